r"""What training must have shown for each way to decode, a choice at a time.

    python -m dgr2_jax.main --config=configs/quickstart.py --workdir=BASE
    python experiments/decoding/training.py --base=BASE --workdir=DIR

BASE is a finished quickstart. Every variant of `cft` or `opd` trains from the
weights that BASE had before the stage, with the same data, noise keys and
steps, and its last weights decode all test requests autoregressively, by
threshold, fused (the commit pass is the next block's first denoising step) and
verified, with windows at the pivot and on the training grid. "As AR" is the
share of tokens that the same weights, where their clean stream is an AR model,
would have written autoregressively behind those before them, "as unfused" the
share of fused responses that are the unfused ones, token for token. Writes
training.json and training.md here. A variant that DIR already holds is not
trained again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from typing import Any

from absl import logging
import jax
import numpy as np

from dgr2_jax.decoding import block_decoder
from dgr2_jax.decoding import commit
from dgr2_jax.decoding import verification
from dgr2_jax.evaluation import environment
from dgr2_jax.evaluation import responses
from dgr2_jax.evaluation import rows
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.objectives import rewards
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import variants

HERE = pathlib.Path(__file__).parent
# name -> stage and fields of the config; the others are BASE's.
VARIANTS = {
    'CFT as configured': ('cft', {}),
    'CFT, no AR term': ('cft', {'cft.ar_weight': 0.}),
    'CFT, random offsets': ('cft', {'cft.random_offset': True}),
    'CFT, half of the blocks masked whole': (
        'cft', {'cft.full_block_prob': .5}),
    # A block-causal clean stream is no AR model that could be trained along.
    'CFT, no AR term, block-causal clean stream': ('cft', {
        'canvas.clean_stream': 'block_causal', 'cft.ar_weight': 0.,
        'rl.ar_weight': 0.}),
    'CFT, same position': ('cft', {'canvas.alignment': 'same_position'}),
    'OPD as configured': ('opd', {}),
    'OPD, AR term': ('opd', {'opd.ar_weight': .5}),
    'OPD, all steps of a rollout': (
        'opd', {'opd.rollout.canvases': 'all'}),
}
_ONCE = commit.Threshold(1.)


def modes_of(canvas: canvas_lib.CanvasConfig) -> dict[str, dict[str, Any]]:
  """name -> arguments of `decode_split`, and `fused`."""
  blocks = {
      f'{name} {tau}': dict(canvas=canvas, rule=commit.Threshold(tau),
                            draft=None, fused=name == 'fused')
      for name in ('tau', 'fused') for tau in (.9, .6)}
  if not canvas.verifiable:
    return blocks
  return {
      'autoregressive': dict(canvas=canvas_lib.AUTOREGRESSIVE, rule=_ONCE,
                             draft=None, fused=False),
      **blocks,
      **{f'verified, {window}': dict(canvas=canvas, rule=_ONCE, fused=False,
                                     draft=verification.DraftConfig(1, window))
         for window in verification.WINDOWS}}


def as_autoregressive(experiment: experiment_lib.Experiment, params: Any,
                      batches: list[dict[str, np.ndarray]],
                      rollout: block_decoder.Rollout) -> float:
  """The share of tokens that the AR stream would have written there itself."""
  model, vocabulary = experiment.model, experiment.vocabulary

  @jax.jit
  def own(batch, response):
    states = canvas_lib.states(
        model, params, canvas_lib.autoregressive(
            batch['prompt'], batch['prompt_length'], response[:, None]),
        vocabulary.mask_id, canvas_lib.AUTOREGRESSIVE).clean[:, 0]
    return vocabulary.allow(model.apply(
        {'params': params}, states, method='logits')).argmax(-1)

  begin, agree = 0, 0
  for batch in batches:
    rows = np.flatnonzero(batch['valid'])
    tokens = np.zeros((len(batch['valid']), rollout.tokens.shape[1]), np.int32)
    mine = slice(begin, begin + len(rows))
    tokens[rows], begin = rollout.tokens[mine], mine.stop
    got = own({k: batch[k] for k in ('prompt', 'prompt_length')}, tokens)
    stands = np.arange(tokens.shape[1]) < rollout.length[mine][:, None]
    agree += ((np.asarray(got) == tokens)[rows] & stands).sum()
  return float(agree / rollout.length.sum())


def equal(a: block_decoder.Rollout, b: block_decoder.Rollout) -> float:
  """The share of responses that are the same, through EOS."""
  behind = np.arange(a.tokens.shape[1]) >= a.length[:, None]
  same = ((a.tokens == b.tokens) | behind).all(1) & (a.length == b.length)
  return float(same.mean())


def measure(experiment: experiment_lib.Experiment,
            params: Any) -> dict[str, dict[str, float]]:
  """mode -> figures over all test requests."""
  targets = experiment.data.target_positions('test')
  batches = experiment.eval_batches(
      'test', experiment.config.evaluate.batch_size)
  points, rollouts = {}, {}
  for name, mode in modes_of(experiment.canvas).items():
    config = dataclasses.replace(
        experiment.decode_config(), fused=mode.pop('fused'))
    rollout = responses.decode_split(
        experiment.model, params, batches, vocabulary=experiment.vocabulary,
        mesh=experiment.mesh, config=config, what=name, **mode)
    outcome = responses.outcome(
        '', rollout, experiment.parser, targets,
        experiment.config.data.num_candidates, rewards.RewardConfig())
    points[name], rollouts[name] = rows.figures(outcome, targets), rollout
    if config.fused:
      points[name]['as_unfused'] = equal(
          rollout, rollouts[name.replace('fused', 'tau')])
    if experiment.canvas.verifiable:
      points[name]['as_ar'] = as_autoregressive(
          experiment, params, batches, rollout)
  return points


def table(content: dict[str, Any]) -> str:
  """The text of training.md."""
  results = content['results']
  n = next(iter(next(iter(results.values())).values()))['n']
  lines = [
      '# Decoding by what training shows', '',
      f'Written by training.py; {n:,} test requests. Machine: '
      f'{content["machine"]}; jax {content["jax"]}.', '',
      '| training | decoding | Recall@1 | NDCG@3 | valid | as AR | '
      'as unfused | tokens per forward |',
      '|---|---|---|---|---|---|---|---|']
  lines += [
      f'| {variant} | {mode} | {p["recall@1"]:.3f} | {p["ndcg@3"]:.3f} | '
      f'{p["valid_rate"]:.3f} | '
      + ' | '.join(f'{p[name]:.3f}' if name in p else '-'
                   for name in ('as_ar', 'as_unfused'))
      + f' | {p["tokens_per_forward"]:.2f} |'
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
  for name, (stage, fields) in VARIANTS.items():
    logging.info('%s.', name)
    if args.steps and stage == 'cft':
      fields = fields | {'cft.steps': args.steps}
    config = variants.config_of(base, stage, fields)
    workdir = variants.directory(args.workdir, name)
    variants.train(base, workdir, stage, config)
    experiment = experiment_lib.Experiment(config, workdir)
    results[name] = measure(experiment, variants.last_params(workdir, stage))
    jax.clear_caches()
  content = {'machine': environment.machine(), 'jax': jax.__version__,
             'cft_steps': args.steps, 'results': results}
  text = table(content)
  (HERE / 'training.json').write_text(json.dumps(content, indent=1) + '\n')
  (HERE / 'training.md').write_text(text)
  print(text)


if __name__ == '__main__':
  main()
