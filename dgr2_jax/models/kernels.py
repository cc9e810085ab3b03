"""Attention to prompts by a kernel that writes no scores to memory.

It takes the part of a softmax whose keys are a prompt's, by far the longest:

    self_attention    prompt -> prompt, causal       the whole softmax
    cross_attention   other queries -> prompt        and its log-sum-exp

by `splash.py` on TPUs and `cudnn.py` on GPUs. The log-sum-exp is what
`attention.merge` needs to join that part with others, and a gradient flows
through it, which neither of them gives: with p = softmax(q k) and m = p v,
cotangents dm and dl of m and of l = log-sum-exp make for every query

    ds = p (dm v - dm m) + p dl         of the scores s = q k

The first term is the kernel's own. The second is that of two more calls:
sum_j p_j k_j dl, which is attention with k in place of v, for q, and p dl q,
which is its gradient by these values, for k.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import importlib
from typing import Protocol

import jax
from jax.sharding import PartitionSpec as P

from dgr2_jax.models import partition


class Kernel(Protocol):
  """A module that attends on one device, to scores that are query * key.

  Keys at or after `length` are padding. Where no key is visible, what comes is
  finite and without meaning, and a log-sum-exp so low that `attention.merge`
  gives it no weight.
  """

  def attend(self, query: jax.Array, key: jax.Array, value: jax.Array,
             length: jax.Array, causal: bool = False) -> jax.Array:
    """[N, T, H, F], with a derivative by query, key and value."""

  def with_log_sum_exp(
      self, query: jax.Array, key: jax.Array, value: jax.Array,
      length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same and log sum_j exp(scores), float32 [N, T, H]; no derivative."""


def self_attention(kernel: str, query: jax.Array, key: jax.Array,
                   value: jax.Array, length: jax.Array) -> jax.Array:
  """Causal attention among prompt tokens.

  Args:
    kernel: 'splash' or 'cudnn'.
    query: [N, S, H, F]; head h reads key head h // (H / Hkv).
    key: [N, S, Hkv, F].
    value: like `key`.
    length: int32 [N]; keys at or after it are padding.

  Returns:
    [N, S, H, F]; finite and without meaning where no key is visible.
  """
  return _on_mesh(lambda *x: _kernel(kernel).attend(*x, causal=True), 1,
                  query, key, value, length)


def cross_attention(kernel: str, query: jax.Array, key: jax.Array,
                    value: jax.Array,
                    length: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Attention of any queries to all tokens of their prompt.

  Args:
    kernel: 'splash' or 'cudnn'.
    query: [N, T, H, F].
    key: [N, S, Hkv, F].
    value: like `key`.
    length: int32 [N]; keys at or after it are padding.

  Returns:
    [N, T, H, F], and the log-sum-exp of scores, float32 [N, T, H]; for an
    empty prompt so low that `attention.merge` gives that part no weight.
  """
  return _on_mesh(functools.partial(_full, kernel), 2,
                  query, key, value, length)


def _kernel(name: str) -> Kernel:
  return importlib.import_module(f'dgr2_jax.models.{name}')


def _on_mesh(function: Callable[..., jax.Array | tuple[jax.Array, jax.Array]],
             num_outputs: int, query: jax.Array, *arrays: jax.Array):
  """On every device its own requests and heads: XLA splits no kernel."""
  query *= query.shape[-1] ** -0.5
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return function(query, *arrays)
  heads = partition.fit(mesh, P(partition.BATCH_AXES, None, 'tensor', None),
                        arrays[0].shape)
  outputs = (heads, P(*heads[:3]))[:num_outputs]
  return jax.shard_map(
      function, mesh=mesh, in_specs=(heads, heads, heads, P(heads[0])),
      out_specs=outputs if num_outputs > 1 else outputs[0],
      check_vma=False)(query, *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _full(kernel, query, key, value, length):
  return _kernel(kernel).with_log_sum_exp(query, key, value, length)


def _full_forward(kernel, *arrays):
  return _full(kernel, *arrays), arrays


def _full_backward(kernel, arrays, cotangents):
  """The gradient that opens this module."""
  query, key, value, length = arrays
  d_out, d_log_sum_exp = cotangents
  attend = lambda *x: _kernel(kernel).attend(*x, length)
  d_query, d_key, d_value = jax.vjp(attend, query, key, value)[1](d_out)
  d_log_sum_exp = d_log_sum_exp[..., None]
  mean_key, of_values = jax.vjp(
      lambda values: attend(query, key, values), key)
  d_query += (d_log_sum_exp * mean_key).astype(query.dtype)
  d_key += of_values((d_log_sum_exp * query).astype(query.dtype))[0]
  return d_query, d_key, d_value, None


_full.defvjp(_full_forward, _full_backward)
