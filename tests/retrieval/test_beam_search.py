"""Beam search over a trie against scoring every item by teacher forcing."""

import functools

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgr2_jax.models import canvas
from dgr2_jax.retrieval import beam_search
from tests.models import tiny

LEVELS, USERS, PROMPT, BOUGHT = 3, 5, 7, 4
VOCABULARY = tiny.VOCABULARY


def catalogue(count=30, codes=6):
  """Unique token rows, levels with tokens of their own: int [count, LEVELS]."""
  rng = np.random.default_rng(0)
  rows = rng.permutation(codes ** LEVELS)[:count]
  ids = np.stack(np.unravel_index(rows, (codes,) * LEVELS), 1)
  return 2 + np.arange(LEVELS) * codes + ids


def requests(seed, items):
  rng = np.random.default_rng(seed)
  return (jnp.asarray(rng.integers(2, 44, (USERS, PROMPT)), jnp.int32),
          jnp.asarray(rng.integers(1, PROMPT + 1, USERS), jnp.int32),
          jnp.asarray([rng.permutation(items)[:BOUGHT]
                       for _ in range(USERS)], jnp.int32).at[0].set(-1))


@functools.partial(jax.jit, static_argnums=0)
def log_probabilities(model, params, prompt, length, clean):
  """[N, I] of responses [N, I, L], teacher-forced."""
  states = canvas.states(
      model, params, canvas.autoregressive(prompt, length, clean),
      VOCABULARY.mask_id, canvas.AUTOREGRESSIVE).clean
  log_probs = jax.nn.log_softmax(VOCABULARY.allow(
      model.apply({'params': params}, states, method='logits')))
  return jnp.take_along_axis(log_probs, clean[..., None], -1)[..., 0].sum(-1)


def exhaustive(model, params, prompt, length, tokens):
  """float [N, I]: log p(tokens of item | prompt), all items teacher-forced."""
  clean = jnp.broadcast_to(tokens, (len(prompt), *tokens.shape))
  return np.asarray(log_probabilities(model, params, prompt, length, clean))


@pytest.fixture(scope='module')
def decoder():
  return tiny.model(num_layers=2)


@st.composite
def catalogues(draw, most=40):
  """Unique token rows of 1 to 4 levels, up to full trees; tokens from 2 on.

  Levels have tokens of their own, or share them, so that a prefix may be the
  end of another id.
  """
  levels = draw(st.sampled_from([3, 4, 2, 1]))
  codes = draw(st.integers(2, int(most ** (1 / levels) + 1e-9)))
  full = codes ** levels
  count = draw(st.sampled_from([full, (full + 1) // 2, 1]))
  rows = np.random.default_rng(draw(st.integers(0, 99))).permutation(full)
  ids = np.stack(np.unravel_index(rows[:count], (codes,) * levels), 1)
  shared = levels * codes > 42 or draw(st.sampled_from([True, False]))
  return 2 + ids + (0 if shared else np.arange(levels) * codes)


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(catalogues(most=200))
def test_trie_is_the_items(tokens):
  trie = jax.tree.map(np.asarray, beam_search.make_trie(tokens))
  levels = tokens.shape[1]
  for node, item in enumerate(trie.items):
    assert trie.path[item, -1] == node
    parent = 0
    for level in range(levels):
      child = trie.path[item, level]
      first = trie.first[level]
      assert first[parent] <= child < first[parent + 1]
      assert trie.tokens[level][child] == tokens[item, level]
      prefix = (tokens[:, :level + 1] == tokens[item, :level + 1]).all(1)
      assert trie.below[level][child] == prefix.sum()
      parent = child
  assert [len(t) for t in trie.tokens] == [
      len(np.unique(tokens[:, :level + 1], axis=0)) for level in range(levels)]


# Each shape of a trie is compiled anew: few examples.
@hypothesis.settings(max_examples=4, deadline=None, derandomize=True,
                     database=None, phases=[hypothesis.Phase.generate])
@hypothesis.given(catalogues(most=27), st.integers(0, 9))
def test_any_catalogue_is_searched_as_by_scoring_all_of_it(
    decoder, tokens, seed):
  model, params = decoder
  items = len(tokens)
  prompt, length, _ = requests(seed, items)
  bought = np.full((USERS, BOUGHT), -1, np.int32)
  rng = np.random.default_rng(seed)
  for row in range(1, USERS):
    kept = rng.permutation(items)[:min(BOUGHT, items - 1)]
    bought[row, :len(kept)] = kept
  found, scores = jax.tree.map(np.asarray, beam_search.search(
      model, params, prompt, length, beam_search.make_trie(tokens),
      jnp.asarray(bought), beams=items, allow=VOCABULARY.allow))
  expected = exhaustive(model, params, prompt, length, tokens)
  for row in range(USERS):
    left = np.setdiff1d(np.arange(items), bought[row])
    assert set(found[row, :len(left)]) == set(left)
    assert (found[row, len(left):] == -1).all()
    np.testing.assert_allclose(
        scores[row, :len(left)], np.sort(expected[row, left])[::-1], atol=1e-4)
    np.testing.assert_allclose(
        scores[row, :len(left)], expected[row, found[row, :len(left)]],
        atol=1e-4)


def test_same_ids_are_refused():
  tokens = catalogue()
  tokens[7] = tokens[3]
  with pytest.raises(ValueError, match='items 3 and 7 have the same semantic'):
    beam_search.make_trie(tokens)


@pytest.mark.parametrize('seed', range(2))
def test_enough_beams_are_exhaustive_scoring(decoder, seed):
  model, params = decoder
  tokens = catalogue()
  prompt, length, bought = requests(seed, len(tokens))
  found, scores = jax.tree.map(np.asarray, beam_search.search(
      model, params, prompt, length, beam_search.make_trie(tokens), bought,
      beams=len(tokens), allow=VOCABULARY.allow))
  expected = exhaustive(model, params, prompt, length, tokens)
  for row in range(USERS):
    left = np.setdiff1d(np.arange(len(tokens)), np.asarray(bought[row]))
    order = left[np.argsort(-expected[row, left])]
    np.testing.assert_array_equal(found[row, :len(left)], order)
    np.testing.assert_allclose(
        scores[row, :len(left)], expected[row, order], atol=1e-4)
    assert (found[row, len(left):] == -1).all()
    assert np.isneginf(scores[row, len(left):]).all()


@pytest.mark.parametrize('seed', range(8))
def test_few_beams_find_real_items_once_and_none_of_the_history(decoder, seed):
  """Whatever the weights, and with scores that are the items' own."""
  model, params = decoder
  tokens = catalogue()
  key = jax.random.key(seed)
  params = jax.tree.map(
      lambda x: x + .5 * jax.random.normal(key, x.shape), params)
  prompt, length, bought = requests(seed, len(tokens))
  found, scores = jax.tree.map(np.asarray, beam_search.search(
      model, params, prompt, length, beam_search.make_trie(tokens), bought,
      beams=4, allow=VOCABULARY.allow))
  expected = exhaustive(model, params, prompt, length, tokens)
  assert (found >= 0).all() and (np.diff(scores) <= 0).all()
  for row in range(USERS):
    assert len(set(found[row])) == 4
    assert not set(found[row]) & set(np.asarray(bought[row]).tolist())
    np.testing.assert_allclose(
        scores[row], expected[row, found[row]], rtol=1e-4, atol=1e-4)


def test_an_exhausted_branch_takes_no_beam(decoder):
  """All items below the likeliest first token are bought but one elsewhere."""
  model, params = decoder
  tokens = catalogue()
  prompt, length, _ = requests(1, len(tokens))
  expected = exhaustive(model, params, prompt, length, tokens)
  best = expected.max(0).argmax()
  branch = np.flatnonzero(tokens[:, 0] == tokens[best, 0])
  bought = jnp.broadcast_to(jnp.asarray(branch, jnp.int32),
                            (USERS, len(branch)))
  found, _ = beam_search.search(
      model, params, prompt, length, beam_search.make_trie(tokens), bought,
      beams=1, allow=VOCABULARY.allow)
  assert (np.asarray(found) >= 0).all()
  assert not np.isin(np.asarray(found), branch).any()
