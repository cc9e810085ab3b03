"""Fields of the configs: they are there to be set, and start as defaults."""

import dataclasses
import pathlib
import runpy

from absl import flags
from ml_collections import config_flags
import pytest

from dgr2_jax.retrieval import retrievers
from dgr2_jax.semantic_ids import embeddings
from dgr2_jax.semantic_ids import rqvae
from dgr2_jax.training import validation

ROOT = pathlib.Path(__file__).parents[1]
TRAINED = [('beauty_small', 'sasrec'), ('beauty_small', 'generative'),
           ('quickstart', 'full'), ('quickstart', 'full,sasrec')]


@pytest.mark.parametrize('name, variant', TRAINED)
def test_ids_and_retrievers_are_set_on_the_command_line(name, variant):
  kind = variant.replace('full,', '').replace('full', 'generative')
  given = {
      'semantic_ids.rqvae.steps': 100, 'semantic_ids.rqvae.latent': 8,
      'semantic_ids.rqvae.last_level': 'random',
      'semantic_ids.rqvae.hidden': (64, 32),
      'semantic_ids.rqvae.embeddings.kind': 'npy',
      'semantic_ids.rqvae.embeddings.path': 'e.npy',
      f'data.retriever.{kind}.epochs': 3, f'data.retriever.{kind}.folds': 2,
      f'data.retriever.{kind}.width': 16, 'data.path': 'somewhere'}
  argv = ['main', f'--config={ROOT}/configs/{name}.py:{variant}',
          *(f'--config.{field}={value}' for field, value in given.items())]
  values = flags.FlagValues()
  flag = config_flags.DEFINE_config_file(
      'config', None, '', values, sys_argv=argv)
  values(argv)
  config = flag.value
  validation.check(config)
  found = rqvae.RqVaeConfig.from_config(config.semantic_ids)
  assert (found.steps, found.latent, found.last_level, found.hidden) == (
      100, 8, 'random', (64, 32))
  section = config.data.retriever[kind]
  assert (section.epochs, section.folds, section.width) == (3, 2, 16)


@pytest.mark.parametrize('name, variant', TRAINED)
def test_they_start_as_the_defaults(name, variant):
  config = runpy.run_path(str(ROOT / f'configs/{name}.py'))['get_config'](
      variant)
  section = config.semantic_ids
  bare = rqvae.RqVaeConfig(section.levels, section.codes, section.seed)
  assert rqvae.RqVaeConfig.from_config(section) == bare
  assert embeddings.EmbeddingConfig(
      **section.rqvae.embeddings) == embeddings.EmbeddingConfig()
  retriever = config.data.retriever
  chosen = retrievers.LEARNED[retriever.kind]
  assert dataclasses.asdict(chosen(**retriever[retriever.kind])) == (
      dataclasses.asdict(chosen()))
