"""Tests of the reader and validator of a user's data directory."""

import json

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from dgr2_jax.data import directory
from dgr2_jax.data import interactions

_ITEMS = [
    {'item_id': 'a', 'title': 'Shampoo', 'categories': ['Beauty', 'Hair'],
     'brand': 'Lumea', 'price': 7, 'other': [1]},
    {'item_id': 'b', 'title': '', 'categories': ['Beauty'], 'brand': None,
     'price': None},
    {'item_id': 'c', 'title': 'Crème "x"\u2028{', 'categories': ['Beauty']}]


def _write(path, items=_ITEMS, sequences='u a b c\n', purchases=None):
  if items is not None:
    text = items if isinstance(items, str) else ''.join(
        json.dumps(i, ensure_ascii=False) + '\n' for i in items)
    (path / 'items.jsonl').write_text(text, 'utf-8')
  if sequences is not None:
    (path / 'sequences.txt').write_text(sequences, 'utf-8')
  if purchases is not None:
    (path / 'interactions.csv').write_text(purchases, 'utf-8')
  return path


def _fails(path, match):
  with pytest.raises(interactions.DataError, match=match):
    directory.read(path)


def test_reads_items_and_sequences(tmp_path):
  items, log = directory.read(
      _write(tmp_path, sequences='\ufeffu1 c  a\n\nu2\tb\r\n'))
  assert list(items) == ['a', 'b', 'c']
  assert items['a'] == interactions.Item(
      'a', 'Shampoo', ('Beauty', 'Hair'), 'Lumea', 7.0)
  assert items['b'] == interactions.Item('b', '', ('Beauty',))
  assert items['c'].title == 'Crème "x"\u2028{'
  assert log.users == ('u1', 'u2') and log.timestamp is None
  assert log.user.tolist() == [0, 0, 1] and log.item.tolist() == [2, 0, 1]


def test_reads_interactions(tmp_path):
  items, log = directory.read(_write(
      tmp_path, sequences=None,
      purchases='item_id,timestamp,user_id,stars\n'
                'b,12,"u, one",5\na, 3.5,u2,4\n\nc,-1,"u, one",3\n'))
  assert len(items) == 3
  assert log.users == ('u, one', 'u2')
  assert log.user.tolist() == [0, 1, 0] and log.item.tolist() == [1, 0, 2]
  assert log.timestamp.tolist() == [12, 3.5, -1]


_IDS = st.text(st.characters(
    codec='utf-8', exclude_categories=('Z', 'C')), min_size=1, max_size=4)


@given(st.lists(_IDS, min_size=1, max_size=6, unique=True),
       st.dictionaries(_IDS, st.lists(
           st.integers(0, 99), min_size=1, max_size=6), min_size=1),
       st.booleans())
@settings(deadline=None, max_examples=50)
def test_round_trip(tmp_path_factory, item_ids, bought, as_csv):
  path = tmp_path_factory.mktemp('data')
  bought = {u: [item_ids[i % len(item_ids)] for i in b]
            for u, b in bought.items()}
  quote = lambda s: '"' + s.replace('"', '""') + '"'
  _write(
      path, [{'item_id': i, 'title': i, 'categories': [i]} for i in item_ids],
      None if as_csv else ''.join(
          f'{u} {" ".join(b)}\n' for u, b in bought.items()),
      'user_id,item_id,timestamp\n' + ''.join(
          f'{quote(u)},{quote(i)},{t}\n' for u, b in bought.items()
          for t, i in enumerate(b)) if as_csv else None)
  _, log = directory.read(path)
  log = interactions.chronological(log, 'file', 0)
  assert {
      u: [log.items[i] for i in log.item[log.user == k]]
      for k, u in enumerate(log.users)} == bought


@given(st.binary(max_size=80), st.sampled_from(
    ['items.jsonl', 'sequences.txt', 'interactions.csv']))
@settings(deadline=None, max_examples=100)
def test_any_bytes_give_data_or_a_data_error(tmp_path_factory, content, name):
  path = tmp_path_factory.mktemp('data')
  _write(path, sequences=None if name == 'interactions.csv' else 'u a b c\n')
  (path / name).write_bytes(content)
  try:
    items, log = directory.read(path)
  except interactions.DataError as e:
    assert str(path) in str(e)
  else:
    assert items and len(log.user)


def test_missing_files(tmp_path):
  _fails(tmp_path / 'nowhere', 'nowhere: no such directory')
  _fails(tmp_path, 'expected either sequences.txt or interactions.csv, found '
         'neither')
  _write(tmp_path, items=None)
  _fails(tmp_path, 'items.jsonl: no such file')
  _fails(_write(tmp_path, purchases='user_id,item_id,timestamp\n'), 'both')


@pytest.mark.parametrize('line,reason', [
    ('{"item_id": "z", ', 'malformed JSON'),
    ('[' * 100_000, 'malformed JSON'),
    ('["z"]', 'expected a JSON object, got list'),
    ('{"title": "", "categories": ["x"]}', "'item_id' must .* missing"),
    ('{"item_id": 3, "title": "", "categories": ["x"]}', "'item_id' .* got 3"),
    ('{"item_id": "z", "categories": ["x"]}', "'title' must .* missing"),
    ('{"item_id": "z", "title": "", "categories": []}', "'categories' .* non-"),
    ('{"item_id": "z", "title": "", "categories": "x"}', "'categories' .*'x'"),
    ('{"item_id": "z", "title": "", "categories": [1]}', "'categories' must"),
    ('{"item_id": "z", "title": "", "categories": ["x"], "brand": 1}',
     "'brand' must be a string that UTF-8 can hold, or null, got 1"),
    ('{"item_id": "z", "title": "\\ud800", "categories": ["x"]}',
     "'title' must be a string that UTF-8 can hold"),
    ('{"item_id": "z", "title": "", "categories": ["\\udfff"]}',
     "'categories' must be"),
    ('{"item_id": "z", "title": "", "categories": ["x"], "price": 1' +
     400 * '0' + '}', "'price' must be a finite number"),
    ('{"item_id": "z", "title": "", "categories": ["x"], "price": "1"}',
     "'price' must be a finite number"),
    ('{"item_id": "z", "title": "", "categories": ["x"], "price": NaN}',
     "'price' must be a finite number"),
    ('{"item_id": "z", "title": "", "categories": ["x"], "price": true}',
     "'price' must be a finite number"),
    ('{"item_id": "a", "title": "", "categories": ["x"]}',
     "duplicate item_id 'a', first on line 1"),
])
def test_bad_items(tmp_path, line, reason):
  good = json.dumps(_ITEMS[0])
  _fails(_write(tmp_path, f'{good}\n\n{line}\n'), f'items.jsonl:3: .*{reason}')


def test_empty_files(tmp_path):
  _fails(_write(tmp_path, ' \n\n'), 'items.jsonl: empty')
  _fails(_write(tmp_path, sequences='\n'), 'sequences.txt: no purchases')
  (tmp_path / 'sequences.txt').unlink()
  _fails(_write(tmp_path, sequences=None, purchases=''), 'bad header')
  _fails(_write(tmp_path, sequences=None,
                purchases='user_id,item_id,timestamp\n'),
         'interactions.csv: no purchases')


@pytest.mark.parametrize('text,reason', [
    ('u a\nv b x\n', "2: unknown item 'x', not in items.jsonl"),
    ('u a\n\nu b\n', "3: duplicate user 'u', first on line 1"),
    ('u a\nv\n', "2: user 'v' has no items"),
])
def test_bad_sequences(tmp_path, text, reason):
  _fails(_write(tmp_path, sequences=text), f'sequences.txt:{reason}')


@pytest.mark.parametrize('text,reason', [
    ('user,item_id,timestamp\nu,a,1\n', "1: bad header 'user,item_id,times"),
    ('u,a,1\n', '1: bad header'),
    ('user_id,item_id,timestamp\nu,a\n', '2: 2 fields, the header has 3'),
    ('user_id,item_id,timestamp\nu,a,1\nu,x,1\n', "3: unknown item 'x'"),
    ('user_id,item_id,timestamp\n,a,1\n', '2: empty user_id'),
    ('user_id,item_id,timestamp\nu,a,2014-01-01\n',
     "2: timestamp '2014-01-01': expected a number"),
    ('user_id,item_id,timestamp\nu,a,nan\n', "2: timestamp 'nan'"),
    ('user_id,item_id,timestamp\n"u"x,a,1\n', '2: malformed CSV'),
    ('user_id,item_id,timestamp\nu,a,1\n"u,b,1\n\nu,c,1\n',
     r'3: malformed CSV: .*\(a quote open until line 5\?\)'),
    ('user_id,item_id,timestamp\n"u\nv",a,nan\n', "2: timestamp 'nan'"),
])
def test_bad_interactions(tmp_path, text, reason):
  _fails(_write(tmp_path, sequences=None, purchases=text),
         f'interactions.csv:{reason}')


def test_not_utf8(tmp_path):
  _write(tmp_path)
  (tmp_path / 'sequences.txt').write_bytes(b'u a\nv \xff\n')
  _fails(tmp_path, 'sequences.txt:2: not UTF-8')


def test_interactions_are_ordered_by_time(tmp_path):
  items, log = directory.read(_write(
      tmp_path, sequences=None,
      purchases='user_id,item_id,timestamp\nu,c,5\nu,b,1\nu,a,5\nu,b,0\n'))
  data = interactions.dataset('test', items, log, 1, 'file', 0, 'somewhere')
  np.testing.assert_array_equal(data.sequences[0], [1, 2, 0])
