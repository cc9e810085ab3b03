"""Ctrl-C that ends a command at once, wherever it is."""

import os
import signal


def ends_with(message: str) -> None:
  """Has SIGINT write a line to stderr and end the process, exit code 130.

  For processes that may be killed at any time. KeyboardInterrupt would not end
  them: JAX's callbacks and imports swallow it.
  """
  def stop(*unused_args):
    os.write(2, f'\nerror: {message}\n'.encode())
    os._exit(130)

  signal.signal(signal.SIGINT, stop)
