"""Replayed canvases against what a played decoder saw."""

import collections

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from dgr2_jax.decoding import replay as replay_lib
from dgr2_jax.models import canvas as canvas_lib
from tests.decoding import traces

ALIGNMENT = {True: 'shifted', False: 'same_position'}
PLAYS = dict(block_size=st.sampled_from([1, 2, 4, 8]), shifted=st.booleans(),
             blocks=st.integers(1, 4), rows=st.tuples(st.integers(1, 3),
                                                      st.integers(1, 3)),
             seed=st.integers(0, 10**6))


def played(block_size, shifted, blocks, rows, seed):
  length = block_size * blocks
  ends = np.random.default_rng(seed).integers(1, length + 1, rows)
  calls, steps = traces.play_all(seed, ends, length, block_size, shifted)
  return calls, steps, canvas_lib.CanvasConfig(
      block_size, alignment=ALIGNMENT[shifted])


def used(replay, response):
  """A response's canvases, which have a weight; the others must be empty."""
  n, g = response
  rows = np.flatnonzero(replay.owner[n] == g)
  fields = [field[n][rows].reshape(-1, *field.shape[3:]) for field in (
      replay.start, replay.masked, replay.decided, replay.weight)]
  on = fields[-1] > 0
  assert not any(field[~on].any() for field in fields)
  return [(int(start), tuple(masked.tolist()), tuple(decided.tolist()), weight)
          for start, masked, decided, weight in zip(*(f[on] for f in fields))]


@settings(max_examples=80, deadline=None)
@given(**PLAYS, per_row=st.integers(1, 5))
def test_every_step_comes_back_with_its_share(per_row, **play):
  calls, steps, canvas = played(**play)
  got = replay_lib.replay(calls, canvas, per_row)
  assert [x.dtype for x in got] == [np.int32, np.int32, np.int32, bool, bool,
                                    np.float32]
  n, g, _ = calls.shape
  m = 0 if canvas.block_size == 1 and canvas.shifted else per_row
  needed = max(sum(max(1, -(-len(steps[i, j]) // per_row)) for j in range(g))
               for i in range(n))
  r = got.owner.shape[1]
  assert needed <= r < needed + -(-g // 2)
  assert got.masked.shape == (n, r, m, canvas.block_size)
  for i, j in np.ndindex(n, g):
    assert got.first[i, j] == np.flatnonzero(got.owner[i] == j)[0]
  for row, seen in steps.items():
    count = collections.Counter(step.start for step in seen)
    canvases = used(got, row)
    assert sorted(c[:3] for c in canvases) == sorted(map(tuple, seen))
    share = collections.Counter()
    for start, _, _, weight in canvases:
      assert weight == pytest.approx(1 / count[start])
      share[start] += weight
    assert all(x == pytest.approx(1) for x in share.values())
    # Each token that is no seed is decided once, if ever.
    decided = collections.Counter(
        start + b for start, _, taken, _ in canvases
        for b in np.flatnonzero(taken))
    assert decided == {
        i: 1 for i, c in enumerate(calls[row]) if c < traces.NEVER
        and not (canvas.shifted and i % canvas.block_size == 0)}


@settings(max_examples=40, deadline=None)
@given(**PLAYS)
def test_one_step_a_block_stands_for_all(**play):
  calls, steps, canvas = played(**play)
  got = replay_lib.replay(calls, canvas, 8, np.random.default_rng(3))
  for row, seen in steps.items():
    canvases = used(got, row)
    assert {c[:3] for c in canvases} <= set(map(tuple, seen))
    assert (sorted(c[0] for c in canvases)
            == sorted({step.start for step in seen}))
    assert all(weight == 1 for *_, weight in canvases)


def test_the_one_step_is_uniform_and_independent_by_block():
  call = np.array([0, 2, 1, 3, 4, 6, 5, 6])  # three steps, then two
  n = 6000
  got = replay_lib.replay(
      np.tile(call, (n, 1, 1)), canvas_lib.CanvasConfig(4), 2,
      np.random.default_rng(0))
  assert got.start.shape == (n, 1, 2)
  np.testing.assert_array_equal(got.start[:, 0], np.tile([0, 4], (n, 1)))
  left = got.masked[:, 0].sum(-1)  # tells the steps of a block apart
  count = collections.Counter(map(tuple, left.tolist()))
  assert sorted(count) == [(a, b) for a in (1, 2, 3) for b in (2, 3)]
  # 1,000 each, with a standard deviation of 29.
  assert all(abs(x - 1000) < 120 for x in count.values())


def test_the_picture_of_the_module():
  call = np.array([0, 4, 3, 4, 5]).reshape(1, 1, 5)
  got = replay_lib.replay(call, canvas_lib.CanvasConfig(5), 4)
  shown = [''.join('.' if m else 'x' for m in row) for row in got.masked[0, 0]]
  assert shown[:3] == ['x....', 'x.x..', 'xxxx.']
  np.testing.assert_array_equal(got.decided[0, 0].sum(-1), [1, 2, 1, 0])
  np.testing.assert_allclose(got.weight[0, 0], [1 / 3] * 3 + [0], rtol=1e-6)


def test_a_block_of_one_has_no_canvases():
  calls = np.arange(12).reshape(1, 1, 12)
  got = replay_lib.replay(calls, canvas_lib.CanvasConfig(1), 8)
  assert [x.shape for x in got] == [
      (1, 1), (1, 1), (1, 1, 0), (1, 1, 0, 1), (1, 1, 0, 1), (1, 1, 0)]


def test_rows_follow_what_a_response_needs():
  long = np.array([0, 1, 2, 3, 4, 5, 6, 7])  # a token a step
  short = np.array([0, 1, 1, 1, 1, 1, 1, 1])
  got = replay_lib.replay(np.stack([short, long, short, short])[None],
                          canvas_lib.CanvasConfig(8), 4)
  # One row more; rows are added by halves of the four.
  assert got.owner.tolist() == [[0, 1, 1, 2, 3, 0]]
  assert got.first.tolist() == [[0, 1, 3, 4]]
  assert (got.weight > 0).sum(-1).tolist() == [[1, 4, 3, 1, 1, 0]]


def test_a_seed_of_a_fused_commit_is_scored_once():
  """It has the call of its block's first step, and stands on the clean stream.
  """
  calls = np.array([[[0, 1, 1, 1, 2, 2, 3, 2]]])
  got = replay_lib.replay(calls, canvas_lib.CanvasConfig(4), 4)
  np.testing.assert_array_equal(got.decided[0, 0, :3].astype(int), [
      [0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 0]])
