"""Runs of the quickstart's recipe in processes of their own, for tests."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = ROOT / 'configs' / 'quickstart.py'
MESH = ('data', 'fsdp', 'tensor')
ONE = dict(os.environ)
FOUR, MANY = (
    ONE | {'XLA_FLAGS': f'{ONE["XLA_FLAGS"]} '
                        f'--xla_force_host_platform_device_count={count}'}
    for count in (4, 8))


def command(workdir, *flags, program=('dgr2_jax.main',)):
  return [sys.executable, '-m', *program, f'--config={CONFIG}:smoke',
          f'--workdir={workdir}', '--config.data.embedded.num_users=120',
          '--config.boosted.iterations=20',
          '--config.evaluate.thresholds=(1.0,0.4)', *flags]


def run(workdir, *flags, env=ONE, **kwargs):
  return subprocess.run(command(workdir, *flags, **kwargs), cwd=ROOT, text=True,
                        capture_output=True, check=False, env=env)


def metrics(workdir):
  """What was logged, without what a clock measured."""
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [{k: v for k, v in json.loads(line).items() if k != 'timing'}
          for line in lines]
