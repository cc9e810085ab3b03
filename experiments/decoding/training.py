r"""What CFT must have shown for each way to decode, one choice at a time.

    python -m dgr2_jax.main --config=configs/quickstart.py --workdir=BASE
    python experiments/decoding/training.py --base=BASE --workdir=DIR

BASE is a finished quickstart. Every variant of `cft` trains from BASE's AR
weights with the same data, noise keys and steps, and its last weights decode
all test requests autoregressively, by threshold, fused (the commit pass is the
next block's first denoising step) and verified, with windows at the pivot and
on the training grid. Writes training.json and training.md here. A variant that
DIR already holds is not trained again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from typing import Any

from absl import logging
import jax

from dgr2_jax.decoding import commit
from dgr2_jax.decoding import verification
from dgr2_jax.evaluation import responses
from dgr2_jax.evaluation import rows
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.objectives import rewards
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import variants

HERE = pathlib.Path(__file__).parent
# name -> fields of the config; the others are BASE's.
VARIANTS = {
    'as configured': {},
    'no AR term': {'cft.ar_weight': 0.},
    'random offsets': {'cft.random_offset': True},
    'half of the blocks masked whole': {'cft.full_block_prob': .5},
}
_ONCE = commit.Threshold(1.)


def modes_of(canvas: canvas_lib.CanvasConfig) -> dict[str, dict[str, Any]]:
  """name -> arguments of `decode_split`, and `fused`."""
  verified = {f'verified, {window}': dict(
      canvas=canvas, rule=_ONCE, fused=False,
      draft=verification.DraftConfig(1, window))
              for window in verification.WINDOWS}
  return {
      'autoregressive': dict(canvas=canvas_lib.AUTOREGRESSIVE, rule=_ONCE,
                             draft=None, fused=False),
      **{f'{name} {tau}': dict(canvas=canvas, rule=commit.Threshold(tau),
                               draft=None, fused=name == 'fused')
         for name in ('tau', 'fused') for tau in (.9, .6)},
      **verified}


def measure(experiment: experiment_lib.Experiment,
            params: Any) -> dict[str, dict[str, float]]:
  """mode -> figures over all test requests."""
  targets = experiment.data.target_positions('test')
  batches = experiment.eval_batches(
      'test', experiment.config.evaluate.batch_size)
  points = {}
  for name, mode in modes_of(experiment.canvas).items():
    config = dataclasses.replace(
        experiment.decode_config(), fused=mode.pop('fused'))
    outcome = responses.outcome('', responses.decode_split(
        experiment.model, params, batches, vocabulary=experiment.vocabulary,
        mesh=experiment.mesh, config=config, what=name, **mode),
                                experiment.parser, targets,
                                experiment.config.data.num_candidates,
                                rewards.RewardConfig())
    points[name] = rows.figures(outcome, targets)
  return points


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
  """The text of training.md."""
  n = next(iter(next(iter(results.values())).values()))['n']
  lines = [
      '# CFT by what it shows', '',
      f'Written by training.py; {n:,} test requests.', '',
      '| CFT | decoding | Recall@1 | NDCG@3 | valid | tokens per forward |',
      '|---|---|---|---|---|---|']
  lines += [
      f'| {variant} | {mode} | {p["recall@1"]:.3f} | {p["ndcg@3"]:.3f} | '
      f'{p["valid_rate"]:.3f} | {p["tokens_per_forward"]:.2f} |'
      for variant, points in results.items() for mode, p in points.items()]
  return '\n'.join(lines) + '\n'


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--base', type=pathlib.Path, required=True)
  parser.add_argument('--workdir', type=pathlib.Path, required=True)
  parser.add_argument('--steps', type=int, default=0,
                      help='of CFT; 0: as many as BASE')
  args = parser.parse_args()
  logging.set_verbosity(logging.INFO)
  logging.use_absl_handler()
  base, results = args.base.resolve(), {}
  for name, fields in VARIANTS.items():
    logging.info('CFT: %s.', name)
    if args.steps:
      fields = fields | {'cft.steps': args.steps}
    config = variants.config_of(base, 'cft', fields)
    workdir = variants.directory(args.workdir, name)
    variants.train(base, workdir, 'cft', config)
    experiment = experiment_lib.Experiment(config, workdir)
    results[name] = measure(experiment, variants.last_params(workdir, 'cft'))
    jax.clear_caches()
  text = table(results)
  (HERE / 'training.json').write_text(json.dumps(results, indent=1) + '\n')
  (HERE / 'training.md').write_text(text)
  print(text)


if __name__ == '__main__':
  main()
