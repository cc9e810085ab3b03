"""A plain transformer over a dense mask, written apart from the package.

It reads the package's parameter tree and nothing else of it: one row of
tokens, one dense [T, T] mask, no cache, no parts, no chunks.
"""

import functools

import jax
import jax.numpy as jnp


def _norm(x, scale, eps):
  return x / jnp.sqrt((x ** 2).mean(-1, keepdims=True) + eps) * scale


def _rotate(x, positions, theta):
  """x [T, H, F]: pairs (i, i + F/2) turn by position * theta^(-2i/F)."""
  f = x.shape[-1]
  out = [None] * f
  for i in range(f // 2):
    angle = positions * theta ** (-2. * i / f)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    out[i] = x[..., i] * cos - x[..., i + f // 2] * sin
    out[i + f // 2] = x[..., i] * sin + x[..., i + f // 2] * cos
  return jnp.stack(out, -1)


@functools.partial(jax.jit, static_argnums=1)
def hidden(params, config, tokens, positions, mask):
  """Final states [T, D] of tokens [T] under a dense mask [T, T]."""
  x = params['embedding'][tokens]
  groups = config.num_heads // config.num_kv_heads
  for index in range(config.num_layers):
    w = jax.tree.map(lambda a: a[index], params['layers'])
    y = _norm(x, w['attention_norm'], config.norm_eps)
    q, k, v = (jnp.tensordot(y, w[name], 1)
               for name in ('query', 'key', 'value'))
    if config.attention_bias:
      q, k, v = q + w['query_bias'], k + w['key_bias'], v + w['value_bias']
    if config.qk_norm:
      q = _norm(q, w['query_norm'], config.norm_eps)
      k = _norm(k, w['key_norm'], config.norm_eps)
    q = _rotate(q, positions, config.rope_theta)
    k = _rotate(k, positions, config.rope_theta)
    heads = []
    for h in range(config.num_heads):
      score = q[:, h] @ k[:, h // groups].T / config.head_dim ** .5
      score = jnp.where(mask, score, -jnp.inf)
      heads.append(jax.nn.softmax(score, -1) @ v[:, h // groups])
    x = x + jnp.einsum('thf,hfd->td', jnp.stack(heads, 1), w['out'])
    y = _norm(x, w['mlp_norm'], config.norm_eps)
    gate = y @ w['gate']
    x = x + (gate * jax.nn.sigmoid(gate) * (y @ w['up'])) @ w['down']
  return _norm(x, params['final_norm'], config.norm_eps)


def logits(params, config, states):
  head = params['embedding'].T if config.tie_embeddings else params['head']
  return states @ head


def causal_logprobs(params, config, banned, prompt, response):
  """log p(response token | prompt, response before) of one row, [L]."""
  tokens = jnp.concatenate([prompt, response])
  t = len(tokens)
  states = hidden(params, config, tokens, jnp.arange(t),
                  jnp.tril(jnp.ones((t, t), bool)))
  scores = logits(params, config, states)
  scores = scores.at[:, jnp.array(banned)].set(-jnp.inf)
  logprobs = jax.nn.log_softmax(scores)[len(prompt) - 1:-1]
  return logprobs[jnp.arange(len(response)), response], logprobs
