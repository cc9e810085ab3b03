import json

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from dgr2_jax.data import parsing
from dgr2_jax.data import prompts
from dgr2_jax.data import tokens
from tests.data import fabricated

FORMATS = (prompts.JSON, prompts.COMPACT)
TEMPLATES = {f: fabricated.template(f) for f in FORMATS}
PARSERS = {f: parsing.Parser(TEMPLATES[f].tokenizer, f, 10) for f in FORMATS}

_settings = hypothesis.settings(deadline=None, max_examples=60)


def _json(text, eos=True):
  pieces = [tokens.Text(text)] + [tokens.Special(tokens.EOS)] * eos
  return TEMPLATES[prompts.JSON].tokenizer.encode(pieces)


def _compact(*names, eos=True):
  names += (tokens.EOS,) * eos
  return TEMPLATES[prompts.COMPACT].tokenizer.encode(
      map(tokens.Special, names))


def _c(*numbers):
  return [tokens.candidate(n) for n in numbers]


@pytest.mark.parametrize('response_format', FORMATS)
@hypothesis.given(st.permutations(range(10)), st.integers(0, 30), st.integers(
    0, 5))
@_settings
def test_round_trip(response_format, order, seed, shown):
  response = TEMPLATES[response_format].response(
      fabricated.request(seed), np.array(order), shown)
  parser = PARSERS[response_format]
  parse = parser.strict(response.ids)
  assert parse.failure == parsing.VALID
  assert parse.order == tuple(order)
  assert parse.answer_start == np.argmax(response.is_answer)
  assert parser.lenient(response.ids) == tuple(order)
  # What follows the end of the response doesn't count.
  longer = np.concatenate([response.ids, response.ids])
  assert parser.strict(longer) == parse
  # Without its end, it's an overflow that can still be read.
  cut = parser.strict(response.ids[:-1])
  assert cut.failure == 'overflow' and cut.order is None
  assert cut.explanation == parse.explanation
  assert cut.answer_start == parse.answer_start
  assert parser.lenient(response.ids[:-1]) == tuple(order)


@pytest.mark.parametrize('response_format', FORMATS)
@hypothesis.given(st.data())
@_settings
def test_any_ids(response_format, data):
  tokenizer = TEMPLATES[response_format].tokenizer
  base = TEMPLATES[response_format].response(
      fabricated.request(0), np.arange(10), 5).ids.tolist()
  anything = st.integers(0, tokenizer.vocab_size - 1)
  ids = data.draw(st.lists(st.sampled_from(base) | anything, max_size=60))
  _check(PARSERS[response_format], ids)
  # A good response with a few tokens changed.
  for _ in range(data.draw(st.integers(1, 4))):
    base[data.draw(st.integers(0, len(base) - 1))] = data.draw(anything)
  _check(PARSERS[response_format], base)


@hypothesis.given(st.text() | st.recursive(
    st.integers() | st.text(max_size=5) | st.none() | st.floats(),
    lambda inner: st.lists(inner) | st.dictionaries(
        st.sampled_from(['explanation', 'recommendations', 'x']), inner),
).map(json.dumps))
@_settings
def test_any_text(text):
  _check(PARSERS[prompts.JSON], _json(text))


def _check(parser, ids):
  parse = parser.strict(ids)
  assert (parse.order is None) == (parse.failure != parsing.VALID)
  assert parse.failure in (parsing.VALID, *parsing.FAILURES)
  assert parse.answer_start is None or 0 <= parse.answer_start < len(ids)
  lenient = parser.lenient(ids)
  assert lenient is None or sorted(lenient) == list(range(10))
  if parse.order:
    assert lenient == parse.order


ORDER = [3, 1, 2, 4, 5, 6, 7, 8, 9, 10]


def _object(numbers, **more):
  return json.dumps({
      'explanation': 'e', 'recommendations': list(map(str, numbers)), **more})


@pytest.mark.parametrize('text, failure', [
    (_object(ORDER), 'valid'),
    (' \n' + _object(ORDER) + '\n', 'valid'),
    ('', 'unparseable'),
    ('so: ' + _object(ORDER), 'unparseable'),
    (_object(ORDER)[:-1], 'unparseable'),
    (_object(ORDER, more=1), 'unparseable'),
    (json.dumps({'recommendations': list(map(str, ORDER))}), 'unparseable'),
    (json.dumps({'explanation': 'e', 'recommendations': ORDER}), 'unparseable'),
    (json.dumps({'explanation': 1, 'recommendations': ['1']}), 'unparseable'),
    ('{"recommendations": ["1"], ' + _object(ORDER)[1:], 'unparseable'),
    ('[' * 100_000, 'unparseable'),
    (_object([11, *ORDER[1:]]), 'out_of_set'),
    (_object([0, *ORDER[1:]]), 'out_of_set'),
    (_object(['03', *ORDER[1:]]), 'out_of_set'),
    (_object([' 3', *ORDER[1:]]), 'out_of_set'),
    (_object(['\u0663', *ORDER[1:]]), 'out_of_set'),
    (_object(['9' * 5000, *ORDER[1:]]), 'out_of_set'),
    (_object([11, 1, 1]), 'out_of_set'),
    (_object([1, *ORDER[1:]]), 'duplicate'),
    (_object([1, 1]), 'duplicate'),
    (_object(ORDER + [3]), 'duplicate'),
    (_object(ORDER[1:]), 'omission'),
    (_object([]), 'omission'),
])
def test_json_failures(text, failure):
  parse = PARSERS[prompts.JSON].strict(_json(text))
  assert parse.failure == failure
  assert PARSERS[prompts.JSON].strict(_json(text, eos=False)).failure == (
      'overflow')


@pytest.mark.parametrize('names, failure', [
    ([tokens.ANSWER, *_c(*ORDER)], 'valid'),
    (_c(*ORDER), 'unparseable'),
    ([], 'unparseable'),
    ([tokens.ANSWER, tokens.ANSWER, *_c(*ORDER)], 'unparseable'),
    ([tokens.ANSWER, *_c(*ORDER[:9]), tokens.REASON], 'out_of_set'),
    ([tokens.ANSWER, *_c(*ORDER), tokens.REASON], 'out_of_set'),
    ([tokens.ANSWER, *_c(1, *ORDER[1:])], 'duplicate'),
    ([tokens.ANSWER, *_c(*ORDER, 1)], 'duplicate'),
    ([tokens.ANSWER, *_c(*ORDER[1:])], 'omission'),
    ([tokens.ANSWER], 'omission'),
])
def test_compact_failures(names, failure):
  parser = PARSERS[prompts.COMPACT]
  parse = parser.strict(_compact(tokens.CANDIDATES, *names))
  assert parse.failure == failure
  assert parser.strict(_compact(*names, eos=False)).failure == 'overflow'


def _completed(*first):
  first = [n - 1 for n in first]
  return tuple(first + [c for c in range(10) if c not in first])


@pytest.mark.parametrize('text, order', [
    (_object([4, 4, 12, 'x', 2]), _completed(4, 2)),
    (json.dumps({'recommendations': [5, '6 ', None, True, 7.0]}),
     _completed(5, 6)),
    ('Sure! {"explanation": "see [1]", "recommendations": ["7", "3"',
     _completed(7, 3)),
    ('{"explanation": "\\"recommendations\\": [9]", "recommendations": [8]',
     _completed(8)),
    ('I choose [4, 2, 40] of 10', _completed(4, 2)),
    ('candidate 3 of 10', None),
    (_object([11, 0]), None),
    ('"recommendations": [' + '1' * 5000 + ', 2]', _completed(2)),
    ('', None),
])
def test_lenient_json(text, order):
  assert PARSERS[prompts.JSON].lenient(_json(text)) == order


@pytest.mark.parametrize('names, order', [
    ([*_c(9), tokens.ANSWER, *_c(4, 4), tokens.REASON, *_c(2)],
     _completed(4, 2)),
    ([*_c(9), tokens.REASON, *_c(3, 7)], _completed(3, 7)),
    ([*_c(9), tokens.ANSWER], None),
    ([*_c(9), tokens.REASON], None),
    ([], None),
])
def test_lenient_compact(names, order):
  assert PARSERS[prompts.COMPACT].lenient(_compact(*names)) == order
