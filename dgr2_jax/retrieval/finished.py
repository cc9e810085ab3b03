"""Keeps the parts of a long computation that are done, for when it is killed.

    DIR/<hash of settings and data>/<part>.npz

`prepare` leaves its directory whole or not at all, but a retriever that is
trained within it takes one model for validation and test and one a fold. The
lists of each model stand here from when they are there until `prepare` is
complete; a part that was made from other settings or data has another name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import hashlib
import io
import json
import pathlib
from typing import Any
import zipfile

from absl import logging
import numpy as np

from dgr2_jax.training import workdir


class Finished:
  """Arrays by part; those that are not on disk are made and written."""

  def __init__(self, directory: pathlib.Path | None = None,
               settings: Mapping[str, Any] | None = None,
               arrays: Mapping[str, np.ndarray] | None = None):
    """Opens nothing yet.

    Args:
      directory: DIR; None keeps nothing.
      settings: plain data that decide the parts.
      arrays: the data that do.
    """
    self._directory = None
    if directory is not None:
      digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
      for name, array in sorted((arrays or {}).items()):
        digest.update(f'{name} {array.dtype} {array.shape} '.encode())
        digest.update(np.ascontiguousarray(array).tobytes())
      self._directory = directory / digest.hexdigest()[:16]

  def get(self, part: str, make: Callable[[], dict[str, np.ndarray]]
          ) -> dict[str, np.ndarray]:
    """The arrays of a part: those on disk, or what `make` gives."""
    if self._directory is None:
      return make()
    path = self._directory / f'{part}.npz'
    try:
      with np.load(path) as f:
        arrays = dict(f)
      if not arrays:
        raise ValueError('no arrays')
      logging.info('%s is there from an earlier start.', path)
      return arrays
    except FileNotFoundError:
      pass
    except (OSError, ValueError, EOFError, NotImplementedError,
            zipfile.BadZipFile) as e:
      logging.warning('%s is damaged (%s): it is made anew.', path, e)
    arrays = make()
    content = io.BytesIO()
    np.savez(content, **arrays)
    self._directory.mkdir(parents=True, exist_ok=True)
    workdir.write_bytes(path, content.getvalue())
    return arrays
