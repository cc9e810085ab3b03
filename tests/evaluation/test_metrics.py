"""Metrics against hand-computed values and ranx."""

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from dgr2_jax.evaluation import metrics


def test_rank_of_target():
  orders = np.array([[2, 0, 1], [0, 1, 2], [1, 2, -1], [1, 2, -1]])
  ranks = metrics.rank_of_target(orders, np.array([1, 0, 0, -1]))
  assert ranks.tolist() == [3, 1, 0, 0]


def test_rank_of_target_rejects_bad_shapes_and_repeats():
  with pytest.raises(ValueError, match='orders'):
    metrics.rank_of_target(np.zeros((2, 3), int), np.zeros(3, int))
  with pytest.raises(ValueError, match='more than once'):
    metrics.rank_of_target(np.array([[1, 1, 0]]), np.array([1]))
  assert metrics.rank_of_target(
      np.zeros((2, 0), int), np.zeros(2, int)).tolist() == [0, 0]


def test_hand_computed_values():
  ranks = np.array([1, 2, 3, 4, 0])
  np.testing.assert_array_equal(metrics.recall(ranks, 3), [1, 1, 1, 0, 0])
  np.testing.assert_allclose(
      metrics.ndcg(ranks, 3), [1, 1 / np.log2(3), 0.5, 0, 0])
  means = metrics.means(ranks)
  assert means['recall@1'] == 0.2
  assert means['recall@5'] == 0.8
  with pytest.raises(ValueError, match='no requests'):
    metrics.means(np.zeros(0, int))


@hypothesis.given(st.lists(st.integers(0, 12), min_size=1, max_size=30))
def test_metrics_are_shares_that_grow_with_the_cutoff(ranks):
  means = metrics.means(np.array(ranks))
  assert tuple(means) == metrics.METRICS
  assert 0 <= means['recall@1'] <= means['ndcg@3'] <= means['recall@3']
  assert means['recall@3'] <= means['recall@5'] <= 1
  assert means['ndcg@3'] <= means['ndcg@5'] <= means['ndcg@10'] <= 1


def test_agrees_with_ranx():
  # Its array functions: compiling its dictionaries of strings takes a minute.
  theirs = pytest.importorskip('ranx.metrics')
  numba = pytest.importorskip('numba')
  rng = np.random.default_rng(0)
  n, c = 500, 10
  orders = rng.permuted(np.tile(np.arange(c), (n, 1)), axis=1)
  targets = rng.integers(c, size=n)
  missed = rng.random(n) < 0.1
  # (document, relevance) and (document, score), best first; a missed target is
  # a relevant document that nobody ranks.
  qrels = numba.typed.List(
      np.array([[c if miss else target, 1]], np.float64)
      for target, miss in zip(targets, missed))
  run = numba.typed.List(
      np.stack([order, c - np.arange(c)], -1).astype(np.float64)
      for order in orders)
  ours = metrics.per_request(
      metrics.rank_of_target(orders, np.where(missed, -1, targets)))
  for name, values in ours.items():
    function, k = name.split('@')
    expected = getattr(theirs, function)(qrels, run, int(k), 1)
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-9)


def test_recovery():
  floor = {'recall@1': 0.3, 'ndcg@3': 0.4}
  reference = {'recall@1': 0.4, 'ndcg@3': 0.4}
  row = {'recall@1': 0.375, 'ndcg@3': 0.5}
  shares = metrics.recovery(row, floor, reference, ('recall@1', 'ndcg@3'))
  assert shares['recall@1'] == pytest.approx(0.75)
  assert shares['ndcg@3'] is None
