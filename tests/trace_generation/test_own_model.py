"""The AR model as its own teacher: same filter, cache and statistics."""

import asyncio
import json
import pathlib
import runpy
import types

import numpy as np
import pytest

from dgr2_jax.data import generated
from dgr2_jax.data import prepare
from dgr2_jax.evaluation import responses
from dgr2_jax.trace_generation import cache as cache_lib
from dgr2_jax.trace_generation import own_model
from dgr2_jax.trace_generation import questions
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import workdir as workdir_lib

_ROOT = pathlib.Path(__file__).parents[2]
_COUNT = 10
HOW = own_model.ModelConfig('ar_sft', batch_size=4)


@pytest.fixture(scope='module', name='workdir')
def make_workdir(tmp_path_factory):
  return _prepared(tmp_path_factory.mktemp('run'), 'quickstart_traces.py')


def _prepared(root, name):
  config = runpy.run_path(str(_ROOT / 'configs' / name))['get_config']('smoke')
  config.boosted.iterations = 2
  config.prompt.traces = None
  config.prompt.max_history = 2
  workdir_lib.write_text(
      root / 'config.json', json.dumps(workdir_lib.to_json(config)))
  prepare.prepare(config, root / 'data')
  return root


def asked_key(question):
  return cache_lib.key_of(question.body, question.fingerprint)


@pytest.fixture(name='untrained')
def use_initial_weights(monkeypatch):
  monkeypatch.setattr(experiment_lib.Experiment, 'restore',
                      lambda self, stage: self.initial_params())


class Decoder:
  """Stands for `responses.decode_split`: the template's responses.

  The first answers to every second request name another candidate first, the
  last request never gets an answer.
  """

  def __init__(self, data, first_right):
    self.batches = []
    self._data = data
    self._first_right = first_right

  def __call__(self, model, params, batches, **unused_options):
    batch, = batches
    tokens, lengths = [], []
    self.batches.append(batch['example_id'][batch['valid']].tolist())
    for example in batch['example_id'][batch['valid']].tolist():
      index, attempt = divmod(example, 1024)
      request = self._data.requests('train')[index]
      template = self._data.template
      target = request.candidates.tolist().index(request.target)
      if attempt < self._first_right * (index % 2):
        target = (target + 1) % 10
      order = [target, *(c for c in range(10) if c != target)]
      ids = template.response(
          request, order, template.prompt(request).shown).ids
      if index == _COUNT - 1:
        ids = ids[:20]
      row = np.zeros(self._data.response_length, np.int32)
      row[:len(ids)] = ids
      tokens.append(row)
      lengths.append(len(ids))
    finished = [length > 20 for length in lengths]
    return types.SimpleNamespace(
        tokens=np.stack(tokens), length=np.array(lengths), finished=finished)


def test_rejection_sampling_and_a_second_run(
    workdir, tmp_path, monkeypatch, untrained):
  config = workdir_lib.read_config(workdir)
  data = prepare.load(config, workdir / 'data')
  decoder = Decoder(data, first_right=2)
  monkeypatch.setattr(responses, 'decode_split', decoder)
  output = tmp_path / 'traces.jsonl'
  own_model.generate(workdir, output, HOW, 3, _COUNT)
  asked = [example for batch in decoder.batches for example in batch]
  assert len(asked) == len(set(asked))  # no random number twice
  report = json.loads((tmp_path / 'traces.jsonl.report.json').read_text())
  # One in two needs three answers, and the last never gets any.
  assert report['accepted'] == _COUNT - 1 and report['given_up'] == 1
  assert report['rejected'] == {'target_not_first': 2 * (_COUNT // 2 - 1),
                                'cut_off': 3}
  assert len(asked) == report['answers']
  assert max(map(len, decoder.batches)) == HOW.batch_size
  traces = generated.read(output)
  for request in data.requests('train')[:_COUNT - 1]:
    answer = traces[generated.fingerprint(request, data.items)]
    assert request.candidates[answer.order[0]] == request.target
    assert answer.explanation.startswith('Pattern: the latest purchase is <')
  written = output.read_bytes()
  own_model.generate(workdir, output, HOW, 3, _COUNT)
  assert output.read_bytes() == written
  assert [x for b in decoder.batches for x in b] == asked
  own_model.generate(workdir, output, HOW, 4, _COUNT)  # goes on
  assert decoder.batches[-1] == [(_COUNT - 1) * 1024 + 3]


def test_answers_do_not_depend_on_the_batch(workdir, tmp_path, untrained):
  experiment = experiment_lib.Experiment(
      workdir_lib.read_config(workdir), workdir)
  requests = questions.distinct(
      experiment.data.requests('train')[:3], experiment.data.items)
  asked = list(own_model.write(HOW, experiment, requests))

  async def ask(name, *groups):
    with cache_lib.AnswerCache(tmp_path / name) as cache:
      async with own_model.Client(
          HOW, experiment, cache, asyncio.Event()) as client:
        answers = {}
        for group in groups:
          replies = await asyncio.gather(
              *(client.ask(asked[i].body) for i in group))
          for i, reply in zip(group, replies):
            answers.setdefault(i, []).append(reply)
            cache.add(asked_key(asked[i]), reply)
        return answers

  together = asyncio.run(ask('a', (0, 1, 2), (1,)))
  apart = asyncio.run(ask('b', (2,), (1,), (1, 0)))
  assert together == apart
  first, second = together[1]
  assert first.content != second.content
  assert first.prompt_tokens == len(asked[1].body['prompt'])
  assert {r.finish for rs in together.values() for r in rs} <= {
      'stop', 'length'}


def test_weights_and_settings_make_another_question(workdir):
  experiment = experiment_lib.Experiment(
      workdir_lib.read_config(workdir), workdir)
  requests = questions.distinct(
      experiment.data.requests('train')[:1], experiment.data.items)

  def key(**changes):
    question, = own_model.write(
        own_model.ModelConfig(**{'stage': 'ar_sft', **changes}), experiment,
        requests)
    return asked_key(question)

  first = key()
  assert key(batch_size=2) == first
  assert len({first, key(stage='ar_rl'), key(temperature=1.)}) == 3
  experiment.config.evaluate.batch_size = 1
  assert key() == first
  experiment.config.ar_sft.steps += 1
  assert key() != first


def test_bad_settings(workdir, tmp_path):
  with pytest.raises(ValueError, match="stage is 'cft': expected one of"):
    own_model.ModelConfig('cft')
  with pytest.raises(ValueError, match='temperature is 0 and max_attempts 2'):
    own_model.generate(workdir, tmp_path / 'x', own_model.ModelConfig(
        'ar_sft', temperature=0.), 2)
  with pytest.raises(ValueError, match="response_format .* is 'compact'"):
    own_model.generate(
        _prepared(tmp_path, 'quickstart.py'), tmp_path / 'x', HOW, 2)
  assert not list(tmp_path.glob('x*'))
  with pytest.raises(experiment_lib.MissingStageError, match='ar_sft'):
    own_model.generate(workdir, tmp_path / 'x', HOW, 2)
