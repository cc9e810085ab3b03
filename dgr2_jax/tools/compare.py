"""Puts the reports of two or more runs side by side.

    python -m dgr2_jax.tools.compare A B [C ...] [--output=PAGE]

A run is a working directory or a report.json. The tables are printed, and PAGE,
compare.html by default, shows them with the frontiers in one figure.
Differences are to the first run. Where both runs hold the responses to the same
requests (`responses/` beside the report) they come with paired 95 % intervals.
With a config.json beside the reports the fields that differ are listed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
import dataclasses
import json
import pathlib
import string
import sys
from typing import Any

import numpy as np

from dgr2_jax.data import parsing
from dgr2_jax.evaluation import figures
from dgr2_jax.evaluation import intervals
from dgr2_jax.evaluation import metrics
from dgr2_jax.evaluation import outcomes
from dgr2_jax.evaluation import page
from dgr2_jax.evaluation import panels as panels_lib
from dgr2_jax.evaluation import rows as rows_lib
from dgr2_jax.evaluation import tables
from dgr2_jax.training import workdir as workdir_lib

# What is compared: metric, its title, digits. Those of a request are paired.
_COMPARED = (('recall@1', 'Recall@1', 3), ('ndcg@3', 'NDCG@3', 3),
             ('valid_rate', 'Valid responses', 3),
             ('tokens_per_forward', 'Tokens per forward', 2),
             ('tokens_per_second', 'Tokens per second', 0))
_PAIRED = (*rows_lib.KEY_METRICS, 'valid_rate')
_RESAMPLES = 2000

# What is read of a report, of its rows and of its points.
_NUMBER, _MAYBE = (int, float), (int, float, type(None))
_REPORT = {'title': str, 'dataset': dict, 'conditional': int, 'rows': list,
           'frontier': list}
_ROW = {'name': str}
_POINT = {'row': str, 'mode': str, 'threshold': _MAYBE, 'n': int,
          'floor': dict, 'ci': (dict, type(None)), 'valid_rate': _MAYBE,
          'tokens_per_forward': _MAYBE, 'tokens_per_second': _MAYBE,
          **dict.fromkeys(rows_lib.KEY_METRICS, _NUMBER)}


@dataclasses.dataclass(frozen=True)
class Run:
  """One run.

  Attributes:
    letter: its short name.
    path: of its report.
    content: of its report.
    config: fields by dotted name; None where it is not known.
  """
  letter: str
  path: pathlib.Path
  content: Mapping[str, Any]
  config: Mapping[str, Any] | None

  def entries(self) -> dict[str, tuple[Mapping[str, Any], pathlib.Path]]:
    """Rows and points of the frontier, and where their responses are."""
    found = {row['name']: (row, outcomes.file_name(row['name']))
             for row in self.content['rows']}
    for point in self.content['frontier']:
      found[f'{point["row"]}, {tables.mode_name(point)}'] = (
          point, outcomes.file_name(
              point['row'], point['mode'], point['threshold']))
    directory = self.path.parent / outcomes.DIRECTORY
    return {name: (entry, directory / file)
            for name, (entry, file) in found.items()}

  def requests(self) -> list[tuple[str, int]] | None:
    """Digest and target of every request; None where they are not known."""
    path = self.path.parent / outcomes.DIRECTORY / outcomes.REQUESTS
    if not path.exists():
      return None
    return [(line['request'], line['target'])
            for line in outcomes.read(path, 'target')]


def load(letter: str, path: pathlib.Path) -> Run:
  """Reads a working directory or a report.json.

  Raises:
    ValueError: there is no report, or it is none of this version.
  """
  path = path / 'report.json' if path.is_dir() else path
  try:
    text = path.read_text(encoding='utf-8')
    content = json.loads(text, parse_constant=_refuse)
  except (OSError, ValueError, RecursionError) as e:
    raise ValueError(f'{path}: expected a report of dgr2_jax.main ({e}).'
                     ) from e
  try:
    _check(content)
  except ValueError as e:
    raise ValueError(f'{path}: not a report of this version: {e}.') from e
  config = None
  if (path.parent / 'config.json').exists():
    config = workdir_lib.flatten(
        workdir_lib.read_config(path.parent, whole=False).to_dict())
  return Run(letter, path, content, config)


def _refuse(constant: str) -> None:
  raise ValueError(f'{constant} is no figure')


def _check(content: Any) -> None:
  """Raises ValueError with what is read of a report and is not so."""
  _expect('', content, _REPORT)
  for i, row in enumerate(content['rows']):
    _expect(f'rows[{i}]', row, _ROW)
    _expect(f'rows[{i}]', row, {
        name: _MAYBE for name, *_ in _COMPARED if name in row})
  for i, point in enumerate(content['frontier']):
    where = f'frontier[{i}]'
    _expect(where, point, _POINT)
    keys = rows_lib.KEY_METRICS
    _expect(f'{where}.floor', point['floor'], dict.fromkeys(keys, _NUMBER))
    if point['ci'] is not None:
      _expect(f'{where}.ci', point['ci'], dict.fromkeys(keys, list))
      for name in keys:
        bounds = dict(enumerate(point['ci'][name]))
        _expect(f'{where}.ci.{name}', bounds, {0: _NUMBER, 1: _NUMBER})


def _expect(where: str, value: Any, fields: Mapping[Any, Any]) -> None:
  """Raises ValueError unless a value has the fields, of these types."""
  if not isinstance(value, dict):
    raise ValueError(f'{where or "it"} is a {type(value).__name__}')
  for name, kinds in fields.items():
    place = f'{where}.{name}' if where else name
    if name not in value:
      raise ValueError(f'{place} is missing')
    if not isinstance(value[name], kinds) or isinstance(value[name], bool):
      raise ValueError(f'{place} is a {type(value[name]).__name__}')


def per_request(path: pathlib.Path, targets: Sequence[int],
                entry: Mapping[str, Any]) -> np.ndarray:
  """float64 [hits, len(_PAIRED)] of the requests whose target was retrieved.

  Raises:
    ValueError: the responses are not those of the report's `entry`.
  """
  lines = outcomes.read(path, 'order', 'failure')
  targets = np.array(targets)
  hits = targets >= 0
  by_name = metrics.per_request(metrics.rank_of_target(
      np.array([line['order'] for line in lines]), targets))
  by_name['valid_rate'] = np.array([
      line['failure'] == parsing.VALID for line in lines], float)
  values = np.stack([by_name[name] for name in _PAIRED], 1)[hits]
  for name, value in zip(_PAIRED, values.mean(0)):
    if entry.get(name) is not None and abs(entry[name] - value) > 1e-6:
      raise ValueError(
          f'{path}: {name} is {value:.4f}, the report has {entry[name]:.4f}; '
          'run --stage=evaluate again.')
  return values


def paired(run: Run, first: Run) -> dict[str, dict[str, list[float]]]:
  """Intervals of the differences to the first run, by entry and metric.

  Empty where the runs have not answered the same requests.
  """
  requests = run.requests()
  if requests is None or requests != first.requests():
    return {}
  targets, others = [target for _, target in requests], first.entries()
  bounds = {}
  for name, (entry, path) in run.entries().items():
    if name not in others or not path.exists() or not others[name][1].exists():
      continue
    here = per_request(path, targets, entry)
    there = per_request(others[name][1], targets, others[name][0])
    bounds[name] = dict(zip(_PAIRED, intervals.paired_bootstrap(
        here, there, seed=0, resamples=_RESAMPLES).T.tolist()))
  return bounds


def comparisons(runs: Sequence[Run]) -> list[tables.Table]:
  """One table a metric: entries by runs."""
  entries = [run.entries() for run in runs]
  bounds = [{}, *(paired(run, runs[0]) for run in runs[1:])]
  names = dict.fromkeys(name for found in entries for name in found)
  unpaired = ', '.join(run.letter for run, found in zip(runs[1:], bounds[1:])
                       if not found)
  note = ('Small: the difference to A' + (
      f'; without an interval ({unpaired}) the requests are not known to be '
      'the same, and data differ as well as models.' if unpaired else
      ', with its paired 95% interval; bold where that excludes zero.'))

  def cell(index, name, metric, digits):
    value, first = (found.get(name, ({},))[0].get(metric)
                    for found in (entries[index], entries[0]))
    text = tables.number(value, digits)
    if not index or value is None or first is None:
      return tables.Cell(text)
    difference = tables.signed(value - first, digits)
    interval = bounds[index].get(name, {}).get(metric)
    if interval is None:
      return tables.Cell(text, difference)
    return tables.Cell(text, f'{difference} {tables.interval(interval)}',
                       tables.excludes_zero(interval))

  found = []
  for metric, title, digits in _COMPARED:
    body = tuple(
        (tables.Cell(name), *(cell(i, name, metric, digits)
                              for i in range(len(runs))))
        for name in names
        if any(e.get(name, ({},))[0].get(metric) is not None
               for e in entries))
    found.append(tables.Table(
        title, ('row', *(run.letter for run in runs)), body,
        note if metric in _PAIRED else 'Small: the difference to A.'))
  return found


def differing_fields(runs: Sequence[Run]) -> tables.Table:
  """Fields of the configs that are not the same in all runs."""
  configs = [run.config for run in runs]
  body = ()
  if None not in configs:
    def text(config, name):
      return json.dumps(config[name]) if name in config else 'absent'

    body = tuple(
        (tables.Cell(name), *(tables.Cell(text(c, name)) for c in configs))
        for name in sorted(set().union(*configs))
        if len({text(c, name) for c in configs}) > 1)
  return tables.Table(
      'Fields that differ', ('field', *(run.letter for run in runs)), body,
      text_columns=1 + len(runs))


def overlaid(runs: Sequence[Run]) -> list[panels_lib.Panel]:
  """The frontiers of all runs in the same axes, the first one's labelled."""
  points = [{**point, 'row': f'{run.letter} {point["row"]}'}
            for run in runs for point in run.content['frontier']]
  first = {point['row'] for point in points[:len(runs[0].content['frontier'])]}
  return figures.frontier({'rows': [], 'frontier': points}, first)


def headline(runs: Sequence[Run]) -> list[str]:
  """What is compared."""
  return [f'{run.letter}: {run.path}, {run.content["title"]}, '
          f'{run.content["conditional"]:,} requests' for run in runs]


def as_text(runs: Sequence[Run]) -> str:
  """The tables for the terminal."""
  parts, shown = headline(runs), comparisons(runs)
  for table in (*shown, differing_fields(runs)):
    if table.rows:
      parts += ['', table.title, tables.as_text(table)]
  notes = dict.fromkeys(table.note for table in shown if table.rows)
  return '\n'.join([*parts, '', *notes])


def as_html(runs: Sequence[Run]) -> str:
  """The tables and the frontiers in one figure, as a page."""
  return page.document('Runs compared', headline(runs), {
      'Results': ''.join(map(page.table_html, comparisons(runs))),
      'Frontier': page.panels_html(overlaid(runs)),
      'Configuration': page.table_html(differing_fields(runs))})


def main(argv: Sequence[str] | None = None) -> None:
  """Compares; what users can mend is one line on stderr and exit code 1."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  parser.add_argument('runs', nargs='+', type=pathlib.Path, metavar='RUN',
                      help='a working directory or a report.json')
  parser.add_argument('--output', type=pathlib.Path, default=pathlib.Path('.'),
                      help='the page (.html), or a directory for its '
                      'compare.html (default: here)')
  args = parser.parse_args(argv)
  if not 2 <= len(args.runs) <= len(string.ascii_uppercase):
    parser.error(f'{len(args.runs)} runs: expected from 2 to '
                 f'{len(string.ascii_uppercase)}')
  try:
    runs = list(map(load, string.ascii_uppercase, args.runs))
    path = args.output
    if path.suffix != '.html' or path.is_dir():
      path = path / 'compare.html'
    if path.with_name('report.json').exists() and path.name == 'report.html':
      raise ValueError(f'--output={path}: a run has its report there')
    path.parent.mkdir(parents=True, exist_ok=True)
    workdir_lib.write_text(path, as_html(runs))
    print(as_text(runs))
  except (ValueError, OSError) as e:
    sys.exit(f'error: {e}')
  print(f'Page: {path}')


if __name__ == '__main__':
  main()
