"""Tests of the schedule and of the weight-decay mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgr2_jax.training import optimizer
from tests.training import toy_run


def test_learning_rate():
  rate = optimizer.learning_rate(toy_run.get_config(steps=10, warmup_steps=4))
  rates = np.array([rate(i) for i in range(11)]) / 5e-2
  np.testing.assert_allclose(rates[:5], [.25, .5, .75, 1., 1.], rtol=1e-6)
  np.testing.assert_allclose(rates[7], .5, rtol=1e-6)
  np.testing.assert_allclose(rates[10], 0., atol=1e-7)
  rate = optimizer.learning_rate(toy_run.get_config(schedule='constant',
                                               warmup_steps=0))
  assert rate(0) == rate(19) == pytest.approx(5e-2)
  with pytest.raises(ValueError, match="'linear'.*'cosine'"):
    optimizer.learning_rate(toy_run.get_config(schedule='linear'))


def test_decay_leaves_norms_biases_and_vectors_alone():
  shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
  params = {'layers': {'query': shape(2, 8, 4, 2), 'query_bias': shape(2, 4, 2),
                       'mlp_norm': shape(2, 8), 'scale': shape(2, 8)},
            'embedding': shape(16, 8), 'vector': shape(8)}
  assert optimizer.decayed(params) == {
      'layers': {'query': True, 'query_bias': False, 'mlp_norm': False,
                 'scale': False}, 'embedding': True, 'vector': False}
