"""Items, users and their purchase sequences, from any source.

Every source (a data directory, the raw Amazon files, TFDS, the embedded
catalogue) gives item metadata and a `Log` of purchases; pure functions over the
log lead to the `Dataset`:

    read -> chronological -> first_purchases -> k_core -> dataset

An item that a user buys again counts once, at its first purchase. Items that
nobody buys after the filtering leave the catalogue.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import hashlib
from typing import NamedTuple

from absl import logging
import ml_collections
import numpy as np

TIES = ('file', 'hash')
# A training purchase, the validation target and the test target.
SHORTEST = 3


class DataError(ValueError):
  """Bad input data; the message names the file, the line and the reason."""


@dataclasses.dataclass(frozen=True)
class Item:
  """One catalogue item; `categories` is a path, broad to narrow."""
  item_id: str
  title: str
  categories: tuple[str, ...]
  brand: str = ''
  price: float | None = None


@dataclasses.dataclass(frozen=True)
class Dataset:
  """A catalogue and its users' purchase sequences.

  Attributes:
    name: what reports call it.
    items: the catalogue; an *item index* is a position in this tuple.
    users: user ids.
    sequences: per user, int32 item indices, oldest first, no repeats.
  """
  name: str
  items: tuple[Item, ...]
  users: tuple[str, ...]
  sequences: tuple[np.ndarray, ...]

  @property
  def num_interactions(self) -> int:
    return sum(len(s) for s in self.sequences)


@dataclasses.dataclass(frozen=True)
class Log:
  """Purchases as parallel arrays, E of them, in the order of their file.

  Attributes:
    users: user ids.
    items: item ids.
    user: int32 [E], index into `users`.
    item: int32 [E], index into `items`.
    timestamp: float64 [E], seconds; None where each user's purchases are in
      order already.
  """
  users: tuple[str, ...]
  items: tuple[str, ...]
  user: np.ndarray
  item: np.ndarray
  timestamp: np.ndarray | None

  def select(self, rows: np.ndarray) -> Log:
    """The log with only these rows (a mask or indices), in their order."""
    return dataclasses.replace(
        self, user=self.user[rows], item=self.item[rows],
        timestamp=None if self.timestamp is None else self.timestamp[rows])


class Split(NamedTuple):
  """One user's leave-one-out split."""
  train: np.ndarray  # int32 [n - 2]
  validation: int
  test: int


def leave_one_out(sequence: np.ndarray) -> Split:
  """Splits off the last purchase for test, the one before for validation.

  Args:
    sequence: int32 [n] item indices, oldest first.

  Returns:
    The training part and the two targets.

  Raises:
    DataError: n is less than three.
  """
  if len(sequence) < SHORTEST:
    raise DataError(
        f'A sequence of {len(sequence)} purchases cannot be split: '
        f'leave-one-out needs at least {SHORTEST}.')
  return Split(sequence[:-2], int(sequence[-2]), int(sequence[-1]))


def chronological(log: Log, ties: str, seed: int) -> Log:
  """Groups a log by user and orders each user's purchases by time.

  Args:
    log: E purchases in any order.
    ties: order of one user's purchases with equal timestamps: 'file' keeps the
      order of the file, 'hash' takes that of a seeded hash of user and item,
      which no property of the ids can explain.
    seed: of the hash.

  Returns:
    The E purchases, users in the order of `log.users`.

  Raises:
    ValueError: unknown `ties`.
  """
  if ties not in TIES:
    raise ValueError(f'data.ties is {ties!r}: expected one of {TIES}.')
  if log.timestamp is None:
    return log.select(np.argsort(log.user, kind='stable'))
  if ties == 'file':
    return log.select(np.lexsort((log.timestamp, log.user)))
  key = str(seed).encode()
  hashes = np.array([
      int.from_bytes(hashlib.blake2b(
          f'{log.users[u]}\0{log.items[i]}'.encode(), key=key,
          digest_size=8).digest(), 'big')
      for u, i in zip(log.user, log.item)], np.uint64)
  return log.select(np.lexsort((hashes, log.timestamp, log.user)))


def first_purchases(log: Log) -> Log:
  """Drops all but the first purchase of an item by a user, in log order."""
  pair = log.user.astype(np.int64) * max(len(log.items), 1) + log.item
  _, first = np.unique(pair, return_index=True)
  return log.select(np.sort(first))


def k_core(log: Log, min_count: int) -> Log:
  """Drops users and items with fewer purchases than `min_count`, to the end.

  Dropping an item shortens its buyers' sequences and the other way round, so
  both are repeated until nothing changes: what is left is the largest part in
  which everyone and everything has `min_count` purchases, possibly nothing.
  """
  while len(log.user):
    keep = (
        (np.bincount(log.user) >= min_count)[log.user]
        & (np.bincount(log.item) >= min_count)[log.item])
    if keep.all():
      break
    log = log.select(keep)
  return log


def dataset(
    name: str, items: Mapping[str, Item], log: Log, min_count: int,
    ties: str, seed: int, origin: str) -> Dataset:
  """Orders, deduplicates and filters a log into a dataset.

  Args:
    name: what reports call it.
    items: metadata by item id, in catalogue order, of at least `log.items`.
    log: the purchases.
    min_count: k of the k-core.
    ties: see `chronological`.
    seed: see `chronological`.
    origin: the file or directory that errors name.

  Returns:
    The dataset; its items keep the order of `items`, its users that of
    `log.users`.

  Raises:
    DataError: nothing is left, or a user is left with too few purchases to be
      split.
  """
  ordered = first_purchases(chronological(log, ties, seed))
  if len(ordered.user) < len(log.user):
    logging.warning(
        '%s: %d repeated purchases of an item by the same user ignored.',
        origin, len(log.user) - len(ordered.user))
  core = k_core(ordered, min_count)
  if not len(core.user):
    raise DataError(
        f'{origin}: none of the {len(ordered.user)} purchases is left after '
        f'{min_count}-core filtering; expected users and items with at least '
        f'{min_count} purchases each (data.min_count).')
  position = {item_id: i for i, item_id in enumerate(items)}
  # Catalogue order of the items that are left.
  catalogue = np.array([position[item_id] for item_id in core.items])
  kept, item = np.unique(catalogue[core.item], return_inverse=True)
  users, starts = np.unique(core.user, return_index=True)
  sequences = np.split(item.astype(np.int32), starts[1:])
  for user, sequence in zip(users, sequences):
    if len(sequence) < SHORTEST:
      raise DataError(
          f'{origin}: user {core.users[user]!r} has {len(sequence)} purchases '
          f'after {min_count}-core filtering; leave-one-out needs at least '
          f'{SHORTEST}, raise data.min_count.')
  every = tuple(items.values())
  result = Dataset(
      name=name,
      items=tuple(every[i] for i in kept),
      users=tuple(core.users[u] for u in users),
      sequences=tuple(sequences))
  logging.info(
      '%s: %d users, %d items, %d interactions (%d dropped by %d-core).', name,
      len(result.users), len(result.items), len(core.user),
      len(ordered.user) - len(core.user), min_count)
  return result


def load_dataset(config: ml_collections.ConfigDict) -> Dataset:
  """Loads what `config.data` describes.

  Args:
    config: the section `data`. `source` picks the loader: 'embedded' draws the
      synthetic catalogue from the section `embedded`; 'directory' reads the
      neutral format at `path`; 'amazon_raw' reads the 2014 Amazon files of
      `name` at `path`; 'tfds' does so through a prepared TFDS dataset.
      `min_count`, `ties` and `seed` apply to all.

  Returns:
    The dataset.

  Raises:
    DataError: bad data, or none at `path`.
    ValueError: a bad configuration field.
  """
  # The loaders build on this module, and TFDS takes seconds to import.
  # pylint: disable=g-import-not-at-top
  if config.source == 'embedded':
    from dgr2_jax.data import embedded
    drawn = embedded.generate(config.embedded)
    items, log = {i.item_id: i for i in drawn.items}, as_log(drawn)
    origin = 'the embedded catalogue'
  elif config.source == 'directory':
    from dgr2_jax.data import directory
    items, log = directory.read(config.path)
    origin = str(config.path)
  elif config.source == 'amazon_raw':
    from dgr2_jax.data import amazon
    items, log = amazon.read(config.path, config.name, config.check_counts)
    origin = str(config.path)
  elif config.source == 'tfds':
    from dgr2_jax.data import amazon_reviews_2014
    items, log = amazon_reviews_2014.read(
        config.path, config.name, config.check_counts)
    origin = str(config.path)
  else:
    raise ValueError(
        f'data.source is {config.source!r}: expected embedded, directory, '
        'amazon_raw or tfds.')
  return dataset(
      config.name, items, log, config.min_count, config.ties, config.seed,
      origin)


def as_log(data: Dataset) -> Log:
  """A dataset's purchases, already in order, as a log."""
  lengths = [len(s) for s in data.sequences]
  return Log(
      users=data.users,
      items=tuple(item.item_id for item in data.items),
      user=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
      item=np.concatenate(data.sequences).astype(np.int32),
      timestamp=None)
