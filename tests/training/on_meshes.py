"""Every stage's step on meshes of eight simulated devices, beside one device.

    python -m tests.training.on_meshes DIR [--process=I/N@PORT] MESH:STAGE,...

DIR keeps what `prepare` makes and what one device gives; a mesh is
data.fsdp.tensor. N processes share the eight devices, in a DIR where one
process ran the same stages before. The updates are those that training
compiles, optimizer and all, from random weights: losses, gradients, noise and,
where a policy decodes, tokens must be those of a single device, and what the
compiled programs exchange is checked. Prints a line an update. `STAGE+parts`
takes a batch in two parts, `STAGE+lora` trains adapters; `teacher` is the
forward of OPD's teacher, whose parameters may be whole along fsdp.
"""

import collections
import math
import pathlib
import pickle
import re
import sys

import jax

PROCESS = re.fullmatch(r'--process=(\d)/(\d)@(\d+)', sys.argv[2])
jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 8 // int(PROCESS[2] if PROCESS else 1))
if PROCESS:
  jax.distributed.initialize(
      f'127.0.0.1:{PROCESS[3]}', int(PROCESS[2]), int(PROCESS[1]))

import numpy as np
import optax

from configs import quickstart
from dgr2_jax.decoding import block_decoder
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import transformer
from dgr2_jax.objectives import denoising
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import loop
from dgr2_jax.training import losses
from dgr2_jax.training import sharding
from dgr2_jax.training import stages
from dgr2_jax.training import step as step_lib

ON_POLICY = ('ar_rl', 'opd', 'rl')
# Sizes that tell dimensions apart in a program's text.
N, LAYERS, WIDTH, HEADS, HEAD_DIM = 16, 3, 32, 8, 4
KEY = jax.random.key(3)
LORA = dict(matrices=('gate', 'down'), rank=4, alpha=4.)


def get_config():
  c = quickstart.get_config('full,cooccurrence,smoke')
  c.model.update(num_layers=LAYERS, width=WIDTH, num_heads=HEADS,
                 num_kv_heads=HEADS, head_dim=HEAD_DIM, mlp_dim=64,
                 unroll_layers=False, remat='full')
  for name in ('mid_train', 'ar_sft', 'ar_rl', 'cft', 'opd', 'rl'):
    c[name].batch_size = N
  for name in ON_POLICY:
    c[name].rollout.update(num_rollouts=2, updates=1, threshold=.3, refill=1,
                           temperature=1., canvases='all', canvases_per_row=3)
  c.ar_rl.cft_weight = c.rl.cft_weight = 0.
  c.opd.teacher = 'ar'
  return c


class Experiment(experiment_lib.Experiment):
  """Every stage begins with random weights; the teacher has others."""

  def restore(self, stage, dtype=None, rules=None):
    params = self.initial_params()
    params['final_norm'] *= 20  # surer of itself
    if stage == 'ar_sft':
      params['layers'] = jax.tree.map(lambda x: 1.1 * x, params['layers'])
    return params


def run(workdir, sizes, stage):
  """What a stage's first step gives on a mesh, and its programs' texts."""
  stage, _, how = stage.partition('+')
  config = get_config()
  if how == 'parts':
    config[stage].accumulate = 2
  elif how == 'lora':
    config[stage].optimizer = dict(lora=LORA)
  devices = jax.devices()[:math.prod(sizes)]
  mesh = sharding.make_mesh(dict(zip(sharding.AXES, sizes)), devices)
  captured, texts = {}, {}
  decode = block_decoder.decode

  def compiled_decode(model, *args, **static):
    program = decode.lower(model, *args, **static).compile()
    texts['decode'] = program.as_text()
    return program(*args)

  real = (sharding.make_mesh, experiment_lib.Experiment, loop.train, decode)
  sharding.make_mesh = lambda _: mesh
  experiment_lib.Experiment = Experiment
  loop.train = lambda **kwargs: captured.update(kwargs)
  block_decoder.decode = compiled_decode
  try:
    getattr(stages, stage)(config, workdir)
    params, batches = captured['params'], captured['batches']
    if stage in ON_POLICY:
      batch, = batches.collect(params, 0, 3)
      if stage != 'opd':  # random responses all earn the same
        draw = np.random.default_rng(0).normal(size=(N, 2))
        batch |= sharding.shard_batch(mesh, {
            'advantage': np.float32(draw), 'kept': np.arange(N) % 3 > 0},
                                      whole=True)
    else:
      batch = sharding.shard_batch(mesh, dict(batches[0]))
  finally:
    (sharding.make_mesh, experiment_lib.Experiment, loop.train,
     block_decoder.decode) = real

  section, out = captured['config'], {}
  with jax.set_mesh(mesh):
    program = step_lib.program(
        captured['loss_fn'], params, batch, section, mesh, captured['rules'],
        captured['seed'])
    state = jax.jit(program.init, out_shardings=program.shardings)(params)
    if how == 'lora':  # without their zeros, which leave gradients of zero
      state = state.replace(params=jax.tree.map(lambda x: x + .01,
                                                state.params))
    lowered = program.update.lower(state, batch)
    update = lowered.compile()
    state = update(state, batch)
    if stage == 'cft':
      out['noise'] = jax.jit(lambda batch: denoising.noised_canvas(
          batch, KEY, canvas_lib.CanvasConfig(**config.canvas),
          denoising.DenoisingConfig()).masked)(batch)
  texts.update(update=update.as_text(), lowered=lowered.as_text())
  out['metrics'] = state.sums
  # What AdamW's first moment holds of it, clipped
  out['gradient'] = optax.tree_utils.tree_get(state.opt_state, 'mu')
  if stage in ON_POLICY:
    out['tokens'] = batch['response']
  return sharding.to_hosts(out), texts, params['embedding'].shape[0]


def assert_equal(got, want):
  """Integers to the bit, others to 1e-5 of an array's largest entry.

  What is a single number to 1e-5 of 1, if it is smaller.
  """

  def compare(path, a, b):
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind in 'biu':
      np.testing.assert_array_equal(a, b, err_msg=str(path))
    else:
      np.testing.assert_allclose(a, b, rtol=0, err_msg=str(path),
                                 atol=1e-5 * max(b.ndim == 0, np.abs(b).max()))

  jax.tree.map_with_path(compare, got, want)


_EXCHANGE = re.compile(r'= (.*?) (all-gather|all-reduce|all-to-all|'
                       r'collective-permute|reduce-scatter)(?:-start)?\(')
_FLOATS = re.compile(r'(?:f32|bf16)\[([\d,]+)\]')


def exchanges(text):
  """(kind, shape of a float array) of all that devices tell each other."""
  found = collections.Counter()
  for line in text.splitlines():
    if match := _EXCHANGE.search(line):
      for shape in _FLOATS.findall(match.group(1)):
        found[match.group(2), tuple(map(int, shape.split(',')))] += 1
  return found


def check_exchanges(text, sizes, vocabulary):
  """No activations of the whole batch, no parameters of all layers, no logits.
  """
  data, fsdp, tensor = sizes
  for kind, shape in exchanges(text):
    told = f'{kind} of {shape} on {sizes}'
    if data * fsdp > 1:
      adapter = shape == (WIDTH // fsdp, LORA['rank'])  # its gradient
      assert shape[0] != N or adapter, f'the whole batch: {told}'
    if kind == 'all-gather':
      assert shape[0] != LAYERS, f'a parameter of all layers: {told}'
      assert shape[-1] != vocabulary, f'logits: {told}'
      if fsdp == 1:  # no parameter is gathered, and nothing that is large
        assert math.prod(shape) < N * WIDTH * 32, told
  if fsdp > 1:
    matrix = (WIDTH, HEADS // tensor, HEAD_DIM)  # of one layer
    assert any(kind == 'all-gather' and shape[-3:] == matrix
               for kind, shape in exchanges(text)), 'no layer was gathered'


def check_constraints(text, how):
  """Activations and, of a query matrix, weights in use and gradients."""
  told = set(re.findall(r'sdy.sharding_constraint .*<@mesh, \[(.*?)\]>', text))
  wanted = {'{"data", "fsdp"}, {}, {}', '{}, {"tensor"}, {}'}
  if how != 'lora':  # adapters are no matrices of a model
    wanted.add('{}, {"fsdp"}, {"tensor"}, {}')
  assert wanted <= told, told


def check_cache(text, sizes):
  """Keys and values [layers, N, G, L, Hkv, F]: over requests and heads."""
  data, fsdp, tensor = sizes
  shapes = set(re.findall(rf'f32\[{LAYERS},(\d+),2,\d+,(\d+),{HEAD_DIM}\]',
                          text))
  assert shapes == {(str(N // data // fsdp), str(HEADS // tensor))}, shapes


def check_teacher(workdir, sizes):
  """Its states are the same; without fsdp nothing is gathered."""
  config, states = get_config(), []
  mesh = sharding.make_mesh(dict(zip(sharding.AXES, sizes)))
  experiment = Experiment(config, workdir, mesh)
  params = experiment.restore('ar_sft')
  batch = experiment.train_batches(N, [experiment.data.record_file('train')])[0]
  batch = sharding.shard_batch(
      mesh, {k: batch[k] for k in losses.TEACHER_READS})
  for fsdp in (True, False):
    config.opd.teacher_fsdp = fsdp
    placed = jax.device_put(params, sharding.param_shardings(
        mesh, params, losses.teacher_rules(experiment)))
    with jax.set_mesh(mesh):
      program = jax.jit(losses.teacher_states(experiment)).lower(
          placed, batch).compile()
      states.append(np.asarray(program(placed, batch)))
    gathered = any(kind == 'all-gather' for kind, _ in exchanges(
        program.as_text()))
    assert gathered == fsdp, program.as_text()
  assert_equal(*states)


def on_one_device(workdir, stage):
  """What the stage gives there; computed once."""
  path = workdir / f'{stage}.pickle'
  if not path.exists():
    path.write_bytes(pickle.dumps(run(workdir, (1, 1, 1), stage)[0]))
  return pickle.loads(path.read_bytes())


def main(workdir, *wanted):
  stages.prepare(get_config(), workdir)
  for item in wanted:
    mesh, names = item.split(':')
    sizes = tuple(map(int, mesh.split('.')))
    for stage in names.split(','):
      if stage == 'teacher':
        check_teacher(workdir, sizes)
        print(f'teacher on {sizes} agrees', flush=True)
        continue
      alone = on_one_device(workdir, stage)
      got, texts, vocabulary = run(workdir, sizes, stage)
      assert_equal(got, alone)
      check_constraints(texts.pop('lowered'), stage.partition('+')[2])
      for name, text in texts.items():
        check_exchanges(text, sizes, vocabulary)
        if name == 'decode' and stage != 'ar_rl':
          check_cache(text, sizes)
      loss = got['metrics']['loss']
      print(f'{stage} on {sizes} agrees: loss {loss:.6f}', flush=True)


if __name__ == '__main__':
  main(pathlib.Path(sys.argv[1]), *sys.argv[3 if PROCESS else 2:])
