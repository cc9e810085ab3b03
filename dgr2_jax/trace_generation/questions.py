"""What a teacher is asked, by the five prompt principles of GR2.

    role and task       an expert re-ranks ten candidates          system
    shared context      history and all candidates at once         user
    domain knowledge    what tends to follow what (`hint`)         system
    constraints         cite SIDs, speak of nothing else           system
    structured steps    pattern, complement, match                 system

(arXiv 2602.07774, in our own words.) *Rejection* sampling asks just that and
keeps what names the target first by itself; *targeted* sampling shows the
target and asks for the reasoning that leads there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import json
from typing import Any

import numpy as np

from dgr2_jax.data import faithfulness
from dgr2_jax.data import generated
from dgr2_jax.data import interactions
from dgr2_jax.data import prompts
from dgr2_jax.data import requests as requests_lib
from dgr2_jax.data import tokens
from dgr2_jax.trace_generation import chat

REJECTION, TARGETED = 'rejection', 'targeted'
HINT = (
    'People restock what they use up, stay with brands that they like, and '
    'complete a routine: after a shampoo comes a conditioner, then styling.')

_SYSTEM = '''\
You are an expert in online retail. You are shown what a shopper bought, \
oldest first, and {count} candidates in the order of a retriever. Put the \
candidates in a new order, so that what the shopper most likely buys next \
comes first.

What is known about such shoppers: {hint}

Reason in three steps, a sentence or two each:
Pattern: what the purchases have in common, and where they are heading.
Complement: which type of product would come next.
Match: which candidates are of that type, and what tells them apart.

Keep to these rules:
- Cite products by their id, copied whole from {begin} to {end}; cite at least \
one purchase.
- Cite no product that is not shown, and claim nothing that is not shown.
- Call a candidate "Candidate" and its number.
- End the reasoning with the sentence "Candidate N fits best.", where N is the \
number that you put first.

Reply with one JSON object and nothing else:
{{"explanation": "Pattern: ... Complement: ... Match: ... Candidate N fits \
best.", "recommendations": ["N", ...]}}
where recommendations has every number from 1 to {count} once, as a string.'''
_TARGET = '''

The shopper went on to buy candidate {number}. Put it first, and reason your \
way to it from the purchases alone: nothing in your words may show that you \
knew.'''


@dataclasses.dataclass(frozen=True)
class QuestionConfig:
  """How questions are put.

  Attributes:
    model: the name that the endpoint knows it by.
    mode: REJECTION or TARGETED.
    hint: domain knowledge, a sentence or two.
    temperature: of sampling.
    max_tokens: of an answer, thinking included.
    extra_body: further fields of the request body; none of
      `chat.OWN_FIELDS`.
  """
  model: str
  mode: str
  hint: str = HINT
  temperature: float = 0.8
  max_tokens: int = 1024
  extra_body: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if not self.model:
      raise ValueError('model is empty: expected a name that the endpoint '
                       'knows.')
    if self.mode not in (REJECTION, TARGETED):
      raise ValueError(f'mode is {self.mode!r}: expected {REJECTION} or '
                       f'{TARGETED}.')
    if not 0 <= self.temperature <= 2:
      raise ValueError(
          f'temperature is {self.temperature}: expected 0 to 2.')
    if self.max_tokens < 1:
      raise ValueError(f'max_tokens is {self.max_tokens}: expected at least 1.')
    chat.check_extra_body(self.extra_body)


@dataclasses.dataclass(frozen=True)
class Question:
  """One request as it is put to a teacher.

  Attributes:
    fingerprint: see `generated.fingerprint`.
    user: of the request.
    position: of the request.
    mode: REJECTION or TARGETED.
    body: of the chat completion request.
    seen: what an answer may speak of.
  """
  fingerprint: str
  user: int
  position: int
  mode: str
  body: Mapping[str, Any]
  seen: faithfulness.View

  def read(self, reply: chat.Reply) -> tuple[dict | None, str | None]:
    """Fields of a faithful answer, or why it is rejected."""
    answer = generated.parse(reply.content)
    if answer is None:
      # A reply that was cut off is a matter of max_tokens.
      return None, 'cut_off' if reply.finish == 'length' else 'unparseable'
    reason = faithfulness.check(answer, self.seen)
    return (None, reason) if reason else (generated.as_fields(answer), None)

  def line(self, **fields: Any) -> dict[str, Any]:
    """A line of the file of traces."""
    return {'request': self.fingerprint, **fields, 'user': self.user,
            'position': self.position, 'mode': self.mode,
            'model': self.body['model']}


def distinct(
    requests: Iterable[requests_lib.Request],
    items: Sequence[interactions.Item]) -> dict[str, requests_lib.Request]:
  """Requests by their fingerprint; those that are alike count once."""
  by_fingerprint = {}
  for request in requests:
    by_fingerprint.setdefault(generated.fingerprint(request, items), request)
  return by_fingerprint


def write(
    config: QuestionConfig,
    requests: Mapping[str, requests_lib.Request],
    template: prompts.Template,
    items: Sequence[interactions.Item],
    semantic_ids: np.ndarray) -> Iterator[Question]:
  """Puts requests into questions.

  Args:
    config: how.
    requests: training requests, by fingerprint.
    template: says how much of a history the student is shown; the teacher sees
      the same.
    items: the catalogue, I items.
    semantic_ids: int [I, levels].
  """
  for fingerprint, request in requests.items():
    shown = template.prompt(request).shown
    seen = faithfulness.view(request, shown, items, semantic_ids)
    bought = request.history[len(request.history) - shown:]
    yield Question(
        fingerprint=fingerprint, user=request.user, position=request.position,
        mode=config.mode, seen=seen, body={
            'model': config.model,
            'messages': _messages(
                config, seen, [items[i] for i in bought],
                [items[i] for i in request.candidates]),
            'temperature': config.temperature,
            'max_tokens': config.max_tokens,
            **config.extra_body})


def _messages(
    config: QuestionConfig, seen: faithfulness.View,
    history: Sequence[interactions.Item],
    candidates: Sequence[interactions.Item]) -> list[dict[str, str]]:
  system = _SYSTEM.format(
      count=len(candidates), hint=config.hint,
      begin=tokens.SID_BEGIN, end=tokens.SID_END)
  lines = ['Purchases, oldest first:', *map(_line, seen.history, history),
           'Candidates, in the order of the retriever:']
  for number, (sid, item) in enumerate(
      zip(seen.candidates, candidates, strict=True), 1):
    lines.append(f'Candidate {number}: {_line(sid, item)}')
  user = '\n'.join(lines)
  if config.mode == TARGETED:
    user += _TARGET.format(number=seen.target + 1)
  # Lone surrogates, which JSON can spell, have no UTF-8 form.
  return [{'role': role, 'content': text.encode('utf-8', 'replace').decode()}
          for role, text in (('system', system), ('user', user))]


def _line(sid: str, item: interactions.Item) -> str:
  """An item; its texts are quoted, so that they can't pass for more."""
  fields = (('title', item.title), ('categories', ' > '.join(item.categories)),
            ('brand', item.brand))
  return ', '.join([sid, *(
      f'{name}: {json.dumps(text, ensure_ascii=False)}'
      for name, text in fields if text)])
