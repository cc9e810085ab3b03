"""Settings for all tests."""

import os

# Tests compile hundreds of tiny programs and run each once: don't optimise.
os.environ['XLA_FLAGS'] = ' '.join([
    os.environ.get('XLA_FLAGS', ''), '--xla_backend_optimization_level=0',
    '--xla_llvm_disable_expensive_passes=true'])

import jax  # after the flags
import pytest


@pytest.fixture(autouse=True, scope='module')
def _free_programs():
  """Compiled programs take memory mappings, of which a process has so many."""
  yield
  jax.clear_caches()
