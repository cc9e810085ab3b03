"""Published figures, shown beside ours where the data are Amazon Beauty.

Diffusion-GR2 (arXiv 2607.01170, v2), Qwen3-8B, Beauty, n = 1,615: its accuracy
table (tau = 1.0), its frontier on one H100, its speed by length at tau = 0.6
and batch size 1, and its judge of reasoning.
"""

from __future__ import annotations

from dgr2_jax.evaluation import tables

_NOTE = ('Published, not measured here: Diffusion-GR2 (arXiv 2607.01170) with '
         'Qwen3-8B on Amazon Beauty, n = 1,615 requests of another retriever. '
         'Compare gains over the floor, not levels.')

_ACCURACY = (
    ('pre-rank floor', '.2811', '.5591', '.4401'),
    ('AR GR2 (teacher)', '.2960', '.5651', '.4497'),
    ('naive conversion (valid 0.1%)', '.2811', '.5591', '.4401'),
    ('+ CFT', '.2930', '.5651', '.4497'),
    ('+ CFT + OPD', '.2944', '.5658', '.4497'),
    ('+ CFT + OPD, then RL', '.2951', '.5671', '.4517'),
)

_FRONTIER = (
    ('AR', '.2960', '71', '1.0'),
    ('τ 0.9 (valid 100%)', '.2950', '172', '2.4'),
    ('τ 0.6', '.2942', '234', '3.3'),
    ('τ 0.4 (parsing degrades)', '.2936', '246', '3.5'),
)

_SPEED_NOTE = ('Published, not measured here: Diffusion-GR2 (arXiv 2607.01170) '
               'with Qwen3-8B, τ 0.6, batch size 1.')
_SPEED = (('32', '1.1'), ('64', '1.5'), ('128', '2.2'), ('256', '3.2'),
          ('512', '4.7'))

# Its judge of reasoning: verdicts over 50 pairs, mean scores AR / diffusion. A
# stands for the AR re-ranker, B for the diffusion one.
JUDGE = {'pairs': '50', 'A': '17', 'B': '9', 'tie': '24',
         'grounding': '4.50 / 4.34', 'consistency': '4.94 / 4.94',
         'flow': '4.54 / 4.40', 'identifiers': '1.00 / 1.00'}
JUDGE_NOTE = ('Published, not measured here: Diffusion-GR2 (arXiv 2607.01170), '
              'Qwen3-8B on Amazon Beauty, another judge.')

# The report's rows that its own stand for, in the order of the table.
_ROWS = ('pre_rank', 'ar', 'naive', 'cft', 'opd', 'rl')


def accuracy(metric: str) -> dict[str, float]:
  """Published values by the report's row; none of metrics it doesn't have."""
  if tables.short(metric) not in ACCURACY.columns:
    return {}
  column = ACCURACY.columns.index(tables.short(metric)) - 1
  return {row: float(values[column])
          for row, (_, *values) in zip(_ROWS, _ACCURACY, strict=True)}


def _table(title, columns, lines, note=_NOTE) -> tables.Table:
  return tables.Table(
      title, columns,
      tuple(tuple(map(tables.Cell, line)) for line in lines), note)


ACCURACY = _table('Published accuracy', ('row', 'R@1', 'R@3', 'N@3'),
                  _ACCURACY)
FRONTIER = _table('Published frontier', ('decoding', 'R@1', 'tokens/s',
                                         'speed-up'), _FRONTIER)
SPEED = _table('Published speed by output length',
               ('output tokens', 'speed-up'), _SPEED, _SPEED_NOTE)
SPEED_BY_PROMPT = _table(
    'Published speed by prompt length',
    ('prompt tokens', 'speed-up with 512 output tokens'),
    (('32 to 4,096', '4.0 to 4.8'),), _SPEED_NOTE)
