"""Asks for traces, or anything, until every question is settled.

    question -> answers so far (cache, then endpoint) -> filter
       '-- accepted: a trace
       '-- rejected: asked again, up to `max_attempts` answers; then given up
       '-- refused by the endpoint: given up
       '-- unavailable: not settled; the same command asks again

An answer is in the cache before it is judged. Judging is a function of the
answer, so a run that resumes comes to the same verdicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import asyncio
import collections
import dataclasses
import datetime
import time
from typing import Any, Protocol

from absl import logging

from dgr2_jax.trace_generation import cache as cache_lib
from dgr2_jax.trace_generation import chat

# So many questions without an answer: it is not the questions.
_MOST_FAILURES = 8
_PROGRESS_EVERY = 10.  # seconds


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """How long and how fast to ask.

  Attributes:
    max_attempts: answers to a question before it is given up.
    concurrency: questions under way at a time.
    prompt_price: of a million tokens, in any currency.
    completion_price: of a million tokens.
  """
  max_attempts: int = 8
  concurrency: int = 16
  prompt_price: float = 0.
  completion_price: float = 0.

  def __post_init__(self):
    for field, low in (('max_attempts', 1), ('concurrency', 1),
                       ('prompt_price', 0), ('completion_price', 0)):
      if not getattr(self, field) >= low:
        raise ValueError(
            f'{field} is {getattr(self, field)}: expected at least {low}.')


@dataclasses.dataclass
class Outcome:
  """What became of the questions.

  Attributes:
    accepted: lines of questions with an answer, by fingerprint.
    given_up: of those that get none, and why, by fingerprint.
    unsettled: questions that the endpoint failed to answer, and the last
      reason, by fingerprint; those never begun are not among them.
    rejected: answers by the reason they were rejected for.
    answers: answers judged, from the cache or not.
    prompt_tokens: in them.
    completion_tokens: in them.
    error: why the run ended before its end; None if it did not.
  """
  accepted: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
  given_up: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
  unsettled: dict[str, str] = dataclasses.field(default_factory=dict)
  rejected: collections.Counter = dataclasses.field(
      default_factory=collections.Counter)
  answers: int = 0
  prompt_tokens: int = 0
  completion_tokens: int = 0
  error: str | None = None

  @property
  def settled(self) -> int:
    """How many questions need no more asking."""
    return len(self.accepted) + len(self.given_up)

  def statistics(self, config: SamplingConfig) -> dict[str, Any]:
    """Acceptance and costs, as plain data."""
    return {
        'settled': self.settled,
        'accepted': len(self.accepted),
        'given_up': len(self.given_up),
        'answers': self.answers,
        'answers_per_request': self.answers / max(self.settled, 1),
        'acceptance_rate': len(self.accepted) / max(self.answers, 1),
        'rejected': dict(self.rejected.most_common()),
        'prompt_tokens': self.prompt_tokens,
        'completion_tokens': self.completion_tokens,
        'cost': (self.prompt_tokens * config.prompt_price
                 + self.completion_tokens * config.completion_price) / 1e6}


class Question(Protocol):
  """What a sampler settles.

  Attributes:
    fingerprint: tells questions apart, those with the same body too.
    body: of the chat completion request.
  """
  fingerprint: str
  body: Mapping[str, Any]

  def read(self, reply: chat.Reply) -> tuple[dict | None, str | None]:
    """Fields of an answer that is accepted, or why it is rejected."""

  def line(self, **fields: Any) -> dict[str, Any]:
    """What the outcome keeps of a question, `fields` among it."""


class Sampler:
  """Settles questions, many at a time.

  Attributes:
    outcome: what became of them so far.
  """

  def __init__(
      self,
      config: SamplingConfig,
      client: chat.Client,
      cache: cache_lib.AnswerCache,
      stop: asyncio.Event):
    """Makes a sampler.

    Args:
      config: how long and how fast.
      client: answers.
      cache: keeps the answers.
      stop: once set, no question is begun; set here too, when the endpoint
        turns out to be of no use.
    """
    self.outcome = Outcome()
    self._config = config
    self._client = client
    self._cache = cache
    self._stop = stop
    self._failures = 0  # in a row
    self._first = None  # when the endpoint was first asked, and settled then
    self._shown = time.monotonic()

  async def run(
      self, questions: Iterator[Question], count: int) -> Outcome:
    """Settles questions until all are, or there is reason to stop.

    Args:
      questions: what to ask.
      count: how many they are, for the progress.
    """
    async with asyncio.TaskGroup() as group:
      for _ in range(self._config.concurrency):
        group.create_task(self._work(questions, count))
    return self.outcome

  async def _work(
      self, questions: Iterator[Question], count: int) -> None:
    """One of the workers, which share the questions."""
    for question in questions:
      if self._stop.is_set():
        return
      try:
        await self._settle(question)
      except chat.Refused as e:
        self.outcome.given_up[question.fingerprint] = question.line(
            refused=str(e))
        if not self.outcome.answers and (
            len(self.outcome.given_up) >= _MOST_FAILURES):
          self._end(f'no question was answered; the last: {e}')
      except chat.Unavailable as e:
        self.outcome.unsettled[question.fingerprint] = str(e)
        self._failures += 1
        if self._failures >= _MOST_FAILURES:
          self._end(f'{self._failures} questions in a row got no answer; the '
                    f'last: {e}')
      except (chat.EndpointError, OSError) as e:
        self._end(str(e))
      except chat.Stopped:
        return
      self._show_progress(count)
      await asyncio.sleep(0)  # Questions may all be in the cache.

  async def _settle(self, question: Question) -> None:
    """Looks for an answer that is accepted."""
    key = cache_lib.key_of(question.body, question.fingerprint)
    answers = self._cache.answers(key)
    reasons = collections.Counter()
    for attempt in range(max(len(answers), self._config.max_attempts)):
      reply = (answers[attempt] if attempt < len(answers)
               else await self._ask(key, question))
      self.outcome.answers += 1
      self.outcome.prompt_tokens += reply.prompt_tokens
      self.outcome.completion_tokens += reply.completion_tokens
      answer, reason = question.read(reply)
      if answer is not None:
        self.outcome.accepted[question.fingerprint] = question.line(
            **answer, attempts=attempt + 1)
        return
      reasons[reason] += 1
      self.outcome.rejected[reason] += 1
    self.outcome.given_up[question.fingerprint] = question.line(
        rejected=dict(reasons))

  async def _ask(
      self, key: str, question: Question) -> chat.Reply:
    self._first = self._first or (time.monotonic(), self.outcome.settled)
    reply = await self._client.ask(question.body)
    self._cache.add(key, reply)
    self._failures = 0
    return reply

  def _end(self, error: str) -> None:
    """Ends the run; the first reason counts."""
    self.outcome.error = self.outcome.error or error
    self._stop.set()

  def _show_progress(self, count: int) -> None:
    """Logs now and then how far it is, and how long it will take."""
    now = time.monotonic()
    if now < self._shown + _PROGRESS_EVERY or self._first is None:
      return
    self._shown = now
    begun, settled_then = self._first
    settled = self.outcome.settled
    pace = (now - begun) / max(settled - settled_then, 1)
    statistics = self.outcome.statistics(self._config)
    logging.info(
        '%d of %d settled, %d accepted, %.2f answers a request, %d tokens, '
        'cost %.2f; %s left.', settled, count, len(self.outcome.accepted),
        statistics['answers_per_request'],
        self.outcome.prompt_tokens + self.outcome.completion_tokens,
        statistics['cost'],
        datetime.timedelta(seconds=round(pace * (count - settled))))
