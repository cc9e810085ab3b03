"""Runs that differ from a config in a few fields, as commands.

A config file may have a `sweep()`: name -> the fields that differ, by their
whole names. `python -m dgr2_jax.main --print_sweep` lists one command a run.
"""

from __future__ import annotations

from collections.abc import Mapping
import pathlib
import runpy
import shlex
from typing import Any

_SFT = ('ar_sft', 'ar_rl', 'convert', 'cft')
# What every stage and choice of the method is worth.
ABLATIONS = {
    'whole': {},
    'cft': {'recipe': _SFT},
    'cft_opd': {'recipe': (*_SFT, 'opd')},
    'cft_rl': {'recipe': (*_SFT, 'rl')},
    # A block-causal clean stream is no AR model that could be trained along.
    'block_causal': {'canvas.clean_stream': 'block_causal',
                     'cft.ar_weight': 0., 'rl.ar_weight': 0.},
    'same_position': {'canvas.alignment': 'same_position'},
    'all_canvases': {'opd.rollout.canvases': 'all'},
    'opd_as_published': {'opd.positions': 'all', 'opd.elsewhere': 'none'},
    'rl_as_published': {'rl.cft_weight': 0.},
}


def of(filename: str) -> dict[str, dict[str, Any]]:
  """The sweep of a config file.

  Raises:
    ValueError: it has none.
  """
  path = pathlib.Path(filename.partition(':')[0])
  functions = runpy.run_path(str(path))
  if 'sweep' not in functions:
    raise ValueError(f'{path} has no sweep(): a function that returns '
                     '{name: {field: value}}')
  return functions['sweep']()


def commands(filename: str, workdir: str, flags: list[str],
             sweep: Mapping[str, Mapping[str, Any]]) -> list[str]:
  """One command line a run, each with a working directory of its own.

  Args:
    filename: of the config, with its argument.
    workdir: in which every run has a directory named after it.
    flags: other flags of all runs.
    sweep: from `of`.
  """
  return [' '.join(_quoted(part) for part in (
      'python', '-m', 'dgr2_jax.main', f'--config={filename}',
      f'--workdir={pathlib.Path(workdir) / name}', *flags,
      *(f'--config.{field}={value}' for field, value in fields.items())))
          for name, fields in sweep.items()]


def _quoted(part: str) -> str:
  """For a shell; tuples of names in double quotes, which reads best."""
  return f'"{part}"' if "'" in part and not set(part) & set('"$`\\!') else (
      shlex.quote(part))
