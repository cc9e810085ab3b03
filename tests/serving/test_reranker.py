"""The re-ranker's prompts, answers and command."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

import dgr2_jax
from dgr2_jax.data import facts
from dgr2_jax.data import pipeline
from dgr2_jax.data import prepare
from dgr2_jax.data import traces
from dgr2_jax.decoding import batching
from dgr2_jax.decoding import block_decoder
from dgr2_jax.decoding import commit
from dgr2_jax.serving import prompting
from dgr2_jax.serving import reranker as reranker_lib
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import workdir as workdir_lib
from tests.serving.prepared import Request
from tests.serving.prepared import described
from tests.serving.prepared import prompts_of
from tests.serving.prepared import requests_of


@pytest.mark.parametrize('split', ['validation', 'test'])
def test_prompts_are_those_of_the_evaluation(reranker, split):
  data = reranker._experiment.data
  batches = pipeline.eval_batches(
      data.record_file(split), 1, data.prompt_length, data.response_length, 0,
      1)
  want = [batch['prompt'][0, :batch['prompt_length'][0]] for batch in batches]
  got = prompts_of(reranker, requests_of(reranker, split))
  assert len(got) == len(want) > 50
  for a, b in zip(got, want):
    np.testing.assert_array_equal(a, b)


def test_prepare_leaves_requests_to_try(reranker, workdir):
  lines = (workdir / 'data' / 'requests.jsonl').read_text().splitlines()
  examples = [json.loads(line) for line in lines]
  assert len(examples) == 100 and all(e.pop('id') for e in examples)
  for example, want in zip(examples, requests_of(reranker)):
    assert Request(**example) == dataclasses.replace(
        want, scores=example['scores'])
  for got, want in zip(*(prompts_of(reranker, requests) for requests in (
      [Request(**e) for e in examples], requests_of(reranker)[:100]))):
    np.testing.assert_array_equal(got, want)


def test_a_new_user_is_one_whom_no_count_has_seen(reranker, workdir,
                                                  monkeypatch):
  """The same prompts as if the known user had never been in the data."""
  dataset = reranker._experiment.data.dataset
  monkeypatch.setattr(experiment_lib.Experiment, 'restore',
                      lambda self, stage: None)
  for request in requests_of(reranker)[::30]:
    keep = [i for i, user in enumerate(dataset.users)
            if user != request.user_id]
    monkeypatch.setattr(prepare.Prepared, 'dataset', dataclasses.replace(
        dataset, users=tuple(dataset.users[i] for i in keep),
        sequences=tuple(dataset.sequences[i] for i in keep)))
    got, = prompts_of(reranker_lib.Reranker.load(workdir, 'cft'),
                      [dataclasses.replace(request, user_id=None)])
    np.testing.assert_array_equal(got, prompts_of(reranker, [request])[0])


def writing(monkeypatch, write):
  """Lets `write` fill in the response [L] to a prompt's ids; its length."""
  def decode(model, params, prompts, *, config, **options):
    del model, params, options
    # As they are done: the last of a batch first.
    for index, prompt in reversed(list(enumerate(prompts))):
      tokens = np.zeros(config.max_response, np.int32)
      length = write(prompt.tokens, tokens)
      yield batching.Response(index, block_decoder.Rollout(
          tokens[None], np.array([length]), np.array([length < len(tokens)]),
          np.arange(len(tokens))[None] // 4, np.zeros((1, len(tokens))),
          np.array([9])))

  monkeypatch.setattr(batching, 'decode', decode)


def test_answers_are_the_responses_orders(reranker, monkeypatch):
  requests = requests_of(reranker)[:5]
  checked = reranker._prompter.with_facts(
      [reranker._prompter.checked(r) for r in requests])
  asked = dict(zip(map(bytes, prompts_of(reranker, requests)), checked))

  def write(prompt, tokens):
    request = asked[bytes(prompt)]
    if request is checked[3]:
      return len(tokens)  # garbage
    response = reranker._prompter._template.response(
        request, traces.target_first(
            request.candidates, request.candidates[-1]), 1, np.zeros(10, int)
    ).ids
    tokens[:len(response)] = response
    return len(response)

  writing(monkeypatch, write)
  answers = reranker.rerank(requests, batch_size=2)
  assert [a.valid for a in answers] == [True, True, True, False, True]
  for request, answer in zip(requests, answers):
    candidates = tuple(request.candidates)
    want = (candidates[-1:] + candidates[:-1] if answer.valid else candidates)
    assert answer.ranking == want
    assert want == tuple(candidates[i] for i in answer.order)
    assert answer.forwards == 9
    assert answer.trace[4].forward == 1
  assert answers[3].failure == 'overflow'
  assert answers[0].explanation and answers[0].failure == 'valid'


def test_invalid_answers_can_be_completed(reranker, monkeypatch):
  requests = requests_of(reranker)[:3]
  checked = reranker._prompter.with_facts(
      [reranker._prompter.checked(r) for r in requests])
  prompts = [list(ids) for ids in prompts_of(reranker, requests)]

  def write(prompt, tokens):
    which = prompts.index(list(prompt))
    if which == 1:
      return len(tokens)  # not even a marker
    response = reranker._prompter._template.response(
        checked[which], np.arange(10), 1, np.zeros(10, int)).ids
    tokens[:len(response)] = response
    if which == 0:
      tokens[len(response) - 3] = tokens[len(response) - 2]  # twice
    return len(response)

  writing(monkeypatch, write)
  plain = reranker.rerank(requests)
  assert [a.failure for a in plain] == ['duplicate', 'overflow', 'valid']
  assert not any(a.completed for a in plain)
  answers = reranker.rerank(requests, complete=True)
  assert [a.completed for a in answers] == [True, False, False]
  assert [a.valid for a in answers] == [False, False, True]
  assert sorted(answers[0].ranking) == sorted(requests[0].candidates)
  assert answers[1:] == plain[1:]


@pytest.mark.parametrize('mode', reranker_lib.MODES)
def test_every_mode_decodes_and_neighbours_change_nothing(reranker, mode):
  requests = requests_of(reranker)[:5]
  answers = reranker.rerank(requests, mode, batch_size=4)
  assert len(answers) == 5
  for request, answer in zip(requests, answers):
    assert sorted(answer.ranking) == sorted(request.candidates)
    assert answer.forwards >= 1 and answer.trace
  assert reranker.rerank(requests[3:], mode, batch_size=4) == answers[3:]
  assert reranker.rerank([], mode) == []


def test_modes_that_weights_do_not_have_are_refused(reranker, workdir,
                                                    monkeypatch):
  monkeypatch.setattr(experiment_lib.Experiment, 'restore',
                      lambda self, stage: self.initial_params())
  autoregressive = dgr2_jax.Reranker.load(workdir, 'ar_sft')
  for mode in ('threshold', 'verify'):
    with pytest.raises(ValueError, match='weights of ar_sft are autoregr'):
      autoregressive.rerank([], mode)
  assert autoregressive.rerank([], 'ar') == []
  monkeypatch.setattr(reranker, '_canvas', dataclasses.replace(
      reranker._canvas, clean_stream='block_causal'))
  with pytest.raises(ValueError, match="mode 'ar' needs"):
    reranker.rerank([], 'ar')


@pytest.mark.parametrize('changes, message', [
    (dict(history=[]), 'history: expected at least one'),
    (dict(history='E0001'), 'history: expected a list of items, not one'),
    (dict(history=['nothing']), "history: unknown item 'nothing'"),
    (dict(candidates=[]), 'candidates: 0 items, expected 10'),
    (dict(candidates=['nothing'] * 10), "candidates: unknown item 'nothing'"),
    (dict(scores=[1.] * 9), 'scores: expected 10'),
    (dict(scores=[0.] * 9 + [1.]), 'scores: .*do not rise'),
    (dict(scores=[10 ** 400] * 10), 'scores: .*finite'),
    (dict(scores=[1e300] * 10), 'scores: .*finite as float32'),
    (dict(user_id='nobody'), "user_id: unknown user 'nobody'")])
@pytest.mark.filterwarnings('error::RuntimeWarning')
def test_bad_requests_are_named(reranker, changes, message):
  good = requests_of(reranker)[0]
  with pytest.raises(prompting.RequestError, match=f'request 1: {message}'):
    reranker.rerank([good, dataclasses.replace(good, **changes)])


def test_what_is_no_request_is_named(reranker):
  good = requests_of(reranker)[0]
  with pytest.raises(prompting.RequestError, match='a Request, got dict'):
    reranker.rerank([dataclasses.asdict(good)])
  with pytest.raises(ValueError, match='batch_size is 0'):
    reranker.rerank([good], batch_size=0)


def test_candidates_differ_and_are_new(reranker):
  good = requests_of(reranker)[0]
  for candidates, message in (
      (good.candidates[:9] + good.candidates[:1], 'stands twice'),
      (good.candidates[:9] + list(good.history[:1]), 'is in the history'),
      (good.candidates + ['x'], 'unknown item'),
      (good.candidates + requests_of(reranker)[1].candidates, '20 items')):
    with pytest.raises(prompting.RequestError, match=message):
      reranker.check(dataclasses.replace(good, candidates=candidates))
  with pytest.raises(prompting.RequestError, match='purchases of user'):
    reranker.check(dataclasses.replace(good, history=good.history[::-1]))


def test_candidates_too_long_for_a_prompt_are_named(reranker, monkeypatch):
  template, good = reranker._prompter._template, requests_of(reranker)[0]
  longest = len(prompts_of(reranker, [dataclasses.replace(
      good, history=good.history[:1])])[0])
  for room, fits in ((longest - 1, True), (longest - 9, False)):
    monkeypatch.setattr(template, 'config', dataclasses.replace(
        template.config, max_prompt=room))
    if fits:
      reranker.check(good)
    else:
      with pytest.raises(prompting.RequestError, match='candidates: .*takes'):
        reranker.check(good)


def test_new_items_are_read_as_never_bought(reranker, monkeypatch):
  good = dataclasses.replace(requests_of(reranker)[0], user_id=None)
  new = described(reranker, good.candidates[4], 'new')
  candidates = [*good.candidates[:4], new, *good.candidates[5:]]
  asked = dataclasses.replace(good, candidates=candidates)
  checked, = reranker._prompter.with_facts([reranker._prompter.checked(asked)])
  level = dict(zip([fact.name for fact in facts.FACTS], checked.facts[4]))
  for name in ('bought_with_last', 'bought_with_history', 'popularity',
               'bought_after_last'):
    assert level[name] == 0
  # Category and brand are those of the item that it describes.
  before, = reranker._prompter.with_facts([reranker._prompter.checked(good)])
  for name in ('category', 'brand', 'rank', 'follows', 'similarity'):
    assert level[name] == before.facts[4][facts.index(name)]
  ids, was = prompts_of(reranker, [asked, good])
  assert len(ids) == len(was) and (ids != was).any()

  writing(monkeypatch, lambda prompt, tokens: len(tokens))
  first, second = reranker.rerank([asked, good])
  assert first.ranking == tuple(
      'new' if x is new else x for x in candidates)
  assert (first.new_items, second.new_items) == (('new',), ())


def test_histories_may_hold_new_items(reranker):
  good = dataclasses.replace(requests_of(reranker)[0], user_id=None)
  new = {'item_id': 'new', 'title': 'A thing', 'categories': ['Things']}
  known = {'item_id': good.candidates[0], 'categories': []}  # that will do
  alone = dataclasses.replace(good, history=[new, new])
  ids, again = prompts_of(reranker, [alone, dataclasses.replace(
      alone, candidates=[known, *good.candidates[1:]])])
  np.testing.assert_array_equal(ids, again)
  last = prompts_of(reranker, [dataclasses.replace(
      good, history=[*good.history, new])])[0]
  tokenizer = reranker._experiment.data.tokenizer
  assert tokenizer.id('<|other_category|>') in last
  assert tokenizer.id('<|no_brand|>') in last


@pytest.mark.parametrize('item, message', [
    ({}, "field 'item_id' must be a non-empty string"),
    ({'item_id': 'x', 'title': 3, 'categories': ['a']}, "field 'title'"),
    (7, 'expected a JSON object')])
def test_bad_descriptions_are_named(reranker, item, message):
  good = requests_of(reranker)[0]
  with pytest.raises(prompting.RequestError, match=f'history: .*{message}'):
    reranker.check(Request([item], good.candidates))
  one = {'item_id': 'x', 'title': 'x', 'categories': ['a']}
  with pytest.raises(prompting.RequestError, match="'x' is described in two"):
    reranker.check(Request([one, {**one, 'title': 'y'}], good.candidates))
  with pytest.raises(prompting.RequestError, match="'x' is in the history"):
    reranker.check(Request([one], [one, *good.candidates[1:]]))


def test_a_checkpoint_names_directory_and_stage(workdir, monkeypatch):
  restored = []
  monkeypatch.setattr(
      experiment_lib.Experiment, 'restore', lambda self, stage: restored.append(
          (self.workdir, stage)))
  reranker_lib.Reranker.load(workdir / 'checkpoints' / 'cft')
  assert restored == [(workdir, 'cft')]


def test_what_is_no_working_directory_is_said(tmp_path, workdir):
  with pytest.raises(workdir_lib.WorkdirError, match='config.json'):
    reranker_lib.Reranker.load(tmp_path)
  with pytest.raises(ValueError, match="stage 'cfd' is not in the recipe"):
    reranker_lib.Reranker.load(workdir, 'cfd')
  with pytest.raises(ValueError, match="stage '' is not in the recipe"):
    reranker_lib.Reranker.load(workdir, '')
  with pytest.raises(ValueError, match='--stage=rl'):
    reranker_lib.Reranker.load(workdir)


@pytest.mark.parametrize('section, key, named', [
    ('data', 'num_candidates', 'num_candidates'),
    ('model', 'num_layers', 'num_layers'), ('canvas', 'width', 'width')])
def test_configs_of_other_versions_are_named(workdir, tmp_path, section, key,
                                             named):
  content = json.loads((workdir / 'config.json').read_text())
  if content[section].pop(key, None) is None:
    content[section][key] = 1
  (tmp_path / 'config.json').write_text(json.dumps(content))
  (tmp_path / 'data').symlink_to(workdir / 'data')
  with pytest.raises(workdir_lib.WorkdirError, match=f'config.json.*{named}'):
    reranker_lib.Reranker.load(tmp_path)


def test_unknown_mode_and_threshold(reranker):
  with pytest.raises(ValueError, match="mode is 'fast'"):
    reranker.rerank([], 'fast')
  with pytest.raises(ValueError, match='tau=1.5'):
    reranker.rerank([], threshold=1.5)


def test_the_package_names_it():
  assert dgr2_jax.Reranker is reranker_lib.Reranker
  with pytest.raises(AttributeError, match='Rerankr'):
    dgr2_jax.Rerankr  # pylint: disable=pointless-statement


def test_answer_may_have_a_threshold_of_its_own(reranker, monkeypatch):
  asked = []

  def decode(*args, **options):
    del args
    asked.append((options['rule'], options['config'].answer_marker))
    return iter(())

  monkeypatch.setattr(batching, 'decode', decode)
  requests = requests_of(reranker)[:1]
  reranker.rerank(requests, threshold=.4)
  reranker.rerank(requests, threshold=.4, answer_threshold=.9)
  marker = reranker._experiment.data.tokenizer.id('<|answer|>')
  assert asked == [(commit.Threshold(.4), -1),
                   (commit.Threshold(.4, .9), marker)]
  with pytest.raises(ValueError, match='of mode threshold, not ar'):
    reranker.rerank(requests, 'ar', answer_threshold=.9)


def test_weights_that_are_not_whole_are_named(workdir):
  path = workdir / 'checkpoints' / 'rl'
  path.mkdir(parents=True)
  try:
    with pytest.raises(ValueError, match='complete stage; run .* --stage=rl'):
      reranker_lib.Reranker.load(workdir)
    (path / 'complete.json').write_text('{"step": 4, "best": {"step": 4}}')
    (path / '4').mkdir()
    with pytest.raises(ValueError, match=r'rl/4: it has no manifest.*--st'):
      reranker_lib.Reranker.load(workdir)
    assert (path / '4').exists() and (path / 'complete.json').exists()
  finally:
    shutil.rmtree(workdir / 'checkpoints')
