"""The decoder against uncached forwards, replay and plain AR decoding."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgr2_jax.decoding import block_decoder
from dgr2_jax.decoding import commit
from dgr2_jax.models import canvas as canvas_lib
from tests.models import reference
from tests.models import tiny

V = tiny.VOCABULARY
NEVER = block_decoder.NEVER
RULES = list(itertools.product(('token_causal', 'block_causal'),
                               ('shifted', 'same_position')))


def decode(model, params, batch, canvas, threshold=1., key=jax.random.key(2),
           **options):
  options.setdefault('max_response', 12)
  return block_decoder.decode(
      model, params, batch['prompt'], batch['prompt_length'],
      batch['example_id'], key, commit.Threshold(threshold), vocabulary=V,
      canvas=canvas, config=block_decoder.DecodeConfig(**options))


@functools.partial(jax.jit, static_argnums=(0, 4, 5, 6))
def replay(model, params, batch, rollout, canvas, temperature, off_by=0):
  """Log-probability of every token on the canvas that committed it, uncached.

  A token committed by call c saw its block with everything committed at or
  after c masked. One block canvas a token. `off_by` shifts c: a wrong replay.
  """
  n, g, length = rollout.tokens.shape
  b = canvas.block_size
  start = np.arange(length) // b * b
  positions = start[:, None] + np.arange(b)  # [L, B]
  call = rollout.call
  masked = call[:, :, positions] >= call[..., None] + off_by
  board = canvas_lib.Canvas(
      batch['prompt'], batch['prompt_length'], rollout.tokens,
      jnp.broadcast_to(start, (n, g, length)), masked)
  states = canvas_lib.states(model, params, board, V.mask_id, canvas)
  own = np.arange(length) % b
  state = states.noisy[:, :, np.arange(length), own]  # [N, G, L, D]
  logits = V.allow(model.apply({'params': params}, state, method='logits'))
  logprob = jax.nn.log_softmax(logits / (temperature or 1.))
  return jnp.take_along_axis(logprob, rollout.tokens[..., None], -1)[..., 0]


@pytest.mark.parametrize('clean_stream, alignment', RULES)
@pytest.mark.parametrize('temperature', [0., .7])
@pytest.mark.parametrize('threshold', [1., .3])
def test_replay_gives_the_recorded_logprobs(clean_stream, alignment, threshold,
                                            temperature):
  """Invariants 2 and 3: the cached decoder equals the training forward."""
  canvas = canvas_lib.CanvasConfig(4, clean_stream, alignment)
  model, params = tiny.model()
  batch = tiny.batch()
  rollout = decode(model, params, batch, canvas, threshold, num_rollouts=2,
                   temperature=temperature)
  committed = np.asarray(rollout.call) < NEVER
  assert committed.sum() > 20
  got = replay(model, params, batch, rollout, canvas, temperature)
  np.testing.assert_allclose(np.asarray(got)[committed],
                             np.asarray(rollout.logprob)[committed], atol=1e-4)
  if threshold == 1.:  # one token a step: a wrong replay must show
    wrong = replay(model, params, batch, rollout, canvas, temperature, 1)
    gap = np.abs(np.asarray(wrong) - np.asarray(rollout.logprob))[committed]
    assert gap.max() > 1e-2


def test_block_of_one_decodes_as_a_plain_ar_model():
  """Invariant 1, greedy: token for token, one forward a token."""
  model, params = tiny.model()
  batch = tiny.batch()
  rollout = decode(model, params, batch, canvas_lib.CanvasConfig(1))
  for n in range(3):
    prompt = batch['prompt'][n, :int(batch['prompt_length'][n])]
    response = []
    while len(response) < 12 and V.eos_id not in response:
      # Causal: what stands after the position read does not matter.
      padded = jnp.array(response + [0] * (12 - len(response)), jnp.int32)
      _, logprobs = reference.causal_logprobs(
          params, model.config, V.banned, prompt, padded)
      response.append(int(jnp.argmax(logprobs[len(response)])))
    length = int(rollout.length[n, 0])
    assert list(map(int, rollout.tokens[n, 0, :length])) == response
    assert int(rollout.calls[n, 0]) == len(response)
    assert bool(rollout.finished[n, 0]) == (V.eos_id in response)


def test_tau_means_the_same_at_every_temperature():
  """A draw that is all but greedy commits what greedy decoding commits."""
  canvas = canvas_lib.CanvasConfig(4)
  model, params = tiny.model(3.)
  batch = tiny.batch()
  greedy, cold = (
      decode(model, params, batch, canvas, .2, temperature=temperature)
      for temperature in (0., 1e-3))
  calls = np.asarray(greedy.call)
  np.testing.assert_array_equal(calls, cold.call)
  # Some steps commit several tokens, and not all commit everything.
  steps = [len(set(row[row < NEVER])) for row in calls.reshape(-1, 12)]
  assert all(6 < s < 12 for s in steps)


@pytest.mark.parametrize('threshold', [1., .3])
def test_padding_neighbours_and_batch_size_change_nothing(threshold):
  """Invariant 4, for greedy and sampled decoding."""
  canvas = canvas_lib.CanvasConfig(4)
  model, params = tiny.model()
  batch = tiny.batch()
  wide = {**batch, 'prompt': jnp.pad(batch['prompt'], ((0, 0), (0, 5)))}
  one = jax.tree.map(lambda x: x[1:2], batch)
  for temperature in (0., 1.):
    want = decode(model, params, batch, canvas, threshold,
                  temperature=temperature, num_rollouts=2)
    for other, rows in ((wide, slice(None)), (one, slice(1, 2))):
      got = decode(model, params, other, canvas, threshold,
                   temperature=temperature, num_rollouts=2)
      for field in ('tokens', 'call', 'calls', 'length'):
        np.testing.assert_array_equal(
            getattr(got, field), getattr(want, field)[rows], err_msg=field)
      np.testing.assert_allclose(got.logprob, want.logprob[rows], atol=1e-4)


def test_rollouts_of_a_group_differ_and_keys_matter():
  model, params = tiny.model(scale=1.)
  one = jax.tree.map(lambda x: x[:1], tiny.batch())
  canvas = canvas_lib.CanvasConfig(4)
  rollout = decode(model, params, one, canvas, .9, num_rollouts=4,
                   temperature=1.)
  rows = {tuple(map(int, row)) for row in rollout.tokens[0]}
  assert len(rows) == 4
  again = decode(model, params, one, canvas, .9, num_rollouts=4,
                 temperature=1., key=jax.random.key(3))
  assert (again.tokens != rollout.tokens).any()


def test_calls_are_counted_prefill_and_commits_included():
  """Prefill 1; a block of B costs its steps and one commit, but the last."""
  model, params = tiny.model()
  batch = tiny.batch()
  canvas = canvas_lib.CanvasConfig(4)
  rollout = decode(model, params, batch, canvas, 1.)
  call = np.asarray(rollout.call)
  assert not rollout.finished.all()
  for n in range(3):
    if not rollout.finished[n, 0]:
      # 3 blocks x 3 denoising steps, 2 commits, 1 prefill.
      assert int(rollout.calls[n, 0]) == 12
    committed = call[n, 0][call[n, 0] < NEVER]
    assert sorted(committed) == list(range(len(committed)))  # one a call
    assert int(rollout.calls[n, 0]) == committed.max() + 1


def test_tau_one_commits_one_token_a_step_even_at_certainty():
  model, params = tiny.model(scale=500.)  # probabilities saturate
  rollout = decode(model, params, tiny.batch(), canvas_lib.CanvasConfig(4), 1.)
  for row in np.asarray(rollout.call).reshape(-1, 12):
    committed = row[row < NEVER]
    assert len(set(committed)) == len(committed)
  fast = decode(model, params, tiny.batch(), canvas_lib.CanvasConfig(4), .99)
  assert fast.calls.sum() < rollout.calls.sum()


def test_step_cap_commits_the_rest_of_the_block():
  model, params = tiny.model(scale=.1)  # never confident
  rollout = decode(model, params, tiny.batch(), canvas_lib.CanvasConfig(4),
                   .99, max_denoising_steps=1)
  unfinished = ~np.asarray(rollout.finished)
  assert unfinished.any()
  # Prefill, 3 denoising steps, 2 commits.
  assert (np.asarray(rollout.calls)[unfinished] == 6).all()


def test_banned_tokens_are_never_sampled():
  model, params = tiny.model(scale=.01)
  rollout = decode(model, params, tiny.batch(n=6), canvas_lib.CanvasConfig(4),
                   .9, temperature=2., num_rollouts=4)
  committed = np.asarray(rollout.call) < NEVER
  assert not np.isin(np.asarray(rollout.tokens)[committed], V.banned).any()


def test_literal_eos_and_mask_tokens_in_the_prompt_are_tokens_like_others():
  """Invariant 5: with equal embedding rows, rollouts are equal."""
  model, params = tiny.model()
  batch = tiny.batch()
  canvas = canvas_lib.CanvasConfig(4)
  for token in (V.eos_id, V.mask_id):
    row = params['embedding'][token]
    twin = {**params, 'embedding': params['embedding'].at[0].set(row)}
    want, got = (
        decode(model, twin, {**batch, 'prompt': batch['prompt'].at[:, 0].set(
            spelt)}, canvas, .5) for spelt in (0, token))  # 0 is banned
    for field in ('tokens', 'call', 'calls', 'length'):
      np.testing.assert_array_equal(getattr(got, field), getattr(want, field))


@pytest.mark.parametrize('clean_stream', ['token_causal', 'block_causal'])
def test_cached_logits_equal_the_training_forward(clean_stream):
  """Invariant 2, all logits: denoising and commit passes of three blocks."""
  canvas = canvas_lib.CanvasConfig(4, clean_stream, 'same_position')
  model, params = tiny.model()
  batch = tiny.batch()
  n, g, length = batch['response'].shape
  masked = np.random.default_rng(0).random((n, g, 3, 4)) < .5
  start = jnp.broadcast_to(jnp.arange(3) * 4, (n, g, 3))
  encode = jax.jit(canvas_lib.states, static_argnums=(0, 3, 4))
  prefill = jax.jit(canvas_lib.prefill, static_argnums=(0, 4, 5))
  decode_block = jax.jit(canvas_lib.decode_block, static_argnums=(0, 6))
  states = encode(
      model, params, canvas_lib.Canvas(
          batch['prompt'], batch['prompt_length'], batch['response'], start,
          jnp.asarray(masked)), V.mask_id, canvas)
  cache, last = prefill(
      model, params, batch['prompt'], batch['prompt_length'], g, length)
  np.testing.assert_allclose(  # scores the first token
      jnp.broadcast_to(last[:, None], states.clean[:, :, 0].shape),
      states.clean[:, :, 0], atol=2e-5)
  for block in range(3):
    here = slice(4 * block, 4 * block + 4)
    tokens = batch['response'][:, :, here]
    for clean in (False, True):
      shown = tokens if clean else jnp.where(
          masked[:, :, block], V.mask_id, tokens)
      hidden, entries = decode_block(
          model, params, cache, shown, start[:, :, block],
          jnp.full((n, g), clean), canvas)
      cache = cache.written(entries)
      if clean:  # state i of the clean stream scores token i + 1
        want = states.clean[:, :, 4 * block + 1:4 * block + 5]
        hidden = hidden[:, :, :want.shape[2]]
      else:
        want = states.noisy[:, :, block]
      np.testing.assert_allclose(*(
          model.apply({'params': params}, x, method='logits')
          for x in (hidden, want)), atol=1e-4)


def test_used_candidates_are_masked_after_the_marker():
  model, params = tiny.model()
  batch = tiny.batch(n=6)
  marker, answers = 7, (10, 11, 12, 13, 14)
  # Push the model to the marker and the candidates.
  embedding = params['embedding'].at[jnp.array([marker, *answers])].multiply(3)
  params = {**params, 'embedding': embedding}
  rollout = decode(model, params, batch, canvas_lib.CanvasConfig(1),
                   answer_marker=marker, answer_ids=answers, temperature=1.)
  checked = 0
  for row in np.asarray(rollout.tokens)[:, 0]:
    if marker in row:
      after = row[list(row).index(marker):]
      used = [t for t in after if t in answers]
      assert len(set(used)) == len(used)
      checked += len(used)
  assert checked > 0
  with pytest.raises(ValueError, match='block_size=4'):
    decode(model, params, batch, canvas_lib.CanvasConfig(4),
           answer_ids=answers, answer_marker=marker)


def test_length_must_be_a_multiple_of_the_block():
  model, params = tiny.model()
  with pytest.raises(ValueError, match='max_response=10'):
    decode(model, params, tiny.batch(), canvas_lib.CanvasConfig(4),
           max_response=10)


def test_top_k_of_one_is_greedy():
  model, params = tiny.model()
  canvas = canvas_lib.CanvasConfig(4)
  want, got = (decode(model, params, tiny.batch(), canvas, .3, **options)
               for options in ({}, dict(temperature=1., top_k=1)))
  for field in ('tokens', 'call', 'calls', 'length', 'logprob'):
    np.testing.assert_array_equal(getattr(got, field), getattr(want, field))


def nucleus(logprobs, top_k, top_p):
  """Ids of the fewest tokens, of the top_k likeliest, that hold top_p."""
  order = np.argsort(-logprobs)
  order = order[np.isfinite(logprobs[order])][:top_k or None]
  mass = np.exp(logprobs[order].astype(np.float64))
  mass /= mass.sum()
  held, kept = 0., []
  for token, share in zip(order, mass):
    if held < top_p:
      kept.append(int(token))
    held += share
  return kept


@pytest.mark.parametrize('top_k, top_p', [
    (0, 1.), (1, 1.), (5, 1.), (200, 1.), (0, .5), (0, .95), (0, 1e-6),
    (6, .7), (200, .9)])
def test_narrowed_support_is_the_nucleus(top_k, top_p):
  config = block_decoder.DecodeConfig(4, temperature=1., top_k=top_k,
                                      top_p=top_p)
  rng = np.random.default_rng(0)
  logits = np.array(V.allow(jnp.float32(rng.normal(0, 2, (3, 2, 4, 48)))))
  got = np.asarray(block_decoder._narrowed(logits, config))
  for row in np.ndindex(3, 2, 4):
    kept = nucleus(logits[row] - np.logaddexp.reduce(logits[row]), top_k,
                   top_p)
    assert np.flatnonzero(np.isfinite(got[row])).tolist() == sorted(kept)
    np.testing.assert_array_equal(got[row][kept], logits[row][kept])


def test_narrowing_bounds_the_draw_and_not_the_record():
  """Tokens lie in the AR model's nucleus; log-probabilities are its own."""
  model, params = tiny.model(scale=1.)
  batch = jax.tree.map(lambda x: x[:1], tiny.batch())
  temperature, top_k, top_p = .7, 12, .6
  rollout = decode(model, params, batch, canvas_lib.CanvasConfig(1),
                   max_response=4, num_rollouts=24, temperature=temperature,
                   top_k=top_k, top_p=top_p)
  prompt = batch['prompt'][0, :int(batch['prompt_length'][0])]
  first = set()
  for g in range(24):
    tokens = np.asarray(rollout.tokens[0, g])
    _, logprobs = reference.causal_logprobs(
        params, model.config, V.banned, prompt, rollout.tokens[0, g])
    logprobs = np.asarray(jax.nn.log_softmax(logprobs / temperature))
    for i in range(int(rollout.length[0, g])):
      assert tokens[i] in nucleus(logprobs[i], top_k, top_p)
      assert rollout.logprob[0, g, i] == pytest.approx(
          logprobs[i, tokens[i]], abs=1e-4)
    first.add(int(tokens[0]))
  assert len(first) > 2
  assert first <= set(nucleus(logprobs[0], top_k, top_p))


@pytest.mark.parametrize('options', [
    dict(top_k=-1), dict(top_p=0.), dict(top_p=1.5), dict(temperature=np.inf),
    dict(temperature=np.nan), dict(num_rollouts=0), dict(max_response=-4),
    dict(answer_ids=(3,))])
def test_options_out_of_range_name_the_field(options):
  with pytest.raises(ValueError, match='|'.join(options)):
    block_decoder.DecodeConfig(**{'max_response': 4} | options)
