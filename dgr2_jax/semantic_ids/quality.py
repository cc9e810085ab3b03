"""What semantic ids are worth: unique, evenly used, alike for like items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dgr2_jax.data import interactions


def uniqueness(ids: np.ndarray) -> float:
  """Different ids as a share of the items; 1 if every item has its own."""
  return len(np.unique(ids, axis=0)) / len(ids)


def code_use(ids: np.ndarray, codes: int) -> list[dict[str, float]]:
  """How many of its codes each level uses, and how evenly.

  Args:
    ids: int [I, L].
    codes: K.

  Returns:
    A level each: `used`, a share of K, and `perplexity`, exp of the entropy of
    the codes' shares of the items: K if they are equal.
  """
  levels = []
  for column in ids.T:
    share = np.unique(column, return_counts=True)[1] / len(ids)
    levels.append({
        'used': len(share) / codes,
        'perplexity': float(np.exp(-(share * np.log(share)).sum()))})
  return levels


def prefix_purity(ids: np.ndarray, labels: Sequence[Any]
                  ) -> list[dict[str, float | None]]:
  """How well prefixes of ids agree with a labelling such as categories.

  Items that share a prefix with no other item would count as pure, so they are
  left out.

  Args:
    ids: int [I, L].
    labels: one an item, hashable.

  Returns:
    A prefix length each, from 1 to L: `items`, the share of items that have
    company, `purity`, the share of these whose label is the commonest among
    the items with their prefix, and `chance`, the purity of the same groups
    filled at random; both None where no item has company.
  """
  known = {label: i for i, label in enumerate(dict.fromkeys(labels))}
  label = np.array([known[x] for x in labels])
  shuffled = np.random.default_rng(0).permutation(label)
  lengths = []
  for length in range(1, ids.shape[1] + 1):
    _, group, size = np.unique(
        ids[:, :length], axis=0, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    company = size[group] > 1
    lengths.append({
        'items': float(company.mean()),
        'purity': _purity(group[company], label[company]),
        'chance': _purity(group[company], shuffled[company])})
  return lengths


def _purity(group: np.ndarray, label: np.ndarray) -> float | None:
  if not len(group):
    return None
  pairs, count = np.unique(
      np.stack([group, label], axis=1), axis=0, return_counts=True)
  commonest = np.zeros(group.max() + 1, np.int64)
  np.maximum.at(commonest, pairs[:, 0], count)
  return float(commonest.sum() / len(group))


def nearest(ids: np.ndarray, item: int, count: int) -> list[tuple[int, int]]:
  """The items whose ids share the longest prefix with an item's.

  Args:
    ids: int [I, L].
    item: an item index.
    count: at most so many.

  Returns:
    (item index, length of the shared prefix), longest first, then by index;
    none that shares no prefix.
  """
  shared = np.cumprod(ids == ids[item], axis=1).sum(axis=1)
  shared[item] = 0
  order = np.argsort(-shared, kind='stable')[:count]
  return [(int(i), int(shared[i])) for i in order if shared[i]]


def examples(ids: np.ndarray, items: Sequence[interactions.Item], count: int,
             seed: int = 0) -> list[dict[str, Any]]:
  """Items drawn at random, each with the three that are nearest by its id.

  Args:
    ids: int [I, L].
    items: the catalogue.
    count: items drawn, at most I.
    seed: of the draw.

  Returns:
    `id`, `item_id`, `title`, `categories` and `nearest`: the same of others,
    with the length of the `shared` prefix, see `nearest`.
  """
  describe = lambda i: {
      'id': ids[i].tolist(), 'item_id': items[i].item_id,
      'title': items[i].title, 'categories': list(items[i].categories)}
  drawn = np.random.default_rng(seed).choice(
      len(ids), min(count, len(ids)), replace=False)
  return [{**describe(item), 'nearest': [
      {**describe(other), 'shared': shared}
      for other, shared in nearest(ids, item, 3)]}
          for item in drawn.tolist()]


def report(ids: np.ndarray, codes: int, items: Sequence[interactions.Item],
           nearest_ids: np.ndarray | None = None) -> dict[str, Any]:
  """All figures of a catalogue's ids.

  Args:
    ids: int [I, L], as items are shown.
    codes: K.
    items: the catalogue.
    nearest_ids: int [I, L], before the last level was chosen; `ids` if None.

  Returns:
    `uniqueness` of the ids; and of the ids before the last level was chosen:
    `uniqueness_before` by prefix length, `levels` (see `code_use`) and
    `purity` of the broadest category and of the whole path (see
    `prefix_purity`).
  """
  before = ids if nearest_ids is None else nearest_ids
  purity = {
      'broadest': [item.categories[:1] for item in items],
      'path': [item.categories for item in items]}
  return {
      'uniqueness': uniqueness(ids),
      'uniqueness_before': [
          uniqueness(before[:, :n + 1]) for n in range(ids.shape[1])],
      'levels': code_use(before, codes),
      'purity': {name: prefix_purity(before, labels)
                 for name, labels in purity.items()}}
