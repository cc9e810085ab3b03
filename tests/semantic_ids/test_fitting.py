"""Tests of fitting an RQ-VAE, and of the catalogue's ids that come of it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from dgr2_jax.data import interactions
from dgr2_jax.semantic_ids import catalogue
from dgr2_jax.semantic_ids import fitting
from dgr2_jax.semantic_ids import last_level
from dgr2_jax.semantic_ids import quality
from dgr2_jax.semantic_ids import residual_kmeans
from dgr2_jax.semantic_ids import rqvae
from tests.data import shoppers

SMALL = dict(hidden=(16,), latent=4, steps=30, batch_size=64, warmup_steps=2,
             reset_after=5, learning_rate=1e-2)


def config(**changes):
  return rqvae.RqVaeConfig(
      **{'levels': 3, 'codes': 8, 'seed': 0, **SMALL, **changes})


def grouped(groups=8, size=25, width=12):
  """Unit rows around a few centres, and the number of each row's centre."""
  rng = np.random.default_rng(0)
  group = np.repeat(np.arange(groups), size)
  rows = rng.normal(size=(groups, width))[group]
  rows += .1 * rng.normal(size=rows.shape)
  rows /= np.linalg.norm(rows, axis=1, keepdims=True)
  return rows.astype(np.float32), group


@pytest.fixture(scope='module')
def model():
  return rqvae.RqVae(config(), grouped()[0].shape[1])


@pytest.fixture(scope='module')
def initial(model):
  return fitting.initial_params(model, grouped()[0])


@pytest.fixture(scope='module')
def fitted():
  return fitting.fit(grouped()[0], config())


def test_codes_are_used_and_like_items_share_the_first(fitted, model, initial):
  rows, group = grouped()
  assert [level['used'] for level in quality.code_use(fitted.nearest, 8)] == [
      1, 1, 1]
  purity = quality.prefix_purity(fitted.nearest, group.tolist())[0]
  assert purity['purity'] > 2 * purity['chance']
  untrained = fitting.read_ids(model, initial, rows).reconstruction
  assert fitted.reconstruction['nearest'] < .7 * untrained['nearest']


def test_collision_aware_ids_are_unique(fitted):
  assert quality.uniqueness(fitted.nearest) < 1  # of what is there to solve
  assert quality.uniqueness(fitted.ids) == 1 and fitted.ids.dtype == np.int32


def test_two_runs_give_the_same_ids(fitted):
  again = fitting.fit(grouped()[0], config())
  np.testing.assert_array_equal(again.nearest, fitted.nearest)
  np.testing.assert_array_equal(again.ids, fitted.ids)


@pytest.mark.parametrize('kind', [last_level.RANDOM, last_level.NEAREST])
def test_other_last_levels(initial, kind):
  rows, _ = grouped()
  chosen = rqvae.RqVae(
      dataclasses.replace(config(), last_level=kind), rows.shape[1])
  found = fitting.read_ids(chosen, initial, rows)
  np.testing.assert_array_equal(found.ids[:, :-1], found.nearest[:, :-1])
  same = (found.ids == found.nearest).all()
  assert same == (kind == last_level.NEAREST)
  if not same:  # codes drawn at random decode to something else
    assert found.reconstruction['ids'] > found.reconstruction['nearest']


def test_kmeans_initialisation_clusters_residuals_and_repeats(model, initial):
  rows, _ = grouped()
  latent = model.apply({'params': initial}, rows, method='encode')
  centroids, codes = residual_kmeans.residual_clusters(latent, 3, 8, 0)
  for table, expected in zip(initial['codebooks'], centroids):
    np.testing.assert_allclose(table, expected, rtol=1e-5, atol=1e-6)
  found = rqvae.quantise(latent, initial['codebooks'])
  np.testing.assert_array_equal(found.codes, codes)
  jax.tree.map(np.testing.assert_array_equal, initial,
               fitting.initial_params(model, rows))
  other = rqvae.RqVae(config(seed=1), rows.shape[1])
  assert (fitting.initial_params(other, rows)['codebooks']
          != initial['codebooks']).any()


def test_codes_without_distinct_rows_stay_random():
  rows = np.repeat(grouped(groups=3, size=1)[0], 5, axis=0)
  model = rqvae.RqVae(config(), rows.shape[1])
  table = fitting.initial_params(model, rows)['codebooks'][0]
  untouched = model.init(
      jax.random.key(0), jnp.zeros((1, rows.shape[1])))['params']['codebooks']
  np.testing.assert_array_equal(table[3:], untouched[0][3:])
  assert (table[:3] != untouched[0][:3]).all()


@pytest.mark.parametrize('items, changes, message', [
    (7, {}, 'codes is 8: k-means needs as many items, the catalogue has 7'),
    (65, dict(levels=2), r'8\^2 ids do not suffice for 65 items')])
def test_sizes_that_do_not_fit(items, changes, message):
  with pytest.raises(ValueError, match=message):
    fitting.fit(np.ones((items, 4), np.float32), config(**changes))


def test_divergence_is_an_error(model, initial, monkeypatch):
  monkeypatch.setattr(
      fitting, 'make_step',
      lambda *_: lambda state, batch: (state, {'loss': np.float32('nan')}))
  with pytest.raises(ValueError, match='not finite at step 3'):
    fitting.train(model, initial, grouped()[0])


def section(**changes):
  return ml_collections.ConfigDict(dict(
      levels=3, codes=8, svd_dim=6, seed=0, rqvae={**SMALL, **changes}))


def counted(embeddings, config):
  """In place of a fit: items numbered in base K."""
  place = config.codes ** np.arange(config.levels)[::-1]
  ids = (np.arange(len(embeddings))[:, None] // place % config.codes).astype(
      np.int32)
  return fitting.Fitted(ids, ids, {'nearest': 0., 'ids': 0.}, {})


def test_ids_are_stored_with_what_made_them(tmp_path, monkeypatch):
  items = shoppers.make(0).items
  catalogue.build(items, section(steps=3)).save(tmp_path)
  ids = np.load(tmp_path / 'semantic_ids.npy')
  assert ids.shape == (20, 3) and quality.uniqueness(ids) == 1
  described = json.loads((tmp_path / 'semantic_ids.json').read_text())
  assert described['kind'] == 'rqvae'
  assert described['settings']['codes'] == 8
  assert described['settings']['rqvae']['decay'] == .99  # a default
  assert described['quality']['uniqueness'] == 1
  assert len(described['examples']) == 5
  for example in described['examples']:
    item = [item.item_id for item in items].index(example['item_id'])
    assert example['id'] == ids[item].tolist()
    assert [(x['item_id'], x['shared']) for x in example['nearest']] == [
        (items[i].item_id, shared)
        for i, shared in quality.nearest(ids, item, 3)]
  monkeypatch.setattr(fitting, 'fit', counted)
  again = catalogue.build(items, section(steps=3)).description
  assert again['version'] == described['version']
  for other in (catalogue.build(items, section(steps=4)),
                catalogue.build(items[1:], section(steps=3))):
    assert other.description['version'] != described['version']


def test_the_content_of_a_matrix_counts_not_its_path(tmp_path, monkeypatch):
  monkeypatch.setattr(fitting, 'fit', counted)
  items = shoppers.make(0).items
  matrix = np.random.default_rng(0).normal(size=(20, 6))
  versions = []
  for name, values in (('a', matrix), ('b', matrix), ('c', matrix + 1)):
    np.save(tmp_path / f'{name}.npy', values)
    versions.append(catalogue.build(items, section(steps=1, embeddings=dict(
        kind='npy', path=str(tmp_path / f'{name}.npy')))).description[
            'version'])
  assert versions[0] == versions[1] != versions[2]


def test_without_a_section_ids_are_residual_kmeans():
  items = shoppers.make(0).items
  plain = ml_collections.ConfigDict(
      dict(levels=3, codes=8, svd_dim=6, seed=0))
  made = catalogue.build(items, plain)
  assert made.description['kind'] == 'residual_kmeans'
  np.testing.assert_array_equal(made.ids, residual_kmeans.fit_semantic_ids(
      residual_kmeans.text_embeddings(items, plain), plain)[0])


@pytest.mark.parametrize('kind', ['residual_kmeans', 'rqvae'])
def test_new_items_get_the_nearest_free_ids_of_the_kept_model(tmp_path, kind):
  items = shoppers.make(0).items
  config = section(steps=3)
  if kind == 'residual_kmeans':
    del config.rqvae
  made = catalogue.build(items, config)
  made.save(tmp_path)
  # Were no id taken, the catalogue would get its own ids again.
  again = catalogue.Encoder(items, made.ids[:0], config, tmp_path)
  np.testing.assert_array_equal(again(items), made.ids)
  # With other settings the model would mean something else.
  other = config.copy_and_resolve_references()
  other.svd_dim += 1
  with pytest.raises(ValueError, match='semantic_ids.svd_dim: 6 there, 7 now'):
    catalogue.Encoder(items, made.ids, other, tmp_path)
  # All are: twins get others, most of them beside their twins.
  twins = catalogue.Encoder(items, made.ids, config, tmp_path)(items)
  assert len(np.unique(np.concatenate([made.ids, twins]), axis=0)) == 40
  assert (twins[:, :2] == made.ids[:, :2]).all(1).mean() > .5
  with pytest.raises(ValueError, match='all 8.3 semantic ids are taken'):
    catalogue.Encoder(items, np.zeros((8 ** 3, 3), int), config, tmp_path)(
        items)
  (tmp_path / 'semantic_ids_model.npz').unlink()
  with pytest.raises(ValueError, match='an earlier version'):
    catalogue.Encoder(items, made.ids, config, tmp_path)


def test_new_items_have_no_row_in_a_matrix(tmp_path):
  with pytest.raises(ValueError, match='no rows for new items'):
    catalogue.Encoder(
        shoppers.make(0).items, np.zeros((20, 3), int), section(
            embeddings=dict(kind='npy', path='e.npy')), tmp_path)


def test_bad_sections():
  with pytest.raises(ValueError, match='k-means needs as many items'):
    catalogue.build(shoppers.make(0).items[:5], section())
  with pytest.raises(ValueError, match='embeddings has a field too many'):
    catalogue.check(section(embeddings=dict(url='x')))
  with pytest.raises(interactions.DataError, match='missing.npy'):
    catalogue.build(shoppers.make(0).items, section(
        embeddings=dict(kind='npy', path='missing.npy')))
