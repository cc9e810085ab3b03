"""Imports the raw Amazon review files of 2014 (McAuley et al., SIGIR 2015).

    reviews_<Category>_5.json.gz   5-core reviews, one JSON object a line:
                                   reviewerID, asin, unixReviewTime, ...
    meta_<Category>.json.gz        one *Python literal* a line, not JSON: asin,
                                   title, categories (list of paths), brand,
                                   price, ...

Both are streamed. The metadata covers the whole category, some twenty times the
5-core's items, so that a line is parsed only if its item is wanted. Review
times are whole days, and the review file is sorted by ASIN: with
`data.ties = 'file'` a day's purchases lie in ASIN order, as in published
splits.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
import dataclasses
import gzip
import html
import json
import pathlib
import re
import zlib

from absl import logging
import numpy as np

from dgr2_jax.data import directory
from dgr2_jax.data import interactions

_LOG_EVERY = 100_000  # lines
# Metadata lines start with their ASIN; others are parsed to find it.
_ASIN = re.compile(r"\{'asin': '(\w+)'")


@dataclasses.dataclass(frozen=True)
class Subset:
  """A category of the data and its published 5-core counts."""
  category: str
  users: int
  items: int
  interactions: int


SUBSETS = {
    'beauty': Subset('Beauty', 22_363, 12_101, 198_502),
    'sports': Subset('Sports_and_Outdoors', 35_598, 18_357, 296_337),
    'toys': Subset('Toys_and_Games', 19_412, 11_924, 167_597),
}


def paths(
    path: str | pathlib.Path, name: str) -> tuple[pathlib.Path, pathlib.Path]:
  """The review file and the metadata file of a subset in a directory.

  Raises:
    ValueError: unknown subset.
    interactions.DataError: a file is missing.
  """
  if name not in SUBSETS:
    raise ValueError(
        f'data.name is {name!r}: expected one of {sorted(SUBSETS)} for the '
        'Amazon data.')
  category, path = SUBSETS[name].category, pathlib.Path(path)
  found = (path / f'reviews_{category}_5.json.gz',
           path / f'meta_{category}.json.gz')
  for file in found:
    if not file.is_file():
      raise interactions.DataError(
          f'{file}: no such file; download the 5-core reviews and the metadata '
          f'of {category} (Amazon reviews 2014) into {path}.')
  return found


def read(
    path: str | pathlib.Path, name: str, check_counts: bool
) -> tuple[dict[str, interactions.Item], interactions.Log]:
  """Reads one subset.

  Args:
    path: the directory of the two files.
    name: 'beauty', 'sports' or 'toys'.
    check_counts: whether to insist on the published 5-core counts.

  Returns:
    The items by ASIN, sorted, and the purchases.

  Raises:
    interactions.DataError: a file is missing, truncated or malformed, or the
      counts differ.
    ValueError: unknown subset.
  """
  reviews, metadata = paths(path, name)
  log = read_reviews(reviews)
  if check_counts:
    verify_counts(log, name, str(reviews))
  return read_metadata(metadata, log.items), log


def verify_counts(log: interactions.Log, name: str, origin: str):
  """Raises a DataError unless a log has the subset's published counts."""
  subset = SUBSETS[name]
  found = len(log.users), len(log.items), len(log.user)
  expected = subset.users, subset.items, subset.interactions
  if found != expected:
    raise interactions.DataError(
        f'{origin}: {found[0]:,} users, {found[1]:,} items and {found[2]:,} '
        f'interactions; the published 5-core of {subset.category} has '
        f'{expected[0]:,}, {expected[1]:,} and {expected[2]:,}. Set '
        'data.check_counts to False to use another version.')


def read_reviews(path: str | pathlib.Path) -> interactions.Log:
  """Reads a review file; users and items are in the order of their ids."""
  fields = (('reviewerID', str), ('asin', str), ('unixReviewTime', int))
  users, items, stamps = [], [], []
  for number, line in _lines(path):
    review = _parse(json.loads, line, f'{path}:{number}')
    for (field, kind), column in zip(fields, (users, items, stamps)):
      value = review.get(field)
      if type(value) is not kind:
        raise interactions.DataError(
            f'{path}:{number}: field {field!r} must be '
            f'{"a string" if kind is str else "an integer"}, got {value!r}.')
      column.append(value)
  if not users:
    raise interactions.DataError(f'{path}: empty, expected one review a line.')
  user_ids, user = np.unique(users, return_inverse=True)
  item_ids, item = np.unique(items, return_inverse=True)
  return interactions.Log(
      users=tuple(user_ids.tolist()), items=tuple(item_ids.tolist()),
      user=user.astype(np.int32), item=item.astype(np.int32),
      timestamp=np.array(stamps, np.float64))


def read_metadata(
    path: str | pathlib.Path,
    wanted: tuple[str, ...]) -> dict[str, interactions.Item]:
  """Reads the metadata of the wanted ASINs.

  Args:
    path: `meta_<Category>.json.gz`.
    wanted: ASINs.

  Returns:
    The items in the order of `wanted`. Titles may be empty where the file has
    none; an item without categories gets the file's category.

  Raises:
    interactions.DataError: the file is truncated or malformed, or lacks an
      item.
  """
  category = pathlib.Path(path).name.removeprefix('meta_').removesuffix(
      '.json.gz').replace('_', ' ')
  missing = set(wanted)
  found = {}
  for number, line in _lines(path):
    start = _ASIN.match(line)
    if start and start[1] not in missing:
      continue
    where = f'{path}:{number}'
    fields = _parse(ast.literal_eval, line, where)
    asin = fields.get('asin')
    if not isinstance(asin, str):
      raise interactions.DataError(f'{where}: no asin.')
    if asin in missing:
      missing.remove(asin)
      found[asin] = _item(asin, fields, category, where)
  if missing:
    raise interactions.DataError(
        f'{path}: {len(missing)} of {len(wanted)} reviewed items are not '
        f'described, the first is {min(missing)!r}.')
  return {asin: found[asin] for asin in wanted}


def _item(
    asin: str, fields: dict[str, object], category: str,
    where: str) -> interactions.Item:
  """Converts one metadata record."""
  def text(value: object) -> str:
    text = ' '.join(html.unescape(str(value or '')).split())
    # A literal can spell half a surrogate pair, which UTF-8 cannot.
    return text.encode('utf-8', 'replace').decode()

  categories = fields.get('categories') or [[category]]
  if not (isinstance(categories, list) and isinstance(categories[0], list)):
    raise interactions.DataError(
        f"{where}: field 'categories' must be a list of lists.")
  price = fields.get('price')
  if price is not None and not directory.is_number(price):
    raise interactions.DataError(f"{where}: field 'price' must be a number.")
  return interactions.Item(
      item_id=asin,
      title=text(fields.get('title')),
      # An item may be filed under several paths; the first is its main one.
      categories=tuple(text(c) for c in categories[0]) or (category,),
      brand=text(fields.get('brand')),
      price=None if price is None else float(price))


def _parse(
    parser: Callable[[str], object], line: str,
    where: str) -> dict[str, object]:
  try:
    value = parser(line)
  # What json.loads and ast.literal_eval raise on malformed or deep input.
  except (ValueError, SyntaxError, TypeError, MemoryError,
          RecursionError) as e:
    raise interactions.DataError(f'{where}: malformed line: {e}') from e
  if not isinstance(value, dict):
    raise interactions.DataError(
        f'{where}: expected an object, got {type(value).__name__}.')
  return value


def _lines(path: str | pathlib.Path) -> Iterator[tuple[int, str]]:
  """Yields (line number, text) of a gzip file's lines, logging progress."""
  number = 0
  try:
    with gzip.open(path, 'rt', encoding='utf-8') as f:
      for number, line in enumerate(f, 1):
        if number % _LOG_EVERY == 0:
          logging.info('%s: %d lines read.', path, number)
        if line.strip():
          yield number, line
  except (EOFError, zlib.error) as e:
    raise interactions.DataError(
        f'{path}: truncated or damaged after line {number}: {e} Download it '
        'again.') from e
  except gzip.BadGzipFile as e:
    raise interactions.DataError(
        f'{path}: damaged, or not a gzip file: {e}') from e
  except UnicodeDecodeError as e:
    raise interactions.DataError(
        f'{path}: not UTF-8 text after line {number}: {e.reason}.') from e
