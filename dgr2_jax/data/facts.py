"""Bucketed facts about a request's candidates.

A prompt shows them as evidence, a trace argues with them, and the boosted
ranker sees nothing else. They come in two steps:

    purchases, candidates -> measure -> real numbers -> bucket -> levels

Every measurement leaves out the purchases of the query's own user, as if the
counts had been made without that user (see `retrieval`). A finely resolved
count would still give the target away: the target's count, and only the
target's, is one below what other users' lists show for the same item, and a
ranker trained on such counts learns just that. A handful of levels hides it.

Edges of levels are quantiles over the candidates of the training requests;
level 0 of a count is "never", and the others share what is left evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import NamedTuple

import numpy as np
from scipy import sparse
from sklearn.feature_extraction import text as feature_text

from dgr2_jax.data import histories as histories_lib
from dgr2_jax.data import interactions
from dgr2_jax.data import item_text

# How many of the latest purchases count as recent.
RECENT = 3
# Queries measured at once; bounds the [history slots, C] look-ups.
_CHUNK = 4096


class Fact(NamedTuple):
  """One integer fact: its name and the number of its levels."""
  name: str
  levels: int


FACTS = (
    # Place in the retriever's list.
    Fact('rank', 10),
    # Retriever score as a share of the list's best.
    Fact('score', 8),
    # Buyers of both the candidate and the last item; of both it and a recent
    # item, summed over the recent items.
    Fact('bought_with_last', 6),
    Fact('bought_with_recent', 6),
    # Buyers.
    Fact('popularity', 6),
    # Shares the leaf category (brand) with: 1 a history item, 2 a recent one,
    # 3 the last one. 0 also where the catalogue does not know it.
    Fact('category', 4),
    Fact('brand', 4),
    # Share of the candidate's leaf category among the purchases that directly
    # follow one from the last item's leaf category.
    Fact('follows', 6),
    # Largest text cosine with a recent item.
    Fact('similarity', 6),
    # Buyers who bought it directly after the last (last but one) item.
    Fact('bought_after_last', 6),
    Fact('bought_after_second_last', 6),
    # Buyers of both it and a history item, summed over the history, divided by
    # the root of its popularity.
    Fact('bought_with_history', 6),
)

# Facts that are levels by nature.
_DISCRETE = ('rank', 'category', 'brand')
# Facts without a meaningful zero: all levels are quantiles.
_NO_ZERO = ('score', 'popularity')


def index(name: str) -> int:
  """Returns the column of the fact called `name`.

  Raises:
    ValueError: there is no such fact.
  """
  names = [fact.name for fact in FACTS]
  if name not in names:
    raise ValueError(f'unknown fact {name!r}: expected one of {names}')
  return names.index(name)


@dataclasses.dataclass(frozen=True)
class Statistics:
  """Counts over the training slots of all users.

  Attributes:
    histories: the purchases.
    items: the catalogue.
    leaf: int64 [I] leaf category, -1 unknown.
    brand: int64 [I] brand, -1 unknown.
    text: float64 [I, words] unit TF-IDF rows.
    words: what `text` counts.
    popularity: int64 [I] buyers.
    together: int64 [I, I] buyers of both items.
    after: int64 [I, I] times the second item directly follows the first.
    leaf_after: int64 [K, K] the same of leaf categories.
    own_leaf_after: int64 [U, K * K] each user's part of `leaf_after`.
    own_after_leaf: int64 [U, K] its sum over the second leaf.
  """
  histories: histories_lib.Histories
  items: tuple[interactions.Item, ...]
  leaf: np.ndarray
  brand: np.ndarray
  text: sparse.csr_matrix
  words: feature_text.TfidfVectorizer
  popularity: np.ndarray
  together: sparse.csr_matrix
  after: sparse.csr_matrix
  leaf_after: sparse.csr_matrix
  own_leaf_after: sparse.csr_matrix
  own_after_leaf: sparse.csr_matrix


def _codes(values: list) -> np.ndarray:
  """Numbers values by first appearance; empty ones are -1."""
  known = {v: i for i, v in enumerate(dict.fromkeys(v for v in values if v))}
  return np.array([known.get(v, -1) for v in values], np.int64)


def _count(rows, columns, shape) -> sparse.csr_matrix:
  ones = np.ones(len(rows), np.int64)
  return sparse.csr_matrix((ones, (rows, columns)), shape)


def fit(
    dataset: interactions.Dataset, histories: histories_lib.Histories
) -> Statistics:
  """Counts what the facts need, over the training slots."""
  h, num_items = histories, histories.num_items
  leaf = _codes([item.categories for item in dataset.items])
  slot = np.flatnonzero(h.seen)
  bought = _count(h.user[slot], h.items[slot], (len(h.start), num_items))
  first = np.flatnonzero(
      h.seen[:-1] & h.seen[1:] & (h.user[:-1] == h.user[1:]))
  a, b = h.items[first], h.items[first + 1]
  num_leaves = int(leaf.max(initial=0)) + 1
  text, words = item_text.tfidf(dataset.items)
  known = (leaf[a] >= 0) & (leaf[b] >= 0)
  pair = leaf[a[known]] * num_leaves + leaf[b[known]]
  return Statistics(
      histories=h,
      items=dataset.items,
      leaf=leaf,
      brand=_codes([item.brand for item in dataset.items]),
      text=text,
      words=words,
      popularity=np.bincount(h.items[slot], minlength=num_items),
      together=(bought.T @ bought).tocsr(),
      after=_count(a, b, (num_items, num_items)),
      leaf_after=_count(
          leaf[a[known]], leaf[b[known]], (num_leaves, num_leaves)),
      own_leaf_after=_count(
          h.user[first[known]], pair, (len(h.start), num_leaves ** 2)),
      own_after_leaf=_count(
          h.user[first[known]], leaf[a[known]], (len(h.start), num_leaves)),
  )


def extended(statistics: Statistics, histories: histories_lib.Histories,
             new_items: Sequence[interactions.Item] = ()) -> Statistics:
  """The same counts beside further users and items that nobody bought.

  Args:
    statistics: of `fit`.
    histories: from `histories_lib.extended`.
    new_items: as many as `histories` was extended by. Their texts are read in
      the catalogue's words.
  """
  s, users, size = statistics, len(histories.start), histories.num_items
  s = dataclasses.replace(
      s, histories=histories,
      own_leaf_after=with_empty(s.own_leaf_after, users),
      own_after_leaf=with_empty(s.own_after_leaf, users))
  if not new_items:
    return s
  items = (*s.items, *new_items)  # codes go by first appearance: none changes
  return dataclasses.replace(
      s, items=items,
      leaf=_codes([item.categories for item in items]),
      brand=_codes([item.brand for item in items]),
      text=sparse.vstack(
          [s.text, item_text.of_new(new_items, s.words)], 'csr'),
      popularity=np.pad(s.popularity, (0, len(new_items))),
      together=with_empty(s.together, size, size),
      after=with_empty(s.after, size, size))


def with_empty(matrix: sparse.csr_matrix, rows: int,
               columns: int | None = None) -> sparse.csr_matrix:
  """The matrix with empty rows, and columns, at its end."""
  indptr = np.pad(matrix.indptr, (0, rows - matrix.shape[0]), mode='edge')
  return sparse.csr_matrix((matrix.data, matrix.indices, indptr),
                           (rows, columns or matrix.shape[1]))


def measure(
    statistics: Statistics,
    users: np.ndarray,
    positions: np.ndarray,
    candidates: np.ndarray,
    scores: np.ndarray,
) -> dict[str, np.ndarray]:
  """Measures every fact, own purchases left out.

  Args:
    statistics: of `fit`.
    users: int [n] users of the queries.
    positions: int [n] index of the target in the user's sequence, > 0.
    candidates: int [n, C] items outside the history.
    scores: float [n, C] retriever scores, descending.

  Returns:
    float64 [n, C] by fact name.
  """
  parts = [
      _measure_chunk(statistics, *(
          x[begin:begin + _CHUNK] for x in
          (users, positions, candidates, scores)))
      for begin in range(0, max(len(users), 1), _CHUNK)]
  return {fact.name: np.concatenate([part[fact.name] for part in parts])
          for fact in FACTS}


def _look_up(matrix, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
  """matrix[rows, columns] for broadcastable index arrays."""
  rows, columns = np.broadcast_arrays(rows, columns)
  if not rows.size:
    return np.zeros(rows.shape, np.int64)
  found = matrix[rows.ravel(), columns.ravel()]
  return np.asarray(found).reshape(rows.shape)


def _measure_chunk(s, users, positions, candidates, scores):
  """`measure` for a few thousand queries."""
  h = s.histories
  n, num_candidates = candidates.shape

  # Slot of a candidate in its own user's training part, -1 where not bought.
  own = np.full((n, num_candidates), -1, np.int64)
  row, slot = h.training_after(users, positions)
  match, place = np.nonzero(candidates[row] == h.items[slot][:, None])
  own[row[match], place] = slot[match]
  is_own = (own >= 0).astype(np.int64)

  popularity = s.popularity[candidates] - is_own
  result = dict(
      rank=np.broadcast_to(np.arange(num_candidates), candidates.shape),
      score=scores / np.maximum(
          scores.max(axis=1, keepdims=True, initial=0), 1e-30),
      popularity=popularity)

  with_recent = np.zeros(candidates.shape)
  similarity = np.zeros(candidates.shape)
  for age in range(1, RECENT + 1):
    exists = (positions >= age)[:, None]
    slot = np.where(positions >= age, h.start[users] + positions - age, 0)
    item = h.items[slot][:, None]
    together = exists * (_look_up(s.together, item, candidates) - is_own)
    with_recent += together
    cosine = s.text[np.repeat(item[:, 0], num_candidates)].multiply(
        s.text[candidates.ravel()]).sum(axis=1)
    similarity = np.maximum(
        similarity, exists * np.asarray(cosine).reshape(candidates.shape))
    after = exists * (_look_up(s.after, item, candidates)
                      - (own == slot[:, None] + 1))
    if age == 1:
      result['bought_with_last'] = together
      result['bought_after_last'] = after
      result['follows'] = _follows(s, users, s.leaf[item], s.leaf[candidates])
    elif age == 2:
      result['bought_after_second_last'] = after
  result['bought_with_recent'] = with_recent
  result['similarity'] = similarity

  row, slot = h.before(users, positions)
  together = _look_up(s.together, h.items[slot][:, None], candidates[row])
  cell = row[:, None] * num_candidates + np.arange(num_candidates)
  with_history = np.bincount(
      cell.ravel(), together.ravel(), minlength=candidates.size
  ).reshape(candidates.shape) - is_own * positions[:, None]
  result['bought_with_history'] = (
      with_history / np.sqrt(np.maximum(popularity, 1)))

  closeness = np.where(positions[row] - h.position[slot] == 1, 3, np.where(
      positions[row] - h.position[slot] <= RECENT, 2, 1))
  for name, code in (('category', s.leaf), ('brand', s.brand)):
    shared = (code[h.items[slot]][:, None] == code[candidates[row]]) & (
        code[candidates[row]] >= 0)
    level = np.zeros(candidates.shape, np.int64)
    np.maximum.at(level, row, shared * closeness[:, None])
    result[name] = level
  return {name: np.asarray(x, np.float64) for name, x in result.items()}


def _follows(s, users, last_leaf, leaf):
  """Share of `leaf` [n, C] among what follows `last_leaf` [n, 1]."""
  num_leaves = s.leaf_after.shape[0]
  # Nothing follows or leads to the categories of new items alone.
  known = ((last_leaf >= 0) & (last_leaf < num_leaves)
           & (leaf >= 0) & (leaf < num_leaves))
  last_leaf, leaf = (np.clip(x, 0, num_leaves - 1) for x in (last_leaf, leaf))
  count = _look_up(s.leaf_after, last_leaf, leaf) - _look_up(
      s.own_leaf_after, users[:, None], last_leaf * num_leaves + leaf)
  total = np.asarray(s.leaf_after.sum(axis=1)).ravel()[last_leaf] - _look_up(
      s.own_after_leaf, users[:, None], last_leaf)
  return known * count / np.maximum(total, 1)


def learn_edges(measured: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Learns the lower edges of levels from training candidates.

  Args:
    measured: float [n, C] by fact name, of the training requests.

  Returns:
    Ascending float64 edges by fact name; fewer than the levels allow where
    the values leave some of them empty.

  Raises:
    ValueError: there are no training candidates.
  """
  edges = {}
  for fact in FACTS:
    if fact.name in _DISCRETE:
      continue
    values = np.ravel(measured[fact.name])
    if not values.size:
      raise ValueError('no training candidates to learn fact levels from')
    if fact.name in _NO_ZERO:
      edges[fact.name] = _even_edges(values, fact.levels)
    else:
      edges[fact.name] = _even_edges(values[values > 0], fact.levels - 1)
  return edges


def _even_edges(values: np.ndarray, parts: int) -> np.ndarray:
  """Lower edges of all parts but the first, as even as ties allow."""
  values = np.sort(values)
  edges, start = [], 0
  for left in range(parts, 1, -1):
    if start == len(values):
      break
    edge = values[start + (len(values) - start) // left]
    if edge == values[start]:  # A tie fills the part: go on to what follows.
      after = np.searchsorted(values, edge, side='right')
      if after == len(values):
        break
      edge = values[after]
    edges.append(edge)
    start = np.searchsorted(values, edge)
  return np.array(edges, np.float64)


def bucket(
    measured: Mapping[str, np.ndarray], edges: Mapping[str, np.ndarray]
) -> np.ndarray:
  """Turns measurements into levels.

  Args:
    measured: float [n, C] by fact name.
    edges: of `learn_edges`.

  Returns:
    int8 [n, C, len(FACTS)], column f within [0, FACTS[f].levels).
  """
  columns = []
  for fact in FACTS:
    values = measured[fact.name]
    if fact.name in _DISCRETE:
      level = np.minimum(values, fact.levels - 1)
    else:
      level = np.searchsorted(edges[fact.name], values, side='right')
      if fact.name not in _NO_ZERO:
        level = (values > 0) * (1 + level)
    columns.append(level)
  return np.stack(columns, axis=-1).astype(np.int8)
