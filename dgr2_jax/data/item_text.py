"""TF-IDF vectors of what a catalogue says about its items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scipy import sparse
from sklearn.feature_extraction import text

from dgr2_jax.data import interactions


def tfidf(
    items: Iterable[interactions.Item]
) -> tuple[sparse.csr_matrix, text.TfidfVectorizer]:
  """Returns unit TF-IDF rows over title, brand and categories.

  Args:
    items: the catalogue, I items.

  Returns:
    float64 [I, words], the row of an item without words being zero; and the
    words with their weights, for `of_new`.

  Raises:
    DataError: no item has any word.
  """
  documents = list(map(_document, items))
  vectorizer = text.TfidfVectorizer(sublinear_tf=True)
  try:
    return vectorizer.fit_transform(documents), vectorizer
  except ValueError as e:
    raise interactions.DataError(
        f'no words in the titles, brands and categories of {len(documents)} '
        f'items: {e}') from e


def of_new(items: Sequence[interactions.Item],
           vectorizer: text.TfidfVectorizer) -> sparse.csr_matrix:
  """The rows [n, words] of items that the catalogue lacks, in its words."""
  return vectorizer.transform(map(_document, items))


def _document(item: interactions.Item) -> str:
  return ' '.join((item.title, item.brand, *item.categories))
