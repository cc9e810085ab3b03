"""Tests of the embedded catalogue, its shoppers and their oracle."""

import itertools

import ml_collections
import numpy as np
import pytest

from dgr2_jax.data import embedded
from dgr2_jax.data import interactions

_SMALL = embedded.EmbeddedConfig(
    seed=5, num_users=50, num_items=60, num_brands=5, max_length=9)


def _equal(a, b):
  return (a.items == b.items and a.users == b.users
          and all(np.array_equal(s, t)
                  for s, t in zip(a.sequences, b.sequences, strict=True)))


def test_is_a_function_of_its_configuration():
  data = embedded.generate(_SMALL)
  fields = dict(seed=5, num_users=50, num_items=60, num_brands=5, max_length=9)
  assert _equal(data, embedded.generate(fields))
  assert _equal(data, embedded.generate(ml_collections.ConfigDict(fields)))
  other = embedded.generate(dict(fields, seed=6))
  assert other.items != data.items


@pytest.mark.parametrize('seed', range(3))
def test_catalogue_and_shoppers(seed):
  config = embedded.EmbeddedConfig(seed=seed)
  data = embedded.generate(config)
  assert len(data.items) == config.num_items
  assert len({i.item_id for i in data.items}) == config.num_items
  assert len({i.title for i in data.items}) == config.num_items
  for item in data.items:
    assert item.categories[0] == 'Beauty' and len(item.categories) == 3
    assert item.title.startswith(f'{item.brand} ')
    assert item.price > 0
  assert len({i.categories for i in data.items}) == 31
  assert len({i.brand for i in data.items}) == config.num_brands
  # Brands span categories.
  for brand in {i.brand for i in data.items}:
    assert len({i.categories[1] for i in data.items if i.brand == brand}) >= 4

  lengths = np.array([len(s) for s in data.sequences])
  assert (lengths.min(), lengths.max()) == (5, 14)
  assert all(len(np.unique(s)) == len(s) for s in data.sequences)
  count = np.sort(np.bincount(np.concatenate(data.sequences)))
  assert count[0] >= 20
  assert count[-30:].sum() > 2.5 * count[:30].sum()  # popularity is skewed
  filtered = interactions.dataset(
      data.name, {i.item_id: i for i in data.items}, interactions.as_log(data),
      5, 'file', 0, 'embedded')
  assert _equal(filtered, data)


def test_shoppers_follow_routines_and_brands():
  config = embedded.EmbeddedConfig()
  data = embedded.generate(config)
  following = {}
  for routines in embedded.ROUTINES.values():
    for routine in routines:
      for step, leaf in enumerate(routine):
        following[leaf[0]] = routine[(step + 1) % len(routine)][0]
  leaf = [i.categories[-1] for i in data.items]
  steps = [following[leaf[a]] == leaf[b]
           for s in data.sequences for a, b in itertools.pairwise(s)]
  assert 0.6 < np.mean(steps) < 0.66
  brand = [i.brand for i in data.items]
  top_two = []
  for s in data.sequences:
    _, count = np.unique([brand[i] for i in s], return_counts=True)
    top_two.append(np.sort(count)[-2:].sum() / len(s))
  assert np.mean(top_two) > 0.75


def _oracle_by_definition(config, history):
  """p(i | h) of the module docstring with plain loops over brand pairs."""
  world = embedded._world(config)
  brands = embedded.BRANDS[:config.num_brands]
  pairs = list(itertools.combinations(brands, 2))

  def next_item(past, pair):
    last = world.leaf[past[-1]] if past else -1
    s, noise = np.zeros(config.num_items), np.zeros(config.num_items)
    for i, item in enumerate(world.items):
      if i not in past:
        noise[i] = world.popularity[i]
        s[i] = (world.transition[last, world.leaf[i]] * noise[i]
                * (config.loyalty if item.brand in pair else 1))
    return (1 - config.noise) * s / s.sum() + config.noise * noise / noise.sum()

  likelihood = [
      np.prod([next_item(history[:t], pair)[history[t]]
               for t in range(len(history))]) for pair in pairs]
  return sum(w * next_item(history, pair) for w, pair in zip(
      likelihood / np.sum(likelihood), pairs))


def test_oracle_is_bayes_rule():
  data = embedded.generate(_SMALL)
  histories = [data.sequences[u][:n] for u, n in enumerate((0, 1, 4, 8, 4))]
  got = embedded.oracle_probabilities(_SMALL, data, histories)
  for row, history in zip(got, histories):
    want = _oracle_by_definition(_SMALL, history.tolist())
    np.testing.assert_allclose(row, want, rtol=1e-9, atol=1e-15)
    assert row[history].tolist() == [0.0] * len(history)
  np.testing.assert_allclose(got.sum(1), 1, rtol=1e-9)


def test_oracle_is_calibrated():
  config = embedded.EmbeddedConfig(seed=1)
  data = embedded.generate(config)
  target = np.array([s[-1] for s in data.sequences])
  p = embedded.oracle_probabilities(
      config, data, [s[:-1] for s in data.sequences])
  top = p.max(1)
  right = p.argmax(1) == target
  # Whatever it is sure of happens as often as it says.
  for low, high in ((0, 0.2), (0.2, 0.5), (0.5, 1)):
    rows = (top >= low) & (top < high)
    error = np.sqrt((top * (1 - top))[rows].sum())
    assert abs(right[rows].sum() - top[rows].sum()) < 4 * error


def test_oracle_of_a_filtered_catalogue():
  data = embedded.generate(_SMALL)
  history = data.sequences[0][:3]
  kept = np.setdiff1d(np.arange(60), [i for i in range(9) if i not in history])
  filtered = interactions.Dataset(
      'filtered', tuple(data.items[i] for i in kept), (), ())
  got = embedded.oracle_probabilities(
      _SMALL, filtered, [np.searchsorted(kept, history)])
  want = embedded.oracle_probabilities(_SMALL, data, [history])
  np.testing.assert_array_equal(got, want[:, kept])
  with pytest.raises(ValueError, match='not an item of this configuration'):
    embedded.oracle_probabilities(dict(seed=1), data, [])


@pytest.mark.parametrize('seed', range(3))
def test_reading_the_history_beats_counting_co_purchases(seed):
  """The documented band, with a symmetric counting retriever."""
  config = embedded.EmbeddedConfig(seed=seed)
  data = embedded.generate(config)
  bought = [s[:-2] for s in data.sequences]
  together = np.zeros((config.num_items, config.num_items))
  for s in bought:
    for a, b in itertools.combinations(range(len(s)), 2):
      together[s[a], s[b]] += 0.6 ** (b - a)
      together[s[b], s[a]] += 0.6 ** (b - a)
  histories = [s[:-1] for s in data.sequences]
  score = np.array([
      (together[h] * 0.7 ** np.arange(len(h))[::-1, None]).sum(0)
      for h in histories])
  for row, h in zip(score, histories):
    row[h] = -1
  lists = np.argsort(-score, axis=1)[:, :10]
  target = np.array([s[-1] for s in data.sequences])
  hit = (lists == target[:, None]).any(1)
  assert 0.35 < hit.mean() < 0.6
  floor = (lists[:, 0] == target)[hit].mean()
  p = np.take_along_axis(
      embedded.oracle_probabilities(config, data, histories), lists, axis=1)
  best = np.take_along_axis(lists, p.argmax(1)[:, None], axis=1)[:, 0]
  oracle = (best == target)[hit].mean()
  assert 0.25 < floor < 0.45
  assert floor + 0.2 < oracle < 0.8


@pytest.mark.parametrize('fields,message', [
    (dict(num_user=3), "data.embedded: .*'num_user'"),
    (dict(num_items=20), 'data.embedded.num_items is 20: expected at least 31'),
    (dict(num_items=10_000), 'data.embedded.num_items is 10000: expected at m'),
    (dict(num_brands=1), 'num_brands is 1: expected between 2 and 24'),
    (dict(min_length=15), 'min_length is 15'),
    (dict(routine=0.9, skip=0.1), 'routine is 0.9: expected routine . skip'),
    (dict(noise=1.0), 'noise is 1.0'),
])
def test_bad_configurations(fields, message):
  with pytest.raises(ValueError, match=message):
    embedded.generate(fields)
