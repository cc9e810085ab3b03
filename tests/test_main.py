"""Tests of the command line, with the stages replaced by a stub."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[1]

# The stages are the recipe's business: what matters here is what the command
# line hands them, and what becomes of their errors.
_STUB = """
import sys, types
from dgr2_jax import training

def run(config, workdir, stage):
  (workdir / 'checkpoints').mkdir(exist_ok=True)
  from dgr2_jax.data import interactions
  from dgr2_jax.training import loop
  print('run', workdir, stage, config.data.path, config.ar_sft.steps)
  if config.data.path == 'bad':
    raise interactions.DataError('items.jsonl:3: no title')
  if config.data.path == 'stop':
    raise loop.Interrupted('the same command goes on')
  if config.data.path == 'bug':
    raise RuntimeError('a bug')

stages = types.ModuleType('dgr2_jax.training.stages')
stages.STAGES, stages.run = ('prepare', 'ar_sft', 'cft'), run
stages.plan = lambda config, stage: None
sys.modules[stages.__name__] = training.stages = stages
from dgr2_jax import main
main.run()
"""

_CONFIG = """
import ml_collections

def get_config():
  return ml_collections.ConfigDict(dict(
      seed=1, data=dict(path='x', name='y'), ar_sft=dict(steps=3, rate=.1),
      cft=dict(steps=4)))
"""


def _main(directory, *args, config='config.py'):
  (directory / 'config.py').write_text(_CONFIG)
  config = [f'--config={directory / config}'] if config else []
  return subprocess.run(
      [sys.executable, '-c', _STUB, *config,
       f'--workdir={directory / "run"}', *args],
      cwd=_ROOT, capture_output=True, text=True, timeout=120)


def test_runs_and_resumes(tmp_path):
  for args, stage in ((), None), (('--stage=cft',), 'cft'):
    done = _main(tmp_path, '--config.ar_sft.steps=7', *args)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f'run {tmp_path / "run"} {stage} x 7\n'
  written = json.loads((tmp_path / 'run/config.json').read_text())
  assert written['ar_sft']['steps'] == 7
  done = _main(tmp_path)
  assert done.returncode == 1
  assert 'config.ar_sft.steps: 7 there, 3 now' in done.stderr


@pytest.mark.parametrize('arg, message', [
    ('--config.data.pth=x', 'no field --config.data.pth. Did you mean '
                            '--config.data.path'),
    ('--config.dat.path=x', 'Did you mean --config.data.path?'),
    ('--config.steps=9', 'Did you mean --config.ar_sft.steps or '
                         '--config.cft.steps?'),
    ('--config.zzz=9', 'The config has no field --config.zzz.'),
    ('--config.ar_sft.steps=many', 'config.ar_sft.steps=many: invalid literal'),
    ('--stge=cft', "Unknown command line flag 'stge'"),
    ('cft', "Unexpected argument 'cft'"),
    ('--multihost=here', '--multihost=here: expected auto'),
])
def test_mistyped_command(tmp_path, arg, message):
  done = _main(tmp_path, arg)
  assert done.returncode == 1
  assert message in done.stderr
  assert 'Traceback' not in done.stderr
  assert not (tmp_path / 'run').exists()


def test_bad_value_is_told_before_anything_is_written(tmp_path):
  done = _main(tmp_path, '--config.cft.steps=0')
  assert done.returncode == 1
  assert done.stderr == ('error: config.cft.steps is 0: expected a whole '
                         'number of at least 1. (--debug shows where)\n')
  assert not (tmp_path / 'run').exists()


def test_missing_config(tmp_path):
  done = _main(tmp_path, config='no.py')
  assert done.returncode == 1
  assert 'no.py' in done.stderr and 'No such file' in done.stderr
  assert 'Traceback' not in done.stderr
  done = _main(tmp_path, config=None)
  assert done.returncode == 1 and '--config is required' in done.stderr


def test_config_file_that_raises(tmp_path):
  (tmp_path / 'bad.py').write_text(
      "def get_config():\n  raise ValueError('no such variant')")
  done = _main(tmp_path, config='bad.py')
  assert done.returncode == 1
  assert 'bad.py' in done.stderr
  assert done.stderr.endswith('ValueError: no such variant\n')
  assert len(done.stderr.splitlines()) == 1


def test_unknown_stage_lists_the_stages(tmp_path):
  done = _main(tmp_path, '--stage=ctf')
  assert done.returncode == 1
  assert done.stderr == ('error: --stage=ctf: unknown; the stages are prepare, '
                         'ar_sft, cft.\n')
  assert not (tmp_path / 'run').exists()


def test_errors_of_data_are_one_line(tmp_path):
  done = _main(tmp_path, '--config.data.path=bad')
  assert done.returncode == 1
  assert done.stderr == ('error: items.jsonl:3: no title (--debug shows '
                         'where)\n')
  done = _main(tmp_path, '--config.data.path=bad', '--debug')
  assert done.returncode == 1
  assert 'Traceback' in done.stderr and 'DataError' in done.stderr


def test_interruption_is_not_success(tmp_path):
  done = _main(tmp_path, '--config.data.path=stop')
  assert done.returncode == 130
  assert done.stderr == 'error: the same command goes on\n'


def test_bugs_keep_their_traceback(tmp_path):
  done = _main(tmp_path, '--config.data.path=bug')
  assert done.returncode == 1
  assert 'Traceback' in done.stderr and 'a bug' in done.stderr


def _stages():
  """Names in training/stages.py, which this file's stub replaces."""
  text = (_ROOT / 'dgr2_jax' / 'training' / 'stages.py').read_text()
  return re.findall(r"'(\w+)': \1\b", text.partition('_RUN = {')[2])


def test_a_script_beside_a_clone_finds_the_package(tmp_path):
  """Not the clone's directory, which has the same name."""
  (tmp_path / 'dgr2_jax').symlink_to(_ROOT)
  result = subprocess.run(
      [sys.executable, '-c', 'import dgr2_jax; print(dgr2_jax.__file__)'],
      cwd=tmp_path, text=True, capture_output=True, check=True)
  assert result.stdout.strip().endswith('__init__.py')


def test_help(tmp_path):
  done = subprocess.run(
      [sys.executable, '-m', 'dgr2_jax.main', '--help'], cwd=_ROOT,
      capture_output=True, text=True, timeout=120)
  assert '--config=configs/quickstart.py --workdir=DIR' in done.stdout
  assert '--stage' in done.stdout
  listed = re.findall(r'^    ([a-z_]+)  +\w', done.stdout, re.M)
  assert listed == _stages()
