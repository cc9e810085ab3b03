"""Where arrays live: the mesh, parameter shardings and batch placement.

    axis      splits                                a typical use
    data      requests                              every run
    fsdp      requests, and parameters along D      models beyond one chip
    tensor    heads, hidden width, vocabulary       models beyond one host

A single device is a mesh of one, so there is one code path. Parameters are
placed by a table of (pattern over the parameter path, PartitionSpec) that the
model keeps beside itself, activations by constraints (`models/partition.py`);
XLA's partitioner does the rest (all axes are Auto).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import math
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
import numpy as np

from dgr2_jax.models import partition

AXES = partition.AXES
BATCH_AXES = partition.BATCH_AXES
Rules = partition.Rules


def make_mesh(config: Mapping[str, int],
              devices: Sequence[jax.Device] | None = None) -> Mesh:
  """Builds the (data, fsdp, tensor) mesh over all devices.

  Args:
    config: a size per axis (`config.mesh`); -1, at most once, means the rest.
    devices: what to build it from; all devices of the job by default.

  Returns:
    A mesh whose axes are all Auto, as linen modules need.

  Raises:
    ValueError: the sizes do not multiply to the number of devices, or neither
      data nor fsdp splits over the slices that these belong to.
  """
  devices = jax.devices() if devices is None else devices
  if set(config) != set(AXES):
    raise ValueError(f'config.mesh has fields {sorted(config)}; expected '
                     f'{sorted(AXES)}.')
  sizes = [config[axis] for axis in AXES]
  given = ', '.join(f'{a}={s}' for a, s in zip(AXES, sizes))
  if any(s < 1 and s != -1 for s in sizes) or sizes.count(-1) > 1:
    raise ValueError(f'config.mesh ({given}): sizes must be positive, with at '
                     'most one -1 for the rest of the devices.')
  fixed = math.prod(s for s in sizes if s != -1)
  if -1 in sizes and len(devices) % fixed == 0:
    sizes[sizes.index(-1)] = len(devices) // fixed
  if math.prod(sizes) != len(devices):
    raise ValueError(
        f'config.mesh ({given}) does not fit {len(devices)} devices: '
        + (f'{fixed} does not divide {len(devices)}.' if -1 in sizes else
           f'its sizes multiply to {fixed}.'))
  auto = (AxisType.Auto,) * len(AXES)
  slices = len({getattr(d, 'slice_index', 0) for d in devices})
  if slices == 1:
    return jax.make_mesh(tuple(sizes), AXES, devices=devices, axis_types=auto)
  # Links between TPU slices, and between nodes of GPUs, are slow: data crosses
  # them as far as it goes, then fsdp.
  across = [math.gcd(slices, sizes[0]), 1, 1]
  across[1] = slices // across[0]
  if sizes[1] % across[1]:
    raise ValueError(
        f'config.mesh ({given}): data and fsdp do not split over {slices} '
        'slices or nodes; make one of them a multiple.')
  return Mesh(mesh_utils.create_hybrid_device_mesh(
      [size // n for size, n in zip(sizes, across)], across, devices,
      allow_split_physical_axes=True), AXES, axis_types=auto)


def mesh_here(config: Mapping[str, int]) -> Mesh:
  """`make_mesh`, or one with `fsdp` alone where that is for other devices."""
  try:
    return make_mesh(config)
  except ValueError:
    return make_mesh(dict(data=1, fsdp=-1, tensor=1))


def host_share(mesh: Mesh) -> tuple[int, int]:
  """Which share of a batch's rows this host loads: (index, count).

  (0, 1), all of them, where devices of several hosts hold the same rows, since
  `tensor` spans hosts.
  """
  parts = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
  apart = all(len({d.process_index for d in group}) == 1
              for group in mesh.devices.reshape(parts, -1))
  return (jax.process_index(), jax.process_count()) if apart else (0, 1)


def param_shardings(mesh: Mesh, tree: Any, rules: Rules) -> Any:
  """A sharding for every leaf of `tree`.

  The first rule whose pattern is found (`re.search`) in a leaf's path wins.
  Patterns should be anchored at their end only (`layers/query$`): the
  optimizer's moments end in the same path and so get the same sharding.

  Args:
    mesh: from `make_mesh`.
    tree: arrays or `jax.ShapeDtypeStruct`s.
    rules: (pattern, PartitionSpec). A dimension that its axes do not divide
      is replicated, and so is a leaf that no pattern matches.

  Returns:
    `tree` with a `NamedSharding` for each leaf.

  Raises:
    ValueError: a rule has more dimensions than the array it matches.
  """
  def leaf_sharding(path, leaf):
    name = partition.path_name(path)
    return NamedSharding(mesh, partition.fit(
        mesh, partition.spec_of(name, rules), np.shape(leaf), name))

  return jax.tree.map_with_path(leaf_sharding, tree)


def abstract(tree: Any, shardings: Any) -> Any:
  """Shapes and dtypes of `tree`, each with its sharding."""
  return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=s),
      tree, shardings)


def replicated(mesh: Mesh) -> NamedSharding:
  """Every device holds the whole array."""
  return NamedSharding(mesh, P())


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Axis 0 (requests) is split over `data` and `fsdp`."""
  return NamedSharding(mesh, P(BATCH_AXES))


def shard_batch(mesh: Mesh, batch: Mapping[str, np.ndarray],
                whole: bool = False) -> dict[str, jax.Array]:
  """Turns rows on hosts into global arrays.

  Args:
    mesh: from `make_mesh`.
    batch: arrays [N / hosts, ...], the rows of `host_share`.
    whole: whether every host holds all N rows instead.

  Returns:
    Arrays [N, ...], split as `batch_sharding` says.

  Raises:
    ValueError: N is not a multiple of the data x fsdp devices.
  """
  sharding = batch_sharding(mesh)
  hosts = 1 if whole else host_share(mesh)[1]

  def place(path, x):
    rows = x.shape[0] * hosts
    check_rows(mesh, rows, f'the batch of {partition.path_name(path)}')
    return jax.make_array_from_process_local_data(
        sharding, x, (rows, *x.shape[1:]))

  return jax.tree.map_with_path(place, dict(batch))


def check_rows(mesh: Mesh, rows: int, name: str) -> None:
  """Raises ValueError if a batch of `rows` does not split over the mesh."""
  parts = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
  if rows % parts:
    raise ValueError(f'{name}: {rows} rows do not split over {parts} devices '
                     '(mesh data x fsdp); make batch_size a multiple')


def to_hosts(tree: Any) -> Any:
  """Global arrays as NumPy arrays, whole on every host."""
  if jax.process_count() == 1:
    return jax.device_get(tree)
  return multihost_utils.process_allgather(tree, tiled=True)
