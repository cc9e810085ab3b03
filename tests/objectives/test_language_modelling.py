"""Packed rows against every example alone, and sums written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.objectives import language_modelling
from tests.models import tiny

T = 16
# Row -> examples, as (length, first learned position).
ROWS = (((6, 1), (7, 4)), ((16, 9),), ((2, 1), (3, 2), (4, 1)))


@pytest.fixture(scope='module')
def setting():
  model, params = tiny.model()
  rng = np.random.default_rng(0)
  tokens = rng.integers(2, 44, (len(ROWS), T))
  start, weight = np.full(tokens.shape, -1), np.zeros(tokens.shape, np.float32)
  for row, examples in enumerate(ROWS):
    begin = 0
    for length, learned_from in examples:
      start[row, begin:begin + length] = begin
      weight[row, begin + learned_from:begin + length] = 1
      begin += length
    tokens[row, begin:] = tiny.VOCABULARY.mask_id  # banned: -inf if it counted
  batch = {'tokens': jnp.asarray(tokens), 'start': jnp.asarray(start),
           'weight': jnp.asarray(weight)}
  return model, params, batch


@pytest.fixture(scope='module')
def by_hand(setting):
  """(log-probability, whether it is the most likely) of learned tokens.

  Every example is a row of its own, read by the AR canvas.
  """
  model, params, batch = setting
  own = [np.asarray(tokens)[begin:begin + length]
         for tokens, examples in zip(batch['tokens'], ROWS)
         for begin, (length, _) in zip(
             np.cumsum([0] + [n for n, _ in examples]), examples)]
  alone = jnp.asarray(np.stack([np.pad(x, (0, T - len(x))) for x in own]))
  canvas = canvas_lib.autoregressive(
      alone[:, :1], jnp.ones(len(own), int), alone[:, None, 1:])
  states = jax.jit(lambda: canvas_lib.states(
      model, params, canvas, tiny.VOCABULARY.mask_id,
      canvas_lib.AUTOREGRESSIVE).clean[:, 0])()
  logits = tiny.VOCABULARY.allow(
      model.apply({'params': params}, states, method='logits'))
  logprobs = np.asarray(jax.nn.log_softmax(logits))  # [examples, T - 1, V]
  return np.array([
      (row[i - 1, tokens[i]], row[i - 1].argmax() == tokens[i])
      for row, tokens, (length, learned_from) in zip(
          logprobs, own, sum(ROWS, ())) for i in range(learned_from, length)])


@pytest.mark.parametrize('head_chunk', [0, 4])
def test_examples_are_scored_as_if_alone(setting, by_hand, head_chunk):
  model, params, batch = setting
  function = lambda f: jax.jit(lambda batch: f(
      model, params, batch, tiny.VOCABULARY, head_chunk))(batch)
  loss, measured = function(language_modelling.loss)
  np.testing.assert_allclose(loss.value, -by_hand[:, 0].mean(), rtol=1e-5)
  np.testing.assert_allclose(
      measured['top1'].value, by_hand[:, 1].mean(), rtol=1e-6)
  assert measured['tokens'] == sum(n for row in ROWS for n, _ in row)
  weight, logprob, _ = function(language_modelling.token_scores)
  np.testing.assert_allclose(
      np.asarray(logprob)[np.asarray(weight) > 0], by_hand[:, 0], rtol=1e-4,
      atol=1e-5)


def test_weights_weigh_and_padding_does_not_count(setting, by_hand):
  model, params, batch = setting
  want = by_hand[:, 0]
  weights = np.random.default_rng(1).uniform(.5, 2, len(want))
  weight = np.array(batch['weight'])
  weight[weight > 0] = weights
  batch = batch | {'weight': jnp.asarray(weight)}
  function = jax.jit(jax.value_and_grad(
      lambda params, batch: language_modelling.loss(
          model, params, batch, tiny.VOCABULARY, 4)[0].value))
  loss, gradient = function(params, batch)
  np.testing.assert_allclose(loss, -(weights * want).sum() / weights.sum(),
                             rtol=1e-5)
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))
  tokens = np.array(batch['tokens'])
  tokens[np.asarray(batch['start']) < 0] = 7
  other, other_gradient = function(
      params, batch | {'tokens': jnp.asarray(tokens)})
  np.testing.assert_allclose(other, loss, rtol=1e-6)
  for got, wanted in zip(*map(jax.tree.leaves, (other_gradient, gradient))):
    np.testing.assert_allclose(got, wanted, atol=1e-6)
