"""Exact replay, and the surrogate against rows under dense masks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgr2_jax.decoding import block_decoder
from dgr2_jax.decoding import commit
from dgr2_jax.decoding import replay as replay_lib
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.objectives import policy
from dgr2_jax.objectives import scoring
from tests.decoding import traces
from tests.models import reference
from tests.models import tiny

V = tiny.VOCABULARY
LENGTH = 12
RULES = (canvas_lib.CanvasConfig(4),
         canvas_lib.CanvasConfig(4, 'block_causal', 'same_position'),
         canvas_lib.CanvasConfig(1))
CONFIG = policy.PolicyConfig(clip_low=.1, clip_high=.4, kl_weight=.3)
# Ratios clear of the kinks .9 and 1.4, two of them clipped for some sign.
RATIOS = np.array([.5, .8, 1.1, 1.9])


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def replayed(model, params, batch, canvas, temperature):
  return policy.replayed_logprobs(model, params, batch, canvas, V, temperature)


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def loss_and_grad(model, params, batch, canvas, config):
  def value(params):
    loss, metrics = policy.loss(model, params, batch, canvas, config, V)
    return loss.value, scoring.values(metrics)
  return jax.value_and_grad(value, has_aux=True)(params)


def on_canvas(batch, response, calls, canvas):
  """What `replayed_logprobs` reads; long traces take several rows."""
  canvases = replay_lib.replay(np.asarray(calls), canvas, 4)._asdict()
  del canvases['weight']
  return {'prompt': batch['prompt'], 'prompt_length': batch['prompt_length'],
          'response': response, **canvases}


@functools.cache
def rolled_out(canvas, threshold, temperature, scale=3.):
  model, params = tiny.model(scale)
  batch = tiny.batch()
  rollout = block_decoder.decode(
      model, params, batch['prompt'], batch['prompt_length'],
      batch['example_id'], jax.random.key(2), commit.Threshold(threshold),
      vocabulary=V, canvas=canvas, config=block_decoder.DecodeConfig(
          LENGTH, num_rollouts=2, temperature=temperature))
  inputs = on_canvas(batch, rollout.tokens, rollout.call, canvas)
  stands = np.arange(LENGTH) < np.asarray(rollout.length)[..., None]
  return model, params, inputs, rollout, stands


@pytest.mark.parametrize('block, clean_stream, alignment, temperature', [
    (4, 'token_causal', 'shifted', 1.),
    (4, 'token_causal', 'same_position', .7),
    (4, 'block_causal', 'shifted', 0.),
    (4, 'block_causal', 'same_position', 1.),
    (1, 'token_causal', 'shifted', .7),
    (1, 'block_causal', 'same_position', 0.),
])
def test_replay_gives_the_recorded_logprobs(block, clean_stream, alignment,
                                            temperature):
  """Invariant 3, and that it is not for want of looking."""
  canvas = canvas_lib.CanvasConfig(block, clean_stream, alignment)
  for threshold in (1., .3):
    model, params, inputs, rollout, stands = rolled_out(
        canvas, threshold, temperature)
    assert stands.sum() > 20
    recorded = np.asarray(rollout.logprob)
    got = np.asarray(replayed(model, params, inputs, canvas, temperature))
    np.testing.assert_allclose(got[stands], recorded[stands], atol=1e-4)
    # One call late.
    if inputs['masked'].shape[2]:  # The canvas shows what it is to decide.
      late = inputs | {'masked': inputs['masked'] & ~inputs['decided']}
      wrong = np.asarray(replayed(model, params, late, canvas, temperature))
    else:  # A token more stands before every other.
      late = inputs | {'response': np.roll(inputs['response'], 1, -1)}
      wrong = np.roll(replayed(model, params, late, canvas, temperature), -1,
                      -1)
    assert np.abs(wrong - recorded)[stands].max() > 1e-2


def test_ratio_is_one_before_the_first_update():
  canvas = RULES[0]
  model, params, inputs, rollout, stands = rolled_out(canvas, .3, 1.)
  advantage = np.array([[1., -2.], [.5, .5], [0., 3.]])
  batch = inputs | {
      'logprob': rollout.logprob, 'response_length': rollout.length,
      'advantage': advantage, 'kept': np.array([True, True, False]),
      'reference_logprob': rollout.logprob}
  (loss, metrics), _ = loss_and_grad(model, params, batch, canvas, CONFIG)
  assert metrics['max_log_ratio'] < 1e-4
  assert metrics['clip_fraction'] == 0
  assert metrics['kl'] < 1e-6
  mean = [(advantage[n, :, None] * stands[n]).sum() / stands[n].sum()
          for n in range(2)]
  assert loss == pytest.approx(-np.mean(mean), abs=1e-4)
  entropy = [-np.asarray(rollout.logprob)[n][stands[n]].mean()
             for n in range(2)]
  assert metrics['entropy'] == pytest.approx(np.mean(entropy), abs=1e-4)


@functools.cache
def problem(canvas):
  """An update batch off the policy: chosen ratios, tokens, traces."""
  model, params = tiny.model()
  batch = tiny.batch()
  rng = np.random.default_rng(1)
  length = np.asarray(batch['response_length'])
  stands = np.arange(LENGTH) < length[..., None]
  # What stands right of EOS is seen by its block and scored nowhere.
  response = np.where(stands, batch['response'],
                      rng.integers(2, 44, stands.shape)).astype(np.int32)
  calls, steps = traces.play_all(
      0, length, LENGTH, canvas.block_size, canvas.shifted)
  inputs = on_canvas(batch, response, calls, canvas)
  now = np.asarray(replayed(model, params, inputs, canvas, 1.))
  ratio = rng.choice(RATIOS, now.shape)
  gap = rng.normal(0, .3, now.shape)
  batch = inputs | {
      'logprob': now - np.log(ratio).astype(np.float32),
      'reference_logprob': now + gap.astype(np.float32),
      'response_length': length, 'kept': np.array([True, False, True]),
      'advantage': rng.normal(size=length.shape).astype(np.float32)}
  return model, params, batch, steps, ratio, gap


def test_clips_and_k3_by_hand():
  """low .1, high .4: the surrogate is flat where the sign says so."""
  model, params, batch, _, ratio, gap = problem(RULES[0])
  (loss, metrics), _ = loss_and_grad(model, params, batch, RULES[0], CONFIG)
  total = clipped = kl = 0.
  for n in (0, 2):
    count = batch['response_length'][n].sum()
    for g, i in np.ndindex(2, LENGTH):
      if i >= batch['response_length'][n, g]:
        continue
      rho, advantage = ratio[n, g, i], batch['advantage'][n, g]
      bound = min(rho, 1.4) if advantage > 0 else max(rho, .9)
      total -= bound * advantage / count / 2
      clipped += (bound != rho) / count / 2
      kl += (np.exp(gap[n, g, i]) - 1 - gap[n, g, i]) / count / 2
  assert .2 < clipped < .8
  assert metrics['clip_fraction'] == pytest.approx(clipped, abs=1e-5)
  assert metrics['kl'] == pytest.approx(kl, rel=1e-3)
  assert loss == pytest.approx(total + .3 * kl, rel=1e-3)


def dense_rows(batch, steps, canvas):
  """One row [prompt; clean before the block; noisy block] a canvas.

  Returns tokens [R, T], masks [R, T, T] and, for every token that counts, its
  row, the place that is read, the token and where it goes [N * G * L].
  """
  prompt, lengths = (np.asarray(batch[k]) for k in ('prompt', 'prompt_length'))
  b, width = canvas.block_size, prompt.shape[1] + LENGTH
  rows, masks, scored = [], [], []

  def row(n, g, start, noisy):
    p = int(lengths[n])
    tokens = [*prompt[n, :p], *batch['response'][n, g, :start], *noisy]
    mask = np.eye(width, dtype=bool)
    for q in range(len(tokens)):
      for k in range(len(tokens)):
        if q < p + start:
          causal = k <= q
          if canvas.clean_stream == 'block_causal' and min(q, k) >= p:
            causal = (k - p) // b <= (q - p) // b
          mask[q, k] = causal and k < p + start
        else:
          mask[q, k] = True
    rows.append(np.pad(tokens, (0, width - len(tokens))))
    masks.append(mask)

  def score(n, g, i, read):
    if i < batch['response_length'][n, g]:
      scored.append((len(rows) - 1, int(lengths[n]) + read,
                     batch['response'][n, g, i], (n * 2 + g) * LENGTH + i))

  for (n, g), seen in steps.items():
    for start, masked, decided in seen:
      response = batch['response'][n, g, start:start + b]
      row(n, g, start, np.where(masked, V.mask_id, response))
      for offset in np.flatnonzero(decided):
        score(n, g, start + offset, start + offset - canvas.shifted)
    if canvas.shifted:
      for start in range(0, int(batch['response_length'][n, g]), b):
        row(n, g, start, [])
        score(n, g, start, start - 1)
  rows += [rows[0]] * (80 - len(rows))  # one shape for every rule
  masks += [masks[0]] * (80 - len(masks))
  return tuple(map(np.array, (rows, masks, list(zip(*scored)))))


@functools.partial(jax.jit, static_argnums=1)
def dense_loss_and_grad(params, config, batch, rows, masks, scored):
  row, read, token, place = scored
  allowed = np.setdiff1d(np.arange(V.size), V.banned)

  def loss(params):
    states = jax.vmap(lambda tokens, mask: reference.hidden(
        params, config, tokens, jnp.arange(rows.shape[1]), mask))(rows, masks)
    scores = reference.logits(params, config, states[row, read])
    logprob = jnp.take_along_axis(scores, token[:, None], 1)[:, 0]
    logprob -= jnp.log(jnp.exp(scores[:, allowed]).sum(-1))
    rho = jnp.exp(logprob - batch['logprob'].ravel()[place])
    advantage = batch['advantage'].ravel()[place // LENGTH]
    bound = jnp.where(advantage > 0, jnp.minimum(rho, 1.4),
                      jnp.maximum(rho, .9))
    gap = batch['reference_logprob'].ravel()[place] - logprob
    value = .3 * (jnp.exp(gap) - 1 - gap) - bound * advantage
    group = place // (2 * LENGTH)
    means = [jnp.where(group == n, value, 0).sum() / (group == n).sum()
             for n in (0, 2)]
    return sum(means) / 2

  return jax.value_and_grad(loss)(params)


@pytest.mark.parametrize('canvas, head_chunk', zip(RULES, (0, 5, 5)))
def test_shared_prompt_equals_one_dense_row_a_canvas(canvas, head_chunk):
  model, params, batch, steps, _, _ = problem(canvas)
  config = dataclasses.replace(CONFIG, head_chunk=head_chunk)
  (got, _), got_grad = loss_and_grad(model, params, batch, canvas, config)
  want, want_grad = dense_loss_and_grad(
      params, model.config, {k: batch[k] for k in (
          'logprob', 'reference_logprob', 'advantage')},
      *dense_rows(batch, steps, canvas))
  assert got == pytest.approx(float(want), rel=1e-4)
  assert max(np.abs(x).max() for x in jax.tree.leaves(want_grad)) > .1
  jax.tree.map(lambda a, b: np.testing.assert_allclose(
      a, b, rtol=1e-3, atol=5e-5), got_grad, want_grad)


def test_gradient_equals_finite_differences():
  canvas, step = RULES[0], 3e-3
  model, params, batch, _, _, _ = problem(canvas)
  stands = np.arange(LENGTH) < batch['response_length'][..., None]
  now = replayed(model, params, batch, canvas, 1.)
  _, grad = loss_and_grad(model, params, batch, canvas, CONFIG)
  leaves, tree = jax.tree.flatten(grad)
  rng = np.random.default_rng(0)
  directions = [leaves] + [
      [rng.normal(size=x.shape) for x in leaves] for _ in range(4)]
  for direction in directions:
    norm = np.sqrt(sum((np.asarray(x) ** 2).sum() for x in direction))
    direction = [jnp.float32(x / norm) for x in direction]
    slope = sum(float((x * y).sum()) for x, y in zip(leaves, direction))
    ends = []
    for sign in (1, -1):
      moved = jax.tree.map(lambda x, v: x + sign * step * v, params,
                           jax.tree.unflatten(tree, direction))
      (loss, _), _ = loss_and_grad(model, moved, batch, canvas, CONFIG)
      # No ratio crosses a kink: .8 is the nearest, to .9.
      then = replayed(model, moved, batch, canvas, 1.)
      assert np.abs(then - now)[stands].max() < np.log(.9 / .8)
      ends.append(float(loss))
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(
        slope, rel=.01, abs=1e-4)


@pytest.mark.parametrize('kept', [False, True])
def test_a_ratio_without_bounds_leaves_no_nan(kept):
  """A policy that has drifted far, in a group that teaches nothing or not."""
  model, params, batch, *_ = problem(RULES[0])
  batch = batch | {
      'logprob': np.asarray(batch['logprob']) - [[[200.]], [[0.]], [[0.]]],
      'kept': np.array([kept, True, True])}
  (loss, _), grad = loss_and_grad(model, params, batch, RULES[0], CONFIG)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((loss, grad)))


@pytest.mark.parametrize('kept', [False, True])
def test_no_group_and_banned_tokens_leave_no_nan(kept):
  """Nobody reads what stands beyond EOS, be it a banned token."""
  model, params, batch, steps, _, _ = problem(RULES[0])
  stands = np.arange(LENGTH) < batch['response_length'][..., None]
  batch = batch | {
      'response': np.where(stands, batch['response'], V.mask_id),
      'kept': np.full(3, kept)}
  (loss, _), grad = loss_and_grad(model, params, batch, RULES[0], CONFIG)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((loss, grad)))
  if not kept:
    assert loss == 0
    assert not any(x.any() for x in jax.tree.leaves(grad))
  undecided = np.arange(LENGTH) % 4 > 0  # no seeds
  undecided = np.tile(undecided, (*stands.shape[:2], 1))
  for row, seen in steps.items():
    for start, _, decided in seen:
      undecided[row][start + np.flatnonzero(decided)] = False
  assert undecided.any()
  assert not replayed(model, params, batch, RULES[0], 1.)[undecided].any()
