"""Reads the answer out of a generated response.

*Strict* (what Diffusion-GR2, arXiv 2607.01170, calls valid): the response ends
and its answer is exactly one permutation of the candidates. Otherwise it has
one failure, the first that applies:

    overflow       no end of response
    unparseable    no answer: not the JSON object, not one answer marker
    out_of_set     an entry is no candidate
    duplicate      a candidate is there twice
    omission       a candidate is missing

so a response that repeats one candidate and thereby loses another counts as a
duplicate.

*Lenient* (GR2, arXiv 2602.07774, App. E): JSON, else a regular expression;
entries that are candidates are kept, repetitions dropped, missing candidates
appended in the incoming order. It fails only when no candidate is left.

Orders are candidate *positions from zero*, best first; responses count from
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import json
import re
from typing import NamedTuple

from dgr2_jax.data import prompts
from dgr2_jax.data import tokenizer as tokenizer_lib
from dgr2_jax.data import tokens

VALID = 'valid'
FAILURES = ('overflow', 'unparseable', 'out_of_set', 'duplicate', 'omission')

_KEYS = {'explanation', 'recommendations'}
# The key of the answer; inside the explanation its quotes would be escaped.
_KEY = re.compile(r'(?<!\\)"recommendations"\s*:')
_LIST = re.compile(r'\[([^\[\]]*)\]?')
# No candidate number is longer; int() refuses numbers of thousands of digits.
_NUMBER = re.compile(r'(?<!\d)\d{1,4}(?!\d)', re.ASCII)


class Parse(NamedTuple):
  """What a response says.

  Attributes:
    order: candidate positions from zero, best first; None unless valid.
    failure: VALID or one of `FAILURES`.
    explanation: the reasoning as text.
    answer_start: index of the first answer token; None where no answer begins.
  """
  order: tuple[int, ...] | None
  failure: str
  explanation: str
  answer_start: int | None


class Parser:
  """Parses generated ids of one response form."""

  def __init__(
      self,
      tokenizer: tokenizer_lib.Tokenizer,
      response_format: str,
      num_candidates: int):
    """Makes a parser; `response_format` is prompts.JSON or prompts.COMPACT."""
    self._tokenizer = tokenizer
    self._compact = response_format == prompts.COMPACT
    self._num_candidates = num_candidates
    if self._compact:
      self._marker = tokenizer.id(tokens.ANSWER)
      self._positions = {
          tokenizer.id(tokens.candidate(position + 1)): position
          for position in range(num_candidates)}

  def strict(self, ids: Sequence[int]) -> Parse:
    """Parses a response strictly.

    Args:
      ids: int [l] generated tokens; those after the first EOS don't count.
    """
    ids, ended = self._through_eos(ids)
    read = self._read_compact if self._compact else self._read_json
    entries, explanation, start = read(ids)
    failure = self._failure(entries, ended)
    order = tuple(entries) if failure == VALID else None
    return Parse(order, failure, explanation, start)

  def lenient(self, ids: Sequence[int]) -> tuple[int, ...] | None:
    """Parses a response leniently.

    Args:
      ids: as in `strict`.

    Returns:
      A permutation of the positions; None if no candidate was found.
    """
    ids, _ = self._through_eos(ids)
    if self._compact:
      entries = self._lenient_compact(ids)
    else:
      entries = self._lenient_json(self._tokenizer.decode(ids))
    kept = dict.fromkeys(
        e for e in entries if e is not None and 0 <= e < self._num_candidates)
    if not kept:
      return None
    return tuple(dict.fromkeys([*kept, *range(self._num_candidates)]))

  def _through_eos(self, ids: Sequence[int]) -> tuple[list[int], bool]:
    """The ids before the first EOS, and whether there is one."""
    ids = [int(i) for i in ids]
    ended = self._tokenizer.eos_id in ids
    return ids[:ids.index(self._tokenizer.eos_id)] if ended else ids, ended

  def _failure(
      self, entries: Sequence[int | None] | None, ended: bool) -> str:
    if not ended:
      return 'overflow'
    if entries is None:
      return 'unparseable'
    candidates = set(range(self._num_candidates))
    if not candidates.issuperset(entries):
      return 'out_of_set'
    if len(set(entries)) < len(entries):
      return 'duplicate'
    return VALID if set(entries) == candidates else 'omission'

  def _read_compact(self, ids: Sequence[int]):
    """Entries (None if there is no one answer), explanation, answer start."""
    markers = [i for i, token in enumerate(ids) if token == self._marker]
    if not markers:
      return None, self._tokenizer.decode(ids), None
    start = markers[-1] + 1
    explanation = self._tokenizer.decode(ids[:start - 1])
    entries = [self._positions.get(token) for token in ids[start:]]
    return (entries if len(markers) == 1 else None, explanation,
            start if start < len(ids) else None)

  def _read_json(self, ids: Sequence[int]):
    """As `_read_compact`; an entry that is no number from 1 on is None."""
    text = self._tokenizer.decode(ids)
    start = self._json_start(text, ids)
    answer = _load(text)
    if answer is None or set(answer) != _KEYS:
      return None, _before_key(text), start
    explanation, entries = answer['explanation'], answer['recommendations']
    if (not isinstance(explanation, str) or not isinstance(entries, list)
        or not all(isinstance(entry, str) for entry in entries)):
      return None, _before_key(text), start
    numbers = [int(e) - 1 if re.fullmatch('[1-9][0-9]{0,3}', e) else None
               for e in entries]
    return numbers, explanation, start

  def _json_start(self, text: str, ids: Sequence[int]) -> int | None:
    """The token after the one that completes the answer's key."""
    keys = list(_KEY.finditer(text))
    if not keys:
      return None
    # The shortest prefix of tokens whose text holds the key.
    low, high = 0, len(ids)
    while low < high:
      middle = (low + high) // 2
      if len(self._tokenizer.decode(ids[:middle])) >= keys[-1].end():
        high = middle
      else:
        low = middle + 1
    return low if low < len(ids) else None

  def _lenient_compact(self, ids: Sequence[int]) -> Iterable[int | None]:
    if self._marker in ids:
      _, _, start = self._read_compact(ids)
      return [] if start is None else map(self._positions.get, ids[start:])
    # Without a marker, the candidates that the response ends with.
    entries = []
    for token in reversed(ids):
      if token not in self._positions:
        break
      entries.append(self._positions[token])
    return reversed(entries)

  def _lenient_json(self, text: str) -> Iterable[int | None]:
    answer = _load(text)
    if answer and isinstance(answer.get('recommendations'), list):
      numbers = [str(e).strip() for e in answer['recommendations']
                 if isinstance(e, (str, int))]
    else:
      keys = list(_KEY.finditer(text))
      lists = _LIST.findall(text, keys[-1].end() if keys else 0)
      # After the key its list, without one the last list of the text.
      chosen = lists[:1] if keys else lists[-1:]
      numbers = _NUMBER.findall(chosen[0]) if chosen else []
    return [int(n) - 1 for n in numbers if _NUMBER.fullmatch(n)]


def _load(text: str) -> dict | None:
  """The JSON object that is the whole text, if it is one."""
  try:
    value = json.loads(text, object_pairs_hook=_unique)
  except (ValueError, RecursionError):
    return None
  return value if isinstance(value, dict) else None


def _unique(pairs: list[tuple[str, object]]) -> dict:
  """A JSON object; repeated keys would hide one of two answers."""
  value = dict(pairs)
  if len(value) < len(pairs):
    raise ValueError('repeated key')
  return value


def _before_key(text: str) -> str:
  """The text before the answer's key: the explanation of a broken object."""
  keys = list(_KEY.finditer(text))
  return text[:keys[-1].start()] if keys else text
