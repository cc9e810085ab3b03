"""Policy gradient with exact trace replay: GR2's RL and Diffusion-GR2's.

For response g of a request, token i decided at log-probability l_i by the
policy that decoded it, and advantage A_g,

    rho_i = exp(log p(x_i | the canvas that decided it) - l_i)
    L = - mean over groups of 1 / sum_g |o_g| *
          sum_g sum_i min(rho_i A_g, clip(rho_i, 1 - eps_low, 1 + eps_high) A_g)
        + kl_weight * the same mean of k3, an estimate of
          KL(policy || reference)

(token-level clipped surrogate of DAPO, arXiv 2503.14476; ratios by trace
replay as in TraceRL, 2509.06949). With B = 1 every token is decided on the
clean stream and this is GR2's objective for the AR model.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib
from dgr2_jax.objectives import scoring


# A log ratio whose exponential is finite; beyond, there is no gradient.
_LARGEST = 20.


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
  """The surrogate.

  Attributes:
    clip_low: eps_low.
    clip_high: eps_high.
    kl_weight: of the divergence from a reference.
    head_chunk: rows a request that meet the LM head at a time; 0 is all.
  """
  clip_low: float = 0.2
  clip_high: float = 0.2
  kl_weight: float = 0.0
  head_chunk: int = 0


def replayed_logprobs(
    model: transformer.Transformer, params: Any, batch: dict[str, jax.Array],
    canvas: canvas_lib.CanvasConfig, vocabulary: vocabulary_lib.Vocabulary,
    temperature: float = 1., head_chunk: int = 0) -> jax.Array:
  """Log-probability of every response token on the canvas that decided it.

  Args:
    model: the decoder.
    params: its parameters.
    batch: `prompt` [N, P], `prompt_length` [N], `response` [N, G, L] and the
      fields of its `replay.Replay`, rows R of M canvases.
    canvas: block size and rules of the rollout.
    vocabulary: special ids.
    temperature: of the rollout; 0 (greedy) is scored as 1.
    head_chunk: see `PolicyConfig`.

  Returns:
    float32 [N, G, L]; 0 where no canvas decided the token. Seeds are scored
    wherever they stand, beyond the end of the response too.
  """
  response = batch['response']
  n, g, length = response.shape
  states = canvas_lib.states(
      model, params, canvas_lib.Canvas(
          batch['prompt'], batch['prompt_length'],
          canvas_lib.take_rows(response, batch['owner']), batch['start'],
          batch['masked']), vocabulary.mask_id, canvas)
  clean = canvas_lib.take_rows(states.clean, batch['first'])
  index = jnp.broadcast_to(
      jnp.arange(g * length).reshape(g, length), response.shape)
  parts = []
  if canvas.shifted:
    seeds = jnp.arange(0, length, canvas.block_size)
    parts.append((clean[:, :, seeds], index[:, :, seeds],
                  jnp.ones((n, g, len(seeds)), bool)))
  if batch['masked'].shape[2]:
    at = (batch['owner'][..., None, None] * length
          + canvas_lib.block_positions(batch['start'], canvas.block_size))
    parts.append((states.noisy, at, batch['decided']))
  total = jnp.zeros((n, g * length), jnp.float32)
  for state, at, used in parts:
    state = state.reshape(n, -1, state.shape[-1])
    at, used = at.reshape(n, -1), used.reshape(n, -1)
    # Every token is decided once: no more than g * length rows are used.
    used, state, at = scoring.gather_rows(
        used.astype(jnp.float32), min(g * length, at.shape[1]), state, at)
    tokens = jnp.take_along_axis(response.reshape(n, -1), at, 1)
    logprob, _ = scoring.token_scores(
        model, params, state, tokens, vocabulary, head_chunk,
        temperature or 1.)
    # where, not *: an unused row may hold a banned token's -inf.
    total = jax.vmap(lambda row, at, values: row.at[at].add(values))(
        total, at, jnp.where(used > 0, logprob, 0))
  return total.reshape(response.shape)


def loss(model: transformer.Transformer, params: Any,
         batch: dict[str, jax.Array], canvas: canvas_lib.CanvasConfig,
         config: PolicyConfig, vocabulary: vocabulary_lib.Vocabulary,
         temperature: float = 1.
         ) -> tuple[scoring.Mean, dict[str, scoring.Mean | jax.Array]]:
  """The objective at the top of this module.

  Args:
    model: the decoder.
    params: its parameters.
    batch: see `replayed_logprobs`, and `logprob` float [N, G, L] (recorded),
      `response_length` int [N, G], `advantage` float [N, G], `kept` bool [N]
      (groups that count) and, with `kl_weight`, `reference_logprob`.
    canvas: block size and rules of the rollout.
    config: see `PolicyConfig`.
    vocabulary: special ids.
    temperature: of the rollout.

  Returns:
    The loss, 0 where no group counts, and metrics; `max_log_ratio` is no mean
    but a maximum.
  """
  logprob = replayed_logprobs(
      model, params, batch, canvas, vocabulary, temperature, config.head_chunk)
  index = jnp.arange(logprob.shape[-1])
  stands = index < batch['response_length'][..., None]
  counted = stands & batch['kept'][:, None, None]
  weight = counted / jnp.maximum(
      counted.sum((1, 2), keepdims=True), 1)  # sums to 1 a group
  mean = lambda x: scoring.Mean((weight * x).sum(), batch['kept'].sum())
  log_ratio = jnp.where(stands, logprob - batch['logprob'], 0.)
  # Weight 0 would not undo an infinite ratio.
  ratio = jnp.exp(jnp.where(counted, jnp.minimum(log_ratio, _LARGEST), 0.))
  advantage = batch['advantage'][..., None]
  clipped = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
  surrogate = jnp.minimum(ratio * advantage, clipped * advantage)
  objective = -surrogate
  metrics = {
      'clip_fraction': mean(clipped * advantage < ratio * advantage),
      'policy_loss': mean(-surrogate),
      # 0 in a round's first update but for rounding.
      'max_log_ratio': jnp.abs(log_ratio).max(),
      'mean_log_ratio': mean(jnp.abs(log_ratio)),
      # Of the sampled tokens: an estimate of the policy's entropy in nats.
      'entropy': mean(-logprob)}
  if config.kl_weight:
    gap = jnp.where(counted, jnp.minimum(
        batch['reference_logprob'] - logprob, _LARGEST), 0.)
    kl = jnp.exp(gap) - gap - 1
    objective += config.kl_weight * kl
    metrics['kl'] = mean(kl)
  return mean(objective), metrics
