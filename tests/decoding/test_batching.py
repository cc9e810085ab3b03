"""Continuous batching against decoding every request alone."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgr2_jax.decoding import batching
from dgr2_jax.decoding import block_decoder
from dgr2_jax.decoding import commit
from dgr2_jax.decoding import verification
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import transformer
from dgr2_jax.training import sharding
from tests.decoding import test_verification
from tests.models import tiny

V = tiny.VOCABULARY
BLOCKS, AR = canvas_lib.CanvasConfig(4), canvas_lib.AUTOREGRESSIVE
LENGTH, LONGEST = 12, 14
WAYS = {
    'threshold': dict(canvas=BLOCKS),
    'threshold, sampled': dict(canvas=BLOCKS, temperature=.7, num_rollouts=2),
    'ar': dict(canvas=AR),
    'verify, sampled': dict(canvas=BLOCKS, draft=verification.DraftConfig(),
                            temperature=.7),
    'verify, another model': dict(
        canvas=canvas_lib.CanvasConfig(4, 'block_causal'),
        draft=verification.DraftConfig(window='grid'),
        verifier=test_verification.other),
}


@functools.cache
def model():
  """Responses of many lengths: EOS is likelier than in `tiny`."""
  network, params = tiny.model()
  return network, params | {
      'embedding': params['embedding'].at[V.eos_id].multiply(3)}


def mesh_of(devices=1, tensor=1):
  return sharding.make_mesh(dict(data=-1, fsdp=1, tensor=tensor),
                            jax.devices()[:devices])


def prompts_of(n, seed=0, longest=LONGEST):
  rng = np.random.default_rng(seed)
  return [batching.Prompt(rng.integers(2, 44, rng.integers(1, longest + 1)),
                          example_id=7 * i) for i in range(n)]


def arguments(canvas, draft=None, verifier=None, **options):
  how = dict(vocabulary=V, canvas=canvas, config=block_decoder.DecodeConfig(
      max_response=LENGTH, **options))
  if verifier:
    how['verifier'], how['verifier_params'] = verifier()
  return how, draft


def alone(prompt, way, seed=3):
  """What `decode` gives for one request."""
  how, draft = arguments(**way)
  tokens = np.zeros((1, LONGEST), np.int32)
  tokens[0, :len(prompt.tokens)] = prompt.tokens
  args = (*model(), jnp.array(tokens), jnp.array([len(prompt.tokens)]),
          jnp.array([prompt.example_id]), jax.random.key(seed))
  if draft is None:
    rollout = block_decoder.decode(*args, commit.Threshold(.4), **how)
  else:
    rollout = verification.decode(*args, draft=draft, **how)
  return jax.tree.map(lambda x: np.asarray(x[0]), rollout)


def together(*args, **options):
  return list(streamed(*args, **options))


def streamed(prompts, way, seed=3, rows=4, devices=1, tensor=1, **options):
  how, draft = arguments(**way)
  mesh = mesh_of(devices, tensor)
  network, params = model()
  if tensor > 1:
    params, how['verifier_params'] = (
        jax.device_put(p, sharding.param_shardings(mesh, p, transformer.RULES))
        for p in (params, how['verifier_params']))
  return batching.decode(
      network, params, prompts, rule=commit.Threshold(.4), draft=draft,
      mesh=mesh, rows=rows, max_prompt=LONGEST, seed=seed, **how, **options)


def equal(got, want):
  for field in ('length', 'finished', 'calls'):
    np.testing.assert_array_equal(getattr(got, field), getattr(want, field))
  for field in ('tokens', 'call'):
    stands = np.arange(LENGTH) < want.length[..., None]
    np.testing.assert_array_equal(getattr(got, field)[stands],
                                  getattr(want, field)[stands])
  np.testing.assert_allclose(got.logprob[stands], want.logprob[stands],
                             atol=1e-4)


@pytest.mark.parametrize('way', WAYS)
def test_a_request_is_decoded_as_if_it_were_alone(way):
  prompts, way = prompts_of(11), WAYS[way]
  responses = together(prompts, way)
  assert sorted(r.index for r in responses) == list(range(11))
  want = [alone(prompt, way) for prompt in prompts]
  for response in responses:
    equal(response.rollout, want[response.index])
  # Rows did not wait for each other, and requests differ.
  assert [r.index for r in responses] != list(range(11))
  assert len({w.tokens.tobytes() for w in want}) > 5


def test_buckets_are_few_and_near():
  assert batching.buckets(132) == (32, 48, 64, 96, 128, 132)
  assert batching.buckets(20) == (20,)
  sizes = batching.buckets(4096)
  assert len(sizes) == 15
  for length in range(17, 4097):
    assert min(s for s in sizes if s >= length) < max(1.51 * length, 33)


def test_a_day_compiles_no_more_than_its_buckets():
  """1,000 requests of random lengths, and another day compiles nothing."""
  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
      lambda name, *_, **__: compiled.append(name)
      if name.endswith('backend_compile_duration') else None)
  how, _ = arguments(AR)
  how['config'] = block_decoder.DecodeConfig(max_response=4)
  model()
  for day in (0, 1):
    compiled.clear()
    prompts = prompts_of(1_000, seed=day, longest=96)
    ask = lambda prompts: dict(batching.decode(
        *model(), prompts, rule=commit.Threshold(1.), mesh=mesh_of(), rows=32,
        max_prompt=96, **how))
    got = ask(prompts)
    assert sorted(got) == list(range(1_000))
    for index in (3, 500, 998) if day == 0 else ():  # a bucket of their own
      again, = ask(prompts[index:index + 1]).values()
      length = int(again.length[0])
      assert length == got[index].length[0]
      np.testing.assert_array_equal(again.tokens[0, :length],
                                    got[index].tokens[0, :length])
    # One a bucket; the empty batch, the step loop and the key.
    assert len(compiled) <= (len(batching.buckets(96)) + 3 if day == 0 else 0)


def test_equal_prompts_are_decoded_once_if_greedy(monkeypatch):
  prefilled = []
  padded = batching._padded
  monkeypatch.setattr(batching, '_padded', lambda prompts, *rest: (
      prefilled.extend(prompts), padded(prompts, *rest))[1])
  one, other = prompts_of(2)
  prompts = [one, other, one._replace(example_id=5), one]
  got = {r.index: r.rollout for r in together(prompts, WAYS['threshold'])}
  assert sorted(got) == [0, 1, 2, 3] and len(prefilled) == 2
  for index in (2, 3):
    equal(got[index], got[0])
  prefilled.clear()
  got = {r.index: r.rollout
         for r in together(prompts, WAYS['threshold, sampled'])}
  assert len(prefilled) == 4
  assert (got[2].tokens != got[0].tokens).any()  # another example


def test_equal_prompts_without_end_are_answered_in_time():
  one, other = prompts_of(2)
  taken = []

  def repeated():
    for _ in range(60):
      for prompt in (one, one, other):
        taken.append(prompt)
        yield prompt

  first = next(streamed(repeated(), WAYS['threshold'], rows=2))
  assert first.index < 10 and len(taken) < 20
  got = sorted(r.index for r in together(repeated(), WAYS['threshold'], rows=2))
  assert got == list(range(180))


def test_bad_arguments_are_named():
  good, _ = prompts_of(2)
  for changes, message in (
      (dict(rows=0), 'rows=0'), (dict(admit=0), 'admit=0')):
    with pytest.raises(ValueError, match=message):
      together([good], WAYS['ar'], **changes)
  for size in (0, LONGEST + 1):
    with pytest.raises(ValueError, match=f'prompt 1 has {size} tokens'):
      together([good, batching.Prompt(np.ones(size, int))], WAYS['ar'])
  with pytest.raises(ValueError, match='max_response=12'):
    together([good], dict(canvas=canvas_lib.CanvasConfig(5)))


def test_rows_and_heads_are_split_over_devices():
  """Half of the rows a device, and of the heads, decode what one does."""
  subprocess.run([sys.executable, '-c', '''
import jax
jax.config.update('jax_num_cpu_devices', 4)
from tests.decoding import test_batching as t
prompts = t.prompts_of(7)
for response in t.together(prompts, t.WAYS['ar'], devices=2):
  t.equal(response.rollout, t.alone(prompts[response.index], t.WAYS['ar']))
way = t.WAYS['verify, another model']
for response in t.together(prompts, way, devices=4, tensor=2):
  t.equal(response.rollout, t.alone(prompts[response.index], way))
'''], check=True, timeout=300)


def test_a_cache_in_bfloat16_is_half_as_large_and_nearly_as_good():
  prompts, way = prompts_of(8), WAYS['ar']
  how, _ = arguments(**way, cache_dtype='bfloat16')
  with jax.set_mesh(mesh_of()):
    cache = jax.eval_shape(lambda: batching._empty(
        model()[0], 4, LONGEST, draft=None, **how)).state.cache
  assert {x.dtype.name for x in jax.tree.leaves((cache.prompt, cache.clean))
          } == {'bfloat16'}
  want = {r.index: r.rollout for r in together(prompts, way)}
  same = 0
  for index, got in together(prompts, dict(way, cache_dtype='bfloat16')):
    # Up to where rounding tips a token, its probability is about the same.
    alike = np.cumprod(got.tokens == want[index].tokens, -1).astype(bool)
    alike &= np.arange(LENGTH) < want[index].length[..., None]
    np.testing.assert_allclose(got.logprob[alike],
                               want[index].logprob[alike], atol=.1)
    same += alike.sum()
  total = sum(int(w.length.sum()) for w in want.values())
  assert .8 * total < same
