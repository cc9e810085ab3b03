"""What the documentation names exists."""

import importlib
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob('*.md'), *ROOT.glob('docs/*.md'),
                *ROOT.glob('experiments/**/*.md')])
NAMED = re.compile(r'`([\w/]+)\.py:(\w+)`')
LINK = re.compile(r'\]\((?!https?:|#)([^)#\s]+)')


@pytest.mark.parametrize(
    'page', PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_functions_and_files_exist(page):
  text = page.read_text(encoding='utf-8')
  for module, name in NAMED.findall(text):
    found = importlib.import_module(f'dgr2_jax.{module.replace("/", ".")}')
    assert hasattr(found, name), f'{module}.py has no {name}'
  for target in LINK.findall(text):
    assert (page.parent / target).exists(), f'{page.name} links to {target}'


def test_the_method_is_a_table_of_functions():
  text = (ROOT / 'docs' / 'method.md').read_text(encoding='utf-8')
  assert len(NAMED.findall(text)) > 20


def test_the_architecture_names_modules_and_all_packages():
  text = (ROOT / 'docs' / 'architecture.md').read_text(encoding='utf-8')
  package = ROOT / 'dgr2_jax'
  found = {path.name for path in package.rglob('*.py')}
  assert set(re.findall(r'\w+\.py', text)) <= found
  for path in re.findall(r'\w+/\w+\.py', text):
    assert (package / path).exists(), path
  assert set(re.findall(r'^\| `(\w+)/`', text, re.M)) == {
      path.parent.name for path in package.glob('*/__init__.py')}


@pytest.mark.parametrize('script', sorted(
    ROOT.glob('experiments/launch/*.sh')), ids=lambda path: path.name)
def test_launch_scripts_are_bash(script):
  subprocess.run(['bash', '-n', script], check=True)
  missing = subprocess.run(['bash', script], capture_output=True, text=True,
                           env={'PATH': '/usr/bin:/bin'}, check=False)
  assert missing.returncode and 'bash' not in missing.stdout
  assert any(name in missing.stderr for name in ('WORKDIR', 'TPU'))
