"""SASRec with the full softmax over the catalogue.

    h_0 = dropout(norm(E[item] + P[position]))
    h <- norm(h + dropout(attention(h)));  h <- norm(h + dropout(mlp(h)))
    p(next = j | items before) = softmax(E h)_j

Self-attentive sequential recommendation (Kang and McAuley, 1808.09781), with
the cross-entropy over all items in place of sampled negatives, which is most of
what later models gain on it (Klenitskiy and Vasilev, 2309.07602).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dgr2_jax.retrieval import packing
from dgr2_jax.retrieval import training


@dataclasses.dataclass(frozen=True)
class SasRecConfig(training.TrainingConfig):
  """The model and how it is trained; see `training.TrainingConfig`.

  Attributes:
    width: D.
    layers: of attention and MLP.
    heads: of the attention; they divide D.
    dropout: of embeddings and residual branches.
    history: T, the latest purchases that are read.
  """
  batch_rows: int = 8
  learning_rate: float = 2e-3
  width: int = 64
  layers: int = 2
  heads: int = 2
  dropout: float = .5
  history: int = 50

  def __post_init__(self):
    super().__post_init__()
    self.check_whole('width', 'layers', 'heads', 'history')
    if self.width % self.heads:
      self.refuse('heads', f'a divisor of width={self.width}')
    if not 0 <= self.dropout < 1:
      self.refuse('dropout', 'a number from 0 to below 1')


class _Layer(nn.Module):
  """Attention and MLP, each followed by its norm."""
  config: SasRecConfig

  @nn.compact
  def __call__(self, x, visible, deterministic):
    c = self.config
    r, t, d = x.shape
    dense = functools.partial(
        nn.Dense, kernel_init=nn.initializers.normal(.02))
    drop = nn.Dropout(c.dropout, deterministic=deterministic)
    query, key, value = jnp.split(
        dense(3 * d, name='attention')(x).reshape(r, t, c.heads, -1), 3, -1)
    scores = jnp.einsum('rthf,rshf->rhts', query, key)
    scores *= query.shape[-1] ** -.5
    weights = drop(nn.softmax(jnp.where(visible[:, None], scores, -1e30)))
    out = jnp.einsum('rhts,rshf->rthf', weights, value).reshape(r, t, d)
    x = nn.LayerNorm(name='attention_norm')(
        x + drop(dense(d, name='out')(out)))
    y = dense(d, name='down')(nn.gelu(dense(4 * d, name='up')(x)))
    return nn.LayerNorm(name='mlp_norm')(x + drop(y))


class SasRec(nn.Module):
  """The encoder; items score by their embeddings' products with its states.

  Attributes:
    config: its sizes.
    num_items: I.
  """
  config: SasRecConfig
  num_items: int

  def setup(self):
    c, init = self.config, nn.initializers.normal(.02)
    self.items = self.param('items', init, (self.num_items, c.width))
    self.positions = self.param('positions', init, (c.history, c.width))
    self.norm = nn.LayerNorm()
    self.layers = [_Layer(c) for _ in range(c.layers)]
    self.dropout = nn.Dropout(c.dropout)

  def __call__(self, inputs: jax.Array, segment: jax.Array,
               position: jax.Array, deterministic: bool) -> jax.Array:
    """States [R, T, D] of packed items, see `packing.Rows`."""
    x = self.norm(self.items[inputs] + self.positions[position])
    x = self.dropout(x, deterministic=deterministic)
    visible = packing.visible(segment)
    for layer in self.layers:
      x = layer(x, visible, deterministic)
    return x

  def logits(self, states: jax.Array) -> jax.Array:
    """Scores [..., I] of states [..., D]."""
    return states @ self.items.T


class SasRecRetriever(training.Retriever):
  """SASRec as `training` and `lists` know retrievers."""

  def __init__(self, config: SasRecConfig, num_items: int):
    self.config = config
    self.row_length = config.history
    self._model = SasRec(config, num_items)

  def init(self, key: jax.Array) -> Any:
    empty = jnp.zeros((1, 1), jnp.int32)
    return self._model.init(key, empty, empty, empty, True)['params']

  def sequences(self, histories: list[np.ndarray],
                rng: np.random.Generator) -> list[np.ndarray]:
    del rng
    return histories

  def loss(self, params: Any, rows: packing.Rows, key: jax.Array) -> jax.Array:
    states = self._model.apply(
        {'params': params}, rows.inputs, rows.segment, rows.position, False,
        rngs={'dropout': key})
    logits = self._model.apply({'params': params}, states, method='logits')
    return training.cross_entropy(logits, rows.targets, rows.segment > 0)

  @functools.partial(jax.jit, static_argnums=(0, 4))
  def top(self, params: Any, items: jax.Array, length: jax.Array,
          count: int) -> tuple[jax.Array, jax.Array]:
    rows, t = items.shape
    read = jnp.maximum(length - self.config.history, 0)[:, None]
    kept = min(t, self.config.history)
    latest = jnp.take_along_axis(
        items, jnp.minimum(read + jnp.arange(kept), t - 1), 1)
    states = self._model.apply(
        {'params': params}, latest, jnp.ones_like(latest),
        jnp.broadcast_to(jnp.arange(kept), latest.shape), True)
    last = jnp.minimum(length, kept) - 1
    logits = self._model.apply(
        {'params': params}, states[jnp.arange(rows), last], method='logits')
    log_probs = nn.log_softmax(logits)
    bought = jnp.where(jnp.arange(t) < length[:, None], items, logits.shape[1])
    log_probs = log_probs.at[jnp.arange(rows)[:, None], bought].set(
        -jnp.inf, mode='drop')
    scores, best = jax.lax.top_k(log_probs, count)
    return best, scores
