"""Template reasoning traces: a ranker's work on paper.

A trace has GR2's three steps (arXiv 2602.07774) and a choice, computed from the
history, the candidates and their facts, like the category-based templates that
OneRec-Think (arXiv 2510.11639) uses on public data:

    pattern      which categories and which brand the history shows
    complement   which category would come next
    match        what speaks for each candidate
    choice       the candidate that is recommended first

It is rendered as prose (json responses) or densely (compact responses). The
dense form has a fixed length, so that every token has its place and a block
decoder can write tokens side by side (C candidates, F facts):

    pattern and complement             match                            choice
    [last] [frequent] [brand] [wanted] ([<|c1|>] [facts] [grade]) ... C   [<|c3|>]
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
import collections
import dataclasses
import json
import re
from typing import NamedTuple

import numpy as np

from dgr2_jax.data import boosted
from dgr2_jax.data import facts
from dgr2_jax.data import interactions
from dgr2_jax.data import tokens

# What the dense form can open with.
PATTERN = ('last_category', 'frequent_category', 'brand', 'wanted_category')

# How prose introduces the candidates that a fact speaks for.
PHRASES = {
    'score': 'preferred by the retriever',
    'bought_with_last': 'bought together with the latest purchase',
    'bought_with_recent': 'bought together with recent purchases',
    'popularity': 'popular',
    'category': 'in a category of the history',
    'brand': 'by a brand of the history',
    'follows': 'of a type that usually comes next',
    'similarity': 'described like recent purchases',
    'bought_after_last': 'bought right after the latest purchase',
    'bought_after_second_last': 'bought right after the purchase before it',
    'bought_with_history': 'bought together with the history',
}
# Candidates that prose names for a fact, strongest first.
_NAMED = 3


@dataclasses.dataclass(frozen=True)
class TraceConfig:
  """What a trace says.

  Attributes:
    pattern: what the dense form opens with, of `PATTERN`.
    facts: names of the facts it goes through for every candidate. Not `rank`,
      which is a candidate's index.
    combine_facts: whether the dense form joins a candidate's facts into one
      token; shorter responses train and decode faster.
    show_index: whether the dense form names each candidate before its facts.
    grades: whether the match gives every candidate's grade, the teacher's: what
      the facts amount to, before the answer sorts the candidates by it.
  """
  pattern: tuple[str, ...]
  facts: tuple[str, ...]
  combine_facts: bool
  show_index: bool
  grades: bool

  def __post_init__(self):
    for field, allowed in (('pattern', PATTERN), ('facts', tuple(PHRASES))):
      values = getattr(self, field)
      if not set(values) <= set(allowed) or len(set(values)) < len(values):
        raise ValueError(
            f'prompt.trace.{field} is {values}: expected different names of '
            f'{allowed}.')

  @classmethod
  def from_config(cls, config: Mapping) -> TraceConfig:
    """From `config.prompt.trace`."""
    return cls(
        pattern=tuple(config['pattern']), facts=tuple(config['facts']),
        combine_facts=config['combine_facts'],
        show_index=config['show_index'], grades=config['grades'])

  def names(self) -> list[str]:
    """Fact tokens that the dense form needs.

    Raises:
      ValueError: joined facts have too many levels.
    """
    grades = [tokens.grade(level) for level in range(boosted.NUM_GRADES)
              if self.grades]
    if self.combine_facts and self.facts:
      return tokens.joined_fact_names(self.facts) + grades
    return tokens.fact_names(self.facts) + grades


@dataclasses.dataclass(frozen=True)
class Trace:
  """The content of a trace; absent categories and brands are empty.

  Attributes:
    last: item index of the latest purchase, None for an empty history.
    last_category: its category path.
    frequent_category: most frequent category path of the history.
    brand: most frequent brand of the history.
    wanted_category: the candidates' category that follows the history best.
    facts: names of the facts, F.
    matches: int [C, F] levels of the facts.
    choice: position of the first recommended candidate, from zero.
    grades: int [C], the teacher's; None where there is no teacher.
  """
  last: int | None
  last_category: tuple[str, ...]
  frequent_category: tuple[str, ...]
  brand: str
  wanted_category: tuple[str, ...]
  facts: tuple[str, ...]
  matches: np.ndarray
  choice: int
  grades: np.ndarray | None


def _most_frequent(values: Sequence):
  """The most frequent non-empty value, the latest of several; or None."""
  values = [v for v in reversed(values) if v]
  return max(values, key=collections.Counter(values).get, default=None)


def build(
    items: Sequence[interactions.Item],
    history: np.ndarray,
    candidates: np.ndarray,
    levels: np.ndarray,
    choice: int,
    names: Sequence[str],
    grades: np.ndarray | None = None) -> Trace:
  """Computes a trace.

  Args:
    items: the catalogue.
    history: int [h] item indices that the prompt shows, oldest first.
    candidates: int [C] item indices.
    levels: int [C, len(facts.FACTS)], the candidates' facts.
    choice: position of the candidate to recommend first, from zero.
    names: the facts to go through.
    grades: int [C], the teacher's grades.
  """
  bought = [items[i] for i in history]
  follows = np.asarray(levels)[:, facts.index('follows')]
  best = int(follows.argmax())  # The first of several.
  wanted = items[candidates[best]].categories if follows[best] > 0 else ()
  return Trace(
      last=int(history[-1]) if bought else None,
      last_category=bought[-1].categories if bought else (),
      frequent_category=_most_frequent([i.categories for i in bought]) or (),
      brand=_most_frequent([i.brand for i in bought]) or '',
      wanted_category=wanted,
      facts=tuple(names),
      matches=np.asarray(levels)[:, [facts.index(name) for name in names]],
      choice=choice, grades=grades)


def dense(
    trace: Trace, config: TraceConfig, known: Container[str]
) -> list[tokens.Special]:
  """The dense form, of a length that depends on `config` and C alone.

  Args:
    trace: what to write.
    config: which parts of it.
    known: names of existing tokens, for attributes that lack one.

  Raises:
    ValueError: grades are wanted and the trace has none.
  """
  if config.grades and trace.grades is None:
    raise ValueError('prompt.trace.grades needs a teacher: '
                     "prompt.answer_order='teacher'")
  pattern = {
      'last_category': tokens.category(trace.last_category, known),
      'frequent_category': tokens.category(trace.frequent_category, known),
      'brand': tokens.brand(trace.brand, known),
      'wanted_category': tokens.category(trace.wanted_category, known)}
  names = [pattern[part] for part in config.pattern]
  for position, levels in enumerate(trace.matches.tolist()):
    if config.show_index:
      names.append(tokens.candidate(position + 1))
    if config.combine_facts and trace.facts:
      names.append(tokens.joined_facts(trace.facts, levels))
    else:
      names.extend(map(tokens.fact, trace.facts, levels))
    if config.grades:
      names.append(tokens.grade(int(trace.grades[position])))
  names.append(tokens.candidate(trace.choice + 1))
  return [tokens.Special(name) for name in names]


class Dense(NamedTuple):
  """What a dense trace says, read back.

  Attributes:
    pattern: category and brand tokens, by part of `PATTERN`.
    indices: the numbers that candidates are introduced by, from one; empty
      where they are not.
    levels: by candidate, the level of every fact.
    grades: by candidate; empty without grades.
    choice: position of the candidate named last, from zero.
  """
  pattern: dict[str, str]
  indices: tuple[int, ...]
  levels: tuple[dict[str, int], ...]
  grades: tuple[int, ...]
  choice: int


def read_dense(names: Sequence[str], config: TraceConfig,
               num_candidates: int) -> Dense | None:
  """Reads a dense trace; None if it does not have its form.

  Args:
    names: tokens of a response before the answer's marker.
    config: what the trace was to say.
    num_candidates: C.
  """
  left = iter(names)

  def number() -> int:
    """A candidate's number from its token."""
    value = int(_inside(next(left)).removeprefix('c'))
    if not 1 <= value <= num_candidates:
      raise ValueError(value)
    return value

  def facts_() -> dict[str, int]:
    joined = config.combine_facts and config.facts
    words = (_inside(next(left)).split(' ') if joined
             else [_inside(next(left)) for _ in config.facts])
    return {fact: _level_of(word, fact)
            for word, fact in zip(words, config.facts, strict=True)}

  indices, levels, grades = [], [], []
  try:
    pattern = {part: _attribute_token(next(left), part)
               for part in config.pattern}
    for _ in range(num_candidates):
      if config.show_index:
        indices.append(number())
      levels.append(facts_())
      if config.grades:
        grades.append(_level_of(_inside(next(left)), 'grade'))
    choice = number() - 1
  except (StopIteration, ValueError):
    return None
  if next(left, None) is not None:
    return None
  return Dense(pattern, tuple(indices), tuple(levels), tuple(grades), choice)


def readable(names: Sequence[str], config: TraceConfig,
             num_candidates: int) -> str | None:
  """A dense trace in words, see `read_dense`; None as there."""
  trace = read_dense(names, config, num_candidates)
  if trace is None:
    return None
  sentences = [f'{_OPENING[part]}: {_attribute(name)}.'
               for part, name in trace.pattern.items()]
  for position, levels in enumerate(trace.levels):
    words = list(map(in_words, levels.keys(), levels.values()))
    words += [f'grade {grade}' for grade in trace.grades[position:][:1]]
    if words:
      sentences.append(f'Candidate {position + 1}: {", ".join(words)}.')
  return ' '.join([*sentences, f'Candidate {trace.choice + 1} fits best.'])


_OPENING = {
    'last_category': 'Latest purchase',
    'frequent_category': 'Bought most',
    'brand': 'Leading brand',
    'wanted_category': 'Would come next'}


def _inside(name: str) -> str:
  """What stands between <| and |>."""
  if not (name.startswith('<|') and name.endswith('|>')):
    raise ValueError(name)
  return name[2:-2]


def in_words(fact: str, level: int) -> str:
  """A fact's level: 'popular 3 of 5'."""
  highest = facts.FACTS[facts.index(fact)].levels - 1
  return f'{PHRASES[fact]} {level} of {highest}'


def _attribute_token(name: str, part: str) -> str:
  """The name, if it is one of a category or brand, as the part has."""
  kind = 'brand' if part == 'brand' else 'category'
  if not _inside(name).startswith((f'{kind}: ', f'no_{kind}', f'other_{kind}')):
    raise ValueError(name)
  return name


def _attribute(name: str) -> str:
  """A category or brand token in words: its value, or 'other brand'."""
  _, colon, value = _inside(name).partition(': ')
  return value if colon else _inside(name).replace('_', ' ')


def _level_of(fact: str, name: str) -> int:
  """The level in `name_3`."""
  if not re.fullmatch(rf'{name}_[0-9]{{1,4}}', fact):
    raise ValueError(fact)
  return int(fact[len(name) + 1:])


def prose(
    trace: Trace, cite: Callable[[int], list[tokens.Piece]]
) -> list[tokens.Piece]:
  """The trace in sentences, escaped so that it can stand in a JSON string.

  Args:
    trace: what to write.
    cite: pieces that refer to an item, given its index.
  """
  pieces = [tokens.Text('Pattern: ')]
  if trace.last is None:
    pieces.append(tokens.Text('there are no purchases to go by'))
  else:
    pieces.append(tokens.Text('the latest purchase is '))
    pieces.extend(cite(trace.last))
    if trace.last_category:
      pieces.append(_escaped(f' from {trace.last_category[-1]}'))
    if trace.frequent_category:
      pieces.append(_escaped(
          f', {trace.frequent_category[-1]} is bought most'))
    if trace.brand:
      pieces.append(_escaped(f', {trace.brand} is the leading brand'))
  pieces.append(tokens.Text('. Complement: '))
  if trace.wanted_category:
    pieces.append(_escaped(
        f'{trace.wanted_category[-1]} usually comes next. '))
  else:
    pieces.append(tokens.Text('no type of product stands out. '))
  matches = []
  for name, levels in zip(trace.facts, trace.matches.T, strict=True):
    # Stable, so that the retriever's order decides between equals.
    strongest = np.argsort(-levels.astype(int), kind='stable')[:_NAMED]
    named = [str(c + 1) for c in strongest if levels[c] > 0]
    if named:
      matches.append(f'{PHRASES[name]}: {", ".join(named)}')
  pieces.append(tokens.Text(
      f'Match: {"; ".join(matches) or "no candidate stands out"}. '))
  if trace.grades is not None:
    pieces.append(tokens.Text(
        f'Grades, 0 to {boosted.NUM_GRADES - 1}: '
        f'{", ".join(str(int(grade)) for grade in trace.grades)}. '))
  pieces.append(tokens.Text(f'Candidate {trace.choice + 1} fits best.'))
  return pieces


def written(explanation: str) -> list[tokens.Piece]:
  """A model's explanation as the inside of a JSON string, SIDs as tokens."""
  pieces, end = [], 0
  for cited in tokens.SEMANTIC_ID.finditer(explanation):
    pieces.append(_escaped(explanation[end:cited.start()]))
    pieces.extend(tokens.from_semantic_id_text(cited.group()))
    end = cited.end()
  return [*pieces, _escaped(explanation[end:])]


def _escaped(text: str) -> tokens.Text:
  """Text as the inside of a JSON string."""
  return tokens.Text(json.dumps(text, ensure_ascii=False)[1:-1])


def target_first(candidates: np.ndarray, target: int) -> np.ndarray:
  """GR2's answer: the target, then the others in the retriever's order.

  Args:
    candidates: int [C] item indices.
    target: item index; where it isn't a candidate the order stays.

  Returns:
    int [C] candidate positions from zero, best first.
  """
  return np.argsort(np.asarray(candidates) != target, kind='stable')
