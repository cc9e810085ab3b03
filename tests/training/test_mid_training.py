"""The stage on a tiny catalogue: it learns, resumes, hands on its weights."""

import json
import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgr2_jax.data import candidates
from dgr2_jax.data import mid_training
from dgr2_jax.data import pipeline
from dgr2_jax.objectives import language_modelling
from dgr2_jax.tools import retrieve
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import loop
from dgr2_jax.training import stages
from dgr2_jax.training import validation
from dgr2_jax.training import variants
from dgr2_jax.training import workdir as workdir_lib

ROOT = pathlib.Path(__file__).parents[2]
GET_CONFIG = runpy.run_path(str(ROOT / 'configs' / 'quickstart.py'))[
    'get_config']
STEPS = 24


def make_config(text=ROOT / 'LICENSE', **changes):
  config = GET_CONFIG('full,smoke,cooccurrence')
  config.data.embedded.update(num_users=120, num_items=60)
  config.semantic_ids.rqvae = dict(steps=20)
  config.boosted.iterations = 5
  config.mid_train.update(dict(
      steps=STEPS, eval_every=8, checkpoint_every=6, log_every=4, batch_size=8,
      warmup_steps=2, learning_rate=1e-2, eval_requests=0,
      text=str(text)) | changes)
  validation.check(config)
  return config


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  config, path = make_config(), tmp_path_factory.mktemp('mid_train')
  with workdir_lib.open_workdir(path, config) as workdir:
    for stage in ('prepare', 'mid_train'):
      stages.run(config, workdir, stage)
  return path


def metrics(workdir):
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [{k: v for k, v in json.loads(line).items() if k != 'timing'}
          for line in lines]


def assert_same(got, want):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(a, b)


def test_every_task_is_learned(finished):
  lines = [line for line in metrics(finished) if 'validation/logprob' in line]
  assert [line['step'] for line in lines] == [8, 16, 24]
  first, last = lines[0], lines[-1]
  for task in mid_training.TASKS:
    name = f'validation/{task}_logprob'
    assert first[name] + .1 < last[name] < 0, task
  weights = make_config().mid_train.weights
  np.testing.assert_allclose(last['validation/logprob'], sum(
      weights[task] * last[f'validation/{task}_logprob']
      for task in mid_training.TASKS) / sum(weights.values()), rtol=1e-6)
  losses = [line['train/loss'] for line in metrics(finished)
            if 'train/loss' in line]
  assert losses[-1] < losses[0] - 1


def test_stopped_in_the_middle_of_an_epoch_ends_with_the_same_bits(
    finished, tmp_path, monkeypatch):
  (tmp_path / 'data').symlink_to(finished / 'data')
  config, mixed = make_config(), pipeline.mixed_batches

  class Stop(Exception):
    pass

  class Stopping:
    """Batches up to a step between two checkpoints and two log lines."""

    def __init__(self, *args):
      self._batches = mixed(*args)

    def __getitem__(self, step):
      if step >= 15:
        raise Stop
      return self._batches[step]

  monkeypatch.setattr(pipeline, 'mixed_batches', Stopping)
  with pytest.raises(Stop):
    stages.run(config, tmp_path, 'mid_train')
  assert metrics(tmp_path)[-1]['step'] == 12
  monkeypatch.setattr(pipeline, 'mixed_batches', mixed)
  stages.run(config, tmp_path, 'mid_train')
  assert metrics(tmp_path) == [
      line for line in metrics(finished) if line['stage'] == 'mid_train']
  assert_same(variants.last_params(tmp_path, 'mid_train'),
              variants.last_params(finished, 'mid_train'))


def test_fine_tuning_starts_from_its_weights(finished, monkeypatch):
  started = {}
  monkeypatch.setattr(loop, 'train', lambda **kwargs: started.update(kwargs))
  stages.run(make_config(), finished, 'ar_sft')
  assert started['stage'] == 'ar_sft'
  experiment = experiment_lib.Experiment(make_config(), finished)
  assert_same(started['params'], experiment.restore('mid_train'))
  # Without the stage, or before it, from random ones.
  alone = make_config()
  alone.recipe = alone.recipe[1:]
  stages.run(alone, finished, 'ar_sft')
  assert_same(started['params'], experiment.initial_params())


def test_it_retrieves_what_it_would_write(finished, tmp_path, capsys):
  """The tool's lists against every item scored by teacher forcing."""
  output = tmp_path / 'candidates.jsonl'
  retrieve.main([f'--workdir={finished}', f'--output={output}', '--beams=60'])
  assert 'recall@10' in capsys.readouterr().out
  config = make_config()
  experiment = experiment_lib.Experiment(config, finished)
  params, data = experiment.restore('mid_train'), experiment.data
  dataset, template = data.dataset, data.template
  found = candidates.read(output, dataset, config.data.num_candidates)
  assert set(found) == {'validation', 'test'}
  sids = np.array([template.item(i, mid_training.SID)
                   for i in range(len(dataset.items))])
  size = sids.shape[1]

  @jax.jit
  def log_probs(prompt):
    tokens = jnp.concatenate([jnp.broadcast_to(
        prompt, (len(sids), len(prompt))), sids], 1)
    states = language_modelling.hidden_states(
        experiment.model, params, tokens, jnp.zeros_like(tokens))
    logits = experiment.model.apply(
        {'params': params}, states[:, -size - 1:-1], method='logits')
    scores = jax.nn.log_softmax(experiment.vocabulary.allow(logits))
    return jnp.take_along_axis(scores, sids[..., None], 2).sum((1, 2))

  users, positions, listed = found['test']
  lengths = {}  # a program a length
  for user, position, items in zip(users, positions, listed):
    history = dataset.sequences[user][:position]
    prompt = mid_training.next_item_prompt(
        template, history, config.mid_train.max_length)
    if len(lengths.setdefault(len(prompt), [])) == 3 or len(lengths) > 4:
      continue
    lengths[len(prompt)].append(user)
    scores = np.array(log_probs(jnp.asarray(prompt)))
    scores[history] = -np.inf
    best = np.argsort(-scores)[:len(items)]
    np.testing.assert_allclose(scores[items], scores[best], atol=1e-4)
    assert len(set(items)) == len(items)


def test_only_a_mid_trained_run_retrieves(finished, tmp_path):
  for workdir, arguments, message in (
      (tmp_path, (), 'expected the config of a working directory'),
      (finished, ('--count=61',), '60 items'),
      (finished, (f'--output={tmp_path}/none/c',), 'expected a file'),
      (finished, (f'--output={tmp_path}',), 'expected a file')):
    with pytest.raises(SystemExit, match=message):
      retrieve.main([f'--workdir={workdir}', f'--output={tmp_path / "c"}',
                     *arguments])


def test_text_that_cannot_be_read_is_refused_before_any_work(tmp_path):
  empty = tmp_path / 'empty.txt'
  empty.write_text('\n')
  for path, message in ((empty, 'empty.txt: config.mid_train.text is empty'),
                        (tmp_path / 'none.txt', 'none.txt: .*cannot be read')):
    with pytest.raises(ValueError, match=message):
      stages.run(make_config(path), tmp_path / 'run', 'prepare')
    assert not list((tmp_path / 'run').glob('data*'))
