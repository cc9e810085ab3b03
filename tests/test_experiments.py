"""Summaries over seeds are what their script makes of the reports."""

import json
import pathlib
import runpy

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SEEDS = runpy.run_path(str(ROOT / 'experiments' / 'seeds.py'))


CONFIGS = sorted(ROOT.glob('experiments/*/seed*/config.json'))


@pytest.mark.parametrize(
    'path', CONFIGS, ids=lambda path: str(path.relative_to(ROOT).parent))
def test_published_figures_are_of_the_present_configuration(path):
  published = json.loads(path.read_text(encoding='utf-8'))
  name = path.parents[1].name
  present = runpy.run_path(str(ROOT / f'configs/{name}.py'))['get_config']()
  present.seed = published['seed']
  if published['data']['path']:
    present.data.path = published['data']['path']
  present = json.loads(json.dumps(present.to_dict()))
  for section in present.keys() | published.keys():
    assert published.get(section) == present.get(section), section


@pytest.mark.parametrize(
    'path', sorted(ROOT.glob('experiments/*/summary.md')), ids=str)
def test_published_summaries_are_of_the_published_reports(path):
  assert path.read_text(encoding='utf-8') == SEEDS['summary'](path.parent)


@pytest.mark.parametrize('name', ['semantic_ids', 'retrieval'])
def test_published_tables_are_of_the_published_measurements(name):
  folder = ROOT / 'experiments' / name
  table = runpy.run_path(str(folder / 'run.py'))['table']
  text = (folder / f'{name}.md').read_text(encoding='utf-8')
  assert text == table(json.loads(
      (folder / f'{name}.json').read_text(encoding='utf-8')))


def test_attention_is_timed_by_what_runs_here():
  script = runpy.run_path(str(ROOT / 'experiments/kernels/kernels.py'))
  shape = dict(requests=1, prompt=8, rollouts=1, response=4, block_size=2,
               canvases=2, layers=2, width=16, heads=2, kv_heads=1,
               head_dim=128, dtype='float32')
  content = script['measure'](shape, passes=1)
  assert [(x['program'], x['attention']) for x in content['rows']] == [
      ('prefill', 'xla'), ('update', 'xla')]  # a CPU
  assert all(x['speedup'] == 1 for x in content['rows'])
  content['rows'].append(dict(content['rows'][0], attention='splash',
                              seconds=.002, low=.001, high=.003, speedup=1.5))
  assert ('| prefill | splash | 2.00 | 1.00 - 3.00 | 1.50 |'
          in script['markdown'](content))


def test_summary_of_two_made_up_seeds(tmp_path):
  for seed, cft in enumerate((.35, .45)):
    folder = tmp_path / f'seed{seed}'
    folder.mkdir()
    kept = {'recall@1': cft * 10 - 3, 'ndcg@3': cft * 10 - 3}
    rows = [{'name': 'cft', 'recall@1': cft, 'recall@3': .5, 'ndcg@3': cft,
             'recovery': kept}]
    point = {'row': 'cft', 'mode': 'threshold', 'threshold': .9,
             'recall@1': cft, 'recall@3': .5, 'ndcg@3': cft,
             'valid_rate': .99, 'tokens_per_forward': 2., 'recovery': kept}
    (folder / 'report.json').write_text(json.dumps({
        'conditional': 1000 + seed, 'dataset': {}, 'rows': rows,
        'frontier': [point], 'stages': [{
            'name': 'rl', 'before': 'opd', 'decoding': 'x', 'reward': cft,
            'change': {'reward': .01 * (seed + 1)},
            'ci': {'reward': [-.005, .03]}}]}))
  text = SEEDS['summary'](tmp_path)
  assert 'seed0 1,000, seed1 1,001' in text
  line, = (l for l in text.splitlines() if l.startswith('| cft |'))
  assert '0.400 (0.350 - 0.450)' in line
  assert line.count('1.00 (0.50 - 1.50)') == 2  # kept of R@1 and of NDCG@3
  assert '| cft, tau 0.9 |' in text
  line, = (l for l in text.splitlines() if l.startswith('| rl | opd |'))
  assert '0.400 (0.350 - 0.450)' in line and '0.015 (0.010 - 0.020)' in line
  assert line.count('[-0.005, +0.030]') == 2
  with pytest.raises(ValueError, match='no seed'):
    SEEDS['summary'](tmp_path / 'seed0')
