import dataclasses

import numpy as np
import pytest

from dgr2_jax.data import pipeline
from dgr2_jax.data import prompts
from dgr2_jax.data import records
from tests.data import fabricated

NUM, P, L = 22, 80, 40


@pytest.fixture(scope='module')
def template():
  return fabricated.template(prompts.COMPACT)


@pytest.fixture(scope='module')
def written(template):
  return list(records.build(
      [fabricated.request(s, history=1 + s % 5) for s in range(NUM)], template))


@pytest.fixture(scope='module')
def path(template, written, tmp_path_factory):
  path = tmp_path_factory.mktemp('records') / 'train.array_record'
  records.write(path, written, template.tokenizer.pad_id)
  return path


def _train(path, size=8, seed=3, index=0, count=1):
  return pipeline.train_batches([path], size, P, L, seed, index, count)


def test_rows(path, written, template):
  batch = _train(path)[0]
  shapes = {key: (value.shape, value.dtype) for key, value in batch.items()}
  assert shapes == {
      'prompt': ((8, P), np.int32), 'prompt_length': ((8,), np.int32),
      'response': ((8, 1, L), np.int32), 'response_length': ((8, 1), np.int32),
      'is_answer': ((8, 1, L), bool),
      'supervised_from': ((8, 1), np.int32), 'example_id': ((8,), np.int32)}
  for row, example in enumerate(batch['example_id']):
    record = written[example]
    p, l = batch['prompt_length'][row], batch['response_length'][row, 0]
    np.testing.assert_array_equal(batch['prompt'][row, :p], record.prompt)
    assert (batch['prompt'][row, p:] == template.tokenizer.pad_id).all()
    np.testing.assert_array_equal(batch['response'][row, 0, :l],
                                  record.response)
    assert (batch['response'][row, 0, l - 1:] == template.tokenizer.eos_id
           ).all()
    np.testing.assert_array_equal(
        batch['is_answer'][row, 0, :l], record.is_answer)
    assert not batch['is_answer'][row, 0, l:].any()


def test_every_epoch_has_every_record_in_its_own_order(path):
  dataset = _train(path, size=2)
  steps = NUM // 2
  epochs = [
      np.concatenate([dataset[e * steps + s]['example_id']
                      for s in range(steps)]) for e in range(3)]
  for epoch in epochs:
    assert sorted(epoch) == list(range(NUM))
  assert not np.array_equal(epochs[0], epochs[1])
  assert not np.array_equal(epochs[1], epochs[2])


def test_a_step_is_a_function_of_seed_and_step(path):
  first = [_train(path)[step]['example_id'] for step in (0, 7, 30)]
  again = _train(path)
  for step, ids in zip((30, 7, 0), first[::-1]):
    np.testing.assert_array_equal(again[step]['example_id'], ids)
  assert not np.array_equal(_train(path, seed=4)[0]['example_id'], first[0])


@pytest.mark.parametrize('count', [2, 4])
def test_hosts_share_the_same_global_batch(path, count):
  whole = _train(path)
  hosts = [_train(path, index=k, count=count) for k in range(count)]
  for step in (0, 1, 5, 40):
    shares = [host[step] for host in hosts]
    for key, value in whole[step].items():
      np.testing.assert_array_equal(
          value, np.concatenate([share[key] for share in shares]))


@pytest.mark.parametrize('count', [1, 2, 4])
def test_evaluation_in_order(path, count):
  hosts = [list(pipeline.eval_batches(path, 8, P, L, k, count))
           for k in range(count)]
  assert {len(host) for host in hosts} == {3}
  for step in range(3):
    ids = np.concatenate([host[step]['example_id'] for host in hosts])
    valid = np.concatenate([host[step]['valid'] for host in hosts])
    wanted = np.arange(8) + 8 * step
    np.testing.assert_array_equal(ids, np.minimum(wanted, NUM - 1))
    np.testing.assert_array_equal(valid, wanted < NUM)
  assert hosts[0][0]['prompt'].shape == (8 // count, P)


def test_errors(path):
  with pytest.raises(ValueError, match='multiple of the 3 hosts'):
    _train(path, count=3)
  with pytest.raises(ValueError, match='prompt of 63 tokens'):
    pipeline.train_batches([path], 8, 60, L, 0, 0, 1)
  with pytest.raises(ValueError, match='response of 27'):
    next(pipeline.eval_batches(path, 8, P, 26, 0, 1))


def test_files_are_shuffled_together(path, written, template, tmp_path):
  more = tmp_path / 'more.array_record'
  records.write(more, [
      dataclasses.replace(r, example_id=NUM + r.example_id, supervised_from=3)
      for r in written], template.tokenizer.pad_id)
  dataset = pipeline.train_batches([path, more], 4, P, L, 0, 0, 1)
  epoch = [dataset[step] for step in range(NUM // 2)]
  ids = np.concatenate([batch['example_id'] for batch in epoch])
  assert sorted(ids) == list(range(2 * NUM))
  assert len({int(i) // NUM for i in ids[:8]}) == 2
  for batch in epoch:
    np.testing.assert_array_equal(
        batch['supervised_from'][:, 0], 3 * (batch['example_id'] >= NUM))


def test_padded_length():
  assert pipeline.padded_length([1, 33, 2], 32) == 64
  assert pipeline.padded_length([64], 32) == 64
