"""Rows of the report from what a re-ranker returned."""

import dataclasses

import numpy as np
import pytest

from dgr2_jax.evaluation import metrics
from dgr2_jax.evaluation import rows

N, C = 200, 10


def target_first(targets, share, rng):
  """Orders that move the target to the front for a share of the requests."""
  orders = np.tile(np.arange(C), (len(targets), 1))
  for i in np.flatnonzero(rng.random(len(targets)) < share):
    orders[i] = [targets[i], *(c for c in range(C) if c != targets[i])]
  return orders


@pytest.fixture(name='case')
def make_case():
  rng = np.random.default_rng(0)
  targets = rng.integers(C, size=N)
  incoming = np.tile(np.arange(C), (N, 1))
  ar = rows.RowOutcome(
      'ar', target_first(targets, 0.4, rng), incoming, ['valid'] * N,
      np.full(N, 30), np.full(N, 30), np.full(N, 10), np.full(N, 10))
  failures = ['duplicate'] * 10 + ['overflow'] * 6 + ['unparseable'] * 4
  failures += ['omission', 'out_of_set'] + ['valid'] * (N - 22)
  cft = rows.RowOutcome(
      'cft', ar.orders.copy(), ar.orders, failures, np.full(N, 30),
      np.full(N, 12), np.full(N, 10), np.full(N, 2))
  cft.orders[:22] = incoming[:22]
  return targets, ar, cft, rows.RowOutcome('pre_rank', incoming)


def test_row_of_a_language_model(case):
  targets, ar, cft, _ = case
  row = rows.build_row(cft, targets, ar, resamples=500)
  assert row['n'] == N
  assert row['valid_rate'] == pytest.approx((N - 22) / N)
  assert row['duplicate_rate'] == pytest.approx(10 / N)
  assert row['omission_rate'] == row['out_of_set_rate'] == pytest.approx(1 / N)
  assert row['parse_rate'] == pytest.approx(1 - 10 / N)
  assert row['overflow_rate'] == pytest.approx(6 / N)
  assert row['tokens_per_forward'] == pytest.approx(2.5)
  assert row['answer_tokens_per_forward'] == pytest.approx(5)
  reference = rows.build_row(ar, targets, ar, resamples=500)
  # The lenient reading got what the strict one fell back from.
  assert row['lenient'] == {k: reference[k] for k in metrics.METRICS}
  assert 0 < row['recovery']['recall@1'] < 1
  for name in metrics.METRICS:
    low, high = row['ci'][name]
    assert low <= row[name] - reference[name] <= high <= 0
    low, high = row['interval'][name]
    assert low < row[name] < high


def test_row_fields_that_do_not_apply_are_none(case):
  targets, ar, _, pre_rank = case
  row = rows.build_row(pre_rank, targets, ar, resamples=200)
  for field in ('lenient', 'valid_rate', 'duplicate_rate', 'omission_rate',
                'out_of_set_rate', 'parse_rate', 'overflow_rate',
                'tokens_per_forward', 'answer_tokens_per_forward'):
    assert row[field] is None, field
  assert row['recovery'] == {'recall@1': 0, 'ndcg@3': 0}
  reference = rows.build_row(ar, targets, ar, resamples=200)
  assert reference['ci'] is None
  assert reference['recovery'] == {'recall@1': 1, 'ndcg@3': 1}
  assert rows.build_row(pre_rank, targets, None, resamples=200)['ci'] is None
  # The reference that gains nothing leaves nothing to recover.
  same = rows.RowOutcome('ar', pre_rank.orders)
  assert rows.build_row(pre_rank, targets, same, resamples=200)[
      'recovery'] == {'recall@1': None, 'ndcg@3': None}


def test_missed_targets_count_only_unconditionally(case):
  targets, ar, cft, _ = case
  missed = np.arange(N) % 4 == 0
  with_misses = np.where(missed, -1, targets)
  hits = ~missed
  only_hits = rows.RowOutcome('cft', cft.orders[hits], failures=[
      f for f, hit in zip(cft.failures, hits) if hit])
  conditional = rows.build_row(only_hits, targets[hits], None, resamples=200)
  row = rows.build_row(cft, with_misses, ar, resamples=200)
  for field in (*metrics.METRICS, 'n', 'valid_rate'):
    assert row[field] == conditional[field], field
  direct = rows.unconditional(cft, with_misses, hit_rate=0)
  scaled = rows.unconditional(only_hits, targets[hits], hit_rate=0.75)
  assert direct == pytest.approx(scaled)
  assert direct['recall@1'] == pytest.approx(0.75 * row['recall@1'])


def test_stage_is_compared_request_by_request(case):
  targets, ar, cft, _ = case
  before = dataclasses.replace(ar, rewards=np.zeros(N))
  after = dataclasses.replace(cft, rewards=np.full(N, .25))
  stage = rows.build_stage(after, before, targets, decoding='x', resamples=500)
  assert (stage['name'], stage['before'], stage['n']) == ('cft', 'ar', N)
  # Every request gains the same: an interval without width.
  assert stage['reward'] == stage['change']['reward'] == .25
  assert stage['ci']['reward'] == [.25, .25]
  assert stage['change']['valid_rate'] == pytest.approx(-22 / N)
  low, high = stage['ci']['valid_rate']
  assert low < -22 / N < high < 0
  lost = (metrics.recall(metrics.rank_of_target(cft.orders, targets), 1)
          - metrics.recall(metrics.rank_of_target(ar.orders, targets), 1))
  assert stage['change']['recall@1'] == pytest.approx(lost.mean())


def test_frontier_point(case):
  targets, ar, cft, pre_rank = case
  point = rows.build_frontier_point(
      cft, targets, mode='threshold', threshold=0.9, tokens_per_second=300.,
      same_weights=ar, same_weights_tokens_per_second=100., reference=ar,
      resamples=200)
  row = rows.build_row(cft, targets, ar, resamples=200)
  for field in ('recall@1', 'ndcg@3', 'valid_rate', 'tokens_per_forward',
                'answer_tokens_per_forward', 'recovery', 'n'):
    assert point[field] == row[field], field
  assert point['ci'] == {k: row['ci'][k] for k in rows.KEY_METRICS}
  assert point['speedup'] == 3
  floor = rows.build_row(pre_rank, targets, None, resamples=200)
  assert point['floor'] == {k: floor[k] for k in rows.KEY_METRICS}
  ar_point = rows.build_frontier_point(
      ar, targets, mode='ar', threshold=None, tokens_per_second=100.,
      same_weights=ar, same_weights_tokens_per_second=100., reference=None,
      resamples=200)
  assert ar_point['ci'] is None and ar_point['recovery'] is None
  assert ar_point['speedup'] == 1


def test_bad_outcomes(case):
  targets, ar, cft, _ = case
  with pytest.raises(ValueError, match='not a permutation'):
    rows.RowOutcome('x', np.zeros((2, 3), int))
  with pytest.raises(ValueError, match='unknown failure'):
    rows.RowOutcome('x', cft.orders, failures=['odd'] * N)
  with pytest.raises(ValueError, match='tokens has 3'):
    rows.RowOutcome('x', cft.orders, tokens=np.zeros(3, int))
  with pytest.raises(ValueError, match='target_positions'):
    rows.build_row(cft, targets[:-1], ar)
  with pytest.raises(ValueError, match='no request has its target'):
    rows.build_row(cft, np.full(N, -1), ar)
  with pytest.raises(ValueError, match='hit_rate'):
    rows.unconditional(cft, targets, hit_rate=1.2)
