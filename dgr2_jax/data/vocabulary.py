"""The vocabulary of a configuration: which tokens its prompts need.

    mask | pad, end of response, structure | <|c1|> ... | semantic ids |
    facts, joined facts | categories, brands | tasks of mid-training

Only what the configured form can use is added, because every token costs a
small model an embedding row and a place in the softmax.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import json

import numpy as np

from dgr2_jax.data import facts
from dgr2_jax.data import interactions
from dgr2_jax.data import prompts
from dgr2_jax.data import tokenizer as tokenizer_lib
from dgr2_jax.data import tokens
from dgr2_jax.data import traces

# Sentences of the template come with every so many items: often enough to earn
# tokens, too rarely to crowd out the words of titles.
_TEMPLATE_EVERY = 10


def special_names(
    config: prompts.PromptConfig,
    items: Sequence[interactions.Item],
    levels: int,
    codes: int,
    num_candidates: int,
    num_brands: int,
    mid_train: bool = False) -> list[str]:
  """Names of the tokens that a template needs, in the order of their ids.

  Args:
    config: what prompts and responses look like.
    items: the catalogue.
    levels: of a semantic id.
    codes: per level of a semantic id.
    num_candidates: C.
    num_brands: brands with a token of their own.
    mid_train: whether the recipe has mid-training.
  """
  compact = config.response_format == prompts.COMPACT
  names = (tokens.compact_names(num_candidates) if compact
           else tokens.chat_names())
  if not compact or mid_train or 'sid' in config.item_fields:
    names += tokens.semantic_id_names(levels, codes)
  if compact:
    for group in config.evidence:
      names += tokens.joined_fact_names(group.split('+'))
    names += config.trace.names()
    names += tokens.attribute_names(items, num_brands)
  if mid_train:
    names += [tokens.PERSONA, tokens.NEXT, tokens.DESCRIBE, tokens.IDENTIFY]
  return list(dict.fromkeys(names))


def texts(
    config: prompts.PromptConfig,
    items: Sequence[interactions.Item],
    num_candidates: int,
    mid_train: bool = False) -> Iterator[str]:
  """Texts to train a tokenizer on: what is said of items."""
  if config.response_format == prompts.COMPACT:
    if mid_train or 'title' in config.item_fields:
      yield from (item.title for item in items)
    return
  for index, item in enumerate(items):
    path = ' > '.join(item.categories)
    yield (f'Candidate {index % num_candidates + 1}: title: '
           f'{json.dumps(item.title, ensure_ascii=False)}, categories: '
           f'"{path}", brand: "{item.brand}"')
    if index % _TEMPLATE_EVERY:
      continue
    yield prompts.SYSTEM
    yield from (f', {words}: {index % 6} of 5'
                for words in prompts.EVIDENCE.values())
    order = np.roll(np.arange(num_candidates), index // _TEMPLATE_EVERY)
    levels = np.repeat(order[:, None] % 2, len(facts.FACTS), axis=1)
    trace = traces.build(
        items, np.array([index]), np.full(num_candidates, index), levels,
        int(order[0]), config.trace.facts)
    yield ''.join(
        piece.text for piece in traces.prose(trace, lambda item: [])
        if isinstance(piece, tokens.Text))
    yield prompts.json_answer(order)


def build(
    config: Mapping, items: Sequence[interactions.Item]
) -> tokenizer_lib.Tokenizer:
  """The tokenizer of a whole configuration.

  Reads `tokenizer` (kind 'bpe' or 'huggingface', vocab_size, path, num_brands,
  pad_vocab_to), `prompt`, `semantic_ids` (levels, codes),
  `data.num_candidates` and whether `recipe` has `mid_train`.

  Args:
    config: the experiment's configuration.
    items: the catalogue.

  Raises:
    ValueError: a field is out of range; the message names it.
    interactions.DataError: `tokenizer.path` holds no tokenizer.
  """
  prompt = prompts.PromptConfig.from_config(config['prompt'])
  num_candidates = config['data']['num_candidates']
  section = config['tokenizer']
  mid_train = 'mid_train' in config.get('recipe', ())
  names = special_names(
      prompt, items, config['semantic_ids']['levels'],
      config['semantic_ids']['codes'], num_candidates, section['num_brands'],
      mid_train)
  if section['kind'] == 'bpe':
    return tokenizer_lib.train(
        texts(prompt, items, num_candidates, mid_train), section['vocab_size'],
        names, section['pad_vocab_to'])
  if section['kind'] == 'huggingface':
    return tokenizer_lib.from_huggingface(
        section['path'], names, section['pad_vocab_to'])
  raise ValueError(
      f"tokenizer.kind is {section['kind']!r}: expected 'bpe' or "
      "'huggingface'.")
