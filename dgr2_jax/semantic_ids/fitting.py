"""Fits an RQ-VAE to a catalogue and reads the ids off it.

    initialise    random weights; codebooks by k-means++ on residuals
    every step    loss -> AdamW;  moving averages;  dead codes reset
    then          codes of all items -> last level -> ids

This is its own loop, not `training.loop`: moving averages and resets are no
gradient updates, and it runs within `prepare`, which builds its files whole or
not at all, so that checkpoints would not be kept. Twelve thousand items take
about 15 seconds of a CPU core (experiments/semantic_ids).
"""

from __future__ import annotations

from collections.abc import Iterator
import functools
from typing import Any, NamedTuple

from absl import logging
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dgr2_jax.semantic_ids import last_level
from dgr2_jax.semantic_ids import residual_kmeans
from dgr2_jax.semantic_ids import rqvae
from dgr2_jax.training import optimizer as optimizer_lib

_CHUNK = 8192  # items that are encoded at a time
_LOGS = 10  # lines a fit


@struct.dataclass
class State:
  """What a step changes."""
  params: Any
  opt_state: optax.OptState
  usage: rqvae.Usage


class Fitted(NamedTuple):
  """Ids and what they are made of.

  Attributes:
    nearest: int32 [I, L], the nearest code at every level; rows may be equal.
    ids: int32 [I, L], after the last level.
    reconstruction: mean |e - e'|^2 of unit rows e, by 'nearest' and 'ids'.
    params: of the RQ-VAE.
  """
  nearest: np.ndarray
  ids: np.ndarray
  reconstruction: dict[str, float]
  params: Any


def fit(embeddings: np.ndarray, config: rqvae.RqVaeConfig) -> Fitted:
  """Trains an RQ-VAE and gives every item an id.

  Args:
    embeddings: float32 [I, E], unit rows.
    config: the model and its training.

  Returns:
    Ids; unique with `last_level='collision_aware'`.

  Raises:
    ValueError: there are too few items for the codes, or too few ids for the
      items; or training diverged.
  """
  check_sizes(len(embeddings), config)
  model = rqvae.RqVae(config, embeddings.shape[1])
  params = train(model, initial_params(model, embeddings), embeddings)
  return read_ids(model, params, embeddings)


def read_ids(model: rqvae.RqVae, params: Any,
             embeddings: np.ndarray) -> Fitted:
  """The ids that a trained model gives.

  Args:
    model: the module, whose config names the last level.
    params: from `train`.
    embeddings: float32 [I, E].
  """
  config = model.config
  latent, nearest = _encode(model, params, embeddings)
  tables = np.asarray(params['codebooks'])
  ids = nearest
  if config.last_level == last_level.RANDOM:
    ids = last_level.random(nearest, config.codes, config.seed)
  elif config.last_level == last_level.COLLISION_AWARE:
    ids = last_level.collision_aware(latent, nearest, tables, config.codes)
  return Fitted(nearest, ids, {
      'nearest': _reconstruction(model, params, embeddings, nearest),
      'ids': _reconstruction(model, params, embeddings, ids)}, params)


def check_sizes(items: int, config: rqvae.RqVaeConfig) -> None:
  """Checks that codes have items, and items ids.

  Raises:
    ValueError: as for `fit`.
  """
  if config.init == 'kmeans' and items < config.codes:
    raise ValueError(
        f'config.semantic_ids.codes is {config.codes}: k-means needs as many '
        f'items, the catalogue has {items}; choose fewer codes, or '
        "config.semantic_ids.rqvae.init='random'.")
  if (config.last_level == last_level.COLLISION_AWARE
      and config.codes ** config.levels < items):
    raise ValueError(
        f'config.semantic_ids: {config.codes}^{config.levels} ids do not '
        f'suffice for {items} items; raise levels or codes.')


def initial_params(model: rqvae.RqVae, embeddings: np.ndarray) -> Any:
  """Random weights; with `init='kmeans'` codebooks fitted to their residuals.

  Args:
    model: the module.
    embeddings: float32 [I, E].

  Returns:
    The parameters. Codes that k-means has no distinct rows for stay random.
  """
  config = model.config
  params = jax.jit(model.init)(
      jax.random.key(config.seed), jnp.zeros((1, model.size)))['params']
  if config.init == 'random':
    return params
  latent, _ = _encode(model, params, embeddings)
  centroids, _ = residual_kmeans.residual_clusters(
      latent, config.levels, config.codes, config.seed)
  tables = np.array(params['codebooks'])
  for table, rows in zip(tables, centroids, strict=True):
    table[:len(rows)] = rows
  return {**params, 'codebooks': jnp.asarray(tables)}


def make_step(model: rqvae.RqVae, optimizer: optax.GradientTransformation):
  """One update, to be jitted: (state, batch [N, E]) -> state, loss terms."""
  config = model.config

  def step(state: State, batch: jax.Array):
    (total, (terms, quantised)), grads = jax.value_and_grad(
        functools.partial(rqvae.loss, model), has_aux=True)(
            state.params, batch)
    updates, opt_state = optimizer.update(
        grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    usage = rqvae.follow(
        state.usage, quantised.residuals, quantised.codes, config.decay)
    codebooks = params['codebooks']
    if config.codebook == 'ema':  # whatever the optimizer did to them
      codebooks = rqvae.averages(usage, state.params['codebooks'])
    if config.reset_after:
      codebooks, usage = rqvae.reset_dead(
          codebooks, usage, quantised.residuals, quantised.distances.min(-1),
          config.reset_after)
    return (State({**params, 'codebooks': codebooks}, opt_state, usage),
            {'loss': total, **terms})

  return step


def train(model: rqvae.RqVae, params: Any, embeddings: np.ndarray) -> Any:
  """Trains for `config.steps` steps.

  Args:
    model: the module.
    params: from `initial_params`.
    embeddings: float32 [I, E].

  Returns:
    The parameters.

  Raises:
    ValueError: the loss is not finite.
  """
  config = model.config
  optimizer = optimizer_lib.make_optimizer(config)
  step_fn = jax.jit(make_step(model, optimizer))
  state = State(params, optimizer.init(params),
                rqvae.initial_usage(params['codebooks']))
  every = -(-config.steps // _LOGS)
  for step, rows in enumerate(_batches(len(embeddings), config), 1):
    state, terms = step_fn(state, embeddings[rows])
    if step % every == 0 or step == config.steps:
      if not np.isfinite(terms['loss']):
        raise ValueError(
            f'semantic ids: the loss of the RQ-VAE is not finite at step '
            f'{step}; lower config.semantic_ids.rqvae.learning_rate.')
      logging.info(
          'RQ-VAE %d/%d | %s', step, config.steps,
          ' '.join(f'{k} {float(v):.4f}' for k, v in terms.items()))
  return state.params


def _batches(items: int, config: rqvae.RqVaeConfig) -> Iterator[np.ndarray]:
  """Item indices of every step, in epochs without repeats."""
  size = min(config.batch_size, items)
  rng = np.random.default_rng(config.seed)
  order = rng.permutation(items)
  for _ in range(config.steps):
    if len(order) < size:
      order = rng.permutation(items)
    yield order[:size]
    order = order[size:]


def _encode(model: rqvae.RqVae, params: Any, embeddings: np.ndarray
            ) -> tuple[np.ndarray, np.ndarray]:
  """Latents, float32 [I, D], and their nearest codes, int32 [I, L]."""
  @jax.jit
  def encode(params, batch):
    latent = model.apply({'params': params}, batch, method='encode')
    return latent, rqvae.quantise(latent, params['codebooks']).codes

  parts = [encode(params, embeddings[start:start + _CHUNK])
           for start in range(0, len(embeddings), _CHUNK)]
  return tuple(np.concatenate(column) for column in zip(*parts))


def _reconstruction(model: rqvae.RqVae, params: Any, embeddings: np.ndarray,
                    ids: np.ndarray) -> float:
  """Mean squared error of what ids decode to."""
  @jax.jit
  def error(params, batch, codes):
    rows = params['codebooks'][jnp.arange(model.config.levels), codes]
    decoded = model.apply({'params': params}, rows.sum(1), method='decode')
    return jnp.square(batch - decoded).sum()

  total = sum(
      float(error(params, embeddings[start:start + _CHUNK],
                  ids[start:start + _CHUNK]))
      for start in range(0, len(ids), _CHUNK))
  return total / len(ids)
