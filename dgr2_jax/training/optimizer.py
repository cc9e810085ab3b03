"""Optimizers: learning-rate schedule, what decays, and what fits in memory."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import ml_collections
import numpy as np
import optax

from dgr2_jax.models import partition
from dgr2_jax.training import lora as lora_lib

_NO_DECAY = re.compile(r'norm|bias$|scale$')


def learning_rate(config: ml_collections.ConfigDict) -> optax.Schedule:
  """Linear warm-up, then constant or a cosine to zero at the last step.

  Args:
    config: `learning_rate`, `warmup_steps`, `schedule`, `steps`.

  Returns:
    Steps done -> the next step's rate; the first one is not zero.

  Raises:
    ValueError: an unknown `schedule`.
  """
  if config.schedule not in ('constant', 'cosine'):
    raise ValueError(f'schedule is {config.schedule!r}; expected \'constant\' '
                     'or \'cosine\'.')

  def rate(count):
    warmup = jnp.minimum(1., (count + 1) / max(1, config.warmup_steps))
    if config.schedule == 'constant':
      return config.learning_rate * warmup
    done = jnp.clip((count - config.warmup_steps)
                    / max(1, config.steps - config.warmup_steps), 0., 1.)
    return config.learning_rate * warmup * .5 * (1. + jnp.cos(math.pi * done))

  return rate


def decayed(params: Any) -> Any:
  """Which parameters decay: matrices; not norms, biases or vectors.

  Names decide as well as ranks, for a scanned layer's norm is a matrix.
  """
  return jax.tree.map_with_path(
      lambda path, x: np.ndim(x) > 1
      and not _NO_DECAY.search(partition.path_name(path[-1:])), params)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """The optional section `optimizer` of a stage.

  Attributes:
    kind: 'adamw', or 'adafactor' (Shazeer & Stern, arXiv 1804.04235): factored
      second moments, updates clipped at a root mean square of 1, no momentum
      and a decay of its own; `b1` and `b2` are not used.
    mu_dtype: of AdamW's first moment, 'float32' or 'bfloat16'; None is that of
      the parameters, as it always is of the second moment, whose small changes
      bfloat16 would lose.
    lora: fields of a `lora.LoraConfig`; only adapters are trained then.
  """
  kind: str = 'adamw'
  mu_dtype: str | None = None
  lora: Mapping[str, Any] | None = None

  def __post_init__(self):
    for field, known in (('kind', ('adamw', 'adafactor')),
                         ('mu_dtype', (None, 'float32', 'bfloat16'))):
      if getattr(self, field) not in known:
        raise ValueError(
            f'optimizer.{field}={getattr(self, field)!r}: expected '
            + ' or '.join(map(str, known)))
    if self.kind == 'adafactor' and self.mu_dtype:
      raise ValueError(f'optimizer.mu_dtype={self.mu_dtype!r}: adafactor keeps '
                       'no first moment')
    self.adapters()

  def adapters(self) -> lora_lib.LoraConfig | None:
    """How matrices are adapted, if they are.

    Raises:
      ValueError: a field of `lora` is wrong.
    """
    if self.lora is None:
      return None
    try:
      return lora_lib.LoraConfig(**self.lora)
    except (TypeError, ValueError) as e:
      raise ValueError(f'optimizer.lora: {e}') from e


def of_stage(config: ml_collections.ConfigDict) -> OptimizerConfig:
  """The choice of a stage's section; AdamW without one."""
  return OptimizerConfig(**config.get('optimizer', {}))


# Before a model's: Adafactor's vectors are small, and not shaped like matrices.
RULES = ((r'/v_(row|col)/', P()),)


def make_optimizer(
    config: ml_collections.ConfigDict,
    choice: OptimizerConfig = OptimizerConfig()
    ) -> optax.GradientTransformation:
  """An optimizer with global-norm clipping.

  Args:
    config: `grad_clip` (0 is none), `b1`, `b2`, `weight_decay`, and the fields
      of `learning_rate`.
    choice: which one; `of_stage` for a stage.

  Returns:
    The optimizer.

  Raises:
    ValueError: a field is wrong.
  """
  clip = (optax.clip_by_global_norm(config.grad_clip) if config.grad_clip
          else optax.identity())
  rate = learning_rate(config)
  if choice.kind == 'adamw':
    return optax.chain(clip, optax.adamw(
        rate, b1=config.b1, b2=config.b2, mu_dtype=choice.mu_dtype,
        weight_decay=config.weight_decay, mask=decayed))
  return optax.chain(
      clip, optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.),
      optax.add_decayed_weights(config.weight_decay, decayed),
      optax.scale_by_learning_rate(rate))
