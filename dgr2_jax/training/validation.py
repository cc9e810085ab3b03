"""Checks a config before anything is written, naming the field at fault.

A field that only the last stage reads should not fail there, after hours: what
can be told from the config alone is told before the first stage. What depends
on the data, such as the length of prompts, is checked where it is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import importlib.util
import math
import re
from typing import Any

import ml_collections

from dgr2_jax.data import mid_training
from dgr2_jax.data import pipeline
from dgr2_jax.data import prompts
from dgr2_jax.decoding import verification
from dgr2_jax.evaluation import metrics
from dgr2_jax.models import canvas
from dgr2_jax.models import huggingface
from dgr2_jax.objectives import denoising
from dgr2_jax.objectives import distillation
from dgr2_jax.objectives import policy
from dgr2_jax.objectives import rewards
from dgr2_jax.retrieval import retrievers
from dgr2_jax.semantic_ids import catalogue
from dgr2_jax.training import optimizer
from dgr2_jax.training import rollouts
from dgr2_jax.training import teachers

# Stages that a recipe may have, in their order.
RECIPE = ('mid_train', 'ar_sft', 'ar_rl', 'convert', 'cft', 'opd', 'rl')
# What is built from a stage's section, and from the sections in it.
_OBJECTIVES = {
    'mid_train': (mid_training.MidTrainingConfig,),
    'ar_sft': (denoising.DenoisingConfig,),
    'ar_rl': (policy.PolicyConfig, denoising.DenoisingConfig),
    'cft': (denoising.DenoisingConfig,),
    'opd': (distillation.DistillationConfig, denoising.DenoisingConfig),
    'rl': (policy.PolicyConfig, denoising.DenoisingConfig)}
_ON_POLICY = {'rollout': rollouts.RolloutConfig, 'reward': rewards.RewardConfig}

# What every training stage must have, and some have more.
_TRAINING = ('batch_size', 'steps', 'learning_rate', 'warmup_steps', 'schedule',
             'weight_decay', 'grad_clip', 'b1', 'b2', 'log_every', 'eval_every',
             'checkpoint_every', 'keep', 'best_metric', 'eval_requests')
_MORE = {'mid_train': ('max_length', 'held_out', 'weights', 'text',
                       'head_chunk'),
         'ar_rl': ('cft_weight',), 'cft': ('eval_threshold',),
         'opd': ('teacher', 'cft_weight'), 'rl': ('cft_weight',)}

# (test, what it expects)
_Rule = tuple[Callable[[Any], bool], str]


def _is_number(value: Any) -> bool:
  return (isinstance(value, (int, float)) and not isinstance(value, bool)
          and math.isfinite(value))


def _whole(low: int, high: float = math.inf) -> _Rule:
  return (lambda x: _is_number(x) and isinstance(x, int) and low <= x <= high,
          f'a whole number of at least {low}'
          + (f' and at most {high}' if high < math.inf else ''))


def _share(x: Any) -> bool:
  return _is_number(x) and 0 <= x <= 1


def _one_of(*values: str) -> _Rule:
  return (lambda x: x in values, f'one of {", ".join(values)}')


_NOT_NEGATIVE = (lambda x: _is_number(x) and x >= 0, 'a number of at least 0')
_NOT_POSITIVE = (lambda x: _is_number(x) and x <= 0, 'a number of at most 0')
_ABOVE_ZERO = (lambda x: _is_number(x) and x > 0, 'a number above 0')
_SHARE = (_share, 'a number from 0 to 1')
_ABOVE_ZERO_TO_ONE = (lambda x: _share(x) and x > 0,
                      'a number above 0 and at most 1')
_BELOW_ONE = (lambda x: _share(x) and x < 1, 'a number from 0 to below 1')
_ABOVE_ZERO_BELOW_ONE = (lambda x: _share(x) and 0 < x < 1,
                         'a number above 0 and below 1')
_SWITCH = (lambda x: isinstance(x, bool), 'True or False')
_THRESHOLDS = (
    lambda x: (isinstance(x, (tuple, list)) and len(x) > 0
               and all(_share(t) and t > 0 for t in x)
               and len(set(x)) == len(x)),
    'one or more different numbers above 0 and at most 1')
_WIDTHS = (
    lambda x: (isinstance(x, (tuple, list)) and len(x) > 0
               and all(_whole(1)[0](width) for width in x)),
    'one or more whole numbers of at least 1')
_STEPS = (
    lambda x: (isinstance(x, (tuple, list)) and (not x or (
        len(x) == 2 and all(_whole(1)[0](step) for step in x)
        and x[0] <= x[1]))),
    'the first and the last step of a profile, from 1, or ()')
_DTYPE = _one_of('float32', 'bfloat16', 'float16')
_METRICS = _one_of(*metrics.METRICS, 'valid_rate', 'reward',
                   'tokens_per_forward')

# Pattern over a field's whole name -> rule; the first that matches counts.
_RULES = tuple((re.compile(pattern), rule) for pattern, rule in (
    (r'(.+\.)?seed', _whole(0, 2 ** 32 - 1)),
    (r'profile_steps', _STEPS),
    (r'data\.min_count', _whole(1)),
    (r'data\.num_candidates', _whole(2)),
    (r'data\.max_train_requests', _whole(0)),
    (r'data\.(keep_misses|check_counts)', _SWITCH),
    (r'data\.retriever\.window', _whole(1)),
    (r'data\.retriever\.(\w+_(decay|power)|backward|backoff)', _NOT_NEGATIVE),
    (r'semantic_ids\.levels', _whole(1, 26)),
    (r'semantic_ids\.(codes|svd_dim)', _whole(1)),
    (r'semantic_ids\.rqvae\.(latent|batch_size|steps)', _whole(1)),
    (r'semantic_ids\.rqvae\.(reset_after|warmup_steps)', _whole(0)),
    (r'semantic_ids\.rqvae\.hidden', _WIDTHS),
    (r'semantic_ids\.rqvae\.learning_rate', _ABOVE_ZERO),
    (r'semantic_ids\.rqvae\.(decay|b1|b2)', _BELOW_ONE),
    (r'semantic_ids\.rqvae\.((commitment|diversity)_weight|weight_decay'
     r'|grad_clip)', _NOT_NEGATIVE),
    (r'boosted\.folds', _whole(2)),
    (r'prompt\.(max_history|max_prompt|max_response|pad_multiple)', _whole(1)),
    (r'prompt\.trace\.(combine_facts|show_index|grades)', _SWITCH),
    (r'prompt\.counterfactuals', _SHARE),
    (r'tokenizer\.(vocab_size|pad_vocab_to)', _whole(1)),
    (r'tokenizer\.num_brands', _whole(0)),
    (r'model\.(num_\w+|width|head_dim|mlp_dim)', _whole(1)),
    (r'model\.(qk_norm|attention_bias|tie_embeddings|unroll_layers)', _SWITCH),
    (r'model\.(rope_theta|norm_eps)', _ABOVE_ZERO),
    (r'model\.(dtype|param_dtype)', _DTYPE),
    (r'model\.canvas_chunk', _whole(0)),
    (r'canvas\.block_size', _whole(1)),
    (r'evaluate\.thresholds', _THRESHOLDS),
    (r'evaluate\.constrained_ar', _SWITCH),
    (r'evaluate\.num_examples', _whole(0)),
    (r'evaluate\.verify\.steps', _whole(1)),
    (r'evaluate\.verify\.window', _one_of(*verification.WINDOWS)),
    (r'evaluate\.verify\.threshold', _ABOVE_ZERO_TO_ONE),
    (r'evaluate\.(max_denoising_steps|bootstrap_resamples|timing_\w+)',
     _whole(1)),
    (r'mid_train\.max_length', _whole(2)),
    (r'mid_train\.held_out', _ABOVE_ZERO_BELOW_ONE),
    (r'mid_train\.weights\.\w+', _NOT_NEGATIVE),
    (r'mid_train\.text', (lambda x: isinstance(x, str), 'a path, or empty')),
    # Checked with the tasks.
    (r'mid_train\.best_metric', (lambda x: isinstance(x, str), 'a name')),
    (r'\w+\.rollout\.(num_rollouts|updates|max_denoising_steps|refill'
     r'|canvases_per_row)', _whole(1)),
    (r'\w+\.rollout\.top_k', _whole(0)),
    (r'\w+\.rollout\.(threshold|top_p)', _ABOVE_ZERO_TO_ONE),
    (r'\w+\.rollout\.temperature', _NOT_NEGATIVE),
    (r'\w+\.rollout\.canvases', _one_of('all', 'one')),
    (r'\w+\.reward\.overlong_buffer', _whole(0)),
    (r'\w+\.reward\.invalid', _NOT_POSITIVE),
    (r'\w+\.reward\.format_weight', _NOT_NEGATIVE),
    # Fields of every section that trains or decodes.
    (r'\w+\.(batch_size|steps|eval_every|checkpoint_every|log_every|keep)',
     _whole(1)),
    (r'\w+\.(warmup_steps|eval_requests|head_chunk)', _whole(0)),
    (r'\w+\.accumulate', _whole(1)),
    (r'\w+\.teacher_dtype', _DTYPE),
    (r'\w+\.teacher_fsdp', _SWITCH),
    (r'\w+\.optimizer\.lora\.rank', _whole(1)),
    (r'\w+\.optimizer\.lora\.alpha', _ABOVE_ZERO),
    (r'\w+\.learning_rate', _ABOVE_ZERO),
    (r'\w+\.(weight_decay|grad_clip|(reasoning|answer|ar|kl|cft)_weight'
     r'|clip_high)', _NOT_NEGATIVE),
    (r'\w+\.clip_low', _SHARE),
    (r'\w+\.teacher_top_k', _whole(0)),
    (r'\w+\.mask_pairs', _whole(1)),
    (r'\w+\.(b1|b2)', _BELOW_ONE),
    (r'\w+\.(full_block_prob|min_ratio)', _SHARE),
    (r'\w+\.random_offset', _SWITCH),
    (r'\w+\.eval_threshold', _ABOVE_ZERO_TO_ONE),
    (r'\w+\.schedule', _one_of('cosine', 'constant')),
    (r'\w+\.best_metric', _METRICS),
))


def check(config: ml_collections.ConfigDict) -> None:
  """Checks what can be told from the config alone.

  Args:
    config: of an experiment; sections that it lacks are not checked.

  Raises:
    ValueError: a field is out of range or of the wrong type, or two fields
      contradict each other; the message names them.
  """
  _check_fields(config, '')
  for name, build in (
      ('prompt', prompts.PromptConfig.from_config),
      ('canvas', lambda section: canvas.CanvasConfig(**section)),
      ('evaluate', lambda section: verification.DraftConfig(**section.verify)),
      ('model', lambda section: huggingface.model_config(
          section, vocab_size=1)),
      ('semantic_ids', catalogue.check),
      ('data', lambda section: 'retriever' in section and retrievers.check(
          section.retriever))):
    if name in config:
      try:
        build(config[name])
      except (TypeError, KeyError, AttributeError) as e:
        raise ValueError(
            f'config.{name} has a field too many or too few: {e}') from e
  _check_together(config)


def _check_fields(section: ml_collections.ConfigDict, prefix: str) -> None:
  for name, value in section.items():
    if isinstance(value, ml_collections.ConfigDict):
      _check_fields(value, f'{prefix}{name}.')
      continue
    for pattern, (good, expected) in _RULES:
      if pattern.fullmatch(prefix + name):
        if not good(value):
          raise ValueError(
              f'config.{prefix}{name} is {value!r}: expected {expected}.')
        break


def _require(section: ml_collections.ConfigDict, prefix: str,
             wanted: Mapping[str, Iterable[str]]) -> None:
  """Sections and the fields that they must have."""
  for name, fields in wanted.items():
    if not isinstance(section.get(name), ml_collections.ConfigDict):
      raise ValueError(f'config.{prefix}{name} is missing, or no section.')
    for field in fields:
      if field not in section[name]:
        raise ValueError(f'config.{prefix}{name}.{field} is missing.')


def _check_stage(name: str, section: ml_collections.ConfigDict) -> None:
  """The fields of a stage: all that it needs, and no others."""
  def build(cls, values, what):
    try:
      cls(**values)
    except (TypeError, ValueError) as e:
      raise ValueError(f'config.{what}: {e}') from e

  known = {*_TRAINING, *_MORE.get(name, ()), 'accumulate', 'optimizer'}
  if name == 'opd':
    known |= {'teacher_dtype', 'teacher_fsdp'}
  if name in ('opd', 'rl'):  # else as it rolls out
    known |= {'eval_threshold'}
  build(optimizer.OptimizerConfig, section.get('optimizer', {}),
        f'{name}.optimizer')
  parts = section.get('accumulate', 1)
  if section.batch_size % parts:
    raise ValueError(f'config.{name}.accumulate is {parts}: expected a divisor '
                     f'of {name}.batch_size={section.batch_size}.')
  for cls in _OBJECTIVES[name]:
    fields = {field.name for field in dataclasses.fields(cls)}
    build(cls, {f: section[f] for f in fields if f in section}, name)
    known |= fields
  if name in ('ar_rl', 'opd', 'rl'):
    for field, cls in _ON_POLICY.items():
      _require(section, f'{name}.', {
          field: [f.name for f in dataclasses.fields(cls)]})
      build(cls, section[field], f'{name}.{field}')
    known |= _ON_POLICY.keys()
  if unknown := sorted(set(section) - known):
    raise ValueError(f'config.{name}.{unknown[0]} is no field of this stage: '
                     f'expected some of {", ".join(sorted(known))}.')


def _check_recipe(config: ml_collections.ConfigDict) -> None:
  """The stages between prepare and evaluate, and their sections."""
  if not isinstance(config.recipe, (tuple, list)):
    raise ValueError(f'config.recipe is {config.recipe!r}: expected a tuple of '
                     'stages.')
  recipe = tuple(config.recipe)
  known = [name for name in RECIPE if name in recipe]
  if list(recipe) != known or not {'ar_sft', 'convert', 'cft'} <= set(recipe):
    raise ValueError(
        f'config.recipe is {recipe}: expected names of {RECIPE}, in this '
        'order, with ar_sft, convert and cft among them.')
  _require(config, '', {'evaluate': (), **{
      name: (*_TRAINING, *_MORE.get(name, ())) for name in recipe
      if name != 'convert'}})
  chunk = config.get('model', {}).get('canvas_chunk', 0)
  for name in recipe:
    if name == 'convert':
      continue
    section = config[name]
    _check_stage(name, section)
    if name == 'mid_train':
      tasks = mid_training.MidTrainingConfig.from_config(section).tasks
      known = ('logprob', *(f'{task}_logprob' for task in tasks))
      if section.best_metric not in known:
        raise ValueError(
            f'config.mid_train.best_metric is {section.best_metric!r}: '
            f'expected one of {", ".join(known)}.')
    if name == 'opd':
      if '/' not in str(section.teacher):  # another run's where it is needed
        teachers.check(config)
      if section.rollout.refill != 1:
        raise ValueError(f'config.opd.rollout.refill is '
                         f'{section.rollout.refill}: expected 1; every group '
                         'is distilled.')
      greedy = not section.rollout.temperature or section.rollout.top_k == 1
      if greedy and section.rollout.num_rollouts > 1:
        raise ValueError('config.opd.rollout.num_rollouts is '
                         f'{section.rollout.num_rollouts}: expected 1 where '
                         'they are greedy, and equal.')
    rollout = section.get('rollout', {})
    buffer = section.get('reward', {}).get('overlong_buffer', 0)
    if buffer > config.prompt.max_response:
      raise ValueError(
          f'config.{name}.reward.overlong_buffer is {buffer}: expected at most '
          f'prompt.max_response={config.prompt.max_response}.')
    if name in ('ar_rl', 'rl'):
      if rollout.canvases != 'all':
        raise ValueError(
            f'config.{name}.rollout.canvases is {rollout.canvases!r}: '
            "expected 'all'; a token is scored on the step that decided it.")
      for field, good, expected in (
          ('num_rollouts', rollout.num_rollouts > 1, 'at least 2'),
          ('temperature', rollout.temperature >= 1e-3, 'at least 0.001'),
          ('top_k', rollout.top_k != 1, 'at least 2, or 0')):
        if not good:
          raise ValueError(
              f'config.{name}.rollout.{field} is {rollout[field]}: expected '
              f'{expected}; nothing is learned from groups of equals.')
    if chunk and name in ('opd', 'rl') and rollout.canvases_per_row % chunk:
      raise ValueError(
          f'config.model.canvas_chunk is {chunk}: expected a divisor of '
          f'{name}.rollout.canvases_per_row={rollout.canvases_per_row}.')
    unit = rollout.get('updates', 1)
    for field in ('steps', 'eval_every', 'checkpoint_every'):
      if section[field] % unit:
        raise ValueError(
            f'config.{name}.{field} is {section[field]}: expected a multiple '
            f'of {name}.rollout.updates={unit}; a round is not split.')


def _check_together(config: ml_collections.ConfigDict) -> None:
  """Fields that are good by themselves."""
  if 'recipe' in config:
    _check_recipe(config)
  data = config.get('data', {})
  if data.get('source', 'embedded') != 'embedded' and not data.get('path'):
    raise ValueError(f'config.data.path is empty: data.source={data.source!r} '
                     'needs the directory of the data.')
  prompt = config.get('prompt', {})
  compact = prompt.get('response_format') == prompts.COMPACT
  if prompt and prompt.trace.grades and prompt.answer_order != 'teacher':
    raise ValueError(
        'config.prompt.trace.grades are those of the teacher: expected '
        f"prompt.answer_order='teacher', got {prompt.answer_order!r}; or set "
        'grades to False.')
  if prompt and not compact and config.get('evaluate', {}).get(
      'constrained_ar'):
    raise ValueError(
        'config.evaluate.constrained_ar masks whole-token candidates: expected '
        f"prompt.response_format='compact', got {prompt.response_format!r}; or "
        'set constrained_ar to False.')
  if prompt and 'canvas' in config:
    length = pipeline.padded_length(
        [prompt.max_response], prompt.pad_multiple)
    if length % config.canvas.block_size:
      raise ValueError(
          f'config.canvas.block_size={config.canvas.block_size} does not '
          f'divide the {length} tokens of a response: prompt.max_response='
          f'{prompt.max_response} rounded up to prompt.pad_multiple='
          f'{prompt.pad_multiple}.')
  if config.get('model', {}).get('huggingface'):
    kind = config.get('tokenizer', {}).get('kind')
    if kind != 'huggingface':
      raise ValueError(f'config.tokenizer.kind is {kind!r}: expected '
                       "'huggingface' with model.huggingface, whose rows are "
                       "those of its own tokenizer's ids.")
    if importlib.util.find_spec('safetensors') is None:
      raise ValueError('config.model.huggingface needs the package safetensors:'
                       " pip install -e '.[hf]'.")
  block_causal = config.get('canvas', {}).get('clean_stream') == 'block_causal'
  if (config.get('opd', {}).get('positions') == 'corrected' and not compact):
    raise ValueError(
        "config.opd.positions is 'corrected': it needs candidates that are "
        "single tokens, prompt.response_format='compact'.")
  for name in config.get('recipe', ()):
    section = config.get(name, {})
    # The AR model is one token a block, where both streams are the same.
    if (block_causal and name not in ('ar_sft', 'ar_rl')
        and section.get('ar_weight')):
      raise ValueError(
          f'config.{name}.ar_weight is {section.ar_weight}: expected 0 with '
          "canvas.clean_stream='block_causal', whose clean stream sees the "
          'tokens that it would score.')
    if block_causal and section.get('random_offset'):
      raise ValueError(
          f'config.{name}.random_offset is True: expected False with '
          "canvas.clean_stream='block_causal', whose keys know the rest of "
          'their block.')
