"""Runs side by side: differences, paired intervals, what can't be paired."""

import json
import pathlib

import numpy as np
import pytest

from dgr2_jax.evaluation import outcomes
from dgr2_jax.evaluation import rows
from dgr2_jax.tools import compare
from tests.evaluation import test_report

N, C = 60, 10
ROOT = pathlib.Path(__file__).parents[2]


def _run(root, name, seed, requests='r', better=0.):
  """A working directory with a report and responses; one target in ten is
  missed."""
  rng = np.random.default_rng(0)  # targets are those of the requests
  targets = np.where(np.arange(N) % 10 == 9, -1, rng.integers(C, size=N))
  rng = np.random.default_rng(seed)
  orders = np.stack([rng.permutation(C) for _ in range(N)])
  for i in np.flatnonzero((rng.random(N) < better) & (targets >= 0)):
    orders[i] = [targets[i], *(c for c in range(C) if c != targets[i])]
  failures = rng.choice(['valid', 'duplicate'], N).tolist()
  outcome = rows.RowOutcome('cft', orders, orders, failures, np.full(N, 30),
                            np.full(N, 30), np.full(N, 10), np.full(N, 10),
                            np.full(N, 20))
  before = rows.RowOutcome('pre_rank', np.tile(np.arange(C), (N, 1)))
  point = rows.build_frontier_point(
      outcome, targets, mode='threshold', threshold=.9,
      tokens_per_second=10. + seed, same_weights=outcome,
      same_weights_tokens_per_second=10., reference=None, resamples=10)
  folder = root / name
  (folder / outcomes.DIRECTORY).mkdir(parents=True)
  content = {
      'title': f'<b>{name}</b>', 'command': 'x', 'conditional': N - N // 10,
      'dataset': {'name': 'made up'},
      'unconditional': {'users': N, 'hit_rate': .9, 'rows': {}},
      'rows': [rows.build_row(o, targets, None, resamples=10)
               for o in (before, outcome)],
      'frontier': [point], 'timing': {}, 'environment': {}}
  (folder / 'report.json').write_text(json.dumps(content))
  (folder / 'config.json').write_text(json.dumps(
      {'seed': seed, 'cft': {'steps': 5, **({'x': None} if seed else {})}}))

  def write(file, lines):
    (folder / outcomes.DIRECTORY / file).write_text(
        ''.join(json.dumps(line) + '\n' for line in lines))

  keys = [f'{requests}{i}' for i in range(N)]
  write(outcomes.REQUESTS, (
      {'request': k, 'target': t} for k, t in zip(keys, targets.tolist())))
  for file in (outcomes.file_name('cft'),
               outcomes.file_name('cft', 'threshold', .9)):
    write(file, ({'request': k, 'order': o, 'failure': f, 'explanation': ''}
                 for k, o, f in zip(keys, orders.tolist(), failures)))
  return folder, targets, outcome


def _text(*paths):
  return compare.as_text(list(map(compare.load, 'ABC', paths)))


def test_paired_intervals(tmp_path):
  (a, targets, one), (b, _, other) = (
      _run(tmp_path, name, seed, better=better)
      for name, seed, better in (('a', 0, .1), ('b', 1, .6)))
  found = compare.paired(*(compare.load(letter, path)
                           for letter, path in (('B', b), ('A', a))))
  assert set(found) == {'cft', 'cft, τ 0.9'}
  # Brute force: resample the requests whose target was retrieved.
  hits = np.flatnonzero(targets >= 0)
  first = [np.array([order[0] == t for order, t in zip(o.orders, targets)],
                    float) for o in (one, other)]
  difference = (first[1] - first[0])[hits]
  rng = np.random.default_rng(5)
  means = [difference[rng.integers(len(hits), size=len(hits))].mean()
           for _ in range(4000)]
  low, high = found['cft']['recall@1']
  assert low == pytest.approx(np.quantile(means, .025), abs=.03)
  assert high == pytest.approx(np.quantile(means, .975), abs=.03)
  text = _text(a, b)
  low, high = (f'{x:+.3f}' for x in (low, high))
  line, = (l for l in text.split('Recall@1')[1].split('NDCG')[0].splitlines()
           if l.startswith('cft '))
  assert f'{difference.mean():+.3f} [{low}, {high}]*' in line
  assert 'with its paired 95% interval' in text
  assert 'cft.x  absent  null' in text and 'seed   0       1' in text
  assert 'cft.steps' not in text


def test_the_page(tmp_path, capsys):
  a, b, c = (_run(tmp_path, name, seed)[0]
             for seed, name in enumerate(('a', 'b', 'c')))
  compare.main([*map(str, (a, b, c)), f'--output={tmp_path / "out"}'])
  assert 'compare.html' in capsys.readouterr().out
  text = (tmp_path / 'out' / 'compare.html').read_text(encoding='utf-8')
  checker = test_report._Page()  # pylint: disable=protected-access
  checker.feed(text)
  assert not checker.open and 'script' not in checker.tags
  assert len(checker.ids) == len(set(checker.ids))
  assert all(link.startswith('#') for link in checker.links)
  assert text.count('<svg') == 4 and '<b>' not in text
  for letter in 'ABC':
    assert f'{letter} cft, threshold' in text
  assert 'width=device-width' in text


def test_the_page_under_a_name(tmp_path, capsys):
  run = _run(tmp_path, 'a', 0)[0]
  compare.main([str(run), str(run), f'--output={tmp_path / "new" / "x.html"}'])
  assert capsys.readouterr().out.endswith('x.html\n')
  assert (tmp_path / 'new' / 'x.html').is_file()


def test_other_requests_are_not_paired(tmp_path):
  a, b = (_run(tmp_path, name, 0, requests=name)[0] for name in 'ab')
  text = _text(a, b / 'report.json')
  assert 'without an interval (B)' in text
  line, = (l for l in text.split('Recall@1')[1].split('NDCG')[0].splitlines()
           if l.startswith('cft '))
  assert '[' not in line and '0.000' in line


def test_stale_responses_are_told(tmp_path):
  a, b = (_run(tmp_path, name, 0)[0] for name in 'ab')
  other = _run(tmp_path, 'c', 3, better=1.)[0]
  for folder in (b, other):
    assert (folder / 'responses/cft.jsonl').exists()
  (b / 'responses/cft.jsonl').write_bytes(
      (other / 'responses/cft.jsonl').read_bytes())
  with pytest.raises(SystemExit, match='run --stage=evaluate again'):
    compare.main([str(a), str(b), f'--output={tmp_path}'])


@pytest.mark.parametrize('content, message', [
    (None, 'expected a report'), ('{', 'expected a report'),
    ('{"title": NaN}', 'NaN is no figure'), ('[]', 'it is a list'),
    ('{"rows": []}', 'title is missing')])
def test_no_report(tmp_path, content, message):
  a = _run(tmp_path, 'a', 0)[0]
  if content is not None:
    (tmp_path / 'report.json').write_text(content)
  with pytest.raises(SystemExit, match=f'error: .*{message}'):
    compare.main([str(a), str(tmp_path), f'--output={tmp_path}'])


@pytest.mark.parametrize('config, message', [
    ('[]', 'not a JSON object'), ('"x"', 'not a JSON object'),
    ('[' * 100_000, 'recursion')])
def test_a_broken_config_is_one_line(tmp_path, config, message):
  a = _run(tmp_path, 'a', 0)[0]
  (a / 'config.json').write_text(config)
  with pytest.raises(SystemExit, match=message) as e:
    compare.main([str(a), str(a), f'--output={tmp_path}'])
  assert str(e.value).startswith(f'error: {a / "config.json"}: expected ')


@pytest.mark.parametrize('count', [1, 27])
def test_as_many_runs_as_letters(count, capsys):
  with pytest.raises(SystemExit):
    compare.main(['x'] * count)
  assert f'{count} runs: expected from 2 to 26' in capsys.readouterr().err


def _without(key, **changes):
  def change(content):
    point, = content['frontier']
    point.pop(key)
    point.update(changes)
  return change


@pytest.mark.parametrize('change, message', [
    (lambda c: c.pop('conditional'), 'conditional is missing'),
    (lambda c: c.update(rows='cft'), 'rows is a str'),
    (lambda c: c['rows'].append('cft'), r'rows\[2\] is a str'),
    (lambda c: c['rows'][1].update({'recall@1': 'x'}), r'recall@1 is a str'),
    (lambda c: c.update(frontier={}), 'frontier is a dict'),
    (_without('threshold'), r'frontier\[0\].threshold is missing'),
    (_without('floor', floor={}), r'floor.recall@1 is missing'),
    (_without('ci', ci={'recall@1': [0.], 'ndcg@3': []}), 'ci.recall@1.1 is'),
    (_without('valid_rate', valid_rate=True), 'valid_rate is a bool')])
def test_a_broken_report_is_one_line(tmp_path, change, message):
  a, b = (_run(tmp_path, name, 0)[0] for name in 'ab')
  content = json.loads((b / 'report.json').read_text())
  change(content)
  (b / 'report.json').write_text(json.dumps(content))
  with pytest.raises(SystemExit, match=message) as e:
    compare.main([str(a), str(b), f'--output={tmp_path}'])
  begin = f'error: {b / "report.json"}: not a report of this version: '
  assert str(e.value).startswith(begin) and '\n' not in str(e.value)


def test_published_reports_compare():
  text = _text(*sorted(ROOT.glob('experiments/quickstart/seed*')))
  assert 'Recall@1' in text and 'data.seed' in text
