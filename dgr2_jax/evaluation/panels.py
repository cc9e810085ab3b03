"""How figures are drawn: one small axes a panel, for both colour schemes.

A panel is wide enough to be read on a phone; pages lay panels side by side
where there is room. Each comes as PNG for Markdown and as SVG whose colours are
CSS variables, so that a page's colour scheme applies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import io
import itertools
import re
from typing import NamedTuple

import matplotlib
from matplotlib import axes as mpl_axes
from matplotlib import figure as mpl_figure
from matplotlib import path
from matplotlib import transforms
from matplotlib.backends import backend_agg
import numpy as np

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


class Label(NamedTuple):
  """What a point at x, y is called."""
  text: str
  x: float
  y: float


def panel(name: str, title: str,
          draw: Callable[[mpl_axes.Axes], Sequence[Label] | None]) -> Panel:
  """Draws one axes, without any global state of matplotlib.

  Args:
    name: of the file; what is neither letter nor digit becomes a dash below.
    title: of the axes.
    draw: fills the axes and may return labels, see `_place`.
  """
  name = re.sub('[^a-z0-9]+', '_', name.lower()).strip('_')
  with matplotlib.rc_context({**_STYLE, 'svg.hashsalt': name}):
    figure = mpl_figure.Figure(figsize=(4.2, 3.3), layout='constrained')
    # Pages have other fonts: room for ticks that end with the axes.
    figure.get_layout_engine().set(w_pad=0.1)
    backend_agg.FigureCanvasAgg(figure)
    ax = figure.add_subplot()
    labels = draw(ax)
    ax.set_title(title)
    _add_legend(ax)
    if labels:
      _place(ax, labels)
    png, svg = io.BytesIO(), io.StringIO()
    figure.savefig(png, format='png', dpi=160, facecolor=SURFACE,
                   metadata={'Software': None})
    figure.set_layout_engine('none')  # it stays where it was put
    figure.savefig(svg, format='svg', transparent=True)
  return Panel(name, title, png.getvalue(), _inline(svg.getvalue(), name))


def _add_legend(ax: mpl_axes.Axes) -> None:
  """A legend below, in as many columns as fit; many lines make it taller."""
  figure = ax.figure
  unique = dict(zip(*reversed(ax.get_legend_handles_labels())))
  for columns in range(min(3, len(unique)), 0, -1):
    legend = figure.legend(
        unique.values(), unique.keys(), loc='outside lower center',
        ncols=columns, fontsize=8)
    # Pages have other fonts, which may be wider.
    if legend.get_window_extent().width < 0.95 * figure.bbox.width:
      lines = -(-len(unique) // columns)
      figure.set_figheight(figure.get_figheight() + 0.17 * max(0, lines - 2))
      return
    if columns > 1:
      legend.remove()


def _place(ax: mpl_axes.Axes, labels: Sequence[Label]) -> None:
  """Writes labels beside their points, over no other text and no point.

  Of the free places that which is near and crosses few lines is taken, with a
  thin line to the point where it is far; a label without any is left out.
  """
  figure = ax.figure
  figure.draw_without_rendering()  # from here on places are known
  pixels = figure.dpi / 72  # a point's
  centres = ax.transData.transform([(label.x, label.y) for label in labels])
  marks = np.concatenate([centres, *(
      line.get_transform().transform(line.get_xydata())
      for line in ax.lines if line.get_marker() != 'None')])
  taken = [transforms.Bbox.from_extents(x - r, y - r, x + r, y + r)
           for r in (5 * pixels,) for x, y in marks]
  taken += [text.get_window_extent() for text in ax.texts]
  lines = [line.get_transform().transform_path(line.get_path())
           for line in ax.lines]
  inside = ax.get_window_extent()
  written = []

  def places(label, x, y):
    text = ax.text(0, 0, label.text, fontsize=8)
    size = text.get_window_extent()
    text.remove()
    width, height = 1.15 * size.width + 2, size.height + 2
    for distance, angle in itertools.product(
        (8, 13, 20, 30, 42, 56), np.linspace(0, 2 * np.pi, 16, False)):
      dx = np.cos(angle) * (distance * pixels + width / 2)
      dy = np.sin(angle) * (distance * pixels + height / 2)
      box = transforms.Bbox.from_bounds(
          x + dx - width / 2, y + dy - height / 2, width, height)
      leader = path.Path([(x, y), (x + dx, y + dy)])
      if (inside.containsx(box.x0) and inside.containsx(box.x1)
          and inside.containsy(box.y0) and inside.containsy(box.y1)
          and not any(box.overlaps(other) for other in taken)
          and not any(leader.intersects_bbox(other) for other in written)):
        crossed = sum(line.intersects_bbox(box, filled=False)
                      for line in lines)
        away = np.hypot(*(marks - (x + dx, y + dy)).T).min()
        mistaken = 20 * bool(away < np.hypot(dx, dy) - 1)  # another's label
        yield distance + 15 * crossed + mistaken, distance, (dx, dy), box

  for label, (x, y) in zip(labels, centres):
    _, distance, (dx, dy), box = min(
        places(label, x, y), key=lambda place: place[0],
        default=(None,) * 2 + ((0, 0), None))
    if box is None:
      continue
    taken.append(box)
    written.append(box)
    arrow = dict(arrowstyle='-', color=MUTED, linewidth=0.6, shrinkB=4)
    ax.annotate(
        label.text, (label.x, label.y), (dx / pixels, dy / pixels),
        textcoords='offset points', ha='center', va='center', fontsize=8,
        arrowprops=arrow if distance > 13 else None).set_in_layout(False)


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
