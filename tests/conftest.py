"""Settings for all tests."""

import atexit
from importlib import metadata
import os
import shutil
import signal
import tempfile

# Tests compile hundreds of tiny programs and run each once: don't optimise.
_FLAGS = ['--xla_backend_optimization_level=0',
          '--xla_llvm_disable_expensive_passes=true']
if metadata.version('jaxlib').startswith('0.10.'):  # 0.12 doesn't know it
  _FLAGS.append('--xla_cpu_use_fusion_emitters=false')
os.environ['XLA_FLAGS'] = ' '.join([os.environ.get('XLA_FLAGS', ''), *_FLAGS])

# Processes that tests start share what they compile, not these tests' own.
_CACHE = 'JAX_COMPILATION_CACHE_DIR'
_directory = os.environ.pop(_CACHE, None)  # of the session, in its workers

import jax  # after the flags
import pytest

if not _directory:
  _directory = tempfile.mkdtemp(prefix='dgr2_jax_tests')
  atexit.register(shutil.rmtree, _directory, ignore_errors=True)
os.environ |= {_CACHE: _directory,
               'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
               'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1'}

# Scripts start what runs in the background with it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

# They take longest, and begin first: nothing then waits for one at the end.
_LONGEST = ('test_stages.py', 'test_ablations.py', 'test_meshes.py',
            'test_commands.py', 'test_colab.py')


def pytest_collection_modifyitems(items):
  place = {name: i - len(_LONGEST) for i, name in enumerate(_LONGEST)}
  items.sort(key=lambda item: place.get(item.path.name, 0))


@pytest.fixture(autouse=True, scope='module')
def _free_programs():
  """Compiled programs take memory mappings, of which a process has so many."""
  yield
  jax.clear_caches()
