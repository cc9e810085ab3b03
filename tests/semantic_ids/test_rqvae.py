"""Tests of the quantiser, its gradients and its codebooks' rules."""

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from dgr2_jax.semantic_ids import rqvae

N, E, D, L, K = 12, 6, 4, 3, 5


def config(**changes):
  return rqvae.RqVaeConfig(
      levels=L, codes=K, seed=0, **{'hidden': (8,), 'latent': D, **changes})


def drawn(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def brute_force(latent, codebooks):
  """Codes and residuals, one item, level and code at a time."""
  codes = np.zeros((len(latent), len(codebooks)), int)
  residuals = np.zeros((*codes.shape, latent.shape[1]))
  for i, residual in enumerate(latent.astype(np.float64)):
    for level, table in enumerate(codebooks.astype(np.float64)):
      residuals[i, level] = residual
      codes[i, level] = min(
          range(len(table)), key=lambda k: np.sum((residual - table[k]) ** 2))
      residual = residual - table[codes[i, level]]
  return codes, residuals


def test_quantisation_is_that_of_brute_force():
  latent, codebooks = drawn(200, D), drawn(L, 7, D, seed=1)
  found = rqvae.quantise(latent, codebooks)
  codes, residuals = brute_force(latent, codebooks)
  np.testing.assert_array_equal(found.codes, codes)
  np.testing.assert_allclose(found.residuals, residuals, atol=1e-5)
  np.testing.assert_allclose(found.chosen, codebooks[np.arange(L), codes])
  np.testing.assert_allclose(
      found.distances,
      ((residuals[:, :, None] - codebooks) ** 2).sum(-1), atol=1e-4)


def model_and_params(**changes):
  model = rqvae.RqVae(config(**changes), E)
  return model, jax.jit(model.init)(
      jax.random.key(1), jnp.zeros((1, E)))['params']


def gradient(**changes):
  """The loss's gradient on a batch, and that batch."""
  model, params = model_and_params(**changes)
  batch = drawn(N, E)
  batch /= np.linalg.norm(batch, axis=1, keepdims=True)
  grads = jax.jit(jax.grad(lambda p: rqvae.loss(model, p, batch)[0]))(params)
  return model, params, batch, grads


def test_gradients_go_straight_through():
  """The encoder's: pull q's gradient and the commitment's back from z."""
  model, params, batch, found = gradient(diversity_weight=0.)
  encode = lambda encoder: model.apply(
      {'params': {**params, 'encoder': encoder}}, batch, method='encode')
  latent, pull_back = jax.vjp(encode, params['encoder'])
  codes, residuals = brute_force(
      np.asarray(latent), np.asarray(params['codebooks']))
  rows = np.asarray(params['codebooks'])[np.arange(L), codes]

  def error(quantised, decoder):
    decoded = model.apply({'params': {**params, 'decoder': decoder}},
                          quantised, method='decode')
    return ((batch - decoded) ** 2).sum(-1).mean()

  at_q, decoder = jax.grad(error, argnums=(0, 1))(
      rows.sum(1), params['decoder'])
  # d/dz of the mean over N and D of sum_l |r_l - c|^2, dr_l/dz = 1.
  commitment = 2 * (residuals - rows).sum(1) / (N * D)
  expected, = pull_back(
      at_q + model.config.commitment_weight * commitment.astype(np.float32))
  for want, have in ((expected, found['encoder']), (decoder, found['decoder'])):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(
        a, b, rtol=1e-4, atol=1e-6), want, have)
  assert not np.asarray(found['codebooks']).any()  # averages move them


def test_gradient_codebooks_move_to_their_residuals():
  model, params, batch, found = gradient(codebook='gradient',
                                         diversity_weight=0.)
  latent = model.apply({'params': params}, batch, method='encode')
  codes, residuals = brute_force(
      np.asarray(latent), np.asarray(params['codebooks']))
  expected = np.zeros((L, K, D))
  for i in range(N):
    for level, code in enumerate(codes[i]):
      expected[level, code] += 2 * (
          params['codebooks'][level, code] - residuals[i, level]) / (N * D)
  np.testing.assert_allclose(
      found['codebooks'], expected, rtol=1e-4, atol=1e-6)


def test_diversity_is_zero_if_even_and_one_if_a_single_code_is_used():
  even = 100 * (1 - np.eye(K, dtype=np.float32))[:, None] + 1  # [K, 1, K]
  assert float(rqvae.diversity(even)) == pytest.approx(0, abs=1e-6)
  assert float(rqvae.diversity(even[:1])) == pytest.approx(1, abs=1e-6)
  # Of the scale of distances nothing depends.
  some = np.square(drawn(N, L, K)) + .1
  assert float(rqvae.diversity(some)) == pytest.approx(
      float(rqvae.diversity(100 * some)), rel=1e-4)
  slope = jax.jit(jax.grad(rqvae.diversity))
  for extreme in (0 * even, 1e4 * even - 1e4 + 1e-3):
    assert np.isfinite(slope(extreme)).all()


def test_averages_follow_a_numpy_reference():
  codebooks = drawn(L, K, D)
  usage = rqvae.initial_usage(jnp.asarray(codebooks))
  count, total = np.ones((L, K)), codebooks.astype(np.float64)
  idle, decay = np.zeros((L, K), int), .9
  for step in range(4):
    residuals = drawn(N, L, D, seed=step)
    codes = np.random.default_rng(step).integers(K - 1, size=(N, L))
    usage = rqvae.follow(usage, residuals, codes, decay)
    for level in range(L):
      for k in range(K):
        mine = residuals[codes[:, level] == k, level]
        count[level, k] = decay * count[level, k] + (1 - decay) * len(mine)
        total[level, k] = decay * total[level, k] + (1 - decay) * mine.sum(0)
        idle[level, k] = 0 if len(mine) else idle[level, k] + 1
  np.testing.assert_allclose(usage.count, count, rtol=1e-5)
  np.testing.assert_array_equal(usage.idle, idle)
  np.testing.assert_allclose(
      rqvae.averages(usage, codebooks), total / count[..., None], rtol=1e-4,
      atol=1e-5)
  # The last code was never chosen: it stays where it was.
  np.testing.assert_allclose(
      rqvae.averages(usage, codebooks)[:, -1], codebooks[:, -1], rtol=1e-5)
  forgotten = usage.replace(count=0 * usage.count, total=0 * usage.total)
  np.testing.assert_array_equal(
      rqvae.averages(forgotten, codebooks), codebooks)


@pytest.mark.parametrize('samples', [12, 2])
def test_dead_codes_take_the_worst_fitted_samples(samples):
  codebooks, residuals = drawn(L, K, D), drawn(samples, L, D, seed=1)
  errors = np.abs(drawn(samples, L, seed=2))
  idle = np.array([[0, 3, 0, 2, 5], [0] * 5, [7] * 5])
  usage = rqvae.initial_usage(jnp.asarray(codebooks) + 1).replace(
      count=jnp.full((L, K), 4.), idle=jnp.asarray(idle))
  found, after = rqvae.reset_dead(codebooks, usage, residuals, errors, after=3)
  for level in range(L):
    worst = list(np.argsort(-errors[:, level]))
    for k in range(K):
      if idle[level, k] >= 3 and worst:
        row = residuals[worst.pop(0), level]
        expected = row, 1, row, 0
      else:
        expected = (codebooks[level, k], 4, codebooks[level, k] + 1,
                    idle[level, k])
      for have, want in zip(
          (found, after.count, after.total, after.idle), expected):
        np.testing.assert_allclose(have[level, k], want, rtol=1e-6)


@pytest.mark.parametrize('field, value', [
    ('init', 'zeros'), ('codebook', 'fixed'), ('last_level', 'free'),
    ('schedule', 'linear'), ('latent', 0), ('hidden', ()), ('steps', 0),
    ('decay', 1.), ('reset_after', -1), ('diversity_weight', -.1)])
def test_bad_fields_are_named(field, value):
  with pytest.raises(ValueError, match=f'rqvae.{field} is .*expected'):
    config(**{field: value})


def test_config_of_a_section():
  section = ml_collections.ConfigDict(dict(
      levels=L, codes=K, svd_dim=2, seed=3,
      rqvae=dict(hidden=[8], steps=7, embeddings=dict(kind='tfidf'))))
  found = rqvae.RqVaeConfig.from_config(section)
  assert (found.levels, found.codes, found.seed) == (L, K, 3)
  assert found.hidden == (8,) and found.steps == 7
  section.rqvae.depth = 3
  with pytest.raises(ValueError, match='rqvae.depth is no field'):
    rqvae.RqVaeConfig.from_config(section)
