"""A killed `prepare` trains no model twice, and takes none for another."""

import dataclasses

import numpy as np
import pytest

from dgr2_jax.data import requests
from dgr2_jax.retrieval import finished
from dgr2_jax.retrieval import training
from tests.retrieval import test_lists


class Killed(Exception):
  pass


@pytest.fixture
def trained(monkeypatch):
  """The number of users of every training; it is killed as told."""
  train, users = training.train, []

  def counting(retriever, histories, **kwargs):
    if len(users) == counting.until:
      raise Killed
    users.append(len(histories))
    return train(retriever, histories, **kwargs)

  counting.until = None
  monkeypatch.setattr(training, 'train', counting)
  return counting, users


def build(keep, kind='sasrec', dataset=test_lists.DATASET, **changes):
  return requests.build_requests(
      dataset, test_lists.config(kind, **changes), test_lists.IDS, keep)


def as_arrays(sets, path):
  requests.save(sets, path)
  with np.load(path) as f:
    return dict(f)


def test_after_a_kill_the_next_fold_is_trained(trained, tmp_path):
  counting, users = trained
  kept = tmp_path / 'kept'
  whole = as_arrays(build(None), tmp_path / 'whole.npz')
  assert users == [30, 15, 15]  # all, and without each of two folds
  users.clear()
  counting.until = 2
  with pytest.raises(Killed):
    build(kept)
  counting.until = None
  assert {p.name for p in kept.glob('*/*')} == {'all_users.npz', 'fold0.npz'}
  users.clear()
  again = as_arrays(build(kept), tmp_path / 'again.npz')
  assert users == [15]
  assert again.keys() == whole.keys()
  for name, array in whole.items():
    np.testing.assert_array_equal(again[name], array, err_msg=name)
  users.clear()
  build(kept)
  assert not users
  # Half a file, as a disk that was full may leave it, counts as none.
  path, = kept.glob('*/fold1.npz')
  path.write_bytes(path.read_bytes()[:100])
  build(kept)
  assert users == [15]


def test_other_settings_or_data_are_trained_anew(trained, tmp_path):
  counting, users = trained
  build(tmp_path)
  counting.until = len(users)
  build(tmp_path)
  sequences = list(test_lists.DATASET.sequences)
  sequences[0] = sequences[0][::-1]
  other = dataclasses.replace(test_lists.DATASET, sequences=tuple(sequences))
  for changes in (dict(learning_rate=1e-4), dict(folds=3), dict(seed=1),
                  dict(dataset=other), dict(kind='generative')):
    with pytest.raises(Killed):
      build(tmp_path, **changes)


def test_without_a_directory_nothing_is_kept(tmp_path):
  made = []
  part = finished.Finished()
  for _ in range(2):
    part.get('a', lambda: made.append(1) or {'x': np.ones(2)})
  assert made == [1, 1]
  assert not list(tmp_path.iterdir())
