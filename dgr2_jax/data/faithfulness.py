"""What a written trace must keep to: GR2's prompt principles as a filter.

An answer of a language model is used only if

    its recommendations      are a permutation, the target first
    every SID it cites       is one of the history or the candidates, and the
                             one of the candidate it is said to be
    at least one SID         is of the history: reasoning starts there
    its last sentence        names the candidate that it ranks first
    it speaks                as somebody who doesn't know what was bought

(arXiv 2602.07774 demands citations and steps in its prompts; how its traces
were filtered, beyond the first recommendation, is not said. These rules are
ours.) `check` gives the first rule that is broken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import re
from typing import NamedTuple

import numpy as np

from dgr2_jax.data import interactions
from dgr2_jax.data import leaks
from dgr2_jax.data import requests
from dgr2_jax.data import tokens

# Why an answer is rejected.
REASONS = (
    'not_a_permutation', 'target_not_first', 'malformed_sid', 'unknown_sid',
    'no_history_cited', 'unknown_candidate', 'wrong_candidate_sid',
    'no_conclusion', 'wrong_conclusion', 'leak')

_FRAGMENT = re.compile(r'<\|sid_(?:begin|end)\|>|<s_[a-z]_[0-9]+>')
_CANDIDATE = re.compile(leaks.NUMBERED, re.IGNORECASE)
_SID = f'({tokens.SEMANTIC_ID.pattern})'
# A candidate and the SID that is said to be its own: Candidate 3 (<|sid_be...
# Behind a comma there is an end: "unlike candidate 3, <|sid_be... is a soap"
# speaks of two.
_NAMED = re.compile(
    rf'{leaks.NUMBERED}[*_]* ?(?:[(\[:=\u2013\u2014-]? ?|'
    rf'(?:is|has|(?:has|with) (?:the )?id) ){_SID}'
    rf'|{leaks.NUMBERED}[*_]*, ?{_SID}(?= ?[,.;:)])', re.IGNORECASE)
# The SID first: <|sid_be... (candidate 3).
_NAMED_AFTER = re.compile(
    rf'{_SID} ?(?:[(\[] ?[*_]*{leaks.NUMBERED}(?=[*_]* ?[)\],;])'
    rf'|(?:is|=) [*_]*{leaks.NUMBERED})', re.IGNORECASE)
_CONCLUSION = re.compile(r'\bcandidate\s+([0-9]+)\s+fits\s+best[.!]?\s*$',
                         re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Answer:
  """A written trace and the order that follows it.

  Attributes:
    explanation: the reasoning; cites items by SID.
    order: candidate positions from zero, best first, as they were given.
  """
  explanation: str
  order: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class View:
  """What a trace may speak of.

  Attributes:
    history: SIDs of the purchases that the prompt shows, as text.
    candidates: SIDs of the candidates, as text, in the retriever's order.
    titles: titles of all of these.
    target: position of the true next purchase among the candidates, from zero.
  """
  history: tuple[str, ...]
  candidates: tuple[str, ...]
  titles: tuple[str, ...]
  target: int


def view(
    request: requests.Request,
    shown: int,
    items: Sequence[interactions.Item],
    semantic_ids: np.ndarray) -> View:
  """What the prompt of a request shows.

  Args:
    request: its target is among its candidates.
    shown: history items in the prompt, the latest ones.
    items: the catalogue, I items.
    semantic_ids: int [I, levels].
  """
  history = request.history[len(request.history) - shown:].tolist()
  candidates = request.candidates.tolist()
  sid = lambda item: tokens.semantic_id_text(semantic_ids[item].tolist())
  return View(
      history=tuple(map(sid, history)), candidates=tuple(map(sid, candidates)),
      titles=tuple(items[i].title for i in history + candidates),
      target=candidates.index(request.target))


class Mentions(NamedTuple):
  """What a text names.

  Attributes:
    sids: semantic ids, in order.
    malformed: whether there are parts of further ones.
    candidates: numbers of candidates from one; 0 for those of no candidate.
    named: candidates with the SID that is said to be theirs.
    conclusion: the number that the last sentence says fits best; None where
      it says no such thing.
  """
  sids: tuple[str, ...]
  malformed: bool
  candidates: tuple[int, ...]
  named: tuple[tuple[int, str], ...]
  conclusion: int | None


def mentions(text: str, titles: Sequence[str] = ()) -> Mentions:
  """Reads what a text names; `titles` may say anything, and are left out."""
  conclusion = _CONCLUSION.search(text)
  sids = tuple(tokens.SEMANTIC_ID.findall(text))
  malformed = _FRAGMENT.search(tokens.SEMANTIC_ID.sub('', text)) is not None
  text = leaks.strip_titles(text, titles)
  return Mentions(
      sids=sids, malformed=malformed,
      candidates=tuple(map(_number, _CANDIDATE.findall(text))),
      named=tuple(_pairs(text)),
      conclusion=_number(conclusion[1]) if conclusion else None)


def _pairs(text: str) -> Iterator[tuple[int, str]]:
  """Candidates with the SIDs that they are said to have."""
  for number, sid, other_number, other_sid in _NAMED.findall(text):
    yield _number(number or other_number), sid or other_sid
  for sid, number, other_number in _NAMED_AFTER.findall(text):
    yield _number(number or other_number), sid


def check(answer: Answer, seen: View) -> str | None:
  """The first of `REASONS` that applies; None if an answer is faithful."""
  count = len(seen.candidates)
  if sorted(answer.order) != list(range(count)):
    return 'not_a_permutation'
  if answer.order[0] != seen.target:
    return 'target_not_first'
  said = mentions(answer.explanation, seen.titles)
  if said.malformed:
    return 'malformed_sid'
  if not set(said.sids).issubset(seen.history + seen.candidates):
    return 'unknown_sid'
  if seen.history and set(said.sids).isdisjoint(seen.history):
    return 'no_history_cited'
  if not all(1 <= n <= count for n in said.candidates):
    return 'unknown_candidate'
  if any(seen.candidates[n - 1] != sid for n, sid in said.named):
    return 'wrong_candidate_sid'
  if said.conclusion is None:
    return 'no_conclusion'
  if said.conclusion != answer.order[0] + 1:
    return 'wrong_conclusion'
  told = leaks.told(answer.explanation, seen.titles, seen.candidates)
  return 'leak' if told else None


def _number(digits: str) -> int:
  """A candidate number; int() refuses numbers of thousands of digits."""
  return int(digits) if len(digits) < 5 else 0
