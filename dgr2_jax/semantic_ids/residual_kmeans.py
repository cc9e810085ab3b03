"""Semantic ids by residual k-means over text embeddings.

    TF-IDF of title, brand, categories -> truncated SVD -> unit rows e [E]
    r_0 = e;  code_l = nearest centroid c to r_l;  r_(l+1) = r_l - c

so similar items share the first codes (TIGER, arXiv 2305.05065, with k-means
for its RQ-VAE). Items that end up with the same codes are then told apart, the
later ones by the nearest codes that are still free.
"""

from __future__ import annotations

from collections.abc import Sequence

from ml_collections import config_dict
import numpy as np
from sklearn import cluster
from sklearn import decomposition
import threadpoolctl

from dgr2_jax.data import interactions
from dgr2_jax.data import item_text
from dgr2_jax.semantic_ids import last_level


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
  vectors = item_text.tfidf(items)
  size = min(config.svd_dim, *vectors.shape)
  # One thread: sums in a fixed order, the same embedding every time.
  with threadpoolctl.threadpool_limits(1):
    embeddings = vectors.toarray() if vectors.shape[1] == 1 else (
        decomposition.TruncatedSVD(
            size, random_state=config.seed).fit_transform(vectors))
  norm = np.linalg.norm(embeddings, axis=1, keepdims=True)
  return (embeddings / np.maximum(norm, 1e-12)).astype(np.float32)


def fit_semantic_ids(
    embeddings: np.ndarray, config: config_dict.ConfigDict
) -> np.ndarray:
  """Gives every item an id of its own.

  Args:
    embeddings: float [I, E].
    config: the section `semantic_ids`: `levels`, `codes`, `seed`.

  Returns:
    int32 [I, levels] in [0, codes), rows unique.

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
  return last_level.collision_aware(embeddings, ids, centroids, codes)


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
