"""The re-ranker that an experiment trained, for other people's requests.

    reranker = Reranker.load('/tmp/dgr2_quickstart')
    request = Request(history=['B001', 'B007'], candidates=[ten item ids])
    result, = reranker.rerank([request], mode='verify')
    result.ranking, result.valid, result.explanation, result.forwards

A request becomes the prompt that training would have made of it: facts about
candidates come from the purchases that the experiment was prepared with. An
invalid response leaves the candidates as they came, and says so; or its answer
is completed to a permutation (`decoding/permutation.py`), and says that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import itertools
import pathlib
from typing import Any

import jax
import numpy as np
import tqdm

from dgr2_jax.data import facts
from dgr2_jax.data import histories as histories_lib
from dgr2_jax.data import parsing
from dgr2_jax.data import requests as requests_lib
from dgr2_jax.data import traces
from dgr2_jax.decoding import batching
from dgr2_jax.decoding import block_decoder
from dgr2_jax.decoding import commit
from dgr2_jax.decoding import permutation
from dgr2_jax.decoding import verification
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.retrieval import cooccurrence
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import workdir as workdir_lib

MODES = ('threshold', 'verify', 'ar')


class RequestError(ValueError):
  """A request that cannot be answered; the message says why."""


@dataclasses.dataclass(frozen=True)
class Request:
  """What is to be re-ranked.

  Attributes:
    history: item ids, oldest first; later repeats of an item do not count.
    candidates: item ids in the retriever's order, as many as the model was
      trained for, none of them in the history.
    scores: of the candidates, not rising; None lets the built-in retriever
      score them, or their ranks, if it was trained with another's lists.
    user_id: a user of the training data, whose own later purchases are then
      left out of all counts; what evaluations need.
  """
  history: Sequence[str]
  candidates: Sequence[str]
  scores: Sequence[float] | None = None
  user_id: str | None = None


@dataclasses.dataclass(frozen=True)
class Token:
  """One token of a response: its text, and the forward that committed it."""
  text: str
  forward: int


@dataclasses.dataclass(frozen=True)
class Reranking:
  """An answer.

  Attributes:
    ranking: the candidates, best first.
    valid: whether the response was exactly one permutation of them; if not,
      `ranking` is the order they came in, or `completed`.
    completed: whether `ranking` is what `permutation.complete` made of the
      reasoning.
    failure: 'valid', or what is wrong; see `parsing.FAILURES`.
    explanation: the reasoning.
    forwards: model calls, prefill included.
    trace: the response token by token.
  """
  ranking: tuple[str, ...]
  valid: bool
  completed: bool
  failure: str
  explanation: str
  forwards: int
  trace: tuple[Token, ...]


class Reranker:
  """Answers requests with the weights of one stage."""

  def __init__(self, experiment: experiment_lib.Experiment, stage: str):
    """Restores weights and counts purchases; see `load`."""
    self._experiment = experiment
    self._params = experiment.restore(stage)
    config, data = experiment.config, experiment.data
    self.num_candidates = config.data.num_candidates
    dataset = data.dataset
    self._item_index = {x.item_id: i for i, x in enumerate(dataset.items)}
    self._item_ids = [x.item_id for x in dataset.items]
    self._user_index = {user: i for i, user in enumerate(dataset.users)}
    self._histories = histories_lib.flatten(dataset)
    self._statistics = facts.fit(dataset, self._histories)
    self._retriever = None
    if config.data.retriever.kind == 'cooccurrence':
      self._retriever = cooccurrence.fit(
          dataset, self._histories, config.data.retriever)
    self._template = data.template

  @classmethod
  def load(cls, workdir: str | pathlib.Path,
           stage: str | None = None) -> Reranker:
    """Loads what `dgr2_jax.main` left in a working directory.

    Args:
      workdir: the directory; at least `stage` is complete there.
      stage: whose weights; None is the recipe's last.

    Raises:
      workdir.WorkdirError: it is no working directory.
      ValueError: no such stage, or not complete.
    """
    workdir = pathlib.Path(workdir).expanduser().absolute()
    config = workdir_lib.read_config(workdir)
    recipe = tuple(config.recipe)
    stage = stage or recipe[-1]
    if stage not in recipe:
      raise ValueError(f'stage {stage!r} is not in the recipe of {workdir}: '
                       f'expected one of {", ".join(recipe)}')
    return cls(experiment_lib.Experiment(config, workdir), stage)

  def check(self, request: Request) -> None:
    """Raises RequestError if a request cannot be answered."""
    self._checked(request)

  def rerank(self, requests: Sequence[Request], *args: Any,
             progress: bool = False, **options: Any) -> list[Reranking]:
    """All answers at once; arguments and errors are those of `stream`.

    Requests are checked before the first is decoded. `progress` shows a bar on
    stderr.
    """
    answers = self.stream(requests, *args, **options)
    for index, request in enumerate(requests):
      self._checked(request, f'request {index}: ')
    return list(tqdm.tqdm(answers, total=len(requests), disable=not progress,
                          unit='req'))

  def stream(self, requests: Iterable[Request], mode: str = 'threshold',
             threshold: float = .9, batch_size: int = 16,
             complete: bool = False) -> Iterator[Reranking]:
    """Answers requests while they come.

    An answer does not depend on the other requests.

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

    Yields:
      One answer a request, in their order.

    Raises:
      RequestError: a request cannot be answered; the message names it.
      ValueError: unknown mode, or one that these weights do not have.
    """
    decoding = self._decoding(mode, threshold)
    if complete and not self._experiment.candidate_ids():
      raise ValueError('complete=True needs compact responses, whose '
                       'candidates are single tokens')
    return self._stream(requests, batch_size, decoding, complete)

  def _stream(self, requests: Iterable[Request], batch_size: int,
              decoding: dict[str, Any], complete: bool) -> Iterator[Reranking]:
    """See `stream`."""
    experiment, asked = self._experiment, []

    def prompts():
      numbered = enumerate(requests)
      while part := list(itertools.islice(numbered, batch_size)):
        checked = self._with_facts(
            [self._checked(r, f'request {i}: ') for i, r in part])
        ids = [self._template.prompt(r).ids for r in checked]
        # Prompts of like lengths are prefilled together.
        for k in sorted(range(len(part)), key=lambda k: len(ids[k])):
          asked.append((part[k][0], checked[k], ids[k]))
          yield batching.Prompt(ids[k])

    ready, following = {}, 0
    for index, rollout in batching.decode(
        experiment.model, self._params, prompts(), rows=batch_size,
        vocabulary=experiment.vocabulary, config=experiment.decode_config(),
        mesh=experiment.mesh, max_prompt=experiment.config.prompt.max_prompt,
        **decoding):
      place, request, ids = asked[index]
      asked[index] = None
      ready[place] = self._answer(
          request, ids, jax.tree.map(lambda x: x[0], rollout), complete)
      while following in ready:
        yield ready.pop(following)
        following += 1

  def _decoding(self, mode: str, threshold: float) -> dict[str, Any]:
    """Arguments of `batching.decode`."""
    experiment = self._experiment
    if mode not in MODES:
      raise ValueError(f'mode is {mode!r}: expected {", ".join(MODES)}')
    canvas = (canvas_lib.AUTOREGRESSIVE if mode == 'ar' else experiment.canvas)
    draft = None
    if mode == 'verify':
      draft = verification.DraftConfig(**experiment.config.evaluate.verify)
      verification.check(canvas, experiment.decode_config(), draft)
    return dict(canvas=canvas, rule=commit.Threshold(threshold), draft=draft)

  def _checked(self, request: Request,
               name: str = '') -> requests_lib.Request:
    """The request in indices, without facts yet; `name` opens errors."""
    try:
      return self._indexed(request)
    except RequestError as e:
      raise RequestError(f'{name}{e}') from e

  def _indexed(self, request: Request) -> requests_lib.Request:
    def items(ids, what):
      unknown = [i for i in ids if i not in self._item_index]
      if unknown:
        raise RequestError(f'{what}: unknown item {unknown[0]!r}')
      return [self._item_index[i] for i in ids]

    history = list(dict.fromkeys(items(request.history, 'history')))
    if not history:
      raise RequestError('history: expected at least one item')
    candidates = items(request.candidates, 'candidates')
    if len(candidates) != self.num_candidates:
      raise RequestError(f'candidates: {len(candidates)} items, expected '
                         f'{self.num_candidates}')
    for wrong, why in (
        ([c for c in candidates if candidates.count(c) > 1], 'stands twice'),
        (sorted(set(candidates) & set(history)), 'is in the history')):
      if wrong:
        raise RequestError(
            f'candidates: {self._item_ids[wrong[0]]!r} {why}')
    scores = request.scores
    if scores is not None:
      scores = np.array([_as_float(s) for s in scores], np.float32)
      if (scores.shape != (self.num_candidates,)
          or not np.isfinite(scores).all() or (np.diff(scores) > 0).any()):
        raise RequestError(f'scores: expected {self.num_candidates} finite '
                           'numbers that do not rise')
    user = -1
    if request.user_id is not None:
      if request.user_id not in self._user_index:
        raise RequestError(f'user_id: unknown user {request.user_id!r}')
      user = self._user_index[request.user_id]
      start = self._histories.start[user]
      if (len(history) >= self._histories.length[user]
          or self._histories.items[start:start + len(history)].tolist()
          != history):
        raise RequestError('history: not how the purchases of user '
                           f'{request.user_id!r} begin')
    return requests_lib.Request(
        user=user, split='test', position=len(history),
        history=np.array(history, np.int32),
        candidates=np.array(candidates, np.int32), scores=scores, target=-1,
        facts=None)

  def _with_facts(self, requests: Sequence[requests_lib.Request]
                  ) -> list[requests_lib.Request]:
    """Measures what the prompts show."""
    histories = histories_lib.extended(
        self._histories, [r.history for r in requests])
    new = len(self._histories.start)
    users = np.array([new + i if r.user < 0 else r.user
                      for i, r in enumerate(requests)])
    positions = np.array([r.position for r in requests])
    candidates = np.stack([r.candidates for r in requests])
    if self._retriever is None:
      scores = np.tile(1 / np.arange(1, self.num_candidates + 1), (
          len(requests), 1)).astype(np.float32)
    else:
      scores = np.take_along_axis(
          cooccurrence.extended(self._retriever, histories).scores(
              users, positions), candidates, 1)
    for i, request in enumerate(requests):
      if request.scores is not None:
        scores[i] = request.scores
    levels = facts.bucket(
        facts.measure(facts.extended(self._statistics, histories), users,
                      positions, candidates, scores),
        self._experiment.data.fact_edges)
    return [dataclasses.replace(r, scores=scores[i], facts=levels[i])
            for i, r in enumerate(requests)]

  def _answer(self, request: requests_lib.Request, ids: Sequence[int],
              rollout: block_decoder.Rollout, complete: bool) -> Reranking:
    """Reads a response [L] to the prompt `ids`."""
    tokens = rollout.tokens[:rollout.length]
    parse = self._experiment.parser.strict(tokens)
    order = parse.order
    if complete and order is None:
      order = self._completed(ids, rollout.tokens, parse.answer_start)
    decode = self._experiment.data.tokenizer.decode
    texts = [decode([int(token)]) for token in tokens]
    explanation = parse.explanation
    if self._experiment.candidate_ids() and parse.answer_start:  # compact
      explanation = traces.readable(
          texts[:parse.answer_start - 1], self._template.config.trace,
          self.num_candidates) or explanation
    ranking = range(self.num_candidates) if order is None else order
    return Reranking(
        ranking=tuple(self._item_ids[request.candidates[i]] for i in ranking),
        valid=parse.failure == parsing.VALID,
        completed=order is not None and parse.order is None,
        failure=parse.failure, explanation=explanation,
        forwards=int(rollout.calls),
        trace=tuple(Token(text, int(c))
                    for text, c in zip(texts, rollout.call)))

  def _completed(self, ids: Sequence[int], tokens: np.ndarray,
                 answer_start: int | None) -> Sequence[int] | None:
    """The order that the reasoning leads to, if there is room for one."""
    if (answer_start is None
        or answer_start > len(tokens) - self.num_candidates):
      return None
    experiment = self._experiment
    # As long as any: one program.
    prompt = np.zeros((1, experiment.config.prompt.max_prompt), np.int32)
    prompt[0, :len(ids)] = ids
    return permutation.complete(
        experiment.model, self._params, prompt, np.array([len(ids)]),
        tokens[None], np.array([answer_start]), experiment.candidate_ids(),
        experiment.vocabulary, experiment.canvas)[0].tolist()


def _as_float(number: float) -> float:
  try:
    return float(number)
  except OverflowError:
    return np.inf
