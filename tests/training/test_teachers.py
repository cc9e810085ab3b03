"""A run whose OPD is taught by a larger model of another run."""

import json
import runpy

import pytest

from dgr2_jax.data import prepare
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import stages
from dgr2_jax.training import teachers
from dgr2_jax.training import validation
from tests.training import runs


def config_of(teacher='ar', **model):
  """The shortest run, of few shoppers."""
  config = runpy.run_path(str(runs.CONFIG))['get_config']('smoke')
  config.recipe = ('ar_sft', 'convert', 'cft', 'opd')
  config.data.embedded.num_users = 120
  config.boosted.iterations = 20
  for stage in ('ar_sft', 'cft', 'opd'):
    config[stage].update(
        steps=2, eval_every=2, eval_requests=8, batch_size=4)
  config.opd.teacher = str(teacher)
  config.model.update(model)
  return config


def run(config, workdir, *names):
  workdir.mkdir(exist_ok=True)
  (workdir / 'config.json').write_text(config.to_json())
  for name in names:
    getattr(stages, name)(config, workdir)


@pytest.fixture(scope='module')
def other(tmp_path_factory):
  """A run that got as far as `ar_sft`."""
  workdir = tmp_path_factory.mktemp('other')
  run(config_of(), workdir, 'prepare', 'ar_sft')
  return workdir


def test_a_larger_model_of_another_run_teaches(other, tmp_path, monkeypatch):
  config = config_of(other / 'checkpoints' / 'ar_sft', num_layers=1, width=24,
                     dtype='bfloat16')
  config.opd.eval_threshold = .3
  validation.check(config)
  validated, decode = [], stages.responses.decode_split
  monkeypatch.setattr(
      stages.responses, 'decode_split', lambda *args, rule, **kwargs:
      validated.append(rule.tau) or decode(*args, rule=rule, **kwargs))
  run(config, tmp_path, 'prepare', 'ar_sft', 'convert', 'cft', 'opd')
  assert any(line.get('train/kl', 0) > 0 for line in runs.metrics(tmp_path)
             if line['stage'] == 'opd')
  assert validated == [1., config.cft.eval_threshold, .3, .3]
  experiment = experiment_lib.Experiment(config, tmp_path)
  shape = experiment.teacher.config
  assert shape.width == config_of().model.width != 24
  assert shape.dtype == 'bfloat16'  # how it computes is up to this run
  assert stages._teacher(experiment)['final_norm'].shape == (shape.width,)
  away = other.rename(other.with_name('away'))
  try:  # what it has taught does not need it
    stages.run(config, tmp_path, 'opd')
  finally:
    away.rename(other)


@pytest.mark.parametrize('section, field, value, message', [
    ('prompt', 'max_history', 3, 'prompt.max_history=5, not 3'),
    ('data', 'num_candidates', 8, 'data.num_candidates=10, not 8'),
    ('tokenizer', 'num_brands', 8, 'the tokens of .* are not those of this'),
    ('data', 'seed', 5, 'the items of .* are not those of this'),
    ('semantic_ids', 'codes', 8, 'the items of .* are not those of this')])
def test_what_it_cannot_read_is_named_behind_prepare(
    other, tmp_path, section, field, value, message):
  config = config_of(other / 'checkpoints' / 'ar_sft')
  config[section][field] = value
  with pytest.raises(ValueError, match=f'config.opd.teacher: .*{message}'):
    teachers.check(config)
    run(config, tmp_path, 'prepare')
    teachers.check_data(config, prepare.load(config, tmp_path / 'data'))
  config.opd.teacher = 'ar'
  teachers.check(config)


def test_a_bad_teacher_is_named_before_any_work(tmp_path):
  stage = tmp_path / 'run' / 'checkpoints' / 'cft'
  stage.mkdir(parents=True)
  for where, message in (
      ('nobody/checkpoints/ar', 'expected the config of a working directory'),
      ('~nobody/checkpoints/ar', 'expected the config of a working directory'),
      ('run', 'expected a stage of another run as DIR/checkpoints/STAGE')):
    with pytest.raises(ValueError, match=message):
      stages.run(config_of(
          where if where[0] == '~' else tmp_path / where), tmp_path)
  content = config_of().to_dict() | {'recipe': ['ar_sft', 'convert', 'cft']}
  content['canvas']['clean_stream'] = 'block_causal'
  (tmp_path / 'run' / 'config.json').write_text(json.dumps(content))
  with pytest.raises(ValueError, match='that stage is not complete'):
    stages.run(config_of(stage), tmp_path)
  (stage / 'complete.json').write_text('{}')
  with pytest.raises(ValueError, match=f'{stage}.*a stage before convert'):
    stages.run(config_of(stage), tmp_path)
  config = config_of('cft')
  config.canvas.clean_stream = 'block_causal'
  with pytest.raises(ValueError, match='expected a stage before convert'):
    validation.check(config)
