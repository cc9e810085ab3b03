"""Judging against a stub endpoint: good, biased, broken and absent judges."""

import json
import re

import numpy as np
import pytest
from sklearn import metrics as sklearn_metrics

from dgr2_jax.data import tokens
from dgr2_jax.evaluation import judging
from dgr2_jax.tools import judge
from tests.trace_generation import endpoint as endpoint_lib

N = 12


def _item(name, **fields):
  return {'sid': tokens.semantic_id_text((1, 2)), 'title': name,
          'categories': ['Root', 'Leaf'], 'brand': 'Ash', **fields}


@pytest.fixture(name='files')
def make_files(tmp_path):
  """A reasons well for every request but each third, where B does."""
  lines = {'requests': [], 'a': [], 'b': []}
  for i in range(N):
    lines['requests'].append({
        'request': f'r{i}', 'target': 2,
        'history': [_item(f'"bought" {i} \ud800')],
        'candidates': [_item(f'candidate {i}.{c}', facts={'popularity': c})
                       for c in range(3)]})
    for name in 'ab':
      good = (name == 'a') == bool(i % 3)
      lines[name].append({
          'request': f'r{i}', 'order': [2, 0, 1], 'failure': 'valid',
          'explanation': f'{"sound" if good else "poor"} reasoning {i}'})
  for name, content in lines.items():
    _write(tmp_path / f'{name}.jsonl', content)
  return tmp_path


def _write(path, lines):
  path.write_text(''.join(json.dumps(line) + '\n' for line in lines))


def _shown(body):
  """Reasonings of a question, in the order they are shown."""
  return re.findall(r'reasoning: "(\w+)', body['messages'][1]['content'])


def fair(body, before=0):
  """Prefers and scores what is sound."""
  del before
  shown = _shown(body)
  if len(shown) == 1:
    high = shown[0] == 'sound'
    answer = {'grounding': 5 if high else 2, 'consistency': 4, 'flow': 3,
              'identifiers': int(high)}
  elif shown[0] == shown[1]:
    answer = {'preference': 'tie'}
  else:
    answer = {'preference': str(1 + shown.index('sound'))}
  return endpoint_lib.completion(
      f'<think>{{</think>Here:\n```{json.dumps(answer)}```')


def biased(body, before=0):
  """Prefers what is shown first."""
  if len(_shown(body)) == 1:
    return fair(body, before)
  return endpoint_lib.completion('{"preference": "1"}')


def _judge(files, url, *args, a='a', b='b', models=('m',)):
  judge.main([str(files / f'{a}.jsonl'), str(files / f'{b}.jsonl'),
              f'--base_url={url}', *(f'--model={m}' for m in models),
              f'--output={files / "out.json"}', '--backoff=.001', *args])
  return json.loads((files / 'out.json').read_text())


def test_a_fair_judge(files, capsys):
  with endpoint_lib.serve(fair) as endpoint:
    result = _judge(files, endpoint.url)
    asked = endpoint.asked.total()
    assert asked == len(endpoint.asked) == 4 * N
    again = _judge(files, endpoint.url)
    assert endpoint.asked.total() == asked and again == result
  found, = result['judges']
  assert found['verdicts'] == {'A': 8, 'B': 4, 'tie': 0}
  assert found['order_agreement']['rate'] == 1
  assert found['first_preferred']['rate'] == .5
  assert found['preferred_b_over_a']['mean'] == pytest.approx(-1 / 3)
  assert found['axes']['grounding']['A'] == pytest.approx((8 * 5 + 4 * 2) / 12)
  assert found['axes']['identifiers']['B'] == pytest.approx(1 / 3)
  assert found['axes']['flow']['interval'] == [0, 0]
  text = capsys.readouterr().out
  for line in ('A preferred 8 17', 'tie 0 24', 'grounding A / B 4.00 / 3.00'):
    assert line in ' '.join(text.split()), line
  assert 'Published, not measured here' in text


def test_position_bias_shows(files):
  with endpoint_lib.serve(biased) as endpoint:
    found, = _judge(files, endpoint.url)['judges']
  assert found['verdicts'] == {'A': 0, 'B': 0, 'tie': N}
  assert found['order_agreement']['rate'] == 0
  assert found['first_preferred']['rate'] == 1
  assert found['first_preferred']['interval'][0] > .5


def test_two_judges(files):
  def respond(body, before):
    return (fair if body['model'] == 'good' else biased)(body, before)

  with endpoint_lib.serve(respond) as endpoint:
    result = _judge(files, endpoint.url, models=('good', 'bad'))
  assert [j['model'] for j in result['judges']] == ['good', 'bad']
  assert result['agreement_of_judges']['agreement']['rate'] == 0
  assert result['agreement_of_judges']['kappa'] == 0


def test_it_is_blind(files):
  seen = []

  def respond(body, before):
    seen.append(body)
    return fair(body, before)

  with endpoint_lib.serve(respond) as endpoint:
    _judge(files, endpoint.url, '--pairs=3')
  assert len(seen) == 12
  for body in seen:
    text = json.dumps(body['messages'])
    for word in ('jsonl', 'target', 'autoregressive', 'diffusion', 'valid'):
      assert word not in text, word
    assert 'popular 2 of 5' in text and 'new order: 3, 1, 2' in text
    assert tokens.SID_BEGIN not in text  # nothing cites one


def test_no_order_is_shown_of_an_unusable_response():
  response = {'order': [0, 1], 'failure': 'valid', 'explanation': 'sound'}
  pair = judging.Pair({'history': [], 'candidates': []},
                      (response, response | {'failure': 'duplicate'}))
  text = judging.messages(pair, 'prefer_AB')[1]['content']
  assert 'Response 1, new order: 1, 2' in text
  assert 'Response 2, new order: none' in text and text.count('1, 2') == 1


def test_faults_garbage_and_a_resumed_run(files, capsys):
  def respond(body, before):
    if 'reasoning 0"' in body['messages'][1]['content']:
      return endpoint_lib.completion('I like both.')  # never an answer
    if before == 0:
      return endpoint_lib.Reply(429, headers=(('Retry-After', '0'),))
    if before == 1:
      return endpoint_lib.Reply(500)
    if before == 2:
      return endpoint_lib.completion('{"preference": "3", "grounding": 9}')
    return fair(body)

  with endpoint_lib.serve(lambda body, before: endpoint_lib.Reply(
      500)) as endpoint:
    with pytest.raises(SystemExit) as error:
      _judge(files, endpoint.url, '--retries=0')
  assert error.value.code == 1 and not (files / 'out.json').exists()
  assert 'The same command goes on.' in capsys.readouterr().err
  with endpoint_lib.serve(respond) as endpoint:
    found, = _judge(files, endpoint.url)['judges']
  assert found['compared'] == found['scored'] == N - 1
  assert found['asking']['rejected'] == {'unparseable': 4 * (N - 1) + 4 * 3}
  assert found['asking']['given_up'] == 4


@pytest.mark.parametrize('change, message', [
    ({'a': 'absent'}, 'absent.jsonl: no such file'),
    ({'b': 'other'}, 'are of different requests'),
    ({'b': 'broken'}, 'broken.jsonl:2: expected the fields request, order'),
    ({'b': 'silent'}, 'no request has reasoning in both files'),
    ({'models': ('a', 'b', 'c')}, '3 judges: expected one or two'),
    ({'models': ('a', 'a')}, 'the same judge twice'),
])
def test_bad_input(files, change, message):
  lines = [json.loads(x) for x in (files / 'b.jsonl').read_text().splitlines()]
  _write(files / 'other.jsonl', lines[:-1])
  _write(files / 'broken.jsonl', [lines[0], {'request': 'r1'}])
  _write(files / 'silent.jsonl', [{**x, 'explanation': ''} for x in lines])
  with pytest.raises(SystemExit, match=message):
    _judge(files, 'http://localhost:1/v1', **change)
  assert not (files / 'out.json').exists()


@pytest.mark.parametrize('flag, message', [
    ('--extra_body={', 'extra_body is not JSON: '),
    ('--extra_body=' + '[' * 100_000, 'extra_body is not JSON: '),
    ('--extra_body=[1]', r'extra_body is \[1\]: expected a JSON object'),
    ('--extra_body={"x": NaN}', 'which cannot be sent'),
    ('--extra_body={"x": "\\ud800"}', 'which cannot be sent'),
    ('--base_url=h:1/v1', '--base_url: 2 for 1 models')])
def test_bad_flags(files, flag, message):
  with pytest.raises(SystemExit, match=f'error: .*{message}'):
    _judge(files, 'http://localhost:1/v1', flag)


@pytest.mark.parametrize(
    'url', ['', 'localhost:8000', 'http://h/\x01', 'http://é' + 'é' * 99])
def test_bad_urls(files, url):
  with pytest.raises(SystemExit, match='error: base_url is .*: expected some'):
    _judge(files, url)


@pytest.mark.parametrize('reply, reason', [
    ('{"choices": null}', 'no chat completion'),
    ('{"choices": [{"message": null}]}', 'no chat completion'),
    ('{"choices": [{"message": {"content": null}}]}', 'no answer that can be')])
def test_replies_of_nulls_are_failures(files, capsys, reply, reason):
  with endpoint_lib.serve(lambda body, before: endpoint_lib.Reply(
      body=reply.encode())) as endpoint:
    with pytest.raises(SystemExit) as error:
      _judge(files, endpoint.url, '--pairs=1', '--retries=1')
  assert reason in capsys.readouterr().err + str(error.value)


def test_inputs_are_not_overwritten(files):
  before = (files / 'a.jsonl').read_bytes()
  for output, message in (('a.jsonl', 'would overwrite what is judged'),
                          ('.', 'expected a file')):
    with pytest.raises(SystemExit, match=message):
      _judge(files, 'http://localhost:1/v1', f'--output={files / output}')
  assert (files / 'a.jsonl').read_bytes() == before


def test_a_judge_that_says_nothing(files):
  with endpoint_lib.serve(
      lambda body, before: endpoint_lib.completion('Hm.')) as endpoint:
    with pytest.raises(SystemExit, match='no answer that can be read'):
      _judge(files, endpoint.url, '--pairs=2')


def test_models_of_one_name_at_two_endpoints(files):
  with endpoint_lib.serve(fair) as one, endpoint_lib.serve(biased) as other:
    result = _judge(files, one.url, f'--base_url={other.url}',
                    models=('m', 'm'))
    assert one.asked.total() == other.asked.total() == 4 * N
  assert result['agreement_of_judges']['kappa'] < 1


@pytest.mark.parametrize('question, content, expected', [
    ('prefer_AB', '{"preference": "1"}', 'A'),
    ('prefer_BA', '{"preference": 1}', 'B'),
    ('prefer_BA', '{"preference": "2"}', 'A'),
    ('prefer_AB', '{"preference": "Tie"}', 'tie'),
    ('prefer_AB', '{"preference": "A"}', None),
    ('prefer_AB', '[1]', None),
    ('prefer_AB', '', None),
    ('score_A', '{"grounding": 5, "consistency": 5, "flow": 5}', None),
    ('score_A', '{"grounding": 5, "consistency": 5, "flow": 0, '
     '"identifiers": 1}', None),
    ('score_B', '{"grounding": 5, "consistency": 5, "flow": NaN, '
     '"identifiers": 1}', None),
    ('score_A', '{"grounding": true, "consistency": 5, "flow": 5, '
     '"identifiers": 1}', None),
])
def test_answers(question, content, expected):
  assert judging.read(question, content) == expected


def test_kappa_agrees_with_scikit_learn():
  rng = np.random.default_rng(0)
  for n in (2, 10, 200):
    one, other = (rng.choice(judging.VERDICTS, n).tolist() for _ in range(2))
    other[:n // 2] = one[:n // 2]
    assert judging.kappa(list(zip(one, other))) == pytest.approx(
        sklearn_metrics.cohen_kappa_score(one, other))
  assert judging.kappa([('A', 'A')] * 3) is None
  assert judging.kappa([]) is None
