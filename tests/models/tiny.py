"""A tiny model, vocabulary and batch for tests of models and decoders."""

import jax
import jax.numpy as jnp
import numpy as np

from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib

VOCABULARY = vocabulary_lib.Vocabulary(
    size=48, mask_id=44, eos_id=1, banned=(0, 44, 45, 46, 47))


def model(scale=3., **changes):
  """A random model; `scale` sharpens its predictions."""
  shape = dict(vocab_size=48, num_layers=2, width=24, num_heads=4,
               num_kv_heads=2, head_dim=6, mlp_dim=32, rope_theta=1e4)
  config = transformer.ModelConfig(**{**shape, **changes})
  params = transformer.init(config, jax.random.key(0))
  keys = iter(jax.random.split(jax.random.key(7), 99))
  # Norm scales and biases start at one and zero: move them.
  params = jax.tree.map(
      lambda x: x + .1 * jax.random.normal(next(keys), x.shape), params)
  params['final_norm'] *= scale
  return transformer.Transformer(config), params


def batch(n=3, p=9, g=2, length=12, seed=0):
  rng = np.random.default_rng(seed)
  response_length = rng.integers(3, length + 1, (n, g))
  response = rng.integers(2, 44, (n, g, length))
  after = np.arange(length) >= response_length[..., None] - 1
  response = np.where(after, VOCABULARY.eos_id, response)
  arrays = dict(
      prompt=rng.integers(2, 44, (n, p)),
      prompt_length=rng.integers(2, p + 1, (n,)),
      response=response, response_length=response_length,
      is_answer=np.broadcast_to(np.arange(length) >= 2, response.shape),
      supervised_from=np.zeros((n, g), int),
      example_id=np.arange(n) + 100 * seed)
  return {k: jnp.asarray(v) for k, v in arrays.items()}
