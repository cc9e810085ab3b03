"""Fabricated raw Amazon files for tests."""

import gzip
import json

NUM_USERS, NUM_ITEMS = 7, 6


def write(path):
  """Writes small files of the category Beauty into `path`.

  Every user buys every item; the reviews lie in ASIN order, as in the dump, and
  user u buys item a on day (a * u) % 4.
  """
  path.mkdir(parents=True, exist_ok=True)
  with gzip.open(path / 'reviews_Beauty_5.json.gz', 'wt') as f:
    for a in range(NUM_ITEMS):
      for u in range(NUM_USERS):
        f.write(json.dumps({
            'reviewerID': f'U{u}', 'asin': f'B{a}', 'overall': 5.0,
            'unixReviewTime': 86_400 * ((a * u) % 4)}) + '\n')
  records = [
      {'asin': f'B{a}', 'title': f"It's \n item &amp; {a}", 'price': 1.5 + a,
       'related': {'also_bought': ['B9']}, 'brand': 'Lumea',
       'categories': [['Beauty', 'Hair &amp; Care', 'Shampoos'], ['Other']]}
      for a in (5, 8, 1, 0, 2, 7)]
  records += [{'categories': [['Beauty']], 'asin': 'B3', 'title': 'Ç "three"'},
              {'asin': 'B4'}]
  with gzip.open(path / 'meta_Beauty.json.gz', 'wt', encoding='utf-8') as f:
    f.writelines(repr(r) + '\n' for r in records)
  return path
