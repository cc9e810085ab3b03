"""Matrix products of a forward or an update, in closed form.

A multiply-add is two FLOPs. For T tokens, A (query, key) pairs that attention
computes, hidden ones included, K rows at the head, and E the MLP's width, a
forward takes

    layers * ( 2 T D (2 H F + 2 Hkv F + 3 E) + 4 A H F ) + 2 K D V

of them, and the backward pass two products for each of the forward's. XLA's own
count has the body of a loop once (layers, chunks, parts of a batch) and what is
recomputed in the backward pass twice; `experiments/cost` holds the two against
each other where there are no loops.
"""

from __future__ import annotations

import dataclasses

from dgr2_jax.models import transformer


@dataclasses.dataclass(frozen=True)
class Work:
  """What goes through the model.

  Attributes:
    tokens: T.
    pairs: A.
    head_rows: K.
  """
  tokens: int
  pairs: int
  head_rows: int

  def __add__(self, other: Work) -> Work:
    return Work(self.tokens + other.tokens, self.pairs + other.pairs,
                self.head_rows + other.head_rows)


def canvas(rows: int, prompt: int, copies: int, length: int, canvases: int,
           block: int, head_rows: int) -> Work:
  """One pass over shared-prompt canvases, see `models/canvas.py`.

  Args:
    rows: N, requests.
    prompt: P.
    copies: clean copies of responses a request: G, or a replay's R.
    length: L.
    canvases: M, block canvases of a copy.
    block: B.
    head_rows: K, of a request.
  """
  clean, noisy = copies * length, copies * canvases * block
  pairs = (prompt ** 2 + clean * (prompt + length)
           + noisy * (prompt + length + block))
  return Work(rows * (prompt + clean + noisy), rows * pairs, rows * head_rows)


def decoding_call(rows: int, prompt: int, length: int, block: int) -> Work:
  """One call of the decoder over a block of each of `rows` responses."""
  tokens = rows * block
  return Work(tokens, tokens * (prompt + length + block), tokens)


def forward(config: transformer.ModelConfig, work: Work) -> int:
  """FLOPs of a forward pass."""
  heads = config.num_heads * config.head_dim
  kv_heads = config.num_kv_heads * config.head_dim
  weights = config.width * (2 * heads + 2 * kv_heads + 3 * config.mlp_dim)
  layer = 2 * work.tokens * weights + 4 * work.pairs * heads
  return (config.num_layers * layer
          + 2 * work.head_rows * config.width * config.vocab_size)


def update(config: transformer.ModelConfig, work: Work) -> int:
  """FLOPs of a value and its gradient; what is recomputed is not counted."""
  return 3 * forward(config, work)


def recomputed(config: transformer.ModelConfig, work: Work) -> int:
  """FLOPs of a forward pass that the backward pass does again, by `remat`.

  'dots' keeps products with weights, and not attention's. 'full' keeps none,
  but a layer's last product is not done again: no gradient needs its output.
  """
  if config.remat == 'none':
    return 0
  if config.remat == 'dots':
    return forward(config, Work(0, work.pairs, 0))
  last = 2 * work.tokens * config.width * config.mlp_dim
  return (forward(config, dataclasses.replace(work, head_rows=0))
          - config.num_layers * last)
