import dataclasses

import numpy as np
import pytest

from dgr2_jax.data import boosted
from dgr2_jax.data import interactions
from dgr2_jax.data import parsing
from dgr2_jax.data import prompts
from dgr2_jax.data import records
from dgr2_jax.data import tokens
from tests.data import fabricated

REQUESTS = [fabricated.request(seed, history=1 + seed % 6) for seed in range(9)]


@pytest.fixture(scope='module')
def template():
  return fabricated.template(prompts.COMPACT)


def test_bytes_round_trip(template):
  for record in records.build(REQUESTS, template):
    record = dataclasses.replace(record, supervised_from=record.example_id)
    again = records.Record.from_bytes(record.to_bytes())
    assert (again.example_id, again.dropped, again.supervised_from) == (
        record.example_id, record.dropped, record.supervised_from)
    for name in ('prompt', 'response', 'is_answer'):
      one, two = getattr(record, name), getattr(again, name)
      np.testing.assert_array_equal(one, two)
      assert one.dtype == two.dtype


def test_answer_orders(template):
  parser = parsing.Parser(template.tokenizer, prompts.COMPACT, 10)
  for record, request in zip(
      records.build(REQUESTS, template), REQUESTS, strict=True):
    order = parser.strict(record.response).order
    assert request.candidates[order[0]] == request.target
    assert list(order[1:]) == sorted(order[1:])
  taught = fabricated.template(prompts.COMPACT, answer_order='teacher')
  scores = np.random.default_rng(0).normal(size=(len(REQUESTS), 10))
  for record, score in zip(
      records.build(REQUESTS, taught, scores), scores, strict=True):
    order = parser.strict(record.response).order
    assert list(score[list(order)]) == sorted(score, reverse=True)
  with pytest.raises(ValueError, match='answer_order'):
    list(records.build(REQUESTS, taught))


def test_counterfactual_answers_follow_their_grades():
  taught = fabricated.template(
      prompts.COMPACT, answer_order='teacher', counterfactuals=.5,
      trace={'grades': True})
  parser = parsing.Parser(taught.tokenizer, prompts.COMPACT, 10)
  requests = REQUESTS * 20
  scores = np.random.default_rng(0).normal(size=(len(requests), 10)) * 2
  originals = list(records.build(requests, taught, scores))
  written = list(records.build_counterfactuals(requests, taught, scores, 1))
  assert .35 < len(written) / len(requests) < .65
  grade_of = {taught.tokenizer.id(tokens.grade(level)): level
              for level in range(boosted.NUM_GRADES)}
  candidate = [taught.tokenizer.id(tokens.candidate(i + 1)) for i in range(10)]
  moved = 0
  for record in written:
    grades = [grade_of[i] for i in record.response.tolist() if i in grade_of]
    order = sorted(range(10), key=lambda c: (-grades[c], c))
    assert parser.strict(record.response).order == tuple(order)
    assert record.response[record.supervised_from] == candidate[order[0]]
    assert record.supervised_from == np.argmax(record.is_answer) - 2
    original = originals[record.example_id - len(requests)]
    np.testing.assert_array_equal(record.prompt, original.prompt)
    # What is given differs from the teacher's in grades alone.
    given = slice(record.supervised_from)
    changed = original.response[given] != record.response[given]
    assert {*original.response[given][changed].tolist(),
            *record.response[given][changed].tolist()} <= set(grade_of)
    moved += changed.any()
  assert moved > .9 * len(written)
  again = records.build_counterfactuals(requests, taught, scores, 1)
  assert [r.to_bytes() for r in again] == [r.to_bytes() for r in written]
  with pytest.raises(ValueError, match='prompt.counterfactuals'):
    fabricated.template(prompts.COMPACT, counterfactuals=.5)


def test_training_responses_must_fit():
  template = fabricated.template(prompts.COMPACT, max_response=26)
  with pytest.raises(ValueError, match='takes 27 tokens: prompt.max_response'):
    list(records.build(REQUESTS, template))
  test = [fabricated.request(0, split='test')]
  record, = records.build(test, template)
  assert len(record.response) == len(record.is_answer) == 26  # a reference only


def test_statistics(tmp_path):
  # Room for the candidates and three history items of two tokens.
  template = fabricated.template(prompts.COMPACT, max_prompt=59)
  path = tmp_path / 'train.array_record'
  written = list(records.build(REQUESTS, template))
  statistics = records.write(path, written, template.tokenizer.pad_id)
  assert records.read_statistics(path) == statistics
  assert statistics.num_records == 9
  assert statistics.max_prompt == 59
  assert statistics.num_dropped_history == sum(
      min(len(r.history), 5) > 3 for r in REQUESTS)
  used = sum(len(r.prompt) + len(r.response) for r in written)
  assert statistics.padding_share(64, 32) == pytest.approx(1 - used / (9 * 96))
  assert sorted(p.name for p in tmp_path.iterdir()) == [
      'train.array_record', 'train.array_record.json']


def test_failure_leaves_nothing(tmp_path, template):
  def failing():
    yield from records.build(REQUESTS[:2], template)
    raise RuntimeError('broken')

  with pytest.raises(RuntimeError):
    records.write(tmp_path / 'a', failing(), 0)
  with pytest.raises(ValueError, match='no requests'):
    records.write(tmp_path / 'a', [], 0)
  assert not list(tmp_path.iterdir())
  with pytest.raises(interactions.DataError, match='a.json'):
    records.read_statistics(tmp_path / 'a')
  (tmp_path / 'a.json').write_text('{"num_records": 1}')
  with pytest.raises(interactions.DataError, match='a.json'):
    records.read_statistics(tmp_path / 'a')
