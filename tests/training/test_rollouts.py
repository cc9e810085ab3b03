"""Which groups of a round are learned from, with a decoder that is scripted."""

import types

import jax
import numpy as np
import pytest

from dgr2_jax.data import parsing
from dgr2_jax.decoding import block_decoder
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.objectives import rewards
from dgr2_jax.training import rollouts
from dgr2_jax.training import sharding

N, G, L, C = 4, 3, 6, 5


class Decoder:
  """Response g of example e ranks its target g-th where e is in `differ`."""

  def __init__(self, differ):
    self.differ = differ
    self.asked, self.keys = [], []

  def __call__(self, model, params, prompt, prompt_length, example_id, key,
               threshold, **options):
    del model, params, prompt, prompt_length, threshold, options
    examples = np.asarray(example_id)
    self.asked.append(examples.tolist())
    self.keys.append(tuple(jax.random.key_data(key).tolist()))
    place = np.where(np.isin(examples, self.differ)[:, None], np.arange(G), 0)
    tokens = np.zeros((N, G, L), np.int32)
    tokens[..., 0], tokens[..., 1] = place, examples[:, None]
    full = np.broadcast_to(np.arange(L, dtype=np.int32), tokens.shape)
    return block_decoder.Rollout(
        tokens=tokens, length=np.full((N, G), L), call=full,
        finished=np.ones((N, G), bool), calls=np.full((N, G), L),
        logprob=np.zeros((N, G, L), np.float32))


def parse(tokens):
  """The target (candidate 0) stands where the first token says."""
  order = [1, 2, 3, 4]
  order.insert(int(tokens[0]), 0)
  return parsing.Parse(tuple(order), parsing.VALID, 'because', L)


class Prompts:
  """Batch i holds examples i N ... i N + N - 1."""

  def __getitem__(self, index):
    examples = np.arange(index * N, (index + 1) * N)
    return {'prompt': np.zeros((N, 2), np.int32),
            'prompt_length': np.full(N, 2), 'example_id': examples}


def make(monkeypatch, differ, **config):
  decoder = Decoder(differ)
  monkeypatch.setattr(block_decoder, 'decode', decoder)
  data = types.SimpleNamespace(
      target_positions=lambda split: np.zeros(1000, int), response_length=L,
      tokenizer=types.SimpleNamespace(decode=str))
  experiment = types.SimpleNamespace(
      data=data, model=None, vocabulary=types.SimpleNamespace(eos_id=0),
      parser=types.SimpleNamespace(strict=parse),
      mesh=sharding.make_mesh({'data': 1, 'fsdp': 1, 'tensor': 1},
                              jax.devices()[:1]),
      config=types.SimpleNamespace(
          data=types.SimpleNamespace(num_candidates=C)))
  return decoder, rollouts.Rollouts(
      experiment, 'rl', canvas_lib.AUTOREGRESSIVE, Prompts(),
      rollouts.RolloutConfig(num_rollouts=G, **config),
      rewards.RewardConfig())


def examples_of(batch):
  return np.asarray(batch['response'])[:, 0, 1].tolist()


def test_groups_of_equals_stay_and_do_not_count(monkeypatch):
  _, source = make(monkeypatch, differ=[1, 3])
  batch, = source.collect(None, round_=0, seed=0)
  assert examples_of(batch) == [1, 3, 0, 2]
  np.testing.assert_array_equal(batch['kept'], [True, True, False, False])
  advantage = np.asarray(batch['advantage'])
  # Ranks 1, 2, 3 of a target that came first: only the first keeps R_fmt.
  earned = np.array([.2, -.2, -.4])
  want = (earned - earned.mean()) / earned.std()
  np.testing.assert_allclose(advantage[0], want, rtol=1e-5)
  assert (advantage[2:] == 0).all()


def test_refill_decodes_until_enough_groups_differ(monkeypatch):
  decoder, source = make(monkeypatch, differ=range(1, 100, 2), refill=4)
  batch, = source.collect(None, round_=0, seed=0)
  # The third was dispatched while the second was parsed, and is left out.
  assert decoder.asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
  assert examples_of(batch) == [1, 3, 5, 7]
  assert np.asarray(batch['kept']).all()
  # The next round has prompts of its own, whatever this one needed.
  source.collect(None, round_=1, seed=0)
  assert decoder.asked[3] == [16, 17, 18, 19]


def test_refill_gives_up_with_what_there_is(monkeypatch):
  decoder, source = make(monkeypatch, differ=[5], refill=2)
  batch, = source.collect(None, round_=0, seed=0)
  assert len(decoder.asked) == 2
  assert np.asarray(batch['kept']).tolist() == [True, False, False, False]
  assert examples_of(batch)[0] == 5


def test_what_counts_is_spread_over_the_updates(monkeypatch):
  _, source = make(monkeypatch, differ=[1, 2, 5, 6], updates=2)
  batches = source.collect(None, round_=0, seed=0)
  assert [np.asarray(b['kept']).sum() for b in batches] == [2, 2]
  assert sorted(sum(map(examples_of, batches), [])) == list(range(2 * N))


def test_a_prompt_that_comes_back_gets_other_noise(monkeypatch):
  decoder, source = make(monkeypatch, differ=[1])
  for round_ in range(3):
    source.collect(None, round_, seed=0)
  source.collect(None, round_=0, seed=1)
  assert len(set(decoder.keys)) == 4
  source.collect(None, round_=0, seed=0)
  assert decoder.keys[-1] == decoder.keys[0]


def test_a_request_twice_in_a_batch_gets_other_noise():
  np.testing.assert_array_equal(
      rollouts.apart(np.array([5, 3, 5, 0, 5, 3])), [5, 3, 11, 0, 17, 9])


def test_metrics_are_of_all_that_was_decoded(monkeypatch):
  _, source = make(monkeypatch, differ=[1, 5, 7], refill=2)
  batch, = source.collect(None, round_=0, seed=0)
  measured = {k: float(v.value) for k, v in rollouts.measured(batch).items()}
  # 8 groups were decoded, 3 of them differ; the batch holds 4.
  assert measured['same_reward_share'] == pytest.approx(5 / 8)
  assert measured['kept_share'] == pytest.approx(3 / 4)
  assert measured['valid_rate'] == 1.
  # Equals rank the target first; the others first, second and third.
  assert measured['reward'] == pytest.approx(
      (5 * .2 + 3 * (.2 - .2 - .4) / 3) / 8, abs=1e-6)
  assert measured['response_length'] == L


def test_a_round_that_teaches_nothing_says_so(monkeypatch, caplog):
  _, source = make(monkeypatch, differ=[])
  with caplog.at_level('WARNING'):
    batch, = source.collect(None, round_=7, seed=0)
  assert not np.asarray(batch['kept']).any()
  assert np.isfinite(np.asarray(batch['advantage'])).all()
  assert 'round 7' in caplog.text and 'nothing is learned' in caplog.text


def test_a_round_without_a_valid_response_says_so(monkeypatch, caplog):
  _, source = make(monkeypatch, differ=[1])
  invalid = parsing.Parse(None, 'overflow', '', None)
  source._experiment.parser.strict = lambda tokens: invalid
  with caplog.at_level('WARNING'):
    batch, = source.collect(None, round_=2, seed=0)
  assert (np.asarray(batch['reward']) == -1).all()
  assert 'round 2: no response is valid' in caplog.text


@pytest.mark.parametrize('field', ['num_rollouts', 'updates', 'refill'])
def test_counts_below_one_are_named(field):
  with pytest.raises(ValueError, match=f'{field}=0'):
    rollouts.RolloutConfig(**({'num_rollouts': 2} | {field: 0}))
