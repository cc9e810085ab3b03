"""One update of the parameters, whole or in parts.

    whole      g = grad (sum_i w_i l_i) / (sum_i w_i)         over the batch
    in parts   W = sum_i w_i                                  no model needed
               g = sum over parts of grad (sum_{i in part} w_i l_i) / W

So a batch in parts has the loss and the gradient of the whole one, to rounding,
however weights are spread over the parts; noise is drawn by example id and
stays the same too. A part takes every n-th row: no row moves between devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
import ml_collections
import optax

from dgr2_jax.models import partition
from dgr2_jax.objectives import scoring
from dgr2_jax.training import lora as lora_lib
from dgr2_jax.training import optimizer as optimizer_lib
from dgr2_jax.training import sharding

Params = Any
Metrics = dict[str, scoring.Mean | jax.Array]
# (params, batch, key) -> (terms of the loss, metrics). Metrics that are no
# means are maxima if they are named `max_...`, else sums over the batch.
LossFn = Callable[[Params, dict[str, Any], jax.Array],
                  tuple[Sequence[scoring.Mean], Metrics]]
# The entry of a batch that has no rows: parameters of frozen models.
FROZEN = 'frozen'


@struct.dataclass
class TrainState:
  """What a checkpoint holds.

  Attributes:
    step: int32, steps done.
    params: the parameters that are trained.
    opt_state: optax's state.
    sums: float32 sums of the metrics since the last log line; maxima of those
      that are maxima.
    bad_step: int32, the first step whose loss or gradient was not finite; -1
      while there is none.
    base: with LoRA, the parameters that `params` adapt; they never change and
      are in no checkpoint.
  """
  step: jax.Array
  params: Params
  opt_state: optax.OptState
  sums: dict[str, jax.Array]
  bad_step: jax.Array
  base: Params = None


def make_step(loss_fn: LossFn, optimizer: optax.GradientTransformation,
              seed: int, rules: partition.Rules, accumulate: int = 1,
              lora: lora_lib.LoraConfig | None = None
              ) -> Callable[[TrainState, Any], TrainState]:
  """One update, to be jitted.

  Args:
    loss_fn: a pure function, see `LossFn`.
    optimizer: from `optimizer.make_optimizer`.
    seed: with the step, all that a step's randomness depends on.
    rules: where parameters and their gradients live.
    accumulate: parts of a batch, one after the other.
    lora: how `state.params` adapt `state.base`.

  Returns:
    (state, batch) -> state.
  """

  def step(state: TrainState, batch: dict[str, Any]) -> TrainState:
    key = jax.random.fold_in(jax.random.key(seed), state.step)

    def adapted_loss(params, batch, key):
      if lora:
        params = lora_lib.join(state.base, params, lora)
      return loss_fn(params, batch, key)

    loss, metrics, grads = gradient(
        adapted_loss, state.params, batch, key, rules, accumulate)
    norm = optax.global_norm(grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    metrics = {'loss': loss, 'gradient_norm': norm} | metrics
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    return state.replace(
        step=state.step + 1,
        params=optax.apply_updates(state.params, updates),
        opt_state=opt_state,
        sums={k: _merge(k, v, jnp.asarray(metrics[k], jnp.float32))
              for k, v in state.sums.items()},
        bad_step=jnp.where(finite | (state.bad_step >= 0), state.bad_step,
                           state.step + 1))

  return step


class Program(NamedTuple):
  """A stage's first state and its update, compiled or to be.

  Attributes:
    init: parameters -> the first state.
    state: its shapes, each with its sharding.
    update: jitted (state, batch) -> state; the state is donated.
    lora: how `state.params` adapt `state.base`; None where they are the
      model's own.
  """
  init: Callable[[Params], TrainState]
  state: TrainState
  update: Any
  lora: lora_lib.LoraConfig | None

  @property
  def shardings(self) -> TrainState:
    return jax.tree.map(lambda x: x.sharding, self.state)


def program(loss_fn: LossFn, params: Params, example: Any,
            config: ml_collections.ConfigDict, mesh: jax.sharding.Mesh,
            rules: partition.Rules, seed: int) -> Program:
  """What trains a stage; shapes are enough to make it.

  Args:
    loss_fn: see `LossFn`.
    params: the model's parameters, or their shapes.
    example: a batch, or its shapes.
    config: the stage's section, see `loop.train`.
    mesh: from `sharding.make_mesh`.
    rules: parameter shardings.
    seed: see `make_step`.
  """
  choice = optimizer_lib.of_stage(config)
  optimizer = optimizer_lib.make_optimizer(config, choice)
  lora = choice.adapters()
  rules = (*optimizer_lib.RULES, *rules)
  key = jax.eval_shape(lambda: jax.random.key(seed))

  def init(params):
    base = None
    if lora:
      base, params = params, lora_lib.init(params, jax.random.key(seed), lora)
    return TrainState(
        step=jnp.int32(0), params=jax.tree.map(jnp.copy, params),
        opt_state=optimizer.init(params),
        sums={name: jnp.float32(0)
              for name in ('loss', 'gradient_norm', *metrics)},
        bad_step=jnp.int32(-1), base=jax.tree.map(jnp.copy, base))

  with jax.set_mesh(mesh):
    _, metrics = jax.eval_shape(loss_fn, params, example, key)
    state = jax.eval_shape(init, params)
    shardings = sharding.param_shardings(mesh, state, rules)
    update = jax.jit(
        make_step(loss_fn, optimizer, seed, rules,
                  config.get('accumulate', 1), lora),
        in_shardings=(shardings, None),  # batches are placed already
        out_shardings=shardings, donate_argnums=0)
  return Program(init, sharding.abstract(state, shardings), update, lora)


def gradient(loss_fn: LossFn, params: Params, batch: dict[str, Any],
             key: jax.Array, rules: partition.Rules, accumulate: int = 1
             ) -> tuple[jax.Array, dict[str, jax.Array], Params]:
  """Loss, metrics and gradient of a batch; see the module.

  Raises:
    ValueError: the batch does not divide into `accumulate` parts.
  """

  def part_loss(params, part, weights):
    terms, metrics = loss_fn(params, part, key)
    if weights is None:
      weights = [term.weight for term in terms]
    return sum(term.replace(weight=weight).value
               for term, weight in zip(terms, weights)), metrics

  def of_part(part, weights):
    (loss, metrics), grads = jax.value_and_grad(part_loss, has_aux=True)(
        params, part, weights)
    return loss, metrics, partition.placed(grads, rules)

  if accumulate == 1:
    loss, metrics, grads = of_part(batch, None)
    return loss, scoring.values(metrics), grads
  frozen = {k: v for k, v in batch.items() if k == FROZEN}
  parts = _parts({k: v for k, v in batch.items() if k != FROZEN}, accumulate)
  # The losses are not used: the compiler leaves the model out of this call.
  weights = [term.weight for term in loss_fn(params, batch, key)[0]]

  def add(sums, part):
    loss, metrics, grads = of_part(part | frozen, weights)
    return (sums[0] + loss,
            {k: _merge(k, sums[1][k], v) for k, v in metrics.items()},
            jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums[2], grads)
            ), None

  _, metrics, _ = jax.eval_shape(
      lambda part: of_part(part | frozen, weights),
      jax.tree.map(lambda x: x[0], parts))
  zeros = lambda tree: jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype), tree)
  grads = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
  (loss, metrics, grads), _ = jax.lax.scan(
      add, (jnp.float32(0), zeros(metrics), partition.placed(grads, rules)),
      parts)
  return loss, scoring.values(metrics), jax.tree.map(
      lambda g, p: g.astype(p.dtype), grads, params)


def is_maximum(name: str) -> bool:
  """Whether a metric of several parts is their maximum, not their sum."""
  return name.startswith('max_')


def _merge(name: str, a: Any, b: Any) -> Any:
  """A metric of two parts; maxima are of magnitudes."""
  return jax.tree.map(jnp.maximum if is_maximum(name) else jnp.add, a, b)


def _parts(batch: Mapping[str, Any], count: int) -> Any:
  """[N, ...] -> [count, N / count, ...]; part i has the rows i, i + count."""

  def split(path, x):
    if x.shape[0] % count:
      raise ValueError(
          f'A batch of {x.shape[0]} rows ({partition.path_name(path)}) does '
          f'not divide into accumulate={count} parts.')
    x = x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)
    return partition.constrain(x, None, partition.BATCH_AXES)

  return jax.tree.map_with_path(split, dict(batch))
