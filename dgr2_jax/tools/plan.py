"""Says what a run would take on devices that are not here.

    python -m dgr2_jax.tools.plan --config=configs/beauty_qwen3_8b.py \\
        --qwen3=8b --topology=v5p:2x2x2 [--stages=cft,opd,rl] [--num_slices=1]

compiles the update of every stage, the forward of the teacher or of RL's
reference and the decoding of rollouts ahead of time, for TPUs with their own
compiler (`libtpu`), which needs no TPU. No weight is made. For GPUs
(`--topology=h100:8`) and simulated devices (`cpu:8`) XLA's compiler for CPUs is
asked instead: how arrays are split and what a program reads is the same there,
its temporaries are an estimate.

`--qwen3` takes the model's published shape where its checkpoint is not at hand.
Prompts are as long as `prompt.max_prompt`. `--output` writes what was found as
JSON. Exit code 0 only if all fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import importlib.util
import json
import math
import os
import pathlib
import re
import sys
import time
from typing import Any

from absl import app
from absl import flags
import jax
import ml_collections
from ml_collections import config_flags
import numpy as np

from dgr2_jax.training import abstract
from dgr2_jax.training import chips
from dgr2_jax.training import sharding
from dgr2_jax.training import validation

_CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'A file of configs/; its fields can be set as in training.')
_TOPOLOGY = flags.DEFINE_string(
    'topology', None, 'CHIP:SHAPE for TPUs, such as v5e:4x4 or v5p:2x2x4; '
    'CHIP:COUNT for GPUs, such as h100:8; cpu:COUNT for simulated devices.')
_QWEN3 = flags.DEFINE_enum(
    'qwen3', None, sorted(abstract.QWEN3),
    "A published model's shape, in place of config.model's and without its "
    'checkpoint.')
_STAGES = flags.DEFINE_list(
    'stages', None, "Stages of the config's recipe; all that train by default.")
_NUM_SLICES = flags.DEFINE_integer(
    'num_slices', 1, 'TPU slices of that topology.')
_STEPS = flags.DEFINE_float(
    'steps_per_block', 10., 'Denoising steps a block that rollouts take.')
_OUTPUT = flags.DEFINE_string('output', None, 'A JSON file to write.')


def devices(topology: str, num_slices: int = 1) -> tuple[
    chips.Chip | None, Sequence[jax.Device]]:
  """The chip, None for simulated ones, and what stands for the devices.

  Args:
    topology: see the flag.
    num_slices: of TPUs.

  Raises:
    ValueError: there is no such topology, or what it takes is not installed.
  """
  match = re.fullmatch(r'(\w+):(\d+(?:x\d+)*)', topology)
  if not match:
    raise ValueError(f'--topology={topology}: expected CHIP:SHAPE, such as '
                     'v5p:2x2x2, h100:8 or cpu:8.')
  name, shape = match.groups()
  chip = None if name == 'cpu' else chips.named(name)
  if chip and chip.tpu:
    return chip, _tpus(topology, num_slices)
  count = math.prod(map(int, shape.split('x')))
  if num_slices != 1:
    raise ValueError(f'--num_slices={num_slices}: only TPUs have slices.')
  if jax.local_device_count('cpu') < count:
    raise ValueError(
        f'--topology={topology}: JAX simulates '
        f'{jax.local_device_count("cpu")} devices; in a fresh process as many '
        'as it takes.')
  return chip, jax.devices('cpu')[:count]


def _tpus(topology: str, num_slices: int) -> Sequence[jax.Device]:
  if importlib.util.find_spec('libtpu') is None:
    raise ValueError(
        f'--topology={topology} needs the TPU compiler, the package libtpu: '
        "pip install -e '.[tpu]' (no TPU is needed); or plan for "
        '--topology=cpu:COUNT.')
  # Its import takes a while.
  from jax.experimental import topologies

  more = {'num_slices': num_slices} if num_slices > 1 else {}
  chip, _, shape = topology.partition(':')
  sizes = [int(size) for size in shape.split('x')]
  if math.prod(sizes) < 4:  # a part of a host
    more['chips_per_host_bounds'] = (*sizes, 1)[:3]
  try:
    return topologies.get_topology_desc(
        platform='tpu', topology_name=topology, **more).devices
  except Exception as e:
    raise ValueError(f'--topology={topology}: {e}') from e


def measure(config: ml_collections.ConfigDict, stage: str,
            chip: chips.Chip | None, devices_: Sequence[jax.Device],
            steps: float = 10.) -> dict[str, Any]:
  """Compiles a stage's programs.

  Args:
    config: of the experiment.
    stage: of `abstract.STAGES`.
    chip: for the memory and the roofline; None: neither is known.
    devices_: from `devices`.
    steps: denoising steps a block of rollouts.

  Returns:
    JSON: the mesh, the parts of a batch, and bytes a device, FLOPs and seconds
    of every program.

  Raises:
    ValueError: see `abstract.programs`.
  """
  config = config.copy_and_resolve_references()
  mesh = sharding.make_mesh(config.mesh, devices_)
  section = config[stage]
  setting = abstract.Setting(config, mesh)
  programs = abstract.programs(setting, stage, steps)
  held = {}
  for program in programs:
    for kind, tree in program.arguments.items():
      if kind != 'batch':
        held[kind] = max(held.get(kind, 0), _bytes_a_device(tree))
  found = {}
  for program in programs:
    print(f'{stage}: compiling {program.name} for {len(devices_)} devices ...',
          file=sys.stderr, flush=True)
    found[program.name] = _measure_program(
        setting, program, held, chip)
  fits = None
  if chip:
    fits = all('error' not in x and x['total'] <= chip.memory
               for x in found.values())
  return {
      'stage': stage, 'devices': len(devices_),
      'chip': chip.name if chip else 'cpu', 'fits': fits,
      'compiler': 'TPU' if chip and chip.tpu else 'CPU, an estimate',
      # Of the compiler; jax 0.12 has no such choice.
      'effort': getattr(jax.config, 'jax_exec_time_optimization_effort', None),
      'mesh': dict(mesh.shape), 'accumulate': section.get('accumulate', 1),
      'batch_size': section.batch_size,
      'shape': {'prompt': setting.prompt_length,
                'response': setting.response_length,
                'block_size': config.canvas.block_size,
                'rollouts': section.get('rollout', {}).get('num_rollouts', 1),
                'vocabulary': setting.vocabulary.size,
                'steps_per_block': steps},
      'programs': found}


def _measure_program(setting: abstract.Setting, program: abstract.Program,
                     held: Mapping[str, int],
                     chip: chips.Chip | None) -> dict[str, Any]:
  """One program; `held` is what the device holds beside it, by kind."""
  arguments = {kind: _bytes_a_device(tree)
               for kind, tree in program.arguments.items()}
  count = setting.mesh.size
  start = time.monotonic()
  result = {
      'runs': program.runs, 'arguments': arguments,
      # Held by the stage while this runs, and no argument of it.
      'held': {kind: size - arguments.get(kind, 0)
               for kind, size in held.items()
               if size > arguments.get(kind, 0)},
      'flops': program.flops / count,
      'recomputed_flops': program.recomputed / count}
  result |= roofline(setting, program, chip)
  try:
    compiled = program.lower().compile()
  except Exception as e:
    message = str(e)
    # What the TPU compiler says of a program that its chip cannot hold.
    if not re.search('RESOURCE_EXHAUSTED|Ran out of memory|HbmOom', message):
      raise
    used = re.search(r'Used ([\d.]+)([GM]) of', message)
    return result | {
        'error': 'out of memory', 'needed': used and float(
            used[1]) * (2 ** 30 if used[2] == 'G' else 2 ** 20)}
  memory = compiled.memory_analysis()
  cost = compiled.cost_analysis() or {}
  result |= {
      'outputs': memory.output_size_in_bytes - memory.alias_size_in_bytes,
      'temporaries': memory.temp_size_in_bytes,
      'code': memory.generated_code_size_in_bytes,
      'xla_flops': cost.get('flops'), 'xla_bytes': cost.get('bytes accessed'),
      'compile_seconds': round(time.monotonic() - start, 1)}
  result['total'] = (
      memory.argument_size_in_bytes + result['outputs']
      + result['temporaries'] + result['code'] + sum(result['held'].values()))
  return result


def roofline(setting: abstract.Setting, program: abstract.Program,
             chip: chips.Chip | None) -> dict[str, Any]:
  """Lower bounds of a program's time, by published peaks.

      compute   FLOPs, recomputed ones too / peak
      memory    (weights * passes + cache + state, read and written) / bandwidth
      links     the others' share of weights, every pass / links, one way

  Embeddings that are no head are not gathered. Activations are left out,
  attention scores among them, which XLA's attention writes to memory: what is
  measured will be above.

  Returns:
    `intensity`, FLOPs a byte of HBM, and for a known chip `seconds` and what
    they are `bound` by.
  """
  mesh, model = setting.mesh.shape, setting.model.config
  # A teacher and a reference have parameters of their own, by their names.
  params = dict(program.arguments.get(program.name, setting.params()))
  if 'head' in params:  # else the embedding is the head
    del params['embedding']
  parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
  weights = (parameters / mesh['tensor'] * np.dtype(model.dtype).itemsize
             * program.passes)
  state = 2 * sum(_bytes_a_device(program.arguments[kind])
                  for kind in ('parameters', 'optimizer')
                  if program.name == 'update')
  compute = (program.flops + program.recomputed) / setting.mesh.size
  memory = weights + program.cache / setting.mesh.size + state
  found = {'intensity': compute / memory}
  if chip:
    times = {
        'compute': compute / chip.flops,
        'memory': memory / chip.bandwidth,
        'links': weights * (1 - 1 / mesh['fsdp']) / (chip.links / 2)}
    found['bound'] = max(times, key=times.get)
    found |= {'seconds': times[found['bound']], 'times': times}
  return found


def _bytes_a_device(tree: Any) -> int:
  """Of arrays with shardings, on the fullest device."""
  return sum(
      math.prod(x.sharding.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize
      for x in jax.tree.leaves(tree))


def size_of(size: float) -> str:
  """Bytes for people, in powers of ten."""
  for unit in ('B', 'kB', 'MB', 'GB'):
    if size < 1000 or unit == 'GB':
      return f'{size:.3g} {unit}' if unit != 'GB' else f'{size:.2f} GB'
    size /= 1000


def text(found: Mapping[str, Any]) -> str:
  """What `measure` found, for people."""
  mesh = ', '.join(f'{k}={v}' for k, v in found['mesh'].items() if v > 1)
  s = found['shape']
  lines = [
      f'{found["stage"]} on {found["devices"]} x {found["chip"]} '
      f'({mesh or "one device"}; compiler: {found["compiler"]})',
      f'  P={s["prompt"]:,} L={s["response"]} B={s["block_size"]} '
      f'G={s["rollouts"]} V={s["vocabulary"]:,}; {found["batch_size"]} '
      f'requests in {found["accumulate"]} parts; {s["steps_per_block"]:g} '
      'steps a block']
  for name, x in found['programs'].items():
    lines.append(f'  {name}, {x["runs"]:g} an update')
    sizes = {**x['arguments'],
             **{f'{kind} held beside it': size
                for kind, size in x['held'].items()}}
    if 'error' in x:
      lines.append(f'    does not fit: {x["error"]}')
    else:
      sizes |= {k: x[k] for k in ('outputs', 'temporaries', 'code', 'total')}
    lines += [f'    {kind:<28}{size_of(size):>10} a device'
              for kind, size in sizes.items() if size]
    lines.append(f'    {"FLOPs, closed form":<28}{x["flops"] / 1e12:>10.3g} T '
                 f'a device (+ {x["recomputed_flops"] / 1e12:.3g} T again)')
    if x.get('xla_flops'):
      lines.append(f'    {"FLOPs by XLA, loops once":<28}'
                   f'{x["xla_flops"] / 1e12:>10.3g} T')
    lines.append(f'    {"FLOPs a byte of HBM":<28}{x["intensity"]:>10.0f}')
    if 'seconds' in x:
      lines.append(f'    {"at least":<28}{x["seconds"]:>10.3f} s, bound by '
                   f'{x["bound"]}')
  if found['fits'] is not None:
    seconds = sum(x['seconds'] * x['runs'] for x in found['programs'].values())
    lines.append(f'  {"fits" if found["fits"] else "DOES NOT FIT"}; at least '
                 f'{seconds:.2f} s an update, by published peaks')
  return '\n'.join(lines)


def main(argv: Sequence[str]) -> None:
  """Plans; what users can mend is one line on stderr and exit code 1."""
  try:
    if len(argv) > 1 or _CONFIG.value is None or _TOPOLOGY.value is None:
      raise ValueError('--config and --topology are required; see --help.')
    config = _CONFIG.value
    if 'data' in config and not config.data.get('path'):
      config.data.path = 'planned'  # nothing is read
    if _QWEN3.value:
      abstract.take_shape(config, _QWEN3.value)
    elif directory := config.model.get('huggingface'):
      if not (pathlib.Path(directory) / 'config.json').exists():
        raise ValueError(f'config.model.huggingface={directory} holds no '
                         'config.json: give the checkpoint, or --qwen3=SIZE '
                         'for its published shape.')
    validation.check(config)
    chip, devices_ = devices(_TOPOLOGY.value, _NUM_SLICES.value)
    stages = _STAGES.value or [s for s in config.recipe
                               if s in abstract.STAGES]
    results = []
    for stage in stages:
      results.append(measure(config, stage, chip, devices_, _STEPS.value))
      print(text(results[-1]), flush=True)
  except ValueError as e:
    sys.exit(f'error: {e}')
  if _OUTPUT.value:
    pathlib.Path(_OUTPUT.value).write_text(
        json.dumps(results, indent=1) + '\n', encoding='utf-8')
  sys.exit(any(result['fits'] is False for result in results))


def set_up(simulated: int = 1) -> None:
  """What has to be said before anything asks JAX for a device."""
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
  os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', simulated)


def run() -> None:
  """The command."""
  wanted = re.search(r'--topology[= ](?!v)\w+:(\d+)', ' '.join(sys.argv))
  set_up(int(wanted[1]) if wanted else 1)
  app.run(main)


if __name__ == '__main__':
  run()
