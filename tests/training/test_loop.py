"""Tests of the training loop: exact resume, faults, devices."""

import json
import multiprocessing
import pathlib
import signal
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgr2_jax.training import checkpoints
from dgr2_jax.training import chips
from dgr2_jax.training import loop
from dgr2_jax.training import optimizer
from dgr2_jax.training import sharding
from dgr2_jax.training import step as step_lib
from tests.training import toy_run

# A process that has imported everything, but not started JAX, is forked.
_CONTEXT = multiprocessing.get_context('forkserver')
_CONTEXT.set_forkserver_preload(['tests.training.toy_run'])


def _start(directory, *args):
  process = _CONTEXT.Process(
      target=toy_run.main,
      args=([str(directory), *args], f'{directory}.log'))
  process.start()
  return process


def _finish(directory, process):
  process.join(timeout=120)
  log = pathlib.Path(f'{directory}.log')
  errors = log.read_text()
  log.unlink()
  return process.exitcode, errors


def _run(directory, *args):
  """Exit code and stderr of one run of the toy in its own process."""
  return _finish(directory, _start(directory, *args))


def _metrics(directory):
  lines = (directory / 'metrics.jsonl').read_text().splitlines()
  return [{k: v for k, v in json.loads(line).items() if k != 'timing'}
          for line in lines]


def _checkpoint(directory, keep=2):
  """(step, state leaves, best) of the final checkpoint, as numpy."""
  mesh = sharding.make_mesh(dict(data=1, fsdp=1, tensor=1), jax.devices()[:1])
  config = toy_run.get_config()
  shapes = lambda tree: jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype,
                                     sharding=sharding.replicated(mesh)), tree)
  params = jax.tree.map(jnp.asarray, toy_run.init_params())
  state = step_lib.TrainState(
      step=jnp.int32(0), params=None,
      opt_state=optimizer.make_optimizer(config).init(params),
      sums={k: jnp.float32(0) for k in (
          'loss', 'gradient_norm', 'error/absolute', 'tokens')},
      bad_step=jnp.int32(0))
  step, state, params, best = checkpoints.Checkpoints(
      directory / 'checkpoints' / 'toy', keep).restore_latest(
          shapes(state), shapes(params))
  return step, jax.device_get(jax.tree.leaves((state, params))), best


def _assert_same(a, b):
  (step_a, leaves_a, best_a), (step_b, leaves_b, best_b) = a, b
  assert (step_a, best_a) == (step_b, best_b)
  for x, y in zip(leaves_a, leaves_b, strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
  directory = tmp_path_factory.mktemp('uninterrupted')
  code, errors = _run(directory)
  assert code == 0, errors
  return directory


def test_learns_and_keeps_latest_and_best(uninterrupted):
  metrics = _metrics(uninterrupted)
  loss = [m['train/loss'] for m in metrics if 'train/loss' in m]
  assert [m['step'] for m in metrics if 'train/loss' in m] == [
      3, 6, 9, 12, 15, 18, 20]
  assert loss[-1] < loss[0] - 1
  values = {m['step']: m['validation/ndcg@3'] for m in metrics
            if 'validation/ndcg@3' in m}
  assert list(values) == [6, 12, 18, 20]
  step, _, best = _checkpoint(uninterrupted)
  assert step == 20
  assert best.step == max(values, key=values.get) not in (6, 20)
  assert best.value == values[best.step]
  names = {p.name for p in (uninterrupted / 'checkpoints/toy').iterdir()
           if p.is_dir()}
  assert {'20', str(best.step)} <= names and len(names) <= 3
  assert list((uninterrupted / 'tensorboard/toy').iterdir())


def test_killed_anywhere_ends_with_the_same_bits(uninterrupted, tmp_path):
  step = int(np.random.default_rng().integers(2, 10))
  for die in (f'batch@{step}', 'save@10', 'log@15'):
    code, errors = _run(tmp_path, f'--die={die}')
    assert code == -signal.SIGKILL, (die, errors)
  code, errors = _run(tmp_path, '--term=19')
  assert code == 1 and 'the same command goes on' in errors
  code, errors = _run(tmp_path)
  assert code == 0, errors
  _assert_same(_checkpoint(uninterrupted), _checkpoint(tmp_path))
  assert _metrics(uninterrupted) == _metrics(tmp_path)


@pytest.mark.parametrize('mesh', ['2,2,2'])
def test_eight_devices_agree_and_their_checkpoint_resumes_on_one(
    uninterrupted, tmp_path, mesh):
  args = ('--devices=8', f'--mesh={mesh}')
  code, errors = _run(tmp_path, *args, '--die=batch@17')
  assert code == -signal.SIGKILL, errors
  toy_run.train(tmp_path, devices=jax.devices()[:1])  # from step 15 to 20
  one, eight = _checkpoint(uninterrupted), _checkpoint(tmp_path)
  assert one[0] == eight[0]
  for x, y in zip(one[1], eight[1], strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)
  for a, b in zip(_metrics(uninterrupted), _metrics(tmp_path), strict=True):
    assert a == pytest.approx(b, abs=1e-5)


def test_two_processes_agree_with_one(uninterrupted, tmp_path):
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    port = s.getsockname()[1]
  runs = [_start(tmp_path, f'--process={i}/2@{port}') for i in range(2)]
  for process in runs:
    process.join(timeout=120)
  assert [process.exitcode for process in runs] == [0, 0], (
      pathlib.Path(f'{tmp_path}.log').read_text())
  for x, y in zip(_checkpoint(uninterrupted)[1], _checkpoint(tmp_path)[1],
                  strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


def test_complete_stage_returns_the_best_at_once(uninterrupted):
  class Never:
    def __getitem__(self, step):
      raise AssertionError('a complete stage must not train')
  before = _metrics(uninterrupted)
  params = toy_run.train(uninterrupted, batches=Never(),
                         devices=jax.devices()[:1])
  best = _checkpoint(uninterrupted)[2]
  assert toy_run.validate(params)['ndcg@3'] == pytest.approx(best.value)
  assert _metrics(uninterrupted) == before


def test_damaged_best_of_a_complete_stage_is_trained_again(tmp_path):
  one = dict(devices=jax.devices()[:1])
  want = jax.device_get(toy_run.train(tmp_path, **one))
  before, metrics = _checkpoint(tmp_path), _metrics(tmp_path)
  best = tmp_path / 'checkpoints/toy' / str(before[2].step)
  assert best.name != '20'
  (best / '_CHECKPOINT_METADATA').unlink()
  got = jax.device_get(toy_run.train(tmp_path, **one))
  jax.tree.map(np.testing.assert_array_equal, want, got)
  _assert_same(before, _checkpoint(tmp_path))
  assert _metrics(tmp_path) == metrics


def test_starting_parameters_do_not_stay_in_memory(tmp_path):
  for steps in (2, 4):  # from the start, and going on
    params = jax.tree.map(jnp.array, toy_run.init_params())
    toy_run.train(tmp_path / 'run', params=params, devices=jax.devices()[:1],
                  config=toy_run.get_config(steps=steps))
    assert all(x.is_deleted() for x in jax.tree.leaves(params))
    complete = f'checkpoints/{toy_run.STAGE}/complete.json'
    (tmp_path / 'run' / complete).unlink()


@pytest.mark.parametrize('fault', ['loss', 'gradient'])
def test_not_finite_stops_and_keeps_the_last_good_checkpoint(tmp_path, fault):
  def loss_fn(params, batch, key):
    (loss,), metrics = toy_run.loss_fn(params, batch, key)
    bad = (batch['x'] > 50).any()
    # sqrt has a finite value and an infinite gradient at 0.
    edge = jnp.sqrt(jnp.where(bad, 0., 1.) * jnp.abs(params['out'][0]))
    other = (jnp.where(bad, jnp.nan, 0.) if fault == 'loss' else 0. * edge)
    return (loss.replace(total=loss.total + other),), metrics

  class Bad(toy_run.Batches):
    def __getitem__(self, step):
      batch = super().__getitem__(step)
      return batch | {'x': batch['x'] + 99 * (step == 12)}

  with pytest.raises(loop.TrainingError, match=(
      r'toy: the loss or its gradient is not finite at step 13 \(seen after '
      r'step 15, finite up to 12\).*step 12 is kept')):
    toy_run.train(tmp_path, batches=Bad(), loss_fn=loss_fn,
                  devices=jax.devices()[:1])
  step, leaves, _ = _checkpoint(tmp_path)
  assert step == 12
  assert all(np.isfinite(x).all() for x in leaves)


@pytest.mark.parametrize('values, message', [
    ({'recall@1': 0.5}, r"no 'ndcg@3' \(toy.best_metric\).*recall@1"),
    ({'ndcg@3': float('nan')}, 'ndcg@3 = nan')])
def test_validation_without_its_metric(tmp_path, values, message):
  with pytest.raises(loop.TrainingError, match=message):
    toy_run.train(tmp_path, validate=lambda params: values,
                  devices=jax.devices()[:1])


@pytest.mark.parametrize('field', ['steps', 'eval_every', 'checkpoint_every',
                                   'log_every', 'keep'])
def test_fields_out_of_range(tmp_path, field):
  with pytest.raises(ValueError, match=f'{field} must be at least 1'):
    toy_run.train(tmp_path, config=toy_run.get_config(**{field: 0}),
                  devices=jax.devices()[:1])


def test_failing_batches_raise_in_the_loop(tmp_path):
  def hook(step):
    if step == 7:
      raise ValueError('items.jsonl:3: bad')
  with pytest.raises(ValueError, match='items.jsonl:3'):
    toy_run.train(tmp_path, batches=toy_run.Batches(hook),
                  devices=jax.devices()[:1])


class Rounds:
  """Batches that depend on the policy, two updates a round."""
  updates = 2

  def __init__(self, stop_in_round=None):
    self.rounds = []
    self._stop = stop_in_round

  def example(self):
    return {k: jnp.asarray(v) for k, v in toy_run.make_batch(0).items()}

  def collect(self, params, round_, seed):
    self.rounds.append(round_)
    if round_ == self._stop:
      raise RuntimeError('stopped in a round')
    shift = float(params['out'].sum()) + seed
    return [{k: jnp.asarray(v + shift * (k == 'y')) for k, v in
             toy_run.make_batch(2 * round_ + update).items()}
            for update in range(2)]


def test_rounds_resume_where_the_last_one_was_saved(tmp_path):
  one = dict(devices=jax.devices()[:1],
             config=toy_run.get_config(checkpoint_every=4))
  undisturbed = Rounds()
  want = toy_run.train(tmp_path / 'a', batches=undisturbed, **one)
  assert undisturbed.rounds == list(range(10))
  with pytest.raises(RuntimeError, match='stopped in a round'):
    toy_run.train(tmp_path / 'b', batches=Rounds(stop_in_round=5), **one)
  resumed = Rounds()
  got = toy_run.train(tmp_path / 'b', batches=resumed, **one)
  assert resumed.rounds == list(range(4, 10))  # saved at step 8
  jax.tree.map(np.testing.assert_array_equal, want, got)
  assert _metrics(tmp_path / 'a') == _metrics(tmp_path / 'b')


def test_rounds_end_no_worse_than_they_begin(tmp_path, caplog):
  start = toy_run.init_params()
  seen = []

  def validate(params):
    seen.append(jax.device_get(params))
    return {'ndcg@3': -float(len(seen))}  # ever worse

  with caplog.at_level('WARNING'):
    best = toy_run.train(tmp_path, batches=Rounds(), validate=validate,
                         devices=jax.devices()[:1],
                         config=toy_run.get_config(checkpoint_every=4))
  jax.tree.map(np.testing.assert_array_equal, seen[0], start)
  jax.tree.map(np.testing.assert_array_equal, best, start)
  assert 'the weights it began with' in caplog.text
  assert [m['step'] for m in _metrics(tmp_path) if 'validation/ndcg@3' in m
          ] == [0, 6, 12, 18, 20]


def test_killed_at_the_first_validation_leaves_one_line(tmp_path, monkeypatch):
  one = dict(devices=jax.devices()[:1],
             config=toy_run.get_config(checkpoint_every=4))
  want = toy_run.train(tmp_path / 'a', batches=Rounds(), **one)
  with monkeypatch.context() as patch:
    def stop(*_):
      raise RuntimeError('killed before the checkpoint')
    patch.setattr(loop.checkpoints_lib.Checkpoints, 'save', stop)
    with pytest.raises(RuntimeError, match='killed'):
      toy_run.train(tmp_path / 'b', batches=Rounds(), **one)
  with pytest.raises(RuntimeError, match='stopped in a round'):
    toy_run.train(tmp_path / 'b', batches=Rounds(stop_in_round=0), **one)
  got = toy_run.train(tmp_path / 'b', batches=Rounds(), **one)
  jax.tree.map(np.testing.assert_array_equal, want, got)
  assert _metrics(tmp_path / 'a') == _metrics(tmp_path / 'b')


def test_a_signal_waits_for_the_end_of_its_round(tmp_path):
  class Interrupting(Rounds):
    def collect(self, params, round_, seed):
      if round_ == 3:
        signal.raise_signal(signal.SIGTERM)
      return super().collect(params, round_, seed)

  with pytest.raises(loop.Interrupted, match='at step 8 of 20'):
    toy_run.train(tmp_path, batches=Interrupting(), devices=jax.devices()[:1],
                  config=toy_run.get_config(checkpoint_every=4))


@pytest.mark.parametrize('field', ['steps', 'eval_every', 'checkpoint_every'])
def test_a_round_is_not_split(tmp_path, field):
  with pytest.raises(ValueError, match=f'{field} is 5: expected a multiple'):
    toy_run.train(tmp_path, batches=Rounds(), devices=jax.devices()[:1],
                  config=toy_run.get_config(
                      **{'checkpoint_every': 4, field: 5}))


def test_utilisation_and_a_profile(tmp_path, monkeypatch, caplog):
  chip = chips.Chip('toy', 'cpu', flops=1e3, memory=1., bandwidth=1., links=1.)
  monkeypatch.setattr(chips, 'of_kind', lambda kind: chip)
  config = toy_run.get_config(steps=6, log_every=3, eval_every=6,
                              checkpoint_every=6)
  with caplog.at_level('INFO', 'absl'):
    toy_run.train(tmp_path, devices=jax.devices()[:1], config=config,
                  flops_of=lambda batch: 10. * batch['x'].size,
                  profile_steps=(2, 4))
  timings = [json.loads(line)['timing'] for line in
             (tmp_path / 'metrics.jsonl').read_text().splitlines()]
  for timing in (x for x in timings if 'mfu' in x):
    # 10 FLOPs a number of a [16, 4] batch, of the thousand a second.
    assert timing['mfu'] == pytest.approx(
        timing['steps_per_second'] * 640 / 1e3, rel=1e-3, abs=1e-3)
    assert timing['tokens_per_second_per_chip'] == timing['tokens_per_second']
  assert sum('mfu' in x for x in timings) == 2
  assert any('MFU' in message for message in caplog.messages)
  assert list((tmp_path / 'profile' / 'toy').rglob('*.xplane.pb'))
  assert 'A profile of the steps up to 4' in caplog.text


def test_no_utilisation_of_an_unknown_chip(tmp_path):
  toy_run.train(tmp_path, devices=jax.devices()[:1],
                flops_of=lambda batch: 1.)
  assert 'mfu' not in (tmp_path / 'metrics.jsonl').read_text()
  assert not (tmp_path / 'profile').exists()
