"""Metrics to disk and progress to the screen.

    DIR/metrics.jsonl           one JSON object a line, only ever appended to:
      {"stage": "cft", "step": 40, "train/loss": 1.25, "timing": {...}}
      {"stage": "cft", "step": 40, "validation/ndcg@3": 0.47, "timing": {...}}
    DIR/tensorboard/<stage>/    the same values as curves
    DIR/profile/<stage>/        of `config.profile_steps`, for XProf

Everything but `timing` is a function of config and data. When a stage resumes
from step s, its lines beyond s are dropped, so that a run that was killed
leaves the same lines as one that was not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import json
import math
import os
import pathlib
import time
from typing import Any

from absl import logging
import jax
import orbax.checkpoint as ocp
import tensorboardX

from dgr2_jax.training import workdir as workdir_lib


def hide_library_chatter() -> None:
  """Keeps INFO lines of JAX and Orbax (dozens a checkpoint) off the screen."""
  packages = tuple(os.path.dirname(module.__file__) + os.sep
                   for module in (jax, ocp))

  def wanted(record):
    return record.levelno > logging.converter.STANDARD_INFO or (
        not record.pathname.startswith(packages))

  logging.get_absl_handler().addFilter(wanted)


class Clock:
  """Time spent training: it stands still inside `pause()`."""

  def __init__(self):
    self._start = time.monotonic()
    self._paused = 0.

  def seconds(self) -> float:
    """Seconds since the start, pauses excluded."""
    return time.monotonic() - self._start - self._paused

  @contextlib.contextmanager
  def pause(self) -> Iterator[None]:
    """Stops the clock, for compilation, validation and checkpoints."""
    start = time.monotonic()
    try:
      yield
    finally:
      self._paused += time.monotonic() - start


class Profile:
  """A profile of some steps, written by `jax.profiler`; of none by default."""

  def __init__(self, directory: pathlib.Path, first: int = 0, last: int = 0):
    """Args are the steps, counted from 1, and where their profile goes."""
    self._directory = directory
    self._first, self._last = first, last
    self._running = False

  def before(self, step: int) -> None:
    """Starts with the first step, or with a later one of a resumed run."""
    if self._first <= step <= self._last and not self._running:
      jax.profiler.start_trace(self._directory)
      self._running = True

  def after(self, step: int, state: Any) -> None:
    """Ends with the last step, when its `state` is there."""
    if self._running and step >= self._last:
      jax.block_until_ready(state)
      self.close()
      logging.info('A profile of the steps up to %d is in %s.', step,
                   self._directory)

  def close(self) -> None:
    """Writes what was begun."""
    if self._running:
      self._running = False
      jax.profiler.stop_trace()


class MetricsWriter:
  """Writes one stage's metrics; only process 0 touches the disk."""

  def __init__(self, directory: pathlib.Path, stage: str, step: int):
    """Opens the files.

    Args:
      directory: the run's working directory.
      stage: the stage that writes.
      step: the step it resumes from; -1 starts anew.
    """
    self._stage = stage
    self._file = self._board = None
    if jax.process_index() == 0:
      path = directory / 'metrics.jsonl'
      _drop_after(path, stage, step)
      self._file = open(path, 'a', encoding='utf-8')
      self._board = tensorboardX.SummaryWriter(
          str(directory / 'tensorboard' / stage), purge_step=step + 1)

  def write(self, step: int, values: Mapping[str, float],
            timing: Mapping[str, float]) -> None:
    """Appends one line, on disk when this returns.

    Args:
      step: training steps done.
      values: what the same command reproduces exactly. A value that is not
        finite becomes null, as JSON has no word for it.
      timing: wall-clock figures, in seconds or per second.
    """
    if self._file is None:
      return
    line = {'stage': self._stage, 'step': step}
    line |= {k: _finite(v) for k, v in values.items()}
    line['timing'] = {k: round(float(v), 3) for k, v in timing.items()}
    self._file.write(json.dumps(line, allow_nan=False) + '\n')
    self._file.flush()
    os.fsync(self._file.fileno())
    for name, value in {**values, **{f'timing/{k}': v
                                     for k, v in timing.items()}}.items():
      # TensorBoard's names know no @.
      self._board.add_scalar(name.replace('@', '_'), float(value), step)
    self._board.flush()

  def close(self) -> None:
    """Closes the files."""
    if self._file is not None:
      self._file.close()
      self._board.close()


def _finite(value: float) -> float | None:
  value = float(value)
  return value if math.isfinite(value) else None


def _drop_after(path: pathlib.Path, stage: str, step: int) -> None:
  """Atomically drops a stage's lines beyond `step`, and a torn last line."""
  if not path.exists():
    return
  text = path.read_text(encoding='utf-8', errors='replace')
  kept = []
  for line in text.splitlines(keepends=True):
    try:
      values = json.loads(line)
      if line.endswith('\n') and not (values['stage'] == stage
                                      and values['step'] > step):
        kept.append(line)
    except (ValueError, KeyError, TypeError):
      logging.warning('%s: dropped a line that is not a metrics record: %.80r',
                      path, line)
  if (new := ''.join(kept)) != text:
    workdir_lib.write_text(path, new)


def progress(stage: str, step: int, steps: int, seconds: float, done: int,
             values: Mapping[str, float], tokens: float | None,
             mfu: float | None = None) -> None:
  """Logs a line such as

      cft 120/600 | loss 1.234 | 3.1 steps/s | 12.3k tokens/s | ETA 2m35s

  Args:
    stage: what is being trained.
    step: steps done.
    steps: steps in all.
    seconds: training time of the last `done` steps.
    done: steps since the last line.
    values: metrics; `loss` is shown.
    tokens: tokens in the last `done` steps, if known.
    mfu: share of the chips' published peak, if known.
  """
  rate = done / max(seconds, 1e-9)
  parts = [f'{stage} {step}/{steps}']
  if 'loss' in values:
    parts.append(f'loss {values["loss"]:.4g}')
  parts.append(f'{rate:.3g} steps/s')
  if tokens is not None:
    per_second = tokens / max(seconds, 1e-9)
    parts.append(f'{per_second / 1e3:.1f}k tokens/s' if per_second >= 1e4
                 else f'{per_second:.0f} tokens/s')
  if mfu is not None:
    parts.append(f'MFU {mfu:.1%}')
  parts.append(f'ETA {duration((steps - step) / rate)}')
  logging.info('%s', ' | '.join(parts))


def duration(seconds: float) -> str:
  """A duration for people: 42s, 2m35s, 1h02m."""
  seconds = round(seconds)
  if seconds < 60:
    return f'{seconds}s'
  if seconds < 3600:
    return f'{seconds // 60}m{seconds % 60:02d}s'
  return f'{seconds // 3600}h{seconds % 3600 // 60:02d}m'
