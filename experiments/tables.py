"""Puts what was measured here beside the tables of Diffusion-GR2.

    python experiments/tables.py

writes table.md into table2, table3, table4 and figure6, from the reports of all
seeds in beauty_small/, a judge's answers in table4/judge.json and the speeds in
decoding/speed_*.json; what was not measured has a dash. The paper's figures are
those of dgr2_jax/evaluation/paper.py.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import json
import pathlib
import runpy
from typing import Any

from dgr2_jax.evaluation import judging
from dgr2_jax.evaluation import paper
from dgr2_jax.evaluation import report
from dgr2_jax.evaluation import rows as rows_lib
from dgr2_jax.evaluation import tables

HERE = pathlib.Path(__file__).parent
SEEDS = runpy.run_path(str(HERE / 'seeds.py'))
OURS = 'beauty_small'  # the run on the paper's data set
NONE = '-'  # as summaries have it
METRICS = ('recall@1', 'recall@3', 'ndcg@3')  # of the paper's accuracy
# Our names of the paper's rows, and of its points, in its order.
ROWS = ('pre_rank', 'ar', 'naive', 'cft', 'opd', 'rl')
POINTS = ('ar', *map(tables.tau, (.9, .6, .4)))


def _page(title: str, *parts: str) -> str:
  written = 'Written by `python experiments/tables.py`.'
  return '\n\n'.join((f'# {title}', written, *parts)) + '\n'


def _about(reports: Mapping[str, Mapping[str, Any]]) -> str:
  """Whose figures ours are."""
  machines = sorted({f'{e["machine"]}, jax {e["jax"]}' for e in (
      r['environment'] for r in reports.values())})
  return (f'Ours: [{OURS}](../{OURS}/), mean (lowest - highest) over seeds; '
          f'test requests: {SEEDS["sizes"](reports)}. '
          f'Machine: {"; ".join(machines)}.')


def _cells(values: Iterable[str]) -> tuple[tables.Cell, ...]:
  return tuple(map(tables.Cell, values))


def _columns(first: str, published: Sequence[str],
             ours: Sequence[str]) -> tuple[str, ...]:
  return (first, *(f'paper, {name}' for name in published),
          *(f'ours, {name}' for name in ours))


def table2(root: pathlib.Path) -> str:
  """Accuracy of every stage at tau 1, and its gain over the retriever."""
  reports = SEEDS['read'](root / OURS)
  published = [[cell.text for cell in row] for row in paper.ACCURACY.rows]
  floors = [tables.row_named(r, ROWS[0]) for r in reports.values()]
  accuracy, gains = [], []
  for name, (label, *figures) in zip(ROWS, published, strict=True):
    rows = [tables.row_named(r, name) or {} for r in reports.values()]
    accuracy.append(_cells((label, *figures, *(
        SEEDS['spread']((row.get(metric) for row in rows), 3)
        for metric in (*METRICS, 'valid_rate')))))
    if name == ROWS[0]:
      continue
    gains.append(_cells((
        label, *(f'{float(value) - float(floor):.4f}'
                 for value, floor in zip(figures, published[0][1:])),
        *(SEEDS['spread']((row[metric] - floor[metric] if row else None
                           for row, floor in zip(rows, floors)), 3)
          for metric in METRICS))))
  short = tuple(map(tables.short, METRICS))
  return _page(
      'Table 2: accuracy of every stage, τ 1', _about(reports),
      report.markdown_table(tables.Table(
          'Accuracy', _columns('row', short, (*short, 'valid')),
          tuple(accuracy), 'Rows are called as in the paper: the valid 0.1% '
          f'is its own. {paper.ACCURACY.note}')),
      report.markdown_table(tables.Table(
          "Gain over the retriever's order", _columns('row', short, short),
          tuple(gains), 'Of the rows above; ours seed by seed.')))


def table3(root: pathlib.Path) -> str:
  """Accuracy against speed of the last stage's weights."""
  reports = SEEDS['read'](root / OURS)
  published = {name: [cell.text for cell in row[1:]] for name, row in zip(
      POINTS, paper.FRONTIER.rows, strict=True)}
  points = [{tables.mode_name(p): p for p in r['frontier']}
            for r in reports.values()]
  ours = (*((metric, 3) for metric in (*rows_lib.KEY_METRICS, 'valid_rate')),
          ('tokens_per_forward', 2), ('speedup', 2))
  lines = tuple(_cells((
      name, *published.get(name, [NONE] * 3),
      *(SEEDS['spread']((p.get(name, {}).get(figure) for p in points), digits)
        for figure, digits in ours))) for name in points[0])
  return _page(
      'Table 3: accuracy and speed by τ', _about(reports),
      report.markdown_table(tables.Table(
          'Frontier', _columns(
              'decoding', paper.FRONTIER.columns[1:],
              (*map(tables.short, rows_lib.KEY_METRICS), 'valid', 'TPF',
               'speed-up')), lines,
          'ar: ours is the same weights decoded one token at a time, which '
          'speed-up refers to. verify: drafts verified by the same weights. '
          'TPF: tokens per forward of the model, prefill and commit passes '
          f'included. {paper.FRONTIER.note}')))


def table4(root: pathlib.Path) -> str:
  """Reasoning as a language model judges it."""
  path = root / 'table4' / 'judge.json'
  judges = (json.loads(path.read_text(encoding='utf-8'))['judges']
            if path.exists() else [])
  found = judging.table(judges)
  if not judges:  # what only our judges tell has no published figure
    found = dataclasses.replace(found, note=paper.JUDGE_NOTE, rows=tuple(
        row for row in found.rows if row[-1].text != tables.NONE))
  return _page(
      'Table 4: reasoning, judged',
      'A: AR, B: diffusion.' if judges else
      'A: AR, B: diffusion. Not measured here yet: no judge was asked.',
      report.markdown_table(found))


def figure6(root: pathlib.Path) -> str:
  """Speed by output and by prompt length."""
  contents = [json.loads(path.read_text(encoding='utf-8'))
              for path in sorted((root / 'decoding').glob('speed_*.json'))]
  about = [
      f'Ours, {c["shape"]}: random weights, {c["dtype"]}; steps: '
      f'{c["schedule"]}. Machine: {c["machine"]}, jax {c["jax"]}.'
      for c in contents] or ['Not measured here yet.']
  return _page(
      'Figure 6: speed by output and prompt length', *about,
      _lengths(contents, 'response_length', 'prompt_length', paper.SPEED),
      _lengths(contents, 'prompt_length', 'response_length',
               paper.SPEED_BY_PROMPT))


def _lengths(contents: Sequence[Mapping[str, Any]], varied: str, fixed: str,
             published: tables.Table) -> str:
  """A table of speeds by one length, at the other's most frequent value."""
  ours = {}  # column -> length -> cell
  for content in contents:
    points = content['points']
    (value, _), = collections.Counter(
        p[fixed] for p in points).most_common(1)
    for p in points:
      if p[fixed] == value and p['block_size'] > 1:
        name = (f'{content["shape"]}, blocks of {p["block_size"]}, '
                f'{fixed.replace("_", " ")} {value:,}')
        ours.setdefault(name, {})[f'{p[varied]:,}'] = (
            f'{p["speed"]:.2f} ({p["speed_with_prefill"]:.2f})')
  papers = {row[0].text: row[1].text for row in published.rows}
  lengths = sorted(
      dict.fromkeys((*papers, *(n for c in ours.values() for n in c))),
      key=lambda text: int(text.split()[-1].replace(',', '')))
  return report.markdown_table(tables.Table(
      f'By {varied.replace("_", " ")}',
      _columns(published.columns[0], published.columns[1:], list(ours)),
      tuple(_cells((n, papers.get(n, NONE), *(
          column.get(n, NONE) for column in ours.values())))
            for n in lengths),
      'Tokens a second, autoregressive decoding = 1; ours: decoding alone '
      f'(with prefill). {published.note}' if ours else published.note))


TABLES: dict[str, Callable[[pathlib.Path], str]] = {
    'table2': table2, 'table3': table3, 'table4': table4, 'figure6': figure6}


if __name__ == '__main__':
  for folder, table in TABLES.items():
    path = HERE / folder / 'table.md'
    path.write_text(table(HERE), encoding='utf-8')
    print(path)
