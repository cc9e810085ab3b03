"""Tests of packed rows."""

import numpy as np
import pytest

from dgr2_jax.retrieval import packing


def test_every_target_stands_once_behind_what_it_may_see():
  rng = np.random.default_rng(0)
  length = 7
  sequences = [rng.integers(0, 1000, m) for m in (2, 5, 1, 12, 8, 3, 3, 2, 0)]
  rows = packing.pack(sequences, length, np.random.default_rng(1))
  visible = np.asarray(packing.visible(rows.segment))
  found = []
  for r, t in zip(*np.nonzero(rows.segment)):
    seen = visible[r, t]
    assert rows.position[r, t] == seen.sum() - 1
    found.append((*rows.inputs[r, seen], rows.targets[r, t]))
  expected = [tuple(s[-length - 1:][:end]) for s in sequences
              for end in range(2, min(len(s), length + 1) + 1)]
  assert sorted(found) == sorted(expected)
  assert len(rows.inputs) == -(-len(expected) // length)  # no room is wasted


def test_orders_are_drawn_and_nothing_to_learn_is_said():
  sequences = [np.arange(i, i + 3) for i in range(20)]
  first, again, other = (
      packing.pack(sequences, 6, np.random.default_rng(seed)).inputs
      for seed in (0, 0, 1))
  np.testing.assert_array_equal(first, again)
  assert (first != other).any()
  with pytest.raises(ValueError, match='nothing to learn'):
    packing.pack([np.array([3])], 6, np.random.default_rng(0))
