"""Assigned answers against every arrangement, tried one by one."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgr2_jax.decoding import permutation
from dgr2_jax.models import canvas as canvas_lib
from tests.decoding.test_fused import scores
from tests.models import tiny

V = tiny.VOCABULARY
CANDIDATES = (5, 9, 17, 21, 30)


def by_hand(model, params, batch, canvas, response, begin):
  """The order of the first request's answer."""
  b, order = canvas.block_size, []
  tokens = response.copy()
  tokens[begin:] = V.eos_id

  def decide(start, slots):
    masked = np.isin(np.arange(start, start + b), slots)
    if canvas.shifted:
      masked[0] = False
    logprob = np.asarray(jax.nn.log_softmax(scores(
        model, params, batch, jnp.array(tokens), jnp.array(start),
        jnp.array(masked), canvas)))
    left = [c for c in range(len(CANDIDATES)) if c not in order]
    best = max(itertools.permutations(left, len(slots)), key=lambda p: sum(
        logprob[slot - start, CANDIDATES[c]] for slot, c in zip(slots, p)))
    order.extend(best)
    tokens[slots] = np.array(CANDIDATES)[list(best)]

  slots = list(range(begin, begin + len(CANDIDATES)))
  for start in range(0, len(tokens), b):
    here = [slot for slot in slots if start <= slot < start + b]
    if canvas.shifted and start in here:
      decide(start, [start])
      here.remove(start)
    if here:
      decide(start, here)
  return order


@pytest.mark.parametrize('canvas', [
    canvas_lib.CanvasConfig(4, 'token_causal', 'shifted'),
    canvas_lib.CanvasConfig(4, 'block_causal', 'same_position'),
    canvas_lib.AUTOREGRESSIVE], ids=str)
def test_the_best_arrangement_of_every_block(canvas):
  model, params = tiny.model()
  batch = tiny.batch()
  response = np.array(batch['response'][:, 0])
  orders = []
  for begin in ([2, 4, 7], [3, 1, 0], [7, 7, 7]):
    got = permutation.complete(
        model, params, batch['prompt'], batch['prompt_length'], response,
        np.array(begin), CANDIDATES, V, canvas)
    assert got[0].tolist() == by_hand(
        model, params, batch, canvas, response[0], begin[0])
    orders += got.tolist()
  assert all(sorted(order) == list(range(5)) for order in orders)
  assert len(set(map(tuple, orders))) > 1


def test_an_answer_needs_room():
  model, params = tiny.model()
  batch = tiny.batch()
  with pytest.raises(ValueError, match='does not fit into 12'):
    permutation.complete(
        model, params, batch['prompt'], batch['prompt_length'],
        np.array(batch['response'][:, 0]), np.array([8, 0, 0]), CANDIDATES, V,
        canvas_lib.CanvasConfig(4))
