"""Hugging Face checkpoints: what config.json and its tensors mean here.

    config.json          ModelConfig
    tensor [out, in]     parameter [layers, in ..., out ...]

    model.layers.3.self_attn.o_proj.weight   [D, H F]
      = layers/out [layers, H, F, D] of layer 3, as 'HFD' stored as 'D HF'

Families are Qwen3, Qwen2 (also 2.5) and Llama (also SmolLM2). What changes
their logits and is not in `transformer.py` is refused by name. The tensors
themselves are read and written by `huggingface_weights.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import json
import math
import pathlib
from typing import Any

import numpy as np

from dgr2_jax.models import transformer

FAMILIES = {
    'qwen3': dict(qk_norm=True, attention_bias=False),
    'qwen2': dict(qk_norm=False, attention_bias=True),
    'llama': dict(qk_norm=False, attention_bias=False),
}
_ARCHITECTURES = {'qwen3': 'Qwen3ForCausalLM', 'qwen2': 'Qwen2ForCausalLM',
                  'llama': 'LlamaForCausalLM'}

# Field of ModelConfig -> key of config.json.
_KEYS = {
    'vocab_size': 'vocab_size',
    'num_layers': 'num_hidden_layers',
    'width': 'hidden_size',
    'num_heads': 'num_attention_heads',
    'num_kv_heads': 'num_key_value_heads',
    'head_dim': 'head_dim',
    'mlp_dim': 'intermediate_size',
    'rope_theta': 'rope_theta',
    'norm_eps': 'rms_norm_eps',
    'tie_embeddings': 'tie_word_embeddings',
}
# Annotation of a field -> types in JSON, and what is expected.
_VALUES = {'int': ((int,), 'a whole number above 0'),
           'float': ((int, float), 'a number above 0'),
           'bool': ((bool,), 'true or false')}
# Types of what else is read, where it is there.
_KINDS = {'rope_parameters': dict, 'rope_scaling': dict, 'layer_types': list,
          'max_window_layers': int}
# The only values that the transformer implements; absent is as good.
_SUPPORTED = {
    'hidden_act': 'silu',
    'attention_bias': False,  # Qwen2 has its biases without this key
    'mlp_bias': False,
    'rope_type': 'default',
    'rope_interleaved': False,
    'partial_rotary_factor': 1.,
    'quantization_config': None,
}
# Fields of ModelConfig that are free whatever the checkpoint is.
FREE = ('dtype', 'param_dtype', 'remat', 'unroll_layers', 'canvas_chunk',
        'attention')


@dataclasses.dataclass(frozen=True)
class Layout:
  """How a parameter's dimensions are stored, a letter each.

  Attributes:
    param: the parameter's, without the layer: 'HFD'.
    stored: the tensor's; letters that stand together are one: 'D HF'.
  """
  param: str
  stored: str

  def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
    """The tensor's shape, given the parameter's."""
    size = dict(zip(self.param, shape, strict=True))
    return tuple(math.prod(size[axis] for axis in axes)
                 for axes in self.stored.split())

  def store(self, x: np.ndarray) -> np.ndarray:
    """The tensor that holds parameter `x`."""
    order = [self.param.index(axis) for axis in self.stored.replace(' ', '')]
    return np.ascontiguousarray(
        x.transpose(order).reshape(self.stored_shape(x.shape)))

  def read(self, tensor: Any, shape: Sequence[int],
           index: Sequence[slice]) -> np.ndarray:
    """Part of a parameter.

    Args:
      tensor: what slices of the stored tensor are read from.
      shape: the whole parameter's.
      index: which part of it, a slice for every dimension.
    """
    size = dict(zip(self.param, shape, strict=True))
    wanted = dict(zip(self.param, index, strict=True))
    rows, unmerged, inner = [], [], []
    for first, *others in self.stored.split():
      # Merged dimensions are read whole, but for the first.
      unit = math.prod(size[axis] for axis in others)
      start, stop, _ = wanted[first].indices(size[first])
      rows.append(slice(start * unit, stop * unit))
      unmerged += [stop - start, *(size[axis] for axis in others)]
      inner += [slice(None), *(wanted[axis] for axis in others)]
    x = tensor[tuple(rows)].reshape(unmerged)[tuple(inner)]
    stored = self.stored.replace(' ', '')
    return x.transpose([stored.index(axis) for axis in self.param])


# Parameter path -> (tensor name, with {} for the layer; layout).
TENSORS = {
    'embedding': ('model.embed_tokens.weight', Layout('VD', 'V D')),
    'final_norm': ('model.norm.weight', Layout('D', 'D')),
    'head': ('lm_head.weight', Layout('DV', 'V D')),
    **{f'layers/{path}': (f'model.layers.{{}}.{name}', layout)
       for path, name, layout in (
           ('attention_norm', 'input_layernorm.weight', Layout('D', 'D')),
           ('query', 'self_attn.q_proj.weight', Layout('DHF', 'HF D')),
           ('key', 'self_attn.k_proj.weight', Layout('DHF', 'HF D')),
           ('value', 'self_attn.v_proj.weight', Layout('DHF', 'HF D')),
           ('query_bias', 'self_attn.q_proj.bias', Layout('HF', 'HF')),
           ('key_bias', 'self_attn.k_proj.bias', Layout('HF', 'HF')),
           ('value_bias', 'self_attn.v_proj.bias', Layout('HF', 'HF')),
           ('query_norm', 'self_attn.q_norm.weight', Layout('F', 'F')),
           ('key_norm', 'self_attn.k_norm.weight', Layout('F', 'F')),
           ('out', 'self_attn.o_proj.weight', Layout('HFD', 'D HF')),
           ('mlp_norm', 'post_attention_layernorm.weight', Layout('D', 'D')),
           ('gate', 'mlp.gate_proj.weight', Layout('DE', 'E D')),
           ('up', 'mlp.up_proj.weight', Layout('DE', 'E D')),
           ('down', 'mlp.down_proj.weight', Layout('ED', 'D E')))},
}


def read_config(directory: str | pathlib.Path) -> transformer.ModelConfig:
  """The architecture that DIR/config.json describes.

  Raises:
    ValueError: the file is no JSON object, lacks keys or has settings that
      `transformer.py` does not implement; all of them are named.
  """
  path = pathlib.Path(directory) / 'config.json'
  content = read_json(path)
  family = content.get('model_type')
  if family not in list(FAMILIES):  # it may be anything
    raise ValueError(f'{path}: model_type is {family!r}: expected one of '
                     f'{", ".join(FAMILIES)}.')
  for key, kind in _KINDS.items():
    if not isinstance(content.get(key), (kind, type(None))):
      raise ValueError(f'{path}: {key} is {content[key]!r}: expected the type '
                       f'{kind.__name__}.')
  # Newer versions nest what belongs to RoPE.
  content |= content.get('rope_parameters') or {}
  fields = {field: content.get(key) for field, key in _KEYS.items()}
  if family != 'qwen3' and fields['head_dim'] is None:
    if _is_good('width', fields['width']) and _is_good(
        'num_heads', fields['num_heads']):
      fields['head_dim'] = fields['width'] // fields['num_heads']
  problems = [
      f'{_KEYS[field]} is ' + (
          'missing' if value is None else f'{value!r}, expected '
          + _VALUES[transformer.ModelConfig.__annotations__[field]][1])
      for field, value in fields.items() if not _is_good(field, value)]
  problems = problems or list(_unsupported(content))
  if problems:
    raise ValueError(f'{path}: ' + '; '.join(problems) + '.')
  try:
    return transformer.ModelConfig(**fields, **FAMILIES[family])
  except (TypeError, ValueError) as e:
    raise ValueError(f'{path}: {e}') from e


def _is_good(field: str, value: Any) -> bool:
  """Whether a field of ModelConfig may have this value."""
  kind = transformer.ModelConfig.__annotations__[field]
  return type(value) in _VALUES[kind][0] and (kind == 'bool' or value > 0)


def _unsupported(content: Mapping[str, Any]) -> Iterator[str]:
  """Settings that change logits and that nothing here implements."""
  for key, value in _SUPPORTED.items():
    if key in content and content[key] != value:
      yield f'{key} is {content[key]!r}, only {value!r} is supported'
  scaling = content.get('rope_scaling') or {}
  kind = scaling.get('rope_type', scaling.get('type', 'default'))
  if kind != 'default':
    yield f"rope_scaling has type {kind!r}, only 'default' is supported"
  if kinds := content.get('layer_types'):
    sliding = any(kind != 'full_attention' for kind in kinds)
  else:
    first = content.get('max_window_layers') or 0
    sliding = (
        content.get('use_sliding_window') and content.get('sliding_window')
        and first < content['num_hidden_layers'])
  if sliding:
    yield 'sliding-window layers are on, only full attention is supported'


def model_config(section: Mapping[str, Any],
                 vocab_size: int) -> transformer.ModelConfig:
  """The model of `config.model`.

  Args:
    section: fields of `ModelConfig`; or `huggingface`, a directory whose
      config.json fixes the architecture, beside the fields it leaves free.
    vocab_size: V.

  Raises:
    ValueError: a field contradicts `huggingface`, or see `read_config`.
  """
  fields = dict(section)
  directory = fields.pop('huggingface', '')
  if not directory:
    return transformer.ModelConfig(vocab_size=vocab_size, **fields)
  if fixed := sorted(fields.keys() - set(FREE)):
    raise ValueError(
        f'config.model.{fixed[0]} is fixed by model.huggingface: expected only '
        f'{", ".join(FREE)} beside it.')
  return dataclasses.replace(
      read_config(directory), vocab_size=vocab_size, **fields)


def config_json(config: transformer.ModelConfig) -> dict[str, Any]:
  """The architecture as config.json has it.

  Raises:
    ValueError: no family has this combination of fields.
  """
  family = next((name for name, fields in FAMILIES.items()
                 if all(getattr(config, k) == v for k, v in fields.items())),
                None)
  if family is None:
    raise ValueError(
        f'model.qk_norm={config.qk_norm} with '
        f'model.attention_bias={config.attention_bias}: no Hugging Face family '
        f'of {", ".join(FAMILIES)} has both.')
  return {
      'architectures': [_ARCHITECTURES[family]],
      'model_type': family,
      **{key: getattr(config, field) for field, key in _KEYS.items()},
      'hidden_act': 'silu',
      'torch_dtype': config.param_dtype,
  }


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """The JSON object in a file.

  Raises:
    ValueError: it cannot be read or is something else.
  """
  try:
    content = json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError, RecursionError) as e:
    raise ValueError(f'{path}: cannot be read: {e}') from e
  if not isinstance(content, dict):
    raise ValueError(f'{path}: expected a JSON object.')
  return content
