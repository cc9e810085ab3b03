"""Traces that a language model wrote: reading its answers, and their file.

`dgr2_jax.tools.generate_traces` writes the file, one JSON object a line; the
`prepare` stage puts the traces into json responses (`prompt.traces`):

    {"request": "5f0c...", "explanation": "Pattern: <|sid_begin|>...",
     "recommendations": ["3", "1", ...], "user": 7, "position": 4, ...}

`request` is a digest of the request's items, so a file fits every working
directory that has the same requests. Whether a trace is faithful is asked
again there, of the prompt that the student gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import collections
import dataclasses
import hashlib
import json
import os
import re

from absl import logging
import numpy as np

from dgr2_jax.data import directory
from dgr2_jax.data import faithfulness
from dgr2_jax.data import interactions
from dgr2_jax.data import requests
from dgr2_jax.data import tokens

TEMPLATE, DROP = 'template', 'drop'


@dataclasses.dataclass(frozen=True)
class TracesConfig:
  """Which written traces to learn from.

  Attributes:
    path: the file.
    missing: what becomes of training requests without a usable trace:
      'template' gives them the template's, 'drop' leaves them out.
  """
  path: str
  missing: str

  def __post_init__(self):
    if not isinstance(self.path, str) or not self.path:
      raise ValueError(
          f'prompt.traces.path is {self.path!r}: expected a file of '
          'dgr2_jax.tools.generate_traces.')
    if self.missing not in (TEMPLATE, DROP):
      raise ValueError(
          f'prompt.traces.missing is {self.missing!r}: expected '
          f"'{TEMPLATE}' or '{DROP}'.")


def fingerprint(
    request: requests.Request, items: Sequence[interactions.Item]) -> str:
  """A digest of a request's history, candidates and target, as item ids."""
  content = json.dumps([
      [items[i].item_id for i in request.history],
      [items[i].item_id for i in request.candidates],
      items[request.target].item_id])
  return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def parse(content: str) -> faithfulness.Answer | None:
  """Reads a model's answer.

  Args:
    content: a JSON object as the prompt asks for; thinking before it and text
      around it (such as a code fence) are overlooked.

  Returns:
    The answer; None if there is none.
  """
  text = content.rpartition(tokens.THINK_END)[2]
  try:
    value = json.loads(text[text.find('{'):text.rfind('}') + 1])
  except (ValueError, RecursionError):
    return None
  return _answer(value) if isinstance(value, dict) else None


def _answer(value: Mapping) -> faithfulness.Answer | None:
  explanation, numbers = value.get('explanation'), value.get('recommendations')
  if not isinstance(explanation, str) or not isinstance(numbers, list):
    return None
  # Numbers may come as strings, as GR2 has them, or as they are.
  if not all(isinstance(n, (str, int)) and re.fullmatch('[0-9]{1,4}', str(n))
             for n in numbers):
    return None
  return faithfulness.Answer(
      explanation.strip(), tuple(int(n) - 1 for n in numbers))


def as_fields(answer: faithfulness.Answer) -> dict:
  """The fields of a line that hold an answer."""
  return {'explanation': answer.explanation,
          'recommendations': [str(c + 1) for c in answer.order]}


def read(path: str | os.PathLike) -> dict[str, faithfulness.Answer]:
  """Reads a file of traces: answers by the fingerprint of their request.

  Raises:
    interactions.DataError: it is missing, empty or malformed; the message gives
      file, line and reason.
  """
  answers, line_of = {}, {}
  for number, line in directory.lines(path):
    where = f'{path}:{number}'
    try:
      fields = json.loads(line)
    except (ValueError, RecursionError) as e:
      raise interactions.DataError(f'{where}: malformed JSON: {e}') from e
    if not isinstance(fields, dict):
      raise interactions.DataError(f'{where}: expected a JSON object.')
    key = fields.get('request')
    if not isinstance(key, str):
      raise interactions.DataError(
          f"{where}: field 'request' must be a string, got {key!r}.")
    answer = _answer(fields)
    if answer is None:
      raise interactions.DataError(
          f"{where}: expected the fields 'explanation', a string, and "
          "'recommendations', a list of candidate numbers.")
    if key in answers:
      raise interactions.DataError(
          f'{where}: a second trace of request {key}, first on line '
          f'{line_of[key]}.')
    answers[key], line_of[key] = answer, number
  if not answers:
    raise interactions.DataError(f'{path}: empty, expected one trace a line.')
  return answers


class Traces:
  """Written traces by request, and what became of them.

  Attributes:
    config: where they are from.
    counts: requests by outcome: 'used', 'absent', one of
      `faithfulness.REASONS`, or what `reject` was given.
  """

  def __init__(
      self,
      config: TracesConfig,
      answers: Mapping[str, faithfulness.Answer],
      items: Sequence[interactions.Item],
      semantic_ids: np.ndarray):
    """Keeps what `read` gave, with the catalogue and its semantic ids."""
    self.config = config
    self.counts = collections.Counter()
    self._answers = answers
    self._items = items
    self._semantic_ids = semantic_ids

  def find(
      self, request: requests.Request, shown: int
  ) -> faithfulness.Answer | None:
    """The trace of a request, if it is faithful to `shown` history items."""
    answer = self._answers.get(fingerprint(request, self._items))
    if answer is None:
      self.counts['absent'] += 1
      return None
    reason = faithfulness.check(answer, faithfulness.view(
        request, shown, self._items, self._semantic_ids))
    self.counts[reason or 'used'] += 1
    return None if reason else answer

  def reject(self, reason: str) -> None:
    """Takes back the last trace found."""
    self.counts['used'] -= 1
    self.counts[reason] += 1

  def finish(self) -> None:
    """Logs what became of the requests.

    Raises:
      interactions.DataError: no trace was used.
    """
    others = ', '.join(f'{reason} {count}' for reason, count
                       in self.counts.most_common() if reason != 'used')
    if not self.counts['used']:
      raise interactions.DataError(
          f'{self.config.path}: no trace fits a training request ({others}); '
          'expected traces of the same data, retriever and semantic ids.')
    logging.info(
        'Traces of %s: %d used; the other requests (%s) %s.', self.config.path,
        self.counts['used'], others or 'none',
        'get the template' if self.config.missing == TEMPLATE
        else 'are dropped')
