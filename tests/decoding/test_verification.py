"""Verified decoding against autoregressive decoding of the same weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dgr2_jax.decoding import block_decoder
from dgr2_jax.decoding import commit
from dgr2_jax.decoding import verification
from dgr2_jax.models import canvas as canvas_lib
from tests.models import tiny

CANVAS = canvas_lib.CanvasConfig(4)


@functools.cache
def other():
  """Another model over the same vocabulary, much like the drafter."""
  model, params = tiny.model()
  return model, jax.tree.map(
      lambda x: x + .05 * jax.random.normal(jax.random.key(9), x.shape), params)


def run(batch, canvas=CANVAS, draft=verification.DraftConfig(),
        key=jax.random.key(2), model=None, verifier=(None, None), **options):
  model, params = model or tiny.model()
  options.setdefault('max_response', 12)
  config = block_decoder.DecodeConfig(**options)
  args = (model, params, batch['prompt'], batch['prompt_length'],
          batch['example_id'], key)
  if canvas.block_size == 1:
    return block_decoder.decode(*args, commit.Threshold(1.), config=config,
                                vocabulary=tiny.VOCABULARY, canvas=canvas)
  return verification.decode(*args, vocabulary=tiny.VOCABULARY, canvas=canvas,
                             config=config, draft=draft, verifier=verifier[0],
                             verifier_params=verifier[1])


@pytest.mark.parametrize('steps, window', [
    (1, 'pivot'), (1, 'grid'), (3, 'pivot')])
def test_greedy_is_the_autoregressive_decoding(steps, window):
  batch = tiny.batch(n=6)
  want = run(batch, canvas_lib.AUTOREGRESSIVE)
  got = run(batch, draft=verification.DraftConfig(steps, window))
  np.testing.assert_array_equal(got.length, want.length)
  np.testing.assert_array_equal(got.finished, want.finished)
  before = np.arange(12) < np.asarray(want.length)[..., None]
  np.testing.assert_array_equal(np.asarray(got.tokens)[before],
                                np.asarray(want.tokens)[before])
  np.testing.assert_allclose(np.asarray(got.logprob)[before],
                             np.asarray(want.logprob)[before], atol=1e-4)
  # Each verification gives at least its own token, at most a block.
  for length, calls, call in zip(
      np.ravel(got.length), np.ravel(got.calls),
      np.asarray(got.call).reshape(-1, 12)):
    accepted = np.unique(call[1:length], return_counts=True)[1]
    assert accepted.max() <= 4
    assert calls == 1 + (steps + 1) * len(accepted)
  # Something was accepted, else nothing was tested.
  assert (np.asarray(got.calls) < 1 + (steps + 1)
          * (np.asarray(got.length) - 1)).any()


@pytest.mark.parametrize('lengths', [(6,), (2, 4, 8)])
def test_windows_of_any_length_give_the_autoregressive_decoding(lengths):
  batch = tiny.batch(n=6)
  want = run(batch, canvas_lib.AUTOREGRESSIVE)
  got = run(batch, draft=verification.DraftConfig(lengths=lengths))
  before = np.arange(12) < np.asarray(want.length)[..., None]
  np.testing.assert_array_equal(got.length, want.length)
  np.testing.assert_array_equal(np.asarray(got.tokens)[before],
                                np.asarray(want.tokens)[before])


@pytest.mark.parametrize('given, done, want', [
    ([1., 9.], [False, True], 2), ([1.5, 9.], [False, True], 4),
    ([3., 3.], [False, False], 4), ([2., 6.], [False, False], 8),
    ([9., 1.], [True, False], 2), ([99.], [False], 8)])
def test_a_window_has_room_for_one_token_more_than_lately(given, done, want):
  lengths = (2, 4, 8)
  got = verification.chosen_length(
      lengths, jnp.array([given]), jnp.array([done]))
  assert lengths[int(got)] == want


def test_windows_shrink_where_little_is_accepted():
  """A verification gives no more than the window that its row has earned."""
  batch = {k: v[:1] for k, v in tiny.batch(n=6, seed=1).items()}
  lengths = (2, 4, 8)
  call = np.asarray(run(
      batch, draft=verification.DraftConfig(lengths=lengths)).call)[0, 0]
  given = np.unique(call[(call > 0) & (call < block_decoder.NEVER)],
                    return_counts=True)[1]
  lately, seen = 8., []
  for count in given:
    seen.append(next((n for n in lengths if n >= lately + 1), 8))
    assert count <= seen[-1]
    lately = (lately + count) / 2
  assert len(set(seen)) > 1


@pytest.mark.parametrize('window, steps, clean', [
    ('pivot', 1, 'token_causal'), ('grid', 2, 'token_causal'),
    ('grid', 1, 'block_causal')])
def test_another_model_verifies(window, steps, clean):
  batch = tiny.batch(n=6)
  draft = verification.DraftConfig(steps, window)
  want, mine = (run(batch, canvas_lib.AUTOREGRESSIVE, model=m)
                for m in (other(), None))
  got = run(batch, canvas_lib.CanvasConfig(4, clean), draft, verifier=other())
  before = np.arange(12) < np.asarray(want.length)[..., None]
  np.testing.assert_array_equal(got.length, want.length)
  np.testing.assert_array_equal(np.asarray(got.tokens)[before],
                                np.asarray(want.tokens)[before])
  np.testing.assert_allclose(np.asarray(got.logprob)[before],
                             np.asarray(want.logprob)[before], atol=1e-4)
  assert (np.asarray(mine.tokens) != want.tokens)[before].any()
  # Two prefills; draft, the drafter's commit, verification; some are accepted.
  verifications = (np.asarray(got.calls) - 2) / (steps + 2)
  np.testing.assert_array_equal(verifications, np.round(verifications))
  assert (verifications < np.asarray(got.length) - 1).any()


@pytest.mark.parametrize('clean', ['token_causal', 'block_causal'])
def test_the_drafter_remembers_what_the_verifier_wrote(clean):
  """Its keys are those of the response that stands, block by block."""
  batch, draft = tiny.batch(n=2), verification.DraftConfig(window='grid')
  canvas = canvas_lib.CanvasConfig(4, clean)
  config = block_decoder.DecodeConfig(max_response=12)
  model, params = tiny.model()
  state, keys = verification.begin(
      *other(), batch['prompt'], batch['prompt_length'], batch['example_id'],
      jax.random.key(2), vocabulary=tiny.VOCABULARY, canvas=canvas,
      config=config, draft=draft)
  fresh, _ = own, _ = block_decoder.prefill(
      model, params, batch['prompt'], batch['prompt_length'], config)
  step = jax.jit(lambda state, own: verification.step(
      (model, params), other(), state, own, keys, tiny.VOCABULARY, canvas,
      config, draft))
  while (state.start < 8).any():
    state, own = step(state.replace(done=jnp.zeros_like(state.done)), own)
  for start in (0, 4):
    at = jnp.full((2, 1), start)
    _, entries = canvas_lib.decode_block(
        model, params, fresh, state.tokens[..., start:start + 4], at,
        jnp.ones((2, 1), bool), canvas)
    fresh = fresh.written(entries)
  for got, want in zip(own.clean, fresh.clean):
    np.testing.assert_allclose(got[:, :, :, :8], want[:, :, :, :8], atol=1e-5)


def test_batch_neighbours_change_nothing():
  batch = tiny.batch(n=6)
  alone = {k: v[2:3] for k, v in batch.items()}
  together = run(batch, temperature=1., num_rollouts=2)
  single = run(alone, temperature=1., num_rollouts=2)
  for name in ('tokens', 'call', 'calls', 'length'):
    np.testing.assert_array_equal(getattr(together, name)[2:3],
                                  getattr(single, name), err_msg=name)


def chi_square(counts, probabilities):
  """p-value; cells of fewer than five expected are pooled."""
  expected = probabilities.astype(float)
  expected *= counts.sum() / expected.sum()
  rare = expected < 5
  counts = np.append(counts[~rare], counts[rare].sum())
  expected = np.append(expected[~rare], expected[rare].sum())
  some = expected > 0
  return stats.chisquare(counts[some], expected[some]).pvalue


@functools.partial(jax.jit, static_argnums=4)
def probabilities(params, drafter, batch, prefix, canvas, temperature):
  """p of the token behind `prefix`, from the clean stream; q of a draft.

  `params` are the verifier's, `drafter` the drafter's. q is read on an uncached
  block canvas that begins at the last token of `prefix`, all behind it masked.
  """
  model, _ = tiny.model()
  v, size = tiny.VOCABULARY, prefix.shape[0]
  b = canvas.block_size
  clean = jnp.full((1, 1, 3 * b), v.eos_id).at[0, 0, :size].set(prefix)
  board = canvas_lib.Canvas(
      batch['prompt'], batch['prompt_length'], clean,
      jnp.full((1, 1, 1), size - 1),
      (jnp.arange(b) > 0)[None, None, None])
  logits = []
  for weights, pick in (
      (params, lambda s: s.clean[0, 0, size]),
      (drafter, lambda s: s.noisy[0, 0, 0, 1])):
    states = canvas_lib.states(model, weights, board, v.mask_id, canvas)
    logits.append(model.apply(
        {'params': weights}, pick(states), method='logits'))
  return jax.nn.softmax(v.allow(jnp.stack(logits)) / temperature)


@pytest.mark.parametrize('window, verifier', [
    ('pivot', None), ('grid', None), ('pivot', other)])
def test_sampling_leaves_the_distribution_of_the_verifier(window, verifier):
  """Tokens behind frequent prefixes, against exact AR probabilities."""
  _, drafter = tiny.model()
  verifier = verifier() if verifier else (None, None)
  params = drafter if verifier[0] is None else verifier[1]
  vocabulary, temperature = tiny.VOCABULARY, .7
  batch = {k: v[:1] for k, v in tiny.batch().items()}
  got = run(batch, temperature=temperature, num_rollouts=8_000, max_response=8,
            draft=verification.DraftConfig(window=window), verifier=verifier)
  rows = np.arange(8_000)
  tokens, call, logprob = (np.asarray(x)[0] for x in (
      got.tokens, got.call, got.logprob))
  tested = 0
  for place in range(1, 8):
    counts = np.bincount(tokens[rows, place - 1])
    counts[vocabulary.eos_id] = 0  # nothing stands behind it
    rows = rows[tokens[rows, place - 1] == counts.argmax()]
    if len(rows) < 200:
      break
    p, q = np.asarray(probabilities(
        params, drafter, batch, jnp.array(tokens[rows[0], :place]), CANVAS,
        temperature))
    counts = np.bincount(tokens[rows, place], minlength=len(p))
    assert chi_square(counts, p) > 1e-3, place
    if place == 1:  # drafts, had they been taken unread, would show
      assert chi_square(counts, q) < 1e-6
      followed = call[rows, 2] == call[rows, 1]
      assert 0 < followed.mean() < 1  # some are accepted, some are not
    np.testing.assert_allclose(
        logprob[rows, place], np.log(p[tokens[rows, place]]), atol=1e-4)
    tested += 1
  assert tested >= 3


def test_speculative_sampling_draws_from_p_and_not_from_q():
  rng = np.random.default_rng(0)
  size, v = 20_000, 6
  p, q = rng.dirichlet(np.ones(v), 2)
  drafted = rng.choice(v, (size, 1, 2), p=q)
  shape = (size, 1, 2, v)
  tokens, accepted = verification.speculate(
      jnp.broadcast_to(jnp.log(p), shape), jnp.broadcast_to(jnp.log(q), shape),
      jnp.array(drafted), jnp.array([False, True]),
      jax.random.split(jax.random.key(1), (size, 1)))
  tokens, accepted = np.asarray(tokens)[:, 0], np.asarray(accepted)[:, 0]
  for place in range(2):
    counts = np.bincount(tokens[:, place], minlength=v)
    assert chi_square(counts, p) > 1e-3
    assert chi_square(counts, q) < 1e-6  # the test would notice
  # Accepted as often as p and q overlap; the last place has no draft.
  assert accepted[:, 0].mean() == pytest.approx(
      np.minimum(p, q).sum(), abs=.02)
  assert not accepted[:, 1].any()


@pytest.mark.parametrize('canvas, options, draft, message', [
    (canvas_lib.CanvasConfig(4, 'block_causal'), {}, {}, 'block_causal'),
    (canvas_lib.CanvasConfig(4, alignment='same_position'), {}, {},
     'same_position'),
    (canvas_lib.CanvasConfig(4, 'block_causal'), dict(verifier=(0, 0)), {},
     "draft.window='grid'"),
    (canvas_lib.CanvasConfig(4, alignment='same_position'),
     dict(verifier=(0, 0)), {}, 'same_position'),
    (CANVAS, dict(temperature=1.), dict(steps=2), 'draft.steps=2'),
    (CANVAS, dict(temperature=1.), dict(lengths=(2, 4)), 'draft.lengths'),
    (CANVAS, dict(top_k=3), {}, 'top_k=3'),
    (CANVAS, dict(answer_ids=(3,), answer_marker=5), {},
     'autoregressive'),
    (CANVAS, dict(fused=True), {}, 'fuse'),
])
def test_what_would_not_be_lossless_is_refused(canvas, options, draft, message):
  with pytest.raises(ValueError, match=message):
    run(tiny.batch(), canvas, draft=verification.DraftConfig(**draft),
        **options)


@pytest.mark.parametrize('fields', [
    dict(steps=0), dict(steps=1.5), dict(threshold=5), dict(window='left'),
    dict(lengths=(1, 4)),
    dict(lengths=(4, 4)), dict(lengths=(4,), window='grid')])
def test_draft_config_names_the_field(fields):
  with pytest.raises(ValueError, match=f'draft.{next(iter(fields))}='):
    verification.DraftConfig(**fields)
