r"""A pretrained SmolLM2-135M through the recipe, and how fast it then decodes.

    python experiments/smollm2/checkpoint.py --output=CHECKPOINT
    python experiments/smollm2/run.py --checkpoint=CHECKPOINT --workdir=WORKDIR

Runs `prepare`, `ar_sft`, `convert` and `cft` of config.py, checks what became
of the weights, and decodes test requests one by one: autoregressively, by
threshold and verified, with the weights that CFT left; then in forced schedules
of so many equal denoising steps a block, which give the speed at the tokens per
forward that a trained model would reach. There EOS has no weight, so that all
responses are as long.

The ways take turns, compilation and a first pass are left out, the median of
the passes counts; prefill is timed apart. Writes smollm2.json and smollm2.md
here.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import runpy
import time
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from dgr2_jax.decoding import block_decoder
from dgr2_jax.decoding import commit
from dgr2_jax.decoding import verification
from dgr2_jax.evaluation import environment
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import losses
from dgr2_jax.training import stages
from dgr2_jax.training import validation
from dgr2_jax.training import workdir as workdir_lib

HERE = pathlib.Path(__file__).parent
CONFIG = runpy.run_path(str(HERE / 'config.py'))
SPEED = runpy.run_path(str(HERE.parent / 'decoding' / 'speed.py'))
AR = 'autoregressive'
VERIFIED = 'verified'
STEPS = (1, 2, 4)  # of a block, forced
CLOCKS = {'wall': time.perf_counter, 'cpu': time.process_time}


def train(checkpoint: pathlib.Path,
          workdir: pathlib.Path) -> experiment_lib.Experiment:
  """Runs the recipe, or what of it `workdir` does not hold yet."""
  config = CONFIG['get_config'](str(checkpoint.absolute()))
  validation.check(config)
  with workdir_lib.open_workdir(workdir, config) as directory:
    for stage in ('prepare', *config.recipe):
      stages.run(config, directory, stage)
  return experiment_lib.Experiment(config, directory)


def training_losses(workdir: pathlib.Path) -> dict[str, list[float]]:
  """Stage -> the loss of every step."""
  curves = {}
  for line in map(json.loads, (workdir / 'metrics.jsonl').read_text(
      encoding='utf-8').splitlines()):
    if 'train/loss' in line:
      curves.setdefault(line['stage'], []).append(line['train/loss'])
  return curves


def changed(before: Any, after: Any) -> dict[str, list]:
  """Rows of the embedding and names of other parameters that differ."""
  before, after = dict(before), dict(after)
  rows = (before.pop('embedding') != after.pop('embedding')).any(1)
  paths = jax.tree_util.tree_leaves_with_path(
      jax.tree.map(lambda x, y: bool((x != y).any()), before, after))
  return {'rows': np.flatnonzero(rows).tolist(),
          'others': [jax.tree_util.keystr(path) for path, x in paths if x]}


def learned(experiment: experiment_lib.Experiment) -> dict[str, Any]:
  """What `convert` changed, and CFT's loss of one batch before and after."""
  batch = experiment.eval_batches(
      'validation', experiment.config.evaluate.batch_size, 1)[0]
  loss = jax.jit(lambda params: losses.loss_of(experiment, 'cft')(
      params, batch, jax.random.key(0))[0][0].value)
  params = experiment.restore('convert')
  return {'mask_id': experiment.vocabulary.mask_id,
          'convert': changed(experiment.restore('ar_sft'), params),
          'cft_loss': [float(loss(params)),
                       float(loss(experiment.restore('cft')))]}


def points(experiment: experiment_lib.Experiment, params: Any,
           ways: dict[str, tuple[commit.Rule, dict[str, Any]]],
           requests: int, repetitions: int,
           clock: str) -> list[dict[str, Any]]:
  """One entry a way to decode the first test requests; speeds by `AR`'s."""
  prompts = [(jnp.asarray(batch['prompt']), jnp.asarray(batch['prompt_length']))
             for batch in experiment.eval_batches('test', 1, requests)]
  how = dict(vocabulary=experiment.vocabulary,
             config=experiment.decode_config())
  measured = SPEED['timed'](
      experiment.model, params, prompts,
      {name: (rule, how | more) for name, (rule, more) in ways.items()},
      repetitions, CLOCKS[clock])
  result = []
  for name, (rollouts, (prefilling, decoding)) in measured.items():
    tokens, calls = (sum(int(getattr(r, field)[0, 0]) for r in rollouts)
                     for field in ('length', 'calls'))
    result.append({
        'decoding': name, 'tokens': tokens, 'forwards': calls,
        'tokens_per_forward': tokens / calls,
        'differ': sum(not equal(*pair)
                      for pair in zip(rollouts, measured[AR][0])),
        'prefill_ms': 1e3 * prefilling / len(prompts),
        # A prefill is a forward, too.
        'forward_ms': 1e3 * decoding / (calls - len(prompts)),
        'tokens_per_second': tokens / decoding,
        'with_prefill': tokens / (decoding + prefilling)})
    base = result[0]
    result[-1] |= {'speed': result[-1]['tokens_per_second']
                            / base['tokens_per_second'],
                   'speed_with_prefill': result[-1]['with_prefill']
                                         / base['with_prefill'],
                   'forward': result[-1]['forward_ms'] / base['forward_ms']}
    logging.info('%s', result[-1])
  return result


def equal(a: block_decoder.Rollout, b: block_decoder.Rollout) -> bool:
  """Whether two responses to one request are token for token the same."""
  length = int(a.length[0, 0])
  return length == int(b.length[0, 0]) and bool(
      (a.tokens[0, 0, :length] == b.tokens[0, 0, :length]).all())


def measure(experiment: experiment_lib.Experiment, requests: int,
            repetitions: int, clock: str) -> dict[str, Any]:
  """What smollm2.json holds."""
  canvas, params = experiment.canvas, experiment.restore('cft')
  once = commit.Threshold(1.)
  ways = {AR: (once, dict(canvas=canvas_lib.AUTOREGRESSIVE)),
          **{f'tau {tau:g}': (commit.Threshold(tau), dict(canvas=canvas))
             for tau in experiment.config.evaluate.thresholds},
          VERIFIED: (once, dict(canvas=canvas,
                                draft=verification.DraftConfig()))}
  blocks = experiment.data.response_length // canvas.block_size
  forced = {AR: ways[AR]} | {
      f'{n} steps a block': (
          SPEED['Replay'](jnp.array(np.tile(
              SPEED['equal_steps'](canvas.block_size, n)[0], blocks))),
          dict(canvas=canvas)) for n in STEPS}
  # A logit of zero among so many is never the largest.
  endless = params | {'embedding': params['embedding'].at[
      experiment.vocabulary.eos_id].set(0)}
  return {
      'environment': environment.environment('jax'),
      'stages': {name: experiment.config[name].steps
                 for name in experiment.config.recipe if name != 'convert'},
      'block_size': canvas.block_size, 'requests': requests,
      'repetitions': repetitions, 'clock': clock,
      'prompt_length': experiment.data.prompt_length,
      'response_length': experiment.data.response_length,
      'training_loss': training_losses(experiment.workdir),
      **learned(experiment),
      'decoded': points(experiment, params, ways, requests, repetitions,
                        clock),
      'forced': points(experiment, endless, forced, requests, repetitions,
                       clock)}


def rows_of(content: list[dict[str, Any]]) -> list[str]:
  """A table of `points`."""
  lines = [
      '| decoding | tokens | forwards | tokens per forward | prefill, ms | '
      'a forward, ms | tokens/s | speed | speed with prefill |',
      '|---' * 9 + '|']
  return lines + [
      f'| {p["decoding"]} | {p["tokens"]} | {p["forwards"]} | '
      f'{p["tokens_per_forward"]:.2f} | {p["prefill_ms"]:.0f} | '
      f'{p["forward_ms"]:.0f} | '
      f'{p["tokens_per_second"]:.1f} | {p["speed"]:.2f} | '
      f'{p["speed_with_prefill"]:.2f} |' for p in content]


def table(results: dict[str, Any]) -> str:
  """The text of smollm2.md."""
  b, loss = results['block_size'], results['training_loss']
  cost = float(np.mean([p['forward'] for p in results['forced'][1:]]))
  converted, decoded = results['convert'], results['decoded']
  differ, = (p['differ'] for p in decoded if p['decoding'] == VERIFIED)
  return '\n'.join([
      '# SmolLM2-135M through the recipe', '',
      'Written by run.py. '
      + ', '.join(f'{k} {v}' for k, v in results['environment'].items())
      + f'; float32, prompts padded to {results["prompt_length"]} tokens, '
      f'responses of at most {results["response_length"]}, blocks of {b}.', '',
      '| stage | steps | training loss, first step | last step |',
      '|---|---|---|---|',
      *(f'| {name} | {steps} | {loss[name][0]:.3f} | {loss[name][-1]:.3f} |'
        for name, steps in results['stages'].items()), '',
      'CFT\'s loss of one validation batch, with the same masks: '
      '{:.3f} before it, {:.3f} after it.'.format(*results['cft_loss']),
      f'`convert` changed rows {converted["rows"]} of the embedding (the mask '
      f'is {results["mask_id"]}) and {len(converted["others"])} other '
      'parameters.', '',
      f'Test requests at batch size 1: {results["requests"]}; passes, of which '
      f'the median counts: {results["repetitions"]}; {results["clock"]} time. '
      'Tokens per forward count prefills; tokens/s and speed (autoregressive '
      '= 1) do not, but for the last column.', '',
      'With the weights after CFT. They are not trained: how many tokens a '
      'threshold commits, and how many drafts are accepted, is not what a '
      'trained model does. Of the verified responses '
      f'{differ} differ from the autoregressive ones.', '',
      *rows_of(decoded), '',
      'In forced schedules, without EOS: what is committed follows the '
      'schedule, whatever it is.', '', *rows_of(results['forced']), '',
      f'A forward over {b} tokens takes {cost:.2f} times as long as one over '
      f'one token (mean of the schedules): at x tokens per forward, prefill '
      f'aside, decoding is x / {cost:.2f} times as fast as autoregressively, '
      f'faster from {cost:.2f} on.']) + '\n'


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--checkpoint', type=pathlib.Path, required=True)
  parser.add_argument('--workdir', type=pathlib.Path, required=True)
  parser.add_argument('--requests', type=int, default=2)
  parser.add_argument('--repetitions', type=int, default=3)
  parser.add_argument(
      '--clock', choices=CLOCKS, default='wall',
      help='cpu: of the process, for one core that others use, too')
  args = parser.parse_args()
  logging.set_verbosity(logging.INFO)
  logging.use_absl_handler()
  results = measure(train(args.checkpoint, args.workdir), args.requests,
                    args.repetitions, args.clock)
  text = table(results)
  for name, content in (('json', json.dumps(results, indent=1) + '\n'),
                        ('md', text)):
    (HERE / f'smollm2.{name}').write_text(content, encoding='utf-8')
  print(text)


if __name__ == '__main__':
  main()
