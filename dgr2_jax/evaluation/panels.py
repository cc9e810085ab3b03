"""How figures are drawn: one small axes a panel, for both colour schemes.

A panel is wide enough to be read on a phone; pages lay panels side by side
where there is room. Each comes as PNG for Markdown and as SVG whose colours are
CSS variables, so that a page's colour scheme applies.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import io
import re

import matplotlib
from matplotlib import axes as mpl_axes
from matplotlib import figure as mpl_figure
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


def panel(name: str, title: str, draw: Callable[[mpl_axes.Axes], None]
          ) -> Panel:
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
