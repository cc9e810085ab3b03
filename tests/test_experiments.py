"""Summaries over seeds are what their script makes of the reports."""

import json
import pathlib
import runpy

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SEEDS = runpy.run_path(str(ROOT / 'experiments' / 'seeds.py'))


@pytest.mark.parametrize(
    'path', sorted(ROOT.glob('experiments/*/summary.md')), ids=str)
def test_published_summaries_are_of_the_published_reports(path):
  assert path.read_text(encoding='utf-8') == SEEDS['summary'](path.parent)


def test_summary_of_two_made_up_seeds(tmp_path):
  for seed, cft in enumerate((.35, .45)):
    folder = tmp_path / f'seed{seed}'
    folder.mkdir()
    rows = [{'name': name, 'recall@1': value, 'recall@3': .5, 'ndcg@3': value}
            for name, value in (('pre_rank', .3), ('ar', .4), ('cft', cft))]
    point = {'row': 'cft', 'mode': 'threshold', 'threshold': .9,
             'recall@1': cft, 'recall@3': .5, 'ndcg@3': cft,
             'valid_rate': .99, 'tokens_per_forward': 2.}
    (folder / 'report.json').write_text(json.dumps({
        'conditional': 1000 + seed, 'dataset': {}, 'rows': rows,
        'frontier': [point]}))
  text = SEEDS['summary'](tmp_path)
  assert 'seed0 1,000, seed1 1,001' in text
  line, = (l for l in text.splitlines() if l.startswith('| cft |'))
  assert '0.400 (0.350 - 0.450)' in line
  assert line.count('1.00 (0.50 - 1.50)') == 2  # kept of R@1 and of NDCG@3
  assert '| cft, tau 0.9 |' in text
  with pytest.raises(ValueError, match='no seed'):
    SEEDS['summary'](tmp_path / 'seed0')
