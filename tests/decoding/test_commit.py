"""Commit rules on crafted confidences and in the decoder, against NumPy."""

import functools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgr2_jax.decoding import block_decoder
from dgr2_jax.decoding import commit
from dgr2_jax.models import canvas as canvas_lib
from tests.decoding.test_fused import scores
from tests.models import tiny

V = tiny.VOCABULARY
NEVER = block_decoder.NEVER
RULES = (commit.Threshold(.9), commit.Threshold(.6, .95), commit.Factor(.5),
         commit.FixedSteps(3), commit.Adaptive(.5))


def choose(rule, confidence, eligible=None, answering=None, step=0,
           agreement=1.):
  """What a rule commits of one block."""
  confidence = np.asarray(confidence, np.float32)[None, None]
  eligible = np.ones(confidence.shape, bool) if eligible is None else (
      np.asarray(eligible)[None, None])
  if answering is not None:
    answering = jnp.array(answering)[None, None]
  context = commit.Context(answering, jnp.full((1, 1), step),
                           jnp.full((1, 1), agreement))
  chosen = rule.choose(jnp.array(eligible), jnp.array(confidence), context)
  return np.flatnonzero(np.asarray(chosen)[0, 0]).tolist()


def test_threshold_takes_the_sure_else_the_surest():
  assert choose(commit.Threshold(.9), [.5, .9, .2, .95]) == [1, 3]
  assert choose(commit.Threshold(.9), [.5, .8, .8, .1]) == [1]
  assert choose(commit.Threshold(.9), [.5, .99, .2, .3],
                [True, False, True, True]) == [0]
  # Saturated: tau = 1 is one token a step, the first among equals.
  assert choose(commit.Threshold(1.), [1., 1., 1., .2]) == [0]


def test_answers_have_a_threshold_of_their_own():
  rule = commit.Threshold(.6, .95)
  answering = [False, False, True, True]
  assert choose(rule, [.7, .5, .9, .96], answering=answering) == [0, 3]
  assert choose(commit.Threshold(1., .5), [.9, .8, .7, .6],
                answering=answering) == [0, 2, 3]
  with pytest.raises(ValueError, match='answer_marker'):
    choose(rule, [.7, .5, .9, .96])


def test_factor_demands_more_of_more():
  # 1 - f / (n + 1) for f = .5: .75, .833, .875, .9
  rule = commit.Factor(.5)
  assert choose(rule, [.9, .9, .9, .9]) == [0, 1, 2, 3]
  assert choose(rule, [.88, .2, .88, .88]) == [0, 2, 3]
  assert choose(rule, [.88, .2, .86, .84]) == [0, 2]
  # The second alone fails, three pass: the largest n counts.
  assert choose(rule, [.875, .875, .875, .1]) == [0, 1, 2]
  assert choose(rule, [.2, .1, .3, .1]) == [2]
  assert choose(commit.Factor(0.), [1., 1., 1., 1.]) == [0]


def test_fixed_steps_share_the_block():
  rule = commit.FixedSteps(3)
  assert choose(rule, [.1, .4, .3, .2, .9, .8, .7]) == [4, 5, 6]
  assert choose(rule, [.1, .4, .3, .2, .9, .8, .7],
                [True, True, True, True, False, False, False],
                step=1) == [1, 2]
  assert choose(rule, [.1, .4, .3, .2], [True, False, False, True],
                step=2) == [0, 3]
  assert choose(rule, [.1, .4], step=7) == [0, 1]  # after its time: all


def test_adaptive_thresholds_follow_agreement():
  rule = commit.Adaptive(.5, .9, sharpness=1.)
  confidence = [.55, .75, .95, .1]
  assert choose(rule, confidence, agreement=1.) == [0, 1, 2]
  assert choose(rule, confidence, agreement=.5) == [1, 2]  # tau .7
  assert choose(rule, confidence, agreement=0.) == [2]


@pytest.mark.parametrize('make, message', [
    (lambda: commit.Threshold(0.), 'tau=0.0'),
    (lambda: commit.Threshold(.9, 1.2), 'answer_tau=1.2'),
    (lambda: commit.Factor(-1.), 'f=-1.0'),
    (lambda: commit.FixedSteps(0), 'steps=0'),
    (lambda: commit.FixedSteps(1.5), 'steps=1.5'),
    (lambda: commit.Adaptive(0.), 'low=0.0'),
    (lambda: commit.Adaptive(.5, 2.), 'high=2.0'),
    (lambda: commit.Adaptive(.9, .5), 'low=0.9 must be at most high=0.5'),
    (lambda: commit.Adaptive(.5, sharpness=.5), 'sharpness=0.5'),
    (lambda: commit.Threshold(np.float32(2)), 'tau=2.0'),
    (lambda: commit.FixedSteps(np.inf), 'steps=inf'),
    (lambda: commit.FixedSteps(np.int64(0)), 'steps=0')])
def test_rules_check_their_numbers(make, message):
  with pytest.raises(ValueError, match=message):
    make()


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans(),
                          st.booleans()), min_size=6, max_size=6),
       st.integers(0, 4), st.floats(0, 1), st.sampled_from(RULES))
def test_every_rule_makes_progress_and_keeps_to_the_undecided(
    block, step, agreement, rule):
  confidence, eligible, answering = map(list, zip(*block))
  chosen = choose(rule, confidence, eligible, answering, step, agreement)
  assert set(chosen) <= set(np.flatnonzero(eligible).tolist())
  assert bool(chosen) == any(eligible)


def by_hand(model, params, batch, canvas, choose_of, length):
  """Tokens and calls of the first request, decoded greedily without a cache.

  Args:
    choose_of: (confidence, masked, step, agreement, answering) -> chosen.
  """
  b = canvas.block_size
  tokens, call = np.full(length, V.eos_id), np.full(length, NEVER)
  calls, agreement = 1, 1.

  def logits(start, masked, causal=False):
    rules = canvas_lib.AUTOREGRESSIVE if causal else canvas
    return np.asarray(scores(model, params, batch, jnp.array(tokens),
                             jnp.array(start), jnp.array(masked), rules))

  def ended():
    stands = np.cumprod(call < NEVER).astype(bool)
    return (tokens[stands] == V.eos_id).any()

  for start in range(0, length, b):
    block = slice(start, start + b)
    seed = logits(start, np.array([True]), causal=True)[0]
    tokens[start], call[start] = seed.argmax(), calls - 1
    step = 0
    while (call[block] == NEVER).any() and not ended():
      masked = call[block] == NEVER
      probability = np.asarray(jax.nn.softmax(logits(start, masked)))
      confidence = probability.max(-1)
      proposed = np.where(masked, probability.argmax(-1), tokens[block])
      marked = np.concatenate([tokens[:start], proposed]) == MARKER
      answering = (np.cumsum(marked) - marked > 0)[start:]
      chosen = choose_of(confidence, masked, step, agreement, answering)
      tokens[block] = np.where(chosen, proposed, tokens[block])
      call[block] = np.where(chosen, calls, call[block])
      step, calls = step + 1, calls + 1
    if ended() or start + b == length:
      break
    own = [logits(start + i, np.array([True]), causal=True)[0].argmax()
           for i in range(1, b)]
    agreement = (agreement + (own == tokens[block][1:]).mean()) / 2
    calls += 1
  return tokens, call, calls


MARKER = 31  # a token that the tiny model writes


def numpy_rule(rule, confidence, masked, step, agreement, answering):
  """The rules once more, position by position."""
  order = sorted(np.flatnonzero(masked), key=lambda i: -confidence[i])
  if isinstance(rule, commit.Factor):
    count = max([n for n in range(1, len(order) + 1)
                 if confidence[order[n - 1]] >= 1 - rule.f / (n + 1)] + [1])
  elif isinstance(rule, commit.FixedSteps):
    count = int(np.ceil(len(order) / max(rule.steps - step, 1)))
  else:
    if isinstance(rule, commit.Adaptive):
      trust = agreement ** rule.sharpness
      tau = np.full(len(masked), rule.low * trust + rule.high * (1 - trust))
    else:
      tau = np.where(answering, rule.answer_tau or rule.tau, rule.tau)
    return masked & ((confidence >= tau) | (np.arange(len(masked)) == order[0]))
  return np.isin(np.arange(len(masked)), order[:count])


@pytest.mark.parametrize('rule', [
    commit.Threshold(.3), commit.Threshold(.2, .6), commit.Threshold(.6, .2),
    commit.Factor(1.2), commit.FixedSteps(2),
    commit.Adaptive(.2, .9, sharpness=1.)], ids=str)
def test_the_decoder_commits_by_the_rule(rule):
  model, params = tiny.model()
  batch = tiny.batch()
  canvas = canvas_lib.CanvasConfig(4, 'token_causal', 'shifted')
  config = block_decoder.DecodeConfig(max_response=12, answer_marker=MARKER)

  def decode(rule):
    return block_decoder.decode(
        model, params, batch['prompt'], batch['prompt_length'],
        batch['example_id'], jax.random.key(0), rule, vocabulary=V,
        canvas=canvas, config=config)

  got = decode(rule)
  tokens, call, calls = by_hand(
      model, params, batch, canvas, functools.partial(numpy_rule, rule), 12)
  stands = call < NEVER
  np.testing.assert_array_equal(got.call[0, 0], call)
  np.testing.assert_array_equal(got.tokens[0, 0][stands], tokens[stands])
  assert got.calls[0, 0] == calls
  # What makes a rule more than a threshold made a difference here.
  plain = {commit.Threshold: lambda: rule.tau,
           commit.Adaptive: lambda: rule.low}.get(type(rule))
  if plain and rule != commit.Threshold(plain()):
    other = decode(commit.Threshold(plain()))
    assert (other.call[0, 0] != got.call[0, 0]).any()


def test_adaptive_needs_an_autoregressive_clean_stream():
  model, params = tiny.model()
  batch = tiny.batch()
  with pytest.raises(ValueError, match='clean stream'):
    block_decoder.decode(
        model, params, batch['prompt'], batch['prompt_length'],
        batch['example_id'], jax.random.key(0), commit.Adaptive(.5),
        vocabulary=V, canvas=canvas_lib.CanvasConfig(4, 'block_causal'),
        config=block_decoder.DecodeConfig(max_response=12))
