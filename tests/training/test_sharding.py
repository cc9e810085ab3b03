"""Tests of the mesh and of array placement; layouts run on eight devices."""

import dataclasses
import pathlib
import subprocess
import sys
import types

import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from dgr2_jax.training import sharding

_EIGHT = """
import jax
jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 8)
import numpy as np
from jax.sharding import PartitionSpec as P
from dgr2_jax.models import partition
from dgr2_jax.models import transformer
from dgr2_jax.training import sharding

mesh = sharding.make_mesh(dict(data=-1, fsdp=2, tensor=2))
assert dict(mesh.shape) == dict(data=2, fsdp=2, tensor=2), mesh
assert all(t == jax.sharding.AxisType.Auto for t in mesh.axis_types)

tree = {'layers': {'query': np.zeros((3, 8, 4)), 'query_norm': np.zeros(8)},
        'odd': {'query': np.zeros((3, 7, 4))}, 'head': np.zeros((8, 16))}
rules = ((r'query$', P(None, 'fsdp', 'tensor')),
         (r'head$', P(('fsdp', 'tensor'))), (r'head', P('data')))
specs = jax.tree.map(lambda s: s.spec,
                     sharding.param_shardings(mesh, tree, rules))
assert specs == {
    'layers': {'query': P(None, 'fsdp', 'tensor'), 'query_norm': P()},
    'odd': {'query': P(None, None, 'tensor')},   # 7 is not a multiple of 2
    'head': P(('fsdp', 'tensor'))}, specs        # the first rule wins

batch = sharding.shard_batch(mesh, {'x': np.arange(24).reshape(8, 3)})
assert batch['x'].sharding.spec == P(('data', 'fsdp'))
assert {s.data.shape for s in batch['x'].addressable_shards} == {(2, 3)}
np.testing.assert_array_equal(batch['x'], np.arange(24).reshape(8, 3))
try:
  sharding.shard_batch(mesh, {'x': np.zeros((6, 3))})
except ValueError as e:
  assert 'the batch of x: 6 rows do not split over 4 devices' in str(e), e
else:
  raise AssertionError('6 rows on 4 devices')
try:
  sharding.make_mesh(dict(data=-1, fsdp=3, tensor=1))
except ValueError as e:
  assert 'fsdp=3' in str(e) and '3 does not divide 8' in str(e), e
else:
  raise AssertionError('a mesh of 3 on 8 devices')

# A table looked up: its rows and gradient, where dimensions split or do not.
for rows, width, n in ((6, 8, 8), (7, 8, 4), (6, 7, 8), (6, 8, 3)):
  tree = {'embedding': np.arange(rows * width, dtype='f').reshape(rows, width)}
  tokens = np.arange(n * 5).reshape(n, 5) ** 2 % rows
  weights = np.float32(np.random.default_rng(0).normal(size=(n, 5, width)))
  table = jax.device_put(tree, sharding.param_shardings(
      mesh, tree, transformer.RULES))['embedding']
  with jax.set_mesh(mesh):
    program = jax.jit(lambda table, tokens, weights: (
        partition.lookup(table, tokens),
        jax.grad(lambda x: (weights * partition.lookup(x, tokens)).sum())(
            table))).lower(table, tokens, weights).compile()
    found, gradient = program(table, tokens, weights)
  np.testing.assert_array_equal(found, tree['embedding'][tokens])
  wanted = np.zeros((rows, width))
  np.add.at(wanted, tokens, weights)
  np.testing.assert_allclose(gradient, wanted, atol=1e-5)
  if (rows, width, n) == (6, 8, 8):
    assert ' all-to-all(' in program.as_text()
    assert not [line for line in program.as_text().splitlines()
                if 'f32' in line and ' all-gather(' in line], program.as_text()
"""


def test_layouts_on_eight_devices():
  subprocess.run([sys.executable, '-c', _EIGHT], check=True, timeout=120,
                 cwd=pathlib.Path(__file__).parents[2])


def test_one_device_is_a_mesh_of_one():
  mesh = sharding.make_mesh(dict(data=-1, fsdp=1, tensor=1),
                            jax.devices()[:1])
  assert dict(mesh.shape) == dict(data=1, fsdp=1, tensor=1)
  batch = sharding.shard_batch(mesh, {'x': np.ones((3, 2), np.int32)})
  assert batch['x'].dtype == np.int32


@pytest.mark.parametrize('config, message', [
    (dict(data=2, fsdp=1, tensor=1), 'data=2.*multiply to 2'),
    (dict(data=-1, fsdp=2, tensor=1), '2 does not divide 1'),
    (dict(data=-1, fsdp=-1, tensor=1), 'at most one -1'),
    (dict(data=0, fsdp=1, tensor=1), 'must be positive'),
    (dict(data=1, model=1), r"fields \['data', 'model'\]"),
])
def test_mesh_that_does_not_fit(config, message):
  with pytest.raises(ValueError, match=message):
    sharding.make_mesh(config, jax.devices()[:1])


@dataclasses.dataclass(frozen=True)
class Device:
  """What a mesh asks of a device; two nodes of four."""
  id: int
  platform: str = 'gpu'
  device_kind: str = 'h100'

  @property
  def process_index(self):
    return self.id // 4

  slice_index = process_index


@pytest.mark.parametrize('sizes, nodes', [
    ((2, 4, 1), [[[0], [0], [0], [0]], [[1], [1], [1], [1]]]),
    ((1, 8, 1), [[[0], [0], [0], [0], [1], [1], [1], [1]]]),
    ((2, 2, 2), [[[0, 0], [0, 0]], [[1, 1], [1, 1]]])])
def test_slow_links_are_crossed_by_data_and_then_fsdp(sizes, nodes):
  mesh = sharding.make_mesh(
      dict(zip(sharding.AXES, sizes)), [Device(i) for i in range(8)])
  assert dict(mesh.shape) == dict(zip(sharding.AXES, sizes))
  assert [[[d.slice_index for d in row] for row in plane]
          for plane in mesh.devices] == nodes


def test_tensor_does_not_cross_slow_links():
  with pytest.raises(ValueError, match='do not split over 2 slices'):
    sharding.make_mesh(dict(data=1, fsdp=1, tensor=8),
                       [Device(i) for i in range(8)])


@pytest.mark.parametrize('sizes, count', [
    ((8, 1, 1), 2), ((1, 2, 4), 2), ((1, 1, 8), 1)])
def test_hosts_load_all_rows_where_tensor_spans_them(monkeypatch, sizes, count):
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  devices = np.array([Device(i) for i in range(8)]).reshape(sizes)
  mesh = types.SimpleNamespace(
      devices=devices, shape=dict(zip(sharding.AXES, sizes)))
  assert sharding.host_share(mesh) == (0, count)


def test_a_mesh_for_other_devices_becomes_one_for_these():
  mesh = sharding.mesh_here(dict(data=1, fsdp=64, tensor=2))
  assert dict(mesh.shape) == dict(data=1, fsdp=jax.device_count(), tensor=1)


def test_rule_with_too_many_dimensions():
  mesh = sharding.make_mesh(dict(data=1, fsdp=1, tensor=1), jax.devices()[:1])
  with pytest.raises(ValueError, match='rule for a/bias has 2 dim.* has 1'):
    sharding.param_shardings(mesh, {'a': {'bias': np.zeros(3)}},
                             [('bias', P(None, 'fsdp'))])


def test_moments_are_placed_like_their_parameters():
  mesh = sharding.make_mesh(dict(data=1, fsdp=1, tensor=1), jax.devices()[:1])
  state = ({'mu': {'layers': {'out': np.zeros((2, 4))}}}, np.int32(0))
  specs = jax.tree.map(lambda s: s.spec, sharding.param_shardings(
      mesh, state, [(r'layers/out$', P('fsdp'))]))
  assert specs == ({'mu': {'layers': {'out': P('fsdp')}}}, P())
