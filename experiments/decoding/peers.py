r"""Our decoders beside `transformers` generate, on the same weights.

    pip install -e '.[parity,hf]'
    python experiments/decoding/peers.py --workdir=WORKDIR --name=NAME
    python experiments/decoding/peers.py --shape=smollm2_135m

A finished working directory's weights, or random ones of a real shape (of
speed.py), are exported and loaded by `transformers` (PyTorch). Both decode the
same prompts greedily at each batch size: theirs autoregressively with its
cache, ours autoregressively and, for trained weights, by threshold and
verified. On the same cores, or the same GPU where JAX has one (theirs on CUDA;
not run there yet), in float32, taking turns; prefill is timed, a first
pass and compilation are not, the median of the passes counts. Responses are
compared token by token. Writes peers_<name>.json and .md here.

Decoding by threshold is also how Fast-dLLM v2 commits (arXiv 2509.26328), with
our cache and our forwards: it stands for that algorithm, not for its code.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
import dataclasses
import importlib.util
import json
import os
import pathlib
import runpy
import tempfile
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
from dgr2_jax.models import huggingface_weights
from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import workdir as workdir_lib

HERE = pathlib.Path(__file__).parent
SHAPES = runpy.run_path(str(HERE / 'speed.py'))['SHAPES']
TORCH_DEVICES = {'cpu': 'cpu', 'gpu': 'cuda'}  # by JAX's backend
THEIRS, OURS = 'transformers generate', 'autoregressive'


@dataclasses.dataclass(frozen=True)
class Subject:
  """What is decoded: weights, and prompts by batch size."""
  model: transformer.Transformer
  params: Any
  vocabulary: vocabulary_lib.Vocabulary
  canvas: canvas_lib.CanvasConfig
  config: block_decoder.DecodeConfig
  prompts: list[np.ndarray]
  trained: bool

  def batches(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Prompts [size, P], padded on the right, and their lengths."""
    width = max(map(len, self.prompts))
    for i in range(0, len(self.prompts) - size + 1, size):
      part = self.prompts[i:i + size]
      yield (np.stack([np.pad(p, (0, width - len(p))) for p in part]),
             np.array([len(p) for p in part], np.int32))


def of_workdir(workdir: pathlib.Path, requests: int) -> Subject:
  """The last stage's weights, and test requests."""
  config = workdir_lib.read_config(workdir)
  config.model.dtype = 'float32'
  experiment = experiment_lib.Experiment(config, workdir.absolute())
  batch = experiment.eval_batches('test', requests, requests)[0]
  return Subject(
      experiment.model, experiment.restore(experiment.config.recipe[-1]),
      experiment.vocabulary, experiment.canvas, experiment.decode_config(),
      [row[:n] for row, n, valid in zip(
          batch['prompt'], batch['prompt_length'], batch['valid']) if valid],
      trained=True)


def of_shape(shape: str, requests: int, prompt_length: int,
             response_length: int) -> Subject:
  """Random weights that never end a response, and random prompts."""
  config = transformer.ModelConfig(**SHAPES[shape])
  params = jax.jit(transformer.init, static_argnums=0)(
      config, jax.random.key(0))
  eos, mask = config.vocab_size - 2, config.vocab_size - 1
  # A logit of zero is never the largest: neither ends, and no mask is written.
  params['embedding'] = params['embedding'].at[eos:].set(0)
  rng = np.random.default_rng(0)
  return Subject(
      transformer.Transformer(config), params, vocabulary_lib.Vocabulary(
          size=config.vocab_size, mask_id=mask, eos_id=eos, banned=(mask,)),
      canvas_lib.AUTOREGRESSIVE,
      block_decoder.DecodeConfig(max_response=response_length),
      list(rng.integers(2, eos, (requests, prompt_length), np.int32)),
      trained=False)


def ours(subject: Subject) -> dict[str, Any]:
  """name -> (prompts, lengths) -> tokens [N, L] and their lengths [N]."""

  def runner(decode, **how):
    def run(prompt, length):
      rollout = decode(
          subject.model, subject.params, prompt, length,
          jnp.zeros(len(prompt), jnp.int32), jax.random.key(0),
          vocabulary=subject.vocabulary, config=subject.config, **how)
      return np.asarray(rollout.tokens)[:, 0], np.asarray(rollout.length)[:, 0]
    return run

  def threshold(canvas, tau):
    return runner(block_decoder.decode, canvas=canvas,
                  rule=commit.Threshold(tau))

  ways = {OURS: threshold(canvas_lib.AUTOREGRESSIVE, 1.)}
  if subject.trained:
    ways['tau .9'] = threshold(subject.canvas, .9)
    if subject.canvas.verifiable:
      ways['verified'] = runner(verification.decode, canvas=subject.canvas,
                                draft=verification.DraftConfig())
  return ways


def theirs(subject: Subject, threads: int) -> Any:
  """`transformers` on the same weights; as `ours`."""
  import torch
  import transformers

  torch.set_num_threads(threads)
  device = TORCH_DEVICES[jax.default_backend()]
  longest = max(map(len, subject.prompts)) + subject.config.max_response
  with tempfile.TemporaryDirectory() as directory:
    where = pathlib.Path(directory) / 'checkpoint'
    huggingface_weights.save(
        where, subject.params, subject.model.config, subject.vocabulary,
        canvas_lib.AUTOREGRESSIVE, longest)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        where, dtype=torch.float32).to(device)
  model.generation_config.suppress_tokens = None  # spares it work
  eos, limit = subject.vocabulary.eos_id, subject.config.max_response

  def run(prompt, length):
    # Padded on the left, as `generate` wants it.
    rows = np.stack([np.roll(row, len(row) - n)
                     for row, n in zip(prompt, length)])
    seen = np.arange(rows.shape[1]) >= (rows.shape[1] - length)[:, None]
    with torch.inference_mode():
      got = model.generate(
          torch.tensor(rows, dtype=torch.long, device=device),
          attention_mask=torch.tensor(seen, dtype=torch.long, device=device),
          max_new_tokens=limit, do_sample=False, eos_token_id=eos,
          pad_token_id=eos)[:, rows.shape[1]:].cpu().numpy()
    ends = got == eos
    return got, np.where(ends.any(1), ends.argmax(1) + 1, limit)

  return run


def measure(subject: Subject, ways: dict[str, Any], size: int,
            repetitions: int) -> list[dict[str, Any]]:
  """One entry a way to decode, at one batch size."""
  batches = list(subject.batches(size))
  rates = {name: [] for name in ways}
  differ = dict.fromkeys(ways, 0)
  for repetition in range(repetitions + 1):
    totals = {name: np.zeros(2) for name in ways}
    for batch in batches:
      got = {}
      for name, run in ways.items():
        begin = time.perf_counter()
        got[name] = run(*batch)
        totals[name] += got[name][1].sum(), time.perf_counter() - begin
      if not repetition:
        for name in ways:
          differ[name] += differing(got[name], got[OURS])
    if repetition:
      for name, (tokens, seconds) in totals.items():
        rates[name].append(tokens / seconds)
  points = [{
      'decoding': name, 'batch_size': size, 'responses': len(batches) * size,
      'differ': differ[name],
      'tokens_per_second': float(np.median(rates[name])),
      'speed': float(np.median(rates[name]) / np.median(rates[OURS]))}
            for name in ways]
  for point in points:
    logging.info('%s', point)
  return points


def differing(a, b) -> int:
  """How many responses are not the same tokens."""
  return sum(n != m or bool((x[:n] != y[:n]).any())
             for x, n, y, m in zip(*a, *b))


def table(name: str, content: dict[str, Any]) -> str:
  lines = [
      f'# Beside `transformers`: {name}', '',
      'Written by peers.py. Float32, prefill timed; speed: response tokens a '
      'second, our autoregressive decoder = 1 at the same batch size. '
      '"Differ": responses that are not the tokens of our autoregressive '
      'decoder.', '',
      f'Machine: {content["machine"]}; {content["threads"]} threads each; jax '
      f'{content["jax"]}, torch {content["torch"]}, transformers '
      f'{content["transformers"]}; median of {content["repetitions"]} passes.',
      '', '| batch | decoding | responses | differ | tokens/s | speed |',
      '|---|---|---|---|---|---|']
  lines += [
      f'| {p["batch_size"]} | {p["decoding"]} | {p["responses"]} | '
      f'{p["differ"]} | {p["tokens_per_second"]:,.0f} | {p["speed"]:.2f} |'
      for p in content['points']]
  return '\n'.join(lines) + '\n'


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  what = parser.add_mutually_exclusive_group(required=True)
  what.add_argument('--workdir', type=pathlib.Path)
  what.add_argument('--shape', choices=SHAPES)
  parser.add_argument('--name', help='of the files; --shape gives one')
  parser.add_argument('--requests', type=int, default=64)
  parser.add_argument('--batch_sizes', type=int, nargs='+', default=[1, 16])
  parser.add_argument('--prompt_length', type=int, default=128,
                      help='with --shape')
  parser.add_argument('--response_length', type=int, default=64,
                      help='with --shape')
  parser.add_argument('--repetitions', type=int, default=3)
  args = parser.parse_args()
  if args.workdir and not args.name:
    parser.error('--workdir wants a --name')
  if min(args.repetitions, args.requests, *args.batch_sizes) < 1:
    parser.error('expected --repetitions, --requests and --batch_sizes of at '
                 'least 1')
  jax.config.update('jax_default_matmul_precision', 'highest')  # no TF32
  for package in ('torch', 'transformers', 'safetensors'):
    if importlib.util.find_spec(package) is None:
      parser.error(f"needs {package}: pip install -e '.[parity,hf]'")
  if jax.default_backend() not in TORCH_DEVICES:
    parser.error(f'PyTorch is not compared on {jax.default_backend()}: set '
                 'JAX_PLATFORMS=cpu')
  logging.set_verbosity(logging.INFO)
  if args.workdir:
    subject = of_workdir(args.workdir, args.requests)
  else:
    subject = of_shape(args.shape, args.requests, args.prompt_length,
                       args.response_length)
  if len(subject.prompts) < max(args.batch_sizes):
    parser.error(f'{len(subject.prompts)} test requests do not fill a batch of '
                 f'{max(args.batch_sizes)}')
  threads = len(os.sched_getaffinity(0))
  ways = {THEIRS: theirs(subject, threads), **ours(subject)}
  points = []
  for size in args.batch_sizes:
    points += measure(subject, ways, size, args.repetitions)
  name = args.name or args.shape
  versions = environment.environment('jax', 'torch', 'transformers')
  content = {**versions, 'threads': threads, 'repetitions': args.repetitions,
             'points': points}
  text = table(name, content)
  (HERE / f'peers_{name}.json').write_text(json.dumps(content, indent=1) + '\n')
  (HERE / f'peers_{name}.md').write_text(text)
  print(text)


if __name__ == '__main__':
  main()
