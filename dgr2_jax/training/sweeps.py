"""Variants of a config: words behind its colon, and sweeps as commands.

A config file may have a `sweep(variant)`: name -> the fields that differ, by
their whole names, of the words behind its colon. `python -m dgr2_jax.main
--print_sweep` lists one command a run.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Mapping
import pathlib
import runpy
import shlex
from typing import Any

import ml_collections


def ablations(config: ml_collections.ConfigDict) -> dict[str, dict[str, Any]]:
  """A sweep: what every stage and choice of the method is worth."""
  def without(*stages):
    return {'recipe': tuple(x for x in config.recipe if x not in stages)}

  return {
      'whole': {},
      'cft': without('opd', 'rl'),
      'cft_opd': without('rl'),
      'cft_rl': without('opd'),
      # A block-causal clean stream is no AR model that could be trained along.
      'block_causal': {'canvas.clean_stream': 'block_causal',
                       'cft.ar_weight': 0., 'rl.ar_weight': 0.,
                       'opd.teacher': 'ar'},
      'no_ar_term': {'cft.ar_weight': 0., 'rl.ar_weight': 0.,
                     'opd.teacher': 'ar'},
      'same_position': {'canvas.alignment': 'same_position'},
      'all_canvases': {'opd.rollout.canvases': 'all'},
      'other_teacher': {
          'opd.teacher': 'ar' if config.opd.teacher == 'self' else 'self'},
      'opd_as_published': {'opd.positions': 'all', 'opd.elsewhere': 'none',
                           'opd.teacher': 'ar'},
      # Which tau the paper rolls out at is open.
      'rl_as_published': {
          'ar_rl.cft_weight': 0., 'rl.cft_weight': 0., 'rl.ar_weight': 0.,
          'rl.rollout.threshold': .9, 'rl.rollout.temperature': 1.,
          'rl.rollout.refill': 1},
  }


def parse_variant(variant: str, words: Collection[str],
                  retrievers: Collection[str]) -> tuple[set[str], str]:
  """The words behind a config's colon, and the retriever among them or ''.

  Raises:
    ValueError: a word that is neither, or two retrievers.
  """
  chosen = set(filter(None, variant.split(',')))
  kinds = chosen - set(words)
  if len(kinds) > 1 or kinds - set(retrievers):
    raise ValueError(
        f'{variant!r} behind the colon of --config: expected some of '
        f'{", ".join(words)} and at most one of {", ".join(retrievers)}, '
        'joined by commas')
  return chosen - kinds, ''.join(kinds)


def smoke(c: ml_collections.ConfigDict) -> None:
  """Makes an experiment tiny: it shows that everything runs, and no more."""
  if trained := c.data.retriever.get(c.data.retriever.kind):
    trained.update(epochs=2, folds=2, width=32, layers=1)
  if 'embedded' in c.data:
    c.data.embedded.update(num_users=300, num_items=120)
  c.data.max_train_requests = 256
  for stage in (c[name] for name in c.recipe if name in c):
    stage.update(steps=6, eval_every=3, checkpoint_every=2, log_every=2,
                 warmup_steps=2, eval_requests=32)
    if 'rollout' in stage:
      stage.batch_size = 8
      # Untrained, no token is sure: the limit commits several together.
      stage.rollout.update(num_rollouts=4, max_denoising_steps=4)
      # Untrained responses are all invalid: let length tell them apart.
      stage.reward.overlong_buffer = 36
  if 'ar_rl' in c.recipe:
    c.ar_rl.update(eval_every=2)
    c.ar_rl.rollout.update(updates=2)
  c.model.update(num_layers=1, width=32, num_heads=2, num_kv_heads=1,
                 head_dim=16, mlp_dim=64)
  c.evaluate.update(timing_requests=2, timing_repetitions=1,
                    bootstrap_resamples=200)


def of(filename: str) -> dict[str, dict[str, Any]]:
  """The sweep of a config file, with the words behind its colon.

  Raises:
    ValueError: it has none.
  """
  path, _, variant = filename.partition(':')
  functions = runpy.run_path(path)
  if 'sweep' not in functions:
    raise ValueError(f'{path} has no sweep(variant): a function that returns '
                     '{name: {field: value}}')
  return functions['sweep'](variant)


def commands(filename: str, workdir: str, flags: list[str],
             sweep: Mapping[str, Mapping[str, Any]]) -> list[str]:
  """One command line a run, each with a working directory of its own.

  Args:
    filename: of the config, with its argument.
    workdir: in which every run has a directory named after it.
    flags: other flags of all runs.
    sweep: from `of`.
  """
  return [' '.join(_quoted(part) for part in (
      'python', '-m', 'dgr2_jax.main', f'--config={filename}',
      f'--workdir={pathlib.Path(workdir) / name}', *flags,
      *(f'--config.{field}={value}' for field, value in fields.items())))
          for name, fields in sweep.items()]


def _quoted(part: str) -> str:
  """For a shell; tuples of names in double quotes, which reads best."""
  return f'"{part}"' if "'" in part and not set(part) & set('"$`\\!') else (
      shlex.quote(part))
