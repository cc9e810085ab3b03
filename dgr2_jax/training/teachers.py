"""Who teaches `opd`: `config.opd.teacher`.

    'self'                   the student's own clean stream
    'ar'                     the AR re-ranker of this run
    'cft', ...               another stage of this run, before `opd`
    'DIR/checkpoints/STAGE'  a stage of another run over the same catalogue and
                             tokens; its model may have another size
"""

from __future__ import annotations

import dataclasses
import os
import pathlib

import ml_collections
import numpy as np

from dgr2_jax.data import prepare
from dgr2_jax.models import attention
from dgr2_jax.models import huggingface
from dgr2_jax.models import transformer
from dgr2_jax.training import workdir as workdir_lib

# Of a config, what prompts and answers are made of.
_FORM = ('prompt.response_format', 'prompt.item_fields', 'prompt.evidence',
         'prompt.max_history', 'data.num_candidates')


def elsewhere(
    teacher: str) -> tuple[ml_collections.ConfigDict, pathlib.Path, str] | None:
  """Config, directory and stage of another run; None for one of this run.

  Raises:
    ValueError: there is no such run.
  """
  if '/' not in teacher:
    return None
  path = pathlib.Path(os.path.expanduser(teacher))
  if path.parent.name != 'checkpoints':
    raise ValueError(f'config.opd.teacher is {teacher!r}: expected a stage of '
                     'another run as DIR/checkpoints/STAGE.')
  try:
    config = workdir_lib.read_config(path.parents[1])
  except workdir_lib.WorkdirError as e:
    raise ValueError(f'config.opd.teacher: {e}') from e
  return config, path.parents[1], path.name


def check(config: ml_collections.ConfigDict) -> None:
  """Whether there is such a teacher, as far as configs tell.

  Raises:
    ValueError: there is not: no such stage, or none that is complete; one whose
      clean stream is no AR model; or one that reads other prompts.
  """
  teacher, recipe = str(config.opd.teacher), tuple(config.recipe)
  found = elsewhere(teacher)
  if found is None:
    known = ('ar', 'self', *recipe[:recipe.index('opd')])
    if teacher not in known:
      raise ValueError(f'config.opd.teacher is {teacher!r}: expected one of '
                       f'{", ".join(known)}, or a stage of another run as '
                       'DIR/checkpoints/STAGE.')
    _check_stream(config, teacher, teacher)
    return
  other, directory, stage = found
  if not (directory / 'checkpoints' / stage / 'complete.json').exists():
    raise ValueError(f'config.opd.teacher is {teacher!r}: that stage is not '
                     'complete, or not there.')
  _check_stream(other, stage, teacher)
  there, here = (workdir_lib.flatten(workdir_lib.to_json(x))
                 for x in (other, config))
  for name in _FORM:
    if there.get(name) != here.get(name):
      raise ValueError(f'config.opd.teacher: {directory} was trained with '
                       f'{name}={there.get(name)!r}, not {here.get(name)!r}.')


def _check_stream(config: ml_collections.ConfigDict, stage: str,
                  teacher: str) -> None:
  """A clean stream that is block_causal sees the tokens it would teach."""
  recipe = tuple(config.recipe)
  before = recipe[:recipe.index('convert')] if 'convert' in recipe else recipe
  if (config.get('canvas', {}).get('clean_stream') == 'block_causal'
      and stage not in ('ar', *before)):
    raise ValueError(
        f'config.opd.teacher is {teacher!r}: expected a stage '
        "before convert with canvas.clean_stream='block_causal', whose clean "
        'stream sees the tokens that it would teach.')


def check_data(config: ml_collections.ConfigDict,
               data: prepare.Prepared) -> None:
  """Whether a teacher of another run knows this run's items and tokens.

  Raises:
    ValueError: it does not.
  """
  if 'opd' not in config.recipe:
    return
  found = elsewhere(config.opd.teacher)
  if found is None:
    return
  other, directory, _ = found
  theirs = prepare.load(other, directory / 'data')
  if theirs.items != data.items or not np.array_equal(
      theirs.semantic_ids, data.semantic_ids):
    raise ValueError(f'config.opd.teacher: the items of {directory}, or their '
                     'semantic ids, are not those of this run.')
  there, here = ((x.vocab_size, x.huggingface_files())
                 for x in (theirs.tokenizer, data.tokenizer))
  if there != here:
    raise ValueError(f'config.opd.teacher: the tokens of {directory} are not '
                     'those of this run.')


def model(config: ml_collections.ConfigDict,
          student: transformer.ModelConfig) -> transformer.Transformer:
  """The teacher's decoder; how it computes is up to this run.

  Args:
    config: of this run.
    student: the shape of its model, and the teacher's unless that is of another
      run.
  """
  shape = student
  if found := elsewhere(config.opd.teacher):
    shape = dataclasses.replace(
        huggingface.model_config(found[0].model, student.vocab_size),
        **{field: getattr(student, field) for field in huggingface.FREE})
  if dtype := config.opd.get('teacher_dtype'):
    shape = dataclasses.replace(shape, dtype=dtype, param_dtype=dtype)
  try:
    attention.check(shape.attention, shape.head_dim, shape.dtype)
  except ValueError:  # The student's kernel takes no such heads.
    shape = dataclasses.replace(shape, attention='auto')
  return transformer.Transformer(shape)
