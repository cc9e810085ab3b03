r"""Retrievers on Amazon Beauty, over the full catalogue.

    python experiments/retrieval/run.py --data=DIR_WITH_BEAUTY

fits the retrievers that configs/beauty_small.py can choose, lists ten items for
every user's validation and test purchase, and writes retrieval.json and
retrieval.md beside this file. --only=KIND measures one of them anew and keeps
the other rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import runpy
import time
from typing import Any

from absl import logging
import jax
import numpy as np

from dgr2_jax.data import candidates
from dgr2_jax.data import histories as histories_lib
from dgr2_jax.data import interactions
from dgr2_jax.evaluation import environment
from dgr2_jax.retrieval import cooccurrence
from dgr2_jax.retrieval import lists
from dgr2_jax.retrieval import retrievers
from dgr2_jax.semantic_ids import catalogue

HERE = pathlib.Path(__file__).parent
CONFIG = HERE.parents[1] / 'configs' / 'beauty_small.py'
NAMES = {'cooccurrence': 'co-occurrence', 'sasrec': 'SASRec, full softmax',
         'generative': 'generative, beam search'}
METRICS = ('recall@5', 'recall@10', 'ndcg@5', 'ndcg@10')
# Recall@5 and @10 on the test purchases, as published.
PAPER = (
    ('SASRec with cross-entropy, a public rerun', None, .086),
    ('ItemKNN-like, a public rerun', None, .078),
    ('TIGER', None, .065),
    ("GR2's mid-trained model of 8B parameters (arXiv 2602.07774)",
     .0561, .0774))


def measure(kind: str, data: str) -> dict[str, Any]:
  """Fits a retriever: settings, CPU seconds and figures by split."""
  config = runpy.run_path(str(CONFIG))['get_config'](kind)
  config.data.path = data
  dataset = interactions.load_dataset(config.data)
  h = histories_lib.flatten(dataset)
  ids = None
  if kind == 'generative':
    ids = catalogue.build(dataset.items, config.semantic_ids).ids
  users = np.arange(len(h.start))
  start = time.process_time()
  if kind == 'cooccurrence':
    fitted = cooccurrence.fit(dataset, h, config.data.retriever)
    row = {'settings': config.data.retriever.to_dict()}
    listed = lambda positions: cooccurrence.retrieve(
        fitted, users, positions, 10, hits_only=False).candidates
  else:
    retriever = retrievers.make(config.data, h.num_items, ids)
    params, epochs = lists.fit(retriever, h)
    row = {'settings': dataclasses.asdict(retriever.config), 'epochs': epochs,
           'parameters': sum(x.size for x in jax.tree.leaves(params))}
    listed = lambda positions: lists.top(
        retriever, params, h, users, positions, 10)[0]
  row['cpu_seconds'] = time.process_time() - start
  for split, from_end in candidates.FROM_END.items():
    positions = h.length - from_end
    start = time.process_time()
    row[split] = lists.figures(
        listed(positions), h.items[h.start + positions])
    row[f'{split}_cpu_seconds'] = time.process_time() - start
  return {**row, 'environment': environment.environment(
      'jax', 'flax', 'optax', 'numpy'),
          'dataset': {'users': len(users), 'items': h.num_items}}


def table(results: dict[str, Any]) -> str:
  """The text of the Markdown file."""
  number = lambda x: '-' if x is None else f'{x:.4f}'
  first = next(iter(results.values()))
  lines = [
      '# Retrievers on Amazon Beauty', '',
      'Written by run.py: leave-last-out over all '
      f'{first["dataset"]["users"]:,} users and {first["dataset"]["items"]:,} '
      'items but those of the history. Trained on all but the last two '
      'purchases; a test history includes the validation item. One seed. '
      + ', '.join(f'{k} {v}' for k, v in first['environment'].items()) + '.',
      '', 'Training: CPU seconds, with validation after every epoch. Lists: '
      'CPU milliseconds a user.', '',
      '| retriever | epochs | training | lists | validation Recall@10 '
      '| Recall@5 | Recall@10 | NDCG@5 | NDCG@10 |',
      '|---|---|---|---|---|---|---|---|---|']
  for kind, name in NAMES.items():
    if kind not in results:
      continue
    r = results[kind]
    per_user = 1000 * r['test_cpu_seconds'] / r['dataset']['users']
    lines.append(
        f'| {name} | {r.get("epochs", "-")} | {r["cpu_seconds"]:.0f} s '
        f'| {per_user:.1f} ms | {number(r["validation"]["recall@10"])} | '
        + ' | '.join(number(r['test'][metric]) for metric in METRICS) + ' |')
  lines += ['', 'As published, not measured here:', '',
            '| retriever | Recall@5 | Recall@10 |', '|---|---|---|',
            *(f'| {name} | {number(five)} | {number(ten)} |'
              for name, five, ten in PAPER)]
  return '\n'.join(lines) + '\n'


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--data', required=True)
  parser.add_argument('--only', choices=NAMES)
  args = parser.parse_args()
  logging.set_verbosity(logging.INFO)
  logging.use_absl_handler()
  path = HERE / 'retrieval.json'
  for kind in [args.only] if args.only else NAMES:
    row = measure(kind, args.data)
    results = json.loads(path.read_text()) if path.exists() else {}
    results[kind] = row
    path.write_text(json.dumps(results, indent=1) + '\n')
    (HERE / 'retrieval.md').write_text(table(results))
    print(table(results))


if __name__ == '__main__':
  main()
