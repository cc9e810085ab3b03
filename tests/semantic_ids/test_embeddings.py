"""Tests of where text embeddings come from, and of what is refused."""

import json
import sys

import numpy as np
import pytest

from dgr2_jax.data import interactions
from dgr2_jax.semantic_ids import embeddings
from tests.data import shoppers

ITEMS = shoppers.make(0).items


def embed_npy(path, matrix):
  np.save(path, matrix)
  return embeddings.embed(
      ITEMS, embeddings.EmbeddingConfig('npy', str(path)), None)


def test_a_matrix_is_scaled_to_unit_rows(tmp_path):
  matrix = np.random.default_rng(0).normal(size=(len(ITEMS), 3))
  matrix[1] = 0
  found = embed_npy(tmp_path / 'a.npy', matrix.astype(np.float16))
  assert found.dtype == np.float32
  norms = np.linalg.norm(found, axis=1)
  np.testing.assert_allclose(np.delete(norms, 1), 1, rtol=1e-5)
  assert norms[1] == 0
  np.testing.assert_allclose(
      found[0] * np.linalg.norm(matrix[0]), matrix[0], rtol=.01, atol=.01)


@pytest.mark.parametrize('scale', [1e200, 1e-20, 1e-200, 1e300])
def test_a_matrix_of_any_scale_is_the_same(tmp_path, scale):
  matrix = np.random.default_rng(0).normal(size=(len(ITEMS), 3))
  np.testing.assert_allclose(
      embed_npy(tmp_path / 'a.npy', scale * matrix),
      embed_npy(tmp_path / 'b.npy', matrix), atol=1e-6)


@pytest.mark.parametrize('matrix, message', [
    (np.ones((len(ITEMS) - 1, 3)), r'shape \(19, 3\): expected \[20, E\]'),
    (np.ones(len(ITEMS)), r'shape \(20,\): expected'),
    (np.ones((len(ITEMS), 0)), 'expected'),
    (np.where(np.arange(20)[:, None] == 7, np.nan, np.ones((20, 2))),
     '1 of 20 rows hold NaN or infinity, the first is row 7'),
    (np.ones((len(ITEMS), 3), np.int64), 'floating-point'),
    (np.zeros((len(ITEMS), 3)), '20 of 20 rows are all zero'),
    (np.eye(20, 3) * 1e9, '17 of 20 rows are all zero'),
])
def test_bad_matrices(tmp_path, matrix, message):
  with pytest.raises(interactions.DataError, match=message):
    embed_npy(tmp_path / 'a.npy', matrix)


def test_no_matrix(tmp_path):
  (tmp_path / 'text.npy').write_text('no numbers')
  for path in (f'{tmp_path}/text.npy', f'{tmp_path}/missing.npy',
               '~nosuchuser/x.npy'):
    with pytest.raises(interactions.DataError, match=f'{path}: no .npy file'):
      embeddings.embed(
          ITEMS, embeddings.EmbeddingConfig('npy', path), None)


@pytest.mark.parametrize('fields, message', [
    (('word2vec', 'x'), "kind is 'word2vec': expected one of"),
    (('npy', ''), "expected a path with kind='npy'"),
    (('tfidf', 'x'), "expected none with kind='tfidf'"),
])
def test_bad_configs(fields, message):
  with pytest.raises(ValueError, match=message):
    embeddings.EmbeddingConfig(*fields)


def encode(path):
  return embeddings.embed(
      ITEMS, embeddings.EmbeddingConfig('huggingface', str(path)), None)


def test_an_encoder_needs_its_files_and_packages(tmp_path, monkeypatch):
  with pytest.raises(interactions.DataError, match='no config.json'):
    encode(tmp_path)
  (tmp_path / 'config.json').write_text('{}')
  monkeypatch.setitem(sys.modules, 'torch', None)  # as if not installed
  with pytest.raises(ValueError, match='needs the packages torch and'):
    encode(tmp_path)
  (tmp_path / '1_Pooling').mkdir()
  (tmp_path / '1_Pooling' / 'config.json').write_text(
      json.dumps({'pooling_mode_max_tokens': True}))
  with pytest.raises(interactions.DataError, match='pooling_mode_max_tokens'):
    encode(tmp_path)


def write_modules(path, *modules):
  (path / 'config.json').write_text('{}')
  (path / 'modules.json').write_text(json.dumps([
      {'idx': i, 'path': folder, 'type': f'sentence_transformers.models.{kind}'}
      for i, (kind, folder) in enumerate(modules)]))


@pytest.mark.parametrize('modules', [
    [('Transformer', ''), ('Pooling', '1_Pooling'), ('Dense', '2_Dense')],
    [('Transformer', '0_Transformer'), ('Pooling', '1_Pooling')],
    [('Transformer', ''), ('Pooling', '1_P'), ('Pooling', '2_P')],
    [('WordEmbeddings', '')]])
def test_modules_that_would_be_left_out(tmp_path, modules):
  write_modules(tmp_path, *modules)
  with pytest.raises(interactions.DataError, match='modules.json: modules .*'
                     'expected a Transformer'):
    encode(tmp_path)


@pytest.mark.parametrize('text', ['', '{}', '[]', '[{"path": ""}]', '3'])
def test_malformed_modules(tmp_path, text):
  write_modules(tmp_path)
  (tmp_path / 'modules.json').write_text(text)
  with pytest.raises(interactions.DataError, match='modules.json'):
    encode(tmp_path)


def test_a_dense_layer_without_a_list_of_modules(tmp_path):
  (tmp_path / 'config.json').write_text('{}')
  (tmp_path / '2_Dense').mkdir()
  with pytest.raises(interactions.DataError, match="modules .'Dense'.: "):
    encode(tmp_path)


@pytest.mark.parametrize('fields, expected', [
    ({'pooling_mode_mean_tokens': True, 'pooling_mode_cls_token': False},
     'mean'),
    ({'pooling_mode': 'mean'}, 'mean'), ({'pooling_mode': 'cls'}, 'cls'),
    ({'pooling_mode': 'weightedmean'}, None), ({}, None),
    ({'pooling_mode': ['mean', 'max']}, None),
    ({'pooling_mode_mean_tokens': True, 'pooling_mode_cls_token': True}, None)])
def test_pooling(tmp_path, monkeypatch, fields, expected):
  write_modules(tmp_path, ('Transformer', ''), ('Pooling', 'pool'),
                ('Normalize', '2_Normalize'))
  (tmp_path / 'pool').mkdir()
  (tmp_path / 'pool' / 'config.json').write_text(json.dumps(fields))
  monkeypatch.setitem(sys.modules, 'torch', None)
  # pylint: disable=protected-access
  if expected:
    assert embeddings._pooling(tmp_path) == expected
    with pytest.raises(ValueError, match='needs the packages'):
      encode(tmp_path)  # this far it is an encoder
  else:
    with pytest.raises(interactions.DataError, match='pools by'):
      encode(tmp_path)


def test_weights_that_would_be_random(tmp_path):
  # pylint: disable=protected-access
  embeddings._check_loaded(tmp_path, {
      'missing_keys': {'pooler.dense.weight'}, 'unexpected_keys': {'cls.bias'},
      'mismatched_keys': set()})
  for name in ('missing_keys', 'mismatched_keys'):
    with pytest.raises(interactions.DataError, match='1 weights .*layer.0.q'):
      embeddings._check_loaded(tmp_path, {name: ['layer.0.q', 'pooler.b']})


@pytest.mark.parametrize('pooling', ['mean_tokens', 'cls_token'])
def test_an_encoder_of_random_weights(tmp_path, pooling):
  """Against one text at a time, which knows neither padding nor order."""
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  words = sorted({word for item in ITEMS for text in (
      item.title, item.brand, *item.categories)
                  for word in text.lower().split()})
  vocabulary = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', '.', '>', *words]
  (tmp_path / 'vocab.txt').write_text('\n'.join(vocabulary))
  torch.manual_seed(0)
  transformers.BertModel(transformers.BertConfig(
      vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1,
      num_attention_heads=2, intermediate_size=32)).save_pretrained(tmp_path)
  transformers.BertTokenizer(
      str(tmp_path / 'vocab.txt'), model_max_length=64).save_pretrained(
          tmp_path)
  (tmp_path / '1_Pooling').mkdir()
  (tmp_path / '1_Pooling' / 'config.json').write_text(
      json.dumps({f'pooling_mode_{pooling}': True}))
  found = encode(tmp_path)
  assert found.shape == (len(ITEMS), 16) and found.dtype == np.float32
  model = transformers.AutoModel.from_pretrained(tmp_path)
  tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
  for item, row in zip(ITEMS, found):
    parts = (item.title, item.brand, ' > '.join(item.categories))
    with torch.inference_mode():
      hidden = model(**tokenizer(
          '. '.join(filter(None, parts)), return_tensors='pt')
                     ).last_hidden_state[0]
    expected = (hidden[0] if pooling == 'cls_token' else hidden.mean(0)).numpy()
    np.testing.assert_allclose(
        row, expected / np.linalg.norm(expected), atol=1e-5)
