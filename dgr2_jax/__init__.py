"""Diffusion-GR2 in JAX: block-diffusion generative re-ranking.

`Reranker` and `Request` answer requests with a trained model; `python -m
dgr2_jax.main` trains one.
"""

import importlib

__all__ = ['Request', 'Reranker']


def __getattr__(name: str):
  # Loaded when asked for: JAX is slow to import, and commands check their
  # flags first.
  if name in __all__:
    return getattr(importlib.import_module('dgr2_jax.serving.reranker'), name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
