"""Attention by what runs on this machine, against XLA's, in one run.

    python experiments/kernels/kernels.py [--prompt=2215] [--layers=4] ...

times two programs of a model with random weights, layers of Qwen3-0.6B's shape
and a small vocabulary, once for every attention that `models/attention.py` has
for the platform (a CPU has XLA's alone):

    prefill   the prompt's keys, as decoding begins
    update    states of prompt, responses and block canvases, and the gradient

The ways take turns, compilation and a first pass are left out, the median of
the passes counts. Writes kernels.json and kernels.md into --output, and prints
the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
import json
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dgr2_jax.evaluation import environment
from dgr2_jax.models import attention as attention_lib
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import transformer

_MASK_ID = 1


def available(head_dim: int, dtype: str) -> list[str]:
  """Attentions that run on this machine: XLA's, and what 'auto' chooses."""
  return list(dict.fromkeys(
      ['xla', attention_lib.choose('auto', head_dim, dtype)]))


def model_of(shape: dict[str, Any], attention: str) -> transformer.Transformer:
  """A model of `shape` whose prompts are attended to so."""
  return transformer.Transformer(transformer.ModelConfig(
      vocab_size=512, num_layers=shape['layers'], width=shape['width'],
      num_heads=shape['heads'], num_kv_heads=shape['kv_heads'],
      head_dim=shape['head_dim'], mlp_dim=3 * shape['width'],
      dtype=shape['dtype'], remat='full', attention=attention))


def canvas_of(shape: dict[str, Any]) -> canvas_lib.Canvas:
  """Random tokens; of every block as many canvases as `shape` says."""
  rng = np.random.default_rng(0)
  n, p, g = shape['requests'], shape['prompt'], shape['rollouts']
  length, b = shape['response'], shape['block_size']
  start = np.tile(np.arange(0, length, b), shape['canvases'])
  masked = rng.random((n, g, len(start), b)) < .5
  return canvas_lib.Canvas(
      jnp.asarray(rng.integers(2, 512, (n, p))),
      jnp.asarray(rng.integers(p * 3 // 4, p + 1, n)),
      jnp.asarray(rng.integers(2, 512, (n, g, length))),
      jnp.broadcast_to(start, (n, g, len(start))), jnp.asarray(masked))


def programs(shape: dict[str, Any], attention: str,
             canvas: canvas_lib.Canvas) -> dict[str, Callable[[Any], Any]]:
  """Jitted functions of the parameters, by name."""
  model = model_of(shape, attention)
  config = canvas_lib.CanvasConfig(shape['block_size'])

  def prefill(params):
    return canvas_lib.prefill(model, params, canvas.prompt,
                              canvas.prompt_length, 1, shape['block_size'])

  def loss(params):
    states = canvas_lib.states(model, params, canvas, _MASK_ID, config)
    return sum((x.astype(jnp.float32) ** 3).mean()
               for x in jax.tree.leaves(states))

  return {'prefill': jax.jit(prefill), 'update': jax.jit(jax.grad(loss))}


def measure(shape: dict[str, Any], passes: int) -> dict[str, Any]:
  """The content of kernels.json.

  Args:
    shape: see `main`.
    passes: timed runs of every program.
  """
  canvas = canvas_of(shape)
  params = transformer.init(model_of(shape, 'xla').config, jax.random.key(0))
  ways = {(name, attention): function
          for attention in available(shape['head_dim'], shape['dtype'])
          for name, function in programs(shape, attention, canvas).items()}
  seconds = {way: [] for way in ways}
  for i in range(passes + 1):
    for way, function in ways.items():
      begin = time.perf_counter()
      jax.block_until_ready(function(params))
      if i:
        seconds[way].append(time.perf_counter() - begin)
  rows = []
  for (name, attention), times in seconds.items():
    median = statistics.median(times)
    rows.append({
        'program': name, 'attention': attention, 'seconds': median,
        'low': min(times), 'high': max(times),
        'speedup': statistics.median(seconds[name, 'xla']) / median})
  return {'environment': environment.environment('jax', 'jaxlib', 'flax'),
          'devices': 1, 'shape': shape, 'passes': passes, 'rows': rows}


def markdown(content: dict[str, Any]) -> str:
  """kernels.md of `measure`'s result."""
  told = content['environment']
  lines = [
      f'{told["machine"]}; jax {told["jax"]}, jaxlib {told["jaxlib"]}; '
      f'one device; median of {content["passes"]}.',
      ', '.join(f'{k} {v}' for k, v in content['shape'].items()) + '.', '',
      '| program | attention | ms | least - most | XLA = 1 |',
      '|---|---|---:|---:|---:|']
  for x in sorted(content['rows'], key=lambda x: x['program']):
    lines.append(
        f'| {x["program"]} | {x["attention"]} | {1e3 * x["seconds"]:.2f} | '
        f'{1e3 * x["low"]:.2f} - {1e3 * x["high"]:.2f} | '
        f'{x["speedup"]:.2f} |')
  return '\n'.join(lines) + '\n'


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  defaults = dict(requests=1, prompt=2215, rollouts=1, response=160,
                  block_size=32, canvases=2, layers=4, width=1024, heads=16,
                  kv_heads=8, head_dim=128, passes=7)
  for name, value in defaults.items():
    parser.add_argument(f'--{name}', type=int, default=value)
  parser.add_argument('--dtype', default='bfloat16')
  parser.add_argument('--output', type=pathlib.Path,
                      default=pathlib.Path(__file__).parent)
  args = vars(parser.parse_args())
  output, passes = args.pop('output'), args.pop('passes')
  content = measure(args, passes)
  table = markdown(content)
  output.mkdir(parents=True, exist_ok=True)
  (output / 'kernels.json').write_text(
      json.dumps(content, indent=1) + '\n', encoding='utf-8')
  (output / 'kernels.md').write_text(table, encoding='utf-8')
  print(table)


if __name__ == '__main__':
  main()
