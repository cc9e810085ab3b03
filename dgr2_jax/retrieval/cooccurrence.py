"""Item-to-item co-occurrence retrieval that has never seen its own user.

Fitted on the training slots of all users (see `histories`):

    W[i, j] = sum over users who bought i, then j, d purchases later: d^-a
              + backward * sum over users who bought j, then i: d^-a

    score(query, j) = n_j^-t * sum over history items i of
                      age_i^-r * n_i^-s * W[i, j]      + backoff * log(1 + n_j)

with n the number of buyers and age 1 for the latest purchase. Items of the
history are never candidates.

Lists for training queries would look far better than lists at test time if
the user's own purchases stayed in W and n: the target would be known. They
are therefore subtracted, for every query of every split, which gives the same
scores as fitting anew without the user. Trained retrievers, which cannot
subtract, are cross-fitted (`lists`).
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import zlib

from ml_collections import config_dict
import numpy as np
from scipy import sparse

from dgr2_jax.data import facts
from dgr2_jax.data import histories as histories_lib
from dgr2_jax.data import interactions

# Queries scored at once; bounds the dense [chunk, I] score matrix.
_CHUNK = 512
# What rounding can leave of a weight that is the user's own entirely; real
# remainders are many orders of magnitude larger.
_ROUNDING = 1e-9


def default_config() -> config_dict.ConfigDict:
  """Returns the parameters chosen on the validation users of Amazon Beauty."""
  return config_dict.ConfigDict(dict(
      kind='cooccurrence',  # or another of `retrievers.KINDS`.
      path='',  # of 'file'; empty: candidates.jsonl in config.data.path.
      window=20,  # Largest distance of a pair, in purchases.
      distance_decay=0.45,  # a
      backward=0.2,  # Weight of a pair read against its order.
      recency_decay=1.4,  # r
      source_power=0.2,  # s
      target_power=0.05,  # t
      backoff=1e-4,  # Ranks items that no pair leads to.
  ))


@dataclasses.dataclass(frozen=True)
class Cooccurrence:
  """A fitted co-occurrence retriever.

  Attributes:
    histories: the purchases it was fitted on.
    config: its parameters, fields as in `default_config`.
    weights: float64 [I, I] pair weights W of all users together.
    own: float64 [S, S] what each pair of slots added to W in reading order.
    popularity: int64 [I] buyers of every item among the training slots.
    tie: int64 [I] order of items with equal scores, by hash of the item id:
      catalogues are often sorted by id, and ids can tell the time.
  """
  histories: histories_lib.Histories
  config: config_dict.ConfigDict
  weights: sparse.csr_matrix
  own: sparse.csr_matrix
  popularity: np.ndarray
  tie: np.ndarray

  def scores(self, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Scores the catalogue for queries, without their users' own purchases.

    Args:
      users: int [n] users.
      positions: int [n] index of the target in the user's sequence; the
        history is everything before it.

    Returns:
      float32 [n, I], not negative, and -1 for items of the history.
    """
    c, h = self.config, self.histories
    users, positions = np.asarray(users), np.asarray(positions)
    n = len(users)
    row, slot = h.before(users, positions)
    item = h.items[slot]
    age = positions[row] - h.position[slot]
    buyers = np.maximum(self.popularity[item] - h.seen[slot], 1)
    mass = age ** -float(c.recency_decay) * buyers ** -float(c.source_power)
    query = sparse.csr_matrix((mass, (row, item)), (n, h.num_items))
    pairs = (query @ self.weights).toarray()  # [n, I]

    # The user's own part, at the only items it can touch.
    later_row, later_slot = h.training_after(users, positions)
    later = (later_row, h.items[later_slot])
    by_slot = sparse.csr_matrix((mass, (row, slot)), (n, len(h.items)))
    own = np.asarray((by_slot @ self.own)[later_row, later_slot]).ravel()
    others = pairs[later] - own
    others[others < _ROUNDING * own] = 0.0

    count = np.maximum(self.popularity, 1)
    pairs *= count ** -float(c.target_power)
    pairs += c.backoff * np.log1p(self.popularity)
    count = self.popularity[later[1]] - 1
    pairs[later] = (
        others * np.maximum(count, 1) ** -float(c.target_power)
        + c.backoff * np.log1p(count))
    pairs[row, item] = -1.0
    return pairs.astype(np.float32)


def extended(retriever: Cooccurrence,
             histories: histories_lib.Histories) -> Cooccurrence:
  """The same weights beside `histories_lib.extended` users and items."""
  slots, items = len(histories.items), histories.num_items
  return dataclasses.replace(
      retriever, histories=histories,
      own=facts.with_empty(retriever.own, slots, slots),
      weights=facts.with_empty(retriever.weights, items, items),
      popularity=np.pad(
          retriever.popularity, (0, items - len(retriever.popularity))))


def fit(
    dataset: interactions.Dataset,
    histories: histories_lib.Histories,
    config: config_dict.ConfigDict,
) -> Cooccurrence:
  """Fits the retriever on the training slots.

  Args:
    dataset: the catalogue and its users.
    histories: `histories_lib.flatten(dataset)`.
    config: parameters, see `default_config`.
  """
  if config.window < 1:
    raise ValueError(
        f'config.data.retriever.window is {config.window}, must be >= 1')
  first, second, weight = [], [], []
  for distance in range(1, config.window + 1):
    slot = np.arange(len(histories.items) - distance)
    slot = slot[
        (histories.user[slot] == histories.user[slot + distance])
        & histories.seen[slot] & histories.seen[slot + distance]]
    if not len(slot):
      break
    first.append(slot)
    second.append(slot + distance)
    weight.append(np.full(len(slot), distance ** -float(config.distance_decay)))
  first, second, weight = (
      np.concatenate(x) if x else np.zeros(0, np.int64)
      for x in (first, second, weight))
  num_slots, num_items = len(histories.items), histories.num_items
  own = sparse.csr_matrix((weight, (first, second)), (num_slots, num_slots))
  forward = sparse.csr_matrix(
      (weight, (histories.items[first], histories.items[second])),
      (num_items, num_items))
  key = [zlib.crc32(item.item_id.encode()) for item in dataset.items]
  tie = np.empty(num_items, np.int64)
  tie[np.lexsort((np.arange(num_items), key))] = np.arange(num_items)
  return Cooccurrence(
      histories=histories,
      config=config,
      weights=(forward + config.backward * forward.T).tocsr(),
      own=own,
      popularity=np.bincount(
          histories.items[histories.seen], minlength=num_items),
      tie=tie,
  )


@dataclasses.dataclass(frozen=True)
class Lists:
  """Candidate lists of queries.

  Attributes:
    query: int64 [m] which query each list answers.
    candidates: int32 [m, C] item indices, best first.
    scores: float32 [m, C] scores, descending.
  """
  query: np.ndarray
  candidates: np.ndarray
  scores: np.ndarray


def retrieve(
    retriever: Cooccurrence,
    users: np.ndarray,
    positions: np.ndarray,
    num_candidates: int,
    *,
    hits_only: bool,
) -> Lists:
  """Retrieves the best items for queries.

  Args:
    retriever: a fitted retriever.
    users: int [n] users.
    positions: int [n] index of the target in the user's sequence.
    num_candidates: length of the lists, `C`.
    hits_only: return only the lists that hold the target.

  Returns:
    The lists, in the order of the queries. Equal scores are ordered by
    `retriever.tie`.

  Raises:
    DataError: if the catalogue has too few items outside some history.
  """
  h = retriever.histories
  users, positions = np.asarray(users), np.asarray(positions)
  check_enough_items(
      positions.max(initial=0), num_candidates, h.num_items)
  targets = h.items[h.start[users] + positions]
  parts = list(_retrieve_chunks(
      retriever, users, positions, targets, num_candidates, hits_only))
  empty = Lists(np.zeros(0, np.int64), np.zeros((0, num_candidates), np.int32),
                np.zeros((0, num_candidates), np.float32))
  return Lists(*(
      np.concatenate([getattr(part, field.name) for part in [empty] + parts])
      for field in dataclasses.fields(Lists)))


def check_enough_items(longest: int, num_candidates: int,
                       num_items: int) -> None:
  """Raises DataError if the longest history leaves too few candidates."""
  if longest + num_candidates > num_items:
    raise interactions.DataError(
        f'a history of {longest} items leaves fewer than {num_candidates} '
        f'candidates (data.num_candidates) in a catalogue of {num_items} '
        'items')


def _retrieve_chunks(
    retriever: Cooccurrence,
    users: np.ndarray,
    positions: np.ndarray,
    targets: np.ndarray,
    num_candidates: int,
    hits_only: bool,
) -> Iterator[Lists]:
  """Yields the lists of one chunk of queries after the other."""
  # Positive floats compare like their bits, so score and tie make one key.
  tie_bits = (len(retriever.tie) - retriever.tie).astype(np.int64)
  for begin in range(0, len(users), _CHUNK):
    query = np.arange(begin, min(begin + _CHUNK, len(users)))
    scores = retriever.scores(users[query], positions[query])
    if hits_only:  # Cheap test first: most queries end here.
      target = scores[np.arange(len(query)), targets[query]]
      keep = np.sum(scores > target[:, None], axis=1) < num_candidates
      query, scores = query[keep], scores[keep]
    key = (scores.view(np.int32).astype(np.int64) << 32) | tie_bits
    top = np.argpartition(-key, num_candidates - 1)[:, :num_candidates]
    order = np.argsort(-np.take_along_axis(key, top, axis=1), axis=1)
    top = np.take_along_axis(top, order, axis=1)
    if hits_only:  # Ties can still have pushed the target out.
      keep = np.any(top == targets[query][:, None], axis=1)
      query, scores, top = query[keep], scores[keep], top[keep]
    yield Lists(
        query, top.astype(np.int32), np.take_along_axis(scores, top, axis=1))
