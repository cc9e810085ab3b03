"""The working directory of a run: its config, its lock and atomic writes.

    DIR/config.json         what this directory was started with
    DIR/.lock               held while a process works here
    DIR/metrics.jsonl, DIR/tensorboard/, DIR/checkpoints/<stage>/, DIR/report.*

`open_workdir` creates DIR or checks that it belongs to the same config, so
that the same command again always means "go on".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import fcntl
import json
import os
import pathlib
import re
import socket
from typing import Any
import zlib

from absl import logging
import jax
import ml_collections

# Fields that change where a run computes, what it keeps or how it is evaluated
# at the end, but not what is trained. They may differ when a run is resumed,
# and config.json is brought up to date; everything else is compared.
_RESUMABLE = re.compile(
    r'mesh\..+|profile_steps|.+\.keep'
    r'|evaluate\.(?!(batch_size|max_denoising_steps)$).+')

# What only a stage that got somewhere leaves. Without any of it the config may
# still be mended: nothing here was made with it.
_RESULTS = ('data/summary.json', 'checkpoints', 'metrics.jsonl', 'report.json')
_CHUNK = 1 << 22
# Of every config, whatever its recipe.
_SECTIONS = ('canvas', 'data', 'evaluate', 'mesh', 'model', 'prompt',
             'semantic_ids', 'tokenizer')


class WorkdirError(ValueError):
  """The working directory cannot be used; the message says why."""


def write_text(path: str | os.PathLike[str], text: str) -> None:
  """Writes UTF-8 text atomically: readers see the old file or the new one."""
  write_bytes(path, text.encode('utf-8'))


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
  """Writes a file atomically, durable before it takes its name."""
  path = pathlib.Path(path)
  temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
  try:
    with open(temporary, 'wb') as f:
      f.write(data)
      f.flush()
      os.fsync(f.fileno())
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def checksums(
    directory: pathlib.Path, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, tuple[int, int]]]:
  """Yields (relative path, (size, CRC-32)) of the wanted files of a directory.
  """
  for root, _, names in sorted(os.walk(directory)):
    for name in sorted(names):
      path = pathlib.Path(root, name)
      if not wanted(str(path.relative_to(directory))):
        continue
      size = crc = 0
      with open(path, 'rb') as f:
        while chunk := f.read(_CHUNK):
          size, crc = size + len(chunk), zlib.crc32(chunk, crc)
      yield str(path.relative_to(directory)), (size, crc)


def to_json(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """The config as JSON types (tuples become lists).

  Raises:
    WorkdirError: a field holds something that JSON cannot.
  """
  for name, value in flatten(config.to_dict()).items():
    try:
      json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as e:
      raise WorkdirError(f'config.{name} is {value!r}, which JSON cannot '
                         f'hold ({e}); use plain data.') from e
  return json.loads(json.dumps(config.to_dict()))


def read_config(directory: str | os.PathLike[str],
                whole: bool = True) -> ml_collections.ConfigDict:
  """The config that a working directory was started with.

  Args:
    directory: the working directory.
    whole: whether it must have all that is needed to load what is there.

  Raises:
    WorkdirError: there is none.
  """
  path = pathlib.Path(os.path.expanduser(directory)) / 'config.json'
  try:
    content = json.loads(path.read_text(encoding='utf-8'))
    if not isinstance(content, dict):
      raise ValueError('not a JSON object')
    if whole:
      _check_whole(content)
    return ml_collections.ConfigDict(content)
  except (OSError, ValueError, TypeError, RecursionError) as e:
    raise WorkdirError(f'{path}: expected the config of a working directory '
                       f'({e}).') from e


def _check_whole(content: dict[str, Any]) -> None:
  for name in _SECTIONS:
    if not isinstance(content.get(name), dict):
      raise ValueError(f'{name} is missing, or no section')
  recipe = content.get('recipe')
  if not (recipe and isinstance(recipe, list)
          and all(isinstance(stage, str) for stage in recipe)):
    raise ValueError(f'recipe is {recipe!r}, no list of stages')


def flatten(tree: dict[str, Any], prefix: str = '') -> dict[str, Any]:
  """Fields by their dotted names; an empty section is one."""
  flat = {}
  for key, value in tree.items():
    if isinstance(value, dict) and value:
      flat.update(flatten(value, f'{prefix}{key}.'))
    else:
      flat[f'{prefix}{key}'] = value
  return flat


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
  """One line per field that differs and whose change alters training."""
  before, now = flatten(before), flatten(now)
  lines = []
  for name in sorted(before.keys() | now.keys()):
    if _RESUMABLE.fullmatch(name):
      continue
    old, new = (json.dumps(flat[name]) if name in flat else 'absent'
                for flat in (before, now))
    if old != new:
      lines.append(f'config.{name}: {old} there, {new} now')
  return lines


@contextlib.contextmanager
def open_workdir(
    directory: str | os.PathLike[str],
    config: ml_collections.ConfigDict,
) -> Iterator[pathlib.Path]:
  """Creates or re-enters a working directory and holds its lock.

  Args:
    directory: the directory; parents are created.
    config: the run's config, written to config.json at the first start.

  Yields:
    The directory as an absolute path.

  Raises:
    WorkdirError: not writable, in use by another process, a corrupt
      config.json, or one that differs in a field that changes results.
  """
  if '://' in os.fspath(directory):
    raise WorkdirError(f'--workdir={directory}: only mounted file systems are '
                       'supported, not URLs.')
  try:
    root = pathlib.Path(directory).expanduser().absolute()
  except RuntimeError as e:  # of nobody
    raise WorkdirError(f'--workdir={directory}: {e}') from e
  with contextlib.ExitStack() as stack:
    # One host owns the lock and the files; the others share its file system.
    try:
      root.mkdir(parents=True, exist_ok=True)
      if jax.process_index() == 0:
        stack.enter_context(_lock(root))
        _check_config(root, to_json(config))
    except OSError as e:
      reason = ('it is not a directory' if isinstance(e, FileExistsError)
                else e.strerror or e)
      raise WorkdirError(
          f'Cannot write to the working directory {root}: {reason}.') from e
    yield root


@contextlib.contextmanager
def _lock(root: pathlib.Path) -> Iterator[None]:
  """Holds DIR/.lock; the system drops it when the process dies."""
  with open(root / '.lock', 'a+', encoding='utf-8') as f:
    try:
      fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
      f.seek(0)
      raise WorkdirError(f'{root} is in use by another run '
                         f'({f.read().strip()}).') from e
    f.truncate(0)
    f.write(f'process {os.getpid()} on {socket.gethostname()}\n')
    f.flush()
    yield


def _check_config(root: pathlib.Path, config: dict[str, Any]) -> None:
  """Writes config.json, or compares it with what is there."""
  path = root / 'config.json'
  text = json.dumps(config, indent=2, sort_keys=True) + '\n'
  if not path.exists():
    if (root / 'checkpoints').exists():
      raise WorkdirError(f'{root} holds checkpoints but no config.json: they '
                         'cannot be checked against this config. Use another '
                         '--workdir.')
    write_text(path, text)
    return
  try:
    before = json.loads(path.read_text(encoding='utf-8'))
    if not isinstance(before, dict):
      raise ValueError('not a JSON object')
  except (ValueError, RecursionError) as e:
    raise WorkdirError(f'{path} is corrupt ({e}). Restore it, or use another '
                       '--workdir.') from e
  lines = differences(before, config)
  if lines and not any((root / name).exists() for name in _RESULTS):
    logging.info('Working directory %s: an earlier start left no results; '
                 'starting with this config.', root)
    write_text(path, text)
    return
  if lines:
    raise WorkdirError(
        f'{root} was started with another config. Use another --workdir, or '
        'give these fields the values they had:\n  ' + '\n  '.join(lines))
  if before != config:
    write_text(path, text)
  logging.info('Working directory %s: going on where it stopped.', root)
