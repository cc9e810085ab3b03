"""Trains a retriever until its validation lists stop getting better.

    epoch: histories -> sequences -> packed rows -> AdamW on the cross-entropy
           validation users -> lists -> NDCG@10;  the best epoch's weights stay

A loop of its own, as `semantic_ids.fitting`: it runs within `prepare`, which
builds its files whole or not at all. What is kept when that is killed are the
lists of models that are done (`finished`), not checkpoints.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
import dataclasses
import functools
import time
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dgr2_jax.retrieval import packing
from dgr2_jax.training import optimizer as optimizer_lib


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
  """How a retriever is trained.

  Attributes:
    seed: of weights, order, dropout and folds.
    batch_rows: packed rows a step.
    learning_rate: after the warm-up.
    warmup_steps: of a linear warm-up.
    weight_decay: of matrices.
    grad_clip: largest norm of a gradient.
    epochs: at most.
    patience: epochs without a better NDCG@10 after which training ends.
    validation_users: drawn for it; 0 is all.
    folds: of users, for training lists, see `lists`.
  """
  seed: int = 0
  batch_rows: int = 32
  learning_rate: float = 3e-3
  warmup_steps: int = 100
  weight_decay: float = 0.
  grad_clip: float = 1.
  epochs: int = 60
  patience: int = 3
  validation_users: int = 4000
  folds: int = 4

  def __post_init__(self):
    self.check_whole('batch_rows', 'epochs', 'patience')
    self.check_whole('folds', low=2)
    self.check_whole('seed', 'warmup_steps', 'validation_users', low=0)
    for field in ('learning_rate', 'grad_clip'):
      if not getattr(self, field) > 0:
        self.refuse(field, 'a number above 0')
    if not self.weight_decay >= 0:
      self.refuse('weight_decay', 'a number of at least 0')

  def check_whole(self, *fields: str, low: int = 1) -> None:
    """Refuses fields that are no whole numbers from `low` on."""
    for field in fields:
      value = getattr(self, field)
      if isinstance(value, bool) or not isinstance(value, int) or value < low:
        self.refuse(field, f'a whole number of at least {low}')

  def refuse(self, field: str, expected: str) -> None:
    """Raises ValueError with the field's name."""
    raise ValueError(f'config.data.retriever: {field} is '
                     f'{getattr(self, field)!r}: expected {expected}.')


class Retriever(abc.ABC):
  """A model that is trained on histories and lists items.

  Attributes:
    config: how it is trained.
    row_length: T of packed rows.
  """
  config: TrainingConfig
  row_length: int

  @abc.abstractmethod
  def init(self, key: jax.Array) -> Any:
    """Random parameters."""

  @abc.abstractmethod
  def sequences(self, histories: list[np.ndarray],
                rng: np.random.Generator) -> list[np.ndarray]:
    """What an epoch learns of histories, as sequences of tokens."""

  @abc.abstractmethod
  def loss(self, params: Any, rows: packing.Rows, key: jax.Array) -> jax.Array:
    """The mean cross-entropy of the next tokens, a scalar."""

  @abc.abstractmethod
  def top(self, params: Any, items: jax.Array, length: jax.Array,
          count: int) -> tuple[jax.Array, jax.Array]:
    """The most probable next items outside of the history.

    Args:
      params: the parameters.
      items: int32 [n, h] histories, oldest first, padded on the right.
      length: int32 [n], at least 1.
      count: k, items listed.

    Returns:
      int32 [n, k] item indices, best first, and float32 [n, k] their
      log-probabilities.
    """


def cross_entropy(logits: jax.Array, targets: jax.Array,
                  real: jax.Array) -> jax.Array:
  """Mean over the real positions; logits [R, T, V], the others [R, T]."""
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
  return jnp.sum(losses * real) / jnp.maximum(real.sum(), 1)


def train(
    retriever: Retriever,
    histories: list[np.ndarray],
    *,
    epochs: int,
    validate: Callable[[Any], dict[str, float]] | None = None,
) -> tuple[Any, int]:
  """Trains on all but the first item of every history.

  Args:
    retriever: the model.
    histories: int [h] item indices, oldest first.
    epochs: at most; exactly, without `validate`.
    validate: parameters -> figures, 'ndcg@10' among them.

  Returns:
    The parameters of the best epoch, or of the last one without `validate`,
    and that epoch's number, from 1.

  Raises:
    ValueError: no history has two items, or the loss is not finite.
  """
  c = retriever.config
  key = jax.random.key(c.seed)
  params = jax.jit(retriever.init)(key)
  opt_state = _optimizer(c).init(params)
  best, best_epoch, best_score = params, 0, -1.
  steps, start = 0, time.perf_counter()
  for epoch in range(1, epochs + 1):
    rng = np.random.default_rng((c.seed, epoch))
    rows = packing.pack(
        retriever.sequences(histories, rng), retriever.row_length, rng)
    losses = []
    for batch in _batches(rows, c.batch_rows):
      steps += 1
      params, opt_state, loss = _step(
          retriever, params, opt_state, batch, jax.random.fold_in(key, steps))
      losses.append(loss)
    loss = float(np.mean(losses))
    if not np.isfinite(loss):
      raise ValueError(
          f'retriever: the loss is not finite in epoch {epoch}; lower '
          'learning_rate.')
    figures = validate(params) if validate else {}
    logging.info(
        'Retriever, epoch %d/%d | loss %.4f %s| %.0f s', epoch, epochs, loss,
        ''.join(f'{k} {v:.4f} ' for k, v in figures.items()),
        time.perf_counter() - start)
    if not validate or figures['ndcg@10'] > best_score:
      best, best_epoch = params, epoch
      best_score = figures.get('ndcg@10', -1.)
    elif epoch - best_epoch >= c.patience:
      break
  return best, best_epoch


def _optimizer(c: TrainingConfig) -> optax.GradientTransformation:
  rate = optax.linear_schedule(0., c.learning_rate, max(1, c.warmup_steps))
  return optax.chain(
      optax.clip_by_global_norm(c.grad_clip),
      optax.adamw(rate, b2=.98, weight_decay=c.weight_decay,
                  mask=optimizer_lib.decayed))


@functools.partial(jax.jit, static_argnums=0)
def _step(retriever: Retriever, params: Any, opt_state: optax.OptState,
          rows: packing.Rows, key: jax.Array):
  """One update, compiled once for all folds."""
  loss, grads = jax.value_and_grad(retriever.loss)(params, rows, key)
  updates, opt_state = _optimizer(retriever.config).update(
      grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, loss


def _batches(rows: packing.Rows, size: int):
  """Batches of one shape; empty rows fill up the last one."""
  count = len(rows.inputs)
  fill = -count % size
  rows = jax.tree.map(lambda x: np.pad(x, ((0, fill), (0, 0))), rows)
  for begin in range(0, count, size):
    yield rows[begin:begin + size]
