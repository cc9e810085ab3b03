"""SmolLM2-135M through the recipe: few steps on short prompts, for two cores.

    python -m dgr2_jax.main --config=experiments/smollm2/config.py:CHECKPOINT \\
        --workdir=DIR

`configs/quickstart.py` with a pretrained model, its tokenizer and GR2's json
form, whose words the model knows. CHECKPOINT is what `checkpoint.py` writes.
"""

import pathlib
import runpy

import ml_collections

_BASE = pathlib.Path(__file__).parents[2] / 'configs' / 'quickstart.py'


def get_config(checkpoint: str) -> ml_collections.ConfigDict:
  """The experiment, from a Hugging Face directory."""
  c = runpy.run_path(str(_BASE))['get_config']()
  c.data.embedded.update(num_users=300, num_items=120)
  c.data.update(num_candidates=4, max_train_requests=256)
  c.prompt.update(
      response_format='json', item_fields=('sid', 'category'), evidence=(),
      max_history=2, max_prompt=320, max_response=112, pad_multiple=16,
      counterfactuals=0.0)
  c.prompt.trace.update(facts=('follows',), grades=False)
  c.tokenizer = dict(kind='huggingface', path=checkpoint, num_brands=0,
                     pad_vocab_to=256)
  c.model = dict(huggingface=checkpoint, dtype='float32',
                 param_dtype='float32', remat='none', unroll_layers=False,
                 canvas_chunk=0)
  c.canvas.block_size = 16
  c.recipe = ('ar_sft', 'convert', 'cft')
  for name, steps in (('ar_sft', 5), ('cft', 10)):
    c[name].update(
        batch_size=2, steps=steps, learning_rate=2e-4, warmup_steps=2,
        log_every=1, eval_every=steps, checkpoint_every=steps, keep=1,
        eval_requests=2)
  c.evaluate.update(batch_size=2, thresholds=(0.6,), constrained_ar=False)
  return c
