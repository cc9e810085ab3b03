"""Every planted fault is named, and what looks wrong is said."""

import json
import os
import pathlib
import runpy
import subprocess
import sys

import numpy as np
import pytest

from dgr2_jax.tools import check_data

MAKE = runpy.run_path(str(
    pathlib.Path(__file__).parents[2] / 'experiments/bookshop/make.py'))


@pytest.fixture(name='shop')
def _shop(tmp_path):
  rng = np.random.default_rng(0)
  items = MAKE['books'](rng, 150)
  rows = MAKE['purchases'](rng, items, 200)
  lines = [json.dumps(item) for item in items]
  (tmp_path / 'items.jsonl').write_text('\n'.join(lines))
  (tmp_path / 'interactions.csv').write_text('\n'.join(
      ['user_id,item_id,timestamp', *(','.join(map(str, r)) for r in rows)]))
  return tmp_path


def edit(path, change):
  lines = path.read_text().splitlines()
  change(lines)
  path.write_text('\n'.join(lines))


def test_a_good_directory(shop, capsys):
  assert check_data.main([str(shop)]) == 0
  text = capsys.readouterr().out
  assert 'Warnings' not in text and 'fault' not in text
  assert 'users                 200' in text


def test_targets_that_nobody_bought(tmp_path, capsys):
  names = [f'item{i}' for i in range(40)]
  (tmp_path / 'items.jsonl').write_text('\n'.join(json.dumps(
      {'item_id': x, 'title': x, 'categories': ['a']}) for x in names))
  (tmp_path / 'sequences.txt').write_text('\n'.join(
      ' '.join([f'user{u}', *names[4 * u:4 * u + 4]]) for u in range(10)))
  assert check_data.main([str(tmp_path), '--min_count=1']) == 0
  assert 'Most test targets' in capsys.readouterr().out


def test_readers_that_end_early_or_know_ascii_only(shop):
  edit(shop / 'interactions.csv',
       lambda lines: lines.append('zz,b\u00fccher,5'))
  command = [sys.executable, '-m', 'dgr2_jax.tools.check_data', str(shop)]
  reader, writer = os.pipe()
  os.close(reader)
  done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE,
                        check=False)
  os.close(writer)
  assert (done.returncode, done.stderr) == (2, b'')
  done = subprocess.run(command, capture_output=True, check=False,
                        env=os.environ | {'PYTHONIOENCODING': 'ascii'})
  assert (done.returncode, done.stderr) == (2, b'')
  assert rb'b\xfccher' in done.stdout


def test_all_lines_at_fault_are_listed(shop, capsys):
  def spoil_items(lines):
    lines[3] = '{"item_id": '
    lines[4] = json.dumps({'item_id': 'x', 'title': 3, 'categories': ['a']})
    lines.append(lines[0])

  def spoil_purchases(lines):
    lines[5] = 'reader0001,book001,yesterday'
    lines[6] = 'reader0001,book001'
    lines[7] = 'reader0001,nothing,5'

  edit(shop / 'items.jsonl', spoil_items)
  edit(shop / 'interactions.csv', spoil_purchases)
  assert check_data.main([str(shop)]) == 2
  text = capsys.readouterr().out
  for where in ('items.jsonl:4: malformed', "items.jsonl:5: field 'title'",
                'items.jsonl:151: duplicate', "interactions.csv:6: timestamp",
                'interactions.csv:7: 2 fields',
                "interactions.csv:8: unknown item 'nothing'"):
    assert where in text
  # Their items are unknown now, and twenty lines are shown.
  assert 'and ' in text.splitlines()[-1] and text.splitlines()[-1].endswith(
      'more')


def test_reading_goes_on_behind_any_line_at_fault(shop, capsys):
  path = shop / 'interactions.csv'
  lines = path.read_bytes().splitlines()
  for number, line in ((3, b'\xff,book001,1'), (5, b'reader\xff'),
                       (8, b'"reader"1,book001,1'),
                       (len(lines) - 3, b'"reader1,book001,1')):
    lines[number - 1] = line
  path.write_bytes(b'\n'.join(lines))
  (shop / 'candidates.jsonl').write_bytes(b'\xff\n{}\n')
  assert check_data.main([str(shop)]) == 2
  text = capsys.readouterr().out
  assert '7 lines at fault' in text
  for where in ('csv:3: not UTF-8', 'csv:5: not UTF-8', 'csv:8: malformed CSV',
                f'csv:{len(lines) - 3}: malformed CSV',
                f'a quote open until line {len(lines)}?',
                'candidates.jsonl:1: not UTF-8',
                "candidates.jsonl:2: 'user_id'", 'no candidate lists'):
    assert where in text


@pytest.mark.parametrize('flag, message', [
    ('--num_candidates=0', '--num_candidates is 0: expected at least 2.'),
    ('--min_count=-3', '--min_count is -3: expected at least 1.'),
    ('--candidates=nope', 'nope: no such file.'),
    ('--candidates=/', '/: expected a file.')])
def test_flags_out_of_range(shop, capsys, flag, message):
  assert check_data.main([str(shop), flag]) == 1
  assert capsys.readouterr().err == f'error: {message}\n'


@pytest.mark.parametrize('named', [True, False])
def test_lists_that_know_the_target(shop, capsys, named):
  _, log = check_data.directory.read(shop)
  items = {i: None for i in log.items}
  data = check_data.interactions.dataset(
      'x', {i: check_data.interactions.Item(i, '', ('a',)) for i in items}, log,
      5, 'file', 0, 'x')
  lines = []
  for user, sequence in zip(data.users, data.sequences):
    for split, position in (('train', len(sequence) - 3),
                            ('test', len(sequence) - 1)):
      others = [i for i in range(len(data.items)) if i not in sequence][:10]
      chosen = ([sequence[position], *others][:10] if split == 'train'
                else others)
      lines.append(json.dumps({
          'user_id': user, 'split': split, 'position': int(position),
          'candidates': [data.items[i].item_id for i in chosen]}))
  lines.append(json.dumps({'user_id': 'nobody', 'candidates': []}))
  path = shop / 'candidates.jsonl'
  path.write_text('\n'.join(lines))
  flags = [f'--candidates={path}'] if named else []  # there by itself
  assert check_data.main([str(shop), *flags]) == 2
  text = capsys.readouterr().out
  for warning in ('train: nearly all targets are candidate 1',
                  'train: the target is in nearly every list',
                  'No lists for validation', 'Training lists hit far more'):
    assert warning in text
  assert "unknown user 'nobody'" in text


def test_lists_that_are_all_at_fault(shop, capsys):
  (shop / 'candidates.jsonl').write_text(
      json.dumps({'user_id': 'nobody', 'candidates': []}) + '\n')
  assert check_data.main([str(shop)]) == 2
  text = capsys.readouterr().out
  assert 'candidates.jsonl:1: ' in text and 'no candidate lists' in text
  assert 'users' in text  # the summary


@pytest.mark.parametrize('stamp', ['2020-01-01', 'nan'])
def test_lines_are_listed_where_none_can_be_used(shop, capsys, stamp):
  def spoil(lines):
    lines[1:] = [f'{line.rpartition(",")[0]},{stamp}' for line in lines[1:]]

  edit(shop / 'interactions.csv', spoil)
  assert check_data.main([str(shop)]) == 1
  error = capsys.readouterr().err.splitlines()
  assert error[0].endswith('lines at fault') and len(error) == 23
  assert f"interactions.csv:2: timestamp '{stamp}': expected" in error[1]
  assert 'no purchases that can be used' in error[-1]


def test_what_cannot_be_read_is_one_line(tmp_path, capsys):
  assert check_data.main([str(tmp_path / 'none')]) == 1
  assert capsys.readouterr().err.startswith('error: ')
