"""What the documentation names exists."""

import importlib
import pathlib
import re

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
