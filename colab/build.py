r"""Makes executed notebooks of the Python files beside this one.

    python colab/build.py [--output=DIR] [NAME ...]

NAME.py holds cells as many editors know them: `# %%` begins code, `# %%
[markdown]` text in comments. NAME.ipynb gets the cells and what they print and
draw, run from the top in a fresh process.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import pathlib
import subprocess
import sys
from typing import Any

HERE = pathlib.Path(__file__).parent


def cells(source: str) -> list[dict[str, Any]]:
  """The cells of a file, without outputs."""
  result = []
  for index, part in enumerate(source.split('# %%')[1:]):
    head, _, body = part.partition('\n')
    cell = {'cell_type': 'code', 'id': f'cell-{index}', 'metadata': {}}
    if head.strip() == '[markdown]':
      cell['cell_type'] = 'markdown'
      body = '\n'.join(
          line.removeprefix('#').removeprefix(' ') for line in
          body.strip('\n').split('\n'))
    else:
      cell |= {'execution_count': None, 'outputs': []}
    cell['source'] = body.strip('\n').splitlines(keepends=True)
    result.append(cell)
  return result


def execute(notebook: list[dict[str, Any]]) -> None:
  """Runs the code and adds its outputs, in this process."""
  import matplotlib
  matplotlib.use('agg')
  from matplotlib import pyplot as plt

  names, count = {'__name__': '__main__'}, 0
  for cell in notebook:
    if cell['cell_type'] != 'code':
      continue
    count += 1
    cell['execution_count'] = count
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
      exec(compile(''.join(cell['source']), f'cell {count}', 'exec'), names)
    if printed.getvalue():
      cell['outputs'].append({
          'output_type': 'stream', 'name': 'stdout',
          'text': printed.getvalue().splitlines(keepends=True)})
    for number in plt.get_fignums():
      png = io.BytesIO()
      plt.figure(number).savefig(png, dpi=70, bbox_inches='tight')
      cell['outputs'].append({
          'output_type': 'display_data', 'metadata': {},
          'data': {'image/png': base64.b64encode(png.getvalue()).decode()}})
    plt.close('all')


def build(source: pathlib.Path, output: pathlib.Path) -> None:
  """Writes the executed notebook of one file."""
  notebook = cells(source.read_text(encoding='utf-8'))
  execute(notebook)
  output.write_text(json.dumps({
      'cells': notebook, 'nbformat': 4, 'nbformat_minor': 5,
      'metadata': {'kernelspec': {
          'display_name': 'Python 3', 'language': 'python', 'name': 'python3'}},
  }, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')
  print(f'Wrote {output}')


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('names', nargs='*', metavar='NAME')
  parser.add_argument('--output', type=pathlib.Path, default=HERE)
  args = parser.parse_args()
  names = args.names or sorted(
      path.stem for path in HERE.glob('*.py') if path.name != 'build.py')
  if len(names) == 1:
    build(HERE / f'{names[0]}.py', args.output / f'{names[0]}.ipynb')
    return
  for name in names:  # each in a process of its own
    subprocess.run([sys.executable, __file__, f'--output={args.output}', name],
                   check=True)


if __name__ == '__main__':
  main()
