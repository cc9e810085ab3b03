r"""Whether mid-training helps the AR re-ranker, at equal steps of `ar_sft`.

    python -m dgr2_jax.main --config=configs/quickstart.py:full,cooccurrence \
        --workdir=BASE --stage=prepare  # and again with --stage=mid_train
    python experiments/mid_training/run.py --base=BASE --workdir=DIR \
        --steps 300 600

`ar_sft` is trained from BASE's mid-trained weights and from random ones, on the
same records with the same vocabulary and order of batches, for several numbers
of steps; its last weights decode requests of validation and test, all or
--requests of each. Writes mid_training.json and mid_training.md here. A variant
that DIR already holds is not trained again.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
from typing import Any

from absl import logging
import jax
import numpy as np

from dgr2_jax.decoding import commit
from dgr2_jax.evaluation import environment
from dgr2_jax.evaluation import intervals
from dgr2_jax.evaluation import metrics
from dgr2_jax.evaluation import responses
from dgr2_jax.evaluation import rows
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib
from dgr2_jax.objectives import denoising
from dgr2_jax.objectives import rewards
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import losses
from dgr2_jax.training import variants

HERE = pathlib.Path(__file__).parent
SPLITS = ('validation', 'test')
RECIPE = ['ar_sft', 'convert', 'cft']
# Start -> fields of the config.
STARTS = {'random': {'recipe': RECIPE},
          'mid-trained': {'recipe': ['mid_train', *RECIPE]}}
METRICS = rows.KEY_METRICS


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def sft_loss(model: transformer.Transformer,
             objective: denoising.DenoisingConfig,
             vocabulary: vocabulary_lib.Vocabulary, params: Any,
             batch: dict[str, jax.Array]) -> jax.Array:
  return denoising.loss(
      model, params, batch, jax.random.key(0), canvas_lib.AUTOREGRESSIVE,
      objective, vocabulary)[0].value


def response_nats(experiment: experiment_lib.Experiment, params: Any,
                  batches: list[dict[str, np.ndarray]]) -> float:
  """Mean loss of `ar_sft` on the teacher's responses."""
  objective = losses.objective_of(
      denoising.DenoisingConfig, experiment.config.ar_sft)
  return float(np.mean([
      sft_loss(experiment.model, objective, experiment.vocabulary, params,
               batch) for batch in batches if batch['valid'].all()]))


def measure(experiment: experiment_lib.Experiment, params: Any, split: str,
            requests: int) -> tuple[dict[str, float], dict[str, np.ndarray]]:
  """Figures of greedy AR decoding, and the metrics of every request."""
  batches = experiment.eval_batches(
      split, experiment.config.evaluate.batch_size, requests)
  targets = experiment.data.target_positions(split)[
      :sum(int(batch['valid'].sum()) for batch in batches)]
  outcome = responses.outcome('', responses.decode_split(
      experiment.model, params, batches, rule=commit.Threshold(1.),
      vocabulary=experiment.vocabulary, mesh=experiment.mesh,
      canvas=canvas_lib.AUTOREGRESSIVE, config=experiment.decode_config(),
      what=split), experiment.parser, targets,
      experiment.config.data.num_candidates, rewards.RewardConfig())
  values = metrics.per_request(metrics.rank_of_target(outcome.orders, targets))
  return {
      'nats': response_nats(experiment, params, batches),
      **rows.figures(outcome, targets)}, {
          name: values[name] for name in METRICS}


def differences(after: dict[str, np.ndarray], before: dict[str, np.ndarray],
                config: Any) -> dict[str, list[float]]:
  """By metric: the paired difference and its 95% interval."""
  result = {}
  for name in METRICS:
    low, high = intervals.paired_bootstrap(
        after[name], before[name], seed=config.seed,
        resamples=config.evaluate.bootstrap_resamples).tolist()
    result[name] = [float(np.mean(after[name] - before[name])), low, high]
  return result


def held_out(base: pathlib.Path) -> dict[str, dict[str, float]]:
  """Step -> log-probabilities of held-out tokens, of `mid_train`."""
  lines = map(json.loads, (base / 'metrics.jsonl').read_text(
      encoding='utf-8').splitlines())
  return {str(line['step']): {
      k.removeprefix('validation/'): v for k, v in line.items()
      if k.endswith('logprob')}
          for line in lines if line['stage'] == 'mid_train'
          and 'validation/logprob' in line}


def table(results: dict[str, Any]) -> str:
  """The text of mid_training.md."""
  lines = [
      '# ar_sft with and without mid-training', '',
      'Written by run.py. Nats: the loss of ar_sft on the responses to learn. '
      'Change: Recall@1 and NDCG@3 from mid-trained weights minus from random '
      'ones at equal steps of ar_sft, with the 95% interval, paired over '
      'requests. '
      + ', '.join(f'{k} {v}' for k, v in results['environment'].items()) + '.']
  for split in SPLITS:
    points = [p for p in results['points'] if p['split'] == split]
    lines += ['', f'{points[0]["n"]:,} {split} requests:', '',
              '| ar_sft steps | start | nats | Recall@1 | change | NDCG@3 '
              '| change | valid |', '|---|---|---|---|---|---|---|---|']
    for p in points:
      change = {name: '{:+.3f} [{:+.3f}, {:+.3f}]'.format(*p['change'][name])
                if 'change' in p else '-' for name in METRICS}
      lines.append(
          f'| {p["steps"]:,} | {p["start"]} | {p["nats"]:.3f} | '
          + ' | '.join(f'{p[name]:.3f} | {change[name]}' for name in METRICS)
          + f' | {p["valid_rate"]:.3f} |')
  tasks = list(next(iter(results['held_out'].values())))
  lines += ['', 'Held-out log-probability a token in mid-training, nats:', '',
            '| step | ' + ' | '.join(
                'all' if task == 'logprob' else task.removesuffix('_logprob')
                for task in tasks) + ' |', '|---' * (len(tasks) + 1) + '|']
  lines += [
      f'| {step} | ' + ' | '.join(f'{v[task]:.3f}' for task in tasks) + ' |'
      for step, v in results['held_out'].items()]
  return '\n'.join(lines) + '\n'


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--base', type=pathlib.Path, required=True)
  parser.add_argument('--workdir', type=pathlib.Path, required=True)
  parser.add_argument('--steps', type=int, nargs='+', required=True,
                      help='of ar_sft')
  parser.add_argument('--requests', type=int, default=0,
                      help='decoded of each split; 0: all')
  args = parser.parse_args()
  logging.set_verbosity(logging.INFO)
  logging.use_absl_handler()
  base, points = args.base.resolve(), []
  for steps in args.steps:
    first = {}
    for start, fields in STARTS.items():
      logging.info('ar_sft: %d steps, %s.', steps, start)
      config = variants.config_of(base, 'ar_sft',
                                  fields | {'ar_sft.steps': steps})
      workdir = variants.directory(args.workdir, f'{start}_{steps}')
      variants.train(base, workdir, 'ar_sft', config)
      experiment = experiment_lib.Experiment(config, workdir)
      params = variants.last_params(workdir, 'ar_sft')
      for split in SPLITS:
        point, values = measure(experiment, params, split, args.requests)
        if split in first:
          point['change'] = differences(values, first[split], config)
        first.setdefault(split, values)
        points.append({'steps': steps, 'start': start, 'split': split, **point})
    # What is there already is worth keeping if the next one is not waited for.
    results = {'environment': environment.environment('jax'),
               'held_out': held_out(base),
               'points': points}
    text = table(results)
    for name, content in (('json', json.dumps(results, indent=1) + '\n'),
                          ('md', text)):
      (HERE / f'mid_training.{name}').write_text(content)
  print(text)


if __name__ == '__main__':
  main()
