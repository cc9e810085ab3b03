"""The planner: shapes as in training, FLOPs as XLA's, no large arrays."""

import dataclasses
import importlib.util
import json
import math
import pathlib
import re
import runpy
import types

import jax
import ml_collections
import numpy as np
import pytest

from dgr2_jax.data import parsing
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import transformer
from dgr2_jax.objectives import rewards
from dgr2_jax.tools import plan
from dgr2_jax.training import abstract
from dgr2_jax.training import chips
from dgr2_jax.training import losses
from dgr2_jax.training import rollouts
from dgr2_jax.training import sharding
from dgr2_jax.training import validation

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = runpy.run_path(str(ROOT / 'experiments' / 'scaling' / 'config.py'))
SCALING = runpy.run_path(str(ROOT / 'experiments' / 'scaling' / 'scaling.py'))


def config_of(**changes) -> ml_collections.ConfigDict:
  """Small, and no two sizes alike: P=40, L=24, B=4, G=3, M=12, V=768."""
  c = runpy.run_path(str(ROOT / 'configs' / 'quickstart.py'))['get_config']()
  c.prompt.update(max_prompt=40, max_response=24, pad_multiple=8)
  c.canvas.block_size = 4
  c.model.update(num_layers=2, width=16, num_heads=2, num_kv_heads=1,
                 head_dim=8, mlp_dim=32, remat='full', unroll_layers=False,
                 canvas_chunk=2)
  c.recipe = ('mid_train', 'ar_sft', 'convert', 'cft', 'opd', 'rl')
  c.mid_train = {**c.cft.to_dict(), 'batch_size': 2, 'max_length': 48}
  for stage in ('cft', 'opd', 'rl'):
    c[stage].update(batch_size=1, head_chunk=8)
  c.opd.teacher = 'ar'
  for stage in ('opd', 'rl'):
    c[stage].update(cft_weight=0.)
    c[stage].rollout.update(num_rollouts=3, canvases_per_row=12,
                            canvases='all')
  c.update_from_flattened_dict(
      {k.replace('__', '.'): v for k, v in changes.items()})
  return c


def setting_of(config) -> abstract.Setting:
  return abstract.Setting(config, sharding.make_mesh(
      config.mesh, jax.devices()[:1]))


def update_of(stage, **changes):
  """The update's HLO: its arrays as (dtype, elements)."""
  programs = abstract.programs(setting_of(config_of(**changes)), stage, 2.)
  text = programs[0].lower().compile().as_text()
  return [math.prod(map(int, filter(None, dims.split(','))))
          for dims in re.findall(
              r'(?:f32|bf16|pred|s32|u32)\[([\d,]*)\]', text)]


@pytest.mark.parametrize('stage', ['opd', 'rl'])
def test_no_update_holds_what_chunks_avoid(stage):
  setting = setting_of(config_of())
  p, length, g, m, b = 40, 24, 3, 12, 4
  v = setting.vocabulary.size
  scores = 2 * g * m * b * (p + length + b)  # H heads, of all canvases
  tokens = p + g * length + g * m * b
  assert scores < tokens ** 2 and scores < tokens * v
  assert scores < g * length * v  # and so are logits of the rows that count
  assert max(update_of(stage)) < scores


@pytest.mark.parametrize('stage', ['opd', 'rl'])
def test_copies_of_responses_attend_one_by_one(stage):
  """Four canvases a row: a response is replayed in up to three rows."""
  short = {f'{stage}__rollout__canvases_per_row': 4}
  rows = 3 * 3
  scores = rows * 2 * 24 * (40 + 24)  # H heads, of all copies
  assert max(update_of(stage, **short)) < scores
  if stage == 'rl':
    assert max(update_of(stage, model__canvas_chunk=0, **short)) >= scores


@pytest.mark.parametrize('chunk', [0, 2])
def test_no_program_scores_a_whole_prompt(monkeypatch, chunk):
  monkeypatch.setattr(canvas_lib, '_PROMPT_CHUNK', 8)
  setting = setting_of(config_of(model__canvas_chunk=chunk))
  names = {}
  for program in abstract.programs(setting, 'opd', 2.):
    text = program.lower().compile().as_text()
    names[program.name] = bool(re.search(r'f32\[[\d,]*40,40\]', text))
  assert names == dict.fromkeys(('update', 'teacher', 'rollout'), not chunk)


def test_without_chunks_it_would():
  assert max(update_of('rl', model__canvas_chunk=0)) >= 2 * 3 * 12 * 4 * 68
  assert max(update_of('rl', rl__head_chunk=0)) >= 3 * 24 * 640


@pytest.mark.parametrize('stage, remat', [
    ('mid_train', 'none'), ('cft', 'none'), ('opd', 'none'), ('rl', 'none'),
    ('cft', 'dots'), ('cft', 'full')])
def test_flops_are_those_that_xla_counts(stage, remat):
  """Lowered only; wide, as the closed form counts matrix products alone."""
  config = config_of(**{
      'model__width': 256, 'model__num_heads': 4, 'model__head_dim': 128,
      'model__num_kv_heads': 2, 'model__mlp_dim': 512, 'model__remat': remat,
      'model__unroll_layers': True, 'model__canvas_chunk': 0,
      f'{stage}__head_chunk': 0})
  setting = setting_of(config)
  programs = abstract.programs(setting, stage, 2.)
  batch = dict(programs[0].arguments['batch'])
  if stage == 'opd':
    batch['frozen'] = programs[0].arguments['teacher']
  loss = losses.loss_of(setting, stage)
  # The default generator is a loop on CPUs; this one is not.
  key = jax.eval_shape(lambda: jax.random.key(0, impl='unsafe_rbg'))
  lowered = jax.jit(jax.value_and_grad(lambda params, batch, key: sum(
      term.value for term in loss(params, batch, key)[0]))).lower(
          setting.params(), batch, key)
  assert 'stablehlo.while' not in lowered.as_text()
  count = programs[0].flops + programs[0].recomputed
  assert 1 <= lowered.cost_analysis()['flops'] / count < 1.05


@pytest.mark.parametrize('stage', abstract.STAGES)
def test_layers_of_every_stage_are_computed_again_as_said(stage):
  config = config_of(model__remat='dots', opd__teacher='self')
  setting = setting_of(config)
  jaxpr = jax.make_jaxpr(losses.loss_of(setting, stage))(
      setting.params(), abstract.batch_of(setting, stage, 2.),
      jax.eval_shape(lambda: jax.random.key(0)))
  layers = [eqn.params['policy'] for scan in jaxpr.eqns
            if scan.primitive.name == 'scan'
            for eqn in scan.params['jaxpr'].eqns
            if eqn.primitive.name == 'remat2']
  assert transformer._REMAT_POLICIES['dots'] in layers


@pytest.mark.parametrize('block_size', [1, 3])
def test_batches_are_shaped_as_those_of_rollouts(block_size):
  canvas = canvas_lib.CanvasConfig(block_size)
  mesh = sharding.make_mesh(dict(data=1, fsdp=1, tensor=1), jax.devices()[:1])
  section = config_of().rl
  section.update(batch_size=4)
  section.rollout.update(num_rollouts=2, canvases_per_row=3)
  config = ml_collections.ConfigDict(dict(
      rl=section, data=dict(num_candidates=5)))
  parse = parsing.Parse((0, 1, 2, 3, 4), parsing.VALID, 'because', 3)
  experiment = types.SimpleNamespace(
      config=config, mesh=mesh, canvas=canvas, prompt_length=7,
      response_length=6, vocabulary=types.SimpleNamespace(eos_id=0),
      parser=types.SimpleNamespace(strict=lambda tokens: parse),
      data=types.SimpleNamespace(
          response_length=6, target_positions=lambda split: np.zeros(9, int)))
  prompts = [{'prompt': np.zeros((4, 7), np.int32), 'example_id': np.arange(4),
              'prompt_length': np.full(4, 7, np.int32)}]
  want = rollouts.Rollouts(
      experiment, 'rl', canvas, prompts,
      rollouts.RolloutConfig(**section.rollout),
      rewards.RewardConfig(**section.reward)).example()
  got = abstract._responses(experiment, 'rl', steps=1.)
  for name in got.keys() - {'round'}:
    assert got[name].shape == want[name].shape, name
    assert got[name].dtype == want[name].dtype, name


@pytest.mark.parametrize('tied', [True, False])
def test_memory_and_roofline(tied):
  chip = chips.Chip('slow', 'none', flops=2e9, memory=1e9, bandwidth=1e6,
                    links=1e9)
  config = config_of(mesh__fsdp=1, model__tie_embeddings=tied)
  found = plan.measure(config, 'cft', chip, jax.devices()[:1])
  params = transformer.init(setting_of(config).model.config, jax.random.key(0))
  size = sum(x.nbytes for x in jax.tree.leaves(params))
  update, validated = (found['programs'][x] for x in ('update', 'validation'))
  assert update['arguments']['parameters'] == size
  assert 2 * size <= update['arguments']['optimizer'] < 2.1 * size  # moments
  assert validated['held'] == {'optimizer': update['arguments']['optimizer']}
  assert update['total'] > 3 * size and found['fits']
  # Weights three times, for the layers are computed again; state in and out.
  state = update['arguments']['parameters'] + update['arguments']['optimizer']
  assert update['bound'] == 'memory'
  read = size if tied else size - params['embedding'].nbytes  # only looked up
  assert update['seconds'] == pytest.approx((3 * read + 2 * state) / 1e6)
  assert update['times']['links'] == 0
  assert update['times']['compute'] == pytest.approx(
      (update['flops'] + update['recomputed_flops']) / 2e9)
  assert 'cft on 1 x slow' in plan.text(found) and 'fits' in plan.text(found)
  tiny = dataclasses.replace(chip, memory=size)
  found['fits'] = None
  assert not plan.measure(config, 'cft', tiny, jax.devices()[:1])['fits']


def test_a_reference_is_held_beside_the_policy():
  found = plan.measure(config_of(rl__kl_weight=.1, mesh__fsdp=1), 'rl', None,
                       jax.devices()[:1])['programs']
  assert list(found) == ['update', 'reference', 'rollout']
  size = found['update']['arguments']['parameters']
  assert found['reference']['arguments']['reference'] == size
  assert found['update']['held'] == {'reference': size}
  assert 3 * found['reference']['flops'] == found['update']['flops']


@pytest.mark.parametrize('topology, message', [
    ('v5p', 'expected CHIP:SHAPE'), ('v9:2x2', "'v9' is not known"),
    ('cpu:512', 'JAX simulates')])
def test_topologies_that_are_none(topology, message):
  with pytest.raises(ValueError, match=message):
    plan.devices(topology)


@pytest.mark.skipif(importlib.util.find_spec('libtpu') is not None,
                    reason='the TPU compiler is installed')
def test_says_how_to_get_the_tpu_compiler():
  with pytest.raises(ValueError, match=r"libtpu: pip install -e '.\[tpu\]'"):
    plan.devices('v5e:2x2')


def test_a_batch_that_does_not_split_is_an_error():
  config = config_of(cft__batch_size=6)
  config.cft.accumulate = 4
  with pytest.raises(ValueError, match='batch_size=6 in accumulate=4 parts'):
    abstract.programs(setting_of(config), 'cft')
  with pytest.raises(ValueError, match="'prepare' cannot be planned"):
    abstract.programs(setting_of(config), 'prepare')


@pytest.mark.parametrize('kind, name', [
    ('TPU v4', 'v4'), ('TPU v5 lite', 'v5e'), ('TPU v5', 'v5p'),
    ('TPU v5p', 'v5p'), ('TPU v6 lite', 'v6e'),
    ('NVIDIA H100 80GB HBM3', 'h100'), ('NVIDIA H200', 'h200')])
def test_chips_by_what_jax_calls_them(kind, name):
  assert chips.of_kind(kind).name == name
  assert chips.of_kind('cpu') is None


@pytest.mark.parametrize('size', sorted(abstract.QWEN3))
def test_published_shapes_pass_the_checks_of_training(size):
  config = CONFIG['get_config'](f'{size},8')
  validation.check(config)
  setting = setting_of(config)
  parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(
      setting.params()))
  tables = setting.vocabulary.size * config.model.width
  # Qwen3's names count parameters roughly, smaller models' tables included.
  assert parameters / 1e9 == pytest.approx(float(size[:-1]), rel=.25)
  assert SCALING['least_bytes'](size, 1) <= 16 * parameters < (
      SCALING['least_bytes'](size, 1) + 16 * tables)


def test_table_is_that_of_what_was_found():
  found, full = (SCALING['read'](SCALING[name]) for name in ('FOUND', 'FULL'))
  text = SCALING['PAGE'].read_text(encoding='utf-8')
  assert SCALING['page'](text, found, full) == text
  assert '| Qwen3-' in text


@pytest.mark.parametrize('stage', SCALING['STAGES'])
def test_requests_of_a_batch_are_those_of_the_config(stage):
  config = CONFIG['get_config']('8b,8')
  assert config[stage].batch_size == SCALING['STAGES'][stage]


def test_both_efforts_are_compared_where_both_are_known():
  cell = lambda **totals: {'programs': {
      name: {'total': total} if total else {'error': 'out of memory'}
      for name, total in totals.items()}}
  assert SCALING['ratios'](
      {'a': cell(update=6, rollout=3), 'b': cell(update=1),
       'c': cell(update=1), 'd': {'fits': False}},
      {'a': cell(update=4, rollout=0), 'b': cell(teacher=1),
       'd': cell(update=1)}) == [1.5]


def test_cells_of_the_table():
  planned = lambda fits: {'fits': fits, 'programs': {
      'update': {'total': 61e9, 'seconds': 2., 'runs': 1},
      'rollout': {'total': 39e9, 'seconds': 3., 'runs': 2}}}
  cell = lambda **shapes: SCALING['_cell'](
      {f'8b/rl/v5p:{k[1:]}': planned(v) for k, v in shapes.items()},
      '8b', 'rl', 'v5p')
  assert cell() == '-'
  assert cell(s2x2x1=True) == 'v5p-8: 61.0 GB, 8.0 s'
  assert cell(s2x2x1=False, s2x2x2=True) == 'v5p-16: 61.0 GB, 8.0 s'
  assert cell(s2x2x4=True) == '<= v5p-32: 61.0 GB, 8.0 s'
  assert cell(s2x2x1=False) == 'above v5p-8'
