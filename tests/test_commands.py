"""Every command of the documentation runs, as it stands there.

In one directory, as pages read on from each other. What would take minutes
takes few steps of a tiny model: that it runs, not that it learns. A command
that is not in `PLAN` fails: a new one belongs there.
"""

import functools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from tests.trace_generation import endpoint as endpoint_lib

ROOT = pathlib.Path(__file__).parents[1]
COMMAND = re.compile(
    r'^    ((?:make|pip|python3?|\.venv/bin/python) (?:.*\\\n)*.*)$', re.M)
FEW = ["--config.recipe=('ar_sft','convert','cft')",
       '--config.evaluate.thresholds=(0.9,)',
       '--config.evaluate.constrained_ar=False',
       '--config.evaluate.timing_requests=2',
       '--config.evaluate.timing_repetitions=1',
       '--config.data.max_train_requests=64', '--config.model.num_layers=1',
       '--config.boosted.iterations=10',
       *(f'--config.{stage}.{field}' for stage in ('ar_sft', 'cft')
         for field in ('steps=2', 'eval_every=2', 'eval_requests=16',
                       'checkpoint_every=2', 'batch_size=4'))]
PREPARE = ('--stage=prepare',)
# By page: how a command begins, and the arguments that make it short; None is
# what a test cannot do, installing and running all tests.
PLAN = {
    'README.md': [
        ('make quickstart', None), ('make test', None),
        ('python3 -m venv', None),
        ('dgr2_jax.main --config=configs/quickstart.py',
         [*FEW, '--config.data.embedded.num_users=120']),
        ('pytest', None),
        ('dgr2_jax.main --config=configs/forkme.py', PREPARE),
        ('dgr2_jax.rerank', ())],
    'CONTRIBUTING.md': [('make test', None), ('make parity', None),
                        ('pytest', None)],
    'docs/design.md': [('dgr2_jax.tools.huggingface', ())],
    'docs/evaluation.md': [
        ('pip install', None), ('dgr2_jax.tools.judge', ('--pairs=3',)),
        ('dgr2_jax.tools.compare', ())],
    # Programs that take minutes to compile; tests/tools/test_plan.py.
    'docs/scaling.md': [('dgr2_jax.tools.plan', None)],
    'docs/traces.md': [
        ('pip install', None), ('dgr2_jax.main', PREPARE),
        ('dgr2_jax.tools.generate_traces', ('--max_requests=30',
                                            '--max_attempts=2')),
        ('dgr2_jax.main --config=configs/quickstart_traces.py', PREPARE),
        # A model that has learned; tests/trace_generation/test_own_model.py.
        ('dgr2_jax.tools.generate_traces --workdir=DIR --stage', None)],
    'docs/your_data.md': [
        ('experiments/bookshop/make.py', ()),
        ('dgr2_jax.tools.check_data', ()), ('dgr2_jax.main', FEW),
        ('dgr2_jax.main --config=configs/forkme.py:smoke', PREPARE),
        ('dgr2_jax.rerank', ())]}


def text_of(page):
  return (ROOT / page).read_text(encoding='utf-8')


def commands_of(page):
  return [re.sub(r'\\\n *', '', c) for c in COMMAND.findall(text_of(page))]


class Shell:
  """Runs what a page says, with its paths below one directory."""

  def __init__(self, directory, endpoint):
    self.directory = directory
    for name in ('configs', 'experiments'):
      (directory / name).symlink_to(ROOT / name)
    self._paths = {
        '/tmp/': f'{directory}/', 'data.path=DIR': 'data.path=bookshop',
        'workdir=DIR': 'workdir=dgr2_quickstart',
        'DIR1 DIR2 --output=DIR': 'dgr2_quickstart bookshop_run --output=two',
        'DIR/responses/rl-': 'dgr2_quickstart/responses/cft-',
        'DIR/responses/': 'dgr2_quickstart/responses/',
        'quickstart.py': 'quickstart.py:smoke',
        'quickstart_traces.py': 'quickstart_traces.py:smoke',
        'http://localhost:8000/v1': endpoint}

  def here(self, text):
    for ours, mine in self._paths.items():
      text = text.replace(ours, mine)
    return text

  def run(self, *arguments):
    result = subprocess.run(
        [sys.executable, *arguments], cwd=self.directory, text=True,
        capture_output=True, check=False,
        env=os.environ | {'PYTHONPATH': str(ROOT)})
    assert result.returncode == 0, (arguments, result.stderr[-3000:])
    return result.stdout

  @functools.cache
  def follow(self, page):
    """Runs the commands of a page, once; the outputs by how they begin."""
    told = {}
    for (begins, few), command in zip(PLAN[page], commands_of(page)):
      if few is not None:
        python, *arguments = shlex.split(self.here(command))
        assert python.endswith('python')
        told[begins] = self.run(*arguments, *few)
    return told

  def lines(self, name):
    text = (self.directory / name).read_text(encoding='utf-8')
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope='module')
def shell(tmp_path_factory):
  def answer(body, before):  # the retriever's first, or its second
    if 'who judges' in body['messages'][0]['content']:
      return endpoint_lib.completion(json.dumps(dict(
          grounding=4, consistency=4, flow=4, identifiers=1,
          preference='tie')))
    return endpoint_lib.completion(endpoint_lib.faithful(body, 1 + before % 2))

  with endpoint_lib.serve(answer) as endpoint:
    yield Shell(tmp_path_factory.mktemp('reader'), endpoint.url)


def test_all_commands_are_planned():
  pages = [*ROOT.glob('*.md'), *ROOT.glob('docs/*.md')]
  names = [str(page.relative_to(ROOT)) for page in pages]
  assert set(PLAN) == {name for name in names if commands_of(name)}
  for page, plan in PLAN.items():
    commands = commands_of(page)
    assert len(commands) == len(plan), (page, commands)
    for command, (begins, _) in zip(commands, plan):
      assert re.match(rf'(\S*python (-m )?)?{re.escape(begins)}', command)


def test_make_does_what_the_readme_says():
  told = subprocess.run(
      ['make', '-n', 'quickstart', 'test'], cwd=ROOT, text=True, check=True,
      capture_output=True).stdout.replace('\\\n', ' ')
  told = [' '.join(line.split()) for line in told.splitlines()]
  by_hand = [c for c in commands_of('README.md') if c.startswith('.venv')]
  assert any(line.endswith(by_hand[0]) for line in told)
  assert by_hand[1] in told


def answers_what_was_asked(asked, told):
  assert [a['id'] for a in told] == [r['id'] for r in asked]
  for question, answer in zip(asked, told):
    assert sorted(answer['ranking']) == sorted(question['candidates'])
    assert {'valid', 'explanation', 'forwards'} <= set(answer)


def test_from_two_files_to_rankings(shell):
  page = 'docs/your_data.md'
  told = shell.follow(page)['dgr2_jax.tools.check_data']
  assert 'items                 300' in told and 'fault' not in told
  answers_what_was_asked(shell.lines('bookshop/requests.jsonl'),
                         shell.lines('bookshop/rankings.jsonl'))
  snippet, = re.findall(r'```python\n(.*?)```', text_of(page), re.S)
  assert "'book002'" in shell.run('-c', shell.here(snippet))


def follow_readme(shell):
  shell.follow('docs/your_data.md')  # for a directory of one's own
  shell.follow('README.md')


def test_readme(shell):
  follow_readme(shell)
  assert (shell.directory / 'dgr2_quickstart' / 'report.html').exists()
  assert (shell.directory / 'mine' / 'data').exists()
  answers_what_was_asked(shell.lines('dgr2_quickstart/data/requests.jsonl'),
                         shell.lines('rankings.jsonl'))


def test_export(shell):
  follow_readme(shell)
  shell.follow('docs/design.md')
  assert (shell.directory / 'OUT' / 'config.json').exists()


def test_evaluation(shell):
  follow_readme(shell)
  told = shell.follow('docs/evaluation.md')
  assert '3 of 3' in told['dgr2_jax.tools.judge']
  assert (shell.directory / 'two' / 'compare.html').exists()


def test_traces(shell):
  shell.follow('docs/traces.md')
  assert shell.lines('traces.jsonl')
  assert (shell.directory / 'quick_traces' / 'data').exists()
