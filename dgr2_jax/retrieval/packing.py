"""Sequences packed into rows, for training without padding.

    inputs     a0 a1 a2 | b0 | c0 c1 | .        three users in a row
    targets    a1 a2 a3 | b1 | c1 c2 | .        what follows each input
    segment     1  1  1    2    3  3    0       who sees whom; 0 is padding
    position    0  1  2    0    0  1    0

Most users buy few items and some buy many. Rows of padded users would be empty
for the most part, and every position costs a softmax over the catalogue.
"""

from __future__ import annotations

from collections.abc import Sequence

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np


@struct.dataclass
class Rows:
  """Packed sequences, int32 [R, T] each; see the picture above."""
  inputs: np.ndarray
  targets: np.ndarray
  segment: np.ndarray
  position: np.ndarray

  def __getitem__(self, index) -> Rows:
    return jax.tree.map(lambda x: x[index], self)


def pack(sequences: Sequence[np.ndarray], length: int,
         rng: np.random.Generator) -> Rows:
  """Packs sequences, in random order, into rows in random order.

  Args:
    sequences: int [m] tokens each; of one longer than T + 1 the end is kept,
      one shorter than two has no target and is left out.
    length: T.
    rng: of the orders.

  Returns:
    As few rows as best fit finds.

  Raises:
    ValueError: no sequence has a target.
  """
  sequences = [s[-length - 1:] for s in sequences if len(s) > 1]
  if not sequences:
    raise ValueError('no sequence has two tokens or more: nothing to learn')
  sequences = [sequences[i] for i in rng.permutation(len(sequences))]
  size = np.array([len(s) - 1 for s in sequences])
  row, begin = best_fit(size, length)
  within = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
  index = np.repeat(row, size), np.repeat(begin, size) + within

  def laid_out(values):
    out = np.zeros((row.max() + 1, length), np.int32)
    out[index] = values
    return out

  rows = Rows(
      inputs=laid_out(np.concatenate([s[:-1] for s in sequences])),
      targets=laid_out(np.concatenate([s[1:] for s in sequences])),
      segment=laid_out(np.repeat(np.arange(1, len(size) + 1), size)),
      position=laid_out(within))
  return rows[rng.permutation(len(rows.inputs))]


def best_fit(size: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
  """Puts each piece, in order, into the fullest row that has room.

  Args:
    size: int [n], of the pieces, at most `length`.
    length: of a row.

  Returns:
    int64 [n], the row of every piece and where it begins there.
  """
  by_room = [[] for _ in range(length + 1)]  # rows that have so much room
  row, begin = np.zeros((2, len(size)), np.int64)
  rows = 0
  for i, needed in enumerate(size):
    room = next((r for r in range(needed, length + 1) if by_room[r]), None)
    if room is None:
      room, row[i] = length, rows
      rows += 1
    else:
      row[i] = by_room[room].pop()
    begin[i] = length - room
    by_room[room - needed].append(row[i])
  return row, begin


def visible(segment: jax.Array) -> jax.Array:
  """bool [R, T, T]: a position sees those before it in its segment."""
  t = segment.shape[-1]
  return (jnp.tril(jnp.ones((t, t), bool))
          & (segment[:, :, None] == segment[:, None]))
