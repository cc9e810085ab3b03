"""Reads and validates the data directory that a user brings.

    items.jsonl       one item a line: {"item_id": "B01", "title": "Shampoo",
                      "categories": ["Beauty", "Hair Care"], "brand": "Lumea",
                      "price": 7.99}; brand and price may be null or absent,
                      further fields are ignored
    sequences.txt     one user a line: user id, then item ids, oldest first,
                      separated by white space
    interactions.csv  or, instead: user_id,item_id,timestamp with a header,
                      lines in any order, the timestamp a number (unix seconds)

Blank lines are skipped. `sequences.txt` is in order already, so that
`data.ties` has nothing to decide there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import csv
import json
import math
import pathlib

import numpy as np

from dgr2_jax.data import interactions

ITEMS, SEQUENCES, PURCHASES = 'items.jsonl', 'sequences.txt', 'interactions.csv'
COLUMNS = ('user_id', 'item_id', 'timestamp')

# What is done with a line at fault: raised here, collected by a checker. A
# reader that goes on leaves the line out.
Report = Callable[[interactions.DataError], None]


def stop(error: interactions.DataError) -> None:
  """Raises the first error."""
  raise error


def read(
    path: str | pathlib.Path, report: Report = stop
) -> tuple[dict[str, interactions.Item], interactions.Log]:
  """Reads a data directory.

  Args:
    path: the directory.
    report: what is done with a line at fault.

  Returns:
    The items by id in file order, and the purchases.

  Raises:
    interactions.DataError: a file is missing, empty or malformed; the message
      gives file, line and reason.
  """
  path = pathlib.Path(path)
  if not path.is_dir():
    raise interactions.DataError(f'{path}: no such directory (data.path).')
  found = [f for f in (SEQUENCES, PURCHASES) if (path / f).is_file()]
  if len(found) != 1:
    raise interactions.DataError(
        f'{path}: expected either {SEQUENCES} or {PURCHASES}, found '
        f'{"both" if found else "neither"}.')
  items = read_items(path / ITEMS, report)
  reader = read_sequences if found == [SEQUENCES] else read_purchases
  return items, reader(path / found[0], items, report)


def read_items(path: str | pathlib.Path,
               report: Report = stop) -> dict[str, interactions.Item]:
  """Reads `items.jsonl`: the items by id, in file order."""
  items, line_of = {}, {}
  for number, line in lines(path, report):
    where = f'{path}:{number}'
    try:
      try:
        fields = json.loads(line)
      except (ValueError, RecursionError) as e:
        raise interactions.DataError(f'{where}: malformed JSON: {e}') from e
      item = parse_item(fields, where)
      if item.item_id in items:
        raise interactions.DataError(
            f'{where}: duplicate item_id {item.item_id!r}, first on line '
            f'{line_of[item.item_id]}.')
    except interactions.DataError as e:
      report(e)
      continue
    items[item.item_id], line_of[item.item_id] = item, number
  if not items:
    raise interactions.DataError(f'{path}: empty, expected one item a line.')
  return items


def parse_item(fields: object, where: str) -> interactions.Item:
  """Checks the fields of one item.

  Args:
    fields: the parsed JSON value.
    where: what errors name, 'file:line'.

  Returns:
    The item.

  Raises:
    interactions.DataError: a field is missing or has the wrong type.
  """
  def check(good: bool, field: str, expected: str):
    if not good:
      got = f'got {fields[field]!r}' if field in fields else 'it is missing'
      raise interactions.DataError(
          f'{where}: field {field!r} must be {expected}, {got}.')

  if not isinstance(fields, dict):
    raise interactions.DataError(
        f'{where}: expected a JSON object, got {type(fields).__name__}.')
  item_id, title = fields.get('item_id'), fields.get('title')
  categories, price = fields.get('categories'), fields.get('price')
  brand = fields.get('brand')
  check(is_text(item_id) and item_id.strip() != '', 'item_id',
        'a non-empty string')
  check(is_text(title), 'title', 'a string that UTF-8 can hold')
  check(isinstance(categories, list) and len(categories) > 0
        and all(map(is_text, categories)), 'categories',
        'a non-empty list of strings (UTF-8), broad to narrow')
  check(brand is None or is_text(brand), 'brand',
        'a string that UTF-8 can hold, or null')
  check(price is None or is_number(price), 'price', 'a finite number or null')
  return interactions.Item(
      item_id=item_id, title=title, categories=tuple(categories),
      brand=brand or '', price=None if price is None else float(price))


def is_text(value: object) -> bool:
  """Whether a JSON value is a string that UTF-8 can hold.

  JSON can spell half a surrogate pair, which nothing can be written with.
  """
  try:
    return isinstance(value, str) and value.encode() is not None
  except UnicodeEncodeError:
    return False


def is_number(value: object) -> bool:
  """Whether a JSON value is a number that a float can hold."""
  try:
    return (isinstance(value, (int, float)) and not isinstance(value, bool)
            and math.isfinite(value))
  except OverflowError:
    return False


def read_sequences(
    path: str | pathlib.Path, items: dict[str, interactions.Item],
    report: Report = stop) -> interactions.Log:
  """Reads `sequences.txt`, whose items must all be in `items`."""
  builder = _Builder(items, report)
  line_of = {}
  for number, line in lines(path, report):
    user, *bought = line.split()
    where = f'{path}:{number}'
    if user in line_of:
      report(interactions.DataError(
          f'{where}: duplicate user {user!r}, first on line {line_of[user]}.'))
      continue
    if not bought:
      report(interactions.DataError(
          f'{where}: user {user!r} has no items; expected a user id, then item '
          'ids.'))
      continue
    line_of[user] = number
    for item_id in bought:
      builder.add(user, item_id, where)
  return builder.build(path)


def read_purchases(
    path: str | pathlib.Path, items: dict[str, interactions.Item],
    report: Report = stop) -> interactions.Log:
  """Reads `interactions.csv`, whose items must all be in `items`."""
  builder = _Builder(items, report)
  records = _records(path, report)
  where, header = next(records, (f'{path}:1', ()))
  header = [name.strip() for name in header]
  if any(header.count(name) != 1 for name in COLUMNS):
    raise interactions.DataError(
        f'{where}: bad header {",".join(header)!r}: expected '
        f'{",".join(COLUMNS)}, each once.')
  columns = [header.index(name) for name in COLUMNS]
  for where, record in records:
    try:
      if len(record) != len(header):
        raise interactions.DataError(
            f'{where}: {len(record)} fields, the header has {len(header)}.')
      user, item_id, stamp = (record[c].strip() for c in columns)
      if not user:
        raise interactions.DataError(f'{where}: empty user_id.')
      time = _timestamp(stamp, where)
    except interactions.DataError as e:
      report(e)
      continue
    builder.add(user, item_id, where, time)
  return builder.build(path)


def _records(path: str | pathlib.Path,
             report: Report) -> Iterator[tuple[str, list[str]]]:
  """Yields where a record of a CSV file begins, and its fields."""
  numbers = []  # lines of the record; a quoted field may span some

  def text():
    for number, line in lines(path, report):
      numbers.append(number)
      yield line

  records = csv.reader(text(), strict=True)
  while True:
    numbers.clear()
    try:
      record = next(records, None)
    except csv.Error as e:
      open_quote = f' (a quote open until line {numbers[-1]}?)'
      report(interactions.DataError(
          f'{path}:{numbers[0]}: malformed CSV: {e}'
          f'{open_quote if len(numbers) > 1 else ""}.'))
      continue
    if record is None:
      return
    yield f'{path}:{numbers[0]}', record


def _timestamp(text: str, where: str) -> float:
  try:
    value = float(text)
  except ValueError:
    value = math.nan
  if not math.isfinite(value):
    raise interactions.DataError(
        f'{where}: timestamp {text!r}: expected a number, unix seconds.')
  return value


class _Builder:
  """Collects the purchases of a file into a log."""

  def __init__(self, items: dict[str, interactions.Item], report: Report):
    self._report = report
    self._items = tuple(items)
    self._item_index = {item_id: i for i, item_id in enumerate(items)}
    self._users = {}
    self._rows = []  # (user, item)
    self._stamps = []

  def add(
      self, user: str, item_id: str, where: str, stamp: float | None = None):
    if item_id not in self._item_index:
      self._report(interactions.DataError(
          f'{where}: unknown item {item_id!r}, not in {ITEMS}.'))
      return
    self._rows.append((
        self._users.setdefault(user, len(self._users)),
        self._item_index[item_id]))
    if stamp is not None:
      self._stamps.append(stamp)

  def build(self, path: str | pathlib.Path) -> interactions.Log:
    if not self._rows:
      raise interactions.DataError(f'{path}: no purchases that can be used.')
    rows = np.array(self._rows, np.int32)
    return interactions.Log(
        users=tuple(self._users), items=self._items,
        user=rows[:, 0], item=rows[:, 1],
        timestamp=np.array(self._stamps) if self._stamps else None)


def lines(path: str | pathlib.Path,
          report: Report = stop) -> Iterator[tuple[int, str]]:
  """Yields (line number, text) of the lines that are not blank.

  Raises:
    interactions.DataError: the file is missing, or `report` raises it for a
      line that is not UTF-8.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise interactions.DataError(f'{path}: no such file.')
  with path.open('rb') as f:
    for number, raw in enumerate(f, 1):
      try:
        line = raw.decode('utf-8-sig' if number == 1 else 'utf-8')
      except UnicodeDecodeError as e:
        report(interactions.DataError(
            f'{path}:{number}: not UTF-8 text: {e.reason}.'))
        continue
      if line.strip():
        yield number, line
