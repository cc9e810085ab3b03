"""Beam search over the token sequences of real items.

    trie of [a c], [a d], [b c]        first   [0 2 | 2 3]  children of a node
                                       tokens  level 1: a b    level 2: c d c
           .--- a ---.--- c  item 0
    root --|         '--- d  item 1    Items sorted by their tokens, so the
           '--- b ------- c  item 2    children of a node are neighbours.

A level is a call of the model for all beams of all users, behind one copy of
every user's prompt. A child's score is its parent's plus the log-probability
that the model gives to its token among *all* tokens: beams are only ever cut,
and an item's score is that of its tokens by teacher forcing. A child is out
when its user has bought every item below it.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from dgr2_jax.models import canvas
from dgr2_jax.models import transformer


@struct.dataclass
class Trie:
  """Token sequences of I items; node n of level l is a prefix of l tokens.

  Attributes:
    tokens: by level 1..L, int32 [nodes], the last token of every node.
    first: by level 0..L-1, int32 [nodes + 1], the first child of every node, a
      node of the next level; its last child stands before the next one's first.
    below: by level 1..L, int32 [nodes], items below every node.
    path: int32 [I, L], the node of every item at every level.
    items: int32 [I], the item of every node of level L.
    fanout: by level 0..L-1, the most children of a node.
  """
  tokens: tuple[jax.Array, ...]
  first: tuple[jax.Array, ...]
  below: tuple[jax.Array, ...]
  path: jax.Array
  items: jax.Array
  fanout: tuple[int, ...] = struct.field(pytree_node=False)

  @property
  def levels(self) -> int:
    return len(self.tokens)


def make_trie(tokens: np.ndarray) -> Trie:
  """Sorts items by their tokens.

  Args:
    tokens: int [I, L], the tokens of every item.

  Raises:
    ValueError: two items have the same tokens.
  """
  items = np.lexsort(tokens.T[::-1])
  ordered = np.asarray(tokens)[items]
  new = np.ones((len(items), tokens.shape[1]), bool)  # whether a node begins
  new[1:] = np.logical_or.accumulate(ordered[1:] != ordered[:-1], axis=1)
  if not new[:, -1].all():
    same = int(np.flatnonzero(~new[:, -1])[0])
    raise ValueError(
        f'items {items[same - 1]} and {items[same]} have the same semantic id '
        f'{ordered[same].tolist()}: expected unique ids, see '
        "semantic_ids.rqvae.last_level='collision_aware'")
  node = np.cumsum(new, axis=0) - 1  # [I, L], of the sorted items
  path = np.empty_like(node)
  path[items] = node
  above = np.concatenate([np.zeros((len(items), 1), int), node[:, :-1]], 1)
  levels = range(tokens.shape[1])
  children = [np.bincount(above[new[:, l], l]) for l in levels]
  as_int = lambda x: jnp.asarray(x, jnp.int32)
  return Trie(
      tokens=tuple(as_int(ordered[new[:, l], l]) for l in levels),
      first=tuple(as_int(np.cumsum([0, *count])) for count in children),
      below=tuple(as_int(np.bincount(node[:, l])) for l in levels),
      path=as_int(path), items=as_int(items),
      fanout=tuple(int(count.max()) for count in children))


@functools.partial(jax.jit, static_argnames=('model', 'beams', 'allow'))
def search(
    model: transformer.Transformer,
    params: Any,
    prompt: jax.Array,
    prompt_length: jax.Array,
    trie: Trie,
    bought: jax.Array,
    *,
    beams: int,
    allow: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
  """The items whose tokens are most probable after a prompt.

  Args:
    model: the decoder.
    params: its parameters.
    prompt: int32 [N, P], padded on the right.
    prompt_length: int32 [N].
    trie: of I items.
    bought: int32 [N, h], items that are not listed, without repeats; negative
      entries are none.
    beams: G, prefixes that are kept at a level.
    allow: logits -> logits with minus infinity at tokens that the model never
      writes, see `Vocabulary.allow`; None is all tokens.

  Returns:
    int32 [N, G] items, the most probable first, and float32 [N, G] their
    log-probabilities. Where fewer than G items were found, the rest is -1 and
    minus infinity.
  """
  n = prompt.shape[0]
  cache, last = canvas.prefill(
      model, params, prompt, prompt_length, beams, trie.levels)
  states = jnp.broadcast_to(last[:, None], (n, beams, last.shape[-1]))
  node = jnp.zeros((n, beams), jnp.int32)
  # One beam at the root; the others are dead until it has children.
  score = jnp.where(jnp.arange(beams) == 0, 0., -jnp.inf)
  score = jnp.broadcast_to(score, (n, beams))
  paths = jnp.where(bought[..., None] >= 0, trie.path[bought], -1)  # [N, h, L]
  for level in range(trie.levels):
    logits = model.apply({'params': params}, states, method='logits')
    log_probs = jax.nn.log_softmax(allow(logits) if allow else logits)
    child, child_score = _children(
        trie, level, node, score, log_probs, paths[..., level])
    score, kept = jax.lax.top_k(child_score, beams)  # [N, G]
    node = jnp.take_along_axis(child, kept, 1)
    if level + 1 < trie.levels:
      parent = kept // trie.fanout[level]
      cache = cache.replace(clean=jax.tree.map(
          functools.partial(_take_beams, parent=parent), cache.clean))
      states, entries = canvas.decode_block(
          model, params, cache, trie.tokens[level][node][..., None],
          jnp.full((n, beams), level, jnp.int32), jnp.ones((n, beams), bool),
          canvas.AUTOREGRESSIVE)
      cache = cache.written(entries)
      states = states[:, :, 0]
  return jnp.where(jnp.isfinite(score), trie.items[node], -1), score


def _children(trie: Trie, level: int, node: jax.Array, score: jax.Array,
              log_probs: jax.Array,
              bought: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Children of nodes [N, G] and their scores, [N, G * fanout] each.

  `bought` [N, h] holds the nodes of the next level above bought items.
  """
  n = len(node)
  first = trie.first[level]
  child = first[node][..., None] + jnp.arange(trie.fanout[level])
  exists = child < first[node + 1][..., None]  # [N, G, F]
  child = jnp.where(exists, child, 0)
  scores = score[..., None] + jnp.take_along_axis(
      log_probs, trie.tokens[level][child], 2)
  exists, child, scores = (x.reshape(n, -1) for x in (exists, child, scores))
  bought = jnp.sort(bought, axis=1)
  until = lambda side: jax.vmap(
      functools.partial(jnp.searchsorted, side=side))(bought, child)
  left = trie.below[level][child] - (until('right') - until('left'))
  return child, jnp.where(exists & (left > 0), scores, -jnp.inf)


def _take_beams(cache: jax.Array, parent: jax.Array) -> jax.Array:
  """[layers, N, G, ...] with the rows of parents [N, G]."""
  return cache[:, jnp.arange(len(parent))[:, None], parent]
