"""The whole recipe on tiny data: it completes, and survives being killed."""

import json
import os
import random
import runpy
import signal
import socket
import subprocess
import time
import types

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp
import pytest

from dgr2_jax.tools import compare
from dgr2_jax.training import sharding
from dgr2_jax.training import stages
from tests.training import runs

STAGES = ('ar_sft', 'ar_rl', 'convert', 'cft', 'opd', 'rl')
SPEED = ('tokens_per_second', 'speedup')


def kill_within(where, stage, round_, workdir):
  """Runs until an exact place of a round of rollouts."""
  result = runs.run(workdir, program=(
      'tests.training.killed_run', where, stage, str(round_)))
  assert result.returncode == -signal.SIGKILL, result.stderr[-3000:]


def kill_at(sign, delay, workdir, *flags, env=runs.ONE, processes=((),)):
  """Starts a run, of one or more processes with flags of their own.

  They are killed a while after a file appeared, the last one first.
  """
  started = [subprocess.Popen(
      runs.command(workdir, *flags, *own), cwd=runs.ROOT,
      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
             for own in processes]
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
  result = runs.run(workdir)
  assert result.returncode == 0, result.stderr[-3000:]
  return workdir, result.stdout


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
      ('ar', None), ('threshold', 1.0), ('threshold', .4), ('verify', None)]
  assert [(s['before'], s['name'], s['decoding'])
          for s in content['stages']] == [
      ('ar_sft', 'ar', 'ar'), ('ar_sft', 'ar', 'ar, temperature 1')] + [
          (before, name, how) for before, name in (('cft', 'opd'),
                                                   ('opd', 'rl'))
          for how in ('τ 1', 'τ 0.4', 'τ 0.4, temperature 0.5')]
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
  assert len(content['commits']) == 1  # a threshold below one


def test_responses_are_those_of_the_report(finished):
  loaded = compare.load('A', finished[0])
  # Raises where their metrics are not the report's.
  assert set(compare.paired(loaded, loaded)) == set(loaded.entries())


def test_on_policy_stages_learn_from_exact_ratios(finished):
  """What is killed and resumed below is not a run that stands still."""
  lines = [line for line in runs.metrics(finished[0])
           if 'train/gradient_norm' in line]
  for stage in ('ar_rl', 'opd', 'rl'):
    assert any(line['train/gradient_norm'] > 0 for line in lines
               if line['stage'] == stage), stage
  # One update a round: every ratio is 1 before it.
  assert all(line['train/max_log_ratio'] < 1e-4 for line in lines
             if line['stage'] == 'rl')
  assert {line['stage'] for line in lines if 'train/cft_loss' in line} == {
      'ar_rl', 'rl'}


@pytest.mark.parametrize('section', ['evaluate', 'rl'])
def test_batches_that_do_not_split_are_named_before_any_work(
    monkeypatch, tmp_path, section):
  mesh = types.SimpleNamespace(shape=dict(data=4, fsdp=2, tensor=1))
  monkeypatch.setattr(sharding, 'make_mesh', lambda config: mesh)
  config = runpy.run_path(str(runs.CONFIG))['get_config']('smoke')
  config[section].batch_size = 12
  with pytest.raises(ValueError, match=f'config.{section}.batch_size: 12 rows'):
    stages.run(config, tmp_path)
  assert not list(tmp_path.iterdir())


def test_same_command_again_changes_nothing(finished):
  workdir, _ = finished
  before = runs.metrics(workdir), report(workdir)
  result = runs.run(workdir)
  assert result.returncode == 0, result.stderr[-3000:]
  assert (runs.metrics(workdir), report(workdir)) == before


def test_killed_anywhere_ends_with_the_same_bits(finished, tmp_path):
  """At random steps, and within rounds of rollouts."""
  want, _ = finished
  workdir = tmp_path / 'run'
  rng = random.Random(os.getpid())
  delays = {}

  def kill_near(sign):
    delays[sign] = rng.uniform(0, 1.5)
    kill_at(sign, delays[sign], workdir)

  kill_near('data.partial')
  early = rng.random() < .5
  if early:
    kill_near('checkpoints/ar_sft/2')
  kill_within('update', 'ar_rl', 1, workdir)
  if not early:
    kill_near('checkpoints/cft/2')
  kill_within('update', 'opd', 3, workdir)
  kill_within('rollout', 'rl', 3, workdir)
  kill_near('checkpoints/rl/complete.json')
  result = runs.run(workdir)
  assert result.returncode == 0, result.stderr[-3000:]
  assert runs.metrics(workdir) == runs.metrics(want), delays
  assert report(workdir) == report(want), delays
  for stage in STAGES:
    got, expected = (jax.tree.leaves(checkpoint(w, stage))
                     for w in (workdir, want))
    assert len(got) == len(expected) > 0
    for a, b in zip(got, expected):
      np.testing.assert_array_equal(a, b, err_msg=f'{stage} {delays}')


def test_two_processes_and_then_one_train_as_one_does(finished, tmp_path):
  """A run of two processes of 4 devices each goes on in one with all 8."""
  workdir = tmp_path / 'run'
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    port = s.getsockname()[1]
  kill_at('checkpoints/ar_sft/2.json', 0., workdir, '--config.mesh.fsdp=2',
          env=runs.FOUR,
          processes=[[f'--multihost=127.0.0.1:{port},{i}/2'] for i in range(2)])
  eight = [f'--config.mesh.{axis}=2' for axis in runs.MESH]
  # Sampling may tip over on a rounding difference: no rollouts behind cft.
  for stage, mesh, env in (
      ('ar_sft', eight, runs.MANY), ('ar_rl', (), runs.ONE),
      ('convert', (), runs.ONE), ('cft', eight, runs.MANY)):
    result = runs.run(workdir, f'--stage={stage}', *mesh, env=env)
    assert result.returncode == 0, result.stderr[-3000:]
  stages = ('ar_sft', 'ar_rl', 'convert', 'cft')
  for got, want in zip(
      runs.metrics(workdir),
      [line for line in runs.metrics(finished[0]) if line['stage'] in stages],
      strict=True):
    assert got.pop('stage') == want.pop('stage')
    assert got == pytest.approx(want, rel=1e-5, abs=1e-5)
