"""From prompts to what a re-ranker did: decode a split, read its answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import functools
import time
from typing import Any

from absl import logging
import jax
from jax.sharding import Mesh
import numpy as np

from dgr2_jax.data import parsing
from dgr2_jax.decoding import block_decoder
from dgr2_jax.decoding import commit
from dgr2_jax.decoding import verification
from dgr2_jax.evaluation import reasoning
from dgr2_jax.evaluation import rows
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib
from dgr2_jax.objectives import rewards
from dgr2_jax.training import sharding

_PROGRESS_SECONDS = 10.


def decode_split(
    model: transformer.Transformer, params: Any,
    batches: Iterable[Mapping[str, np.ndarray]], *, rule: commit.Rule,
    vocabulary: vocabulary_lib.Vocabulary, canvas: canvas_lib.CanvasConfig,
    config: block_decoder.DecodeConfig, mesh: Mesh, seed: int = 0,
    draft: verification.DraftConfig | None = None,
    verifier: tuple[transformer.Transformer, Any] | None = None,
    what: str = '') -> block_decoder.Rollout:
  """Decodes one response for every request.

  Args:
    model: the decoder.
    params: its parameters, on `mesh`.
    batches: of `prompt` [N, P], `prompt_length` [N], `example_id` [N] and
      `valid` [N], the same on every host; N is a multiple of the mesh's
      devices.
    rule: which tokens a step commits; of no account if drafts are verified.
    vocabulary: special ids.
    canvas: block size and rules; B = 1 decodes autoregressively.
    config: num_rollouts must be 1.
    mesh: of devices.
    seed: of sampling.
    draft: how drafts are made if they are to be verified.
    verifier: another model that verifies them, and its parameters.
    what: named in the progress log; empty for none.

  Returns:
    A rollout of NumPy arrays without the rollout axis: [n, L] and [n].
  """
  decode, batches = _decoder(rule, draft, verifier), list(batches)
  parts, begin, told = [], time.monotonic(), time.monotonic()
  for index, batch in enumerate(batches):
    arrays = sharding.shard_batch(mesh, {
        k: batch[k] for k in ('prompt', 'prompt_length', 'example_id')},
                                  whole=True)
    with jax.set_mesh(mesh):
      rollout = decode(
          model, params, arrays['prompt'], arrays['prompt_length'],
          arrays['example_id'], jax.random.key(seed),
          vocabulary=vocabulary, canvas=canvas, config=config)
    rollout = sharding.to_hosts(rollout)
    parts.append(jax.tree.map(lambda x: x[batch['valid'], 0], rollout))
    now = time.monotonic()
    if what and now - told > _PROGRESS_SECONDS:
      told = now
      left = (now - begin) / (index + 1) * (len(batches) - index - 1)
      logging.info('%s: %d of %d batches decoded, %.0f s left.', what,
                   index + 1, len(batches), left)
  return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)


def _decoder(rule: commit.Rule, draft: verification.DraftConfig | None,
             verifier: tuple[transformer.Transformer, Any] | None = None):
  if draft is None:
    return functools.partial(block_decoder.decode, rule=rule)
  model, params = verifier or (None, None)
  return functools.partial(verification.decode, draft=draft, verifier=model,
                           verifier_params=params)


def outcome(name: str, rollout: block_decoder.Rollout, parser: parsing.Parser,
            targets: np.ndarray, num_candidates: int,
            reward: rewards.RewardConfig,
            checker: reasoning.Checker | None = None) -> rows.RowOutcome:
  """Reads every response, strictly and leniently, and rewards it.

  Args:
    name: of the row.
    rollout: from `decode_split`, n responses.
    parser: of the response form.
    targets: int [n], positions among the candidates; -1 is none of them.
    num_candidates: C; an invalid response leaves the incoming order 0 .. C-1.
    reward: what a response earns.
    checker: holds the reasoning of response i against request i.
  """
  incoming = tuple(range(num_candidates))
  parses, lenient = [], []
  answer_tokens, answer_calls, reasoning_calls = [], [], []
  for tokens, length, call in zip(rollout.tokens, rollout.length,
                                  rollout.call):
    parse = parser.strict(tokens[:length])
    parses.append(parse)
    lenient.append(parser.lenient(tokens[:length]) or incoming)
    begin = length if parse.answer_start is None else parse.answer_start
    answer_tokens.append(length - begin)
    answer_calls.append(forwards_of(call[:length], begin))
    reasoning_calls.append(forwards_of(call[:begin], 0))
  earned = rewards.rewards(parses, targets, rollout.length,
                           rollout.tokens.shape[-1], num_candidates, reward)
  return rows.RowOutcome(
      name=name, orders=np.array([p.order or incoming for p in parses]),
      lenient_orders=np.array(lenient),
      failures=[p.failure for p in parses], tokens=rollout.length,
      calls=rollout.calls,
      answer_tokens=np.array(answer_tokens),
      answer_calls=np.array(answer_calls),
      reasoning_calls=np.array(reasoning_calls), rewards=earned['reward'],
      **_reasoning(rollout, checker))


def _reasoning(rollout: block_decoder.Rollout,
               checker: reasoning.Checker | None) -> dict[str, Any]:
  """Checks and words of all responses."""
  if checker is None:
    return {}
  ids = [tokens[:length]
         for tokens, length in zip(rollout.tokens, rollout.length)]
  return dict(reasoning=np.array([
      checker.check(index, x) for index, x in enumerate(ids)]),
              explanations=[checker.explanation(x) for x in ids])


def forwards_of(call: np.ndarray, begin: int) -> int:
  """Forwards that the tokens from `begin` on took: AR, as many as tokens.

  A forward that commits nothing, as a draft, counts with the next that does.

  Args:
    call: int [n], the forward that committed every token.
    begin: from here on.
  """
  commits = np.unique(call)
  cost = dict(zip(commits.tolist(), np.diff(commits, prepend=-1).tolist()))
  return sum(cost[c] for c in set(call[begin:].tolist()))


def tokens_per_second(
    model: transformer.Transformer, params: Any,
    batches: Iterable[Mapping[str, np.ndarray]], modes: Mapping[Any, Mapping],
    *, vocabulary: vocabulary_lib.Vocabulary,
    config: block_decoder.DecodeConfig, repetitions: int) -> dict[Any, float]:
  """Decode speed of several modes on the same weights, in one run.

  The modes take turns batch by batch, so that what else the machine does hits
  all alike. Compilation and the first pass are not timed; prefill is.

  Args:
    model: the decoder.
    params: its parameters.
    batches: as for `decode_split`.
    modes: name -> the `rule`, `canvas` and `draft` of `decode_split`.
    vocabulary: special ids.
    config: as for `decode_split`.
    repetitions: passes over the batches.

  Returns:
    name -> response tokens through EOS a second, median of the passes.
  """
  batches = list(batches)

  def run(batch, rule, canvas, draft):
    begin = time.perf_counter()
    rollout = _decoder(rule, draft)(
        model, params, batch['prompt'], batch['prompt_length'],
        batch['example_id'], jax.random.key(0),
        vocabulary=vocabulary, canvas=canvas, config=config)
    tokens = int(rollout.length.sum())  # waits for the device
    return tokens, time.perf_counter() - begin

  rates = {name: [] for name in modes}
  for repetition in range(repetitions + 1):
    totals = {name: np.zeros(2) for name in modes}
    for batch in batches:
      for name, mode in modes.items():
        totals[name] += run(batch, **mode)
    if repetition:
      for name, (tokens, seconds) in totals.items():
        rates[name].append(tokens / seconds)
  return {name: float(np.median(values)) for name, values in rates.items()}
