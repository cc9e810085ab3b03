r"""Accuracy, forwards and speed of every way to decode, by batch size.

    python experiments/decoding/frontier.py --workdir=WORKDIR --name=quickstart

Decodes the test requests of a finished working directory by commit rules,
verified and autoregressively, all with the same weights. Accuracy and forwards
are of all requests and do not depend on the batch; speed is measured on
`--requests` of them at every batch size, prefill included, in one run: the ways
take turns batch by batch, compilation and a first pass are left out, the median
of the passes counts. Writes frontier_<name>.json and .md here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from typing import Any

from absl import logging
import jax

from dgr2_jax.data import tokens as tokens_lib
from dgr2_jax.decoding import block_decoder
from dgr2_jax.decoding import commit
from dgr2_jax.decoding import verification
from dgr2_jax.evaluation import environment
from dgr2_jax.evaluation import responses
from dgr2_jax.evaluation import rows
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.objectives import rewards
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import workdir as workdir_lib

HERE = pathlib.Path(__file__).parent
AR = 'autoregressive'
RULES = {
    'tau 1': commit.Threshold(1.),
    'tau .9': commit.Threshold(.9),
    'tau .6': commit.Threshold(.6),
    'tau .4': commit.Threshold(.4),
    'tau .6, answer .9': commit.Threshold(.6, .9),
    'tau .4, answer .9': commit.Threshold(.4, .9),
    'factor .5': commit.Factor(.5),
    'factor 1': commit.Factor(1.),
    '4 steps a block': commit.FixedSteps(4),
    '2 steps a block': commit.FixedSteps(2),
    'adaptive .5 to 1': commit.Adaptive(.5),
    'adaptive .3 to 1': commit.Adaptive(.3),
}
DRAFTS = {
    'verified, pivot': verification.DraftConfig(1, 'pivot'),
    'verified, grid': verification.DraftConfig(1, 'grid'),
    'verified, pivot, 2 steps': verification.DraftConfig(2, 'pivot'),
    'verified, windows of 4, 8, 12 or 18': verification.DraftConfig(
        lengths=(4, 8, 12, 18)),
}


def modes_of(experiment: experiment_lib.Experiment) -> dict[str, dict]:
  """name -> arguments of `decode_split`."""
  once, canvas = commit.Threshold(1.), experiment.canvas
  modes = {AR: dict(canvas=canvas_lib.AUTOREGRESSIVE, rule=once, draft=None)}
  for name, rule in RULES.items():
    apart = getattr(rule, 'answer_tau', None) is not None
    if ((canvas.verifiable or not isinstance(rule, commit.Adaptive))
        and (experiment.candidate_ids() or not apart)):
      modes[name] = dict(canvas=canvas, rule=rule, draft=None)
  if canvas.verifiable:
    modes |= {name: dict(canvas=canvas, rule=once, draft=draft)
              for name, draft in DRAFTS.items()}
  return modes


def decode_config(
    experiment: experiment_lib.Experiment) -> block_decoder.DecodeConfig:
  """Greedy; rules that treat answers apart need their marker."""
  config = experiment.decode_config()
  if not experiment.candidate_ids():
    return config
  return dataclasses.replace(
      config, answer_marker=experiment.data.tokenizer.id(tokens_lib.ANSWER))


def accuracy(experiment: experiment_lib.Experiment, params: Any,
             mode: dict[str, Any]) -> dict[str, float]:
  """Metrics over all test requests."""
  targets = experiment.data.target_positions('test')
  outcome = responses.outcome('', responses.decode_split(
      experiment.model, params,
      experiment.eval_batches('test', experiment.config.evaluate.batch_size),
      vocabulary=experiment.vocabulary, mesh=experiment.mesh,
      config=decode_config(experiment), **mode),
                              experiment.parser, targets,
                              experiment.config.data.num_candidates,
                              rewards.RewardConfig())
  return rows.figures(outcome, targets)


def table(name: str, content: dict[str, Any]) -> str:
  sizes = content['batch_sizes']
  lines = [
      f'# Ways to decode: {name}', '',
      'Written by frontier.py. Speed: response tokens a second, '
      'autoregressive = 1 at the same batch size.', '',
      f'Machine: {content["machine"]}; jax {content["jax"]}; {content["n"]:,} '
      f'requests, {content["timed"]} of them timed, median of '
      f'{content["repetitions"]} passes.', '',
      '| decoding | Recall@1 | NDCG@3 | valid | tokens per forward | '
      + ' | '.join(f'speed, batch {size}' for size in sizes) + ' |',
      '|---|---|---|---|---|' + '---|' * len(sizes)]
  for p in content['points']:
    lines.append(
        f'| {p["decoding"]} | {p["recall@1"]:.3f} | {p["ndcg@3"]:.3f} | '
        f'{p["valid_rate"]:.3f} | {p["tokens_per_forward"]:.2f} | '
        + ' | '.join(f'{p["speed"][str(s)]:.2f}' for s in sizes) + ' |')
  return '\n'.join(lines) + '\n'


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--workdir', type=pathlib.Path, required=True)
  parser.add_argument('--name', required=True)
  parser.add_argument('--requests', type=int, default=64)
  parser.add_argument('--repetitions', type=int, default=5)
  parser.add_argument('--batch_sizes', type=int, nargs='+',
                      default=[1, 8, 32])
  args = parser.parse_args()
  if min(args.repetitions, args.requests, *args.batch_sizes) < 1:
    parser.error('expected --repetitions, --requests and --batch_sizes of at '
                 'least 1')
  logging.set_verbosity(logging.INFO)
  config = workdir_lib.read_config(args.workdir)
  experiment = experiment_lib.Experiment(config, args.workdir.absolute())
  stage = config.recipe[-1]
  params, modes = experiment.restore(stage), modes_of(experiment)
  points = {}
  for name, mode in modes.items():
    points[name] = {'decoding': name, 'speed': {},
                    **accuracy(experiment, params, mode)}
    logging.info('%s', points[name])
  for size in args.batch_sizes:
    speeds = responses.tokens_per_second(
        experiment.model, params,
        experiment.eval_batches('test', size, args.requests), modes,
        vocabulary=experiment.vocabulary,
        config=decode_config(experiment),
        repetitions=args.repetitions)
    for name, speed in speeds.items():
      points[name]['speed'][str(size)] = speed / speeds[AR]
    logging.info('Batch %d timed.', size)
  content = {
      'stage': stage, 'jax': jax.__version__, 'batch_sizes': args.batch_sizes,
      'machine': environment.machine(),
      'n': points[AR]['n'], 'timed': min(args.requests, points[AR]['n']),
      'repetitions': args.repetitions, 'points': list(points.values())}
  text = table(f'{args.name}, weights of {stage}', content)
  (HERE / f'frontier_{args.name}.json').write_text(
      json.dumps(content, indent=1) + '\n')
  (HERE / f'frontier_{args.name}.md').write_text(text)
  print(text)


if __name__ == '__main__':
  main()
