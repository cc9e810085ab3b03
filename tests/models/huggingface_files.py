"""Tiny Hugging Face checkpoints of every family, and what they should give.

    python -m tests.models.huggingface_files

writes huggingface_golden.json: for each variant the config.json, the tensors'
names and shapes and the logits, all as `transformers` has them. It needs torch
and `transformers`; reading it needs neither, as weights are drawn by name.
"""

import json
import pathlib
import tempfile
import zlib

import numpy as np
import safetensors.numpy

GOLDEN = pathlib.Path(__file__).with_name('huggingface_golden.json')
TOKENS = np.random.RandomState(0).randint(0, 40, (2, 16))
_SHAPE = dict(
    vocab_size=40, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
# Variant -> (model type, changes).
_VARIANTS = {
    'qwen3_tied': ('qwen3', dict(
        head_dim=8, tie_word_embeddings=True,
        rope_parameters={'rope_type': 'default', 'rope_theta': 1e6})),
    'qwen3_untied': ('qwen3', dict(
        head_dim=6, rms_norm_eps=1e-5,
        rope_parameters={'rope_type': 'default', 'rope_theta': 5e6})),
    'qwen2': ('qwen2', dict(
        tie_word_embeddings=True, sliding_window=4, use_sliding_window=False,
        rope_parameters={'rope_type': 'default', 'rope_theta': 1e6})),
    'llama': ('llama', dict(
        num_key_value_heads=4, head_dim=10,
        rope_parameters={'rope_type': 'default', 'rope_theta': 1e4})),
    'smollm2': ('llama', dict(
        tie_word_embeddings=True, rms_norm_eps=1e-5,
        rope_parameters={'rope_type': 'default', 'rope_theta': 1e5})),
}


def weights(shapes):
  """float32 tensors; each a function of its name, whatever numpy's version."""
  tensors = {}
  for name, shape in shapes.items():
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(
        shape).astype(np.float32)
    tensors[name] = (1 + .2 * noise if name.endswith('norm.weight')
                     else .3 * noise)
  return tensors


def flat(config):
  """The config as older versions write it: rope_theta at its top."""
  config = dict(config)
  config['rope_theta'] = config.pop('rope_parameters')['rope_theta']
  return config


def write(directory, config, tensors):
  """Writes a checkpoint of one file."""
  directory.mkdir(parents=True, exist_ok=True)
  (directory / 'config.json').write_text(json.dumps(config))
  safetensors.numpy.save_file(tensors, directory / 'model.safetensors',
                              metadata={'format': 'pt'})
  return directory


def transformers_logits(directory):
  """float32 logits [2, 16, V] of `transformers` on `TOKENS`."""
  import torch
  import transformers

  model = transformers.AutoModelForCausalLM.from_pretrained(
      directory, dtype=torch.float32, attn_implementation='eager')
  with torch.no_grad():
    return model(torch.tensor(TOKENS)).logits.numpy()


def _golden(model_type, changes):
  import transformers

  config = transformers.AutoConfig.for_model(model_type, **(_SHAPE | changes))
  model = transformers.AutoModelForCausalLM.from_config(config)
  shapes = {name: list(x.shape) for name, x in model.state_dict().items()
            if not (config.tie_word_embeddings and name == 'lm_head.weight')}
  with tempfile.TemporaryDirectory() as directory:
    directory = pathlib.Path(directory)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    content = json.loads((directory / 'config.json').read_text())
    write(directory, content, weights(shapes))
    logits = transformers_logits(directory)
  return {'config': content, 'tensors': shapes,
          'logits': np.round(logits.astype(float), 6).tolist()}


if __name__ == '__main__':
  GOLDEN.write_text(json.dumps(
      {name: _golden(*variant) for name, variant in _VARIANTS.items()}) + '\n')
