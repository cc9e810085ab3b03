"""The recipe: one function a stage, each from files to files.

    prepare    data/        requests, tokenizer, records, the boosted ranker
    mid_train  checkpoints/ a language model that knows the catalogue; optional
    ar_sft     checkpoints/ the AR re-ranker, from these or random weights
    ar_rl      checkpoints/ its reinforcement learning: GR2, the teacher
    convert    checkpoints/ the same weights with a mask token: "naive"
    cft        checkpoints/ conversion fine-tuning: the block-diffusion student
    opd        checkpoints/ on-policy distillation from the teacher
    rl         checkpoints/ the student's reinforcement learning
    evaluate   report.*     all of them on the test requests

`config.recipe` names the stages between prepare and evaluate. Each trains on
from the weights of the one before it in the recipe, and reads what that left in
the working directory, so each runs alone. A stage that is complete is not run
again, but for `evaluate`. `ar_sft` and `cft` are one objective, and so are
`ar_rl` and `rl`: the block size tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import pathlib
from typing import Any

from absl import logging
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import ml_collections
import numpy as np

from dgr2_jax.data import prepare as prepare_lib
from dgr2_jax.decoding import commit
from dgr2_jax.evaluation import evaluate as evaluate_lib
from dgr2_jax.evaluation import metrics
from dgr2_jax.evaluation import responses
from dgr2_jax.evaluation import rows
from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib
from dgr2_jax.objectives import rewards
from dgr2_jax.training import checkpoints as checkpoints_lib
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import loop
from dgr2_jax.training import losses
from dgr2_jax.training import mid_training
from dgr2_jax.training import rollouts
from dgr2_jax.training import sharding
from dgr2_jax.training import step as step_lib
from dgr2_jax.training import teachers


def prepare(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> None:
  """Builds everything that is data, on one host; see `data/prepare.py`."""
  if jax.process_index() == 0:
    prepare_lib.prepare(config, workdir / 'data')
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices('prepare')


def mid_train(config: ml_collections.ConfigDict,
              workdir: pathlib.Path) -> None:
  """Language modelling of the catalogue; see `training/mid_training.py`."""
  mid_training.train(experiment_lib.Experiment(config, workdir))


def ar_sft(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> None:
  """Supervised fine-tuning of the AR re-ranker: denoising with B = 1."""
  experiment = experiment_lib.Experiment(config, workdir)
  params = (experiment.initial_params() if config.recipe[0] == 'ar_sft'
            else experiment.restore(experiment.before('ar_sft')))
  _denoise(experiment, 'ar_sft', params)


def ar_rl(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> None:
  """GR2's reinforcement learning of the AR re-ranker (arXiv 2602.07774)."""
  _reinforce(experiment_lib.Experiment(config, workdir), 'ar_rl')


def convert(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> None:
  """Copies the AR weights; the mask row becomes the mean row plus noise."""
  experiment = experiment_lib.Experiment(config, workdir)
  checkpoints = _checkpoints(workdir, 'convert')
  if checkpoints.is_complete():
    return
  params = experiment.restore(experiment.before('convert'))
  with jax.set_mesh(experiment.mesh):
    params = jax.jit(functools.partial(
        add_mask_token, vocabulary=experiment.vocabulary,
        key=jax.random.key(config.seed)))(params)
  best = checkpoints_lib.Best(0, 0.)
  checkpoints.save(0, {}, params, best)
  checkpoints.mark_complete(0, best)


def _checkpoints(workdir: pathlib.Path,
                 stage: str) -> checkpoints_lib.Checkpoints:
  return checkpoints_lib.Checkpoints(workdir / 'checkpoints' / stage, keep=1)


def add_mask_token(params: Any, vocabulary: vocabulary_lib.Vocabulary,
                   key: jax.Array) -> Any:
  """Starts the mask's embedding from the mean used row."""
  used = np.ones(vocabulary.size, bool)
  used[list(vocabulary.banned)] = False
  return {**params, 'embedding': vocabulary_lib.start_rows(
      params['embedding'], [vocabulary.mask_id], np.flatnonzero(used), key)}


def cft(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> None:
  """Conversion fine-tuning (arXiv 2607.01170, stage 1)."""
  experiment = experiment_lib.Experiment(config, workdir)
  _denoise(experiment, 'cft', experiment.restore(experiment.before('cft')))


def opd(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> None:
  """On-policy distillation from the AR teacher (arXiv 2607.01170, stage 2)."""
  _distil(experiment_lib.Experiment(config, workdir))


def rl(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> None:
  """Reinforcement learning of the student (arXiv 2607.01170, stage 3)."""
  _reinforce(experiment_lib.Experiment(config, workdir), 'rl')


def evaluate(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> None:
  """Rows, frontier, examples and timing; writes the report."""
  evaluate_lib.evaluate(experiment_lib.Experiment(config, workdir))


def _denoise(experiment: experiment_lib.Experiment, stage: str,
             params: Any) -> None:
  """Trains with the denoising objective on the records."""
  _train(experiment, stage, params, experiment.train_batches(
      experiment.config[stage].batch_size, experiment.data.supervised_files()))


def _reinforce(experiment: experiment_lib.Experiment, stage: str) -> None:
  """Trains with the policy gradient on the policy's own responses."""
  params = experiment.restore(experiment.before(stage))
  annotate = lambda batch: batch
  if experiment.config[stage].get('kl_weight'):
    annotate = _reference(experiment, stage, params)
  _train(experiment, stage, params, _rollouts(experiment, stage, annotate))


def _reference(experiment: experiment_lib.Experiment, stage: str,
               params: Any) -> Callable[[rollouts.Batch], rollouts.Batch]:
  """Adds what the first policy gives to a batch's tokens."""
  params = jax.tree.map(jnp.copy, params)  # training deletes the others
  score = jax.jit(losses.replayed_logprobs(experiment, stage))

  def annotate(batch):
    with jax.set_mesh(experiment.mesh):
      return batch | {'reference_logprob': score(params, batch)}

  return annotate


def _distil(experiment: experiment_lib.Experiment) -> None:
  """Trains with the divergence from the teacher on the student's responses."""
  if _checkpoints(experiment.workdir, 'opd').is_complete():
    return  # the teacher may be gone by now
  teacher = _teacher(experiment)
  clean_states = jax.jit(losses.teacher_states(experiment))

  def annotate(batch):
    if teacher is None:
      return batch
    with jax.set_mesh(experiment.mesh):
      states = clean_states(teacher, {
          k: batch[k] for k in losses.TEACHER_READS})
    return batch | {'teacher_states': states,
                    step_lib.FROZEN: losses.head_of(teacher)}

  _train(experiment, 'opd', experiment.restore(experiment.before('opd')),
         _rollouts(experiment, 'opd', annotate, only_informative=False))


def _teacher(experiment: experiment_lib.Experiment) -> Any:
  """The parameters of OPD's teacher; None where the student is its own."""
  section, source = experiment.config.opd, experiment
  stage = section.teacher
  if stage == 'self':
    return None
  if stage == 'ar':
    stage = experiment.before('convert')
  elif found := teachers.elsewhere(stage):
    config, directory, stage = found
    teachers.check_data(experiment.config, experiment.data)
    source = experiment_lib.Experiment.here(config, directory, experiment.mesh)
  return source.restore(stage, section.get('teacher_dtype'),
                        losses.teacher_rules(experiment))


def _rollouts(experiment: experiment_lib.Experiment, stage: str,
              annotate: Callable[[rollouts.Batch], rollouts.Batch],
              only_informative: bool = True) -> rollouts.Rollouts:
  """Batches of the policy's responses, and of records that are mixed in."""
  section = experiment.config[stage]
  records = experiment.train_batches(
      section.batch_size, experiment.data.supervised_files(),
      whole=True) if section.cft_weight else None
  return rollouts.Rollouts(
      experiment, stage, losses.canvas_of(experiment, stage),
      _prompts(experiment, section), rollouts.RolloutConfig(**section.rollout),
      rewards.RewardConfig(**section.reward), annotate, only_informative,
      supervised=records)


def _prompts(experiment: experiment_lib.Experiment,
             section: ml_collections.ConfigDict):
  """Batches of training requests; refills that are not needed are skipped."""
  return experiment.train_batches(
      section.batch_size, [experiment.data.record_file('train')], whole=True)


def _train(experiment: experiment_lib.Experiment, stage: str, params: Any,
           batches: loop.Batches | loop.Rounds) -> None:
  """Trains one stage, validating by decoding."""
  section = experiment.config[stage]
  validation = experiment.eval_batches(
      'validation', experiment.config.evaluate.batch_size,
      section.eval_requests)
  targets = experiment.data.target_positions('validation')
  reward = rewards.RewardConfig(**section.get('reward', {}))
  threshold = 1.  # ar_sft, one token at a time
  decode_config = experiment.decode_config()
  if 'rollout' in section:  # what is learned is what is validated
    rollout = rollouts.RolloutConfig(**section.rollout)
    threshold = rollout.threshold
    decode_config = rollout.decoding(experiment.data.response_length)
  threshold = section.get('eval_threshold', threshold)

  def validate(params):
    rollout = responses.decode_split(
        experiment.model, params, validation,
        rule=commit.Threshold(threshold),
        vocabulary=experiment.vocabulary,
        canvas=losses.canvas_of(experiment, stage), config=decode_config,
        mesh=experiment.mesh)
    wanted = targets[:len(rollout.length)]
    outcome = responses.outcome(
        stage, rollout, experiment.parser, wanted,
        experiment.config.data.num_candidates, reward)
    ranks = metrics.rank_of_target(outcome.orders, wanted)
    return {
        **metrics.means(ranks), **rows.validity(outcome.failures),
        'reward': outcome.rewards.mean(),
        'tokens_per_forward': outcome.tokens.sum() / outcome.calls.sum()}

  loop.train(
      stage=stage, loss_fn=losses.loss_of(experiment, stage), params=params,
      batches=batches, validate=validate, config=section,
      workdir=experiment.workdir, mesh=experiment.mesh, rules=transformer.RULES,
      seed=experiment.config.seed,
      flops_of=functools.partial(losses.update_flops, experiment, stage),
      profile_steps=experiment.config.get('profile_steps', ()))


_RUN = {'prepare': prepare, 'mid_train': mid_train, 'ar_sft': ar_sft,
        'ar_rl': ar_rl, 'convert': convert, 'cft': cft, 'opd': opd, 'rl': rl,
        'evaluate': evaluate}
STAGES = tuple(_RUN)


def plan(config: ml_collections.ConfigDict,
         stage: str | None = None) -> tuple[str, ...]:
  """The stages to run: `stage`, or all of the recipe if None.

  Raises:
    ValueError: `stage` is not in the recipe, or there is no recipe.
  """
  if 'recipe' not in config:
    raise ValueError('config.recipe is missing: expected the stages between '
                     'prepare and evaluate')
  recipe = ('prepare', *config.recipe, 'evaluate')
  if stage is not None and stage not in recipe:
    raise ValueError(f'--stage={stage} is not in config.recipe, '
                     f'{", ".join(config.recipe)}')
  return recipe if stage is None else (stage,)


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
  names = plan(config, stage)
  if names != ('prepare',):  # which may run elsewhere
    mesh = sharding.make_mesh(config.mesh)
    for name in ('evaluate', *names):
      if size := config.get(name, {}).get('batch_size'):
        sharding.check_rows(mesh, size, f'config.{name}.batch_size')
  taught = 'opd' in names and not (
      workdir / 'checkpoints' / 'opd' / 'complete.json').exists()
  if taught:
    teachers.check(config)
  for name in names:
    logging.info('Stage %s.', name)
    _RUN[name](config, workdir)
    if taught and name == 'prepare':
      teachers.check_data(config, prepare_lib.load(config, workdir / 'data'))
    logging.info('Stage %s is complete.', name)
