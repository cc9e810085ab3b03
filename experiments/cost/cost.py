"""FLOPs of one update at the paper's shape, by layout. Nothing is run.

    python experiments/cost/cost.py

lowers the update of a Qwen3-0.6B-shaped model, asks XLA for its FLOPs, checks
them against a closed form and writes cost.json and cost.md beside this file.
The layouts, for a request with P prompt tokens and G rollouts of L tokens in
L / B blocks, each block decoded in S steps:

    shared prompt            [prompt | (clean, M canvases) x G]          1 row
    one row per rollout      [prompt | clean, M canvases]                G rows
    one row per              [prompt | clean | noisy], P + 2L tokens     G S
      (rollout, step)                                                    rows

M = S L / B. Row (g, s) of the last layout shows every block of rollout g as it
stood before step s, under the dense [x_t ; x_0] mask of BD3-LM (2503.09573).
CFT is the same with G = 1 and two masks in place of S steps. An update is the
value and the gradient of the loss; the optimizer, which costs every layout the
same, is left out.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from dgr2_jax.models import attention as attention_lib
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import flops
from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib
from dgr2_jax.objectives import denoising
from dgr2_jax.objectives import policy
from dgr2_jax.objectives import scoring

# Loops are counted once, so there are none: layers are unrolled, canvases and
# head rows are not chunked, nothing is recomputed.
QWEN3_0_6B = transformer.ModelConfig(
    vocab_size=151936, num_layers=28, width=1024, num_heads=16, num_kv_heads=8,
    head_dim=128, mlp_dim=3072, unroll_layers=True)
# The first unused row of the embedding is the mask; none of them is sampled.
QWEN3_VOCABULARY = vocabulary_lib.Vocabulary(
    size=151936, mask_id=151669, eos_id=151645,
    banned=tuple(range(151669, 151936)))

# Label, numerator, denominator, upper limit.
RATIOS = (
    ('CFT / AR SFT', 'cft', 'ar_sft', 1.25),
    ('CFT, one row per mask / AR SFT', 'cft_rows', 'ar_sft', None),
    ('RL / RL, one row per rollout', 'rl', 'rl_packed', None),
    ('RL / RL, one row per (rollout, step)', 'rl', 'rl_rows', 1 / 8),
)


@dataclasses.dataclass(frozen=True)
class Shape:
  """Sizes of one request.

  Attributes:
    prompt: P.
    length: L.
    block_size: B.
    rollouts: G of the RL update; SFT and CFT have one response.
    steps: denoising steps a block of the RL update.
  """
  prompt: int
  length: int
  block_size: int
  rollouts: int
  steps: int

  @property
  def blocks(self) -> int:
    return self.length // self.block_size


PAPER = Shape(prompt=2215, length=160, block_size=32, rollouts=8, steps=10)


@dataclasses.dataclass(frozen=True)
class Layout:
  """One update on one layout, and what it computes.

  Attributes:
    title: what it is.
    rows: sequences that go through the model.
    tokens: of all rows.
    pairs: (query, key) pairs that attention computes, hidden ones included.
    visible: pairs that the rule lets through.
    head_rows: hidden states that meet the LM head.
    loss: (params, batch) -> scalar.
    batch: shapes of the arrays that `loss` takes.
  """
  title: str
  rows: int
  tokens: int
  pairs: int
  visible: int
  head_rows: int
  loss: Callable[[Any, Any], jax.Array]
  batch: dict[str, jax.ShapeDtypeStruct]


def row_mask(shape: Shape, config: canvas_lib.CanvasConfig) -> jax.Array:
  """bool [P + 2L, P + 2L]: who sees whom in a row [prompt; clean; noisy].

      reads \\ sees   prompt    clean              noisy
      prompt          causal    -                  -
      clean           all       the clean rule     -
      noisy           all       the blocks before  its own block
  """
  p, l, b = shape.prompt, shape.length, shape.block_size
  index = jnp.arange(l)
  before = index < (index // b * b)[:, None]
  own = index // b == (index // b)[:, None]
  return jnp.block([
      [jnp.tril(jnp.ones((p, p), bool)), jnp.zeros((p, 2 * l), bool)],
      [jnp.ones((l, p), bool), canvas_lib.clean_rule(index, index, config),
       jnp.zeros((l, l), bool)],
      [jnp.ones((l, p), bool), before, own]])


def row_logprobs(model: transformer.Transformer, params: Any,
                 batch: dict[str, jax.Array], shape: Shape,
                 config: canvas_lib.CanvasConfig,
                 vocabulary: vocabulary_lib.Vocabulary) -> jax.Array:
  """Log-probabilities on rows [prompt; clean; noisy] under a dense mask.

  Args:
    model: the decoder.
    params: its parameters.
    batch: int32 `prompt` [R, P] without padding, int32 `clean` [R, L] and bool
      `masked` [R, L] of R rows; int32 `row`, `at` and `token` [K]: state `at`
      of row `row` scores `token`.
    shape: P, L and B.
    config: rule of the clean stream.
    vocabulary: special ids.

  Returns:
    float32 [K], in nats.
  """
  p, l = shape.prompt, shape.length
  rows = batch['prompt'].shape[0]
  noisy = jnp.where(batch['masked'], vocabulary.mask_id, batch['clean'])
  tokens = jnp.concatenate([batch['prompt'], batch['clean'], noisy], axis=1)
  response = p + jnp.arange(l)
  positions = jnp.concatenate([jnp.arange(p), response, response])
  visible = row_mask(shape, config)[None, None, None]

  def attention(query, key, value, cache):
    del cache
    out = attention_lib.attend(
        query[:, None, None], [attention_lib.Part(key, value, visible)])
    return out.reshape(query.shape), None

  hidden, _ = model.apply(
      {'params': params}, tokens,
      jnp.broadcast_to(positions, (rows, p + 2 * l)), attention,
      method='hidden')
  states = hidden[batch['row'], batch['at']]  # [K, D]
  logprob, _ = scoring.token_scores(
      model, params, states[None], batch['token'][None], vocabulary)
  return logprob[0]


def layouts(shape: Shape, model: transformer.Transformer,
            vocabulary: vocabulary_lib.Vocabulary) -> dict[str, Layout]:
  """The updates that are compared, for one request."""
  p, l, g, s = shape.prompt, shape.length, shape.rollouts, shape.steps
  config = canvas_lib.CanvasConfig(shape.block_size)
  scored = shape.blocks + l  # seeds, and room for every other token
  return {
      'ar_sft': Layout(
          'AR SFT', 1, *_structured(shape, 1, 1, 0), l,
          _denoising_loss(model, canvas_lib.AUTOREGRESSIVE, vocabulary),
          _denoising_batch(shape)),
      'cft': Layout(
          'CFT, shared prompt', 1, *_structured(shape, 1, 1, 2), scored,
          _denoising_loss(model, config, vocabulary),
          _denoising_batch(shape)),
      'cft_rows': Layout(
          'CFT, one row per mask', 2, *_dense(shape, 2), scored,
          _row_loss(model, shape, config, vocabulary),
          _row_batch(shape, 2, scored)),
      'rl': Layout(
          'RL, shared prompt', 1, *_structured(shape, 1, g, s), g * scored,
          _policy_loss(model, config, vocabulary),
          _policy_batch(shape, 1, g)),
      'rl_packed': Layout(
          'RL, one row per rollout', g, *_structured(shape, g, 1, s),
          g * scored, _policy_loss(model, config, vocabulary),
          _policy_batch(shape, g, 1)),
      'rl_rows': Layout(
          f'RL, one row per (rollout, step), {p + 2 * l:,} tokens each',
          g * s, *_dense(shape, g * s), g * scored,
          _row_loss(model, shape, config, vocabulary),
          _row_batch(shape, g * s, g * scored)),
  }


def _structured(shape: Shape, rows: int, rollouts: int,
                canvases: int) -> tuple[int, int, int]:
  """Tokens, computed pairs and visible pairs of `models.canvas`.

  Args:
    shape: P, L and B.
    rows: requests, each with its own prompt.
    rollouts: responses behind each prompt.
    canvases: noisy copies of every block.
  """
  p, l, b = shape.prompt, shape.length, shape.block_size
  noisy = canvases * l
  before = canvases * b * sum(range(0, l, b))  # block starts
  tokens = p + rollouts * (l + noisy)
  pairs = p * p + rollouts * (l * (p + l) + noisy * (p + l + b))
  visible = p * (p + 1) // 2 + rollouts * (
      l * p + l * (l + 1) // 2 + noisy * (p + b) + before)
  return rows * tokens, rows * pairs, rows * visible


def _dense(shape: Shape, rows: int) -> tuple[int, int, int]:
  """Tokens, computed pairs and visible pairs of rows [prompt; clean; noisy]."""
  tokens = shape.prompt + 2 * shape.length
  return (rows * tokens, rows * tokens ** 2,
          _structured(shape, rows, 1, 1)[2])


def _ints(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.int32)


def _bools(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.bool_)


def _floats(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def _denoising_batch(shape):
  response = (1, 1, shape.length)
  return dict(
      prompt=_ints(1, shape.prompt), prompt_length=_ints(1),
      response=_ints(*response), response_length=_ints(1, 1),
      is_answer=_bools(*response), supervised_from=_ints(1, 1),
      example_id=_ints(1))


def _policy_batch(shape, n, g):
  m, b = shape.steps * shape.blocks, shape.block_size
  return dict(
      prompt=_ints(n, shape.prompt), prompt_length=_ints(n),
      response=_ints(n, g, shape.length), response_length=_ints(n, g),
      owner=_ints(n, g), first=_ints(n, g),
      start=_ints(n, g, m), masked=_bools(n, g, m, b),
      decided=_bools(n, g, m, b), logprob=_floats(n, g, shape.length),
      advantage=_floats(n, g), kept=_bools(n))


def _row_batch(shape, rows, scored):
  return dict(
      prompt=_ints(rows, shape.prompt), clean=_ints(rows, shape.length),
      masked=_bools(rows, shape.length), row=_ints(scored), at=_ints(scored),
      token=_ints(scored), weight=_floats(scored))


def _denoising_loss(model, config, vocabulary):

  def loss(params, batch):
    # The default generator is a loop on CPUs; this one is not.
    key = jax.random.key(0, impl='unsafe_rbg')
    return denoising.loss(model, params, batch, key, config,
                          denoising.DenoisingConfig(), vocabulary)[0].value

  return loss


def _policy_loss(model, config, vocabulary):

  def loss(params, batch):
    return policy.loss(model, params, batch, config, policy.PolicyConfig(),
                       vocabulary)[0].value

  return loss


def _row_loss(model, shape, config, vocabulary):
  """Weighted log-probabilities: the matmuls of either objective."""

  def loss(params, batch):
    logprob = row_logprobs(model, params, batch, shape, config, vocabulary)
    return -(batch['weight'] * logprob).sum()

  return loss


def xla_flops(layout: Layout, params: Any) -> int:
  """XLA's count for the lowered, not yet optimised update.

  Raises:
    ValueError: the program has a loop, whose body would be counted once.
  """
  lowered = jax.jit(jax.value_and_grad(layout.loss)).lower(
      params, layout.batch)
  if 'stablehlo.while' in lowered.as_text():
    raise ValueError(f'{layout.title}: a loop, whose body is counted once')
  return int(lowered.cost_analysis()['flops'])


def measure(shape: Shape, config: transformer.ModelConfig,
            vocabulary: vocabulary_lib.Vocabulary) -> dict[str, Any]:
  """Counts every layout; the content of cost.json.

  Args:
    shape: sizes of the request.
    config: the decoder; layers unrolled, at least two (a scan over one stays a
      loop).
    vocabulary: special ids.
  """
  model = transformer.Transformer(config)
  params = jax.eval_shape(
      lambda: transformer.init(config, jax.random.key(0)))
  counts = {}
  for name, layout in layouts(shape, model, vocabulary).items():
    count = {field: getattr(layout, field) for field in
             ('title', 'rows', 'tokens', 'pairs', 'visible', 'head_rows')}
    counts[name] = count | {
        'xla': xla_flops(layout, params),
        'closed_form': flops.update(config, flops.Work(
            layout.tokens, layout.pairs, layout.head_rows)),
        'closed_form_visible': flops.update(config, flops.Work(
            layout.tokens, layout.visible, layout.head_rows))}
  ratios = []
  for label, above, below, limit in RATIOS:
    ratio = {field: counts[above][field] / counts[below][field]
             for field in ('xla', 'closed_form', 'closed_form_visible')}
    ratios.append({'label': label, **ratio, 'limit': limit,
                   'met': None if limit is None else ratio['xla'] <= limit})
  return {'jax': jax.__version__, 'shape': dataclasses.asdict(shape),
          'model': dataclasses.asdict(config), 'layouts': counts,
          'ratios': ratios}


def markdown(content: dict[str, Any]) -> str:
  """cost.md of `measure`'s result."""
  s = content['shape']
  lines = [
      f'P = {s["prompt"]:,}, L = {s["length"]}, B = {s["block_size"]}, '
      f'G = {s["rollouts"]}, {s["steps"]} steps a block; '
      f'{content["model"]["num_layers"]} layers; one request; '
      f'jax {content["jax"]}. TFLOP an update:',
      '',
      '| update | rows | tokens | head rows | XLA | closed form | '
      'XLA / closed form | closed form, visible pairs only |',
      '|---|---:|---:|---:|---:|---:|---:|---:|']
  for x in content['layouts'].values():
    lines.append(
        f'| {x["title"]} | {x["rows"]} | {x["tokens"]:,} | '
        f'{x["head_rows"]:,} | {x["xla"] / 1e12:.2f} | '
        f'{x["closed_form"] / 1e12:.2f} | {x["xla"] / x["closed_form"]:.4f} | '
        f'{x["closed_form_visible"] / 1e12:.2f} |')
  lines += [
      '',
      '| ratio | XLA | closed form | closed form, visible pairs only | '
      'limit | met |',
      '|---|---:|---:|---:|---:|---|']
  for x in content['ratios']:
    figures = [_ratio(x[field]) for field in
               ('xla', 'closed_form', 'closed_form_visible')]
    limit = '-' if x['limit'] is None else f'{x["limit"]:g}'
    met = {None: '-', True: 'yes', False: 'no'}[x['met']]
    lines.append(f'| {x["label"]} | {" | ".join(figures)} | {limit} | {met} |')
  return '\n'.join(lines) + '\n'


def _ratio(value):
  """Below one also as 1/x."""
  return f'{value:.4f}' + (f' (1/{1 / value:.2f})' if value < 1 else '')


def main():
  # Nothing is run, so that any machine does and gives the same.
  jax.config.update('jax_platforms', 'cpu')
  content = measure(PAPER, QWEN3_0_6B, QWEN3_VOCABULARY)
  folder = pathlib.Path(__file__).parent
  (folder / 'cost.json').write_text(
      json.dumps(content, indent=2) + '\n', encoding='utf-8')
  table = markdown(content)
  (folder / 'cost.md').write_text(table, encoding='utf-8')
  print(table)


if __name__ == '__main__':
  main()
