"""Amazon Beauty with Qwen3-8B at the paper's hyper-parameters, for a TPU pod.

    python -m dgr2_jax.main --config=configs/beauty_qwen3_8b.py \\
        --config.data.path=DIR_WITH_BEAUTY --config.model.huggingface=QWEN3 \\
        --config.tokenizer.path=QWEN3 --config.prompt.traces.path=TRACES \\
        --config.mid_train.text=TEXT --config.mesh.fsdp=8 --multihost=auto \\
        --workdir=/mnt/shared/beauty_8b

QWEN3 is the checkpoint's directory (docs/design.md, "Hugging Face
checkpoints"), TRACES are reasoning traces that a model wrote (docs/traces.md),
TEXT is a file of general text. On more than sixteen chips lower every stage's
`accumulate`: batch_size / accumulate is a multiple of their number. Candidates
are those of the co-occurrence retriever; GR2's come from the mid-trained model
(docs/method.md).

Values marked "paper" are those of Diffusion-GR2 (arXiv 2607.01170) or GR2
(arXiv 2602.07774), the others are ours: the papers leave them open.
`:published` also takes the paper's form where ours differs by default
(docs/method.md). It was never run from here: it needs accelerators.
"""

import pathlib
import runpy

import ml_collections

from dgr2_jax.training import sweeps

_BASE = pathlib.Path(__file__).with_name('beauty_small.py')


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """The experiment; `variant` is '' or 'published'."""
  if variant not in ('', 'published'):
    raise ValueError(f'configs/beauty_qwen3_8b.py:{variant}: expected '
                     'published or nothing after the colon')
  c = runpy.run_path(str(_BASE))['get_config']()
  c.prompt.update(
      response_format='json',  # paper
      item_fields=('sid', 'title', 'category'),  # paper
      evidence=(),  # paper: none
      max_history=20,
      max_prompt=4096,  # the paper's average 2,215
      max_response=160,  # the paper's average about 130
      pad_multiple=32,
      answer_order='target',  # of requests without a trace
      counterfactuals=0.0,
      traces=dict(path='TRACES', missing='drop'))
  c.prompt.trace.grades = False
  c.tokenizer = dict(kind='huggingface', path='QWEN3', num_brands=0,
                     pad_vocab_to=256)
  c.model = dict(huggingface='QWEN3', dtype='bfloat16', param_dtype='float32',
                 remat='full', unroll_layers=False, canvas_chunk=1,
                 attention='xla')  # auto: splash on TPUs, cuDNN on GPUs
  c.canvas.block_size = 32  # paper
  c.mesh = dict(data=-1, fsdp=8, tensor=1)

  c.recipe = ('mid_train', *c.recipe)  # paper: GR2
  c.mid_train = dict(
      {name: c.ar_sft[name] for name in (
          'schedule', 'weight_decay', 'grad_clip', 'b1', 'b2', 'log_every',
          'keep')},
      max_length=512, held_out=0.02,
      weights=dict(persona=0.243, sequential=0.657, caption=0.049,
                   text=0.05),  # paper: GR2
      text='TEXT', best_metric='logprob', eval_requests=256, head_chunk=32,
      # About ten times all purchases.
      batch_size=128, steps=300, eval_every=100, checkpoint_every=50,
      learning_rate=2e-5, warmup_steps=20)
  supervised = dict(batch_size=128, eval_requests=256, head_chunk=32,
                    reasoning_weight=0.5, answer_weight=1.0)  # paper: l_r < l_o
  # 3 epochs (paper) of the 20,254 requests with a hit.
  c.ar_sft.update(supervised, steps=474, eval_every=158, checkpoint_every=79,
                  learning_rate=1e-5, warmup_steps=20)
  c.cft.update(supervised, steps=474, eval_every=158, checkpoint_every=79,
               learning_rate=1e-5, warmup_steps=20)
  policy = dict(eval_requests=256, head_chunk=32, reasoning_weight=0.5,
                answer_weight=1.0, schedule='constant')  # paper: constant
  c.ar_rl.update(policy, batch_size=64, steps=300, eval_every=100,
                 checkpoint_every=50, learning_rate=5e-7, cft_weight=0.0)
  c.opd.update(policy, batch_size=128,  # paper
               steps=1500,  # paper
               learning_rate=1e-6,  # paper
               teacher='ar', teacher_dtype='bfloat16',  # paper: frozen AR
               eval_every=300, checkpoint_every=100, eval_threshold=0.9)
  c.opd.rollout.update(num_rollouts=4, temperature=1.0,  # paper: G' = 4
                       canvases_per_row=5)  # one of every block
  c.rl.update(policy, batch_size=64, steps=600,  # paper: steps
              learning_rate=5e-7,  # paper
              eval_every=100, checkpoint_every=50,
              clip_low=0.2, clip_high=0.2, kl_weight=0.0)  # paper
  c.rl.rollout.update(num_rollouts=8,  # paper: G
                      canvases_per_row=25)  # five steps a block
  for stage in (c.ar_rl, c.opd, c.rl):
    stage.rollout.max_denoising_steps = 64  # paper, at evaluation
  for stage in (c.ar_rl, c.rl):
    stage.reward.update(format_weight=0.2, invalid=-1.0)  # paper
  for stage in (c.mid_train, c.ar_sft, c.ar_rl, c.cft, c.opd, c.rl):
    # Parts of a batch, one after the other: one request a chip of sixteen.
    stage.accumulate = stage.batch_size // 16
    stage.optimizer = dict(kind='adamw')  # adafactor
    stage.log_every = 5  # when hosts agree on an interruption, too
  c.evaluate.update(batch_size=32, constrained_ar=False)

  if variant == 'published':
    c.canvas.clean_stream = 'block_causal'
    c.cft.ar_weight = 0.0
    c.opd.update(positions='all', elsewhere='none')
    c.rl.update(cft_weight=0.0, ar_weight=0.0)
    # Which tau the paper rolls out at is open.
    c.rl.rollout.update(threshold=0.9, temperature=1.0, refill=1)
  return c


def sweep(variant: str = ''):
  """name -> fields that differ; --print_sweep lists the commands."""
  return sweeps.ablations(get_config(variant))
