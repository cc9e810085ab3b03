"""Attention to prompts on NVIDIA GPUs: cuDNN's flash attention, by JAX.

It takes float16 and bfloat16, key heads fewer than query heads, and lengths as
they are. `jax.nn.dot_product_attention` returns cuDNN's log-sum-exp rounded to
the dtype of the queries: in bfloat16 a log-sum-exp of 8 is off by up to 1/32,
and so is every weight that `attention.merge` makes of it. The function beneath,
which this module calls for it, has it in float32.

On CPUs JAX's own reference of the same call computes, for tests.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dgr2_jax.models import partition

# Of a row whose prompt is empty, so that `attention.merge` gives it no weight.
_EMPTY = -2e38


def installed() -> bool:
  """Whether JAX finds cuDNN, which it does with its CUDA plugin alone."""
  try:
    _beneath().check_cudnn_version()
  except (ImportError, RuntimeError):
    return False
  return True


def attend(query: jax.Array, key: jax.Array, value: jax.Array,
           length: jax.Array, causal: bool = False) -> jax.Array:
  """See `kernels.Kernel`."""
  return _checked(
      jax.nn.dot_product_attention, query, key, value, scale=1.,
      is_causal=causal, key_value_seq_lengths=jnp.maximum(length, 1),
      implementation='xla' if partition.platform() == 'cpu' else 'cudnn')


def with_log_sum_exp(query: jax.Array, key: jax.Array, value: jax.Array,
                     length: jax.Array) -> tuple[jax.Array, jax.Array]:
  """See `kernels.Kernel`."""
  some = jnp.maximum(length, 1)  # A softmax over no key is not defined.
  if partition.platform() == 'cpu':
    out, log_sum_exp = jax.nn.dot_product_attention(
        query, key, value, scale=1., key_value_seq_lengths=some,
        implementation='xla', return_residual=True)
  else:
    out, log_sum_exp = _checked(
        lambda *x: _beneath().dot_product_attention(
            *x, q_seqlen=jnp.full_like(some, query.shape[1]), kv_seqlen=some,
            scale=1., mask_type=_beneath().MaskType.PADDING,
            return_residual=True), query, key, value)
    log_sum_exp = jnp.swapaxes(log_sum_exp, 1, 2)  # it is [N, H, T]
  return out, jnp.where((length > 0)[:, None, None],
                        log_sum_exp.astype(jnp.float32), _EMPTY)


def _beneath():
  """What `jax.nn.dot_product_attention` calls; private, as jax 0.10 has it."""
  from jax._src.cudnn import fused_attention_stablehlo

  return fused_attention_stablehlo


def _checked(function, *args, **kwargs):
  """Its result; what keeps cuDNN from it in words of the config.

  Raises:
    ValueError: no cuDNN, or it does not take this on this GPU.
  """
  try:
    return function(*args, **kwargs)
  except (ImportError, NotImplementedError, RuntimeError) as e:
    raise ValueError(
        f"model.attention='cudnn' does not run here: {e} A GPU takes the "
        "extra 'cuda' (pip install -e '.[cuda]'); xla runs everywhere.") from e
