"""SIGTERM and SIGINT as a question between two steps, agreed by all hosts."""

from __future__ import annotations

import signal
import threading
from typing import Any

from absl import logging
import jax
from jax.experimental import multihost_utils
import numpy as np


class Signals:
  """Turns SIGTERM and SIGINT into a question asked between two steps.

  A second SIGINT interrupts at once, as usual. Outside the main thread signals
  are left alone, as are those that the process ignores.
  """

  _HANDLED = (signal.SIGTERM, signal.SIGINT)

  def __enter__(self) -> Signals:
    self._received = False
    self._previous = {}
    if threading.current_thread() is threading.main_thread():
      for number in self._HANDLED:
        if signal.getsignal(number) is not signal.SIG_IGN:
          self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *unused_args) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler or signal.SIG_DFL)

  def _handle(self, number: int, frame: Any) -> None:
    del frame
    if self._received and number == signal.SIGINT:
      raise KeyboardInterrupt
    self._received = True
    logging.warning('%s: stopping after this step or validation; another '
                    'SIGINT stops at once.', signal.Signals(number).name)

  def received(self, synchronise: bool) -> bool:
    """Whether to stop.

    Args:
      synchronise: whether the processes of a job may agree now, which costs
        them a round trip; otherwise only a single process may stop.

    Returns:
      The same answer on all processes.
    """
    if jax.process_count() == 1:
      return self._received
    return synchronise and bool(np.max(multihost_utils.process_allgather(
        np.int32(self._received))))
