"""The cache's reader on damaged files."""

import json

import hypothesis
from hypothesis import strategies as st
import pytest

from dgr2_jax.data import interactions
from dgr2_jax.trace_generation import cache as cache_lib
from dgr2_jax.trace_generation import chat

replies = st.builds(
    chat.Reply, content=st.text(), finish=st.text(max_size=8),
    prompt_tokens=st.integers(0, 9999), completion_tokens=st.integers(0, 99))
KEYS = ('2:a', '2:b', '2:c')
entries = st.lists(st.tuples(st.sampled_from(KEYS), replies), max_size=6)
# What a crash may leave: part of a line, or blocks that were never written.
tails = st.binary(max_size=40).filter(lambda tail: b'\n' not in tail)


def _by_key(pairs):
  return {key: tuple(r for k, r in pairs if k == key) for key in KEYS}


def _read(path):
  with cache_lib.AnswerCache(path) as cache:
    return {key: cache.answers(key) for key in KEYS}


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(written=entries, cut=st.integers(0, 60), tail=tails,
                  more=entries)
def test_all_finished_lines_survive(tmp_path_factory, written, cut, tail, more):
  path = tmp_path_factory.mktemp('cache') / 'answers.jsonl'
  sizes = [0]
  for key, reply in written:
    with cache_lib.AnswerCache(path) as cache:
      cache.add(key, reply)
    sizes.append(path.stat().st_size)
  data = path.read_bytes() if written else b''
  data = data[:max(len(data) - cut, 0)]
  whole = sum(size <= len(data) for size in sizes) - 1
  path.write_bytes(data + tail)
  assert _read(path) == _by_key(written[:whole])
  with cache_lib.AnswerCache(path) as cache:
    for key, reply in more:
      cache.add(key, reply)
      assert cache.answers(key)[-1] == reply
  assert _read(path) == _by_key(written[:whole] + more)


@pytest.mark.parametrize('line', [
    b'', b'{}', b'[]', b'\xff', b'null', b'{"key": "a"', b'[' * 100_000,
    b'{"key": "a", "content": 1, "finish": "", "prompt_tokens": 0, '
    b'"completion_tokens": 0}',
    b'{"key": "a", "content": "", "finish": "", "prompt_tokens": 0, '
    b'"completion_tokens": 0, "more": 1}'])
def test_damage_in_the_middle_is_told(tmp_path, line):
  path = tmp_path / 'answers.jsonl'
  with cache_lib.AnswerCache(path) as cache:
    cache.add('2:a', chat.Reply('x', 'stop', 1, 2))
  before = path.read_bytes() + line + b'\n'
  path.write_bytes(before)
  with pytest.raises(interactions.DataError, match=r'answers.jsonl:2: damaged'):
    cache_lib.AnswerCache(path)
  assert path.read_bytes() == before  # left for the user to mend


def test_one_process_at_a_time(tmp_path):
  path = tmp_path / 'answers.jsonl'
  with cache_lib.AnswerCache(path):
    with pytest.raises(cache_lib.CacheError, match='in use by another run'):
      cache_lib.AnswerCache(path)
  cache_lib.AnswerCache(path).close()


def test_keys_follow_the_question():
  body = {'model': 'm', 'messages': [{'role': 'user', 'content': 'x'}]}
  same = json.loads(json.dumps(dict(reversed(body.items()))))
  key = cache_lib.key_of(body, 'x')
  assert cache_lib.key_of(same, 'x') == key
  assert cache_lib.key_of(body, 'y') != key
  for change in ({'model': 'n'}, {'temperature': 0.5}, {'messages': []}):
    assert cache_lib.key_of({**body, **change}, 'x') != key


def test_an_earlier_version_is_told(tmp_path):
  """Its keys were digests of the body alone."""
  path = tmp_path / 'answers.jsonl'
  line = json.dumps({'key': '9b1e' * 8,
                     **chat.Reply('x', 'stop', 1, 2)._asdict()})
  path.write_text(f'{line}\n')
  with pytest.raises(interactions.DataError, match='answers.jsonl:1: an answer '
                     'of an earlier version.*Move this file away'):
    cache_lib.AnswerCache(path)
  assert path.read_text() == f'{line}\n'


class Full:
  """A file on a disk that is full: it takes half of what is written."""

  def __init__(self, file):
    self.full = True
    self._file = file

  def __getattr__(self, name):
    return getattr(self._file, name)

  def write(self, data):
    return self._file.write(data[:len(data) // 2] if self.full else data)


def test_a_short_write_leaves_nothing(tmp_path, monkeypatch):
  path = tmp_path / 'answers.jsonl'
  first, lost, last = (chat.Reply(x, 'stop', 1, 2) for x in 'xyz')
  with cache_lib.AnswerCache(path) as cache:
    cache.add('2:a', first)
    before = path.read_bytes()
    monkeypatch.setattr(cache, '_file', Full(cache._file))
    with pytest.raises(OSError, match='could not be written whole'):
      cache.add('2:b', lost)
    assert path.read_bytes() == before and cache.answers('2:b') == ()
    cache._file.full = False
    cache.add('2:c', last)
  assert _read(path) == {'2:a': (first,), '2:b': (), '2:c': (last,)}
