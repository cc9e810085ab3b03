"""Tests of request sets."""

import dataclasses
import json
import os
import pathlib

import ml_collections
import numpy as np
import pytest

from dgr2_jax.data import directory
from dgr2_jax.data import facts
from dgr2_jax.data import interactions
from dgr2_jax.data import requests
from dgr2_jax.retrieval import cooccurrence
from tests.data import shoppers

DATASET = shoppers.make(0, num_users=60, num_items=40)


def config(**changes):
  result = ml_collections.ConfigDict(dict(
      path='', num_candidates=10, keep_misses=False, max_train_requests=0,
      seed=0, retriever=cooccurrence.default_config()))
  result.update(dict(changes))
  return result


def assert_same(a, b):
  for split in requests.SPLITS:
    assert len(getattr(a, split)) == len(getattr(b, split))
    for x, y in zip(getattr(a, split), getattr(b, split)):
      for field in dataclasses.fields(x):
        np.testing.assert_array_equal(
            getattr(x, field.name), getattr(y, field.name))
  assert a.summaries == b.summaries


def test_splits_and_protocol():
  sets = requests.build_requests(DATASET, config())
  from_end = {'validation': (2,), 'test': (1,), 'train': range(3, 99)}
  for split, allowed in from_end.items():
    for r in getattr(sets, split):
      sequence = DATASET.sequences[r.user]
      assert r.split == split and r.position >= 1
      assert len(sequence) - r.position in allowed
      assert r.target == sequence[r.position] and r.target in r.candidates
      np.testing.assert_array_equal(r.history, sequence[:r.position])
      assert r.facts.shape == (10, len(facts.FACTS))
  assert sets.summaries['train'].evaluated == sum(
      max(len(s) - 3, 0) for s in DATASET.sequences)


def test_keep_misses_keeps_every_user_and_changes_no_figure():
  hits = requests.build_requests(DATASET, config())
  every = requests.build_requests(DATASET, config(keep_misses=True))
  assert len(every.test) == len(every.validation) == len(DATASET.users)
  assert every.summaries == hits.summaries
  assert_same(hits, dataclasses.replace(every, **{
      split: tuple(r for r in getattr(every, split)
                   if r.target in r.candidates) for split in requests.SPLITS}))
  summary = every.summaries['test']
  places = requests.target_positions(every.test)
  assert np.isclose(summary.hit_rate, np.mean(places >= 0))
  assert np.isclose(summary.unconditional['recall@1'], np.mean(places == 0))
  assert np.isclose(
      summary.floor['recall@3'], np.mean(places[places >= 0] < 3))


def test_save_and_load(tmp_path):
  sets = requests.build_requests(DATASET, config())
  requests.save(sets, tmp_path / 'requests.npz')
  loaded = requests.load(tmp_path / 'requests.npz')
  assert_same(sets, loaded)
  for name, edge in sets.edges.items():
    np.testing.assert_array_equal(edge, loaded.edges[name])
  assert os.listdir(tmp_path) == ['requests.npz']


def test_fewer_training_requests():
  sets = requests.build_requests(DATASET, config(max_train_requests=7))
  assert len(sets.train) == 7


def test_candidates_from_a_file(tmp_path):
  history = set(DATASET.sequences[3].tolist())
  ids = [f'i{i}' for i in range(40) if i not in history][:10]
  target = f'i{DATASET.sequences[3][-1]}'
  (tmp_path / 'candidates.jsonl').write_text(json.dumps(
      dict(user_id='u3', candidates=ids[:4] + [target] + ids[4:])) + '\n')
  c = config(path=str(tmp_path))
  c.retriever.kind = 'file'
  sets = requests.build_requests(DATASET, c)
  assert [r.user for r in sets.test] == [3]
  assert requests.target_positions(sets.test).tolist() == [4]
  assert sets.summaries['test'].evaluated == 1
  # Splits without lists are retrieved as always.
  assert sets.summaries['train'] == requests.build_requests(
      DATASET, config()).summaries['train']


def test_a_split_without_any_hit_is_an_error(tmp_path):
  ids = [f'i{i}' for i in range(40) if i not in DATASET.sequences[3]][:10]
  (tmp_path / 'candidates.jsonl').write_text(json.dumps(
      dict(user_id='u3', candidates=ids)) + '\n')
  for keep_misses in (False, True):
    c = config(path=str(tmp_path), keep_misses=keep_misses)
    c.retriever.kind = 'file'
    with pytest.raises(interactions.DataError, match='none of 1 test requests'):
      requests.build_requests(DATASET, c)


def test_short_history_and_bad_kind_are_errors():
  short = dataclasses.replace(
      DATASET, sequences=(DATASET.sequences[0][:2],) + DATASET.sequences[1:])
  with pytest.raises(interactions.DataError, match="'u0'.*would be empty"):
    requests.build_requests(short, config())
  c = config()
  c.retriever.kind = 'oracle'
  with pytest.raises(ValueError, match="kind is 'oracle'"):
    requests.build_requests(DATASET, c)


BEAUTY = pathlib.Path(os.environ.get(
    'DGR2_BEAUTY',
    pathlib.Path(__file__).parents[3] / 'shared' / 'data' / 'beauty'))


@pytest.mark.skipif(
    not (BEAUTY / 'sequences.txt').exists(),
    reason='needs Amazon Beauty: set DGR2_BEAUTY to its directory')
def test_amazon_beauty_retrieval_figures():
  items, log = directory.read(BEAUTY)
  dataset = interactions.dataset('beauty', items, log, 5, 'file', 0, 'beauty')
  sets = requests.build_requests(dataset, config())
  figures = sets.summaries['test'].unconditional
  assert figures['recall@10'] >= .0777
  assert figures['recall@5'] >= .0567
  assert figures['ndcg@10'] >= .0485
  floors = [sets.summaries[k].floor['recall@1'] for k in requests.SPLITS]
  assert max(floors) - min(floors) < .015
