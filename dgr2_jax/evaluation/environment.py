"""The machine and the versions that figures depend on."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform

import jax


def machine() -> str:
  """Processor, how many of them, and JAX's device, in words."""
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text(encoding='utf-8')
  except OSError:  # not Linux
    lines = ''
  model = [line.partition(':')[2].strip() for line in lines.splitlines()
           if line.startswith('model name')]
  return ', '.join((model[0] if model else platform.machine(),
                    f'{os.cpu_count()} CPUs', jax.devices()[0].device_kind))


def environment(*packages: str) -> dict[str, str]:
  """`machine`, `python`, and the versions of `packages`, by name."""
  return {'machine': machine(), 'python': platform.python_version(),
          **{name: importlib.metadata.version(name) for name in packages}}
