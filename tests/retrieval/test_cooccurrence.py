"""Tests of co-occurrence retrieval."""

import dataclasses

import hypothesis
import numpy as np
import pytest

from dgr2_jax.data import histories
from dgr2_jax.data import interactions
from dgr2_jax.retrieval import cooccurrence
from tests.data import shoppers


def fit(dataset, **changes):
  config = cooccurrence.default_config()
  config.update(dict(changes))
  return cooccurrence.fit(dataset, histories.flatten(dataset), config)


def brute_force(dataset, config, user, position):
  """Scores of one query by loops over all users but its own."""
  num_items = len(dataset.items)
  weights = np.zeros((num_items, num_items))
  popularity = np.zeros(num_items)
  for other, sequence in enumerate(dataset.sequences):
    if other == user:
      continue
    training = sequence[:-2].tolist()
    for p, i in enumerate(training):
      popularity[i] += 1
      for q in range(p + 1, len(training)):
        if q - p <= config.window:
          value = (q - p) ** -config.distance_decay
          weights[i, training[q]] += value
          weights[training[q], i] += config.backward * value
  history = dataset.sequences[user][:position].tolist()
  score = np.zeros(num_items)
  for p, i in enumerate(history):
    score += ((position - p) ** -config.recency_decay * weights[i]
              / max(popularity[i], 1) ** config.source_power)
  score /= np.maximum(popularity, 1) ** config.target_power
  score += config.backoff * np.log1p(popularity)
  score[history] = -1
  return score


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(shoppers.datasets)
def test_subtraction_equals_refit_without_the_user(dataset):
  retriever = fit(dataset, window=3, source_power=.7, target_power=.4)
  users, positions = map(np.array, zip(*shoppers.queries(dataset)))
  scores = retriever.scores(users, positions)
  for row, user, position in zip(scores, users, positions):
    expected = brute_force(dataset, retriever.config, user, position)
    np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-9)


def test_a_pair_of_the_user_alone_leaves_no_trace():
  dataset = shoppers.make(0)
  lonely = np.array([18, 19, 3, 4], np.int32)  # Nobody else buys 18 or 19.
  others = tuple(s[~np.isin(s, (18, 19))] for s in dataset.sequences)
  others = tuple(s for s in others if len(s) > 2)
  dataset = dataclasses.replace(
      dataset, sequences=others + (lonely,),
      users=tuple(f'u{i}' for i in range(len(others) + 1)))
  scores = fit(dataset, backoff=0.0).scores([len(others)], [1])
  assert scores[0, 19] == 0.0


def test_history_is_excluded_and_lists_are_sorted():
  dataset = shoppers.make(1)
  retriever = fit(dataset)
  users, positions = map(np.array, zip(*shoppers.queries(dataset)))
  lists = cooccurrence.retrieve(
      retriever, users, positions, 10, hits_only=False)
  np.testing.assert_array_equal(lists.query, np.arange(len(users)))
  assert np.all(np.diff(lists.scores, axis=1) <= 0)
  for row, user, position in zip(lists.candidates, users, positions):
    assert len(set(row.tolist())) == 10
    assert not set(row.tolist()) & set(
        dataset.sequences[user][:position].tolist())


def test_hits_only_keeps_exactly_the_hits():
  dataset = shoppers.make(2)
  # Without weights everything ties but for the hash of the item id.
  for changes in ({}, dict(backoff=0.0, window=1)):
    retriever = fit(dataset, **changes)
    users, positions = map(np.array, zip(*shoppers.queries(dataset)))
    every = cooccurrence.retrieve(
        retriever, users, positions, 4, hits_only=False)
    hits = cooccurrence.retrieve(retriever, users, positions, 4, hits_only=True)
    targets = np.array(
        [dataset.sequences[u][p] for u, p in zip(users, positions)])
    expected = np.flatnonzero((every.candidates == targets[:, None]).any(1))
    np.testing.assert_array_equal(hits.query, expected)
    np.testing.assert_array_equal(hits.candidates, every.candidates[expected])


def test_ties_follow_the_item_id_not_the_catalogue_order():
  dataset = shoppers.make(3)
  back = np.arange(len(dataset.items))[::-1]
  reversed_dataset = dataclasses.replace(
      dataset, items=dataset.items[::-1],
      sequences=tuple(back[s].astype(np.int32) for s in dataset.sequences))
  lists = [
      cooccurrence.retrieve(
          fit(d), *map(np.array, zip(*shoppers.queries(d))), 10,
          hits_only=False)
      for d in (dataset, reversed_dataset)]
  np.testing.assert_array_equal(
      lists[0].candidates, back[lists[1].candidates])


def test_small_catalogue_is_an_error():
  dataset = shoppers.make(4, num_items=12)
  with pytest.raises(interactions.DataError, match='fewer than 10 candidates'):
    cooccurrence.retrieve(
        fit(dataset), *map(np.array, zip(*shoppers.queries(dataset))), 10,
        hits_only=False)


def test_bad_window():
  with pytest.raises(ValueError, match='window is 0'):
    fit(shoppers.make(0), window=0)


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(shoppers.datasets)
def test_new_items_score_as_catalogued_ones_that_nobody_bought(dataset):
  known = len(dataset.items)
  whole = dataclasses.replace(dataset, items=(
      *dataset.items, interactions.Item('n0', '', ('x',)),
      interactions.Item('n1', '', ('x',))))
  queries = [np.array(q, np.int32) for q in (
      [known], [0, known, 3], [1, 2], [known + 1, 4])]
  users, positions = len(dataset.users) + np.arange(4), np.array([1, 3, 2, 2])
  got = cooccurrence.extended(fit(dataset), histories.extended(
      histories.flatten(dataset), queries, 2)).scores(users, positions)
  want = cooccurrence.extended(fit(whole), histories.extended(
      histories.flatten(whole), queries)).scores(users, positions)
  np.testing.assert_array_equal(got, want)
