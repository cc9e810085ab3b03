"""A mid-trained language model as the retriever, as GR2 (2602.07774) has it.

    <|next|> [id] [id] ... [id]   ->   [id], by beam search among real items

It has learned from the training purchases of all users, so it lists for
validation and test; training lists need a retriever that has not seen their
users (`lists.cross_fitted`).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from dgr2_jax.data import mid_training
from dgr2_jax.data import prompts
from dgr2_jax.data import tokens as tokens_lib
from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib
from dgr2_jax.retrieval import beam_search
from dgr2_jax.retrieval import generative


class MidTrainedRetriever:
  """Next items by `mid_train`'s sequential task, for `lists.top`."""

  def __init__(self, model: transformer.Transformer,
               vocabulary: vocabulary_lib.Vocabulary,
               template: prompts.Template, num_items: int, max_length: int,
               beams: int):
    """Makes the trie.

    Args:
      model: the decoder.
      vocabulary: of it.
      template: writes items.
      num_items: I.
      max_length: of the training rows, `config.mid_train.max_length`.
      beams: prefixes that the search keeps; more where more are listed.

    Raises:
      ValueError: two items have one id, or `max_length` is too short.
    """
    self._model = model
    self._vocabulary = vocabulary
    self._history = mid_training.history_in_a_row(template, max_length)
    self._begin = template.tokenizer.id(tokens_lib.NEXT)
    self._tokens = np.array([
        template.item(i, mid_training.SID) for i in range(num_items)])
    self._trie = beam_search.make_trie(self._tokens)
    self._beams = beams

  @functools.partial(jax.jit, static_argnums=(0, 4))
  def top(self, params: Any, items: jax.Array, length: jax.Array,
          count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` most probable items; see `training.Retriever.top`."""
    return generative.most_probable(
        self._model, params, self._begin, self._tokens, self._trie, items,
        length, history=self._history, beams=max(self._beams, count),
        count=count, allow=self._vocabulary.allow)
