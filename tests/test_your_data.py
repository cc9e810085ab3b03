"""docs/your_data.md, followed to the letter with few steps."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / 'docs' / 'your_data.md').read_text(encoding='utf-8')
# A handful of steps of a tiny model: that it runs, not that it learns.
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


def test_from_two_files_to_rankings(tmp_path):
  def here(text):
    return text.replace('/tmp/', f'{tmp_path}/')

  def run(*command):
    result = subprocess.run(
        [sys.executable, *command], cwd=ROOT, text=True, capture_output=True,
        env=os.environ | {'PYTHONPATH': str(ROOT)}, check=False)
    assert result.returncode == 0, (command, result.stderr[-3000:])
    return result.stdout

  commands = [shlex.split(here(line.replace('\\\n', ' '))) for line in
              re.findall(r'^    (python (?:.*\\\n)*.*)$', PAGE, re.M)]
  names = [command[2 if command[1] == '-m' else 1] for command in commands]
  assert names == ['experiments/bookshop/make.py', 'dgr2_jax.tools.check_data',
                   'dgr2_jax.main', 'dgr2_jax.rerank']
  for name, command in zip(names, commands):
    stdout = run(*command[1:], *(FEW if name == 'dgr2_jax.main' else ()))
    if name == 'dgr2_jax.tools.check_data':
      assert 'items                 300' in stdout and 'fault' not in stdout
  folder = tmp_path / 'bookshop'
  asked, told = ([json.loads(line) for line in (folder / f'{name}.jsonl')
                  .read_text().splitlines()] for name in
                 ('requests', 'rankings'))
  assert [a['id'] for a in told] == [r['id'] for r in asked]
  for question, answer in zip(asked, told):
    assert sorted(answer['ranking']) == sorted(question['candidates'])
  snippet, = re.findall(r'```python\n(.*?)```', PAGE, re.S)
  assert "'book002'" in run('-c', here(snippet))
