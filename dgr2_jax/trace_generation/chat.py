"""A client for chat completion endpoints that speak OpenAI's protocol.

vLLM, SGLang and hosted models do. What can go wrong is sorted by who can help:

    Refused        this question will not be answered: HTTP 400, 413, 422
    Unavailable    not now, however often it was tried: HTTP 429, 5xx, dropped
                   connections, timeouts, replies that are no chat completion
    EndpointError  no question will be answered: HTTP 401, 403, 404 and others,
                   or a Retry-After beyond all patience
    Stopped        the user wants to stop

Between tries the client backs off exponentially, with jitter. A Retry-After
holds back all questions, not only the one that was told; after it they come at
the pace of the limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import asyncio
import collections
import dataclasses
import datetime
import email.utils
import itertools
import json
import math
import random
import signal
import time
from typing import Any, NamedTuple
import urllib.parse

from absl import logging
import httpx2

_REFUSED = (400, 413, 422)
_TRANSIENT = (408, 409, 425, 429)  # and all from 500 on
# What a question says itself, or its reply's reader relies on.
OWN_FIELDS = frozenset(('messages', 'model', 'n', 'stream', 'temperature'))
# Characters of a token, about: for a guess that a reply's usage corrects.
_CHARACTERS = 4
_SHOWN = 200  # characters of an error's body


class Refused(Exception):
  """The endpoint does not answer this question."""


class Unavailable(Exception):
  """The endpoint has not answered after all tries."""


class EndpointError(Exception):
  """The endpoint cannot be used as it is asked; the message says why."""


class Stopped(Exception):
  """The user wants to stop."""


class _Transient(Exception):
  """One try failed; another may not.

  Attributes:
    retry_after: seconds that the server asks to wait.
  """

  def __init__(self, message: str, retry_after: float = 0.):
    super().__init__(message)
    self.retry_after = retry_after


class Reply(NamedTuple):
  """What a model said, how it ended, and tokens in and out."""
  content: str
  finish: str
  prompt_tokens: int
  completion_tokens: int


@dataclasses.dataclass(frozen=True)
class EndpointConfig:
  """How to ask an endpoint.

  Attributes:
    base_url: without `/chat/completions`, such as http://localhost:8000/v1.
    timeout: seconds for a whole reply.
    retries: further tries after the first.
    backoff: seconds before the first retry, doubled for each further one.
    longest_wait: seconds; a backoff grows no further, and a Retry-After beyond
      it ends the run.
    requests_per_minute: over all tries; 0 is no limit.
    tokens_per_minute: in and out; 0 is no limit.
  """
  base_url: str
  timeout: float = 120.
  retries: int = 8
  backoff: float = 1.
  longest_wait: float = 120.
  requests_per_minute: float = 0.
  tokens_per_minute: float = 0.

  def __post_init__(self):
    try:
      httpx2.URL(self.base_url)
      url = urllib.parse.urlsplit(self.base_url)
      good = (url.scheme in ('http', 'https') and url.hostname
              and url.port != 0 and not url.fragment)
    except (ValueError, httpx2.InvalidURL):
      good = False
    if not good:
      raise ValueError(f'base_url is {self.base_url!r}: expected something '
                       'like http://localhost:8000/v1.')
    if url.username or url.password or url.query:
      # Not shown: it may be a secret.
      raise ValueError('base_url holds a user name, a password or a query: '
                       'expected the key in the environment.')
    for field, low in (
        ('timeout', 1e-3), ('retries', 0), ('backoff', 0), ('longest_wait', 0),
        ('requests_per_minute', 0), ('tokens_per_minute', 0)):
      value = getattr(self, field)
      if not (math.isfinite(value) and value >= low):
        raise ValueError(f'{field} is {value}: expected at least {low}.')


def extra_body(text: str) -> dict[str, Any]:
  """Further fields of a request body, from JSON; see `check_extra_body`."""
  try:
    fields = json.loads(text)
  except (ValueError, RecursionError) as e:
    raise ValueError(f'extra_body is not JSON: {e}.') from e
  check_extra_body(fields)
  return fields


def check_extra_body(fields: Any) -> None:
  """Raises ValueError for fields that cannot be sent or are set otherwise."""
  if not isinstance(fields, Mapping):
    raise ValueError(f'extra_body is {fields!r}: expected a JSON object.')
  if taken := sorted(OWN_FIELDS.intersection(fields)):
    raise ValueError(
        f'extra_body is {fields!r}: expected none of {sorted(OWN_FIELDS)}, '
        f'which are set by other means, got {taken}.')
  try:
    json.dumps(dict(fields), ensure_ascii=False, allow_nan=False).encode()
  except ValueError as e:
    raise ValueError(f'extra_body is {fields!r}, which cannot be sent: {e}.'
                     ) from e


class Pace:
  """Spaces out what is used, so that a rate is kept without bursts."""

  def __init__(self, per_minute: float,
               clock: Callable[[], float] = time.monotonic):
    """Makes a pace; a rate of 0 is no limit."""
    self._seconds = 60 / per_minute if per_minute else 0.
    self._clock = clock
    self._free = -math.inf  # when the next may go

  def reserve(self, amount: float) -> float:
    """Takes the next place in the queue; returns seconds until it comes."""
    now = self._clock()
    start = max(now, self._free)
    self._free = start + amount * self._seconds
    return start - now

  def correct(self, amount: float) -> None:
    """Used so much more (or less) than was reserved."""
    self._free += amount * self._seconds


class Client:
  """Asks an endpoint, many questions at a time.

  Attributes:
    tries: HTTP requests that were sent.
    failures: tries that failed, by their reason.
  """

  def __init__(self, config: EndpointConfig, api_key: str | None,
               stop: asyncio.Event,
               clock: Callable[[], float] = time.monotonic):
    """Makes a client; used as an asynchronous context manager.

    Args:
      config: how to ask.
      api_key: sent as a bearer token; never part of a message.
      stop: once set, nothing more is sent; replies under way still arrive.
      clock: seconds.

    Raises:
      ValueError: the key can't be sent.
    """
    self.tries = 0
    self.failures = collections.Counter()
    self._config = config
    self._key = (api_key or '').strip()
    if not (self._key.isascii() and (self._key + 'x').isprintable()):
      raise ValueError('the API key has characters that no header can hold.')
    self._stop = stop
    self._random = random.Random()
    self._clock = clock
    self._requests = Pace(config.requests_per_minute, clock)
    self._tokens = Pace(config.tokens_per_minute, clock)
    self._not_before = -math.inf  # by a server's Retry-After

  async def __aenter__(self) -> Client:
    self._http = httpx2.AsyncClient(
        headers={'Authorization': f'Bearer {self._key}'} if self._key else {},
        # Who may ask at a time is the caller's business.
        limits=httpx2.Limits(max_connections=None), timeout=None)
    return self

  async def __aexit__(self, *unused_args) -> None:
    await self._http.aclose()

  async def ask(self, body: Mapping[str, Any]) -> Reply:
    """Asks until there is a reply.

    Args:
      body: of the chat completion request; `max_tokens` among it.

    Raises:
      Refused: see the module.
      Unavailable: see the module.
      EndpointError: see the module.
      Stopped: see the module.
    """
    guess = len(json.dumps(body)) / _CHARACTERS + (body.get('max_tokens') or 0)
    for failed in itertools.count():
      await self._turn(guess)
      self.tries += 1
      try:
        reply = await self._post(body)
      except _Transient as e:
        self.failures[str(e)] += 1
        if failed == self._config.retries:
          raise Unavailable(f'{e}, after {failed + 1} tries') from e
        self._hold(e.retry_after)
        await self._sleep(
            min(self._config.longest_wait, self._config.backoff * 2 ** failed)
            * self._random.uniform(.5, 1))
      else:
        used = reply.prompt_tokens + reply.completion_tokens
        self._tokens.correct(used - guess if used else 0)
        return reply

  async def _turn(self, tokens: float) -> None:
    """Waits until another request may be sent."""
    while True:
      while (wait := self._not_before - self._clock()) > 0:
        # Without limits, too, all that wait should not come at once.
        await self._sleep(wait * self._random.uniform(1, 1.1))
      await self._sleep(max(
          self._requests.reserve(1), self._tokens.reserve(tokens)))
      # A place in the queue that came during a hold is lost, and another one
      # is taken when it ends; places behind its end stay as they are.
      if self._clock() >= self._not_before:
        return

  async def _sleep(self, seconds: float) -> None:
    """Waits, unless the user wants to stop."""
    if seconds > 0 and not self._stop.is_set():
      try:
        await asyncio.wait_for(self._stop.wait(), seconds)
      except TimeoutError:
        return
    if self._stop.is_set():
      raise Stopped()

  def _hold(self, retry_after: float) -> None:
    """Sends nothing for so many seconds."""
    if retry_after > self._config.longest_wait:
      raise EndpointError(
          f'the endpoint asks to wait {retry_after:.0f} seconds (Retry-After), '
          f'more than longest_wait={self._config.longest_wait:g}.')
    self._not_before = max(self._not_before, self._clock() + retry_after)

  async def _post(self, body: Mapping[str, Any]) -> Reply:
    url = self._config.base_url.rstrip('/') + '/chat/completions'
    try:
      async with asyncio.timeout(self._config.timeout):
        response = await self._http.post(url, json=body)
    except TimeoutError as e:
      raise _Transient(f'no reply in {self._config.timeout:g} seconds') from e
    except httpx2.RequestError as e:
      raise _Transient(f'{type(e).__name__} at {url}') from e
    status = response.status_code
    if status == 200:
      return _read(response)
    if status in _TRANSIENT or status >= 500:
      raise _Transient(
          f'HTTP {status}', _seconds(response.headers.get('Retry-After')))
    message = f'HTTP {status} of {url}: {self._excerpt(response.text)}'
    raise (Refused if status in _REFUSED else EndpointError)(message)

  def _excerpt(self, text: str) -> str:
    """The beginning of an error's body; some servers repeat the key in it."""
    text = text.replace(self._key, '***') if self._key else text
    return ' '.join(text.split())[:_SHOWN]


def stop_at_signals(stop: asyncio.Event) -> list[signal.Signals]:
  """Has SIGINT and SIGTERM set `stop`, and a second one cancel this task.

  Returns:
    The signals that came, in order; grows.
  """
  task, signals = asyncio.current_task(), []

  def handle(number: signal.Signals) -> None:
    signals.append(number)
    if len(signals) > 1:
      task.cancel()
    else:
      logging.warning('%s: waiting for the answers under way; once more drops '
                      'them.', number.name)
      stop.set()

  for number in (signal.SIGINT, signal.SIGTERM):
    asyncio.get_running_loop().add_signal_handler(number, handle, number)
  return signals


def _read(response: httpx2.Response) -> Reply:
  """A chat completion."""
  try:
    data = response.json()
    choice, usage = data['choices'][0], data.get('usage') or {}
    content = choice['message'].get('content') or ''
    finish = choice.get('finish_reason') or ''
    spent = [int(float(usage.get(name) or 0))  # not too large
             for name in ('prompt_tokens', 'completion_tokens')]
    if not isinstance(content, str) or not isinstance(finish, str):
      raise TypeError('content and finish_reason must be text')
  except (ValueError, TypeError, LookupError, AttributeError, OverflowError,
          RecursionError) as e:
    raise _Transient('a reply that is no chat completion: '
                     f'{response.text[:_SHOWN]!r}') from e
  return Reply(content, finish, *spent)


def _seconds(retry_after: str | None) -> float:
  """A Retry-After header, in seconds or as a date; 0 if it is neither."""
  try:
    seconds = float(retry_after or 0)
  except ValueError:
    try:
      date = email.utils.parsedate_to_datetime(retry_after)
      seconds = date.timestamp() - datetime.datetime.now().timestamp()
    except (ValueError, OverflowError):
      return 0.
  return max(seconds, 0.) if not math.isnan(seconds) else 0.
