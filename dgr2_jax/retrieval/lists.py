"""Lists of trained retrievers, by models that have not seen their targets.

    split        model is trained on                     lists
    train        training purchases of the other folds   each fold's users
    validation   training purchases of all users         all users
    test         the same model                          all users

Training purchases are all but the last two of a user. A training list comes
from a model that has not seen a single purchase of its user, as with the
co-occurrence retriever, which subtracts them; the epochs of such a model are as
many as were best for the model of all users.
"""

from __future__ import annotations

from collections.abc import Iterator
import functools
from typing import Any

from absl import logging
import numpy as np

from dgr2_jax.data import histories as histories_lib
from dgr2_jax.evaluation import metrics
from dgr2_jax.retrieval import finished as finished_lib
from dgr2_jax.retrieval import training

# Queries answered at once.
_CHUNK = 256


def top(
    retriever: training.Retriever, params: Any,
    histories: histories_lib.Histories, users: np.ndarray,
    positions: np.ndarray, count: int,
) -> tuple[np.ndarray, np.ndarray]:
  """The best items of queries (see `histories`), whatever their lengths.

  Args:
    retriever: the model.
    params: its parameters.
    histories: all purchases.
    users: int [n].
    positions: int [n], of the targets, at least 1.
    count: k, items listed.

  Returns:
    int32 [n, k] item indices, best first, and float32 [n, k] log-probabilities.
  """
  items = np.zeros((len(users), count), np.int32)
  scores = np.zeros((len(users), count), np.float32)
  done = 0
  for chunk, width in _chunks(positions):
    padded = np.zeros((_CHUNK, width), np.int32)
    length = np.ones(_CHUNK, np.int32)  # of the rows that fill up
    length[:len(chunk)] = positions[chunk]
    row, slot = histories.before(users[chunk], positions[chunk])
    padded[row, histories.position[slot]] = histories.items[slot]
    best, score = retriever.top(params, padded, length, count)
    items[chunk] = best[:len(chunk)]
    scores[chunk] = score[:len(chunk)]
    done += len(chunk)
    logging.log_every_n_seconds(
        logging.INFO, 'Retriever: %d of %d lists.', 60, done, len(users))
  return items, scores


def _chunks(positions: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
  """Queries of similar lengths, and the width of their histories.

  Widths are powers of two, so that few programs are compiled.
  """
  order = np.argsort(positions, kind='stable')
  width = np.maximum(8, 2 ** np.ceil(np.log2(positions[order])).astype(int))
  for w in np.unique(width):
    same = order[width == w]
    for begin in range(0, len(same), _CHUNK):
      yield same[begin:begin + _CHUNK], int(w)


def fit(retriever: training.Retriever,
        histories: histories_lib.Histories) -> tuple[Any, int]:
  """Trains on the training purchases of all users.

  Returns:
    Parameters, and the epochs after which validation was best.
  """
  c = retriever.config
  users = np.arange(len(histories.start))
  if 0 < c.validation_users < len(users):
    users = np.sort(np.random.default_rng(c.seed).choice(
        users, c.validation_users, replace=False))
  positions = histories.training_length[users]  # of the first purchase held out
  targets = histories.items[histories.start[users] + positions]

  def validate(params):
    listed, _ = top(retriever, params, histories, users, positions,
                    min(10, histories.num_items))
    return figures(listed, targets)

  return training.train(
      retriever, training_sequences(histories, range(len(histories.start))),
      epochs=c.epochs, validate=validate)


def cross_fitted(
    retriever: training.Retriever, histories: histories_lib.Histories,
    users: np.ndarray, positions: np.ndarray, count: int, epochs: int,
    finished: finished_lib.Finished = finished_lib.Finished(),
) -> np.ndarray:
  """Lists by models that were trained without their users.

  Args:
    retriever: the model.
    histories: all purchases.
    users: int [n] of the queries.
    positions: int [n] of the targets.
    count: k, items listed.
    epochs: of every model's training.
    finished: keeps the lists of folds that are done.

  Returns:
    int32 [n, k] item indices, best first.

  Raises:
    ValueError: there are fewer users than folds.
  """
  folds, total = retriever.config.folds, len(histories.start)
  if folds > total:
    raise ValueError(f'config.data.retriever: folds is {folds}: expected at '
                     f'most the {total} users')
  fold = np.random.default_rng(
      retriever.config.seed).permutation(total) % folds

  def lists_of(k):
    logging.info('Retriever of fold %d/%d, for training lists.', k + 1, folds)
    params, _ = training.train(
        retriever,
        training_sequences(histories, np.flatnonzero(fold != k)),
        epochs=epochs)
    held = np.flatnonzero(fold[users] == k)
    return {'held': held, 'listed': top(
        retriever, params, histories, users[held], positions[held], count)[0]}

  listed = np.zeros((len(users), count), np.int32)
  for k in range(folds):
    part = finished.get(f'fold{k}', functools.partial(lists_of, k))
    listed[part['held']] = part['listed']
  return listed


def training_sequences(histories: histories_lib.Histories,
                       users) -> list[np.ndarray]:
  """The training purchases of users, int32 [h] each."""
  h = histories
  return [h.items[h.start[u]:h.start[u] + h.training_length[u]] for u in users]


def figures(listed: np.ndarray, targets: np.ndarray) -> dict[str, float]:
  """Recall and NDCG at 5 and 10 of lists [n, k] for targets [n]."""
  ranks = metrics.rank_of_target(listed, targets)
  return {f'{name}@{k}': float(measure(ranks, k).mean())
          for name, measure in (('recall', metrics.recall),
                                ('ndcg', metrics.ndcg)) for k in (5, 10)}
