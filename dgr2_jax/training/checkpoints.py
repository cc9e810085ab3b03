"""Checkpoints of one stage: atomic, verified, keeping the latest and the best.

    DIR/checkpoints/<stage>/40/             Orbax: params, and the rest
    DIR/checkpoints/<stage>/40.json         manifest, written last
    DIR/checkpoints/<stage>/complete.json   the stage is done; names the best

Orbax writes to a temporary directory and renames it. The manifest then lists
every file with its size and checksum, so that a checkpoint is *whole* if and
only if its manifest is there and its files match: half-written, truncated,
missing and altered files are told from good ones before anything is loaded.
Training goes on while the files are written; `finish` then writes the manifest,
for which every process reads its share of the files.

A checkpoint also names the best checkpoint at its time, and is *usable* only
if that one is whole too. So whatever is lost, a run falls back to an earlier
state from which the same training follows, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
from typing import Any
import zlib

from absl import logging
import jax
from jax.experimental import multihost_utils
import numpy as np
from orbax.checkpoint import v1 as ocp

from dgr2_jax.training import workdir as workdir_lib


@dataclasses.dataclass(frozen=True)
class Best:
  """The best validation so far.

  Attributes:
    step: the step it was measured at; a checkpoint of that step is kept.
    value: the metric, higher is better.
  """
  step: int
  value: float


class Checkpoints:
  """The checkpoints of one stage.

  Every method is called by all processes of a job, in the same order;
  process 0 owns the manifests. Until `finish`, with which saving, restoring
  and completing begin, what was saved last does not count.

  Attributes:
    faults: what was found to be wrong with checkpoints.
  """

  def __init__(self, directory: pathlib.Path, keep: int,
               read_only: bool = False):
    """Opens (and creates) a stage's directory.

    Args:
      directory: DIR/checkpoints/<stage>.
      keep: how many of the latest checkpoints to keep, beside the best.
      read_only: whether to leave what is damaged as it is: for those who use
        weights and don't train them.

    Raises:
      ValueError: keep < 1.
    """
    if keep < 1:
      raise ValueError(f'keep must be at least 1, not {keep}.')
    self._directory = directory
    self._keep = keep
    self._read_only = read_only
    self.faults: list[str] = []
    self._pending: tuple[int, Best | None, Any] | None = None
    if _is_primary() and not read_only:
      directory.mkdir(parents=True, exist_ok=True)

  def save(self, step: int, state: Any, params: Any,
           best: Best | None) -> None:
    """Begins to write one checkpoint; the arrays may be donated after it.

    Args:
      step: its number.
      state: a pytree of arrays: everything but the parameters. Without
        leaves, only `restore_best` applies.
      params: the parameters, apart so that they can be restored alone.
      best: the best validation so far, this step included; None before the
        first one.
    """
    self.finish()
    path = self._directory / str(step)
    if _is_primary():
      self._delete(step)
    _barrier(f'save {path}')
    parts = {'params': params}
    if jax.tree.leaves(state):  # Orbax refuses empty trees
      parts['state'] = state
    response = ocp.save_checkpointables_async(path, parts)
    # Orbax's response cannot be asked whether it is done; a future can.
    waiting = futures.ThreadPoolExecutor(1, 'checkpoint')
    self._pending = step, best, waiting.submit(response.result)
    waiting.shutdown(wait=False)

  def finish(self) -> None:
    """Waits for a checkpoint to be whole, then deletes those not needed."""
    if self._pending is None:
      return
    (step, best, written), self._pending = self._pending, None
    written.result()
    path = self._directory / str(step)
    _barrier(f'saved {path}')
    files = _shared_checksums(path)
    if _is_primary():
      manifest = {'step': step,
                  'best': best and dataclasses.asdict(best),
                  'files': files}
      workdir_lib.write_text(self._manifest_path(step),
                             json.dumps(manifest, indent=1) + '\n')
      self._prune()

  def finish_if_written(self) -> None:
    """`finish` where no process would wait for what it writes."""
    if self._pending and _all(self._pending[-1].done()):
      self.finish()

  def close(self) -> None:
    """Waits for what is being written, whatever the other processes do."""
    if jax.process_count() == 1:
      self.finish()
    elif self._pending:
      self._pending[-1].result()

  def restore_latest(self, state: Any,
                     params: Any) -> tuple[int, Any, Any, Best | None] | None:
    """Restores the newest usable checkpoint.

    Newer ones that are not usable are reported in the log and deleted.

    Args:
      state: as given to `save`, of `jax.ShapeDtypeStruct` with shardings,
        which may differ from those it was saved with.
      params: likewise.

    Returns:
      (step, state, params, best), or None if there is nothing usable.
    """
    self.finish()
    step = _agree(self._newest_usable() if _is_primary() else None)
    if step is None:
      return None
    best = self._best(step)
    restored = self._load(step, {'params': params, 'state': state})
    return step, restored['state'], restored['params'], best

  def restore_best(self, params: Any) -> tuple[Best, Any] | None:
    """Restores the best parameters that the newest usable checkpoint names.

    Args:
      params: as for `restore_latest`.

    Returns:
      (best, params), or None if there is nothing usable.
    """
    self.finish()
    step = _agree(self._newest_usable() if _is_primary() else None)
    if step is None:
      return None
    best = self._best(step)
    if best is None:
      return None
    return best, self._load(best.step, {'params': params})['params']

  def mark_complete(self, step: int, best: Best) -> None:
    """Declares the stage done at `step`."""
    self.finish()
    if _is_primary():
      workdir_lib.write_text(
          self._directory / 'complete.json',
          json.dumps({'step': step, 'best': dataclasses.asdict(best)}) + '\n')

  def kept_start(self) -> bool:
    """Whether a complete stage's best parameters are those it began with."""
    text = (self._directory / 'complete.json').read_text(encoding='utf-8')
    return json.loads(text)['best']['step'] == 0

  def fingerprint(self) -> str:
    """What tells the weights of a complete stage from others."""
    text = (self._directory / 'complete.json').read_text(encoding='utf-8')
    manifest = self._manifest_path(json.loads(text)['best']['step'])
    files = json.loads(manifest.read_text(encoding='utf-8'))['files']
    return hashlib.blake2b(json.dumps(files, sort_keys=True).encode(),
                           digest_size=8).hexdigest()

  def is_complete(self) -> bool:
    """Whether the stage is done and its last and best checkpoints are whole.

    A marker whose checkpoints are damaged is removed: the stage then goes on
    from an earlier checkpoint.
    """
    self.finish()
    return bool(_agree(int(self._check_complete()) if _is_primary() else None))

  def _check_complete(self) -> bool:
    marker = self._directory / 'complete.json'
    if not marker.exists():
      return False
    try:
      step = int(json.loads(marker.read_text(encoding='utf-8'))['step'])
    except (ValueError, KeyError, TypeError):
      step = None
      self.faults.append(f'{marker} is corrupt')
    if step is not None and self._newest_usable() == step:
      return True
    if self._read_only:
      return False
    logging.warning('%s: the stage was complete, but its checkpoints are '
                    'damaged; it will be trained again from what is left.',
                    self._directory)
    marker.unlink()
    return False

  def _newest_usable(self) -> int | None:
    """The newest usable step; deletes newer debris."""
    steps = self._steps()
    for step in steps:
      fault = self._fault(step)
      if fault is None and (best := self._best(step)) and best.step != step:
        fault = self._fault(best.step)
        fault = fault and f'the best one, {best.step}, is damaged: {fault}'
      if fault is None:
        return step
      self.faults.append(f'{self._directory / str(step)}: {fault}')
      if self._read_only:
        continue
      logging.warning('Checkpoint %s is not usable (%s); falling back to the '
                      'one before it.', self._directory / str(step), fault)
      self._delete(step)
    if steps and not self._read_only:
      logging.warning('%s: no usable checkpoint is left; the stage starts '
                      'from its beginning.', self._directory)
    return None

  def _steps(self) -> list[int]:
    """Every step with a directory or a manifest, newest first."""
    names = {path.name.removesuffix('.json')
             for path in self._directory.iterdir()}
    return sorted((int(n) for n in names if n.isdecimal()), reverse=True)

  def _fault(self, step: int) -> str | None:
    """What is wrong with a checkpoint's own files, or None."""
    try:
      manifest = json.loads(
          self._manifest_path(step).read_text(encoding='utf-8'))
      files = {str(k): tuple(v) for k, v in manifest['files'].items()}
      if manifest['best'] is not None:
        Best(**manifest['best'])
    except FileNotFoundError:
      return 'it has no manifest: it was not written to its end'
    except (ValueError, KeyError, TypeError, AttributeError):
      return 'its manifest is corrupt'
    found = dict(_sizes(self._directory / str(step)))
    for name, (size, _) in files.items():
      if name not in found:
        return f'{name} is missing'
      if found[name] != size:
        return f'{name} has {found[name]} bytes instead of {size}'
    for name, checksum in workdir_lib.checksums(self._directory / str(step)):
      if name in files and files[name] != checksum:
        return f'{name} was altered'
    return None

  def _best(self, step: int) -> Best | None:
    text = self._manifest_path(step).read_text(encoding='utf-8')
    best = json.loads(text)['best']
    return None if best is None else Best(**best)

  def _prune(self) -> None:
    """Keeps the latest `keep` and the best ones they name; deletes the rest.

    Also removes what an interrupted save left.
    """
    whole = [s for s in self._steps() if self._manifest_path(s).exists()]
    kept = set(whole[:self._keep])
    kept |= {best.step for step in kept if (best := self._best(step))}
    for step in self._steps():
      if step not in kept:
        self._delete(step)
    for path in self._directory.iterdir():
      if path.is_dir() and not path.name.isdecimal():
        shutil.rmtree(path)

  def _delete(self, step: int) -> None:
    # The manifest goes first: a half-deleted checkpoint must not look whole.
    self._manifest_path(step).unlink(missing_ok=True)
    shutil.rmtree(self._directory / str(step), ignore_errors=True)

  def _manifest_path(self, step: int) -> pathlib.Path:
    return self._directory / f'{step}.json'

  def _load(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
    return ocp.load_checkpointables(self._directory / str(step), abstract)


def _shared_checksums(path: pathlib.Path) -> dict[str, tuple[int, int]]:
  """`workdir.checksums`, on every process, each of which reads its share."""
  count, index = jax.process_count(), jax.process_index()
  if count == 1:
    return dict(workdir_lib.checksums(path))
  own = json.dumps(dict(workdir_lib.checksums(
      path, lambda name: zlib.crc32(name.encode()) % count == index)))
  found = {}
  for text in _exchange(own):
    found |= json.loads(text)
  return found


def _exchange(text: str) -> list[str]:
  """Every process's text, on every process."""
  own = np.frombuffer(text.encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.int32(len(own)))
  rows = multihost_utils.process_allgather(
      np.pad(own, (0, int(np.max(sizes)) - len(own))))
  return [bytes(row[:size]).decode() for row, size in zip(rows, sizes)]


def _sizes(directory: pathlib.Path) -> Iterator[tuple[str, int]]:
  for root, _, names in sorted(os.walk(directory)):
    for name in sorted(names):
      path = pathlib.Path(root, name)
      yield str(path.relative_to(directory)), path.stat().st_size


def _is_primary() -> bool:
  return jax.process_index() == 0


def _barrier(name: str) -> None:
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def _all(value: bool) -> bool:
  """Whether it is true on every process."""
  if jax.process_count() == 1:
    return value
  return bool(np.all(multihost_utils.process_allgather(np.bool_(value))))


def _agree(value: int | None) -> int | None:
  """Process 0's value, on every process."""
  if jax.process_count() == 1:
    return value
  sent = multihost_utils.broadcast_one_to_all(
      np.int32(-1 if value is None else value))
  return None if sent < 0 else int(sent)
