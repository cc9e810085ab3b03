"""Copies the report of a finished working directory to its folder here.

    python experiments/publish.py WORKDIR experiments/quickstart/seed0
    python experiments/publish.py experiments/quickstart/seed0

Tables and figures are rendered anew from report.json and metrics.jsonl, which
are taken over like config and command; paths on the machine become DIR. No
number is changed. With a published folder alone it is rendered anew in place;
the training curves of one without metrics.jsonl stay as they are.
"""

from __future__ import annotations

import html
import itertools
import json
import pathlib
import re
import shutil
import sys
import tempfile
from typing import Any

from dgr2_jax.data import prompts
from dgr2_jax.data import tokens
from dgr2_jax.data import traces
from dgr2_jax.evaluation import panels
from dgr2_jax.evaluation import report

# Fields of a config that name files or directories.
PATHS = (
    'data.path', 'data.retriever.path', 'semantic_ids.rqvae.embeddings.path',
    'prompt.traces.path', 'tokenizer.path', 'model.huggingface',
    'mid_train.text')
_FLAGS = '|'.join(map(re.escape, PATHS))
_DIRECTORY = re.compile(
    rf'(--workdir|--config\.(?:{_FLAGS})|--config\.opd\.teacher(?==\S*/))=\S+')
_PUBLISHED = ('metrics.jsonl', 'report.json', 'report.md', 'report.html',
              'figures')


def blank(config: dict[str, Any]) -> None:
  """Replaces the paths that a config names, where it names any."""
  for path in PATHS:
    *sections, field = path.split('.')
    section = config
    for name in sections:
      section = section.get(name) or {}
    if section.get(field):
      section[field] = 'DIR'
  if '/' in (config.get('opd') or {}).get('teacher', ''):  # of another run
    config['opd']['teacher'] = 'DIR'


def published_curves(folder: pathlib.Path) -> list[panels.Panel]:
  """The training curves of a published page and its figures."""
  page = (folder / 'report.html').read_text(encoding='utf-8')
  section = re.search(
      '<section id="training-curves">(.*?)</section>', page, re.S)
  found = []
  for title, svg in re.findall(
      '<figure aria-label="([^"]*)">(.*?)</figure>',
      section[1] if section else '', re.S):
    name = re.search('id="([a-z0-9_]+)-', svg)[1]
    png = (folder / 'figures' / f'{name}.png').read_bytes()
    found.append(panels.Panel(name, html.unescape(title), png, svg))
  return found


def words(content: dict[str, Any], config: dict[str, Any]) -> None:
  """Puts traces into words that an earlier version left as tokens."""
  prompt = config.get('prompt') or {}
  if prompt.get('response_format') != prompts.COMPACT:
    return
  form = traces.TraceConfig.from_config(prompt['trace'])
  for example in content.get('examples') or ():
    names = list(itertools.takewhile(
        lambda name: name != tokens.ANSWER,
        (token['text'] for token in example['tokens'])))
    if ''.join(names) == example['trace']:
      example['trace'] = traces.readable(
          names, form, len(example['candidates'])) or example['trace']


def publish(workdir: pathlib.Path, folder: pathlib.Path) -> None:
  """Writes report, figures and config.json of `workdir` into `folder`.

  Both may be the same published folder.
  """
  content = json.loads((workdir / 'report.json').read_text(encoding='utf-8'))
  content['command'] = _DIRECTORY.sub(r'\1=DIR', content['command'])
  config = json.loads((workdir / 'config.json').read_text(encoding='utf-8'))
  blank(config)
  words(content, config)
  with tempfile.TemporaryDirectory() as rendered:
    rendered = pathlib.Path(rendered)
    curves = None
    if (workdir / 'metrics.jsonl').exists():
      shutil.copy(workdir / 'metrics.jsonl', rendered)
    elif workdir == folder:
      curves = published_curves(folder)
    else:
      raise FileNotFoundError(workdir / 'metrics.jsonl')
    report.write(rendered, content, curves)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / 'figures', ignore_errors=True)
    for name in _PUBLISHED:
      if (rendered / name).exists():
        shutil.move(rendered / name, folder / name)
  (folder / 'config.json').write_text(
      json.dumps(config, indent=2, sort_keys=True) + '\n', encoding='utf-8')


if __name__ == '__main__':
  if len(sys.argv) not in (2, 3):
    sys.exit(__doc__)
  publish(*map(pathlib.Path, (sys.argv[1], sys.argv[-1])))
