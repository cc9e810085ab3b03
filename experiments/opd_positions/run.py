"""OPD on the quickstart: which positions may the causal teacher teach?

    python -m dgr2_jax.main --config=configs/quickstart.py --workdir=BASE
    python experiments/opd_positions/run.py --base=BASE --workdir=DIR

BASE is a finished quickstart. Every variant distils its `cft` weights with the
same prompts, steps and rates, and its last weights are decoded on all requests
of validation and test at several thresholds; results.json and results.md are
written here. A variant that DIR already holds is not trained again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
from typing import Any

from absl import logging
import jax
import ml_collections
from orbax.checkpoint import v1 as ocp

from dgr2_jax.evaluation import metrics
from dgr2_jax.evaluation import responses
from dgr2_jax.evaluation import rows
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.objectives import rewards
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import stages
from dgr2_jax.training import validation
from dgr2_jax.training import workdir as workdir_lib

HERE = pathlib.Path(__file__).parent
THRESHOLDS = (1., .9, .6, .4)
SPLITS = ('validation', 'test')
BEFORE = 'before OPD (cft)'
# Name -> fields of config.opd.
VARIANTS = {
    'all, as published': dict(positions='all', elsewhere='none'),
    'nothing right, else nothing': dict(
        positions='nothing_right', elsewhere='none'),
    'nothing right, else cross-entropy': dict(
        positions='nothing_right', elsewhere='cross_entropy'),
    'cross-entropy only': dict(divergence='none'),
    'all, teacher corrected': dict(positions='corrected', elsewhere='none'),
    'nothing right, else cross-entropy, own clean stream teaches': dict(
        positions='nothing_right', elsewhere='cross_entropy', teacher='self'),
}


def config_of(base: pathlib.Path, fields: dict) -> ml_collections.ConfigDict:
  """BASE's config with an `opd` stage of these fields, not selected."""
  config = ml_collections.ConfigDict(
      json.loads((base / 'config.json').read_text(encoding='utf-8')))
  config.opd.update(fields)
  # Only the end is validated: the best is what it is, not a lucky step.
  config.opd.update(eval_every=config.opd.steps,
                    checkpoint_every=config.opd.steps)
  validation.check(config)
  return config


def last_params(workdir: pathlib.Path, stage: str) -> Any:
  """The weights that a complete stage ended with, good or bad."""
  directory = workdir / 'checkpoints' / stage
  done = json.loads((directory / 'complete.json').read_text(encoding='utf-8'))
  return ocp.load_checkpointables(directory / str(done['step']))['params']


def measure(experiment: experiment_lib.Experiment, params: Any) -> list[dict]:
  """Weights on the requests of both splits, AR and by threshold."""
  points = []
  for split, threshold in itertools.product(SPLITS, ('ar', *THRESHOLDS)):
    batches = experiment.eval_batches(
        split, experiment.config.evaluate.batch_size)
    targets = experiment.data.target_positions(split)
    autoregressive = threshold == 'ar'
    outcome = responses.outcome('opd', responses.decode_split(
        experiment.model, params, batches,
        threshold=1. if autoregressive else threshold,
        vocabulary=experiment.vocabulary, mesh=experiment.mesh,
        canvas=(canvas_lib.AUTOREGRESSIVE if autoregressive
                else experiment.canvas),
        config=experiment.decode_config()), experiment.parser, targets,
        experiment.config.data.num_candidates, rewards.RewardConfig())
    ranks = metrics.means(metrics.rank_of_target(outcome.orders, targets))
    points.append({
        'split': split, 'threshold': threshold, 'n': len(targets),
        'reward': float(outcome.rewards.mean()),
        **{name: ranks[name] for name in ('recall@1', 'ndcg@3')},
        'valid_rate': rows.validity(outcome.failures)['valid_rate'],
        'tokens_per_forward': float(
            outcome.tokens.sum() / outcome.calls.sum())})
  return points


def table(results: dict[str, list[dict]]) -> str:
  """results.md."""
  lines = ['# OPD by position', '', 'Written by run.py.']
  for split in SPLITS:
    first, *_ = (p for p in results[BEFORE] if p['split'] == split)
    lines += ['', f'{first["n"]:,} {split} requests:', '',
              '| variant | tau | reward | Recall@1 | NDCG@3 | valid | TPF |',
              '|---|---|---|---|---|---|---|']
    lines += [
        f'| {name} | {p["threshold"]} | {p["reward"]:.3f} | '
        f'{p["recall@1"]:.3f} | {p["ndcg@3"]:.3f} | {p["valid_rate"]:.3f} | '
        f'{p["tokens_per_forward"]:.2f} |'
        for name, points in results.items() for p in points
        if p['split'] == split]
  return '\n'.join(lines) + '\n'


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--base', type=pathlib.Path, required=True)
  parser.add_argument('--workdir', type=pathlib.Path, required=True)
  args = parser.parse_args()
  if not (args.base / 'config.json').exists():
    parser.error(f'--base={args.base}: no config.json; run the quickstart '
                 'there first')
  logging.set_verbosity(logging.INFO)
  logging.use_absl_handler()
  results = {}
  for name, fields in VARIANTS.items():
    config = config_of(args.base.resolve(), fields)
    # Named by its fields: others train in a directory of their own.
    workdir = args.workdir.resolve() / '-'.join(map(str, fields.values()))
    earlier = config.recipe[:config.recipe.index('opd')]
    with workdir_lib.open_workdir(workdir, config):
      (workdir / 'checkpoints').mkdir(exist_ok=True)
      for shared in ('data', *(f'checkpoints/{stage}' for stage in earlier)):
        if not (workdir / shared).is_symlink():
          (workdir / shared).symlink_to(args.base.resolve() / shared)
      logging.info('Variant: %s.', name)
      stages.run(config, workdir, 'opd')
    experiment = experiment_lib.Experiment(config, workdir)
    if not results:
      results[BEFORE] = measure(
          experiment, experiment.restore('cft'))
    results[name] = measure(experiment, last_params(workdir, 'opd'))
    jax.clear_caches()
  (HERE / 'results.json').write_text(json.dumps(results, indent=1) + '\n')
  (HERE / 'results.md').write_text(table(results))
  print(table(results))


if __name__ == '__main__':
  main()
