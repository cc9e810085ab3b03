import dataclasses
import json

import numpy as np
import pytest

from dgr2_jax.data import facts
from dgr2_jax.data import prompts
from dgr2_jax.data import tokens
from dgr2_jax.data import traces
from tests.data import fabricated

FORMATS = (prompts.JSON, prompts.COMPACT)


@pytest.fixture(scope='module', params=FORMATS)
def template(request):
  return fabricated.template(request.param)


def _structure(template, ids):
  return [n for n in fabricated.names(template.tokenizer, ids) if n]


def test_json_prompt_reads_as_published():
  template = fabricated.template(prompts.JSON)
  request = fabricated.request(0)
  text = template.tokenizer.decode(template.prompt(request).ids)
  assert text.startswith('<|im_start|>system\n')
  assert text.endswith(
      '<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n')
  assert text.count('<|sid_begin|>') == 15
  lines = text.split('\n')
  item = template._items[request.candidates[0]]
  line = next(l for l in lines if l.startswith('Candidate 1: '))
  codes = fabricated.semantic_ids()[request.candidates[0]]
  sid = ''.join(f'<s_{letter}_{c}>' for letter, c in zip('abc', codes))
  assert line.startswith(f'Candidate 1: <|sid_begin|>{sid}<|sid_end|>')
  title = json.dumps(item.title, ensure_ascii=False)
  # A lone surrogate has no UTF-8 form.
  assert f'title: {title}'.replace('\ud800', '?') in line
  level = request.facts[0, facts.index('score')]
  assert f'retriever score: {level} of 7' in line


def test_compact_prompt_is_short_and_positional():
  template = fabricated.template(prompts.COMPACT)
  ids = template.prompt(fabricated.request(1)).ids
  assert len(ids) == 1 + 5 * 2 + 1 + 10 * 5 + 1
  structure = _structure(template, ids)
  assert structure == [
      tokens.HISTORY, tokens.CANDIDATES,
      *(tokens.candidate(i + 1) for i in range(10)), tokens.REASON]


@pytest.mark.parametrize('response_format', FORMATS)
def test_titles_change_no_structure(response_format):
  fields = ('sid', 'title', 'category', 'brand')
  template = fabricated.template(response_format, item_fields=fields)
  plain = prompts.Template(
      template.config, template.tokenizer,
      [dataclasses.replace(i, title='Soap', categories=('A',), brand='B')
       for i in template._items], fabricated.semantic_ids(), 10)
  for seed in range(10):
    request = fabricated.request(seed)
    assert (_structure(template, template.prompt(request).ids)
            == _structure(plain, plain.prompt(request).ids))
    answers = []
    for t in (template, plain):
      response = t.response(request, np.arange(10), 5)
      answers.append(response.ids[response.is_answer].tolist())
    assert answers[0] == answers[1]


def test_answer_span(template):
  request = fabricated.request(2)
  order = np.random.default_rng(0).permutation(10)
  response = template.response(request, order, 5)
  answer = response.ids[response.is_answer]
  assert answer[-1] == template.tokenizer.eos_id
  assert (response.ids == template.tokenizer.eos_id).sum() == 1
  assert (np.diff(response.is_answer.astype(int)) >= 0).all()
  text = template.tokenizer.decode(answer[:-1])
  if template.config.response_format == prompts.JSON:
    full = template.tokenizer.decode(response.ids[:-1])
    parsed = json.loads(full)
    assert list(parsed) == ['explanation', 'recommendations']
    assert parsed['recommendations'] == [str(c + 1) for c in order]
    assert text == ' ' + json.dumps(parsed['recommendations']) + '}'
  else:
    assert text == ''.join(f'<|c{c + 1}|>' for c in order)


def test_long_prompts_lose_the_oldest_items():
  template = fabricated.template(prompts.JSON)
  request = fabricated.request(3)
  whole = template.prompt(request)
  assert whole.shown == 5
  short = fabricated.template(
      prompts.JSON, max_prompt=len(whole.ids) - 1)
  cut = short.prompt(request)
  assert cut.shown == 4 and len(cut.ids) < len(whole.ids)
  # The same as showing four items from the start.
  four = fabricated.template(prompts.JSON, max_history=4).prompt(request)
  np.testing.assert_array_equal(cut.ids, four.ids)


def test_candidates_that_do_not_fit_are_an_error():
  template = fabricated.template(prompts.COMPACT, max_prompt=52)
  with pytest.raises(ValueError, match='takes 53 tokens: prompt.max_prompt'):
    template.prompt(fabricated.request(0))
  template = fabricated.template(prompts.COMPACT, max_prompt=53)
  prompt = template.prompt(fabricated.request(0))
  assert prompt.shown == 0
  # A trace without a history names nothing of it.
  response = template.response(fabricated.request(0), np.arange(10), 0)
  assert template.tokenizer.decode(response.ids[:3]) == (
      '<|no_category|><|no_category|><|no_brand|>')


def test_wrong_arguments(template):
  request = fabricated.request(0)
  with pytest.raises(ValueError, match='9 candidates: expected 10'):
    template.prompt(dataclasses.replace(
        request, candidates=request.candidates[:9]))
  with pytest.raises(ValueError, match='permutation'):
    template.response(request, np.zeros(10, int), 5)


@pytest.mark.parametrize('field, value', [
    ('response_format', 'xml'), ('item_fields', ('sid', 'price')),
    ('item_fields', ()), ('item_fields', ('sid', 'sid')),
    ('evidence', ('luck',)), ('max_history', 0), ('answer_order', 'random')])
def test_bad_fields_are_named(field, value):
  config = fabricated.config(prompts.JSON).prompt
  with config.ignore_type():
    config[field] = value
  with pytest.raises(ValueError, match=f'prompt.{field}'):
    prompts.PromptConfig.from_config(config)


def test_bad_trace_fields_are_named():
  for trace in ({'facts': ('rank',)}, {'pattern': ('colour',)}):
    config = fabricated.config(prompts.JSON, trace=trace).prompt
    with pytest.raises(ValueError, match=f'prompt.trace.{next(iter(trace))}'):
      prompts.PromptConfig.from_config(config)


def test_unknown_attributes_share_a_token():
  template = fabricated.template(prompts.COMPACT)
  new = fabricated.items()
  new[0] = dataclasses.replace(new[0], categories=('New',), brand='New')
  other = prompts.Template(
      template.config, template.tokenizer, new, fabricated.semantic_ids(), 10)
  text = template.tokenizer.decode(other.item(0, other.config.item_fields))
  assert text == tokens.OTHER_CATEGORY + tokens.OTHER_BRAND


def test_trace_facts_are_tokens_of_the_vocabulary():
  for combine in (True, False):
    for show_index in (True, False):
      template = fabricated.template(prompts.COMPACT, trace={
          'combine_facts': combine, 'show_index': show_index})
      lengths = {
          len(template.response(fabricated.request(s), np.arange(10), 5).ids)
          for s in range(5)}
      per_candidate = (1 if combine else 3) + show_index
      assert lengths == {4 + 10 * per_candidate + 1 + 1 + 10 + 1}
  assert isinstance(template.config.trace, traces.TraceConfig)
