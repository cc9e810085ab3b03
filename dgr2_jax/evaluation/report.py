"""The report of a run: report.json, report.md, report.html and its figures.

`write` takes one dictionary, the content, which report.json keeps. None marks
what does not apply, sections marked ? may be absent:

    title           str
    command         str, what was typed
    dataset         name, users, items, interactions,
                    requests {split: number}, hit_rate (test),
                    floors {split: {metric: value}}, oracle? {metric: value},
                    padding_share, dropped_history_share, paper_reference?;
                    further facts are listed as they are
    conditional     int, test requests whose target is among the candidates
    unconditional   users, hit_rate, rows {row: `rows.unconditional`}
    rows            list of `rows.build_row`, in the order to show
    frontier        list of `rows.build_frontier_point`
    timing          nested; floats are seconds, but for names that end in
                    _per_second, whole numbers are counts
    environment     nested, anything
    stages?         list of `rows.build_stage`: each against the one before
    model?          nested, anything: parameters, block size, vocabulary, ...
    examples?       list, see `examples`
    commits?        list of {row, threshold, block_size, steps}: of some
                    responses, the step within its block that committed each
                    token, [responses][tokens]

Training curves come from WORKDIR/metrics.jsonl: lines with `stage`, `step` and
figures by name. Every number in the outputs is computed from these two, except
the published ones of `paper`, which are marked and shown only where
`dataset.paper_reference` is true.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import itertools
import json
import math
import os
import pathlib
import re
from typing import Any

from absl import logging
import numpy as np

from dgr2_jax.evaluation import examples as examples_lib
from dgr2_jax.evaluation import figures
from dgr2_jax.evaluation import page
from dgr2_jax.evaluation import panels as panels_lib
from dgr2_jax.evaluation import paper
from dgr2_jax.evaluation import rows as rows_lib
from dgr2_jax.evaluation import tables
from dgr2_jax.training import workdir as workdir_lib

SECTIONS = ('title', 'command', 'dataset', 'conditional', 'unconditional',
            'rows', 'frontier', 'timing', 'environment')


def write(workdir: str | os.PathLike[str], content: Mapping[str, Any],
          curves: Sequence[panels_lib.Panel] | None = None) -> None:
  """Writes the report; every file appears whole, report.json last.

  Args:
    workdir: an existing directory, with or without metrics.jsonl.
    content: see above. NumPy becomes plain numbers and lists, a figure that is
      not finite None, anything else that JSON lacks its `str`.
    curves: training curves, instead of those of metrics.jsonl.

  Raises:
    ValueError: a section is missing.
    OSError: the directory cannot be written.
  """
  content = _checked(content)
  workdir = pathlib.Path(workdir)
  if curves is None:
    curves = figures.curves(read_metrics(workdir / 'metrics.jsonl'))
  panels = {
      'Results': figures.ladder(content),
      'Frontier': figures.frontier(content),
      'Steps': [*figures.spans(content), *figures.commits(content)],
      'Training curves': curves}
  published = ()
  if content['dataset'].get('paper_reference'):
    published = (paper.ACCURACY, paper.FRONTIER)
  lines = headline(content)
  markdown = _markdown(content, lines, panels, published)
  html = page.render(content, lines, panels, published)
  (workdir / 'figures').mkdir(exist_ok=True)
  for panel in itertools.chain(*panels.values()):
    workdir_lib.write_bytes(
        workdir / 'figures' / f'{panel.name}.png', panel.png)
  workdir_lib.write_text(workdir / 'report.md', markdown)
  workdir_lib.write_text(workdir / 'report.html', html)
  workdir_lib.write_text(
      workdir / 'report.json',
      json.dumps(content, indent=2, allow_nan=False) + '\n')


def summary(content: Mapping[str, Any]) -> str:
  """The report's main tables as plain text, for the terminal."""
  content = _checked(content)
  parts = [content['title'], *(f'- {line}' for line in headline(content))]
  differences = tables.differences(content, rows_lib.KEY_METRICS)
  stages = tables.stages(content)
  for table in (tables.accuracy(content), differences, stages,
                tables.validity(content), tables.reasoning(content),
                tables.frontier(content)):
    if table.rows:
      # Intervals of single rows would make the lines too long to read.
      parts += ['', table.title,
                tables.as_text(
                    table, table is differences or table is stages)]
  return '\n'.join(parts) + '\n'


def headline(content: Mapping[str, Any]) -> list[str]:
  """What the report says, in a few computed sentences."""
  share = tables.percent(content['unconditional']['hit_rate'])
  lines = [f'{content["dataset"]["name"]}: {content["conditional"]:,} test '
           'requests whose target is among the candidates, which holds for '
           f'{share} of the users.']
  ar = tables.row_named(content, 'ar')
  floor = tables.row_named(content, 'pre_rank')
  if ar is not None and floor is not None and floor['ci'] is not None:
    gains = []
    for name in rows_lib.KEY_METRICS:
      low, high = floor['ci'][name]  # of pre_rank - ar
      gains.append(
          f'{tables.short(name)} {tables.number(ar[name])} against '
          f'{tables.number(floor[name])} '
          f'({tables.signed(ar[name] - floor[name])} '
          f'{tables.interval((-high, -low))})')
    lines.append(f"ar over the retriever's order: {', '.join(gains)}.")
  mute = [row['name'] for row in content['rows'] if row.get('valid_rate') == 0]
  if mute:
    lines.append(f'No response of {", ".join(mute)} is valid: what they show is '
                 "the retriever's order.")
  points = [p for p in content['frontier']
            if p['mode'] != 'ar' and p['tokens_per_forward'] is not None
            and (p['valid_rate'] or 0) >= tables.VALID_ENOUGH]
  if points:
    best = max(points, key=lambda p: (p['speedup'] or 0,
                                      p['tokens_per_forward']))
    line = (f'Fastest decoding with at least {tables.VALID_ENOUGH:.0%} valid '
            f'responses: {best["row"]}, {tables.mode_name(best)}, with '
            f'{tables.number(best["tokens_per_forward"], 2)} tokens per '
            'forward')
    if best['speedup'] is not None:
      line += f' and {tables.number(best["speedup"], 2)} times the tokens/s'
    kept = [f'{100 * share:.0f}% on {tables.short(name)}'
            for name, share in (best['recovery'] or {}).items()
            if share is not None]
    if kept:
      line += f"; of ar's gain it keeps {' and '.join(kept)}"
    lines.append(line + '.')
  return lines


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
  """The records of metrics.jsonl; a line that is none is left out."""
  if not path.exists():
    return []
  records = []
  text = path.read_text(encoding='utf-8', errors='replace')
  for i, line in enumerate(text.splitlines(), 1):
    try:
      record = json.loads(line)
    except ValueError:
      record = None
    if isinstance(record, dict) and {'stage', 'step'} <= record.keys():
      records.append(record)
    else:
      logging.warning('%s:%d: not a metrics record, left out of the curves.',
                      path, i)
  return records


def _checked(content: Mapping[str, Any]) -> dict[str, Any]:
  """The content as plain JSON types, all sections there."""
  missing = [name for name in SECTIONS if name not in content]
  if missing:
    raise ValueError(f'the report lacks {", ".join(missing)}')
  return _plain(content)


def _plain(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {str(k): _plain(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain(v) for v in value]
  if isinstance(value, (np.ndarray, np.generic)):
    return _plain(value.tolist())
  if isinstance(value, float) and not math.isfinite(value):
    return None
  if isinstance(value, str):
    # Half a surrogate pair is legal in JSON input and not in UTF-8.
    return value.encode('utf-8', 'replace').decode('utf-8')
  if value is None or isinstance(value, (bool, int, float)):
    return value
  return str(value)


def _markdown(content, lines, panels: Mapping[str, Sequence[panels_lib.Panel]],
              published: Sequence[tables.Table]) -> str:
  """report.md; figures are links to files beside it."""
  parts = [f'# {_escape(content["title"])}',
           '\n'.join(f'- {_escape(line)}' for line in lines)]

  def section(name, *blocks):
    blocks = [block for block in blocks if block]
    if blocks:
      parts.extend([f'## {name}', *blocks])

  section('Results', _images(panels['Results']), *map(markdown_table, (
      tables.accuracy(content), tables.differences(content),
      tables.stages(content), tables.validity(content),
      tables.reasoning(content), tables.unconditional(content))))
  section('Frontier', _images(panels['Frontier']),
          markdown_table(tables.frontier(content)))
  section('Steps', _images(panels['Steps']))
  section('Published figures', *map(markdown_table, published))
  section('Training curves', _images(panels['Training curves']))
  section('Worked examples', *(
      block for i, example in enumerate(content.get('examples') or ())
      for block in _markdown_example(i, example)))
  section('Data and model', *map(markdown_table, (
      tables.dataset(content), tables.floors(content),
      tables.facts_table('Model', content.get('model') or {}))))
  section('Timing and environment', markdown_table(tables.timing(content)),
          markdown_table(tables.facts_table(
              'Environment', content['environment'])))
  # A fence longer than any run of backticks inside.
  runs = re.findall('`+', content['command'])
  fence = '`' * max(3, 1 + max(map(len, runs), default=0))
  section('Command', f'{fence}\n{content["command"]}\n{fence}')
  return '\n\n'.join(parts) + '\n'


def markdown_table(table: tables.Table) -> str:
  """A table with its title and note; nothing if it has no rows."""
  if not table.rows:
    return ''

  def text(cell):
    main = _escape(cell.text)
    if cell.strong:
      main = f'**{main}**'
    return main + (f' ({_escape(cell.small)})' if cell.small else '')

  lines = [[_escape(column) for column in table.columns]]
  lines.append([':--' if i < table.text_columns else '--:'
                for i in range(len(table.columns))])
  lines += [[text(cell) for cell in row] for row in table.rows]
  body = '\n'.join(f'| {" | ".join(line)} |' for line in lines)
  note = f'\n\n{_escape(table.note)}' if table.note else ''
  return f'### {_escape(table.title)}\n\n{body}{note}'


def _markdown_example(index: int, example: Mapping[str, Any]) -> list[str]:
  history = '\n'.join(
      f'{i}. {_escape(" · ".join(filter(None, examples_lib.describe(item))))}'
      for i, item in enumerate(example['history'], 1))
  trace = '\n'.join(f'> {_escape(line)}'
                    for line in example['trace'].splitlines())
  return [f'### {_escape(examples_lib.heading(index, example))}',
          f'{_escape(examples_lib.verdict(example))}.',
          f'History, oldest first:\n\n{history}',
          markdown_table(examples_lib.orders(example)).split('\n\n', 1)[1],
          f'Trace:\n\n{trace}']


def _images(panels: Sequence[panels_lib.Panel]) -> str:
  return '\n'.join(f'![{_escape(panel.title)}](figures/{panel.name}.png)'
                   for panel in panels)


def _escape(text: str) -> str:
  """Text that Markdown shows as it is, on one line."""
  text = re.sub(r'([\\`*_{}\[\]<>#|~$&])', r'\\\1', text)
  return ' '.join(text.split())
