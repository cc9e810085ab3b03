"""Sweeps are commands that a shell and a config understand."""

import pathlib
import runpy
import shlex
import subprocess
import sys

import pytest

from dgr2_jax.training import abstract
from dgr2_jax.training import sweeps
from dgr2_jax.training import validation

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize('name, variant', [
    *((path.stem, '') for path in sorted(ROOT.glob('configs/*.py'))),
    ('quickstart', 'full'), ('quickstart', 'short')])
def test_every_run_is_a_config_that_passes(name, variant):
  path = f'{ROOT}/configs/{name}.py'
  whole = runpy.run_path(path)['get_config'](variant)
  seen = set()
  for fields in sweeps.of(f'{path}:{variant}').values():
    config = runpy.run_path(path)['get_config'](variant)
    config.data.path = 'somewhere'
    if 'qwen3' in name:
      abstract.take_shape(config, '0.6b')  # in place of a checkpoint
    with config.ignore_type():  # a recipe of another length
      config.update_from_flattened_dict(fields)
    validation.check(config)
    left_out = set(whole.recipe) - set(config.recipe)
    assert left_out <= {'opd', 'rl'} and set(config.recipe) <= set(whole.recipe)
    seen.add(config.to_json(sort_keys=True))
  assert len(seen) == len(sweeps.ablations(whole))  # no two runs are the same


def test_commands_say_the_fields_once_a_shell_has_read_them():
  line, = sweeps.commands('c.py:smoke', 'a dir', ['--config.name=it $HOME'], {
      'few': {'recipe': ('ar_sft', 'cft'), 'cft.ar_weight': 0.}})
  assert shlex.split(line) == [
      'python', '-m', 'dgr2_jax.main', '--config=c.py:smoke',
      '--workdir=a dir/few', '--config.name=it $HOME',
      "--config.recipe=('ar_sft', 'cft')", '--config.cft.ar_weight=0.0']


def test_print_sweep(tmp_path):
  def run(config, *more):
    return subprocess.run(
        [sys.executable, '-m', 'dgr2_jax.main', f'--config={config}',
         '--workdir', 'runs', '--print_sweep', '--config.seed=3', *more],
        cwd=ROOT, text=True, capture_output=True, check=False)

  result = run(ROOT / 'configs' / 'quickstart.py:smoke')
  lines = result.stdout.splitlines()
  names = sweeps.of(f'{ROOT}/configs/quickstart.py')
  assert len(lines) == len(names), result.stderr
  for name, line in zip(names, lines):
    assert f'--workdir=runs/{name} ' in line and '--config.seed=3' in line
  result = run(ROOT / 'configs' / 'quickstart.py', '--stage=cft')
  assert result.returncode == 1 and not result.stdout
  assert 'leave out --stage' in result.stderr
  none = tmp_path / 'none.py'
  none.write_text(
      'import ml_collections\n'
      'def get_config():\n  return ml_collections.ConfigDict({"seed": 0})\n')
  result = run(none)
  assert result.returncode == 1
  assert result.stderr.startswith('error: ') and 'no sweep(' in result.stderr
