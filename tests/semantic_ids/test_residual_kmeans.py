"""Tests of semantic ids by residual k-means."""

import hypothesis
from hypothesis import strategies as st
import ml_collections
import numpy as np
import pytest

from dgr2_jax.data import interactions
from dgr2_jax.semantic_ids import residual_kmeans
from tests.data import shoppers


def config(**changes):
  return ml_collections.ConfigDict(
      dict(dict(levels=3, codes=8, svd_dim=16, seed=0), **changes))


def fit(embeddings, section):
  return residual_kmeans.fit_semantic_ids(embeddings, section)[0]


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    st.integers(1, 3), st.integers(1, 5), st.integers(0, 2 ** 16),
    st.floats(0, 1), st.floats(0, 1))
def test_ids_are_unique_up_to_full_capacity(
    levels, codes, seed, fill, duplicates):
  count = max(1, round(fill * codes ** levels))
  rng = np.random.default_rng(seed)
  embeddings = rng.normal(size=(count, 4)).astype(np.float32)
  embeddings[rng.random(count) < duplicates] = embeddings[0]
  ids = fit(
      embeddings, config(levels=levels, codes=codes))
  assert ids.shape == (count, levels) and ids.dtype == np.int32
  assert ids.min() >= 0 and ids.max() < codes
  assert len(np.unique(ids, axis=0)) == count


def test_similar_items_share_prefixes_and_fits_repeat():
  rng = np.random.default_rng(0)
  group = np.repeat(np.arange(6), 20)
  embeddings = (10 * rng.normal(size=(6, 8))[group]
                + .1 * rng.normal(size=(120, 8))).astype(np.float32)
  ids = fit(embeddings, config(codes=6))
  for g in range(6):
    assert len(set(ids[group == g, 0].tolist())) == 1
  np.testing.assert_array_equal(
      ids, fit(embeddings, config(codes=6)))


def test_more_codes_than_items():
  embeddings = residual_kmeans.text_embeddings(
      shoppers.make(0).items, config(svd_dim=128))
  assert embeddings.dtype == np.float32 and embeddings.shape[0] == 20
  np.testing.assert_allclose(
      np.linalg.norm(embeddings, axis=1), 1, rtol=1e-5)
  ids = fit(embeddings, config(codes=256))
  assert len(np.unique(ids, axis=0)) == 20


def test_a_single_word():
  items = [interactions.Item(str(i), 'soap', ('soap',)) for i in range(5)]
  embeddings = residual_kmeans.text_embeddings(items, config())
  np.testing.assert_array_equal(embeddings, np.ones((5, 1)))
  assert len(np.unique(fit(
      embeddings, config()), axis=0)) == 5


def test_errors():
  with pytest.raises(ValueError, match=r'2\^2 ids do not suffice for 5'):
    fit(np.zeros((5, 2)), config(
        codes=2, levels=2))
  with pytest.raises(ValueError, match='levels=0'):
    fit(np.zeros((1, 2)), config(levels=0))
  with pytest.raises(interactions.DataError, match='no words'):
    residual_kmeans.text_embeddings(
        [interactions.Item('a', '', ())], config())
