"""Both ways of sampling against an endpoint with faults."""

import asyncio
import dataclasses
import json
import threading
import time

import pytest

from dgr2_jax.data import generated
from dgr2_jax.data import prompts
from dgr2_jax.trace_generation import cache as cache_lib
from dgr2_jax.trace_generation import chat
from dgr2_jax.trace_generation import questions as questions_lib
from dgr2_jax.trace_generation import sampling
from tests.data import fabricated
from tests.trace_generation import endpoint as endpoint_lib

ITEMS, SIDS = fabricated.items(), fabricated.semantic_ids()
COUNT = 24


@pytest.fixture(scope='module')
def template():
  return fabricated.template(prompts.COMPACT)


def ask(template, mode='rejection', count=COUNT):
  """Questions, by the key of their body."""
  requests = [fabricated.request(seed, history=3) for seed in range(count)]
  how = questions_lib.QuestionConfig('m', mode, extra_body={'top_p': .9})
  return {endpoint_lib.key_of(q.body): q for q in questions_lib.write(
      how, questions_lib.distinct(requests, ITEMS), template, ITEMS, SIDS)}


def sample(questions, url, path, endpoint=None, **config):
  """Settles questions; gives the outcome and how often it asked."""
  async def run():
    stop = asyncio.Event()
    how = chat.EndpointConfig(base_url=url, **{
        'backoff': .001, 'retries': 9, **(endpoint or {})})
    with cache_lib.AnswerCache(path) as cache:
      async with chat.Client(how, None, stop) as client:
        sampler = sampling.Sampler(
            sampling.SamplingConfig(**config), client, cache, stop)
        return (await sampler.run(iter(questions.values()), len(questions)),
                client.tries)
  return asyncio.run(run())


def teacher(questions, wrong=lambda index, before: False):
  """Answers truthfully, or with another candidate first where `wrong`."""
  index = {key: i for i, key in enumerate(questions)}

  def respond(body, before):
    key = endpoint_lib.key_of(body)
    first = questions[key].seen.target
    if wrong(index[key], before):
      first = (first + 1) % 10
    return endpoint_lib.completion(endpoint_lib.faithful(body, first + 1))
  return respond


@pytest.mark.parametrize('mode', ['rejection', 'targeted'])
def test_completes_despite_faults(template, tmp_path, mode):
  questions = ask(template, mode)
  index = {key: i for i, key in enumerate(questions)}
  good = teacher(questions)
  faults = [
      endpoint_lib.Reply(500), endpoint_lib.Reply(cut='dropped'),
      endpoint_lib.Reply(429, headers=(('Retry-After', '0.01'),)),
      endpoint_lib.Reply(body=b'\x00garbage'),
      endpoint_lib.Reply(body=b'{"choices": [1, 2', cut='truncated')]
  failed = set()
  guard = threading.Lock()

  def respond(body, before):
    i = index[endpoint_lib.key_of(body)]
    if i == 0:
      return endpoint_lib.Reply(400, b'too long')
    if i == 1:  # never right
      return endpoint_lib.completion('I would rather not.')
    if i == 2 and before < 2:  # right at the third time
      return teacher(questions, lambda *unused: True)(body, before)
    if i == 3 and before < 1:
      return endpoint_lib.completion('{"explanation": "Pat', 'length')
    with guard:  # then one fault a question
      first = i not in failed
      failed.add(i)
    if i == 4:
      time.sleep(.3)
    return faults[i % len(faults)] if first else good(body, before)

  with endpoint_lib.serve(respond) as endpoint:
    outcome, tries = sample(questions, endpoint.url, tmp_path / 'a',
                            max_attempts=4)
    # All that was answered is on disk: nothing is asked again.
    again, tries_again = sample(questions, endpoint.url, tmp_path / 'a',
                                max_attempts=4)
  assert outcome.error is None and not outcome.unsettled
  assert outcome.settled == COUNT and len(outcome.accepted) == COUNT - 2
  refused, unparseable = (
      outcome.given_up[list(questions.values())[i].fingerprint]
      for i in (0, 1))
  assert 'HTTP 400' in refused['refused'] and 'too long' in refused['refused']
  assert unparseable['rejected'] == {'unparseable': 4}
  assert outcome.rejected == {
      'unparseable': 4, 'target_not_first': 2, 'cut_off': 1}
  assert outcome.answers == COUNT - 2 + 7
  statistics = outcome.statistics(
      sampling.SamplingConfig(prompt_price=1, completion_price=10))
  assert statistics['acceptance_rate'] == (COUNT - 2) / (COUNT + 5)
  assert statistics['cost'] == pytest.approx(
      outcome.answers * (100 * 1 + 20 * 10) / 1e6)
  assert tries >= outcome.answers + COUNT - 2 and tries_again == 1  # the 400
  assert again.accepted == outcome.accepted
  for question in questions.values():
    line = outcome.accepted.get(question.fingerprint)
    if line:
      assert line['recommendations'][0] == str(question.seen.target + 1)
      assert line['mode'] == mode and line['model'] == 'm'
      assert line['attempts'] == {2: 3, 3: 2}.get(index[
          endpoint_lib.key_of(question.body)], 1)
      assert generated.parse(json.dumps(line)) is not None


def test_more_attempts_go_on_from_the_stored_ones(template, tmp_path):
  questions = ask(template, count=3)
  respond = teacher(questions, lambda index, before: before < 3)
  with endpoint_lib.serve(respond) as endpoint:
    few, tries = sample(questions, endpoint.url, tmp_path / 'a', max_attempts=2)
    more, further = sample(
        questions, endpoint.url, tmp_path / 'a', max_attempts=9)
    fewer, none = sample(
        questions, endpoint.url, tmp_path / 'a', max_attempts=1)
  assert len(few.given_up) == 3 and (tries, further, none) == (6, 6, 0)
  assert all(line['attempts'] == 4 for line in more.accepted.values())
  assert fewer.accepted == more.accepted  # what was paid for is used


def test_one_prompt_with_two_targets(template, tmp_path):
  """Each has answers of its own: none is shared, asked twice or lost."""
  request = fabricated.request(0, history=3)
  requests = [dataclasses.replace(request, target=int(target))
              for target in request.candidates[[2, 5, 7]]]
  how = questions_lib.QuestionConfig('m', 'rejection')
  questions = list(questions_lib.write(
      how, questions_lib.distinct(requests, ITEMS), template, ITEMS, SIDS))
  assert len({endpoint_lib.key_of(q.body) for q in questions}) == 1
  keys = {cache_lib.key_of(q.body, q.fingerprint) for q in questions}
  assert len(keys) == len(questions) == 3

  def respond(body, before):
    time.sleep(.02)  # Two are under way.
    return endpoint_lib.completion(
        endpoint_lib.faithful(body, (3, 1, 6, 8, 4, 2)[before]),
        usage=(100, 20 + before))

  with endpoint_lib.serve(respond) as endpoint:
    first, tries = sample(dict(enumerate(questions)), endpoint.url,
                          tmp_path / 'a', max_attempts=2, concurrency=2)
    again, none = sample(dict(enumerate(questions)), endpoint.url,
                         tmp_path / 'a', max_attempts=2, concurrency=2)
  assert first.settled == 3 and none == 0
  assert (again.accepted, again.given_up) == (first.accepted, first.given_up)
  assert again.rejected == first.rejected
  assert tries == first.answers == again.answers == endpoint.asked.total()
  assert first.completion_tokens == again.completion_tokens == sum(
      20 + before for before in range(tries))
  with cache_lib.AnswerCache(tmp_path / 'a') as cache:
    assert sum(len(cache.answers(key)) for key in keys) == tries


def test_concurrency_is_kept(template, tmp_path):
  questions = ask(template)
  full = threading.Barrier(4)

  def respond(body, before):
    full.wait(30)  # Four are under way at a time, or this breaks;
    return teacher(questions)(body, before)

  with endpoint_lib.serve(respond) as endpoint:
    outcome, _ = sample(questions, endpoint.url, tmp_path / 'a', concurrency=4)
  assert len(outcome.accepted) == COUNT
  assert endpoint.most_at_once == 4  # and no more than four.


def test_target_is_hidden_or_shown(template):
  for mode in 'rejection', 'targeted':
    asked = list(ask(template, mode).values())
    for question in asked:
      system, user = (m['content'] for m in question.body['messages'])
      number = question.seen.target + 1
      assert (f'went on to buy candidate {number}.' in user) == (
          mode == 'targeted')
      assert 'went on' not in system
      for i, sid in enumerate(question.seen.candidates, 1):
        assert f'\nCandidate {i}: {sid}' in user
      assert all(user.count(sid) == 1 for sid in question.seen.history)
      assert user.count('\nCandidate ') == 10  # Titles forge none.
      assert question.body['top_p'] == .9
      json.dumps(question.body, ensure_ascii=False).encode()


def test_alike_requests_are_asked_once():
  requests = [fabricated.request(seed % 3) for seed in range(9)]
  assert len(questions_lib.distinct(requests, ITEMS)) == 3


@pytest.mark.parametrize('reply, reason', [
    (endpoint_lib.Reply(500), '8 questions in a row got no answer'),
    (endpoint_lib.Reply(400), 'no question was answered; the last: HTTP 400'),
    (endpoint_lib.Reply(403), 'HTTP 403')])
def test_a_useless_endpoint_ends_the_run(template, tmp_path, reply, reason):
  questions = ask(template)
  with endpoint_lib.serve(lambda body, before: reply) as endpoint:
    outcome, tries = sample(questions, endpoint.url, tmp_path / 'a',
                            endpoint={'retries': 1}, concurrency=2)
  assert outcome.error.startswith(reason)
  assert tries <= 20 and not outcome.accepted
  # An endpoint that works at times is asked to the end.
  index = {key: i for i, key in enumerate(questions)}

  def respond(body, before):
    lame = index[endpoint_lib.key_of(body)] % 4 == 1
    return reply if lame else teacher(questions)(body, before)

  with endpoint_lib.serve(respond) as endpoint:
    outcome, _ = sample(questions, endpoint.url, tmp_path / 'a',
                        endpoint={'retries': 1}, concurrency=2)
  if reply.status == 403:
    assert outcome.error
  else:
    assert outcome.error is None and len(outcome.accepted) == COUNT * 3 / 4
    assert len(outcome.unsettled) + len(outcome.given_up) == COUNT / 4


@pytest.mark.parametrize('cls, fields, field', [
    (sampling.SamplingConfig, {'max_attempts': 0}, 'max_attempts'),
    (sampling.SamplingConfig, {'concurrency': 0}, 'concurrency'),
    (sampling.SamplingConfig, {'prompt_price': float('nan')}, 'prompt_price'),
    (questions_lib.QuestionConfig, {'model': ''}, 'model'),
    (questions_lib.QuestionConfig, {'mode': 'x'}, 'mode'),
    (questions_lib.QuestionConfig, {'temperature': -1}, 'temperature'),
    (questions_lib.QuestionConfig, {'max_tokens': 0}, 'max_tokens'),
    (questions_lib.QuestionConfig, {'extra_body': [1]}, 'extra_body'),
    *((questions_lib.QuestionConfig, {'extra_body': {name: 1}}, 'extra_body')
      for name in ('messages', 'model', 'n', 'stream', 'temperature'))])
def test_bad_configuration(cls, fields, field):
  base = ({'model': 'm', 'mode': 'rejection'}
          if cls is questions_lib.QuestionConfig else {})
  with pytest.raises(ValueError, match=f'^{field} is '):
    cls(**{**base, **fields})
