"""Purchase sequences as flat arrays, for code that runs over all requests.

A *slot* is one purchase: sequences are laid end to end, so user u owns the
slots `start[u] : start[u] + length[u]`. A *query* is a pair (user, position):
predict the item at `position` from the purchases before it.

    slot      0  1  2  3  4 | 5  6  7  8
    user      0  0  0  0  0 | 1  1  1  1
    training  x  x  x       | x  x            all but the last two purchases

Statistics are fitted on the training slots. What a query may know of them
excludes its own user: `seen` says which slots a user added to the counts.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import numpy as np

from dgr2_jax.data import interactions

# Purchases at the end of a sequence that are kept out of every statistic: the
# validation and the test target.
HELD_OUT = 2


@dataclasses.dataclass(frozen=True)
class Histories:
  """All sequences of a dataset, end to end.

  Attributes:
    items: int32 [S] item index of every slot.
    user: int32 [S] user of every slot.
    position: int32 [S] place of the slot in its user's sequence.
    seen: bool [S] whether the slot is a training slot.
    start: int64 [U] first slot of every user.
    length: int64 [U] slots of every user.
    num_items: size of the catalogue, `I`.
  """
  items: np.ndarray
  user: np.ndarray
  position: np.ndarray
  seen: np.ndarray
  start: np.ndarray
  length: np.ndarray
  num_items: int

  @property
  def training_length(self) -> np.ndarray:
    """int64 [U] training slots of every user."""
    return np.maximum(self.length - HELD_OUT, 0)

  def before(self, users: np.ndarray, positions: np.ndarray
            ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the history slots of queries as (row [h], slot [h])."""
    return _ranges(self.start[users], positions)

  def training_after(self, users: np.ndarray, positions: np.ndarray
                    ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the training slots from the target on as (row [h], slot [h]).

    They are the only candidates of a query that its own user's purchases can
    have influenced: earlier purchases are history and never candidates.
    """
    count = np.maximum(self.training_length[users] - positions, 0)
    return _ranges(self.start[users] + positions, count)


def _ranges(first: np.ndarray, count: np.ndarray
           ) -> tuple[np.ndarray, np.ndarray]:
  """Concatenates `range(first[r], first[r] + count[r])` over the rows r."""
  first = np.asarray(first, np.int64)
  count = np.asarray(count, np.int64)
  row = np.repeat(np.arange(len(count)), count)
  within = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
  return row, first[row] + within


def extended(histories: Histories, queries: Sequence[np.ndarray],
             new_items: int = 0) -> Histories:
  """Adds users whose purchases no statistic has counted.

  Args:
    histories: U users.
    queries: int [h] item indices of each further user, oldest first.
    new_items: items that the catalogue lacks; their indices follow its own.

  Returns:
    U + len(queries) users; the position after a further user's last purchase
    asks for the next one.
  """
  h = histories
  length = np.array([len(q) for q in queries], np.int64)
  start = np.cumsum(length) - length
  row, slot = _ranges(start, length)
  return Histories(
      items=np.concatenate([h.items, *queries]).astype(np.int32),
      user=np.concatenate([h.user, len(h.start) + row]).astype(np.int32),
      position=np.concatenate([h.position, slot - start[row]]).astype(np.int32),
      seen=np.concatenate([h.seen, np.zeros(len(slot), bool)]),
      start=np.concatenate([h.start, len(h.items) + start]),
      length=np.concatenate([h.length, length]),
      num_items=h.num_items + new_items)


def flatten(dataset: interactions.Dataset) -> Histories:
  """Lays the sequences of `dataset` end to end."""
  length = np.array([len(s) for s in dataset.sequences], np.int64)
  start = np.cumsum(length) - length
  user, slot = _ranges(start, length)
  position = slot - start[user]
  items = (np.concatenate(dataset.sequences) if len(length) else
           np.zeros(0, np.int32))
  return Histories(
      items=items.astype(np.int32),
      user=user.astype(np.int32),
      position=position.astype(np.int32),
      seen=position < length[user] - HELD_OUT,
      start=start,
      length=length,
      num_items=len(dataset.items),
  )
