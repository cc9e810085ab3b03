"""Rewards and advantages by hand."""

import random

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from dgr2_jax.data import parsing
from dgr2_jax.objectives import rewards as rewards_lib

N = 10


def response(rank, target, explanation='because'):
  """A valid response that puts `target` (from zero) at `rank` (from one)."""
  others = [i for i in range(N) if i != target]
  order = (*others[:rank - 1], target, *others[rank - 1:])
  return parsing.Parse(order, parsing.VALID, explanation, 3)


def earned(parses, targets, lengths=None, **config):
  lengths = [20] * len(parses) if lengths is None else lengths
  return rewards_lib.rewards(parses, np.array(targets), np.array(lengths), 40,
                             N, rewards_lib.RewardConfig(**config))


@pytest.mark.parametrize('condition', rewards_lib.CONDITIONS)
@pytest.mark.parametrize('before, after, rank, form', [
    (4, 1, .3, 1),  # (4 - 1) / 10
    (4, 3, .1, 1),
    (10, 1, .9, 1),
    (4, 4, 0., 0),  # copied
    (2, 5, -.3, 0),
    (1, 1, 0., 1),  # stays first
    (1, 3, -.2, {'gr2': 1, 'diffusion_gr2': 0}),
    (1, 10, -.9, {'gr2': 1, 'diffusion_gr2': 0}),
])
def test_equation_by_hand(condition, before, after, rank, form):
  form = form[condition] if isinstance(form, dict) else form
  got = earned([response(after, before - 1)], [before - 1],
               condition=condition, format_weight=.2)
  assert {k: v.dtype for k, v in got.items()} == dict.fromkeys(
      ('reward', 'rank', 'format', 'overlong'), np.float32)
  assert got['rank'][0] == pytest.approx(rank, abs=1e-6)
  assert got['format'][0] == form
  assert got['reward'][0] == pytest.approx(rank + .2 * form, abs=1e-6)
  # Without a reasoning that can be read there is no format reward.
  mute = earned([response(after, before - 1, ' \n')], [before - 1],
                condition=condition)
  assert mute['reward'][0] == pytest.approx(rank, abs=1e-6)


@pytest.mark.parametrize('target', [0, 4, -1])
@pytest.mark.parametrize('failure', parsing.FAILURES)
def test_failures_earn_a_fixed_reward(failure, target):
  failed = parsing.Parse(None, failure, 'because', None)
  got = earned([failed, response(1, 4)], [target, 4], invalid=-.7)
  np.testing.assert_allclose(got['reward'], [-.7, .4 + .2], atol=1e-6)
  assert got['rank'][0] == got['format'][0] == 0


@pytest.mark.parametrize('condition', rewards_lib.CONDITIONS)
def test_a_target_that_is_no_candidate_earns_nothing(condition):
  rng = random.Random(0)
  orders = [tuple(rng.sample(range(N), N)) for _ in range(20)]
  got = earned([parsing.Parse(o, parsing.VALID, 'because', 3) for o in orders],
               [-1] * 20, condition=condition)
  assert not any(got[k].any() for k in ('reward', 'rank', 'format'))


def test_overlong_grows_over_the_buffer():
  """Limit 40, buffer 8: from 0 at 32 tokens to -1 at 40."""
  lengths = [5, 32, 34, 36, 40]
  got = earned([response(3, 2)] * 5, [2] * 5, lengths, overlong_buffer=8)
  np.testing.assert_allclose(got['overlong'], [0, 0, -.25, -.5, -1])
  np.testing.assert_allclose(got['reward'], got['overlong'])
  none = earned([response(3, 2)] * 5, [2] * 5, lengths)
  assert not none['reward'].any()


@settings(max_examples=100, deadline=None)
@given(st.permutations(range(N)), st.integers(0, N - 1),
       st.sampled_from(rewards_lib.CONDITIONS), st.floats(.01, 1))
def test_copying_earns_nothing_unless_the_target_was_first(
    order, target, condition, weight):
  incoming = parsing.Parse(tuple(range(N)), parsing.VALID, 'because', 3)
  other = parsing.Parse(tuple(order), parsing.VALID, 'because', 3)
  got = earned([incoming, other], [target] * 2, condition=condition,
               format_weight=weight)['reward']
  assert got[0] == pytest.approx(weight if target == 0 else 0)
  if order.index(target) < target:
    assert got[1] > weight
  elif target and order.index(target) > target:
    assert got[1] < 0


def test_shapes_must_agree():
  with pytest.raises(ValueError):
    earned([response(1, 2)] * 2, [2])


def test_config_names_the_field():
  with pytest.raises(ValueError, match="reward.condition='both'"):
    rewards_lib.RewardConfig(condition='both')


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 10**6))
def test_advantages_have_mean_zero_and_unit_variance(n, g, seed):
  rng = np.random.default_rng(seed)
  # As earned: few values, in float32.
  rewards = rng.choice([-1, -.1, .1, .3, .5], (n, g)).astype(np.float32)
  advantages, differ = rewards_lib.group_advantages(rewards)
  assert advantages.dtype == np.float32 and differ.shape == (n,)
  for row, advantage, varied in zip(rewards, advantages, differ):
    assert varied == (len(set(row.tolist())) > 1)
    if varied:
      assert advantage.mean() == pytest.approx(0, abs=1e-5)
      assert advantage.std() == pytest.approx(1, abs=1e-5)
      np.testing.assert_array_equal(np.sign(np.subtract.outer(row, row)),
                                    np.sign(np.subtract.outer(advantage,
                                                              advantage)))
    else:
      assert not advantage.any()


def test_advantages_by_hand():
  advantages, differ = rewards_lib.group_advantages(
      np.array([[0., 1., 0., 1.], [.3, .3, .3, .3], [-1., -1., -1., 3.]]))
  np.testing.assert_allclose(advantages, [
      [-1, 1, -1, 1], [0] * 4, np.array([-1, -1, -1, 3]) / 3 ** .5], rtol=1e-6)
  np.testing.assert_array_equal(differ, [True, False, True])
