"""Text embeddings of a catalogue, from one of three sources.

    tfidf         TF-IDF and a truncated SVD; needs nothing
    huggingface   a sentence encoder, a directory in Hugging Face format
    npy           a matrix of your own, a row an item in the catalogue's order

Rows are scaled to length one, whatever their source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import json
import os
import pathlib
from typing import Any

import ml_collections
import numpy as np

from dgr2_jax.data import interactions
from dgr2_jax.semantic_ids import residual_kmeans

KINDS = ('tfidf', 'huggingface', 'npy')
_FIELD = 'config.semantic_ids.rqvae.embeddings'
_BATCH = 64  # texts of about one length
_MAX_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class EmbeddingConfig:
  """Where embeddings come from.

  Attributes:
    kind: of `KINDS`.
    path: the directory or the file; empty for 'tfidf'.
  """
  kind: str = 'tfidf'
  path: str = ''

  def __post_init__(self):
    if self.kind not in KINDS:
      raise ValueError(
          f'{_FIELD}.kind is {self.kind!r}: expected one of {KINDS}.')
    if bool(self.path) == (self.kind == 'tfidf'):
      raise ValueError(
          f'{_FIELD}.path is {self.path!r}: expected '
          + ('none' if self.kind == 'tfidf' else 'a path')
          + f' with kind={self.kind!r}.')


def embed(
    items: Sequence[interactions.Item],
    config: EmbeddingConfig,
    section: ml_collections.ConfigDict,
) -> np.ndarray:
  """Embeds what the catalogue says about its items.

  Args:
    items: the catalogue, I items.
    config: the source.
    section: `config.semantic_ids`, whose `svd_dim` and `seed` 'tfidf' reads.

  Returns:
    float32 [I, E], unit rows; a row of zeros stays one.

  Raises:
    DataError: `config.path` holds no such embeddings or encoder.
    ValueError: a package that 'huggingface' needs is missing.
  """
  if config.kind == 'tfidf':
    return residual_kmeans.text_embeddings(items, section)
  path = pathlib.Path(os.path.expanduser(config.path))
  if config.kind == 'npy':
    matrix = _read_npy(path)
  else:
    matrix = _encode(items, path)
  if matrix.ndim != 2 or len(matrix) != len(items) or not matrix.shape[1]:
    raise interactions.DataError(
        f'{path}: embeddings of shape {matrix.shape}: expected '
        f'[{len(items)}, E], a row for each item of the catalogue.')
  if bad := int((~np.isfinite(matrix).all(axis=1)).sum()):
    raise interactions.DataError(
        f'{path}: {bad} of {len(matrix)} rows hold NaN or infinity, the first '
        f'is row {int(np.argmin(np.isfinite(matrix).all(axis=1)))}.')
  largest = np.abs(matrix).max(axis=1, keepdims=True)
  if 2 * (zero := int((largest == 0).sum())) > len(matrix):
    raise interactions.DataError(
        f'{path}: {zero} of {len(matrix)} rows are all zero: expected '
        'embeddings of most items at least.')
  # Squares of very large or small numbers would leave float64.
  matrix = matrix / np.where(largest > 0, largest, 1)
  norm = np.linalg.norm(matrix, axis=1, keepdims=True)
  return (matrix / np.maximum(norm, 1)).astype(np.float32)


def _read_npy(path: pathlib.Path) -> np.ndarray:
  try:
    matrix = np.load(path, allow_pickle=False)
  except (OSError, ValueError, EOFError) as e:
    raise interactions.DataError(f'{path}: no .npy file: {e}') from e
  if not (isinstance(matrix, np.ndarray)
          and np.issubdtype(matrix.dtype, np.floating)):
    raise interactions.DataError(
        f'{path}: expected one array of floating-point numbers.')
  return matrix.astype(np.float64)


def _encode(
    items: Sequence[interactions.Item], path: pathlib.Path) -> np.ndarray:
  """Sentence embeddings, float64 [I, E], of a Hugging Face encoder."""
  if not (path / 'config.json').is_file():
    raise interactions.DataError(
        f'{path}: no config.json; expected the directory of a sentence encoder '
        'in Hugging Face format.')
  pooling = _pooling(path)
  try:  # Large, and of no use to the rest of the project.
    # pylint: disable=g-import-not-at-top
    import torch
    import transformers
  except ImportError as e:
    raise ValueError(
        f"{_FIELD}.kind is 'huggingface', which needs the packages torch and "
        f"transformers ({e}): pip install -e '.[encoder]', or choose "
        'another kind.') from e
  try:
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        path, local_files_only=True)
    model, info = transformers.AutoModel.from_pretrained(
        path, local_files_only=True, dtype=torch.float32,
        output_loading_info=True)
  except (OSError, ValueError, KeyError) as e:
    raise interactions.DataError(
        f'{path}: not a sentence encoder that transformers can load: {e}'
    ) from e
  _check_loaded(path, info)
  model.eval()
  texts = [_text(item) for item in items]
  rows: list[Any] = [None] * len(items)
  for batch in _by_length(texts):
    tokens = tokenizer(
        [texts[i] for i in batch], padding=True, truncation=True,
        max_length=min(_MAX_TOKENS, tokenizer.model_max_length),
        return_tensors='pt')
    with torch.inference_mode():
      hidden = model(**tokens).last_hidden_state  # [n, T, E]
      if pooling == 'cls':
        pooled = hidden[:, 0]
      else:
        mask = tokens['attention_mask'][..., None]
        pooled = (hidden * mask).sum(1) / mask.sum(1)
    for i, row in zip(batch, pooled.numpy(), strict=True):
      rows[i] = row
  return np.stack(rows).astype(np.float64)


def _pooling(path: pathlib.Path) -> str:
  """How hidden states become one vector: 'mean', or what the encoder says.

  Raises:
    DataError: the encoder says something else, or has further layers.
  """
  file = path / 'modules.json'
  if file.is_file():
    try:
      modules = [(entry['type'].rpartition('.')[-1], entry.get('path', ''))
                 for entry in json.loads(file.read_text(encoding='utf-8'))]
    except (ValueError, AttributeError, KeyError, TypeError) as e:
      raise interactions.DataError(f'{file}: malformed: {e!r}') from e
  else:
    modules = [('Transformer', '')] + [
        (found.name.partition('_')[2], found.name)
        for found in sorted(path.glob('[0-9]_*')) if found.is_dir()]
    file = path
  # Rows are scaled to length one, whether or not the last one says so.
  kinds = [kind for kind, _ in modules]
  unknown = [kind for kind in kinds
             if kind not in ('Transformer', 'Pooling', 'Normalize')]
  if (unknown or modules[:1] != [('Transformer', '')]
      or kinds.count('Pooling') > 1):
    raise interactions.DataError(
        f'{file}: modules {unknown or modules}: expected a Transformer in the '
        'directory itself, then at most one Pooling, and Normalize.')
  return next((_pooling_mode(path / folder / 'config.json')
               for kind, folder in modules if kind == 'Pooling'), 'mean')


def _pooling_mode(file: pathlib.Path) -> str:
  prefix = 'pooling_mode'
  try:
    fields = json.loads(file.read_text(encoding='utf-8'))
    modes = {name for name, value in fields.items()
             if name.startswith(f'{prefix}_') and value}
    if prefix in fields:  # the shorter form of later versions
      modes.add(f'{prefix}_{fields[prefix]}')
  except (OSError, ValueError, AttributeError) as e:
    raise interactions.DataError(f'{file}: malformed: {e}') from e
  for mode, names in (('mean', ('mean_tokens', 'mean')),
                      ('cls', ('cls_token', 'cls'))):
    if len(modes) == 1 and modes <= {f'{prefix}_{name}' for name in names}:
      return mode
  raise interactions.DataError(
      f'{file}: pools by {sorted(modes)}: expected the mean or the first '
      'token.')


def _check_loaded(path: pathlib.Path, info: Mapping[str, Any]) -> None:
  """Checks what `transformers` says of the weights that it loaded.

  It draws weights that a file lacks at random, with no more than a warning. The
  pooler behind the hidden states is not used here.

  Raises:
    DataError: weights are missing or of another shape.
  """
  wrong = {str(key) for name in ('missing_keys', 'mismatched_keys')
           for key in info.get(name, ())}
  wrong = sorted(key for key in wrong if not key.startswith('pooler.'))
  if wrong:
    raise interactions.DataError(
        f'{path}: {len(wrong)} weights are missing or of another shape, '
        f'{wrong[0]} among them: expected those of the encoder that '
        'config.json describes.')


def _text(item: interactions.Item) -> str:
  parts = (item.title, item.brand, ' > '.join(item.categories))
  return '. '.join(part for part in parts if part)


def _by_length(texts: Sequence[str]) -> Iterator[list[int]]:
  """Batches of indices: texts of similar length need little padding."""
  order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
  for start in range(0, len(order), _BATCH):
    yield order[start:start + _BATCH]
