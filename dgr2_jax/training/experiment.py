"""What every stage needs: data, model, vocabulary, mesh, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import itertools
import pathlib
from typing import Any

import jax
import ml_collections
import numpy as np

from dgr2_jax.data import parsing
from dgr2_jax.data import pipeline
from dgr2_jax.data import prepare
from dgr2_jax.data import prompts
from dgr2_jax.data import tokens
from dgr2_jax.decoding import block_decoder
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import huggingface
from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib
from dgr2_jax.training import checkpoints as checkpoints_lib
from dgr2_jax.training import sharding
from dgr2_jax.training import teachers
from dgr2_jax.training import workdir as workdir_lib


class MissingStageError(ValueError):
  """A stage needs what an earlier stage has not left."""


class Experiment:
  """What every stage needs; built once from the config and `prepare`'s files.

  Attributes:
    config: the whole config.
    workdir: the working directory.
    data: what `prepare` left.
    mesh: of all devices; that of the config unless another is given.
    vocabulary: special ids.
    model: the student's decoder, and that of the stages before it.
    canvas: the student's block size and rules.
    parser: of the response form.
  """

  def __init__(self, config: ml_collections.ConfigDict, workdir: pathlib.Path,
               mesh: jax.sharding.Mesh | None = None):
    self.config = config
    self.workdir = workdir
    self.mesh = mesh or sharding.make_mesh(config.mesh)
    self.canvas = canvas_lib.CanvasConfig(**config.canvas)
    self.data = prepare.load(config, workdir / 'data')
    if self.data.response_length % self.canvas.block_size:
      raise ValueError(
          f'responses are padded to {self.data.response_length} tokens, not a '
          f'multiple of canvas.block_size={self.canvas.block_size}; change '
          'prompt.pad_multiple or canvas.block_size')
    tokenizer = self.data.tokenizer
    self.vocabulary = vocabulary_lib.Vocabulary(
        size=tokenizer.vocab_size, mask_id=tokenizer.mask_id,
        eos_id=tokenizer.eos_id,
        banned=tuple(np.flatnonzero(tokenizer.banned).tolist()))
    self.model = transformer.Transformer(huggingface.model_config(
        config.model, tokenizer.vocab_size))
    self.parser = parsing.Parser(
        tokenizer, config.prompt.response_format, config.data.num_candidates)

  @functools.cached_property
  def teacher(self) -> transformer.Transformer:
    """The decoder of OPD's teacher; see `teachers.model`."""
    return teachers.model(self.config, self.model.config)

  @classmethod
  def here(cls, config: ml_collections.ConfigDict, workdir: pathlib.Path,
           mesh: jax.sharding.Mesh | None = None) -> Experiment:
    """Of a run that may have trained on other devices than are here.

    Args:
      config: of the run.
      workdir: of the run.
      mesh: of devices; without it as much like the run's as there can be.

    Raises:
      workdir.WorkdirError: its config lacks a field, or has one too many.
    """
    try:
      return cls(config, workdir, mesh or sharding.mesh_here(config.mesh))
    except (AttributeError, KeyError, TypeError) as e:
      raise workdir_lib.WorkdirError(
          f'{workdir}/config.json: written by another version, or edited: '
          f'{e}') from e

  def initial_params(self) -> Any:
    """Those of `config.model.huggingface` or random ones, on the mesh."""
    if directory := self.config.model.get('huggingface'):
      return self._pretrained_params(directory)
    init = functools.partial(transformer.init, self.model.config)
    with jax.set_mesh(self.mesh):
      return jax.jit(init, out_shardings=self._shardings(self.model.config))(
          jax.random.key(self.config.seed))

  def _pretrained_params(self, directory: str) -> Any:
    """A checkpoint's parameters, with rows for the tokens it doesn't know."""
    # Its dependency is optional.
    from dgr2_jax.models import huggingface_weights

    rows = huggingface.read_config(directory).vocab_size
    tokenizer = self.data.tokenizer
    known = np.setdiff1d(np.flatnonzero(~tokenizer.banned), tokenizer.new_ids)
    if known[-1] >= rows:
      raise ValueError(
          f'config.tokenizer.path has a token of id {known[-1]}, but '
          f'config.model.huggingface={directory} only {rows} rows: expected '
          'the tokenizer of that model.')
    stored = dataclasses.replace(self.model.config, vocab_size=rows)
    params = huggingface_weights.load(
        directory, stored, self._shardings(stored))
    resize = functools.partial(
        vocabulary_lib.resize, size=tokenizer.vocab_size,
        new=tokenizer.new_ids, known=known,
        key=jax.random.key(self.config.seed))
    tables, shardings = (
        {k: v for k, v in tree.items() if k in vocabulary_lib.TABLES}
        for tree in (params, self._shardings(self.model.config)))
    with jax.set_mesh(self.mesh):
      return params | jax.jit(resize, out_shardings=shardings)(tables)

  def _shardings(self, config: transformer.ModelConfig,
                 rules: sharding.Rules = transformer.RULES) -> Any:
    """Where the parameters of a model live."""
    return sharding.param_shardings(
        self.mesh, transformer.abstract_params(config), rules)

  def restore(self, stage: str, dtype: str | None = None,
              rules: sharding.Rules = transformer.RULES) -> Any:
    """The best parameters that a complete stage left, as `dtype`."""
    checkpoints = self._checkpoints(stage)
    if checkpoints is None or not checkpoints.is_complete():
      damaged = '; '.join(checkpoints.faults) if checkpoints else ''
      raise MissingStageError(
          f'{self.workdir / "checkpoints" / stage} holds no complete stage'
          f'{damaged and f" ({damaged})"}; run dgr2_jax.main with '
          f'--stage={stage} first, or all stages without --stage')
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(
            x.shape, dtype or x.dtype, sharding=s),
        transformer.abstract_params(self.model.config),
        self._shardings(self.model.config, rules))
    return checkpoints.restore_best(abstract)[1]

  def fingerprint(self, stage: str) -> str:
    """What tells the weights of a complete stage from others; '' without any.
    """
    checkpoints = self._checkpoints(stage)
    return checkpoints.fingerprint() if checkpoints else ''

  def before(self, stage: str) -> str:
    """The stage of the recipe whose weights `stage` starts from."""
    recipe = tuple(self.config.recipe)
    return recipe[recipe.index(stage) - 1]

  def origin(self, stage: str) -> str:
    """The complete stage that made the weights which `stage` left.

    Another one where validation preferred those that the stage began with.
    """
    while (stage not in (self.config.recipe[0], 'convert')
           and self._checkpoints(stage).kept_start()):
      stage = self.before(stage)
    return stage

  def candidate_ids(self) -> tuple[int, ...]:
    """The candidates' tokens of the compact form; none in the json form."""
    if self.config.prompt.response_format != prompts.COMPACT:
      return ()
    return tuple(self.data.tokenizer.id(tokens.candidate(i + 1))
                 for i in range(self.config.data.num_candidates))

  def train_batches(self, batch_size: int, files: Sequence[pathlib.Path],
                    whole: bool = False):
    """An endless dataset of training batches, by step.

    Args:
      batch_size: rows over all hosts.
      files: of records.
      whole: whether this host has all rows, or its share.
    """
    share = (0, 1) if whole else sharding.host_share(self.mesh)
    return pipeline.train_batches(
        files, batch_size, self.data.prompt_length, self.data.response_length,
        self.config.seed, *share)

  def _checkpoints(self, stage: str) -> checkpoints_lib.Checkpoints | None:
    path = self.workdir / 'checkpoints' / stage
    return checkpoints_lib.Checkpoints(
        path, keep=1, read_only=True) if path.exists() else None

  def eval_batches(self, split: str, batch_size: int, requests: int = 0):
    """The first batches of a split, `requests` or a few more (0: all)."""
    batches = pipeline.eval_batches(
        self.data.record_file(split), batch_size, self.data.prompt_length,
        self.data.response_length, process_index=0, process_count=1)
    if requests:
      batches = itertools.islice(batches, -(-requests // batch_size))
    return list(batches)

  def decode_config(self) -> block_decoder.DecodeConfig:
    """Greedy decoding at evaluation."""
    return block_decoder.DecodeConfig(
        max_response=self.data.response_length,
        max_denoising_steps=self.config.evaluate.max_denoising_steps)
