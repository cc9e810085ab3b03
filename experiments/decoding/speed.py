r"""Block against autoregressive decoding where a forward costs its weights.

    python experiments/decoding/speed.py [--workdir=WORKDIR] [--shape=...]

A random model of a real shape decodes at batch size 1, autoregressively and in
blocks, with the same weights and the same cache code. What a denoising step
commits is replayed: from the traces that a finished working directory's weights
leave on test requests (in blocks of the same size, by threshold), or, without
`--workdir`, in `--steps` equal steps a block. EOS gets no weight, so that
responses are as long as asked for.

Decoding is timed without the prefill, which stands apart; the ways take turns,
compilation and a first pass are left out, the median of the passes counts.
Writes speed_<shape>.json and .md here; sizes that are there from the same
settings, machine and versions are not measured again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
import functools
import hashlib
import json
import os
import pathlib
import sys
import time
from typing import Any

from absl import logging
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dgr2_jax.decoding import block_decoder
from dgr2_jax.decoding import commit
from dgr2_jax.decoding import verification
from dgr2_jax.evaluation import environment
from dgr2_jax.evaluation import responses
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import workdir as workdir_lib

HERE = pathlib.Path(__file__).parent
SHAPES = {
    'smollm2_135m': dict(
        vocab_size=49152, num_layers=30, width=576, num_heads=9, num_kv_heads=3,
        head_dim=64, mlp_dim=1536, rope_theta=1e5, qk_norm=False),
    'qwen3_0_6b': dict(
        vocab_size=151936, num_layers=28, width=1024, num_heads=16,
        num_kv_heads=8, head_dim=128, mlp_dim=3072, rope_theta=1e6),
    'smoke': dict(
        vocab_size=64, num_layers=2, width=32, num_heads=2, num_kv_heads=1,
        head_dim=16, mlp_dim=64),
}


@flax.struct.dataclass
class Replay:
  """A commit rule that repeats a trace.

  Attributes:
    step: int32 [L], the denoising step of its block, from zero, that commits a
      token; of no account for seeds, which the clean stream gives.
  """
  step: jax.Array

  def choose(self, eligible: jax.Array, confidence: jax.Array,
             context: commit.Context) -> jax.Array:
    del confidence
    # State j scores token start + j + 1 (shifted alignment).
    token = canvas_lib.block_positions(context.start + 1, eligible.shape[-1])
    due = self.step[jnp.minimum(token, len(self.step) - 1)]
    return eligible & (due <= context.step[..., None])


def equal_steps(block_size: int, steps: int) -> np.ndarray:
  """One block [1, B] whose tokens are committed in so many equal steps."""
  drafted = block_size - 1
  return np.concatenate([[0], np.arange(drafted) * steps // drafted])[None]


def trained_steps(workdir: pathlib.Path, block_size: int, threshold: float,
                  requests: int) -> np.ndarray:
  """Blocks [n, B] of what denoising steps committed on test requests."""
  experiment = experiment_lib.Experiment(
      workdir_lib.read_config(workdir), workdir.absolute())
  if not experiment.canvas.verifiable:
    raise ValueError(f'{workdir} decodes by another rule: {experiment.canvas}')
  config = experiment.decode_config()
  length = -(-config.max_response // block_size) * block_size
  call = responses.decode_split(
      experiment.model, experiment.restore(experiment.config.recipe[-1]),
      experiment.eval_batches('test', 16, requests),
      rule=commit.Threshold(threshold), vocabulary=experiment.vocabulary,
      canvas=canvas_lib.CanvasConfig(block_size),
      config=block_decoder.DecodeConfig(max_response=length),
      mesh=experiment.mesh).call
  blocks = call.reshape(-1, block_size)
  blocks = blocks[(blocks < block_decoder.NEVER).all(1)]  # whole ones
  if not len(blocks):
    raise ValueError(f'no response fills a block of {block_size}')
  # Ranks of the calls that committed a block's tokens, behind its seed.
  steps = np.array([np.unique(b[1:], return_inverse=True)[1] for b in blocks])
  return np.pad(steps, ((0, 0), (1, 0)))


_STATIC = ('model', 'vocabulary', 'canvas', 'config', 'draft')


@functools.partial(jax.jit, static_argnames=_STATIC)
def prefill(model, params, prompt, length, *, draft=None, **how):
  if draft is not None:
    begin = functools.partial(verification.begin, draft=draft)
  else:
    begin = block_decoder.begin
  return begin(model, params, prompt, length, jnp.ones(1, jnp.int32),
               jax.random.key(0), **how)


@functools.partial(
    jax.jit, static_argnames=_STATIC, donate_argnames=('state',))
def decode(model, params, state, keys, rule, *, draft=None, **how):
  if draft is not None:
    own = model, params
    step = lambda s: verification.step(
        own, own, s, None, keys, draft=draft, **how)[0]
  else:
    step = lambda s: block_decoder.step(model, params, s, keys, rule, **how)
  return jax.lax.while_loop(lambda s: ~s.done.all(), step, state)


def seconds_of(clock, function, *args: Any, **options: Any):
  begin = clock()
  result = jax.block_until_ready(function(*args, **options))
  return result, clock() - begin


def timed(model: transformer.Transformer, params: Any,
          prompts: list[tuple[jax.Array, jax.Array]],
          ways: dict[Any, tuple[commit.Rule, dict[str, Any]]],
          repetitions: int, clock: Callable[[], float] = time.perf_counter
          ) -> dict[Any, tuple[list[block_decoder.Rollout], np.ndarray]]:
  """Decodes prompts one by one; the ways take turns.

  Args:
    model: the decoder.
    params: its parameters.
    prompts: int32 [1, P] and their lengths, int32 [1].
    ways: name -> a commit rule, and `vocabulary`, `canvas`, `config` and,
      where drafts are verified, `draft`.
    repetitions: passes over the prompts that count.
    clock: in seconds.

  Returns:
    name -> the rollout of every prompt, and seconds of prefill and of decoding
    all prompts, the median of the passes, float [2].
  """
  rollouts = {name: [] for name in ways}
  seconds = {name: np.zeros((repetitions + 1, 2)) for name in ways}
  for repetition in range(repetitions + 1):
    for prompt, length in prompts:
      for name, (rule, how) in ways.items():
        (state, keys), first = seconds_of(
            clock, prefill, model, params, prompt, length, **how)
        state, rest = seconds_of(
            clock, decode, model, params, state, keys, rule, **how)
        seconds[name][repetition] += first, rest
        if not repetition:  # which compiles
          rollouts[name].append(
              block_decoder.rollout_of(state, how['vocabulary']))
  return {name: (rollouts[name], np.median(seconds[name][1:], axis=0))
          for name in ways}


def measure(model: transformer.Transformer, params: Any,
            vocabulary: vocabulary_lib.Vocabulary,
            schedules: dict[int, np.ndarray], prompt_length: int,
            response_length: int, repetitions: int) -> list[dict[str, Any]]:
  """One entry a way to decode, of one prompt and response length."""
  rng = np.random.default_rng(0)
  prompt = jnp.array(rng.integers(2, vocabulary.size - 2, (1, prompt_length)))
  ways = {}
  for b in (1, *schedules):
    blocks = -(-response_length // b)
    rule = commit.Threshold(1.)
    if b > 1:
      drawn = rng.integers(len(schedules[b]), size=blocks)
      rule = Replay(jnp.array(schedules[b][drawn].reshape(-1)))
    ways[b] = rule, dict(
        vocabulary=vocabulary, canvas=canvas_lib.CanvasConfig(b),
        config=block_decoder.DecodeConfig(max_response=blocks * b))
  points = []
  for b, ((rollout,), (prefilling, decoding)) in timed(
      model, params, [(prompt, jnp.array([prompt_length]))], ways,
      repetitions).items():
    tokens, calls = int(rollout.length[0, 0]), int(rollout.calls[0, 0])
    points.append({
        'prompt_length': prompt_length, 'response_length': response_length,
        'block_size': b, 'tokens': tokens, 'calls': calls,
        'tokens_per_forward': tokens / calls,
        'prefill_seconds': float(prefilling),
        'decode_seconds': float(decoding)})
    rate, whole = (tokens / s for s in (decoding, decoding + prefilling))
    if b == 1:
      base = rate, whole
    points[-1] |= {'speed': rate / base[0], 'speed_with_prefill':
                   whole / base[1]}
    logging.info('%s', points[-1])
  return points


def table(content: dict[str, Any]) -> str:
  lines = [
      f'# Block against autoregressive decoding: {content["shape"]}', '',
      'Written by speed.py. Random weights, batch size 1, '
      f'{content["dtype"]}; steps replayed: {content["schedule"]}. Speed: '
      'tokens a second, autoregressive = 1.', '',
      f'Machine: {content["machine"]}; jax {content["jax"]}; median of '
      f'{content["repetitions"]} passes.', '',
      '| prompt | response | block | tokens per forward | decode, ms a forward '
      '| prefill, ms | speed, decode only | of tokens per forward | speed with '
      'prefill |', '|---|---|---|---|---|---|---|---|---|']
  for p in content['points']:
    lines.append(
        f'| {p["prompt_length"]} | {p["response_length"]} | '
        f'{p["block_size"]} | {p["tokens_per_forward"]:.2f} | '
        f'{1e3 * p["decode_seconds"] / (p["calls"] - 1):.1f} | '
        f'{1e3 * p["prefill_seconds"]:.0f} | {p["speed"]:.2f} | '
        f'{p["speed"] / p["tokens_per_forward"]:.2f} | '
        f'{p["speed_with_prefill"]:.2f} |')
  return '\n'.join(lines) + '\n'


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--shape', choices=SHAPES, default='smollm2_135m')
  parser.add_argument('--dtype', choices=('float32', 'bfloat16'),
                      default='float32')
  parser.add_argument('--workdir', type=pathlib.Path,
                      help='whose traces are replayed')
  parser.add_argument('--threshold', type=float, default=.9)
  parser.add_argument('--requests', type=int, default=256)
  parser.add_argument('--steps', type=int, default=2,
                      help='denoising steps a block, without --workdir')
  parser.add_argument('--block_sizes', type=int, nargs='+', default=[8, 16])
  parser.add_argument('--response_lengths', type=int, nargs='+',
                      default=[40, 80, 160, 320])
  parser.add_argument('--prompt_lengths', type=int, nargs='+',
                      default=[32, 128, 512, 2048])
  parser.add_argument('--repetitions', type=int, default=5)
  parser.add_argument('--smoke', action='store_true',
                      help='in seconds, to see that it runs; writes no file')
  args = parser.parse_args()
  logging.set_verbosity(logging.INFO)
  if args.smoke:
    args.shape, args.block_sizes, args.requests = 'smoke', [8], 16
    args.response_lengths, args.prompt_lengths = [16, 32], [16, 32]
    args.repetitions = 1
  if min(args.repetitions, args.requests, *args.prompt_lengths) < 1 or min(
      *args.block_sizes, *args.response_lengths) < 2:
    parser.error('expected --repetitions, --requests and --prompt_lengths of '
                 'at least 1, --block_sizes and --response_lengths of 2')
  if not args.workdir and not 1 <= args.steps < min(args.block_sizes):
    parser.error('expected --steps from 1 to one less than the smallest of '
                 '--block_sizes')
  if not 0 < args.threshold <= 1:
    parser.error('expected --threshold above 0 and at most 1')
  try:
    schedules = {b: trained_steps(args.workdir, b, args.threshold,
                                  args.requests) if args.workdir
                 else equal_steps(b, args.steps) for b in args.block_sizes}
  except (ValueError, OSError) as e:
    sys.exit(f'error: {e}')
  config = transformer.ModelConfig(
      **SHAPES[args.shape], dtype=args.dtype, param_dtype=args.dtype)
  model = transformer.Transformer(config)
  params = jax.jit(transformer.init, static_argnums=0)(
      config, jax.random.key(0))
  eos, mask = config.vocab_size - 2, config.vocab_size - 1
  vocabulary = vocabulary_lib.Vocabulary(
      size=config.vocab_size, mask_id=mask, eos_id=eos, banned=(mask,))
  # A logit of zero among so many is never the largest.
  params['embedding'] = params['embedding'].at[eos].set(0)
  # Every response length behind a middling prompt, and the other way round.
  p = args.prompt_lengths[len(args.prompt_lengths) // 2 - 1]
  r = args.response_lengths[-1]
  sizes = dict.fromkeys([(p, n) for n in args.response_lengths]
                        + [(n, r) for n in args.prompt_lengths])
  content = {
      'shape': args.shape, 'dtype': args.dtype, 'jax': jax.__version__,
      'machine': environment.machine(),
      'schedule': (f'of trained weights, tau {args.threshold:g}' if args.workdir
                   else f'{args.steps} equal steps a block'),
      'steps': {str(b): hashlib.blake2b(steps.tobytes(), digest_size=4)
                .hexdigest() for b, steps in schedules.items()},
      'xla_flags': os.environ.get('XLA_FLAGS', ''),
      'repetitions': args.repetitions, 'points': []}
  name = f'speed_{args.shape}'
  if (HERE / f'{name}.json').exists() and not args.smoke:
    before = json.loads((HERE / f'{name}.json').read_text('utf-8'))
    if before | {'points': []} == content:
      content = before
  done = {(p['prompt_length'], p['response_length'])
          for p in content['points']}
  for prompt_length, response_length in [s for s in sizes if s not in done]:
    content['points'] += measure(
        model, params, vocabulary, schedules, prompt_length, response_length,
        args.repetitions)
    if not args.smoke:  # after every size: the longest take longest
      workdir_lib.write_text(HERE / f'{name}.json',
                             json.dumps(content, indent=1) + '\n')
      workdir_lib.write_text(HERE / f'{name}.md', table(content))
  print(table(content))


if __name__ == '__main__':
  main()
