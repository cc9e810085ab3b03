"""Semantic ids by residual k-means over text embeddings.

    TF-IDF of title, brand, categories -> truncated SVD -> unit rows e [E]
    r_0 = e;  code_l = nearest centroid c to r_l;  r_(l+1) = r_l - c

so similar items share the first codes (TIGER, arXiv 2305.05065, with k-means
for its RQ-VAE). Items that end up with the same codes are then told apart, the
later ones by the nearest codes that are still free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ml_collections import config_dict
import numpy as np
from scipy import sparse
from sklearn import cluster
from sklearn import decomposition
from sklearn.feature_extraction import text
import threadpoolctl

from dgr2_jax.data import interactions
from dgr2_jax.data import item_text
from dgr2_jax.semantic_ids import last_level


class TextModel(NamedTuple):
  """How a catalogue's texts become embeddings.

  Attributes:
    rows: float64 [I, words], the catalogue's TF-IDF rows.
    words: what they count.
    projection: float64 [E, words].
  """
  rows: sparse.csr_matrix
  words: text.TfidfVectorizer
  projection: np.ndarray

  def embed(self, rows: sparse.csr_matrix) -> np.ndarray:
    """float32 [n, E], unit rows, of TF-IDF rows [n, words]."""
    with threadpoolctl.threadpool_limits(1):
      embeddings = rows @ self.projection.T
    norm = np.linalg.norm(embeddings, axis=1, keepdims=True)
    return (embeddings / np.maximum(norm, 1e-12)).astype(np.float32)


def text_model(items: Sequence[interactions.Item],
               config: config_dict.ConfigDict) -> TextModel:
  """Fits what `text_embeddings` embeds with."""
  rows, words = item_text.tfidf(items)
  if rows.shape[1] == 1:
    return TextModel(rows, words, np.ones((1, 1)))
  # One thread: sums in a fixed order, the same embedding every time.
  with threadpoolctl.threadpool_limits(1):
    svd = decomposition.TruncatedSVD(
        min(config.svd_dim, *rows.shape), random_state=config.seed).fit(rows)
  return TextModel(rows, words, svd.components_)


def text_embeddings(
    items: Sequence[interactions.Item], config: config_dict.ConfigDict
) -> np.ndarray:
  """Embeds what the catalogue says about its items.

  Args:
    items: the catalogue, I items.
    config: the section `semantic_ids`: `svd_dim`, `seed`.

  Returns:
    float32 [I, E], unit rows (zero for an item without text); E is `svd_dim`,
    or less where the catalogue has fewer items or words.

  Raises:
    DataError: no item has any text.
  """
  model = text_model(items, config)
  return model.embed(model.rows)


def fit_semantic_ids(
    embeddings: np.ndarray, config: config_dict.ConfigDict
) -> tuple[np.ndarray, list[np.ndarray]]:
  """Gives every item an id of its own.

  Args:
    embeddings: float [I, E].
    config: the section `semantic_ids`: `levels`, `codes`, `seed`.

  Returns:
    int32 [I, levels] in [0, codes), rows unique; and the centroids, a table
    [k, E] a level.

  Raises:
    ValueError: `levels` or `codes` is below one, or codes^levels ids do not
      suffice for the catalogue.
  """
  levels, codes = config.levels, config.codes
  if levels < 1 or codes < 1:
    raise ValueError(
        f'config.semantic_ids has levels={levels}, codes={codes}: expected at '
        'least one')
  if codes ** levels < len(embeddings):
    raise ValueError(
        f'config.semantic_ids: {codes}^{levels} ids do not suffice for '
        f'{len(embeddings)} items; raise levels or codes')
  centroids, ids = residual_clusters(embeddings, levels, codes, config.seed)
  return (last_level.collision_aware(embeddings, ids, centroids, codes),
          centroids)


def nearest(points: np.ndarray, centroids: Sequence[np.ndarray]) -> np.ndarray:
  """The nearest centroid at every level, int [n, L], of points [n, E]."""
  residual, ids = np.asarray(points, np.float64), []
  for table in centroids:
    code = ((residual[:, None] - table) ** 2).sum(-1).argmin(1)
    residual = residual - table[code]
    ids.append(code)
  return np.stack(ids, axis=1)


def residual_clusters(
    points: np.ndarray, levels: int, codes: int, seed: int
) -> tuple[list[np.ndarray], np.ndarray]:
  """Clusters rows by k-means++ and k-means, then what is left of them, and on.

  Args:
    points: float [I, E].
    levels: L.
    codes: K, centroids a level.
    seed: of the clustering.

  Returns:
    L tables of centroids, float64 [k, E] each, k <= K: no more than there are
    distinct rows; and the nearest ones, int [I, L].
  """
  residual = np.asarray(points, np.float64)
  centroids, ids = [], []
  for level in range(levels):
    table, code = _cluster(residual, codes, seed + level)
    residual = residual - table[code]
    centroids.append(table)
    ids.append(code)
  return centroids, np.stack(ids, axis=1)


def _cluster(
    residual: np.ndarray, codes: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
  """Clusters rows: centroids [k, E] with k <= codes, and codes int [I]."""
  # Rows that differ by rounding only are one row to k-means.
  distinct = len(np.unique(residual.round(6), axis=0))
  size = min(codes, distinct)
  with threadpoolctl.threadpool_limits(1):
    fitted = cluster.MiniBatchKMeans(
        size, batch_size=2048, n_init=3, max_iter=50, random_state=seed
    ).fit(residual)
  return fitted.cluster_centers_, fitted.labels_
