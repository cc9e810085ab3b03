"""The stage `mid_train`: a language model of the catalogue, before `ar_sft`.

    data/mid_training.py -> rows by task -> mixed by weight -> the one loop
                                |
                                v
                      held out: log-probability a token, by task
"""

from __future__ import annotations

import functools

import jax

from dgr2_jax.data import mid_training
from dgr2_jax.data import pipeline
from dgr2_jax.models import transformer
from dgr2_jax.objectives import language_modelling
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import loop
from dgr2_jax.training import losses
from dgr2_jax.training import sharding


def train(experiment: experiment_lib.Experiment) -> None:
  """Trains on the four tasks, from the initial weights.

  Validation gives the mean log-probability of held-out tokens, of each task as
  `<task>_logprob` and, as `logprob`, of all of them by their weights.

  Raises:
    interactions.DataError: the data were prepared without mid-training.
  """
  section, mesh = experiment.config.mid_train, experiment.mesh
  weights = mid_training.MidTrainingConfig.from_config(section).tasks
  rows = experiment.data.mid_train_rows(weights, 'train')
  batches = pipeline.mixed_batches(
      list(rows.values()), list(weights.values()), section.batch_size,
      experiment.config.seed, *sharding.host_share(mesh))
  held_out = {
      task: list(pipeline.packed_batches(
          packed[:section.eval_requests or None], section.batch_size))
      for task, packed in experiment.data.mid_train_rows(
          weights, 'held_out').items()}

  @functools.partial(jax.jit, out_shardings=sharding.replicated(mesh))
  def sums(params, batch):
    weight, logprob, _ = language_modelling.token_scores(
        experiment.model, params, batch, experiment.vocabulary,
        section.head_chunk)
    return (weight * logprob).sum(), weight.sum()

  def validate(params):
    means = {}
    for task, task_batches in held_out.items():
      parts = [sums(params, sharding.shard_batch(mesh, batch, whole=True))
               for batch in task_batches]
      logprob, weight = (sum(map(float, column)) for column in zip(*parts))
      means[task] = logprob / weight
    return {'logprob': sum(weights[task] * x for task, x in means.items()),
            **{f'{task}_logprob': x for task, x in means.items()}}

  loop.train(
      stage='mid_train', loss_fn=losses.loss_of(experiment, 'mid_train'),
      params=experiment.initial_params(),
      batches=batches, validate=validate, config=section,
      workdir=experiment.workdir, mesh=mesh, rules=transformer.RULES,
      seed=experiment.config.seed,
      flops_of=functools.partial(losses.update_flops, experiment, 'mid_train'),
      profile_steps=experiment.config.get('profile_steps', ()))
