"""The semantic ids of a catalogue, by whichever method the config names.

    semantic_ids.npy        int32 [I, levels], in the catalogue's order
    semantic_ids.json       version, kind, settings, hash of the embeddings,
                            quality, some items with their nearest by id
    semantic_ids_model.npz  centroids or RQ-VAE, for items that come later

`config.semantic_ids` without the section `rqvae` is residual k-means. The
version is a hash of all that decides the ids: kind, settings and embeddings.
Who gives ids to further items checks that its settings are those.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import hashlib
import json
import pathlib
from typing import Any

from absl import logging
from flax import traverse_util
import ml_collections
import numpy as np

from dgr2_jax.data import interactions
from dgr2_jax.data import item_text
from dgr2_jax.semantic_ids import embeddings as embeddings_lib
from dgr2_jax.semantic_ids import fitting
from dgr2_jax.semantic_ids import last_level
from dgr2_jax.semantic_ids import quality
from dgr2_jax.semantic_ids import residual_kmeans
from dgr2_jax.semantic_ids import rqvae
from dgr2_jax.training import workdir

_MODEL = 'semantic_ids_model.npz'
_DESCRIPTION = 'semantic_ids.json'
_EXAMPLES = 5


@dataclasses.dataclass(frozen=True)
class SemanticIds:
  """A catalogue's ids and what made them.

  Attributes:
    ids: int32 [I, levels].
    description: what semantic_ids.json holds.
    model: arrays by name, for `Encoder`.
  """
  ids: np.ndarray
  description: dict[str, Any]
  model: dict[str, np.ndarray]

  def save(self, directory: pathlib.Path) -> None:
    """Writes the files."""
    with open(directory / 'semantic_ids.npy', 'wb') as f:
      np.save(f, self.ids)
    workdir.write_text(directory / _DESCRIPTION,
                       json.dumps(self.description, indent=1) + '\n')
    with open(directory / _MODEL, 'wb') as f:
      np.savez(f, **self.model)


def check(section: ml_collections.ConfigDict) -> None:
  """Checks the section `rqvae` of `config.semantic_ids`, if it is there.

  Raises:
    ValueError: a field is unknown or wrong.
  """
  if 'rqvae' in section:
    rqvae.RqVaeConfig.from_config(section)
    _embedding_config(section)


def _embedding_config(
    section: ml_collections.ConfigDict) -> embeddings_lib.EmbeddingConfig:
  fields = section.rqvae.get('embeddings', {})
  try:
    return embeddings_lib.EmbeddingConfig(**fields)
  except TypeError as e:
    raise ValueError(
        'config.semantic_ids.rqvae.embeddings has a field too many, or is no '
        f'section: expected kind and path ({e}).') from e


def build(items: Sequence[interactions.Item],
          section: ml_collections.ConfigDict) -> SemanticIds:
  """Embeds the items' texts and gives every item an id.

  Args:
    items: the catalogue, I items.
    section: `config.semantic_ids`: `levels`, `codes`, `svd_dim`, `seed`, and
      `rqvae` with what differs from `rqvae.RqVaeConfig`, and `embeddings`.

  Raises:
    DataError: no embeddings can be had; see `embeddings.embed`.
    ValueError: a field of the config is wrong, or does not fit the catalogue.
  """
  kind, settings = _made_by(section)
  if kind == 'residual_kmeans':
    embeddings = residual_kmeans.text_embeddings(items, section)
    ids, centroids = residual_kmeans.fit_semantic_ids(embeddings, section)
    model = {str(level): table for level, table in enumerate(centroids)}
    report = quality.report(ids, section.codes, items)
  else:
    config = rqvae.RqVaeConfig.from_config(section)
    fitting.check_sizes(len(items), config)  # before embedding takes minutes
    source = _embedding_config(section)
    embeddings = embeddings_lib.embed(items, source, section)
    fitted = fitting.fit(embeddings, config)
    ids = fitted.ids
    model = traverse_util.flatten_dict(fitted.params, sep='/')
    report = {**quality.report(ids, config.codes, items, fitted.nearest),
              'reconstruction': fitted.reconstruction}
    logging.info(
        'RQ-VAE ids: %.2f%% unique before the last level, %.2f%% after.',
        100 * report['uniqueness_before'][-1], 100 * report['uniqueness'])
  made_from = {
      'kind': kind,
      'settings': settings,
      'embeddings_sha256': hashlib.sha256(embeddings.tobytes()).hexdigest()}
  return SemanticIds(
      ids, {'version': _version(**made_from), **made_from, 'quality': report,
            'examples': quality.examples(ids, items, _EXAMPLES)}, model)


def _made_by(section: ml_collections.ConfigDict) -> tuple[str, dict[str, Any]]:
  """The kind of the ids and all settings that decide them."""
  settings = section.to_dict()
  if 'rqvae' not in section:
    return 'residual_kmeans', settings
  # With the defaults, which may change; a path says nothing of its content.
  settings['rqvae'] = {
      **dataclasses.asdict(rqvae.RqVaeConfig.from_config(section)),
      'embeddings': _embedding_config(section).kind}
  return 'rqvae', settings


def _version(kind: str, settings: dict[str, Any],
             embeddings_sha256: str) -> str:
  made_from = {'kind': kind, 'settings': settings,
               'embeddings_sha256': embeddings_sha256}
  return hashlib.sha256(
      json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]


def _check_version(path: pathlib.Path,
                   section: ml_collections.ConfigDict) -> None:
  """Checks that a section's settings are those that stored ids were made with.

  Raises:
    ValueError: they are not, or the description is damaged.
  """
  try:
    stored = json.loads(path.read_text(encoding='utf-8'))
    kind, settings = _made_by(section)
    if stored['version'] == _version(
        kind, settings, stored['embeddings_sha256']):
      return
    lines = workdir.differences(
        {'kind': stored['kind'], 'semantic_ids': stored['settings']},
        {'kind': kind, 'semantic_ids': json.loads(json.dumps(settings))})
  except (OSError, ValueError, KeyError, TypeError) as e:
    raise ValueError(f'{path}: cannot be read ({e!r})') from e
  raise ValueError(f'{path}: the ids are of other settings: '
                   + ('; '.join(lines) or 'its version is not of its content'))


class Encoder:
  """Gives ids to items that the catalogue lacks, by what made its ids."""

  def __init__(self, items: Sequence[interactions.Item], ids: np.ndarray,
               section: ml_collections.ConfigDict, directory: pathlib.Path):
    """Reads the model.

    Args:
      items: the catalogue, I items.
      ids: int [I, levels], theirs.
      section: `config.semantic_ids`, as for `build`.
      directory: where `SemanticIds.save` left its files.

    Raises:
      ValueError: new items have no embedding; ids were made by an earlier
        version, which kept no model, or with other settings or defaults.
    """
    self._ids, self._section, self._text = ids, section, None
    self._source = (_embedding_config(section) if 'rqvae' in section
                    else embeddings_lib.EmbeddingConfig())
    if self._source.kind == 'npy':
      raise ValueError(f'the embeddings are a file, {self._source.path}, which '
                       'has no rows for new items')
    path = directory / _MODEL
    if not path.exists():
      raise ValueError(f'{path} is missing: prepared by an earlier version of '
                       'dgr2_jax')
    _check_version(directory / _DESCRIPTION, section)
    with np.load(path) as f:
      self._model = dict(f)
    if self._source.kind == 'tfidf':
      self._text = residual_kmeans.text_model(items, section)

  def __call__(self, items: Sequence[interactions.Item]) -> np.ndarray:
    """int32 [n, levels]: the nearest ids that nobody has.

    Raises:
      ValueError: no id is free.
    """
    section = self._section
    if section.codes ** section.levels < len(self._ids) + len(items):
      raise ValueError(f'all {section.codes}^{section.levels} semantic ids are '
                       'taken')
    if self._text:
      points = self._text.embed(item_text.of_new(items, self._text.words))
    else:
      points = embeddings_lib.embed(items, self._source, section)
    if 'rqvae' in section:
      params = traverse_util.unflatten_dict(self._model, sep='/')
      model = rqvae.RqVae(
          rqvae.RqVaeConfig.from_config(section), points.shape[1])
      points = np.asarray(
          model.apply({'params': params}, points, method='encode'))
      tables = list(params['codebooks'])
    else:
      tables = [self._model[str(level)] for level in range(section.levels)]
    return last_level.collision_aware(
        points, residual_kmeans.nearest(points, tables), tables, section.codes,
        self._ids)
