"""From other people's requests to prompts.

    Request: ids, or items described -> checked: indices -> facts -> prompt

A request becomes the prompt that training would have made of it: facts about
candidates come from the purchases that the experiment was prepared with, its
history being that of a user whom no count has seen. Items that the catalogue
lacks are read as items that nobody has bought: no count knows them, their text
is read in the catalogue's words, and their semantic ids, where prompts show
them, are the nearest free ones of the model that made the catalogue's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any

import numpy as np

from dgr2_jax.data import directory
from dgr2_jax.data import facts
from dgr2_jax.data import histories as histories_lib
from dgr2_jax.data import interactions
from dgr2_jax.data import prompts
from dgr2_jax.data import requests as requests_lib
from dgr2_jax.retrieval import cooccurrence
from dgr2_jax.semantic_ids import catalogue
from dgr2_jax.training import experiment as experiment_lib

# An id, or what items.jsonl would say.
Item = str | Mapping[str, Any]


class RequestError(ValueError):
  """A request that cannot be answered; the message says why."""


@dataclasses.dataclass(frozen=True)
class Request:
  """What is to be re-ranked.

  Attributes:
    history: items, oldest first; later repeats of an item do not count. An
      item is its id or, if the catalogue may lack it, a mapping with
      'item_id', 'title', 'categories' and, if known, 'brand'. Where the
      catalogue has the id, what it says counts.
    candidates: items in the retriever's order, as many as the model was
      trained for, none of them in the history.
    scores: of the candidates, not rising; None lets the built-in retriever
      score them, or their ranks, if it was trained with another's lists.
    user_id: a user of the training data, whose own later purchases are then
      left out of all counts; what evaluations need.
  """
  history: Sequence[Item]
  candidates: Sequence[Item]
  scores: Sequence[float] | None = None
  user_id: str | None = None


@dataclasses.dataclass(frozen=True)
class Indexed(requests_lib.Request):
  """A request in indices; those of n `new` items follow the catalogue's.

  Attributes:
    new: the items.
    new_ids: int32 [n, levels], their semantic ids; zeros where prompts show
      none.
  """
  new: tuple[interactions.Item, ...] = ()
  new_ids: np.ndarray | None = None


class Prompter:
  """Makes prompts of requests.

  Attributes:
    num_candidates: C, of a request.
  """

  def __init__(self, experiment: experiment_lib.Experiment):
    """Counts the purchases that `prepare` kept."""
    self._experiment = experiment
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

  def template(self, request: Indexed) -> prompts.Template:
    """Writes the prompt of a request that has its facts."""
    if not request.new:
      return self._template
    data = self._experiment.data
    return prompts.Template(
        self._template.config, data.tokenizer, (*data.items, *request.new),
        np.concatenate([data.semantic_ids, request.new_ids]),
        self.num_candidates)

  @functools.cached_property
  def _encoder(self) -> catalogue.Encoder:
    experiment = self._experiment
    return catalogue.Encoder(
        experiment.data.items, experiment.data.semantic_ids,
        experiment.config.semantic_ids, experiment.workdir / 'data')

  def _new_ids(self, new: tuple[interactions.Item, ...]) -> np.ndarray:
    """Semantic ids of new items, see `Indexed`."""
    if 'sid' not in self._template.config.item_fields:
      return np.zeros((len(new), self._experiment.config.semantic_ids.levels),
                      np.int32)
    try:
      return self._encoder(new)
    except ValueError as e:
      raise RequestError(f'{new[0].item_id!r} is not in the catalogue: {e}'
                         ) from e

  def checked(self, request: Request, name: str = '') -> Indexed:
    """The request in indices, without facts yet.

    Args:
      request: of a user.
      name: what errors begin with.

    Raises:
      RequestError: the request cannot be answered.
    """
    try:
      return self._indexed(request)
    except RequestError as e:
      raise RequestError(f'{name}{e}') from e

  def _indexed(self, request: Request) -> Indexed:
    if not isinstance(request, Request):
      raise RequestError(f'expected a Request, got {type(request).__name__}')
    for name in ('history', 'candidates'):
      if isinstance(getattr(request, name), (str, Mapping)):
        raise RequestError(f'{name}: expected a list of items, not one')
    known, new = len(self._item_ids), {}

    def index(item, what):
      if isinstance(item, Mapping):
        name = item.get('item_id')
        if isinstance(name, str) and name in self._item_index:
          return self._item_index[name]  # what the catalogue says counts
        item = dict(item)
      if isinstance(item, str):
        if item not in self._item_index:
          raise RequestError(f'{what}: unknown item {item!r}; describe it as '
                             'in items.jsonl')
        return self._item_index[item]
      try:
        item = directory.parse_item(item, what)
      except interactions.DataError as e:
        raise RequestError(str(e)) from e
      place, before = new.setdefault(item.item_id, (known + len(new), item))
      if before != item:
        raise RequestError(f'{what}: item {item.item_id!r} is described in two '
                           'ways')
      return place

    history = list(dict.fromkeys(
        index(item, 'history') for item in request.history))
    if not history:
      raise RequestError('history: expected at least one item')
    candidates = [index(item, 'candidates') for item in request.candidates]
    if len(candidates) != self.num_candidates:
      raise RequestError(f'candidates: {len(candidates)} items, expected '
                         f'{self.num_candidates}')
    for wrong, why in (
        ([c for c in candidates if candidates.count(c) > 1], 'stands twice'),
        (sorted(set(candidates) & set(history)), 'is in the history')):
      if wrong:
        name = [*self._item_ids, *new][wrong[0]]
        raise RequestError(f'candidates: {name!r} {why}')
    scores = request.scores
    if scores is not None:
      with np.errstate(over='ignore'):
        scores = np.array([_as_float(s) for s in scores], np.float32)
      if (scores.shape != (self.num_candidates,)
          or not np.isfinite(scores).all() or (np.diff(scores) > 0).any()):
        raise RequestError(f'scores: expected {self.num_candidates} numbers, '
                           'finite as float32, that do not rise')
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
    items = tuple(item for _, item in new.values())
    result = Indexed(
        user=user, split='test', position=len(history),
        history=np.array(history, np.int32),
        candidates=np.array(candidates, np.int32), scores=scores, target=-1,
        facts=None, new=items, new_ids=self._new_ids(items) if items else None)
    # Facts are not measured yet; the highest levels are the longest to write.
    highest = np.tile([fact.levels - 1 for fact in facts.FACTS],
                      (self.num_candidates, 1))
    try:
      self.template(result).prompt(dataclasses.replace(result, facts=highest))
    except ValueError as e:
      raise RequestError(f'candidates: {e}') from e
    return result

  def with_facts(self, requests: Sequence[Indexed]) -> list[Indexed]:
    """Measures what the prompts show."""
    new = requests[0].new
    if len(requests) > 1 and any(r.new for r in requests):
      return [self.with_facts([r])[0] for r in requests]  # catalogues differ
    histories = histories_lib.extended(
        self._histories, [r.history for r in requests], len(new))
    first = len(self._histories.start)
    users = np.array([first + i if r.user < 0 else r.user
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
        facts.measure(facts.extended(self._statistics, histories, new), users,
                      positions, candidates, scores),
        self._experiment.data.fact_edges)
    return [dataclasses.replace(r, scores=scores[i], facts=levels[i])
            for i, r in enumerate(requests)]

  def candidate_names(self, request: Indexed) -> list[str]:
    """Item ids of the candidates, in the order they came."""
    known = len(self._item_ids)
    return [self._item_ids[i] if i < known else request.new[i - known].item_id
            for i in request.candidates]


def _as_float(number: float) -> float:
  try:
    return float(number)
  except OverflowError:
    return np.inf
