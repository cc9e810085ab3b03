"""The report from fabricated content, with texts that try to break it."""

import html.parser
import json
import os
import re

import numpy as np
import pytest

from dgr2_jax.evaluation import examples
from dgr2_jax.evaluation import metrics
from dgr2_jax.evaluation import reasoning
from dgr2_jax.evaluation import report
from dgr2_jax.evaluation import rows

C = 10
PANELS = [
    'ladder_recall_1', 'ladder_ndcg_3',
    *(f'frontier_{metric}_{axis}' for metric in ('recall_1', 'ndcg_3')
      for axis in ('tokens_per_forward', 'tokens_per_second')),
    'spans', 'commits_cft_0_9',
    'curves_ar_sft_loss', 'curves_ar_sft_validation', 'curves_cft_loss',
    'curves_cft_reward', 'curves_cft_validation']
HOSTILE = ('<script>alert(1)</script> | **bold** `x` </style> & "quoted" '
           "$\\frac{1}{2}$ <|im_end|> \ud800\u202e\nCandidate 1: x")


def _moved(targets, share, rng):
  orders = np.tile(np.arange(C), (len(targets), 1))
  for i in np.flatnonzero(rng.random(len(targets)) < share):
    orders[i] = [targets[i], *(c for c in range(C) if c != targets[i])]
  return orders


def make_content(n=400, seed=0):
  """A report's content with every section filled in."""
  rng = np.random.default_rng(seed)
  targets = rng.integers(C, size=n)
  incoming = np.tile(np.arange(C), (n, 1))
  valid = ['valid'] * n

  checks = {name: (rng.random((n, len(reasoning.CHECKS))) < share).astype(float)
            for name, share in (('ar', .98), ('naive', .3))}
  checks['ar'][:, reasoning.CHECKS.index('novel')] = np.nan
  checks['naive'][:n // 4, 1:] = np.nan

  def outcome(name, orders, tpf, failures=valid):
    return rows.RowOutcome(
        name, orders, orders, failures, np.full(n, 40),
        np.full(n, round(40 / tpf)), np.full(n, 10), np.full(n, 4),
        np.full(n, round(30 / tpf)), rng.normal(0.271, 0.3, n),
        checks[name] if name in checks else checks['ar'])

  ar = outcome('ar', _moved(targets, 0.3, rng), 1)
  cft_orders = np.where(rng.random((n, 1)) < 0.9, ar.orders, incoming)
  broken = ['duplicate'] * (n - 40) + ['out_of_set'] * 20 + ['overflow'] * 20
  outcomes = [
      rows.RowOutcome('pre_rank', incoming),
      rows.RowOutcome('gbdt', _moved(targets, 0.35, rng)), ar,
      outcome('naive', incoming, 6, broken), outcome('cft', cft_orders, 1.1)]
  same = outcome('cft', cft_orders, 1)
  frontier = [rows.build_frontier_point(
      same, targets, mode='ar', threshold=None, tokens_per_second=110.5,
      same_weights=same, same_weights_tokens_per_second=110.5, reference=ar,
      resamples=200)]
  for tau, tpf, failed in ((1.0, 1.1, 0), (0.9, 2.4, 2), (0.6, 3.4, 30),
                           (0.4, 4.6, 200)):
    frontier.append(rows.build_frontier_point(
        outcome('cft', np.where(np.arange(n)[:, None] < failed, incoming,
                                cft_orders), tpf,
                ['duplicate'] * failed + ['valid'] * (n - failed)),
        targets, mode='threshold', threshold=tau,
        tokens_per_second=100.0 * tpf, same_weights=same,
        same_weights_tokens_per_second=110.5, reference=ar, resamples=200))
  item = {'title': 'Argan Oil Shampoo, 12 oz, for dry and damaged hair',
          'categories': ['Hair Care', 'Shampoos'], 'brand': 'Verbena'}
  texts = ('The user buys hair care of Verbena , most recently a shampoo . '
           'A conditioner of the same brand would follow .').split(' ')
  steps = rng.integers(0, 6, 40)
  example = {
      'row': 'cft', 'threshold': 0.9, 'block_size': 16, 'calls': 17,
      'failure': 'valid', 'target': 3, 'order': [3, 0, 1, 2, *range(4, C)],
      'history': [item] * 4, 'candidates': [item] * C,
      'trace': 'The user buys hair care of Verbena.\nA conditioner follows.',
      'tokens': [{'text': ' ' + texts[i % len(texts)],
                  'call': int(10 * (i // 16) + steps[i]),
                  'is_answer': i >= 30} for i in range(40)]}
  hostile = dict(
      example, failure='duplicate', order=list(range(C)), trace=HOSTILE,
      history=[dict(item, title=HOSTILE)],
      candidates=[dict(item, title=HOSTILE, brand='')] * C,
      tokens=[{'text': HOSTILE, 'call': 0, 'is_answer': True}])
  by_row = {o.name: rows.unconditional(o, targets, 0.07) for o in outcomes}
  return {
      'title': 'Quickstart', 'command': 'python -m dgr2_jax.main --x="a`b"',
      'dataset': {
          'name': 'embedded', 'users': 6000, 'items': 800,
          'interactions': 51234, 'requests': {'train': 9000, 'test': n},
          'hit_rate': 0.07,
          'floors': {'train': metrics.means(targets + 1),
                     'test': metrics.means(targets + 1)},
          'oracle': {'recall@1': 0.71, 'ndcg@3': np.float32(0.8)},
          'padding_share': 0.0312, 'dropped_history_share': 0.0,
          'paper_reference': True},
      'conditional': n,
      'unconditional': {'users': 5800, 'hit_rate': 0.07, 'rows': by_row},
      'rows': [rows.build_row(o, targets, ar, resamples=200)
               for o in outcomes],
      'frontier': frontier,
      'stages': [rows.build_stage(outcomes[4], outcomes[3], targets,
                                  decoding='τ 0.9', resamples=200)],
      'timing': {'stages': {'ar_sft': 155.2, 'cft': 3725.0},
                 'train_tokens_per_second': float('nan'), 'prepare': 4.2,
                 'speed_requests': 64},
      'environment': {'python': '3.11.7', 'jax': '0.10.0',
                      'devices': ['cpu:0']},
      'model': {'parameters': 512345, 'dtype': np.dtype('float32')},
      'examples': [example, hostile],
      'commits': [{'row': 'cft', 'threshold': 0.9, 'block_size': 16,
                   'steps': [rng.integers(0, 5, 30 + i).tolist()
                             for i in range(8)]}],
  }


def _metrics_lines():
  lines = []
  for stage, start in (('ar_sft', 3.0), ('cft', 1.8)):
    for step in range(0, 501, 20):
      loss = start * np.exp(-step / 200) + 0.6
      lines.append({'stage': stage, 'step': step, 'train/loss': loss,
                    'train/answer_loss': loss / 2, 'train/grad_norm': 9.0,
                    **({'train/reward': 1 - loss / 4, 'train/format': 0.1}
                       if stage == 'cft' else {}),
                    'timing': {'steps_per_second': 3.0}})
      if step % 100 == 0:
        lines.append({'stage': stage, 'step': step,
                      'validation/ndcg@3': 0.5 - 0.2 * np.exp(-step / 150),
                      'validation/reward': 0.1,
                      'validation/valid_rate': 1 - np.exp(-step / 50)})
  return [json.dumps(line) for line in lines]


@pytest.fixture(name='content', scope='module')
def content_fixture():
  return make_content()


@pytest.fixture(name='workdir', scope='module')
def workdir_fixture(tmp_path_factory, content):
  directory = tmp_path_factory.mktemp('run')
  (directory / 'metrics.jsonl').write_text(
      '\n'.join(_metrics_lines()) + '\n{"stage": "cft", "st')
  report.write(directory, content)
  return directory


class _Page(html.parser.HTMLParser):
  """Checks that elements nest, and collects ids, tags and links."""

  VOID = {'meta', 'wbr', 'br', 'path', 'use', 'rect', 'image'}

  def __init__(self):
    super().__init__()
    self.open, self.tags, self.ids, self.links = [], set(), [], []

  def handle_starttag(self, tag, attrs):
    self.tags.add(tag)
    for name, value in attrs:
      if name == 'id':
        self.ids.append(value)
      if name in ('href', 'src', 'xlink:href'):
        self.links.append(value)
    if tag not in self.VOID:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.handle_starttag(tag, attrs)
    if tag not in self.VOID:
      self.open.pop()

  def handle_endtag(self, tag):
    if tag not in self.VOID:
      assert self.open.pop() == tag


def test_json_has_the_contract(workdir, content):
  saved = json.loads((workdir / 'report.json').read_text())
  assert [row['name'] for row in saved['rows']] == [
      'pre_rank', 'gbdt', 'ar', 'naive', 'cft']
  assert saved['rows'][2]['recall@1'] == content['rows'][2]['recall@1']
  assert saved['dataset']['oracle']['ndcg@3'] == pytest.approx(0.8)
  assert saved['timing']['train_tokens_per_second'] is None
  assert saved['model'] == {'parameters': 512345, 'dtype': 'float32'}
  for name in ('dataset', 'conditional', 'unconditional', 'rows', 'frontier',
               'timing', 'environment'):
    assert name in saved
  assert not list(workdir.glob('**/.*tmp'))


def test_html_is_one_well_formed_page(workdir):
  text = (workdir / 'report.html').read_text(encoding='utf-8')
  page = _Page()
  page.feed(text)
  assert not page.open
  assert 'script' not in page.tags
  assert len(page.ids) == len(set(page.ids))
  assert page.links and all(link.startswith(('#', 'data:image/png;base64,'))
                            for link in page.links)
  assert {link[1:] for link in page.links if link[0] == '#'} <= set(page.ids)
  assert not re.search(r'url\((?!#)|@import', text)
  assert text.count('<svg') == len(PANELS)
  for name in PANELS:
    assert f'id="{name}-' in text, name
  assert '&lt;script&gt;alert(1)' in text
  assert 'prefers-color-scheme:dark' in text


def test_numbers_stand_in_every_output(workdir, content):
  cft = content['rows'][-1]
  terminal = report.summary(content)
  markdown = (workdir / 'report.md').read_text(encoding='utf-8')
  page = (workdir / 'report.html').read_text(encoding='utf-8')
  for text in (terminal, markdown, page):
    for value in (cft['recall@1'], cft['ndcg@10'], cft['valid_rate']):
      assert f'{value:.3f}' in text
    assert 'at least 99% valid responses: cft, τ 0.9' in text
  for shown in ('1 h 02 min', '>64<', '4.20 s', '>3.1%<'):
    assert shown in page
  assert '.2811' in page and 'Published' in markdown
  assert '.2811' not in terminal


def test_the_fastest_is_by_the_clock(content):
  """Tokens per forward count where no speed was measured."""
  points = [dict(p) for p in content['frontier']]
  fast, most = (next(p for p in points if p['threshold'] == tau
                     and p['mode'] == 'threshold') for tau in (1., .9))
  assert fast['tokens_per_forward'] < most['tokens_per_forward']
  for speedup, want in ((2., 'τ 1,'), (None, 'τ 0.9,')):
    fast['speedup'], most['speedup'] = speedup, speedup and 1.5
    text = '\n'.join(report.headline(content | {'frontier': points}))
    assert f'valid responses: cft, {want}' in text


def test_rows_that_are_never_valid_are_named(content):
  naive, = (row for row in content['rows'] if row['name'] == 'naive')
  assert naive['valid_rate'] == 0
  assert any(line.startswith('No response of naive is valid')
             for line in report.headline(content))


def test_reasoning_stands_beside_the_rows_that_reason(workdir, content):
  by_name = {row['name']: row['reasoning'] for row in content['rows']}
  assert by_name['pre_rank'] is None and by_name['gbdt'] is None
  assert 'novel' not in by_name['ar']
  assert by_name['naive']['form']['n'] == 400
  assert by_name['naive']['shown']['n'] == 300
  low, high = by_name['ar']['choice']['interval']
  assert low < by_name['ar']['choice']['rate'] < high
  for text in ((workdir / 'report.md').read_text(), report.summary(content)):
    line = [x for x in re.split('\n(?=Reasoning|### Reasoning)', text)[1]
            .splitlines() if 'naive' in x][0]
    for found in by_name['naive'].values():
      assert f'{found["rate"]:.3f}' in line


def test_reports_of_earlier_versions(content, tmp_path):
  old = {k: v for k, v in content.items() if k != 'commits'}
  for key, field in (('rows', 'reasoning'),
                     ('rows', 'reasoning_tokens_per_forward'),
                     ('frontier', 'reasoning_tokens_per_forward')):
    old[key] = [{k: v for k, v in entry.items() if k != field}
                for entry in old[key]]
  report.write(tmp_path, old)
  page = (tmp_path / 'report.html').read_text()
  assert '>Reasoning<' not in page and '>Steps<' not in page
  assert '>reasoning TPF<' not in page and '>answer TPF<' in page


def test_markdown_links_exist_and_rows_have_equal_cells(workdir):
  text = (workdir / 'report.md').read_text(encoding='utf-8')
  links = re.findall(r'!\[[^\]]*\]\(([^)]*)\)', text)
  assert [re.sub('.*/|.png', '', link) for link in links] == PANELS
  for link in links:
    assert (workdir / link).read_bytes().startswith(b'\x89PNG')
  for block in text.split('\n\n'):
    if block.startswith('| '):
      widths = {len(re.findall(r'(?<!\\)\|', line))
                for line in block.splitlines()}
      assert len(widths) == 1, block
  assert '<script>' not in text.replace('\\<', '')


def test_writing_twice_gives_the_same_bytes(workdir, content, tmp_path):
  (tmp_path / 'metrics.jsonl').write_bytes(
      (workdir / 'metrics.jsonl').read_bytes())
  report.write(tmp_path, content)
  for path in workdir.rglob('*'):
    if path.is_file():
      other = tmp_path / path.relative_to(workdir)
      assert other.read_bytes() == path.read_bytes(), path.name


def test_published_figures_only_where_asked_for(content, tmp_path):
  plain = dict(content, dataset=dict(content['dataset'],
                                     paper_reference=False))
  report.write(tmp_path, plain)
  assert '.2811' not in (tmp_path / 'report.html').read_text()
  assert '.2811' not in (tmp_path / 'report.md').read_text()


def test_sections_may_be_empty(content, tmp_path):
  bare = dict(content, frontier=[], rows=content['rows'][:1], timing={},
              environment={})
  bare['rows'] = [dict(bare['rows'][0], ci=None, recovery=None)]
  bare['dataset'] = {'name': 'own'}
  for name in ('model', 'examples', 'commits'):
    del bare[name]
  report.write(tmp_path, bare)
  page = _Page()
  page.feed((tmp_path / 'report.html').read_text())
  assert not page.open
  assert 'svg' not in page.tags
  assert 'pre_rank' in report.summary(bare)


def test_a_missing_section_is_named_and_leaves_nothing(content, tmp_path):
  broken = {k: v for k, v in content.items() if k != 'frontier'}
  with pytest.raises(ValueError, match='frontier'):
    report.write(tmp_path, broken)
  assert os.listdir(tmp_path) == []


def test_commit_steps_count_within_blocks():
  calls = [0, 3, 1, 3, 5, 5, 9, 7]
  assert examples.commit_steps(calls, 4) == [0, 2, 1, 2, 0, 0, 2, 1]


def test_examples_show_each_kind_first():
  n = 20
  targets = np.full(n, 2)
  targets[0] = -1
  orders, failures = np.tile(np.arange(C), (n, 1)), ['valid'] * n
  choose = lambda count=5: examples.choose(targets, orders, failures, count)
  assert choose() == [1, 5, 10, 14, 19]
  orders[0] = orders[7] = [2, 0, 1, *range(3, C)]  # 0 has no target
  orders[12] = [0, 1, 3, 2, *range(4, C)]
  failures[9] = 'overflow'
  assert choose() == [7, 12, 9, 1, 5]
  assert choose(2) == [7, 12] and choose(0) == []
  assert len(set(choose(30))) == n - 1
  assert examples.choose(targets[:1], orders[:1], failures[:1], 5) == []


def test_a_trace_of_tokens_is_not_shown_twice():
  tokens = [{'text': '<|grade_1|>'}, {'text': '<|c1|>'}]
  assert examples.words({'tokens': tokens, 'trace': '<|grade_1|>'}) == ''
  assert examples.words({'tokens': tokens, 'trace': 'Fits.'}) == 'Fits.'
