"""Tests of the working directory: config check, lock, atomic writes."""

import json
import multiprocessing
import os

import ml_collections
import pytest

from dgr2_jax.training import workdir


def _config(**overrides):
  config = ml_collections.ConfigDict(dict(
      seed=1, mesh=dict(data=-1, fsdp=1), empty={},
      cft=dict(steps=10, keep=2, log_every=5),
      evaluate=dict(thresholds=(.9,), batch_size=64),
      prompt=dict(item_fields=('sid', 'title'), limit=None)))
  config.update_from_flattened_dict(
      {k.replace('__', '.'): v for k, v in overrides.items()})
  return config


def _open(path, config=None):
  with workdir.open_workdir(path, config or _config()) as root:
    return root


def test_creates_and_reopens(tmp_path):
  root = _open(tmp_path / 'a' / 'b')
  assert root == tmp_path / 'a' / 'b' and root.is_absolute()
  config = json.loads((root / 'config.json').read_text())
  assert config['prompt'] == {'item_fields': ['sid', 'title'], 'limit': None}
  before = (root / 'config.json').read_bytes()
  assert _open(root) == root
  assert (root / 'config.json').read_bytes() == before
  assert not [p for p in root.iterdir() if p.name.endswith('.tmp')]


def test_another_config_names_every_differing_field(tmp_path):
  _open(tmp_path)
  (tmp_path / 'checkpoints').mkdir()
  config = _config(cft__steps=20, prompt__item_fields=('sid',))
  config.cft.extra = True
  with config.unlocked():
    del config.seed
  with pytest.raises(workdir.WorkdirError) as e:
    _open(tmp_path, config)
  assert str(e.value).splitlines()[1:] == [
      '  config.cft.extra: absent there, true now',
      '  config.cft.steps: 10 there, 20 now',
      '  config.prompt.item_fields: ["sid", "title"] there, ["sid"] now',
      '  config.seed: 1 there, absent now']


@pytest.mark.parametrize('content, message', [
    ('[]', 'not a JSON object'), ('3', 'not a JSON object'),
    ('[' * 100_000, 'recursion'), ('{}', 'canvas is missing'),
    (dict(mesh='x'), 'mesh is missing, or no section'),
    (dict(recipe=[]), r'recipe is \[\], no list of stages'),
    (dict(recipe='cft'), "recipe is 'cft', no list"), ({}, '')])
def test_reads_the_config_of_a_working_directory(tmp_path, content, message):
  names = ('canvas', 'data', 'evaluate', 'mesh', 'model', 'prompt',
           'semantic_ids', 'tokenizer')
  if isinstance(content, dict):
    content = json.dumps({
        'recipe': ['cft'], **{name: {} for name in names}, **content})
  path = tmp_path / 'config.json'
  path.write_text(content)
  if message:
    with pytest.raises(workdir.WorkdirError, match=f'{path}: .*{message}'):
      workdir.read_config(tmp_path)
  else:
    assert workdir.read_config(tmp_path).recipe == ['cft']


def test_homes_of_nobody():
  for use in (_open, workdir.read_config):
    with pytest.raises(workdir.WorkdirError, match='~nosuchuser/x'):
      use('~nosuchuser/x')


def test_config_may_be_mended_while_nothing_was_made(tmp_path):
  _open(tmp_path)
  (tmp_path / 'data').mkdir()
  (tmp_path / 'data' / 'items.jsonl').write_text('half a stage')
  _open(tmp_path, _config(cft__steps=20))
  config = json.loads((tmp_path / 'config.json').read_text())
  assert config['cft']['steps'] == 20
  (tmp_path / 'data' / 'summary.json').write_text('{}')
  with pytest.raises(workdir.WorkdirError, match='cft.steps: 20 there, 10 now'):
    _open(tmp_path)


def test_fields_that_do_not_change_results_may_differ(tmp_path):
  _open(tmp_path)
  (tmp_path / 'checkpoints').mkdir()
  _open(tmp_path, _config(mesh__data=4, mesh__fsdp=2, cft__keep=5))
  _open(tmp_path, _config(evaluate__thresholds=(.9, .6)))
  config = json.loads((tmp_path / 'config.json').read_text())
  assert config['evaluate']['thresholds'] == [.9, .6]
  for field, value, message in (('cft__log_every', 7, 'log_every: 5 there, 7'),
                                ('evaluate__batch_size', 8, '64 there, 8 now')):
    with pytest.raises(workdir.WorkdirError, match=message):
      _open(tmp_path, _config(**{field: value}))


@pytest.mark.parametrize('text', ['', '{"seed": 1', '[]', '\x00'])
def test_corrupt_config(tmp_path, text):
  (tmp_path / 'config.json').write_text(text)
  with pytest.raises(workdir.WorkdirError, match='config.json is corrupt'):
    _open(tmp_path)
  assert (tmp_path / 'config.json').read_text() == text


def test_checkpoints_without_config(tmp_path):
  (tmp_path / 'checkpoints').mkdir()
  with pytest.raises(workdir.WorkdirError, match='no config.json'):
    _open(tmp_path)


def test_config_must_be_plain_data(tmp_path):
  config = _config()
  config.rate = float('nan')
  with pytest.raises(workdir.WorkdirError, match='config.rate is nan'):
    _open(tmp_path, config)
  assert not (tmp_path / 'config.json').exists()


@pytest.mark.parametrize('below', ['file', 'file/deeper'])
def test_not_a_directory(tmp_path, below):
  (tmp_path / 'file').write_text('')
  with pytest.raises(workdir.WorkdirError, match='Cannot write to the working'):
    _open(tmp_path / below)


@pytest.mark.skipif(os.geteuid() == 0, reason='root may write anywhere')
def test_unwritable(tmp_path):
  tmp_path.chmod(0o500)
  with pytest.raises(workdir.WorkdirError, match='Permission denied'):
    _open(tmp_path)


def test_urls_are_refused():
  with pytest.raises(workdir.WorkdirError, match='only mounted'):
    _open('gs://bucket/run')


def _try_open(path, results):
  try:
    _open(path)
    results.put('opened')
  except workdir.WorkdirError as e:
    results.put(str(e))


def test_two_processes_do_not_share_a_directory(tmp_path):
  context = multiprocessing.get_context('spawn')
  results = context.Queue()

  def attempt():
    process = context.Process(target=_try_open, args=(tmp_path, results))
    process.start()
    answer = results.get(timeout=60)
    process.join()
    return answer

  with workdir.open_workdir(tmp_path, _config()):
    assert f'is in use by another run (process {os.getpid()}' in attempt()
  assert attempt() == 'opened'


def test_atomic_write_leaves_the_old_file_on_failure(tmp_path, monkeypatch):
  path = tmp_path / 'report.md'
  workdir.write_text(path, 'é one')
  assert path.read_bytes() == 'é one'.encode()

  def fail(*unused_args):
    raise OSError('disk full')

  monkeypatch.setattr(os, 'fsync', fail)
  with pytest.raises(OSError, match='disk full'):
    workdir.write_bytes(path, b'two')
  assert path.read_text() == 'é one'
  assert list(tmp_path.iterdir()) == [path]


def test_checksums_tell_size_and_content(tmp_path):
  (tmp_path / 'a').mkdir()
  (tmp_path / 'a' / 'b').write_bytes(b'one')
  before = dict(workdir.checksums(tmp_path))
  assert before['a/b'][0] == 3
  (tmp_path / 'a' / 'b').write_bytes(b'two')
  assert dict(workdir.checksums(tmp_path))['a/b'] != before['a/b']
