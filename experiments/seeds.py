"""Puts the reports of several seeds side by side.

    python experiments/seeds.py experiments/quickstart

reads experiments/quickstart/seed*/report.json and writes summary.md beside
them: every row, every point of the frontier and what every stage changed, mean
(lowest - highest) over the seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import json
import pathlib
import sys
from typing import Any

_METRICS = (('recall@1', 3), ('recall@3', 3), ('ndcg@3', 3), ('valid_rate', 3),
            ('tokens_per_forward', 2))
_RECOVERED = ('recall@1', 'ndcg@3')  # kept of ar's gain over the retriever


def spread(values: Iterable[float | None], digits: int) -> str:
  """Mean (lowest - highest); a dash where a seed has no value."""
  values = list(values)
  if any(value is None for value in values):
    return '-'
  low, high = (f'{f(values):.{digits}f}' for f in (min, max))
  return f'{sum(values) / len(values):.{digits}f} ({low} - {high})'


def _table(reports: Sequence[Mapping[str, Any]], key: str,
           label: Callable[[Mapping[str, Any]], str]) -> list[str]:
  entries = [entry for report in reports for entry in report[key]]
  measured = [(name, digits) for name, digits in _METRICS
              if any(entry.get(name) is not None for entry in entries)]
  names = [name for name, _ in measured]
  header = ['', *names, *(f'{metric} kept' for metric in _RECOVERED)]
  lines = [f'| {" | ".join(header)} |', '|---' * len(header) + '|']
  for index, entry in enumerate(reports[0][key]):
    same = [report[key][index] for report in reports]
    if len({label(e) for e in same}) > 1:
      raise ValueError(f'the reports differ in their {key}: '
                       f'{sorted({label(e) for e in same})}')
    cells = [spread((e.get(name) for e in same), digits)
             for name, digits in measured]
    cells += [spread(((e['recovery'] or {}).get(metric) for e in same), 2)
              for metric in _RECOVERED]
    lines.append(f'| {label(entry)} | {" | ".join(cells)} |')
  return lines


def _stages(reports: Sequence[Mapping[str, Any]]) -> list[str]:
  """What each stage changed: over the seeds, and the intervals of each."""
  lines = ['| stage | before | decoding | reward | change of reward '
           '| by seed, with 95 % intervals |', '|---' * 6 + '|']
  for index, stage in enumerate(reports[0]['stages']):
    same = [report['stages'][index] for report in reports]
    if len({(s['name'], s['before'], s['decoding']) for s in same}) > 1:
      raise ValueError('the reports differ in their stages')
    each = ', '.join(
        f'{s["change"]["reward"]:+.3f} [{s["ci"]["reward"][0]:+.3f}, '
        f'{s["ci"]["reward"][1]:+.3f}]' for s in same)
    lines.append(
        f'| {stage["name"]} | {stage["before"]} | {stage["decoding"]} | '
        f'{spread((s["reward"] for s in same), 3)} | '
        f'{spread((s["change"]["reward"] for s in same), 3)} | {each} |')
  return lines


def _point(point: Mapping[str, Any]) -> str:
  how = {'ar': 'AR', 'verify': 'verified'}.get(point['mode'])
  how = how or f'tau {point["threshold"]:g}'
  return f'{point["row"]}, {how}'


def read(directory: pathlib.Path) -> dict[str, dict[str, Any]]:
  """The reports of a directory by seed: 'seed0' and so on.

  Raises:
    ValueError: there are none.
  """
  paths = sorted(directory.glob('seed*/report.json'))
  if not paths:
    raise ValueError(f'{directory} has no seed*/report.json')
  return {path.parent.name: json.loads(path.read_text(encoding='utf-8'))
          for path in paths}


def sizes(reports: Mapping[str, Mapping[str, Any]]) -> str:
  """Test requests by seed."""
  return ', '.join(f'{seed} {report["conditional"]:,}'
                   for seed, report in reports.items())


def summary(directory: pathlib.Path) -> str:
  """The text of summary.md.

  Raises:
    ValueError: there are no reports, or they are of different recipes.
  """
  by_seed = read(directory)
  reports = list(by_seed.values())
  oracle = [r['dataset'].get('oracle') for r in reports]
  lines = [
      f'# {len(reports)} seeds', '',
      'Mean (lowest - highest) over seeds, which have data of their own if the '
      'catalogue is embedded. Written by', '',
      f'    python experiments/seeds.py experiments/{directory.name}', '',
      f'Test requests: {sizes(by_seed)}.', '']
  if all(oracle):
    lines += [f'Best possible Recall@1: '
              f'{spread((o["recall@1"] for o in oracle), 3)}.', '']
  lines += ['Rows, at tau 1:', '', *_table(reports, 'rows',
                                           lambda row: row['name']), '']
  lines += ['Frontier:', '', *_table(reports, 'frontier', _point)]
  if all(r.get('stages') for r in reports):
    lines += ['', 'What each stage changed in the mean reward of the test '
              'requests, against the stage before it:', '', *_stages(reports)]
  return '\n'.join(lines) + '\n'


if __name__ == '__main__':
  for argument in sys.argv[1:]:
    folder = pathlib.Path(argument)
    (folder / 'summary.md').write_text(summary(folder), encoding='utf-8')
    print(folder / 'summary.md')
