"""Attention over keys that lie in several arrays.

A block canvas sees the prompt (one array a request), the clean tokens of its
own rollout (one array a rollout) and its own block:

              prompt [N, P]     clean [N, G, L]    block [N, G, M, B]
    query -> [ k k k k k k ] + [ k k k . . . . ] + [ k k k k ]   one softmax

Keeping the parts apart means that nothing is copied a rollout or a canvas, and
that no dense mask over all canvases is ever built. The prompt, the longest of
them, may be left to a kernel (`kernels.py`) and joined to the rest by `merge`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dgr2_jax.models import partition

# Kernels by the platform that has them.
KERNELS = {'splash': 'tpu', 'cudnn': 'gpu'}
CHOICES = ('xla', *KERNELS, 'auto')
_SPLASH_HEAD_DIM = 128  # and multiples of it
_CUDNN_HEAD_DIM = 8  # and multiples of it, up to what all GPUs take
_CUDNN_MOST = 128
_CUDNN_DTYPES = ('bfloat16', 'float16')

# Finite, so that a row without any visible key gives garbage and not NaN.
_HIDDEN = -1e30
# Axes of a part's keys by their number: shared by a request, by a rollout, or
# owned by one canvas.
_AXES = {4: 'nskf', 5: 'ngskf', 6: 'ngmskf'}


class Part(NamedTuple):
  """Keys, values and who sees them.

  Attributes:
    key: [N, S, Hkv, F], [N, G, S, Hkv, F] or [N, G, M, S, Hkv, F].
    value: like `key`.
    visible: bool, broadcastable to [N, G, M, T, S].
    length: int32 [N] where that is the first `length` keys of a request for
      all its queries, which a kernel can take; see `prompt`.
  """
  key: jax.Array
  value: jax.Array
  visible: jax.Array
  length: jax.Array | None = None


def check(attention: str, head_dim: int, dtype: str) -> None:
  """Whether there is this attention for F and `dtype`, on some platform.

  Raises:
    ValueError: there is not; names the field of the model and the limit.
  """
  if attention not in CHOICES:
    raise ValueError(f'model.attention={attention!r}: expected '
                     + ', '.join(CHOICES))
  if attention in KERNELS and (limit := _limit(attention, head_dim, dtype)):
    raise ValueError(f'model.attention={attention!r} takes a {limit}; xla and '
                     'auto take any.')


def _limit(kernel: str, head_dim: int, dtype: str) -> str | None:
  """What a kernel takes, if it does not take this."""
  if kernel == 'splash' and head_dim % _SPLASH_HEAD_DIM:
    return ('model.head_dim that is a multiple '
            f'of {_SPLASH_HEAD_DIM}, not {head_dim}')
  if kernel == 'cudnn' and (head_dim % _CUDNN_HEAD_DIM
                            or head_dim > _CUDNN_MOST):
    return (f'model.head_dim that is a multiple of {_CUDNN_HEAD_DIM} and at '
            f'most {_CUDNN_MOST}, not {head_dim}')
  if kernel == 'cudnn' and dtype not in _CUDNN_DTYPES:
    return f'model.dtype of {" or ".join(_CUDNN_DTYPES)}, not {dtype}'
  return None


def choose(attention: str, head_dim: int, dtype: str) -> str:
  """What computes attention to prompts on the devices of the present mesh.

  Args:
    attention: of `CHOICES`; 'auto' is the kernel of the platform if it has one
      that takes F and `dtype`, else XLA.
    head_dim: F.
    dtype: of queries, keys and values.

  Returns:
    'xla' or one of `KERNELS`.

  Raises:
    ValueError: see `check`; or a kernel of another platform. On CPUs each runs
      by a stand-in, for tests.
  """
  check(attention, head_dim, dtype)
  platform = partition.platform()
  if attention == 'auto':
    fits = (name for name, its in KERNELS.items() if its == platform
            and not _limit(name, head_dim, dtype) and _installed(name))
    return next(fits, 'xla')
  if attention in KERNELS and platform not in (KERNELS[attention], 'cpu'):
    raise ValueError(
        f'model.attention={attention!r} runs on {KERNELS[attention].upper()}s, '
        f'not on a {platform}: expected xla or auto.')
  return attention


def _installed(kernel: str) -> bool:
  if kernel != 'cudnn':
    return True
  from dgr2_jax.models import cudnn
  return cudnn.installed()


def prompt(key: jax.Array, value: jax.Array, length: jax.Array) -> Part:
  """All tokens [N, S, Hkv, F] of prompts but padding, at or after `length`."""
  visible = jnp.arange(key.shape[1]) < length[:, None]
  return Part(key, value, visible[:, None, None, None], length)


def causal(query: jax.Array, key: jax.Array, value: jax.Array,
           length: jax.Array, kernel: str = 'xla',
           chunk: int = 0) -> jax.Array:
  """Prompt tokens see those up to themselves.

  Args:
    query: [N, S, H, F].
    key: [N, S, Hkv, F].
    value: like `key`.
    length: int32 [N]; what is at or after it is padding, seen by nobody.
    kernel: from `choose`.
    chunk: queries that XLA scores at a time; 0 is all at once.

  Returns:
    [N, S, H, F] in the dtype of the values.
  """
  if kernel in KERNELS:
    return _kernels().self_attention(kernel, query, key, value, length)
  part = prompt(key, value, length)
  n, size = query.shape[:2]
  chunk = min(chunk, size) or size
  padding = -size % chunk

  def attended(queries, index):  # [N, 1, 1, chunk, H, F], [1, 1, 1, chunk]
    visible = (jnp.arange(size) <= index[..., None]) & part.visible
    return attend(queries, [Part(key, value, visible)])

  queries = jnp.pad(query, ((0, 0), (0, padding), (0, 0), (0, 0)))
  out = in_chunks(
      attended, 1, queries.reshape(n, 1, -1, chunk, *query.shape[2:]),
      jnp.arange(size + padding).reshape(1, 1, -1, chunk))
  return out.reshape(queries.shape)[:, :size]


def attend(query: jax.Array, parts: Sequence[Part],
           kernel: str = 'xla') -> jax.Array:
  """One softmax over the keys of all parts, scores in float32.

  Args:
    query: [N, G, M, T, H, F]; head h reads key head h // (H / Hkv).
    parts: what the queries see; with a kernel, one of them has a length.
    kernel: from `choose`.

  Returns:
    [N, G, M, T, H, F] in the dtype of the values.
  """
  if kernel == 'xla':
    return _attend(query, parts)[0]
  shared, = (part for part in parts if part.length is not None)
  out, log_sum_exp = _kernels().cross_attention(
      kernel, query.reshape(query.shape[0], -1, *query.shape[4:]),
      shared.key, shared.value, shared.length)
  rest, scores = _attend(query, [x for x in parts if x is not shared])
  rest_log_sum_exp = jnp.moveaxis(jax.nn.logsumexp(scores, -1), -1, 3)
  return merge(
      (out.reshape(query.shape), rest),
      (x.reshape(query.shape[:5]) for x in (log_sum_exp, rest_log_sum_exp))
  ).astype(out.dtype)


def merge(outs: Iterable[jax.Array],
          log_sum_exps: Iterable[jax.Array]) -> jax.Array:
  """The softmax over all keys, from those over disjoint parts of them.

  Args:
    outs: what attention to each part alone gives, [..., F].
    log_sum_exps: float32 [...], of each part's scores.

  Returns:
    sum_i exp(lse_i - lse) out_i, where lse = log sum_i exp(lse_i); float32.
  """
  weights = jax.nn.softmax(jnp.stack(tuple(log_sum_exps)), 0)[..., None]
  return sum(weight * out for weight, out in zip(weights, outs))


def in_chunks(function: Callable[..., jax.Array], chunk: int,
              *arrays: jax.Array) -> jax.Array:
  """Applies `function` to `chunk` canvases at a time; 0 is all at once.

  Arrays and result are [N, G, M, ...].
  """
  m = arrays[0].shape[2]
  if not chunk or chunk >= m:
    return function(*arrays)
  if m % chunk:
    raise ValueError(
        f'model.canvas_chunk={chunk} does not divide the {m} block canvases')

  def to_chunks(x):
    x = x.reshape(*x.shape[:2], m // chunk, chunk, *x.shape[3:])
    return jnp.moveaxis(x, 2, 0)

  outs = jax.lax.map(jax.checkpoint(lambda xs: function(*xs)),
                     tuple(map(to_chunks, arrays)))
  outs = jnp.moveaxis(outs, 0, 2)
  return outs.reshape(*outs.shape[:2], m, *outs.shape[4:])


def _attend(query: jax.Array,
            parts: Sequence[Part]) -> tuple[jax.Array, jax.Array]:
  """By XLA: what `attend` returns, and scores [N, G, M, Hkv, H/Hkv, T, S]."""
  shape = query.shape
  num_kv_heads = parts[0].key.shape[-2]
  grouped = shape[:4] + (num_kv_heads, shape[4] // num_kv_heads, shape[5])
  query = query.reshape(grouped) * shape[5] ** -0.5
  scores = []
  for part in parts:
    score = jnp.einsum(
        f'ngmtkrf,{_AXES[part.key.ndim]}->ngmkrts', query, part.key,
        preferred_element_type=jnp.float32)
    scores.append(jnp.where(part.visible[:, :, :, None, None], score, _HIDDEN))
  sizes = [s.shape[-1] for s in scores]
  scores = jnp.concatenate(scores, -1)
  weights = jax.nn.softmax(scores, -1)
  weights = weights.astype(parts[0].value.dtype)
  out, begin = 0, 0
  for part, size in zip(parts, sizes):
    out += jnp.einsum(
        f'ngmkrts,{_AXES[part.key.ndim]}->ngmtkrf',
        weights[..., begin:begin + size], part.value)
    begin += size
  return out.reshape(shape), scores


def _kernels():
  from dgr2_jax.models import kernels  # Pallas takes a while to import.
  return kernels
