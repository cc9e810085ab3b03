"""Reads `candidates.jsonl`: lists of a retriever that people bring themselves.

    {"user_id": "u1", "candidates": ["B1", "B2", ...]}
    {"user_id": "u1", "candidates": [...], "split": "train", "position": 3}

Candidates stand best first. `split` is test where absent. `position` is the
target's index in the user's sequence; only training lists need it.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np

from dgr2_jax.data import directory
from dgr2_jax.data import histories as histories_lib
from dgr2_jax.data import interactions

SPLITS = ('train', 'validation', 'test')
# Targets of the evaluated splits, counted from the end of a sequence.
FROM_END = {'validation': 2, 'test': 1}


def read(
    path: str | pathlib.Path,
    dataset: interactions.Dataset,
    num_candidates: int,
    report: directory.Report = directory.stop,
) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """Reads candidate lists.

  Args:
    path: of the file.
    dataset: the catalogue and its users.
    num_candidates: candidates of a request; longer lists are cut.
    report: what is done with a line at fault.

  Returns:
    By split that the file has: users int64 [n], positions int64 [n] and
    candidates int32 [n, num_candidates], sorted by user and position.

  Raises:
    DataError: the file cannot be read or a line is at fault: malformed, an
      unknown user or item, too few candidates, a candidate twice or from the
      history, a bad split or position, or two lists for one query.
  """
  path = pathlib.Path(path)
  user_index = {user: i for i, user in enumerate(dataset.users)}
  item_index = {item.item_id: i for i, item in enumerate(dataset.items)}
  found = {}
  for number, line in directory.lines(path, report):
    try:
      split, user, position, chosen = _parse(
          line, dataset, user_index, item_index, num_candidates)
      if (split, user, position) in found:
        raise ValueError('a second list for the same user and position')
    except ValueError as e:
      report(interactions.DataError(f'{path}:{number}: {e}'))
      continue
    found[split, user, position] = chosen
  if not found:
    raise interactions.DataError(f'{path}: no candidate lists')
  result = {}
  for split in SPLITS:
    keys = sorted(key for key in found if key[0] == split)
    if keys:
      result[split] = (
          np.array([key[1] for key in keys], np.int64),
          np.array([key[2] for key in keys], np.int64),
          np.array([found[key] for key in keys], np.int32))
  return result


def _field(record: dict[str, Any], name: str, kind: type, default=None):
  """A field of the right type, or a ValueError that names it."""
  value = record.get(name, default)
  if not isinstance(value, kind) or isinstance(value, bool):
    raise ValueError(f'{name!r} is {value!r}: expected a {kind.__name__}')
  return value


def _parse(line, dataset, user_index, item_index, num_candidates):
  """One line as (split, user, position, item indices)."""
  try:
    record = json.loads(line)
  except (ValueError, RecursionError) as e:
    raise ValueError(f'not JSON: {e}') from e
  if not isinstance(record, dict):
    raise ValueError('expected a JSON object')
  user_id = _field(record, 'user_id', str)
  if user_id not in user_index:
    raise ValueError(
        f'unknown user {user_id!r}: not in the data, or data.min_count dropped '
        'it')
  user = user_index[user_id]
  sequence = dataset.sequences[user]

  split = record.get('split', 'test')
  if split not in SPLITS:
    raise ValueError(f'split is {split!r}: expected one of {SPLITS}')
  if split == 'train':
    position = _field(record, 'position', int)
    last = len(sequence) - histories_lib.HELD_OUT - 1
    if not 1 <= position <= last:
      raise ValueError(
          f'position {position} of a training list is outside 1..{last}: the '
          'target needs a history, and the last two purchases are held out')
  else:
    expected = len(sequence) - FROM_END[split]
    position = _field(record, 'position', int, expected)
    if position != expected:
      raise ValueError(
          f'position is {position}: the {split} target of user {user_id!r} is '
          f'at {expected}')

  ids = _field(record, 'candidates', list)
  if len(ids) < num_candidates:
    raise ValueError(
        f'{len(ids)} candidates: expected at least {num_candidates}')
  chosen = []
  for item_id in ids:
    if not isinstance(item_id, str) or item_id not in item_index:
      raise ValueError(
          f'unknown item {item_id!r}: not in the data, or data.min_count '
          'dropped it')
    chosen.append(item_index[item_id])
  if len(set(chosen)) < len(chosen):
    twice = next(i for i in ids if ids.count(i) > 1)
    raise ValueError(f'candidate {twice!r} stands there twice')
  bought = set(sequence[:position].tolist()) & set(chosen)
  if bought:
    names = sorted(dataset.items[i].item_id for i in bought)
    raise ValueError(f'candidates {names} are in the history already')
  return split, user, position, chosen[:num_candidates]
