"""Planted failures of every kind are caught; the template's traces pass."""

import dataclasses
import json
import time

import numpy as np
import pytest

from dgr2_jax.data import facts
from dgr2_jax.data import interactions
from dgr2_jax.data import parsing
from dgr2_jax.data import prompts
from dgr2_jax.data import tokens
from dgr2_jax.data import traces
from dgr2_jax.data import vocabulary
from dgr2_jax.evaluation import claims
from dgr2_jax.evaluation import reasoning
from tests.data import fabricated

C = 10


def _items(count=40):
  """Names with commas and points, many rare brands, some without any."""
  return [interactions.Item(
      f'id{i}', f'Gentle shampoo {i}',
      ('Root', f'Creams, No. {i % 5}') if i % 7 else (),
      f'Dr. {i % 6 + i % 2 * i}, Inc' if i % 4 else '')
          for i in range(count)]


def _checker(form, requests, **prompt):
  full = fabricated.config(form, **prompt)
  items = _items()
  template = prompts.Template(
      prompts.PromptConfig.from_config(full.prompt),
      vocabulary.build(full, items), items, fabricated.semantic_ids(), C)
  parser = parsing.Parser(template.tokenizer, form, C)
  return template, reasoning.Checker(
      requests, template, items, fabricated.semantic_ids(), parser)


def _named(values):
  return dict(zip(reasoning.CHECKS, values, strict=True))


@pytest.mark.parametrize('form', [prompts.COMPACT, prompts.JSON])
@pytest.mark.parametrize('grades', [False, True])
def test_the_template_passes_every_check(form, grades):
  requests = [fabricated.request(seed, history=seed % 4)
              for seed in range(24)]
  template, checker = _checker(form, requests, trace=dict(
      grades=grades, show_index=grades, pattern=traces.PATTERN,
      facts=('category', 'brand', 'bought_with_recent')))
  rng = np.random.default_rng(0)
  seen = set()
  for index, request in enumerate(requests):
    levels = rng.integers(0, 5, C)
    order = (np.argsort(-levels, kind='stable') if grades
             else rng.permutation(C))
    shown = template.prompt(request).shown
    response = template.response(request, order, shown, levels)
    verdicts = checker.check(index, response.ids)
    assert np.nanmin(verdicts) == 1, (_named(verdicts),
                                      checker.explanation(response.ids))
    seen |= {name for name, v in _named(verdicts).items() if v == 1}
    assert f'Candidate {order[0] + 1} fits best.' in checker.explanation(
        response.ids)
  expected = set(reasoning.CHECKS)
  if not grades:
    expected -= {'grades'}
    if form == prompts.COMPACT:
      expected -= {'novel'}
  assert seen == expected


# A request in the compact form: purchases, then what is said and what is true.
def _name(kind, index):
  return '' if kind == 'sid' else f'<|{kind}: {index % 8}|>'


def _request():
  levels = np.zeros((C, len(facts.FACTS)), np.int8)
  levels[:, facts.index('brand')] = np.arange(C) % 4
  levels[4, facts.index('follows')] = 3
  request = fabricated.request(0)
  return dataclasses.replace(
      request, history=np.array([1, 2, 2, 3]), facts=levels,
      candidates=np.array([4, 5, 6, 12, 13, 14, 20, 21, 22, 28]))


CONFIG = traces.TraceConfig(
    pattern=traces.PATTERN, facts=('brand', 'follows'), combine_facts=True,
    show_index=True, grades=True)
GRADES = (0, 0, 0, 0, 4, 0, 0, 0, 0, 0)
FIRST = 4  # whose facts are the best, and the only one graded
ORDER = (4, 0, 1, 2, 3, 5, 6, 7, 8, 9)


def _dense():
  names = ['<|category: 3|>', '<|category: 2|>', '<|brand: 2|>',
           '<|category: 5|>']
  for c in range(C):
    names += [tokens.candidate(c + 1),
              f'<|brand_{c % 4} follows_{3 if c == 4 else 0}|>',
              tokens.grade(GRADES[c])]
  return [*names, tokens.candidate(FIRST + 1)]


def _check_dense(names, first=FIRST, order=ORDER):
  items = [interactions.Item(f'{i}', f'{i}', (f'{i % 8}',), f'{i % 8}')
           for i in range(40)]
  truth = reasoning.truth_of(_request(), 4, items, _name)
  return reasoning.check(
      claims.read_compact(names, CONFIG, C), truth, first, order)


def _failed(verdicts):
  return {name for name, verdict in verdicts.items() if verdict is False}


def test_a_true_dense_trace_holds():
  assert set(_check_dense(_dense()).values()) == {True}


@pytest.mark.parametrize('change, failed', [
    # Neither in the history nor among the candidates.
    ({0: '<|category: 7|>'}, {'shown', 'pattern'}),
    ({2: '<|brand: 0|>'}, {'shown', 'pattern'}),
    ({3: '<|category: 0|>'}, {'shown', 'pattern'}),
    # A candidate's category or brand given to the history, and a purchase's
    # said to be wanted.
    ({0: '<|category: 5|>'}, {'placed', 'pattern'}),
    ({2: '<|brand: 6|>'}, {'placed', 'pattern'}),
    ({3: '<|category: 2|>'}, {'placed', 'pattern'}),
    # Of the history, but not what it is said to be.
    ({0: '<|category: 1|>'}, {'pattern'}),
    ({1: '<|category: 3|>'}, {'pattern'}),
    ({2: '<|brand: 1|>'}, {'pattern'}),
    ({3: '<|category: 4|>'}, {'pattern'}),
    ({0: tokens.NO_CATEGORY}, {'pattern'}),
    # Other facts of the first candidate, and of another.
    ({5: '<|brand_1 follows_0|>'}, {'facts'}),
    ({17: '<|brand_0 follows_2|>'}, {'facts'}),
    # Another choice, a candidate named twice, grades that say otherwise.
    ({-1: '<|c1|>'}, {'choice'}),
    ({7: '<|c1|>'}, {'novel'}),
    ({6: tokens.grade(3), 18: tokens.grade(1)}, {'grades'}),
    # No form.
    ({0: '<|brand: 2|>'}, {'form'}),
    ({2: '<|grade_1|>'}, {'form'}),
    ({5: '<|brand_1|>'}, {'form'}),
    ({-1: '<|c11|>'}, {'form'}),
    ({-1: tokens.REASON}, {'form'}),
])
def test_planted_failures_of_dense_traces(change, failed):
  names = _dense()
  for place, name in change.items():
    names[place] = name
  assert _failed(_check_dense(names)) == failed


def test_the_answer_decides_choice_and_grades():
  assert _failed(_check_dense(_dense(), first=0)) == {'choice'}
  assert _failed(_check_dense(_dense(), first=None)) == {'choice'}
  verdicts = _check_dense(_dense(), order=None)
  assert verdicts['grades'] is None and not _failed(verdicts)
  cut = _check_dense(_dense()[:-1])
  assert cut.pop('form') is False and set(cut.values()) == {None}


def test_grades_by_brute_force():
  rng = np.random.default_rng(1)
  for _ in range(300):
    grades, order = rng.integers(0, 3, 4).tolist(), rng.permutation(4).tolist()
    inversions = [(a, b) for i, a in enumerate(order) for b in order[i + 1:]
                  if grades[a] < grades[b]]
    assert reasoning.follows(grades, order) is not bool(inversions)


def sid(*codes):
  return tokens.semantic_id_text(codes)


BOUGHT, CANDIDATES = (sid(1, 1), sid(1, 2)), tuple(sid(2, c) for c in range(C))
FREE = (f'Pattern: {BOUGHT[0]} and {BOUGHT[1]} are soaps. Complement: a lotion '
        f'would go with {BOUGHT[0]}. Match: Candidate 3 ({CANDIDATES[2]}) is '
        f'one, {CANDIDATES[0]} is not. Candidate 3 fits best.')
TEMPLATE = (f'Pattern: the latest purchase is {BOUGHT[1]} from Soaps, Soaps is '
            'bought most, Ash is the leading brand. Complement: Lotions usually '
            'comes next. Match: by a brand of the history: 3, 1; popular: 2. '
            'Candidate 3 fits best.')


def _check_text(text, first=2):
  levels = np.zeros((C, len(facts.FACTS)), np.int8)
  levels[[2, 0], facts.index('brand')] = 1
  levels[1, facts.index('popularity')] = 2
  truth = reasoning.Truth(
      history=frozenset({*BOUGHT, 'Soaps', 'Ash'}),
      candidates=tuple(frozenset({c, 'Lotions', 'Birch'})
                       for c in CANDIDATES),
      pattern={'last': {BOUGHT[1]}, 'last_category': {'Soaps'},
               'frequent_category': {'Soaps'}, 'brand': {'Ash'},
               'wanted_category': {'Lotions'}},
      facts=levels, titles=('Candidate 77 soap', 'Soap'))
  read = claims.read_json(text, truth.history.union(*truth.candidates),
                          truth.titles, C)
  return reasoning.check(read, truth, first, tuple(range(C)))


@pytest.mark.parametrize('text', [FREE, TEMPLATE])
def test_true_texts_hold(text):
  assert not _failed(_check_text(text))
  assert not _failed(_check_text(text.replace('Complement:', (
      'There is Candidate 77 soap. Complement:'))))


@pytest.mark.parametrize('text, old, new, failed', [
    (FREE, BOUGHT[0], sid(7, 7), {'shown'}),
    (FREE, BOUGHT[0], BOUGHT[0][:-3], {'shown'}),
    (FREE, 'a lotion', 'Candidate 11', {'shown'}),
    (FREE, f'Pattern: {BOUGHT[0]}', f'Pattern: {CANDIDATES[5]}', {'placed'}),
    (FREE, f'({CANDIDATES[2]})', f'({CANDIDATES[1]})', {'placed'}),
    (FREE, f'({CANDIDATES[2]})', f'({BOUGHT[0]})', {'placed'}),
    (FREE, 'Candidate 3 fits', 'Candidate 1 fits', {'choice'}),
    (FREE, 'are soaps.', 'are soaps. A lotion would go well. A lotion would '
     'go well.', {'novel'}),
    (FREE, 'soaps', 'soft soaps soft soaps soft soaps', {'novel'}),
    (FREE, 'Match:', 'And', {'form'}),
    (FREE, 'fits best', 'it is', {'form'}),
    (TEMPLATE, BOUGHT[1], BOUGHT[0], {'pattern'}),
    (TEMPLATE, BOUGHT[1], CANDIDATES[1], {'placed', 'pattern'}),
    (TEMPLATE, 'from Soaps', 'from Combs', {'shown', 'pattern'}),
    (TEMPLATE, 'from Soaps', 'from Lotions', {'placed', 'pattern'}),
    (TEMPLATE, 'Ash is', 'Birch is', {'placed', 'pattern'}),
    (TEMPLATE, 'Lotions usually', 'Soaps usually', {'placed', 'pattern'}),
    (TEMPLATE, 'history: 3, 1', 'history: 3, 4', {'facts'}),
    (TEMPLATE, 'popular: 2', 'popular: 0', {'facts', 'shown'}),
    (TEMPLATE, 'popular: 2', 'popular: 2222', {'facts', 'shown'}),
    (TEMPLATE, 'popular: 2', 'popular: 2. Grades, 0 to 4: 0, 1, 1, 0, 0, 0, 0, '
     '0, 0, 0', {'grades'}),
])
def test_planted_failures_of_texts(text, old, new, failed):
  assert old in text
  assert _failed(_check_text(text.replace(old, new))) == failed


def test_repetition_by_brute_force():
  def brute(words):
    return any(words[i:i + p] * 3 == words[i:i + 3 * p]
               for p in range(1, 9) for i in range(len(words) - 3 * p + 1))

  rng = np.random.default_rng(0)
  for _ in range(300):
    words = rng.choice(list('abc'), size=rng.integers(0, 14)).tolist()
    assert claims.repeats(' '.join(words)) is brute(words), words
  assert not claims.repeats('Grades: 0, 0, 0, 0, 0')


@pytest.mark.parametrize('text', [
    '', '{', 'Pattern: ' * 3000, 'Pattern:' + 'a, ' * 5000,
    'Pattern: the latest purchase is ' + BOUGHT[0] + ' from ' + 'x, is bought '
    'most' * 2000 + '. Complement: x. Match: x. Candidate 1 fits best.',
    'Candidate ' + '9' * 5000 + ' fits best.', json.dumps({'a': 1})])
def test_garbage_is_read_quickly(text):
  begin = time.perf_counter()
  _check_text(text)
  assert time.perf_counter() - begin < 5
