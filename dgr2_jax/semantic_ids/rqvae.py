"""RQ-VAE: an autoencoder whose latent is a sum of codes, one a level.

    embedding e [E] -> encoder -> z [D]
    r_0 = z;  k_l = argmin_k |r_l - c_(l,k)|^2;  r_(l+1) = r_l - c_(l,k_l)
    q = sum_l c_(l,k_l) -> decoder -> e'                ids are (k_0, k_1, ...)

    loss = |e - e'|^2 + beta sum_l |r_l - sg c_l|^2     (+ codebook, diversity)

The decoder reads z + sg(q - z), so that its gradient reaches the encoder
straight through the quantiser (TIGER, arXiv 2305.05065). What keeps all codes
in use is GR2's (arXiv 2602.07774): codebooks that start from k-means on the
residuals and follow exponential moving averages, dead codes reset to the
worst-fitted sample, and a loss on the mean assignment.

Letters: N items in a batch, E embedding, D latent, L levels, K codes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp
import ml_collections

from dgr2_jax.semantic_ids import last_level

INITS = ('kmeans', 'random')
CODEBOOKS = ('ema', 'gradient')
_HIGHEST = jax.lax.Precision.HIGHEST  # bfloat16 products would tip codes


@dataclasses.dataclass(frozen=True)
class RqVaeConfig:
  """The model, how it is trained, and how ids are read off it.

  Attributes:
    levels: L, of `config.semantic_ids`, as the next two.
    codes: K.
    seed: of the weights, the clustering, the batches and a random last level.
    hidden: widths of the encoder's hidden layers; the decoder mirrors them.
    latent: D; small, for each level shrinks the residual by about K^(-1/D),
      and near-duplicates are told apart by what the last one still resolves.
    init: codebooks start from 'kmeans' (k-means++ on residuals, level by
      level) or at 'random'.
    codebook: codes follow moving averages, 'ema', or the 'gradient'.
    decay: of the moving averages.
    reset_after: tau, batches without use after which a code is reset to the
      worst-fitted sample; 0 is never.
    commitment_weight: beta.
    diversity_weight: lambda, of the loss on the mean assignment.
    last_level: of `last_level.KINDS`.
    batch_size: items a step; all of them where the catalogue is smaller.
    steps: of training.
    learning_rate, warmup_steps, schedule, weight_decay, grad_clip, b1, b2: see
      `training.optimizer`.
  """
  levels: int
  codes: int
  seed: int
  hidden: tuple[int, ...] = (256,)
  latent: int = 4
  init: str = 'kmeans'
  codebook: str = 'ema'
  decay: float = .99
  reset_after: int = 50
  commitment_weight: float = .25
  diversity_weight: float = .1
  last_level: str = last_level.COLLISION_AWARE
  batch_size: int = 512
  steps: int = 600
  learning_rate: float = 3e-3
  warmup_steps: int = 50
  schedule: str = 'cosine'
  weight_decay: float = 0.
  grad_clip: float = 1.
  b1: float = .9
  b2: float = .99

  def __post_init__(self):
    for field, allowed in (
        ('init', INITS), ('codebook', CODEBOOKS),
        ('last_level', last_level.KINDS),
        ('schedule', ('cosine', 'constant'))):
      if getattr(self, field) not in allowed:
        self._refuse(field, f'one of {allowed}')
    for field in ('latent', 'batch_size', 'steps'):
      if getattr(self, field) < 1:
        self._refuse(field, 'at least 1')
    if not self.hidden or min(self.hidden) < 1:
      self._refuse('hidden', 'one or more widths of at least 1')
    if not 0 <= self.decay < 1:
      self._refuse('decay', 'a number from 0 to below 1')
    for field in ('reset_after', 'commitment_weight', 'diversity_weight'):
      if getattr(self, field) < 0:
        self._refuse(field, 'at least 0')

  def _refuse(self, field: str, expected: str):
    raise ValueError(
        f'config.semantic_ids.rqvae.{field} is {getattr(self, field)!r}: '
        f'expected {expected}.')

  @classmethod
  def from_config(cls, section: ml_collections.ConfigDict) -> RqVaeConfig:
    """From `config.semantic_ids`; what `rqvae` leaves out keeps its default.

    Raises:
      ValueError: a field is unknown or out of range.
    """
    fields = {name: value for name, value in section.rqvae.items()
              if name != 'embeddings'}
    known = {field.name for field in dataclasses.fields(cls)} - {
        'levels', 'codes', 'seed'}
    if unknown := sorted(fields.keys() - known):
      raise ValueError(
          f'config.semantic_ids.rqvae.{unknown[0]} is no field: expected some '
          f'of {", ".join(sorted(known | {"embeddings"}))}.')
    if 'hidden' in fields:
      fields['hidden'] = tuple(fields['hidden'])  # JSON has no tuples
    return cls(levels=section.levels, codes=section.codes, seed=section.seed,
               **fields)


class Quantised(NamedTuple):
  """Latents met by the codebooks.

  Attributes:
    codes: int32 [N, L], the nearest codes.
    residuals: float32 [N, L, D], what each level quantises: r_l.
    chosen: float32 [N, L, D], the codes' rows, without gradient.
    distances: float32 [N, L, K], squared.
  """
  codes: jax.Array
  residuals: jax.Array
  chosen: jax.Array
  distances: jax.Array


def quantise(latent: jax.Array, codebooks: jax.Array) -> Quantised:
  """Residual quantisation.

  Args:
    latent: float32 [N, D].
    codebooks: float32 [L, K, D].
  """
  residual, levels = latent, []
  for table in codebooks:
    distance = (
        jnp.square(residual).sum(-1, keepdims=True)
        - 2 * jnp.einsum('nd,kd->nk', residual, table, precision=_HIGHEST)
        + jnp.square(table).sum(-1))
    code = distance.argmin(-1).astype(jnp.int32)
    row = jax.lax.stop_gradient(table[code])
    levels.append((code, residual, row, distance))
    residual = residual - row
  return Quantised(*(jnp.stack(x, axis=1) for x in zip(*levels)))


class Mlp(nn.Module):
  """Dense layers with ReLU between them."""
  widths: tuple[int, ...]

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    for width in self.widths[:-1]:
      x = nn.relu(nn.Dense(width)(x))
    return nn.Dense(self.widths[-1])(x)


class RqVae(nn.Module):
  """Encoder, codebooks and decoder for embeddings of `size` E."""
  config: RqVaeConfig
  size: int

  def setup(self):
    c = self.config
    self.encoder = Mlp((*c.hidden, c.latent))
    self.decoder = Mlp((*reversed(c.hidden), self.size))
    self.codebooks = self.param(
        'codebooks', nn.initializers.normal(c.latent ** -.5),
        (c.levels, c.codes, c.latent), jnp.float32)

  def encode(self, embeddings: jax.Array) -> jax.Array:
    """float32 [N, D] of unit rows [N, E], whose elements are made unit size."""
    return self.encoder(embeddings * self.size ** .5)

  def decode(self, latent: jax.Array) -> jax.Array:
    """float32 [N, E] of [N, D]."""
    return self.decoder(latent) * self.size ** -.5

  def __call__(self, embeddings: jax.Array) -> tuple[Quantised, jax.Array]:
    """What the codebooks make of embeddings [N, E], and their decoding."""
    latent = self.encode(embeddings)
    quantised = quantise(latent, self.codebooks)
    straight = latent + jax.lax.stop_gradient(
        quantised.chosen.sum(axis=1) - latent)
    return quantised, self.decode(straight)


def loss(model: RqVae, params: Any, batch: jax.Array
         ) -> tuple[jax.Array, tuple[dict[str, jax.Array], Quantised]]:
  """The objective on a batch; nothing in it is drawn.

  Args:
    model: the module.
    params: its parameters.
    batch: float32 [N, E], unit rows.

  Returns:
    The loss; its terms, scalars; and the quantisation, which the codebooks are
    updated from. The reconstruction is summed over E, so it is relative to the
    embedding's square; terms in the latent are means over D.
  """
  c = model.config
  quantised, decoded = model.apply({'params': params}, batch)
  terms = {
      'reconstruction': jnp.square(batch - decoded).sum(-1).mean(),
      'commitment': jnp.square(
          quantised.residuals - quantised.chosen).sum(1).mean(),
      'diversity': diversity(quantised.distances)}
  total = (terms['reconstruction'] + c.commitment_weight * terms['commitment']
           + c.diversity_weight * terms['diversity'])
  if c.codebook == 'gradient':
    level = jnp.arange(c.levels)
    rows = params['codebooks'][level, quantised.codes]  # [N, L, D]
    total += jnp.square(
        jax.lax.stop_gradient(quantised.residuals) - rows).sum(1).mean()
  return total, (terms, quantised)


def diversity(distances: jax.Array) -> jax.Array:
  """How unevenly a batch uses the codes: 0 evenly, 1 one code only.

      p_l = mean_n softmax_k(-d_nlk / s_l),   mean_l (1 - H(p_l) / log K)

  s_l is the mean squared distance to the nearest code, so that deep levels,
  whose residuals are small, count as much as the first.

  Args:
    distances: float32 [N, L, K], squared.

  Returns:
    A scalar.
  """
  codes = distances.shape[-1]
  scale = jax.lax.stop_gradient(distances.min(-1).mean(0))[:, None]  # [L, 1]
  mean = jax.nn.softmax(-distances / jnp.maximum(scale, 1e-6)).mean(0)
  # The gradient of x log x is infinite at 0, where far codes underflow to.
  entropy = -(mean * jnp.log(mean + 1e-12)).sum(-1)
  return (1 - entropy / jnp.log(max(codes, 2))).mean()


@struct.dataclass
class Usage:
  """What the codebooks remember between batches.

  Attributes:
    count: float32 [L, K], moving average of the samples that chose a code.
    total: float32 [L, K, D], that of their sum.
    idle: int32 [L, K], batches since a code was last chosen.
  """
  count: jax.Array
  total: jax.Array
  idle: jax.Array


def initial_usage(codebooks: jax.Array) -> Usage:
  """Every code as if one sample had been its mean."""
  shape = codebooks.shape[:2]
  return Usage(jnp.ones(shape), codebooks, jnp.zeros(shape, jnp.int32))


def follow(usage: Usage, residuals: jax.Array, codes: jax.Array,
           decay: float) -> Usage:
  """Moves the averages by a batch (VQ-VAE, arXiv 1711.00937, appendix A.1).

      count <- g count + (1 - g) n;   total <- g total + (1 - g) sum r

  Args:
    usage: before the batch.
    residuals: float32 [N, L, D].
    codes: int32 [N, L].
    decay: g.
  """
  chosen = jax.nn.one_hot(codes, usage.count.shape[1])  # [N, L, K]
  count = chosen.sum(0)
  total = jnp.einsum('nlk,nld->lkd', chosen, residuals, precision=_HIGHEST)
  return Usage(
      count=decay * usage.count + (1 - decay) * count,
      total=decay * usage.total + (1 - decay) * total,
      idle=jnp.where(count > 0, 0, usage.idle + 1))


def averages(usage: Usage, codebooks: jax.Array) -> jax.Array:
  """The codebooks that the averages stand for, [L, K, D].

  A code that was not chosen for so long that its average is nothing stays.
  """
  count = usage.count[..., None]
  return jnp.where(count > 1e-12, usage.total / jnp.maximum(count, 1e-12),
                   codebooks)


def reset_dead(codebooks: jax.Array, usage: Usage, residuals: jax.Array,
               errors: jax.Array, after: int) -> tuple[jax.Array, Usage]:
  """Moves codes that were idle for `after` batches to worst-fitted samples.

  The first dead code of a level takes the sample with the largest error, the
  next one the second largest, and so on; with more dead codes than samples the
  rest wait.

  Args:
    codebooks: float32 [L, K, D].
    usage: after the batch.
    residuals: float32 [N, L, D].
    errors: float32 [N, L], squared distances to the chosen codes.
    after: tau, at least 1.

  Returns:
    The codebooks and their usage.
  """
  def level(table, idle, samples, error):
    dead = idle >= after
    rank = jnp.cumsum(dead) - 1  # among the dead
    _, worst = jax.lax.top_k(error, min(len(error), len(table)))
    reset = dead & (rank < len(worst))
    taken = samples[worst[jnp.minimum(rank, len(worst) - 1)]]
    return reset, jnp.where(reset[:, None], taken, table)

  reset, codebooks = jax.vmap(level, in_axes=(0, 0, 1, 1))(
      codebooks, usage.idle, residuals, errors)
  fresh = initial_usage(codebooks)
  keep = lambda new, old: jnp.where(
      reset.reshape(reset.shape + (1,) * (old.ndim - 2)), new, old)
  return codebooks, jax.tree.map(keep, fresh, usage)
