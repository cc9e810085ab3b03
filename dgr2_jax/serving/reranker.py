"""The re-ranker that an experiment trained, for other people's requests.

    reranker = Reranker.load('/tmp/dgr2_quickstart')
    request = Request(history=['B001', 'B007'], candidates=[ten item ids])
    result, = reranker.rerank([request], mode='verify')
    result.ranking, result.valid, result.explanation, result.forwards

`prompting.py` makes the prompt. An invalid response leaves the candidates as
they came, and says so; or its answer is completed to a permutation
(`decoding/permutation.py`), and says that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import itertools
import os
import pathlib
from typing import Any

import jax
import numpy as np
import tqdm

from dgr2_jax.data import parsing
from dgr2_jax.data import tokens as tokens_lib
from dgr2_jax.data import traces
from dgr2_jax.decoding import batching
from dgr2_jax.decoding import block_decoder
from dgr2_jax.decoding import commit
from dgr2_jax.decoding import permutation
from dgr2_jax.decoding import verification
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.serving import prompting
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import losses
from dgr2_jax.training import workdir as workdir_lib

MODES = ('threshold', 'verify', 'ar')


@dataclasses.dataclass(frozen=True)
class Token:
  """One token of a response: its text, and the forward that committed it."""
  text: str
  forward: int


@dataclasses.dataclass(frozen=True)
class Reranking:
  """An answer.

  Attributes:
    order: positions in the request's candidates from zero, best first.
    ranking: the candidates' ids in this order.
    new_items: ids of the request's items that the catalogue lacks.
    valid: whether the response was exactly one permutation of them; if not,
      `order` is the one they came in, or `completed`.
    completed: whether `order` is what `permutation.complete` made of the
      reasoning.
    failure: 'valid', or what is wrong; see `parsing.FAILURES`.
    explanation: the reasoning.
    forwards: model calls, prefill included.
    trace: the response token by token.
  """
  order: tuple[int, ...]
  ranking: tuple[str, ...]
  new_items: tuple[str, ...]
  valid: bool
  completed: bool
  failure: str
  explanation: str
  forwards: int
  trace: tuple[Token, ...]


class Reranker:
  """Answers requests with the weights of one stage.

  Attributes:
    identity: what tells the model from others.
  """

  def __init__(self, experiment: experiment_lib.Experiment, stage: str):
    """Restores weights and counts purchases; see `load`."""
    self._experiment = experiment
    self._canvas = losses.canvas_of(experiment, stage)
    self._params = experiment.restore(stage)
    # Other directories, stages or trainings have another.
    self.identity = {'model': str(experiment.workdir), 'stage': stage,
                     'weights': experiment.fingerprint(stage)}
    self._prompter = prompting.Prompter(experiment)

  @classmethod
  def load(cls, workdir: str | pathlib.Path,
           stage: str | None = None) -> Reranker:
    """Loads what `dgr2_jax.main` left in a working directory.

    Args:
      workdir: the directory, in which at least `stage` is complete; or its
        `checkpoints/STAGE`, which says both.
      stage: whose weights; None is the recipe's last.

    Raises:
      workdir.WorkdirError: it is no working directory.
      ValueError: no such stage, or not complete.
    """
    # One directory is one model, however its path is spelt.
    workdir = pathlib.Path(os.path.expanduser(workdir)).resolve()
    if workdir.parent.name == 'checkpoints' and stage in (None, workdir.name):
      workdir, stage = workdir.parents[1], workdir.name
    config = workdir_lib.read_config(workdir)
    recipe = tuple(config.recipe)
    stage = recipe[-1] if stage is None else stage
    if stage not in recipe:
      raise ValueError(f'stage {stage!r} is not in the recipe of {workdir}: '
                       f'expected one of {", ".join(recipe)}')
    return cls(experiment_lib.Experiment.here(config, workdir), stage)

  def check(self, request: prompting.Request) -> None:
    """Raises RequestError if a request cannot be answered."""
    self._prompter.checked(request)

  def rerank(self, requests: Iterable[prompting.Request],
             mode: str = 'threshold', threshold: float = .9,
             batch_size: int = 16, complete: bool = False,
             answer_threshold: float | None = None,
             progress: bool = True) -> list[Reranking]:
    """All answers at once; arguments and errors are those of `stream`.

    Requests are checked before the first is decoded. `progress` shows a bar on
    stderr.
    """
    requests = list(requests)
    answers = self.stream(requests, mode, threshold, batch_size, complete,
                          answer_threshold)
    for index, request in enumerate(requests):
      self._prompter.checked(request, f'request {index}: ')
    return list(tqdm.tqdm(answers, total=len(requests), disable=not progress,
                          unit='req'))

  def stream(self, requests: Iterable[prompting.Request],
             mode: str = 'threshold', threshold: float = .9,
             batch_size: int = 16, complete: bool = False,
             answer_threshold: float | None = None) -> Iterator[Reranking]:
    """Answers requests while they come.

    An answer does not depend on the other requests; nor does what it took,
    unless `evaluate.verify` has several `lengths`, which the batch shares.

    Args:
      requests: any number; a few batches of them are taken ahead.
      mode: 'threshold' commits tokens that are at least `threshold` probable;
        'verify' gives the autoregressive result in fewer forwards; 'ar'
        decodes one token a forward.
      threshold: tau in (0, 1]; 1 is one token a denoising step.
      batch_size: requests decoded together; one that is done makes room for
        the next.
      complete: whether to complete invalid answers behind whole reasoning to
        permutations; of compact responses.
      answer_threshold: tau of the answer, if not that of the reasoning: the
        answer is what a low one breaks first.

    Yields:
      One answer a request, in their order.

    Raises:
      RequestError: a request cannot be answered; the message names it.
      ValueError: unknown mode, or one that these weights do not have.
    """
    decoding = self._decoding(mode, threshold, answer_threshold)
    if batch_size < 1:
      raise ValueError(f'batch_size is {batch_size}: expected at least 1')
    if complete and not self._experiment.candidate_ids():
      raise ValueError('complete=True needs compact responses, whose '
                       'candidates are single tokens')
    return self._stream(requests, batch_size, decoding, complete)

  def _stream(self, requests: Iterable[prompting.Request], batch_size: int,
              decoding: dict[str, Any], complete: bool) -> Iterator[Reranking]:
    """See `stream`."""
    experiment, asked = self._experiment, []

    def prompts():
      numbered = enumerate(requests)
      while part := list(itertools.islice(numbered, batch_size)):
        checked = self._prompter.with_facts([
            self._prompter.checked(r, f'request {i}: ') for i, r in part])
        ids = [self._prompter.template(r).prompt(r).ids for r in checked]
        # Prompts of like lengths are prefilled together.
        for k in sorted(range(len(part)), key=lambda k: len(ids[k])):
          asked.append((part[k][0], checked[k], ids[k]))
          yield batching.Prompt(ids[k])

    ready, following = {}, 0
    for index, rollout in batching.decode(
        experiment.model, self._params, prompts(), rows=batch_size,
        vocabulary=experiment.vocabulary, mesh=experiment.mesh,
        max_prompt=experiment.config.prompt.max_prompt, **decoding):
      place, request, ids = asked[index]
      asked[index] = None
      ready[place] = self._answer(
          request, ids, jax.tree.map(lambda x: x[0], rollout),
          decoding['canvas'] if complete else None)
      while following in ready:
        yield ready.pop(following)
        following += 1

  def _decoding(self, mode: str, threshold: float,
                answer_threshold: float | None) -> dict[str, Any]:
    """Arguments of `batching.decode`."""
    experiment = self._experiment
    if mode not in MODES:
      raise ValueError(f'mode is {mode!r}: expected {", ".join(MODES)}')
    if answer_threshold is not None:
      if mode != 'threshold':
        raise ValueError(f'answer_threshold is of mode threshold, not {mode}')
      if not experiment.candidate_ids():
        raise ValueError('answer_threshold needs compact responses, whose '
                         'answer begins at a token of its own')
    if mode != 'ar' and self._canvas == canvas_lib.AUTOREGRESSIVE:
      raise ValueError(f"weights of {self.identity['stage']} are "
                       f"autoregressive: expected mode 'ar', got {mode!r}")
    if mode == 'ar' and not (self._canvas == canvas_lib.AUTOREGRESSIVE
                             or self._canvas.verifiable):
      raise ValueError(f"mode 'ar' needs an autoregressive clean stream, got "
                       f'{self._canvas}')
    canvas = canvas_lib.AUTOREGRESSIVE if mode == 'ar' else self._canvas
    draft = None
    if mode == 'verify':
      draft = verification.DraftConfig(**experiment.config.evaluate.verify)
      verification.check(canvas, experiment.decode_config(), draft)
    config = experiment.decode_config()
    if answer_threshold is not None:
      config = dataclasses.replace(
          config, answer_marker=experiment.data.tokenizer.id(tokens_lib.ANSWER))
    return dict(canvas=canvas, draft=draft, config=config,
                rule=commit.Threshold(threshold, answer_threshold))

  def _answer(self, request: prompting.Indexed, ids: Sequence[int],
              rollout: block_decoder.Rollout,
              complete: canvas_lib.CanvasConfig | None) -> Reranking:
    """Reads a response [L] to the prompt `ids`; see `_completed`."""
    experiment = self._experiment
    tokens = rollout.tokens[:rollout.length]
    parse = experiment.parser.strict(tokens)
    order = parse.order
    if complete and order is None:
      order = self._completed(
          ids, rollout.tokens, parse.answer_start, complete)
    decode = experiment.data.tokenizer.decode
    texts = [decode([int(token)]) for token in tokens]
    explanation = parse.explanation
    if experiment.candidate_ids() and parse.answer_start:  # compact
      explanation = traces.readable(
          texts[:parse.answer_start - 1],
          traces.TraceConfig.from_config(experiment.config.prompt.trace),
          len(request.candidates)) or explanation
    names = self._prompter.candidate_names(request)
    final = range(len(names)) if order is None else order
    return Reranking(
        order=tuple(map(int, final)), ranking=tuple(names[i] for i in final),
        new_items=tuple(item.item_id for item in request.new),
        valid=parse.failure == parsing.VALID,
        completed=order is not None and parse.order is None,
        failure=parse.failure, explanation=explanation,
        forwards=int(rollout.calls),
        trace=tuple(Token(text, int(c))
                    for text, c in zip(texts, rollout.call)))

  def _completed(self, ids: Sequence[int], tokens: np.ndarray,
                 answer_start: int | None, canvas: canvas_lib.CanvasConfig
                 ) -> Sequence[int] | None:
    """The order that the reasoning leads to, if there is room for one."""
    experiment = self._experiment
    candidates = experiment.candidate_ids()
    if answer_start is None or answer_start > len(tokens) - len(candidates):
      return None
    # As long as any: one program.
    prompt = np.zeros((1, experiment.config.prompt.max_prompt), np.int32)
    prompt[0, :len(ids)] = ids
    return permutation.complete(
        experiment.model, self._params, prompt, np.array([len(ids)]),
        tokens[None], np.array([answer_start]), candidates,
        experiment.vocabulary, canvas)[0].tolist()
