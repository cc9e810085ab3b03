"""Signals between steps."""

import os
import signal

import pytest

from dgr2_jax import interruption
from dgr2_jax.training import interrupts


@pytest.fixture(autouse=True)
def _handlers():
  before = signal.getsignal(signal.SIGINT)
  yield
  signal.signal(signal.SIGINT, before)


def test_what_is_ignored_stays_so():
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # in a script's background
  interruption.ends_with('not seen')
  with interrupts.Signals() as signals:
    os.kill(os.getpid(), signal.SIGINT)
    assert not signals.received(False)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received(False)
  assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_the_second_stops_at_once():
  with interrupts.Signals() as signals:
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.received(False)
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)
