r"""Semantic ids of Amazon Beauty: one choice at a time.

    python experiments/semantic_ids/run.py --data=DIR_WITH_BEAUTY

trains an RQ-VAE for every variant on the texts of items.jsonl, and writes
semantic_ids.json and semantic_ids.md beside this file, next to residual k-means
and, where the directory has them, the ids published with LETTER. With
--embeddings=FILE.npy, or a sentence encoder's directory, these take the place
of TF-IDF, and --name=NAME writes NAME.json and NAME.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time
from typing import Any

from absl import logging
import ml_collections
import numpy as np

from dgr2_jax.data import directory as directory_lib
from dgr2_jax.data import interactions
from dgr2_jax.evaluation import environment
from dgr2_jax.semantic_ids import embeddings as embeddings_lib
from dgr2_jax.semantic_ids import fitting
from dgr2_jax.semantic_ids import last_level
from dgr2_jax.semantic_ids import quality
from dgr2_jax.semantic_ids import residual_kmeans
from dgr2_jax.semantic_ids import rqvae

HERE = pathlib.Path(__file__).parent
SECTION = dict(levels=4, codes=256, svd_dim=128, seed=0)
# Name -> fields of `semantic_ids.rqvae`; the others are the defaults.
_PLAIN = dict(init='random', codebook='gradient', reset_after=0,
              diversity_weight=0., last_level='nearest')
_KMEANS = _PLAIN | dict(init='kmeans')
_EMA = _KMEANS | dict(codebook='ema')
_RESET = {k: v for k, v in _EMA.items() if k != 'reset_after'}
_DIVERSE = {k: v for k, v in _RESET.items() if k != 'diversity_weight'}
DEFAULT = '+ collision-aware last level instead: the default'
VARIANTS = {
    'random init, gradient codebooks': _PLAIN,
    'k-means init': _KMEANS,
    '+ EMA codebooks': _EMA,
    '+ dead-code reset': _RESET,
    '+ diversity loss': _DIVERSE,
    '+ random last level': _DIVERSE | dict(last_level='random'),
    DEFAULT: {},
    'the default with a latent of 8': dict(latent=8),
    'the default with a latent of 32': dict(latent=32),
}
# GR2 (arXiv 2602.07774): uniqueness without and with one choice, as published.
PAPER = (('EMA codebooks', '31.3 % -> 97.5 %'),
         ('random last level', '54.1 % -> 82.8 %'),
         ('all together', '>= 99 %'))


def measure(
    items: list[interactions.Item], embeddings: np.ndarray
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Trains every variant: figures and ids by name.

  Variants that differ in the last level only are one training.
  """
  rows, ids, trained = {}, {}, {}
  for name, fields in VARIANTS.items():
    logging.info('Variant: %s.', name)
    config = rqvae.RqVaeConfig.from_config(
        ml_collections.ConfigDict({**SECTION, 'rqvae': fields}))
    model = rqvae.RqVae(config, embeddings.shape[1])
    same = dataclasses.replace(config, last_level='nearest')
    if same not in trained:
      start = time.process_time()
      params = fitting.train(
          model, fitting.initial_params(model, embeddings), embeddings)
      trained[same] = params, time.process_time() - start
    params, seconds = trained[same]
    fitted = fitting.read_ids(model, params, embeddings)
    rows[name] = {
        'settings': dataclasses.asdict(config), 'cpu_seconds': seconds,
        **quality.report(fitted.ids, config.codes, items, fitted.nearest),
        'reconstruction': fitted.reconstruction}
    ids[name] = fitted.ids
  return rows, ids


def clustered(items: list[interactions.Item], embeddings: np.ndarray,
              section: ml_collections.ConfigDict) -> dict[str, Any]:
  """The figures of residual k-means on the embeddings themselves."""
  start = time.process_time()
  centroids, nearest = residual_kmeans.residual_clusters(
      embeddings, section.levels, section.codes, section.seed)
  seconds = time.process_time() - start
  ids = last_level.collision_aware(
      embeddings, nearest, centroids, section.codes)
  error = lambda ids: float(np.square(embeddings - sum(
      table[code] for table, code in zip(centroids, ids.T))).sum(1).mean())
  return {'cpu_seconds': seconds,
          **quality.report(ids, section.codes, items, nearest),
          'reconstruction': {'nearest': error(nearest), 'ids': error(ids)}}


def published(path: pathlib.Path,
              items: list[interactions.Item]) -> dict[str, Any]:
  """The figures of ids that a file gives, by item."""
  lines = path.read_text(encoding='utf-8').splitlines()
  ids = {row['item_id']: row['sid'] for row in map(json.loads, lines)}
  return quality.report(
      np.array([ids[item.item_id] for item in items], np.int32),
      SECTION['codes'], items)


def table(results: dict[str, Any]) -> str:
  """The text of the Markdown file."""
  percent = lambda x: '-' if x is None else f'{100 * x:.1f}'
  lines = [
      '# Semantic ids of Amazon Beauty', '',
      f'Written by run.py: {results["items"]:,} items, '
      f'{results["distinct"]:,} of them with different embeddings '
      f'({results["embeddings"]}), 4 levels of 256 codes, one seed. '
      + ', '.join(f'{k} {v}' for k, v in results['environment'].items()) + '.',
      '', 'Unique: different ids as a share of the items, in %, before and '
      'after the last level is chosen. Used: codes in use a level, in %. '
      'Error: |e - e\'|^2 of unit embeddings, before / after. Purity: share of '
      'items, among those that share their first one or two codes with others, '
      'whose category path is the commonest there (in brackets: groups filled '
      'at random). CPU: seconds of training and initialisation.', '',
      '| ids | unique before | after | used | perplexity | error '
      '| purity 1 | purity 2 | CPU |',
      '|---|---|---|---|---|---|---|---|---|']
  for name, r in results['rows'].items():
    purity = [f'{percent(p["purity"])} ({percent(p["chance"])})'
              for p in r['purity']['path'][:2]]
    error = (' / '.join(f'{r["reconstruction"][k]:.3f}'
                        for k in ('nearest', 'ids'))
             if 'reconstruction' in r else '-')
    seconds = f'{r["cpu_seconds"]:.0f}' if 'cpu_seconds' in r else '-'
    before = (percent(r['uniqueness_before'][-1]) if 'reconstruction' in r
              else '-')
    lines.append(
        f'| {name} | {before} | {percent(r["uniqueness"])} | '
        + ' '.join(percent(level['used']) for level in r['levels']) + ' | '
        + ' '.join(f'{level["perplexity"]:.0f}' for level in r['levels'])
        + f' | {error} | {" | ".join(purity)} | {seconds} |')
  lines += ['', 'GR2 (arXiv 2602.07774), as published: uniqueness without and '
            'with one choice, of other embeddings, not measured here.', '',
            '| choice | uniqueness |', '|---|---|',
            *(f'| {name} | {figures} |' for name, figures in PAPER), '',
            f'Items with the longest shared prefixes ({DEFAULT}):', '']
  for example in results['examples']:
    lines.append(f'- {example["id"]} {example["title"]}')
    lines += [f'    - {other["id"]} {other["title"]}'
              for other in example['nearest']]
  return '\n'.join(lines) + '\n'


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--data', type=pathlib.Path, required=True)
  parser.add_argument('--embeddings', type=pathlib.Path)
  parser.add_argument('--name', default='semantic_ids')
  args = parser.parse_args()
  logging.set_verbosity(logging.INFO)
  logging.use_absl_handler()
  items = list(directory_lib.read_items(args.data / 'items.jsonl').values())
  source = embeddings_lib.EmbeddingConfig()
  if args.embeddings:
    source = embeddings_lib.EmbeddingConfig(
        'npy' if args.embeddings.is_file() else 'huggingface',
        str(args.embeddings))
  section = ml_collections.ConfigDict(SECTION)
  embeddings = embeddings_lib.embed(items, source, section)
  rows, ids = measure(items, embeddings)
  rows['residual k-means'] = clustered(items, embeddings, section)
  letter = args.data / 'letter_sids.jsonl'
  if letter.exists():
    rows['LETTER, as published'] = published(letter, items)
  results = {
      'items': len(items), 'embeddings': source.kind,
      'distinct': len(np.unique(embeddings.round(6), axis=0)),
      'environment': environment.environment(
          'jax', 'flax', 'optax', 'numpy', 'scikit-learn'), 'rows': rows,
      'examples': quality.examples(ids[DEFAULT], items, 5)}
  text = table(results)
  (HERE / f'{args.name}.json').write_text(json.dumps(results, indent=1) + '\n')
  (HERE / f'{args.name}.md').write_text(text)
  print(text)


if __name__ == '__main__':
  main()
