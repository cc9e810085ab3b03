"""Tests of the TFDS builder, end to end on fabricated files."""

import math
import pathlib
import pickle
import subprocess
import sys

import grain
import ml_collections
import numpy as np
import pytest
import tensorflow_datasets as tfds

from dgr2_jax.data import amazon
from dgr2_jax.data import amazon_reviews_2014
from dgr2_jax.data import interactions
from tests.data import amazon_files


@pytest.fixture(scope='module', name='prepared')
def _prepared(tmp_path_factory):
  path = tmp_path_factory.mktemp('tfds')
  amazon_files.write(path / 'downloads' / 'manual')
  return path, amazon_reviews_2014.read(path, 'beauty', False)


def test_equals_the_raw_files(prepared):
  path, (items, log) = prepared
  raw_items, raw = amazon.read(path / 'downloads' / 'manual', 'beauty', False)
  assert items == raw_items and list(items) == list(raw_items)
  assert log.users == raw.users and log.items == raw.items
  order = np.argsort(raw.user, kind='stable')
  for field in ('user', 'item', 'timestamp'):
    np.testing.assert_array_equal(
        getattr(log, field), getattr(raw, field)[order])


def test_needs_no_tensorflow(tmp_path):
  amazon_files.write(tmp_path / 'downloads' / 'manual')
  code = """
import sys
from dgr2_jax.data import amazon_reviews_2014
items, _ = amazon_reviews_2014.read(sys.argv[1], 'beauty', False)
assert 'tensorflow' not in sys.modules
print('items', len(items))
"""
  done = subprocess.run(
      [sys.executable, '-c', code, str(tmp_path)], capture_output=True,
      text=True, check=False, cwd=pathlib.Path(__file__).parents[2])
  assert done.returncode == 0, done.stderr
  assert f'items {amazon_files.NUM_ITEMS}' in done.stdout


def test_second_read_needs_no_raw_files(prepared, tmp_path):
  path, (items, _) = prepared
  manual = path / 'downloads' / 'manual'
  manual.rename(tmp_path / 'elsewhere')
  try:
    assert amazon_reviews_2014.read(path, 'beauty', False)[0] == items
    with pytest.raises(interactions.DataError, match='published 5-core'):
      amazon_reviews_2014.read(path, 'beauty', True)
  finally:
    (tmp_path / 'elsewhere').rename(manual)


def test_data_source_feeds_grain(prepared):
  path, _ = prepared
  source = tfds.data_source(
      'amazon_reviews_2014/beauty', split='users', data_dir=path)
  assert len(source) == amazon_files.NUM_USERS
  rows = list(grain.MapDataset.source(source).seed(0).shuffle())
  assert {r['user_id'] for r in rows} == {f'U{u}'.encode() for u in range(7)}
  assert all(len(r['item_ids']) == len(r['timestamps']) == 6 for r in rows)
  assert all(r['title'] == b'' and math.isnan(r['price']) for r in rows)
  assert len(pickle.loads(pickle.dumps(source))) == len(source)


def test_loads_the_dataset_of_the_raw_files(prepared):
  path, _ = prepared
  for ties in interactions.TIES:
    config = ml_collections.ConfigDict(dict(
        source='tfds', path=str(path), name='beauty', check_counts=False,
        min_count=5, ties=ties, seed=1))
    data = interactions.load_dataset(config)
    config.source, config.path = 'amazon_raw', str(path / 'downloads/manual')
    raw = interactions.load_dataset(config)
    assert data.items == raw.items and data.users == raw.users
    for a, b in zip(data.sequences, raw.sequences):
      np.testing.assert_array_equal(a, b)


def test_missing_raw_files(tmp_path):
  for path in (tmp_path, '~nosuchuser/x'):
    with pytest.raises(
        interactions.DataError,
        match=f'{path}/downloads/manual/reviews_Beauty_5.json.gz: no s'):
      amazon_reviews_2014.read(path, 'beauty', True)
  with pytest.raises(ValueError, match="data.name is 'books'"):
    amazon_reviews_2014.read(tmp_path, 'books', True)


@pytest.mark.parametrize('late', [False, True])
def test_failure_leaves_nothing_half_written(tmp_path, late):
  manual = amazon_files.write(tmp_path / 'downloads' / 'manual')
  if late:
    match, check = 'truncated', False
    file = manual / 'meta_Beauty.json.gz'
    file.write_bytes(file.read_bytes()[:-9])
  else:
    match, check = 'published 5-core', True
  with pytest.raises(interactions.DataError, match=match):
    amazon_reviews_2014.read(tmp_path, 'beauty', check)
  left = [f for f in (tmp_path / 'amazon_reviews_2014').rglob('*')
          if f.is_file() and 'array_record' in f.name]
  assert not left
  amazon_files.write(manual)
  items, _ = amazon_reviews_2014.read(tmp_path, 'beauty', False)
  assert len(items) == amazon_files.NUM_ITEMS


def test_configs():
  builders = amazon_reviews_2014.AmazonReviews2014.BUILDER_CONFIGS
  assert [c.name for c in builders] == ['beauty', 'sports', 'toys']
