"""Prompts and responses: one template, two forms.

The *json* form is GR2's chat (arXiv 2602.07774) in Qwen3's chat template with
an empty thinking part; the answer holds candidate indices as strings:

    <|im_start|>system ... <|im_end|>
    <|im_start|>user
    <|sid_begin|><s_a_57> ... <|sid_end|>, title: "...", categories: "..."
    Candidate 1: <|sid_begin|> ...                                  <|im_end|>
    <|im_start|>assistant
    <think> </think>
                                                         the prompt ends here
    {"explanation": "...", "recommendations": ["3", "1", ...]}<|im_end|>
    '----------- reasoning -----------------''---- answer --------------------'

The *compact* form says the same in special tokens, for small models:

    <|history|> [item] ... <|candidates|> <|c1|> [item] [facts] ... <|reason|>
                                                         the prompt ends here
    [dense trace] <|answer|> <|c3|> <|c1|> ... <|im_end|>
    '------ reasoning -----''---------- answer ---------'

Which tokens are answer is known because a response is put together from
labelled pieces; nothing is searched for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import json
from typing import NamedTuple

import numpy as np

from dgr2_jax.data import facts
from dgr2_jax.data import faithfulness
from dgr2_jax.data import generated
from dgr2_jax.data import interactions
from dgr2_jax.data import requests
from dgr2_jax.data import tokenizer as tokenizer_lib
from dgr2_jax.data import tokens
from dgr2_jax.data import traces

JSON = 'json'
COMPACT = 'compact'
ITEM_FIELDS = ('sid', 'title', 'category', 'brand')
_CONCLUSION = 2  # compact tokens: the choice and the marker of the answer

SYSTEM = (
    'You are an expert in online retail who predicts what a shopper buys next. '
    'You are given the purchase history, oldest first, and {count} candidates '
    'that a retriever has ranked already. Re-rank them so that the most likely '
    'next purchase comes first. Think in three steps: the pattern in the '
    'history, the type of product that would complement it, and how well each '
    'candidate matches. Reply with one JSON object {{"explanation": "...", '
    '"recommendations": [...]}} whose recommendations are the candidate '
    'numbers from 1 to {count}, each once, as strings.')
EVIDENCE = {
    'rank': 'retriever rank', 'score': 'retriever score',
    'bought_with_last': 'bought with the latest purchase',
    'bought_with_recent': 'bought with recent purchases',
    'popularity': 'popularity', 'category': 'category in history',
    'brand': 'brand in history', 'follows': 'follows the latest purchase',
    'similarity': 'similar to recent purchases',
    'bought_after_last': 'bought right after the latest purchase',
    'bought_after_second_last': 'bought right after the purchase before it',
    'bought_with_history': 'bought with the history'}


@dataclasses.dataclass(frozen=True)
class PromptConfig:
  """What prompts and responses look like.

  Attributes:
    response_format: JSON or COMPACT.
    item_fields: what an item shows, of `ITEM_FIELDS`, in this order. Category
      and brand are text in the json form (the category as its whole path) and
      one token each in the compact form.
    evidence: names of the facts that a candidate shows; in the compact form
      'a+b' joins two (or more) into one token, for shorter prompts.
    max_history: history items to show, the latest ones.
    max_prompt: tokens; over-long prompts drop their oldest history items.
    max_response: tokens through EOS.
    answer_order: 'target' (the target, then the retriever's order, as in GR2)
      or 'teacher' (the order of a teacher ranker).
    trace: what the reasoning says.
    counterfactuals: training responses with other grades, as a share of the
      requests; see `records.build_counterfactuals`.
    traces: traces of a language model to learn from; None is the template's.
  """
  response_format: str
  item_fields: tuple[str, ...]
  evidence: tuple[str, ...]
  max_history: int
  max_prompt: int
  max_response: int
  answer_order: str
  trace: traces.TraceConfig
  counterfactuals: float = 0.
  traces: generated.TracesConfig | None = None

  def __post_init__(self):
    for field, allowed in (
        ('response_format', (JSON, COMPACT)),
        ('answer_order', ('target', 'teacher'))):
      if getattr(self, field) not in allowed:
        raise ValueError(
            f'prompt.{field} is {getattr(self, field)!r}: expected one of '
            f'{allowed}.')
    shown = [name for group in self.evidence for name in group.split('+')]
    for field, values, allowed in (
        ('item_fields', self.item_fields, ITEM_FIELDS),
        ('evidence', shown, tuple(fact.name for fact in facts.FACTS))):
      if not set(values) <= set(allowed) or len(set(values)) < len(values):
        raise ValueError(
            f'prompt.{field} is {values}: expected different names of '
            f'{allowed}.')
    if not self.item_fields:
      raise ValueError('prompt.item_fields is empty: items would look alike.')
    if not 0 <= self.counterfactuals <= 1:
      raise ValueError(f'prompt.counterfactuals is {self.counterfactuals}: '
                       'expected 0 to 1.')
    if self.counterfactuals and not self.trace.grades:
      raise ValueError('prompt.counterfactuals changes grades: it needs '
                       'prompt.trace.grades.')
    if self.traces and (self.response_format != JSON or self.trace.grades):
      raise ValueError(
          'prompt.traces are free text without grades: expected '
          f"prompt.response_format='{JSON}' and prompt.trace.grades=False.")
    for field in ('max_history', 'max_prompt', 'max_response'):
      if getattr(self, field) < 1:
        raise ValueError(
            f'prompt.{field} is {getattr(self, field)}: expected at least 1.')

  @classmethod
  def from_config(cls, config: Mapping) -> PromptConfig:
    """From `config.prompt`."""
    return cls(
        response_format=config['response_format'],
        item_fields=tuple(config['item_fields']),
        evidence=tuple(config['evidence']),
        max_history=config['max_history'],
        max_prompt=config['max_prompt'],
        max_response=config['max_response'],
        answer_order=config['answer_order'],
        trace=traces.TraceConfig.from_config(config['trace']),
        counterfactuals=config['counterfactuals'],
        traces=(generated.TracesConfig(**config['traces'])
                if config.get('traces') else None))


class Prompt(NamedTuple):
  """A prompt: its ids int32 [p], and how many history items it shows."""
  ids: np.ndarray
  shown: int


class Response(NamedTuple):
  """A response through EOS.

  Attributes:
    ids: int32 [l].
    is_answer: bool [l].
    conclusion: the position from which on all follows from what stands before
      it: the choice's in the compact form, the answer's in the json form.
  """
  ids: np.ndarray
  is_answer: np.ndarray
  conclusion: int


class Template:
  """Turns requests into token ids."""

  def __init__(
      self,
      config: PromptConfig,
      tokenizer: tokenizer_lib.Tokenizer,
      items: Sequence[interactions.Item],
      semantic_ids: np.ndarray,
      num_candidates: int):
    """Makes a template.

    Args:
      config: what prompts and responses look like.
      tokenizer: has the tokens of `vocabulary.special_names`.
      items: the catalogue, I items.
      semantic_ids: int [I, levels].
      num_candidates: C.
    """
    self.config = config
    self.tokenizer = tokenizer
    self.num_candidates = num_candidates
    self._items = items
    self._semantic_ids = semantic_ids
    self._item_ids = {}  # (item, fields) -> ids; requests share items.
    self._piece_ids = {}
    self._compact = config.response_format == COMPACT

  def prompt(self, request: requests.Request) -> Prompt:
    """Writes the prompt of a request.

    Raises:
      ValueError: the number of candidates is wrong, or they alone are longer
        than `max_prompt`.
    """
    if len(request.candidates) != self.num_candidates:
      raise ValueError(
          f'A request of user {request.user} has {len(request.candidates)} '
          f'candidates: expected {self.num_candidates}.')
    before, between, after = self._frame()
    candidates = []
    for position, item in enumerate(request.candidates):
      candidates += self._candidate(
          position, int(item), request.facts[position])
    history = [self.line(int(i), self.config.item_fields)
               for i in request.history[-self.config.max_history:]]
    room = self.config.max_prompt - sum(
        map(len, (before, between, candidates, after)))
    if room < 0:
      raise ValueError(
          f'Without any history a prompt takes {self.config.max_prompt - room} '
          f'tokens: prompt.max_prompt is {self.config.max_prompt}; raise it or '
          'show less.')
    shown = 0
    while shown < len(history) and len(history[-1 - shown]) <= room:
      room -= len(history[-1 - shown])
      shown += 1
    ids = list(before)
    for line in history[len(history) - shown:]:
      ids += line
    return Prompt(
        np.array(ids + between + candidates + after, np.int32), shown)

  def response(
      self, request: requests.Request, order: np.ndarray, shown: int,
      grades: np.ndarray | None = None) -> Response:
    """Writes the response that a model should give.

    Args:
      request: what is answered.
      order: int [C] candidate positions from zero, best first.
      shown: history items in the prompt; the trace speaks of no others.
      grades: int [C], the teacher's, for `trace.grades`.

    Raises:
      ValueError: `order` isn't a permutation.
    """
    order = [int(position) for position in order]
    if sorted(order) != list(range(self.num_candidates)):
      raise ValueError(
          f'order is {order}: expected a permutation of 0 to '
          f'{self.num_candidates - 1}.')
    trace = traces.build(
        self._items, request.history[len(request.history) - shown:],
        request.candidates, request.facts, order[0], self.config.trace.facts,
        grades if self.config.trace.grades else None)
    if self._compact:
      return self._encoded(*self._compact_response(trace, order))
    return self._encoded(
        *_json_response(traces.prose(trace, self._cite), order))

  def written_response(self, answer: faithfulness.Answer) -> Response:
    """A language model's answer in the json form.

    Args:
      answer: faithful, so that every SID in it is one of the catalogue.
    """
    return self._encoded(
        *_json_response(traces.written(answer.explanation), answer.order))

  def _encoded(
      self, reasoning: Sequence[tokens.Piece], answer: Sequence[tokens.Piece]
  ) -> Response:
    reasoning = self.tokenizer.encode(_merged(reasoning))
    answer = self.tokenizer.encode(answer)
    return Response(
        np.array(reasoning + answer, np.int32),
        np.arange(len(reasoning) + len(answer)) >= len(reasoning),
        len(reasoning) - (_CONCLUSION if self._compact else 0))

  def _compact_response(self, trace, order):
    reasoning = [
        *traces.dense(trace, self.config.trace, self.tokenizer),
        tokens.Special(tokens.ANSWER)]
    answer = [tokens.Special(tokens.candidate(c + 1)) for c in order]
    return reasoning, [*answer, tokens.Special(tokens.EOS)]

  def _frame(self) -> tuple[list[int], list[int], list[int]]:
    """Ids before the history, between it and the candidates, and after."""
    special, text = tokens.Special, tokens.Text
    if self._compact:
      parts = ([special(tokens.HISTORY)], [special(tokens.CANDIDATES)],
               [special(tokens.REASON)])
    else:
      system = SYSTEM.format(count=self.num_candidates)
      parts = (
          [special(tokens.TURN), text(f'system\n{system}'), special(tokens.EOS),
           text('\n'), special(tokens.TURN),
           text('user\nPurchases, oldest first:\n')],
          [text('Candidates, in the order of the retriever:\n')],
          [special(tokens.EOS), text('\n'), special(tokens.TURN),
           text('assistant\n'), special(tokens.THINK_BEGIN), text('\n\n'),
           special(tokens.THINK_END), text('\n\n')])
    return tuple(self._cached(tuple(part)) for part in parts)

  def _cached(self, pieces: tuple[tokens.Piece, ...]) -> list[int]:
    if pieces not in self._piece_ids:
      self._piece_ids[pieces] = self.tokenizer.encode(pieces)
    return self._piece_ids[pieces]

  def item(self, item: int, fields: tuple[str, ...]) -> list[int]:
    """Ids of `fields` of an item, without the end of its line."""
    if (item, fields) not in self._item_ids:
      parts = [self._field(field, item) for field in fields]
      pieces = [piece for part in parts if part
                for piece in (*part, tokens.Text(', '))][:-1]
      if self._compact:
        pieces = [piece for part in parts for piece in part]
      self._item_ids[item, fields] = self.tokenizer.encode(_merged(pieces))
    return self._item_ids[item, fields]

  def _field(self, field: str, item: int) -> list[tokens.Piece]:
    """One field of an item; none where the item lacks it in the json form."""
    value = self._items[item]
    if field == 'sid':
      return self._cite(item)
    if self._compact:
      if field == 'title':
        return [tokens.Text(' '.join(value.title.split()) + '\n')]
      name = (tokens.category(value.categories, self.tokenizer)
              if field == 'category'
              else tokens.brand(value.brand, self.tokenizer))
      return [tokens.Special(name)]
    label, value = {
        'title': ('title', value.title),
        'category': ('categories', ' > '.join(value.categories)),
        'brand': ('brand', value.brand)}[field]
    if not value:
      return []
    return [tokens.Text(f'{label}: {json.dumps(value, ensure_ascii=False)}')]

  def _cite(self, item: int) -> list[tokens.Piece]:
    return tokens.semantic_id(self._semantic_ids[item].tolist())

  def line(self, item: int, fields: tuple[str, ...]) -> list[int]:
    """Ids of `fields` of an item of a history."""
    end = () if self._compact else (tokens.Text('\n'),)
    return self.item(item, fields) + self._cached(end)

  def _candidate(
      self, position: int, item: int, levels: np.ndarray) -> list[int]:
    """Ids of a candidate: its index, the item and its evidence."""
    levels = {name: int(levels[facts.index(name)])
              for group in self.config.evidence for name in group.split('+')}
    if self._compact:
      index = tokens.Special(tokens.candidate(position + 1))
      groups = [group.split('+') for group in self.config.evidence]
      evidence = tuple(
          tokens.Special(tokens.joined_facts(g, [levels[name] for name in g]))
          for g in groups)
    else:
      index = tokens.Text(f'Candidate {position + 1}: ')
      evidence = tuple(
          tokens.Text(
              f', {EVIDENCE[name]}: {level} of '
              f'{facts.FACTS[facts.index(name)].levels - 1}')
          for name, level in levels.items()) + (tokens.Text('\n'),)
    shown = self.item(item, self.config.item_fields)
    return self._cached((index,)) + shown + self._cached(evidence)


def _json_response(
    explanation: Sequence[tokens.Piece], order: Sequence[int]):
  reasoning = [
      tokens.Text('{"explanation": "'), *explanation,
      tokens.Text('", "recommendations":')]
  return reasoning, [
      tokens.Text(json_answer(order)), tokens.Special(tokens.EOS)]


def json_answer(order: Sequence[int]) -> str:
  """The end of a json response: the candidate numbers of an order."""
  return f' {json.dumps([str(c + 1) for c in order])}}}'


def _merged(pieces: Sequence[tokens.Piece]) -> Iterator[tokens.Piece]:
  """Joins neighbouring texts, so that they are encoded as people write."""
  text = ''
  for piece in pieces:
    if isinstance(piece, tokens.Text):
      text += piece.text
      continue
    if text:
      yield tokens.Text(text)
    text = ''
    yield piece
  if text:
    yield tokens.Text(text)
