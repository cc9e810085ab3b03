"""Mid-training examples: four tasks that teach a language model the catalogue.

After OneRec-Think (arXiv 2510.11639), as GR2 (arXiv 2602.07774) uses them:

    persona     <|persona|> [id, title, category, brand] of every purchase
    sequential  <|next|> [id] [id] ... [id]               '-- each is learned
    caption     <|describe|> [id] [title, category, brand] <|im_end|>
                <|identify|> [title, category, brand] [id] <|im_end|>
    text        general text from a file, documents ended by <|im_end|>

Items are written as in prompts, see `prompts.Template`. Every token is learned
but the opening one, and of `sequential` those that are targets: every id behind
the first, so one example holds all (history, next item) pairs of a user. Only
training purchases are used, so no validation or test target is seen as one.
Examples of a task are packed into rows that attention keeps apart:

    tokens   a a a a b b b . .      start   0 0 0 0 4 4 4 -1 -1
    weight   0 1 1 1 0 1 1 0 0

A model that was trained so has seen the purchases of all users: as a retriever
it may make lists for validation and test, but not for training requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import json
import os
import pathlib
from typing import NamedTuple

from absl import logging
import numpy as np

from dgr2_jax.data import directory as directory_lib
from dgr2_jax.data import interactions
from dgr2_jax.data import prompts
from dgr2_jax.data import tokens
from dgr2_jax.retrieval import packing

TASKS = ('persona', 'sequential', 'caption', 'text')
SPLITS = ('train', 'held_out')
SID = ('sid',)
_ATTRIBUTES = ('title', 'category', 'brand')


@dataclasses.dataclass(frozen=True)
class MidTrainingConfig:
  """What `mid_train` trains on.

  Attributes:
    max_length: T, tokens a row.
    held_out: share of users, items and pieces of text that validate.
    weights: by task, relative to their sum: the share of rows, which are about
      equally full. A task that is absent or has no weight is left out.
    text: file of general text, if that has a weight: `.jsonl` with a document
      in the field `text` of every line, or else one document of plain text.
  """
  max_length: int
  held_out: float
  weights: Mapping[str, float]
  text: str

  def __post_init__(self):
    if unknown := sorted(set(self.weights) - set(TASKS)):
      raise ValueError(f'weights.{unknown[0]} is no task: expected some of '
                       f'{", ".join(TASKS)}.')
    if not self.tasks:
      raise ValueError('weights are all 0: expected one above 0 at least.')
    if 'text' in self.tasks and not self.text:
      raise ValueError('text is empty: weights.text needs a file.')

  @property
  def tasks(self) -> dict[str, float]:
    """The weights above 0, in the order of `TASKS`, adding up to 1."""
    total = sum(self.weights.values())
    return {task: self.weights[task] / total for task in TASKS
            if self.weights.get(task)}

  @classmethod
  def from_config(cls, section: Mapping) -> MidTrainingConfig:
    """From `config.mid_train`."""
    return cls(**{field.name: section[field.name]
                  for field in dataclasses.fields(cls)})


class Example(NamedTuple):
  """Token ids, and the first of them that is learned, 1 or later."""
  ids: list[int]
  learned_from: int = 1


def next_item_prompt(template: prompts.Template, history: Sequence[int],
                     max_length: int) -> list[int]:
  """The prompt behind which a mid-trained model writes the next item's id.

      <|next|> [id] [id] ... [id]   ->   [id]

  where [id] is `template.item(item, ('sid',))`, <|sid_begin|> to <|sid_end|>.

  Args:
    template: of the catalogue.
    history: item indices, oldest first; the latest are kept that leave room
      for one more id in `max_length`.
    max_length: of the training rows, tokens.

  Raises:
    ValueError: there is no room for two ids.
  """
  kept = history_in_a_row(template, max_length)
  sids = [template.item(int(item), SID) for item in history[-kept:]]
  return sum(sids, [template.tokenizer.id(tokens.NEXT)])


def history_in_a_row(template: prompts.Template, max_length: int) -> int:
  """Items that `next_item_prompt` keeps at most."""
  return _ids_in_a_row(template, max_length) - 1


def _ids_in_a_row(template: prompts.Template, max_length: int) -> int:
  size = len(template.item(0, SID))
  if max_length < 1 + 2 * size:
    raise ValueError(f'config.mid_train.max_length is {max_length}: expected '
                     f'at least {1 + 2 * size}, two semantic ids.')
  return (max_length - 1) // size


def persona(template: prompts.Template, history: Sequence[int],
            max_length: int) -> Iterator[Example]:
  """Purchases in order; long histories go on in another example."""
  opening = [template.tokenizer.id(tokens.PERSONA)]
  ids = opening
  for item in history:
    line = template.line(int(item), prompts.ITEM_FIELDS)[:max_length - 1]
    if len(ids) + len(line) > max_length:
      yield Example(ids)
      ids = opening
    ids = ids + line
  yield Example(ids)


def sequential(template: prompts.Template, history: Sequence[int],
               max_length: int) -> Iterator[Example]:
  """Every item of a history behind those before it.

  A history that is too long is cut into several, full ones from its end.
  """
  size = _ids_in_a_row(template, max_length)
  for end in range(len(history), 1, -size):
    part = history[max(0, end - size):end]
    if len(part) > 1:
      yield Example(
          next_item_prompt(template, part[:-1], max_length)
          + template.item(int(part[-1]), SID),
          1 + len(template.item(int(part[0]), SID)))


def captions(template: prompts.Template, item: int,
             max_length: int) -> Iterator[Example]:
  """From an item's id to its text and back; long texts are cut."""
  sid, text = template.item(item, SID), template.item(item, _ATTRIBUTES)
  text = text[:max(max_length - len(sid) - 2, 0)]
  for opening, parts in (
      (tokens.DESCRIBE, sid + text), (tokens.IDENTIFY, text + sid)):
    yield Example([template.tokenizer.id(opening), *parts,
                   template.tokenizer.eos_id])


def read_text(path: str | os.PathLike) -> list[str]:
  """The documents of a file of general text, see `MidTrainingConfig.text`.

  Raises:
    interactions.DataError: it can't be read, is malformed or has no text; the
      message names file and line.
  """
  path = pathlib.Path(path)
  try:
    if path.suffix != '.jsonl':
      documents = [path.read_text(encoding='utf-8')]
    else:
      documents = [_document(line, f'{path}:{number}')
                   for number, line in directory_lib.lines(path)]
  except (OSError, UnicodeDecodeError) as e:
    raise interactions.DataError(
        f'{path}: config.mid_train.text cannot be read: {e}.') from e
  documents = [text for text in documents if text.strip()]
  if not documents:
    raise interactions.DataError(
        f'{path}: config.mid_train.text is empty, expected general text.')
  return documents


def _document(line: str, where: str) -> str:
  try:
    fields = json.loads(line)
  except (ValueError, RecursionError) as e:
    raise interactions.DataError(f'{where}: malformed JSON: {e}') from e
  text = fields.get('text') if isinstance(fields, dict) else None
  if not isinstance(text, str):
    raise interactions.DataError(
        f"{where}: expected a JSON object with a string in field 'text'.")
  return text


def general_text(template: prompts.Template, documents: Iterable[str],
                 max_length: int) -> Iterator[Example]:
  """Documents one after the other, cut into pieces of `max_length`."""
  stream = []
  for text in documents:
    stream += template.tokenizer.encode([tokens.Text(text)])
    stream.append(template.tokenizer.eos_id)
  for begin in range(0, len(stream) - 1, max_length):
    yield Example(stream[begin:begin + max_length])


def pack(examples: Iterable[Example], max_length: int) -> np.ndarray:
  """Packs examples into rows, each where it leaves least room.

  Args:
    examples: of at most `max_length` tokens.
    max_length: T.

  Returns:
    int32 [R, 3, T]: tokens, start (the position of the first token of the same
    example; -1 in padding) and weight (0 or 1), as drawn above.
  """
  examples = list(examples)
  row, begin = packing.best_fit(
      np.array([len(example.ids) for example in examples], int), max_length)
  packed = np.zeros((row.max(initial=-1) + 1, 3, max_length), np.int32)
  packed[:, 1] = -1
  for example, index, first in zip(examples, row, begin):
    ids, start, weight = packed[index]
    end = first + len(example.ids)
    ids[first:end] = example.ids
    start[first:end] = first
    weight[first + example.learned_from:end] = 1
  return packed


def build(config: MidTrainingConfig, dataset: interactions.Dataset,
          template: prompts.Template, documents: Sequence[str],
          seed: int) -> Iterator[tuple[str, str, np.ndarray]]:
  """Rows of every task with a weight.

  Args:
    config: which tasks.
    dataset: the catalogue and all purchases, of which validation and test
      targets are left out.
    template: writes items.
    documents: of `read_text`; none without its task.
    seed: of the draw of what is held out: the same users of both tasks that
      speak of users, who are those with two training purchases or more.

  Yields:
    (task, split of `SPLITS`, rows as of `pack`).

  Raises:
    ValueError: `max_length` is too short, or there are too few users, items or
      pieces of text to hold any out.
  """
  histories = [interactions.leave_one_out(s).train for s in dataset.sequences]
  histories = [h for h in histories if len(h) > 1]
  size = config.max_length
  sources = {
      'persona': (histories, lambda h: persona(template, h, size)),
      'sequential': (histories, lambda h: sequential(template, h, size)),
      'caption': (range(len(dataset.items)),
                  lambda i: captions(template, i, size)),
      'text': (list(general_text(template, documents, size)), lambda e: (e,))}
  _ids_in_a_row(template, size)
  for task in config.tasks:
    units, examples = sources[task]
    held_out = _draw(task, len(units), config.held_out, seed)
    for split, chosen in zip(SPLITS, (~held_out, held_out)):
      yield task, split, pack(
          (example for i in np.flatnonzero(chosen)
           for example in examples(units[i])), size)


def _draw(task: str, count: int, share: float, seed: int) -> np.ndarray:
  """bool [count]: which are held out, one at least and not all."""
  if count < 2:
    raise ValueError(
        f'config.mid_train: task {task!r} has {count} users, items or pieces '
        'of text: expected at least 2, one to train on and one held out.')
  chosen = np.zeros(count, bool)
  wanted = min(max(round(share * count), 1), count - 1)
  chosen[np.random.default_rng(seed).permutation(count)[:wanted]] = True
  return chosen


def write(directory: pathlib.Path,
          rows: Iterable[tuple[str, str, np.ndarray]]) -> None:
  """Writes what `build` yields to `directory`/<task>_<split>.npy."""
  directory.mkdir()
  for task, split, packed in rows:
    with open(directory / f'{task}_{split}.npy', 'wb') as f:
      np.save(f, packed)
    logging.info('Mid-training, %s, %s: %d rows, %.1f%% padding.', task, split,
                 len(packed), 100 * (packed[:, 1] < 0).mean())


def load(directory: pathlib.Path, tasks: Iterable[str],
         split: str) -> dict[str, np.ndarray]:
  """Maps rows of tasks into memory, by task.

  Raises:
    interactions.DataError: they were not prepared.
  """
  try:
    return {task: np.load(directory / f'{task}_{split}.npy', mmap_mode='r')
            for task in tasks}
  except OSError as e:
    raise interactions.DataError(
        f'{directory}: no rows of mid-training ({e}); run --stage=prepare with '
        'mid_train in config.recipe.') from e
