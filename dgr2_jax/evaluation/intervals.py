"""Bootstrap intervals over requests.

Two rows of a report re-rank the same requests, so their difference is taken
request by request before resampling: most requests come out alike in both, and
the interval of the *paired* difference is far narrower than the intervals of
the two rows suggest.
"""

from __future__ import annotations

import math

import numpy as np

# Entries of a block of resampled counts: 32 MiB of float64.
_BLOCK = 1 << 22


def bootstrap(values: np.ndarray, *, seed: int, resamples: int = 10_000,
              level: float = 0.95) -> np.ndarray:
  """Percentile bootstrap interval of the mean over requests.

  Columns share their resamples, so they may be compared with each other.

  Args:
    values: float [n] or [n, m], one row a request.
    seed: of the resampling.
    resamples: how many.
    level: the interval's coverage, in (0, 1).

  Returns:
    float64 [2] or [2, m]: low and high.

  Raises:
    ValueError: no requests, or a level or number of resamples out of range.
  """
  values = np.asarray(values, np.float64)
  n = len(values)
  if n == 0:
    raise ValueError('no requests to resample')
  if not 0 < level < 1:
    raise ValueError(f'level={level} must be in (0, 1)')
  if resamples < 1:
    raise ValueError(f'resamples={resamples} must be >= 1')
  rng = np.random.default_rng(seed)
  rows = max(1, min(resamples, _BLOCK // n))
  means = []
  for start in range(0, resamples, rows):
    size = min(rows, resamples - start)
    # How often each request was drawn: one matrix product serves all columns.
    drawn = rng.integers(n, size=(size, n))
    drawn += n * np.arange(size)[:, None]
    counts = np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n)
    means.append(counts.astype(np.float64) @ values / n)
  tail = (1 - level) / 2
  return np.quantile(np.concatenate(means), [tail, 1 - tail], axis=0)


def paired_bootstrap(row: np.ndarray, reference: np.ndarray, *, seed: int,
                     resamples: int = 10_000,
                     level: float = 0.95) -> np.ndarray:
  """Interval of mean(row) - mean(reference) over the same requests.

  Args:
    row: float [n] or [n, m], a metric per request.
    reference: the same for the other row, requests in the same order.
    seed: of the resampling.
    resamples: how many.
    level: the interval's coverage, in (0, 1).

  Returns:
    float64 [2] or [2, m]: low and high.

  Raises:
    ValueError: the shapes disagree; or see `bootstrap`.
  """
  row, reference = np.asarray(row), np.asarray(reference)
  if row.shape != reference.shape:
    raise ValueError('a paired difference needs the same requests in both '
                     f'rows, got shapes {row.shape} and {reference.shape}')
  return bootstrap(row - reference, seed=seed, resamples=resamples,
                   level=level)


def wilson(share: float, n: int) -> tuple[float, float]:
  """95 % score interval of a share of n (Wilson 1927).

  Unlike a bootstrap it has a width where all or none of the n count.

  Raises:
    ValueError: n is not positive, or the share not within 0 and 1.
  """
  if n < 1 or not 0 <= share <= 1:
    raise ValueError(f'expected a share of at least 1, got {share} of {n}')
  z = 1.959964
  middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
  half = z / (1 + z**2 / n) * math.sqrt(
      share * (1 - share) / n + z**2 / (4 * n**2))
  return max(middle - half, 0.), min(middle + half, 1.)
