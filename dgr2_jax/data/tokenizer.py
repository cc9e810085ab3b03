"""Token ids: a text tokenizer extended by special tokens.

    id  0 ......... text vocabulary ......... | mask | added ... | unused | V
        (with the special tokens a directory has)

The text tokenizer is a byte-level BPE trained on the catalogue, or the
`tokenizer.json` of a Hugging Face directory with its special tokens taken out.
Text is encoded by it alone, special tokens are looked up by name: text that
spells a special token stays text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import itertools
import json
import os
import pathlib
from typing import Any

import numpy as np
import tokenizers

from dgr2_jax.data import interactions
from dgr2_jax.data import tokens

_TEXT_FILE = 'text.json'
_SPECIALS_FILE = 'special_tokens.json'


class Tokenizer:
  """Encodes pieces and decodes ids.

  Attributes:
    vocab_size: V, padded.
    mask_id: the mask; the first id after the text tokenizer's own, unless that
      has a mask already.
    pad_id: fills prompts up.
    eos_id: ends a response.
    banned: bool [V], ids that are never sampled: mask, padding, unused rows.
    new_ids: those of the special tokens that the vocabulary didn't have, in
      order.
  """

  def __init__(
      self,
      text: tokenizers.Tokenizer,
      specials: Mapping[str, int],
      added: Sequence[str],
      pad_to: int):
    """Extends a text tokenizer.

    Args:
      text: encodes and decodes text; has no added tokens.
      specials: special tokens that the vocabulary has already, name to id.
      added: names that must exist, PAD and EOS among them; those not in
        `specials` get new ids in this order, after the mask.
      pad_to: V is a multiple of it.

    Raises:
      ValueError: text can produce one of `specials`, or PAD or EOS is missing.
    """
    self._text = text
    self._own = dict(specials)
    self._added = tuple(added)
    self._pad_to = pad_to
    for name, i in self._own.items():
      if i in text.encode(name, add_special_tokens=False).ids:
        raise ValueError(
            f'The tokenizer encodes the text {name!r} as its special token '
            f'{i}: text could forge it. Use a byte-level BPE tokenizer.')
    text_ids = set(text.get_vocab(with_added_tokens=False).values())
    used = text_ids.union(self._own.values())
    self._ids = dict(self._own)
    ids = itertools.count(max(used) + 1)
    for name in (tokens.MASK, *self._added):
      if name not in self._ids:
        self._ids[name] = next(ids)
    for name in (tokens.PAD, tokens.EOS):
      if name not in self._ids:
        raise ValueError(f'The vocabulary lacks {name}.')
    self.new_ids = [i for name, i in self._ids.items() if name not in self._own]
    self._names = {i: name for name, i in self._ids.items()}
    used.update(self._names)
    self.vocab_size = -(-(max(used) + 1) // pad_to) * pad_to
    self.mask_id = self._ids[tokens.MASK]
    self.pad_id = self._ids[tokens.PAD]
    self.eos_id = self._ids[tokens.EOS]
    self.banned = np.ones(self.vocab_size, bool)
    self.banned[list(used)] = False
    self.banned[[self.mask_id, self.pad_id]] = True

  def __contains__(self, name: str) -> bool:
    """Whether a special token exists."""
    return name in self._ids

  def id(self, name: str) -> int:
    """The id of a special token; KeyError where there is none."""
    return self._ids[name]

  def encode(self, pieces: Iterable[tokens.Piece]) -> list[int]:
    """Ids of a sequence of pieces; every piece is encoded by itself."""
    ids = []
    for piece in pieces:
      if isinstance(piece, tokens.Special):
        ids.append(self._ids[piece.name])
      else:
        # Lone surrogates, which JSON can spell, have no UTF-8 form.
        text = piece.text.encode('utf-8', 'replace').decode()
        ids.extend(self._text.encode(text, add_special_tokens=False).ids)
    return ids

  def decode(self, ids: Sequence[int]) -> str:
    """Text of ids, special tokens as their names, unused ids as nothing."""
    parts = []
    for name, run in itertools.groupby(map(int, ids), self._names.get):
      run = list(run)
      if name is not None:
        parts.append(name * len(run))
      else:
        parts.append(self._text.decode(run, skip_special_tokens=False))
    return ''.join(parts)

  def save(self, directory: str | os.PathLike) -> None:
    """Writes the tokenizer to a directory, which is made if need be."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    specials = json.dumps({
        'specials': self._own, 'added': self._added, 'pad_to': self._pad_to},
        indent=1)
    for name, content in (
        (_TEXT_FILE, self._text.to_str()), (_SPECIALS_FILE, specials)):
      temporary = directory / f'{name}.tmp'
      temporary.write_text(content, encoding='utf-8')
      os.replace(temporary, directory / name)

  def huggingface_files(self) -> dict[str, dict[str, Any]]:
    """The files of a Hugging Face directory, by name, as JSON.

    There, text that spells a special token does become that token.
    """
    content = json.loads(self._text.to_str())
    flags = dict(single_word=False, lstrip=False, rstrip=False,
                 normalized=False, special=True)
    content['added_tokens'] = [
        {'id': i, 'content': name, **flags}
        for i, name in sorted(self._names.items())]
    return {'tokenizer.json': content,
            'tokenizer_config.json': {
                'tokenizer_class': 'PreTrainedTokenizerFast',
                'eos_token': tokens.EOS, 'pad_token': tokens.PAD}}


def load(directory: str | os.PathLike) -> Tokenizer:
  """Reads what `Tokenizer.save` wrote; ids are the same.

  Raises:
    interactions.DataError: a file is missing or malformed.
  """
  directory = pathlib.Path(directory)
  text = _read(directory / _TEXT_FILE)
  specials = _read_json(directory / _SPECIALS_FILE)
  return Tokenizer(
      tokenizers.Tokenizer.from_str(text), specials['specials'],
      specials['added'], specials['pad_to'])


def train(
    texts: Iterable[str], vocab_size: int, added: Sequence[str], pad_to: int
) -> Tokenizer:
  """A byte-level BPE trained on texts.

  Args:
    texts: the training texts.
    vocab_size: of the text vocabulary, at least the 256 bytes.
    added: special tokens to add, see `Tokenizer`.
    pad_to: V is a multiple of it.

  Raises:
    ValueError: `vocab_size` is below 256.
  """
  if vocab_size < 256:
    raise ValueError(
        f'tokenizer.vocab_size is {vocab_size}: expected at least the 256 '
        'bytes.')
  text = tokenizers.Tokenizer(tokenizers.models.BPE())
  text.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
      add_prefix_space=False)
  text.decoder = tokenizers.decoders.ByteLevel()
  text.train_from_iterator(
      (t.encode('utf-8', 'replace').decode() for t in texts),
      tokenizers.trainers.BpeTrainer(
          vocab_size=vocab_size, min_frequency=2, show_progress=False,
          initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
  return Tokenizer(text, {}, added, pad_to)


def from_huggingface(
    directory: str | os.PathLike, added: Sequence[str], pad_to: int
) -> Tokenizer:
  """The `tokenizer.json` of a Hugging Face directory, extended.

  Args:
    directory: holds `tokenizer.json`.
    added: special tokens to add where the directory lacks them, see
      `Tokenizer`.
    pad_to: V is a multiple of it.

  Raises:
    interactions.DataError: the file is missing or not a tokenizer.
  """
  path = pathlib.Path(directory) / 'tokenizer.json'
  content = _read_json(path)
  try:
    specials = {t['content']: t['id'] for t in content['added_tokens']}
    # What is left encodes text only: no special tokens, no template that adds
    # them, no limit on the length.
    content.update(
        added_tokens=[], post_processor=None, truncation=None, padding=None)
    text = tokenizers.Tokenizer.from_str(json.dumps(content))
  except Exception as e:  # The library raises bare Exception.
    raise interactions.DataError(
        f'{path}: not a Hugging Face tokenizer: {e!r}.') from e
  return Tokenizer(text, specials, added, pad_to)


def _read(path: pathlib.Path) -> str:
  try:
    return path.read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as e:
    raise interactions.DataError(f'{path}: cannot be read: {e}.') from e


def _read_json(path: pathlib.Path):
  try:
    return json.loads(_read(path))
  except json.JSONDecodeError as e:
    raise interactions.DataError(
        f'{path}:{e.lineno}: not JSON: {e.msg}.') from e
