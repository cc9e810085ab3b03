"""The config to copy for a catalogue of your own.

    python -m dgr2_jax.main --config=configs/forkme.py \\
        --config.data.path=DIR --workdir=/tmp/mine

DIR holds `items.jsonl` and `sequences.txt` or `interactions.csv`, see
docs/your_data.md; run `python -m dgr2_jax.tools.check_data DIR` first. Copy
this file beside the others, give it your name, and change what is below;
everything else is as in `beauty_small.py`, which explains every field.
`configs/forkme.py:smoke` takes few steps of a tiny model, to see that all runs.
"""

import pathlib
import runpy

import ml_collections

from dgr2_jax.training import sweeps

_BASE = pathlib.Path(__file__).with_name('beauty_small.py')


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """The experiment; `variant` as in `beauty_small.py`."""
  c = runpy.run_path(str(_BASE))['get_config'](variant)

  # Your data.
  c.data.name = 'mine'  # what reports call it
  c.data.min_count = 5  # users and items with fewer purchases are dropped
  c.data.ties = 'file'  # or hash: order of purchases with equal times
  # With kind 'file': lists of your own retriever; '' is DIR/candidates.jsonl.
  c.data.retriever.path = ''
  # Items have ids of 3 codes of 64 each; a level needs no more than items.
  c.semantic_ids.update(levels=3, codes=64, svd_dim=64)

  # What the model reads of an item, and of how many purchases.
  c.prompt.item_fields = ('category', 'brand')
  c.prompt.max_history = 6
  c.prompt.max_prompt = 132  # tokens; `prepare` says if it is too short

  # How large, and how long: for a few hundred items, on two cores.
  c.model.update(num_layers=4, width=80, mlp_dim=216)
  c.ar_sft.update(steps=800, eval_every=400)
  c.ar_rl.update(steps=40, eval_every=20)
  c.cft.update(steps=1200, eval_every=600)
  c.opd.update(steps=40, eval_every=20)
  c.rl.update(steps=60, eval_every=20)
  if 'smoke' in variant:
    sweeps.smoke(c)
  return c


def sweep(variant: str = ''):
  """name -> fields that differ; --print_sweep lists the commands."""
  return sweeps.ablations(get_config(variant))
