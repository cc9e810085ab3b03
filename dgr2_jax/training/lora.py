"""Low-rank adapters of chosen matrices (LoRA, Hu et al., arXiv 2106.09685).

    W' = W + alpha / r * A B     W [in, out], A [in, r], B [r, out], at first 0

W is frozen; A and B alone have gradients and an optimizer's state. A layer adds
the product to its own W where it uses it (`models/transformer.py`), so that no
gradient of W is ever held. What a stage leaves are merged matrices: decoding,
evaluation and export know nothing of adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp

# Matrices of a layer that may be adapted, and how many of their dimensions,
# after that of the layer, are inputs.
_INPUTS = {'query': 1, 'key': 1, 'value': 1, 'out': 2, 'gate': 1, 'up': 1,
           'down': 1}


@dataclasses.dataclass(frozen=True)
class LoraConfig:
  """Which matrices, and how.

  Attributes:
    matrices: regular expressions over names of a layer's matrices (query, key,
      value, out, gate, up, down), matched in full.
    rank: r.
    alpha: the product counts alpha / r times.
  """
  matrices: Sequence[str]
  rank: int = 16
  alpha: float = 32.0

  def __post_init__(self):
    if self.rank < 1:
      raise ValueError(f'rank={self.rank} must be >= 1')
    for pattern in self.matrices:
      if not any(re.fullmatch(pattern, name) for name in _INPUTS):
        raise ValueError(f'matrices has {pattern!r}, which matches none of '
                         + ', '.join(_INPUTS))
    if not self.matrices:
      raise ValueError('matrices is empty: nothing would be trained')

  def adapts(self, name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in self.matrices)


def init(base: Any, key: jax.Array, config: LoraConfig) -> Any:
  """Adapters that change nothing yet: {'layers': {'query_lora_a': ...}}."""
  adapters = {}
  for index, (name, inputs) in enumerate(_INPUTS.items()):
    if not config.adapts(name):
      continue
    matrix = base['layers'][name]  # [layers, in..., out...]
    layers, fan_in = matrix.shape[0], matrix.shape[1:1 + inputs]
    adapters[f'{name}_lora_a'] = math.prod(fan_in) ** -0.5 * jax.random.normal(
        jax.random.fold_in(key, index), (layers, *fan_in, config.rank),
        matrix.dtype)
    adapters[f'{name}_lora_b'] = jnp.zeros(
        (layers, config.rank, *matrix.shape[1 + inputs:]), matrix.dtype)
  return {'layers': adapters}


def join(base: Any, adapters: Any, config: LoraConfig) -> Any:
  """Parameters for the model: the base and beside it, scaled, its adapters."""
  scale = config.alpha / config.rank
  scaled = {name: scale * x if name.endswith('_b') else x
            for name, x in adapters['layers'].items()}
  return {**base, 'layers': base['layers'] | scaled}


def merge(base: Any, adapters: Any, config: LoraConfig) -> Any:
  """Parameters like `base`, with the adapted matrices in place of its own."""
  joined = join(base, adapters, config)['layers']
  product = jax.vmap(functools.partial(jnp.tensordot, axes=1))
  return {**base, 'layers': {
      name: matrix + product(joined[f'{name}_lora_a'],
                             joined[f'{name}_lora_b'])
      if f'{name}_lora_a' in joined else matrix
      for name, matrix in base['layers'].items()}}
