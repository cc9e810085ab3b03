"""The AR re-ranker as its own teacher: a client without an endpoint.

    workdir, stage -> prompts of the training requests -> sampled responses

`Client` answers as `chat.Client` does, so that sampling, filter, cache and
statistics are the same. Its prompts are those that the model was trained with,
which have no place for the target: only rejection sampling is possible (as in
STaR, arXiv 2203.14465, without its hints). The n-th answer to a question is a
function of the weights, the question and n, whatever is decoded beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import asyncio
import collections
import dataclasses
import hashlib
import json
import pathlib
from typing import Any

import numpy as np

from dgr2_jax.data import faithfulness
from dgr2_jax.data import prompts
from dgr2_jax.data import requests as requests_lib
from dgr2_jax.decoding import commit
from dgr2_jax.evaluation import responses
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.trace_generation import cache as cache_lib
from dgr2_jax.trace_generation import chat
from dgr2_jax.trace_generation import generation
from dgr2_jax.trace_generation import questions as questions_lib
from dgr2_jax.trace_generation import sampling
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import workdir as workdir_lib

STAGES = ('ar_sft', 'ar_rl')
_PATIENCE = .01  # seconds in which the others may ask, too
# Answers to a question whose random numbers are told apart.
_MOST_ATTEMPTS = 1024


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """How the model is asked.

  Attributes:
    stage: whose weights, of `STAGES`.
    temperature: of sampling.
    batch_size: questions decoded together.
  """
  stage: str
  temperature: float = 0.8
  batch_size: int = 64

  def __post_init__(self):
    if self.stage not in STAGES:
      raise ValueError(f'stage is {self.stage!r}: expected one of {STAGES}.')
    if not 0 <= self.temperature <= 2:
      raise ValueError(
          f'temperature is {self.temperature}: expected 0 to 2.')
    if self.batch_size < 1:
      raise ValueError(f'batch_size is {self.batch_size}: expected at least 1.')


def generate(
    workdir: pathlib.Path,
    output: pathlib.Path,
    how: ModelConfig,
    max_attempts: int,
    max_requests: int = 0) -> None:
  """As `generation.generate`, with the AR model of the working directory.

  Args:
    workdir: `how.stage` is complete there.
    output: the file of traces; the others are named after it.
    how: the model is asked.
    max_attempts: answers to a question before it is given up.
    max_requests: only the first so many; 0 is all.

  Raises:
    As `generation.generate`; and ValueError where the stage is not complete or
    the model does not write json responses.
  """
  config = sampling.SamplingConfig(max_attempts, how.batch_size)
  generation.check(output, how.temperature, config)
  experiment = experiment_lib.Experiment.here(
      workdir_lib.read_config(workdir), workdir)
  data = experiment.data
  if data.template.config.response_format != prompts.JSON:
    raise ValueError(
        'prompt.response_format of the working directory is '
        f'{data.template.config.response_format!r}: traces are those of '
        f'{prompts.JSON!r} responses.')
  requests = questions_lib.distinct(
      data.requests('train')[:max_requests or None], data.items)
  asked = write(how, experiment, requests)
  with cache_lib.AnswerCache(f'{output}.answers.jsonl') as cache:
    outcome = asyncio.run(generation.settle(
        config, lambda stop: Client(how, experiment, cache, stop),
        cache, asked, len(requests)))
  generation.write(output, outcome, config)


def write(
    config: ModelConfig, experiment: experiment_lib.Experiment,
    requests: Mapping[str, requests_lib.Request]
) -> Iterator[questions_lib.Question]:
  """Puts requests, by fingerprint, into questions to the model."""
  data, settings = experiment.data, experiment.config.to_dict()
  # What the weights are a function of, but for the hardware.
  made_by = {k: v for k, v in settings.items() if k not in ('mesh', 'evaluate')}
  digest = hashlib.blake2b(
      json.dumps(made_by, sort_keys=True).encode(), digest_size=8).hexdigest()
  for example, (fingerprint, request) in enumerate(requests.items()):
    prompt = data.template.prompt(request)
    yield questions_lib.Question(
        fingerprint=fingerprint, user=request.user, position=request.position,
        mode=questions_lib.REJECTION,
        seen=faithfulness.view(
            request, prompt.shown, data.items, data.semantic_ids),
        body={'model': f'{config.stage} {digest}', 'request': fingerprint,
              'temperature': config.temperature, 'example': example,
              'prompt': prompt.ids.tolist()})


class Client:
  """Answers questions of `write`, those that wait at a time in batches.

  Attributes:
    tries: questions decoded.
    failures: none; as of `chat.Client`.
  """

  def __init__(self, config: ModelConfig,
               experiment: experiment_lib.Experiment,
               cache: cache_lib.AnswerCache, stop: asyncio.Event):
    """Restores the weights; used as an asynchronous context manager.

    Args:
      config: how to ask.
      experiment: of the working directory; the stage is complete.
      cache: tells how often a question was answered.
      stop: once set, nothing more is decoded.

    Raises:
      experiment.MissingStageError: the stage is not complete.
    """
    self.tries = 0
    self.failures = collections.Counter()
    self._config = config
    self._experiment = experiment
    self._params = experiment.restore(config.stage)
    self._decode_config = dataclasses.replace(
        experiment.decode_config(), temperature=config.temperature)
    self._cache = cache
    self._stop = stop
    self._waiting = asyncio.Queue()

  async def __aenter__(self) -> Client:
    self._worker = asyncio.create_task(self._work())
    return self

  async def __aexit__(self, *unused_args) -> None:
    self._worker.cancel()
    await asyncio.gather(self._worker, return_exceptions=True)

  async def ask(self, body: Mapping[str, Any]) -> chat.Reply:
    """Answers a question.

    Raises:
      chat.Stopped: the user wants to stop.
    """
    if self._stop.is_set():
      raise chat.Stopped()
    answer = asyncio.get_running_loop().create_future()
    self._waiting.put_nowait((body, answer))
    return await answer

  async def _work(self) -> None:
    """Decodes what waits, until it is cancelled."""
    while True:
      batch = [await self._waiting.get()]
      await asyncio.sleep(_PATIENCE)
      while not self._waiting.empty() and len(batch) < self._config.batch_size:
        batch.append(self._waiting.get_nowait())
      bodies = [body for body, _ in batch]
      try:
        replies = await asyncio.to_thread(self._decode, bodies)
      except Exception as e:  # pylint: disable=broad-except
        for _, answer in batch:
          if not answer.cancelled():
            answer.set_exception(e)
        continue
      self.tries += len(batch)
      for (_, answer), reply in zip(batch, replies, strict=True):
        if not answer.cancelled():
          answer.set_result(reply)

  def _decode(self, bodies: Sequence[Mapping[str, Any]]) -> list[chat.Reply]:
    """One batch, filled up with its last question."""
    experiment, mesh = self._experiment, self._experiment.mesh
    n = -(-self._config.batch_size // mesh.size) * mesh.size
    prompt = np.full((n, experiment.data.prompt_length),
                     experiment.data.tokenizer.pad_id, np.int32)
    length, example = np.zeros(n, np.int32), np.zeros(n, np.int32)
    filled = [*bodies, *([bodies[-1]] * (n - len(bodies)))]
    for row, body in enumerate(filled):
      length[row] = len(body['prompt'])
      prompt[row, :length[row]] = body['prompt']
      attempt = len(self._cache.answers(
          cache_lib.key_of(body, body['request'])))
      example[row] = body['example'] * _MOST_ATTEMPTS + attempt % _MOST_ATTEMPTS
    rollout = responses.decode_split(
        experiment.model, self._params, [dict(
            prompt=prompt, prompt_length=length, example_id=example,
            valid=np.arange(n) < len(bodies))],
        rule=commit.Threshold(1.), vocabulary=experiment.vocabulary,
        canvas=canvas_lib.AUTOREGRESSIVE, config=self._decode_config,
        mesh=mesh, seed=experiment.config.seed)
    return [
        chat.Reply(experiment.data.tokenizer.decode(ids[:count]),
                   'stop' if done else 'length', int(size), int(count))
        for ids, count, done, size in zip(
            rollout.tokens, rollout.length, rollout.finished, length)]
