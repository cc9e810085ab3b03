"""Attention by kernels, interpreted, against XLA's; parts against the whole.

cuDNN runs on GPUs alone: JAX's reference of the same call is in its place.
"""

import functools
import importlib.util
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgr2_jax.models import attention as attention_lib
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import cudnn
from dgr2_jax.models import kernels
from dgr2_jax.models import partition
from dgr2_jax.models import splash
from dgr2_jax.training import abstract
from tests.models import tiny
from tests.tools import test_plan

N, S, H, HKV, F = 3, 130, 4, 2, 128
LENGTH = jnp.array([S, 70, 0])  # no padding, some, an empty prompt


def normal(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), 'float32')


def arrays(tokens):
  """Query, key and value with peaked scores."""
  return (2 * normal(0, N, tokens, H, F), normal(1, N, S, HKV, F),
          normal(2, N, S, HKV, F))


def brute_force(query, key, value, visible):
  """Output and log-sum-exp of one query over its visible keys."""
  scores = np.asarray(key)[visible] @ np.asarray(query) / F ** .5
  weights = np.exp(scores - scores.max())
  out = weights @ np.asarray(value)[visible] / weights.sum()
  return out, scores.max() + np.log(weights.sum())


def assert_close(got, want, atol=5e-5):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol),
               got, want)


def test_merged_parts_are_the_softmax_over_all():
  query, key, value = arrays(1)
  whole = brute_force(query[0, 0, 0], key[0, :, 0], value[0, :, 0],
                      np.arange(S))
  cuts = (slice(0, 100), slice(100, 101), slice(101, S))
  outs, sums = zip(*(brute_force(query[0, 0, 0], key[0, :, 0], value[0, :, 0],
                                 np.arange(S)[cut]) for cut in cuts))
  merged = attention_lib.merge(outs, sums)
  np.testing.assert_allclose(merged, whole[0], atol=1e-5)
  # A part without visible keys: finite garbage of no weight.
  merged = attention_lib.merge((*outs, outs[0]), (*sums, np.float32(-2e38)))
  np.testing.assert_allclose(merged, whole[0], atol=1e-5)


@pytest.mark.parametrize('kernel', attention_lib.KERNELS)
def test_cross_attention_equals_brute_force(kernel):
  query, key, value = arrays(5)
  out, log_sum_exp = jax.jit(kernels.cross_attention, static_argnums=0)(
      kernel, query, key, value, LENGTH)
  for n, t, h in np.ndindex(2, 5, H):
    want = brute_force(query[n, t, h], key[n, :, h // 2], value[n, :, h // 2],
                       np.arange(S) < LENGTH[n])
    np.testing.assert_allclose(out[n, t, h], want[0], atol=1e-5)
    np.testing.assert_allclose(log_sum_exp[n, t, h], want[1], atol=1e-5)
  assert np.isfinite(out).all() and (log_sum_exp[2] < -1e38).all()


@functools.partial(jax.jit, static_argnums=0)
def outcome(kernel, length, query, key, value, *others):
  """Output and gradients of causal attention, or of three merged parts."""

  def attend(query, key, value, *others):
    if not others:
      return attention_lib.causal(query, key, value, length, kernel)
    query = query.reshape(len(query), *others[2].shape[1:4], H, F)
    before = (jnp.arange(others[0].shape[2])
              < jnp.array([0, 4, 8])[:, None])[:, None]
    return attention_lib.attend(query, [
        attention_lib.prompt(key, value, length),
        attention_lib.Part(*others[:2], before[None, None]),
        attention_lib.Part(*others[2:], jnp.ones((1,) * 5, bool))], kernel)

  out, vjp = jax.vjp(attend, query, key, value, *others)
  return out, vjp(normal(3, *out.shape))


def canvases(g=2, m=3, t=4, length=12):
  """Queries of block canvases, and keys and values of three parts."""
  return (*arrays(g * m * t),
          *(normal(seed, N, g, length, HKV, F) for seed in (4, 5)),
          *(normal(seed, N, g, m, t, HKV, F) for seed in (6, 7)))


@pytest.mark.parametrize('kernel', attention_lib.KERNELS)
def test_self_attention_and_its_gradient_equal_xla(monkeypatch, kernel):
  monkeypatch.setattr(splash, '_BLOCKS', (128,))  # of several a prompt
  length = LENGTH.at[2].set(1)  # an empty prompt has no last token to read
  assert_close(*(outcome(which, length, *arrays(S))
                 for which in (kernel, 'xla')))


@pytest.mark.parametrize('kernel', attention_lib.KERNELS)
def test_merged_attention_and_its_gradient_equal_xla(kernel):
  found, xla = (outcome(which, LENGTH, *canvases())
                for which in (kernel, 'xla'))
  assert_close(found, xla)
  # Of an empty prompt nothing is learned.
  assert not any(np.any(gradient[2]) for gradient in found[1][1:3])


def test_splits_over_requests_and_heads():
  """Four devices, where XLA alone could not split the kernel, against one."""
  subprocess.run([sys.executable, '-c', '''
import jax
jax.config.update('jax_num_cpu_devices', 4)
from dgr2_jax.training import sharding
from tests.models import test_kernels as t

cases = [(2, t.arrays(t.S)), (2, t.canvases()),
         (3, t.canvases())]  # three requests do not split
cases = [(t.LENGTH[:n], *(x[:n] for x in arrays)) for n, arrays in cases]
want = [t.outcome('xla', *case) for case in cases]
with jax.set_mesh(sharding.make_mesh(dict(data=2, fsdp=1, tensor=2))):
  for case, alone in zip(cases, want):
    for kernel in t.attention_lib.KERNELS:
      t.assert_close(t.outcome(kernel, *case), alone)
'''], check=True, timeout=600)


def test_canvas_by_splash_equals_xla():
  """States, parameter gradients in chunks and with remat, and a prefill."""
  config = canvas_lib.CanvasConfig(4)
  batch = tiny.batch(n=2)
  start = jnp.array([[[0, 4, 8, 8]] * 2] * 2)
  canvas = canvas_lib.Canvas(
      batch['prompt'], batch['prompt_length'], batch['response'], start,
      jnp.asarray(np.random.default_rng(1).random((2, 2, 4, 4)) < .5))

  def outcome_of(attention):
    model, params = tiny.model(
        scale=1., head_dim=F, num_layers=1, attention=attention,
        canvas_chunk=2, remat='full')

    def loss(params):
      states = canvas_lib.states(model, params, canvas,
                                 tiny.VOCABULARY.mask_id, config)
      return sum((x ** 3).mean() for x in jax.tree.leaves(states)), states

    (_, states), gradient = jax.jit(
        jax.value_and_grad(loss, has_aux=True))(params)
    cache, last = canvas_lib.prefill(
        model, params, canvas.prompt, canvas.prompt_length, 2, 12)
    return states, gradient, last, cache

  assert_close(outcome_of('splash'), outcome_of('xla'))


@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None,
                    reason='needs the TPU compiler')
def test_an_update_compiles_for_tpus():
  """Requests and heads split over four chips, gradients in chunks."""
  subprocess.run([sys.executable, '-c', '''
from dgr2_jax.tools import plan
plan.set_up()
from dgr2_jax.training import abstract
from dgr2_jax.training import sharding
from tests.tools import test_plan

config = test_plan.config_of(
    mesh__data=1, mesh__fsdp=2, mesh__tensor=2, cft__batch_size=2,
    model__num_heads=4, model__num_kv_heads=2, model__head_dim=128,
    model__dtype="bfloat16")
config.model.attention = "auto"
setting = abstract.Setting(config, sharding.make_mesh(
    config.mesh, plan.devices("v5p:2x2x1")[1]))
update = abstract.programs(setting, "cft")[0]
text = update.lower().compile().as_text()
for kernel in ("fwd", "dq", "dkv"):
  assert f"splash_mha_{kernel}_segmented" in text, kernel
'''], check=True, timeout=600)


def test_an_update_lowers_for_gpus(monkeypatch):
  """cuDNN's calls, forward and backward, in all of a CFT update; no GPU."""
  monkeypatch.setattr(partition, 'platform', lambda: 'gpu')
  monkeypatch.setattr(cudnn._beneath(), 'check_cudnn_version', lambda: 91000)
  config = test_plan.config_of(
      cft__batch_size=1, model__dtype='bfloat16', model__num_heads=4,
      model__num_kv_heads=2, model__head_dim=128)
  config.model.attention = 'auto'
  setting = test_plan.setting_of(config)
  monkeypatch.setattr(
      abstract, '_lower', lambda setting, function, *args:
      function.trace(*args).lower(lowering_platforms=('cuda',)))
  update = abstract.programs(setting, 'cft')[0]
  text = update.lower().as_text()
  assert 'stablehlo.custom_call @__cudnn$fmhaSoftmax(' in text
  assert 'stablehlo.custom_call @__cudnn$fmhaSoftmaxBackward(' in text


def test_cudnn_keeps_the_log_sum_exp_in_float32(monkeypatch):
  """Rounded to bfloat16, weights of parts would be off by percents."""
  monkeypatch.setattr(partition, 'platform', lambda: 'gpu')
  monkeypatch.setattr(cudnn._beneath(), 'check_cudnn_version', lambda: 91000)
  jaxpr = str(jax.make_jaxpr(cudnn.with_log_sum_exp)(
      *(x.astype('bfloat16') for x in arrays(5)), LENGTH))
  assert f'f32[{N},{H},5]' in jaxpr and f'f32[{N},5,{H}]' in jaxpr
  assert f'bf16[{N},{H},5]' not in jaxpr and f'bf16[{N},5,{H}]' not in jaxpr


def test_auto_takes_what_the_platform_and_the_shape_allow(monkeypatch):
  choose = functools.partial(attention_lib.choose, dtype='bfloat16')
  for kernel in attention_lib.KERNELS:
    assert choose(kernel, 128) == kernel  # a stand-in on a CPU
  assert choose('auto', 128) == 'xla'
  monkeypatch.setattr(partition, 'platform', lambda: 'tpu')
  assert choose('auto', 256) == 'splash'
  assert choose('auto', 64) == choose('xla', 128) == 'xla'
  with pytest.raises(ValueError, match="'cudnn' runs on GPUs, not on a tpu"):
    choose('cudnn', 128)
  monkeypatch.setattr(partition, 'platform', lambda: 'gpu')
  assert choose('auto', 128) == 'xla'  # no cuDNN
  with pytest.raises(ValueError, match="'splash' runs on TPUs, not on a gpu"):
    choose('splash', 128)
  with pytest.raises(ValueError, match="'cudnn' does not run here.*not detect"):
    kernels.cross_attention('cudnn', *arrays(5), LENGTH)
  monkeypatch.setattr(cudnn._beneath(), 'check_cudnn_version', lambda: 91000)
  assert choose('auto', 64) == 'cudnn'
  assert choose('auto', 256) == choose('xla', 64) == 'xla'
  assert attention_lib.choose('auto', 64, 'float32') == 'xla'


@pytest.mark.parametrize('changes, message', [
    (dict(attention='splash', head_dim=64), 'multiple of 128, not 64'),
    (dict(attention='cudnn', head_dim=12), 'multiple of 8 and at most 128'),
    (dict(attention='cudnn', head_dim=64), 'dtype of bfloat16 or float16, not'),
    (dict(attention='flash'), "model.attention='flash': expected xla"),
])
def test_config_errors_name_the_limit(changes, message):
  with pytest.raises(ValueError, match=message):
    tiny.model(**changes)
