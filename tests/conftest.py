"""Settings for all tests."""

import os

# Tests compile hundreds of tiny programs and run each once: don't optimise.
os.environ['XLA_FLAGS'] = ' '.join([
    os.environ.get('XLA_FLAGS', ''), '--xla_backend_optimization_level=0',
    '--xla_llvm_disable_expensive_passes=true'])
