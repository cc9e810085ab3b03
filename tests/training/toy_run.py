"""A toy stage, run in its own process by the tests of the training loop.

    toy_run.main([DIR, '--devices=8', '--die=save@10'], log)

`--die=WHERE@STEP` kills the process (SIGKILL) while it loads the batch,
validates, writes the metrics line or is about to finish the checkpoint of a
step. `--term=STEP` sends itself SIGTERM.
"""

import argparse
import os
import pathlib
import signal
import sys

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import ml_collections
import numpy as np

from dgr2_jax.objectives import scoring
from dgr2_jax.training import logging as metrics_logging
from dgr2_jax.training import loop
from dgr2_jax.training import sharding
from dgr2_jax.training import workdir

RULES = ((r'dense/w$', P('fsdp', 'tensor')), (r'out$', P('tensor')))
STAGE = 'toy'


def get_config(**overrides) -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(dict(
      steps=20, learning_rate=5e-2, warmup_steps=4, schedule='cosine',
      weight_decay=0.1, grad_clip=1., b1=0.9, b2=0.95, eval_every=6,
      checkpoint_every=5, log_every=3, keep=2,
      best_metric='ndcg@3') | overrides)


def make_batch(step: int, rows: int = 16) -> dict[str, np.ndarray]:
  x = np.random.default_rng(step).normal(size=(rows, 4)).astype(np.float32)
  return {'x': x, 'y': x @ np.float32([1., -1., .5, 2.])}


class Batches:
  """This process's rows of `make_batch`, with a hook for faults."""

  def __init__(self, hook=lambda step: None):
    self._hook = hook

  def __getitem__(self, step):
    self._hook(step)
    hosts, host = jax.process_count(), jax.process_index()
    return {k: np.split(v, hosts)[host] for k, v in make_batch(step).items()}


def init_params():
  rng = np.random.default_rng(0)
  return {'dense': {'w': rng.normal(size=(4, 16)).astype(np.float32),
                    'bias': np.zeros(16, np.float32)},
          'out': np.full(16, 0.1, np.float32)}


def loss_fn(params, batch, key):
  hidden = jnp.tanh(batch['x'] @ params['dense']['w'] + params['dense']['bias'])
  hidden *= jax.random.bernoulli(key, 0.9, hidden.shape)
  error = hidden @ params['out'] - batch['y']
  return (scoring.Mean(jnp.square(error).sum(), error.size),), {
      'error/absolute': scoring.Mean(jnp.abs(error).sum(), error.size),
      'tokens': jnp.float32(error.size)}


def validate(params):
  # Peaks at a middle step, so that best and last checkpoints differ.
  size = jax.jit(lambda p: jnp.square(p['out']).mean())(params)
  return {'ndcg@3': -abs(float(size) - 0.1), 'recall@1': 0.5}


def train(directory, *, devices=None, mesh=None, batches=None, **kwargs):
  """Trains the toy; keywords override the pieces handed to the loop."""
  mesh = sharding.make_mesh(mesh or dict(data=-1, fsdp=1, tensor=1), devices)
  return loop.train(**(dict(
      stage=STAGE, loss_fn=loss_fn, params=init_params(),
      batches=batches or Batches(), validate=validate, config=get_config(),
      workdir=pathlib.Path(directory), mesh=mesh, rules=RULES, seed=3)
                       | kwargs))


def _die_at(where: str, step: int) -> loop.Batches:
  """Arranges for SIGKILL; returns the batches to train on."""
  kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
  if where == 'save':
    checksums = workdir.checksums
    def patched(path):
      if path.name == str(step):
        kill()
      return checksums(path)
    workdir.checksums = patched
  elif where == 'log':
    write = metrics_logging.MetricsWriter.write
    def patched_write(self, at, values, timing):
      if at == step:
        self._file.write('{"stage": "toy", "st')
        self._file.flush()
        kill()
      write(self, at, values, timing)
    metrics_logging.MetricsWriter.write = patched_write
  return Batches(lambda at: where == 'batch' and at == step and kill())


def main(argv, log):
  """Runs the toy; stderr goes to the file `log`, kept open as it is."""
  os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
  parser = argparse.ArgumentParser()
  parser.add_argument('directory')
  parser.add_argument('--devices', type=int, default=1)
  parser.add_argument('--mesh', default='-1,1,1')
  parser.add_argument('--die')
  parser.add_argument('--term', type=int)
  parser.add_argument('--process', help='INDEX/COUNT@PORT')
  args = parser.parse_args(argv)
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', args.devices)
  if args.process:
    index, rest = args.process.split('/')
    count, port = rest.split('@')
    jax.distributed.initialize(f'127.0.0.1:{port}', int(count), int(index))
  batches = Batches()
  if args.die:
    where, step = args.die.split('@')
    batches = _die_at(where, int(step))
  if args.term is not None:
    batches = Batches(lambda at: at == args.term and os.kill(
        os.getpid(), signal.SIGTERM))
  mesh = dict(zip(sharding.AXES, map(int, args.mesh.split(','))))
  try:
    train(args.directory, batches=batches, mesh=mesh)
  except loop.Interrupted as e:
    sys.exit(str(e))

