"""The canvas against a brute-force mask over one flat row of tokens."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgr2_jax.models import attention
from dgr2_jax.models import canvas as canvas_lib
from tests.models import reference
from tests.models import tiny

RULES = list(itertools.product(('token_causal', 'block_causal'),
                               ('shifted', 'same_position')))


@functools.partial(jax.jit, static_argnums=(0, 3))
def states_of(model, params, canvas, config):
  return canvas_lib.states(model, params, canvas, tiny.VOCABULARY.mask_id,
                           config)


def random_canvas(batch, block_size, m=5, seed=0):
  """Random masks of random blocks: more than any one stage would show."""
  rng = np.random.default_rng(seed)
  n, g, length = batch['response'].shape
  start = rng.integers(0, length // block_size, (n, g, m)) * block_size
  masked = rng.random((n, g, m, block_size)) < .5
  return canvas_lib.Canvas(batch['prompt'], batch['prompt_length'],
                           batch['response'], jnp.asarray(start),
                           jnp.asarray(masked))


def sees(query, key, config):
  """The rule in words; tokens are (stream, rollout, canvas, position, start)."""
  stream, rollout, canvas, position, start = query
  stream_, rollout_, canvas_, position_, _ = key
  if stream_ == 'prompt':
    return stream != 'prompt' or position_ <= position
  if stream == 'prompt' or rollout != rollout_:
    return False
  if stream_ == 'noisy':
    return stream == 'noisy' and canvas == canvas_
  if stream == 'noisy':
    return position_ < start
  if config.clean_stream == 'token_causal':
    return position_ <= position
  return position_ // config.block_size <= position // config.block_size


def brute_force(params, model, canvas, n, config):
  """{token: final state} of request n."""
  length = int(canvas.prompt_length[n])
  tokens, ids = [], []
  for i in range(length):
    tokens.append(('prompt', 0, 0, i, 0))
    ids.append(int(canvas.prompt[n, i]))
  _, g, m, b = canvas.masked.shape
  for rollout in range(g):
    for i in range(canvas.clean.shape[2]):
      tokens.append(('clean', rollout, 0, i, 0))
      ids.append(int(canvas.clean[n, rollout, i]))
    for c, j in itertools.product(range(m), range(b)):
      start = int(canvas.start[n, rollout, c])
      tokens.append(('noisy', rollout, c, start + j, start))
      ids.append(tiny.VOCABULARY.mask_id if canvas.masked[n, rollout, c, j]
                 else int(canvas.clean[n, rollout, start + j]))
  mask = np.array([[sees(q, k, config) for k in tokens] for q in tokens])
  positions = jnp.array([t[3] + (length if t[0] != 'prompt' else 0)
                         for t in tokens])
  states = reference.hidden(params, model.config, jnp.array(ids), positions,
                            jnp.asarray(mask))
  return dict(zip([t[:4] for t in tokens], np.asarray(states)))


@pytest.mark.parametrize('clean_stream, alignment', RULES)
def test_states_equal_brute_force(clean_stream, alignment):
  config = canvas_lib.CanvasConfig(4, clean_stream, alignment)
  model, params = tiny.model()
  canvas = random_canvas(tiny.batch(n=2), 4)
  states = states_of(model, params, canvas, config)
  for n in range(2):
    want = brute_force(params, model, canvas, n, config)
    last = want['prompt', 0, 0, int(canvas.prompt_length[n]) - 1]
    for g, i in np.ndindex(2, 12):
      np.testing.assert_allclose(
          states.clean[n, g, i], want['clean', g, 0, i - 1] if i else last,
          atol=3e-5)
    for g, m, j in np.ndindex(2, 5, 4):
      position = int(canvas.start[n, g, m]) + j
      if alignment == 'same_position':
        state = want['noisy', g, m, position]
      elif j:
        state = want['noisy', g, m, position - 1]
      else:
        state = want['clean', g, 0, position - 1] if position else last
      np.testing.assert_allclose(states.noisy[n, g, m, j], state, atol=3e-5)


def test_complementary_canvases_equal_the_bd3lm_training_mask():
  """[x_t ; x_0] of BD3-LM (2503.09573, section 3.1) on one response.

  x_t sees its own noised block and the clean blocks before it; x_0 sees the
  clean blocks up to its own.
  """
  config = canvas_lib.CanvasConfig(4, 'block_causal', 'same_position')
  model, params = tiny.model()
  batch = tiny.batch(n=1, g=1)
  length, p = 12, int(batch['prompt_length'][0])
  masked = np.random.default_rng(1).random(length) < .5
  canvas = canvas_lib.Canvas(
      batch['prompt'], batch['prompt_length'], batch['response'],
      jnp.array([[[0, 4, 8]]]), jnp.asarray(masked.reshape(1, 1, 3, 4)))
  states = states_of(model, params, canvas, config)
  clean = batch['response'][0, 0]
  tokens = jnp.concatenate([
      batch['prompt'][0, :p],
      jnp.where(masked, tiny.VOCABULARY.mask_id, clean), clean])
  block = np.arange(length) // 4
  mask = np.zeros((p + 2 * length,) * 2, bool)
  mask[:p, :p] = np.tril(np.ones((p, p)))
  mask[p:, :p] = True
  t, zero = slice(p, p + length), slice(p + length, None)
  mask[t, t] = block[:, None] == block
  mask[t, zero] = block[:, None] > block
  mask[zero, zero] = block[:, None] >= block
  positions = jnp.concatenate(
      [jnp.arange(p + length), p + jnp.arange(length)])
  want = reference.hidden(params, model.config, tokens, positions,
                          jnp.asarray(mask))
  np.testing.assert_allclose(states.noisy.reshape(length, -1), want[t],
                             atol=3e-5)


def test_padding_neighbours_and_sharing_change_nothing():
  config = canvas_lib.CanvasConfig(4)
  model, params = tiny.model()
  canvas = random_canvas(tiny.batch(), 4)
  states = states_of(model, params, canvas, config)
  wide = canvas.replace(prompt=jnp.pad(canvas.prompt, ((0, 0), (0, 7)),
                                       constant_values=3))
  padded = states_of(model, params, wide, config)
  # One row a (request, rollout): the prompt is no longer shared.
  rows = canvas_lib.Canvas(
      jnp.repeat(canvas.prompt, 2, 0), jnp.repeat(canvas.prompt_length, 2, 0),
      *(x.reshape(6, 1, *x.shape[2:])
        for x in (canvas.clean, canvas.start, canvas.masked)))
  alone = states_of(model, params, rows, config)
  one = states_of(model, params,
                  jax.tree.map(lambda x: x[1:2], canvas), config)
  for name in ('clean', 'noisy'):
    want = getattr(states, name)
    np.testing.assert_allclose(getattr(padded, name), want, atol=2e-5)
    np.testing.assert_allclose(getattr(alone, name).reshape(want.shape), want,
                               atol=2e-5)
    np.testing.assert_allclose(getattr(one, name), want[1:2], atol=2e-5)


def test_chunks_of_prompts_change_nothing():
  rng = np.random.default_rng(0)
  query, key, value = (rng.normal(size=(2, 9, heads, 6)).astype(np.float32)
                       for heads in (4, 2, 2))
  length = jnp.array([9, 5])

  def outs(query, chunk):
    out = attention.causal(query, key, value, length, chunk=chunk)
    return jnp.where((jnp.arange(9) < length[:, None])[..., None, None], out, 0)

  whole = outs(query, 0)
  gradient = jax.grad(lambda q, chunk: (outs(q, chunk) ** 2).sum())
  for chunk in (1, 4, 9, 20):
    np.testing.assert_allclose(outs(query, chunk), whole, atol=2e-6)
    np.testing.assert_allclose(
        gradient(query, chunk), gradient(query, 0), atol=2e-6)


def test_chunks_of_canvases_change_nothing():
  config = canvas_lib.CanvasConfig(4)
  canvas = random_canvas(tiny.batch(), 4, m=6)

  def states(params, chunk):
    model, _ = tiny.model(canvas_chunk=chunk)
    both = states_of(model, params, canvas, config)
    return jnp.concatenate([both.clean.ravel(), both.noisy.ravel()])

  params = tiny.model(scale=1.)[1]
  np.testing.assert_allclose(states(params, 2), states(params, 0), atol=2e-5)
  gradients = [jax.grad(lambda p: (states(p, chunk) ** 2).mean())(params)
               for chunk in (0, 3)]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(
      a, b, rtol=1e-3, atol=1e-5), *gradients)
  with pytest.raises(ValueError, match='canvas_chunk=4'):
    states(params, 4)


@pytest.mark.parametrize('changes, message', [
    (dict(block_size=0), 'block_size=0'),
    (dict(block_size=4, clean_stream='causal'), "clean_stream='causal'"),
    (dict(block_size=4, alignment='left'), "alignment='left'"),
])
def test_config_errors_name_the_field(changes, message):
  with pytest.raises(ValueError, match=message):
    canvas_lib.CanvasConfig(**changes)
