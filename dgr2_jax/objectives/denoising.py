"""Supervised objective of the AR model (SFT) and of conversion (CFT).

Masked-diffusion training of the assistant message (arXiv 2607.01170, stage 1):

    L = sum_i w_i (-log p(x_i | prompt, clean blocks before, visible tokens of
        its own block)) / sum_i w_i,    w_i = l_r (reasoning) or l_o (answer)

Every block is shown twice, under two masks that partition its maskable
positions, so each token is supervised once. (Several such pairs, `mask_pairs`,
cost little behind one prompt; L is then their mean.) The mask ratio t of a
block is uniform on (0, 1] and its weight is 1, not 1/t. Under shifted alignment
a block's first token (the seed) is known when the block is decoded: it is in
neither mask, and is supervised on the clean stream instead. With B = 1 every
token is a seed and L is the AR model's cross-entropy.

The blocks of a response lie on the grid of the decoder, or (`random_offset`)
behind a first window that hands over to them after a random number o of tokens,
1 to B, where a window that verification moves to its pivot may begin:

    grid       [ 0 .. B-1 ][ B .. 2B-1 ][ 2B ..           ]
    offset o   [ 0 .. o-1 | ..B-1 ]
                     [ o .. o+B-1 ][ o+B .. o+2B-1 ][ ..
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


@dataclasses.dataclass(frozen=True)
class DenoisingConfig:
  """Weights and noise.

  Attributes:
    reasoning_weight: l_r.
    answer_weight: l_o; also of EOS and of the EOS that fills the last block.
    ar_weight: of the clean stream's tokens that are not seeds: keeps the AR
      model alive inside the student (token_causal only). 0 is the paper's
      objective.
    full_block_prob: chance that a block's first canvas masks all of it, seed
      included, and the second is dropped (for fused decoding).
    min_ratio: lower end of the mask ratio t.
    mask_pairs: independent pairs of masks of every block.
    random_offset: whether every response's grid is displaced; one more block.
    head_chunk: rows a request that meet the LM head at a time; 0 is all.
  """
  reasoning_weight: float = 0.5
  answer_weight: float = 1.0
  ar_weight: float = 0.0
  full_block_prob: float = 0.0
  min_ratio: float = 0.0
  mask_pairs: int = 1
  random_offset: bool = False
  head_chunk: int = 0

  def __post_init__(self):
    for field in ('reasoning_weight', 'answer_weight', 'ar_weight'):
      if getattr(self, field) < 0:
        raise ValueError(f'{field}={getattr(self, field)} must be >= 0')
    if not (self.reasoning_weight or self.answer_weight):
      raise ValueError('reasoning_weight and answer_weight are both 0')
    for field in ('full_block_prob', 'min_ratio'):
      if not 0 <= getattr(self, field) <= 1:
        raise ValueError(f'{field}={getattr(self, field)} is not in [0, 1]')


def complementary_masks(key: jax.Array, num_blocks: int,
                        canvas: canvas_lib.CanvasConfig,
                        config: DenoisingConfig) -> jax.Array:
  """Two masks of every block that partition its maskable positions.

  Args:
    key: one response's key.
    num_blocks: L / B.
    canvas: block size and alignment.
    config: noise.

  Returns:
    bool [num_blocks, 2, B]. The first masks exactly max(1, round(t * n)) of
    the n maskable positions.
  """
  b = canvas.block_size
  ratio_key, order_key, full_key = jax.random.split(key, 3)
  maskable = jnp.arange(b) >= (1 if canvas.shifted else 0)
  n = b - 1 if canvas.shifted else b
  # uniform() is in [0, 1): 1 - it is in (0, 1].
  ratio = 1 - jax.random.uniform(
      ratio_key, (num_blocks, 1)) * (1 - config.min_ratio)
  count = jnp.maximum(1, jnp.round(ratio * n))
  noise = jax.random.uniform(order_key, (num_blocks, b))
  rank = jnp.argsort(jnp.argsort(jnp.where(maskable, noise, jnp.inf)))
  first = (rank < count) & maskable
  masks = jnp.stack([first, maskable & ~first], axis=1)
  full = jax.random.bernoulli(
      full_key, config.full_block_prob, (num_blocks, 1, 1))
  whole = jnp.array([True, False])[:, None]  # the partner is dropped
  return jnp.where(full, whole, masks)


def noised_canvas(batch: dict[str, jax.Array], key: jax.Array,
                  config: canvas_lib.CanvasConfig,
                  noise: DenoisingConfig) -> canvas_lib.Canvas:
  """Places a batch on the canvas, with `mask_pairs` pairs of every block.

  Noise is a function of (key, example id): batch order, hosts and devices
  don't change it.

  Args:
    batch: `prompt` [N, P], `prompt_length` [N], `response` [N, G, L] and
      `example_id` [N]; L is a multiple of B.
    key: the step's key.
    config: block size and alignment.
    noise: mask ratios.
  """
  n, g, length = batch['response'].shape
  b = config.block_size
  if length % b:
    raise ValueError(f'response length {length} is not a multiple of the '
                     f'block size {b}')
  if b == 1 and config.shifted:  # every token is a seed
    return canvas_lib.autoregressive(
        batch['prompt'], batch['prompt_length'], batch['response'])
  begins = jnp.broadcast_to(jnp.arange(length // b) * b, (n, g, length // b))
  if noise.random_offset:
    offset = jax.vmap(lambda i: jax.random.randint(jax.random.fold_in(
        jax.random.fold_in(key, i), g * noise.mask_pairs), (g, 1), 1, b + 1))(
            batch['example_id'])
    begins = jnp.concatenate([begins[..., :1], begins + offset], -1)
  blocks = begins.shape[-1]

  def draw(example_id):
    keys = jax.random.split(
        jax.random.fold_in(key, example_id), g * noise.mask_pairs)
    return jax.vmap(lambda k: complementary_masks(k, blocks, config, noise))(
        keys)

  masked = jax.vmap(draw)(batch['example_id'])  # [N, G * pairs, blocks, 2, B]
  start = jnp.tile(jnp.repeat(begins, 2, -1), noise.mask_pairs)
  return canvas_lib.Canvas(
      batch['prompt'], batch['prompt_length'], batch['response'],
      start, masked.reshape(*start.shape, b))


def token_weights(batch: dict[str, jax.Array],
                  config: DenoisingConfig) -> jax.Array:
  """l_r, l_o, or 0 where it is given, of every response position [N, G, L]."""
  index = jnp.arange(batch['response'].shape[-1])
  after = index >= batch['response_length'][..., None]
  weight = jnp.where(batch['is_answer'] | after, config.answer_weight,
                     config.reasoning_weight)
  return weight * (index >= batch['supervised_from'][..., None])


def supervision(batch: dict[str, jax.Array], canvas: canvas_lib.Canvas,
                config: canvas_lib.CanvasConfig,
                weights: DenoisingConfig) -> tuple[jax.Array, jax.Array]:
  """Loss weight of every clean and every noisy token.

  Returns:
    float [N, G, L] and [N, G, M, B]. Blocks after the one that holds EOS
    carry nothing; the EOS that fill that block are supervised as noise.
  """
  b = config.block_size
  weight = token_weights(batch, weights)
  index = jnp.arange(weight.shape[-1])
  length = batch['response_length'][..., None]
  # Of the grid; the first window ends there.
  displaced = weights.random_offset and canvas.start.shape[-1] > 0
  offset = canvas.start[..., 2:3] if displaced else b
  filled = offset + (length - offset + b - 1) // b * b
  seed = jnp.full(index.shape, weights.ar_weight)
  if config.shifted:
    seed = jnp.where((index == 0) | ((index - offset) % b == 0), 1., seed)
  clean = weight * seed * (index < length)
  positions = canvas_lib.block_positions(canvas.start, canvas.masked.shape[-1])
  noisy = canvas_lib.take_tokens(
      weight * (index < filled) / weights.mask_pairs, positions)
  noisy *= canvas.masked
  if displaced:
    first = (canvas.start == 0)[..., None]
    noisy *= positions < jnp.where(first, offset[..., None], index.size)
  if config.shifted and noisy.shape[2]:
    noisy *= jnp.arange(noisy.shape[-1]) > 0  # a seed is scored when clean
  return clean, noisy


def loss(model: transformer.Transformer, params: Any,
         batch: dict[str, jax.Array], key: jax.Array,
         config: canvas_lib.CanvasConfig, denoising: DenoisingConfig,
         vocabulary: vocabulary_lib.Vocabulary
         ) -> tuple[scoring.Mean, dict[str, scoring.Mean]]:
  """The objective at the top of this module.

  Args:
    model: the decoder.
    params: its parameters.
    batch: see `noised_canvas`, and `response_length` int32 [N, G] (tokens
      through EOS), `is_answer` bool [N, G, L] and `supervised_from` int32
      [N, G], before which nothing is learned.
    key: the step's key.
    config: block size, clean stream and alignment.
    denoising: weights and noise.
    vocabulary: special ids.

  Raises:
    ValueError: `ar_weight` or `random_offset` with a block-causal clean stream.

  Returns:
    The loss and metrics: mean cross-entropy in nats and share of
    tokens that are the arg-max, on the clean stream and under noise.
  """
  if denoising.ar_weight and config.clean_stream == 'block_causal':
    raise ValueError('ar_weight needs canvas.clean_stream=token_causal: a '
                     'block_causal clean stream sees the tokens it would score')
  if denoising.random_offset and config.clean_stream == 'block_causal':
    raise ValueError('random_offset needs canvas.clean_stream=token_causal: '
                     'keys of a block_causal stream know the rest of a block')
  canvas = noised_canvas(batch, key, config, denoising)
  states = canvas_lib.states(model, params, canvas, vocabulary.mask_id, config)
  clean_weight, noisy_weight = supervision(batch, canvas, config, denoising)
  n, g, length = canvas.clean.shape
  m, b = canvas.masked.shape[2:]
  total, total_weight, metrics = 0., 0., {}

  def add(name, weight, capacity, states, tokens):
    nonlocal total, total_weight
    weight, states, tokens = scoring.gather_rows(
        weight.reshape(n, -1), capacity,
        states.reshape(n, -1, states.shape[-1]), tokens.reshape(n, -1))
    logprob, top = scoring.token_scores(
        model, params, states, tokens, vocabulary, denoising.head_chunk)
    used = weight > 0
    count = used.sum()
    # where, not *: an unused row may hold a banned token's -inf.
    total -= jnp.where(used, weight * logprob, 0).sum()
    total_weight += weight.sum()
    metrics[f'{name}_nats'] = scoring.Mean(
        -jnp.where(used, logprob, 0).sum(), count)
    metrics[f'{name}_top1'] = scoring.Mean((used & top).sum(), count)

  seeds = g * (length if denoising.ar_weight or b == 1
               else length // b + denoising.random_offset)
  if denoising.ar_weight or config.shifted:
    add('clean', clean_weight, seeds, states.clean, canvas.clean)
  if m:
    add('noisy', noisy_weight, g * length * denoising.mask_pairs, states.noisy,
        canvas_lib.take_tokens(
            canvas.clean, canvas_lib.block_positions(canvas.start, b)))
  return scoring.Mean(total, total_weight), metrics
