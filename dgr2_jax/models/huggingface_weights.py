"""Hugging Face checkpoints: reads and writes the tensors.

    DIR/config.json, DIR/model.safetensors
    DIR/config.json, DIR/model.safetensors.index.json, DIR/model-00001-of-...

`load` reads from the files only what each device holds, a parameter at a time,
and `save` writes a file at a time: neither has the whole model in the host's
memory. The package safetensors comes with the extra `hf`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import huggingface
from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib

_SINGLE = 'model.safetensors'
_INDEX = 'model.safetensors.index.json'
_DTYPES = ('F32', 'F16', 'BF16')
# Derived from the config; old Llama checkpoints store it.
_DERIVED = re.compile(r'model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq')


def _tensors(
    config: transformer.ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
  """By tensor name: a parameter's path, and the layer if it holds only one."""
  names = {path: huggingface.TENSORS[path][0]
           for path in _flat(transformer.abstract_params(config))}
  tensors = {name: (path, ()) for path, name in names.items()
             if '{}' not in name}
  for layer in range(config.num_layers):
    tensors |= {name.format(layer): (path, (layer,))
                for path, name in names.items() if '{}' in name}
  return tensors


def load(directory: str | os.PathLike[str], config: transformer.ModelConfig,
         shardings: Any) -> Any:
  """Reads the parameters of a checkpoint.

  Args:
    directory: holds config.json and safetensors files.
    config: `huggingface.read_config` of it; its `param_dtype` is that of the
      result, whatever is stored.
    shardings: one for every parameter.

  Returns:
    The parameters, each in its sharding.

  Raises:
    ValueError: a file is missing or damaged, or tensors are missing, unknown,
      or of another shape or dtype; all of them are named.
  """
  directory = pathlib.Path(directory)
  with contextlib.ExitStack() as stack:
    stored = _open(directory, stack)
    _check(directory, stored, config)

    def place(path, leaf, sharding):
      name, layout = huggingface.TENSORS[_path_name(path)]

      def read(index):
        if '{}' not in name:
          return layout.read(stored[name], leaf.shape, index).astype(leaf.dtype)
        return np.stack([
            layout.read(stored[name.format(layer)], leaf.shape[1:], index[1:])
            for layer in range(*index[0].indices(leaf.shape[0]))],
                        dtype=leaf.dtype, casting='unsafe')

      # One shard after the other: no more than that is held on the host.
      shards = [
          jax.device_put(read(index), device) for device, index
          in sharding.addressable_devices_indices_map(leaf.shape).items()]
      return jax.make_array_from_single_device_arrays(
          leaf.shape, sharding, shards)

    return jax.tree.map_with_path(
        place, transformer.abstract_params(config), shardings)


def _open(directory: pathlib.Path,
          stack: contextlib.ExitStack) -> dict[str, Any]:
  """What slices of each tensor are read from, by tensor name."""
  files = [_SINGLE]
  if (directory / _INDEX).exists():
    index = huggingface.read_json(directory / _INDEX)
    if not isinstance(index.get('weight_map'), dict):
      raise ValueError(f'{directory / _INDEX}: weight_map is missing.')
    files = sorted(set(index['weight_map'].values()))
  stored = {}
  for file in files:
    try:
      handle = stack.enter_context(
          safetensors.safe_open(directory / file, framework='numpy'))
    except (OSError, safetensors.SafetensorError) as e:
      raise ValueError(f'{directory / file}: cannot be read: {e}') from e
    stored |= {name: handle.get_slice(name) for name in handle.keys()}
  return stored


def _check(directory: pathlib.Path, stored: Mapping[str, Any],
           config: transformer.ModelConfig) -> None:
  """Compares the tensors that are there with those that should be."""
  wanted, params = _tensors(config), _flat(transformer.abstract_params(config))
  problems = []
  for name, (path, layer) in wanted.items():
    if name not in stored:
      problems.append(f'{name}: missing')
      continue
    _, layout = huggingface.TENSORS[path]
    expected = layout.stored_shape(params[path].shape[len(layer):])
    shape = tuple(stored[name].get_shape())
    if shape != expected:
      problems.append(f'{name}: shape {shape}, expected {expected}')
    dtype = stored[name].get_dtype()
    if dtype not in _DTYPES:
      problems.append(
          f'{name}: dtype {dtype}, expected one of {", ".join(_DTYPES)}')
  # Some tied checkpoints store the embedding a second time.
  head = {huggingface.TENSORS['head'][0]} if config.tie_embeddings else set()
  problems += [f'{name}: unknown' for name in sorted(stored)
               if name not in wanted and name not in head
               and not _DERIVED.fullmatch(name)]
  if problems:
    raise ValueError(f'{directory}: the tensors do not fit config.json:\n  '
                     + '\n  '.join(problems))


def save(directory: str | os.PathLike[str], params: Any,
         config: transformer.ModelConfig,
         vocabulary: vocabulary_lib.Vocabulary,
         canvas: canvas_lib.CanvasConfig, max_positions: int,
         files: Mapping[str, Any] | None = None,
         max_shard_bytes: int = 5 * 10 ** 9) -> None:
  """Writes a checkpoint that `transformers` reads as a causal model.

  It appears whole or not at all. Banned ids are suppressed in generation;
  how to decode blocks stands in config.json under `block_diffusion`. Runs in
  one process.

  Args:
    directory: must not exist.
    params: the parameters, in any sharding.
    config: of the model.
    vocabulary: its special ids.
    canvas: block size and rules that the parameters were trained for.
    max_positions: the longest sequence that a server should accept.
    files: more JSON files by their names, such as the tokenizer's.
    max_shard_bytes: a file is no larger, unless one tensor is.

  Raises:
    ValueError: `directory` exists, or no family has this architecture.
  """
  directory = pathlib.Path(directory).absolute()
  if directory.exists():
    raise ValueError(f'{directory} exists already.')
  contents = {
      'config.json': huggingface.config_json(config) | {
          'max_position_embeddings': max_positions,
          'eos_token_id': vocabulary.eos_id,
          'block_diffusion': dataclasses.asdict(canvas) | {
              'mask_token_id': vocabulary.mask_id}},
      'generation_config.json': {
          'eos_token_id': vocabulary.eos_id,
          'suppress_tokens': list(vocabulary.banned)},
      **(files or {})}
  partial = directory.with_name(f'.{directory.name}.{os.getpid()}.partial')
  partial.mkdir(parents=True)
  try:
    _write_tensors(partial, params, config, max_shard_bytes)
    for name, content in contents.items():
      _write_json(partial / name, content)
    os.rename(partial, directory)
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def _write_tensors(directory: pathlib.Path, params: Any,
                   config: transformer.ModelConfig,
                   max_shard_bytes: int) -> None:
  """Writes one file, or several and their index."""
  tensors, flat = _tensors(config), _flat(params)
  sizes = {name: flat[path].nbytes // (flat[path].shape[0] if layer else 1)
           for name, (path, layer) in tensors.items()}

  def fetch(path, layer):
    return huggingface.TENSORS[path][1].store(np.asarray(flat[path][layer]))

  shards = list(_shards(sizes, max_shard_bytes))
  weight_map = {}
  for number, names in enumerate(shards, 1):
    file = (_SINGLE if len(shards) == 1
            else f'model-{number:05}-of-{len(shards):05}.safetensors')
    safetensors.numpy.save_file(
        {name: fetch(*tensors[name]) for name in names}, directory / file,
        metadata={'format': 'pt'})  # transformers asks for it
    weight_map |= dict.fromkeys(names, file)
  if len(shards) > 1:
    _write_json(directory / _INDEX, {
        'metadata': {'total_size': sum(sizes.values())},
        'weight_map': weight_map})


def _shards(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
  """Names in order, cut where a file would exceed the limit."""
  names, total = [], 0
  for name, size in sizes.items():
    if names and total + size > limit:
      yield names
      names, total = [], 0
    names.append(name)
    total += size
  yield names


def _write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
  path.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')


def _flat(params: Any) -> dict[str, Any]:
  """Parameters by their paths."""
  return {_path_name(path): leaf
          for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def _path_name(path: tuple[Any, ...]) -> str:
  return '/'.join(key.key for key in path)
