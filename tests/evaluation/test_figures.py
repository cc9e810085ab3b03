"""Figures of a report, from the fabricated content of its tests."""

import itertools

from matplotlib import text as mpl_text
import numpy as np
import pytest

from dgr2_jax.evaluation import figures
from dgr2_jax.evaluation import panels
from dgr2_jax.evaluation import paper
from tests.evaluation import test_report


@pytest.fixture(name='content', scope='module')
def content_fixture():
  return test_report.make_content()


def test_ladder_has_rows_intervals_and_the_papers(content):
  panel, other = figures.ladder(content)
  assert (panel.name, other.name) == ('ladder_recall_1', 'ladder_ndcg_3')
  for text in ('pre_rank', 'gbdt', 'naive', '95 % interval', 'retriever',
               "the paper's, Qwen3-8B"):
    assert f'>{text}</text>' in panel.svg, text
  rows_of_old = [{k: v for k, v in row.items() if k != 'interval'}
                 for row in content['rows']]
  own = dict(content, rows=rows_of_old, dataset={'name': 'own'})
  panel, _ = figures.ladder(own)
  assert '95 % interval' not in panel.svg and 'Qwen3' not in panel.svg
  assert figures.ladder(dict(own, rows=rows_of_old[:1])) == []
  assert paper.accuracy('recall@1')['cft'] == .2930
  assert paper.accuracy('ndcg@3')['rl'] == .4517
  assert paper.accuracy('ndcg@10') == {}


def test_frontier_is_cropped_to_its_points(content):
  panel = figures.frontier(content)[0]
  for text in ('Recall@1', 'τ 0.9', 'τ 0.4', '95 %, difference to ar'):
    assert f'>{text}</text>' in panel.svg, text
  far = [dict(p, floor=dict(p['floor'], **{'recall@1': .001}))
         for p in content['frontier']]
  panel, other = figures.frontier(dict(content, frontier=far), ())[:2]
  assert '↓ retriever 0.001' in panel.svg and 'τ 0.9' not in panel.svg


def test_heat_maps_share_one_scale(content):
  part, = content['commits']
  panels_ = figures.commits(dict(content, commits=[
      dict(part, threshold=.9, steps=[[0, 1]]),
      dict(part, threshold=.4, steps=[[0, 6]])]))
  assert len(panels_) == 2
  for panel in panels_:
    assert '>7</text>' in panel.svg and '>8</text>' not in panel.svg


def test_labels_cover_neither_each_other_nor_points():
  places, kept = [(1, .50), (1.02, .501), (1.5, .5), (1.52, .499)] * 2, []

  def draw(ax):
    kept.append(ax)
    for i, (x, y) in enumerate(places):
      ax.plot([x], [y], 'o', label=f'reward, validation {i}')
    ax.plot([1, 1.5], [.5, .5])
    ax.margins(.2)
    return [panels.Label(f'τ 0.{i}', *xy) for i, xy in enumerate(places)]

  panels.panel('x', 'x', draw)
  ax, = kept
  ax.figure.draw_without_rendering()  # for places at the figure's own dpi
  # Of an annotation without its line.
  boxes = [mpl_text.Text.get_window_extent(text) for text in ax.texts]
  assert len(boxes) == len(places)
  for box, other in itertools.combinations(boxes, 2):
    assert not box.overlaps(other)
  for x, y in ax.transData.transform(places):
    assert not any(box.contains(x, y) for box in boxes)
  legend, = ax.figure.legends
  box = legend.get_window_extent()
  assert box.x0 >= 0 and box.x1 <= ax.figure.bbox.width


def test_curves_keep_the_last_value_of_a_step():
  panels = figures.curves([
      {'stage': 'cft', 'step': 1, 'train/loss': 2.0},
      {'stage': 'cft', 'step': 1, 'train/loss': None},
      {'stage': 'cft', 'step': 2, 'train/loss': 1.0, 'note': 'x'}])
  assert [p.name for p in panels] == ['curves_cft_loss']


def test_ramp_is_legible():
  def luminance(colour):
    rgb = np.array([int(colour[i:i + 2], 16) for i in (1, 3, 5)]) / 255
    rgb = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055)**2.4)
    return rgb @ [0.2126, 0.7152, 0.0722]

  for colour, ink in panels.ramp(10):
    light, dark = sorted((luminance(colour), luminance(ink)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5
