"""A rollout's trace as block canvases: what the decoder saw, step by step.

A denoising step of a block showed the tokens committed before it and masks
elsewhere. These (block, step) canvases, put behind the shared prompt and the
clean response, give the log-probabilities that the decoder drew from:

    call of a block's tokens    0 4 3 4 5      the seed came with call 0
    canvas of call 3            x . . . .      decides the token with call 3
    canvas of call 4            x . x . .      decides two
    canvas of call 5            x x x x .      decides one

Seeds (shifted alignment) are decided on the clean stream. With B = 1 every
token is a seed: there are no canvases, and a replay is the AR forward. A token
that was never committed stays masked in every canvas.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dgr2_jax.decoding import block_decoder
from dgr2_jax.models import canvas as canvas_lib


class Replay(NamedTuple):
  """The canvases of a batch of rollouts; unused ones have weight 0.

  Attributes:
    start: int32 [N, G, M], the first position of each canvas's block.
    masked: bool [N, G, M, B], what the step had not committed before.
    decided: bool [N, G, M, B], what it committed.
    weight: float32 [N, G, M], the canvas's share of its block's steps: 1 over
      their number, or 1 where one step stands for all.
  """
  start: np.ndarray
  masked: np.ndarray
  decided: np.ndarray
  weight: np.ndarray


def replay(call: np.ndarray, canvas: canvas_lib.CanvasConfig, multiple: int = 1,
           one_step: np.random.Generator | None = None) -> Replay:
  """Rebuilds the canvases of recorded traces.

  Args:
    call: int [N, G, L], `Rollout.call`.
    canvas: block size and alignment of the rollout.
    multiple: M is rounded up to one, so that few shapes are compiled.
    one_step: draws one random step of every block; None keeps all.
  """
  n, g, length = call.shape
  b = canvas.block_size
  blocks = call.reshape(n * g, length // b, b)
  first = 1 if canvas.shifted else 0
  decided = blocks[..., first:]
  row, block, _ = np.nonzero(decided < block_decoder.NEVER)
  steps = np.unique(np.stack(
      [row, block, decided[decided < block_decoder.NEVER]], 1), axis=0)
  if one_step is not None:
    noise = one_step.random(len(steps))
    order = np.lexsort((noise, steps[:, 1], steps[:, 0]))
    _, picked = np.unique(steps[order, :2], axis=0, return_index=True)
    steps = steps[np.sort(order[picked])]
  per_row = np.bincount(steps[:, 0], minlength=n * g)
  m = int(-(-per_row.max(initial=0) // multiple) * multiple)
  slot = np.arange(len(steps)) - np.repeat(
      np.cumsum(per_row) - per_row, per_row)
  start = np.zeros((n * g, m), np.int32)
  masked = np.zeros((n * g, m, b), bool)
  taken = np.zeros((n * g, m, b), bool)
  weight = np.zeros((n * g, m), np.float32)
  row, block, step = steps.T
  seen = blocks[row, block]  # [steps, B]
  start[row, slot] = block * b
  masked[row, slot] = seen >= step[:, None]
  taken[row, slot] = seen == step[:, None]
  _, which, count = np.unique(steps[:, :2], axis=0, return_inverse=True,
                              return_counts=True)
  weight[row, slot] = 1 / count[which.ravel()]
  return Replay(*(x.reshape(n, g, *x.shape[1:])
                  for x in (start, masked, taken, weight)))
