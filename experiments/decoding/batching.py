r"""Static batches against continuous admission, on the same requests.

    python experiments/decoding/batching.py --workdir=WORKDIR --name=quickstart

Decodes test requests of a finished working directory in batches that wait for
their slowest row (`responses.decode_split`) and continuously
(`decoding/batching.py`), with the weights of the last stage, by batch size. The
clock runs from prompts in memory to responses in memory, prefill included; the
ways take turns, compilation and a first pass are left out, the median of the
passes counts. Rows at work: the share of row-forwards that a response needed.
Writes batching_<name>.json and .md here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time
from typing import Any

from absl import logging
import jax
import numpy as np

from dgr2_jax.decoding import batching
from dgr2_jax.decoding import commit
from dgr2_jax.decoding import verification
from dgr2_jax.evaluation import environment
from dgr2_jax.evaluation import responses
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import workdir as workdir_lib

HERE = pathlib.Path(__file__).parent


def modes_of(canvas: canvas_lib.CanvasConfig) -> dict[str, dict[str, Any]]:
  """name -> arguments of both decoders."""
  once = commit.Threshold(1.)
  modes = {
      'autoregressive': dict(canvas=canvas_lib.AUTOREGRESSIVE, rule=once,
                             draft=None),
      'tau .9': dict(canvas=canvas, rule=commit.Threshold(.9), draft=None),
      'tau .6': dict(canvas=canvas, rule=commit.Threshold(.6), draft=None)}
  if canvas.verifiable:
    modes['verified'] = dict(canvas=canvas, rule=once,
                             draft=verification.DraftConfig())
  return modes


def measure(experiment: experiment_lib.Experiment, params: Any,
            modes: dict[str, dict[str, Any]], rows: int, requests: int,
            repetitions: int, cache_dtype: str) -> list[dict[str, Any]]:
  """One entry a mode, at one batch size."""
  batches = experiment.eval_batches('test', rows, requests)
  prompts = [batching.Prompt(prompt[:length], example_id)
             for b in batches for prompt, length, example_id, valid in zip(
                 b['prompt'], b['prompt_length'], b['example_id'], b['valid'])
             if valid]
  how = dict(vocabulary=experiment.vocabulary, mesh=experiment.mesh,
             config=dataclasses.replace(
                 experiment.decode_config(), cache_dtype=cache_dtype))

  def static(mode):
    rollout = responses.decode_split(
        experiment.model, params, batches, **how, **mode)
    return rollout.tokens, rollout.length, rollout.calls

  def continuous(mode):
    found = sorted(batching.decode(
        experiment.model, params, prompts, rows=rows,
        max_prompt=experiment.data.prompt_length, **how, **mode),
                   key=lambda response: response.index)
    return tuple(np.stack([getattr(r.rollout, field)[0] for r in found])
                 for field in ('tokens', 'length', 'calls'))

  seconds = {(name, way): [] for name in modes for way in (static, continuous)}
  points = {name: {'mode': name, 'rows': rows} for name in modes}
  for repetition in range(repetitions + 1):
    for name, mode in modes.items():
      got = {}
      for way in (static, continuous):
        begin = time.perf_counter()
        got[way] = way(mode)
        if repetition:
          seconds[name, way].append(time.perf_counter() - begin)
      if not repetition:
        points[name] |= compare(got[static], got[continuous], rows)
  for name, point in points.items():
    for way in (static, continuous):
      median = float(np.median(seconds[name, way]))
      point[f'{way.__name__}_requests_per_second'] = len(prompts) / median
    point['speed'] = (point['continuous_requests_per_second']
                      / point['static_requests_per_second'])
    logging.info('%s', point)
  return list(points.values())


def compare(static, continuous, rows: int) -> dict[str, Any]:
  """Where responses differ, and how much of static batches is at work."""
  tokens, length, calls = static
  other, other_length, _ = continuous
  stands = np.arange(tokens.shape[1]) < length[:, None]
  differ = ((tokens != other) & stands).any(1) | (length != other_length)
  slowest = sum(calls[i:i + rows].max() - 1
                for i in range(0, len(calls), rows))
  return {'requests': len(calls), 'differ': int(differ.sum()),
          'static_rows_at_work': float((calls - 1).sum() / (slowest * rows))}


def table(name: str, content: dict[str, Any]) -> str:
  lines = [
      f'# Static batches against continuous admission: {name}', '',
      'Written by batching.py. Speed: requests a second, static = 1 in the '
      'same row; in the last column, autoregressive = 1, both continuous.', '',
      f'Machine: {content["machine"]}; jax {content["jax"]}; '
      f'{content["points"][0]["requests"]} requests, median of '
      f'{content["repetitions"]} passes; cache '
      f'{content["cache_dtype"] or "as the model"}.', '',
      '| decoding | batch | rows at work, static | responses that differ | '
      'speed, continuous | beside autoregressive |',
      '|---|---|---|---|---|---|']
  autoregressive = {
      p['rows']: p['continuous_requests_per_second']
      for p in content['points'] if p['mode'] == 'autoregressive'}
  for p in content['points']:
    beside = p['continuous_requests_per_second'] / autoregressive[p['rows']]
    lines.append(
        f'| {p["mode"]} | {p["rows"]} | {p["static_rows_at_work"]:.2f} | '
        f'{p["differ"]} | {p["speed"]:.2f} | {beside:.2f} |')
  return '\n'.join(lines) + '\n'


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--workdir', type=pathlib.Path, required=True)
  parser.add_argument('--name', required=True)
  parser.add_argument('--requests', type=int, default=1024)
  parser.add_argument('--repetitions', type=int, default=5)
  parser.add_argument('--batch_sizes', type=int, nargs='+', default=[8, 32])
  parser.add_argument('--cache_dtype', default='')
  parser.add_argument('--smoke', action='store_true',
                      help='in a minute, to see that it runs; writes no file')
  args = parser.parse_args()
  if min(args.repetitions, args.requests, *args.batch_sizes) < 1:
    parser.error('expected --repetitions, --requests and --batch_sizes of at '
                 'least 1')
  logging.set_verbosity(logging.INFO)
  config = workdir_lib.read_config(args.workdir)
  experiment = experiment_lib.Experiment(config, args.workdir.absolute())
  stage = config.recipe[-1]
  params, modes = experiment.restore(stage), modes_of(experiment.canvas)
  if args.smoke:
    args.requests, args.repetitions, args.batch_sizes = 64, 1, [8]
  points = []
  for rows in args.batch_sizes:
    points += measure(experiment, params, modes, rows, args.requests,
                      args.repetitions, args.cache_dtype)
  content = {
      'stage': stage, 'jax': jax.__version__, 'cache_dtype': args.cache_dtype,
      'machine': environment.machine(),
      'repetitions': args.repetitions, 'points': points}
  text = table(f'{args.name}, weights of {stage}', content)
  if not args.smoke:
    (HERE / f'batching_{args.name}.json').write_text(
        json.dumps(content, indent=1) + '\n')
    (HERE / f'batching_{args.name}.md').write_text(text)
  print(text)


if __name__ == '__main__':
  main()
