"""Figures of a report: accuracy ladder, frontier, steps, training curves."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
import itertools
from typing import Any

from matplotlib import ticker
import numpy as np

from dgr2_jax.evaluation import panels as panels_lib
from dgr2_jax.evaluation import paper
from dgr2_jax.evaluation import rows as rows_lib
from dgr2_jax.evaluation import tables

# Validation metrics that are shares, and so can share an axis.
_VALIDATION = tuple(f'validation/{name}' for name in (
    'recall@1', 'ndcg@3', 'valid_rate'))
_UNITS = {'loss': 'loss (nats a token; RL: surrogate)',
          'reward': 'mean a response', 'validation': 'metric (0 to 1)'}
# The reward and its parts, which share an axis, and their names.
_REWARDS = {'train/reward': 'reward', 'train/rank': 'rank promotion',
            'train/format': 'format, unweighted', 'train/overlong': 'overlong',
            'validation/reward': 'reward, validation'}
_MARKERS = {'ar': '*', 'threshold': 'o', 'verify': 'D'}
_AXES = {
    'tokens_per_forward': 'tokens per forward',
    'tokens_per_second': 'tokens per second',
}


def ladder(content: Mapping[str, Any]) -> list[panels_lib.Panel]:
  """Key metrics of every row with their 95 % intervals.

  Args:
    content: of the report; rows of earlier ones may lack intervals.

  Returns:
    A panel a metric that two rows or more have.
  """
  panels = []
  for metric in rows_lib.KEY_METRICS:
    rows = [row for row in content['rows'] if row.get(metric) is not None]
    if len(rows) < 2:
      continue

    def draw(ax, rows=rows, metric=metric):
      _draw_ladder(ax, rows, metric, paper.accuracy(metric) if content[
          'dataset'].get('paper_reference') else {})
      floor = tables.row_named(content, 'pre_rank')
      if floor is not None:
        ax.axvline(floor[metric], color=panels_lib.MUTED, linestyle=':',
                   label='retriever')

    panels.append(panels_lib.panel(
        f'ladder_{metric}', f'{_full(metric)} by row', draw))
  return panels


def _draw_ladder(ax, rows, metric, published) -> None:
  for y, row in enumerate(rows):
    bounds = (row.get('interval') or {}).get(metric)
    if bounds:
      ax.plot(bounds, [y, y], color=panels_lib.SERIES[0], linewidth=2,
              label='95 % interval')
    ax.plot([row[metric]], [y], 'o', color=panels_lib.SERIES[0],
            label='measured here')
    if row['name'] in published:
      # Below the row's own, which it might cover.
      ax.plot([published[row['name']]], [y + 0.3], 'D', markersize=5,
              color=panels_lib.SERIES[1], markerfacecolor=panels_lib.SURFACE,
              label="the paper's, Qwen3-8B")
  ax.set_yticks(range(len(rows)), [row['name'] for row in rows])
  ax.set_ylim(len(rows) - 0.4, -0.6)
  ax.set_xlabel(_full(metric))
  ax.grid(False, axis='y')


def frontier(content: Mapping[str, Any],
             labelled: Collection[str] | None = None) -> list[
                 panels_lib.Panel]:
  """Key metrics against tokens per forward and tokens per second.

  Hollow points are those with less than `tables.VALID_ENOUGH` valid responses:
  there the fallback to the retriever's order hides part of the loss. Bars are
  the intervals of the paired difference to the AR mode of the same weights.

  Args:
    content: of the report.
    labelled: rows whose points say how they were decoded; None for all.

  Returns:
    A panel per pair of metric and axis that has figures.
  """
  panels = []
  for metric, axis in itertools.product(rows_lib.KEY_METRICS, _AXES):
    points = [p for p in content['frontier'] if p[axis] is not None]
    if not points:
      continue
    title = f'{_full(metric)} by {_AXES[axis]}'

    def draw(ax, points=points, metric=metric, axis=axis):
      ax.set_xlabel(_AXES[axis])
      ax.set_ylabel(_full(metric))
      _draw_frontier(ax, points, metric, axis, content)
      return [panels_lib.Label(tables.mode_name(p), p[axis], p[metric])
              for p in points if labelled is None or p['row'] in labelled]

    panels.append(panels_lib.panel(f'frontier_{metric}_{axis}', title, draw))
  return panels


def _draw_frontier(ax, points, metric, axis, content) -> None:
  colours = dict(zip(
      dict.fromkeys(p['row'] for p in content['frontier']),
      itertools.cycle(panels_lib.SERIES)))
  heights = []
  groups = itertools.groupby(points, lambda p: (p['row'], p['mode']))
  for (row, mode), group in groups:
    group = list(group)
    x, y = [p[axis] for p in group], [p[metric] for p in group]
    heights += y
    style = dict(color=colours[row], marker=_MARKERS.get(mode, 's'),
                 markersize=11 if mode == 'ar' else 6)
    ax.plot(x, y, label=f'{row}, {mode}',
            linestyle='--' if mode == 'verify' else '-', **style)
    for point, a, b in zip(group, x, y):
      bounds = _bounds(point, metric, content['frontier'])
      if bounds:
        ax.plot([a, a], bounds, color=colours[row], linewidth=0.9,
                label='95 %, difference to ar')
        heights += bounds
      if (point['valid_rate'] or 0) < tables.VALID_ENOUGH:
        ax.plot([a], [b], markerfacecolor=panels_lib.SURFACE, **style)
  # Lines of reference: only over the same requests as the points.
  references = {
      'retriever': (':', sorted({p['floor'][metric] for p in points}))}
  ar = tables.row_named(content, 'ar')
  if ar is not None and {p['n'] for p in points} == {ar['n']}:
    references['ar row'] = '--', [ar[metric]]
  _draw_references(ax, references, min(heights), max(heights))
  ax.margins(x=0.12)


def _bounds(point, metric, points) -> list[float] | None:
  """Where the AR mode of the same weights and the difference to it put it."""
  start = [p[metric] for p in points
           if p['row'] == point['row'] and p['mode'] == 'ar']
  if not start or not point['ci']:
    return None
  return [start[0] + change for change in point['ci'][metric]]


def _draw_references(ax, references, low, high) -> None:
  """Lines where they are near what is drawn from low to high, else words."""
  span = max(high - low, 0.01)
  drawn, above, below = [low, high], [], []
  for name, (dash, values) in references.items():
    apart = {True: [], False: []}  # by whether it is above
    for value in values:
      if low - span / 2 <= value <= high + span / 2:
        drawn.append(value)
        ax.axhline(value, color=panels_lib.MUTED, linestyle=dash, label=name)
      else:
        apart[value > high].append(f'{value:.3f}')
    above += [f'{name} {", ".join(apart[True])}'] if apart[True] else []
    below += [f'{name} {", ".join(apart[False])}'] if apart[False] else []
  low, high = min(drawn), max(drawn)
  pad = 0.2 * max(high - low, 0.01)
  ax.set_ylim(low - pad, high + pad)
  for words, arrow, y, side in ((above, '↑', 0.985, 'top'),
                                (below, '↓', 0.02, 'bottom')):
    if words:
      ax.text(0.01, y, f'{arrow} {", ".join(words)}', fontsize=8, va=side,
              color=panels_lib.MUTED, transform=ax.transAxes)


def spans(content: Mapping[str, Any]) -> list[panels_lib.Panel]:
  """Tokens per forward of reasoning and answer, by way to decode.

  Args:
    content: of the report; earlier ones don't have the reasoning's.
  """
  points = [p for p in content['frontier']
            if p.get('reasoning_tokens_per_forward') is not None
            and p['answer_tokens_per_forward'] is not None]
  if not points:
    return []

  def draw(ax):
    place = np.arange(len(points))
    for shift, colour, (span, key) in zip(
        (-0.2, 0.2), panels_lib.SERIES, (
            ('reasoning', 'reasoning_tokens_per_forward'),
            ('answer', 'answer_tokens_per_forward'))):
      bars = ax.bar(place + shift, [p[key] for p in points], 0.4,
                    color=colour, label=span)
      ax.bar_label(bars, fmt='%.1f', fontsize=7)
    ax.set_xticks(place, [tables.mode_name(p) for p in points])
    ax.set_ylabel(_AXES['tokens_per_forward'])
    ax.grid(False, axis='x')

  return [panels_lib.panel(
      'spans', f'{points[0]["row"]}: tokens per forward by span', draw)]


def commits(content: Mapping[str, Any]) -> list[panels_lib.Panel]:
  """Heat maps of the step that committed each token of some responses.

  Args:
    content: of the report; without `commits` there are none.
  """
  panels = []
  parts = content.get('commits') or ()
  # One scale, so that a colour is the same step in all of them.
  most = 1 + max((step for part in parts for row in part['steps']
                  for step in row), default=0)
  for part in parts:
    rows, size = part['steps'], part['block_size']
    steps = np.full((len(rows), max(map(len, rows))), np.nan)
    for line, row in zip(steps, rows):
      line[:len(row)] = np.add(row, 1)

    def draw(ax, steps=steps, size=size):
      image = ax.imshow(
          steps, aspect='auto', interpolation='nearest', cmap='viridis',
          extent=(0, steps.shape[1], len(steps), 0), vmin=1, vmax=most)
      for begin in range(size, steps.shape[1], size):
        ax.axvline(begin, color=panels_lib.SURFACE, linewidth=1.5)
      ax.set_xlabel('token of the response')
      ax.set_ylabel('response')
      ax.grid(False)
      bar = ax.figure.colorbar(image, ax=ax)
      bar.set_label('step within its block')
      bar.locator = ticker.MaxNLocator(integer=True)

    how = tables.tau(part['threshold'])
    panels.append(panels_lib.panel(
        f'commits_{part["row"]}_{part["threshold"]:g}',
        f'{part["row"]}, {how}: when tokens are committed', draw))
  return panels


def curves(records: Sequence[Mapping[str, Any]]) -> list[panels_lib.Panel]:
  """Losses, rewards and validation metrics of every stage over its steps.

  Args:
    records: lines of metrics.jsonl. Of their figures those called a loss make
      one panel a stage, the parts of the reward another, and a few validation
      metrics a third.

  Returns:
    The panels, in the order in which the stages appear.
  """
  series: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
  for record in records:
    for key, value in record.items():
      kind = _kind(key)
      if kind is None or isinstance(value, bool) or not isinstance(
          value, (int, float)):
        continue
      lines = series.setdefault((record['stage'], kind), {})
      lines.setdefault(key, {})[record['step']] = value
  stages = dict.fromkeys(record['stage'] for record in records)
  panels = []
  for stage, kind in itertools.product(
      stages, ('loss', 'reward', 'validation')):
    lines = series.get((stage, kind))
    # Where nothing is rewarded in training, the reward is one more metric.
    if not lines or kind == 'reward' and 'train/reward' not in lines:
      continue

    def draw(ax, lines=lines):
      styles = itertools.product(('-', '--', ':'), panels_lib.SERIES)
      for (name, values), (dash, colour) in zip(
          sorted(lines.items()), itertools.cycle(styles)):
        steps = sorted(values)
        ax.plot(steps, [values[s] for s in steps], dash, color=colour,
                marker='.' if len(steps) < 30 else None,
                label=_REWARDS.get(name) or name.split('/')[-1])
      ax.set_xlabel('step')
      ax.set_ylabel(_UNITS[kind])

    panels.append(panels_lib.panel(
        f'curves_{stage}_{kind}', f'{stage}: {kind}', draw))
  return panels


def _kind(key: str) -> str | None:
  """Which panel a figure belongs to; None for speed, gradient norms, ..."""
  if 'loss' in key:
    return 'loss'
  if key in _REWARDS:
    return 'reward'
  return 'validation' if key in _VALIDATION else None


def _full(metric: str) -> str:
  return metric.replace('recall', 'Recall').replace('ndcg', 'NDCG')
