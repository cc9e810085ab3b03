"""The transformer against a plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgr2_jax.models import attention as attention_lib
from dgr2_jax.models import transformer
from tests.models import reference
from tests.models import tiny


def causal(query, key, value, cache):
  del cache
  t = query.shape[1]
  visible = jnp.tril(jnp.ones((t, t), bool))[None, None, None]
  out = attention_lib.attend(
      query[:, None, None], [attention_lib.Part(key, value, visible)])
  return out.reshape(query.shape), None


@pytest.mark.parametrize('changes', [
    dict(),  # Qwen3, tied
    dict(tie_embeddings=False, num_kv_heads=4, head_dim=8),
    dict(qk_norm=False, attention_bias=True),  # Qwen2
    dict(qk_norm=False, num_kv_heads=1),  # Llama
    dict(unroll_layers=True, remat='full'),
])
def test_equals_plain_transformer(changes):
  model, params = tiny.model(**changes)
  tokens = tiny.batch()['prompt']
  t = tokens.shape[1]
  positions = jnp.broadcast_to(jnp.arange(t) + 5, tokens.shape)
  hidden, _ = model.apply({'params': params}, tokens, positions, causal,
                          method='hidden')
  logits = model.apply({'params': params}, hidden, method='logits')
  for row in range(len(tokens)):
    want = reference.hidden(
        params, model.config, tokens[row], positions[row],
        jnp.tril(jnp.ones((t, t), bool)))
    np.testing.assert_allclose(hidden[row], want, atol=2e-5)
    np.testing.assert_allclose(
        logits[row], reference.logits(params, model.config, want), atol=1e-4)


def test_remat_policies_give_equal_gradients():
  batch = tiny.batch()

  def gradient(**changes):
    model, params = tiny.model(**changes)
    positions = jnp.broadcast_to(jnp.arange(9), batch['prompt'].shape)

    def loss(params):
      hidden, _ = model.apply({'params': params}, batch['prompt'], positions,
                              causal, method='hidden')
      return (hidden ** 3).sum()

    return jax.jit(jax.grad(loss))(params)

  want = gradient()
  for remat in ('full', 'dots'):
    # Small entries of a gradient in the thousands are no better than float32
    # makes its large ones: four units in their last place.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(
        a, b, rtol=2e-4, atol=5e-7 * np.abs(b).max()),
                 gradient(remat=remat), want)


@pytest.mark.parametrize('changes, message', [
    (dict(num_heads=3), 'num_kv_heads'), (dict(head_dim=5), 'head_dim'),
    (dict(remat='some'), "remat='some'"),
])
def test_config_errors_name_the_field(changes, message):
  shape = dict(vocab_size=8, num_layers=1, width=8, num_heads=4,
               num_kv_heads=2, head_dim=4, mlp_dim=8)
  with pytest.raises(ValueError, match=message):
    transformer.ModelConfig(**{**shape, **changes})
