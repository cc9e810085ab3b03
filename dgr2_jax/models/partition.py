"""How a step's arrays lie on the mesh that is set (`jax.set_mesh`).

    activations   [N, ...]          requests over data and fsdp
    heads, mlp    [N, T, H, F]      heads or hidden width over tensor, too
    logits        [..., V]          vocabulary over tensor, too
    parameters    by a table        gathered along fsdp where they are used,
                                    but for the embedding: see `lookup`

Left alone, XLA's partitioner follows parameters that are split along D and
gathers the whole batch's activations. `training/sharding.py` makes the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
import re
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

AXES = ('data', 'fsdp', 'tensor')
BATCH_AXES = ('data', 'fsdp')

Rules = Sequence[tuple[str, P]]


def platform() -> str:
  """Of the mesh's devices, which need not be here; else JAX's default."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  name = device.platform if device else jax.default_backend()
  return 'gpu' if name in ('cuda', 'rocm') else name


def path_name(path: tuple[Any, ...]) -> str:
  """A key path as text: `params/layers/query`."""
  return '/'.join(jax.tree_util.keystr((key,), simple=True) for key in path)


def spec_of(name: str, rules: Rules) -> P:
  """The spec of the first rule whose pattern is found in a leaf's path."""
  for pattern, spec in rules:
    if re.search(pattern, name):
      return spec
  return P()


def fit(mesh: jax.sharding.AbstractMesh | jax.sharding.Mesh, spec: P,
        shape: tuple[int, ...], name: str = 'array') -> P:
  """`spec`, with dimensions that the mesh does not divide replicated.

  An array of one element, an optimizer's placeholder, always is.

  Raises:
    ValueError: `spec` has more dimensions than `shape`; names `name`.
  """
  if math.prod(shape) == 1:
    return P()
  if len(spec) > len(shape):
    raise ValueError(f'The sharding rule for {name} has {len(spec)} '
                     f'dimensions; the array has {len(shape)}.')
  fitted = []
  for size, axes in zip(shape, spec):
    names = (axes,) if isinstance(axes, str) else axes or ()
    parts = math.prod(mesh.shape[axis] for axis in names)
    fitted.append(axes if size % parts == 0 else None)
  return P(*fitted)


def constrain(x: jax.Array, *spec: str | tuple[str, ...] | None) -> jax.Array:
  """`x`, split as `spec` says where a mesh of several devices is set."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return x
  return jax.lax.with_sharding_constraint(x, fit(mesh, P(*spec), x.shape))


def batched(x: jax.Array, *rest: str | None) -> jax.Array:
  """Activations [N, ...], with `rest` the axes of their last dimensions."""
  return constrain(
      x, BATCH_AXES, *(None,) * (x.ndim - 1 - len(rest)), *rest)


def placed(tree: Any, rules: Rules) -> Any:
  """A tree of parameters, or of what is shaped like them, by the table."""
  return jax.tree.map_with_path(
      lambda path, x: constrain(x, *spec_of(path_name(path), rules)), tree)


def whole(rules: Rules, axis: str = 'fsdp') -> Rules:
  """The table without an axis: parameters are whole along it."""
  return tuple((pattern, P(*(None if a == axis else a for a in spec)))
               for pattern, spec in rules)


def gathered(x: jax.Array, name: str, rules: Rules) -> jax.Array:
  """A parameter, or one layer's part of it, whole along fsdp."""
  spec = spec_of(name, whole(rules))
  return constrain(x, *spec[len(spec) - x.ndim:])


def lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
  """Rows of a table [V, D] that lies over (tensor, fsdp), for requests [N, T].

  The table stays where it is: devices along fsdp look up their part of D for
  the requests of all of them, and then exchange [N, T, D], less than [V, D].
  (Where fsdp does not divide D, each looks up all of it for all of them.)

  Returns:
    [N, T, D], requests over data and fsdp.
  """
  rows = table[constrain(tokens, 'data')]
  return batched(constrain(rows, 'data', None, 'fsdp'))
