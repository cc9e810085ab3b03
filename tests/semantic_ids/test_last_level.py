"""Tests of how items that share an id are told apart."""

import hypothesis
from hypothesis import strategies as st
import numpy as np

from dgr2_jax.semantic_ids import last_level


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    st.integers(1, 3), st.integers(1, 5), st.integers(0, 2 ** 16),
    st.floats(0, 1), st.floats(0, 1))
def test_collision_aware_ids_are_unique_and_spare_the_prefix(
    levels, codes, seed, fill, shared):
  """Whatever the nearest codes are, up to a full tree."""
  rng = np.random.default_rng(seed)
  count = max(1, round(fill * codes ** levels))
  points = rng.normal(size=(count, 3)).astype(np.float32)
  points[rng.random(count) < shared] = points[0]
  tables = [rng.normal(size=(codes, 3)) for _ in range(levels)]
  residual, nearest = points.astype(np.float64), []
  for table in tables:
    nearest.append(((residual[:, None] - table) ** 2).sum(-1).argmin(-1))
    residual = residual - table[nearest[-1]]
  nearest = np.stack(nearest, 1)
  ids = last_level.collision_aware(points, nearest, tables, codes)
  assert ids.dtype == np.int32 and ids.min() >= 0 and ids.max() < codes
  assert len(np.unique(ids, axis=0)) == count
  # Every id that someone wants is someone's who wants it.
  kept = np.unique(nearest[(ids == nearest).all(1)], axis=0)
  np.testing.assert_array_equal(kept, np.unique(nearest, axis=0))
  # Where no prefix is over-full, only last codes move.
  _, sizes = np.unique(nearest[:, :-1], axis=0, return_counts=True)
  if sizes.max() <= codes:
    np.testing.assert_array_equal(ids[:, :-1], nearest[:, :-1])


def test_a_random_last_level_is_seeded_and_uses_all_codes():
  ids = np.zeros((400, 3), np.int64)
  drawn = last_level.random(ids, 16, seed=1)
  assert (drawn[:, :-1] == 0).all()
  assert set(drawn[:, -1].tolist()) == set(range(16))
  np.testing.assert_array_equal(drawn, last_level.random(ids, 16, seed=1))
  assert (drawn != last_level.random(ids, 16, seed=2)).any()
