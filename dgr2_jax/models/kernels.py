"""Attention to prompts by a kernel that writes no scores to memory.

On TPUs that is splash attention, as JAX ships it. It takes the part of a
softmax whose keys are a prompt's, by far the longest:

    self_attention    prompt -> prompt, causal       the whole softmax
    cross_attention   other queries -> prompt        and its log-sum-exp

The log-sum-exp is what `attention.merge` needs to join that part with others,
and a gradient flows through it, which JAX's kernel alone does not give: with
p = softmax(q k) and m = p v, cotangents dm and dl of m and of l = log-sum-exp
make for every query

    ds = p (dm v - dm m) + p dl         of the scores s = q k

The first term is the kernel's own. The second is that of two more calls:
sum_j p_j k_j dl, which is attention with k in place of v, for q, and p dl q,
which is its gradient by these values, for k.
"""

from __future__ import annotations

from collections.abc import Callable
import functools

import jax
from jax.experimental.pallas.ops.tpu import splash_attention as splash
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dgr2_jax.models import partition

_LANES = 128  # Lengths are padded to a multiple.
_BLOCKS = (512, 384, 256, 128)  # The first that divides a padded length.


def self_attention(query: jax.Array, key: jax.Array, value: jax.Array,
                   length: jax.Array) -> jax.Array:
  """Causal attention among prompt tokens.

  Args:
    query: [N, S, H, F]; head h reads key head h // (H / Hkv).
    key: [N, S, Hkv, F].
    value: like `key`.
    length: int32 [N]; keys at or after it are padding.

  Returns:
    [N, S, H, F]; finite and without meaning where no key is visible.
  """
  return _on_mesh(functools.partial(_run, _causal), 1,
                  query, key, value, length)


def cross_attention(query: jax.Array, key: jax.Array, value: jax.Array,
                    length: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Attention of any queries to all tokens of their prompt.

  Args:
    query: [N, T, H, F].
    key: [N, S, Hkv, F].
    value: like `key`.
    length: int32 [N]; keys at or after it are padding.

  Returns:
    [N, T, H, F], and the log-sum-exp of scores, float32 [N, T, H]; for an
    empty prompt so low that `attention.merge` gives that part no weight.
  """
  return _on_mesh(functools.partial(_run, _full), 2,
                  query, key, value, length)


def _on_mesh(function: Callable[..., jax.Array | tuple[jax.Array, jax.Array]],
             num_outputs: int, *arrays: jax.Array):
  """On every device its own requests and heads: XLA splits no kernel."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return function(*arrays)
  heads = partition.fit(mesh, P(partition.BATCH_AXES, None, 'tensor', None),
                        arrays[1].shape)
  outputs = (heads, P(*heads[:3]))[:num_outputs]
  return jax.shard_map(
      function, mesh=mesh, in_specs=(heads, heads, heads, P(heads[0])),
      out_specs=outputs if num_outputs > 1 else outputs[0],
      check_vma=False)(*arrays)


def _run(attend, query, key, value, length):
  """`attend` on arrays [N, heads, tokens, F], padded, queries scaled."""
  tokens = query.shape[1]
  query, key, value = (
      jnp.pad(jnp.swapaxes(x, 1, 2),
              ((0, 0), (0, 0), (0, -x.shape[1] % _LANES), (0, 0)))
      for x in (query * query.shape[-1] ** -0.5, key, value))
  # Queries see keys of their own segment, 0: no padding.
  segments = splash.SegmentIds(
      jnp.zeros((query.shape[0], query.shape[2]), jnp.int32),
      (jnp.arange(key.shape[2]) >= length[:, None]).astype(jnp.int32))
  return jax.tree.map(lambda x: jnp.swapaxes(x[:, :, :tokens], 1, 2),
                      attend(query, key, value, segments))


def _kernel(mask: type[splash.Mask], query: jax.Array, key: jax.Array,
            save_residuals: bool = False):
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


def _causal(query, key, value, segments):
  return _kernel(splash.CausalMask, query, key)(query, key, value, segments)


@jax.custom_vjp
def _full(query, key, value, segments):
  kernel = _kernel(splash.FullMask, query, key, save_residuals=True)
  out, (log_sum_exp,) = kernel(query, key, value, segments)
  return out, log_sum_exp


def _full_forward(*arrays):
  return _full(*arrays), arrays


def _full_backward(arrays, cotangents):
  """The gradient that opens this module."""
  query, key, value, segments = arrays
  d_out, d_log_sum_exp = cotangents
  kernel = _kernel(splash.FullMask, query, key)
  _, of_out = jax.vjp(lambda *x: kernel(*x, segments), query, key, value)
  d_query, d_key, d_value = of_out(d_out)
  d_log_sum_exp = d_log_sum_exp[..., None]
  mean_key, of_values = jax.vjp(
      lambda values: kernel(query, key, values, segments), key)
  d_query += (d_log_sum_exp * mean_key).astype(query.dtype)
  d_key += of_values((d_log_sum_exp * query).astype(query.dtype))[0]
  return d_query, d_key, d_value, None


_full.defvjp(_full_forward, _full_backward)
