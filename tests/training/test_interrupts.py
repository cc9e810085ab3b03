"""Signals between steps."""

import os
import pathlib
import signal
import socket
import subprocess
import sys

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


def test_a_job_of_processes_leaves_sigterm_alone():
  process = subprocess.Popen(
      [sys.executable, '-c',
       'import time\nfrom dgr2_jax.training import hosts\n'
       f'hosts.join("localhost:{_free_port()},0/1")\n'
       'print("joined", flush=True)\ntime.sleep(60)'],
      cwd=pathlib.Path(__file__).parents[2], text=True, stdout=subprocess.PIPE)
  assert process.stdout.readline() == 'joined\n'
  process.terminate()
  assert process.wait(timeout=30) == -signal.SIGTERM


def _free_port():
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


def test_the_second_stops_at_once():
  with interrupts.Signals() as signals:
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.received(False)
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)
