"""Continuous batching against decoding every request alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgr2_jax.decoding import batching
from dgr2_jax.decoding import block_decoder
from dgr2_jax.decoding import commit
from dgr2_jax.decoding import verification
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.training import sharding
from tests.models import tiny

V = tiny.VOCABULARY
BLOCKS, AR = canvas_lib.CanvasConfig(4), canvas_lib.AUTOREGRESSIVE
LENGTH, LONGEST = 12, 14
WAYS = {
    'threshold': dict(canvas=BLOCKS),
    'threshold, sampled': dict(canvas=BLOCKS, temperature=.7, num_rollouts=2),
    'ar': dict(canvas=AR),
    'verify': dict(canvas=BLOCKS, draft=verification.DraftConfig()),
    'verify, sampled': dict(canvas=BLOCKS, draft=verification.DraftConfig(),
                            temperature=.7),
}


@functools.cache
def model():
  """Responses of many lengths: EOS is likelier than in `tiny`."""
  network, params = tiny.model()
  return network, params | {
      'embedding': params['embedding'].at[V.eos_id].multiply(3)}


def prompts_of(n, seed=0, longest=LONGEST):
  rng = np.random.default_rng(seed)
  return [batching.Prompt(rng.integers(2, 44, rng.integers(1, longest + 1)),
                          example_id=7 * i) for i in range(n)]


def arguments(canvas, draft=None, **options):
  return dict(vocabulary=V, canvas=canvas, config=block_decoder.DecodeConfig(
      max_response=LENGTH, **options)), draft


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


def together(prompts, way, seed=3, rows=4, devices=1, **options):
  how, draft = arguments(**way)
  mesh = sharding.make_mesh(dict(data=-1, fsdp=1, tensor=1),
                            jax.devices()[:devices])
  return list(batching.decode(
      *model(), prompts, rule=commit.Threshold(.4), draft=draft, mesh=mesh,
      rows=rows, max_prompt=LONGEST, seed=seed, **how, **options))


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
