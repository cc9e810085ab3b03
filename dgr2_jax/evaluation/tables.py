"""The tables of a report: from its content to cells of text.

The terminal, report.md and report.html show the same cells, so a number is
formatted once. `report` documents the content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

from dgr2_jax.evaluation import metrics
from dgr2_jax.evaluation import reasoning as reasoning_lib
from dgr2_jax.evaluation import rows as rows_lib

NONE = '–'
# Points of the frontier below this are drawn hollow and never named the best.
VALID_ENOUGH = 0.99

DESCRIPTIONS = {
    'pre_rank': "the retriever's order, untouched",
    'gbdt': 'gradient-boosted ranker on the same candidates and facts',
    'ar_sft': 'autoregressive re-ranker after fine-tuning',
    'ar': 'autoregressive re-ranker, which differences refer to',
    'ar_constrained': 'ar with used candidates masked in the answer',
    'naive': 'its weights decoded in blocks, no training in between',
    'cft': 'after conversion fine-tuning',
    'opd': 'after on-policy distillation',
    'rl': 'after reinforcement learning',
}

_LABELS = {
    'hit_rate': 'users whose target is among the candidates',
    'padding_share': 'padding among the tokens of a batch',
    'dropped_history_share': 'prompts that lost old history items',
}


# By span: all, before the answer, the answer.
_TPF = ('TPF', 'reasoning TPF', 'answer TPF')


class Cell(NamedTuple):
  """One cell: its text, what stands small beside it, whether it is bold."""
  text: str
  small: str = ''
  strong: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
  """A titled table; the first `text_columns` columns hold text."""
  title: str
  columns: tuple[str, ...]
  rows: tuple[tuple[Cell, ...], ...]
  note: str = ''
  text_columns: int = 1


def as_text(table: Table, show_small: bool = True) -> str:
  """A table in aligned columns; a bold cell has a star."""
  def text(cell):
    small = f' {cell.small}' if cell.small and show_small else ''
    return cell.text + small + ('*' if cell.strong else '')

  lines = [list(table.columns)]
  lines += [[text(cell) for cell in row] for row in table.rows]
  widths = [max(map(len, column)) for column in zip(*lines)]
  return '\n'.join(
      '  '.join(word.ljust(width) if i < table.text_columns
                else word.rjust(width)
                for i, (word, width) in enumerate(zip(line, widths))).rstrip()
      for line in lines)


def short(metric: str) -> str:
  """'recall@1' -> 'R@1', as papers abbreviate it."""
  return metric.replace('recall', 'R').replace('ndcg', 'N')


def number(value: float | None, digits: int = 3) -> str:
  """A figure with fixed digits; a dash for None."""
  return NONE if value is None else f'{value:,.{digits}f}'


def percent(value: float | None) -> str:
  """A share in percent; a dash for None."""
  return NONE if value is None else f'{100 * value:.1f}%'


def signed(value: float, digits: int = 3) -> str:
  """A difference with its sign; a true minus, and no minus before zero."""
  text = f'{value:+.{digits}f}'
  return text.replace('-', '−') if float(text) else text[1:]


def interval(bounds: Sequence[float]) -> str:
  """'[low, high]' of a difference."""
  return f'[{signed(bounds[0])}, {signed(bounds[1])}]'


def excludes_zero(bounds: Sequence[float]) -> bool:
  """Whether a difference is told apart from none."""
  return bounds[0] > 0 or bounds[1] < 0


def row_named(content: Mapping[str, Any], name: str) -> dict[str, Any] | None:
  """The row called `name`, if the report has it."""
  return next((r for r in content['rows'] if r['name'] == name), None)


def tau(threshold: float) -> str:
  """A threshold's name: 'τ 0.9'."""
  return f'τ {threshold:g}'


def mode_name(point: Mapping[str, Any]) -> str:
  """How a frontier point was decoded: 'ar', 'τ 0.9', 'verify'."""
  if point['threshold'] is None:
    return point['mode']
  return tau(point['threshold'])


def accuracy(content: Mapping[str, Any]) -> Table:
  """Metrics with the rows' own intervals, and what of the gain is kept."""
  def cell(row, name):
    low, high = row['interval'][name]
    return Cell(number(row[name]), f'{number(low)}–{number(high)}')

  body = []
  known = [f'{row["name"]}: {DESCRIPTIONS[row["name"]]}'
           for row in content['rows'] if row['name'] in DESCRIPTIONS]
  for row in content['rows']:
    cells = [Cell(row['name']), Cell(f'{row["n"]:,}')]
    cells += [cell(row, name) for name in metrics.METRICS]
    cells += [_recovered(row, name) for name in rows_lib.KEY_METRICS]
    body.append(tuple(cells))
  return Table(
      'Accuracy',
      ('row', 'n', *map(short, metrics.METRICS),
       *(f'kept {short(name)}' for name in rows_lib.KEY_METRICS)),
      tuple(body),
      'R is Recall, N is NDCG, over requests whose target is among the '
      'candidates; a response that is not a permutation counts as the '
      "retriever's order. Small: 95% bootstrap interval of the row alone. "
      f"Kept: share of ar's gain over pre_rank. Rows: {'; '.join(known)}.")


def differences(content: Mapping[str, Any],
                names: Sequence[str] = metrics.METRICS) -> Table:
  """Paired differences to the 'ar' row."""
  reference = row_named(content, 'ar')

  def cell(row, name):
    bounds = row['ci'][name]
    return Cell(signed(row[name] - reference[name]), interval(bounds),
                excludes_zero(bounds))

  body = tuple(
      (Cell(row['name']), *(cell(row, name) for name in names))
      for row in content['rows'] if row['ci'] is not None)
  return Table(
      'Differences to ar', ('row', *map(short, names)),
      body if reference else (),
      'Paired over the same requests, with 95% bootstrap intervals; bold '
      'where the interval excludes zero.')


def stages(content: Mapping[str, Any]) -> Table:
  """What each stage changed in the weights of the one before it."""
  names = ('reward', *rows_lib.KEY_METRICS, 'valid_rate')

  def cell(stage, name):
    bounds = stage['ci'][name]
    return Cell(f'{number(stage[name])} ({signed(stage["change"][name])})',
                interval(bounds), excludes_zero(bounds))

  body = tuple(
      (Cell(stage['name']), Cell(stage['before']), Cell(stage['decoding']),
       *(cell(stage, name) for name in names))
      for stage in content.get('stages') or ())
  return Table(
      'Each stage against the one before',
      ('stage', 'before', 'decoding', 'reward', *map(
          short, rows_lib.KEY_METRICS), 'valid'), body,
      'In brackets the change over the stage before, with its 95% bootstrap '
      'interval, paired over the same test requests; bold where the interval '
      "excludes zero. Reward: the target's promotion and the conditional "
      'format reward. Reinforcement learning maximises its mean over sampled '
      'responses; without a temperature the likeliest tokens are taken.',
      text_columns=3)


def _filled(table: Table) -> Table:
  """A table without the figures that no row has, as earlier reports lack."""
  kept = [i for i in range(len(table.columns)) if i < table.text_columns
          or any(row[i].text != NONE for row in table.rows)]
  return dataclasses.replace(
      table, columns=tuple(table.columns[i] for i in kept),
      rows=tuple(tuple(row[i] for i in kept) for row in table.rows))


def validity(content: Mapping[str, Any]) -> Table:
  """What became of the responses, for rows that write one."""
  rates = ('valid_rate', 'duplicate_rate', 'omission_rate', 'out_of_set_rate',
           'overflow_rate', 'parse_rate')
  body = []
  for row in content['rows']:
    if row['valid_rate'] is None:
      continue
    lenient = row['lenient'] or {}
    body.append((
        Cell(row['name']), *(Cell(number(row[rate])) for rate in rates),
        *(Cell(number(lenient.get(name))) for name in rows_lib.KEY_METRICS),
        *_tokens_per_forward(row)))
  return _filled(Table(
      'Validity',
      ('row', 'valid', 'duplicate', 'omission', 'out of set', 'overflow',
       'parsed', *(f'lenient {short(n)}' for n in rows_lib.KEY_METRICS),
       *_TPF),
      tuple(body),
      'Valid: exactly one permutation of the candidates. Each other response '
      'counts in one class, the first that applies. Lenient: metrics when '
      'broken answers are repaired instead of dropped. TPF: tokens per '
      'forward of the model, prefill and commit passes included.'))


def reasoning(content: Mapping[str, Any]) -> Table:
  """How often what responses reason is true of their requests."""
  rows = [row for row in content['rows'] if row.get('reasoning')]
  names = [name for name in reasoning_lib.CHECKS
           if any(name in row['reasoning'] for row in rows)]

  def cell(found):
    if found is None:
      return Cell(NONE)
    low, high = found['interval']
    return Cell(number(found['rate']), f'{number(low)}–{number(high)}')

  body = tuple(
      (Cell(row['name']), *(cell(row['reasoning'].get(name))
                            for name in names)) for row in rows)
  return Table(
      'Reasoning', ('row', *names), body,
      'Share of the responses for which a check holds, of those that it '
      'applies to, with its 95% interval. ' + ' '.join(
          f'{name.capitalize()}: {_CHECKS[name]}.' for name in names)
      + ' All but form: of reasoning that has its form.')


_CHECKS = {
    'form': 'the reasoning has its form',
    'shown': 'all that it names is in the request',
    'placed': 'purchases and candidates are not taken for each other',
    'pattern': 'what it says of the history is so',
    'facts': 'what it says of candidates are their facts',
    'choice': 'the candidate that it names last is ranked first',
    'grades': 'a permutation follows its grades',
    'novel': 'it does not repeat itself'}


def unconditional(content: Mapping[str, Any]) -> Table:
  """Metrics over all users, missed targets counting zero."""
  figures = content['unconditional']
  body = tuple(
      (Cell(name), *(Cell(number(row[m], 4)) for m in metrics.METRICS))
      for name, row in figures['rows'].items())
  return Table(
      'All users', ('row', *map(short, metrics.METRICS)), body,
      f'Over all {figures["users"]:,} evaluated users; a target that the '
      f'retriever missed counts 0. It found {percent(figures["hit_rate"])} of '
      'them.')


def frontier(content: Mapping[str, Any]) -> Table:
  """Quality against speed, for every way the weights were decoded."""
  def metric_cell(point, name):
    if point['ci'] is None:
      return Cell(number(point[name]))
    bounds = point['ci'][name]
    return Cell(number(point[name]), interval(bounds), excludes_zero(bounds))

  body = tuple(
      (Cell(point['row']), Cell(mode_name(point)), Cell(f'{point["n"]:,}'),
       *(metric_cell(point, name) for name in rows_lib.KEY_METRICS),
       *(_recovered(point, name) for name in rows_lib.KEY_METRICS),
       Cell(number(point['valid_rate'])),
       *_tokens_per_forward(point),
       Cell(number(point['tokens_per_second'], 0)),
       Cell(number(point['speedup'], 2)))
      for point in content['frontier'])
  return _filled(Table(
      'Quality and speed',
      ('row', 'decoding', 'n', *map(short, rows_lib.KEY_METRICS),
       *(f'kept {short(name)}' for name in rows_lib.KEY_METRICS), 'valid',
       *_TPF, 'tokens/s', 'speed-up'),
      body,
      'Small: 95% interval of the paired difference to the ar mode of the '
      'same weights, which speed-up refers to as well; bold where it excludes '
      "zero. Kept: share of the ar row's gain over the retriever. Plots: "
      f'hollow points have less than {VALID_ENOUGH:.0%} valid responses, bars '
      'are the intervals of the differences.', text_columns=2))


def floors(content: Mapping[str, Any]) -> Table:
  """The retriever's order by split, and the best possible score."""
  facts = content['dataset']
  lines = dict(facts.get('floors') or {})
  if facts.get('oracle'):
    lines['oracle'] = facts['oracle']
  names = [m for m in metrics.METRICS if any(m in v for v in lines.values())]
  body = tuple(
      (Cell(name), *(Cell(number(values.get(m))) for m in names))
      for name, values in lines.items())
  return Table(
      "The retriever's order by split", ('split', *map(short, names)), body,
      'Splits whose lists are alike have floors alike.' + (
          ' Oracle: the best score that knows how the data were generated.'
          if facts.get('oracle') else ''))


def dataset(content: Mapping[str, Any]) -> Table:
  """Everything else known about the data."""
  facts = {k: v for k, v in content['dataset'].items()
           if k not in ('floors', 'oracle', 'paper_reference')}
  facts['test requests evaluated'] = content['conditional']
  return facts_table('Data', facts)


def timing(content: Mapping[str, Any]) -> Table:
  """Durations; counts (whole numbers) and rates stay what they are."""
  def show(key, value):
    if isinstance(value, float) and not key.endswith('_per_second'):
      return duration(value)
    return plain(key, value)

  return facts_table('Timing', content['timing'], show)


def plain(key: str, value: Any) -> str:
  """A fact as text; shares and rates in percent."""
  if value is None:
    return NONE
  if isinstance(value, bool):
    return 'yes' if value else 'no'
  if isinstance(value, int):
    return f'{value:,}'
  if isinstance(value, float):
    if key.endswith(('_share', '_rate')):
      return percent(value)
    return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.4g}'
  if isinstance(value, (list, tuple)):
    return ', '.join(plain(key, v) for v in value)
  return str(value)


def duration(seconds: float) -> str:
  """Seconds for people: '0.42 s', '42 s', '2 min 35 s', '1 h 02 min'."""
  if seconds < 10:
    return f'{seconds:.2f} s'
  minutes, rest = divmod(round(seconds), 60)
  if minutes == 0:
    return f'{rest} s'
  if minutes < 60:
    return f'{minutes} min {rest:02d} s'
  return f'{minutes // 60} h {minutes % 60:02d} min'


def facts_table(title: str, facts: Mapping[str, Any], show=plain) -> Table:
  """A two-column table of a nested dictionary."""
  body = []

  def add(mapping, path):
    for key, value in mapping.items():
      if isinstance(value, Mapping):
        add(value, (*path, key))
      else:
        names = (*path, _LABELS.get(key, key))
        body.append((Cell(' · '.join(names).replace('_', ' ')),
                     Cell(show(key, value))))

  add(facts, ())
  return Table(title, ('', ''), tuple(body), text_columns=2)


def _recovered(row: Mapping[str, Any], name: str) -> Cell:
  share = (row['recovery'] or {}).get(name)
  return Cell(
      NONE if share is None else f'{100 * share:.0f}%'.replace('-', '−'))


def _tokens_per_forward(entry: Mapping[str, Any]) -> list[Cell]:
  """Cells of `_TPF`; earlier reports lack the one of the reasoning."""
  return [Cell(number(entry.get(f'{span}tokens_per_forward'), 2))
          for span in ('', 'reasoning_', 'answer_')]
