"""Tests of what is reported about semantic ids."""

import numpy as np
import pytest

from dgr2_jax.data import interactions
from dgr2_jax.semantic_ids import quality

IDS = np.array([[0, 1], [0, 1], [0, 2], [3, 0], [3, 1], [1, 1]])


def test_uniqueness_and_code_use():
  assert quality.uniqueness(IDS) == 5 / 6
  first, second = quality.code_use(IDS, codes=4)
  assert first['used'] == 3 / 4 and second['used'] == 3 / 4
  shares = np.array([3, 2, 1]) / 6
  assert first['perplexity'] == pytest.approx(
      np.exp(-(shares * np.log(shares)).sum()))
  even, = quality.code_use(np.arange(8)[:, None], codes=8)
  assert even['perplexity'] == pytest.approx(8)


def test_purity_counts_items_with_company():
  one, two = quality.prefix_purity(IDS, ['a', 'a', 'b', 'b', 'b', 'c'])
  # {a, a, b}, {b, b}; the last item is alone.
  assert one['items'] == 5 / 6 and one['purity'] == 4 / 5
  assert two['items'] == 2 / 6 and two['purity'] == 1
  alone, = quality.prefix_purity(np.arange(4)[:, None], list('aabb'))
  assert alone == {'items': 0, 'purity': None, 'chance': None}


def test_nearest_by_shared_prefix():
  assert quality.nearest(IDS, 0, 3) == [(1, 2), (2, 1)]
  assert quality.nearest(IDS, 5, 3) == []
  # Equal codes behind different ones are not shared.
  assert quality.nearest(IDS, 4, 3) == [(3, 1)]


def test_examples_are_all_items_at_most():
  items = [interactions.Item(str(i), f'Item {i}', ('x',)) for i in range(6)]
  found = quality.examples(IDS, items, 9)
  assert sorted(example['item_id'] for example in found) == list('012345')
  first, = (example for example in found if example['item_id'] == '0')
  assert first['title'] == 'Item 0' and first['id'] == [0, 1]
  assert [(other['item_id'], other['shared']) for other in first['nearest']
          ] == [('1', 2), ('2', 1)]


def test_report():
  items = [interactions.Item(str(i), '', ('Beauty', 'xyz'[i % 3]))
           for i in range(6)]
  unique = np.array([[0, 1], [0, 3], [0, 2], [3, 0], [3, 1], [1, 1]])
  report = quality.report(unique, 4, items, IDS)
  assert report['uniqueness'] == 1
  assert report['uniqueness_before'] == [3 / 6, 5 / 6]
  assert report['levels'] == quality.code_use(IDS, 4)
  assert report['purity']['broadest'][0]['purity'] == 1
  assert report['purity']['path'][0]['purity'] == 2 / 5
