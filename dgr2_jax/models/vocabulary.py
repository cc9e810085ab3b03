"""What models and decoders need to know about token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

# The parameters with a row or a column for every id.
TABLES = ('embedding', 'head')


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """Ids with a role.

  Attributes:
    size: V, padded rows included.
    mask_id: the mask token.
    eos_id: ends a response and fills its last block.
    banned: ids that are never sampled and left out of every softmax: mask,
      padding and unused rows.
  """
  size: int
  mask_id: int
  eos_id: int
  banned: tuple[int, ...]

  def __post_init__(self):
    if self.mask_id not in self.banned or self.eos_id in self.banned:
      raise ValueError('the mask must be banned and EOS must not')

  def allow(self, logits: jax.Array) -> jax.Array:
    """Logits [..., V] with minus infinity at banned ids."""
    banned = np.zeros(self.size, bool)
    banned[list(self.banned)] = True
    return jnp.where(banned, -jnp.inf, logits)


def start_rows(table: jax.Array, rows: Sequence[int], known: Sequence[int],
               key: jax.Array) -> jax.Array:
  """Sets rows of a table [V, D] to the mean known row and a tenth of its noise.

  An untrained row of another scale makes gradients explode.

  Args:
    table: an embedding, or a head by rows.
    rows: ids that start afresh.
    known: ids whose rows are trained.
    key: of the noise.
  """
  trained = table[np.asarray(known)]
  noise = jax.random.normal(key, (len(rows), table.shape[1]), table.dtype)
  return table.at[np.asarray(rows, int)].set(
      trained.mean(0) + .1 * trained.std(0) * noise)


def resize(tables: Mapping[str, jax.Array], size: int, new: Sequence[int],
           known: Sequence[int], key: jax.Array) -> dict[str, jax.Array]:
  """The parameters that grow with the vocabulary, for one of another size.

  Rows that stay keep their bits, and so their logits.

  Args:
    tables: `embedding` [V, D] and, of an untied model, `head` [D, V].
    size: V of the result.
    new: ids that the model doesn't know yet, see `start_rows`.
    known: ids that it knows.
    key: of the noise.
  """
  def resized(table, key):  # [V, D]
    padding = max(0, size - len(table))
    table = jnp.pad(table[:size], ((0, padding), (0, 0)))
    return start_rows(table, new, known, key)

  keys = jax.random.split(key)
  out = {'embedding': resized(tables['embedding'], keys[0])}
  if 'head' in tables:
    out['head'] = resized(tables['head'].T, keys[1]).T
  return out
