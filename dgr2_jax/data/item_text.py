"""TF-IDF vectors of what a catalogue says about its items."""

from __future__ import annotations

from collections.abc import Iterable

from scipy import sparse
from sklearn.feature_extraction import text

from dgr2_jax.data import interactions


def tfidf(items: Iterable[interactions.Item]) -> sparse.csr_matrix:
  """Returns unit TF-IDF rows over title, brand and categories.

  Args:
    items: the catalogue, I items.

  Returns:
    float64 [I, words]; the row of an item without words is zero.

  Raises:
    DataError: no item has any word.
  """
  documents = [
      ' '.join((item.title, item.brand, *item.categories)) for item in items]
  try:
    return text.TfidfVectorizer(sublinear_tf=True).fit_transform(documents)
  except ValueError as e:
    raise interactions.DataError(
        f'no words in the titles, brands and categories of {len(documents)} '
        f'items: {e}') from e
