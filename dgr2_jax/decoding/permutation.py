"""Answers that are permutations by construction, for callers who need one.

A response that ran up to the answer's marker has C slots for C candidates. Its
reasoning is kept and the slots are filled anew, block by block:

    every slot of a block is masked      [x x x <answer> . . . . . .]
    the model scores candidates there    log p[slot, candidate]
    the best assignment is committed     each candidate once

so a block's slots are decided together, by what the model would denoise them
to in one step, and later blocks choose from what is left. A seed (shifted
alignment) is decided first, on the clean stream. This is no decoding of the
model's own: reports tell raw validity without it.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize

from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib


def complete(model: transformer.Transformer, params: Any, prompt: np.ndarray,
             prompt_length: np.ndarray, response: np.ndarray,
             answer_start: np.ndarray, candidate_ids: Sequence[int],
             vocabulary: vocabulary_lib.Vocabulary,
             canvas: canvas_lib.CanvasConfig) -> np.ndarray:
  """Fills the answers of responses with permutations of the candidates.

  Args:
    model: the decoder.
    params: its parameters.
    prompt: int32 [N, P], padded on the right.
    prompt_length: int32 [N].
    response: int32 [N, L]; what counts stands before `answer_start`.
    answer_start: int [N], the first slot.
    candidate_ids: C token ids.
    vocabulary: special ids.
    canvas: block size and rules.

  Returns:
    int [N, C], candidate positions from zero in the order of the slots.

  Raises:
    ValueError: an answer has no room.
  """
  n, length = response.shape
  count, b = len(candidate_ids), canvas.block_size
  answer_start = np.asarray(answer_start)
  if ((answer_start < 0) | (answer_start + count > length)).any():
    raise ValueError(f'an answer of {count} tokens from {answer_start} on does '
                     f'not fit into {length}')
  slots = answer_start[:, None] + np.arange(count)  # [N, C]
  index = np.arange(length)
  tokens = np.where(index < answer_start[:, None], response, vocabulary.eos_id)
  order = np.full((n, count), -1)

  def decide(start, wanted):
    """Assigns the wanted slots [N, C] of the blocks that begin at `start`."""
    place = start[:, None] + np.arange(b)  # [N, B]
    masked = ((place >= answer_start[:, None])
              & (place < answer_start[:, None] + count)
              & ~np.take_along_axis(
                  _scatter(order >= 0, slots, length), place, 1))
    scores = np.asarray(_scores(
        model, params, prompt, prompt_length, tokens, start, masked,
        tuple(candidate_ids), vocabulary, canvas))  # [N, B, C]
    for row in range(n):
      slot = np.flatnonzero(wanted[row])
      left = np.setdiff1d(np.arange(count), order[row])
      at = slots[row, slot] - start[row]
      _, best = optimize.linear_sum_assignment(
          scores[row][at][:, left], maximize=True)
      order[row, slot] = left[best]
      tokens[row, slots[row, slot]] = np.asarray(candidate_ids)[left[best]]

  # Blocks that hold slots, the first, second ... of every row.
  first = answer_start // b * b
  for offset in range(0, count + b, b):
    start = np.minimum(first + offset, length - b)
    inside = (slots >= start[:, None]) & (slots < start[:, None] + b)
    if canvas.shifted:
      seed = inside & (order < 0) & (slots == start[:, None])
      if seed.any():
        decide(start, seed)
    if (rest := inside & (order < 0)).any():
      decide(start, rest)
  return order


def _scatter(values: np.ndarray, at: np.ndarray, length: int) -> np.ndarray:
  """bool [N, length] with values [N, C] at [N, C]."""
  out = np.zeros((len(at), length), bool)
  np.put_along_axis(out, at, values, 1)
  return out


@functools.partial(
    jax.jit, static_argnames=('model', 'candidate_ids', 'vocabulary', 'canvas'))
def _scores(model, params, prompt, prompt_length, tokens, start, masked,
            candidate_ids, vocabulary, canvas):
  """Log-probability of every candidate at every place of a block [N, B, C]."""
  if canvas.shifted:  # A seed is read off the clean stream, never masked.
    masked = masked.at[:, 0].set(False)
  states = canvas_lib.states(
      model, params, canvas_lib.Canvas(
          prompt, prompt_length, tokens[:, None], start[:, None, None],
          masked[:, None, None]), vocabulary.mask_id, canvas)
  logits = vocabulary.allow(model.apply(
      {'params': params}, states.noisy[:, 0, 0], method='logits'))
  return jax.nn.log_softmax(logits)[..., jnp.array(candidate_ids)]
