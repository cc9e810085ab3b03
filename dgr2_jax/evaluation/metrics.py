"""Ranking metrics with one relevant item, vectorised over requests.

A request has C candidates in the retriever's order and one target. An order is
a permutation of the candidates' positions; the target's rank r in it is
1-based, and 0 where the target is not in it at all.

    Recall@K = [1 <= r <= K]        NDCG@K = [1 <= r <= K] / log2(r + 1)

With one relevant item the ideal DCG is 1, so NDCG needs no normaliser.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

RECALL_CUTOFFS = (1, 3, 5)
NDCG_CUTOFFS = (3, 5, 10)
METRICS = (*(f'recall@{k}' for k in RECALL_CUTOFFS),
           *(f'ndcg@{k}' for k in NDCG_CUTOFFS))


def rank_of_target(orders: np.ndarray,
                   target_positions: np.ndarray) -> np.ndarray:
  """1-based rank of every request's target.

  Args:
    orders: int [n, C], candidate positions from first to last; negative
      entries are padding.
    target_positions: int [n], where the target stands among the candidates;
      -1 where the retriever missed it.

  Returns:
    int32 [n], 0 where the target is absent.

  Raises:
    ValueError: the shapes disagree, or a target stands twice in an order.
  """
  orders = np.asarray(orders)
  targets = np.asarray(target_positions)
  if orders.ndim != 2 or targets.shape != orders.shape[:1]:
    raise ValueError('expected orders [n, C] and target_positions [n], got '
                     f'{orders.shape} and {targets.shape}')
  found = (orders == targets[:, None]) & (targets[:, None] >= 0)  # [n, C]
  if orders.shape[1] == 0:
    return np.zeros(len(orders), np.int32)
  twice = np.flatnonzero(found.sum(1) > 1)
  if twice.size:
    raise ValueError(f'order {twice[0]} names its target more than once: '
                     f'{orders[twice[0]].tolist()}')
  return np.where(found.any(1), found.argmax(1) + 1, 0).astype(np.int32)


def recall(ranks: np.ndarray, k: int) -> np.ndarray:
  """Recall@k per request: float64 [n] from int [n] ranks."""
  ranks = np.asarray(ranks)
  return ((ranks >= 1) & (ranks <= k)).astype(np.float64)


def ndcg(ranks: np.ndarray, k: int) -> np.ndarray:
  """NDCG@k per request: float64 [n] from int [n] ranks."""
  ranks = np.asarray(ranks)
  return recall(ranks, k) / np.log2(np.maximum(ranks, 1) + 1.0)


def per_request(ranks: np.ndarray) -> dict[str, np.ndarray]:
  """Every metric of `METRICS`, float64 [n] each."""
  values = {f'recall@{k}': recall(ranks, k) for k in RECALL_CUTOFFS}
  values.update({f'ndcg@{k}': ndcg(ranks, k) for k in NDCG_CUTOFFS})
  return values


def means(ranks: np.ndarray) -> dict[str, float]:
  """The mean of every metric over the requests.

  Raises:
    ValueError: there are no requests.
  """
  if len(ranks) == 0:
    raise ValueError('no requests: their mean metrics are undefined')
  return {name: float(v.mean()) for name, v in per_request(ranks).items()}


def recovery(row: Mapping[str, float], pre_rank: Mapping[str, float],
             reference: Mapping[str, float],
             names: tuple[str, ...]) -> dict[str, float | None]:
  """Share of the reference's gain over the retriever that a row keeps.

      (row - pre_rank) / (reference - pre_rank)

  Returns:
    The share by metric name; None where the reference gains nothing.
  """
  shares = {}
  for name in names:
    gain = reference[name] - pre_rank[name]
    shares[name] = (row[name] - pre_rank[name]) / gain if gain > 0 else None
  return shares
