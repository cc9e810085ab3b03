r"""OPD, RL and the AR model's RL on the quickstart, one choice at a time.

    python experiments/on_policy/run.py --stage=rl --base=BASE --workdir=DIR

BASE is a finished quickstart as it was; README.md has the command. Every
variant of the stage, ar_rl, opd or rl, trains from the weights that BASE had
before it, with the same prompts, and its last weights are decoded on all
requests of validation and test at several thresholds, the AR model's token by
token; <stage>.json and <stage>.md are written to --output, here by default. A
variant that DIR already holds is not trained again. BASE may be another run,
such as one of beauty_small; --variants picks some by their names' first words
or, with =, by the whole name.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
from typing import Any

from absl import logging
import jax
import numpy as np

from dgr2_jax.decoding import commit
from dgr2_jax.evaluation import intervals
from dgr2_jax.evaluation import responses
from dgr2_jax.evaluation import rows
from dgr2_jax.objectives import rewards
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import losses
from dgr2_jax.training import variants

HERE = pathlib.Path(__file__).parent
THRESHOLDS = (.9, .6, .4)
# Of metrics.jsonl: groups whose responses all earn the same, and groups of the
# update batches that count.
GROUPS = ('same_reward_share', 'kept_share')
SPLITS = ('validation', 'test')


def distilled(positions: str, elsewhere: str, teacher: str = 'ar',
              **other: Any) -> dict[str, Any]:
  return {'opd.positions': positions, 'opd.elsewhere': elsewhere,
          'opd.teacher': teacher,
          **{f'opd.{name}': value for name, value in other.items()}}


def rolled_out(threshold: float, temperature: float, cft_weight: float = 0.
               ) -> dict[str, Any]:
  return {'rl.rollout.threshold': threshold,
          'rl.rollout.temperature': temperature, 'rl.cft_weight': cft_weight}


def longer(steps: int, **other: Any) -> dict[str, Any]:
  return {'ar_rl.steps': steps,
          **{f'ar_rl.{name}': value for name, value in other.items()}}


AT_HALF = {'opd.rollout.threshold': .5}
# Stage -> name -> fields of the config.
VARIANTS = {
    'ar_rl': {
        'as configured': {},
        'SFT mixed in': {'ar_rl.cft_weight': 1.},
        'five times the updates, three times the learning rate': longer(
            200, learning_rate=3e-4),
        'five times the updates, groups of 32': {
            **longer(200), 'ar_rl.rollout.num_rollouts': 32},
        'five times the updates, SFT mixed in': longer(200, cft_weight=1.),
    },
    'opd': {
        'all, as published': distilled('all', 'none'),
        'nothing right, else nothing': distilled('nothing_right', 'none'),
        'nothing right, else cross-entropy': distilled(
            'nothing_right', 'cross_entropy'),
        'nothing right, else cross-entropy, three times the learning rate':
            distilled('nothing_right', 'cross_entropy', learning_rate=3e-4),
        'nothing right, else cross-entropy, a third of the learning rate':
            distilled('nothing_right', 'cross_entropy', learning_rate=3e-5),
        "nothing right, else cross-entropy, cft's AR stream teaches":
            distilled('nothing_right', 'cross_entropy', teacher='cft'),
        'cross-entropy only': {'opd.divergence': 'none'},
        'all, teacher corrected': distilled('corrected', 'none'),
        'nothing right, else cross-entropy, own clean stream teaches':
            distilled('nothing_right', 'cross_entropy', teacher='self'),
        'nothing right, else cross-entropy, own clean stream teaches, CFT':
            distilled('nothing_right', 'cross_entropy', teacher='self',
                      cft_weight=1.),
        'cross-entropy only, CFT': {'opd.divergence': 'none',
                                    'opd.cft_weight': 1.},
        **{f'own clean stream teaches: {positions}': distilled(
            positions, 'none', teacher='self')
           for positions in ('all', 'nothing_right', 'corrected')},
        'rollouts at tau .5: all, as published':
            AT_HALF | distilled('all', 'none'),
        'rollouts at tau .5: nothing right, else cross-entropy':
            AT_HALF | distilled('nothing_right', 'cross_entropy'),
        'rollouts at tau .5: cross-entropy only':
            AT_HALF | {'opd.divergence': 'none'},
    },
    'rl': {
        'as configured': {},
        'as configured, four rounds of prompts': {'rl.rollout.refill': 4},
        'as configured, groups of 16': {'rl.rollout.num_rollouts': 16},
        'as configured, temperature 1': {'rl.rollout.temperature': 1.},
        'rollouts at tau .9, temperature 1': rolled_out(.9, 1.),
        'rollouts at tau .4, temperature .5': rolled_out(.4, .5),
        'tau .4, temperature .5, CFT 1': rolled_out(.4, .5, cft_weight=1.),
        'tau .4, temperature .5, CFT .3': rolled_out(.4, .5, cft_weight=.3),
        'tau .4, temperature .5, CFT .3, twice the updates':
            rolled_out(.4, .5, cft_weight=.3) | {'rl.steps': 200},
        'four updates a round, else the last': rolled_out(
            .4, .5, cft_weight=.3) | {
                'rl.steps': 200, 'rl.rollout.updates': 4, 'rl.eval_every': 40},
    },
}


class Measured:
  """Weights on the requests of both splits, by threshold.

  Attributes:
    points: what the results hold, one a split and threshold.
  """

  def __init__(self, experiment: experiment_lib.Experiment, stage: str,
               params: Any, before: Measured | None = None):
    config, self.points, self._rewards = experiment.config, [], []
    canvas = losses.canvas_of(experiment, stage)
    thresholds = THRESHOLDS if canvas == experiment.canvas else (1.,)
    for split, threshold in itertools.product(SPLITS, thresholds):
      targets = experiment.data.target_positions(split)
      outcome = responses.outcome('', responses.decode_split(
          experiment.model, params,
          experiment.eval_batches(split, config.evaluate.batch_size),
          rule=commit.Threshold(threshold), vocabulary=experiment.vocabulary,
          mesh=experiment.mesh, canvas=canvas,
          config=experiment.decode_config()), experiment.parser, targets,
          config.data.num_candidates,
          rewards.RewardConfig(**config[stage].reward))
      point = {
          'split': split, 'threshold': threshold,
          'reward': float(outcome.rewards.mean()),
          **rows.figures(outcome, targets)}
      if before:
        earlier = before._rewards[len(self.points)]
        point['change'] = float(np.mean(outcome.rewards - earlier))
        point['ci'] = intervals.paired_bootstrap(
            outcome.rewards, earlier, seed=config.seed,
            resamples=config.evaluate.bootstrap_resamples).tolist()
      self.points.append(point)
      self._rewards.append(outcome.rewards)


def table(stage: str, results: dict[str, list[dict]]) -> str:
  """The text of <stage>.md."""
  lines = [f'# Variants of {stage}', '',
           'Written by run.py. Change: of the mean reward over the weights '
           'before the stage, with its 95% interval, paired over requests.']
  for split in SPLITS:
    points = [(name, p) for name, points in results.items()
              for p in points if p['split'] == split]
    lines += ['', f'{points[0][1]["n"]:,} {split} requests:', '',
              '| variant | tau | reward | change | Recall@1 | NDCG@3 | valid '
              '| TPF |', '|---|---|---|---|---|---|---|---|']
    for name, p in points:
      change = ('{:+.3f} [{:+.3f}, {:+.3f}]'.format(p['change'], *p['ci'])
                if 'change' in p else '-')
      lines.append(
          f'| {name} | {p["threshold"]} | {p["reward"]:.3f} | {change} | '
          f'{p["recall@1"]:.3f} | {p["ndcg@3"]:.3f} | {p["valid_rate"]:.3f} | '
          f'{p["tokens_per_forward"]:.2f} |')
  rollouts = {name: points[0] for name, points in results.items()
              if set(GROUPS) <= points[0].keys()}
  if rollouts:
    lines += ['', 'Groups of rollouts, shares over the training:', '',
              '| variant | of equal reward, of all | that count, of a batch |',
              '|---|---|---|']
    lines += [f'| {name} | ' + ' | '.join(
        f'{point[share]:.2f}' for share in GROUPS) + ' |'
              for name, point in rollouts.items()]
  return '\n'.join(lines) + '\n'


def group_shares(workdir: pathlib.Path, stage: str) -> dict[str, float]:
  """Means of `GROUPS` over the training of a stage."""
  with open(workdir / 'metrics.jsonl', encoding='utf-8') as f:
    logged = [line for line in map(json.loads, f)
              if line['stage'] == stage and f'train/{GROUPS[0]}' in line]
  return {share: float(np.mean([line[f'train/{share}'] for line in logged]))
          for share in GROUPS}


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--stage', choices=VARIANTS, required=True)
  parser.add_argument('--base', type=pathlib.Path, required=True)
  parser.add_argument('--workdir', type=pathlib.Path, required=True)
  parser.add_argument('--variants', nargs='+', default=[''],
                      help='how their names begin; all by default')
  parser.add_argument('--output', type=pathlib.Path, default=HERE)
  args = parser.parse_args()
  base = args.base.resolve()
  chosen = {name: fields for name, fields in VARIANTS[args.stage].items()
            if any(f'={name}' == words or name.startswith(words)
                   for words in args.variants)}
  if not chosen:
    parser.error('--variants: none begins so; expected one of '
                 + '; '.join(VARIANTS[args.stage]))
  logging.set_verbosity(logging.INFO)
  logging.use_absl_handler()
  results, start = {}, None
  for name, fields in chosen.items():
    logging.info('Variant of %s: %s.', args.stage, name)
    config = variants.config_of(base, args.stage, fields)
    workdir = variants.directory(args.workdir / args.stage, name)
    variants.train(base, workdir, args.stage, config)
    experiment = experiment_lib.Experiment(config, workdir)
    if start is None:
      before = experiment.before(args.stage)
      start = Measured(experiment, args.stage, experiment.restore(before))
      results[f'before: {before}'] = start.points
    results[name] = Measured(
        experiment, args.stage, variants.last_params(workdir, args.stage),
        start).points
    if args.stage != 'opd':  # whose groups all count
      results[name][0] |= group_shares(workdir, args.stage)
    jax.clear_caches()
  text = table(args.stage, results)
  for kind, content in (('json', json.dumps(results, indent=1) + '\n'),
                        ('md', text)):
    (args.output / f'{args.stage}.{kind}').write_text(content)
  print(text)


if __name__ == '__main__':
  main()
