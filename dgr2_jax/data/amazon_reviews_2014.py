"""TFDS builder of the Amazon reviews of 2014, written as ArrayRecord.

TensorFlow is not needed: the builder is prepared as ArrayRecord and read
through `tfds.data_source`, which is random-access and feeds Grain directly.
(`tfds.load` and the `tfds` command do need TensorFlow.)

    split 'users': one user's 5-core reviews, in the order of the review file
    split 'items': one reviewed item's metadata

TFDS gives all splits of a dataset the same features, so that the fields of the
other split are empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import math
import os
import pathlib

from etils import epath
import grain
import numpy as np
import tensorflow_datasets as tfds

from dgr2_jax.data import amazon
from dgr2_jax.data import interactions

_CITATION = """\
@inproceedings{mcauley2015image,
  title={Image-based recommendations on styles and substitutes},
  author={McAuley, Julian and Targett, Christopher and Shi, Qinfeng and
          van den Hengel, Anton},
  booktitle={SIGIR},
  year={2015}
}"""


class AmazonReviews2014(tfds.core.GeneratorBasedBuilder):
  """Purchase sequences and item metadata of three 5-core subsets."""

  name = 'amazon_reviews_2014'
  VERSION = tfds.core.Version('1.0.0')
  MANUAL_DOWNLOAD_INSTRUCTIONS = (
      'Download reviews_<Category>_5.json.gz and meta_<Category>.json.gz for '
      + ', '.join(s.category for s in amazon.SUBSETS.values())
      + ' as needed; the data is for research use.')
  BUILDER_CONFIGS = [
      tfds.core.BuilderConfig(name=name, description=subset.category)
      for name, subset in amazon.SUBSETS.items()]
  # TFDS finds this out by itself only where `importlib_resources`, which it
  # does not declare, happens to be installed.
  code_path = epath.Path(__file__)

  def __init__(self, *, check_counts: bool = True, **kwargs):
    """Builds the builder.

    Args:
      check_counts: whether preparing insists on the published 5-core counts.
      **kwargs: those of every TFDS builder.
    """
    super().__init__(**kwargs)
    self._check_counts = check_counts

  def _info(self) -> tfds.core.DatasetInfo:
    text, texts = tfds.features.Text(), tfds.features.Sequence(
        tfds.features.Text())
    return self.dataset_info_from_configs(
        description='Amazon reviews of 2014, 5-core, as purchase sequences.',
        citation=_CITATION,
        homepage='https://cseweb.ucsd.edu/~jmcauley/datasets.html',
        features=tfds.features.FeaturesDict({
            'user_id': text,
            'item_ids': texts,
            'timestamps': tfds.features.Sequence(np.int64),  # unix seconds
            'item_id': text,
            'title': text,
            'categories': texts,
            'brand': text,
            'price': np.float64,  # dollars, NaN where unknown
        }))

  def _split_generators(
      self, dl_manager: tfds.download.DownloadManager
  ) -> dict[str, Iterator[tuple[str, dict[str, object]]]]:
    items, log = amazon.read(
        dl_manager.manual_dir, self.builder_config.name, self._check_counts)
    return {'users': _users(log), 'items': _items(items)}

  def _generate_examples(self, *args, **kwargs):
    """Unused: `_split_generators` returns the generators themselves."""
    raise NotImplementedError


def _users(
    log: interactions.Log) -> Iterator[tuple[str, dict[str, object]]]:
  """Examples of the split 'users'."""
  order = np.argsort(log.user, kind='stable')
  _, starts = np.unique(log.user[order], return_index=True)
  for rows in np.split(order, starts[1:]):
    user_id = log.users[log.user[rows[0]]]
    yield user_id, {
        'user_id': user_id,
        'item_ids': [log.items[i] for i in log.item[rows]],
        'timestamps': log.timestamp[rows].astype(np.int64),
        'item_id': '', 'title': '', 'categories': [], 'brand': '',
        'price': math.nan}


def _items(
    items: dict[str, interactions.Item]
) -> Iterator[tuple[str, dict[str, object]]]:
  """Examples of the split 'items'."""
  for item in items.values():
    yield item.item_id, {
        'user_id': '', 'item_ids': [], 'timestamps': np.zeros(0, np.int64),
        'item_id': item.item_id, 'title': item.title,
        'categories': list(item.categories), 'brand': item.brand,
        'price': math.nan if item.price is None else item.price}


def read(
    path: str | pathlib.Path, name: str, check_counts: bool
) -> tuple[dict[str, interactions.Item], interactions.Log]:
  """Reads a subset through TFDS and Grain, preparing it on the first call.

  Args:
    path: the TFDS data directory; the raw files are looked for in its
      `downloads/manual`, as TFDS has it, and only if nothing is prepared yet.
    name: 'beauty', 'sports' or 'toys'.
    check_counts: whether to insist on the published 5-core counts.

  Returns:
    The items by ASIN, sorted, and the purchases.

  Raises:
    interactions.DataError: a raw file is missing, truncated or malformed, or
      the counts differ.
    ValueError: unknown subset.
  """
  path = pathlib.Path(os.path.expanduser(path)).resolve()
  manual = path / 'downloads' / 'manual'
  prepared = path / AmazonReviews2014.name / name / str(
      AmazonReviews2014.VERSION)
  if not prepared.is_dir():
    amazon.paths(manual, name)  # raises a clear error
  users, items = tfds.data_source(
      f'{AmazonReviews2014.name}/{name}', split=['users', 'items'],
      data_dir=path, builder_kwargs={
          'check_counts': check_counts, 'file_format': 'array_record'},
      download_and_prepare_kwargs={
          'download_config': tfds.download.DownloadConfig(manual_dir=manual)})
  catalogue = {}
  for row in _rows(items):
    item_id = _text(row['item_id'])
    catalogue[item_id] = interactions.Item(
        item_id=item_id, title=_text(row['title']),
        categories=tuple(_text(c) for c in row['categories']),
        brand=_text(row['brand']),
        price=None if math.isnan(row['price']) else float(row['price']))
  # TFDS shuffles what it writes; sorted ids undo that.
  catalogue = {item_id: catalogue[item_id] for item_id in sorted(catalogue)}
  log = _log(_rows(users), tuple(catalogue))
  if check_counts:
    amazon.verify_counts(log, name, str(prepared))
  return catalogue, log


def _rows(source: Sequence[dict[str, object]]) -> grain.IterDataset:
  """All rows of a split, once and in order."""
  # Rows are small: waiting for reader threads costs more than reading.
  return grain.MapDataset.source(source).to_iter_dataset(
      grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


def _log(rows: grain.IterDataset, items: tuple[str, ...]) -> interactions.Log:
  """The log of the split 'users', users in the order of their ids."""
  rows = sorted(rows, key=lambda row: row['user_id'])
  index = {item_id: i for i, item_id in enumerate(items)}
  return interactions.Log(
      users=tuple(_text(row['user_id']) for row in rows),
      items=items,
      user=np.repeat(
          np.arange(len(rows), dtype=np.int32),
          [len(row['item_ids']) for row in rows]),
      item=np.array(
          [index[_text(i)] for row in rows for i in row['item_ids']], np.int32),
      timestamp=np.concatenate(
          [row['timestamps'] for row in rows]).astype(np.float64))


def _text(value: bytes | str) -> str:
  return value.decode('utf-8') if isinstance(value, bytes) else str(value)
