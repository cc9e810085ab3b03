"""The recipe: one function a stage, each from files to files.

    prepare    data/        requests, tokenizer, records, the boosted ranker
    ar_sft     checkpoints/ the AR re-ranker, from random weights
    convert    checkpoints/ the same weights with a mask token: "naive"
    cft        checkpoints/ conversion fine-tuning: the block-diffusion student
    evaluate   report.*     all of them on the test requests

A stage reads what the stages before it left in the working directory, so each
runs alone. A stage that is complete is not run again, but for `evaluate`.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import pathlib
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from dgr2_jax.data import pipeline
from dgr2_jax.data import prepare as prepare_lib
from dgr2_jax.evaluation import evaluate as evaluate_lib
from dgr2_jax.evaluation import metrics
from dgr2_jax.evaluation import responses
from dgr2_jax.evaluation import rows
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib
from dgr2_jax.objectives import denoising
from dgr2_jax.training import checkpoints as checkpoints_lib
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import loop

def fields_of(cls: type, section: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of `section` that the dataclass `cls` has."""
  return {field.name: section[field.name]
          for field in dataclasses.fields(cls) if field.name in section}


def prepare(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> None:
  """Builds everything that is data; see `data/prepare.py`."""
  prepare_lib.prepare(config, workdir / 'data')


def ar_sft(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> None:
  """Supervised fine-tuning of the AR re-ranker: denoising with B = 1."""
  experiment = experiment_lib.Experiment(config, workdir)
  _train(experiment, 'ar_sft', config.ar_sft, experiment.initial_params(),
         canvas_lib.AUTOREGRESSIVE, threshold=1.)


def convert(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> None:
  """Copies the AR weights; the mask row becomes the mean row plus noise."""
  experiment = experiment_lib.Experiment(config, workdir)
  checkpoints = checkpoints_lib.Checkpoints(
      workdir / 'checkpoints' / 'convert', keep=1)
  if checkpoints.is_complete():
    return
  params = experiment.restore('ar_sft')
  with jax.set_mesh(experiment.mesh):
    params = jax.jit(functools.partial(
        add_mask_token, vocabulary=experiment.vocabulary,
        key=jax.random.key(config.seed)))(params)
  best = checkpoints_lib.Best(0, 0.)
  checkpoints.save(0, {}, params, best)
  checkpoints.mark_complete(0, best)


def add_mask_token(params: Any, vocabulary: vocabulary_lib.Vocabulary,
                   key: jax.Array) -> Any:
  """Sets the mask's embedding to the mean used row plus a tenth of its noise.

  An untrained row of another scale makes gradients explode.
  """
  embedding = params['embedding']
  used = np.ones(vocabulary.size, bool)
  used[list(vocabulary.banned)] = False
  rows_ = embedding[np.flatnonzero(used)]
  noise = jax.random.normal(key, embedding.shape[1:], embedding.dtype)
  row = rows_.mean(0) + .1 * rows_.std(0) * noise
  return {**params, 'embedding': embedding.at[vocabulary.mask_id].set(row)}


def cft(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> None:
  """Conversion fine-tuning (method.md, stage 1)."""
  experiment = experiment_lib.Experiment(config, workdir)
  _train(experiment, 'cft', config.cft, experiment.restore('convert'),
         experiment.canvas, config.cft.eval_threshold)


def evaluate(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> None:
  """Rows, frontier, examples and timing; writes the report."""
  evaluate_lib.evaluate(experiment_lib.Experiment(config, workdir))


def _train(experiment: experiment_lib.Experiment, stage: str,
           section: ml_collections.ConfigDict, params: Any,
           canvas: canvas_lib.CanvasConfig, threshold: float) -> None:
  """Trains with the denoising objective, validating by decoding."""
  objective = denoising.DenoisingConfig(
      **fields_of(denoising.DenoisingConfig, section))
  data = experiment.data
  batches = pipeline.train_batches(
      data.supervised_files(), section.batch_size, data.prompt_length,
      data.response_length, experiment.config.seed, jax.process_index(),
      jax.process_count())
  validation = experiment.eval_batches(
      'validation', experiment.config.evaluate.batch_size,
      section.eval_requests)
  targets = data.target_positions('validation')

  def loss_fn(params, batch, key):
    loss, measured = denoising.loss(
        experiment.model, params, batch, key, canvas, objective,
        experiment.vocabulary)
    tokens = batch['prompt_length'].sum() + batch['response_length'].sum()
    return loss, measured | {'tokens': tokens.astype(jnp.float32)}

  def validate(params):
    rollout = responses.decode_split(
        experiment.model, params, validation, threshold=threshold,
        vocabulary=experiment.vocabulary, canvas=canvas,
        config=experiment.decode_config(), mesh=experiment.mesh)
    outcome = responses.outcome(stage, rollout, experiment.parser,
                                experiment.config.data.num_candidates)
    n = len(outcome.orders)
    ranks = metrics.rank_of_target(outcome.orders, targets[:n])
    return {
        **metrics.means(ranks), **rows.validity(outcome.failures),
        'tokens_per_forward': outcome.tokens.sum() / outcome.calls.sum()}

  loop.train(
      stage=stage, loss_fn=loss_fn, params=params, batches=batches,
      validate=validate, config=section, workdir=experiment.workdir,
      mesh=experiment.mesh, rules=transformer.RULES,
      seed=experiment.config.seed)


_RUN = {'prepare': prepare, 'ar_sft': ar_sft, 'convert': convert, 'cft': cft,
        'evaluate': evaluate}
STAGES = tuple(_RUN)


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path,
        stage: str | None = None) -> None:
  """Runs one stage, or all in order.

  Args:
    config: of the experiment.
    workdir: from `workdir.open_workdir`.
    stage: of `STAGES`, or None for all.

  Raises:
    ValueError: a field of the config, the data, or a stage that needs another.
  """
  for name in STAGES if stage is None else (stage,):
    logging.info('Stage %s.', name)
    _RUN[name](config, workdir)
