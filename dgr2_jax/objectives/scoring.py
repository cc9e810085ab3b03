"""Log-probabilities of given tokens, without ever holding [N, T, V].

Only rows that carry a loss reach the head, and they reach it in chunks. What
an objective makes of them are `Mean`s, so that a batch may come in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib


@flax.struct.dataclass
class Mean:
  """A weighted mean, as sums that add up over the parts of a batch.

  Attributes:
    total: scalar, the weighted sum.
    weight: scalar, the sum of weights; no function of parameters.
  """
  total: jax.Array
  weight: jax.Array

  @property
  def value(self) -> jax.Array:
    """The mean; 0 where nothing has a weight."""
    return self.total / jnp.maximum(self.weight, 1e-9)

  def times(self, factor: float) -> Mean:
    """The mean of values times `factor`."""
    return self.replace(total=factor * self.total)


def values(metrics: Mapping[str, Any]) -> dict[str, jax.Array]:
  """Metrics as scalars: the values of means, others as they are."""
  return {k: v.value if isinstance(v, Mean) else v for k, v in metrics.items()}


def gather_rows(weight: jax.Array, capacity: int,
                *arrays: jax.Array) -> tuple[jax.Array, ...]:
  """Moves the rows with a weight to the front and drops the rest.

  Args:
    weight: float [N, T]; rows that carry a loss are positive.
    capacity: K, at least the number of positive weights of any request.
    *arrays: [N, T, ...].

  Returns:
    `weight` and `arrays`, gathered to [N, K, ...].
  """
  index = jnp.argsort(weight <= 0, axis=1, stable=True)[:, :capacity]

  def take(x):
    return jnp.take_along_axis(
        x, index.reshape(index.shape + (1,) * (x.ndim - 2)), axis=1)

  return tuple(map(take, (weight, *arrays)))


def token_scores(model: transformer.Transformer, params: Any,
                 states: jax.Array, tokens: jax.Array,
                 vocabulary: vocabulary_lib.Vocabulary,
                 chunk: int = 0, temperature: float = 1.
                 ) -> tuple[jax.Array, jax.Array]:
  """Log-probability of each token and whether it is the most likely one.

  Args:
    model: the decoder.
    params: its parameters.
    states: [N, K, D], aligned: state k scores token k.
    tokens: int32 [N, K].
    vocabulary: ids banned from the softmax.
    chunk: rows a request that meet the head at a time; 0 is all. The backward
      pass recomputes a chunk's logits.
    temperature: divides the logits.

  Returns:
    float32 [N, K] log-probabilities (-inf for a banned token) and bool [N, K].
  """

  def score(states, tokens):
    logits = vocabulary.allow(
        model.apply({'params': params}, states, method='logits')) / temperature
    chosen = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
    return (chosen - jax.nn.logsumexp(logits, -1),
            jnp.argmax(logits, -1) == tokens)

  return in_chunks(score, chunk, states, tokens)


def in_chunks(function: Callable[..., Any], chunk: int,
              *arrays: jax.Array) -> Any:
  """Applies `function` to `chunk` rows (axis 1) of [N, K, ...] at a time.

  The backward pass recomputes a chunk. Padded rows, all zeros, are cut off.

  Args:
    function: arrays [N, k, ...] -> a tree of arrays [N, k, ...].
    chunk: k; 0 is all at once.
    *arrays: [N, K, ...].
  """
  n, k = arrays[0].shape[:2]
  if not chunk or chunk >= k:
    return function(*arrays)
  chunks = -(-k // chunk)
  pad = chunks * chunk - k

  def to_chunks(x):
    x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(n, chunks, chunk, *x.shape[2:]), 1, 0)

  outs = jax.lax.map(jax.checkpoint(lambda xs: function(*xs)),
                     tuple(map(to_chunks, arrays)))
  return jax.tree.map(
      lambda x: jnp.moveaxis(x, 0, 1).reshape(
          n, chunks * chunk, *x.shape[3:])[:, :k], outs)
