"""Tests of the prepare stage: what it leaves, and how damage is told."""

import json
import pathlib
import runpy
import shutil

import pytest

from dgr2_jax.data import interactions
from dgr2_jax.data import prepare
from dgr2_jax.data import requests

_CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'quickstart.py'


def _directory(path):
  """A data directory with an item that has neither title nor brand."""
  path.mkdir()
  items = [{'item_id': f'i{i}', 'title': f'Item {i}' if i else '',
            'categories': ['Beauty', f'Leaf {i % 5}']} for i in range(30)]
  (path / 'items.jsonl').write_text(
      ''.join(json.dumps(item) + '\n' for item in items))
  (path / 'sequences.txt').write_text(''.join(
      f'u{u} ' + ' '.join(f'i{(u * 7 + k) % 30}' for k in range(6)) + '\n'
      for u in range(60)))
  return path


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  root = tmp_path_factory.mktemp('prepare')
  config = runpy.run_path(str(_CONFIG))['get_config']('smoke')
  config.data.update(source='directory', path=str(_directory(root / 'user')))
  prepare.prepare(config, root / 'data')
  return config, root / 'data'


def test_items_without_title_or_brand_survive(prepared):
  data = prepare.load(*prepared)
  assert data.items[0] == interactions.Item('i0', '', ('Beauty', 'Leaf 0'))
  assert data.describe([0])[0]['title'] == ''


def test_summary_is_for_the_report(prepared):
  summary = prepare.load(*prepared).summary
  assert summary['requests']['test'] > 0 and 'files' not in summary


@pytest.mark.parametrize('name', [
    'requests.npz', 'scores.npz', 'items.jsonl', 'test.array_record',
    'train.array_record.json', 'tokenizer/text.json'])
@pytest.mark.parametrize('fault', ['missing', 'bytes instead of', 'altered'])
def test_damaged_file_is_named(prepared, tmp_path, name, fault):
  config, directory = prepared
  shutil.copytree(directory, tmp_path / 'data')
  path = tmp_path / 'data' / name
  content = path.read_bytes()
  if fault == 'missing':
    path.unlink()
  else:
    path.write_bytes(content[:len(content) // 2] if fault != 'altered' else
                     content[:-1] + bytes([content[-1] ^ 1]))
  for call in prepare.prepare, prepare.load:
    with pytest.raises(interactions.DataError,
                       match=f'{name}: .*{fault}.*delete') as e:
      call(config, tmp_path / 'data')
    assert '\n' not in str(e.value)


@pytest.mark.parametrize('text', ['', '{"name": ', '[]', '{}', '\x00'])
def test_garbage_summary(prepared, tmp_path, text):
  config, directory = prepared
  shutil.copytree(directory, tmp_path / 'data')
  (tmp_path / 'data' / 'summary.json').write_text(text)
  with pytest.raises(interactions.DataError, match='summary.json: damaged'):
    prepare.load(config, tmp_path / 'data')


def test_what_a_killed_prepare_left_is_made_anew(prepared, tmp_path):
  config, directory = prepared
  (tmp_path / 'data.partial').mkdir()
  (tmp_path / 'data.partial' / 'debris').write_text('')
  (tmp_path / 'data.lists').mkdir()
  with pytest.raises(ValueError, match='--stage=prepare'):
    prepare.load(config, tmp_path / 'data')
  prepare.prepare(config, tmp_path / 'data')
  assert {path.name for path in tmp_path.iterdir()} == {'data'}
  for path in sorted(directory.iterdir()):
    if path.suffix in ('.npz', '.npy', '.jsonl', '.array_record'):
      assert (tmp_path / 'data' / path.name).read_bytes() == path.read_bytes()


def test_lists_of_a_trained_retriever_outlive_a_kill(
    prepared, tmp_path, monkeypatch):
  def killed(dataset, config, semantic_ids, keep):
    keep.mkdir()
    raise KeyboardInterrupt

  monkeypatch.setattr(requests, 'build_requests', killed)
  with pytest.raises(KeyboardInterrupt):
    prepare.prepare(prepared[0], tmp_path / 'data')
  assert {path.name for path in tmp_path.iterdir()} == {'data.lists'}


def test_bad_data_leaves_nothing(tmp_path, prepared):
  config = prepared[0].copy_and_resolve_references()
  user = _directory(tmp_path / 'user')
  (user / 'sequences.txt').write_text('u1 i0 i1 nowhere\n')
  config.data.path = str(user)
  with pytest.raises(interactions.DataError, match='sequences.txt:1'):
    prepare.prepare(config, tmp_path / 'data')
  assert {path.name for path in tmp_path.iterdir()} == {'user'}


@pytest.mark.parametrize('seed', [0, 1, 2])
def test_quickstart_is_neither_trivial_nor_hopeless(seed):
  """Its floor leaves room for a re-ranker, and its oracle is not perfect."""
  config = runpy.run_path(str(_CONFIG))['get_config']()
  config.seed = seed
  assert config.data.embedded.seed == config.boosted.seed == seed
  dataset = interactions.load_dataset(config.data)
  sets = requests.build_requests(dataset, config.data)
  for summary in sets.summaries.values():
    assert .25 < summary.floor['recall@1'] < .45
  oracle = prepare.oracle(config, dataset, sets.test)
  assert sets.summaries['test'].floor['recall@1'] + .2 < oracle['recall@1'] < .8
