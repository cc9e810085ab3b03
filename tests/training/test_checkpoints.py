"""Tests of checkpoints: retention, damage of every kind, completeness."""

import json
import pathlib
import shutil
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgr2_jax.training import checkpoints

Best = checkpoints.Best


def _value(step):
  return {'w': jnp.full((64, 3), float(step)), 'n': jnp.int32(step)}


def _abstract():
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype,
                                                     sharding=device),
                      _value(0))


def _save(store, step, best):
  store.save(step, {'opt': _value(10 * step)}, _value(step), best)
  store.finish()


def test_nobody_waits_for_what_is_being_written(directory, monkeypatch):
  written = threading.Event()
  begin = checkpoints.ocp.save_checkpointables_async

  def slow(*args):
    response = begin(*args)
    return types.SimpleNamespace(
        result=lambda: (written.wait(), response.result()))

  monkeypatch.setattr(checkpoints.ocp, 'save_checkpointables_async', slow)
  store = checkpoints.Checkpoints(directory, keep=2)
  store.save(1, {'opt': _value(10)}, _value(1), Best(1, .5))
  store.finish_if_written()
  assert not (directory / '1.json').exists()
  written.set()
  while not (directory / '1.json').exists():
    store.finish_if_written()
  assert _latest(store) == (1, Best(1, .5))


def _latest(store):
  restored = store.restore_latest({'opt': _abstract()}, _abstract())
  if restored is None:
    return None
  step, state, params, best = restored
  jax.tree.map(np.testing.assert_array_equal, params, _value(step))
  jax.tree.map(np.testing.assert_array_equal, state['opt'], _value(10 * step))
  return step, best


def test_restores_as_another_dtype(tmp_path):
  store = checkpoints.Checkpoints(tmp_path / 'ar_sft', keep=1)
  values = {'w': jnp.linspace(0., 1., 12).reshape(4, 3)}
  store.save(1, {}, values, Best(1, 0.5))
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  _, got = store.restore_best({'w': jax.ShapeDtypeStruct(
      (4, 3), jnp.bfloat16, sharding=device)})
  assert got['w'].dtype == jnp.bfloat16
  np.testing.assert_array_equal(got['w'], values['w'].astype(jnp.bfloat16))


def _steps(directory):
  return sorted(int(p.name) for p in directory.iterdir() if p.is_dir())


@pytest.fixture(name='directory')
def _directory(tmp_path):
  return tmp_path / 'checkpoints' / 'cft'


@pytest.fixture(name='store')
def _store(directory):
  """Steps 2 and 4 name 2 as the best, step 6 itself."""
  store = checkpoints.Checkpoints(directory, keep=3)
  _save(store, 2, Best(2, 0.5))
  _save(store, 4, Best(2, 0.5))
  _save(store, 6, Best(6, 0.7))
  return store


def test_round_trip(store):
  assert _latest(store) == (6, Best(6, 0.7))
  best, params = store.restore_best(_abstract())
  assert best == Best(6, 0.7)
  jax.tree.map(np.testing.assert_array_equal, params, _value(6))


def test_training_goes_on_while_files_are_written(directory):
  """What is saved are the values at the call, though they are overwritten."""
  update = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree),
                   donate_argnums=0)
  store = checkpoints.Checkpoints(directory, keep=1)
  values = {'w': jnp.arange(2. ** 22), 'n': jnp.int32(3)}
  wanted = jax.tree.map(lambda x: np.array(x, copy=True), values)
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=device), values)
  store.save(1, {'opt': values['w']}, values, Best(1, 0.5))
  assert not (directory / '1.json').exists()
  for _ in range(20):
    values = jax.block_until_ready(update(values))
  step, state, params, _ = store.restore_latest({'opt': abstract['w']},
                                                abstract)
  assert step == 1 and (directory / '1.json').exists()
  jax.tree.map(np.testing.assert_array_equal, params, wanted)
  np.testing.assert_array_equal(state['opt'], wanted['w'])


def test_nothing_yet(directory):
  store = checkpoints.Checkpoints(directory, keep=1)
  assert _latest(store) is None
  assert store.restore_best(_abstract()) is None
  assert not store.is_complete()


def test_before_the_first_validation(directory):
  store = checkpoints.Checkpoints(directory, keep=1)
  _save(store, 1, None)
  assert _latest(store) == (1, None)
  assert store.restore_best(_abstract()) is None


def test_parameters_alone(directory):
  store = checkpoints.Checkpoints(directory, keep=1)
  store.save(0, {}, _value(0), Best(0, 0.))
  store.mark_complete(0, Best(0, 0.))
  assert store.is_complete()
  best, params = store.restore_best(_abstract())
  assert best == Best(0, 0.)
  jax.tree.map(np.testing.assert_array_equal, params, _value(0))


def test_keeps_the_latest_and_every_best_they_name(directory):
  store = checkpoints.Checkpoints(directory, keep=2)
  for step, best in [(1, 1), (2, 1), (3, 1), (4, 4), (5, 4), (6, 4)]:
    _save(store, step, Best(best, best / 10))
    assert set(_steps(directory)) >= {step, best}
    if step == 4:  # 3 is kept, and could not be resumed without 1
      assert _steps(directory) == [1, 3, 4]
  assert _steps(directory) == [4, 5, 6]


def _payload(path: pathlib.Path) -> pathlib.Path:
  """The largest file of a checkpoint: array data."""
  return max((p for p in path.rglob('*') if p.is_file()),
             key=lambda p: p.stat().st_size)


def _flip(path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def _truncate(path):
  path.write_bytes(path.read_bytes()[:-1])


_DAMAGES = {
    'flipped bit': (lambda d: _flip(_payload(d / '6')), 'was altered'),
    'truncated': (lambda d: _truncate(_payload(d / '6')), 'bytes instead of'),
    'file gone': (lambda d: _payload(d / '6').unlink(), 'is missing'),
    'directory gone': (lambda d: shutil.rmtree(d / '6'), 'is missing'),
    'never finished': (lambda d: (d / '6.json').unlink(), 'no manifest'),
    'torn manifest': (lambda d: _truncate(d / '6.json'), None),
    'manifest cut': (lambda d: (d / '6.json').write_text('{"step"'),
                     'manifest is corrupt'),
    'manifest of another kind': (lambda d: (d / '6.json').write_text('[]'),
                                 'manifest is corrupt'),
}


@pytest.mark.parametrize('damage', _DAMAGES)
def test_damage_falls_back_and_says_so(store, directory, damage, caplog):
  act, reason = _DAMAGES[damage]
  act(directory)
  with caplog.at_level('WARNING', 'absl'):
    got = _latest(store)
  if reason is None:  # only the newline is missing
    assert got[0] == 6
    return
  assert got == (4, Best(2, 0.5))
  assert reason in caplog.text and 'falling back' in caplog.text
  assert str(directory / '6') in caplog.text
  _save(store, 6, Best(6, 0.7))  # the way is clear
  assert _latest(store) == (6, Best(6, 0.7))


def test_damaged_best_falls_back_to_before_it(store, directory, caplog):
  _save(store, 8, Best(6, 0.7))
  _flip(_payload(directory / '6'))
  with caplog.at_level('WARNING', 'absl'):
    assert _latest(store) == (4, Best(2, 0.5))
  assert 'the best one, 6, is damaged' in caplog.text


def test_all_damaged_starts_over(store, directory, caplog):
  _flip(_payload(directory / '2'))
  _flip(_payload(directory / '6'))
  with caplog.at_level('WARNING', 'absl'):
    assert _latest(store) is None
  assert 'starts from its beginning' in caplog.text


def test_debris_of_a_killed_save_is_removed(store, directory):
  (directory / '8.orbax-checkpoint-tmp').mkdir()
  (directory / '7').mkdir()
  _save(store, 8, Best(6, 0.7))
  assert _steps(directory) == [2, 4, 6, 8]


def test_complete(store, directory, caplog):
  assert not store.is_complete()
  store.mark_complete(6, Best(6, 0.7))
  assert store.is_complete()
  marker = json.loads((directory / 'complete.json').read_text())
  assert marker == {'step': 6, 'best': {'step': 6, 'value': 0.7}}
  _truncate(_payload(directory / '6'))
  with caplog.at_level('WARNING', 'absl'):
    assert not store.is_complete()
  assert 'was complete, but its checkpoints are damaged' in caplog.text
  assert not (directory / 'complete.json').exists()
  assert _latest(store)[0] == 4


def test_corrupt_marker_is_not_complete(store, directory):
  store.mark_complete(6, Best(6, 0.7))
  (directory / 'complete.json').write_text('{')
  assert not store.is_complete()
  assert _latest(store)[0] == 6


@pytest.mark.parametrize('damaged', ['1.json', '1', 'complete.json'])
def test_reading_changes_nothing(directory, damaged):
  store = checkpoints.Checkpoints(directory, keep=1)
  _save(store, 1, Best(1, 0.5))
  store.mark_complete(1, Best(1, 0.5))
  path = directory / damaged
  if path.is_dir():
    shutil.rmtree(path)
  elif damaged == '1.json':
    path.unlink()
  else:
    path.write_text('{')
  before = sorted(directory.rglob('*'))
  reader = checkpoints.Checkpoints(directory, keep=1, read_only=True)
  assert not reader.is_complete() and len(reader.faults) == 1
  assert sorted(directory.rglob('*')) == before


def test_keep_must_be_positive(directory):
  with pytest.raises(ValueError, match='keep must be at least 1'):
    checkpoints.Checkpoints(directory, keep=0)
