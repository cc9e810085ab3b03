"""The recipe takes the lists of another retriever as they come."""

import json
import pathlib
import runpy

from dgr2_jax.data import prepare
from dgr2_jax.training import stages
from dgr2_jax.training import workdir as workdir_lib

_CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'quickstart.py'


def test_smoke_with_another_retriever(tmp_path):
  config = runpy.run_path(str(_CONFIG))['get_config']('smoke,generative')
  assert config.data.retriever.kind == 'generative'
  with workdir_lib.open_workdir(tmp_path, config) as directory:
    for stage in ('prepare', 'ar_sft'):
      stages.run(config, directory, stage)
  data = prepare.load(config, tmp_path / 'data')
  assert data.summary['evaluated_users'] == data.summary['users']
  assert data.summary['retriever']['recall@10'] == data.summary['hit_rate'] > 0
  for request in data.requests('train'):
    assert request.target in request.candidates
  complete = tmp_path / 'checkpoints' / 'ar_sft' / 'complete.json'
  assert json.loads(complete.read_text())['step'] > 0
