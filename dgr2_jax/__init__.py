"""Diffusion-GR2 in JAX: block-diffusion generative re-ranking.

`Reranker` answers a `Request` with a `Reranking`, or raises `RequestError`;
`python -m dgr2_jax.main` trains one.
"""

import importlib

_WHERE = {'Request': 'prompting', 'RequestError': 'prompting',
          'Reranker': 'reranker', 'Reranking': 'reranker'}
__all__ = list(_WHERE)


def __getattr__(name: str):
  # Loaded when asked for: JAX is slow to import, and commands check their
  # flags first.
  if name in _WHERE:
    return getattr(
        importlib.import_module(f'dgr2_jax.serving.{_WHERE[name]}'), name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
