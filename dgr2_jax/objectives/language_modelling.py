"""Next-token cross-entropy of packed rows: the objective of mid-training.

    L = sum_t w_t (-log p(x_t | x_s, start_t <= s < t)) / sum_t w_t

A row holds several examples one after the other. A token sees those of its own
example only, from `start_t` on, and positions count from there, so that an
example is read as if it stood alone:

    tokens   a a a b b     position  0 1 2 0 1     sees  1 . . . .
    start    0 0 0 3 3                                   1 1 . . .
                                                         1 1 1 . .
                                                         . . . 1 .
                                                         . . . 1 1
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dgr2_jax.models import attention as attention_lib
from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib
from dgr2_jax.objectives import scoring


def hidden_states(model: transformer.Transformer, params: Any,
                  tokens: jax.Array, start: jax.Array) -> jax.Array:
  """States [N, T, D] of packed rows; state t scores token t + 1.

  Args:
    model: the decoder.
    params: its parameters.
    tokens: int32 [N, T].
    start: int32 [N, T], where each token's example begins; -1 in padding,
      whose states mean nothing.
  """
  index = jnp.arange(tokens.shape[1])
  visible = (start[..., None] <= index) & (index <= index[:, None])  # [N, T, T]

  def attention(query, key, value, cache):
    del cache
    out = attention_lib.attend(query[:, None, None], [
        attention_lib.Part(key, value, visible[:, None, None])])
    return out.reshape(query.shape), None

  return model.apply({'params': params}, tokens, index - start, attention,
                     method='hidden')[0]


def token_scores(model: transformer.Transformer, params: Any,
                 batch: dict[str, jax.Array],
                 vocabulary: vocabulary_lib.Vocabulary,
                 head_chunk: int) -> tuple[jax.Array, ...]:
  """Weight, log-probability (0 without a weight) and top-1 of tokens 1 to T-1.

  Args:
    model: the decoder.
    params: its parameters.
    batch: `tokens`, `start` and `weight`, see `pipeline.packed_fields`.
    vocabulary: ids banned from the softmax.
    head_chunk: tokens a row that meet the LM head at a time; 0 is all.

  Returns:
    float32, float32 and bool, [N, T - 1] each.
  """
  states = hidden_states(model, params, batch['tokens'], batch['start'])
  weight = batch['weight'][:, 1:]
  logprob, top = scoring.token_scores(
      model, params, states[:, :-1], batch['tokens'][:, 1:], vocabulary,
      head_chunk)
  # where, not *: padding may hold a banned token's -inf.
  return weight, jnp.where(weight > 0, logprob, 0), top & (weight > 0)


def loss(model: transformer.Transformer, params: Any,
         batch: dict[str, jax.Array], vocabulary: vocabulary_lib.Vocabulary,
         head_chunk: int
         ) -> tuple[scoring.Mean, dict[str, scoring.Mean | jax.Array]]:
  """The objective at the top of this module; arguments as `token_scores`.

  Returns:
    The loss, and the share of learned tokens that are the arg-max and the
    number of tokens that are not padding.
  """
  weight, logprob, top = token_scores(
      model, params, batch, vocabulary, head_chunk)
  return scoring.Mean(-(weight * logprob).sum(), weight.sum()), {
      'top1': scoring.Mean(top.sum(), (weight > 0).sum()),
      'tokens': (batch['start'] >= 0).sum().astype(jnp.float32)}
