"""The last level of semantic ids: how items that share an id are told apart.

    nearest           the nearest code, as at every level; ids may be shared
    random            a uniform draw (GR2, arXiv 2602.07774); ids may be shared
    collision_aware   the nearest code that is still free; ids are unique
"""

from __future__ import annotations

from collections.abc import Sequence
import collections

import numpy as np

NEAREST, RANDOM, COLLISION_AWARE = 'nearest', 'random', 'collision_aware'
KINDS = (NEAREST, RANDOM, COLLISION_AWARE)


def random(ids: np.ndarray, codes: int, seed: int) -> np.ndarray:
  """Draws every item's last code from all codes.

  Args:
    ids: int [I, L].
    codes: K.
    seed: of the draw.

  Returns:
    int32 [I, L].
  """
  result = ids.astype(np.int32)
  result[:, -1] = np.random.default_rng(seed).integers(codes, size=len(ids))
  return result


def collision_aware(
    points: np.ndarray,
    ids: np.ndarray,
    centroids: Sequence[np.ndarray],
    codes: int,
    taken: np.ndarray | None = None,
) -> np.ndarray:
  """Moves items off shared ids, to the nearest free code of the last level.

  Where items share an id, the one nearest to its centroids keeps it. Where a
  prefix has no free code, the code before it moves to the next nearest one, and
  so on upwards.

  Args:
    points: float [I, E], what was quantised.
    ids: int [I, L], the nearest centroids.
    centroids: L tables, float [k, E] with k <= K.
    codes: K.
    taken: int [T, L], ids of others, which stay theirs; I + T <= K^L.

  Returns:
    int32 [I, L], rows unique.
  """
  levels = ids.shape[1]
  residual = np.asarray(points, np.float64)
  for table, code in zip(centroids, ids.T, strict=True):
    residual = residual - table[code]
  distance = (residual ** 2).sum(axis=1)
  result = ids.astype(np.int32)
  used = collections.Counter()  # Items below every prefix, full ids included.

  def place(path: tuple[int, ...]) -> None:
    for length in range(1, levels + 1):
      used[path[:length]] += 1

  def nearest_free(prefix, residual):
    """Depth first, nearest codes first, past full subtrees."""
    level = len(prefix)
    if level == levels:
      return prefix
    table = centroids[level]
    order = np.argsort(
        ((residual - table) ** 2).sum(axis=1), kind='stable').tolist()
    # Codes that clustering left without a centroid come last.
    for code in order + list(range(len(table), codes)):
      path = prefix + (code,)
      if used[path] < codes ** (levels - level - 1):
        return nearest_free(
            path, residual - (table[code] if code < len(table) else 0.0))
    raise AssertionError('no free id: capacity was checked before')

  for path in () if taken is None else map(tuple, taken.tolist()):
    place(path)
  waiting = []
  for item in np.lexsort((np.arange(len(ids)), distance)).tolist():
    path = tuple(ids[item].tolist())
    if used[path]:
      waiting.append(item)
    else:
      place(path)
  for item in waiting:
    path = nearest_free((), np.asarray(points[item], np.float64))
    # The own prefix first: it is the greedy path as long as it has room.
    result[item] = path
    place(path)
  return result
