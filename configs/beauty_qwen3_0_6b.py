"""`beauty_qwen3_8b.py` with Qwen3-0.6B, for a small slice.

    python -m dgr2_jax.main --config=configs/beauty_qwen3_0_6b.py \\
        --config.data.path=DIR_WITH_BEAUTY --config.model.huggingface=QWEN3 \\
        --config.tokenizer.path=QWEN3 --config.prompt.traces.path=TRACES \\
        --config.mid_train.text=TEXT --workdir=/tmp/beauty_0_6b
"""

import pathlib
import runpy

import ml_collections

from dgr2_jax.training import sweeps

_BASE = pathlib.Path(__file__).with_name('beauty_qwen3_8b.py')


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """The experiment; `variant` is '' or 'published'."""
  c = runpy.run_path(str(_BASE))['get_config'](variant)
  c.mesh.fsdp = 1
  # A smaller model bears larger steps. Batches are taken in eight parts.
  for stage in (c.mid_train, c.ar_sft, c.cft):
    stage.update(learning_rate=2 * stage.learning_rate, accumulate=8)
  for stage in (c.ar_rl, c.opd, c.rl):
    stage.update(learning_rate=2 * stage.learning_rate, accumulate=8)
  return c


def sweep(variant: str = ''):
  """name -> fields that differ; --print_sweep lists the commands."""
  return sweeps.ablations(get_config(variant))
