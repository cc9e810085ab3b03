"""What the reasoning of a response claims: read from dense traces and text.

    dense   [last] [brand] [wanted] [facts] [grade] ...   -> Claims
    json    "Pattern: ... Complement: ... Match: ..."     -> Claims

Of the template's sentences all is read, of free text, as a language model
writes it, what it cites and concludes. `reasoning` holds claims against the
truth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
import dataclasses
import functools
import re

import numpy as np

from dgr2_jax.data import faithfulness
from dgr2_jax.data import tokens
from dgr2_jax.data import traces

# The part of a pattern that speaks of candidates, not of the history.
_WANTED = 'wanted_category'
_WORD = re.compile(rf'{tokens.SEMANTIC_ID.pattern}|\w+')
_FACT_OF = {phrase: name for name, phrase in traces.PHRASES.items()}
_LONGEST_PHRASE = 8  # words
_LONGEST_NAME = 80  # characters of a category or brand that is not shown


@dataclasses.dataclass(frozen=True)
class Claims:
  """What a response's reasoning says.

  Attributes:
    of_history: names that it gives to purchases.
    of_candidates: (position from zero or None for any, name).
    elsewhere: names that it gives to neither.
    malformed: whether parts of SIDs stand alone.
    pattern: what is said by part of `traces.PATTERN`, or of the 'last' item;
      '' for nothing.
    levels: (position, fact, level), None being any above the lowest.
    choice: position of the candidate named last; None for none.
    grades: by candidate; empty for none.
    repeats: whether it repeats itself; None where the form has no room to.
  """
  of_history: tuple[str, ...] = ()
  of_candidates: tuple[tuple[int | None, str], ...] = ()
  elsewhere: tuple[str, ...] = ()
  malformed: bool = False
  pattern: Mapping[str, str] = dataclasses.field(default_factory=dict)
  levels: tuple[tuple[int, str, int | None], ...] = ()
  choice: int | None = None
  grades: tuple[int, ...] = ()
  repeats: bool | None = None


def read_compact(names: Sequence[str], config: traces.TraceConfig,
                 num_candidates: int) -> Claims | None:
  """Claims of a dense trace, given its tokens before the answer's marker."""
  trace = traces.read_dense(names, config, num_candidates)
  if trace is None:
    return None
  pattern = {part: something(name) for part, name in trace.pattern.items()}
  return Claims(
      **_owners(pattern), pattern=pattern,
      levels=tuple((position, fact, level)
                   for position, levels in enumerate(trace.levels)
                   for fact, level in levels.items()),
      choice=trace.choice, grades=trace.grades,
      repeats=(len(set(trace.indices)) < len(trace.indices)
               if trace.indices else None))


def read_json(text: str, names: Set[str], titles: Sequence[str],
              num_candidates: int) -> Claims | None:
  """Claims of an explanation: the template's sentences, or free text.

  Args:
    text: the explanation.
    names: categories and brands that the request shows; they tell where one
      ends in a sentence.
    titles: of its items; they may say anything, and are left out.
    num_candidates: C.

  Returns:
    None if the three steps or the conclusion are missing.
  """
  steps = re.fullmatch(
      r'\s*Pattern:(.*?)Complement:(.*?)Match:(.*)', text, re.DOTALL)
  said = faithfulness.mentions(text, titles)
  if steps is None or said.conclusion is None:
    return None
  pattern, complement, match = (step.strip() for step in steps.groups())
  purchases = tuple(tokens.SEMANTIC_ID.findall(pattern))
  beside = tuple((n - 1, sid) for n, sid in said.named)
  placed = {*purchases, *(sid for _, sid in beside)}
  claims = Claims(
      of_history=purchases, of_candidates=beside,
      elsewhere=tuple(sid for sid in said.sids if sid not in placed),
      malformed=(said.malformed
                 or not all(1 <= n <= num_candidates
                             for n in said.candidates)),
      choice=said.conclusion - 1, repeats=repeats(text))
  template = _read_template(
      pattern, complement, match, frozenset(names), num_candidates)
  if template is None:
    return claims
  parts, levels, grades = template
  return dataclasses.replace(
      claims, **_owners(parts), pattern=parts, levels=levels, grades=grades)


def _owners(pattern: Mapping[str, str]) -> dict[str, tuple]:
  """To whom a pattern gives its names."""
  return dict(
      of_history=tuple(name for part, name in pattern.items()
                       if name and part != _WANTED),
      of_candidates=tuple((None, name) for part, name in pattern.items()
                          if name and part == _WANTED))


def repeats(text: str) -> bool:
  """Whether a clause of three words stands twice, or a phrase runs thrice."""
  clauses = [' '.join(_WORD.findall(clause.lower()))
             for clause in re.split(r'[.;!?\n]', text)]
  clauses = [clause for clause in clauses if clause.count(' ') >= 2]
  if len(set(clauses)) < len(clauses):
    return True
  words = np.array(_WORD.findall(text.lower()), object)
  worded = np.array([not word.isdigit() for word in words], bool)
  for period in range(1, _LONGEST_PHRASE + 1):
    same = words[period:] == words[:-period]
    for begin in range(len(same) - 2 * period + 1):
      run = slice(begin, begin + 2 * period)
      if same[begin] and same[run].all() and worded[run].any():
        return True
  return False


def _read_template(pattern: str, complement: str, match: str,
                   names: frozenset[str], num_candidates: int):
  """Pattern, levels and grades of `traces.prose`; None for other text."""
  begun, next_, listed = (
      sentence.fullmatch(step) for sentence, step in zip(
          _sentences(names), (pattern, complement, match), strict=True))
  if not (begun and next_ and listed):
    return None
  parts = {**begun.groupdict(), **next_.groupdict()}
  levels = []
  for part in listed['facts'].split('; '):
    phrase, _, numbers = part.partition(': ')
    if phrase in _FACT_OF:
      levels += [(int(n) - 1, _FACT_OF[phrase], None)
                 for n in re.findall('[0-9]{1,4}', numbers)]
  grades = [int(g) for g in re.findall('[0-9]{1,4}', listed['grades'] or '')]
  return ({part: said or '' for part, said in parts.items()}, tuple(levels),
          tuple(grades) if len(grades) == num_candidates else ())


@functools.lru_cache(maxsize=4096)
def _sentences(names: frozenset[str]) -> tuple[re.Pattern, ...]:
  """The template's three steps; a name is one that is shown, or any other."""
  known = '|'.join(map(re.escape, sorted(names, key=len, reverse=True)))
  name = f'{known}|.{{1,{_LONGEST_NAME}}}?'
  return (
      re.compile(
          '(there are no purchases to go by|the latest purchase is (?P<last>'
          f'{tokens.SEMANTIC_ID.pattern})(?: from (?P<last_category>{name}))?'
          f'(?:, (?P<frequent_category>{name}) is bought most)?'
          rf'(?:, (?P<brand>{name}) is the leading brand)?)\.', re.DOTALL),
      re.compile(
          f'(no type of product stands out|(?P<wanted_category>{name}) usually '
          r'comes next)\.', re.DOTALL),
      re.compile(
          r'(?P<facts>[^.]*)\.(?: Grades, 0 to \d+: (?P<grades>[\d, ]+)\.)?'
          r' Candidate \d+ fits best\.'))


def something(name: str) -> str:
  """A category or brand token; '' for the token of none."""
  return '' if name in (tokens.NO_CATEGORY, tokens.NO_BRAND) else name
