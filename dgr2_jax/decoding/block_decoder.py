"""Block decoding; B = 1 is the autoregressive decoder.

    prefill -> seed of block 0
    repeat, each row on its own clock:
      tokens left to commit in the block?
        denoise: one forward over [seed, MASK, x, MASK ...], both ways;
                 commit what the rule allows, the best one at least
                 (`commit`: top probability >= threshold)
      else
        commit:  one forward over the finished block by the clean rule; its keys
                 stay in the cache, its last state gives the next block's seed
    until an EOS stands with everything to its left

Both kinds of forward have the same shape, so rows of a batch mix freely and no
row waits for another at a block boundary. With B = 1 (shifted) a block is its
seed and only commits remain: one token a forward. `fused` commits also carry
the next block's first denoising step, masked whole, in a forward of 2 B tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dgr2_jax.decoding import commit
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib

NEVER = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
  """Decoding options that fix the compiled program.

  Attributes:
    max_response: L, response tokens at most; a multiple of B.
    num_rollouts: G, responses a request.
    temperature: of the draw, not of the confidence; 0 is greedy.
    top_k: draws from the likeliest tokens and their equals; 0 is off.
    top_p: so, from the likeliest that hold this mass; 1 is off.
    max_denoising_steps: per block; at the cap everything left is committed.
    fused: whether the commit pass of a block is also the first denoising step
      of the next: one forward over both. The seed commits there, whatever its
      probability. Wants weights trained on blocks masked whole
      (`full_block_prob`), which no recipe does.
    answer_marker: token after which the answer begins, for rules that decide
      otherwise there, and for `answer_ids`.
    answer_ids: candidates, masked once used (constrained AR); empty for none.
    cache_dtype: of cached keys and values; empty is the model's. 'bfloat16'
      halves a float32 cache, and what a forward reads of it.
  """
  max_response: int
  num_rollouts: int = 1
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  max_denoising_steps: int = 64
  fused: bool = False
  answer_marker: int = -1
  answer_ids: tuple[int, ...] = ()
  cache_dtype: str = ''

  def __post_init__(self):
    for field in ('max_response', 'num_rollouts', 'max_denoising_steps'):
      if getattr(self, field) < 1:
        raise ValueError(f'{field}={getattr(self, field)} must be >= 1')
    if not 0 <= self.temperature < np.inf:
      raise ValueError(f'temperature={self.temperature} must be >= 0')
    if self.top_k < 0 or not 0 < self.top_p <= 1:
      raise ValueError(f'top_k={self.top_k} must be >= 0 and top_p='
                       f'{self.top_p} in (0, 1]')
    if self.answer_ids and self.answer_marker < 0:
      raise ValueError('answer_ids need an answer_marker')


@flax.struct.dataclass
class Rollout:
  """Decoded responses and their traces.

  Attributes:
    tokens: int32 [N, G, L]; undefined from `length` on.
    length: int32 [N, G], tokens through EOS; L without one.
    finished: bool [N, G], whether an EOS stands; otherwise it overflowed.
    call: int32 [N, G, L], the model call that committed the token (0 is the
      prefill), NEVER where none did; of a block, equal calls are one step.
    logprob: float32 [N, G, L] of softmax(logits / temperature), banned ids
      left out (greedy: temperature 1): what the token was drawn from, but for
      top_k and top_p, which narrow the draw and not what is recorded.
    calls: int32 [N, G], model calls of the response, prefill and commit passes
      included.
  """
  tokens: jax.Array
  length: jax.Array
  finished: jax.Array
  call: jax.Array
  logprob: jax.Array
  calls: jax.Array


@flax.struct.dataclass
class State:
  """Loop state; see `Rollout`. `step` counts denoising steps of the block.

  `start` is where the block begins; in `verification`, the last token that
  stands. `agreement`: see `commit.Context`; there, tokens a verification.
  """
  cache: canvas_lib.Cache
  tokens: jax.Array
  call: jax.Array
  logprob: jax.Array
  start: jax.Array  # [N, G]
  step: jax.Array  # [N, G]
  agreement: jax.Array  # [N, G]
  calls: jax.Array  # [N, G]
  done: jax.Array  # [N, G]


@functools.partial(
    jax.jit, static_argnames=('model', 'vocabulary', 'canvas', 'config'))
def decode(model: transformer.Transformer, params: Any, prompt: jax.Array,
           prompt_length: jax.Array, example_id: jax.Array, key: jax.Array,
           rule: commit.Rule, *, vocabulary: vocabulary_lib.Vocabulary,
           canvas: canvas_lib.CanvasConfig, config: DecodeConfig) -> Rollout:
  """Decodes G responses a request.

  A row's result is a function of its own prompt, `example_id` and `key`: batch
  neighbours don't change it.

  Args:
    model: the decoder.
    params: its parameters.
    prompt: int32 [N, P], padded on the right.
    prompt_length: int32 [N].
    example_id: int32 [N], seeds a request's sampling.
    key: seeds the rollout.
    rule: which tokens a denoising step commits.
    vocabulary: special ids.
    canvas: block size and rules.
    config: the rest.

  Raises:
    ValueError: arguments that do not fit together.
  """
  check(rule, canvas, config)
  state, row_keys = begin(
      model, params, prompt, prompt_length, example_id, key,
      vocabulary=vocabulary, canvas=canvas, config=config)
  state = jax.lax.while_loop(
      lambda s: ~s.done.all(),
      lambda s: step(model, params, s, row_keys, rule, vocabulary, canvas,
                     config), state)
  return rollout_of(state, vocabulary)


def check(rule: commit.Rule, canvas: canvas_lib.CanvasConfig,
          config: DecodeConfig) -> None:
  """Raises ValueError for arguments of `decode` that do not fit together."""
  if config.max_response % canvas.block_size:
    raise ValueError(
        f'max_response={config.max_response} is not a multiple of '
        f'block_size={canvas.block_size}')
  if config.answer_ids and canvas.block_size > 1:
    raise ValueError('masking used candidates is for autoregressive decoding '
                     f'(block_size 1), got block_size={canvas.block_size}')
  if isinstance(rule, commit.Adaptive) and not canvas.verifiable:
    raise ValueError('an adaptive threshold needs blocks whose clean stream is '
                     f'autoregressive, got {canvas}')


def prefill(model: transformer.Transformer, params: Any, prompt: jax.Array,
            prompt_length: jax.Array, config: DecodeConfig):
  """`canvas.prefill` for all rollouts, its keys as `config.cache_dtype`."""
  cache, last = canvas_lib.prefill(
      model, params, prompt, prompt_length, config.num_rollouts,
      config.max_response)
  if config.cache_dtype:
    prompt_keys, clean = jax.tree.map(
        lambda x: x.astype(config.cache_dtype), (cache.prompt, cache.clean))
    cache = cache.replace(prompt=prompt_keys, clean=clean)
  return cache, last


def begin(model: transformer.Transformer, params: Any, prompt: jax.Array,
          prompt_length: jax.Array, example_id: jax.Array, key: jax.Array, *,
          vocabulary: vocabulary_lib.Vocabulary,
          canvas: canvas_lib.CanvasConfig,
          config: DecodeConfig) -> tuple[State, jax.Array]:
  """Prefills; the loop's first state and the rows' keys [N, G]."""
  n, g, length = example_id.shape[0], config.num_rollouts, config.max_response
  cache, last = prefill(model, params, prompt, prompt_length, config)
  row_keys = keys_of(key, example_id, g)
  state = State(
      cache=cache,
      tokens=jnp.full((n, g, length), vocabulary.eos_id, jnp.int32),
      call=jnp.full((n, g, length), NEVER, jnp.int32),
      logprob=jnp.zeros((n, g, length), jnp.float32),
      start=jnp.zeros((n, g), jnp.int32),
      step=jnp.zeros((n, g), jnp.int32),
      agreement=jnp.ones((n, g), jnp.float32),
      calls=jnp.ones((n, g), jnp.int32),
      done=jnp.zeros((n, g), bool))
  if canvas.shifted:
    seed_state = jnp.broadcast_to(
        last[:, None, None], (n, g, 1, last.shape[-1]))
    token, _, logprob = draw(
        score(model, params, seed_state, state, vocabulary, config), row_keys,
        0 * state.calls, config)
    state = write(state, jnp.zeros((n, g, 1), jnp.int32),
                  jnp.ones((n, g, 1), bool), token, logprob, 0 * state.calls)
    state = finish(state, vocabulary)
  return state, row_keys


def keys_of(key: jax.Array, example_id: jax.Array, num_rollouts: int):
  """The rows' keys [N, G]."""
  return jax.vmap(lambda i: jax.random.split(
      jax.random.fold_in(key, i), num_rollouts))(example_id)


def rollout_of(state: State, vocabulary: vocabulary_lib.Vocabulary) -> Rollout:
  """What the loop's last state says of the responses."""
  stands, end = _end_of_response(state, vocabulary)
  length = jnp.where(stands, end + 1, state.tokens.shape[-1])
  return Rollout(state.tokens, length, stands, state.call, state.logprob,
                 state.calls)


def step(model, params, state: State, row_keys, rule: commit.Rule, vocabulary,
         canvas, config) -> State:
  """One forward: a denoising step or a commit pass, row by row."""
  b = canvas.block_size
  positions = canvas_lib.block_positions(state.start, b)  # [N, G, B]
  committed = jnp.take_along_axis(state.call, positions, -1) < NEVER
  tokens = jnp.where(committed, jnp.take_along_axis(
      state.tokens, positions, -1), vocabulary.mask_id)
  committing = committed.all(-1)  # [N, G]

  def forward(fused: bool) -> tuple[State, canvas_lib.Entries]:
    if fused:
      both = jnp.pad(tokens, ((0, 0), (0, 0), (0, b)),
                     constant_values=vocabulary.mask_id)
      hidden, entries = canvas_lib.decode_block_and_next(
          model, params, state.cache, both, state.start, committing, canvas)
    else:
      hidden, entries = canvas_lib.decode_block(
          model, params, state.cache, tokens, state.start, committing, canvas)
    logits = score(model, params, hidden, state, vocabulary, config)
    if config.fused and not fused:
      # As wide as with neighbours that commit, so that draws are the same.
      logits = jnp.pad(logits, ((0, 0), (0, 0), (0, b), (0, 0)))
    token, confidence, logprob = draw(logits, row_keys, state.calls, config)
    # Which token of the block, from zero, every state scores. B and more are
    # tokens of the next block: they are decided by rows that commit.
    index = jnp.arange(logits.shape[2]) + canvas.shifted
    undecided = ~committed[..., jnp.minimum(index, b - 1)]
    eligible = jnp.where(committing[..., None],
                         (index >= b) & (index < 2 * b),
                         undecided & (index < b))
    if canvas.shifted:  # The seed commits, whatever its probability.
      confidence = jnp.where(index == b, 2., confidence)
    past = jnp.where(committing, 0, state.step)
    agreement = state.agreement
    if isinstance(rule, commit.Adaptive):
      own = jnp.argmax(logits[..., :b - 1, :], -1) == tokens[..., 1:]
      agreement = jnp.where(committing, (agreement + own.mean(-1)) / 2,
                            agreement)
    answering = None
    if config.answer_marker >= 0:
      standing = jnp.where(undecided | (index >= b), token,
                           tokens[..., jnp.minimum(index, b - 1)])
      answering = _answering(state, index[0], standing, config.answer_marker)
    chosen = rule.choose(eligible, confidence, commit.Context(
        answering=answering, step=past, agreement=agreement,
        start=state.start))
    steps = past + 1
    chosen |= eligible & (steps >= config.max_denoising_steps)[..., None]
    alive = ~state.done
    new = write(
        state.replace(cache=None), state.start[..., None] + index,
        chosen & alive[..., None], token, logprob, state.calls)
    return new.replace(
        start=state.start + b * (committing & alive),
        step=steps if fused else jnp.where(committing, 0, steps),
        agreement=agreement, calls=state.calls + alive), entries

  if config.fused and b > 1:
    new, entries = jax.lax.cond((committing & ~state.done).any(),
                                lambda: forward(True), lambda: forward(False))
  else:
    new, entries = forward(False)
  return finish(new.replace(cache=state.cache.written(entries)), vocabulary)


def _answering(state: State, first: jax.Array, standing: jax.Array,
               marker: int) -> jax.Array:
  """Which tokens from index `first` of the block on are the answer's.

  Args:
    state: before this forward.
    first: of the tokens; those before it are committed.
    standing: int32 [N, G, T], what is committed or else proposed.
    marker: the token after which the answer begins.
  """
  before = jnp.arange(state.tokens.shape[-1]) < (state.start + first)[..., None]
  begun = (before & (state.call < NEVER) & (state.tokens == marker)).any(-1)
  here = standing == marker
  return begun[..., None] | (jnp.cumsum(here, -1) - here > 0)


def score(model, params, hidden, state: State, vocabulary, config):
  """Logits [N, G, B, V] without what may not be sampled."""
  logits = vocabulary.allow(
      model.apply({'params': params}, hidden, method='logits'))
  if config.answer_ids:
    # Candidates committed after the marker are used.
    stands = state.call < NEVER
    answering = jnp.cumsum(
        stands & (state.tokens == config.answer_marker), -1) > 0
    used = ((state.tokens[..., None] == jnp.array(config.answer_ids))
            & (stands & answering)[..., None]).any(2)  # [N, G, C]
    banned = jnp.zeros(logits.shape[:2] + logits.shape[-1:], bool)
    banned = banned.at[..., jnp.array(config.answer_ids)].set(used)
    logits = jnp.where(banned[:, :, None], -jnp.inf, logits)
  return logits


def draw(logits, row_keys, calls, config):
  """Token, confidence and the token's log-probability, [N, G, B] each.

  Confidence is the top probability at temperature 1: what tau means does not
  depend on the temperature.
  """
  logprobs = jax.nn.log_softmax(logits)
  confidence = jnp.exp(logprobs.max(-1))
  if config.temperature:
    if config.temperature != 1:
      logits = logits / config.temperature
      logprobs = jax.nn.log_softmax(logits)
    keys = jax.vmap(jax.vmap(jax.random.fold_in))(row_keys, calls)
    token = jax.vmap(jax.vmap(jax.random.categorical))(
        keys, _narrowed(logits, config))
  else:
    token = jnp.argmax(logits, -1)
  token = token.astype(jnp.int32)
  logprob = jnp.take_along_axis(logprobs, token[..., None], -1)[..., 0]
  return token, confidence, logprob


def _narrowed(logits, config):
  """Logits [..., V] with minus infinity outside of top_k and top_p."""
  if not config.top_k and config.top_p == 1:
    return logits
  ordered = jnp.sort(logits, axis=-1, descending=True)
  if config.top_k:
    ordered = jnp.where(
        np.arange(ordered.shape[-1]) < config.top_k, ordered, -jnp.inf)
  probability = jax.nn.softmax(ordered)
  # A token stays if those before it do not hold the mass yet.
  stays = jnp.cumsum(probability, -1) - probability < config.top_p
  least = jnp.min(jnp.where(stays & (ordered > -jnp.inf), ordered, jnp.inf), -1,
                  keepdims=True)
  return jnp.where(logits >= least, logits, -jnp.inf)


def write(state: State, positions, chosen, token, logprob, call) -> State:
  """Commits the chosen tokens [N, G, B] at their positions."""
  positions = jnp.where(chosen, positions, state.tokens.shape[-1])  # dropped

  @jax.vmap
  @jax.vmap
  def put_row(array, at, values):
    return array.at[at].set(values, mode='drop')

  put = lambda array, values: put_row(array, positions, values)
  return state.replace(
      tokens=put(state.tokens, token), logprob=put(state.logprob, logprob),
      call=put(state.call, jnp.broadcast_to(call[..., None], token.shape)))


def _end_of_response(state: State, vocabulary):
  """Whether an EOS stands with all to its left, and where: [N, G] each."""
  committed = state.call < NEVER
  left = jnp.cumprod(committed, -1).astype(bool)
  ends = left & (state.tokens == vocabulary.eos_id)
  return ends.any(-1), jnp.argmax(ends, -1).astype(jnp.int32)


def finish(state: State, vocabulary) -> State:
  """Marks rows whose response has ended or whose room is full."""
  stands, _ = _end_of_response(state, vocabulary)
  full = (state.call < NEVER).all(-1)
  return state.replace(done=state.done | stands | full)
