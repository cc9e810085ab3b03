"""Batches of a policy's own responses, for OPD and RL.

    round r:  prompts --decode G each--> responses --parse, reward--> groups
              --keep groups whose rewards differ, refill--> U update batches

A round is a function of (parameters, seed, r), and checkpoints are only written
between rounds: a run killed within one does it again with the same bits.
Within a round decoding is dispatched ahead: a device decodes the next prompts,
for another update batch (U > 1) or a refill, while the host parses the last
ones. Between rounds it waits, as the next prompts want the updated policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
from typing import Any

from absl import logging
import jax
import numpy as np

from dgr2_jax.data import parsing
from dgr2_jax.decoding import block_decoder
from dgr2_jax.decoding import commit
from dgr2_jax.decoding import replay as replay_lib
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.objectives import rewards as rewards_lib
from dgr2_jax.objectives import scoring
from dgr2_jax.training import sharding

Batch = dict[str, Any]
OUTCOMES = (parsing.VALID, *parsing.FAILURES)


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
  """How responses are sampled and which are learned from.

  Attributes:
    num_rollouts: G, responses a request.
    updates: U, update batches from one round.
    threshold: tau.
    temperature: of the sampling.
    top_k: draws from the likeliest tokens only; 0 is off.
    top_p: draws from the nucleus of this mass only; 1 is off.
    max_denoising_steps: a block.
    canvases: 'all' steps of a block, or 'one' at random.
    canvases_per_row: M of `replay.replay`: about what most responses take. Each
      row repeats the clean response, so few are dear for long responses.
    refill: rounds of prompts that may be decoded to find groups whose rewards
      differ (DAPO's dynamic sampling); 1 drops the others and goes on.
  """
  num_rollouts: int
  updates: int = 1
  threshold: float = 0.9
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  max_denoising_steps: int = 64
  canvases: str = 'all'
  canvases_per_row: int = 8
  refill: int = 1

  def __post_init__(self):
    for field in ('num_rollouts', 'updates', 'canvases_per_row', 'refill'):
      if getattr(self, field) < 1:
        raise ValueError(f'{field}={getattr(self, field)} must be >= 1')
    if self.canvases not in ('all', 'one'):
      raise ValueError(f"canvases={self.canvases!r}: expected 'all' or 'one'")

  def decoding(self, length: int) -> block_decoder.DecodeConfig:
    """How one response of at most `length` tokens is sampled."""
    return block_decoder.DecodeConfig(
        max_response=length, temperature=self.temperature, top_k=self.top_k,
        top_p=self.top_p, max_denoising_steps=self.max_denoising_steps)

  def sampling(self, length: int) -> block_decoder.DecodeConfig:
    """How the G responses of a request are sampled."""
    return dataclasses.replace(
        self.decoding(length), num_rollouts=self.num_rollouts)


def apart(example_id: np.ndarray) -> np.ndarray:
  """Ids for noise: where one of int [N] comes again, it gets a new one."""
  order = np.argsort(example_id, kind='stable')
  first = np.searchsorted(example_id[order], example_id[order])
  again = np.empty_like(order)
  again[order] = np.arange(len(order)) - first
  return (example_id + again * (example_id.max() + 1)).astype(np.int32)


class Rollouts:
  """Decodes, parses and rewards; see the module.

  Attributes:
    updates: U.
  """

  def __init__(self, experiment, stage: str, canvas: canvas_lib.CanvasConfig,
               prompts: Sequence[Batch], config: RolloutConfig,
               reward: rewards_lib.RewardConfig,
               annotate: Callable[[Batch], Batch] = lambda batch: batch,
               only_informative: bool = True,
               supervised: Sequence[Batch] | None = None):
    """Makes a source of update batches.

    Args:
      experiment: an `experiment.Experiment`.
      stage: named in logs.
      canvas: block size and rules of the policy.
      prompts: batches of N requests by index, see `pipeline.train_batches`;
        the same on every host, like all that is done on hosts here.
      config: see `RolloutConfig`.
      reward: see `RewardConfig`.
      annotate: adds what frozen models say to an update batch on the mesh.
      only_informative: whether groups without reward variance are left out (of
        RL; to a teacher they are as good as others).
      supervised: batches of records by index, handed on beside the responses.
    """
    self.updates = config.updates
    self._experiment = experiment
    self._stage = stage
    self._canvas = canvas
    self._prompts = prompts
    self._config = config
    self._reward = reward
    self._annotate = annotate
    self._only_informative = only_informative
    self._supervised = supervised
    self._targets = experiment.data.target_positions('train')
    self._limit = experiment.data.response_length
    self._decode_config = config.sampling(self._limit)

  def example(self) -> Batch:
    """An update batch of made-up responses: its fields, shapes and types."""
    prompts = self._prompts[0]
    shape = (len(prompts['example_id']), self._config.num_rollouts)
    full = (*shape, self._limit)
    blocks = np.arange(self._limit, dtype=np.int32) // self._canvas.block_size
    made_up = block_decoder.Rollout(
        tokens=np.full(full, self._experiment.vocabulary.eos_id, np.int32),
        length=np.ones(shape, np.int32), finished=np.ones(shape, bool),
        call=np.broadcast_to(blocks, full),  # one step a block
        logprob=np.zeros(full, np.float32), calls=np.ones(shape, np.int32))
    groups = self._groups(prompts, made_up)
    tally = _Tally()
    tally.add(groups)
    return self._place(self._batch(groups, tally, seed=(0, 0)), step=0)

  def collect(self, params: Any, round_: int, seed: int) -> list[Batch]:
    """The U update batches of a round, on the mesh.

    Args:
      params: of the policy that decodes.
      round_: counts rounds from zero.
      seed: of the run.
    """
    size = len(self._prompts[0]['example_id'])
    wanted = self.updates * size
    kept, spare, decoded = [], [], 0
    tally = _Tally()
    most = self.updates * self._config.refill
    for prompts, rollout in self._decode(
        params, range(round_ * most, (round_ + 1) * most), seed):
      groups = self._groups(prompts, rollout)
      tally.add(groups)
      decoded += size
      good = groups['kept']
      kept.append(_take(groups, np.flatnonzero(good)))
      spare.append(_take(groups, np.flatnonzero(~good)))
      informative = sum(len(g['kept']) for g in kept)
      if informative >= wanted and decoded % wanted == 0:
        break
    # Groups that teach nothing fill up the batches; they carry no weight.
    groups = _take(_concatenate(kept + spare), np.arange(wanted))
    self._tell(round_, tally, groups, decoded, min(informative, wanted))
    # Spread what counts over the update batches.
    order = np.arange(wanted).reshape(size, self.updates).T
    return [
        self._place(
            self._batch(_take(groups, rows), tally, (seed, round_, update)),
            round_ * self.updates + update)
        for update, rows in enumerate(order)]

  def _decode(self, params: Any, indices: range, seed: int
              ) -> Iterator[tuple[Batch, block_decoder.Rollout]]:
    """Prompt batches with their rollouts, decoding one batch ahead."""
    experiment, ahead = self._experiment, None

    def dispatch(index):
      batch = self._prompts[index]
      arrays = sharding.shard_batch(experiment.mesh, {
          'prompt': batch['prompt'], 'prompt_length': batch['prompt_length'],
          'example_id': apart(batch['example_id'])}, whole=True)
      # The index too: a prompt that comes back gets other responses.
      key = jax.random.fold_in(jax.random.key(seed), index)
      with jax.set_mesh(experiment.mesh):
        return batch, block_decoder.decode(
            experiment.model, params, arrays['prompt'],
            arrays['prompt_length'], arrays['example_id'], key,
            commit.Threshold(self._config.threshold),
            vocabulary=experiment.vocabulary, canvas=self._canvas,
            config=self._decode_config)

    for index in indices:
      current, ahead = ahead, dispatch(index)
      if current:
        yield current[0], sharding.to_hosts(current[1])
    yield ahead[0], sharding.to_hosts(ahead[1])

  def _groups(self, prompts: Batch, rollout: block_decoder.Rollout) -> Batch:
    """One row a request: its responses, what they earn and whether to learn."""
    n, g, _ = rollout.tokens.shape
    experiment = self._experiment
    lengths = rollout.length.ravel()
    parses = [experiment.parser.strict(tokens[:length]) for tokens, length in
              zip(rollout.tokens.reshape(n * g, -1), lengths)]
    targets = np.repeat(self._targets[prompts['example_id']], g)
    earned = rewards_lib.rewards(
        parses, targets, lengths, self._limit,
        experiment.config.data.num_candidates, self._reward)
    earned = {k: v.reshape(n, g) for k, v in earned.items()}
    advantage, differ = rewards_lib.group_advantages(earned['reward'])
    begin = np.array([length if p.answer_start is None else p.answer_start
                      for p, length in zip(parses, lengths)]).reshape(n, g)
    index = np.arange(rollout.tokens.shape[-1])
    return {
        'prompt': prompts['prompt'], 'prompt_length': prompts['prompt_length'],
        'response': rollout.tokens, 'response_length': rollout.length,
        'call': rollout.call, 'logprob': rollout.logprob,
        'calls': rollout.calls,
        'is_answer': ((index >= begin[..., None])
                      & (index < rollout.length[..., None])),
        'advantage': advantage, 'differ': differ,
        'kept': differ | (not self._only_informative),
        'outcome': np.array([OUTCOMES.index(p.failure) for p in parses],
                            np.int32).reshape(n, g),
        **earned}

  def _batch(self, groups: Batch, tally: _Tally,
             seed: Sequence[int]) -> Batch:
    """An update batch: groups, their canvases, and means over the round."""
    draw = (np.random.default_rng(seed) if self._config.canvases == 'one'
            else None)
    canvases = replay_lib.replay(
        groups['call'], self._canvas, self._config.canvases_per_row, draw)
    kept = groups['kept']
    means = tally.means() | {'kept_share': kept.mean()}
    return groups | canvases._asdict() | {'round': {
        k: np.full(len(kept), v, np.float32) for k, v in means.items()}}

  def _place(self, batch: Batch, step: int) -> Batch:
    """The batch of a step on the mesh, with what others say to it."""
    batch = {k: v for k, v in batch.items() if k != 'call'}
    if self._supervised is not None:
      batch['supervised'] = dict(self._supervised[step])
    return self._annotate(sharding.shard_batch(
        self._experiment.mesh, batch, whole=True))

  def _tell(self, round_: int, tally: _Tally, groups: Batch, decoded: int,
            informative: int) -> None:
    """Logs a round and one of its responses."""
    length = int(groups['response_length'][0, 0])
    text = self._experiment.data.tokenizer.decode(
        groups['response'][0, 0, :length].tolist())
    logging.info(
        '%s round %d | %s | %d of %d decoded groups count | reward %.2f: %s',
        self._stage, round_, tally, informative, decoded,
        groups['reward'][0, 0], text if len(text) < 160 else text[:157] + '...')
    if not tally.means()['valid_rate']:
      logging.warning('%s round %d: no response is valid.', self._stage, round_)
    if self._only_informative and not informative:
      logging.warning(
          '%s round %d: all responses of every request earn the same; nothing '
          'is learned from it. If this goes on, raise the temperature, '
          'num_rollouts or refill.', self._stage, round_)


class _Tally:
  """Means over everything that a round decoded, learned from or not."""

  def __init__(self):
    self._groups = []

  def add(self, groups: Batch) -> None:
    self._groups.append({k: groups[k] for k in (
        'reward', 'rank', 'format', 'overlong', 'differ', 'response_length',
        'calls', 'outcome')})

  def means(self) -> dict[str, float]:
    """Metrics by name."""
    groups = _concatenate(self._groups)
    return {
        **{k: groups[k].mean() for k in ('reward', 'rank', 'format',
                                         'overlong', 'response_length')},
        'reward_std': groups['reward'].std(axis=1).mean(),
        'same_reward_share': 1 - groups['differ'].mean(),
        'tokens_per_forward': (groups['response_length'].sum()
                               / groups['calls'].sum()),
        **{f'{name}_rate': (groups['outcome'] == i).mean()
           for i, name in enumerate(OUTCOMES)}}

  def __str__(self) -> str:
    means = self.means()
    failed = ', '.join(f'{name} {means[f"{name}_rate"]:.2f}'
                       for name in parsing.FAILURES if means[f'{name}_rate'])
    return (f'reward {means["reward"]:.3f} | valid {means["valid_rate"]:.3f}'
            + (f' ({failed})' if failed else '')
            + f' | {means["tokens_per_forward"]:.2f} tokens per forward')


def measured(batch: Mapping[str, Any]) -> dict[str, scoring.Mean]:
  """Metrics of the round that an update batch comes from."""
  return {name: scoring.Mean(values.sum(), values.size)
          for name, values in batch['round'].items()}


def _take(groups: Batch, rows: np.ndarray) -> Batch:
  return {k: v[rows] for k, v in groups.items()}


def _concatenate(parts: Sequence[Batch]) -> Batch:
  return {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}
