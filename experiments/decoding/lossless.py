r"""Is verified decoding what autoregressive decoding gives?

    python experiments/decoding/lossless.py --workdir=WORKDIR --name=quickstart
    python experiments/decoding/lossless.py --workdirs A B C --name=seeds

Decodes every test request of finished working directories autoregressively and
verified, by window and number of draft steps, and compares token by token.
Where they differ first, the autoregressive model's two largest logits are
looked up, with the tokens before: forwards of one and of B tokens round
differently, so a near tie may tip. Writes lossless_<name>.json and .md here,
with rows for each of several directories, which are called by their last parts;
fails if a difference is no near tie.

`--verifier=ar_rl` lets the weights of that stage verify, a model of its own
with its own cache; the last stage's draft. `--dtype=bfloat16` computes in that
type, where ties are common: differences are counted, and none fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import sys
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from dgr2_jax.decoding import block_decoder
from dgr2_jax.decoding import commit
from dgr2_jax.decoding import verification
from dgr2_jax.evaluation import environment
from dgr2_jax.evaluation import responses
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import workdir as workdir_lib

HERE = pathlib.Path(__file__).parent
NEAR_TIE = 1e-4  # logits


def drafts_of(
    canvas: canvas_lib.CanvasConfig) -> list[verification.DraftConfig]:
  """Ways to draft; a block-causal drafter has windows on the grid only."""
  windows = ('grid',) if canvas.clean_stream == 'block_causal' else (
      verification.WINDOWS)
  return [verification.DraftConfig(steps, window)
          for window, steps in itertools.product(windows, (1, 2))]


def decoded(experiment: experiment_lib.Experiment, params: Any,
            canvas: canvas_lib.CanvasConfig,
            draft: verification.DraftConfig | None = None,
            verifier: Any = None) -> block_decoder.Rollout:
  return responses.decode_split(
      experiment.model, params,
      experiment.eval_batches('test', experiment.config.evaluate.batch_size),
      rule=commit.Threshold(1.), vocabulary=experiment.vocabulary,
      canvas=canvas, config=experiment.decode_config(), mesh=experiment.mesh,
      draft=draft, verifier=verifier)


def first_difference(a: block_decoder.Rollout,
                     b: block_decoder.Rollout) -> np.ndarray:
  """Index of the first token that differs, int [n]; -1 for none."""
  n, length = a.tokens.shape
  shorter = np.minimum(a.length, b.length)[:, None]
  differs = (a.tokens != b.tokens) & (np.arange(length) < shorter)
  # One may end where the other goes on.
  differs |= (np.arange(length) == shorter) & (a.length != b.length)[:, None]
  return np.where(differs.any(1), differs.argmax(1), -1)


def gaps(experiment: experiment_lib.Experiment, params: Any,
         rollout: block_decoder.Rollout, at: np.ndarray) -> dict[int, float]:
  """The AR model's gap between its two largest logits at [n] tokens >= 0."""
  model, vocabulary = experiment.model, experiment.vocabulary

  @jax.jit
  def logits_of(batch, response, index):
    states = canvas_lib.states(
        model, params, canvas_lib.autoregressive(
            batch['prompt'], batch['prompt_length'], response[:, None]),
        vocabulary.mask_id, canvas_lib.AUTOREGRESSIVE).clean[:, 0]
    state = jnp.take_along_axis(states, index[:, None, None], 1)[:, 0]
    return vocabulary.allow(
        model.apply({'params': params}, state, method='logits'))

  result, begin = {}, 0
  for batch in experiment.eval_batches(
      'test', experiment.config.evaluate.batch_size):
    rows = np.flatnonzero(batch['valid'])
    mine = np.arange(begin, begin + len(rows))
    begin += len(rows)
    if (at[mine] >= 0).any():
      full = np.minimum(np.arange(len(batch['valid'])), len(rows) - 1)
      logits = np.asarray(logits_of(
          {k: batch[k] for k in ('prompt', 'prompt_length')},
          rollout.tokens[mine][full], np.maximum(at[mine], 0)[full]))
      largest = np.sort(logits, -1)[:, -2:]
      result |= {int(i): float(largest[row, 1] - largest[row, 0])
                 for row, i in enumerate(mine) if at[i] >= 0}
  return result


def measure(experiment: experiment_lib.Experiment, params: Any,
            judge: Any) -> list[dict[str, Any]]:
  """One entry a way to draft; `judge` verifies if it is not None."""
  theirs = params if judge is None else judge
  verifier = None if judge is None else (experiment.model, judge)
  points, drafts = [], drafts_of(experiment.canvas)
  verification.check(experiment.canvas, experiment.decode_config(), drafts[0],
                     own_verifier=judge is None)
  wanted = decoded(experiment, theirs, canvas_lib.AUTOREGRESSIVE)
  for draft in drafts:
    got = decoded(experiment, params, experiment.canvas, draft, verifier)
    at = first_difference(wanted, got)
    near = gaps(experiment, theirs, wanted, at)
    failures = [experiment.parser.strict(tokens[:length]).failure
                for tokens, length in zip(got.tokens, got.length)]
    points.append({
        'window': draft.window, 'steps': draft.steps, 'n': len(at),
        'tokens': int(got.length.sum()), 'differ': len(near),
        'not_near_ties': sum(gap >= NEAR_TIE for gap in near.values()),
        'differences': [{'request': i, 'token': int(at[i]), 'logit_gap': gap}
                        for i, gap in near.items()],
        'valid_rate': failures.count('valid') / len(failures),
        'tokens_per_forward': float(got.length.sum() / got.calls.sum())})
    logging.info('%s', {k: v for k, v in points[-1].items()
                        if k != 'differences'})
  return points


def table(content: dict[str, Any]) -> str:
  """Points of several directories have a `run`, its name."""
  points = content['points']
  several = 'run' in points[0]
  lines = [
      f'# Verified against autoregressive decoding: {content["name"]}', '',
      f'Written by lossless.py; {content["dtype"]}, all test requests, drafts '
      f'of {content["stage"]}, verified by '
      f'{content["verifier"] or "its own clean stream"}. Near ties: the '
      f'autoregressive model\'s two largest logits differ by less than '
      f'{NEAR_TIE:g} where the responses part.', '',
      f'Machine: {content["machine"]}; jax {content["jax"]}.', '',
      '| run ' * several
      + '| window | draft steps | requests | tokens | differ | of them no near '
      'tie | valid | tokens per forward |', '|---' * (8 + several) + '|']
  for p in points:
    lines.append(
        (f'| {p["run"]} ' if several else '') +
        f'| {p["window"]} | {p["steps"]} | {p["n"]:,} | {p["tokens"]:,} | '
        f'{p["differ"]} | {p["not_near_ties"]} | {p["valid_rate"]:.3f} | '
        f'{p["tokens_per_forward"]:.2f} |')
  return '\n'.join(lines) + '\n'


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--workdir', '--workdirs', type=pathlib.Path, nargs='+',
                      required=True)
  parser.add_argument('--name', required=True)
  parser.add_argument('--verifier', metavar='STAGE', default='')
  parser.add_argument('--dtype', choices=('float32', 'bfloat16'),
                      default='float32')
  args = parser.parse_args()
  logging.set_verbosity(logging.INFO)
  workdirs = [path.absolute() for path in args.workdir]
  configs = [workdir_lib.read_config(path) for path in workdirs]
  stage, *others = {config.recipe[-1] for config in configs}
  if others or len({path.name for path in workdirs}) < len(workdirs):
    parser.error('--workdirs: expected one last stage, and different last '
                 'parts of the paths')
  points = []
  for path, config in zip(workdirs, configs):
    config.model.dtype = args.dtype
    experiment = experiment_lib.Experiment(config, path)
    judge = experiment.restore(args.verifier) if args.verifier else None
    run = {'run': path.name} if len(workdirs) > 1 else {}
    points += [run | point for point in measure(
        experiment, experiment.restore(stage), judge)]
  content = {
      'name': args.name, 'stage': stage, 'verifier': args.verifier,
      'dtype': args.dtype, 'machine': environment.machine(),
      'jax': jax.__version__, 'points': points}
  text = table(content)
  (HERE / f'lossless_{args.name}.json').write_text(
      json.dumps(content, indent=1) + '\n')
  (HERE / f'lossless_{args.name}.md').write_text(text)
  print(text)
  if args.dtype == 'float32' and any(p['not_near_ties'] for p in points):
    sys.exit('error: verified decoding differs from autoregressive decoding '
             'where that was no near tie')


if __name__ == '__main__':
  main()
