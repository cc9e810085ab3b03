"""Noise, supervision and the loss."""

import dataclasses
import functools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.objectives import denoising
from dgr2_jax.objectives import scoring
from tests.models import reference
from tests.models import tiny

V = tiny.VOCABULARY


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def loss(params, batch, canvas, config, model, key=jax.random.key(5)):
  return denoising.loss(model, params, batch, key, canvas, config, V)[0].value


@functools.partial(jax.jit, static_argnums=(0, 3))
def states_of(model, params, canvas, config):
  return canvas_lib.states(model, params, canvas, V.mask_id, config)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.booleans(), st.integers(0, 10**6))
def test_masks_partition_the_maskable_positions(block_size, shifted, seed):
  config = canvas_lib.CanvasConfig(
      block_size, alignment='shifted' if shifted else 'same_position')
  masks = np.asarray(denoising.complementary_masks(
      jax.random.key(seed), 6, config, denoising.DenoisingConfig()))
  assert masks.shape == (6, 2, block_size)
  assert not (masks[:, 0] & masks[:, 1]).any()
  covered = masks.any(1)
  assert covered[:, 1:].all() and (covered[:, 0] == (not shifted)).all()
  assert (masks[:, 0].sum(-1) >= 1).all()


def test_mask_ratio_is_uniform_and_full_blocks_come_as_often_as_asked():
  config = canvas_lib.CanvasConfig(8)
  masks = denoising.complementary_masks(
      jax.random.key(0), 20000, config,
      denoising.DenoisingConfig(full_block_prob=.25))
  full = np.asarray(masks[:, 0].all(-1))
  assert abs(full.mean() - .25) < .02
  assert not masks[:, 1][full].any()
  count = np.asarray(masks[:, 0].sum(-1))[~full]
  share = np.bincount(count, minlength=8)[1:] / len(count)
  # round(t * 7): 0 and 1 both give 1; 7 has half a cell.
  np.testing.assert_allclose(
      share, np.array([1.5, 1, 1, 1, 1, 1, .5]) / 7, atol=.02)


def test_noise_depends_on_the_example_alone():
  config = canvas_lib.CanvasConfig(4)
  batch = tiny.batch(n=4)
  draw = functools.partial(denoising.noised_canvas, key=jax.random.key(1),
                           config=config, noise=denoising.DenoisingConfig())
  masked = draw(batch).masked
  order = jnp.array([2, 0, 3])
  np.testing.assert_array_equal(
      draw(jax.tree.map(lambda x: x[order], batch)).masked, masked[order])
  assert (masked[0] != masked[1]).any()
  assert (masked[0, 0] != masked[0, 1]).any()  # rollouts differ


@pytest.mark.parametrize('ar_weight, given_tokens, pairs', [
    (0., 0, 1), (.5, 0, 1), (.5, 3, 1), (.5, 3, 3)])
def test_every_token_through_the_last_block_is_supervised_once(
    ar_weight, given_tokens, pairs):
  config = canvas_lib.CanvasConfig(4)
  weights = denoising.DenoisingConfig(
      reasoning_weight=.5, answer_weight=2., ar_weight=ar_weight,
      mask_pairs=pairs)
  batch = tiny.batch()
  batch['supervised_from'] = jnp.full_like(
      batch['response_length'], given_tokens)
  canvas = denoising.noised_canvas(batch, jax.random.key(0), config, weights)
  clean, noisy = map(np.asarray, denoising.supervision(
      batch, canvas, config, weights))
  n, g, length = clean.shape
  for i, j in np.ndindex(n, g):
    got = np.zeros(length)
    for m, b in np.ndindex(*noisy.shape[2:]):
      got[int(canvas.start[i, j, m]) + b] += noisy[i, j, m, b]
    count = int(batch['response_length'][i, j])
    for t in range(length):
      weight = 2. if t >= min(2, count) else .5
      weight *= t >= given_tokens
      seed = t % 4 == 0
      want_noisy = weight * (not seed) * (t < -(-count // 4) * 4)
      want_clean = weight * (1 if seed else ar_weight) * (t < count)
      assert got[t] == pytest.approx(want_noisy)
      assert clean[i, j, t] == pytest.approx(want_clean)


@pytest.mark.parametrize('pairs, ar_weight', [(1, 0.), (2, .5)])
def test_displaced_blocks_supervise_every_token_once(pairs, ar_weight):
  """[0, offset), then blocks from a random offset on; brute force by token."""
  config = canvas_lib.CanvasConfig(4)
  weights = denoising.DenoisingConfig(
      ar_weight=ar_weight, mask_pairs=pairs, random_offset=True)
  batch = tiny.batch(n=6)
  seen = set()
  for key in range(3):
    canvas = denoising.noised_canvas(
        batch, jax.random.key(key), config, weights)
    clean, noisy = map(np.asarray, denoising.supervision(
        batch, canvas, config, weights))
    n, g, length = clean.shape
    blocks = length // 4 + 1
    assert canvas.start.shape == (n, g, 2 * pairs * blocks)
    for i, j in np.ndindex(n, g):
      starts = np.asarray(canvas.start[i, j]).reshape(pairs, blocks, 2)
      offset = int(starts[0, 1, 0])
      seen.add(offset)
      want = [0, *range(offset, offset + length, 4)]
      assert (starts == np.array(want)[:, None]).all()
      got = np.zeros(length + 8)
      for m, b in np.ndindex(*noisy.shape[2:]):
        got[int(canvas.start[i, j, m]) + b] += noisy[i, j, m, b]
        assert not noisy[i, j, m, b] or canvas.masked[i, j, m, b]
      assert not got[length:].any()
      count = int(batch['response_length'][i, j])
      last = next(e for e in (offset + 4 * k for k in range(9)) if e >= count)
      for t in range(length):
        weight = 1. if t >= min(2, count) else .5
        seed = t in want
        assert got[t] == pytest.approx(weight * (not seed) * (t < last))
        assert clean[i, j, t] == pytest.approx(
            weight * (1 if seed else ar_weight) * (t < count))
  assert seen == {1, 2, 3, 4}


def test_block_of_one_is_the_ar_model():
  """Invariant 1: loss and gradient equal a plain causal transformer's."""
  model, params = tiny.model()
  batch = tiny.batch(n=2)
  config = denoising.DenoisingConfig(reasoning_weight=.5, answer_weight=1.)
  rows = jax.tree.map(np.asarray, batch)

  def plain(params):
    total, weights = 0., 0.
    for n, g in np.ndindex(2, 2):
      length = int(rows['response_length'][n, g])
      prompt = rows['prompt'][n, :int(rows['prompt_length'][n])]
      logprob, _ = reference.causal_logprobs(
          params, model.config, V.banned, prompt,
          rows['response'][n, g, :length])
      weight = jnp.where(jnp.arange(length) < 2, .5, 1.)
      total -= (weight * logprob).sum()
      weights += weight.sum()
    return total / weights

  canvas = canvas_lib.CanvasConfig(1)
  got = jax.value_and_grad(loss)(params, batch, canvas, config, model)
  want = jax.jit(jax.value_and_grad(plain))(params)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(
      a, b, rtol=1e-4, atol=2e-5), got, want)


@pytest.mark.parametrize('alignment, ar_weight, random_offset', [
    ('shifted', 0., False), ('shifted', .5, False), ('shifted', 0., True),
    ('same_position', .5, False)])
def test_loss_equals_a_sum_over_brute_force_rows(
    alignment, ar_weight, random_offset):
  """Rows dropped before the head and chunks of the head lose nothing."""
  model, params = tiny.model()
  batch = tiny.batch()
  canvas_config = canvas_lib.CanvasConfig(4, alignment=alignment)
  config = denoising.DenoisingConfig(
      ar_weight=ar_weight, random_offset=random_offset)
  key = jax.random.key(5)
  canvas = denoising.noised_canvas(batch, key, canvas_config, config)
  clean, noisy = denoising.supervision(batch, canvas, canvas_config, config)
  states = states_of(model, params, canvas, canvas_config)
  targets = canvas_lib.take_tokens(
      canvas.clean, canvas_lib.block_positions(canvas.start, 4))
  total = 0.
  for weight, state, token in ((clean, states.clean, canvas.clean),
                               (noisy, states.noisy, targets)):
    logprob = jax.nn.log_softmax(V.allow(reference.logits(
        params, model.config, state)))
    logprob = jnp.take_along_axis(logprob, token[..., None], -1)[..., 0]
    total -= jnp.where(weight > 0, weight * logprob, 0).sum()
  want = total / (clean.sum() + noisy.sum())
  chunked = dataclasses.replace(config, head_chunk=5)
  (one, got), (other, gradient) = (
      jax.value_and_grad(loss)(params, batch, canvas_config, c, model)
      for c in (chunked, config))
  assert (float(one), float(other)) == pytest.approx(
      (float(want), float(want)), rel=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(
      a, b, rtol=1e-3, atol=1e-5), got, gradient)


def test_literal_mask_tokens_change_nothing():
  """Invariant 5: a mask id in the text is a token like any other."""
  model, params = tiny.model()
  config = canvas_lib.CanvasConfig(4)
  batch = tiny.batch()
  plain, literal = dict(batch), dict(batch)
  for b, token in ((plain, 43), (literal, V.mask_id)):
    b['prompt'] = batch['prompt'].at[:, 1].set(token)
    b['response'] = batch['response'].at[:, :, 1].set(token)
  draws = [denoising.noised_canvas(b, jax.random.key(0), config,
                                   denoising.DenoisingConfig())
           for b in (plain, literal)]
  np.testing.assert_array_equal(draws[0].masked, draws[1].masked)
  weights = [denoising.supervision(b, d, config, denoising.DenoisingConfig())
             for b, d in zip((plain, literal), draws)]
  jax.tree.map(np.testing.assert_array_equal, *weights)
  # With equal embedding rows the two texts are the same to the model.
  row = params['embedding'][43]
  params = {**params, 'embedding': params['embedding'].at[V.mask_id].set(row)}
  states = [states_of(model, params, d, config)
            for d in draws]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
               *states)


def test_gather_rows_keeps_the_supervised_rows_in_order():
  weight = jnp.array([[0., 2., 0., 1., 0.], [3., 0., 0., 0., 0.]])
  values = jnp.arange(10.).reshape(2, 5)
  got_weight, got = scoring.gather_rows(weight, 2, values)
  np.testing.assert_array_equal(got_weight, [[2., 1.], [3., 0.]])
  np.testing.assert_array_equal(got[0], [1., 3.])
  assert got[1, 0] == 5.


def test_errors_name_the_field():
  with pytest.raises(ValueError, match='ar_weight needs'):
    loss(tiny.model()[1], tiny.batch(),
         canvas_lib.CanvasConfig(4, 'block_causal'),
         denoising.DenoisingConfig(ar_weight=.1), tiny.model()[0])
  with pytest.raises(ValueError, match='random_offset needs'):
    loss(tiny.model()[1], tiny.batch(),
         canvas_lib.CanvasConfig(4, 'block_causal'),
         denoising.DenoisingConfig(random_offset=True), tiny.model()[0])
  with pytest.raises(ValueError, match='multiple of the block size 5'):
    loss(tiny.model()[1], tiny.batch(), canvas_lib.CanvasConfig(5),
         denoising.DenoisingConfig(), tiny.model()[0])
  with pytest.raises(ValueError, match='min_ratio=2'):
    denoising.DenoisingConfig(min_ratio=2)
