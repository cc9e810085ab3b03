"""The quickstart in GR2's json form, with reasoning that a model wrote.

    python -m dgr2_jax.main --config=configs/quickstart_traces.py \
        --config.prompt.traces.path=traces.jsonl --workdir=/tmp/quick_traces

docs/traces.md says how to come by traces.jsonl. Requests, semantic ids and how
many purchases a prompt shows are the quickstart's, so its workdir can be asked
for traces. The texts are many times longer than the quickstart's: allow hours
on two cores, or `--config=configs/quickstart_traces.py:smoke`.
"""

import os
import runpy

import ml_collections

from dgr2_jax.training import sweeps


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """The experiment; `variant` is '' or 'smoke'."""
  quickstart = os.path.join(os.path.dirname(__file__), 'quickstart.py')
  c = runpy.run_path(quickstart)['get_config'](variant)
  c.prompt.update(
      response_format='json',
      item_fields=('sid', 'title', 'category', 'brand'),
      evidence=(),  # as in GR2
      max_prompt=1536,
      max_response=384,
      pad_multiple=32,
      answer_order='target',  # of requests without a trace
      counterfactuals=0.0,
      # missing='drop' leaves out requests without a trace.
      traces=dict(path='traces.jsonl', missing='template'))
  c.prompt.trace.grades = False
  c.tokenizer.vocab_size = 1024
  c.canvas.block_size = 32
  c.evaluate.constrained_ar = False  # masks single-token candidates
  return c


def sweep(variant: str = ''):
  """name -> fields that differ; --print_sweep lists the commands."""
  return sweeps.ablations(get_config(variant))
