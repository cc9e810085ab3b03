"""What every re-ranker did with every request, on disk: WORKDIR/responses.

    requests.jsonl    {"request": "5f0c...", "target": 3, "history": [item],
                      "candidates": [{**item, "facts": {name: level}}]}
    cft.jsonl         {"request": "5f0c...", "order": [3, 0, ...],
                      "failure": "valid", "explanation": "..."}
    rl-tau_0.9.jsonl  a point of the frontier

A line a test request, in the same order in all files. `request` is a digest of
its items (`data/generated.py`), so that runs on the same requests can be
compared pair by pair; positions count from zero. A history is what the prompt
shows. An item is {"sid":, "title":, "categories": [...], "brand":}. `failure`
and `explanation` are null and empty for rankers that write no response.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import json
import os
import pathlib
from typing import Any

import numpy as np

from dgr2_jax.data import directory as directory_lib
from dgr2_jax.data import facts
from dgr2_jax.data import generated
from dgr2_jax.data import interactions
from dgr2_jax.data import prepare
from dgr2_jax.data import tokens
from dgr2_jax.data import traces
from dgr2_jax.evaluation import rows as rows_lib
from dgr2_jax.training import workdir as workdir_lib

DIRECTORY = 'responses'
REQUESTS = 'requests.jsonl'


def file_name(row: str, mode: str | None = None,
              threshold: float | None = None) -> str:
  """The file of a row, or of a point of the frontier."""
  if mode is None:
    return f'{row}.jsonl'
  how = mode if threshold is None else f'tau_{threshold:g}'
  return f'{row}-{how}.jsonl'


def write(workdir: pathlib.Path, data: prepare.Prepared, split: str,
          outcomes: Mapping[str, rows_lib.RowOutcome]) -> None:
  """Writes the requests of a split and outcomes by file name."""
  directory = workdir / DIRECTORY
  directory.mkdir(exist_ok=True)
  requests = data.requests(split)
  keys = [generated.fingerprint(r, data.items) for r in requests]
  targets = data.target_positions(split).tolist()

  config = data.template.config
  evidence = [name for group in config.evidence for name in group.split('+')]
  facts_of = {name: facts.index(name) for name in dict.fromkeys(
      (*evidence, *config.trace.facts)) if name in traces.PHRASES}

  def items(indices):
    sids = (tokens.semantic_id_text(data.semantic_ids[i].tolist())
            for i in indices)
    return [{'sid': sid, **item}
            for sid, item in zip(sids, data.describe(indices))]

  def history(request):
    shown = data.template.prompt(request).shown
    return items(request.history[len(request.history) - shown:].tolist())

  def candidates(request):
    return [{**item, 'facts': {name: int(levels[column])
                               for name, column in facts_of.items()}}
            for item, levels in zip(items(request.candidates), request.facts)]

  _write(directory / REQUESTS, (
      {'request': key, 'target': target, 'history': history(r),
       'candidates': candidates(r)}
      for key, target, r in zip(keys, targets, requests, strict=True)))
  nothing = [None] * len(keys)
  for name, outcome in outcomes.items():
    _write(directory / name, (
        {'request': key, 'order': order, 'failure': failure,
         'explanation': explanation or ''}
        for key, order, failure, explanation in zip(
            keys, np.asarray(outcome.orders).tolist(),
            outcome.failures or nothing, outcome.explanations or nothing,
            strict=True)))


def _write(path: pathlib.Path, lines: Iterable[Mapping[str, Any]]) -> None:
  workdir_lib.write_text(
      path, ''.join(json.dumps(line) + '\n' for line in lines))


def read(path: str | os.PathLike, *fields: str) -> list[dict[str, Any]]:
  """Reads one of the files.

  Args:
    path: the file.
    *fields: that every line must have, beside `request`.

  Raises:
    interactions.DataError: it is missing, empty or malformed; the message gives
      file, line and reason.
  """
  fields, lines = ('request', *fields), []
  for number, text in directory_lib.lines(path):
    try:
      line = json.loads(text)
    except (ValueError, RecursionError) as e:
      raise interactions.DataError(
          f'{path}:{number}: malformed JSON: {e}') from e
    if not isinstance(line, dict) or any(f not in line for f in fields):
      raise interactions.DataError(
          f'{path}:{number}: expected the fields {", ".join(fields)}.')
    lines.append(line)
  if not lines:
    raise interactions.DataError(f'{path}: empty, expected one line a request.')
  return lines


def check_same_requests(
    files: Mapping[str | os.PathLike, Sequence[Mapping[str, Any]]]) -> None:
  """Raises interactions.DataError if files, read, are of other requests."""
  (first, lines), *others = files.items()
  keys = [line['request'] for line in lines]
  for path, lines in others:
    if [line['request'] for line in lines] != keys:
      raise interactions.DataError(
          f'{path} and {first} are of different requests: expected runs on '
          'the same test split.')
