"""Notebooks are executed, up to date and small, and run from the top."""

import pathlib
import runpy
import sys

import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[1]
COLAB = ROOT / 'colab'
BUILD = runpy.run_path(str(COLAB / 'build.py'))
CELLS = BUILD['cells']
SOURCES = sorted(set(COLAB.glob('*.py')) - {COLAB / 'build.py'})
# What makes a run short, by notebook.
FEW = {
    'block_diffusion': {'STEPS = 600': 'STEPS = 2'},
    'recipe': {"get_config('short')": """get_config('smoke')
config.recipe = ('ar_sft', 'convert', 'cft')
config.data.embedded.num_users = 120
config.evaluate.update(thresholds=(.9,), constrained_ar=False)
"""},
    'look_inside': {"['get_config']('short')": "['get_config']('smoke')"},
    'your_data': {'ar_sft.update(': """model.num_layers = 1
config.boosted.iterations = 10
config.data.max_train_requests = 64
config.ar_sft.update(eval_requests=16, checkpoint_every=2, """,
                  'cft.update(': """cft.update(
    eval_requests=16, checkpoint_every=2, """,
                  'steps=400, eval_every=400': 'steps=2, eval_every=2',
                  'steps=500, eval_every=500': 'steps=2, eval_every=2',
                  'batch_size=16': 'batch_size=4'}}


@pytest.fixture(scope='module')
def shared(tmp_path_factory):
  """Where notebooks keep their models: one goes on from another's."""
  return tmp_path_factory.mktemp('models')


def test_every_notebook_has_a_source():
  assert SOURCES and {path.stem for path in SOURCES} == {
      path.stem for path in COLAB.glob('*.ipynb')} == set(FEW)


@pytest.mark.parametrize('source', SOURCES, ids=lambda path: path.stem)
def test_what_is_committed_is_the_source_executed(source):
  path = source.with_suffix('.ipynb')
  notebook = nbformat.read(path, as_version=4)
  nbformat.validate(notebook)
  cells = notebook.cells
  outputs = [cell.pop('outputs', ()) for cell in cells]
  counts = [cell.pop('execution_count', None) for cell in cells]
  want = CELLS(source.stem, source.read_text(encoding='utf-8'))
  for cell in want:
    cell.pop('outputs', None)
    cell.pop('execution_count', None)
  assert cells == want
  assert not any(o.get('name') == 'stderr' for os in outputs for o in os)
  run = [c for c in counts if c]
  assert run == list(range(1, len(run) + 1)) and sum(map(bool, outputs)) > 3
  assert path.stat().st_size < 200_000


def test_badge_and_installation():
  title, install, first = CELLS(
      'one', '# %% [markdown]\n# # One\n#\n# Text.\n# %%\nx = 1\n')
  assert title.source.startswith('# One\n\n[![Open in Colab](')
  assert title.source.endswith(
      f'({BUILD["COLAB"]}/blob/main/colab/one.ipynb)\n\nText.')
  assert BUILD['COLAB'].startswith(
      'https://colab.research.google.com/github/dgr2')
  assert first.source == 'x = 1'
  exec(install.source, {})  # installed already: does nothing
  assert BUILD['REPOSITORY'] in install.source


@pytest.mark.parametrize('runtime, gpu, extra', [
    ({'TPU_ACCELERATOR_TYPE': 'v5e-1'}, False, '[tpu]'), ({}, True, '[cuda]'),
    ({}, False, '')])
def test_installation_on_colab(runtime, gpu, extra, monkeypatch):
  monkeypatch.delenv('TPU_ACCELERATOR_TYPE', raising=False)
  for name, value in runtime.items():
    monkeypatch.setenv(name, value)
  ran = []
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  monkeypatch.setattr('pathlib.Path.exists', lambda path: gpu and (
      path == pathlib.Path('/dev/nvidia0')))
  monkeypatch.setattr('subprocess.run', lambda a, check: ran.append(a))
  monkeypatch.setattr('sys.path', list(sys.path))
  exec(BUILD['INSTALL'], {})
  (git, *_, folder), (python, *_, what) = ran
  assert git == 'git' and python == sys.executable
  assert what == f'{folder}{extra}' and sys.path[0] == str(folder)
  monkeypatch.setattr('pathlib.Path.exists', lambda path: True)
  exec(BUILD['INSTALL'], {})  # again, where pip failed
  assert len(ran) == 3 and ran[2][0] == sys.executable


def drawn(notebook) -> list[int]:
  """The cells that show a figure."""
  return [i for i, c in enumerate(notebook.cells) if any(
      'image/png' in o.get('data', ()) for o in c.get('outputs', ()))]


# In the order of FEW: look_inside goes on from the model of recipe.
@pytest.mark.parametrize('source', [COLAB / f'{name}.py' for name in FEW],
                         ids=lambda path: path.stem)
def test_it_runs_from_the_top(source, tmp_path, shared, monkeypatch):
  text = source.read_text(encoding='utf-8')
  for long, short in FEW[source.stem].items():
    assert long in text
    text = text.replace(long, short)
  text = text.replace("'/tmp/", f"'{shared}/")
  few = tmp_path / source.name
  few.write_text(text, encoding='utf-8')
  monkeypatch.setenv('PYTHONPATH', str(ROOT))
  BUILD['build'](few, few.with_suffix('.ipynb'))
  built = nbformat.read(few.with_suffix('.ipynb'), as_version=4)
  nbformat.validate(built)
  assert [c.source for c in built.cells] == [
      c.source for c in CELLS(source.stem, text)]
  ran = [c for c in built.cells if c.cell_type == 'code']
  assert [c.execution_count for c in ran] == list(range(1, len(ran) + 1))
  committed = nbformat.read(COLAB / f'{source.stem}.ipynb', as_version=4)
  assert drawn(built) == drawn(committed)
