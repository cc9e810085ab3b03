"""The `prepare` stage: from interactions to records on disk.

    dataset -> semantic ids -> candidates and facts -> boosted ranker -> tokens

    DIR/data/items.jsonl           the catalogue, in the neutral format
    DIR/data/purchases.npz         users and their sequences
    DIR/data/semantic_ids.npy      int32 [I, levels]
    DIR/data/semantic_ids.json     what made them, and how good they are
    DIR/data/semantic_ids_model.npz  gives ids to items that come later
    DIR/data/requests.npz          requests of all splits
    DIR/data/requests.jsonl        the first of the test split, for `rerank`
    DIR/data/scores.npz            the boosted ranker's scores of all splits
    DIR/data/tokenizer/            text.json, special_tokens.json
    DIR/data/<split>.array_record  prompts and responses
    DIR/data/counterfactuals.array_record  responses to other grades
    DIR/data/mid_train/            packed rows, where the recipe has mid_train
    DIR/data/summary.json          facts for the report, and sizes and checksums
                                   of the files above

They are made in DIR/data.partial, which is renamed when it is complete. Until
then DIR/data.lists has the lists of the trained retrievers that are done.
"""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import functools
import json
import os
import pathlib
import shutil
from typing import Any

from absl import logging
import ml_collections
import numpy as np

from dgr2_jax.data import boosted
from dgr2_jax.data import directory as directory_lib
from dgr2_jax.data import embedded
from dgr2_jax.data import generated
from dgr2_jax.data import interactions
from dgr2_jax.data import mid_training
from dgr2_jax.data import pipeline
from dgr2_jax.data import prompts
from dgr2_jax.data import records
from dgr2_jax.data import requests as requests_lib
from dgr2_jax.data import tokenizer as tokenizer_lib
from dgr2_jax.data import vocabulary
from dgr2_jax.evaluation import metrics
from dgr2_jax.semantic_ids import catalogue
from dgr2_jax.training import workdir as workdir_lib

SPLITS = requests_lib.SPLITS
_COUNTERFACTUALS = 'counterfactuals'
_PURCHASES = 'purchases.npz'
_MID_TRAIN = 'mid_train'
_EXAMPLES = 100  # requests for `rerank`


def prepare(config: ml_collections.ConfigDict,
            directory: pathlib.Path) -> None:
  """Builds everything in `directory`, or leaves nothing.

  Nothing but lists of trained retrievers, if there are any: they take longest,
  and the next start goes on behind them (`retrieval/finished.py`).

  Raises:
    interactions.DataError: bad data, or a damaged `directory`.
    ValueError: a bad field of the config.
  """
  partial, kept = (directory.with_name(f'{directory.name}.{name}')
                   for name in ('partial', 'lists'))
  if directory.exists():
    shutil.rmtree(kept, ignore_errors=True)
    _read_summary(directory)
    return
  shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
  partial.mkdir(parents=True)
  try:
    _build(config, partial, kept)
    os.rename(partial, directory)
    shutil.rmtree(kept, ignore_errors=True)
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def _build(config: ml_collections.ConfigDict, directory: pathlib.Path,
           kept: pathlib.Path) -> None:
  # What can be wrong in the config should show before minutes of work.
  prompt_config = prompts.PromptConfig.from_config(config.prompt)
  traces_config = prompt_config.traces
  answers = generated.read(traces_config.path) if traces_config else None
  mid_train, documents = None, ()
  if _MID_TRAIN in config.recipe:
    mid_train = mid_training.MidTrainingConfig.from_config(config.mid_train)
    if 'text' in mid_train.tasks:
      documents = mid_training.read_text(mid_train.text)
  dataset = interactions.load_dataset(config.data)
  tokenizer = vocabulary.build(config, dataset.items)
  tokenizer.save(directory / 'tokenizer')
  _write_items(directory / 'items.jsonl', dataset.items)
  _write_purchases(directory / _PURCHASES, dataset)
  logging.info('Semantic ids of %d items.', len(dataset.items))
  made = catalogue.build(dataset.items, config.semantic_ids)
  made.save(directory)
  semantic_ids = made.ids
  template = prompts.Template(
      prompt_config, tokenizer, dataset.items, semantic_ids,
      config.data.num_candidates)
  if mid_train:
    mid_training.write(directory / _MID_TRAIN, mid_training.build(
        mid_train, dataset, template, documents, config.data.seed))
  sets = requests_lib.build_requests(dataset, config.data, semantic_ids, kept)
  requests_lib.save(sets, directory / 'requests.npz')
  _write_examples(directory / 'requests.jsonl', dataset,
                  sets.test[:_EXAMPLES])
  logging.info('The boosted ranker, and %d more for the training orders.',
               config.boosted.folds)
  ranker = boosted.fit(sets.train, config.boosted)
  scores = {
      'train': boosted.cross_fitted_scores(sets.train, config.boosted),
      'validation': ranker.scores(sets.validation),
      'test': ranker.scores(sets.test)}
  with open(directory / 'scores.npz', 'wb') as f:
    np.savez(f, **scores)
  written = {}
  if traces_config:
    written['train'] = generated.Traces(
        traces_config, answers, dataset.items, semantic_ids)
  statistics = {}
  for split in SPLITS:
    statistics[split] = records.write(
        directory / f'{split}.array_record',
        records.build(getattr(sets, split), template, scores[split],
                      written.get(split)),
        tokenizer.pad_id)
  if prompt_config.counterfactuals:
    extra = list(records.build_counterfactuals(
        sets.train, template, scores['train'], config.data.seed))
    if not extra:
      raise ValueError(
          f'prompt.counterfactuals={prompt_config.counterfactuals} draws none '
          f'of {len(sets.train)} training requests; raise it or set it to 0.')
    records.write(directory / f'{_COUNTERFACTUALS}.array_record', extra,
                  tokenizer.pad_id)
  summary = _summary(config, dataset, sets, statistics, tokenizer)
  summary['files'] = dict(workdir_lib.checksums(directory))
  workdir_lib.write_text(directory / 'summary.json',
                         json.dumps(summary, indent=1) + '\n')


def _read_summary(directory: pathlib.Path) -> dict[str, Any]:
  """Reads the summary and checks every file that it lists.

  Raises:
    interactions.DataError: a file is missing, damaged or altered.
  """
  path = directory / 'summary.json'
  again = f'delete {directory}; dgr2_jax.main --stage=prepare makes it anew.'
  try:
    summary = json.loads(path.read_text(encoding='utf-8'))
    listed = {k: tuple(v) for k, v in summary.pop('files').items()}
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
    raise interactions.DataError(f'{path}: damaged ({e!r}); {again}') from e
  found = dict(workdir_lib.checksums(directory))
  for name, entry in listed.items():
    if found.get(name) != entry:
      fault = 'missing' if name not in found else (
          f'{found[name][0]} bytes instead of {entry[0]}'
          if found[name][0] != entry[0] else 'altered')
      raise interactions.DataError(f'{directory / name}: {fault}; {again}')
  return summary


def _write_items(path: pathlib.Path,
                 items: Iterable[interactions.Item]) -> None:
  workdir_lib.write_text(path, ''.join(
      json.dumps({k: v for k, v in dataclasses.asdict(item).items()
                  if k not in ('brand', 'price') or v not in ('', None)},
                 ensure_ascii=False) + '\n'
      for item in items))


def _write_purchases(path: pathlib.Path,
                     dataset: interactions.Dataset) -> None:
  """Users and sequences; ids as JSON, which keeps every character."""
  with open(path, 'wb') as f:
    np.savez(f, users=json.dumps(dataset.users),
             length=[len(s) for s in dataset.sequences],
             items=np.concatenate(dataset.sequences))


def _write_examples(path: pathlib.Path, dataset: interactions.Dataset,
                    requests: Iterable[requests_lib.Request]) -> None:
  """Requests as `dgr2_jax.rerank` reads them, ids being those of users."""
  name = lambda indices: [dataset.items[i].item_id for i in indices]
  workdir_lib.write_text(path, ''.join(
      json.dumps({'id': dataset.users[r.user], 'user_id': dataset.users[r.user],
                  'history': name(r.history), 'candidates': name(r.candidates),
                  'scores': r.scores.tolist()}) + '\n'
      for r in requests))


def _lengths(config: ml_collections.ConfigDict,
             statistics: Iterable[records.Statistics]) -> tuple[int, int]:
  """P, the longest prompt of any split, and L, `max_response`, rounded up."""
  multiple = config.prompt.pad_multiple
  return (
      pipeline.padded_length([s.max_prompt for s in statistics], multiple),
      pipeline.padded_length([config.prompt.max_response], multiple))


def _summary(config, dataset, sets, statistics, tokenizer) -> dict[str, Any]:
  """The report's facts about the data."""
  test, train = sets.summaries['test'], statistics['train']
  prompt_length, response_length = _lengths(config, statistics.values())
  summary = {
      'name': dataset.name,
      'users': len(dataset.users),
      'items': len(dataset.items),
      'interactions': dataset.num_interactions,
      'requests': {split: len(getattr(sets, split)) for split in SPLITS},
      'evaluated_users': test.evaluated,
      'hit_rate': test.hit_rate,
      'retriever': test.unconditional,
      'floors': {split: s.floor for split, s in sets.summaries.items()},
      'padding_share': train.padding_share(prompt_length, response_length),
      'dropped_history_share': {
          split: s.dropped_history_share for split, s in statistics.items()},
      'mean_prompt_tokens': train.prompt_tokens / train.num_records,
      'mean_response_tokens': train.response_tokens / train.num_records,
      'vocabulary': tokenizer.vocab_size,
      'ties': config.data.ties,
      'answer_order': config.prompt.answer_order,
      'paper_reference': dataset.name == 'beauty',
  }
  if config.data.source == 'embedded':
    summary['oracle'] = oracle(config, dataset, sets.test)
  return summary


def oracle(config: ml_collections.ConfigDict, dataset: interactions.Dataset,
           requests: Iterable[requests_lib.Request]) -> dict[str, float]:
  """Metrics of the best possible ranking, on the embedded catalogue.

  Requests whose target was not retrieved are left out.
  """
  requests = [r for r in requests if r.target in r.candidates]
  probabilities = embedded.oracle_probabilities(
      config.data.embedded, dataset, [r.history for r in requests])
  candidates = np.stack([r.candidates for r in requests])
  orders = np.argsort(
      -np.take_along_axis(probabilities, candidates, 1), 1, kind='stable')
  return metrics.means(metrics.rank_of_target(
      orders, requests_lib.target_positions(requests)))


class Prepared:
  """What `prepare` left, read when asked for.

  Attributes:
    summary: facts for the report.
    tokenizer: of prompts and responses.
    prompt_length: P of all batches.
    response_length: L of all batches.
  """

  def __init__(self, config: ml_collections.ConfigDict,
               directory: pathlib.Path):
    self._config = config
    self._directory = directory
    self.summary = _read_summary(directory)
    self.tokenizer = tokenizer_lib.load(directory / 'tokenizer')
    self.prompt_length, self.response_length = _lengths(
        config, [records.read_statistics(self.record_file(split))
                 for split in SPLITS])

  def record_file(self, split: str) -> pathlib.Path:
    return self._directory / f'{split}.array_record'

  @functools.cached_property
  def template(self) -> prompts.Template:
    """What the prompts and responses were written with."""
    return prompts.Template(
        prompts.PromptConfig.from_config(self._config.prompt), self.tokenizer,
        self.items, self.semantic_ids, self._config.data.num_candidates)

  def supervised_files(self) -> list[pathlib.Path]:
    """The record files that fine-tuning learns from."""
    files = map(self.record_file, ('train', _COUNTERFACTUALS))
    return [file for file in files if file.exists()]

  def mid_train_rows(self, tasks: Iterable[str],
                     split: str) -> dict[str, np.ndarray]:
    """Packed rows of mid-training by task, see `mid_training.load`."""
    return mid_training.load(self._directory / _MID_TRAIN, tasks, split)

  @functools.cached_property
  def _sets(self) -> requests_lib.RequestSets:
    return requests_lib.load(self._directory / 'requests.npz')

  @functools.cached_property
  def items(self) -> tuple[interactions.Item, ...]:
    """The catalogue, by item index."""
    return tuple(directory_lib.read_items(
        self._directory / 'items.jsonl').values())

  @property
  def dataset(self) -> interactions.Dataset:
    """The catalogue and all purchases.

    Raises:
      interactions.DataError: an earlier version prepared the directory.
    """
    path = self._directory / _PURCHASES
    if not path.exists():
      raise interactions.DataError(
          f'{path} is missing: prepared by an earlier version of dgr2_jax; run '
          '--stage=prepare in a new working directory')
    with np.load(path) as f:
      ends = np.cumsum(f['length'])[:-1]
      return interactions.Dataset(
          self.summary['name'], self.items, tuple(json.loads(str(f['users']))),
          tuple(np.split(f['items'], ends)))

  @functools.cached_property
  def semantic_ids(self) -> np.ndarray:
    """int32 [I, levels]."""
    return np.load(self._directory / 'semantic_ids.npy')

  @property
  def fact_edges(self) -> dict[str, np.ndarray]:
    """The edges of fact levels, see `facts.learn_edges`."""
    return self._sets.edges

  def requests(self, split: str) -> tuple[requests_lib.Request, ...]:
    return getattr(self._sets, split)

  def target_positions(self, split: str) -> np.ndarray:
    """int64 [n] of a split's requests; -1 where the retriever missed."""
    return requests_lib.target_positions(self.requests(split))

  def boosted_orders(self, split: str) -> np.ndarray:
    """int64 [n, C], best first."""
    with np.load(self._directory / 'scores.npz') as scores:
      return boosted.orders(scores[split])

  def boosted_grades(self, split: str) -> np.ndarray:
    """int64 [n, C], what the model is taught; see `boosted.grades`."""
    with np.load(self._directory / 'scores.npz') as scores:
      return boosted.grades(scores[split])

  def describe(self, items: Iterable[int]) -> list[dict[str, Any]]:
    """Items for people to read."""
    return [{'title': item.title, 'categories': list(item.categories),
             'brand': item.brand} for item in (self.items[i] for i in items)]


def load(config: ml_collections.ConfigDict,
         directory: pathlib.Path) -> Prepared:
  """Opens a prepared directory.

  Raises:
    ValueError: it is not complete.
  """
  if not directory.exists():
    raise ValueError(f'{directory} is not prepared; run dgr2_jax.main with '
                     '--stage=prepare first, or all stages without --stage')
  return Prepared(config, directory)
