"""What models and decoders need to know about token ids."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """Ids with a role.

  Attributes:
    size: V, padded rows included.
    mask_id: the mask token.
    eos_id: ends a response and fills its last block.
    banned: ids that are never sampled and left out of every softmax: mask,
      padding and unused rows.
  """
  size: int
  mask_id: int
  eos_id: int
  banned: tuple[int, ...]

  def __post_init__(self):
    if self.mask_id not in self.banned or self.eos_id in self.banned:
      raise ValueError('the mask must be banned and EOS must not')

  def allow(self, logits: jax.Array) -> jax.Array:
    """Logits [..., V] with minus infinity at banned ids."""
    banned = np.zeros(self.size, bool)
    banned[list(self.banned)] = True
    return jnp.where(banned, -jnp.inf, logits)
