"""Fused commit passes against uncached forwards."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgr2_jax.decoding import block_decoder
from dgr2_jax.models import canvas as canvas_lib
from tests.decoding.test_block_decoder import decode
from tests.models import tiny

V = tiny.VOCABULARY
NEVER = block_decoder.NEVER
RULES = list(itertools.product(('token_causal', 'block_causal'),
                               ('shifted', 'same_position')))


@functools.partial(jax.jit, static_argnums=(0, 6))
def scores(model, params, batch, tokens, start, masked, canvas):
  """Logits of a block canvas of the first request's response, uncached."""
  board = canvas_lib.Canvas(
      batch['prompt'][:1], batch['prompt_length'][:1], tokens[None, None],
      start[None, None, None], masked[None, None, None])
  states = canvas_lib.states(model, params, board, V.mask_id, canvas)
  return V.allow(model.apply(
      {'params': params}, states.noisy[0, 0, 0], method='logits'))


def fused_by_hand(model, params, batch, canvas, threshold, length):
  """Tokens and calls of the first request's greedy fused decoding."""
  b = canvas.block_size
  tokens = np.full(length, V.eos_id)
  call = np.full(length, NEVER)
  calls = 1

  def ended():
    stands = np.cumprod(call < NEVER).astype(bool)
    return (tokens[stands] == V.eos_id).any()

  for start in range(0, length, b):
    block = slice(start, start + b)
    while (call[block] == NEVER).any() and not ended():
      masked = call[block] == NEVER
      probability = np.asarray(jax.nn.softmax(scores(
          model, params, batch, jnp.array(tokens), jnp.array(start),
          jnp.array(masked), canvas)))
      chosen = masked & (probability.max(-1) >= threshold) & (threshold < 1)
      seed = canvas.shifted and masked[0]
      chosen[0 if seed else np.argmax(
          np.where(masked, probability.max(-1), -1))] = True
      now = calls
      if seed and not start:  # The prefill gives the first one, alone.
        chosen[1:], now = False, 0
      tokens[block] = np.where(chosen, probability.argmax(-1), tokens[block])
      call[block] = np.where(chosen, now, call[block])
      calls += now > 0
  return tokens, call, calls


@pytest.mark.parametrize('clean_stream, alignment', RULES)
def test_fused_commits_are_denoising_steps_of_the_next_block(
    clean_stream, alignment):
  model, params = tiny.model()
  batch = tiny.batch()
  canvas = canvas_lib.CanvasConfig(4, clean_stream, alignment)
  for threshold in (1., .6, .2):
    got = decode(model, params, batch, canvas, threshold, fused=True)
    tokens, call, calls = fused_by_hand(model, params, batch, canvas,
                                        threshold, 12)
    assert got.calls[0, 0] == calls
    np.testing.assert_array_equal(got.call[0, 0], call)
    np.testing.assert_array_equal(got.tokens[0, 0][call < NEVER],
                                  tokens[call < NEVER])
    # One forward a denoising step, and the prefill.
    for row, count in zip(np.asarray(got.call).reshape(-1, 12),
                          np.ravel(got.calls)):
      assert count == 1 + len(set(row[row < NEVER].tolist()) - {0})


def test_fused_rows_do_not_depend_on_their_neighbours():
  model, params = tiny.model()
  batch = tiny.batch(n=5)
  canvas = canvas_lib.CanvasConfig(4)
  together = decode(model, params, batch, canvas, .3, fused=True,
                    temperature=.7, num_rollouts=2)
  alone = decode(model, params, {k: v[3:4] for k, v in batch.items()}, canvas,
                 .3, fused=True, temperature=.7, num_rollouts=2)
  for name in ('tokens', 'call', 'calls'):
    np.testing.assert_array_equal(getattr(together, name)[3:4],
                                  getattr(alone, name))


def test_the_fused_forward_is_the_first_step_of_the_cap():
  model, params = tiny.model()
  got = decode(model, params, tiny.batch(), canvas_lib.CanvasConfig(4),
               fused=True, max_denoising_steps=2)
  for row in np.asarray(got.call).reshape(-1, 12):
    for block in row.reshape(3, 4)[1:]:
      assert len(set(block[block < NEVER].tolist())) <= 2


def test_a_block_of_one_is_not_fused():
  model, params = tiny.model()
  batch = tiny.batch()
  plain, fused = (decode(model, params, batch, canvas_lib.AUTOREGRESSIVE,
                         fused=fused) for fused in (False, True))
  jax.tree.map(np.testing.assert_array_equal, plain, fused)
