"""What Qwen3 takes at the paper's shape: the smallest TPU slice that fits.

    python experiments/scaling/scaling.py [--only 8b/cft/v5p ...]

compiles (`dgr2_jax/tools/plan.py`) the programs of `cft`, `opd` and `rl` for
slices of growing size until one fits, adds what it finds to scaling.json beside
this file and writes the table into docs/scaling.md. What is in scaling.json is
not compiled again. No TPU is needed, but its compiler (`pip install
'dgr2_jax[tpu]'`).

The compiler is asked for little effort, which takes it a minute a program;
`--full_effort` asks for what training would, which may take twenty, and adds to
full_effort.json: a check.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from dgr2_jax.training import abstract
from dgr2_jax.training import chips

ROOT = pathlib.Path(__file__).parents[2]
FOUND = pathlib.Path(__file__).with_name('scaling.json')
FULL = FOUND.with_name('full_effort.json')
PAGE = ROOT / 'docs' / 'scaling.md'
BEGIN, END = '<!-- experiments/scaling/scaling.json -->\n', '<!-- end -->\n'

SIZES = ('0.6b', '1.7b', '4b', '8b')
# Stages, and the requests of a batch: every chip takes one at least.
STAGES = {'cft': 128, 'opd': 128, 'rl': 64}
# By chip: shapes that can be had, and what Cloud TPU calls them.
SLICES = {
    'v5e': {'1x1': 'v5e-1', '2x2': 'v5e-4', '2x4': 'v5e-8', '4x4': 'v5e-16',
            '4x8': 'v5e-32', '8x8': 'v5e-64', '8x16': 'v5e-128'},
    'v5p': {'2x2x1': 'v5p-8', '2x2x2': 'v5p-16', '2x2x4': 'v5p-32',
            '2x4x4': 'v5p-64', '4x4x4': 'v5p-128'},
    'v6e': {'1x1': 'v6e-1', '2x2': 'v6e-4', '2x4': 'v6e-8', '4x4': 'v6e-16',
            '4x8': 'v6e-32', '8x8': 'v6e-64', '8x16': 'v6e-128'},
}


def least_bytes(size: str, devices: int) -> float:
  """Parameters, two moments and a gradient in float32, split over the chips."""
  s = abstract.QWEN3[size]
  layer = s['width'] * (2 * s['num_heads'] * 128 + 2 * 8 * 128
                        + 3 * s['mlp_dim'])
  tables = (1 if s['tie_embeddings'] else 2) * 151936 * s['width']
  return 16 * (s['num_layers'] * layer + tables) / devices


def too_small(found: Mapping[str, Any], size: str, stage: str, name: str,
              devices: int) -> bool:
  """Known without compiling: not even chips of more memory were enough."""
  memory = chips.named(name).memory
  return least_bytes(size, devices) > memory or any(
      key.startswith(f'{size}/{stage}/') and not cell['fits']
      and chips.named(cell['chip']).memory >= memory
      and math.prod(cell['mesh'].values()) == devices
      for key, cell in found.items() if 'mesh' in cell)


def search(path: pathlib.Path, size: str, stage: str, name: str) -> None:
  """Plans slices of a chip until one fits; adds to `path` after each."""
  found = read(path)
  for shape in SLICES[name]:
    key, devices = f'{size}/{stage}/{name}:{shape}', math.prod(
        map(int, shape.split('x')))
    if too_small(found, size, stage, name, devices):
      continue
    if devices > STAGES[stage]:
      return
    if key not in found:
      planned = _plan(size, stage, f'{name}:{shape}', devices,
                      '0' if path == FULL else '-1')
      found = read(path) | {key: planned}  # another may have written, too
      path.write_text(json.dumps(found, indent=1, sort_keys=True) + '\n',
                      encoding='utf-8')
    if found[key]['fits']:
      return


def read(path: pathlib.Path) -> dict[str, Any]:
  """What was found so far: what `plan.measure` returns, by cell and shape."""
  return json.loads(path.read_text('utf-8')) if path.exists() else {}


def _plan(size: str, stage: str, topology: str, devices: int,
          effort: str) -> dict[str, Any]:
  """In a process of its own: the compiler may abort it."""
  with tempfile.NamedTemporaryFile(suffix='.json') as output:
    done = subprocess.run(
        [sys.executable, '-m', 'dgr2_jax.tools.plan',
         f'--config={pathlib.Path(__file__).with_name("config.py")}'
         f':{size},{devices}', f'--topology={topology}', f'--stages={stage}',
         f'--output={output.name}'], cwd=ROOT, check=False,
        env=os.environ | {'JAX_EXEC_TIME_OPTIMIZATION_EFFORT': effort})
    if done.returncode < 0:
      return {'fits': False, 'error': 'the compiler aborted'}
    content = pathlib.Path(output.name).read_text(encoding='utf-8')
  if not content:
    sys.exit(f'error: {topology} could not be planned, see above.')
  return json.loads(content)[0]


def table(found: Mapping[str, Any]) -> str:
  """The table of docs/scaling.md."""
  lines = ['| model | stage | ' + ' | '.join(SLICES) + ' |',
           '|---|---|' + '---|' * len(SLICES)]
  for size in SIZES:
    for stage in STAGES:
      cells = [_cell(found, size, stage, name) for name in SLICES]
      if any(cell != '-' for cell in cells):
        lines.append(f'| Qwen3-{size.upper()} | `{stage}` | '
                     + ' | '.join(cells) + ' |')
  return '\n'.join(lines) + '\n'


def _cell(found: Mapping[str, Any], size: str, stage: str, name: str) -> str:
  """The first slice that fits; `<=` where a smaller one is not known."""
  above, skipped = '', ''
  for shape, slice_ in SLICES[name].items():
    cell = found.get(f'{size}/{stage}/{name}:{shape}')
    if cell and cell['fits']:
      total = max(x['total'] for x in cell['programs'].values())
      seconds = sum(x['seconds'] * x['runs']
                    for x in cell['programs'].values())
      return f'{skipped}{slice_}: {total / 1e9:.1f} GB, {seconds:.1f} s'
    if cell and 'programs' not in cell:  # the compiler aborted
      skipped = '<= '
    elif cell:
      above = f'above {slice_}'
    elif not too_small(found, size, stage, name,
                       math.prod(map(int, shape.split('x')))):
      skipped = '<= '
  return above or '-'


def ratios(found: Mapping[str, Any], full: Mapping[str, Any]) -> list[float]:
  """Bytes at little effort by those at full, of programs that have both."""
  return [program['total'] / other['total']
          for key in found.keys() & full.keys()
          for name, program in found[key].get('programs', {}).items()
          if 'total' in program and 'total' in (
              other := full[key].get('programs', {}).get(name, {}))]


def page(text: str, found: Mapping[str, Any], full: Mapping[str, Any]) -> str:
  """docs/scaling.md with the table of `found` in its place."""
  before, rest = text.split(BEGIN)
  check = ratios(found, full)
  words = (f'{len(check)} of the programs were compiled at full effort, too: '
           f'at\nlittle they take {min(check):.2f} to {max(check):.2f} times '
           'as many bytes.\n\n' if check else '')
  return (before + BEGIN + '\n' + table(found) + '\n' + words + END
          + rest.split(END)[1])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--only', nargs='*', metavar='SIZE/STAGE/CHIP',
                      help='cells of the table; all by default')
  parser.add_argument('--full_effort', action='store_true')
  args = parser.parse_args()
  cells = [f'{size}/{stage}/{name}' for size in SIZES for stage in STAGES
           for name in SLICES]
  for cell in args.only if args.only is not None else cells:
    if cell not in cells:
      parser.error(f'{cell}: expected one such as {cells[0]}')
    search(FULL if args.full_effort else FOUND, *cell.split('/'))
    PAGE.write_text(
        page(PAGE.read_text('utf-8'), read(FOUND), read(FULL)), 'utf-8')


if __name__ == '__main__':
  main()
