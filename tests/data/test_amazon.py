"""Tests of the importer of the raw Amazon files."""

import gzip
import json

import ml_collections
import numpy as np
import pytest

from dgr2_jax.data import amazon
from dgr2_jax.data import interactions
from tests.data import amazon_files

_REVIEW = {'reviewerID': 'U', 'asin': 'B', 'unixReviewTime': 1}


def _gz(path, text):
  path.write_bytes(gzip.compress(text.encode('utf-8')))
  return path


def test_reads_reviews_and_metadata(tmp_path):
  items, log = amazon.read(amazon_files.write(tmp_path), 'beauty', False)
  assert list(items) == [f'B{a}' for a in range(6)] == list(log.items)
  assert items['B2'] == interactions.Item(
      'B2', "It's item & 2", ('Beauty', 'Hair & Care', 'Shampoos'), 'Lumea',
      3.5)
  assert items['B3'] == interactions.Item('B3', 'Ç "three"', ('Beauty',))
  assert items['B4'] == interactions.Item('B4', '', ('Beauty',))
  assert log.users == tuple(f'U{u}' for u in range(7))
  assert len(log.user) == 42
  assert log.timestamp[log.user == 3].tolist() == [
      86_400 * ((a * 3) % 4) for a in range(6)]


@pytest.mark.parametrize('ties', interactions.TIES)
def test_loads_a_dataset(tmp_path, ties):
  config = ml_collections.ConfigDict(dict(
      source='amazon_raw', path=str(amazon_files.write(tmp_path)),
      name='beauty', check_counts=False, min_count=5, ties=ties, seed=0))
  data = interactions.load_dataset(config)
  assert (len(data.users), len(data.items)) == (7, 6)
  days = [(a * 3) % 4 for a in data.sequences[3]]
  assert days == sorted(days)
  if ties == 'file':  # a day's purchases in ASIN order
    assert data.sequences[3].tolist() == [0, 4, 3, 2, 1, 5]


def test_counts(tmp_path):
  path = amazon_files.write(tmp_path)
  with pytest.raises(interactions.DataError, match=(
      '7 users, 6 items and 42 interactions; the published 5-core of Beauty '
      'has 22,363, 12,101 and 198,502.*check_counts')):
    amazon.read(path, 'beauty', True)


def test_counts_of_the_published_data_pass():
  subset = amazon.SUBSETS['beauty']
  rows = np.zeros(subset.interactions, np.int32)
  log = interactions.Log(
      ('u',) * subset.users, ('i',) * subset.items, rows, rows, None)
  amazon.verify_counts(log, 'beauty', 'somewhere')


def test_missing_files_and_names(tmp_path):
  with pytest.raises(interactions.DataError,
                     match='reviews_Toys_and_Games_5.json.gz: no such file'):
    amazon.read(tmp_path, 'toys', True)
  with pytest.raises(ValueError, match="data.name is 'books'.*beauty"):
    amazon.read(tmp_path, 'books', True)
  amazon_files.write(tmp_path)
  (tmp_path / 'meta_Beauty.json.gz').unlink()
  with pytest.raises(interactions.DataError, match='meta_Beauty.json.gz: no s'):
    amazon.read(tmp_path, 'beauty', False)


@pytest.mark.parametrize('name', ['reviews_Beauty_5', 'meta_Beauty'])
@pytest.mark.parametrize('damage,reason', [
    (lambda b: b[:-9], 'truncated'),
    (lambda b: b[:40], 'truncated'),
    (lambda b: b[:60] + b'\0\0\0\0\0\0' + b[66:], 'damaged'),
    (lambda b: b[:-8] + b'abcd' + b[-4:], 'damaged'),
    (lambda b: b'plain text', 'not a gzip file'),
])
def test_damaged_files(tmp_path, name, damage, reason):
  file = amazon_files.write(tmp_path) / f'{name}.json.gz'
  file.write_bytes(damage(file.read_bytes()))
  with pytest.raises(interactions.DataError, match=f'{name}.*{reason}'):
    amazon.read(tmp_path, 'beauty', False)


@pytest.mark.parametrize('line,reason', [
    ('{"reviewerID": ', 'malformed line'),
    ('[1]', 'expected an object, got list'),
    (json.dumps(dict(_REVIEW, asin=None)), "'asin' must be a string, got None"),
    (json.dumps(dict(_REVIEW, unixReviewTime='1')),
     "'unixReviewTime' must be an integer, got '1'"),
    (json.dumps({'asin': 'B', 'unixReviewTime': 1}), "'reviewerID' must be"),
])
def test_bad_reviews(tmp_path, line, reason):
  path = _gz(tmp_path / 'r.gz', json.dumps(_REVIEW) + '\n' + line + '\n')
  with pytest.raises(interactions.DataError, match=f'r.gz:2: .*{reason}'):
    amazon.read_reviews(path)


def test_empty_reviews(tmp_path):
  with pytest.raises(interactions.DataError, match='r.gz: empty'):
    amazon.read_reviews(_gz(tmp_path / 'r.gz', '\n'))


@pytest.mark.parametrize('line,reason', [
    ("{'asin': 'B2', ", 'malformed line'),
    ("{'asin': 'B2', 'title': open('x')}", 'malformed line'),
    ("['B2']", 'expected an object, got list'),
    ("{'title': 'x'}", 'no asin'),
    ("{'asin': 'B2', 'categories': ['Beauty']}", "'categories' must be"),
    ("{'asin': 'B2', 'price': '1'}", "'price' must be a number"),
    ("{'asin': 'B2', 'price': 1" + 400 * '0' + '}', "'price' must be a number"),
])
def test_bad_metadata(tmp_path, line, reason):
  path = _gz(tmp_path / 'm.gz', "{'asin': 'B1'}\n" + line + '\n')
  with pytest.raises(interactions.DataError, match=f'm.gz:2: .*{reason}'):
    amazon.read_metadata(path, ('B1', 'B2'))


def test_half_surrogate_pairs_are_replaced(tmp_path):
  path = _gz(tmp_path / 'm.gz', "{'asin': 'B1', 'title': 'a\\ud800b'}\n")
  assert amazon.read_metadata(path, ('B1',))['B1'].title == 'a?b'


def test_unwanted_metadata_is_not_parsed(tmp_path):
  path = _gz(tmp_path / 'm.gz', "{'asin': 'B9', oops\n{'asin': 'B1'}\n")
  assert list(amazon.read_metadata(path, ('B1',))) == ['B1']


def test_items_without_metadata(tmp_path):
  path = _gz(tmp_path / 'm.gz', "{'asin': 'B1'}\n")
  with pytest.raises(interactions.DataError,
                     match="1 of 2 reviewed items .* first is 'B2'"):
    amazon.read_metadata(path, ('B1', 'B2'))
