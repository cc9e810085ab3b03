"""Tests of the bucketed facts."""

import dataclasses

import hypothesis
import numpy as np
import pytest
from sklearn.feature_extraction import text as feature_text

from dgr2_jax.data import facts
from dgr2_jax.data import histories
from dgr2_jax.data import interactions
from tests.data import shoppers


def brute_force(dataset, user, position, candidates):
  """The countable facts of one query by loops over all other users."""
  items = dataset.items
  others = [s[:-2].tolist() for u, s in enumerate(dataset.sequences)
            if u != user]
  history = dataset.sequences[user][:position].tolist()[::-1]  # Latest first.

  def together(i, j):
    return sum(i in s and j in s for s in others)

  def after(i, j):
    return sum((a, b) == (i, j) for s in others for a, b in zip(s, s[1:]))

  leaves = [(items[a].categories, items[b].categories)
            for s in others for a, b in zip(s, s[1:])]
  leaves = [pair for pair in leaves if all(pair)]
  last = items[history[0]].categories
  from_last = [b for a, b in leaves if a == last]

  def closeness(attribute, j):
    value = getattr(items[j], attribute)
    shared = [age for age, i in enumerate(history)
              if value and getattr(items[i], attribute) == value]
    return 0 if not shared else (
        3 if shared[0] == 0 else 2 if shared[0] < facts.RECENT else 1)

  result = []
  for j in candidates.tolist():
    popularity = sum(j in s for s in others)
    leaf = items[j].categories
    result.append(dict(
        popularity=popularity,
        bought_with_last=together(history[0], j),
        bought_with_recent=sum(
            together(i, j) for i in history[:facts.RECENT]),
        bought_with_history=sum(together(i, j) for i in history)
        / max(popularity, 1) ** .5,
        bought_after_last=after(history[0], j),
        bought_after_second_last=(
            after(history[1], j) if len(history) > 1 else 0),
        follows=from_last.count(leaf) / max(len(from_last), 1) if leaf else 0,
        category=closeness('categories', j),
        brand=closeness('brand', j)))
  return result


def measure(dataset, seed=0):
  rng = np.random.default_rng(seed)
  users, positions = map(np.array, zip(*shoppers.queries(dataset)))
  candidates = np.stack([
      rng.permutation(np.setdiff1d(
          np.arange(len(dataset.items)), dataset.sequences[u][:p]))[:10]
      for u, p in zip(users, positions)])
  scores = np.tile(np.linspace(2, 1, 10), (len(users), 1))
  statistics = facts.fit(dataset, histories.flatten(dataset))
  return users, positions, candidates, facts.measure(
      statistics, users, positions, candidates, scores)


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(shoppers.datasets)
def test_facts_equal_counts_without_the_user(dataset):
  users, positions, candidates, measured = measure(dataset)
  for row, (user, position) in enumerate(zip(users, positions)):
    expected = brute_force(dataset, user, position, candidates[row])
    for name in expected[0]:
      np.testing.assert_allclose(
          measured[name][row], [e[name] for e in expected], atol=1e-12,
          err_msg=name)


def test_similarity_and_score_are_shares():
  _, _, _, measured = measure(shoppers.make(5))
  assert measured['similarity'].min() >= 0
  assert measured['similarity'].max() <= 1 + 1e-9
  np.testing.assert_allclose(measured['score'][:, 0], 1.0)


def test_levels_stay_in_range_and_keep_the_order_of_values():
  _, _, _, measured = measure(shoppers.make(6))
  edges = facts.learn_edges(measured)
  wild = {name: np.concatenate([x, x * 100, x * 0])
          for name, x in measured.items()}
  levels = facts.bucket(wild, edges)
  assert levels.dtype == np.int8
  for i, fact in enumerate(facts.FACTS):
    assert 0 <= levels[..., i].min() and levels[..., i].max() < fact.levels
    order = np.argsort(wild[fact.name], axis=None)
    assert np.all(np.diff(levels[..., i].ravel()[order]) >= 0), fact.name


def test_levels_of_counts_are_filled_despite_ties():
  values = {f.name: np.zeros((1, 1)) for f in facts.FACTS}
  values['bought_after_last'] = np.array(
      [[0] * 30 + [1] * 50 + [2] * 9 + [3] * 5 + [4] * 3 + [7, 8, 9]])
  edges = facts.learn_edges(values)['bought_after_last']
  np.testing.assert_array_equal(edges, [2, 3, 4, 7])


def test_names():
  assert facts.index('rank') == 0
  with pytest.raises(ValueError, match="'colour'.*popularity"):
    facts.index('colour')


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(shoppers.datasets)
def test_new_items_are_catalogued_items_that_nobody_bought(dataset):
  """Facts beside five new items equal those of a catalogue that has them."""
  known = len(dataset.items)
  new = tuple(
      interactions.Item(f'n{i}', f'soap number{i} w{i % 4}', categories, brand)
      for i, (categories, brand) in enumerate([
          (('Root', 'Leaf1'), 'B1'), (('Root', 'New'), 'New'), ((), ''),
          (('Root', 'New'), 'B2'), (('Root', 'Leaf3'), 'New')]))
  whole = dataclasses.replace(dataset, items=(*dataset.items, *new))
  rng = np.random.default_rng(0)
  # Further users, whose histories and candidates mix both kinds.
  order = [rng.permutation(known + 5) for _ in range(20)]
  queries = [o[:rng.integers(1, 6)].astype(np.int32) for o in order]
  candidates = np.stack([o[-10:] for o in order])
  users = len(dataset.users) + np.arange(20)
  positions = np.array([len(q) for q in queries])
  scores = np.tile(np.linspace(2, 1, 10), (20, 1))

  flat = histories.flatten(dataset)
  more = histories.extended(flat, queries, len(new))
  got = facts.measure(facts.extended(facts.fit(dataset, flat), more, new),
                      users, positions, candidates, scores)
  flat = histories.flatten(whole)
  statistics = facts.fit(whole, flat)
  want = facts.measure(
      facts.extended(statistics, histories.extended(flat, queries)),
      users, positions, candidates, scores)
  for fact in facts.FACTS:
    if fact.name != 'similarity':  # words weigh by the catalogue alone
      np.testing.assert_array_equal(got[fact.name], want[fact.name], fact.name)
  said = [' '.join((i.title, i.brand, *i.categories)) for i in whole.items]
  rows = feature_text.TfidfVectorizer(sublinear_tf=True).fit(
      said[:known]).transform(said)
  cosine = (rows @ rows.T).toarray()
  for row, query in enumerate(queries):
    np.testing.assert_allclose(
        got['similarity'][row],
        cosine[query[-facts.RECENT:]][:, candidates[row]].max(0), atol=1e-12)
