"""From a working directory to a file of traces.

    workdir -> training requests -> questions -> sampling -> OUTPUT
                                                    |        OUTPUT.report.json
                                                    '- OUTPUT.answers.jsonl
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import asyncio
import collections
import json
import pathlib

from absl import logging

from dgr2_jax.data import prepare
from dgr2_jax.trace_generation import cache as cache_lib
from dgr2_jax.trace_generation import chat
from dgr2_jax.trace_generation import questions
from dgr2_jax.trace_generation import sampling
from dgr2_jax.training import workdir as workdir_lib


class NotComplete(Exception):
  """Requests are left; the message says why, `code` is the exit code."""

  def __init__(self, message: str, code: int = 1):
    super().__init__(f'{message.removesuffix(".")}. The same command goes on.')
    self.code = code


def generate(
    workdir: pathlib.Path,
    output: pathlib.Path,
    endpoint: chat.EndpointConfig,
    how: questions.QuestionConfig,
    config: sampling.SamplingConfig,
    api_key: str | None = None,
    max_requests: int = 0) -> None:
  """Settles the training requests of a working directory; writes the files.

  Args:
    workdir: its prepare stage is complete.
    output: the file of traces; the others are named after it.
    endpoint: whom to ask.
    how: the questions are put.
    config: how long and how fast to ask.
    api_key: of the endpoint, if it wants one.
    max_requests: only the first so many; 0 is all.

  Raises:
    NotComplete: requests are left; what was answered is kept.
    ValueError: a setting or the cache is bad.
    workdir.WorkdirError: it is no working directory.
    cache.CacheError: another run works on the same output.
    OSError: a file can't be written.
  """
  check(output, how.temperature, config)
  data = prepare.load(workdir_lib.read_config(workdir), workdir / 'data')
  requests = questions.distinct(
      data.requests('train')[:max_requests or None], data.items)
  asked = questions.write(
      how, requests, data.template, data.items, data.semantic_ids)
  with cache_lib.AnswerCache(f'{output}.answers.jsonl') as cache:
    outcome = asyncio.run(settle(
        config, lambda stop: chat.Client(endpoint, api_key, stop), cache,
        asked, len(requests)))
  write(output, outcome, config)


def check(output: pathlib.Path, temperature: float,
           config: sampling.SamplingConfig) -> None:
  """Raises ValueError for settings that can't work."""
  if config.max_attempts > 1 and not temperature:
    raise ValueError(
        f'temperature is 0 and max_attempts {config.max_attempts}: the same '
        'answer would come again; expected a temperature above 0 or '
        'max_attempts=1.')
  if output.is_dir():
    raise ValueError(
        f'output is {output}: a directory; expected the name of a file.')
  if not output.parent.is_dir():
    raise ValueError(
        f'output is {output}: {output.parent} is no directory.')


async def settle(
    config: sampling.SamplingConfig,
    client: Callable[[asyncio.Event], chat.Client],
    cache: cache_lib.AnswerCache,
    asked: Iterator[sampling.Question],
    count: int) -> sampling.Outcome:
  """Settles questions, or stops cleanly at SIGINT and SIGTERM.

  Args:
    config: how long and how fast to ask.
    client: makes who answers, such as a `chat.Client`, given what is set when
      it is to stop.
    cache: keeps the answers.
    asked: the questions.
    count: how many they are.

  Raises:
    NotComplete: some are left; what was answered is in the cache.
  """
  stop = asyncio.Event()
  signals = chat.stop_at_signals(stop)
  async with client(stop) as answers:
    sampler = sampling.Sampler(config, answers, cache, stop)
    try:
      outcome = await sampler.run(asked, count)
    except asyncio.CancelledError:
      outcome = sampler.outcome
    logging.info('%d questions sent, %d failed: %s.', answers.tries,
                 answers.failures.total(),
                 dict(answers.failures.most_common()))
  logging.info('%s', outcome.statistics(config))
  if outcome.error:
    raise NotComplete(outcome.error)
  if outcome.settled < count:
    reasons = collections.Counter(outcome.unsettled.values())
    if signals:
      reasons[f'stopped by {signals[0].name}'] = (
          count - outcome.settled - reasons.total())
    raise NotComplete(
        f'{count - outcome.settled} of {count} requests are not settled: '
        f'{dict(reasons.most_common())}.', 128 + signals[0] if signals else 1)
  return outcome


def write(output: pathlib.Path, outcome: sampling.Outcome,
           config: sampling.SamplingConfig) -> None:
  """Writes the traces, and a report with what was given up."""
  workdir_lib.write_text(f'{output}.report.json', json.dumps({
      **outcome.statistics(config),
      'requests_given_up': list(outcome.given_up.values())}, indent=1) + '\n')
  # In an order that does not depend on which answer came first.
  traces = sorted(outcome.accepted.values(),
                  key=lambda line: (line['user'], line['position']))
  workdir_lib.write_text(output, ''.join(
      json.dumps(line) + '\n' for line in traces))
  logging.info('%s: %d traces; %d requests given up, see %s.report.json.',
               output, len(traces), len(outcome.given_up), output)
  if not traces:
    logging.warning('Not one trace was accepted. The first request given up: '
                    '%s', next(iter(outcome.given_up.values()), 'none'))
