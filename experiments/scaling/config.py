"""What `scaling.py` plans: a Qwen3 at the paper's shape on so many chips.

    python -m dgr2_jax.tools.plan \\
        --config=experiments/scaling/config.py:8b,16 \\
        --topology=v5p:2x2x4 --stages=rl

`beauty_qwen3_8b.py` with parameters split over all chips, one request a chip at
a time, and prompts of the paper's average length.
"""

import pathlib
import runpy

import ml_collections

from dgr2_jax.training import abstract

_BASE = pathlib.Path(__file__).parents[2] / 'configs' / 'beauty_qwen3_8b.py'


def get_config(variant: str = '8b,8') -> ml_collections.ConfigDict:
  """The experiment; `variant` is a size of `abstract.QWEN3` and the chips."""
  size, chips = variant.split(',')
  config = runpy.run_path(str(_BASE))['get_config']()
  config.data.path = 'planned'
  abstract.take_shape(config, size)
  config.prompt.max_prompt = 2215  # paper
  config.mesh = dict(data=1, fsdp=-1, tensor=1)
  for stage in ('cft', 'opd', 'rl'):
    config[stage].accumulate = max(1, config[stage].batch_size // int(chips))
  # A row holds all canvases of a response: ten steps a block, or one of each.
  config.rl.rollout.canvases_per_row = 50
  config.opd.rollout.canvases_per_row = 5
  return config
