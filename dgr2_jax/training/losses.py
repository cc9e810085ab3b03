"""The loss of every stage, from its section of the config.

    mid_train      next token     of packed rows
    ar_sft, cft    denoising      of records
    ar_rl, rl      policy         of the policy's responses, replayed
    opd            distillation   of the student's responses, replayed
                                  + cft_weight * denoising of records

They are pure functions that know of neither files nor devices: `stages.py`
trains with them, and `abstract.py` lowers them from shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import ml_collections

from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import flops
from dgr2_jax.models import partition
from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib
from dgr2_jax.objectives import denoising
from dgr2_jax.objectives import distillation
from dgr2_jax.objectives import language_modelling
from dgr2_jax.objectives import policy
from dgr2_jax.training import rollouts
from dgr2_jax.training import step as step_lib

# What a teacher reads of a batch.
TEACHER_READS = ('prompt', 'prompt_length', 'response')


class Setting(Protocol):
  """What losses need of an `experiment.Experiment`."""
  config: ml_collections.ConfigDict
  model: transformer.Transformer
  teacher: transformer.Transformer
  vocabulary: vocabulary_lib.Vocabulary
  canvas: canvas_lib.CanvasConfig

  def candidate_ids(self) -> tuple[int, ...]:
    """The candidates' tokens of the compact form."""


def canvas_of(setting: Setting, stage: str) -> canvas_lib.CanvasConfig:
  """Block size and rules of a stage: B = 1 before the conversion."""
  return (canvas_lib.AUTOREGRESSIVE
          if stage in ('mid_train', 'ar_sft', 'ar_rl') else setting.canvas)


def loss_of(setting: Setting, stage: str) -> step_lib.LossFn:
  """The loss of a stage: (params, batch, key) -> (terms, metrics)."""
  if stage == 'mid_train':
    return _of_rows(setting)
  if stage in ('ar_sft', 'cft'):
    return _of_records(setting, stage)
  return _of_responses(setting, stage)


def objective_of(cls: type, section: Mapping[str, Any]) -> Any:
  """A `cls` of those of its fields that `section` has."""
  return cls(**{field.name: section[field.name]
                for field in dataclasses.fields(cls) if field.name in section})


def _of_rows(setting: Setting) -> step_lib.LossFn:
  head_chunk = setting.config.mid_train.head_chunk

  def loss_fn(params, batch, key):
    del key  # nothing is drawn
    loss, measured = language_modelling.loss(
        setting.model, params, batch, setting.vocabulary, head_chunk)
    return (loss,), measured

  return loss_fn


def _denoising(setting: Setting, stage: str) -> Callable[..., Any]:
  objective = objective_of(denoising.DenoisingConfig, setting.config[stage])
  return lambda params, batch, key: denoising.loss(
      setting.model, params, batch, key, canvas_of(setting, stage), objective,
      setting.vocabulary)


def _of_records(setting: Setting, stage: str) -> step_lib.LossFn:
  loss_of_records = _denoising(setting, stage)

  def loss_fn(params, batch, key):
    loss, measured = loss_of_records(params, batch, key)
    tokens = batch['prompt_length'].sum() + batch['response_length'].sum()
    return (loss,), measured | {'tokens': tokens.astype(jnp.float32)}

  return loss_fn


def _of_responses(setting: Setting, stage: str) -> step_lib.LossFn:
  section, canvas = setting.config[stage], canvas_of(setting, stage)
  if stage == 'opd':
    objective = objective_of(distillation.DistillationConfig, section)
    candidates = setting.candidate_ids()
    own = lambda params, batch: distillation.loss(
        setting.model, params, batch, canvas, objective, setting.vocabulary,
        batch.get(step_lib.FROZEN), candidates, setting.teacher)
  else:
    objective = objective_of(policy.PolicyConfig, section)
    own = lambda params, batch: policy.loss(
        setting.model, params, batch, canvas, objective, setting.vocabulary,
        section.rollout.temperature)
  loss_of_records = _denoising(setting, stage)

  def loss_fn(params, batch, key):
    loss, measured = own(params, batch)
    terms, measured = (loss,), measured | rollouts.measured(batch)
    if section.cft_weight:
      other, _ = loss_of_records(params, batch['supervised'], key)
      terms += (other.times(section.cft_weight),)
      measured['cft_loss'] = other
    return terms, measured

  return loss_fn


def replayed_logprobs(setting: Setting,
                      stage: str) -> Callable[..., jax.Array]:
  """(params, batch) -> `policy.replayed_logprobs` of a reference."""
  section = setting.config[stage]
  return functools.partial(
      policy.replayed_logprobs, setting.model,
      canvas=canvas_of(setting, stage), vocabulary=setting.vocabulary,
      temperature=section.rollout.temperature,
      head_chunk=objective_of(policy.PolicyConfig, section).head_chunk)


def teacher_states(setting: Setting) -> Callable[..., jax.Array]:
  """(teacher's params, `TEACHER_READS` of a batch) -> its clean states."""
  def clean_states(params, batch):
    return canvas_lib.states(
        setting.teacher, params, canvas_lib.autoregressive(
            *(batch[k] for k in TEACHER_READS)),
        setting.vocabulary.mask_id, canvas_lib.AUTOREGRESSIVE).clean

  return clean_states


def teacher_rules(setting: Setting) -> partition.Rules:
  """How the teacher's parameters lie on the mesh.

  As the student's, or with `opd.teacher_fsdp=False` whole along fsdp: its
  forward then gathers nothing.
  """
  if setting.config.opd.get('teacher_fsdp', True):
    return transformer.RULES
  return partition.whole(transformer.RULES)


def head_of(params: Any) -> Any:
  """The parameters that turn states into logits."""
  return {k: v for k, v in params.items() if k != 'layers'}


def update_work(setting: Setting, stage: str,
                batch: Mapping[str, Any]) -> flops.Work:
  """What an update puts through the model, padding included.

  Args:
    setting: of the run.
    stage: that trains.
    batch: its arrays or their shapes.
  """
  section, canvas = setting.config[stage], canvas_of(setting, stage)
  if stage == 'mid_train':
    n, length = batch['tokens'].shape
    return flops.Work(n * length, n * length ** 2, n * (length - 1))
  if stage in ('ar_sft', 'cft'):
    return _records_work(section, canvas, batch)
  work = replay_work(setting, stage, batch)
  if section.cft_weight:
    work += _records_work(section, canvas, batch['supervised'])
  return work


def replay_work(setting: Setting, stage: str,
                batch: Mapping[str, Any]) -> flops.Work:
  """What one replay of an on-policy batch puts through the model."""
  section, canvas = setting.config[stage], canvas_of(setting, stage)
  n, g, length = batch['response'].shape
  _, rows, m, b = batch['masked'].shape
  first = int(canvas.shifted)
  seeds = g * length // b * first
  if stage == 'opd':
    seeds = g * length if section.get('ar_weight') else seeds
    noisy = rows * m * (b - first)
  else:
    noisy = min(g * length, rows * m * b)
  return flops.canvas(n, batch['prompt'].shape[1], rows, length, m, b,
                      seeds + noisy)


def _records_work(section: Mapping[str, Any], canvas: canvas_lib.CanvasConfig,
                  batch: Mapping[str, Any]) -> flops.Work:
  n, g, length = batch['response'].shape
  b, pairs = canvas.block_size, section.get('mask_pairs', 1)
  blocks = length // b + bool(section.get('random_offset'))
  if b == 1 and canvas.shifted:  # every token is a seed
    return flops.canvas(n, batch['prompt'].shape[1], g, length, 0, 1,
                        g * length)
  clean = length if section.get('ar_weight') else blocks * int(canvas.shifted)
  return flops.canvas(n, batch['prompt'].shape[1], g, length,
                      2 * pairs * blocks, b, g * (clean + length * pairs))


def update_flops(setting: Setting, stage: str,
                 batch: Mapping[str, Any]) -> int:
  """FLOPs of an update, see `models/flops.py`; nothing recomputed counts."""
  work = update_work(setting, stage, batch)
  count = flops.update(setting.model.config, work)
  if stage == 'opd':  # the teacher's logits of the same rows, no gradient
    count += flops.forward(setting.teacher.config,
                           flops.Work(0, 0, work.head_rows))
  return count
