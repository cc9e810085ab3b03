"""Other recipes than the quickstart's are configs; what is wrong is said."""

import json
import re

import numpy as np
import pytest

from dgr2_jax.training import hosts
from tests.training import runs


def test_stages_run_alone_and_name_what_they_need(tmp_path):
  result = runs.run(tmp_path / 'run', '--stage=cft')
  assert result.returncode == 1
  assert '--stage=prepare' in result.stderr
  assert runs.run(tmp_path / 'run', '--stage=prepare').returncode == 0
  result = runs.run(tmp_path / 'run', '--stage=cft')
  assert result.returncode == 1
  assert '--stage=convert' in result.stderr
  assert 'Traceback' not in result.stderr
  result = runs.run(tmp_path / 'other', '--stage=rl',
               "--config.recipe=('ar_sft','convert','cft')")
  assert result.returncode == 1
  assert '--stage=rl is not in config.recipe' in result.stderr
  assert not (tmp_path / 'other').exists()


def test_bad_fields_are_named(tmp_path):
  """Before anything is read or written; more in test_validation.py."""
  result = runs.run(tmp_path / 'run', '--config.canvas.block_size=5')
  assert result.returncode == 1
  assert 'canvas.block_size=5' in result.stderr, result.stderr[-2000:]
  assert 'Traceback' not in result.stderr


@pytest.mark.parametrize('where, message', [
    ('here', '--multihost=here: expected auto'),
    ('localhost:1,2/2', 'with I below N')])
def test_bad_hosts_are_named(where, message):
  with pytest.raises(ValueError, match=message):
    hosts.join(where)


@pytest.mark.parametrize('recipe, flags', [
    (('ar_sft', 'convert', 'cft', 'opd'),
     ('canvas.clean_stream=block_causal', 'canvas.alignment=same_position',
      'opd.teacher=ar', 'cft.ar_weight=0.', 'opd.cft_weight=0.5',
      'opd.positions=all', 'opd.elsewhere=none', 'opd.rollout.canvases=all')),
    (('ar_sft', 'convert', 'cft', 'opd', 'rl'),
     ('opd.teacher=self', 'opd.divergence=reverse', 'opd.teacher_top_k=4',
      'rl.kl_weight=0.1', 'rl.reward.overlong_buffer=0',
      *(f'mesh.{axis}=2' for axis in runs.MESH)))],
                         ids=['published-rules', 'eight-devices'])
def test_ablations_are_configs(tmp_path, recipe, flags):
  flags = [f'--config.{flag}' for flag in flags]
  flags += [f'--config.recipe={recipe}', '--config.evaluate.thresholds=(0.9,)',
            '--config.data.max_train_requests=64',
            '--config.evaluate.timing_requests=1']
  for stage in set(recipe) - {'convert'}:
    flags += [f'--config.{stage}.{field}' for field in (
        'steps=2', 'eval_every=2', 'eval_requests=16', 'batch_size=4')]
  env = runs.MANY if '--config.mesh.data=2' in flags else runs.ONE
  result = runs.run(tmp_path / 'run', *flags, env=env)
  assert result.returncode == 0, result.stderr[-3000:]
  losses = {line['stage']: line['train/loss']
            for line in runs.metrics(tmp_path / 'run') if 'train/loss' in line}
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
    result = runs.run(tmp_path / 'run', f'--stage={stage}', *flags)
    assert result.returncode == 0, result.stderr[-3000:]
  last = runs.metrics(tmp_path / 'run')[-1]
  assert last['stage'] == 'cft' and 0 <= last['validation/parse_rate'] <= 1
