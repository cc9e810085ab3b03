"""One training loop for every stage, always sharded.

    for step in range(start, steps):
      state = train_step(state, batches[step])       # jitted, donated
      every log_every:         metrics.jsonl, TensorBoard, progress
      every eval_every:        validate(params); a new best is checkpointed
      every checkpoint_every:  checkpoint, written while training goes on

On-policy stages get their batches from the policy itself, a round of U updates
at a time, and are checkpointed between rounds only. The weights that they begin
with are validated too, and are the best until others are better.

A stage brings a pure loss (`step.LossFn`), batches that are a function of the
step, and a validation. Everything a step draws is
a function of (seed, step), and what is summed between two log lines is part of
the checkpointed state, so that a run killed anywhere and started again ends
with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import functools
import math
import pathlib
from typing import Any, Protocol

from absl import logging
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import ml_collections
import numpy as np

from dgr2_jax.training import checkpoints as checkpoints_lib
from dgr2_jax.training import chips
from dgr2_jax.training import interrupts
from dgr2_jax.training import logging as metrics_logging
from dgr2_jax.training import lora as lora_lib
from dgr2_jax.training import sharding
from dgr2_jax.training import step as step_lib

Params = Any
Batch = Mapping[str, np.ndarray]

_PREFETCH = 2  # batches loaded ahead of the step that needs them


class TrainingError(Exception):
  """Training cannot go on; the message names the stage and the steps."""


class Interrupted(Exception):
  """A signal stopped training after a checkpoint; run it again to go on."""


class Rounds(Protocol):
  """Batches that the policy makes itself, such as `rollouts.Rollouts`."""
  updates: int

  def example(self) -> Any:
    """A batch on the mesh, for its fields and shapes."""

  def collect(self, params: Params, round_: int, seed: int) -> list[Any]:
    """The batches of a round's `updates` steps, on the mesh."""


class Batches(Protocol):
  """This host's batches by step, such as a repeated `grain.MapDataset`."""

  def __getitem__(self, step: int) -> Batch:
    ...


def train(*, stage: str, loss_fn: step_lib.LossFn, params: Params,
          batches: Batches | Rounds,
          validate: Callable[[Params], Mapping[str, float]],
          config: ml_collections.ConfigDict, workdir: pathlib.Path,
          mesh: Mesh, rules: sharding.Rules, seed: int,
          flops_of: Callable[[Any], float] = lambda batch: 0.,
          profile_steps: Sequence[int] = ()) -> Params:
  """Trains one stage to its end, going on where an earlier call stopped.

  Args:
    stage: names the checkpoints and the metrics.
    loss_fn: a pure function, see `step.LossFn`. Logged values are means over
      the steps since the last line. A metric `tokens` (processed in the step)
      gives tokens/s.
    params: initial parameters, deleted once training has its copy; when
      resuming not used but for shapes and, with LoRA, as what is adapted.
    batches: this host's rows of every step's batch, or rounds of the policy's
      own responses.
    validate: the parameters -> metrics; called every `eval_every` steps, at the
      end and, for rounds, at the start.
    config: the stage's section: `steps`, `eval_every`, `checkpoint_every`,
      `log_every`, `keep`, `best_metric` (of `validate`, higher is better), and
      the fields of `optimizer.make_optimizer`; optionally `accumulate`, parts
      that a batch is taken in.
    workdir: the run's directory.
    mesh: from `sharding.make_mesh`.
    rules: parameter shardings, see `sharding.param_shardings`.
    seed: of everything that the loss draws.
    flops_of: a batch -> FLOPs of its update, for MFU: their share of what the
      chips could do in the time since the last line. Decoding of a round takes
      time and does not count.
    profile_steps: the first and the last step of a profile, counted from 1; it
      is written to `workdir`/profile/`stage` and viewed with XProf.

  Returns:
    The best parameters by `best_metric`, restored from disk.

  Raises:
    TrainingError: a loss or gradient that is not finite, or a validation
      without a finite `best_metric`.
    Interrupted: SIGTERM or SIGINT arrived; a checkpoint was written.
    ValueError: a config field is out of its range.
  """
  unit = getattr(batches, 'updates', 1)
  for name in ('steps', 'eval_every', 'checkpoint_every', 'log_every'):
    if config[name] < 1:
      raise ValueError(f'{stage}.{name} must be at least 1, not '
                       f'{config[name]}.')
    if config[name] % unit and name != 'log_every':
      raise ValueError(f'{stage}.{name} is {config[name]}: expected a multiple '
                       f'of the {unit} updates of a round.')
  checkpoints = checkpoints_lib.Checkpoints(
      workdir / 'checkpoints' / stage, config.keep)
  if not checkpoints.is_complete():
    run = _Run(stage, loss_fn, validate, config, mesh, checkpoints, seed,
               flops_of)
    run.start(params, batches, rules)
    run.to_end(batches, workdir, tuple(profile_steps))
    del run  # its state, before the best parameters need the memory
  shardings = sharding.param_shardings(mesh, params, rules)
  best, params = checkpoints.restore_best(sharding.abstract(params, shardings))
  logging.info('%s is complete; best %s %.4f at step %d.', stage,
               config.best_metric, best.value, best.step)
  return params


def _delete(params: Params) -> None:
  """Frees the devices' memory, whoever still holds the arrays."""
  for x in jax.tree.leaves(params):
    if isinstance(x, jax.Array) and not x.is_deleted():
      x.delete()


class _Run:
  """A stage's training between its start and its end."""

  def __init__(self, stage, loss_fn, validate, config, mesh, checkpoints,
               seed, flops_of):
    self._flops_of = flops_of
    chip = chips.of_kind(mesh.devices.flat[0].device_kind)
    self._peak = chip and chip.flops * mesh.size
    self._stage = stage
    self._loss_fn = loss_fn
    self._validate = validate
    self._config = config
    self._mesh = mesh
    self._checkpoints = checkpoints
    self._seed = seed

  def start(self, params: Params, batches: Batches | Rounds,
            rules: sharding.Rules) -> None:
    """Restores the newest usable checkpoint, or initialises."""
    example = (batches.example() if hasattr(batches, 'collect')
               else dict(batches[0]))
    program = step_lib.program(self._loss_fn, params, example, self._config,
                               self._mesh, rules, self._seed)
    self._step_fn = program.update
    self._lora = lora = program.lora
    abstract, shardings = program.state, program.shardings
    self._merge = lora and jax.jit(
        functools.partial(lora_lib.merge, config=lora),
        out_shardings=shardings.base)
    full = 'base' if lora else 'params'  # shaped like the model's
    restored = self._checkpoints.restore_latest(
        self._apart(abstract), getattr(abstract, full))
    if restored is None or lora:
      with jax.set_mesh(self._mesh):
        self._state = jax.jit(
            program.init, out_shardings=shardings, donate_argnums=0)(
                jax.device_put(params, getattr(shardings, full)))
    else:
      _delete(params)
    if restored is None:
      self._step, self._best = 0, None
      logging.info('%s starts: %s parameters, %s trained, %d steps.',
                   self._stage, f'{_size(params):,}',
                   f'{_size(abstract.params):,}', self._config.steps)
    else:
      self._step, rest, saved, self._best = restored
      self._state = (rest.replace(base=self._state.base) if lora
                     else rest.replace(params=saved))
      logging.info('%s resumes at step %d of %d.', self._stage, self._step,
                   self._config.steps)
    self._saved = None if restored is None else self._step
    self._logged = self._step // self._config.log_every * self._config.log_every
    self._finite_until = self._step

  def _apart(self, state: step_lib.TrainState) -> step_lib.TrainState:
    """What a checkpoint holds beside the model's parameters."""
    return state.replace(**{'base' if self._lora else 'params': None})

  def _params(self) -> Params:
    """The model's parameters, adapters merged."""
    if not self._lora:
      return self._state.params
    with jax.set_mesh(self._mesh):
      return self._merge(self._state.base, self._state.params)

  def to_end(self, batches: Batches | Rounds, workdir: pathlib.Path,
             profile_steps: tuple[int, ...] = ()) -> None:
    """Runs the remaining steps and marks the stage complete."""
    config, unit = self._config, getattr(batches, 'updates', 1)
    self._writer = metrics_logging.MetricsWriter(
        workdir, self._stage, -1 if self._saved is None else self._step)
    profile = metrics_logging.Profile(
        workdir / 'profile' / self._stage, *profile_steps)
    with (contextlib.closing(self._checkpoints),
          contextlib.closing(self._writer), contextlib.closing(profile),
          interrupts.Signals() as signals,
          contextlib.closing(self._batches(batches)) as loaded):
      self._clock, self._timed = metrics_logging.Clock(), self._step
      self._clock_start, self._started, self._flops = 0., self._step, 0.
      rounds = hasattr(batches, 'collect')
      if rounds and self._best is None:
        # A policy may not end worse than it begins.
        self._evaluate()
        self._save()
      for batch in loaded:
        profile.before(self._step + 1)
        self._train_step(batch)
        profile.after(self._step, self._state)
        last = self._step == config.steps
        if last or self._step % config.log_every == 0:
          self._log()
          with self._clock.pause():
            self._checkpoints.finish_if_written()
        improved = False
        if last or self._step % config.eval_every == 0:
          improved = self._evaluate()
        if last or improved or self._step % config.checkpoint_every == 0:
          self._save()
        # A round takes long enough for hosts to agree after each.
        if (not last and self._step % unit == 0 and signals.received(
            rounds or self._step % config.log_every == 0)):
          self._save()
          self._checkpoints.finish()
          raise Interrupted(
              f'{self._stage} was interrupted at step {self._step} of '
              f'{config.steps} and saved; the same command goes on from there.')
      self._checkpoints.mark_complete(self._step, self._best)
      if self._best.step == 0:
        logging.warning(
            '%s: no validation was better than that of the weights it began '
            'with; they stay. A lower learning rate, more steps or more '
            'rollouts may help.', self._stage)
      if signals.received(True):
        raise Interrupted(f'{self._stage} was interrupted when it was complete;'
                          ' the same command goes on from there.')

  def _batches(self, batches: Batches | Rounds) -> Iterator[Any]:
    """The remaining steps' batches; rounds are made when they are needed."""
    if not hasattr(batches, 'collect'):
      yield from _prefetch(batches, self._mesh, self._step, self._config.steps)
      return
    for round_ in range(self._step // batches.updates,
                        self._config.steps // batches.updates):
      yield from batches.collect(self._params(), round_, self._seed)

  def _train_step(self, batch: dict[str, jax.Array]) -> None:
    first = self._step == self._started
    with self._clock.pause() if first else contextlib.nullcontext():
      with jax.set_mesh(self._mesh):
        self._state = self._step_fn(self._state, batch)
      self._step += 1
      if first:  # compilation is not training
        jax.block_until_ready(self._state.step)
        self._timed = self._step
      else:
        self._flops += self._flops_of(batch)

  def _check_finite(self) -> None:
    bad = int(self._state.bad_step)
    if bad >= 0:
      self._checkpoints.finish()  # all processes are here
      raise TrainingError(
          f'{self._stage}: the loss or its gradient is not finite at step '
          f'{bad} (seen after step {self._step}, finite up to '
          f'{self._finite_until}). '
          + ('There is no checkpoint yet. ' if self._saved is None
             else f'The checkpoint of step {self._saved} is kept. ')
          + f'Lower {self._stage}.learning_rate or {self._stage}.grad_clip, or '
          'look at the data of that step.')
    self._finite_until = self._step

  def _log(self) -> None:
    """Writes and shows the means, or maxima, since the last line."""
    self._check_finite()
    steps = self._step - self._logged
    means = {k: float(v) / (1 if step_lib.is_maximum(k) else steps)
             for k, v in jax.device_get(self._state.sums).items()}
    self._state = self._state.replace(sums=jax.tree.map(
        lambda x: jax.device_put(jnp.zeros_like(x), x.sharding),
        self._state.sums))
    seconds = self._clock.seconds() - self._clock_start
    timing = {}
    if done := self._step - self._timed:
      tokens = means['tokens'] * done if 'tokens' in means else None
      seconds = max(seconds, 1e-9)
      timing['steps_per_second'] = done / seconds
      if tokens is not None:
        timing['tokens_per_second'] = tokens / seconds
        timing['tokens_per_second_per_chip'] = (
            tokens / seconds / self._mesh.size)
      if self._peak and self._flops:
        timing['mfu'] = self._flops / seconds / self._peak
      metrics_logging.progress(self._stage, self._step, self._config.steps,
                               seconds, done, means, tokens, timing.get('mfu'))
    self._writer.write(self._step, {f'train/{k}': v for k, v in means.items()},
                       timing)
    self._logged, self._timed, self._flops = self._step, self._step, 0.
    self._clock_start = self._clock.seconds()

  def _evaluate(self) -> bool:
    """Validates; says whether it is the best so far."""
    self._check_finite()
    before = metrics_logging.Clock()
    with self._clock.pause(), jax.set_mesh(self._mesh):
      values = {k: float(v) for k, v in
                self._validate(self._params()).items()}
    name = self._config.best_metric
    value = values.get(name, math.nan)
    if not math.isfinite(value):
      raise TrainingError(
          f'{self._stage}: validation at step {self._step} gave '
          + (f'{name} = {value}.' if name in values else
             f'no {name!r} ({self._stage}.best_metric), only '
             f'{sorted(values)}.'))
    self._writer.write(self._step,
                       {f'validation/{k}': v for k, v in values.items()},
                       {'seconds': before.seconds()})
    improved = self._best is None or value > self._best.value
    if improved:
      self._best = checkpoints_lib.Best(self._step, value)
    logging.info('%s %d/%d | validation %s %.4f%s', self._stage, self._step,
                 self._config.steps, name, value,
                 ' (best)' if improved else
                 f' (best {self._best.value:.4f} at {self._best.step})')
    return improved

  def _save(self) -> None:
    if self._saved == self._step:
      return
    self._check_finite()
    with self._clock.pause():
      self._checkpoints.save(self._step, self._apart(self._state),
                             self._params(), self._best)
    self._saved = self._step


def _prefetch(batches: Batches, mesh: Mesh, start: int,
              stop: int) -> Iterator[dict[str, jax.Array]]:
  """Batches start..stop-1 on their devices, loaded ahead by one thread."""
  with futures.ThreadPoolExecutor(1, thread_name_prefix='batches') as pool:
    load = lambda step: sharding.shard_batch(mesh, batches[step])
    queue = [pool.submit(load, step)
             for step in range(start, min(start + _PREFETCH, stop))]
    try:
      for step in range(start, stop):
        if step + _PREFETCH < stop:
          queue.append(pool.submit(load, step + _PREFETCH))
        yield queue.pop(0).result()
    finally:
      pool.shutdown(cancel_futures=True)


def _size(tree: Any) -> int:
  return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
