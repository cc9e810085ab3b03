"""Notebooks are executed, up to date and small, and run from the top."""

import json
import os
import pathlib
import runpy
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
COLAB = ROOT / 'colab'
CELLS = runpy.run_path(str(COLAB / 'build.py'))['cells']
SOURCES = sorted(set(COLAB.glob('*.py')) - {COLAB / 'build.py'})
# What makes a run short.
FEW = {'STEPS = 600': 'STEPS = 2'}


def test_every_notebook_has_a_source():
  assert SOURCES and {path.stem for path in SOURCES} == {
      path.stem for path in COLAB.glob('*.ipynb')}


@pytest.mark.parametrize('source', SOURCES, ids=lambda path: path.stem)
def test_what_is_committed_is_the_source_executed(source):
  path = source.with_suffix('.ipynb')
  cells = json.loads(path.read_text(encoding='utf-8'))['cells']
  outputs = [cell.pop('outputs', ()) for cell in cells]
  counts = [cell.pop('execution_count', None) for cell in cells]
  want = CELLS(source.read_text(encoding='utf-8'))
  for cell in want:
    cell.pop('outputs', None)
    cell.pop('execution_count', None)
  assert cells == want
  run = [c for c in counts if c]
  assert run == list(range(1, len(run) + 1)) and sum(map(bool, outputs)) > 3
  assert path.stat().st_size < 200_000


@pytest.mark.parametrize('source', SOURCES, ids=lambda path: path.stem)
def test_it_runs_from_the_top(source, tmp_path):
  shutil.copy(COLAB / 'build.py', tmp_path)
  text = source.read_text(encoding='utf-8')
  for long, short in FEW.items():
    assert long in text
    text = text.replace(long, short)
  (tmp_path / source.name).write_text(text, encoding='utf-8')
  result = subprocess.run(
      [sys.executable, str(tmp_path / 'build.py')], text=True,
      capture_output=True, check=False,
      env=os.environ | {'PYTHONPATH': str(ROOT)})
  assert result.returncode == 0, result.stderr[-3000:]
  built = json.loads((tmp_path / f'{source.stem}.ipynb').read_text('utf-8'))
  assert [c['source'] for c in built['cells']] == [
      c['source'] for c in CELLS(text)]
