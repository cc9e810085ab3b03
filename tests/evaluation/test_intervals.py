"""Bootstrap intervals: coverage, pairing, determinism."""

import numpy as np
import pytest

from dgr2_jax.evaluation import intervals


def test_coverage_is_near_nominal():
  rng = np.random.default_rng(1)
  covered = 0
  for trial in range(300):
    values = (rng.random(200) < 0.35).astype(float)
    low, high = intervals.bootstrap(values, seed=trial, resamples=500)
    covered += low <= 0.35 <= high
  assert 0.90 <= covered / 300 <= 0.985


def test_close_to_the_normal_approximation():
  values = np.random.default_rng(2).random(1000)
  low, high = intervals.bootstrap(values, seed=0)
  half = 1.96 * values.std() / np.sqrt(len(values))
  assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
  assert high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_paired_is_narrower_than_unpaired():
  rng = np.random.default_rng(3)
  reference = (rng.random(1000) < 0.4).astype(float)
  row = np.where(rng.random(1000) < 0.05, 1 - reference, reference)
  paired = np.diff(intervals.paired_bootstrap(row, reference, seed=0))
  unpaired = np.diff(intervals.paired_bootstrap(
      row, rng.permutation(reference), seed=0))
  assert paired < 0.5 * unpaired


def test_equal_rows_differ_by_exactly_nothing():
  row = np.random.default_rng(4).random((100, 3))
  np.testing.assert_array_equal(
      intervals.paired_bootstrap(row, row, seed=0), np.zeros((2, 3)))


def test_seeded_and_columns_share_resamples():
  values = np.random.default_rng(5).random((50, 2))
  both = intervals.bootstrap(values, seed=7, resamples=300)
  np.testing.assert_array_equal(
      both, intervals.bootstrap(values, seed=7, resamples=300))
  np.testing.assert_allclose(
      both[:, 1], intervals.bootstrap(values[:, 1], seed=7, resamples=300))
  assert (both != intervals.bootstrap(values, seed=8, resamples=300)).any()


def test_long_inputs_are_resampled_in_blocks():
  values = np.random.default_rng(6).random(intervals._BLOCK // 3)
  low, high = intervals.bootstrap(values, seed=0, resamples=7)
  assert low < high
  assert abs(low - values.mean()) < 1e-3


@pytest.mark.parametrize('kwargs, message', [
    (dict(values=np.zeros(0)), 'no requests'),
    (dict(values=np.zeros(3), level=1.0), 'level'),
    (dict(values=np.zeros(3), resamples=0), 'resamples'),
])
def test_bad_arguments(kwargs, message):
  with pytest.raises(ValueError, match=message):
    intervals.bootstrap(**kwargs, seed=0)
  with pytest.raises(ValueError, match='same requests'):
    intervals.paired_bootstrap(np.zeros(3), np.zeros(4), seed=0)


def test_wilson_is_where_the_score_test_accepts():
  for successes, n in ((0, 20), (7, 20), (20, 20), (1430, 1431)):
    low, high = intervals.wilson(successes / n, n)
    for p in np.linspace(.001, .999, 999):
      z = abs(successes / n - p) / np.sqrt(p * (1 - p) / n)
      if abs(z - 1.959964) > .02:
        assert bool(low <= p <= high) is bool(z < 1.959964), (successes, n, p)
  assert intervals.wilson(1., 5)[1] == 1
  with pytest.raises(ValueError, match='share'):
    intervals.wilson(1.2, 5)
