"""Lists of candidates by the mid-trained language model of a run.

    python -m dgr2_jax.tools.retrieve --workdir=DIR --output=candidates.jsonl

DIR holds a complete `mid_train` (`configs/quickstart.py:full`). Prints Recall
and NDCG over the whole catalogue; a further run, or another model, re-ranks the
lists with --config.data.retriever.kind=file (`data/candidates.py`). There are
none for training requests, whose purchases the model has seen: training lists
come from the retrievers `generative` or `sasrec`, which are cross-fitted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import json
import pathlib
import sys

from absl import logging
import numpy as np

from dgr2_jax.data import candidates
from dgr2_jax.data import histories as histories_lib
from dgr2_jax.evaluation import tables
from dgr2_jax.retrieval import cooccurrence
from dgr2_jax.retrieval import lists
from dgr2_jax.retrieval import mid_trained
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import workdir as workdir_lib

_STAGE = 'mid_train'


def retrieve(workdir: pathlib.Path, output: pathlib.Path, count: int,
             beams: int) -> tables.Table:
  """Writes the lists.

  Args:
    workdir: of the run.
    output: file to write.
    count: items of a list; 0 is as many as the run's requests have.
    beams: see `mid_trained.MidTrainedRetriever`.

  Returns:
    Recall and NDCG by split.

  Raises:
    ValueError: no mid-training, not complete, or items share an id.
  """
  config = workdir_lib.read_config(workdir)
  if output.is_dir() or not output.absolute().parent.is_dir():
    raise ValueError(f'--output={output}: expected a file in a directory that '
                     'exists.')
  if _STAGE not in config.recipe:
    raise ValueError(f'{workdir}: {_STAGE} is not in its recipe '
                     f'({", ".join(config.recipe)}).')
  experiment = experiment_lib.Experiment.here(config, workdir)
  params = experiment.restore(_STAGE)
  data = experiment.data
  dataset = data.dataset
  count = count or config.data.num_candidates
  retriever = mid_trained.MidTrainedRetriever(
      experiment.model, experiment.vocabulary, data.template,
      len(dataset.items), config.mid_train.max_length, beams)
  histories = histories_lib.flatten(dataset)
  cooccurrence.check_enough_items(
      histories.length.max() - 1, count, len(dataset.items))
  lines, rows = [], []
  for split, from_end in candidates.FROM_END.items():
    users = np.flatnonzero(histories.length > from_end)
    positions = histories.length[users] - from_end
    logging.info('%s: %d lists.', split, len(users))
    listed, _ = lists.top(
        retriever, params, histories, users, positions, count)
    figures = lists.figures(
        listed, histories.items[histories.start[users] + positions])
    rows.append((tables.Cell(split), tables.Cell(str(len(users))),
                 *(tables.Cell(f'{x:.4f}') for x in figures.values())))
    lines += [json.dumps({
        'user_id': dataset.users[user], 'split': split,
        'candidates': [dataset.items[i].item_id for i in found if i >= 0]})
              for user, found in zip(users, listed.tolist())]
  workdir_lib.write_text(output, '\n'.join(lines) + '\n')
  return tables.Table(
      'Retrieval', ('split', 'lists', *figures), tuple(rows))


def main(argv: Sequence[str] | None = None) -> None:
  """Retrieves; what users can mend is one line on stderr and exit code 1."""
  parser = argparse.ArgumentParser(
      description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--workdir', type=pathlib.Path, required=True)
  parser.add_argument('--output', type=pathlib.Path, required=True)
  parser.add_argument('--count', type=int, default=0,
                      help="items of a list (default: as the run's requests)")
  parser.add_argument('--beams', type=int, default=20,
                      help='of the search (default: 20)')
  args = parser.parse_args(argv)
  if args.count < 0 or args.beams < 1:
    parser.error('--count and --beams: expected positive numbers')
  logging.set_verbosity(logging.INFO)
  try:
    found = retrieve(args.workdir.absolute(), args.output, args.count,
                     args.beams)
  except (ValueError, OSError) as e:
    sys.exit(f'error: {e}')
  print(tables.as_text(found))


if __name__ == '__main__':
  main()
