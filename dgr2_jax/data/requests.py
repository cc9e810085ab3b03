"""Re-ranking requests: a history, ten candidates and the facts about them.

Of a sequence of n purchases, the targets are

    train        positions 1 .. n-3      many requests a user
    validation   position n-2
    test         position n-1

and the history is everything before the target. By the published, conditional
protocol only requests whose target is among the candidates count; `Summary`
keeps the figures over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib

from absl import logging
from ml_collections import config_dict
import numpy as np

from dgr2_jax.data import candidates as candidates_lib
from dgr2_jax.data import facts
from dgr2_jax.data import histories as histories_lib
from dgr2_jax.data import interactions
from dgr2_jax.retrieval import cooccurrence
from dgr2_jax.retrieval import finished as finished_lib
from dgr2_jax.retrieval import lists as lists_lib
from dgr2_jax.retrieval import retrievers

SPLITS = candidates_lib.SPLITS
_SHORTEST = histories_lib.HELD_OUT + 1


@dataclasses.dataclass(frozen=True)
class Request:
  """One re-ranking request.

  Attributes:
    user: index into `Dataset.users`.
    split: 'train', 'validation' or 'test'.
    position: index of the target in the user's sequence.
    history: int32 [h] item indices before `position`, oldest first.
    candidates: int32 [C] item indices in the retriever's order.
    scores: float32 [C] retriever scores, descending.
    target: item index of the true next purchase.
    facts: int8 [C, len(facts.FACTS)] bucketed facts, own purchases excluded.
  """
  user: int
  split: str
  position: int
  history: np.ndarray
  candidates: np.ndarray
  scores: np.ndarray
  target: int
  facts: np.ndarray


@dataclasses.dataclass(frozen=True)
class Summary:
  """What the retriever did for one split.

  Attributes:
    evaluated: queries asked: users, or positions of the training split.
    hits: queries whose target is among the candidates.
    unconditional: recall@1/3/5/10 and ndcg@3/5/10 of the retriever's order over
      all queries, a miss counting 0. With candidates from the whole catalogue
      these are the retriever's full-catalogue figures.
  """
  evaluated: int
  hits: int
  unconditional: dict[str, float]

  @property
  def hit_rate(self) -> float:
    return self.hits / max(self.evaluated, 1)

  @property
  def floor(self) -> dict[str, float]:
    """The same metrics over the hits: what a re-ranker starts from."""
    scale = self.evaluated / max(self.hits, 1)
    return {name: x * scale for name, x in self.unconditional.items()}


@dataclasses.dataclass(frozen=True)
class RequestSets:
  """Requests of all splits, what the retriever did, and the fact levels."""
  train: tuple[Request, ...]
  validation: tuple[Request, ...]
  test: tuple[Request, ...]
  summaries: dict[str, Summary]
  edges: dict[str, np.ndarray]


def target_positions(requests: Sequence[Request]) -> np.ndarray:
  """Where targets stand among the candidates: int64 [n], -1 for a miss."""
  result = np.full(len(requests), -1, np.int64)
  for i, request in enumerate(requests):
    found = np.flatnonzero(request.candidates == request.target)
    if len(found):
      result[i] = found[0]
  return result


def _summary(evaluated: int, ranks: np.ndarray) -> Summary:
  """Summarises 0-based target ranks [hits] among `evaluated` queries."""
  metrics = {}
  for k in (1, 3, 5, 10):
    metrics[f'recall@{k}'] = float((ranks < k).sum())
  for k in (3, 5, 10):
    metrics[f'ndcg@{k}'] = float((1 / np.log2(ranks[ranks < k] + 2)).sum())
  return Summary(
      evaluated, len(ranks),
      {name: x / max(evaluated, 1) for name, x in metrics.items()})


def _queries(
    h: histories_lib.Histories, split: str
) -> tuple[np.ndarray, np.ndarray]:
  """All (users, positions) of a split."""
  if split == 'train':
    slot = np.flatnonzero(h.seen & (h.position > 0))
    return h.user[slot].astype(np.int64), h.position[slot].astype(np.int64)
  users = np.arange(len(h.start))
  return users, h.length - candidates_lib.FROM_END[split]


# Users, positions and candidates of a split's lists.
_Given = tuple[np.ndarray, np.ndarray, np.ndarray]


def _from_file(dataset: interactions.Dataset,
               config: config_dict.ConfigDict) -> dict[str, _Given]:
  """The lists that a file has, by split."""
  path = config.retriever.path or pathlib.Path(config.path, 'candidates.jsonl')
  given = candidates_lib.read(path, dataset, config.num_candidates)
  if missing := [split for split in SPLITS if split not in given]:
    logging.warning('%s has no lists for %s: the co-occurrence retriever '
                    'makes them.', path, ' and '.join(missing))
  for split in given.keys() & candidates_lib.FROM_END.keys():
    if (count := len(given[split][0])) < len(dataset.users):
      logging.warning('%s has %s lists of %d users: figures over all users are '
                      'over these, of %d.', path, split, count,
                      len(dataset.users))
  return given


def _learned(h: histories_lib.Histories, config: config_dict.ConfigDict,
             semantic_ids: np.ndarray | None,
             keep: pathlib.Path | None) -> dict[str, _Given]:
  """The lists of a retriever that is trained here, by split."""
  retriever = retrievers.make(config, h.num_items, semantic_ids)
  cooccurrence.check_enough_items(
      h.length.max() - 1, config.num_candidates, h.num_items)
  finished = finished_lib.Finished(
      keep, {'kind': config.retriever.kind, 'count': config.num_candidates,
             'items': h.num_items, **dataclasses.asdict(retriever.config)},
      {'items': h.items, 'length': h.length,
       'semantic_ids': np.array([] if semantic_ids is None else semantic_ids)})

  def of_all_users():
    params, epochs = lists_lib.fit(retriever, h)
    listed = {split: lists_lib.top(
        retriever, params, h, *_queries(h, split), config.num_candidates)[0]
              for split in candidates_lib.FROM_END}
    return {'epochs': np.array(epochs), **listed}

  listed = finished.get('all_users', of_all_users)
  train = _queries(h, 'train')
  listed['train'] = lists_lib.cross_fitted(
      retriever, h, *train, config.num_candidates, int(listed['epochs']),
      finished)
  return {split: (*_queries(h, split), listed[split]) for split in SPLITS}


def build_requests(
    dataset: interactions.Dataset,
    config: config_dict.ConfigDict,
    semantic_ids: np.ndarray | None = None,
    keep: pathlib.Path | None = None,
) -> RequestSets:
  """Retrieves candidates and measures facts for all splits.

  Args:
    dataset: the catalogue and its users.
    config: the section `data`: `retriever`, `num_candidates`, `keep_misses`,
      `max_train_requests`, `seed`, and `path` for a retriever of kind 'file'.
    semantic_ids: int [I, L], for a retriever of kind 'generative'.
    keep: directory for what a retriever that is trained here has done, should
      this be killed; see `finished`.

  Returns:
    The requests. `keep_misses` applies to validation and test; a training
    request without its target would teach nothing.

  Raises:
    DataError: a user has fewer than three purchases, so that some target has
      an empty history; a bad candidates file; or no request of a split holds
      its target.
    ValueError: a bad field of `retriever`, or training diverged.
  """
  for user, sequence in zip(dataset.users, dataset.sequences):
    if len(sequence) < _SHORTEST:
      raise interactions.DataError(
          f'user {user!r} has {len(sequence)} purchases: with fewer than '
          f'{_SHORTEST} the history of a target would be empty')
  retrievers.check(config.retriever)
  h = histories_lib.flatten(dataset)
  given = {}
  if config.retriever.kind == 'file':
    given = _from_file(dataset, config)
  elif config.retriever.kind in retrievers.LEARNED:
    given = _learned(h, config, semantic_ids, keep)
  retriever = cooccurrence.fit(dataset, h, config.retriever)
  statistics = facts.fit(dataset, h)

  sets, summaries, edges = {}, {}, {}
  for split in SPLITS:  # The training split first: it sets the fact levels.
    keep_misses = config.keep_misses and split != 'train'
    if split in given:
      users, positions, chosen = given[split]
      lists = cooccurrence.Lists(
          np.arange(len(users)), chosen,
          # Models of different folds do not score alike: ranks do.
          np.tile(1 / np.arange(1, config.num_candidates + 1, dtype=np.float32),
                  (len(users), 1)))
    else:
      users, positions = _queries(h, split)
      lists = cooccurrence.retrieve(
          retriever, users, positions, config.num_candidates,
          hits_only=not keep_misses)
    evaluated = len(users)
    users, positions = users[lists.query], positions[lists.query]
    targets = h.items[h.start[users] + positions]
    match = lists.candidates == targets[:, None]
    hit = match.any(axis=1)
    summaries[split] = _summary(evaluated, match[hit].argmax(axis=1))
    keep = np.flatnonzero(hit | keep_misses)
    if not hit.any():
      raise interactions.DataError(
          f'none of {evaluated} {split} requests has its target among the '
          f'{config.num_candidates} candidates (data.num_candidates): expected '
          'more users, longer sequences or a better retriever')
    if split == 'train' and 0 < config.max_train_requests < len(keep):
      rng = np.random.default_rng(config.seed)
      keep = np.sort(rng.choice(keep, config.max_train_requests, False))
    users, positions, targets = users[keep], positions[keep], targets[keep]
    chosen, scores = lists.candidates[keep], lists.scores[keep]
    measured = facts.measure(statistics, users, positions, chosen, scores)
    if split == 'train':
      edges = facts.learn_edges(measured)
    levels = facts.bucket(measured, edges)
    sets[split] = tuple(
        Request(
            user=int(users[i]), split=split, position=int(positions[i]),
            history=dataset.sequences[users[i]][:positions[i]],
            candidates=chosen[i], scores=scores[i], target=int(targets[i]),
            facts=levels[i])
        for i in range(len(users)))
    s = summaries[split]
    logging.info(
        '%s: %d requests, hit rate %.4f of %d, floor Recall@1/3 %.3f/%.3f; '
        'retriever Recall@5/10 %.4f/%.4f, NDCG@5/10 %.4f/%.4f.',
        split, len(users), s.hit_rate, s.evaluated, s.floor['recall@1'],
        s.floor['recall@3'], *(s.unconditional[name] for name in (
            'recall@5', 'recall@10', 'ndcg@5', 'ndcg@10')))
  return RequestSets(**sets, summaries=summaries, edges=edges)


def save(sets: RequestSets, path: str | pathlib.Path) -> None:
  """Writes request sets to one .npz, complete or not at all."""
  arrays = {f'edges/{name}': edge for name, edge in sets.edges.items()}
  for split in SPLITS:
    requests = getattr(sets, split)
    for name in ('user', 'position', 'target'):
      arrays[f'{split}/{name}'] = np.array(
          [getattr(r, name) for r in requests], np.int64)
    arrays[f'{split}/history'] = np.concatenate(
        [np.zeros(0, np.int32)] + [r.history for r in requests])
    if requests:
      for name in ('candidates', 'scores', 'facts'):
        arrays[f'{split}/{name}'] = np.stack(
            [getattr(r, name) for r in requests])
  summaries = {k: dataclasses.asdict(s) for k, s in sets.summaries.items()}
  path = pathlib.Path(path)
  partial = path.with_name(path.name + '.partial')
  with partial.open('wb') as f:
    np.savez(f, summaries=json.dumps(summaries), **arrays)
  os.replace(partial, path)


def load(path: str | pathlib.Path) -> RequestSets:
  """Reads what `save` wrote."""
  with np.load(path) as f:
    arrays = {name: f[name] for name in f.files}
  sets = {}
  for split in SPLITS:
    part = {name.split('/')[1]: x for name, x in arrays.items()
            if name.startswith(split + '/')}
    # A history has as many items as its target's position says.
    histories = np.split(part['history'], np.cumsum(part['position'])[:-1])
    sets[split] = tuple(
        Request(
            user=int(part['user'][i]), split=split,
            position=int(part['position'][i]), history=histories[i],
            candidates=part['candidates'][i], scores=part['scores'][i],
            target=int(part['target'][i]), facts=part['facts'][i])
        for i in range(len(part['user'])))
  return RequestSets(
      **sets,
      summaries={k: Summary(**s) for k, s in
                 json.loads(str(arrays['summaries'])).items()},
      edges={name.split('/')[1]: x for name, x in arrays.items()
             if name.startswith('edges/')})
