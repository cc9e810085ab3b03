"""Commands that take hours, and those in running text: parsed, not run.

tests/test_commands.py runs the others. Here every script of a command of
experiments/**/README.md is imported, and its own parser reads the arguments;
of dgr2_jax.main, with the config and the fields that are set.
"""

import functools
import importlib
import pathlib
import re
import runpy
import shlex
from unittest import mock

from absl import flags
from ml_collections import config_flags
import pytest

from dgr2_jax.training import stages
from dgr2_jax.training import validation

# Other commands define flags of the same names in this process, before this
# import or after it.
_NAMES = ('config', 'workdir', 'stage')
_OTHERS = {name: flags.FLAGS[name] for name in _NAMES if name in flags.FLAGS}
for _name in _OTHERS:
  delattr(flags.FLAGS, _name)
from dgr2_jax import main  # pylint: disable=wrong-import-position
for _name in _NAMES:
  if _name in flags.FLAGS:
    delattr(flags.FLAGS, _name)
for _name, _flag in _OTHERS.items():
  flags.FLAGS[_name] = _flag

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted(ROOT.glob('experiments/**/README.md'))
# A block's lines, continued ones joined.
COMMAND = re.compile(r'^    ((?:.*\\\n)*.*)$', re.M)
MODULE = re.compile(
    r'^    (?:\S*/)?python -m (dgr2_jax\.\S+)((?:.*\\\n)*.*)$', re.M)
AT_LEAST = {'README.md': 3, 'traces.md': 4, 'scaling.md': 1}  # of MODULE
BEFORE = re.compile(r'([A-Z_]+=\S*|taskset|-c|\d+)$')  # what may stand there
INLINE = re.compile(r'`([^`]*)`')
EVERYWHERE = sorted({*PAGES, *ROOT.glob('*.md'), *ROOT.glob('docs/*.md')})


def name_of(page):
  return str(page.relative_to(ROOT))


def commands_of(page):
  """[words, from python on] of a page's commands; not those of pip."""
  found = []
  for block in COMMAND.findall(page.read_text(encoding='utf-8')):
    words = shlex.split(block.replace('\\\n', ' '), comments=True)
    while words and BEFORE.match(words[0]):
      words.pop(0)
    if words and words[0] not in ('pip', 'make'):
      assert words[0] == 'python', (page, block)
      found.append(words[1:])
  return found


class Reached(Exception):
  """A program is about to read its arguments, by the parser that it has."""


def _stop(parser, args=None):
  del args
  raise Reached(parser)


@functools.cache
def parser_of(script):
  """The parser of a file or module; None if it takes no arguments."""
  if script.endswith('.py'):
    names = runpy.run_path(str(ROOT / script))
  else:
    names = vars(importlib.import_module(script))
  if 'argparse' not in names:
    return None
  with mock.patch('argparse.ArgumentParser.parse_args', _stop):
    with pytest.raises(Reached) as reached:
      names['main']()
  return reached.value.args[0]


def configured(words):
  """The config that arguments of dgr2_jax.main make."""
  values = flags.FlagValues()
  flag = config_flags.DEFINE_config_file(
      'config', None, '', values, sys_argv=['main', *words])
  values(['main', *words])
  return flag.value


def check_main(words):
  own = flags_of(pathlib.Path(main.__file__)) - {'--config'}
  ours = [word for word in words if word.startswith('--config')]
  for word in set(words) - set(ours):
    assert word.partition('=')[0] in own, word
    if word.startswith('--stage='):
      assert word.partition('=')[2] in stages.STAGES
  config = configured(ours)
  if not config.model.get('huggingface'):  # which lies elsewhere
    validation.check(config)


@pytest.mark.parametrize('page', PAGES, ids=name_of)
def test_commands_of_experiments_are_read(page, monkeypatch):
  monkeypatch.chdir(ROOT)
  for script, *words in commands_of(page):
    if script == '-m':
      script, *words = words
    if script == 'pytest':
      assert all((ROOT / word).exists() for word in words)
    elif script == 'dgr2_jax.main':
      check_main(words)
    elif parser := parser_of(script):
      parser.parse_args([w.replace('=SHAPE', '=smoke') for w in words])
    else:
      assert not words, script


def test_there_are_commands():
  assert sum(len(commands_of(page)) for page in PAGES) > 30


def flags_of(path):
  """The flags that a file defines, by absl or argparse."""
  source = path.read_text(encoding='utf-8')
  names = {f'--{name}' for name in re.findall(
      r"(?:flags\.DEFINE_\w+|DEFINE_config_file)\(\s*'(\w+)'", source)}
  if 'ArgumentParser(' in source:
    names |= set(vars(parser_of(str(path)))['_option_string_actions'])
  return names


@pytest.mark.parametrize('page', [p for p in EVERYWHERE if p not in PAGES],
                         ids=name_of)
def test_flags_of_commands_elsewhere_exist(page):
  """Also of those that tests/test_commands.py leaves out."""
  commands = MODULE.findall(page.read_text(encoding='utf-8'))
  assert len(commands) >= AT_LEAST.get(page.name, 0)
  for module, rest in commands:
    own = flags_of((ROOT / module.replace('.', '/')).with_suffix('.py'))
    for word in shlex.split(rest.replace('\\\n', ' ')):
      if word.startswith('--') and not word.startswith('--config.'):
        assert word.partition('=')[0] in own, (module, word)


@functools.cache
def known():
  """Names of flags, and of the fields of configs, wherever they are."""
  names = {'--help', '--config'}
  for folder in ('dgr2_jax', 'experiments', 'colab'):
    for path in (ROOT / folder).rglob('*.py'):
      names |= flags_of(path)
  for name in ('quickstart.py', 'quickstart.py:full,sasrec', 'beauty_small.py',
               'beauty_small.py:sasrec', 'forkme.py', 'beauty_qwen3_8b.py'):
    fields = main._fields(  # pylint: disable=protected-access
        configured([f'--config={ROOT}/configs/{name}']))
    names |= {f'--{field}' for field in fields}
  return names


@pytest.mark.parametrize('page', EVERYWHERE, ids=name_of)
def test_flags_in_running_text_exist(page, monkeypatch):
  monkeypatch.chdir(ROOT)
  for text in INLINE.findall(page.read_text(encoding='utf-8')):
    for word in text.split():
      if not re.match('--[a-z]', word):
        continue
      name, _, value = word.partition('=')
      assert name in known(), word
      if name == '--config' and not re.search('[A-Z.]{3}', value):
        configured([word])
