"""Attention to prompts on TPUs: splash attention, as JAX ships it.

It has heads before tokens and lengths that are multiples of 128: arrays are
transposed and padded on the way in, and the output back on the way out. On CPUs
the kernel is interpreted, for tests.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.experimental.pallas.ops.tpu import splash_attention as splash
import jax.numpy as jnp

from dgr2_jax.models import partition

_LANES = 128  # Lengths are padded to a multiple.
_BLOCKS = (512, 384, 256, 128)  # The first that divides a padded length.


def attend(query: jax.Array, key: jax.Array, value: jax.Array,
           length: jax.Array, causal: bool = False) -> jax.Array:
  """See `kernels.Kernel`."""
  mask = splash.CausalMask if causal else splash.FullMask
  return _run(mask, False, query, key, value, length)


def with_log_sum_exp(query: jax.Array, key: jax.Array, value: jax.Array,
                     length: jax.Array) -> tuple[jax.Array, jax.Array]:
  """See `kernels.Kernel`."""
  out, (log_sum_exp,) = _run(
      splash.FullMask, True, query, key, value, length)
  return out, log_sum_exp


def _run(mask: type[splash.Mask], save_residuals: bool, query, key, value,
         length):
  """The kernel on arrays [N, heads, tokens, F], padded."""
  tokens = query.shape[1]
  query, key, value = (
      jnp.pad(jnp.swapaxes(x, 1, 2),
              ((0, 0), (0, 0), (0, -x.shape[1] % _LANES), (0, 0)))
      for x in (query, key, value))
  # Queries see keys of their own segment, 0: no padding.
  segments = splash.SegmentIds(
      jnp.zeros((query.shape[0], query.shape[2]), jnp.int32),
      (jnp.arange(key.shape[2]) >= length[:, None]).astype(jnp.int32))
  kernel = _kernel(mask, query, key, save_residuals)
  return jax.tree.map(lambda x: jnp.swapaxes(x[:, :, :tokens], 1, 2),
                      kernel(query, key, value, segments))


def _kernel(mask: type[splash.Mask], query: jax.Array, key: jax.Array,
            save_residuals: bool) -> Callable:
  """Splash attention of a batch, by static masks and padded lengths."""
  block_q, block_kv = (
      next(size for size in _BLOCKS if x.shape[2] % size == 0)
      for x in (query, key))
  heads = [mask((query.shape[2], key.shape[2]))] * query.shape[1]
  return jax.vmap(splash.make_splash_mha_single_device(
      splash.MultiHeadMask(heads),
      block_sizes=splash.BlockSizes(
          block_q=block_q, block_kv=block_kv, block_q_dkv=block_q,
          block_kv_dkv=block_kv, block_q_dq=block_q, block_kv_dq=block_kv),
      save_residuals=save_residuals, interpret=partition.platform() == 'cpu'))
