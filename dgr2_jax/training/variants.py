"""One stage trained anew on what a finished run made before it."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import ml_collections
from orbax.checkpoint import v1 as ocp

from dgr2_jax.training import stages
from dgr2_jax.training import validation
from dgr2_jax.training import workdir as workdir_lib


def config_of(base: pathlib.Path, stage: str,
              fields: dict[str, Any]) -> ml_collections.ConfigDict:
  """The base's config with other fields, and a `stage` without selection.

  Args:
    base: a working directory.
    stage: of its recipe.
    fields: values by their name in the config, `opd.learning_rate`. Optional
      ones that the base does not set may be among them.

  Raises:
    ValueError: the config that this makes is wrong.
  """
  config = workdir_lib.read_config(base)
  for name, value in fields.items():
    *sections, field = name.split('.')
    section = config
    for key in sections:
      section = section[key]
    section[field] = value
  # Only the end is validated: the best is what it is, not a lucky step.
  config[stage].update(eval_every=config[stage].steps,
                       checkpoint_every=config[stage].steps)
  validation.check(config)
  return config


def directory(root: pathlib.Path, name: str) -> pathlib.Path:
  """Where the variant of a name, which may be a sentence, has its files."""
  return root.resolve() / ''.join(c if c.isalnum() else '_' for c in name)


def train(base: pathlib.Path, workdir: pathlib.Path, stage: str,
          config: ml_collections.ConfigDict) -> None:
  """Runs one stage; data and earlier stages are links to the base's.

  A stage that `workdir` already holds is not trained again.

  Raises:
    ValueError: `workdir` has links to another base.
  """
  earlier = config.recipe[:config.recipe.index(stage)]
  with workdir_lib.open_workdir(workdir, config):
    (workdir / 'checkpoints').mkdir(exist_ok=True)
    for shared in ('data', *(f'checkpoints/{s}' for s in earlier)):
      link = workdir / shared
      if not link.is_symlink():
        link.symlink_to(base / shared)
      elif link.readlink() != base / shared:
        raise ValueError(f'{link} is of another base: {link.readlink()}')
    stages.run(config, workdir, stage)


def last_params(workdir: pathlib.Path, stage: str) -> Any:
  """The weights that a complete stage ended with, good or bad."""
  directory = workdir / 'checkpoints' / stage
  done = json.loads((directory / 'complete.json').read_text(encoding='utf-8'))
  return ocp.load_checkpointables(directory / str(done['step']))['params']
