"""AdamW: its learning-rate schedule, and which parameters decay."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from dgr2_jax.training import sharding

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
      and not _NO_DECAY.search(sharding.path_name(path[-1:])), params)


def make_optimizer(
    config: ml_collections.ConfigDict) -> optax.GradientTransformation:
  """AdamW with global-norm clipping.

  Args:
    config: `grad_clip` (0 is none), `b1`, `b2`, `weight_decay`, and the
      fields of `learning_rate`.

  Returns:
    The optimizer.
  """
  clip = (optax.clip_by_global_norm(config.grad_clip) if config.grad_clip
          else optax.identity())
  return optax.chain(clip, optax.adamw(
      learning_rate(config), b1=config.b1, b2=config.b2,
      weight_decay=config.weight_decay, mask=decayed))
