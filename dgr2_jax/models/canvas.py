"""The shared-prompt canvas: what is on it and who sees whom.

A request lies on the canvas as one prompt, its G clean responses, and noised
copies ("block canvases") of single blocks of the responses:

    prompt [N, P]     clean [N, G, L]     noisy [N, G, M, B]

    reads \\ sees    prompt    clean                    own block
    prompt          causal    -                        -
    clean i         all       j <= i, or               -
                              block(j) <= block(i)
    noisy           all       j < start of its block   all, both ways

A response's position i is P_n + i for a prompt of P_n tokens; P_n differs by
row and prompts are padded on the right. With two complementary masks of every
block this equals the [x_t ; x_0] training mask of BD3-LM (2503.09573) on every
response, but the prompt is encoded once. M = 0 is the autoregressive model.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dgr2_jax.models import attention as attention_lib
from dgr2_jax.models import transformer


@dataclasses.dataclass(frozen=True)
class CanvasConfig:
  """How a response is cut into blocks and which state scores a token.

  Attributes:
    block_size: B; 1 is the autoregressive model.
    clean_stream: 'token_causal' (the clean stream stays an autoregressive
      model) or 'block_causal' (Diffusion-GR2).
    alignment: 'shifted' (token i is read at i - 1, as in the AR model; the
      first token of a block, its *seed*, is read on the clean stream) or
      'same_position'.
  """
  block_size: int
  clean_stream: str = 'token_causal'
  alignment: str = 'shifted'

  def __post_init__(self):
    if self.block_size < 1:
      raise ValueError(f'canvas.block_size={self.block_size} must be >= 1')
    for field, values in (('clean_stream', ('token_causal', 'block_causal')),
                          ('alignment', ('shifted', 'same_position'))):
      if getattr(self, field) not in values:
        raise ValueError(f'canvas.{field}={getattr(self, field)!r}: expected '
                         + ' or '.join(values))

  @property
  def shifted(self) -> bool:
    return self.alignment == 'shifted'

  @property
  def verifiable(self) -> bool:
    """Whether the clean stream is an AR model that can verify drafts."""
    return (self.shifted and self.clean_stream == 'token_causal'
            and self.block_size > 1)


AUTOREGRESSIVE = CanvasConfig(block_size=1)
_PROMPT_CHUNK = 256  # prompt tokens that attend at once where canvases do not


@flax.struct.dataclass
class Canvas:
  """Token arrays of N requests; what is masked is explicit, never an id.

  Attributes:
    prompt: int32 [N, P], padded on the right.
    prompt_length: int32 [N].
    clean: int32 [N, G, L], filled with EOS to the end.
    start: int32 [N, G, M], the first position of each block canvas.
    masked: bool [N, G, M, B], canvas tokens shown as the mask token; the
      others show the clean token.
  """
  prompt: jax.Array
  prompt_length: jax.Array
  clean: jax.Array
  start: jax.Array
  masked: jax.Array


@flax.struct.dataclass
class States:
  """Hidden states [..., D] that score a token, one for every token.

  Attributes:
    clean: [N, G, L, D]; state i scores clean token i and is read before it
      whatever the alignment. With a token_causal stream that is an AR model.
    noisy: [N, G, M, B, D]; state b scores token start + b.
  """
  clean: jax.Array
  noisy: jax.Array


def autoregressive(prompt: jax.Array, prompt_length: jax.Array,
                   clean: jax.Array) -> Canvas:
  """The canvas without block canvases, M = 0."""
  n, g, _ = clean.shape
  return Canvas(prompt, prompt_length, clean,
                jnp.zeros((n, g, 0), jnp.int32),
                jnp.zeros((n, g, 0, 1), bool))


def block_positions(start: jax.Array, block_size: int) -> jax.Array:
  """Response positions [..., B] of blocks that begin at `start` [...]."""
  return start[..., None] + jnp.arange(block_size)


def clean_rule(queries: jax.Array, keys: jax.Array,
               config: CanvasConfig) -> jax.Array:
  """Whether clean queries see clean keys, by response position.

  token_causal, B = 2     block_causal, B = 2
      1 . . .                 1 1 . .
      1 1 . .                 1 1 . .
      1 1 1 .                 1 1 1 1
      1 1 1 1                 1 1 1 1
  """
  if config.clean_stream == 'block_causal':
    queries = queries // config.block_size
    keys = keys // config.block_size
  return keys[..., None, :] <= queries[..., :, None]


def take_tokens(clean: jax.Array, positions: jax.Array) -> jax.Array:
  """Values of `clean` [N, G, L] at positions [N, G, M, B]."""
  n, g, m, b = positions.shape
  flat = jnp.minimum(positions, clean.shape[-1] - 1).reshape(n, g, m * b)
  return jnp.take_along_axis(clean, flat, axis=-1).reshape(n, g, m, b)


def take_rows(responses: jax.Array, owner: jax.Array) -> jax.Array:
  """[N, R, ...] of [N, G, ...]: row r is that of response `owner` [N, R]."""
  index = owner.reshape(owner.shape + (1,) * (responses.ndim - 2))
  return jnp.take_along_axis(responses, index, axis=1)


def states(model: transformer.Transformer, params: Any, canvas: Canvas,
           mask_id: int, config: CanvasConfig) -> States:
  """Encodes a canvas and aligns hidden states with the tokens they score."""
  n, p = canvas.prompt.shape
  g, l = canvas.clean.shape[1:]
  m, b = canvas.masked.shape[2:]
  positions = block_positions(canvas.start, b)  # [N, G, M, B]
  noisy = jnp.where(canvas.masked, mask_id,
                    take_tokens(canvas.clean, positions))
  tokens = jnp.concatenate(
      [canvas.prompt, canvas.clean.reshape(n, -1), noisy.reshape(n, -1)], 1)
  offset = canvas.prompt_length[:, None]
  rope_positions = jnp.concatenate(
      [jnp.broadcast_to(jnp.arange(p), (n, p)),
       offset + jnp.tile(jnp.arange(l), g),
       offset + positions.reshape(n, -1)], 1)
  hidden, _ = model.apply(
      {'params': params}, tokens, rope_positions,
      _canvas_attention(canvas, config, model.config),
      method='hidden')
  d = hidden.shape[-1]
  last = jnp.take_along_axis(
      hidden, canvas.prompt_length[:, None, None] - 1, axis=1)  # [N, 1, D]
  clean = hidden[:, p:p + g * l].reshape(n, g, l, d)
  noisy = hidden[:, p + g * l:].reshape(n, g, m, b, d)
  return _align(last, clean, noisy, canvas.start, config)


def _align(last: jax.Array, clean: jax.Array, noisy: jax.Array,
           start: jax.Array, config: CanvasConfig) -> States:
  """Shifts hidden states so that state i scores token i."""
  n, g, _, d = clean.shape
  first = jnp.broadcast_to(last[:, None], (n, g, 1, d))
  clean = jnp.concatenate([first, clean[:, :, :-1]], axis=2)
  if config.shifted and noisy.shape[2]:
    seed = jnp.take_along_axis(
        clean, jnp.minimum(start, clean.shape[2] - 1)[..., None], axis=2)
    noisy = jnp.concatenate([seed[:, :, :, None], noisy[:, :, :, :-1]], axis=3)
  return States(clean, noisy)


def _canvas_attention(canvas: Canvas, config: CanvasConfig,
                      model: transformer.ModelConfig) -> transformer.Attention:
  """The rule drawn at the top of this module."""
  kernel = attention_lib.choose(model.attention, model.head_dim, model.dtype)
  n, p = canvas.prompt.shape
  g, l = canvas.clean.shape[1:]
  m, b = canvas.masked.shape[2:]

  def attention(query, key, value, cache):
    del cache
    def split(x):
      heads = x.shape[2:]
      return (x[:, :p], x[:, p:p + g * l].reshape(n, g, l, *heads),
              x[:, p + g * l:].reshape(n, g, m, b, *heads))

    (qp, qc, qn), (kp, kc, kn), (vp, vc, vn) = map(split, (query, key, value))
    out_prompt = attention_lib.causal(
        qp, kp, vp, canvas.prompt_length, kernel,
        model.canvas_chunk and _PROMPT_CHUNK)
    prompt = attention_lib.prompt(kp, vp, canvas.prompt_length)
    index = jnp.arange(l)
    own = clean_rule(index, index, config)[None, None, None]

    def responses(qc, kc, vc):  # [N, 1, g, L, ...]
      return attention_lib.attend(
          qc, [prompt, attention_lib.Part(kc, vc, own)], kernel)

    one_by_one = kernel == 'xla' and model.canvas_chunk > 0  # for its scores
    out_clean = attention_lib.in_chunks(
        responses, int(one_by_one), *(x[:, None] for x in (qc, kc, vc)))
    outs = [out_prompt, out_clean.reshape(n, g * l, *query.shape[2:])]
    if m:
      def block_canvases(qn, kn, vn, start):  # [N, G, m, ...]
        before = (index < start[..., None])[..., None, :]  # [N, G, m, 1, L]
        own = jnp.ones((1,) * 5, bool)
        return attention_lib.attend(qn, [
            prompt, attention_lib.Part(kc, vc, before),
            attention_lib.Part(kn, vn, own)], kernel)

      out_noisy = attention_lib.in_chunks(
          block_canvases, model.canvas_chunk, qn, kn, vn, canvas.start)
      outs.append(out_noisy.reshape(n, g * m * b, *query.shape[2:]))
    return jnp.concatenate(outs, axis=1), None

  return attention


@flax.struct.dataclass
class Cache:
  """Keys and values of committed tokens, for decoding block by block.

  Attributes:
    prompt: ([layers, N, P, Hkv, F],) * 2, shared by the G responses.
    clean: ([layers, N, G, L, Hkv, F],) * 2; valid before each row's start.
    prompt_length: int32 [N].
  """
  prompt: tuple[jax.Array, jax.Array]
  clean: tuple[jax.Array, jax.Array]
  prompt_length: jax.Array

  def written(self, new: Entries) -> Cache:
    """With new entries; in place, as they wait for all that reads it."""
    return self.replace(clean=tuple(jax.lax.scatter(
        old, new.position[..., None], x.astype(old.dtype), _ROW_BY_ROW,
        mode='drop') for old, x in zip(self.clean, new.clean)))


@flax.struct.dataclass
class Entries:
  """What a forward over W tokens adds to a cache; not written yet.

  A conditional should return these: a cache that leaves one is copied.

  Attributes:
    clean: ([layers, N, G, W, Hkv, F],) * 2.
    position: int32 [N, G, W], of the response; L and more is nowhere.
  """
  clean: tuple[jax.Array, jax.Array]
  position: jax.Array


def prefill(model: transformer.Transformer, params: Any, prompt: jax.Array,
            prompt_length: jax.Array, num_rollouts: int,
            length: int) -> tuple[Cache, jax.Array]:
  """Encodes prompts once.

  Args:
    model: the decoder.
    params: its parameters.
    prompt: int32 [N, P].
    prompt_length: int32 [N].
    num_rollouts: G.
    length: L, room for response tokens.

  Returns:
    The cache and the last prompt token's hidden state [N, D], which scores
    the first response token.
  """
  n, p = prompt.shape
  c = model.config
  kernel = attention_lib.choose(c.attention, c.head_dim, c.dtype)

  def attention(query, key, value, cache):
    del cache
    out = attention_lib.causal(query, key, value, prompt_length, kernel,
                               c.canvas_chunk and _PROMPT_CHUNK)
    return out, (key, value)

  hidden, emitted = model.apply(
      {'params': params}, prompt, jnp.broadcast_to(jnp.arange(p), (n, p)),
      attention, method='hidden')
  last = jnp.take_along_axis(
      hidden, prompt_length[:, None, None] - 1, axis=1)[:, 0]
  layers, _, _, heads, head_dim = emitted[0].shape
  empty = jnp.zeros((layers, n, num_rollouts, length, heads, head_dim),
                    emitted[0].dtype)
  return Cache(emitted, (empty, empty), prompt_length), last


# Of old[:, n, g, at[n, g, w]] = new[:, n, g, w]: rows stay on their devices.
_ROW_BY_ROW = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(0, 4, 5), inserted_window_dims=(3,),
    scatter_dims_to_operand_dims=(3,), operand_batching_dims=(1, 2),
    scatter_indices_batching_dims=(0, 1))


def decode_block(model: transformer.Transformer, params: Any, cache: Cache,
                 tokens: jax.Array, start: jax.Array, clean: jax.Array,
                 config: CanvasConfig) -> tuple[jax.Array, Entries]:
  """One forward over one block of every response.

  To write the block's keys to the cache is the commit when the row's tokens are
  final; before, it is harmless: nobody sees clean keys at or after its own
  start, and the commit overwrites them.

  Args:
    model: the decoder.
    params: its parameters.
    cache: committed keys and values.
    tokens: int32 [N, G, B], the mask token where undecided.
    start: int32 [N, G].
    clean: bool [N, G]; rows that commit see their block by the clean rule,
      the others both ways.
    config: block size and rules.

  Returns:
    Hidden states [N, G, B, D], unaligned, and the block's entries.
  """
  positions = block_positions(start, tokens.shape[-1])
  own = ~clean[..., None, None] | clean_rule(positions, positions, config)
  return _decode_window(model, params, cache, tokens, start, own)


def decode_block_and_next(
    model: transformer.Transformer, params: Any, cache: Cache,
    tokens: jax.Array, start: jax.Array, clean: jax.Array,
    config: CanvasConfig) -> tuple[jax.Array, Entries]:
  """`decode_block` with the block canvas behind it in the same forward.

    reads \\ sees    cache             own block       next block
    own block       j < start         as decode_block -
    next block      j < start         all             all, both ways

  The next block's states mean something where `clean`: they are those of a
  denoising step that follows the commit.

  Args as of `decode_block`, but for
    tokens: int32 [N, G, 2 B], of both blocks.
    start: int32 [N, G], of the first block.
    clean: bool [N, G], rows that commit the first block.

  Returns:
    Hidden states [N, G, 2 B, D], unaligned, and the first block's entries.
  """
  b = tokens.shape[-1] // 2
  positions = block_positions(start, b)
  own = ~clean[..., None, None] | clean_rule(positions, positions, config)
  sees = jnp.ones((*own.shape[:2], 2 * b, 2 * b), bool)
  sees = sees.at[:, :, :b, :b].set(own).at[:, :, :b, b:].set(False)
  hidden, entries = _decode_window(model, params, cache, tokens, start, sees)
  return hidden, Entries(tuple(x[:, :, :, :b] for x in entries.clean),
                         entries.position[..., :b])


def _decode_window(model, params, cache: Cache, tokens: jax.Array,
                   start: jax.Array,
                   sees: jax.Array) -> tuple[jax.Array, Entries]:
  """W tokens [N, G, W] from `start` on; among them `sees` [N, G, W, W]."""
  n, g, w = tokens.shape
  positions = block_positions(start, w)
  length = cache.clean[0].shape[3]
  before = (jnp.arange(length) < start[..., None])[:, :, None, None]
  prompt_length = cache.prompt_length

  def attention(query, key, value, cache):
    (kp, vp), (kc, vc) = cache
    blocks = [x.reshape(n, g, 1, w, *x.shape[2:]) for x in (query, key, value)]
    query_, key_, value_ = blocks
    out = attention_lib.attend(query_, [
        attention_lib.prompt(kp, vp, prompt_length),
        attention_lib.Part(kc, vc, before),
        attention_lib.Part(key_, value_, sees[:, :, None])])
    return out.reshape(query.shape), (key_[:, :, 0], value_[:, :, 0])

  places = (cache.prompt_length[:, None, None] + positions).reshape(n, g * w)
  hidden, emitted = model.apply(
      {'params': params}, tokens.reshape(n, g * w), places, attention,
      (cache.prompt, cache.clean), method='hidden')
  hidden = hidden.reshape(n, g, w, -1)
  # A write that waits for the last layer copies nothing: the cache is read.
  positions = jnp.where(jnp.isnan(hidden[..., 0]), length, positions)
  return hidden, Entries(emitted, positions)
