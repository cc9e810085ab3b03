"""The command that re-ranks a file of requests."""

import dataclasses
import fcntl
import io
import json
import os
import pathlib
import subprocess
import sys

import pytest

from dgr2_jax import rerank
from dgr2_jax.serving import reranker as reranker_lib
from tests.serving.prepared import Request
from tests.serving.prepared import described
from tests.serving.prepared import requests_of

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def command(reranker, monkeypatch, tmp_path):
  """Runs the command on lines; returns exit code, answers and errors."""
  monkeypatch.setattr(reranker_lib.Reranker, 'load',
                      lambda model, stage=None: reranker)

  def run(lines, *flags):
    (tmp_path / 'in.jsonl').write_bytes(b'\n'.join(lines))
    code = rerank.main(['--model=x', f'--input={tmp_path}/in.jsonl',
                        f'--output={tmp_path}/out.jsonl', '--batch_size=4',
                        *flags])
    read = lambda name: [
        json.loads(line) for line in (tmp_path / name).read_text().splitlines()
    ] if (tmp_path / name).exists() else []
    return code, read('out.jsonl'), read('out.jsonl.errors.jsonl')

  return run


def line_of(identifier, request, **more):
  return json.dumps({
      'id': identifier, 'history': list(request.history),
      'candidates': list(request.candidates), **more}).encode()


def test_command_answers_the_good_and_lists_the_bad(command, reranker):
  good = requests_of(reranker)
  lines = [
      line_of('a', good[0]), b'', b'{"id": "b"', b'[1]', b'\xff\xfe',
      line_of('c', good[1], user_id=good[1].user_id), line_of('a', good[2]),
      line_of(True, good[2]), line_of(3, good[2], rank=1),
      line_of('x' * (1 << 20), good[2]), line_of(3, good[2]),
      line_of('3', good[3]), line_of('\ud800\x00"\u2028é', good[4]),
      line_of('d', Request(['no'], [])), b'{"id": 5, "history": "abc"}',
      b'[' * 100_000, line_of('e', Request(['no', 17], [])),
      line_of('g', Request(['n' * 10_000], good[0].candidates)),
      *(line_of('f', Request(good[0].history, candidates)) for candidates in (
          [], good[0].candidates[:9], good[0].candidates[:1] * 10,
          good[0].candidates * 2))]
  code, answers, errors = command(lines)
  assert code == 2
  assert [a['id'] for a in answers] == ['a', 'c', 3, '3', '\ud800\x00"\u2028é']
  assert all(set(a) - {'failure'} == {
      'id', 'ranking', 'valid', 'explanation', 'forwards', 'request'}
             for a in answers)
  failures = [r.failure for r in reranker.rerank(good[:5])]
  assert [a.get('failure', 'valid') for a in answers] == failures
  assert [a['valid'] for a in answers] == [f == 'valid' for f in failures]
  assert [e['line'] for e in errors] == [
      3, 4, 5, 7, 8, 9, 10, *range(14, 23)]
  assert 'the same as in line 1' in errors[3]['error']
  assert max(len(e['error']) for e in errors) == 1000
  assert errors[-6]['error'].startswith('history: 17 in it, expected item ids')


def test_command_takes_items_that_the_catalogue_lacks(command, reranker):
  good = requests_of(reranker)[0]
  new = described(reranker, good.candidates[0], 'new')
  code, answers, _ = command([
      line_of('a', dataclasses.replace(
          good, candidates=[new, *good.candidates[1:]])), line_of('b', good)])
  assert code == 0 and answers[0]['new_items'] == ['new']
  assert sorted(answers[0]['ranking']) == sorted(['new', *good.candidates[1:]])
  assert 'new_items' not in answers[1]


def test_command_goes_on_where_it_stopped(command, reranker, tmp_path):
  good = requests_of(reranker)[:9]
  lines = [line_of(i, r) for i, r in enumerate(good)]
  code, want, errors = command(lines)
  assert (code, errors) == (0, [])
  assert [a['id'] for a in want] == list(range(9))
  output = tmp_path / 'out.jsonl'
  whole = output.read_bytes()
  for cut in (0, 10, len(whole) // 2, len(whole) - 1, len(whole)):
    output.write_bytes(whole[:cut])
    assert command(lines) == (0, want, [])
    assert output.read_bytes() == whole


def test_command_answers_no_request_with_the_answer_to_another(
    command, reranker):
  first, second, third = requests_of(reranker)[:3]
  assert command([line_of(1, first)])[0] == 0
  assert command([line_of(1, first), line_of(2, second)])[0] == 0
  code, answers, errors = command(
      [line_of(2, second), line_of(1, second), line_of(3, third)])
  assert code == 2 and [a['id'] for a in answers] == [1, 2, 3]
  (error,) = errors
  assert error['line'] == 2 and 'to another request' in error['error']
  # Nor with that to the same ten of a user who has bought more since.
  later = dataclasses.replace(
      first, history=[*first.history, second.history[0]])
  code, answers, errors = command([line_of(1, later)])
  assert (code, len(answers), len(errors)) == (2, 3, 1)


def test_command_can_be_interrupted(command, reranker, monkeypatch):
  good = requests_of(reranker)[:12]
  lines = [line_of(i, request) for i, request in enumerate(good)]
  stream = reranker.stream

  def interrupted(requests, **how):
    for count, answer in enumerate(stream(requests, **how)):
      if count == 5:
        raise KeyboardInterrupt
      yield answer

  with monkeypatch.context() as patch:
    patch.setattr(reranker, 'stream', interrupted)
    code, answers, _ = command(lines)
    assert code == 130 and [a['id'] for a in answers] == [0, 1, 2, 3, 4]
  code, answers, _ = command(lines)
  assert code == 0 and [a['id'] for a in answers] == list(range(12))


@pytest.mark.parametrize('program, flags, where', [
    ('rerank', ['--model=x', '--input=README.md', '--output=x'], 'here'),
    ('main', [f'--config={ROOT}/configs/quickstart.py', '--workdir=x'],
     'the last checkpoint')])
def test_command_ends_where_an_interruption_would_be_swallowed(
    program, flags, where):
  script = f'''
import runpy, signal, sys

class Callback:
  def __del__(self):  # as JAX's, of the garbage collection
    signal.raise_signal(signal.SIGINT)

class Finder:
  def find_spec(self, name, *unused_args):
    if name == 'jax':
      Callback()
      print('swallowed')

sys.meta_path.insert(0, Finder())
sys.argv[1:] = {flags}
runpy.run_module('dgr2_jax.{program}', run_name='__main__')
'''
  done = subprocess.run([sys.executable, '-c', script], capture_output=True,
                        text=True, check=False, cwd=ROOT)
  assert (done.returncode, done.stdout) == (130, '')
  assert done.stderr.endswith(f'the same command goes on from {where}.\n')
  reader, writer = os.pipe()
  os.close(reader)  # as of a `tee` that ended first
  done = subprocess.run(
      [sys.executable, '-c', script], stdout=subprocess.PIPE, stderr=writer,
      check=False, cwd=ROOT)
  os.close(writer)
  assert (done.returncode, done.stdout) == (130, b'')


def test_command_goes_on_where_nobody_reads_stderr(
    command, reranker, monkeypatch):
  class Gone(io.StringIO):
    def write(self, text):
      raise BrokenPipeError

  lines = [line_of(i, r) for i, r in enumerate(requests_of(reranker)[:5])]
  monkeypatch.setattr(rerank, '_pace', lambda terminal: {})
  monkeypatch.setattr(sys, 'stderr', Gone())
  code, answers, _ = command(lines)
  assert code == 0 and len(answers) == 5


@pytest.mark.parametrize('content, message', [
    ('[', 'not JSON'), ('[' * 100_000, 'not JSON'), ('[]', 'no settings of')])
def test_command_names_settings_that_are_none(
    command, reranker, tmp_path, capsys, content, message):
  lines = [line_of(0, requests_of(reranker)[0])]
  assert command(lines)[0] == 0
  path = tmp_path / 'out.jsonl.settings.json'
  before = json.loads(path.read_text())
  path.write_text(content)
  assert command(lines)[0] == 1
  assert message in capsys.readouterr().err
  # As another version has them: what is not there is null.
  path.write_text(json.dumps({**before, 'new': None} | {'mode': 'threshold'}))
  assert command(lines)[0] == 0


def test_command_keeps_off_other_files(command, reranker, tmp_path, capsys):
  output = tmp_path / 'out.jsonl'
  output.write_text('something else\n')
  with pytest.raises(ValueError):  # reading it back as answers
    command([line_of(1, requests_of(reranker)[0])])
  assert output.read_text() == 'something else\n'
  assert 'out.jsonl:1: no answer of this command' in capsys.readouterr().err


def test_command_keeps_its_input(command, reranker, tmp_path, capsys):
  line = line_of(1, requests_of(reranker)[0])
  path = tmp_path / 'requests.jsonl'
  for content in (line, line + b'\n'):
    path.write_bytes(content)
    assert rerank.main(
        ['--model=x', f'--input={path}', f'--output={path}']) == 1
    assert 'would be overwritten' in capsys.readouterr().err
    assert path.read_bytes() == content
  settings = tmp_path / 'new.settings.json'
  settings.write_bytes(line)
  assert rerank.main(['--model=x', f'--input={settings}',
                      f'--output={tmp_path / "new"}']) == 1
  assert 'would be overwritten' in capsys.readouterr().err
  assert settings.read_bytes() == line
  (tmp_path / 'out.jsonl').write_bytes(line)  # as an output
  assert rerank.main(['--model=x', f'--input={path}',
                      f'--output={tmp_path / "out.jsonl"}']) == 1
  assert (tmp_path / 'out.jsonl').read_bytes() == line
  assert 'no answer of this command' in capsys.readouterr().err


def test_command_says_where_its_output_is_none(
    command, reranker, tmp_path, capsys, monkeypatch):
  lines = [line_of(i, r) for i, r in enumerate(requests_of(reranker)[:3])]
  for output in (tmp_path, '/dev/null', '.'):
    assert command(lines, f'--output={output}')[0] == 1
    assert f'--output={output}: expected a file' in capsys.readouterr().err
  stream = reranker.stream

  def removing(requests, **how):
    for answer in stream(requests, **how):
      (tmp_path / 'out.jsonl').unlink(missing_ok=True)
      yield answer

  monkeypatch.setattr(reranker, 'stream', removing)
  assert command(lines)[0] == 1
  assert 'out.jsonl was removed meanwhile' in capsys.readouterr().err


def test_command_does_not_mix_settings_or_write_into_its_input(
    command, reranker, tmp_path, capsys):
  lines = [line_of(i, r) for i, r in enumerate(requests_of(reranker)[:3])]
  _, want, _ = command(lines)
  code, got, _ = command(lines, '--mode=ar')
  assert code == 1 and got == want
  assert "(mode 'threshold', now 'ar'; threshold 0.9, now None)" in (
      capsys.readouterr().err)
  with pytest.MonkeyPatch.context() as patch:  # trained anew in its place
    patch.setitem(reranker.identity, 'weights', 'others')
    assert command(lines)[:2] == (1, want)
  assert "weights '', now 'others'" in capsys.readouterr().err
  assert command(lines, '--batch_size=2') == (0, want, [])
  path = tmp_path / 'in.jsonl'
  before = path.read_bytes() + b'\n'
  path.write_bytes(before)
  assert rerank.main(['--model=x', f'--input={path}', f'--output={path}']) == 1
  assert path.read_bytes() == before


def test_command_waits_for_no_other_and_leaves_it_alone(
    command, reranker, tmp_path, capsys):
  lines = [line_of('a', requests_of(reranker)[0]), b'broken']
  _, want, errors = command(lines)
  with open(tmp_path / 'out.jsonl', 'rb') as other:
    fcntl.flock(other, fcntl.LOCK_EX)
    assert command(lines) == (1, want, errors)
  assert 'written by another process' in capsys.readouterr().err


def test_command_names_bad_flags(command, capsys):
  assert command([b''], '--mode=fast')[0] == 1
  assert '--mode=fast: expected threshold, ' in capsys.readouterr().err
  assert command([b''], '--batch_size=0')[0] == 1
  for flag in ('--threshold=7', '--answer_threshold=0', '--threshold=nan'):
    assert command([b''], '--mode=ar', flag)[0] == 1
    assert flag in capsys.readouterr().err
  assert command([b''])[:2] == (0, [])
