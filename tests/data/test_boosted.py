"""Tests of the gradient-boosted ranker."""

import dataclasses

import numpy as np
import pytest

from dgr2_jax.data import boosted
from dgr2_jax.data import facts
from dgr2_jax.data import requests
from tests.data import fabricated

CONFIG = boosted.default_config()
CONFIG.update(dict(iterations=40, min_samples_leaf=20))


def learnable(count, first_user=0):
  """Requests whose target mostly is the one of the highest popularity."""
  column = facts.index('popularity')
  result = []
  for i in range(count):
    r = fabricated.request(first_user + i)
    levels = r.facts.copy()
    best = int(levels[:, column].argmax())
    levels[:, column] = np.minimum(levels[:, column], 3)
    levels[best, column] = facts.FACTS[column].levels - 1
    result.append(dataclasses.replace(
        r, facts=levels, target=int(r.candidates[best if i % 5 else i % 10])))
  return result


def recall_at_one(orders, rs):
  return np.mean(orders[:, 0] == requests.target_positions(rs))


def test_learns_a_fact_and_ranks_all_candidates():
  ranker = boosted.fit(learnable(300), CONFIG)
  test = learnable(200, first_user=1000)
  orders = boosted.orders(ranker.scores(test))
  np.testing.assert_array_equal(
      np.sort(orders, axis=1), np.tile(np.arange(10), (200, 1)))
  assert recall_at_one(orders, test) > .5 > recall_at_one(
      np.tile(np.arange(10), (200, 1)), test)


def test_same_seed_same_ranker():
  train, test = learnable(100), learnable(50, 500)
  one, two = (boosted.fit(train, CONFIG).scores(test) for _ in range(2))
  np.testing.assert_array_equal(one, two)


def test_cross_fitted_scores_have_not_seen_the_users_targets():
  train = learnable(120)
  scores = boosted.cross_fitted_scores(train, CONFIG)
  assert scores.shape == (120, 10)
  # Another target for one user leaves that user's scores as they were.
  for user in (0, 7, 63):
    changed = list(train)
    changed[user] = dataclasses.replace(
        train[user], target=int(train[user].candidates[3]))
    again = boosted.cross_fitted_scores(changed, CONFIG)
    np.testing.assert_array_equal(again[user], scores[user])


def test_partial_configuration_and_misses():
  train = learnable(60)
  miss = dataclasses.replace(train[0], target=-1, user=999)
  part = {'iterations': 3, 'min_samples_leaf': 20}
  np.testing.assert_array_equal(
      boosted.fit(train + [miss], part).scores(train),
      boosted.fit(train, part).scores(train))


def test_orders_keep_the_retrievers_order_within_ties():
  np.testing.assert_array_equal(
      boosted.orders(np.array([[1., 3., 1., 3.]])), [[1, 3, 0, 2]])


def test_grades_rise_with_scores_and_cover_their_range():
  scores = np.array([np.zeros(10), np.arange(10.), 40. * np.arange(10)])
  grades = boosted.grades(scores)
  assert np.all(np.diff(grades, axis=1) >= 0)
  assert grades.min() == 0 and grades.max() == boosted.NUM_GRADES - 1
  assert len(set(grades[0].tolist())) == 1


def test_errors():
  with pytest.raises(ValueError, match='no requests'):
    boosted.fit([], CONFIG)
  with pytest.raises(ValueError, match='folds is 5.*users, 2'):
    boosted.cross_fitted_scores(learnable(2), CONFIG)
