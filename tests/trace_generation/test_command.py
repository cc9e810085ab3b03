"""The command on a prepared working directory, and the recipe on its file."""

import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import threading
import time

from array_record.python import array_record_module
import pytest

from dgr2_jax.data import generated
from dgr2_jax.data import parsing
from dgr2_jax.data import prepare
from dgr2_jax.data import prompts
from dgr2_jax.data import records
from dgr2_jax.trace_generation import chat
from dgr2_jax.trace_generation import generation
from dgr2_jax.trace_generation import questions
from dgr2_jax.trace_generation import sampling
from dgr2_jax.training import validation
from dgr2_jax.training import workdir as workdir_lib
from tests.trace_generation import endpoint as endpoint_lib

_ROOT = pathlib.Path(__file__).parents[2]
_COUNT = 12


def _config(name):
  """A tiny one, quickly prepared."""
  path = _ROOT / 'configs' / name
  config = runpy.run_path(str(path))['get_config']('smoke')
  config.boosted.iterations = 2
  return config


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  config = _config('quickstart.py')
  root = tmp_path_factory.mktemp('run')
  workdir_lib.write_text(
      root / 'config.json', json.dumps(workdir_lib.to_json(config)))
  prepare.prepare(config, root / 'data')
  return root


def _start(workdir, url, output, *args):
  """The command, in its own process."""
  return subprocess.Popen(
      [sys.executable, '-m', 'dgr2_jax.tools.generate_traces',
       f'--workdir={workdir}', f'--base_url={url}', '--model=m',
       '--mode=targeted', f'--output={output}', f'--max_requests={_COUNT}',
       '--concurrency=3', *args],
      cwd=_ROOT, env={**os.environ, 'TRACES_API_KEY': 'sekret-1'}, text=True,
      stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _finish(process):
  """Exit code and all output."""
  out, err = process.communicate(timeout=300)
  return process.returncode, out + err


def _generate(workdir, url, output, max_requests=_COUNT, **config):
  """The same in this process, which is faster."""
  generation.generate(
      workdir, output, chat.EndpointConfig(url, backoff=.001),
      questions.QuestionConfig('m', questions.TARGETED),
      sampling.SamplingConfig(**config), 'sekret-1', max_requests)


def _shown(body, before=0):
  """A faithful answer with the target first, which the prompt shows."""
  del before
  number = int(body['messages'][1]['content'].rpartition(
      'went on to buy candidate ')[2].split('.')[0])
  return endpoint_lib.completion(endpoint_lib.faithful(body, number))


def _answered(output):
  """How many answers are on disk."""
  path = pathlib.Path(f'{output}.answers.jsonl')
  return path.read_text().count('\n') if path.exists() else 0


def test_killed_run_resumes_without_asking_again(workdir, tmp_path):
  output = tmp_path / 'traces.jsonl'
  release, lock, served = threading.Event(), threading.Lock(), []

  def respond(body, before):
    with lock:
      served.append(body)
      number = len(served)
    if number > 5:  # The rest are not answered before the kill.
      release.wait(300)
    return _shown(body)

  with endpoint_lib.serve(respond) as endpoint:
    process = _start(workdir, endpoint.url, output)
    deadline = time.monotonic() + 300
    while _answered(output) < 5:
      assert time.monotonic() < deadline and process.poll() is None
      time.sleep(.02)
    process.kill()
    _finish(process)
    assert _answered(output) == 5 and not output.exists()
    # A kill in the middle of writing leaves half a line.
    with open(f'{output}.answers.jsonl', 'a') as f:
      f.write('{"key": "0123", "cont')
    release.set()
    _generate(workdir, endpoint.url, output)
    assert all(endpoint.asked[endpoint_lib.key_of(body)] == 1
               for body in served[:5])  # those that were answered
    assert len(endpoint.asked) == _COUNT
    asked, written = endpoint.asked.total(), output.read_bytes()
    _generate(workdir, endpoint.url, output)
    assert endpoint.asked.total() == asked
    assert output.read_bytes() == written
    assert endpoint.keys == {'Bearer sekret-1'}
  assert len(generated.read(output)) == _COUNT
  report = json.loads(pathlib.Path(f'{output}.report.json').read_text())
  assert report['accepted'] == _COUNT and report['requests_given_up'] == []
  for path in tmp_path.iterdir():
    assert 'sekret' not in path.read_text()


def test_sigterm_waits_for_answers(workdir, tmp_path):
  output = tmp_path / 'traces.jsonl'
  release, begun = threading.Event(), threading.Barrier(4)

  def respond(body, before):
    if not release.is_set():
      begun.wait(300)
      release.wait(300)
    return _shown(body)

  with endpoint_lib.serve(respond) as endpoint:
    process = _start(workdir, endpoint.url, output)
    begun.wait(300)  # Three are under way.
    process.terminate()
    for line in process.stderr:
      if 'SIGTERM: waiting for the answers under way' in line:
        break
    release.set()
    code, text = _finish(process)
    assert code == 128 + signal.SIGTERM
    assert "9 of 12 requests are not settled: {'stopped by SIGTERM': 9}" in text
    assert 'The same command goes on.' in text and 'Traceback' not in text
    assert _answered(output) == 3 and not output.exists()
    _generate(workdir, endpoint.url, output)
    assert endpoint.asked.total() == len(endpoint.asked) == _COUNT


def test_useless_key(workdir, tmp_path):
  refusal = endpoint_lib.Reply(401, b'bad key sekret-1')
  with endpoint_lib.serve(lambda body, before: refusal) as endpoint:
    code, text = _finish(_start(
        workdir, endpoint.url, tmp_path / 'traces.jsonl'))
  assert code == 1 and not (tmp_path / 'traces.jsonl').exists()
  assert 'error: HTTP 401' in text and 'bad key ***' in text
  assert 'sekret' not in text and 'Traceback' not in text


def test_bad_command(workdir, tmp_path):
  code, text = _finish(_start(
      workdir, 'http://localhost/v1', tmp_path / 'x', '--extra_body={'))
  assert code == 1 and 'Traceback' not in text
  assert 'error: extra_body is not JSON' in text
  assert not list(tmp_path.iterdir())


def test_given_up_requests_are_listed(workdir, tmp_path):
  output = tmp_path / 'traces.jsonl'
  never = endpoint_lib.completion('no')
  with endpoint_lib.serve(lambda body, before: never) as endpoint:
    _generate(workdir, endpoint.url, output, max_requests=2, max_attempts=2)
  report = json.loads(pathlib.Path(f'{output}.report.json').read_text())
  assert [r['rejected'] for r in report['requests_given_up']] == [
      {'unparseable': 2}] * 2
  assert report['answers'] == 4 and output.read_text() == ''


def test_unavailable_requests_are_not_settled(workdir, tmp_path):
  output = tmp_path / 'traces.jsonl'

  with endpoint_lib.serve(
      lambda body, before: endpoint_lib.Reply(500)) as endpoint:
    with pytest.raises(generation.NotComplete, match='2 of 2 requests are not '
                       'settled: .*HTTP 500, after 9 tries.: 2'):
      _generate(workdir, endpoint.url, output, max_requests=2)
  assert not output.exists()


@pytest.mark.parametrize('change, reason', [
    ({'workdir': 'nowhere'}, 'nowhere/config.json: expected the config'),
    ({'output': 'nowhere/x'}, 'nowhere is no directory'),
    ({'output': '.'}, 'output is .*: a directory; expected the name of a fi'),
    ({'how': {'temperature': 0.}}, 'temperature is 0 and max_attempts 8')])
def test_bad_settings(workdir, tmp_path, change, reason):
  given = {'workdir': workdir, 'output': 'x', 'how': {}, **change}
  with pytest.raises((ValueError, workdir_lib.WorkdirError), match=reason):
    generation.generate(
        tmp_path / given['workdir'], tmp_path / given['output'],
        chat.EndpointConfig('http://localhost/v1'),
        questions.QuestionConfig('m', 'rejection', **given['how']),
        sampling.SamplingConfig())
  assert not list(tmp_path.iterdir())


def test_recipe_learns_from_the_file(workdir, tmp_path):
  """Half of the requests have a trace; the others are dropped."""
  output = tmp_path / 'traces.jsonl'
  with endpoint_lib.serve(_shown) as endpoint:
    _generate(workdir, endpoint.url, output, max_requests=128)
  config = _config('quickstart_traces.py')
  config.prompt.traces.update(path=str(output), missing='drop')
  validation.check(config)
  prepare.prepare(config, tmp_path / 'data')
  data = prepare.load(config, tmp_path / 'data')
  answers = generated.read(output)
  reader = array_record_module.ArrayRecordReader(
      str(data.record_file('train')))
  read = list(map(records.Record.from_bytes, reader.read_all()))
  reader.close()
  assert len(read) >= len(answers) > 0
  parser = parsing.Parser(data.tokenizer, prompts.JSON, 10)
  for record in read:
    request = data.requests('train')[record.example_id]
    answer = answers[generated.fingerprint(request, data.items)]
    parse = parser.strict(record.response)
    assert (parse.explanation, parse.order) == (
        answer.explanation, answer.order)
