"""What is published is what the scripts make of the measurements."""

import copy
import dataclasses
import json
import pathlib
import re
import runpy
import shutil

import pytest

from dgr2_jax.evaluation import judging
from dgr2_jax.retrieval import retrievers
from dgr2_jax.semantic_ids import embeddings
from dgr2_jax.semantic_ids import rqvae
from dgr2_jax.training import sweeps

ROOT = pathlib.Path(__file__).parents[1]
SEEDS = runpy.run_path(str(ROOT / 'experiments' / 'seeds.py'))
TABLES = runpy.run_path(str(ROOT / 'experiments' / 'tables.py'))['TABLES']
PUBLISH = runpy.run_path(str(ROOT / 'experiments' / 'publish.py'))

CONFIGS = sorted(ROOT.glob('experiments/*/*/config.json'))


@pytest.mark.parametrize(
    'path', CONFIGS, ids=lambda path: str(path.relative_to(ROOT).parent))
def test_published_figures_are_of_the_present_configuration(path):
  published = json.loads(path.read_text(encoding='utf-8'))
  name, run = path.parents[1].name, path.parent.name  # seed0, or a variant
  name = {'bookshop': 'forkme'}.get(name, name)
  variant = () if run.startswith('seed') else (run,)
  present = runpy.run_path(str(ROOT / f'configs/{name}.py'))['get_config'](
      *variant)
  present.seed = published['seed']
  present = json.loads(json.dumps(present.to_dict()))
  if published['data']['path']:
    present['data']['path'] = 'DIR'
  PUBLISH['blank'](present)
  published, present = map(written_out, (published, present))
  for section in present.keys() | published.keys():
    assert published.get(section) == present.get(section), section


def written_out(config):
  """The same experiment, with the defaults of fields that may be left out."""
  def defaults(cls):
    return {field.name: field.default for field in dataclasses.fields(cls)
            if field.default is not dataclasses.MISSING}

  config = {'profile_steps': (), **copy.deepcopy(config)}
  ids, retriever = config['semantic_ids'], config['data']['retriever']
  if 'rqvae' in ids:  # without it: residual k-means
    ids['rqvae'] = {**defaults(rqvae.RqVaeConfig), **ids['rqvae']}
    ids['rqvae']['embeddings'] = {
        **defaults(embeddings.EmbeddingConfig),
        **ids['rqvae'].get('embeddings', {})}
  if chosen := retrievers.LEARNED.get(retriever['kind']):
    retriever[retriever['kind']] = {
        **defaults(chosen), 'seed': config['data']['seed'],
        **retriever.get(retriever['kind'], {})}
  return json.loads(json.dumps(config))


@pytest.mark.parametrize('kind', [*retrievers.LEARNED, 'cooccurrence'])
def test_a_config_means_what_it_leaves_out(kind):
  present = runpy.run_path(str(ROOT / 'configs/beauty_small.py'))[
      'get_config'](kind).to_dict()
  bare = copy.deepcopy(present)
  bare['semantic_ids']['rqvae'] = {}
  bare['data']['retriever'].pop(kind, None)
  assert bare != present and written_out(bare) == written_out(present)
  for section, field, value in (
      ('rqvae', 'steps', 7), ('rqvae', 'embeddings', {'kind': 'npy'}),
      ('retriever', kind, {'epochs': 7})):
    other = copy.deepcopy(bare)
    {'rqvae': other['semantic_ids']['rqvae'],
     'retriever': other['data']['retriever']}[section][field] = value
    assert written_out(other) != written_out(present)
  del bare['semantic_ids']['rqvae']  # residual k-means
  assert written_out(bare) != written_out(present)


@pytest.mark.parametrize(
    'path', sorted(ROOT.glob('experiments/*/summary.md')), ids=str)
def test_published_summaries_are_of_the_published_reports(path):
  assert path.read_text(encoding='utf-8') == SEEDS['summary'](path.parent)


@pytest.mark.parametrize('folder', sorted(
    path.parent for path in ROOT.glob('experiments/*/run.py')
    if path.with_name(f'{path.parent.name}.json').exists()),
                         ids=lambda folder: folder.name)
def test_published_tables_are_of_the_published_measurements(folder):
  name = folder.name
  table = runpy.run_path(str(folder / 'run.py'))['table']
  text = (folder / f'{name}.md').read_text(encoding='utf-8')
  assert text == table(json.loads(
      (folder / f'{name}.json').read_text(encoding='utf-8')))


@pytest.mark.parametrize('path', sorted(
    path for stage in ('ar_rl', 'opd', 'rl')
    for path in ROOT.glob(f'experiments/**/{stage}.json')), ids=str)
def test_published_variants_are_of_the_published_measurements(path):
  table = runpy.run_path(
      str(ROOT / 'experiments' / 'on_policy' / 'run.py'))['table']
  assert path.with_suffix('.md').read_text(encoding='utf-8') == table(
      path.stem, json.loads(path.read_text(encoding='utf-8')))


@pytest.mark.parametrize('name', TABLES)
def test_tables_of_the_paper_are_of_the_published_reports(name):
  path = ROOT / 'experiments' / name / 'table.md'
  assert path.read_text(encoding='utf-8') == TABLES[name](ROOT / 'experiments')


@pytest.mark.parametrize('path', sorted(
    ROOT.glob('experiments/decoding/lossless_*.json')), ids=str)
def test_lossless_tables_are_of_the_published_measurements(path):
  table = runpy.run_path(
      str(ROOT / 'experiments' / 'decoding' / 'lossless.py'))['table']
  published = json.loads(path.read_text(encoding='utf-8'))
  text = table(published)
  assert text == path.with_suffix('.md').read_text(encoding='utf-8')
  alone = [{k: v for k, v in point.items() if k != 'run'}
           for point in published['points']]
  lines = table(published | {'points': alone}).splitlines()
  several = table(published | {'points': [
      point | {'run': run} for run in 'AB' for point in alone]})
  for line in lines[8:]:
    assert f'| A {line}' in several and f'| B {line}' in several


@pytest.mark.parametrize('path', sorted(
    path for kind in ('batching', 'frontier', 'peers', 'speed', 'training')
    for path in ROOT.glob(f'experiments/decoding/{kind}*.json')), ids=str)
def test_decoding_tables_are_of_the_published_measurements(path):
  kind, _, name = path.stem.partition('_')
  table = runpy.run_path(
      str(ROOT / 'experiments' / 'decoding' / f'{kind}.py'))['table']
  content = json.loads(path.read_text(encoding='utf-8'))
  title = {'speed': [], 'training': [], 'peers': [name]}.get(
      kind, [f'{name}, weights of {content.get("stage")}'])
  assert path.with_suffix('.md').read_text(encoding='utf-8') == table(
      *title, content)


def line_of(text, begins):
  line, = (l for l in text.splitlines() if l.startswith(f'| {begins} |'))
  return [cell.strip() for cell in line.strip('| ').split('|')]


def test_tables_of_made_up_measurements(tmp_path):
  for seed, gain in enumerate((.1, .2)):
    rows = [{'name': name, 'recall@1': .3 + g, 'recall@3': .5, 'ndcg@3': .4,
             'valid_rate': valid}
            for name, g, valid in (('pre_rank', 0., None), ('cft', gain, .9))]
    point = {'recall@1': .3 + gain, 'ndcg@3': .4, 'valid_rate': .9,
             'mode': 'threshold'}
    write(tmp_path / f'beauty_small/seed{seed}/report.json', {
        'conditional': 1000, 'rows': rows,
        'environment': {'machine': 'abacus', 'jax': '1'}, 'frontier': [
            point | {'threshold': .6, 'tokens_per_forward': 4., 'speedup': 2.},
            point | {'threshold': .2, 'tokens_per_forward': 8.}]})
  text = TABLES['table2'](tmp_path)
  accuracy, gains = text.split("### Gain over the retriever's order")
  assert 'seed0 1,000, seed1 1,000' in text and 'abacus, jax 1' in text
  assert line_of(accuracy, 'pre-rank floor')[-1] == '-'
  assert line_of(accuracy, '+ CFT')[1:5] == [
      '.2930', '.5651', '.4497', '0.450 (0.400 - 0.500)']
  assert line_of(gains, '+ CFT')[1] == '0.0119'
  assert line_of(gains, '+ CFT')[4] == '0.150 (0.100 - 0.200)'
  assert line_of(gains, '+ CFT + OPD')[4:] == ['-'] * 3  # not measured
  text = TABLES['table3'](tmp_path)
  assert line_of(text, 'τ 0.6')[1:5] == [
      '.2942', '234', '3.3', '0.450 (0.400 - 0.500)']
  assert line_of(text, 'τ 0.2')[1:4] == ['-'] * 3
  assert line_of(text, 'τ 0.2')[-1] == '-'
  assert 'Not measured here' in TABLES['figure6'](tmp_path)
  write(tmp_path / 'decoding/speed_toy.json', {
      'shape': 'toy', 'dtype': 'float32', 'schedule': 'equal', 'jax': '1',
      'machine': 'abacus', 'points': [
          {'prompt_length': p, 'response_length': r, 'block_size': b,
           'speed': float(b), 'speed_with_prefill': b * r / 1000}
          for p, r in ((16, 32), (16, 512), (8, 512)) for b in (1, 8)]})
  text = TABLES['figure6'](tmp_path)
  outputs, prompts = text.split('### By prompt length')
  assert 'blocks of 8, prompt length 16' in outputs
  assert line_of(outputs, '32')[1:] == ['1.1', '8.00 (0.26)']
  assert line_of(outputs, '64')[1:] == ['1.5', '-']
  assert line_of(outputs, '512')[1:] == ['4.7', '8.00 (4.10)']
  assert [line_of(prompts, n)[1] for n in ('8', '16')] == ['-', '-']
  assert line_of(prompts, '32 to 4,096')[1:] == ['4.0 to 4.8', '-']


def test_the_judged_table_has_ours_where_a_judge_was_asked(tmp_path):
  assert 'Not measured here' in TABLES['table4'](tmp_path)
  scores = {'grounding': 4, 'consistency': 5, 'flow': 3, 'identifiers': 1}
  answers = [{'score_A': scores, 'score_B': scores | {'flow': 5},
              'prefer_AB': 'B', 'prefer_BA': 'B'}] * 3
  write(tmp_path / 'table4/judge.json', {'judges': [
      {'model': 'sage', **judging.statistics(answers, seed=0)}]})
  text = TABLES['table4'](tmp_path)
  assert 'Not measured here' not in text and '| sage |' in text
  assert line_of(text, 'B preferred')[1:] == ['3', '9']
  assert line_of(text, 'flow A / B')[1].startswith('**3.00 / 5.00**')
  assert line_of(text, 'flow A / B')[2] == '4.54 / 4.40'


def write(path, content):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(content), encoding='utf-8')


def test_the_ablations_page_has_every_run_of_the_sweep():
  text = (ROOT / 'experiments/ablations/README.md').read_text(encoding='utf-8')
  named = [name for cells in re.findall(r'^\| (`.*?) \|', text, re.M)
           for name in re.findall(r'`(\w+)`', cells)]
  assert sorted(named) == sorted(sweeps.of(
      str(ROOT / 'configs/quickstart.py')))


def test_the_bookshop_gives_what_the_docs_say():
  rows = {row['name']: row for row in json.loads((
      ROOT / 'experiments/bookshop/seed0/report.json').read_text())['rows']}
  figures = ' '.join((ROOT / 'docs/your_data.md').read_text('utf-8').split())
  before, after, count = re.search(
      r"retriever's (\.\d+) to (\.\d+), over the (\d+) of", figures).groups()
  assert before == f'{rows["pre_rank"]["recall@1"]:.2f}'[1:]
  assert after == f'{rows["rl"]["recall@1"]:.2f}'[1:]
  assert int(count) == rows['rl']['n']


def test_the_index_lists_every_directory():
  folder = ROOT / 'experiments'
  text = (folder / 'README.md').read_text(encoding='utf-8')
  assert sorted(re.findall(r'^\| \[(\w+)\]\(\1/\)', text, re.M)) == sorted(
      path.name for path in folder.iterdir()
      if path.is_dir() and path.name != '__pycache__')


def test_published_configs_and_commands_name_no_paths(tmp_path):
  fields = {'data.path': '/home/me/beauty', 'model.huggingface': '/qwen',
            'tokenizer.path': '/qwen', 'prompt.traces.path': '/t.jsonl',
            'mid_train.text': '/text.jsonl', 'data.retriever.path': '/lists',
            'semantic_ids.rqvae.embeddings.path': '/e.npy'}
  assert sorted(fields) == sorted(PUBLISH['PATHS'])
  config = {'seed': 3, 'semantic_ids': {'codes': 4}}
  PUBLISH['blank'](config)
  assert config == {'seed': 3, 'semantic_ids': {'codes': 4}}
  for field, value in fields.items():
    *sections, name = field.split('.')
    section = config
    for key in sections:
      section = section.setdefault(key, {})
    section[name] = value
  published = ROOT / 'experiments/quickstart/seed0/report.json'
  content = json.loads(published.read_text(encoding='utf-8'))
  content['command'] = ' '.join((
      'python -m dgr2_jax.main --workdir=/home/me/run --config.seed=3',
      *(f'--config.{field}={value}' for field, value in fields.items())))
  write(tmp_path / 'run/report.json', content)
  write(tmp_path / 'run/config.json', config)
  (tmp_path / 'run/metrics.jsonl').write_text('')
  PUBLISH['publish'](tmp_path / 'run', tmp_path / 'out')
  for name in ('config.json', 'report.json', 'report.md', 'report.html'):
    text = (tmp_path / 'out' / name).read_text(encoding='utf-8')
    assert not [v for v in (*fields.values(), '/home/me/run') if v in text]
  config = json.loads((tmp_path / 'out/config.json').read_text())
  assert config['seed'] == 3 and config['semantic_ids']['codes'] == 4
  command = json.loads((tmp_path / 'out/report.json').read_text())['command']
  assert command.count('=DIR') == 8 and '--config.seed=3' in command


def test_a_published_folder_is_rendered_anew_in_place(tmp_path):
  folder = tmp_path / 'seed0'
  shutil.copytree(ROOT / 'experiments/quickstart/seed0', folder)
  before = {path.relative_to(folder): path.read_bytes()
            for path in folder.rglob('*') if path.is_file()}
  (folder / 'figures/ladder_recall_1.png').unlink()
  PUBLISH['publish'](folder, folder)
  after = {path.relative_to(folder): path.read_bytes()
           for path in folder.rglob('*') if path.is_file()}
  assert after.keys() == before.keys()
  text = after[pathlib.Path('report.html')].decode()
  for path in before:
    if path.name.startswith('curves_') or path.suffix == '.json':
      assert after[path] == before[path], path
    if path.suffix == '.png':
      assert f'id="{path.stem}-' in text
  trace = json.loads((folder / 'report.json').read_text())['examples'][0][
      'trace']
  assert trace.startswith('Latest purchase: ') and '<|' not in trace
  with pytest.raises(FileNotFoundError, match='metrics.jsonl'):
    PUBLISH['publish'](folder, tmp_path / 'other')


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
