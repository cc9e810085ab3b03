"""Tests of reading candidate lists."""

import json

import pytest

from dgr2_jax.data import candidates
from dgr2_jax.data import interactions
from tests.data import shoppers

DATASET = shoppers.make(0)


def line(**changes):
  """A good test list of user u0, with changes."""
  history = DATASET.sequences[0].tolist()
  free = [f'i{i}' for i in range(20) if i not in history][:10]
  record = dict(user_id='u0', candidates=free)
  record.update(changes)
  return json.dumps({k: v for k, v in record.items() if v is not None})


def read(tmp_path, *lines):
  path = tmp_path / 'candidates.jsonl'
  path.write_text('\n'.join(lines) + '\n')
  return candidates.read(path, DATASET, 10)


def test_reads_all_splits(tmp_path):
  result = read(tmp_path, line(), line(split='train', position=1),
                line(split='validation'))
  length = len(DATASET.sequences[0])
  assert {k: v[1].tolist() for k, v in result.items()} == {
      'train': [1], 'validation': [length - 2], 'test': [length - 1]}
  assert result['test'][2].shape == (1, 10)


GOOD = json.loads(line())['candidates']


@pytest.mark.parametrize('bad, message', [
    ('{"user_id": ', 'not JSON'),
    ('[' * 100_000, 'not JSON'),
    ('[]', 'expected a JSON object'),
    (line(user_id=None), "'user_id' is None"),
    (line(user_id='nobody'), "unknown user 'nobody'"),
    (line(candidates=GOOD[:9]), '9 candidates: expected at least 10'),
    (line(candidates=GOOD[:9] + ['x']), "unknown item 'x'"),
    (line(candidates=GOOD[:9] + GOOD[:1]), f"'{GOOD[0]}' stands there twice"),
    (line(candidates=GOOD[:9] + [f'i{DATASET.sequences[0][0]}']),
     'in the history already'),
    (line(split='dev'), "split is 'dev'"),
    (line(split='train'), "'position' is None"),
    (line(split='train', position=99), r'position 99 .* outside 1\.\.'),
    (line(position=1), 'position is 1: the test target'),
    (line(), 'a second list'),
])
def test_errors_name_file_and_line(tmp_path, bad, message):
  with pytest.raises(
      interactions.DataError, match=rf'candidates\.jsonl:3: .*{message}'):
    read(tmp_path, line(), '', bad)


def test_missing_or_empty_file(tmp_path):
  with pytest.raises(interactions.DataError, match='none.jsonl: no such file'):
    candidates.read(tmp_path / 'none.jsonl', DATASET, 10)
  with pytest.raises(interactions.DataError, match='no candidate lists'):
    read(tmp_path, '')
  (tmp_path / 'c').write_bytes(line().encode() + b'\n\xff\n')
  with pytest.raises(interactions.DataError, match='c:2: not UTF-8'):
    candidates.read(tmp_path / 'c', DATASET, 10)
