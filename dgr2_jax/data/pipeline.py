"""Batches from record files, by Grain.

    records -> pad -> shuffle (anew every epoch) -> repeat -> batch -> host

The step number is the only state: `train_batches(...)[step]` is a function of
(file, seed, step), so resuming needs nothing but the step. With K hosts, host k
gets the rows k N/K to (k + 1) N/K of every global batch of N rows; the global
batch doesn't depend on K:

    shuffled   0 1 2 3 | 4 5 6 7 | ...         N = 4
    K = 2      0 1      4 5                     host 0
                   2 3      6 7                 host 1

Packed rows of several tasks are shuffled task by task and interleaved in the
proportion of their weights, which makes a row's task a function of the step.

Nothing random is drawn here but the order. Masks are drawn on the device from
(seed, step, example_id), so they depend neither on hosts nor on batch order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import os

import grain
import numpy as np

from dgr2_jax.data import records

Batch = dict[str, np.ndarray]


def padded_length(lengths: Sequence[int], multiple: int) -> int:
  """The longest of `lengths`, rounded up to a multiple."""
  return -(-max(lengths) // multiple) * multiple


def train_batches(
    record_files: Sequence[str | os.PathLike],
    batch_size: int,
    prompt_length: int,
    response_length: int,
    seed: int,
    process_index: int,
    process_count: int) -> grain.MapDataset:
  """An endless dataset of training batches, indexed by step.

  Args:
    record_files: written by `records.write`; shuffled together.
    batch_size: N, over all hosts.
    prompt_length: P, tokens.
    response_length: L, tokens.
    seed: of the order.
    process_index: this host, from zero.
    process_count: hosts, K.

  Returns:
    A dataset whose element `step` is this host's rows (n = N/K) of a batch:
    prompt int32 [n, P] (padded on the right), prompt_length int32 [n], response
    int32 [n, 1, L] (EOS repeated to the end), response_length int32 [n, 1]
    (through the first EOS), is_answer bool [n, 1, L] (false after the first
    EOS), supervised_from int32 [n, 1], example_id int32 [n].

  Raises:
    ValueError: N isn't a multiple of K, or a record is longer than P or L.
    interactions.DataError: a record file lacks its statistics.
  """
  rows = grain.MapDataset.concatenate([
      _source(file, prompt_length, response_length) for file in record_files])
  return _host_batches(rows.seed(seed).shuffle().repeat(), batch_size,
                       process_index, process_count)


def mixed_batches(
    rows: Sequence[np.ndarray],
    weights: Sequence[float],
    batch_size: int,
    seed: int,
    process_index: int,
    process_count: int) -> grain.MapDataset:
  """An endless dataset of batches of packed rows, indexed by step.

  Args:
    rows: a task's rows each, int32 [R, 3, T], see `mid_training.pack`.
    weights: of the tasks, adding up to 1.
    batch_size: see `train_batches`, as the rest.
    seed: of the order.
    process_index: this host, from zero.
    process_count: hosts, K.

  Returns:
    A dataset whose element `step` is this host's rows of a batch, see
    `packed_fields`.

  Raises:
    ValueError: N isn't a multiple of K.
  """
  tasks = [grain.MapDataset.source(task).seed(seed + k).shuffle().repeat()
           for k, task in enumerate(rows)]
  mixed = grain.MapDataset.mix(tasks, weights).map(packed_fields)
  return _host_batches(mixed, batch_size, process_index, process_count)


def packed_fields(rows: np.ndarray) -> Batch:
  """The arrays of packed rows [..., 3, T], each [..., T].

  Returns:
    tokens int32; start int32, where the token's example begins, -1 in padding;
    weight float32, of the token in the loss.
  """
  tokens, start, weight = np.moveaxis(np.asarray(rows), -2, 0)
  return {'tokens': tokens, 'start': start,
          'weight': weight.astype(np.float32)}


def packed_batches(
    rows: np.ndarray, batch_size: int) -> Iterator[Batch]:
  """Packed rows once, in order, whole batches on every host.

  Args:
    rows: int32 [R, 3, T].
    batch_size: N; the last batch is filled up.

  Yields:
    As `packed_fields`; nothing has a weight in the rows that fill up.
  """
  for first in range(0, len(rows), batch_size):
    wanted = np.arange(first, first + batch_size)
    batch = packed_fields(rows[np.minimum(wanted, len(rows) - 1)])
    batch['weight'] *= (wanted < len(rows))[:, None]
    yield batch


def _host_batches(
    rows: grain.MapDataset, batch_size: int, process_index: int,
    process_count: int) -> grain.MapDataset:
  # Consecutive host batches make up a global batch.
  batches = rows.batch(_host_size(batch_size, process_count))
  return batches[process_index::process_count]


def _host_size(batch_size: int, process_count: int) -> int:
  """n = N / K."""
  if batch_size % process_count:
    raise ValueError(
        f'batch_size is {batch_size}: expected a multiple of the '
        f'{process_count} hosts.')
  return batch_size // process_count


def eval_batches(
    record_file: str | os.PathLike,
    batch_size: int,
    prompt_length: int,
    response_length: int,
    process_index: int,
    process_count: int) -> Iterator[Batch]:
  """All records of a file once, in order; arguments as in `train_batches`.

  Yields:
    Batches as of `train_batches` and `valid`, bool [n]: false in the rows that
    fill up the last batch, which repeat the last record. Every host gets the
    same number of batches.

  Raises:
    ValueError: see `train_batches`.
    interactions.DataError: see `train_batches`.
  """
  rows = _source(record_file, prompt_length, response_length)
  n = _host_size(batch_size, process_count)
  for first in range(0, len(rows), batch_size):
    wanted = np.arange(n) + first + process_index * n
    batch = [rows[int(i)] for i in np.minimum(wanted, len(rows) - 1)]
    yield {
        **{key: np.stack([row[key] for row in batch]) for key in batch[0]},
        'valid': wanted < len(rows)}


def _source(
    record_file: str | os.PathLike, prompt_length: int, response_length: int
) -> grain.MapDataset:
  """Padded rows in the order of the file."""
  statistics = records.read_statistics(record_file)
  for name, longest, length in (
      ('prompt', statistics.max_prompt, prompt_length),
      ('response', statistics.max_response, response_length)):
    if longest > length:
      raise ValueError(
          f'{record_file} has a {name} of {longest} tokens: expected at most '
          f'{length}.')

  def pad(data: bytes) -> Batch:
    record = records.Record.from_bytes(data)
    p, l = len(record.prompt), len(record.response)
    prompt = np.full(prompt_length, statistics.pad_id, np.int32)
    prompt[:p] = record.prompt
    # A block that EOS falls into is filled with EOS.
    response = np.full((1, response_length), record.response[-1], np.int32)
    response[0, :l] = record.response
    is_answer = np.zeros((1, response_length), bool)
    is_answer[0, :l] = record.is_answer
    return {
        'prompt': prompt,
        'prompt_length': np.int32(p),
        'response': response,
        'response_length': np.array([l], np.int32),
        'is_answer': is_answer,
        'supervised_from': np.array([record.supervised_from], np.int32),
        'example_id': np.int32(record.example_id),
    }

  source = grain.sources.ArrayRecordDataSource(os.fspath(record_file))
  return grain.MapDataset.source(source).map(pad)
