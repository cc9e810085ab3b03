"""On-policy distillation from the AR teacher (arXiv 2607.01170, stage 2).

The student decodes; the frozen teacher reads the *clean* response causally, the
student its own *masked canvases*; both are aligned so that state i scores token
i. For responses o of a batch, their canvases c and token weights w (CFT's),

    L = sum_o sum_c a_c sum_{i masked in c} w_i D(teacher_i || student_ic)
        / sum_o sum_i w_i

with a_c = 1 over the number of steps of c's block (or one random step a block
with a_c = 1: the same on average). Seeds are decided on the clean stream and
distilled there, `ar_weight` of the other clean tokens too.

*Which masked positions.* The teacher is causal. At a masked position with
tokens revealed to its right it does not know them, and puts mass back on
candidates that the canvas uses already, and a student that learns it repeats
candidates. `experiments/on_policy` compares the choices of `positions`:

    all            every masked position: the paper's form
    nothing_right  positions right of everything revealed in the block; what is
                   still masked to their left the teacher alone knows
    corrected      all, the teacher's mass on candidates that stand to the right
                   taken away (compact form: candidates are single tokens)

and `elsewhere`: nothing, or cross-entropy to the token that the rollout chose.

The paper averages token weights per response; here responses of a batch share
one sum, so that a long one weighs more, as in CFT.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib
from dgr2_jax.objectives import scoring

_CHOICES = {
    'divergence': ('forward', 'reverse', 'none'),
    'positions': ('all', 'nothing_right', 'corrected'),
    'elsewhere': ('none', 'cross_entropy'),
}


@dataclasses.dataclass(frozen=True)
class DistillationConfig:
  """What is distilled, and how.

  Attributes:
    divergence: 'forward' KL(teacher || student), 'reverse' KL, or 'none': a
      control that leaves the cross-entropy alone, at every masked position.
    positions: see the module.
    elsewhere: see the module.
    teacher_top_k: the teacher's likeliest tokens, and one bucket for the rest;
      0 is the full vocabulary.
    ar_weight: of clean tokens that are not seeds.
    reasoning_weight: l_r.
    answer_weight: l_o.
    head_chunk: rows a request that meet the two heads at a time; 0 is all.
  """
  divergence: str = 'forward'
  positions: str = 'nothing_right'
  elsewhere: str = 'cross_entropy'
  teacher_top_k: int = 0
  ar_weight: float = 0.0
  reasoning_weight: float = 0.5
  answer_weight: float = 1.0
  head_chunk: int = 0

  def __post_init__(self):
    for field, choices in _CHOICES.items():
      if getattr(self, field) not in choices:
        raise ValueError(f'{field}={getattr(self, field)!r}: expected one of '
                         + ', '.join(choices))
    if self.divergence == 'none':
      for field, only in (('elsewhere', 'cross_entropy'), ('ar_weight', 0)):
        if getattr(self, field) != only:
          raise ValueError(f'{field}={getattr(self, field)!r}: expected {only} '
                           "with divergence='none'")
    if not (self.reasoning_weight or self.answer_weight):
      raise ValueError('reasoning_weight and answer_weight are both 0')


def last_revealed(masked: jax.Array) -> jax.Array:
  """Index in the block of the last token shown, -1 for none: [...] of [..., B].
  """
  b = masked.shape[-1]
  return jnp.where(masked, -1, jnp.arange(b)).max(-1)


def revealed_to_the_right(tokens: jax.Array, masked: jax.Array,
                          ids: tuple[int, ...]) -> jax.Array:
  """Which of `ids` a canvas shows right of each position.

  Args:
    tokens: int [..., B].
    masked: bool [..., B].
    ids: C token ids.

  Returns:
    bool [..., B, C].
  """
  shown = (tokens[..., None] == jnp.array(ids)) & ~masked[..., None]
  count = jnp.cumsum(shown[..., ::-1, :], -2)[..., ::-1, :]
  return count - shown > 0


def divergence(teacher: jax.Array, student: jax.Array, kind: str,
               top_k: int) -> jax.Array:
  """D of log-probabilities [..., V]: [...]. Banned tokens are -inf in both."""
  if top_k and top_k < teacher.shape[-1]:
    teacher, ids = jax.lax.top_k(teacher, top_k)
    student = jnp.take_along_axis(student, ids, -1)
    teacher, student = (
        jnp.concatenate([x, _rest(x)], -1) for x in (teacher, student))
  if kind == 'reverse':
    teacher, student = student, teacher
  # 0 log 0 = 0, also in the gradient.
  possible = jnp.isfinite(teacher)
  teacher = jnp.where(possible, teacher, 0.)
  gap = teacher - jnp.where(jnp.isfinite(student), student, _FLOOR)
  return jnp.where(possible, jnp.exp(teacher) * gap, 0.).sum(-1)


# Log-probability, for the other side, of a token that one side excludes.
_FLOOR = -50.


def _rest(logprobs: jax.Array) -> jax.Array:
  """Log-probability of everything that is not listed, [..., 1]."""
  listed = jnp.minimum(jnp.exp(logprobs).sum(-1, keepdims=True), 1 - 1e-6)
  return jnp.log1p(-listed)


def loss(model: transformer.Transformer, params: Any,
         batch: Mapping[str, jax.Array], canvas: canvas_lib.CanvasConfig,
         config: DistillationConfig, vocabulary: vocabulary_lib.Vocabulary,
         teacher_head: Any, candidate_ids: tuple[int, ...] = (),
         teacher: transformer.Transformer | None = None
         ) -> tuple[scoring.Mean, dict[str, scoring.Mean]]:
  """The objective at the top of this module.

  Args:
    model: the student's decoder.
    params: the student's parameters.
    batch: `prompt` [N, P], `prompt_length` [N], `response` [N, G, L],
      `response_length` [N, G], `is_answer` bool [N, G, L]; the fields of a
      `replay.Replay`, rows R of M canvases; `teacher_states` [N, G, L, D'],
      the teacher's clean states. Without `teacher_states` the teacher is the
      student's own clean stream, with no gradient through it.
    canvas: block size and rules of the student.
    config: see `DistillationConfig`.
    vocabulary: special ids.
    teacher_head: parameters of the teacher's head; unused without
      `teacher_states`.
    candidate_ids: candidate tokens, for `positions='corrected'`.
    teacher: the teacher's decoder, over the same vocabulary; None is `model`.

  Returns:
    The loss and metrics.

  Raises:
    ValueError: a block_causal clean stream is to teach or to be scored, or
      candidates are needed and not given.
  """
  own = 'teacher_states' not in batch
  if canvas.clean_stream == 'block_causal' and (own or config.ar_weight):
    raise ValueError('a block_causal clean stream sees the tokens it would '
                     'teach or score: ar_weight must be 0 and the teacher '
                     'another model')
  if config.positions == 'corrected' and not candidate_ids:
    raise ValueError("positions='corrected' needs candidate_ids")
  response = batch['response']
  n, g, length = response.shape
  b = canvas.block_size
  states = canvas_lib.states(
      model, params, canvas_lib.Canvas(
          batch['prompt'], batch['prompt_length'],
          canvas_lib.take_rows(response, batch['owner']), batch['start'],
          batch['masked']), vocabulary.mask_id, canvas)
  clean = canvas_lib.take_rows(states.clean, batch['first'])
  flat = lambda x: x.reshape(n, g * length, *x.shape[3:])
  teacher_states = jax.lax.stop_gradient(
      flat(clean if own else batch['teacher_states']))
  teaches = model if own or teacher is None else teacher
  teacher_params = jax.lax.stop_gradient(params) if own else teacher_head
  index = jnp.arange(length)
  token_weight = jnp.where(batch['is_answer'], config.answer_weight,
                           config.reasoning_weight)
  token_weight *= index < batch['response_length'][..., None]
  flat_index = jnp.broadcast_to(
      jnp.arange(g * length).reshape(g, length), response.shape)

  at = (batch['owner'][..., None, None] * length
        + canvas_lib.block_positions(batch['start'], b))  # [N, R, M, B]

  def shown(x):
    """[N, G, L] at the canvases' tokens."""
    return jnp.take_along_axis(flat(x), at.reshape(n, -1), 1).reshape(at.shape)

  weight = (shown(token_weight) * batch['masked']
            * batch['weight'][..., None])
  right = jnp.arange(b) > last_revealed(batch['masked'])[..., None]
  distilled = right | (config.positions != 'nothing_right')
  excluded = jnp.zeros((*at.shape, len(candidate_ids)), bool)
  if config.positions == 'corrected':
    # In the answer; reasoning may name a candidate as often as it likes.
    answer = shown(batch['is_answer'])
    excluded = answer[..., None] & revealed_to_the_right(
        shown(response), batch['masked'] | ~answer, candidate_ids)
  if config.divergence == 'none':
    distilled &= False
  # A shifted seed is never masked.
  maskable = b - 1 if canvas.shifted else b
  parts = [(weight, states.noisy, at, distilled, excluded,
            weight[0].size // b * maskable)]
  clean_weight = token_weight * config.ar_weight
  if canvas.shifted:
    clean_weight = jnp.where(index % b == 0, token_weight, clean_weight)
  if (canvas.shifted or config.ar_weight) and config.divergence != 'none':
    parts.append((clean_weight, clean, flat_index,
                  jnp.ones(response.shape, bool),
                  jnp.zeros((*response.shape, len(candidate_ids)), bool),
                  g * length // (1 if config.ar_weight else b)))

  def score(state, token, distilled, excluded, teacher_state):
    student = _logprobs(model, params, state, vocabulary)
    target = _logits(teaches, teacher_params, teacher_state, vocabulary)
    if config.positions == 'corrected':
      ids = jnp.array(candidate_ids)
      target = target.at[..., ids].set(
          jnp.where(excluded, -jnp.inf, target[..., ids]))
    target = jax.lax.stop_gradient(jax.nn.log_softmax(target))
    kl = divergence(target, student, config.divergence, config.teacher_top_k)
    nats = -jnp.take_along_axis(student, token[..., None], -1)[..., 0]
    return kl, nats

  kl_sum = kl_weight = nats_sum = nats_weight = 0.
  for weight, state, at, distilled, excluded, capacity in parts:
    used = weight * (distilled | (config.elsewhere == 'cross_entropy'))
    used, state, at, distilled, excluded = scoring.gather_rows(
        used.reshape(n, -1), capacity,
        *(x.reshape(n, used[0].size, *x.shape[used.ndim:])
          for x in (state, at, distilled, excluded)))
    token = jnp.take_along_axis(flat(response), at, 1)
    teacher_state = jnp.take_along_axis(teacher_states, at[..., None], 1)
    kl, nats = scoring.in_chunks(
        score, config.head_chunk, state, token, distilled, excluded,
        teacher_state)
    # where, not *: an unused row may hold a banned token.
    kl_sum += jnp.where((used > 0) & distilled, used * kl, 0.).sum()
    kl_weight += (used * distilled).sum()
    nats_sum += jnp.where((used > 0) & ~distilled, used * nats, 0.).sum()
    nats_weight += (used * ~distilled).sum()
  metrics = {'kl': scoring.Mean(kl_sum, kl_weight),
             'elsewhere_nats': scoring.Mean(nats_sum, nats_weight),
             'distilled_share': scoring.Mean(
                 kl_weight, kl_weight + nats_weight)}
  return scoring.Mean(kl_sum + nats_sum, token_weight.sum()), metrics


def _logits(model, params, states, vocabulary):
  return vocabulary.allow(
      model.apply({'params': params}, states, method='logits'))


def _logprobs(model, params, states, vocabulary):
  return jax.nn.log_softmax(_logits(model, params, states, vocabulary))
