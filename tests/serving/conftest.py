"""A re-ranker of random weights."""

import json
import pathlib
import runpy

import pytest

from dgr2_jax.data import prepare
from dgr2_jax.serving import reranker as reranker_lib
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import workdir as workdir_lib

_CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'quickstart.py'


@pytest.fixture(scope='package')
def workdir(tmp_path_factory):
  """Prepared, with random weights in place of every stage's."""
  root = tmp_path_factory.mktemp('run')
  config = runpy.run_path(str(_CONFIG))['get_config']('smoke')
  prepare.prepare(config, root / 'data')
  (root / 'config.json').write_text(json.dumps(workdir_lib.to_json(config)))
  return root


@pytest.fixture(scope='package')
def reranker(workdir):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(experiment_lib.Experiment, 'restore',
                  lambda self, stage: self.initial_params())
    return reranker_lib.Reranker.load(workdir)
