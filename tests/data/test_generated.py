"""Written traces: reading answers and files, and the records they become."""

import json

import numpy as np
import pytest

from dgr2_jax.data import faithfulness
from dgr2_jax.data import generated
from dgr2_jax.data import interactions
from dgr2_jax.data import parsing
from dgr2_jax.data import prompts
from dgr2_jax.data import records
from dgr2_jax.data import tokens
from tests.data import fabricated

ITEMS, SIDS = fabricated.items(), fabricated.semantic_ids()
REQUESTS = [fabricated.request(seed, history=3) for seed in range(6)]
# Texts that look like structure; stray parts of ids are rejected.
NASTY = [text for text in fabricated.NASTY if '<s_' not in text]
GOOD = {'explanation': 'why', 'recommendations': ['2', '1']}


@pytest.fixture(scope='module')
def template():
  return fabricated.template(prompts.JSON, traces={
      'path': 'traces.jsonl', 'missing': 'template'})


def answer(request, words='more of it'):
  """A faithful answer that is not in the template's order."""
  seen = faithfulness.view(request, 3, ITEMS, SIDS)
  number = seen.target + 1
  others = [c for c in reversed(range(10)) if c != seen.target]
  return faithfulness.Answer(
      f'Pattern: {seen.history[0]}, "{words}". Match: Candidate {number} '
      f'({seen.candidates[seen.target]}). Candidate {number} fits best.',
      (seen.target, *others))


def traces(answers, missing='template'):
  config = generated.TracesConfig('traces.jsonl', missing)
  return generated.Traces(
      config, {generated.fingerprint(r, ITEMS): a for r, a in answers}, ITEMS,
      SIDS)


@pytest.mark.parametrize('content', [
    json.dumps(GOOD), '<think>{"a": 1}</think>\n' + json.dumps(GOOD),
    'thoughts {1} </think>' + json.dumps(GOOD),
    f'Here it is:\n```json\n{json.dumps(GOOD, indent=1)}\n```',
    json.dumps({**GOOD, 'recommendations': [2, 1], 'more': 0})])
def test_answers(content):
  assert generated.parse(content) == faithfulness.Answer('why', (1, 0))


@pytest.mark.parametrize('content', [
    '', 'no', '{', '[]', '{}', '{"explanation": "x"}', '[' * 100_000,
    '{"a":' * 100_000, json.dumps(GOOD)[:-2],
    json.dumps({**GOOD, 'explanation': 3}),
    json.dumps({**GOOD, 'recommendations': '21'}),
    json.dumps({**GOOD, 'recommendations': [True]}),
    json.dumps({**GOOD, 'recommendations': ['two']}),
    json.dumps({**GOOD, 'recommendations': ['2.0']})])
def test_no_answers(content):
  assert generated.parse(content) is None


def test_file_round_trip(tmp_path):
  path = tmp_path / 'traces.jsonl'
  answers = {generated.fingerprint(r, ITEMS): answer(r, words)
             for r, words in zip(REQUESTS, NASTY)}
  path.write_text('\n'.join(json.dumps(
      {'request': key, **generated.as_fields(a), 'more': 1})
      for key, a in answers.items()))
  assert generated.read(path) == answers
  assert len(answers) == len(REQUESTS)


@pytest.mark.parametrize('line, reason', [
    ('{"request": "b"', 'malformed JSON'), ('3', 'expected a JSON object'),
    ('{"explanation": "x", "recommendations": ["1"]}', "field 'request'"),
    ('{"request": "b", "explanation": "x"}', "the fields 'explanation'"),
    ('{"request": "b", "explanation": "x", "recommendations": ["x"]}',
     "a list of candidate numbers"),
    ('{"request": "a", "explanation": "x", "recommendations": ["1"]}',
     'a second trace of request a, first on line 1')])
def test_malformed_files(tmp_path, line, reason):
  path = tmp_path / 'traces.jsonl'
  path.write_text(json.dumps({'request': 'a', **GOOD}) + f'\n\n{line}\n')
  with pytest.raises(interactions.DataError,
                     match=rf'traces\.jsonl:3: .*{reason}'):
    generated.read(path)


def test_missing_and_empty_files(tmp_path):
  with pytest.raises(interactions.DataError, match='no such file'):
    generated.read(tmp_path / 'traces.jsonl')
  (tmp_path / 'traces.jsonl').write_text('\n')
  with pytest.raises(interactions.DataError, match='traces.jsonl: empty'):
    generated.read(tmp_path / 'traces.jsonl')


def test_responses_hold_the_trace(template):
  parser = parsing.Parser(template.tokenizer, prompts.JSON, 10)
  known = [(r, answer(r, words)) for r, words in zip(REQUESTS, NASTY)]
  written = traces(known)
  got = list(records.build(REQUESTS, template, written=written))
  assert written.counts == {'used': len(REQUESTS)}
  begin = template.tokenizer.id(tokens.SID_BEGIN)
  for record, (request, a) in zip(got, known, strict=True):
    parse = parser.strict(record.response)
    assert parse.order == a.order
    # Half a surrogate pair is replaced; all else stays.
    assert parse.explanation == a.explanation.encode(
        'utf-8', 'replace').decode()
    assert parse.answer_start == np.argmax(record.is_answer)
    assert (record.response == begin).sum() == 2
    np.testing.assert_array_equal(record.prompt, template.prompt(request).ids)


def test_requests_without_a_trace(template):
  target = faithfulness.Answer('The target is', answer(REQUESTS[1]).order)
  known = [(REQUESTS[0], answer(REQUESTS[0])), (REQUESTS[1], target),
           (REQUESTS[2], answer(REQUESTS[2], 'long ' * 200))]
  plain = list(records.build(REQUESTS, template))
  written = traces(known)
  got = list(records.build(REQUESTS, template, written=written))
  assert written.counts == {
      'used': 1, 'absent': 3, 'too_long': 1, 'no_history_cited': 1}
  assert [r.to_bytes() for r in got[1:]] == [r.to_bytes() for r in plain[1:]]
  assert got[0].to_bytes() != plain[0].to_bytes()
  dropped = list(records.build(
      REQUESTS, template, written=traces(known, 'drop')))
  assert [r.to_bytes() for r in dropped] == [got[0].to_bytes()]


def test_traces_of_other_data_are_told(template):
  stranger = fabricated.request(99)
  with pytest.raises(interactions.DataError,
                     match=r'traces.jsonl: no trace fits .*absent 6'):
    list(records.build(REQUESTS, template,
                       written=traces([(stranger, answer(stranger))])))


@pytest.mark.parametrize('response_format, change, reason', [
    (prompts.COMPACT, {}, "expected prompt.response_format='json'"),
    (prompts.JSON, {'trace': {'grades': True}, 'answer_order': 'teacher'},
     'prompt.trace.grades=False'),
    (prompts.JSON, {'traces': {'path': '', 'missing': 'drop'}},
     r"prompt.traces.path is ''"),
    (prompts.JSON, {'traces': {'path': 'x', 'missing': 'skip'}},
     r"prompt.traces.missing is 'skip'")])
def test_bad_configuration(response_format, change, reason):
  config = fabricated.config(response_format, **{
      'traces': {'path': 'x', 'missing': 'drop'}, **change})
  with pytest.raises(ValueError, match=reason):
    prompts.PromptConfig.from_config(config.prompt)
