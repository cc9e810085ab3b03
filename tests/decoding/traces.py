"""Random traces, made by playing a decoder that commits what it likes."""

from typing import NamedTuple

import numpy as np

from dgr2_jax.decoding import block_decoder

NEVER = block_decoder.NEVER


class Step(NamedTuple):
  """A denoising step: the canvas it saw and what it committed, B each."""
  start: int
  masked: tuple[bool, ...]
  decided: tuple[bool, ...]


def play(rng, end, length, block_size, shifted):
  """Calls [L] and steps of a response that stops once `end` tokens stand."""
  call = np.full(length, NEVER, np.int32)
  steps, start, clock = [], 0, 1
  if shifted:
    call[0] = 0  # prefill
  while (call[:end] == NEVER).any():
    block = slice(start, start + block_size)
    masked = call[block] == NEVER
    if masked.any():
      decided = masked & (rng.random(block_size) < rng.random())
      if not decided.any():
        decided[rng.choice(np.flatnonzero(masked))] = True
      steps.append(Step(start, *(tuple(x.tolist()) for x in (masked, decided))))
      call[block][decided] = clock
    else:  # the commit pass
      start += block_size
      if shifted:
        call[start] = clock
    clock += 1
  return call, steps


def play_all(seed, ends, length, block_size, shifted):
  """Calls [N, G, L] and lists of steps by (n, g), for ends [N, G]."""
  rng = np.random.default_rng(seed)
  calls = np.zeros((*ends.shape, length), np.int32)
  steps = {}
  for row in np.ndindex(ends.shape):
    calls[row], steps[row] = play(
        rng, int(ends[row]), length, block_size, shifted)
  return calls, steps
