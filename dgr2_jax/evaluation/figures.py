"""Figures of a report: frontier, spans, commit steps, training curves.

A panel is one small axes, wide enough to be read on a phone; pages lay panels
side by side where there is room. Each comes as PNG for Markdown and as SVG
whose colours are CSS variables, so that a page's colour scheme applies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import io
import itertools
import re
from typing import Any

import matplotlib
from matplotlib import figure as mpl_figure
from matplotlib import ticker
import numpy as np

from dgr2_jax.evaluation import rows as rows_lib
from dgr2_jax.evaluation import tables

# What figures are drawn with -> (CSS variable, its value on a dark page).
INK, MUTED, GRID, SURFACE = '#1f2328', '#5c6570', '#d9dde2', '#ffffff'
SERIES = ('#2563ab', '#c2570c', '#2f7d32', '#8a3fa0', '#b0285f', '#6b6a00')
VARIABLES = {
    INK: ('--ink', '#e4e7eb'),
    MUTED: ('--muted', '#9aa4af'),
    GRID: ('--grid', '#343a42'),
    SURFACE: ('--surface', '#15181c'),
    SERIES[0]: ('--series-1', '#7cb5f2'),
    SERIES[1]: ('--series-2', '#f6a15b'),
    SERIES[2]: ('--series-3', '#7fce83'),
    SERIES[3]: ('--series-4', '#d39be6'),
    SERIES[4]: ('--series-5', '#f08cb4'),
    SERIES[5]: ('--series-6', '#d4d45a'),
}

# Validation metrics that are shares, and so can share an axis.
_VALIDATION = tuple(f'validation/{name}' for name in (
    'recall@1', 'ndcg@3', 'valid_rate'))
# The reward and its parts, which share an axis, and their names.
_REWARDS = {'train/reward': 'reward', 'train/rank': 'rank promotion',
            'train/format': 'format, unweighted', 'train/overlong': 'overlong',
            'validation/reward': 'reward, validation'}
_MARKERS = {'ar': '*', 'threshold': 'o', 'verify': 'D'}
_AXES = {
    'tokens_per_forward': 'tokens per forward',
    'tokens_per_second': 'tokens per second',
}
_STYLE = {
    'svg.fonttype': 'none',
    'text.parse_math': False,
    'text.color': INK,
    'axes.edgecolor': MUTED,
    'axes.labelcolor': INK,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': True,
    'axes.axisbelow': True,
    'axes.titlesize': 10,
    'axes.titleweight': 'bold',
    'axes.titlelocation': 'left',
    'grid.color': GRID,
    'xtick.color': MUTED,
    'ytick.color': MUTED,
    'xtick.labelcolor': INK,
    'ytick.labelcolor': INK,
    'font.size': 9,
    'legend.frameon': False,
    'lines.linewidth': 1.6,
}


@dataclasses.dataclass(frozen=True)
class Panel:
  """A drawn figure: file name without suffix, its title, PNG and SVG."""
  name: str
  title: str
  png: bytes
  svg: str


def frontier(content: Mapping[str, Any]) -> list[Panel]:
  """Key metrics against tokens per forward and tokens per second.

  Hollow points are those with less than `tables.VALID_ENOUGH` valid responses:
  there the fallback to the retriever's order hides part of the loss.

  Args:
    content: of the report.

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
      _draw_frontier(ax, points, metric, axis, content)
      ax.set_xlabel(_AXES[axis])

    panels.append(_panel(f'frontier_{metric}_{axis}', title, draw))
  return panels


def _draw_frontier(ax, points, metric, axis, content) -> None:
  colours = dict(zip(
      dict.fromkeys(p['row'] for p in content['frontier']),
      itertools.cycle(SERIES)))
  groups = itertools.groupby(points, lambda p: (p['row'], p['mode']))
  for (row, mode), group in groups:
    group = list(group)
    x, y = [p[axis] for p in group], [p[metric] for p in group]
    colour = colours[row]
    ax.plot(x, y, color=colour, marker=_MARKERS.get(mode, 's'),
            markersize=11 if mode == 'ar' else 6, label=f'{row}, {mode}',
            linestyle='--' if mode == 'verify' else '-')
    for point, a, b in zip(group, x, y):
      if (point['valid_rate'] or 0) < tables.VALID_ENOUGH:
        ax.plot([a], [b], marker=_MARKERS.get(mode, 's'), color=colour,
                markersize=11 if mode == 'ar' else 6,
                markerfacecolor=SURFACE)
      ax.annotate(tables.mode_name(point), (a, b),
                  xytext=(0, 8 if mode == 'ar' else -14),
                  textcoords='offset points', ha='center', fontsize=8)
  # Lines of reference: only over the same requests as the points.
  for floor in sorted({p['floor'][metric] for p in points}):
    ax.axhline(floor, color=MUTED, linestyle=':', label='retriever')
  ar = tables.row_named(content, 'ar')
  if ar is not None and {p['n'] for p in points} == {ar['n']}:
    ax.axhline(ar[metric], color=MUTED, linestyle='--', label='ar row')
  ax.margins(x=0.12, y=0.18)


def spans(content: Mapping[str, Any]) -> list[Panel]:
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
        (-0.2, 0.2), SERIES, (
            ('reasoning', 'reasoning_tokens_per_forward'),
            ('answer', 'answer_tokens_per_forward'))):
      bars = ax.bar(place + shift, [p[key] for p in points], 0.4,
                    color=colour, label=span)
      ax.bar_label(bars, fmt='%.1f', fontsize=7)
    ax.set_xticks(place, [tables.mode_name(p) for p in points])
    ax.set_ylabel(_AXES['tokens_per_forward'])
    ax.grid(False, axis='x')

  return [_panel('spans', f'{points[0]["row"]}: tokens per forward by span',
                 draw)]


def commits(content: Mapping[str, Any]) -> list[Panel]:
  """Heat maps of the step that committed each token of some responses.

  Args:
    content: of the report; without `commits` there are none.
  """
  panels = []
  for part in content.get('commits') or ():
    rows, size = part['steps'], part['block_size']
    steps = np.full((len(rows), max(map(len, rows))), np.nan)
    for line, row in zip(steps, rows):
      line[:len(row)] = np.add(row, 1)

    def draw(ax, steps=steps, size=size):
      image = ax.imshow(
          steps, aspect='auto', interpolation='nearest', cmap='viridis',
          extent=(0, steps.shape[1], len(steps), 0), vmin=1)
      for begin in range(size, steps.shape[1], size):
        ax.axvline(begin, color=SURFACE, linewidth=1.5)
      ax.set_xlabel('token of the response')
      ax.set_ylabel('response')
      ax.grid(False)
      bar = ax.figure.colorbar(image, ax=ax)
      bar.set_label('step within its block')
      bar.locator = ticker.MaxNLocator(integer=True)

    how = tables.tau(part['threshold'])
    panels.append(_panel(
        f'commits_{part["row"]}_{part["threshold"]:g}',
        f'{part["row"]}, {how}: when tokens are committed', draw))
  return panels


def curves(records: Sequence[Mapping[str, Any]]) -> list[Panel]:
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
      styles = itertools.product(('-', '--', ':'), SERIES)
      for (name, values), (dash, colour) in zip(
          sorted(lines.items()), itertools.cycle(styles)):
        steps = sorted(values)
        ax.plot(steps, [values[s] for s in steps], dash, color=colour,
                marker='.' if len(steps) < 30 else None,
                label=_REWARDS.get(name) or name.split('/')[-1])
      ax.set_xlabel('step')

    panels.append(_panel(f'curves_{stage}_{kind}', f'{stage}: {kind}', draw))
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


def _panel(name: str, title: str, draw) -> Panel:
  """Draws one axes, without any global state of matplotlib."""
  name = re.sub('[^a-z0-9]+', '_', name.lower()).strip('_')
  with matplotlib.rc_context({**_STYLE, 'svg.hashsalt': name}):
    figure = mpl_figure.Figure(figsize=(4.2, 3.3), layout='constrained')
    ax = figure.add_subplot()
    draw(ax)
    ax.set_title(title)
    handles, labels = ax.get_legend_handles_labels()
    unique = dict(zip(labels, handles))
    figure.legend(unique.values(), unique.keys(), loc='outside lower center',
                  ncols=min(3, len(unique)), fontsize=8)
    png, svg = io.BytesIO(), io.StringIO()
    figure.savefig(png, format='png', dpi=160, facecolor=SURFACE,
                   metadata={'Software': None})
    figure.savefig(svg, format='svg', transparent=True)
  return Panel(name, title, png.getvalue(), _inline(svg.getvalue(), name))


def _inline(svg: str, name: str) -> str:
  """An SVG document as an element of a page that holds several."""
  svg = svg[svg.index('<svg'):]
  svg = re.sub(r'<metadata>.*?</metadata>', '', svg, flags=re.S)
  svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1', svg, count=1)
  svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r'\1', svg, count=1)
  svg = svg.replace('<svg', '<svg role="img"', 1)
  # Ids must be unique on the page.
  svg = re.sub(r'\bid="', f'id="{name}-', svg)
  svg = re.sub(r'url\(#', f'url(#{name}-', svg)
  svg = re.sub(r'xlink:href="#', f'xlink:href="#{name}-', svg)
  for colour, (variable, _) in VARIABLES.items():
    svg = svg.replace(colour, f'var({variable})')
  return svg


def ramp(count: int) -> list[tuple[str, str]]:
  """`count` ordered colours and the ink that is legible on each, as hex."""
  colours = matplotlib.colormaps['viridis'](np.linspace(0.15, 1, count))
  # Relative luminance of linear light, as in the WCAG contrast ratio.
  light = (((colours[:, :3] + 0.055) / 1.055)**2.4) @ [0.2126, 0.7152, 0.0722]
  return [(matplotlib.colors.to_hex(c), '#000000' if y > 0.18 else '#ffffff')
          for c, y in zip(colours, light)]
