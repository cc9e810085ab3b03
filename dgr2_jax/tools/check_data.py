"""Checks a data directory and says what is in it.

    python -m dgr2_jax.tools.check_data DIR [--candidates=FILE]

DIR holds items.jsonl and sequences.txt or interactions.csv, see
`data/directory.py`, and may hold a retriever's lists in candidates.jsonl. All
lines at fault are counted and the first twenty listed. What is legal and yet
looks wrong is a warning. Exit code 0: can be used; 2: some lines are at fault;
1: nothing could be read.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
import os
import pathlib
import sys

from absl import logging
import numpy as np

from dgr2_jax.data import candidates as candidates_lib
from dgr2_jax.data import directory
from dgr2_jax.data import interactions

_SHOWN = 20  # lines at fault
_COLD = 5  # purchases below which an item is called rare


class _Summary:
  """Lines of text, and warnings that go below them."""

  def __init__(self):
    self.lines, self.warnings = [], []

  def add(self, name: str, text: str) -> None:
    self.lines.append(f'  {name:<22}{text}')

  def warn(self, condition: bool, text: str) -> None:
    if condition:
      self.warnings.append(f'  {text}')


def summarise(items: Mapping[str, interactions.Item], log: interactions.Log,
              dataset: interactions.Dataset) -> _Summary:
  """What the files hold, and what of it is used.

  Args:
    items: the catalogue by id.
    log: all purchases.
    dataset: what the filters leave of both.
  """
  s, every = _Summary(), list(items.values())
  bought = np.bincount(log.item, minlength=len(items))
  s.add('items', f'{len(every):,}; {(bought == 0).sum():,} never bought, '
        f'{((bought > 0) & (bought < _COLD)).sum():,} fewer than {_COLD} times')
  s.add('users', f'{len(log.users):,}')
  s.add('purchases', f'{len(log.user):,}')
  for name, have in (('brand', [bool(i.brand) for i in every]),
                     ('price', [i.price is not None for i in every])):
    s.add(f'items with a {name}', _share(have))
  titled = [bool(i.title.strip()) for i in every]
  s.add('items with a title', _share(titled))
  depth = [len(i.categories) for i in every]
  leaves = {i.categories for i in every}
  s.add('categories', f'{len(leaves):,} paths, {min(depth)} to {max(depth)} '
        'deep')
  s.warn(np.mean(titled) < .9, 'Many items have no title: their semantic ids '
         'and prompts say little.')
  s.warn(len(leaves) < 2, 'All items are of one category: reasoning by '
         'categories has nothing to say.')
  texts = [(i.title, i.categories, i.brand) for i in every]
  same = len(texts) - len(set(texts))
  s.warn(same > 0, f'{same:,} items have the text of another one; only their '
         'ids tell them apart.')
  pair = log.user.astype(np.int64) * len(items) + log.item
  again = len(pair) - len(np.unique(pair))
  s.warn(again > 0, f'{again:,} purchases repeat an item of their user: only '
         'the first counts.')
  if log.timestamp is None:
    s.add('order', 'as in the file')
  else:
    order = np.lexsort((log.timestamp, log.user))
    tied = ((np.diff(log.user[order]) == 0)
            & (np.diff(log.timestamp[order]) == 0))
    s.add('order', f'by time; {_share(tied)} of neighbours tie (data.ties)')
    s.warn(tied.mean() > .5, 'Most purchases of a user have one time: their '
           'order is that of the file, or arbitrary.')
  length = [len(sequence) for sequence in dataset.sequences]
  quantiles = np.quantile(length, (0, .25, .5, .75, 1)).astype(int)
  s.lines.append('After filtering (data.min_count)')
  s.add('users', f'{len(dataset.users):,} of {len(log.users):,}')
  s.add('items', f'{len(dataset.items):,} of {len(every):,}')
  s.add('purchases', f'{dataset.num_interactions:,} of {len(log.user):,}')
  s.add('of a user', 'minimum {}, quartiles {} {} {}, maximum {}'.format(
      *quantiles))
  s.warn(len(dataset.users) < .5 * len(log.users), 'More than half of the '
         'users are dropped: lower data.min_count?')
  s.warn(len(dataset.items) < 100, 'Fewer than 100 items: lists of ten are '
         'hardly a choice.')
  targets = [sequence[-1] for sequence in dataset.sequences]
  cold = ~np.isin(targets, np.concatenate(
      [sequence[:-2] for sequence in dataset.sequences]))
  s.add('test targets', f'{_share(cold)} in nobody\'s training purchases')
  s.warn(np.mean(cold) > .5, 'Most test targets are in nobody\'s training '
         'purchases: a retriever that counts cannot find them.')
  return s


def summarise_candidates(
    lists: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]],
    dataset: interactions.Dataset, s: _Summary) -> None:
  """Adds what lists of candidates hold; see `candidates.read`."""
  s.lines.append('Candidate lists')
  hits = {}
  for split, (users, positions, chosen) in lists.items():
    target = np.array([dataset.sequences[u][p]
                       for u, p in zip(users, positions)])
    found = chosen == target[:, None]
    hits[split] = found.any(1).mean()
    s.add(split, f'{len(users):,} lists of {chosen.shape[1]}, '
          f'{len(set(users.tolist())):,} of {len(dataset.users):,} users; the '
          f'target is in {_share(found.any(1))}')
    place = np.bincount(found.argmax(1)[found.any(1)],
                        minlength=chosen.shape[1])
    if place.sum() >= 20:
      s.warn(place.max() > .9 * place.sum(), f'{split}: nearly all targets are '
             f'candidate {place.argmax() + 1}: the order gives them away.')
    s.warn(len(users) >= 20 and hits[split] > .95, f'{split}: the target is in '
           'nearly every list. A real retriever misses most: were the lists '
           'made with the target known?')
  for split in candidates_lib.SPLITS:
    s.warn(split not in lists, f'No lists for {split}: they will be the '
           "built-in retriever's, and look unlike the others.")
  if 'train' in hits and 'test' in hits:
    s.warn(hits['train'] > 2 * hits['test'] + .02, 'Training lists hit far '
           'more often than test lists: a retriever that has seen its users?')


def _share(of: Sequence[bool] | np.ndarray) -> str:
  return f'{100 * np.mean(of):.1f} %' if len(of) else 'none'


def check(path: pathlib.Path, candidates: pathlib.Path | None,
          min_count: int, num_candidates: int) -> tuple[str, int]:
  """Reads everything.

  Returns:
    The text, and the number of lines at fault.

  Raises:
    interactions.DataError: nothing can be made of the files; with the lines.
  """
  if candidates and not candidates.is_file():
    raise interactions.DataError(f'{candidates}: ' + (
        'expected a file.' if candidates.exists() else 'no such file.'))
  errors = []
  try:
    items, log = directory.read(path, errors.append)
    dataset = interactions.dataset(
        'data', items, log, min_count, 'file', 0, str(path))
  except interactions.DataError as e:
    raise interactions.DataError(
        '\n'.join([*_at_fault(errors), str(e)])) from e
  summary = summarise(items, log, dataset)
  beside = path / 'candidates.jsonl'
  if candidates or beside.exists():
    try:
      summarise_candidates(candidates_lib.read(
          candidates or beside, dataset, num_candidates, errors.append),
                           dataset, summary)
    except interactions.DataError as e:  # of none can anything be made
      errors.append(e)
  text = [str(path), *summary.lines]
  if summary.warnings:
    text += ['Warnings', *summary.warnings]
  return '\n'.join([*text, *_at_fault(errors)]), len(errors)


def _at_fault(errors: Sequence[Exception]) -> list[str]:
  """The first lines at fault, and how many there are, if any."""
  if not errors:
    return []
  text = [f'{len(errors):,} lines at fault',
          *(f'  {e}' for e in errors[:_SHOWN])]
  if len(errors) > _SHOWN:
    text.append(f'  and {len(errors) - _SHOWN:,} more')
  return text


def main(argv: Sequence[str] | None = None) -> int:
  """Prints the summary; what users can mend is no traceback."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('directory', type=pathlib.Path)
  parser.add_argument('--candidates', type=pathlib.Path,
                      help="a retriever's lists; DIR/candidates.jsonl, if it "
                      'is there')
  parser.add_argument('--min_count', type=int, default=5,
                      help='data.min_count of the config')
  parser.add_argument('--num_candidates', type=int, default=10,
                      help='data.num_candidates of the config')
  args = parser.parse_args(argv)
  verbosity = logging.get_verbosity()
  logging.set_verbosity(logging.ERROR)  # the summary says it all
  try:
    for flag, least in (('min_count', 1), ('num_candidates', 2)):
      if (value := getattr(args, flag)) < least:
        raise ValueError(f'--{flag} is {value}: expected at least {least}.')
    text, faults = check(args.directory, args.candidates, args.min_count,
                         args.num_candidates)
  except (ValueError, OSError) as e:
    print(f'error: {e}', file=sys.stderr)
    return 1
  finally:
    logging.set_verbosity(verbosity)
  try:
    print(text, flush=True)
  except BrokenPipeError:  # as in `| head`: nothing is to be flushed again
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  return 2 if faults else 0


if __name__ == '__main__':
  sys.stdout.reconfigure(errors='backslashreplace')  # text that came from data
  sys.exit(main())
