"""Tests of the pure functions over purchase logs and of `load_dataset`."""

import os
import pathlib

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import ml_collections
import numpy as np
import pytest

from dgr2_jax.data import interactions

_BEAUTY = pathlib.Path(os.environ.get(
    'DGR2_BEAUTY',
    pathlib.Path(__file__).parents[3] / 'shared' / 'data' / 'beauty'))


def _log(rows):
  """A log of (user, item, timestamp) rows with ids u0, u1, ... i0, i1, ..."""
  rows = np.array(rows, int).reshape(-1, 3)
  return interactions.Log(
      users=tuple(f'u{i}' for i in range(rows[:, 0].max(initial=-1) + 1)),
      items=tuple(f'i{i}' for i in range(rows[:, 1].max(initial=-1) + 1)),
      user=rows[:, 0].astype(np.int32), item=rows[:, 1].astype(np.int32),
      timestamp=rows[:, 2].astype(float))


def _rows(log):
  return list(zip(log.user.tolist(), log.item.tolist()))


def _items(log):
  return {i: interactions.Item(i, f'title of {i}', ('Beauty',))
          for i in log.items}


def _dataset(log, min_count=1, ties='file', seed=0):
  return interactions.dataset(
      'test', _items(log), log, min_count, ties, seed, 'somewhere')


_ROWS = st.lists(st.tuples(
    st.integers(0, 8), st.integers(0, 8), st.integers(0, 3)), max_size=60)


@given(_ROWS, st.integers(1, 4))
@settings(deadline=None)
def test_k_core_is_the_largest_part_with_k_purchases_each(rows, k):
  rows = list(dict.fromkeys(rows))
  got = set(_rows(interactions.k_core(_log(rows), k)))
  # The definition by removal of one violating user or item at a time.
  left = {(u, i) for u, i, _ in rows}
  everything = [(u, i) for u, i, _ in rows]
  while True:
    count = lambda axis, x: sum(e[axis] == x for e in everything)
    bad = next((e for e in everything
                if count(0, e[0]) < k or count(1, e[1]) < k), None)
    if bad is None:
      break
    axis = 0 if count(0, bad[0]) < k else 1
    everything = [e for e in everything if e[axis] != bad[axis]]
    left = set(everything)
  assert got == left


@given(_ROWS)
@settings(deadline=None)
def test_file_ties_are_a_stable_sort(rows):
  got = interactions.chronological(_log(rows), 'file', 0)
  assert _rows(got) == [r[:2] for r in sorted(rows, key=lambda r: (r[0], r[2]))]


@given(_ROWS, st.randoms())
@settings(deadline=None)
def test_hash_ties_do_not_depend_on_file_order(rows, random):
  shuffled = list(rows)
  random.shuffle(shuffled)
  orders = [interactions.chronological(_log(r), 'hash', 3)
            for r in (rows, shuffled)]
  assert _rows(orders[0]) == _rows(orders[1])
  for order in orders:
    keys = list(zip(order.user, order.timestamp))
    assert keys == sorted(keys)


def test_hash_ties_follow_the_seed_and_not_the_item():
  log = _log([(u, i, 0) for u in range(40) for i in range(10)])
  orders = [interactions.chronological(log, 'hash', s) for s in (0, 0, 1)]
  assert _rows(orders[0]) == _rows(orders[1])
  assert _rows(orders[0]) != _rows(orders[2])
  steps = np.diff(orders[0].item.reshape(40, 10), axis=1)
  # In file order every step goes up; by hash about half of the 360 do.
  assert abs(np.mean(steps > 0) - 0.5) < 4 * 0.5 / np.sqrt(360)


def test_unknown_ties():
  with pytest.raises(ValueError, match="data.ties is 'random'"):
    interactions.chronological(_log([(0, 0, 0)]), 'random', 0)


def test_ordered_logs_keep_their_order():
  log = interactions.Log(('a', 'b'), ('x', 'y', 'z'), np.array([1, 0, 1, 0]),
                         np.array([2, 1, 0, 0]), None)
  for ties in interactions.TIES:
    assert _rows(interactions.chronological(log, ties, 0)) == [
        (0, 1), (0, 0), (1, 2), (1, 0)]


def test_first_purchase_counts():
  rows = [(0, 5, 9), (0, 2, 1), (0, 5, 2), (0, 3, 3), (0, 2, 4)]
  data = _dataset(_log(rows))
  assert [data.items[i].item_id for i in data.sequences[0]] == [
      'i2', 'i5', 'i3']


def test_leave_one_out():
  split = interactions.leave_one_out(np.array([4, 2, 7, 1], np.int32))
  assert split.train.tolist() == [4, 2]
  assert (split.validation, split.test) == (7, 1)
  with pytest.raises(interactions.DataError, match='at least 3'):
    interactions.leave_one_out(np.array([4, 2]))


def test_dataset_drops_what_the_core_drops():
  rows = [(u, i, i) for u in range(3) for i in (1, 2, 4)] + [(3, 0, 0)]
  data = _dataset(_log(rows), min_count=3)
  assert data.users == ('u0', 'u1', 'u2')
  assert [i.item_id for i in data.items] == ['i1', 'i2', 'i4']
  assert all(s.tolist() == [0, 1, 2] for s in data.sequences)
  assert all(s.dtype == np.int32 for s in data.sequences)
  assert data.num_interactions == 9


def test_dataset_errors():
  log = _log([(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1)])
  with pytest.raises(interactions.DataError,
                     match='somewhere: none of the 4 purchases .* 5-core'):
    _dataset(log, min_count=5)
  with pytest.raises(interactions.DataError,
                     match="user 'u0' has 2 purchases .* data.min_count"):
    _dataset(log, min_count=2)


def test_as_log_is_the_inverse():
  data = _dataset(_log([(u, (i + u) % 7, i) for u in range(4)
                        for i in range(5)]))
  again = interactions.dataset(
      'test', {i.item_id: i for i in data.items}, interactions.as_log(data), 1,
      'hash', 0, 'somewhere')
  assert again.users == data.users and again.items == data.items
  for a, b in zip(again.sequences, data.sequences):
    np.testing.assert_array_equal(a, b)


def _config(**fields):
  return ml_collections.ConfigDict(dict(
      dict(name='test', path='', min_count=5, ties='file', seed=0,
           check_counts=True), **fields))


def test_load_unknown_source():
  with pytest.raises(ValueError, match="data.source is 'amazon'"):
    interactions.load_dataset(_config(source='amazon'))


def test_load_embedded():
  config = _config(source='embedded', embedded=dict(seed=4, num_users=400))
  data = interactions.load_dataset(config)
  assert data.name == 'test'
  counts = np.bincount(np.concatenate(data.sequences))
  assert counts.min() >= 5
  assert min(len(s) for s in data.sequences) >= 5


@pytest.mark.skipif(
    not _BEAUTY.is_dir(), reason=f'no Amazon Beauty data at {_BEAUTY}')
def test_load_beauty():
  data = interactions.load_dataset(
      _config(source='directory', name='beauty', path=str(_BEAUTY)))
  assert (len(data.users), len(data.items), data.num_interactions) == (
      22_363, 12_101, 198_502)
  assert min(len(s) for s in data.sequences) == 5
  assert max(len(s) for s in data.sequences) == 204
