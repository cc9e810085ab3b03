"""A Qwen3-style decoder whose attention rule is an argument.

    tokens -> embed -> [ x + attention(norm(x)); x + SwiGLU(norm(x)) ] x layers
           -> norm -> head

The module knows nothing of blocks: `attention(query, key, value, cache)` is
handed in, so that training on a canvas, prefilling a prompt and decoding a
block are the same layers. Switches cover Qwen3 (q/k norm), Qwen2 (attention
bias) and Llama (neither).
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dgr2_jax.models import attention as attention_lib
from dgr2_jax.models import partition

# (query [N, T, H, F], key [N, T, Hkv, F], value, cache) -> (out, emitted)
Attention = Callable[[jax.Array, jax.Array, jax.Array, Any],
                     tuple[jax.Array, Any]]

# Parameter path -> sharding. The first dimension of layers/* is the layer.
RULES = (
    (r'embedding$', P('tensor', 'fsdp')),
    (r'head$', P('fsdp', 'tensor')),
    (r'layers/(query|key|value)$', P(None, 'fsdp', 'tensor', None)),
    (r'layers/(query|key|value)_bias$', P(None, 'tensor', None)),
    (r'layers/out$', P(None, 'tensor', None, 'fsdp')),
    (r'layers/(gate|up)$', P(None, 'fsdp', 'tensor')),
    (r'layers/down$', P(None, 'tensor', 'fsdp')),
    # Adapters: A as the inputs of its matrix, B as the outputs.
    (r'layers/(query|key|value|gate|up)_lora_a$', P(None, 'fsdp')),
    (r'layers/(query|key|value|gate|up)_lora_b$', P(None, None, 'tensor')),
    (r'layers/(out|down)_lora_a$', P(None, 'tensor')),
    (r'layers/(out|down)_lora_b$', P(None, None, 'fsdp')),
)

_REMAT_POLICIES = {
    'full': jax.checkpoint_policies.nothing_saveable,
    'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Shape of the decoder.

  Attributes:
    vocab_size: rows of the embedding, padding included.
    rope_theta: base of the rotary frequencies.
    qk_norm: RMSNorm per head on queries and keys before RoPE (Qwen3).
    attention_bias: biases on query, key and value (Qwen2).
    dtype: of activations; parameters are kept in `param_dtype`.
    remat: 'none', 'full' (recompute each layer) or 'dots' (keep matmuls).
    unroll_layers: no while loop over layers; for FLOP counts, and faster for
      small models on CPUs. Same parameters either way.
    canvas_chunk: block canvases of every response attended at a time; by XLA
      then clean responses one by one, and prompts 256 tokens at a time. 0 is
      all at once.
    attention: what computes attention to prompts: 'xla', 'splash' (a kernel
      for TPUs), 'cudnn' (for GPUs) or 'auto', see `attention.choose`.
  """
  vocab_size: int
  num_layers: int
  width: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  rope_theta: float = 1e6
  norm_eps: float = 1e-6
  qk_norm: bool = True
  attention_bias: bool = False
  tie_embeddings: bool = True
  dtype: str = 'float32'
  param_dtype: str = 'float32'
  remat: str = 'none'
  unroll_layers: bool = False
  canvas_chunk: int = 0
  attention: str = 'xla'

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
          f'model.num_heads={self.num_heads} is not a multiple of '
          f'model.num_kv_heads={self.num_kv_heads}')
    if self.head_dim % 2:
      raise ValueError(f'model.head_dim={self.head_dim} must be even (RoPE)')
    if self.remat != 'none' and self.remat not in _REMAT_POLICIES:
      raise ValueError(
          f'model.remat={self.remat!r}: expected none, '
          + ', '.join(_REMAT_POLICIES))
    attention_lib.check(self.attention, self.head_dim, self.dtype)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """x / rms(x) * scale over the last axis, computed in float32."""
  y = x.astype(jnp.float32)
  y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + eps)
  return (y * scale).astype(x.dtype)


class Rotation(NamedTuple):
  """cos and sin of the rotary angles, float32 [N, T, 1, F/2] each."""
  cos: jax.Array
  sin: jax.Array


def rotation(positions: jax.Array, head_dim: int, theta: float) -> Rotation:
  """Rotary angles of int positions [N, T] (Su et al., 2104.09864).

  Args:
    positions: int [N, T].
    head_dim: F.
    theta: base of the frequencies.
  """
  half = head_dim // 2
  frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = positions[..., None, None].astype(jnp.float32) * frequency
  return Rotation(jnp.cos(angle), jnp.sin(angle))


def rope(x: jax.Array, by: Rotation) -> jax.Array:
  """Heads x [N, T, H, F] with their two halves rotated against each other."""
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate(
      [a * by.cos - b * by.sin, b * by.cos + a * by.sin], -1).astype(x.dtype)


class Layer(nn.Module):
  """Pre-norm attention and SwiGLU; one step of the scan over layers."""
  config: ModelConfig
  attention: Attention

  @nn.compact
  def __call__(self, x, cache, angles):
    c = self.config
    dtype = jnp.dtype(c.dtype)

    def weight(name, shape, fan_in):
      init = nn.initializers.normal(fan_in ** -0.5)
      value = self.param(name, init, shape, jnp.dtype(c.param_dtype))
      if self.has_variable('params', f'{name}_lora_a'):  # training/lora.py
        value += jnp.tensordot(*(self.get_variable('params', f'{name}_lora_{x}')
                                 for x in 'ab'), axes=1)
      return partition.gathered(value.astype(dtype), f'layers/{name}', RULES)

    def norm(name, x):
      scale = self.param(name, nn.initializers.ones, (x.shape[-1],),
                         jnp.dtype(c.param_dtype))
      return rms_norm(x, scale, c.norm_eps)

    y = norm('attention_norm', x)
    heads = {'query': c.num_heads, 'key': c.num_kv_heads,
             'value': c.num_kv_heads}
    projected = {}
    for name, count in heads.items():
      z = jnp.einsum('ntd,dhf->nthf', y,
                     weight(name, (c.width, count, c.head_dim), c.width))
      if c.attention_bias:
        z += self.param(f'{name}_bias', nn.initializers.zeros,
                        (count, c.head_dim),
                        jnp.dtype(c.param_dtype)).astype(dtype)
      if c.qk_norm and name != 'value':
        z = norm(f'{name}_norm', z)
      if name != 'value':
        z = rope(z, angles)
      projected[name] = partition.batched(z, 'tensor', None)
    out, emitted = self.attention(**projected, cache=cache)
    # Residual branches start small: 1/sqrt(2 * layers), as in GPT-2.
    depth = 2 * c.num_layers
    x += jnp.einsum('nthf,hfd->ntd', out, weight(
        'out', (c.num_heads, c.head_dim, c.width),
        c.num_heads * c.head_dim * depth))
    y = norm('mlp_norm', x)
    gate = jnp.einsum('ntd,de->nte', y,
                      weight('gate', (c.width, c.mlp_dim), c.width))
    up = jnp.einsum('ntd,de->nte', y,
                    weight('up', (c.width, c.mlp_dim), c.width))
    y = partition.batched(nn.silu(gate) * up, 'tensor')
    x += jnp.einsum('nte,ed->ntd', y, weight(
        'down', (c.mlp_dim, c.width), c.mlp_dim * depth))
    return partition.batched(x), emitted


class Transformer(nn.Module):
  """Embedding, layers, final norm and head; see `hidden` and `logits`."""
  config: ModelConfig

  def setup(self):
    c = self.config
    param_dtype = jnp.dtype(c.param_dtype)
    self.embedding = self.param(
        'embedding', nn.initializers.normal(0.02 if c.tie_embeddings else 1.),
        (c.vocab_size, c.width), param_dtype)
    self.final_norm = self.param(
        'final_norm', nn.initializers.ones, (c.width,), param_dtype)
    if not c.tie_embeddings:
      self.head = self.param(
          'head', nn.initializers.normal(c.width ** -0.5),
          (c.width, c.vocab_size), param_dtype)

  @nn.compact
  def hidden(self, tokens: jax.Array, positions: jax.Array,
             attention: Attention, cache: Any = None) -> tuple[jax.Array, Any]:
    """Final hidden states and what `attention` emitted in every layer.

    Args:
      tokens: int [N, T].
      positions: int [N, T], for RoPE.
      attention: the visibility rule, see `Attention`.
      cache: a tree whose leaves have a leading layer axis, handed to
        `attention` layer by layer; or None.

    Returns:
      [N, T, D] after the final norm, and the emitted trees stacked by layer.
    """
    c = self.config
    layer = Layer
    if c.remat != 'none':
      layer = nn.remat(layer, policy=_REMAT_POLICIES[c.remat],
                       prevent_cse=False)
    layers = nn.scan(
        layer, variable_axes={'params': 0}, split_rngs={'params': True},
        in_axes=(0, nn.broadcast), out_axes=0, length=c.num_layers,
        unroll=c.num_layers if c.unroll_layers else 1)
    x = partition.lookup(self.embedding, tokens).astype(jnp.dtype(c.dtype))
    angles = rotation(positions, c.head_dim, c.rope_theta)  # one for all layers
    x, emitted = layers(c, attention, name='layers')(x, cache, angles)
    return rms_norm(x, self.final_norm, c.norm_eps), emitted

  def logits(self, hidden: jax.Array) -> jax.Array:
    """float32 [..., V] of hidden states [..., D]."""
    name = 'embedding' if self.config.tie_embeddings else 'head'
    head = partition.gathered(
        getattr(self, name).astype(hidden.dtype), name, RULES)
    return partition.batched(jnp.einsum(
        '...d,dv->...v', hidden,
        head.T if self.config.tie_embeddings else head,
        preferred_element_type=jnp.float32), 'tensor')


def init(config: ModelConfig, key: jax.Array) -> Any:
  """Random parameters."""
  tokens = jnp.zeros((1, 1), jnp.int32)

  def attention(query, key, value, cache):
    del key, value, cache
    return query, None

  return Transformer(config).init(
      key, tokens, tokens, attention, method='hidden')['params']


def abstract_params(config: ModelConfig) -> Any:
  """Shapes and dtypes of the parameters."""
  return jax.eval_shape(functools.partial(init, config), jax.random.key(0))
