"""Trained retrievers: what they score, and what their lists may have seen."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from dgr2_jax.data import histories as histories_lib
from dgr2_jax.data import interactions
from dgr2_jax.data import requests
from dgr2_jax.objectives import language_modelling
from dgr2_jax.retrieval import cooccurrence
from dgr2_jax.retrieval import lists
from dgr2_jax.retrieval import packing
from dgr2_jax.retrieval import retrievers
from dgr2_jax.retrieval import sasrec
from tests.data import shoppers

DATASET = shoppers.make(0, num_users=30, num_items=24)
HISTORIES = histories_lib.flatten(DATASET)
IDS = np.stack(np.unravel_index(np.arange(24) * 5 % 27, (3, 3, 3)), 1)
SMALL = {
    'sasrec': dict(width=8, layers=1, heads=2, history=6),
    'generative': dict(width=16, layers=1, heads=2, mlp=16, history=6,
                       item_dropout=0., beams=24)}
TRAINING = dict(batch_rows=4, epochs=1, folds=2, warmup_steps=1)
KINDS = tuple(SMALL)


def config(kind, **changes):
  section = cooccurrence.default_config()
  section.kind = kind
  section[kind] = {**SMALL[kind], **TRAINING, **changes}
  return ml_collections.ConfigDict(dict(
      path='', num_candidates=10, keep_misses=False, max_train_requests=0,
      seed=0, retriever=section))


def make(kind, **changes):
  return retrievers.make(config(kind, **changes), 24, IDS)


# Compiled once for all tests.
SHARED = {kind: make(kind) for kind in KINDS}


def queries():
  return map(np.array, zip(*shoppers.queries(DATASET)))


def next_log_probs(kind, params, history):
  """float [I] of one history, nothing packed, padded or searched."""
  return np.array(_next_log_probs(kind, params, jnp.asarray(history[-6:])))


@functools.partial(jax.jit, static_argnums=0)
def _next_log_probs(kind, params, latest):
  retriever = SHARED[kind]
  if kind == 'sasrec':
    inputs = latest[None]
    states = sasrec.SasRec(retriever.config, 24).apply(
        {'params': params}, inputs, jnp.ones_like(inputs),
        jnp.arange(len(latest))[None], True)
    return jax.nn.log_softmax(states[0, -1] @ params['items'].T)
  # Every item's tokens behind the history, as training lays them out.
  tokens = jnp.asarray(1 + np.arange(3) * 3 + IDS)
  start = jnp.append(0, tokens[latest])
  inputs = jnp.concatenate(
      [jnp.broadcast_to(start, (24, len(start))), tokens[:, :-1]], 1)
  states = language_modelling.hidden_states(
      retriever.model, params, inputs, jnp.zeros_like(inputs))
  log_probs = jax.nn.log_softmax(retriever.model.apply(
      {'params': params}, states[:, -3:], method='logits'))
  return jnp.take_along_axis(log_probs, tokens[..., None], 2).sum((1, 2))


@pytest.mark.parametrize('kind', KINDS)
def test_lists_are_the_best_items_outside_of_the_history(kind):
  params = SHARED[kind].init(jax.random.key(1))
  params = jax.tree.map(lambda x: 3 * x, params)  # sharper
  users, positions = queries()
  chosen = np.r_[0:len(users):9, positions.argmax()]  # one longer than is read
  users, positions = users[chosen], positions[chosen]
  assert positions.max() > 6
  found, scores = lists.top(
      SHARED[kind], params, HISTORIES, users, positions, 10)
  for row, (user, position) in enumerate(zip(users, positions)):
    history = DATASET.sequences[user][:position]
    expected = next_log_probs(kind, params, history)
    expected[history] = -np.inf
    best = np.argsort(-expected)[:10]
    np.testing.assert_array_equal(found[row], best)
    np.testing.assert_allclose(scores[row], expected[best], atol=1e-4)


@pytest.mark.parametrize('kind', KINDS)
def test_loss_is_the_mean_over_the_targets(kind):
  params = SHARED[kind].init(jax.random.key(1))
  histories = [s[:7] for s in DATASET.sequences if len(s) > 2]
  retriever = SHARED[kind]
  if kind == 'sasrec':
    retriever = make(kind, dropout=0.)
  rng = np.random.default_rng(0)
  rows = packing.pack(
      retriever.sequences(histories, rng), retriever.row_length, rng)
  loss = jax.jit(retriever.loss)(params, rows, jax.random.key(0))
  if kind == 'sasrec':
    expected = -np.mean([next_log_probs(kind, params, h[:end])[h[end]]
                         for h in histories for end in range(1, len(h))])
  else:
    # Per token; the first item, behind an empty history, is learned too.
    expected = -np.mean([next_log_probs(kind, params, h[:end])[h[end]] / 3
                         for h in histories for end in range(len(h))])
  np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_training_finds_what_follows_what():
  """Items i, i + 1, ... : the next one is certain."""
  rng = np.random.default_rng(0)
  sequences = tuple(
      (rng.integers(24) + np.arange(8)).astype(np.int32) % 24
      for _ in range(40))
  h = histories_lib.flatten(dataclasses.replace(
      DATASET, users=tuple(map(str, range(40))), sequences=sequences))
  retriever = make('sasrec', epochs=60, learning_rate=.02, dropout=.1,
                   width=16)
  params, _ = lists.fit(retriever, h)
  users = np.arange(40)
  found, _ = lists.top(retriever, params, h, users, h.length - 1, 10)
  assert lists.figures(
      found, h.items[h.start + h.length - 1])['recall@5'] > .9


def rebuilt(change):
  """The histories with every user's sequence changed."""
  return histories_lib.flatten(dataclasses.replace(
      DATASET, sequences=tuple(map(change, DATASET.sequences))))


def other(history, purchases):
  """As many other items, none of the history."""
  unused = np.setdiff1d(np.arange(24), np.concatenate([history, purchases]))
  return unused[:len(purchases)].astype(np.int32)


@pytest.mark.parametrize('kind', KINDS)
def test_held_out_purchases_are_not_trained_on(kind):
  held = lambda s: np.concatenate([s[:-2], other(s[:-2], s[-2:])])
  fits = [lists.fit(SHARED[kind], h)[0]
          for h in (HISTORIES, rebuilt(held))]
  jax.tree.map(np.testing.assert_array_equal, *fits)


@pytest.mark.parametrize('kind', KINDS)
def test_training_lists_know_of_their_user_only_the_history(kind):
  """Other purchases from the target on, of one user, change no list of his."""
  users, positions = queries()
  train = positions < HISTORIES.training_length[users]
  users, positions = users[train], positions[train]
  listed = lists.cross_fitted(
      SHARED[kind], HISTORIES, users, positions, 10, epochs=1)
  changed_others = False
  for user in (3, 7):
    cut = int(HISTORIES.training_length[user]) // 2
    sequences = list(DATASET.sequences)
    s = sequences[user]
    sequences[user] = np.concatenate([s[:cut], other(s[:cut], s[cut:])])
    assert len(sequences[user]) == len(s)
    h = histories_lib.flatten(
        dataclasses.replace(DATASET, sequences=tuple(sequences)))
    again = lists.cross_fitted(
        SHARED[kind], h, users, positions, 10, epochs=1)
    own = (users == user) & (positions <= cut)
    assert own.any()
    np.testing.assert_array_equal(listed[own], again[own])
    changed_others |= (listed[users != user] != again[users != user]).any()
  assert changed_others


@pytest.mark.parametrize('kind', KINDS)
def test_requests_from_a_trained_retriever(kind):
  sets = requests.build_requests(DATASET, config(kind), IDS)
  for split in requests.SPLITS:
    for r in getattr(sets, split):
      assert r.target in r.candidates
      assert not np.isin(r.candidates, r.history).any()
      np.testing.assert_allclose(r.scores, 1 / np.arange(1, 11))
  evaluated = {k: s.evaluated for k, s in sets.summaries.items()}
  assert evaluated == {
      'train': int((HISTORIES.training_length - 1).sum()),
      'validation': 30, 'test': 30}


@pytest.mark.parametrize('change, message', [
    (dict(kind='oracle'), "kind is 'oracle': expected one of cooccurrence"),
    (dict(windw=3), 'retriever.windw is unknown'),
    (dict(sasrec=dict(widht=3)), 'retriever.sasrec: a field too many'),
    (dict(sasrec=dict(heads=5)), 'heads is 5: expected a divisor'),
    (dict(sasrec=dict(dropout=1.)), 'dropout is 1.0'),
    (dict(generative=dict(beams=0)), 'beams is 0: expected a whole number'),
    (dict(generative=dict(folds=1)), 'folds is 1: expected a whole number'),
    (dict(generative=dict(learning_rate=0.)), 'learning_rate is 0.0'),
])
def test_bad_fields_are_named(change, message):
  section = cooccurrence.default_config()
  for name, value in change.items():
    section[name] = value
  with pytest.raises(ValueError, match=message):
    retrievers.check(section)


def test_what_does_not_fit_the_data_is_named():
  with pytest.raises(ValueError, match='needs semantic ids'):
    requests.build_requests(DATASET, config('generative'))
  with pytest.raises(ValueError, match='have the same semantic id'):
    requests.build_requests(DATASET, config('generative'), IDS * 0)
  with pytest.raises(interactions.DataError, match='fewer than 20 candidates'):
    c = config('sasrec')
    c.num_candidates = 20
    requests.build_requests(DATASET, c)
  with pytest.raises(ValueError, match='folds is 31: expected at most'):
    lists.cross_fitted(make('sasrec', folds=31), HISTORIES, np.array([0]),
                       np.array([1]), 5, epochs=1)
