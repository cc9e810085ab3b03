"""Tests of a step: batches in parts, adapters, optimizers."""

import functools

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import transformer
from dgr2_jax.objectives import denoising
from dgr2_jax.objectives import scoring
from dgr2_jax.training import lora as lora_lib
from dgr2_jax.training import optimizer as optimizer_lib
from dgr2_jax.training import step as step_lib
from tests.models import tiny
from tests.training import toy_run

CANVAS = canvas_lib.CanvasConfig(4)
KEY = jax.random.key(5)
LORA = lora_lib.LoraConfig(('query', 'value', 'out', 'up|down'), rank=3,
                           alpha=6.)


def cft_loss(model):
  def loss_fn(params, batch, key):
    loss, metrics = denoising.loss(
        model, params, batch, key, CANVAS, denoising.DenoisingConfig(
            ar_weight=.5), tiny.VOCABULARY)
    # Of another weight, as CFT mixed into RL.
    other = scoring.Mean(
        jnp.square(params['final_norm']).sum() * batch['prompt_length'].sum(),
        batch['response_length'].sum())
    return (loss, other.times(.01)), metrics | {
        'tokens': batch['response_length'].sum(),
        'max_id': batch['example_id'].max()}
  return loss_fn


@functools.partial(jax.jit, static_argnums=(0, 3))
def gradient(model, params, batch, accumulate):
  return step_lib.gradient(cft_loss(model), params, batch, KEY,
                           transformer.RULES, accumulate)


def close(got, want, atol=1e-6):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(
      a, b, rtol=1e-5, atol=atol), got, want)


def test_parts_add_up_to_the_whole_batch():
  """Responses of very different lengths: a mean of means would be another."""
  model, params = tiny.model()
  batch = tiny.batch(n=4)
  batch['response_length'] = jnp.array([[12, 12], [3, 4], [9, 3], [3, 3]])
  want = gradient(model, params, batch, 1)
  close(gradient(model, params, batch, 4), want)


def test_weights_are_had_without_the_model():
  """Parts cost no forward pass beyond their own."""
  model, params = tiny.model(unroll_layers=True)
  weights = jax.jit(lambda params, batch: [
      term.weight for term in cft_loss(model)(params, batch, KEY)[0]])
  text = weights.lower(params, tiny.batch(n=4)).compile().as_text()
  assert ' dot(' not in text and 'custom-call' not in text
  assert ' dot(' in jax.jit(lambda params, batch: cft_loss(model)(
      params, batch, KEY)[0]).lower(params, tiny.batch(n=4)).compile().as_text()


def test_a_batch_that_does_not_divide_is_an_error():
  model, params = tiny.model()
  with pytest.raises(ValueError, match='3 rows .* accumulate=2'):
    gradient(model, params, tiny.batch(n=3), 2)


def optimizer_of(section):
  return optimizer_lib.make_optimizer(section, optimizer_lib.of_stage(section))


def section(**optimizer):
  return ml_collections.ConfigDict(
      toy_run.get_config(grad_clip=0., weight_decay=.1, schedule='constant',
                         warmup_steps=0).to_dict() | {'optimizer': optimizer})


def test_adapters_begin_as_nothing_and_merge_as_they_are_applied():
  model, params = tiny.model()
  batch = tiny.batch(n=2)
  adapters = lora_lib.init(params, KEY, LORA)
  assert set(adapters['layers']) == {
      f'{name}_lora_{x}' for name in ('query', 'value', 'out', 'up', 'down')
      for x in 'ab'}
  states = jax.jit(lambda params: canvas_lib.states(
      model, params, canvas_lib.autoregressive(
          batch['prompt'], batch['prompt_length'], batch['response']),
      tiny.VOCABULARY.mask_id, canvas_lib.AUTOREGRESSIVE).clean)
  want = states(params)
  np.testing.assert_array_equal(
      states(lora_lib.join(params, adapters, LORA)), want)
  adapters = jax.tree.map(
      lambda x: x + .1 * jax.random.normal(KEY, x.shape), adapters)
  merged = lora_lib.merge(params, adapters, LORA)
  assert jax.tree.structure(merged) == jax.tree.structure(params)
  applied = states(lora_lib.join(params, adapters, LORA))
  assert np.abs(applied - want).max() > .1
  np.testing.assert_allclose(applied, states(merged), atol=1e-5)
  # By hand: alpha / rank = 2.
  a, b = (np.asarray(adapters['layers'][f'out_lora_{x}']) for x in 'ab')
  np.testing.assert_allclose(
      merged['layers']['out'],
      params['layers']['out'] + 2 * np.einsum('lhfr,lrd->lhfd', a, b),
      rtol=1e-5, atol=1e-6)
  for name in ('key', 'gate', 'mlp_norm'):
    np.testing.assert_array_equal(merged['layers'][name],
                                  params['layers'][name])


def test_only_adapters_are_trained():
  model, params = tiny.model()
  adapters = lora_lib.init(params, KEY, LORA)
  optimizer = optimizer_of(section())
  state = step_lib.TrainState(
      step=jnp.int32(0), params=adapters, opt_state=optimizer.init(adapters),
      sums={'loss': jnp.float32(0)}, bad_step=jnp.int32(-1), base=params)
  size = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
  assert size(state.opt_state) <= 2 * size(adapters) + 4 < size(params)
  step = jax.jit(step_lib.make_step(
      cft_loss(model), optimizer, 0, transformer.RULES, lora=LORA))
  one = step(state, tiny.batch(n=2))
  two = step(one, tiny.batch(n=2))
  jax.tree.map(np.testing.assert_array_equal, two.base, params)
  moved = {k: np.abs(two.params['layers'][k] - v).max()
           for k, v in adapters['layers'].items()}
  assert min(moved.values()) > 1e-3
  assert 0 < float(two.sums['loss'] - one.sums['loss']) < float(
      one.sums['loss'])
  # No gradient is as large as a base matrix, let alone the embedding.
  grads = jax.eval_shape(jax.grad(lambda adapters: cft_loss(model)(
      lora_lib.join(params, adapters, LORA), tiny.batch(n=2), KEY)[0][0].value),
      adapters)
  assert size(grads) == size(adapters)


def test_adafactor_is_small_and_descends():
  optimizer = optimizer_of(section(kind='adafactor'))
  params = {'w': jnp.ones((256, 128)), 'norm': jnp.ones(3)}
  state = optimizer.init(params)
  size = sum(x.size for x in jax.tree.leaves(state))
  assert size < 256 + 128 + 20
  # The definition at the first step: v = g^2 (the decay is 0), v ~ r c / mean.
  grads = {'w': jnp.asarray(np.random.default_rng(0).normal(
      size=(256, 128)), jnp.float32), 'norm': jnp.array([1., -2., 3.])}
  updates, _ = optimizer.update(grads, state, params)
  square = np.square(grads['w']) + 1e-30
  v = np.outer(square.mean(1), square.mean(0)) / square.mean()
  u = grads['w'] / np.sqrt(v)
  u /= max(1., np.sqrt(np.square(u).mean()))
  np.testing.assert_allclose(updates['w'], -5e-2 * (u + .1 * params['w']),
                             rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(updates['norm'], [-5e-2, 5e-2, -5e-2], rtol=1e-4)


def test_first_moment_in_bfloat16():
  optimizer = optimizer_of(section(mu_dtype='bfloat16'))
  params = {'w': jnp.ones((4, 4))}
  state = optimizer.init(params)
  dtypes = sorted(str(x.dtype) for x in jax.tree.leaves(state) if x.size > 1)
  assert dtypes == ['bfloat16', 'float32']
  plain = optimizer_of(section())
  grads = {'w': jnp.linspace(-1., 1., 16).reshape(4, 4)}
  got, _ = optimizer.update(grads, state, params)
  want, _ = plain.update(grads, plain.init(params), params)
  np.testing.assert_allclose(got['w'], want['w'], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize('fields, message', [
    (dict(kind='sgd'), "kind='sgd': expected adamw or adafactor"),
    (dict(mu_dtype='float8'), "mu_dtype='float8'"),
    (dict(kind='adafactor', mu_dtype='bfloat16'), 'no first moment'),
    (dict(lora=dict(matrices=('queri',))), "'queri', which matches none"),
    (dict(lora=dict(matrices=())), 'matrices is empty'),
    (dict(lora=dict(matrices=('.*',), rank=0)), 'rank=0'),
    (dict(lora=dict(ranks=4)), 'optimizer.lora: .*ranks')])
def test_choices_out_of_range_are_named(fields, message):
  with pytest.raises(ValueError, match=message):
    optimizer_of(section(**fields))


def test_adapters_resume_to_the_bit_and_leave_merged_parameters(tmp_path):
  rng = np.random.default_rng(0)
  params = {'layers': {name: np.float32(rng.normal(size=(2, 4, 3)))
                       for name in ('gate', 'up')}}
  config = toy_run.get_config(
      steps=8, eval_every=4, checkpoint_every=4,
      optimizer=dict(lora=dict(matrices=('up',), rank=2)))

  def loss_fn(params, batch, key):
    layers = params['layers']
    gate, up = layers['gate'], layers['up']
    if 'up_lora_a' in layers:
      up += jnp.einsum('ldr,lre->lde', layers['up_lora_a'],
                       layers['up_lora_b'])
    error = jnp.square(jnp.einsum('nd,lde->nle', batch['x'], gate * up) - 1)
    return (scoring.Mean(error.sum(), error.size),), {}

  seen = []

  def validate(params):
    seen.append(jax.device_get(params))
    (loss,), _ = loss_fn(params, toy_run.make_batch(0), None)
    return {'ndcg@3': -float(loss.value)}

  def train(directory, hook=lambda step: None):
    return jax.device_get(toy_run.train(
        tmp_path / directory, loss_fn=loss_fn, params=params, config=config,
        validate=validate, batches=toy_run.Batches(hook),
        devices=jax.devices()[:1]))

  want = train('a')
  jax.tree.map(np.testing.assert_array_equal, want, seen[1])
  np.testing.assert_array_equal(want['layers']['gate'],
                                params['layers']['gate'])
  assert np.abs(want['layers']['up'] - params['layers']['up']).max() > 1e-3

  def stop(step):
    if step == 6:
      raise RuntimeError('stopped')

  with pytest.raises(RuntimeError, match='stopped'):
    train('b', stop)
  jax.tree.map(np.testing.assert_array_equal, train('b'), want)
