r"""Makes executed notebooks of the Python files beside this one.

    python colab/build.py [--sources=DIR] [--output=DIR] [NAME ...]

NAME.py holds cells as many editors know them: `# %%` begins code, `# %%
[markdown]` text in comments. NAME.ipynb gets the cells and what they print and
draw, run from the top in a fresh Jupyter kernel of this Python. Below the title
comes a badge that opens the notebook in Colab, and behind the first text a cell
that installs the project there; both get the repository's address from
setup.py.
"""

from __future__ import annotations

import argparse
import pathlib
import re

import nbclient
import nbformat

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
  if not folder.exists():
    subprocess.run(['git', 'clone', '-q', '--depth=1', '{REPOSITORY}', folder],
                   check=True)
  subprocess.run([sys.executable, '-m', 'pip', 'install', '-q', '-e',
                  f'{{folder}}{{extra}}'], check=True)
  sys.path.insert(0, str(folder))  # a running process does not see pip's link
"""


METADATA = {'kernelspec': {
    'display_name': 'Python 3', 'language': 'python', 'name': 'python3'}}
# Small pictures, whatever a user's settings of Jupyter.
DRAWING = "--InlineBackend.print_figure_kwargs={'bbox_inches':'tight','dpi':70}"


def cells(name: str, source: str) -> list[nbformat.NotebookNode]:
  """The cells of a file, with badge and installation, without outputs."""
  title, *rest = (
      _cell(*part.split('\n', 1)) for part in source.split('# %%')[1:])
  link = f'{COLAB}/blob/main/colab/{name}.ipynb'
  title.source = title.source.replace(
      '\n', f'\n\n[![Open in Colab]({BADGE})]({link})\n', 1)
  result = [title, _cell('', INSTALL), *rest]
  for index, cell in enumerate(result):
    cell.id = f'cell-{index}'
  return result


def _cell(head: str, body: str) -> nbformat.NotebookNode:
  """A cell of text or code; `head` is what stands behind `# %%`."""
  body = body.strip('\n')
  if head.strip() != '[markdown]':
    return nbformat.v4.new_code_cell(body)
  return nbformat.v4.new_markdown_cell('\n'.join(
      line.removeprefix('#').removeprefix(' ') for line in body.split('\n')))


def build(source: pathlib.Path, output: pathlib.Path) -> None:
  """Writes the executed notebook of one file."""
  notebook = nbformat.v4.new_notebook(
      cells=cells(source.stem, source.read_text(encoding='utf-8')))
  nbclient.NotebookClient(
      notebook, kernel_name='python3', extra_arguments=[DRAWING],
      coalesce_streams=True, record_timing=False, store_widget_state=False,
  ).execute()
  for cell in notebook.cells:
    if cell.cell_type == 'code':  # without logs and progress bars
      cell.outputs = [o for o in cell.outputs if o.get('name') != 'stderr']
  notebook.metadata = METADATA
  output.write_text(nbformat.writes(notebook) + '\n', encoding='utf-8')
  print(f'Wrote {output}')


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('names', nargs='*', metavar='NAME')
  parser.add_argument('--sources', type=pathlib.Path, default=HERE)
  parser.add_argument('--output', type=pathlib.Path, default=HERE)
  args = parser.parse_args()
  for name in args.names or sorted(
      path.stem for path in args.sources.glob('*.py') if path.stem != 'build'):
    build(args.sources / f'{name}.py', args.output / f'{name}.ipynb')


if __name__ == '__main__':
  main()
