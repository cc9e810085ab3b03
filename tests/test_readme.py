"""The README's results are those of the reports it names."""

import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / 'README.md').read_text(encoding='utf-8')
# A table follows the path of the report that it quotes.
TABLES = re.findall(
    r'<!-- (experiments/\S+/report\.json) -->\n\n((?:\|.*\n)+)', README)


def cells(line):
  return [cell.strip() for cell in line.strip().strip('|').split('|')]


def quoted(value, digits):
  return '-' if value is None else f'{value:.{digits}f}'


def expected(content, row, decoding):
  """A line of the table from the report's rows, or from its frontier."""
  if decoding == '-':
    found, = (r for r in content['rows'] if r['name'] == row)
    speedup = None
  else:
    mode = {'AR': 'ar', 'verified': 'verify'}.get(decoding)
    points = [p for p in content['frontier'] if p['row'] == row
              and (p['mode'] == mode if mode else
                   p['threshold'] == float(decoding.split()[1]))]
    found, = points or [r for r in content['rows'] if r['name'] == row]
    speedup = found.get('speedup')
  return [quoted(found['recall@1'], 3), quoted(found['ndcg@3'], 3),
          quoted(found.get('valid_rate'), 3),
          quoted(found.get('tokens_per_forward'), 2), quoted(speedup, 2)]


def test_there_are_results():
  assert TABLES


@pytest.mark.parametrize('path, table', TABLES)
def test_table_quotes_its_report(path, table):
  content = json.loads((ROOT / path).read_text(encoding='utf-8'))
  lines = [cells(line) for line in table.splitlines()]
  assert lines[0] == ['row', 'decoding', 'Recall@1', 'NDCG@3', 'valid', 'TPF',
                      'tokens/s, AR = 1']
  for row, decoding, *figures in lines[2:]:
    assert figures == expected(content, row, decoding), (row, decoding)


def test_files_that_the_readme_links_to_exist():
  links = [link for link in re.findall(r'\]\(([^)#]+)\)', README)
           if '://' not in link]
  assert links
  for link in links:
    assert (ROOT / link).exists(), link
  for path in re.findall(r'`((?:configs|dgr2_jax|experiments)/[\w/.]+)`',
                         README):
    assert (ROOT / path).exists(), path
