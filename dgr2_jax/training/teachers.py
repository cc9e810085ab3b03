"""Who teaches `opd`: `config.opd.teacher`.

    'self'                   the student's own clean stream
    'ar'                     the AR re-ranker of this run
    'cft', ...               another stage of this run, before `opd`
    'DIR/checkpoints/STAGE'  a stage of another run over the same tokens; its
                             model may have another size
"""

from __future__ import annotations

import dataclasses
import pathlib

import ml_collections

from dgr2_jax.data import prepare
from dgr2_jax.models import huggingface
from dgr2_jax.models import transformer
from dgr2_jax.training import workdir as workdir_lib

# Of a config, what prompts are made of.
_PROMPT = ('response_format', 'item_fields', 'evidence', 'max_history')


def elsewhere(
    teacher: str) -> tuple[ml_collections.ConfigDict, pathlib.Path, str] | None:
  """Config, directory and stage of another run; None for one of this run.

  Raises:
    ValueError: there is no such run, or its recipe has no such stage, or that
      stage has no AR stream.
  """
  if '/' not in teacher:
    return None
  path = pathlib.Path(teacher).expanduser()
  if path.parent.name != 'checkpoints':
    raise ValueError(f'config.opd.teacher is {teacher!r}: expected a stage of '
                     'another run as DIR/checkpoints/STAGE.')
  try:
    config = workdir_lib.read_config(path.parents[1])
  except workdir_lib.WorkdirError as e:
    raise ValueError(f'config.opd.teacher: {e}') from e
  recipe = tuple(config.recipe)
  if path.name not in recipe:
    raise ValueError(f'config.opd.teacher is {teacher!r}: its recipe has '
                     f'{", ".join(recipe)}.')
  if (config.canvas.get('clean_stream') == 'block_causal'
      and recipe.index(path.name) > recipe.index('convert')):
    raise ValueError(f'config.opd.teacher is {teacher!r}: expected a stage up '
                     'to convert, as its clean stream is block_causal.')
  return config, path.parents[1], path.name


def check_data(config: ml_collections.ConfigDict,
               data: prepare.Prepared) -> None:
  """Whether a teacher of another run reads this run's prompts.

  Raises:
    ValueError: it does not; names what differs.
  """
  if 'opd' not in config.recipe:
    return
  found = elsewhere(config.opd.teacher)
  if found is None:
    return
  other, directory, _ = found
  for field in _PROMPT:
    there, here = (workdir_lib.to_json(x)['prompt'].get(field)
                   for x in (other, config))
    if there != here:
      raise ValueError(f'config.opd.teacher: {directory} was trained with '
                       f'prompt.{field}={there!r}, not {here!r}.')
  there, here = (x.tokenizer for x in (
      prepare.load(other, directory / 'data'), data))
  if (there.vocab_size, there.huggingface_files()) != (
      here.vocab_size, here.huggingface_files()):
    raise ValueError(
        f'config.opd.teacher: the tokens of {directory} are not those of this '
        'run: expected the same tokenizer, catalogue and retriever.')


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
  return transformer.Transformer(shape)

