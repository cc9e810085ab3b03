"""Every program of a stage, from the config and a mesh alone.

    config, mesh -> shapes of parameters, state and batch, with shardings
                 -> update | teacher | reference | rollout, lowered: no
                    weights, no data

The programs are those that training runs (`losses.py`, `step.program`,
`block_decoder.decode`). What only data would tell is taken at its largest: P
and L are `prompt.max_prompt` and `max_response` rounded up to `pad_multiple`,
brands are as many as `tokenizer.num_brands`. How many canvases a replay has is
decided by the policy, and an argument here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
import math
import pathlib
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
import ml_collections
import numpy as np

from dgr2_jax.data import pipeline
from dgr2_jax.data import prompts
from dgr2_jax.data import tokenizer as tokenizer_lib
from dgr2_jax.data import vocabulary as vocabulary_names
from dgr2_jax.decoding import block_decoder
from dgr2_jax.decoding import commit
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import flops
from dgr2_jax.models import huggingface
from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib
from dgr2_jax.training import losses
from dgr2_jax.training import rollouts
from dgr2_jax.training import sharding
from dgr2_jax.training import step as step_lib
from dgr2_jax.training import teachers

STAGES = ('mid_train', 'ar_sft', 'ar_rl', 'cft', 'opd', 'rl')
_QWEN3_IDS = 151669  # of text and special tokens; later rows are not used

# Of the models' config.json.
QWEN3 = {
    '0.6b': dict(num_layers=28, width=1024, num_heads=16, mlp_dim=3072,
                 tie_embeddings=True),
    '1.7b': dict(num_layers=28, width=2048, num_heads=16, mlp_dim=6144,
                 tie_embeddings=True),
    '4b': dict(num_layers=36, width=2560, num_heads=32, mlp_dim=9728,
               tie_embeddings=True),
    '8b': dict(num_layers=36, width=4096, num_heads=32, mlp_dim=12288,
               tie_embeddings=False),
}


def take_shape(config: ml_collections.ConfigDict, size: str) -> None:
  """Gives `config.model` the shape of a Qwen3; how it computes stays."""
  free = {k: v for k, v in config.model.items() if k in huggingface.FREE}
  config.model = dict(
      QWEN3[size], num_kv_heads=8, head_dim=128, rope_theta=1e6, norm_eps=1e-6,
      qk_norm=True, attention_bias=False, **free)


class Setting:
  """A `losses.Setting` without data, and the lengths of its arrays.

  Attributes:
    config: the whole config.
    mesh: of the devices that are planned for.
    prompt_length: P.
    response_length: L.
    vocabulary, model, teacher, canvas: see `experiment.Experiment`.
  """

  def __init__(self, config: ml_collections.ConfigDict, mesh: Mesh):
    self.config = config
    self.mesh = mesh
    self.canvas = canvas_lib.CanvasConfig(**config.canvas)
    pad = lambda length: pipeline.padded_length(
        [length], config.prompt.pad_multiple)
    self.prompt_length = pad(config.prompt.max_prompt)
    self.response_length = pad(config.prompt.max_response)
    self.vocabulary = _vocabulary(config)
    self.model = transformer.Transformer(huggingface.model_config(
        config.model, self.vocabulary.size))

  def candidate_ids(self) -> tuple[int, ...]:
    """As many ids as there are candidates in the compact form."""
    if self.config.prompt.response_format != prompts.COMPACT:
      return ()
    return tuple(range(self.config.data.num_candidates))

  @functools.cached_property
  def teacher(self) -> transformer.Transformer:
    """See `teachers.model`."""
    return teachers.model(self.config, self.model.config)

  def params(self, model: transformer.Transformer | None = None,
             rules: sharding.Rules = transformer.RULES) -> Any:
    """The shapes on the mesh of a model's parameters, the student's."""
    params = transformer.abstract_params((model or self.model).config)
    return sharding.abstract(params, sharding.param_shardings(
        self.mesh, params, rules))


def _vocabulary(config: ml_collections.ConfigDict) -> vocabulary_lib.Vocabulary:
  """Sizes as `data/vocabulary.py` would make them; the ids are made up."""
  section = config.tokenizer
  names = vocabulary_names.special_names(
      prompts.PromptConfig.from_config(config.prompt), (),
      config.semantic_ids.levels, config.semantic_ids.codes,
      config.data.num_candidates, 0, 'mid_train' in config.recipe)
  path = pathlib.Path(section.path) / 'tokenizer.json'
  if section.kind == 'huggingface' and path.exists():
    size = tokenizer_lib.from_huggingface(
        section.path, names, section.pad_vocab_to).vocab_size
    used = size - 1
  else:
    text = _QWEN3_IDS if section.kind == 'huggingface' else section.vocab_size
    used = text + 1 + len(names)
    if config.prompt.response_format == prompts.COMPACT:
      used += section.num_brands
    size = -(-used // section.pad_vocab_to) * section.pad_vocab_to
  return vocabulary_lib.Vocabulary(
      size=size, mask_id=used - 1, eos_id=1,
      banned=(used - 1, *range(used, size)))


class Program(NamedTuple):
  """One program of a stage.

  Attributes:
    name: 'update', 'teacher', 'reference', 'rollout' or 'validation'.
    lower: () -> `jax.stages.Lowered`.
    arguments: the shapes of what it reads, by kind.
    flops: of one run, in closed form.
    runs: an update.
    recomputed: FLOPs that the backward pass computes again, in closed form.
    passes: times that every weight is read in a run.
    cache: bytes of cached keys and values read in a run, over all devices.
  """
  name: str
  lower: Callable[[], jax.stages.Lowered]
  arguments: Mapping[str, Any]
  flops: int
  runs: float = 1
  recomputed: int = 0
  passes: float = 1
  cache: float = 0


def programs(setting: Setting, stage: str,
             steps: float = 10.) -> list[Program]:
  """The programs that a stage runs between two updates.

  Args:
    setting: from shapes.
    stage: of `STAGES`.
    steps: denoising steps a block of a rollout; decides the size of a replay.

  Raises:
    ValueError: `stage` is not in the recipe, or a batch does not divide.
  """
  if stage not in STAGES or stage not in setting.config.recipe:
    raise ValueError(f'stage {stage!r} cannot be planned: expected one of '
                     + ', '.join(s for s in setting.config.recipe
                                 if s in STAGES))
  section = setting.config[stage]
  parts, rows = section.get('accumulate', 1), math.prod(
      setting.mesh.shape[axis] for axis in sharding.BATCH_AXES)
  if section.batch_size % (parts * rows):
    raise ValueError(
        f'{stage}.batch_size={section.batch_size} in accumulate={parts} parts '
        f'does not split over {rows} devices (mesh data x fsdp): a part must '
        'have a multiple of them.')
  batch = batch_of(setting, stage, steps)
  params = setting.params()
  teacher = None
  found = []
  if stage == 'opd' and section.teacher != 'self':
    teacher = setting.params(setting.teacher, losses.teacher_rules(setting))
    reads = {k: batch[k] for k in losses.TEACHER_READS}
    states = jax.jit(losses.teacher_states(setting))
    found.append(Program(
        'teacher', lambda: _lower(setting, states, teacher, reads),
        {'teacher': teacher, 'batch': reads},
        flops.forward(setting.teacher.config, flops.canvas(
            *batch['prompt'].shape, *batch['response'].shape[1:], 0, 1, 0))))
    batch |= {
        'teacher_states': _batched(
            setting, (*batch['response'].shape, setting.teacher.config.width),
            setting.teacher.config.dtype),
        step_lib.FROZEN: losses.head_of(teacher)}
  if section.get('kl_weight'):
    score = jax.jit(losses.replayed_logprobs(setting, stage))
    replayed = {k: v for k, v in batch.items() if k != 'reference_logprob'}
    found.append(Program(
        'reference', lambda: _lower(setting, score, params, replayed),
        {'reference': params, 'batch': replayed},
        flops.forward(setting.model.config,
                      losses.replay_work(setting, stage, batch))))
  step = step_lib.program(
      losses.loss_of(setting, stage), params, batch, section, setting.mesh,
      transformer.RULES, setting.config.seed)
  work = losses.update_work(setting, stage, batch)
  again = setting.model.config.remat == 'full'
  found.insert(0, Program(
      'update', lambda: _lower(setting, step.update, step.state, batch),
      {'parameters': (step.state.params, step.state.base),
       'optimizer': step.state.opt_state,
       'batch': {k: v for k, v in batch.items() if k != step_lib.FROZEN},
       'teacher': batch.get(step_lib.FROZEN)},
      losses.update_flops(setting, stage, batch),
      recomputed=flops.recomputed(setting.model.config, work),
      passes=(2 + again) * section.get('accumulate', 1)))
  if stage != 'mid_train':
    found.append(_decoding(setting, stage, params, steps))
  return found


def batch_of(setting: Setting, stage: str, steps: float) -> dict[str, Any]:
  """The arrays of an update's batch; `steps` as in `programs`."""
  if stage == 'mid_train':
    section = setting.config.mid_train
    array = functools.partial(
        _batched, setting, (section.batch_size, section.max_length))
    return dict(tokens=array(), start=array(), weight=array(np.float32))
  if stage in ('ar_sft', 'cft'):
    return _records(setting, stage)
  return _responses(setting, stage, steps)


def _lower(setting: Setting, function: Any, *args: Any,
           **kwargs: Any) -> jax.stages.Lowered:
  with jax.set_mesh(setting.mesh):
    return function.lower(*args, **kwargs)


def _batched(setting: Setting, shape: tuple[int, ...],
             dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
  """An array of a batch: requests are split."""
  return jax.ShapeDtypeStruct(
      shape, dtype, sharding=sharding.batch_sharding(setting.mesh))


def _requests(setting: Setting, n: int, g: int) -> dict[str, Any]:
  """What every batch holds of requests and their responses."""
  array = functools.partial(_batched, setting)
  response = (n, g, setting.response_length)
  return dict(
      prompt=array((n, setting.prompt_length)), prompt_length=array((n,)),
      response=array(response), response_length=array((n, g)),
      is_answer=array(response, bool))


def _records(setting: Setting, stage: str) -> dict[str, Any]:
  """A batch of `pipeline.train_batches`."""
  n = setting.config[stage].batch_size
  return _requests(setting, n, 1) | dict(
      supervised_from=_batched(setting, (n, 1)),
      example_id=_batched(setting, (n,)))


def _responses(setting: Setting, stage: str, steps: float) -> dict[str, Any]:
  """A batch of `rollouts.Rollouts`."""
  section, canvas = setting.config[stage], losses.canvas_of(setting, stage)
  rollout = rollouts.RolloutConfig(**section.rollout)
  n, g, b = section.batch_size, rollout.num_rollouts, canvas.block_size
  array = functools.partial(_batched, setting)
  batch = _requests(setting, n, g)
  m = rollout.canvases_per_row if b > canvas.shifted else 0
  visited = setting.response_length // b * (
      1 if rollout.canvases == 'one' else steps)
  rows = g * math.ceil(visited / m) if m else g
  batch |= dict(
      logprob=array(batch['response'].shape, np.float32),
      advantage=array((n, g), np.float32), kept=array((n,), bool),
      owner=array((n, rows)), first=array((n, g)),
      start=array((n, rows, m)), masked=array((n, rows, m, b), bool),
      decided=array((n, rows, m, b), bool),
      weight=array((n, rows, m), np.float32), round={})
  if section.get('kl_weight'):
    batch['reference_logprob'] = batch['logprob']
  if section.cft_weight:
    batch['supervised'] = _records(setting, stage)
  return batch


def _decoding(setting: Setting, stage: str, params: Any,
              steps: float) -> Program:
  """Decoding of a round's prompts; of validation's, where there are none."""
  section, canvas = setting.config[stage], losses.canvas_of(setting, stage)
  config, threshold, runs = setting.config.evaluate, 1., 0.
  n, g, decode = config.batch_size, 1, block_decoder.DecodeConfig(
      max_response=setting.response_length,
      max_denoising_steps=config.max_denoising_steps)
  if 'rollout' in section:
    rollout = rollouts.RolloutConfig(**section.rollout)
    n, g = section.batch_size, rollout.num_rollouts
    threshold, runs = rollout.threshold, rollout.refill
    decode = rollout.sampling(setting.response_length)
  p, length, b = (setting.prompt_length, setting.response_length,
                  canvas.block_size)
  array = functools.partial(_batched, setting)
  key = jax.eval_shape(lambda: jax.random.key(0))
  reads = dict(prompt=array((n, p)), prompt_length=array((n,)),
               example_id=array((n,)))
  model = setting.model.config
  # A call a denoising step, and one to commit the block.
  calls = length // b * (steps + 1 if b > 1 else 1)
  call = flops.forward(model, flops.decoding_call(n * g, p, length, b))
  prefill = flops.forward(model, flops.Work(n * p, n * p * p, 0))
  return Program(
      'rollout' if runs else 'validation',
      lambda: _lower(
          setting, block_decoder.decode, setting.model, params, *reads.values(),
          jax.ShapeDtypeStruct(key.shape, key.dtype,
                               sharding=sharding.replicated(setting.mesh)),
          commit.Threshold(threshold), vocabulary=setting.vocabulary,
          canvas=canvas, config=decode),
      {'parameters': params, 'batch': reads}, int(prefill + calls * call),
      runs, passes=1 + calls, cache=calls * n * (p + g * length) * 2
      * model.num_layers * model.num_kv_heads * model.head_dim
      * np.dtype(model.dtype).itemsize)
