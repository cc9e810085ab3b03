"""Rows of the report: what one re-ranker did with the test requests.

Recall and NDCG use the strict reading of a response: one that isn't exactly
one permutation falls back to the retriever's order, so invalid responses cost
whatever the row would have gained there. Fallback hides how many they were:
`valid_rate` stands beside every metric, and GR2's lenient reading apart.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from dgr2_jax.data import parsing
from dgr2_jax.evaluation import intervals
from dgr2_jax.evaluation import metrics
from dgr2_jax.evaluation import reasoning as reasoning_lib

# Responses that gave nothing to read.
UNREAD = ('unparseable', 'overflow')
# The metrics that a conversion is judged by.
KEY_METRICS = ('recall@1', 'ndcg@3')


@dataclasses.dataclass(frozen=True)
class RowOutcome:
  """What one re-ranker returned for n requests of C candidates each.

  Attributes:
    name: of the row: 'pre_rank', 'gbdt', 'ar', 'naive', 'cft', ...
    orders: int [n, C], candidate positions, first to last: the strict reading,
      falling back to the incoming order.
    lenient_orders: int [n, C], GR2's lenient reading; None for rankers that
      write no response, like the rest below.
    failures: per request the class of `parsing.FAILURES` that the response
      belongs to, or `parsing.VALID`.
    tokens: int [n], response tokens through EOS.
    calls: int [n], model calls of the response, prefill and commits included.
    answer_tokens: int [n], tokens of the answer span.
    answer_calls: int [n], calls that its answer span took.
    reasoning_calls: int [n], calls that the tokens before it took.
    rewards: float [n], what the responses earn; see `objectives/rewards.py`.
    reasoning: float [n, len(reasoning.CHECKS)]: 1 holds, 0 fails, NaN does not
      apply.
    explanations: per request the reasoning in words.
  """
  name: str
  orders: np.ndarray
  lenient_orders: np.ndarray | None = None
  failures: Sequence[str] | None = None
  tokens: np.ndarray | None = None
  calls: np.ndarray | None = None
  answer_tokens: np.ndarray | None = None
  answer_calls: np.ndarray | None = None
  reasoning_calls: np.ndarray | None = None
  rewards: np.ndarray | None = None
  reasoning: np.ndarray | None = None
  explanations: Sequence[str] | None = None

  def __post_init__(self):
    n = len(self.orders)
    for field in ('orders', 'lenient_orders'):
      orders = getattr(self, field)
      if orders is None:
        continue
      if len(orders) != n:
        raise ValueError(f'{self.name}: {field} has {len(orders)} requests, '
                         f'orders has {n}')
      broken = np.flatnonzero(
          (np.sort(orders, 1) != np.arange(orders.shape[1])).any(1))
      if broken.size:
        raise ValueError(f'{self.name}: {field}[{broken[0]}] is not a '
                         f'permutation: {orders[broken[0]].tolist()}')
    for field in ('failures', 'tokens', 'calls', 'answer_tokens',
                  'answer_calls', 'reasoning_calls', 'rewards', 'reasoning',
                  'explanations'):
      value = getattr(self, field)
      if value is not None and len(value) != n:
        raise ValueError(
            f'{self.name}: {field} has {len(value)} requests, orders has {n}')
    classes = (parsing.VALID, *parsing.FAILURES)
    unknown = set(self.failures or ()).difference(classes)
    if unknown:
      raise ValueError(f'{self.name}: unknown failure classes '
                       f'{sorted(unknown)}; expected {classes}')


def validity(failures: Sequence[str] | None) -> dict[str, float | None]:
  """Shares of responses by failure class, of the valid and of the read.

  Args:
    failures: per request a class of `parsing.FAILURES` or `parsing.VALID`.

  Returns:
    `valid_rate`, `parse_rate` (neither unparseable nor overflowing) and a rate
    per remaining class, None each for rankers that write no response.
  """
  def rate(classes):
    if failures is None:
      return None
    return sum(f in classes for f in failures) / len(failures)

  unread = rate(UNREAD)
  return {
      'valid_rate': rate((parsing.VALID,)),
      'duplicate_rate': rate(('duplicate',)),
      'omission_rate': rate(('omission',)),
      'out_of_set_rate': rate(('out_of_set',)),
      'parse_rate': None if unread is None else 1 - unread,
      'overflow_rate': rate(('overflow',)),
  }


def figures(outcome: RowOutcome, targets: np.ndarray) -> dict[str, float]:
  """The figures of an experiment's table: order, validity and forwards.

  Args:
    outcome: of n requests, from `responses.outcome`.
    targets: int [n], as for `metrics.rank_of_target`.
  """
  means = metrics.means(metrics.rank_of_target(outcome.orders, targets))
  return {
      'n': len(targets), **{name: means[name] for name in KEY_METRICS},
      'valid_rate': validity(outcome.failures)['valid_rate'],
      'tokens_per_forward': float(outcome.tokens.sum() / outcome.calls.sum())}


def reasoning(checks: np.ndarray | None) -> dict[str, Any] | None:
  """How often each check of `reasoning.CHECKS` holds where it applies.

  Args:
    checks: float [n, len(CHECKS)], see `RowOutcome`.

  Returns:
    By check `n`, the `rate` and its 95 % `interval`; checks that apply to no
    response are left out. None without responses.
  """
  if checks is None:
    return None
  rates = {}
  for name, values in zip(reasoning_lib.CHECKS, checks.T, strict=True):
    values = values[~np.isnan(values)]
    if values.size:
      rate = float(values.mean())
      rates[name] = {'n': values.size, 'rate': rate,
                     'interval': list(intervals.wilson(rate, values.size))}
  return rates


def build_row(outcome: RowOutcome, target_positions: np.ndarray,
              reference: RowOutcome | None, *, seed: int = 0,
              resamples: int = 10_000) -> dict[str, Any]:
  """One entry of `rows` in report.json.

  Requests whose target the retriever missed are left out (the conditional
  protocol); `unconditional` counts them.

  Args:
    outcome: the row.
    target_positions: int [n], where the target stands among the candidates;
      -1 where the retriever missed it.
    reference: the 'ar' row, which differences and recovery refer to.
    seed: of the bootstrap.
    resamples: of the bootstrap.

  Returns:
    The fields of the report's contract. `interval` is the row's own 95 %
    interval, `ci` that of the paired difference to the reference, `recovery`
    the share of the reference's gain over the incoming order that the row
    keeps. What does not apply is None.

  Raises:
    ValueError: no target is among its candidates, or the numbers of requests
      disagree.
  """
  hits = _hits(outcome, target_positions)
  kept = _select(outcome, hits)
  ranks = metrics.rank_of_target(kept.orders, target_positions[hits])
  values = _stack(ranks)
  means = metrics.means(ranks)
  row: dict[str, Any] = {'name': outcome.name, 'n': int(hits.sum()), **means}
  row['interval'] = _by_metric(
      intervals.bootstrap(values, seed=seed, resamples=resamples))
  row['ci'] = row['recovery'] = None
  if reference is not None and reference.name != outcome.name:
    row['ci'] = _difference(
        values, reference, target_positions, hits, seed, resamples)
  if reference is not None:
    row['recovery'] = _recovery(means, reference, target_positions, hits)
  row['lenient'] = None
  if kept.lenient_orders is not None:
    row['lenient'] = metrics.means(metrics.rank_of_target(
        kept.lenient_orders, target_positions[hits]))
  row.update(validity(kept.failures))
  row.update(_tokens_per_forward(kept))
  row['reasoning'] = reasoning(kept.reasoning)
  return row


def build_stage(outcome: RowOutcome, before: RowOutcome,
                target_positions: np.ndarray, *, decoding: str,
                seed: int = 0, resamples: int = 10_000) -> dict[str, Any]:
  """One entry of `stages` in report.json: what a stage changed.

  Args:
    outcome: the stage's weights, with rewards.
    before: those of the stage before it, decoded in the same way.
    target_positions: int [n]; -1 where the retriever missed the target.
    decoding: names how both were decoded.
    seed: of the bootstrap.
    resamples: of the bootstrap.

  Returns:
    `reward`, the key metrics and `valid_rate` of the stage, and under `change`
    the mean and under `ci` the 95 % interval of their paired differences to
    the stage before.

  Raises:
    ValueError: as `build_row`.
  """
  hits = _hits(outcome, target_positions)

  def per_request(o):
    kept = _select(o, hits)
    by_name = metrics.per_request(
        metrics.rank_of_target(kept.orders, target_positions[hits]))
    return {'reward': kept.rewards,
            **{name: by_name[name] for name in KEY_METRICS},
            'valid_rate': np.array([f == parsing.VALID for f in kept.failures],
                                   float)}

  after, earlier = per_request(outcome), per_request(before)
  bounds = intervals.paired_bootstrap(
      np.stack(list(after.values()), 1), np.stack(list(earlier.values()), 1),
      seed=seed, resamples=resamples)
  means = {name: float(values.mean()) for name, values in after.items()}
  return {
      'name': outcome.name, 'before': before.name, 'decoding': decoding,
      'n': int(hits.sum()), **means,
      'change': {name: means[name] - float(earlier[name].mean())
                 for name in means},
      'ci': {name: bounds[:, i].tolist() for i, name in enumerate(means)}}


def build_frontier_point(
    outcome: RowOutcome, target_positions: np.ndarray, *, mode: str,
    threshold: float | None, tokens_per_second: float | None,
    same_weights: RowOutcome, same_weights_tokens_per_second: float | None,
    reference: RowOutcome | None, seed: int = 0,
    resamples: int = 10_000) -> dict[str, Any]:
  """One entry of `frontier` in report.json: quality and speed of one decode.

  Args:
    outcome: what this decode returned; its name is the weights' row.
    target_positions: int [n]; -1 where the retriever missed the target.
    mode: 'ar', 'threshold' or 'verify'.
    threshold: tau; None where the mode has none.
    tokens_per_second: measured.
    same_weights: the 'ar' mode of the same weights, which `ci` refers to.
    same_weights_tokens_per_second: its speed, which `speedup` refers to.
    reference: the 'ar' row, which `recovery` refers to.
    seed: of the bootstrap.
    resamples: of the bootstrap.

  Returns:
    The fields of the report's contract; `floor` holds the key metrics of the
    incoming order on the same requests.

  Raises:
    ValueError: as `build_row`.
  """
  hits = _hits(outcome, target_positions)
  kept = _select(outcome, hits)
  ranks = metrics.rank_of_target(kept.orders, target_positions[hits])
  means = metrics.means(ranks)
  floor = metrics.means(target_positions[hits] + 1)
  point: dict[str, Any] = {
      'row': outcome.name, 'mode': mode, 'threshold': threshold,
      'n': int(hits.sum())}
  point.update({name: means[name] for name in KEY_METRICS})
  point['floor'] = {name: floor[name] for name in KEY_METRICS}
  point['ci'] = point['recovery'] = None
  if outcome is not same_weights:
    difference = _difference(_stack(ranks), same_weights, target_positions,
                             hits, seed, resamples)
    point['ci'] = {name: difference[name] for name in KEY_METRICS}
  if reference is not None:
    point['recovery'] = _recovery(means, reference, target_positions, hits)
  point['valid_rate'] = validity(kept.failures)['valid_rate']
  point.update(_tokens_per_forward(kept))
  point['tokens_per_second'] = tokens_per_second
  point['speedup'] = None
  if tokens_per_second and same_weights_tokens_per_second:
    point['speedup'] = tokens_per_second / same_weights_tokens_per_second
  return point


def unconditional(outcome: RowOutcome, target_positions: np.ndarray,
                  hit_rate: float) -> dict[str, float]:
  """Metrics over all evaluated users, a missed target counting 0.

      unconditional = conditional * hit_rate

  where hit_rate = users whose target is among the candidates / users. Where
  `target_positions` holds misses (-1), the mean is taken over all requests
  instead, and `hit_rate` is not used.

  Args:
    outcome: the row.
    target_positions: int [n].
    hit_rate: in [0, 1], over all evaluated users.

  Returns:
    Every metric.

  Raises:
    ValueError: `hit_rate` is no share, or the numbers of requests disagree.
  """
  if not 0 <= hit_rate <= 1:
    raise ValueError(f'hit_rate={hit_rate} must be in [0, 1]')
  ranks = metrics.rank_of_target(outcome.orders, target_positions)
  means = metrics.means(ranks)
  if (target_positions < 0).any():
    return means
  return {name: value * hit_rate for name, value in means.items()}


def _hits(outcome: RowOutcome, target_positions: np.ndarray) -> np.ndarray:
  """bool [n]: the requests whose target is among the candidates."""
  if target_positions.shape != (len(outcome.orders),):
    raise ValueError(f'{outcome.name}: {len(outcome.orders)} orders for '
                     f'target_positions of shape {target_positions.shape}')
  hits = target_positions >= 0
  if not hits.any():
    raise ValueError(
        f'{outcome.name}: no request has its target among the candidates')
  return hits


def _select(outcome: RowOutcome, kept: np.ndarray) -> RowOutcome:
  """The outcome of the requests where `kept` [n] is true."""
  def pick(value):
    if isinstance(value, np.ndarray):
      return value[kept]
    return [v for v, keep in zip(value, kept, strict=True) if keep]

  return dataclasses.replace(outcome, **{
      field.name: pick(getattr(outcome, field.name))
      for field in dataclasses.fields(outcome)
      if field.name != 'name' and getattr(outcome, field.name) is not None})


def _stack(ranks: np.ndarray) -> np.ndarray:
  """float64 [n, len(METRICS)]."""
  values = metrics.per_request(ranks)
  return np.stack([values[name] for name in metrics.METRICS], -1)


def _by_metric(bounds: np.ndarray) -> dict[str, list[float]]:
  """[low, high] by metric name, from [2, len(METRICS)]."""
  return {name: [float(low), float(high)]
          for name, low, high in zip(metrics.METRICS, *bounds, strict=True)}


def _reference_ranks(reference: RowOutcome, target_positions: np.ndarray,
                     hits: np.ndarray) -> np.ndarray:
  return metrics.rank_of_target(reference.orders, target_positions)[hits]


def _difference(values, reference, target_positions, hits, seed, resamples):
  ranks = _reference_ranks(reference, target_positions, hits)
  return _by_metric(intervals.paired_bootstrap(
      values, _stack(ranks), seed=seed, resamples=resamples))


def _recovery(means, reference, target_positions, hits):
  return metrics.recovery(
      means, metrics.means(target_positions[hits] + 1),
      metrics.means(_reference_ranks(reference, target_positions, hits)),
      KEY_METRICS)


def _tokens_per_forward(outcome: RowOutcome) -> dict[str, float | None]:
  def ratio(tokens, calls):
    if tokens is None or calls is None or not np.sum(calls):
      return None
    return float(np.sum(tokens) / np.sum(calls))

  reasoning_tokens = None
  if outcome.reasoning_calls is not None:
    reasoning_tokens = outcome.tokens - outcome.answer_tokens
  return {
      'tokens_per_forward': ratio(outcome.tokens, outcome.calls),
      'reasoning_tokens_per_forward': ratio(
          reasoning_tokens, outcome.reasoning_calls),
      'answer_tokens_per_forward': ratio(
          outcome.answer_tokens, outcome.answer_calls)}
