"""Commit rules: which positions of a block a denoising step commits.

A rule reads how sure the model is of every position (the probability of its
likeliest token at temperature 1) and commits the surest one at least, so that
every step makes progress:

    Threshold(tau)     all that are at least tau        Diffusion-GR2, section 3
    Factor(f)          the n surest, n as large as c_(n) >= 1 - f / (n + 1)
                       allows: the more at once, the surer
                                                        Fast-dLLM (2505.22618)
    FixedSteps(n)      as many as finish a block in n steps
    Adaptive(low, high)  a threshold that rises as the autoregressive stream
                       disagrees with what was committed

Numbers in a rule are traced: another tau does not compile anew.
"""

from __future__ import annotations

import numbers
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Context:
  """What a rule may know besides confidences.

  Attributes:
    answering: bool [N, G, B], positions behind the answer's marker; None where
      no marker is known.
    step: int32 [N, G], denoising steps of the block so far.
    agreement: float32 [N, G], recent share of committed tokens that are the
      clean stream's own choice; see `Adaptive`.
    start: int32 [N, G], where the block begins; None in drafts.
  """
  answering: jax.Array | None
  step: jax.Array
  agreement: jax.Array
  start: jax.Array | None = None


@flax.struct.dataclass
class Threshold:
  """Commits what is at least `tau` probable.

  Attributes:
    tau: in (0, 1]; 1 switches it off: one token a step.
    answer_tau: tau behind the answer's marker; None is `tau`. Answers clash
      first: below .9 a candidate is easily committed twice.
  """
  tau: Any
  answer_tau: Any = None

  def __post_init__(self):
    _check(self, 'tau', 'answer_tau')

  def choose(self, eligible: jax.Array, confidence: jax.Array,
             context: Context) -> jax.Array:
    tau = self.tau
    if self.answer_tau is not None:
      if context.answering is None:
        raise ValueError('answer_tau needs DecodeConfig.answer_marker, the '
                         'token after which the answer begins')
      tau = jnp.where(context.answering, self.answer_tau, self.tau)
    return eligible & (_best(eligible, confidence) | _sure(confidence, tau))


@flax.struct.dataclass
class Factor:
  """Commits the n surest for the largest n with c_(n) >= 1 - f / (n + 1).

  Attributes:
    f: at least 0; 0 is one token a step.
  """
  f: Any

  def __post_init__(self):
    if isinstance(self.f, numbers.Real) and not self.f >= 0:
      raise ValueError(f'f={self.f} must be at least 0')

  def choose(self, eligible: jax.Array, confidence: jax.Array,
             context: Context) -> jax.Array:
    del context
    rank, ordered = _ranked(eligible, confidence)
    n = jnp.arange(1, rank.shape[-1] + 1)
    allowed = jnp.where(ordered >= 1 - self.f / (n + 1), n, 0)
    allowed = jnp.where(self.f > 0, allowed, 0)  # float32 saturates at 1
    count = jnp.maximum(allowed.max(-1, keepdims=True), 1)
    return eligible & (rank < count)


@flax.struct.dataclass
class FixedSteps:
  """Commits an equal share a step, the surest first: n steps a block.

  Attributes:
    steps: n, at least 1.
  """
  steps: Any

  def __post_init__(self):
    if isinstance(self.steps, numbers.Real) and (
        not self.steps >= 1 or self.steps % 1):
      raise ValueError(f'steps={self.steps} must be a whole number above 0')

  def choose(self, eligible: jax.Array, confidence: jax.Array,
             context: Context) -> jax.Array:
    rank, _ = _ranked(eligible, confidence)
    left = jnp.maximum(self.steps - context.step, 1)[..., None]
    count = -(-eligible.sum(-1, keepdims=True) // left)
    return eligible & (rank < count)


@flax.struct.dataclass
class Adaptive:
  """A threshold between `low` and `high` that follows a verifier.

      tau = low + (high - low) (1 - agreement)

  The pass that commits a block is also its autoregressive reading, where the
  clean stream is an AR model (`canvas.verifiable`): which of its tokens that
  would have chosen costs nothing to know. `agreement` halves the past with
  every block and begins at 1.

  Attributes:
    low: tau in (0, 1] while all agree.
    high: tau in (0, 1] when nothing does; at least `low`.
    sharpness: at least 1; agreement counts by this power.
  """
  low: Any
  high: Any = 1.
  sharpness: Any = 4.

  def __post_init__(self):
    _check(self, 'low', 'high')
    fields = self.low, self.high, self.sharpness
    if all(isinstance(x, numbers.Real) for x in fields):
      if self.low > self.high:
        raise ValueError(f'low={self.low} must be at most high={self.high}')
      if not self.sharpness >= 1:
        raise ValueError(f'sharpness={self.sharpness} must be at least 1')

  def choose(self, eligible: jax.Array, confidence: jax.Array,
             context: Context) -> jax.Array:
    trust = context.agreement ** self.sharpness
    tau = (self.high + (self.low - self.high) * trust)[..., None]
    return eligible & (_best(eligible, confidence) | _sure(confidence, tau))


Rule = Threshold | Factor | FixedSteps | Adaptive


def _check(rule: Any, *names: str) -> None:
  """Raises ValueError for a number outside of (0, 1]; tracers pass."""
  for name in names:
    value = getattr(rule, name)
    if isinstance(value, numbers.Real) and not 0 < value <= 1:
      raise ValueError(f'{name}={value} must be above 0 and at most 1')


def _best(eligible: jax.Array, confidence: jax.Array) -> jax.Array:
  """The surest eligible position, the first among equals."""
  best = jnp.argmax(jnp.where(eligible, confidence, -1), -1, keepdims=True)
  return jnp.arange(confidence.shape[-1]) == best


def _sure(confidence: jax.Array, tau: Any) -> jax.Array:
  # A float32 probability can saturate at 1: tau = 1 must not compare.
  return (confidence >= tau) & (jnp.asarray(tau) < 1)


def _ranked(eligible: jax.Array,
            confidence: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Every position's rank by confidence, and the ordered confidences."""
  confidence = jnp.where(eligible, confidence, -1)
  order = jnp.argsort(confidence, axis=-1, descending=True, stable=True)
  rank = jnp.argsort(order, axis=-1)
  return rank, jnp.take_along_axis(confidence, order, -1)
