"""The evaluation of a run: every row, the frontier, examples and the report.

    row              weights          decoding
    pre_rank         -                the retriever's order
    gbdt             -                the boosted ranker on the same facts
    ar_sft           ar_sft           B = 1, where the recipe has ar_rl
    ar               ar_rl or ar_sft  B = 1
    ar_constrained   the same         B = 1, used candidates masked (optional)
    naive            convert          blocks, tau = 1
    cft, opd, rl     of the recipe    blocks, tau = 1

`stages` tells what the on-policy stages changed: decoded at every threshold,
and sampled as the last of them samples. The frontier decodes the last of these
weights autoregressively, at every threshold and, where the clean stream is an
AR model, verified by it. Its speeds are measured in one run, the modes taking
turns.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import time
from typing import Any

from absl import logging
import jax
import numpy as np

from dgr2_jax.data import prompts
from dgr2_jax.data import tokens as tokens_lib
from dgr2_jax.decoding import block_decoder
from dgr2_jax.decoding import commit
from dgr2_jax.decoding import verification
from dgr2_jax.evaluation import environment
from dgr2_jax.evaluation import examples as examples_lib
from dgr2_jax.evaluation import outcomes as outcomes_lib
from dgr2_jax.evaluation import reasoning
from dgr2_jax.evaluation import report
from dgr2_jax.evaluation import responses
from dgr2_jax.evaluation import rows as rows_lib
from dgr2_jax.evaluation import tables
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.objectives import rewards
from dgr2_jax.training import rollouts

_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain',
             'numpy', 'scikit-learn')
_COMMITS = 32  # requests whose commit steps are shown
_ONE_BY_ONE = commit.Threshold(1.)  # one token a denoising step


def evaluate(experiment) -> dict[str, Any]:
  """Evaluates all stages on the test requests and writes the report.

  Args:
    experiment: an `experiment.Experiment` whose stages are complete.

  Returns:
    The report's content, see `report`.
  """
  return _Evaluation(experiment).run()


class _Evaluation:
  """One pass over rows and frontier; holds what they share."""

  def __init__(self, experiment):
    self._experiment = experiment
    self._config = experiment.config.evaluate
    self._batches = experiment.eval_batches('test', self._config.batch_size)
    self._targets = experiment.data.target_positions('test')
    self._num_candidates = experiment.config.data.num_candidates
    self._seconds = {}
    self._rollouts = {}  # by weights and way to decode
    data = experiment.data
    self._checker = reasoning.Checker(
        data.requests('test'), data.template, data.items, data.semantic_ids,
        experiment.parser)
    teacher = experiment.before('convert')
    self._stage_of = {'naive': 'convert', 'ar': teacher,
                      'ar_constrained': teacher}

  def run(self) -> dict[str, Any]:
    data = self._experiment.data
    n = len(self._targets)
    incoming = np.tile(np.arange(self._num_candidates), (n, 1))
    outcomes = [rows_lib.RowOutcome('pre_rank', incoming),
                rows_lib.RowOutcome('gbdt', data.boosted_orders('test'))]
    recipe = self._experiment.config.recipe
    teachers = {}
    if 'ar_rl' in recipe:
      params = self._experiment.restore('ar_sft')
      teachers['ar_sft'] = {'ar': self._decode(
          'ar_sft', params, canvas_lib.AUTOREGRESSIVE, _ONE_BY_ONE)[0]}
      outcomes.append(teachers['ar_sft']['ar'])
      self._sample(teachers['ar_sft'], params, 'ar_rl')
    teacher = self._experiment.restore(self._experiment.before('convert'))
    reference, _ = self._decode(
        'ar', teacher, canvas_lib.AUTOREGRESSIVE, _ONE_BY_ONE)
    outcomes.append(reference)
    if teachers:
      teachers['ar'] = {'ar': reference}
      self._sample(teachers['ar'], teacher, 'ar_rl')
    if self._config.constrained_ar:
      outcomes.append(self._constrained(teacher))
    canvas = self._experiment.canvas
    outcomes.append(self._decode(
        'naive', self._experiment.restore('convert'), canvas,
        _ONE_BY_ONE)[0])
    *earlier, last = recipe[recipe.index('convert') + 1:]
    thresholds = tuple(dict.fromkeys((1., *self._config.thresholds)))
    students = {}
    for name in earlier:
      params = self._experiment.restore(name)
      students[name] = {
          tables.tau(t): self._decode(name, params, canvas,
                                      commit.Threshold(t))[0]
          for t in thresholds}
      outcomes.append(students[name][tables.tau(1.)])
      self._sample(students[name], params, last)
    student = self._experiment.restore(last)
    modes = self._modes(thresholds)
    points = {mode: self._decode(last, student, **options)
              for mode, options in modes.items()}
    outcomes.append(points[1.][0])
    students[last] = {tables.tau(t): points[t][0] for t in thresholds}
    if earlier:
      self._sample(students[last], student, last)
    speeds = self._speeds(student, modes)
    shown = max((t for t in thresholds if t < 1), default=1.)
    content = {
        'title': f'Diffusion-GR2 on {self._experiment.config.data.name}',
        'command': ' '.join([os.path.basename(sys.executable), '-m',
                             'dgr2_jax.main', *sys.argv[1:]]),
        'dataset': data.summary,
        'conditional': int((self._targets >= 0).sum()),
        'unconditional': {
            'users': data.summary['evaluated_users'],
            'hit_rate': data.summary['hit_rate'],
            'rows': {o.name: rows_lib.unconditional(
                o, self._targets, data.summary['hit_rate'])
                     for o in outcomes}},
        'rows': [self._row(o, reference) for o in outcomes],
        'frontier': [self._point(name, points, speeds, reference)
                     for name in modes
                     if name != 1. or name in self._config.thresholds],
        'stages': self._stages(teachers) + self._stages(students),
        'model': self._model(student),
        'commits': self._commits(points),
        'examples': self._examples(points[shown], shown),
        'timing': {'seconds': self._seconds,
                   'speed_batch_size': self._config.timing_batch_size,
                   'speed_requests': self._config.timing_requests},
        'environment': {
            **environment.environment(*_PACKAGES),
            'devices': [f'{d.platform}: {d.device_kind}'
                        for d in jax.devices()],
            'mesh': dict(self._experiment.mesh.shape)},
    }
    if jax.process_index() == 0:
      self._write_outcomes(outcomes, points)
      report.write(self._experiment.workdir, content)
      print(report.summary(content))
      print(f'Report: {self._experiment.workdir / "report.html"}')
    return content

  def _modes(self, thresholds: tuple[float, ...]) -> dict[Any, dict[str, Any]]:
    """Ways to decode a student: AR, by threshold, drafts verified."""
    canvas = self._experiment.canvas
    modes = {'ar': dict(canvas=canvas_lib.AUTOREGRESSIVE, rule=_ONE_BY_ONE,
                        draft=None)}
    for threshold in thresholds:
      modes[threshold] = dict(
          canvas=canvas, rule=commit.Threshold(threshold), draft=None)
    if canvas.verifiable:
      modes['verify'] = dict(
          canvas=canvas, rule=_ONE_BY_ONE,
          draft=verification.DraftConfig(**self._config.verify))
    return modes

  def _decode(self, name: str, params: Any, canvas: canvas_lib.CanvasConfig,
              rule: commit.Threshold, how: str = '',
              draft: verification.DraftConfig | None = None, **options):
    """The outcome and the rollout of one way to decode the test requests."""
    begin = time.monotonic()
    how = how or ('ar' if canvas.block_size == 1 else 'verify' if draft
                  else tables.tau(rule.tau))
    config = dataclasses.replace(self._experiment.decode_config(), **options)
    # A stage may have kept the weights of the one before.
    weights = self._experiment.origin(self._stage_of.get(name, name))
    key = weights, canvas, rule, config, draft
    if key not in self._rollouts:
      self._rollouts[key] = responses.decode_split(
          self._experiment.model, params, self._batches, rule=rule,
          vocabulary=self._experiment.vocabulary, canvas=canvas, config=config,
          mesh=self._experiment.mesh, draft=draft, what=f'{name}, {how}')
    rollout = self._rollouts[key]
    # Rewarded as its reinforcement learning rewards.
    stage = ('ar_rl' if name.startswith('ar')
             else self._experiment.config.recipe[-1])
    reward = self._experiment.config.get(stage, {}).get('reward', {})
    outcome = responses.outcome(
        name, rollout, self._experiment.parser, self._targets,
        self._num_candidates, rewards.RewardConfig(**reward), self._checker)
    self._seconds[f'{name}, {how}'] = time.monotonic() - begin
    valid = rows_lib.validity(outcome.failures)['valid_rate']
    logging.info('%s, %s: %d requests, valid %.3f, %.2f tokens per forward.',
                 name, how, len(outcome.orders), valid,
                 outcome.tokens.sum() / outcome.calls.sum())
    return outcome, rollout

  def _constrained(self, params: Any) -> rows_lib.RowOutcome:
    config = self._experiment.config
    if config.prompt.response_format != prompts.COMPACT:
      raise ValueError(
          'evaluate.constrained_ar masks whole-token candidates: it needs '
          f'prompt.response_format={prompts.COMPACT!r}, got '
          f'{config.prompt.response_format!r}')
    return self._decode(
        'ar_constrained', params, canvas_lib.AUTOREGRESSIVE, _ONE_BY_ONE,
        answer_ids=self._experiment.candidate_ids(),
        answer_marker=self._experiment.data.tokenizer.id(tokens_lib.ANSWER))[0]

  def _speeds(self, params: Any, modes) -> dict[Any, float]:
    size = self._config.timing_batch_size
    batches = self._experiment.eval_batches(
        'test', size, self._config.timing_requests)
    return responses.tokens_per_second(
        self._experiment.model, params, batches, modes,
        vocabulary=self._experiment.vocabulary,
        config=self._experiment.decode_config(),
        repetitions=self._config.timing_repetitions)

  def _row(self, outcome, reference) -> dict[str, Any]:
    return rows_lib.build_row(
        outcome, self._targets, reference, seed=self._experiment.config.seed,
        resamples=self._config.bootstrap_resamples)

  def _sample(self, decoded: dict[str, rows_lib.RowOutcome], params: Any,
              stage: str) -> None:
    """Adds responses that are sampled as the on-policy `stage` samples."""
    rollout = rollouts.RolloutConfig(**self._experiment.config[stage].rollout)
    canvas, how = self._experiment.canvas, tables.tau(rollout.threshold)
    if stage == 'ar_rl':
      canvas, how = canvas_lib.AUTOREGRESSIVE, 'ar'
    how += f', temperature {rollout.temperature:g}'
    name = next(iter(decoded.values())).name
    decoded[how] = self._decode(
        name, params, canvas, commit.Threshold(rollout.threshold), how,
        **dataclasses.asdict(rollout.decoding(
            self._experiment.data.response_length)))[0]

  def _stages(self, decoded: dict[str, dict[str, rows_lib.RowOutcome]]
              ) -> list[dict[str, Any]]:
    """What each stage changed, by name and decoding; the first is a start."""
    return [rows_lib.build_stage(
        decoded[name][how], decoded[before][how], self._targets, decoding=how,
        seed=self._experiment.config.seed,
        resamples=self._config.bootstrap_resamples)
            for before, name in itertools.pairwise(decoded)
            for how in decoded[name]]

  def _point(self, name, points, speeds, reference) -> dict[str, Any]:
    return rows_lib.build_frontier_point(
        points[name][0], self._targets,
        mode=name if isinstance(name, str) else 'threshold',
        threshold=None if isinstance(name, str) else name,
        tokens_per_second=speeds[name], same_weights=points['ar'][0],
        same_weights_tokens_per_second=speeds['ar'], reference=reference,
        seed=self._experiment.config.seed,
        resamples=self._config.bootstrap_resamples)

  def _model(self, params: Any) -> dict[str, Any]:
    config = self._experiment.model.config
    return {
        'parameters': sum(x.size for x in jax.tree.leaves(params)),
        **dataclasses.asdict(config),
        **dataclasses.asdict(self._experiment.canvas),
        'prompt_length': self._experiment.data.prompt_length,
        'response_length': self._experiment.data.response_length}

  def _examples(self, point, threshold: float) -> list[dict[str, Any]]:
    """Worked examples, see `examples.choose`."""
    outcome, rollout = point
    return [self._example(i, outcome, rollout, threshold)
            for i in examples_lib.choose(
                self._targets, outcome.orders, outcome.failures,
                self._config.num_examples)]

  def _commits(self, points) -> list[dict[str, Any]]:
    """When tokens were committed, of some requests, by way to decode."""
    shown = np.linspace(0, len(self._targets) - 1, min(
        _COMMITS, len(self._targets))).astype(int)
    block_size = self._experiment.canvas.block_size
    return [
        {'row': outcome.name, 'threshold': mode, 'block_size': block_size,
         'steps': [examples_lib.commit_steps(
             rollout.call[i, :rollout.length[i]], block_size) for i in shown]}
        for mode, (outcome, rollout) in points.items()
        if not isinstance(mode, str) and mode < 1]

  def _write_outcomes(self, outcomes, points) -> None:
    """Every response, for `tools.judge` and `tools.compare`."""
    named = {outcomes_lib.file_name(o.name): o for o in outcomes}
    for mode, (outcome, _) in points.items():
      named[outcomes_lib.file_name(outcome.name, *(
          (mode,) if isinstance(mode, str) else ('threshold', mode)))] = outcome
    outcomes_lib.write(self._experiment.workdir, self._experiment.data, 'test',
                       named)

  def _example(self, index: int, outcome: rows_lib.RowOutcome,
               rollout: block_decoder.Rollout,
               threshold: float) -> dict[str, Any]:
    data = self._experiment.data
    request = data.requests('test')[index]
    length = int(rollout.length[index])
    ids, calls = rollout.tokens[index, :length], rollout.call[index, :length]
    parse = self._experiment.parser.strict(ids)
    begin = length if parse.answer_start is None else parse.answer_start
    return {
        'row': outcome.name, 'threshold': threshold,
        'block_size': self._experiment.canvas.block_size,
        'calls': int(rollout.calls[index]), 'failure': parse.failure,
        'target': int(self._targets[index]),
        'order': outcome.orders[index].tolist(),
        'history': data.describe(request.history),
        'candidates': data.describe(request.candidates),
        'trace': outcome.explanations[index],
        'tokens': [
            {'text': data.tokenizer.decode([int(token)]), 'call': int(call),
             'is_answer': i >= begin}
            for i, (token, call) in enumerate(zip(ids, calls))],
    }
