"""The whole recipe on tiny data: it completes, and survives being killed."""

import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp
import pytest

from dgr2_jax.tools import compare

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = ROOT / 'configs' / 'quickstart.py'
STAGES = ('ar_sft', 'ar_rl', 'convert', 'cft', 'opd', 'rl')
MESH = ('data', 'fsdp', 'tensor')
# Many runs of the same programs: compiled well, once for all.
_CACHE = tempfile.TemporaryDirectory()
ONE = os.environ | {
    'XLA_FLAGS': '', 'JAX_COMPILATION_CACHE_DIR': _CACHE.name,
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1'}
FOUR, MANY = (
    ONE | {'XLA_FLAGS': f'--xla_force_host_platform_device_count={count}'}
    for count in (4, 8))
SPEED = ('tokens_per_second', 'speedup')
# Half the layers are compiled in half the time.
SMALL = ('--config.model.num_layers=2', '--config.boosted.iterations=20')


def command(workdir, *flags, program=('dgr2_jax.main',)):
  return [sys.executable, '-m', *program, f'--config={CONFIG}:smoke',
          f'--workdir={workdir}', *SMALL, *flags]


def run(workdir, *flags, env=ONE, **kwargs):
  return subprocess.run(command(workdir, *flags, **kwargs), cwd=ROOT, text=True,
                        capture_output=True, check=False, env=env)


def kill_within(where, stage, round_, workdir):
  """Runs until an exact place of a round of rollouts."""
  result = run(workdir, program=('tests.training.killed_run', where, stage,
                                 str(round_)))
  assert result.returncode == -signal.SIGKILL, result.stderr[-3000:]


def kill_at(sign, delay, workdir, *flags, env=ONE, processes=((),)):
  """Starts a run, of one or more processes with flags of their own.

  They are killed a while after a file appeared, the last one first.
  """
  started = [subprocess.Popen(
      command(workdir, *flags, *own), cwd=ROOT, stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL, env=env) for own in processes]
  while not (workdir / sign).exists() and started[0].poll() is None:
    time.sleep(.02)
  time.sleep(delay)
  for process in reversed(started):
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, 'it ended before it was killed'


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """A working directory in which the recipe ran undisturbed."""
  workdir = tmp_path_factory.mktemp('finished') / 'run'
  result = run(workdir)
  assert result.returncode == 0, result.stderr[-3000:]
  return workdir, result.stdout


def metrics(workdir):
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [{k: v for k, v in json.loads(line).items() if k != 'timing'}
          for line in lines]


def report(workdir):
  """report.json without what a clock measured."""
  content = json.loads((workdir / 'report.json').read_text())
  for section in ('timing', 'environment', 'command'):
    del content[section]
  for point in content['frontier']:
    for name in SPEED:
      del point[name]
  return content


def checkpoint(workdir, stage):
  directory = workdir / 'checkpoints' / stage
  step = json.loads((directory / 'complete.json').read_text())['step']
  return ocp.load_checkpointables(directory / str(step))


def test_report_has_the_rows_and_the_frontier(finished):
  workdir, stdout = finished
  content = json.loads((workdir / 'report.json').read_text())
  assert [row['name'] for row in content['rows']] == [
      'pre_rank', 'gbdt', 'ar_sft', 'ar', 'ar_constrained', 'naive', 'cft',
      'opd', 'rl']
  assert [(p['mode'], p['threshold']) for p in content['frontier']] == [
      ('ar', None), ('threshold', 1.0), ('threshold', .9), ('threshold', .6),
      ('threshold', .4), ('verify', None)]
  assert [(s['before'], s['name'], s['decoding'])
          for s in content['stages']] == [
      ('ar_sft', 'ar', 'ar'), ('ar_sft', 'ar', 'ar, temperature 1')] + [
          (before, name, how) for before, name in (('cft', 'opd'),
                                                   ('opd', 'rl'))
          for how in ('τ 1', 'τ 0.9', 'τ 0.6', 'τ 0.4',
                      'τ 0.4, temperature 0.5')]
  floor, ar = content['rows'][0], content['rows'][3]
  assert ar['tokens_per_forward'] == 1.
  assert floor['recall@1'] == pytest.approx(
      content['dataset']['floors']['test']['recall@1'])
  assert content['dataset']['oracle']['recall@1'] > floor['recall@1']
  assert len(content['examples']) == 5
  for name in ('report.html', 'report.md', 'config.json'):
    assert (workdir / name).stat().st_size > 500
  assert 'pre_rank' in stdout and 'TPF' in stdout
  assert content['rows'][-1]['reasoning']['form']['n'] == content['conditional']
  assert len(content['commits']) == 3  # thresholds below one


def test_responses_are_those_of_the_report(finished):
  loaded = compare.load('A', finished[0])
  # Raises where their metrics are not the report's.
  assert set(compare.paired(loaded, loaded)) == set(loaded.entries())


def test_on_policy_stages_learn_from_exact_ratios(finished):
  """What is killed and resumed below is not a run that stands still."""
  lines = [line for line in metrics(finished[0])
           if 'train/gradient_norm' in line]
  for stage in ('ar_rl', 'opd', 'rl'):
    assert any(line['train/gradient_norm'] > 0 for line in lines
               if line['stage'] == stage), stage
  # One update a round: every ratio is 1 before it.
  assert all(line['train/max_log_ratio'] < 1e-4 for line in lines
             if line['stage'] == 'rl')
  assert {line['stage'] for line in lines if 'train/cft_loss' in line} == {'rl'}


def test_same_command_again_changes_nothing(finished):
  workdir, _ = finished
  before = metrics(workdir), report(workdir)
  result = run(workdir)
  assert result.returncode == 0, result.stderr[-3000:]
  assert (metrics(workdir), report(workdir)) == before


def test_killed_anywhere_ends_with_the_same_bits(finished, tmp_path):
  """At random steps, and within rounds of rollouts."""
  want, _ = finished
  workdir = tmp_path / 'run'
  rng = random.Random(os.getpid())
  delays = []

  def kill_near(sign):
    delays.append(rng.uniform(0, 1.5))
    kill_at(sign, delays[-1], workdir)

  kill_near('data.partial')
  kill_near('checkpoints/ar_sft/2')
  kill_near('checkpoints/cft/2')
  kill_within('update', 'opd', 3, workdir)
  kill_within('rollout', 'rl', 1, workdir)
  kill_near('checkpoints/rl/complete.json')
  result = run(workdir)
  assert result.returncode == 0, result.stderr[-3000:]
  assert metrics(workdir) == metrics(want), delays
  assert report(workdir) == report(want), delays
  for stage in STAGES:
    got, expected = (jax.tree.leaves(checkpoint(w, stage))
                     for w in (workdir, want))
    assert len(got) == len(expected) > 0
    for a, b in zip(got, expected):
      np.testing.assert_array_equal(a, b, err_msg=f'{stage} {delays}')


def test_two_processes_and_then_one_train_as_one_does(finished, tmp_path):
  """A run of two processes of 4 devices each is resumed on a single one."""
  workdir = tmp_path / 'run'
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    port = s.getsockname()[1]
  kill_at('checkpoints/ar_sft/2.json', 0., workdir, '--config.mesh.fsdp=2',
          env=FOUR, processes=[[f'--multihost=127.0.0.1:{port},{i}/2']
                               for i in range(2)])
  for stage in ('ar_sft', 'ar_rl', 'convert'):
    result = run(workdir, f'--stage={stage}')
    assert result.returncode == 0, result.stderr[-3000:]
  # Sampling may tip over on a rounding difference: no rollouts from here on.
  result = run(workdir, '--stage=cft', *(f'--config.mesh.{axis}=2'
                                         for axis in MESH), env=MANY)
  assert result.returncode == 0, result.stderr[-3000:]
  stages = ('ar_sft', 'ar_rl', 'convert', 'cft')
  for got, want in zip(
      metrics(workdir),
      [line for line in metrics(finished[0]) if line['stage'] in stages],
      strict=True):
    assert got.pop('stage') == want.pop('stage')
    assert got == pytest.approx(want, rel=1e-5, abs=1e-5)


def test_stages_run_alone_and_name_what_they_need(tmp_path):
  result = run(tmp_path / 'run', '--stage=cft')
  assert result.returncode == 1
  assert '--stage=prepare' in result.stderr
  assert run(tmp_path / 'run', '--stage=prepare').returncode == 0
  result = run(tmp_path / 'run', '--stage=cft')
  assert result.returncode == 1
  assert '--stage=convert' in result.stderr
  assert 'Traceback' not in result.stderr
  result = run(tmp_path / 'other', '--stage=rl',
               "--config.recipe=('ar_sft','convert','cft')")
  assert result.returncode == 1
  assert '--stage=rl is not in config.recipe' in result.stderr
  assert not (tmp_path / 'other').exists()


def test_bad_fields_are_named(tmp_path):
  for flag, message in (
      ('--config.canvas.block_size=5', 'canvas.block_size=5'),
      ('--config.model.num_kv_heads=3', 'model.num_kv_heads=3'),
      ('--config.cft.learning_rat=1', 'learning_rate'),
      ('--multihost=here', '--multihost=here: expected auto'),
      ('--multihost=localhost:1,2/2', 'with I below N')):
    # --stage=cft needs prepare; a wrong field must not get that far.
    result = run(tmp_path / 'run', flag)
    assert result.returncode == 1
    assert message in result.stderr, result.stderr[-2000:]
    assert 'Traceback' not in result.stderr


@pytest.mark.parametrize('recipe, flags', [
    (('ar_sft', 'convert', 'cft', 'opd'),
     ('canvas.clean_stream=block_causal', 'canvas.alignment=same_position',
      'cft.ar_weight=0.', 'opd.cft_weight=0.5', 'opd.positions=all',
      'opd.elsewhere=none', 'opd.rollout.canvases=all')),
    (('ar_sft', 'convert', 'cft', 'opd', 'rl'),
     ('opd.teacher=self', 'opd.divergence=reverse', 'opd.teacher_top_k=4',
      'rl.kl_weight=0.1', 'rl.reward.overlong_buffer=0',
      *(f'mesh.{axis}=2' for axis in MESH)))],
                         ids=['published-rules', 'eight-devices'])
def test_ablations_are_configs(tmp_path, recipe, flags):
  flags = [f'--config.{flag}' for flag in flags]
  flags += [f'--config.recipe={recipe}', '--config.evaluate.thresholds=(0.9,)',
            '--config.data.max_train_requests=64']
  for stage in set(recipe) - {'convert'}:
    flags += [f'--config.{stage}.{field}' for field in (
        'steps=2', 'eval_every=2', 'eval_requests=16', 'batch_size=4')]
  result = run(tmp_path / 'run', *flags,
               env=MANY if '--config.mesh.data=2' in flags else ONE)
  assert result.returncode == 0, result.stderr[-3000:]
  losses = {line['stage']: line['train/loss']
            for line in metrics(tmp_path / 'run') if 'train/loss' in line}
  assert list(losses) == [stage for stage in recipe if stage != 'convert']
  assert all(map(np.isfinite, losses.values()))
  if 'rl' in recipe:
    # Untrained: no response ends, and without a buffer all earn the same.
    for message in (r' .*\(overflow (0\.[89]|1)', ': no response is valid',
                    ': all responses .* nothing is learned from it'):
      assert re.search(f'rl round 1{message}', result.stderr), message
  content = json.loads((tmp_path / 'run' / 'report.json').read_text())
  assert [r['name'] for r in content['rows']][-1] == recipe[-1]


def test_published_form_trains_too(tmp_path):
  """GR2's chat prompt and JSON answers, through fine-tuning and conversion."""
  flags = [
      '--config.prompt.response_format=json',
      "--config.prompt.item_fields=('sid','title')",
      "--config.prompt.evidence=('score',)", '--config.prompt.max_history=2',
      '--config.prompt.max_prompt=1500', '--config.prompt.max_response=480',
      '--config.tokenizer.vocab_size=800',
      '--config.data.max_train_requests=32',
      '--config.evaluate.constrained_ar=False',
      '--config.evaluate.batch_size=8',
      "--config.recipe=('ar_sft','convert','cft')"]
  for stage in ('ar_sft', 'cft'):
    flags += [f'--config.{stage}.{field}' for field in (
        'steps=2', 'eval_every=2', 'eval_requests=8', 'batch_size=4')]
  for stage in ('prepare', 'ar_sft', 'convert', 'cft'):
    result = run(tmp_path / 'run', f'--stage={stage}', *flags)
    assert result.returncode == 0, result.stderr[-3000:]
  last = metrics(tmp_path / 'run')[-1]
  assert last['stage'] == 'cft' and 0 <= last['validation/parse_rate'] <= 1
