"""How commands begin: Ctrl-C ends them, and stderr is there to write to.

Not by KeyboardInterrupt, which JAX's callbacks and imports swallow.
"""

import os
import signal
import sys


class Stderr:
  """stderr, whose reader may end before the work does."""

  def write(self, text: str) -> None:
    try:
      sys.stderr.write(text)
      sys.stderr.flush()
    except OSError:  # such as a broken pipe: from now on to nobody
      sys.stderr = open(os.devnull, 'w', encoding='utf-8')

  def flush(self) -> None:
    pass  # written already

  def isatty(self) -> bool:
    return sys.stderr.isatty()

  @property
  def encoding(self) -> str:
    return sys.stderr.encoding


def ends_with(message: str) -> None:
  """Has SIGINT write a line to stderr and end the process, exit code 130.

  For processes that may be killed at any time. As any handler it runs when
  Python does: a compilation ends first. Where SIGINT is ignored, as in the
  background of a script, it stays so. A stderr that was closed is opened, so
  that no other file gets its number.
  """
  def stop(*unused_args):
    try:
      os.write(2, f'\nerror: {message}\n'.encode())
    finally:  # stderr may be gone
      os._exit(130)

  if sys.stderr is None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stderr = open(2, 'w', encoding='utf-8', closefd=False)
  if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, stop)
