"""Worked examples of a report: one request, its response, how it was decoded.

    {"row": "cft", "threshold": 0.9, "block_size": 16, "calls": 17,
     "failure": "valid", "target": 3, "order": [3, 0, ...],
     "history": [item, ...],         oldest first
     "candidates": [item, ...],      in the retriever's order
     "trace": "...",                 the reasoning, in words where it has them
     "tokens": [{"text": "...", "call": 2, "is_answer": false}, ...]}

An item is {"title":, "categories": [...], "brand":}; `target` and `order` are
candidate positions from zero, `order` after the fallback; `call` is the model
call that committed the token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dgr2_jax.data import parsing
from dgr2_jax.evaluation import tables

TARGET_MARK = '★'


def choose(targets: np.ndarray, orders: np.ndarray, failures: Sequence[str],
           count: int) -> list[int]:
  """Requests to show: what goes right, what goes wrong, and some at random.

  Args:
    targets: int [n], the targets' positions among the candidates, -1 for none.
    orders: int [n, C], the re-ranked candidates.
    failures: n, see `rows.RowOutcome`.
    count: how many; fewer where fewer have a target.

  Returns:
    The first request whose target was promoted, the first where it was demoted
    and the first with an invalid response, where there are any; then others,
    spread evenly over those that have a target.
  """
  hits = np.flatnonzero(targets >= 0)
  change = targets[hits] - np.argmax(orders[hits] == targets[hits, None], 1)
  invalid = np.array([failures[i] != parsing.VALID for i in hits], bool)
  chosen = [hits[kind.argmax()] for kind in (change > 0, change < 0, invalid)
            if kind.any()]
  spread = np.linspace(0, len(hits) - 1, min(count, len(hits))).astype(int)
  return list(dict.fromkeys(map(int, [*chosen, *hits[spread]])))[:count]


def words(example: Mapping[str, Any]) -> str:
  """The trace, unless it is but the tokens, which are shown anyway."""
  text = ''.join(token['text'] for token in example['tokens'])
  return '' if text.startswith(example['trace']) else example['trace']


def heading(index: int, example: Mapping[str, Any]) -> str:
  """What the example shows, in a line."""
  before = example['target'] + 1
  after = list(example['order']).index(example['target']) + 1
  if before == after:
    move = f'target stays at {before}'
  else:
    move = f'target from {before} to {after}'
  tau = example['threshold']
  how = '' if tau is None else f' at τ {tau:g}'
  return f'Example {index + 1}: {example["row"]}{how}, {move}'


def verdict(example: Mapping[str, Any]) -> str:
  """Whether the response counts, and what it took."""
  count, calls = len(example['tokens']), example['calls']
  cost = (f'{count} tokens in {calls} model calls '
          f'({count / calls:.2f} per call)')
  if example['failure'] == parsing.VALID:
    return f'valid, {cost}'
  kind = example['failure'].replace('_', ' ')
  return f"invalid ({kind}), so the retriever's order stands; {cost}"


def describe(item: Mapping[str, Any]) -> tuple[str, str]:
  """An item's title, and its brand and category path."""
  parts = [item.get('brand') or '', ' › '.join(item.get('categories') or ())]
  return item['title'], ' · '.join(filter(None, parts))


def orders(example: Mapping[str, Any]) -> tables.Table:
  """The candidates before and after; the target is bold and starred."""
  def cell(position):
    is_target = position == example['target']
    title, small = describe(example['candidates'][position])
    mark = f' {TARGET_MARK}' if is_target else ''
    return tables.Cell(f'{position + 1}. {title}{mark}', small, is_target)

  body = tuple(
      (tables.Cell(f'{rank + 1}'), cell(rank), cell(position))
      for rank, position in enumerate(example['order']))
  return tables.Table(
      'Order', ('', "retriever's order", 're-ranked'), body,
      f'{TARGET_MARK} marks what the user bought next.', text_columns=3)


def commit_steps(calls: Sequence[int], block_size: int) -> list[int]:
  """When each token was committed, counted from 0 within its block.

  Calls that committed nothing in a block leave no gap.

  Args:
    calls: int [n], the call that committed each token.
    block_size: tokens of a block.

  Returns:
    One step a token.
  """
  calls = np.asarray(calls, np.int64)
  steps: list[int] = []
  for start in range(0, len(calls), block_size):
    block = calls[start:start + block_size]
    steps += np.unique(block, return_inverse=True)[1].tolist()
  return steps
