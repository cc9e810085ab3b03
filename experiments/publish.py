"""Copies the report of a finished working directory to its folder here.

    python experiments/publish.py WORKDIR experiments/quickstart/seed0

Tables and figures are rendered anew from report.json and metrics.jsonl, config
and command are taken over; paths on the machine become DIR in both. No figure
is changed.
"""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import sys
import tempfile
from typing import Any

from dgr2_jax.evaluation import report

# Fields of a config that name files or directories.
PATHS = (
    'data.path', 'data.retriever.path', 'semantic_ids.rqvae.embeddings.path',
    'prompt.traces.path', 'tokenizer.path', 'model.huggingface',
    'mid_train.text')
_FLAGS = '|'.join(map(re.escape, PATHS))
_DIRECTORY = re.compile(rf'(--workdir|--config\.(?:{_FLAGS}))=\S+')
_PUBLISHED = ('report.json', 'report.md', 'report.html', 'figures')


def blank(config: dict[str, Any]) -> None:
  """Replaces the paths that a config names, where it names any."""
  for path in PATHS:
    *sections, field = path.split('.')
    section = config
    for name in sections:
      section = section.get(name) or {}
    if section.get(field):
      section[field] = 'DIR'


def publish(workdir: pathlib.Path, folder: pathlib.Path) -> None:
  """Writes report, figures and config.json of `workdir` into `folder`."""
  content = json.loads((workdir / 'report.json').read_text(encoding='utf-8'))
  content['command'] = _DIRECTORY.sub(r'\1=DIR', content['command'])
  config = json.loads((workdir / 'config.json').read_text(encoding='utf-8'))
  blank(config)
  with tempfile.TemporaryDirectory() as rendered:
    rendered = pathlib.Path(rendered)
    shutil.copy(workdir / 'metrics.jsonl', rendered)
    report.write(rendered, content)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / 'figures', ignore_errors=True)
    for name in _PUBLISHED:
      shutil.move(rendered / name, folder / name)
  (folder / 'config.json').write_text(
      json.dumps(config, indent=2, sort_keys=True) + '\n', encoding='utf-8')


if __name__ == '__main__':
  if len(sys.argv) != 3:
    sys.exit(__doc__)
  publish(*map(pathlib.Path, sys.argv[1:]))
