"""The client against an endpoint with faults."""

import asyncio
import datetime
import email.utils
import functools
import selectors
import time

import numpy as np
import pytest

from dgr2_jax.trace_generation import chat
from tests.trace_generation import endpoint as endpoint_lib

BODY = {'model': 'm', 'messages': [], 'max_tokens': 8}
GOOD = endpoint_lib.completion('fine')
FAULTS = {
    'server error': endpoint_lib.Reply(500),
    'overloaded': endpoint_lib.Reply(503, headers=(('Retry-After', '0.01'),)),
    'rate limit': endpoint_lib.Reply(429, headers=(('Retry-After', '0'),)),
    'nonsense limit': endpoint_lib.Reply(
        429, headers=(('Retry-After', 'soon'),)),
    'dropped': endpoint_lib.Reply(cut='dropped'),
    'truncated': endpoint_lib.Reply(body=GOOD.body, cut='truncated'),
    'garbage': endpoint_lib.Reply(body=b'\xff<html>'),
    'deep': endpoint_lib.Reply(body=b'[' * 100_000),
    'no choices': endpoint_lib.Reply(body=b'{"choices": []}'),
    'strange choice': endpoint_lib.Reply(body=b'{"choices": ["x"]}'),
    'strange content': endpoint_lib.Reply(
        body=b'{"choices": [{"message": {"content": 3}}]}'),
    'null': endpoint_lib.Reply(body=b'null'),
    'null choices': endpoint_lib.Reply(body=b'{"choices": null}'),
    'null choice': endpoint_lib.Reply(body=b'{"choices": [null]}'),
    'null message': endpoint_lib.Reply(
        body=b'{"choices": [{"message": null}]}'),
    'huge usage': endpoint_lib.Reply(
        body=b'{"choices": [{"message": {"content": "a"}}], "usage": '
             b'{"prompt_tokens": 1' + b'0' * 400 + b'}}'),
    'strange usage': endpoint_lib.Reply(
        body=b'{"choices": [{"message": {"content": "a"}}], "usage": '
             b'{"prompt_tokens": "many"}}'),
}


def ask(url, times=1, key=None, stops=None, **config):
  """Asks `times` questions at a time; gives the client and the results."""
  async def run():
    stop = asyncio.Event()
    if stops is not None:
      stops.append(functools.partial(
          asyncio.get_running_loop().call_soon_threadsafe, stop.set))
    defaults = {'backoff': .001, 'retries': 3, 'timeout': 30.}
    client = chat.Client(
        chat.EndpointConfig(base_url=url, **{**defaults, **config}), key, stop)
    async with client:
      return client, await asyncio.gather(
          *(client.ask({**BODY, 'n': i}) for i in range(times)),
          return_exceptions=True)
  return asyncio.run(run())


@pytest.mark.parametrize('fault', FAULTS.values(), ids=FAULTS)
def test_transient_faults_are_tried_again(fault):
  with endpoint_lib.serve(
      lambda body, before: fault if before < 2 else GOOD) as endpoint:
    client, (reply,) = ask(endpoint.url)
  assert reply == chat.Reply('fine', 'stop', 100, 20)
  assert client.tries == 3 and client.failures.total() == 2


def test_slow_replies_are_given_up_and_tried_again():
  def respond(body, before):
    if not before:
      time.sleep(1)
    return GOOD

  with endpoint_lib.serve(respond) as endpoint:
    client, (reply,) = ask(endpoint.url, timeout=.3, retries=20)
  assert reply.content == 'fine'
  assert client.failures['no reply in 0.3 seconds'] >= 1


def test_tries_are_bounded():
  with endpoint_lib.serve(
      lambda body, before: endpoint_lib.Reply(500)) as endpoint:
    client, (error,) = ask(endpoint.url)
  assert isinstance(error, chat.Unavailable)
  assert str(error) == 'HTTP 500, after 4 tries'
  assert client.tries == 4


def test_absent_fields_of_a_reply_are_empty():
  bare = endpoint_lib.Reply(
      body=b'{"choices": [{"message": {"content": null}}]}')
  with endpoint_lib.serve(lambda body, before: bare) as endpoint:
    _, (reply,) = ask(endpoint.url)
  assert reply == chat.Reply('', '', 0, 0)


@pytest.mark.parametrize('status, error', [
    (400, chat.Refused), (422, chat.Refused), (401, chat.EndpointError),
    (404, chat.EndpointError), (307, chat.EndpointError)])
def test_permanent_errors_are_not_tried_again(status, error):
  reply = endpoint_lib.Reply(status, b'bad key: sekret-1\n' * 99)
  with endpoint_lib.serve(lambda body, before: reply) as endpoint:
    client, (raised,) = ask(endpoint.url, key='sekret-1')
    assert endpoint.keys == {'Bearer sekret-1'}
  assert type(raised) is error and client.tries == 1
  assert f'HTTP {status}' in str(raised) and 'bad key: ***' in str(raised)
  assert 'sekret' not in str(raised) and len(str(raised)) < 400


def test_retry_after_holds_all_back():
  """Told to wait by one reply, the client sends none of the questions."""
  limit = endpoint_lib.Reply(429, headers=(('Retry-After', '0.5'),))
  with endpoint_lib.serve(
      lambda body, before: GOOD if before else limit) as endpoint:
    _, replies = ask(endpoint.url, times=4)
  assert all(reply.content == 'fine' for reply in replies)
  arrivals = sorted(endpoint.arrivals)
  assert len(arrivals) == 8 and arrivals[4] - arrivals[0] >= .5


class Clock(selectors.DefaultSelector):
  """An event loop's selector that does not wait, but moves the time on."""

  def __init__(self):
    super().__init__()
    self.now = 0.

  def select(self, timeout=None):
    self.now += timeout or 0.
    return super().select(0)


class Instant(chat.Client):
  """A client whose tries take no time; `replies[i]` is the i-th's fault."""

  def __init__(self, clock, faults, stop, **config):
    super().__init__(
        chat.EndpointConfig('http://localhost/v1', **config), None, stop, clock)
    self.arrivals = []
    self._faults = faults

  async def _post(self, body):
    self.arrivals.append(self._clock())
    fault = self._faults.get(len(self.arrivals) - 1)
    if fault is not None:
      raise chat._Transient('HTTP 429', fault)
    return chat.Reply('fine', 'stop', 0, 0)


@pytest.mark.parametrize('limits, gap', [
    ({'requests_per_minute': 60}, 1),
    ({'tokens_per_minute': 7350}, .1)])  # of 17 / 4 + 8 tokens each
@pytest.mark.parametrize('faults', [
    {0: 20.},  # shorter than what waits
    {0: 90.}, {2: 30., 25: 7.}, {i: 11. for i in range(5)}])
def test_the_pace_is_kept_after_a_hold(limits, gap, faults):
  """By a clock that only waiting moves."""
  clock = Clock()

  def make_loop():
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now
    return loop

  async def run():
    client = Instant(lambda: clock.now, faults, asyncio.Event(), **limits)
    replies = await asyncio.gather(*(
        client.ask({'max_tokens': 8}) for _ in range(40)))
    assert all(reply.content == 'fine' for reply in replies)
    return client

  with asyncio.Runner(loop_factory=make_loop) as runner:
    client = runner.run(run())
  arrivals = np.array(client.arrivals)
  assert len(arrivals) == 40 + len(faults)
  assert np.diff(arrivals).min() >= gap * .99
  for number, seconds in faults.items():  # nothing comes in a hold
    assert arrivals[number + 1] >= arrivals[number] + seconds - 1e-6
  # Nor is much time lost: holds, a tenth of them, and the backoff of one.
  assert arrivals[-1] <= sum(faults.values()) * 1.1 + gap * 90 + 5


def test_retry_after_beyond_patience():
  date = email.utils.format_datetime(
      datetime.datetime.now(datetime.timezone.utc)
      + datetime.timedelta(hours=1))
  for value in (date, '3600', 'inf'):
    limit = endpoint_lib.Reply(429, headers=(('Retry-After', value),))
    with endpoint_lib.serve(lambda body, before: limit) as endpoint:
      _, (error,) = ask(endpoint.url, longest_wait=5)
    assert isinstance(error, chat.EndpointError), value
    assert 'longest_wait=5' in str(error)


def test_stop_ends_waiting_but_not_replies():
  """Stopped, a question under way is answered; one that waits is not asked."""
  stops = []

  def respond(body, before):
    stops[0]()
    time.sleep(.2)
    return GOOD

  with endpoint_lib.serve(respond) as endpoint:
    client, results = ask(
        endpoint.url, times=2, stops=stops, requests_per_minute=1)
  assert results[0].content == 'fine'
  assert isinstance(results[1], chat.Stopped)
  assert client.tries == 1


def test_request_rate_is_kept():
  """n requests at 1,200 a minute take (n - 1) / 20 seconds at least."""
  start = time.monotonic()
  with endpoint_lib.serve(lambda body, before: GOOD) as endpoint:
    ask(endpoint.url, times=11, requests_per_minute=1200)
  assert len(endpoint.arrivals) == 11
  assert max(endpoint.arrivals) - start >= .5


def test_token_rate_is_kept():
  """Each question may use up 60 tokens of 6,000 a minute, .6 seconds."""
  start = time.monotonic()
  with endpoint_lib.serve(lambda body, before: GOOD) as endpoint:
    ask(endpoint.url, times=2, tokens_per_minute=6000)
  used = len('{"model": "m", "messages": [], "max_tokens": 8, "n": 0}') / 4 + 8
  assert max(endpoint.arrivals) - start >= used / 100


def test_pace():
  now = 0.
  pace = chat.Pace(60, clock=lambda: now)
  assert [pace.reserve(1) for _ in range(3)] == [0, 1, 2]
  pace.correct(10)
  assert pace.reserve(1) == 13
  now = 100.
  assert pace.reserve(5) == 0 and pace.reserve(1) == 5
  free = chat.Pace(0, clock=lambda: now)
  assert [free.reserve(1e9) for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize('field, value', [
    ('base_url', 'localhost:8000'), ('base_url', ''),
    ('base_url', 'http://h/\t'), ('base_url', 'http://[v1.x]/'),
    ('base_url', 'http://h/v1#x'),
    ('base_url', 'http://h:x/v1'), ('base_url', 'http://[x/v1'),
    ('timeout', 0.), ('retries', -1), ('backoff', float('nan')),
    ('requests_per_minute', -1.), ('tokens_per_minute', float('inf'))])
def test_bad_configuration(field, value):
  with pytest.raises(ValueError, match=f'^{field} is .*expected'):
    chat.EndpointConfig(**{'base_url': 'http://localhost/v1', field: value})


def test_secrets_are_not_shown():
  with pytest.raises(ValueError) as e:
    chat.EndpointConfig('http://me:sekret@localhost/v1')
  assert 'sekret' not in str(e.value)
  with pytest.raises(ValueError) as e:
    ask('http://localhost/v1', key='sekret\u20ac')
  assert 'sekret' not in str(e.value)
