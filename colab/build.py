r"""Makes executed notebooks of the Python files beside this one.

    python colab/build.py [--sources=DIR] [--output=DIR] [NAME ...]

NAME.py holds cells as many editors know them: `# %%` begins code, `# %%
[markdown]` text in comments. NAME.ipynb gets the cells and what they print and
draw, run from the top in a fresh process. Below the title comes a badge that
opens the notebook in Colab, and behind the first text a cell that installs the
project there; both get the repository's address from setup.py.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import pathlib
import re
import subprocess
import sys
from typing import Any

HERE = pathlib.Path(__file__).parent
REPOSITORY = re.search(
    r"url='(.*?)'", (HERE.parent / 'setup.py').read_text('utf-8'))[1]

BADGE = 'https://colab.research.google.com/assets/colab-badge.svg'
COLAB = REPOSITORY.replace('github.com', 'colab.research.google.com/github')
INSTALL = f"""\
# Installs the project, unless it is there.
import importlib.util
import os
import pathlib
import subprocess
import sys

if importlib.util.find_spec('dgr2_jax') is None:
  tpu = os.environ.get('TPU_ACCELERATOR_TYPE')  # on Colab's TPU runtimes
  gpu = pathlib.Path('/dev/nvidia0').exists()
  extra = '[tpu]' if tpu else '[cuda]' if gpu else ''
  folder = pathlib.Path('source_of_dgr2_jax').absolute()
  repository = '{REPOSITORY}'
  subprocess.run(['git', 'clone', '-q', '--depth=1', repository, folder],
                 check=True)
  subprocess.run([sys.executable, '-m', 'pip', 'install', '-q', '-e',
                  f'{{folder}}{{extra}}'], check=True)
  sys.path.insert(0, str(folder))  # a running process does not see pip's link
"""


def cells(name: str, source: str) -> list[dict[str, Any]]:
  """The cells of a file, with badge and installation, without outputs."""
  result = [_cell(*part.split('\n', 1)) for part in source.split('# %%')[1:]]
  link = f'{COLAB}/blob/main/colab/{name}.ipynb'
  result[0]['source'][1:1] = [
      '\n', f'[![Open in Colab]({BADGE})]({link})\n']
  result.insert(1, _cell('', INSTALL))
  for index, cell in enumerate(result):
    cell['id'] = f'cell-{index}'
  return result


def _cell(head: str, body: str) -> dict[str, Any]:
  """A cell of text or code; `head` is what stands behind `# %%`."""
  cell = {'cell_type': 'code', 'id': '', 'metadata': {}}
  if head.strip() == '[markdown]':
    cell['cell_type'] = 'markdown'
    body = '\n'.join(
        line.removeprefix('#').removeprefix(' ') for line in
        body.strip('\n').split('\n'))
  else:
    cell |= {'execution_count': None, 'outputs': []}
  cell['source'] = body.strip('\n').splitlines(keepends=True)
  return cell


def execute(notebook: list[dict[str, Any]]) -> None:
  """Runs the code and adds its outputs, in this process."""
  import matplotlib
  matplotlib.use('agg')
  from matplotlib import pyplot as plt

  def display(data, raw):
    """Jupyter's, of what has a MIME type."""
    assert raw
    cell['outputs'].append(
        {'output_type': 'display_data', 'metadata': {}, 'data': data})

  names, count = {'__name__': '__main__', 'display': display}, 0
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
  notebook = cells(source.stem, source.read_text(encoding='utf-8'))
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
  parser.add_argument('--sources', type=pathlib.Path, default=HERE)
  parser.add_argument('--output', type=pathlib.Path, default=HERE)
  args = parser.parse_args()
  names = args.names or sorted(
      path.stem for path in args.sources.glob('*.py') if path.stem != 'build')
  if len(names) == 1:
    build(args.sources / f'{names[0]}.py', args.output / f'{names[0]}.ipynb')
    return
  for name in names:  # each in a process of its own
    subprocess.run([sys.executable, __file__, f'--sources={args.sources}',
                    f'--output={args.output}', name], check=True)


if __name__ == '__main__':
  main()
