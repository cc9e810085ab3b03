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

from collections.abc import Callable, Hashable, Mapping, Sequence
import collections
import dataclasses
import itertools

import numpy as np

from dgr2_jax.data import facts
from dgr2_jax.data import interactions
from dgr2_jax.data import parsing
from dgr2_jax.data import prompts
from dgr2_jax.data import requests as requests_lib
from dgr2_jax.data import tokens
from dgr2_jax.data import traces
from dgr2_jax.evaluation import claims as claims_lib

CHECKS = ('form', 'shown', 'placed', 'pattern', 'facts', 'choice', 'grades',
          'novel')


@dataclasses.dataclass(frozen=True)
class Truth:
  """What a request's prompt shows.

  Attributes:
    history: names of the purchases: SIDs, categories and brands, as the
      response form writes them.
    candidates: the same of every candidate, in the retriever's order.
    pattern: what may be said, by part, see `claims.Claims`.
    facts: int [C, len(facts.FACTS)].
    titles: of all these items.
  """
  history: frozenset[str]
  candidates: tuple[frozenset[str], ...]
  pattern: Mapping[str, frozenset[str]]
  facts: np.ndarray
  titles: tuple[str, ...] = ()


def check(claims: claims_lib.Claims | None, truth: Truth, first: int | None,
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
      claims = claims_lib.read_compact(
          self._reasoning(ids), self._template.config.trace,
          self._template.num_candidates)
    else:
      claims = claims_lib.read_json(
          parse.explanation, truth.history.union(*truth.candidates),
          truth.titles, self._template.num_candidates)
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
      return claims_lib.something(
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
  levels = request.facts[:, facts.index('follows')]
  wanted = [name('category', c) for c, level in zip(candidates, levels)
            if level == levels.max() > 0]
  last = history[-1:]
  nothing = frozenset({''})
  return Truth(
      history=frozenset().union(*(names[i] for i in history)),
      candidates=tuple(names[i] for i in candidates),
      pattern={
          'last': frozenset(name('sid', i) for i in last) or nothing,
          'last_category': frozenset(
              name('category', i) for i in last) or nothing,
          # Counted before names: rare brands share one.
          'frequent_category': frozenset(
              name('category', i) for i in _most_frequent(
                  [(i, items[i].categories) for i in history])) or nothing,
          'brand': frozenset(
              name('brand', i) for i in _most_frequent(
                  [(i, items[i].brand) for i in history])) or nothing,
          'wanted_category': frozenset(wanted) or nothing},
      facts=request.facts,
      titles=tuple(items[i].title for i in history + candidates))


def _most_frequent(values: Sequence[tuple[int, Hashable]]) -> list[int]:
  """The items of (item, value) whose value is there most often, or none."""
  counts = collections.Counter(value for _, value in values if value)
  most = max(counts.values(), default=0)
  return [item for item, value in values if value and counts[value] == most]
