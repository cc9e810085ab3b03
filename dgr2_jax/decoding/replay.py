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

Most responses take few steps and some take many. So that the long ones don't
pad the others, a response has as many *rows* of M canvases as it needs, each
beside a copy of its clean tokens:

    responses of a request      row    owner    canvases (M = 4)
    a, 3 steps                  0      a        1 2 3 -
    b, 6 steps                  1      b        1 2 3 4
                                2      b        5 6 - -
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dgr2_jax.decoding import block_decoder
from dgr2_jax.models import canvas as canvas_lib


class Replay(NamedTuple):
  """The canvases of a batch of rollouts; unused ones have weight 0.

  Attributes:
    owner: int32 [N, R], the response that each row of canvases belongs to.
    first: int32 [N, G], the first row of each response: what is scored on the
      clean stream is scored there.
    start: int32 [N, R, M], the first position of each canvas's block.
    masked: bool [N, R, M, B], what the step had not committed before.
    decided: bool [N, R, M, B], what it committed.
    weight: float32 [N, R, M], the canvas's share of its block's steps: 1 over
      their number, or 1 where one step stands for all.
  """
  owner: np.ndarray
  first: np.ndarray
  start: np.ndarray
  masked: np.ndarray
  decided: np.ndarray
  weight: np.ndarray


def replay(call: np.ndarray, canvas: canvas_lib.CanvasConfig,
           canvases_per_row: int,
           one_step: np.random.Generator | None = None) -> Replay:
  """Rebuilds the canvases of recorded traces.

  Args:
    call: int [N, G, L], `Rollout.call`.
    canvas: block size and alignment of the rollout.
    canvases_per_row: M; with B = 1 and shifted alignment there are none.
    one_step: draws one random step of every block; None keeps all.

  Returns:
    R rows a request: G, and as many halves of G more as the longest needs, so
    that few shapes are compiled.
  """
  n, g, length = call.shape
  b = canvas.block_size
  blocks = call.reshape(n * g, length // b, b)
  first = 1 if canvas.shifted else 0
  decided = blocks[..., first:]
  response, block, _ = np.nonzero(decided < block_decoder.NEVER)
  steps = np.unique(np.stack(
      [response, block, decided[decided < block_decoder.NEVER]], 1), axis=0)
  m = canvases_per_row if b > first else 0
  if one_step is not None:
    noise = one_step.random(len(steps))
    order = np.lexsort((noise, steps[:, 1], steps[:, 0]))
    _, picked = np.unique(steps[order, :2], axis=0, return_index=True)
    steps = steps[np.sort(order[picked])]
  count = np.bincount(steps[:, 0], minlength=n * g)
  # Rows of each response, and the first of them in its request.
  rows = np.maximum(-(-count // max(m, 1)), 1).reshape(n, g)
  begin = (np.cumsum(rows, 1) - rows).astype(np.int32)
  half = -(-g // 2)
  r = g + -(-(rows.sum(1).max() - g) // half) * half
  owner = np.zeros((n, r), np.int32)
  for i in range(n):
    owner[i, :rows[i].sum()] = np.repeat(np.arange(g), rows[i])
  start = np.zeros((n, r, m), np.int32)
  masked = np.zeros((n, r, m, b), bool)
  taken = np.zeros((n, r, m, b), bool)
  weight = np.zeros((n, r, m), np.float32)
  response, block, step = steps.T
  index = np.arange(len(steps)) - (np.cumsum(count) - count)[response]
  at = (response // g, begin.ravel()[response] + index // max(m, 1),
        index % max(m, 1))
  seen = blocks[response, block]  # [steps, B]
  start[at] = block * b
  masked[at] = seen >= step[:, None]
  # A fused commit takes the seed along, which the clean stream scores.
  taken[at] = (seen == step[:, None]) & (np.arange(b) >= first)
  _, which, of_block = np.unique(steps[:, :2], axis=0, return_inverse=True,
                                 return_counts=True)
  weight[at] = 1 / of_block[which.ravel()]
  return Replay(owner, begin, start, masked, taken, weight)
