"""Rewards of re-ranked lists (GR2, 2602.07774; Diffusion-GR2, 2607.01170).

With r0 and r the target's rank, from one, in the incoming order and in the
answer, and N candidates:

    R_rank = (r0 - r) / N
    R      = R_rank + alpha R_fmt   if improved, or already first
             R_rank                 otherwise

R_fmt is 1 where reasoning and ranking can both be read. The condition keeps a
policy from earning the format reward by copying the incoming order:

    condition      improved     already first
    gr2            r < r0       r0 = 1
    diffusion_gr2  r < r0       r0 = 1 and r = 1

An answer that is no permutation, or a response without an end, earns a fixed
reward instead of R (-1 in Diffusion-GR2) and stays in its group. DAPO's penalty
of lengths near the limit, if there is one, is added to either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from dgr2_jax.data import parsing

CONDITIONS = ('gr2', 'diffusion_gr2')


@dataclasses.dataclass(frozen=True)
class RewardConfig:
  """What a response earns.

  Attributes:
    condition: of the format reward, of `CONDITIONS`.
    format_weight: alpha.
    invalid: reward of an invalid or overflowing response.
    overlong_buffer: the last tokens before the length limit, over which a
      penalty grows from 0 to 1 (DAPO's soft overlong punishment, 2503.14476);
      0 is none.
  """
  condition: str = 'diffusion_gr2'
  format_weight: float = 0.2
  invalid: float = -1.0
  overlong_buffer: int = 0

  def __post_init__(self):
    if self.condition not in CONDITIONS:
      raise ValueError(f'reward.condition={self.condition!r}: expected '
                       + ' or '.join(CONDITIONS))


def rank_promotion(before: np.ndarray, after: np.ndarray,
                   num_candidates: int) -> np.ndarray:
  """R_rank = (r0 - r) / N, of ranks from one (GR2, section RL)."""
  return (np.asarray(before) - np.asarray(after)) / num_candidates


def conditional_format(before: np.ndarray, after: np.ndarray,
                       readable: np.ndarray, condition: str) -> np.ndarray:
  """R_fmt where `condition` grants it, else 0."""
  first = np.asarray(before) == 1
  if condition == 'diffusion_gr2':
    first &= np.asarray(after) == 1
  granted = (np.asarray(after) < np.asarray(before)) | first
  return np.where(granted & np.asarray(readable), 1., 0.)


def overlong(length: np.ndarray, limit: int, buffer: int) -> np.ndarray:
  """DAPO's soft punishment, 0 down to -1: equation 13 of 2503.14476."""
  if not buffer:
    return np.zeros(np.shape(length))
  return -np.clip((np.asarray(length) - (limit - buffer)) / buffer, 0., 1.)


def rewards(parses: Sequence[parsing.Parse], targets: np.ndarray,
            lengths: np.ndarray, limit: int, num_candidates: int,
            config: RewardConfig) -> Mapping[str, np.ndarray]:
  """Rewards of n responses and their parts.

  Args:
    parses: strict parses, n.
    targets: int [n], the target's position in the incoming order from zero; -1
      where it is no candidate: then no order earns anything.
    lengths: int [n], response tokens.
    limit: the most tokens that a response may have.
    num_candidates: N.
    config: see `RewardConfig`.

  Returns:
    float32 [n] by name: `reward` and its parts `rank`, `format`, `overlong`.
  """
  targets = np.asarray(targets)
  known = targets >= 0
  before = np.where(known, targets + 1, num_candidates)
  valid = np.array([p.order is not None for p in parses], bool)
  after = np.array([
      p.order.index(t) + 1 if p.order is not None and t >= 0 else num_candidates
      for p, t in zip(parses, targets.tolist(), strict=True)])
  readable = valid & np.array([bool(p.explanation.strip()) for p in parses],
                              bool)
  rank = np.where(valid, rank_promotion(before, after, num_candidates), 0.)
  form = np.where(valid & known, conditional_format(
      before, after, readable, config.condition), 0.)
  late = overlong(lengths, limit, config.overlong_buffer)
  total = np.where(valid, rank + config.format_weight * form, config.invalid)
  return {name: value.astype(np.float32) for name, value in (
      ('reward', total + late), ('rank', rank), ('format', form),
      ('overlong', late))}


def group_advantages(
    rewards_: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(R - mean) / std within the G responses of a request (GRPO, 2402.03300).

  Args:
    rewards_: float [N, G].

  Returns:
    float32 [N, G] advantages, and bool [N]: groups whose rewards differ. The
    others have advantage 0: they teach nothing.
  """
  rewards_ = np.asarray(rewards_, np.float64)
  centred = rewards_ - rewards_.mean(1, keepdims=True)
  std = rewards_.std(1, keepdims=True)
  differ = np.ptp(rewards_, axis=1) > 1e-6
  advantages = np.where(differ[:, None], centred / np.maximum(std, 1e-12), 0.)
  return advantages.astype(np.float32), differ
