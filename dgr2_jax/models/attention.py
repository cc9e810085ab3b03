"""Attention over keys that lie in several arrays.

A block canvas sees the prompt (one array a request), the clean tokens of its
own rollout (one array a rollout) and its own block:

              prompt [N, P]     clean [N, G, L]    block [N, G, M, B]
    query -> [ k k k k k k ] + [ k k k . . . . ] + [ k k k k ]   one softmax

Keeping the parts apart means that nothing is copied a rollout or a canvas, and
that no dense mask over all canvases is ever built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

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
  """
  key: jax.Array
  value: jax.Array
  visible: jax.Array


def attend(query: jax.Array, parts: Sequence[Part]) -> jax.Array:
  """One softmax over the keys of all parts, scores in float32.

  Args:
    query: [N, G, M, T, H, F]; head h reads key head h // (H / Hkv).
    parts: what the queries see.

  Returns:
    [N, G, M, T, H, F] in the dtype of the values.
  """
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
  weights = jax.nn.softmax(jnp.concatenate(scores, -1), -1)
  weights = weights.astype(parts[0].value.dtype)
  out, begin = 0, 0
  for part, size in zip(parts, sizes):
    out += jnp.einsum(
        f'ngmkrts,{_AXES[part.key.ndim]}->ngmtkrf',
        weights[..., begin:begin + size], part.value)
    begin += size
  return out.reshape(shape)
