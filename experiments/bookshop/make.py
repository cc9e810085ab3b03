r"""A made-up bookshop: 300 books, 900 readers, as files of one's own.

    python experiments/bookshop/make.py DIR

Readers keep to two genres, like some authors, and mostly read series in order,
so that there is something to find. Times are in seconds. `requests.jsonl` holds
requests to re-rank: what a reader bought, and ten other books.
"""

from __future__ import annotations

import argparse
import collections
import csv
import json
import pathlib

import numpy as np

GENRES = {
    'Crime': ('Cosy', 'Noir', 'Police'), 'Fantasy': ('Epic', 'Urban'),
    'Science Fiction': ('Space', 'Near Future'), 'Romance': ('Historical',
                                                             'Modern'),
    'Cooking': ('Baking', 'Vegetables'), 'Travel': ('Islands', 'Mountains')}
NOUNS = ('Harbour', 'Orchard', 'Lantern', 'Winter', 'River', 'Clock', 'Garden',
         'Letter', 'Bridge', 'Mirror', 'Island', 'Station')
ADJECTIVES = ('Silent', 'Broken', 'Second', 'Hidden', 'Golden', 'Last',
              'Distant', 'Paper', 'Burning', 'Quiet')
AUTHORS = ('A. Moreau', 'J. Okafor', 'L. Lindqvist', 'M. Tanaka', 'R. Haddad',
           'S. Petrov', 'T. Alvarez', 'V. Novak', 'W. Byrne', 'Z. Kaya')
VOLUMES = 3  # of a series


def books(rng: np.random.Generator, count: int = 300) -> list[dict]:
  """Items; books 3 s, 3 s + 1 and 3 s + 2 are a series."""
  kinds = [(genre, sub) for genre, subs in GENRES.items() for sub in subs]
  result = []
  for series in range(count // VOLUMES):
    genre, sub = kinds[rng.integers(len(kinds))]
    author = AUTHORS[rng.integers(len(AUTHORS))]
    name = f'The {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} {series + 1}'
    result += [{
        'item_id': f'book{len(result) + volume:03d}',
        'title': f'{name}, volume {volume + 1}', 'brand': author,
        'categories': ['Books', genre, sub],
        'price': round(float(rng.uniform(6, 25)), 2)}
               for volume in range(VOLUMES)]
  return result


def purchases(rng: np.random.Generator, items: list[dict],
              readers: int = 900) -> list[tuple[str, str, int]]:
  """(user, item, seconds) in any order."""
  genre = np.array([item['categories'][1] for item in items])
  author = np.array([item['brand'] for item in items])
  first = np.arange(len(items)) % VOLUMES == 0
  popularity = rng.gamma(.7, size=len(items)) + .1
  rows = []
  for reader in range(readers):
    liked = rng.choice(list(GENRES), 2, replace=False)
    taste = popularity * np.where(np.isin(genre, liked), 12., 1.)
    taste = taste * np.where(author == rng.choice(AUTHORS), 3., 1.)
    taste = taste * np.where(first, 4., 1.)
    read, now = [], int(rng.integers(1.5e9, 1.6e9))
    for _ in range(rng.integers(6, 15)):
      following = read[-1] + 1 if read else 0
      if (read and following % VOLUMES and following not in read
          and rng.random() < .55):
        chosen = following
      else:
        weights = taste.copy()
        weights[read] = 0
        chosen = int(rng.choice(len(items), p=weights / weights.sum()))
      read.append(chosen)
      now += int(rng.integers(3600, 30 * 86400))
      rows.append((f'reader{reader:04d}', items[chosen]['item_id'], now))
  return [rows[i] for i in rng.permutation(len(rows))]


def requests(rng: np.random.Generator, items: list[dict],
             rows: list[tuple[str, str, int]], count: int = 20) -> list[dict]:
  """A request each of the first readers; the next volumes come first.

  Of books that five readers bought; data.min_count drops the others.
  """
  bought = collections.Counter(item for _, item, _ in rows)
  known = [item['item_id'] for item in items if bought[item['item_id']] >= 5]
  result = []
  for reader in sorted({user for user, _, _ in rows})[:count]:
    history = [item for _, item, _ in sorted(
        (row for row in rows if row[0] == reader and row[1] in known),
        key=lambda row: row[2])]
    after = {items[i]['item_id']: items[i + 1]['item_id']
             for i in range(len(items) - 1) if (i + 1) % VOLUMES}
    following = [after[item] for item in history if after.get(item) in known
                 and after[item] not in history]
    others = [item for item in rng.permutation(known).tolist()
              if item not in history and item not in following]
    result.append({'id': reader, 'history': history,
                   'candidates': [*following[:3], *others][:10]})
  return result


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('directory', type=pathlib.Path)
  parser.add_argument('--seed', type=int, default=0)
  args = parser.parse_args()
  rng = np.random.default_rng(args.seed)
  items = books(rng)
  rows = purchases(rng, items)
  args.directory.mkdir(parents=True, exist_ok=True)
  with (args.directory / 'items.jsonl').open('w', encoding='utf-8') as f:
    f.writelines(json.dumps(item) + '\n' for item in items)
  with (args.directory / 'interactions.csv').open(
      'w', encoding='utf-8', newline='') as f:
    writer = csv.writer(f, lineterminator='\n')
    writer.writerow(('user_id', 'item_id', 'timestamp'))
    writer.writerows(rows)
  with (args.directory / 'requests.jsonl').open('w', encoding='utf-8') as f:
    f.writelines(json.dumps(request) + '\n'
                 for request in requests(rng, items, rows))
  print(f'{args.directory}: {len(items)} books')


if __name__ == '__main__':
  main()
