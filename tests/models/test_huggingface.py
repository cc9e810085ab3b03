"""Hugging Face import and export against `transformers`' own logits.

The golden file holds what `transformers` gave; where it is installed (the extra
`parity`) the same is compared live. See huggingface_files.py.
"""

import dataclasses
import importlib.util
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import huggingface
from dgr2_jax.models import huggingface_weights
from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib
from dgr2_jax.training import sharding
from tests.models import huggingface_files as files
from tests.models import test_transformer

GOLDEN = json.loads(files.GOLDEN.read_text())
VARIANTS = pytest.mark.parametrize('variant', GOLDEN)
CANVAS = canvas_lib.CanvasConfig(block_size=4)
VOCABULARY = vocabulary_lib.Vocabulary(40, mask_id=38, eos_id=1,
                                       banned=(38, 39))
live = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None
        for name in ('torch', 'transformers')),
    reason="needs torch and transformers: pip install -e '.[parity]'")


def checkpoint(directory, variant, **changes):
  """A variant's checkpoint; `changes` replace keys of config.json."""
  golden = GOLDEN[variant]
  return files.write(directory, golden['config'] | changes,
                     files.weights(golden['tensors']))


def shardings(config):
  mesh = sharding.make_mesh(dict(data=1, fsdp=1, tensor=1), jax.devices()[:1])
  return sharding.param_shardings(
      mesh, transformer.abstract_params(config), transformer.RULES)


def load(directory, **changes):
  config = dataclasses.replace(huggingface.read_config(directory), **changes)
  return config, huggingface_weights.load(directory, config, shardings(config))


def save(directory, config, params, **options):
  huggingface_weights.save(directory, params, config, VOCABULARY, CANVAS,
                           max_positions=64, **options)


def logits(config, params, tokens=files.TOKENS):
  model = transformer.Transformer(config)
  tokens = jnp.asarray(tokens)
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  hidden, _ = model.apply({'params': params}, tokens, positions,
                          test_transformer.causal, method='hidden')
  return model.apply({'params': params}, hidden, method='logits')


def assert_equal(one, two):
  assert jax.tree.structure(one) == jax.tree.structure(two)
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two)):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@VARIANTS
def test_logits_equal_golden(variant, tmp_path):
  want = np.array(GOLDEN[variant]['logits'])
  nested = load(checkpoint(tmp_path / 'nested', variant))
  np.testing.assert_allclose(logits(*nested), want, atol=2e-5)
  content = files.flat(GOLDEN[variant]['config'])
  if not nested[0].qk_norm and content.get('head_dim') == 6:
    del content['head_dim']  # D / H where Qwen2 and Llama don't say
  config, params = load(files.write(
      tmp_path / 'flat', content, files.weights(GOLDEN[variant]['tensors'])))
  assert config == nested[0]
  assert_equal(params, nested[1])


@live
@VARIANTS
def test_logits_equal_transformers(variant, tmp_path):
  want = np.array(GOLDEN[variant]['logits'])
  path = checkpoint(tmp_path / 'in', variant)
  np.testing.assert_allclose(files.transformers_logits(path), want, atol=1e-4)
  config, params = load(path)
  save(tmp_path / 'whole', config, params)
  save(tmp_path / 'sharded', config, params, max_shard_bytes=6000)
  for name in ('whole', 'sharded'):
    np.testing.assert_allclose(
        files.transformers_logits(tmp_path / name), want, atol=1e-4)


@VARIANTS
def test_round_trip_is_bitwise(variant, tmp_path):
  config, params = load(checkpoint(tmp_path / 'in', variant))
  save(tmp_path / 'whole', config, params)
  save(tmp_path / 'sharded', config, params, max_shard_bytes=6000)
  assert sorted(p.name for p in (tmp_path / 'whole').iterdir()) == [
      'config.json', 'generation_config.json', 'model.safetensors']
  assert len(list((tmp_path / 'sharded').glob('model-*-of-*'))) > 3
  for name in ('whole', 'sharded'):
    again = load(tmp_path / name)
    assert again[0] == config
    assert_equal(again[1], params)
  content = json.loads((tmp_path / 'whole' / 'config.json').read_text())
  assert content['block_diffusion'] == dict(
      block_size=4, clean_stream='token_causal', alignment='shifted',
      mask_token_id=38)
  # The tensors are those of the original, by name and bit for bit.
  tensors = safetensors.numpy.load_file(tmp_path / 'whole/model.safetensors')
  original = files.weights(GOLDEN[variant]['tensors'])
  assert tensors.keys() == original.keys()
  for name, tensor in tensors.items():
    np.testing.assert_array_equal(tensor, original[name])


@pytest.mark.parametrize('stored', ['float16', 'bfloat16'])
def test_stored_dtypes(stored, tmp_path):
  golden = GOLDEN['qwen3_tied']
  rounded = {name: x.astype(jnp.dtype(stored))
             for name, x in files.weights(golden['tensors']).items()}
  path = files.write(tmp_path / 'in', golden['config'], rounded)
  _, params = load(path)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('float32')}
  np.testing.assert_array_equal(
      params['embedding'],
      rounded['model.embed_tokens.weight'].astype(np.float32))
  config, params = load(path, param_dtype=stored)
  save(tmp_path / 'out', config, params)
  content = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert content['torch_dtype'] == stored
  assert_equal(load(tmp_path / 'out', param_dtype=stored)[1], params)


def test_tied_head_and_derived_tensors_are_left_out(tmp_path):
  golden = GOLDEN['qwen3_tied']
  tensors = files.weights(golden['tensors'])
  more = {'lm_head.weight': tensors['model.embed_tokens.weight'],
          'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(4)}
  path = files.write(tmp_path, golden['config'], tensors | more)
  assert 'head' not in load(path)[1]


def test_every_tensor_at_fault_is_named(tmp_path):
  golden = GOLDEN['qwen2']
  tensors = files.weights(golden['tensors'])
  layer = 'model.layers.1.'
  del tensors[layer + 'mlp.up_proj.weight']
  tensors[layer + 'self_attn.o_proj.bias'] = np.zeros(24, np.float32)
  tensors[layer + 'mlp.down_proj.weight'] = np.zeros((32, 24), np.float32)
  tensors['model.norm.weight'] = np.zeros(24, np.int32)
  path = files.write(tmp_path, golden['config'], tensors)
  with pytest.raises(ValueError) as e:
    load(path)
  assert str(e.value).splitlines()[1:] == [
      '  model.norm.weight: dtype I32, expected one of F32, F16, BF16',
      f'  {layer}mlp.down_proj.weight: shape (32, 24), expected (24, 32)',
      f'  {layer}mlp.up_proj.weight: missing',
      f'  {layer}self_attn.o_proj.bias: unknown']


def test_damaged_files_are_named(tmp_path):
  config, params = load(checkpoint(tmp_path / 'in', 'llama'))
  save(tmp_path / 'out', config, params, max_shard_bytes=6000)
  file = sorted((tmp_path / 'out').glob('model-00002-of-*'))[0]
  file.write_bytes(file.read_bytes()[:-8])
  with pytest.raises(ValueError, match=f'{file.name}: cannot be read'):
    load(tmp_path / 'out')
  file.unlink()
  with pytest.raises(ValueError, match=f'{file.name}: cannot be read'):
    load(tmp_path / 'out')
  (tmp_path / 'out' / 'model.safetensors.index.json').write_text('{}')
  with pytest.raises(ValueError, match='index.json: weight_map is missing'):
    load(tmp_path / 'out')
  (tmp_path / 'in' / 'model.safetensors').unlink()
  with pytest.raises(ValueError, match='model.safetensors: cannot be read'):
    load(tmp_path / 'in')


@pytest.mark.parametrize('variant, changes, message', [
    ('llama', dict(model_type='gpt2'), "model_type is 'gpt2': expected one of"),
    ('llama', dict(hidden_size=None, rope_parameters=None),
     'hidden_size is missing; rope_theta is missing'),
    ('qwen3_tied', dict(head_dim=None), 'head_dim is missing'),
    ('llama', dict(rope_scaling=dict(rope_type='llama3', factor=8.)),
     "rope_scaling has type 'llama3'"),
    ('llama', dict(rope_scaling=dict(type='linear', factor=2.)), "'linear'"),
    ('qwen3_tied', dict(rope_parameters=dict(rope_type='yarn', rope_theta=1.)),
     "rope_type is 'yarn'"),
    ('qwen3_tied', dict(rope_parameters=dict(rope_theta=1.,
                                             partial_rotary_factor=.5)),
     'partial_rotary_factor is 0.5'),
    ('llama', dict(attention_bias=True, mlp_bias=True),
     'attention_bias is True.*mlp_bias is True'),
    ('llama', dict(hidden_act='gelu'), "hidden_act is 'gelu', only 'silu'"),
    ('llama', dict(quantization_config=dict(bits=4)), 'quantization_config'),
    ('qwen2', dict(use_sliding_window=True, sliding_window=4,
                   max_window_layers=1, layer_types=None),
     'sliding-window layers are on'),
    ('qwen3_tied', dict(layer_types=['full_attention', 'sliding_attention']),
     'sliding-window layers are on'),
    ('llama', dict(num_key_value_heads=3), 'num_kv_heads=3'),
    ('llama', dict(model_type=['llama']), "model_type is .'llama'."),
    ('llama', dict(hidden_size='24', head_dim=None),
     "hidden_size is '24', expected a whole number above 0"),
    ('qwen2', dict(rms_norm_eps=-1., tie_word_embeddings=1),
     'rms_norm_eps is -1.0, expected a numb.*ings is 1, expected true'),
    ('llama', dict(rope_parameters=[1]), 'rope_parameters is .*type dict'),
    ('llama', dict(rope_scaling='x'), 'rope_scaling is .*type dict'),
    ('qwen2', dict(layer_types=3), 'layer_types is 3: .*type list'),
    ('qwen2', dict(layer_types=[[1]]), 'sliding-window'),
])
def test_unsupported_settings_are_named(variant, changes, message, tmp_path):
  path = checkpoint(tmp_path, variant, **changes)
  with pytest.raises(ValueError, match=f'config.json: .*{message}'):
    huggingface.read_config(path)


@pytest.mark.parametrize('variant, changes', [
    ('qwen2', dict(use_sliding_window=True, sliding_window=4,
                   layer_types=None)),  # from layer 28 on
    ('qwen2', dict(use_sliding_window=False, sliding_window=4,
                   max_window_layers=0, layer_types=None)),
    ('llama', dict(rope_scaling=None)),
    ('llama', dict(rope_scaling=dict(type='default'))),
])
def test_inactive_settings_are_accepted(variant, changes, tmp_path):
  checkpoint(tmp_path, variant)
  want = huggingface.read_config(tmp_path)
  assert huggingface.read_config(
      checkpoint(tmp_path, variant, **changes)) == want


def test_unreadable_config_is_named(tmp_path):
  with pytest.raises(ValueError, match='config.json: cannot be read'):
    huggingface.read_config(tmp_path)
  for content, message in (('{', 'cannot be read'), ('[]', 'a JSON object'),
                           ('[' * 100_000, 'cannot be read')):
    (tmp_path / 'config.json').write_text(content)
    with pytest.raises(ValueError, match=f'config.json: .*{message}'):
      huggingface.read_config(tmp_path)


def test_export_appears_whole_or_not_at_all(tmp_path, monkeypatch):
  config, params = load(checkpoint(tmp_path / 'in', 'llama'))
  out = tmp_path / 'made' / 'out'
  write = safetensors.numpy.save_file

  def fail(tensors, file, metadata):
    if '00003' in file.name:
      raise OSError('disk full')
    assert not out.exists()
    write(tensors, file, metadata)

  monkeypatch.setattr(safetensors.numpy, 'save_file', fail)
  with pytest.raises(OSError, match='disk full'):
    save(out, config, params, max_shard_bytes=6000)
  assert not list(out.parent.iterdir())
  out.mkdir()
  with pytest.raises(ValueError, match='exists already'):
    save(out, config, params)
  both = dataclasses.replace(config, qk_norm=True, attention_bias=True)
  with pytest.raises(ValueError, match='attention_bias=True: no Hugging Face'):
    save(tmp_path / 'both', both, params)


def test_config_section(tmp_path):
  checkpoint(tmp_path, 'qwen2')
  section = dict(huggingface=str(tmp_path), remat='dots',
                 param_dtype='bfloat16')
  config = huggingface.model_config(section, vocab_size=64)
  assert config == dataclasses.replace(
      huggingface.read_config(tmp_path), vocab_size=64, remat='dots',
      param_dtype='bfloat16')
  with pytest.raises(ValueError, match='config.model.width is fixed'):
    huggingface.model_config(section | dict(width=8), vocab_size=64)


@pytest.mark.parametrize('size', [32, 64])
@pytest.mark.parametrize('variant', ['qwen3_tied', 'qwen3_untied'])
def test_new_tokens_leave_old_logits_alone(variant, size, tmp_path):
  config, params = load(checkpoint(tmp_path, variant))
  known, new = np.arange(30), np.array([30, size - 1])
  resized = params | vocabulary_lib.resize(
      params, size, new, known, jax.random.key(0))
  before, after = (
      logits(dataclasses.replace(config, vocab_size=v), p, files.TOKENS % 30)
      for v, p in ((40, params), (size, resized)))
  assert after.shape[-1] == size
  np.testing.assert_allclose(after[..., :30], before[..., :30], atol=1e-6)
  # New rows are near the mean of the known ones, and differ from each other.
  for name in params.keys() & set(vocabulary_lib.TABLES):
    table, old = (x[name] if name == 'embedding' else x[name].T
                  for x in (resized, params))
    np.testing.assert_array_equal(table[:30], old[:30])
    distance = (table[new] - old[:30].mean(0)) / old[:30].std(0)
    assert .05 < jnp.abs(distance).mean() < .15
    assert (table[new[0]] != table[new[1]]).all()


_EIGHT = """
import pathlib, sys
import jax
jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 8)
import numpy as np
from dgr2_jax.models import huggingface, huggingface_weights, transformer
from dgr2_jax.training import sharding

for directory in map(pathlib.Path, sys.argv[1:]):
  config = huggingface.read_config(directory)
  loaded = []
  for sizes in ((1, 1, 1), (2, 2, 2), (1, 8, 1), (1, 1, 8), (1, 2, 4)):
    devices = jax.devices()[:np.prod(sizes)]
    mesh = sharding.make_mesh(dict(zip(sharding.AXES, sizes)), devices)
    shardings = sharding.param_shardings(
        mesh, transformer.abstract_params(config), transformer.RULES)
    params = huggingface_weights.load(directory, config, shardings)
    assert jax.tree.map(lambda x: x.sharding, params) == shardings
    loaded.append(jax.tree.map(np.asarray, params))
    jax.tree.map(np.testing.assert_array_equal, loaded[0], loaded[-1])
  split = params['layers']['query'].addressable_shards[0].data.shape
  assert split[1:3] == (12, 1), split
"""


def test_eight_devices_hold_the_same(tmp_path):
  paths = [checkpoint(tmp_path / name, name) for name in ('qwen2', 'llama')]
  subprocess.run([sys.executable, '-c', _EIGHT, *map(str, paths)], check=True,
                 timeout=120, cwd=pathlib.Path(__file__).parents[2])
