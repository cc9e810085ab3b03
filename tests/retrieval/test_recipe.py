"""Everything that the catalogue side offers, through the recipe to a report."""

import json
import pathlib
import runpy

from dgr2_jax.data import prepare
from dgr2_jax.training import stages
from dgr2_jax.training import validation
from dgr2_jax.training import workdir as workdir_lib

_CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'quickstart.py'


def make_config():
  """`full,smoke` with fewer items, steps and measurements."""
  config = runpy.run_path(str(_CONFIG))['get_config']('full,smoke')
  config.data.embedded.update(num_users=120, num_items=60)
  config.data.max_train_requests = 64
  config.data.retriever.generative.update(epochs=1, beams=10)
  config.semantic_ids.rqvae.steps = 20
  config.boosted.iterations = 5
  config.mid_train.text = str(_CONFIG.parents[1] / 'LICENSE')
  for name in config.recipe:
    if name != 'convert':
      config[name].update(steps=2, eval_every=2, eval_requests=8, batch_size=4)
  for name in ('ar_rl', 'opd', 'rl'):
    config[name].rollout.update(num_rollouts=2, refill=1)
  config.evaluate.update(
      batch_size=16, thresholds=(.9,), constrained_ar=False,
      timing_requests=1, timing_repetitions=1, num_examples=1,
      bootstrap_resamples=20)
  validation.check(config)
  return config


def test_full_recipe(tmp_path):
  config = make_config()
  assert config.recipe[0] == 'mid_train' and 'rqvae' in config.semantic_ids
  assert config.data.retriever.kind == 'generative'
  with workdir_lib.open_workdir(tmp_path, config) as directory:
    stages.run(config, directory)
  data = prepare.load(config, tmp_path / 'data')
  assert data.summary['evaluated_users'] == data.summary['users']
  assert data.summary['retriever']['recall@10'] == data.summary['hit_rate'] > 0
  for request in data.requests('train'):
    assert request.target in request.candidates
  ids = json.loads((tmp_path / 'data' / 'semantic_ids.json').read_text())
  assert ids['kind'] == 'rqvae' and ids['quality']['uniqueness'] == 1
  for stage in config.recipe:
    complete = tmp_path / 'checkpoints' / stage / 'complete.json'
    assert json.loads(complete.read_text())['step'] == (
        0 if stage == 'convert' else 2)
  report = json.loads((tmp_path / 'report.json').read_text())
  assert [row['name'] for row in report['rows']] == [
      'pre_rank', 'gbdt', 'ar_sft', 'ar', 'naive', 'cft', 'opd', 'rl']
  assert (tmp_path / 'report.html').stat().st_size > 500
