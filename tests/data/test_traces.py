import dataclasses
import json

import numpy as np
import pytest

from dgr2_jax.data import boosted
from dgr2_jax.data import facts
from dgr2_jax.data import interactions
from dgr2_jax.data import tokens
from dgr2_jax.data import traces


def _item(category, brand):
  path = ('Root', category) if category else ()
  return interactions.Item('', '', path, brand)


ITEMS = [
    _item('Shampoo', 'A'), _item('Soap', 'B'), _item('Soap', ''),
    _item('', 'B'), _item('Shampoo', 'A'), _item('Conditioner "x"', 'C\n')]


def _levels(**columns):
  levels = np.zeros((3, len(facts.FACTS)), np.int8)
  for name, values in columns.items():
    levels[:, facts.index(name)] = values
  return levels


def _build(history, levels, choice=1):
  return traces.build(
      ITEMS, np.array(history, int), np.array([0, 5, 1]), levels, choice,
      ('brand', 'follows'))


def test_pattern():
  trace = _build([0, 1, 2, 3, 4], _levels(follows=[1, 3, 3], brand=[0, 2, 1]))
  assert trace.last == 4
  assert trace.last_category == ('Root', 'Shampoo')
  # Twice each: the one seen last wins.
  assert trace.frequent_category == ('Root', 'Shampoo')
  assert trace.brand == 'A'
  assert trace.wanted_category == ITEMS[5].categories
  np.testing.assert_array_equal(trace.matches, [[0, 1], [2, 3], [1, 3]])


def test_nothing_to_say():
  trace = _build([3], _levels())
  assert trace.last_category == trace.frequent_category == ()
  assert trace.wanted_category == ()
  said = ''.join(p.text for p in traces.prose(trace, lambda item: [])
                 if isinstance(p, tokens.Text))
  assert 'no candidate stands out' in said and 'Grades' not in said
  empty = _build([], _levels())
  assert empty.last is None and empty.brand == ''
  assert traces.prose(empty, lambda item: [])


def test_prose_is_the_inside_of_a_json_string():
  trace = _build([5], _levels(follows=[0, 5, 2], brand=[1, 0, 3]))
  pieces = traces.prose(trace, lambda item: [tokens.Special(f'<{item}>')])
  text = ''.join(p.text if isinstance(p, tokens.Text) else p.name
                 for p in pieces)
  said = json.loads(f'"{text}"')
  assert 'the latest purchase is <5> from Conditioner "x"' in said
  assert 'C\n is the leading brand' in said
  assert 'by a brand of the history: 3, 1;' in said
  assert 'of a type that usually comes next: 2, 3.' in said
  assert said.endswith('Candidate 2 fits best.')


def test_dense_form():
  trace = _build([0], _levels(follows=[0, 5, 2], brand=[1, 0, 3]))
  known = {'<|category: Root > Shampoo|>', '<|brand: A|>'}
  config = traces.TraceConfig(
      ('wanted_category', 'last_category', 'brand'), ('brand', 'follows'),
      combine_facts=False, show_index=True, grades=False)
  names = [p.name for p in traces.dense(trace, config, known)]
  assert names == [
      tokens.OTHER_CATEGORY, '<|category: Root > Shampoo|>', '<|brand: A|>',
      '<|c1|>', '<|brand_1|>', '<|follows_0|>',
      '<|c2|>', '<|brand_0|>', '<|follows_5|>',
      '<|c3|>', '<|brand_3|>', '<|follows_2|>', '<|c2|>']
  config = traces.TraceConfig((), ('brand', 'follows'), True, False, False)
  names = [p.name for p in traces.dense(trace, config, known)]
  assert names == [
      '<|brand_1 follows_0|>', '<|brand_0 follows_5|>', '<|brand_3 follows_2|>',
      '<|c2|>']
  assert set(names[:3]) <= set(config.names())
  assert len(config.names()) == 24


def test_dense_form_ends_a_candidate_with_its_grade():
  levels = _levels(brand=[1, 0, 3])
  scores = np.log([[.5, .02, .48]])
  config = traces.TraceConfig((), ('brand',), True, False, True)
  trace = traces.build(
      ITEMS, np.array([0]), np.array([1, 2, 3]), levels, 0, ('brand',),
      boosted.grades(scores)[0])
  names = [p.name for p in traces.dense(trace, config, ())]
  assert names == ['<|brand_1|>', '<|grade_4|>', '<|brand_0|>', '<|grade_0|>',
                   '<|brand_3|>', '<|grade_4|>', '<|c1|>']
  assert set(names[:6]) <= set(config.names())
  with pytest.raises(ValueError, match='prompt.trace.grades'):
    traces.dense(_build([0], levels), config, ())


def test_target_first():
  candidates = np.array([7, 3, 9, 4])
  assert traces.target_first(candidates, 9).tolist() == [2, 0, 1, 3]
  assert traces.target_first(candidates, 5).tolist() == [0, 1, 2, 3]


def _dense(trace, **changes):
  config = traces.TraceConfig(**{**dict(
      pattern=('last_category', 'brand'), facts=('brand', 'follows'),
      combine_facts=True, show_index=False, grades=True), **changes})
  known = {'<|category: Root > Shampoo|>', '<|brand: A|>'}
  return config, [p.name for p in traces.dense(trace, config, known)]


def test_dense_form_in_words():
  trace = dataclasses.replace(
      _build([0, 4], _levels(follows=[1, 3, 0], brand=[0, 2, 1])),
      grades=np.array([4, 0, 1]))
  config, names = _dense(trace)
  assert traces.readable(names, config, 3) == (
      'Latest purchase: Root > Shampoo. Leading brand: A. '
      'Candidate 1: by a brand of the history 0 of 3, of a type that usually '
      'comes next 1 of 5, grade 4. '
      'Candidate 2: by a brand of the history 2 of 3, of a type that usually '
      'comes next 3 of 5, grade 0. '
      'Candidate 3: by a brand of the history 1 of 3, of a type that usually '
      'comes next 0 of 5, grade 1. Candidate 2 fits best.')
  rare = dataclasses.replace(trace, brand='Z', last_category=())
  assert 'Latest purchase: no category. Leading brand: other brand.' in (
      traces.readable(_dense(rare)[1], config, 3))


@pytest.mark.parametrize('changes', [
    dict(combine_facts=False), dict(show_index=True), dict(grades=False),
    dict(facts=(), pattern=())])
def test_every_dense_form_has_words_and_nothing_else_does(changes):
  trace = dataclasses.replace(
      traces.build(ITEMS, np.array([0, 4]), np.array([0, 5, 1]),
                   _levels(follows=[1, 3, 0]), 2,
                   changes.get('facts', ('brand', 'follows'))),
      grades=np.array([4, 0, 1]))
  config, names = _dense(trace, **changes)
  words = traces.readable(names, config, 3)
  assert words.endswith('Candidate 3 fits best.')
  assert ('grade 4' in words) == config.grades
  for cut in range(len(names)):
    assert traces.readable(names[:cut], config, 3) is None
  assert traces.readable([*names, '<|c1|>'], config, 3) is None
  for broken in ('', 'x', '<|c9|>', '<|c|>', '<|grade_x|>'):
    assert traces.readable([*names[:-1], broken], config, 3) is None
