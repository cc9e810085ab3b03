"""The filter rejects each kind of unfaithful trace and passes faithful ones."""

import dataclasses

import pytest

from dgr2_jax.data import faithfulness
from dgr2_jax.data import tokens
from tests.data import fabricated


def sid(*codes):
  return tokens.semantic_id_text(codes)


HISTORY = (sid(1, 2, 3), sid(4, 5, 6))
CANDIDATES = tuple(sid(7, 7, i) for i in range(4))
ALIEN = sid(1, 2, 9)
SEEN = faithfulness.View(
    history=HISTORY, candidates=CANDIDATES,
    titles=('Soap', 'The target is beauty', 'Candidate 9 cream', '', 'best'),
    target=2)
TEXT = (f'Pattern: {HISTORY[0]} and {HISTORY[1]} are soaps. Complement: a '
        f'lotion. Match: Candidate 3 ({CANDIDATES[2]}) is one, Candidate 1 is '
        'not. Candidate 3 fits best.')
FAITHFUL = faithfulness.Answer(TEXT, (2, 0, 1, 3))

UNFAITHFUL = {
    'not_a_permutation': dict(order=(2, 0, 1, 1)),
    'target_not_first': dict(order=(0, 2, 1, 3)),
    'malformed_sid': dict(
        explanation=TEXT.replace(HISTORY[1], HISTORY[1][:-1] + ' ')),
    'unknown_sid': dict(explanation=TEXT.replace(HISTORY[1], ALIEN)),
    'no_history_cited': dict(
        explanation=TEXT.replace(HISTORY[0], 'one').replace(
            HISTORY[1], CANDIDATES[1])),
    'unknown_candidate': dict(
        explanation=TEXT.replace('Candidate 1 is', 'Candidate 5 is')),
    'wrong_candidate_sid': dict(
        explanation=TEXT.replace(CANDIDATES[2], CANDIDATES[1])),
    'no_conclusion': dict(explanation=TEXT.removesuffix(' fits best.')),
    'wrong_conclusion': dict(
        explanation=TEXT.replace('Candidate 3 fits', 'Candidate 1 fits')),
    'leak': dict(explanation=TEXT.replace('a lotion', 'as the target is a '
                                          'lotion, that')),
}


def test_every_reason_is_planted():
  assert set(UNFAITHFUL) == set(faithfulness.REASONS)


@pytest.mark.parametrize('reason', UNFAITHFUL)
def test_unfaithful(reason):
  answer = dataclasses.replace(FAITHFUL, **UNFAITHFUL[reason])
  assert answer != FAITHFUL
  assert faithfulness.check(answer, SEEN) == reason


@pytest.mark.parametrize('text', [
    TEXT,
    TEXT.removesuffix('.').replace('fits best', 'FITS BEST'),
    TEXT.replace('fits best', 'fits\n best') + '\n',
    TEXT.replace(f'({CANDIDATES[2]})', f'is {CANDIDATES[2]} and'),
    TEXT.replace('a lotion', '"The target is beauty" or Candidate 9 cream'),
    TEXT.replace('a lotion', 'a cream for the target area'),
    TEXT.replace(HISTORY[1], 'others'),
    TEXT.replace('Candidate 1 is', 'candidates 1 and 2 are'),
])
def test_faithful(text):
  answer = dataclasses.replace(FAITHFUL, explanation=text)
  assert faithfulness.check(answer, SEEN) is None


def test_without_history_none_need_be_cited():
  seen = dataclasses.replace(SEEN, history=())
  text = 'No purchases to go by. Candidate 3 fits best.'
  assert faithfulness.check(
      faithfulness.Answer(text, (2, 0, 1, 3)), seen) is None


@pytest.mark.parametrize('text', ['', 'Candidate ' + '9' * 5000, '<' * 10_000,
                                  '<|sid_begin|>' * 3000,
                                  'candidate ' + ' ' * 20_000])
def test_odd_texts_are_rejected(text):
  assert faithfulness.check(
      faithfulness.Answer(text, (2, 0, 1, 3)), SEEN) is not None


def test_view_shows_what_the_prompt_shows():
  request = fabricated.request(3, history=5)
  items, ids = fabricated.items(), fabricated.semantic_ids()
  seen = faithfulness.view(request, 2, items, ids)
  assert seen.history == tuple(
      tokens.semantic_id_text(ids[i]) for i in request.history[-2:])
  assert len(seen.candidates) == 10 and len(seen.titles) == 12
  assert request.candidates[seen.target] == request.target
  assert faithfulness.view(request, 0, items, ids).history == ()
