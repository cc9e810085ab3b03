"""Lossless decoding: blocks are drafted, an autoregressive pass verifies.

    prefill -> the first token
    repeat:
      draft:   k denoising steps over [known, MASK, MASK ...] propose a token
               for every position of the window
      verify:  one causal pass over the drafted window; what it would have
               written itself is accepted up to the first difference, where its
               own token stands instead

Both are forwards of the same weights, whose clean stream is an AR model, and
verification is the commit too: it writes the keys of what is accepted, and what
it rejects is overwritten by the next window. Or another model verifies, with a
cache of its own: then the drafter commits in a third forward.

The window begins at the last token that stands (`pivot`, which is `State.start`
here) or at the block of the training grid that holds it (`grid`). A window at
the pivot may have any length, or several that follow what is accepted.

Greedy: the result is the AR decoding token for token, but for near ties, which
rounding may tip: forwards of one and of B tokens round differently. Sampled:
a draft x ~ q is accepted with min(1, p(x) / q(x)), else replaced by a draw from
max(p - q, 0), which leaves the verifier's distribution p as it is (speculative
sampling, 2211.17192).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dgr2_jax.decoding import block_decoder
from dgr2_jax.decoding import commit
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib


WINDOWS = ('pivot', 'grid')


@dataclasses.dataclass(frozen=True)
class DraftConfig:
  """How a window is drafted.

  Attributes:
    steps: k, denoising steps before a verification. All but the last commit
      what a threshold allows, the last commits the rest.
    window: 'pivot' or 'grid'; see the module.
    threshold: tau of the steps before the last.
    lengths: tokens of a window at the pivot, the one that stands included, in
      rising order; none is the block size. Of several, a verification has the
      shortest with room for one draft more than the batch's unfinished rows
      accepted lately on the average: greedily, tokens don't depend on it.
  """
  steps: int = 1
  window: str = 'pivot'
  threshold: float = 0.9
  lengths: tuple[int, ...] = ()

  def __post_init__(self):
    object.__setattr__(self, 'lengths', tuple(self.lengths))  # JSON has lists
    if not isinstance(self.steps, int) or self.steps < 1:
      raise ValueError(f'draft.steps={self.steps} must be a whole number >= 1')
    if not 0 < self.threshold <= 1:
      raise ValueError(f'draft.threshold={self.threshold} must be above 0 and '
                       'at most 1')
    if self.window not in WINDOWS:
      raise ValueError(f'draft.window={self.window!r}: expected '
                       + ' or '.join(WINDOWS))
    rising = all(a < b for a, b in itertools.pairwise((1, *self.lengths)))
    if not rising or (self.lengths and self.window != 'pivot'):
      raise ValueError(
          f'draft.lengths={self.lengths} must rise from 2 or more, and needs '
          f"draft.window='pivot', got {self.window!r}")


def check(canvas: canvas_lib.CanvasConfig,
          config: block_decoder.DecodeConfig, draft: DraftConfig,
          own_verifier: bool = True) -> None:
  """Raises ValueError where verification would not be lossless.

  Args:
    canvas: the drafter's.
    config: see `decode`.
    draft: see there.
    own_verifier: whether the drafter's own clean stream verifies.
  """
  if own_verifier and not canvas.verifiable:
    raise ValueError(
        'verification needs blocks whose clean stream is autoregressive: '
        "block_size > 1, clean_stream='token_causal' and alignment='shifted', "
        f'or another model as the verifier; got {canvas}')
  if canvas.block_size == 1 or not canvas.shifted:
    raise ValueError("drafts need block_size > 1 and alignment='shifted', got "
                     f'{canvas}')
  if canvas.clean_stream == 'block_causal' and draft.window != 'grid':
    # Its keys are those of whole blocks of the grid.
    raise ValueError("a drafter with clean_stream='block_causal' needs "
                     f"draft.window='grid', got {draft.window!r}")
  if config.answer_ids:
    raise ValueError('masking used candidates is for autoregressive decoding')
  if config.fused:
    raise ValueError('a verification commits; there is nothing to fuse')
  if config.temperature and draft.steps > 1:
    # Later draws would depend on earlier ones to their right.
    raise ValueError(f'draft.steps={draft.steps} needs temperature 0, got '
                     f'{config.temperature}')
  if config.temperature and len(draft.lengths) > 1:
    raise ValueError(f'draft.lengths={draft.lengths} needs temperature 0, or '
                     'draws would depend on batch neighbours')
  if config.top_k or config.top_p < 1:
    raise ValueError('verification samples from the whole distribution; got '
                     f'top_k={config.top_k}, top_p={config.top_p}')


@functools.partial(
    jax.jit,
    static_argnames=('model', 'vocabulary', 'canvas', 'config', 'draft',
                     'verifier'))
def decode(model: transformer.Transformer, params: Any, prompt: jax.Array,
           prompt_length: jax.Array, example_id: jax.Array, key: jax.Array,
           *, vocabulary: vocabulary_lib.Vocabulary,
           canvas: canvas_lib.CanvasConfig, config: block_decoder.DecodeConfig,
           draft: DraftConfig = DraftConfig(),
           verifier: transformer.Transformer | None = None,
           verifier_params: Any = None) -> block_decoder.Rollout:
  """Decodes what an AR model alone would, several tokens a verification.

  Args:
    model: the drafter, and the verifier by its clean stream if there is none.
    params: its parameters.
    prompt: int32 [N, P], padded on the right.
    prompt_length: int32 [N].
    example_id: int32 [N], seeds a request's sampling.
    key: seeds the rollout.
    vocabulary: special ids.
    canvas: block size and the drafter's rules; shifted, and token_causal
      unless another model verifies.
    config: length, rollouts and temperature.
    draft: see `DraftConfig`.
    verifier: another AR model over the same vocabulary, such as the teacher.
    verifier_params: its parameters.

  Returns:
    A rollout. `call` is the forward of the verification that accepted a token,
    so these traces are not for `replay`; `logprob` is the verifier's.

  Raises:
    ValueError: see `check`.
  """
  check(canvas, config, draft, own_verifier=verifier is None)
  judge = (model, params) if verifier is None else (verifier, verifier_params)
  state, row_keys = begin(
      *judge, prompt, prompt_length, example_id, key, vocabulary=vocabulary,
      canvas=canvas, config=config, draft=draft)
  own = None  # the drafter's cache, where another model verifies
  if verifier is not None:
    own, _ = block_decoder.prefill(
        model, params, prompt, prompt_length, config)
    state = state.replace(calls=state.calls + 1)
  state, _ = jax.lax.while_loop(
      lambda carry: ~carry[0].done.all(),
      lambda carry: step((model, params), judge, *carry, row_keys, vocabulary,
                         canvas, config, draft), (state, own))
  return block_decoder.rollout_of(state, vocabulary)


def begin(*args: Any, canvas: canvas_lib.CanvasConfig, draft: DraftConfig,
          **options: Any) -> tuple[block_decoder.State, jax.Array]:
  """`block_decoder.begin`, with the tokens that a verification gave lately."""
  state, row_keys = block_decoder.begin(*args, canvas=canvas, **options)
  longest = _lengths(canvas, draft)[-1]
  return state.replace(agreement=jnp.full(
      state.start.shape, longest, jnp.float32)), row_keys


def _lengths(canvas: canvas_lib.CanvasConfig,
             draft: DraftConfig) -> tuple[int, ...]:
  return draft.lengths or (canvas.block_size,)


def step(drafter: tuple[transformer.Transformer, Any],
         judge: tuple[transformer.Transformer, Any],
         state: block_decoder.State, own: canvas_lib.Cache | None, row_keys,
         vocabulary, canvas, config, draft: DraftConfig
         ) -> tuple[block_decoder.State, canvas_lib.Cache | None]:
  """A window's draft and verification.

  Args:
    drafter: model and parameters.
    judge: the verifier's.
    state: the loop's, with the judge's cache.
    own: the drafter's cache; None if it is the judge.
    row_keys: [N, G].
    vocabulary: see `decode`, like all further arguments.
    canvas: see there.
    config: see there.
    draft: see there.

  Returns:
    The next state and drafter's cache.
  """
  lengths = _lengths(canvas, draft)

  def window(length):
    drafted = _draft(
        *drafter, state if own is None else state.replace(cache=own), row_keys,
        length, vocabulary, canvas, config, draft)
    committed = None
    if own is not None:  # What is rejected is overwritten there, too.
      _, committed = canvas_lib.decode_block(
          *drafter, own, drafted.tokens, drafted.start,
          jnp.ones_like(state.done), canvas)
      committed = _padded(committed, lengths[-1])
    new, entries = _verify(
        *judge, state, row_keys, drafted, vocabulary,
        dataclasses.replace(canvas, clean_stream='token_causal'), config,
        draft.steps + (own is not None))
    return new, _padded(entries, lengths[-1]), committed

  new, entries, committed = jax.lax.switch(
      chosen_length(lengths, state.agreement, state.done),
      [functools.partial(window, n) for n in lengths])
  new = new.replace(cache=state.cache.written(entries))
  return new, None if own is None else own.written(committed)


def _padded(entries: canvas_lib.Entries, size: int) -> canvas_lib.Entries:
  """`size` entries, the last of them nowhere: windows of any length alike."""
  nowhere = [(0, 0), (0, 0), (0, size - entries.position.shape[-1])]
  return canvas_lib.Entries(
      tuple(jnp.pad(x, [(0, 0), *nowhere, (0, 0), (0, 0)])
            for x in entries.clean),
      jnp.pad(entries.position, nowhere,
              constant_values=block_decoder.NEVER))


def chosen_length(lengths: tuple[int, ...], given: jax.Array,
                  done: jax.Array) -> jax.Array:
  """Index of the next window's length, see `DraftConfig.lengths`.

  Args:
    lengths: in rising order.
    given: float32 [N, G], tokens that a verification gave lately.
    done: bool [N, G], rows that do not count.
  """
  wanted = jnp.mean(given, where=~done) + 1
  return jnp.sum(jnp.array(lengths[:-1]) < wanted, dtype=jnp.int32)


@flax.struct.dataclass
class _Window:
  """A drafted window.

  Attributes:
    start: int32 [N, G], its first position; at or before the pivot.
    tokens: int32 [N, G, B], what stands, then drafts.
    logits: float32 [N, G, B, V]; state j drafted token start + j + 1.
  """
  start: jax.Array
  tokens: jax.Array
  logits: jax.Array


def _draft(model, params, state: block_decoder.State, row_keys, b: int,
           vocabulary, canvas, config, draft: DraftConfig) -> _Window:
  """k denoising steps over the B tokens that hold the pivot, `state.start`."""
  start = state.start
  if draft.window == 'grid':
    start = start // b * b
  positions = canvas_lib.block_positions(start, b)
  decided = positions <= state.start[..., None]
  tokens = canvas_lib.take_tokens(state.tokens, positions[:, :, None])[:, :, 0]
  for step in range(draft.steps):
    hidden, _ = canvas_lib.decode_block(
        model, params, state.cache,
        jnp.where(decided, tokens, vocabulary.mask_id), start,
        jnp.zeros_like(state.done), canvas)
    logits = block_decoder.score(
        model, params, hidden, state, vocabulary, config)
    proposed, confidence, _ = block_decoder.draw(
        logits, row_keys, state.calls + step, config)
    proposed, confidence = (
        jnp.pad(x[..., :-1], ((0, 0), (0, 0), (1, 0)))
        for x in (proposed, confidence))
    chosen = ~decided
    if step < draft.steps - 1:
      chosen = commit.Threshold(draft.threshold).choose(
          chosen, confidence, commit.Context(
              answering=None, step=jnp.full_like(state.step, step),
              agreement=state.agreement))
    tokens = jnp.where(chosen, proposed, tokens)
    decided |= chosen
  return _Window(start, tokens, logits)


def _verify(model, params, state: block_decoder.State, row_keys,
            window: _Window, vocabulary, canvas, config,
            spent: int) -> tuple[block_decoder.State, canvas_lib.Entries]:
  """Accepts what the model would have written; moves the pivot.

  `spent` forwards went before, since the last verification. The window's
  entries are still to be written to the cache, which the state lacks.
  """
  b = window.tokens.shape[-1]
  hidden, entries = canvas_lib.decode_block(
      model, params, state.cache, window.tokens, window.start,
      jnp.ones_like(state.done), canvas)
  calls = state.calls + spent
  logits = block_decoder.score(model, params, hidden, state, vocabulary, config)
  drafted = jnp.roll(window.tokens, -1, axis=-1)
  last = jnp.arange(b) == b - 1  # Nothing was drafted for the token behind.
  if config.temperature:
    keys = jax.vmap(jax.vmap(jax.random.fold_in))(row_keys, calls)
    token, accepted = speculate(
        logits / config.temperature, window.logits / config.temperature,
        drafted, last, keys)
  else:
    token = jnp.argmax(logits, -1).astype(jnp.int32)
    accepted = (token == drafted) & ~last
  temperature = config.temperature or 1.
  logprob = jnp.take_along_axis(jax.nn.log_softmax(logits / temperature),
                                token[..., None], -1)[..., 0]
  positions = canvas_lib.block_positions(window.start, b) + 1
  ahead = positions > state.start[..., None]
  # All drafts before it were accepted.
  reached = jnp.cumprod(jnp.pad(
      (accepted | ~ahead)[..., :-1], ((0, 0), (0, 0), (1, 0)),
      constant_values=True), -1).astype(bool)
  chosen = ahead & reached & ~state.done[..., None]
  state = block_decoder.write(
      state.replace(cache=None), positions, chosen, token, logprob, calls)
  alive = ~state.done
  given = chosen.sum(-1, dtype=jnp.int32)
  state = state.replace(
      start=state.start + given, agreement=(state.agreement + given) / 2,
      calls=jnp.where(alive, calls + 1, state.calls))
  return block_decoder.finish(state, vocabulary), entries


def speculate(target: jax.Array, draft: jax.Array, drafted: jax.Array,
              last: jax.Array,
              keys: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Speculative sampling (2211.17192, algorithm 1) at every position.

  Args:
    target: [N, G, B, V] logits of p.
    draft: [N, G, B, V] logits of q.
    drafted: int32 [N, G, B], draws from q.
    last: bool [B], positions without a draft: a draw from p.
    keys: [N, G].

  Returns:
    Tokens int32 [N, G, B], and bool [N, G, B] where the draft was accepted.
  """
  accept_key, other_key = jnp.moveaxis(
      jax.vmap(jax.vmap(jax.random.split))(keys), -1, 0)
  p, q = jax.nn.softmax(target), jax.nn.softmax(draft)
  p_x, q_x = (jnp.take_along_axis(x, drafted[..., None], -1)[..., 0]
              for x in (p, q))
  uniform = jax.vmap(jax.vmap(
      lambda k: jax.random.uniform(k, last.shape)))(accept_key)
  accepted = (uniform * q_x < p_x) & ~last
  residual = jnp.where(last[:, None], p, jnp.maximum(p - q, 0.))
  # Equal distributions leave no residual, and nothing to draw from it.
  residual = jnp.where(residual.sum(-1, keepdims=True) > 0, residual, p)
  other = jax.vmap(jax.vmap(jax.random.categorical))(
      other_key, jnp.log(residual))
  return jnp.where(accepted, drafted, other).astype(jnp.int32), accepted
