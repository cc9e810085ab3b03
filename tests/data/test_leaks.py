"""Reasoning that shows that it was told; honest reasoning passes."""

import re

import numpy as np
import pytest

from dgr2_jax.data import faithfulness
from dgr2_jax.data import leaks
from dgr2_jax.data import tokens
from dgr2_jax.data import traces
from dgr2_jax.trace_generation import questions
from tests.data import fabricated
from tests.data import test_faithfulness

H1, H2 = test_faithfulness.HISTORY
C1, C2, C3, C4 = test_faithfulness.CANDIDATES


def reason(words, titles=()):
  """Why a trace with these words is rejected."""
  text = (f'Pattern: {H1} is a soap. Complement: a lotion. Match: {words} '
          'Candidate 3 fits best.')
  return faithfulness.check(
      faithfulness.Answer(text, (2, 0, 1, 3)),
      faithfulness.View(test_faithfulness.HISTORY,
                        test_faithfulness.CANDIDATES, titles, 2))


def instruction(mode):
  """What a teacher is told in one mode: its sentences, and their clauses."""
  seen = faithfulness.View(
      test_faithfulness.HISTORY, test_faithfulness.CANDIDATES, (), 2)
  items = fabricated.items()
  how = questions.QuestionConfig('m', mode)
  return questions._messages(how, seen, items[:2], items[2:6])[1]['content']


def _told():
  hidden, shown = map(instruction, (questions.REJECTION, questions.TARGETED))
  assert shown.startswith(hidden)
  told = ' '.join(shown.removeprefix(hidden).split())
  sentences = re.split(r'(?<=\.) ', told)
  clauses = [c for c in re.split(r'[.,:] ?(?:and )?', told) if c]
  assert len(sentences) >= 2 and len(clauses) >= 4
  return [told, *sentences, *clauses]


TOLD = _told()


@pytest.mark.parametrize('words', TOLD)
def test_what_the_teacher_is_told_is_refused(words):
  first_person = re.sub(r'\byou\b', 'I', re.sub(r'\byour\b', 'my', words))
  for said in (words, words.upper(), words.replace(' ', '\n'), first_person,
               re.sub('shopper', 'customer', words),
               re.sub('buy', 'purchase', words),
               re.sub(r'candidate \d+', C3, words),
               re.sub(r'candidate (\d+)', r'**Candidate \1** (' + C3 + ')',
                      words),
               re.sub(r'candidate (\d+)', r'candidate #\1', words)):
    assert reason(said) == 'leak', said


LEAKS = [
    'Because he would go on to buy candidate 3.',
    'The subsequent purchase was candidate 3.',
    'The future purchase is candidate 3.',
    "The shopper's eventual purchase is candidate 3.",
    'This is confirmed by the later purchase of candidate 3.',
    'The known purchase is candidate 3.', 'The held-out item is candidate 3.',
    'The label is candidate 3.', 'The right choice is candidate 3.',
    'Candidate 3 is what came next.', 'Indeed, the customer purchased it.',
    'The user bought it next.', 'They did buy candidate 3.',
    'I must justify candidate 3.', 'We were asked to rank candidate 3 first.',
    'Knowing the outcome, candidate 3 goes first.',
    'Candidate 3 is the ground\u2014truth.', 'The tar\u200bget is candidate 3.',
    'so ' * 10_000,
    'The ground truth points there', 'the correct answer', 'the target item',
    'It was in fact bought next', 'the actual next item', 'as I was told',
    'she actually bought it', 'the true next purchase',
    'The answer is clear', 'the provided target',
    'Candidate 3 is the target.', 'The target, Candidate 3, is a lotion.',
    'It matches the target.', 'We know candidate 3 was purchased next.',
    'The next purchase was candidate 3.',
    'The shopper ended up buying candidate 3.',
    'So the correct choice is candidate 3.', 'It is the right answer.',
    'Put it first as instructed.', 'As instructed it comes first.',
    'As the prompt says, it comes first.', 'The prompt says so.',
    'Candidate 3 (target) is a lotion.', 'Target: candidate 3.',
    'It is the target lotion.', f'The shopper bought {C3}.',
    f'Candidate 3 ({C3}) was bought next.', f'{C3} was in fact bought.',
    'Candidate 3 was bought by the shopper.', 'Candidate 3 was purchased.',
    'Candidate 3 is what the shopper bought.',
    'The next purchase is candidate 3.', 'In hindsight a lotion made sense.',
    'The customer chose candidate 3.', 'They eventually bought a lotion.',
    'I was given the answer.', 'I already know that it is a lotion.',
    'The "target" is a lotion.', 'The **correct answer** is a lotion.',
    'I have been told so.', 'The gold label is candidate 3.',
    'Candidate 3 is the correct one.', 'Candidate 3 is correct.',
    'Candidate 3 is the next purchase.', 'I rank it first as requested.',
    "I've known it from the start.", 'The ground-truth is candidate 3.']


@pytest.mark.parametrize('words', LEAKS)
def test_leaks(words):
  assert reason(words) == 'leak'


HONEST = [
    'It is made for the target area.', 'It targets dry skin.',
    'The target audience is people with curly hair.',
    'A serum to target dark spots comes next.', 'It is targeted at men.',
    'The shopper will most likely buy a conditioner next.',
    'A conditioner usually comes next.',
    'The next purchase is likely a lotion, which Candidate 3 is.',
    'The next purchase would be a styling product.',
    'Candidate 1 is bought together with the latest purchase.',
    'Candidate 2 is often bought right after a shampoo.',
    'bought together with the history: 3, 1, 2; popular: 1, 3.',
    f'The shopper bought {H1} and then {H2}.',
    f'After {H1} they purchased {H2}, of the same brand.',
    'I would rank candidate 3 above candidate 1.',
    'Candidate 2 is popular, but of another brand.',
    f'Candidate 3 ({C3}) is a lotion, Candidate 1 ({C1}) is a soap.',
    f'Unlike candidate 1, {C2} is no soap.',
    f'Compared with {C1}, candidate 3 is closer to {H1}.',
    f'Candidate 3 is closer to {C2} than to {C1}.',
    f'{C1} is like candidate 2, a soap.',
    f'{C2} and candidate 3 are lotions; {C4} is neither.',
    f'Candidate 1 and {C2} are soaps.',
    f'{C3} (Candidate 3) is a lotion of the right size.',
    f'**Candidate 3** {C3} is the right choice for dry skin.',
    f'Candidate 2, {C2}, is a known brand.',
    'Given the purchases, a lotion is the expected type.',
    'The purchases suggest a routine that lacks a conditioner.',
    'It is the true to scent kind, in the correct size.',
    'The answer to dry skin is a lotion.',
    'Every purchase so far is known to be for children.',
    'It prompts a second purchase.', 'I know of no closer match.',
]


@pytest.mark.parametrize('words', HONEST)
def test_honest_reasoning(words):
  assert reason(words) is None


@pytest.mark.parametrize('seed', range(6))
def test_template_traces_are_honest(seed):
  request = fabricated.request(seed)
  items, sids = fabricated.items(), fabricated.semantic_ids()
  trace = traces.build(
      items, request.history, request.candidates, request.facts, seed,
      tuple(traces.PHRASES), grades=np.arange(10) % 5)
  text = ''.join(
      getattr(piece, 'text', None) or piece.name for piece in traces.prose(
          trace, lambda item: tokens.from_semantic_id_text(
              tokens.semantic_id_text(sids[item].tolist()))))
  assert text.endswith(f'Candidate {seed + 1} fits best.')
  view = faithfulness.view(request, 4, items, sids)
  assert not leaks.told(text, (), view.candidates)
  assert not leaks.told(text, view.titles, view.candidates)


@pytest.mark.parametrize('titles', [
    ('Target', 'the'), ('The target', 'is'), ('A target', 'candidate'),
    ('is', 'answer', '', '  ')])
def test_short_titles_hide_nothing(titles):
  assert reason('The target is candidate 3.', titles) == 'leak'
  assert reason('the target is candidate 3.', titles) == 'leak'


def test_titles_may_say_anything():
  titles = ('The target is beauty', 'Ground truth\tcoffee (as instructed)',
            'Candidate 9 cream')
  words = 'The target is beauty, Ground truth coffee (as instructed).'
  assert reason(words + ' Candidate 9 cream is near.', titles) is None
  assert reason(words) == 'leak'
  # What stands around a title is not joined.
  assert reason('It is the Candidate 9 cream target group.', titles) is None


@pytest.mark.parametrize('words', [
    f'Candidate 3 is {C2}.', f'Candidate #3 {C2} is.', f'Candidate 3: {C2}.',
    f'{C2} (candidate 3) is.', f'{C2} (Candidate #3) is.',
    f'{H2} [candidate 3]',
    f'**Candidate 3** ({C2}) is.', f'Candidate 3, {C2}, is.',
    f'Candidate no. 3 {C2} is.', f'{C2} is candidate 3.',
    f'Candidate 3 \u2013 {C2} is.', f'Candidate 3 with id {C2} is.',
    f'Candidate 3\n  ({C2})', f'Candidate3 {C2}'])
def test_wrong_sid_of_a_candidate(words):
  assert reason(words) == 'wrong_candidate_sid'
  assert reason(words.replace(C2, C3).replace(H2, C3)) is None


@pytest.mark.parametrize('text', [
    'candidate ' * 3000, 'candidate 3' + ' ' * 20_000, 'the target ' * 3000,
    'as ' * 9000, '(' * 20_000, 'target ' * 4000, 'was then ' * 4000,
    'candidate 3 was ' * 2000, 'shopper then actually ' * 2000])
def test_long_texts_take_no_time(text):
  leaks.told(text, ('Two words', 'as as'), (C1, C2))
  faithfulness.mentions(text)
