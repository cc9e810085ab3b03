"""Settings for all tests."""

from importlib import metadata
import os

# Tests compile hundreds of tiny programs and run each once: don't optimise.
_FLAGS = ['--xla_backend_optimization_level=0',
          '--xla_llvm_disable_expensive_passes=true']
if metadata.version('jaxlib').startswith('0.10.'):  # 0.12 doesn't know it
  _FLAGS.append('--xla_cpu_use_fusion_emitters=false')
os.environ['XLA_FLAGS'] = ' '.join([os.environ.get('XLA_FLAGS', ''), *_FLAGS])

import jax  # after the flags
import pytest


# They take longest, and begin first: nothing then waits for one at the end.
_LONGEST = ('test_stages.py', 'test_ablations.py', 'test_commands.py',
            'test_colab.py')


def pytest_collection_modifyitems(items):
  place = {name: i - len(_LONGEST) for i, name in enumerate(_LONGEST)}
  items.sort(key=lambda item: place.get(item.path.name, 0))


@pytest.fixture(autouse=True, scope='module')
def _free_programs():
  """Compiled programs take memory mappings, of which a process has so many."""
  yield
  jax.clear_caches()
