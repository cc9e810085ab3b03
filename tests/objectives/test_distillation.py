"""Distillation against rows of [prompt; clean; noisy] under a dense mask."""

import dataclasses
import functools
import itertools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgr2_jax.decoding import replay as replay_lib
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib
from dgr2_jax.objectives import distillation
from tests.decoding import traces
from tests.models import reference
from tests.models import tiny

V = tiny.VOCABULARY
ALLOWED = np.setdiff1d(np.arange(V.size), V.banned)
CANDIDATES = (10, 11, 12, 13)
N, G, P, LENGTH, B = 2, 2, 9, 12, 4
SHIFTED = canvas_lib.CanvasConfig(B)
SAME = canvas_lib.CanvasConfig(B, alignment='same_position')


@functools.partial(jax.jit, static_argnums=(0, 3, 4, 6))
def loss_and_grad(model, params, batch, canvas, config, head=None,
                  teacher=None):
  return jax.value_and_grad(
      lambda params: distillation.loss(
          model, params, batch, canvas, config, V, head, CANDIDATES,
          teacher)[0].value)(params)


@functools.cache
def problem(canvas):
  """Student, teacher and an update batch from played traces."""
  model, params = tiny.model()
  keys = iter(jax.random.split(jax.random.key(3), 99))
  teacher = jax.tree.map(
      lambda x: x + .1 * jax.random.normal(next(keys), x.shape), params)
  batch = jax.tree.map(np.asarray, tiny.batch(N, P, G, LENGTH, seed=2))
  length = np.array([[12, 7], [10, 12]])
  stands = np.arange(LENGTH) < length[..., None]
  rng = np.random.default_rng(0)
  # Many candidates, and text beyond EOS that a block sees and nobody scores.
  response = np.where(rng.random(stands.shape) < .6,
                      rng.choice(CANDIDATES, stands.shape),
                      rng.integers(2, 44, stands.shape)).astype(np.int32)
  calls, steps = traces.play_all(5, length, LENGTH, B, canvas.shifted)
  canvases = replay_lib.replay(calls, canvas, 4)._asdict()
  del canvases['decided']
  batch = {
      'prompt': batch['prompt'], 'prompt_length': batch['prompt_length'],
      'response': response, 'response_length': length,
      'is_answer': np.arange(LENGTH) >= np.array([[5, 2], [0, 9]])[..., None],
      'teacher_states': clean_states(model, teacher, {
          **batch, 'response': response}), **canvases}
  return model, params, teacher, batch, steps


@functools.partial(jax.jit, static_argnums=0)
def clean_states(model, params, batch):
  return canvas_lib.states(
      model, params, canvas_lib.autoregressive(
          batch['prompt'], batch['prompt_length'], batch['response']),
      V.mask_id, canvas_lib.AUTOREGRESSIVE).clean


def dense_rows(batch, steps, canvas, config):
  """Row (n, g, k) holds the k-th step of every block of a response.

  Returns a dict of arrays with R = N * G * B rows: what the reference reads,
  and the weights of its divergences and cross-entropies.
  """
  width = P + 2 * LENGTH
  index = np.arange(width)
  place = np.concatenate([np.full(P, -1), np.tile(np.arange(LENGTH), 2)])
  block = np.where(place < 0, -1, place // B)
  kind = np.repeat([0, 1, 2], [P, LENGTH, LENGTH])
  see = np.zeros((width, width), bool)
  for q, k in np.ndindex(width, width):
    if kind[k] == 0:
      see[q, k] = kind[q] > 0 or k <= q
    elif kind[k] == 1:
      causal = (block[k] <= block[q] if canvas.clean_stream == 'block_causal'
                else place[k] <= place[q])
      see[q, k] = causal if kind[q] == 1 else (
          kind[q] == 2 and block[k] < block[q])
    else:
      see[q, k] = kind[q] == 2 and block[k] == block[q]
  out = {k: [] for k in (
      'tokens', 'positions', 'mask', 'causal', 'clean_read', 'noisy_read',
      'clean_kl', 'noisy_kl', 'nats', 'excluded', 'response')}
  token_weight = np.zeros((N, G, LENGTH))
  for n, g, i in np.ndindex(N, G, LENGTH):
    if i < batch['response_length'][n, g]:
      token_weight[n, g, i] = (config.answer_weight
                               if batch['is_answer'][n, g, i]
                               else config.reasoning_weight)
  nothing = config.divergence == 'none'
  for n, g, k in np.ndindex(N, G, B):
    p = int(batch['prompt_length'][n])
    response = batch['response'][n, g]
    padding = (index < P) & (index >= p)
    masked = np.zeros(LENGTH, bool)
    kl, nats, clean_kl = np.zeros((3, LENGTH))
    excluded = np.zeros((LENGTH, V.size), bool)
    for start in range(0, LENGTH, B):
      seen = [s for s in steps[n, g] if s.start == start]
      if k >= len(seen):
        continue
      masked[start:start + B] = seen[k].masked
      for i in range(start, start + B):
        if not masked[i]:
          continue
        weight = token_weight[n, g, i] / len(seen)
        shown = [response[j] for j in range(i + 1, start + B)
                 if not seen[k].masked[j - start]]
        if not nothing and (config.positions != 'nothing_right' or not shown):
          kl[i] = weight
        elif nothing or config.elsewhere != 'none':
          nats[i] = weight
        if config.positions == 'corrected' and batch['is_answer'][n, g, i]:
          answer = [response[j] for j in range(i + 1, start + B)
                    if not seen[k].masked[j - start]
                    and batch['is_answer'][n, g, j]]
          excluded[i, [t for t in answer if t in CANDIDATES]] = True
    for i in range(LENGTH):
      if k == 0 and not nothing:
        seed = canvas.shifted and i % B == 0
        clean_kl[i] = token_weight[n, g, i] * (1 if seed else config.ar_weight)
    clean_read = np.array([p - 1, *range(P, P + LENGTH - 1)])
    noisy_read = P + LENGTH + np.arange(LENGTH) - canvas.shifted
    for name, value in (
        ('tokens', np.concatenate([
            batch['prompt'][n], response,
            np.where(masked, V.mask_id, response)])),
        ('positions', np.where(place < 0, index, p + place)),
        ('mask', (see & ~padding) | np.eye(width, dtype=bool)),
        ('causal', (np.tril(np.ones((width, width), bool)) & ~padding
                    | np.eye(width, dtype=bool))[:P + LENGTH, :P + LENGTH]),
        ('clean_read', clean_read), ('noisy_read', noisy_read),
        ('clean_kl', clean_kl), ('noisy_kl', kl), ('nats', nats),
        ('excluded', excluded), ('response', response)):
      out[name].append(value)
  # A shifted seed is never masked, so its noisy read does not matter.
  return {k: np.array(v) for k, v in out.items()} | {
      'total': token_weight.sum(), 'reverse': config.divergence == 'reverse'}


@functools.partial(jax.jit, static_argnums=(1, 3))
def dense_loss_and_grad(params, config, teacher, teacher_config, rows):

  def states(params, config, tokens, positions, mask):
    return jax.vmap(functools.partial(reference.hidden, params, config))(
        tokens, positions, mask)

  def scores(params, config, states, read):
    return reference.logits(
        params, config, jnp.take_along_axis(states, read[..., None], 1))

  clean = rows['causal'].shape[-1]
  taught = scores(teacher, teacher_config, states(
      teacher, teacher_config, rows['tokens'][:, :clean],
      rows['positions'][:, :clean], rows['causal']), rows['clean_read'])
  column = jnp.searchsorted(ALLOWED, rows['response'])[..., None]

  def loss(params):
    total = 0.
    hidden = states(params, config, rows['tokens'], rows['positions'],
                    rows['mask'])
    for part, excluded in (('clean', False), ('noisy', rows['excluded'])):
      student = jax.nn.log_softmax(
          scores(params, config, hidden, rows[part + '_read'])[..., ALLOWED])
      p = jax.nn.softmax(
          jnp.where(excluded, -jnp.inf, taught)[..., ALLOWED])
      # Only forward divergences meet p = 0 here.
      log_p = jnp.where(p > 0, jnp.log(jnp.where(p > 0, p, 1)), 0)
      forward = (p * (log_p - student)).sum(-1)
      reverse = (jnp.exp(student) * (student - log_p)).sum(-1)
      total += (rows[part + '_kl'] * jnp.where(
          rows['reverse'], reverse, forward)).sum()
    # Only `noisy` rows have cross-entropies: p and student are theirs.
    nats = -jnp.take_along_axis(student, column, -1)[..., 0]
    return (total + (rows['nats'] * nats).sum()) / rows['total']

  return jax.value_and_grad(loss)(params)


def config_of(**changes):
  return distillation.DistillationConfig(**{**dict(
      positions='all', elsewhere='none', reasoning_weight=.4,
      answer_weight=1.5), **changes})


@pytest.mark.parametrize('canvas, config', [
    (SHIFTED, config_of()),  # the paper's
    (SHIFTED, config_of(positions='nothing_right', elsewhere='cross_entropy',
                        ar_weight=.3, head_chunk=5)),
    (SHIFTED, config_of(divergence='none', elsewhere='cross_entropy')),
    (SHIFTED, config_of(positions='corrected')),
    (canvas_lib.CanvasConfig(B, 'block_causal'),
     config_of(elsewhere='cross_entropy')),
    (SAME, config_of(divergence='reverse', positions='nothing_right',
                     elsewhere='cross_entropy', ar_weight=.3)),
])
def test_loss_and_gradient_equal_dense_rows(canvas, config):
  model, params, teacher, batch, steps = problem(canvas)
  rows = dense_rows(batch, steps, canvas, config)
  assert rows['excluded'].any() == (config.positions == 'corrected')
  want, want_grad = dense_loss_and_grad(
      params, model.config, teacher, model.config, rows)
  head = {k: v for k, v in teacher.items() if k != 'layers'}
  got, got_grad = loss_and_grad(model, params, batch, canvas, config, head)
  assert got == pytest.approx(float(want), rel=1e-4)
  assert max(np.abs(x).max() for x in jax.tree.leaves(want_grad)) > .1
  jax.tree.map(lambda a, b: np.testing.assert_allclose(
      a, b, rtol=1e-3, atol=1e-4), got_grad, want_grad)


def test_a_teacher_of_another_size_equals_dense_rows():
  model, params, _, batch, steps = problem(SHIFTED)
  config = config_of(positions='nothing_right', elsewhere='cross_entropy')
  large, teacher = tiny.model(width=40, num_layers=3, head_dim=8, mlp_dim=48,
                              tie_embeddings=True)
  batch = batch | {'teacher_states': clean_states(large, teacher, batch)}
  want, want_grad = dense_loss_and_grad(
      params, model.config, teacher, large.config,
      dense_rows(batch, steps, SHIFTED, config))
  head = {k: v for k, v in teacher.items() if k != 'layers'}
  got, got_grad = loss_and_grad(
      model, params, batch, SHIFTED, config, head, large)
  assert got == pytest.approx(float(want), rel=1e-4)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(
      a, b, rtol=1e-3, atol=1e-4), got_grad, want_grad)


def test_own_clean_stream_teaches_like_a_checkpoint_of_the_same_weights():
  model, params, _, batch, _ = problem(SHIFTED)
  config = config_of(positions='nothing_right', elsewhere='cross_entropy',
                     ar_weight=.3, head_chunk=5)
  own = {k: v for k, v in batch.items() if k != 'teacher_states'}
  frozen = batch | {'teacher_states': clean_states(model, params, batch)}
  head = {k: v for k, v in params.items() if k != 'layers'}
  got = loss_and_grad(model, params, own, SHIFTED, config)
  want = loss_and_grad(model, params, frozen, SHIFTED, config, head)
  assert want[0] > .1
  jax.tree.map(lambda a, b: np.testing.assert_allclose(
      a, b, rtol=1e-4, atol=1e-5), got, want)


def test_banned_tokens_in_the_text_leave_no_nan():
  model, params, teacher, batch, _ = problem(SHIFTED)
  config = config_of(positions='nothing_right', elsewhere='cross_entropy',
                     ar_weight=.3, head_chunk=5)
  stands = np.arange(LENGTH) < batch['response_length'][..., None]
  batch = batch | {
      'response': np.where(stands, batch['response'], V.mask_id),
      'prompt': np.where(np.arange(P) == 1, 0, batch['prompt'])}
  head = {k: v for k, v in teacher.items() if k != 'layers'}
  got = loss_and_grad(model, params, batch, SHIFTED, config, head)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))


def test_one_random_step_is_all_steps_on_average():
  model, params, _, batch, _ = problem(SHIFTED)
  config = config_of(positions='nothing_right', elsewhere='cross_entropy')
  batch = {k: batch[k][:1] if k.startswith('prompt') else batch[k][:1, :1, :8]
           for k in ('prompt', 'prompt_length', 'response', 'is_answer')}
  batch['response_length'] = np.array([[8]])
  call = np.array([[[0, 2, 1, 3, 4, 6, 5, 6]]])  # three steps, then two
  steps = replay_lib.replay(call, SHIFTED, 5)
  loss = jax.jit(lambda canvases: distillation.loss(
      model, params, batch | canvases, SHIFTED, config, V, None, CANDIDATES
      )[0].value)

  def chosen(indices, weight):
    return {'owner': steps.owner, 'first': steps.first,
            'start': steps.start[..., indices],
            'masked': steps.masked[:, :, indices], 'weight': weight}

  blocks = [np.flatnonzero(steps.start[0, 0] == start) for start in (0, 4)]
  assert list(map(len, blocks)) == [3, 2]
  losses = [loss(chosen(list(pair), np.ones((1, 1, 2), np.float32)))
            for pair in itertools.product(*blocks)]
  assert np.std(losses) > .01
  assert np.mean(losses) == pytest.approx(
      float(loss(chosen(np.arange(5), steps.weight))), rel=1e-4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([10, 11, 12, 30]), st.booleans()),
                min_size=5, max_size=5))
def test_revealed_to_the_right(board):
  tokens, masked = map(np.array, zip(*board))
  got = distillation.revealed_to_the_right(tokens, masked, (10, 11, 12))
  assert np.asarray(got).tolist() == [
      [(t, False) in board[i + 1:] for t in (10, 11, 12)] for i in range(5)]


def nats(p, q):
  return sum(a * np.log(a / b) for a, b in zip(p, q))


TAUGHT = np.array([.5, .05, .2, .1, .15])
LEARNT = np.array([.1, .15, .3, .25, .2])


@pytest.mark.parametrize('kind', ['forward', 'reverse'])
@pytest.mark.parametrize('top_k, teacher, student', [
    (0, TAUGHT, LEARNT), (7, TAUGHT, LEARNT),
    (6, TAUGHT, LEARNT),  # more than can be drawn
    # Ids 0, 2, 4 and one bucket for 1 and 3.
    (3, [.5, .2, .15, .15], [.1, .3, .2, .4]),
])
def test_divergence_and_its_gradient_by_hand(kind, top_k, teacher, student):
  """Two banned ids, -inf on both sides, lie before and among the others."""
  at = np.array([1, 2, 3, 5, 6])
  given_ = jnp.full(7, -jnp.inf).at[at].set(np.log(TAUGHT))

  def value(logits):
    learnt = jax.nn.log_softmax(jnp.full(7, -jnp.inf).at[at].set(logits))
    return distillation.divergence(given_[None], learnt[None], kind, top_k)[0]

  got, grad = jax.value_and_grad(value)(jnp.log(LEARNT))
  pair = (teacher, student) if kind == 'forward' else (student, teacher)
  assert got == pytest.approx(nats(*pair), abs=2e-5)
  # d/dlogits through softmax q, with buckets' log ratios given to members.
  if top_k == 3:
    member = np.array([0, 3, 1, 3, 2])
    teacher, student = np.array(teacher), np.array(student)
  else:
    member = np.arange(5)
  if kind == 'forward':
    want = LEARNT * (1 - (teacher / student)[member])
  else:
    gap = np.log(student / teacher)[member]
    want = LEARNT * (gap - (LEARNT * gap).sum())
  np.testing.assert_allclose(grad, want, atol=2e-5)


def test_an_excluded_token_costs_a_bounded_number_of_nats():
  taught = jnp.array([[.25, .75, 0.]])
  learnt = jnp.array([[.25, .5, .25]])
  forward, reverse = (distillation.divergence(
      jnp.log(taught), jnp.log(learnt), kind, 0)[0]
                      for kind in ('forward', 'reverse'))
  assert forward == pytest.approx(.75 * np.log(1.5))
  assert reverse == pytest.approx(
      .5 * np.log(2 / 3) + .25 * (np.log(.25) + 50), rel=1e-5)


def test_gradient_needs_no_logits_of_all_rows():
  """[N, T, V] of float32 would be 46 MB, of the masked rows alone 35."""
  size, m, length = 20000, 18, 24
  config = transformer.ModelConfig(
      vocab_size=size, num_layers=1, width=8, num_heads=2, num_kv_heads=1,
      head_dim=4, mlp_dim=16)
  vocabulary = vocabulary_lib.Vocabulary(size, size - 1, 1, (0, size - 1))
  params = jax.eval_shape(
      lambda: transformer.init(config, jax.random.key(0)))
  f32, i32 = jnp.float32, jnp.int32
  batch = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape, dtype in (
      ('prompt', (2, 4), i32), ('prompt_length', (2,), i32),
      ('response', (2, 4, length), i32), ('response_length', (2, 4), i32),
      ('is_answer', (2, 4, length), bool), ('owner', (2, 4), i32),
      ('first', (2, 4), i32), ('start', (2, 4, m), i32),
      ('masked', (2, 4, m, B), bool), ('weight', (2, 4, m), f32),
      ('teacher_states', (2, 4, length, 8), f32))}
  whole = 2 * 4 * m * B * size * 4
  temporary = {}
  for chunk in (0, 4):
    grad = jax.grad(lambda params, batch, head: distillation.loss(
        transformer.Transformer(config), params, batch, SHIFTED,
        config_of(head_chunk=chunk), vocabulary, head, CANDIDATES)[0].value)
    head = {k: v for k, v in params.items() if k != 'layers'}
    temporary[chunk] = jax.jit(grad).lower(params, batch, head).compile(
        ).memory_analysis().temp_size_in_bytes
  assert temporary[4] < whole / 4 < whole < temporary[0]


def test_candidates_may_be_left_out():
  """The JSON form has no candidate tokens, and only 'corrected' reads them."""
  model, params, teacher, batch, _ = problem(SHIFTED)
  head = {k: v for k, v in teacher.items() if k != 'layers'}
  loss, _ = jax.eval_shape(lambda: distillation.loss(
      model, params, batch, SHIFTED, config_of(), V, head))
  assert loss.total.shape == ()


def test_config_names_the_field():
  for field in ('divergence', 'positions', 'elsewhere'):
    with pytest.raises(ValueError, match=f"{field}='some'"):
      dataclasses.replace(config_of(), **{field: 'some'})


@pytest.mark.parametrize('config, own, message', [
    (config_of(), True, 'block_causal'),
    (config_of(ar_weight=.5), False, 'block_causal'),
    (config_of(positions='corrected'), False, 'candidate_ids')])
def test_what_a_clean_stream_cannot_teach_is_an_error(config, own, message):
  model, params, teacher, batch, _ = problem(SHIFTED)
  batch = {k: v for k, v in batch.items() if not own or k != 'teacher_states'}
  with pytest.raises(ValueError, match=message):
    distillation.loss(
        model, params, batch, canvas_lib.CanvasConfig(B, 'block_causal'),
        config, V, teacher)
