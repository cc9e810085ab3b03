"""Whether what a response reasons is true of its request.

    check     what must hold                                         form
    form      the reasoning has its form: dense, or the three steps  both
    shown     what it names (SIDs, categories, brands, candidates)
              is the request's                                       both
    placed    nothing of the candidates is given to the history, nor
              the other way round, nor to another candidate          both
    pattern   latest, most frequent and leading are the history's,
              and the wanted category follows best                   both
    facts     what it says of candidates are their facts             both
    choice    the candidate it names last is ranked first            both
    grades    the answer follows its grades                          both
    novel     no clause stands twice, no phrase three times running  json

A check holds, fails, or does not apply: to reasoning without its form only
`form` does, and free text, as a language model writes it, says nothing that
`pattern` and `facts` can read. A true reading is no sound argument; that is
asked of a judge (`dgr2_jax.tools.judge`).

Claims are read from the response, the truth from its request; `check` holds
one against the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import collections
import dataclasses
import functools
import itertools
import re

import numpy as np

from dgr2_jax.data import facts
from dgr2_jax.data import faithfulness
from dgr2_jax.data import interactions
from dgr2_jax.data import parsing
from dgr2_jax.data import prompts
from dgr2_jax.data import requests as requests_lib
from dgr2_jax.data import tokens
from dgr2_jax.data import traces

CHECKS = ('form', 'shown', 'placed', 'pattern', 'facts', 'choice', 'grades',
          'novel')
# The part of a pattern that speaks of candidates, not of the history.
_WANTED = 'wanted_category'
_WORD = re.compile(rf'{tokens.SEMANTIC_ID.pattern}|\w+')
_LONGEST_PHRASE = 8  # words
_LONGEST_NAME = 80  # characters of a category or brand that is not known


@dataclasses.dataclass(frozen=True)
class Truth:
  """What a request's prompt shows.

  Attributes:
    history: names of the purchases: SIDs, categories and brands, as the
      response form writes them.
    candidates: the same of every candidate, in the retriever's order.
    pattern: what may be said, by part, see `Claims`.
    facts: int [C, len(facts.FACTS)].
    titles: of all these items.
  """
  history: frozenset[str]
  candidates: tuple[frozenset[str], ...]
  pattern: Mapping[str, frozenset[str]]
  facts: np.ndarray
  titles: tuple[str, ...] = ()


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


def check(claims: Claims | None, truth: Truth, first: int | None,
          order: Sequence[int] | None) -> dict[str, bool | None]:
  """Holds claims against the truth.

  Args:
    claims: None for reasoning without its form.
    truth: of the request.
    first: position of the candidate that the answer begins with; None if it
      names none.
    order: the answer, positions from zero; None unless it is a permutation.

  Returns:
    By check of `CHECKS` whether it holds; None where it does not apply.
  """
  if claims is None:
    return {name: False if name == 'form' else None for name in CHECKS}
  anywhere = truth.history.union(*truth.candidates)
  positions = range(len(truth.candidates))

  def misplaced(position, name):
    """Whether a name of something shown is not one of its candidate."""
    owners = [p for p in positions if name in truth.candidates[p]]
    return name in anywhere and (
        not owners if position is None else position not in owners)

  def true_level(position, fact, level):
    value = truth.facts[position][facts.index(fact)]
    return value > 0 if level is None else value == level

  names = {*claims.of_history, *(name for _, name in claims.of_candidates),
           *claims.elsewhere}
  spoken_of = {p for p, *_ in (*claims.of_candidates, *claims.levels)}
  spoken_of.add(claims.choice)
  return {
      'form': True,
      'shown': (not claims.malformed and anywhere.issuperset(names)
                and spoken_of.issubset({None, *positions})),
      'placed': (
          truth.history.issuperset(anywhere.intersection(claims.of_history))
          and not any(misplaced(*claim) for claim in claims.of_candidates)),
      'pattern': all(
          said in truth.pattern[part] for part, said in claims.pattern.items())
                 if claims.pattern else None,
      'facts': all(p in positions and true_level(p, fact, level)
                   for p, fact, level in claims.levels)
               if claims.levels else None,
      'choice': None if claims.choice is None else claims.choice == first,
      'grades': follows(claims.grades, order)
                if claims.grades and order is not None else None,
      'novel': None if claims.repeats is None else not claims.repeats,
  }


def follows(grades: Sequence[int], order: Sequence[int]) -> bool:
  """Whether an order goes from high grades [C] to low ones."""
  return bool((np.diff(np.asarray(grades)[list(order)]) <= 0).all())


def read_compact(names: Sequence[str], config: traces.TraceConfig,
                 num_candidates: int) -> Claims | None:
  """Claims of a dense trace, given its tokens before the answer's marker."""
  trace = traces.read_dense(names, config, num_candidates)
  if trace is None:
    return None
  pattern = {part: _something(name) for part, name in trace.pattern.items()}
  return Claims(
      **_owners(pattern), pattern=pattern,
      levels=tuple((position, fact, level)
                   for position, levels in enumerate(trace.levels)
                   for fact, level in levels.items()),
      choice=trace.choice, grades=trace.grades,
      repeats=(len(set(trace.indices)) < len(trace.indices)
               if trace.indices else None))


def read_json(text: str, truth: Truth) -> Claims | None:
  """Claims of an explanation: the template's sentences, or free text.

  Args:
    text: the explanation.
    truth: its names tell where a category or brand ends in a sentence, and its
      titles, which may say anything, are left out.

  Returns:
    None if the three steps or the conclusion are missing. What names a
    candidate by a number that none has is at position -1.
  """
  steps = re.fullmatch(
      r'\s*Pattern:(.*?)Complement:(.*?)Match:(.*)', text, re.DOTALL)
  said = faithfulness.mentions(text, truth.titles)
  if steps is None or said.conclusion is None:
    return None
  pattern, complement, match = (step.strip() for step in steps.groups())
  purchases = tuple(tokens.SEMANTIC_ID.findall(pattern))
  beside = tuple((n - 1, sid) for n, sid in said.named)
  placed = {*purchases, *(sid for _, sid in beside)}
  count = len(truth.candidates)
  claims = Claims(
      of_history=purchases, of_candidates=beside,
      elsewhere=tuple(sid for sid in said.sids if sid not in placed),
      malformed=(said.malformed
                 or not all(1 <= n <= count for n in said.candidates)),
      choice=said.conclusion - 1, repeats=repeats(text))
  template = _read_template(pattern, complement, match, truth)
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


def _read_template(pattern: str, complement: str, match: str, truth: Truth):
  """Pattern, levels and grades of `traces.prose`; None for other text."""
  begun = re.fullmatch(
      r'(there are no purchases to go by|the latest purchase is (?P<last>'
      rf'{tokens.SEMANTIC_ID.pattern})(?: from (?P<last_category>{_name(truth)}'
      rf'))?(?:, (?P<frequent_category>{_name(truth)}) is bought most)?'
      rf'(?:, (?P<brand>{_name(truth)}) is the leading brand)?)\.', pattern,
      re.DOTALL)
  wanted = re.fullmatch(
      r'(no type of product stands out|(?P<wanted_category>'
      rf'{_name(truth)}) usually comes next)\.', complement, re.DOTALL)
  listed = re.fullmatch(
      r'(?P<facts>[^.]*)\.(?: Grades, 0 to \d+: (?P<grades>[\d, ]+)\.)?'
      r' Candidate \d+ fits best\.', match)
  if begun is None or wanted is None or listed is None:
    return None
  fact_of = {phrase: name for name, phrase in traces.PHRASES.items()}
  levels = []
  for part in listed['facts'].split('; '):
    phrase, _, numbers = part.partition(': ')
    if phrase in fact_of:
      levels += [(int(n) - 1 if len(n) < 5 else -1, fact_of[phrase], None)
                 for n in re.findall('[0-9]+', numbers)]
  parts = {**begun.groupdict(), **wanted.groupdict()}
  grades = tuple(int(g[:4]) for g in re.findall('[0-9]+',
                                                listed['grades'] or ''))
  return ({part: said or '' for part, said in parts.items()}, tuple(levels),
          grades if len(grades) == len(truth.candidates) else ())


@functools.lru_cache(maxsize=256)
def _alternatives(names: frozenset[str]) -> str:
  known = '|'.join(map(re.escape, sorted(names, key=len, reverse=True)))
  return f'(?:{known}|.{{1,{_LONGEST_NAME}}}?)'


def _name(truth: Truth) -> str:
  """A pattern of a category or brand: one that is shown, or any other."""
  return _alternatives(truth.history.union(*truth.candidates))


class Checker:
  """Checks the responses to the requests of a split."""

  def __init__(
      self, requests: Sequence[requests_lib.Request],
      template: prompts.Template, items: Sequence[interactions.Item],
      semantic_ids: np.ndarray, parser: parsing.Parser):
    """Makes a checker.

    Args:
      requests: n of them.
      template: wrote their prompts.
      items: the catalogue, I items.
      semantic_ids: int [I, levels].
      parser: of the responses.
    """
    self._requests = requests
    self._template = template
    self._items = items
    self._semantic_ids = semantic_ids
    self._parser = parser
    self._truths = {}

  def check(self, index: int, ids: Sequence[int]) -> np.ndarray:
    """Checks a response to request `index`.

    Args:
      index: of the request.
      ids: int [l], the response.

    Returns:
      float64 [len(CHECKS)]: 1 holds, 0 fails, NaN does not apply.
    """
    if index not in self._truths:
      request = self._requests[index]
      self._truths[index] = truth_of(
          request, self._template.prompt(request).shown, self._items,
          self._name)
    truth = self._truths[index]
    parse = self._parser.strict(ids)
    lenient = self._parser.lenient(ids)
    if self._compact:
      claims = read_compact(self._reasoning(ids), self._template.config.trace,
                            len(truth.candidates))
    else:
      claims = read_json(parse.explanation, truth)
    verdicts = check(claims, truth, lenient[0] if lenient else None,
                     parse.order)
    return np.array([np.nan if verdicts[name] is None else verdicts[name]
                     for name in CHECKS], np.float64)

  def explanation(self, ids: Sequence[int]) -> str:
    """The reasoning of a response, int [l], in words where it has its form."""
    if self._compact:
      names = self._reasoning(ids)
      return traces.readable(
          names, self._template.config.trace,
          self._template.num_candidates) or ''.join(names)
    return self._parser.strict(ids).explanation

  def _reasoning(self, ids: Sequence[int]) -> list[str]:
    """The tokens of a compact response before the answer's marker."""
    names = [self._template.tokenizer.decode([int(i)]) for i in ids]
    return list(itertools.takewhile(lambda x: x != tokens.ANSWER, names))

  @property
  def _compact(self) -> bool:
    return self._template.config.response_format == prompts.COMPACT

  def _name(self, kind: str, index: int) -> str:
    """How the response form writes an item's 'sid', 'category' or 'brand'."""
    item, tokenizer = self._items[index], self._template.tokenizer
    if kind == 'sid':
      return tokens.semantic_id_text(self._semantic_ids[index].tolist())
    if self._compact:
      return _something(
          tokens.category(item.categories, tokenizer) if kind == 'category'
          else tokens.brand(item.brand, tokenizer))
    if kind == 'brand':
      return item.brand
    return item.categories[-1] if item.categories else ''


def truth_of(request: requests_lib.Request, shown: int,
             items: Sequence[interactions.Item],
             name: Callable[[str, int], str]) -> Truth:
  """What may be said of a request.

  Args:
    request: the request.
    shown: history items in its prompt, the latest ones.
    items: the catalogue.
    name: how the response form writes 'sid', 'category' or 'brand' of an item,
      given its index; '' where it has none.
  """
  history = request.history[len(request.history) - shown:].tolist()
  candidates = request.candidates.tolist()
  names = {
      i: frozenset(filter(None, (
          name(kind, i) for kind in ('sid', 'category', 'brand'))))
      for i in history + candidates}
  follows_best = request.facts[:, facts.index('follows')]
  wanted = [name('category', c) for c, level in zip(candidates, follows_best)
            if level == follows_best.max() > 0]
  last = history[-1:]
  nothing = frozenset({''})
  return Truth(
      history=frozenset().union(*(names[i] for i in history)),
      candidates=tuple(names[i] for i in candidates),
      pattern={
          'last': frozenset(name('sid', i) for i in last) or nothing,
          'last_category': frozenset(
              name('category', i) for i in last) or nothing,
          'frequent_category': _most_frequent(
              name('category', i) for i in history) or nothing,
          'brand': _most_frequent(
              name('brand', i) for i in history) or nothing,
          'wanted_category': frozenset(wanted) or nothing},
      facts=request.facts,
      titles=tuple(items[i].title for i in history + candidates))


def _something(name: str) -> str:
  """A category or brand token; '' for the token of none."""
  return '' if name in (tokens.NO_CATEGORY, tokens.NO_BRAND) else name


def _most_frequent(values: Iterable[str]) -> frozenset[str]:
  """The values, but for '', that are there most often."""
  counts = collections.Counter(filter(None, values))
  most = max(counts.values(), default=0)
  return frozenset(v for v, count in counts.items() if count == most)
