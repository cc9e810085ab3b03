"""Generative retrieval: a language model over semantic ids.

    tokens    0: begin     1 + l K + c: code c of level l
    prompt    [begin] id(item) id(item) ...      oldest first, L tokens an item
    response  id(next item), found by `beam_search` among real items

TIGER (2305.05065) with a decoder only, as GR2 (2602.07774) retrieves. Each
epoch leaves out a share of the history's items, drawn anew: that is the only
regulariser beside weight decay and early stopping.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dgr2_jax.models import transformer
from dgr2_jax.objectives import language_modelling
from dgr2_jax.retrieval import beam_search
from dgr2_jax.retrieval import packing
from dgr2_jax.retrieval import training

_BEGIN = 0


@dataclasses.dataclass(frozen=True)
class GenerativeConfig(training.TrainingConfig):
  """The model, its search, and how it is trained.

  Attributes:
    width: D.
    layers: of the decoder.
    heads: of the attention; they divide D into even parts.
    mlp: width of the SwiGLU.
    history: the latest items that are read.
    item_dropout: share of items left out of the histories that are learned.
    beams: prefixes that the search keeps; no list is longer.
  """
  weight_decay: float = .1
  epochs: int = 15
  validation_users: int = 2000
  width: int = 96
  layers: int = 3
  heads: int = 4
  mlp: int = 256
  history: int = 20
  item_dropout: float = .2
  beams: int = 20

  def __post_init__(self):
    super().__post_init__()
    self.check_whole('width', 'layers', 'heads', 'mlp', 'history', 'beams')
    if self.width % (2 * self.heads):
      self.refuse('heads', f'a divisor of half of width={self.width}')
    if not 0 <= self.item_dropout < 1:
      self.refuse('item_dropout', 'a number from 0 to below 1')


class GenerativeRetriever(training.Retriever):
  """A decoder over semantic ids as `training` and `lists` know retrievers."""

  def __init__(self, config: GenerativeConfig, semantic_ids: np.ndarray):
    """Makes the trie.

    Args:
      config: sizes.
      semantic_ids: int [I, L], rows unique.

    Raises:
      ValueError: two items have one id.
    """
    levels, codes = semantic_ids.shape[1], int(semantic_ids.max()) + 1
    self.config = config
    self.row_length = 1 + (config.history + 1) * levels
    self._tokens = 1 + np.arange(levels) * codes + semantic_ids  # [I, L]
    self._trie = beam_search.make_trie(self._tokens)
    self.model = transformer.Transformer(transformer.ModelConfig(
        vocab_size=1 + levels * codes, num_layers=config.layers,
        width=config.width, num_heads=config.heads, num_kv_heads=config.heads,
        head_dim=config.width // config.heads, mlp_dim=config.mlp,
        rope_theta=1e4, unroll_layers=True))

  def init(self, key: jax.Array) -> Any:
    return transformer.init(self.model.config, key)

  def sequences(self, histories: list[np.ndarray],
                rng: np.random.Generator) -> list[np.ndarray]:
    keep = lambda h: h[rng.random(len(h)) >= self.config.item_dropout]
    return [np.append(_BEGIN, self._tokens[keep(h)[-self.config.history - 1:]])
            for h in histories]

  def loss(self, params: Any, rows: packing.Rows, key: jax.Array) -> jax.Array:
    del key
    index = jnp.arange(rows.inputs.shape[1])
    states = language_modelling.hidden_states(
        self.model, params, rows.inputs,
        jnp.where(rows.segment > 0, index - rows.position, -1))
    logits = self.model.apply({'params': params}, states, method='logits')
    return training.cross_entropy(logits, rows.targets, rows.segment > 0)

  @functools.partial(jax.jit, static_argnums=(0, 4))
  def top(self, params: Any, items: jax.Array, length: jax.Array,
          count: int) -> tuple[jax.Array, jax.Array]:
    return most_probable(
        self.model, params, _BEGIN, self._tokens, self._trie, items, length,
        history=self.config.history, beams=max(self.config.beams, count),
        count=count)


def most_probable(
    model: transformer.Transformer, params: Any, begin: int,
    tokens: np.ndarray, trie: beam_search.Trie, items: jax.Array,
    length: jax.Array, *, history: int, beams: int, count: int,
    allow: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
  """The items that a model is most likely to write after a history.

  Args:
    model: the decoder.
    params: its parameters.
    begin: token before the history.
    tokens: int [I, S], of every item.
    trie: of them.
    items: int32 [n, t], histories, oldest first.
    length: int32 [n], items in them, at least 1.
    history: the latest items that are read.
    beams: see `beam_search.search`, as `allow`.
    count: k, at most `beams`.

  Returns:
    int32 [n, k] items outside of the history, and float32 [n, k]
    log-probabilities.
  """
  n, t = items.shape
  kept = min(t, history)
  first = jnp.maximum(length - kept, 0)[:, None]
  latest = jnp.take_along_axis(
      items, jnp.minimum(first + jnp.arange(kept), t - 1), 1)
  prompt = jnp.pad(jnp.asarray(tokens)[latest].reshape(n, -1),
                   ((0, 0), (1, 0)), constant_values=begin)
  found, scores = beam_search.search(
      model, params, prompt, 1 + jnp.minimum(length, kept) * trie.levels, trie,
      jnp.where(jnp.arange(t) < length[:, None], items, -1), beams=beams,
      allow=allow)
  return found[:, :count], scores[:, :count]
