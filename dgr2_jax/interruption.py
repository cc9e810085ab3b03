"""Ctrl-C that ends a command where KeyboardInterrupt might be swallowed."""

import os
import signal


def ends_with(message: str) -> None:
  """Has SIGINT write a line to stderr and end the process, exit code 130.

  For processes that may be killed at any time. KeyboardInterrupt would not end
  them: JAX's callbacks and imports swallow it. As any handler it runs when
  Python does: a compilation ends first. Where SIGINT is ignored, as in the
  background of a script, it stays so.
  """
  def stop(*unused_args):
    try:
      os.write(2, f'\nerror: {message}\n'.encode())
    finally:  # stderr may be gone
      os._exit(130)

  if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, stop)
