"""The whole recipe on real Amazon Beauty with a small model, on two cores.

    python -m dgr2_jax.main --config=configs/beauty_small.py \\
        --config.data.path=DIR_WITH_BEAUTY --workdir=/tmp/beauty

DIR_WITH_BEAUTY holds `items.jsonl` and `sequences.txt` (README, "Your data");
for the raw 2014 files set --config.data.source=amazon_raw. What it gave is in
experiments/beauty_small/. `--config=configs/beauty_small.py:sasrec` chooses
another retriever, of `data.retriever.kind`; `:smoke` takes few steps of a tiny
model, to see that everything runs.
"""

import ml_collections

from dgr2_jax.training import sweeps

# Retrievers that are trained within `prepare`: the section of the chosen one.
_TRAINED = dict(
    sasrec=dict(
        epochs=60,  # at most
        patience=3,  # epochs without a better validation
        folds=4,  # models for training lists, each without its users
        validation_users=4000,  # 0 is all
        batch_rows=8,
        learning_rate=2e-3,
        width=64,
        layers=2,
        heads=2,
        dropout=0.5,
        history=50),  # the latest purchases
    generative=dict(
        epochs=15,
        patience=3,
        folds=4,
        validation_users=2000,
        batch_rows=32,
        learning_rate=3e-3,
        weight_decay=0.1,
        width=96,
        layers=3,
        heads=4,
        mlp=256,
        history=20,
        item_dropout=0.2,  # share of a history's items left out, every epoch
        beams=20))  # prefixes that the search keeps


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """The experiment; `variant` is a retriever, smoke, or both with a comma."""
  variants, retriever = sweeps.parse_variant(
      variant, ('smoke',), ('cooccurrence', *_TRAINED))
  retriever = retriever or 'cooccurrence'
  c = ml_collections.ConfigDict()
  c.seed = 0  # of everything: data, noise, order, initial weights
  # Devices by axis; -1 takes the rest. One device is a mesh of one.
  c.mesh = dict(data=-1, fsdp=1, tensor=1)
  c.profile_steps = ()  # (5, 7): a profile of these steps, for XProf

  c.data = dict(
      source='directory',  # embedded | amazon_raw | tfds
      path='',  # --config.data.path=...
      name='beauty',
      ties='file',  # or hash: order of same-day purchases
      seed=c.get_ref('seed'),
      min_count=5,  # k-core
      check_counts=True,  # amazon_*: compare with the published counts
      keep_misses=False,  # evaluate users whose target was not retrieved, too
      num_candidates=10,
      max_train_requests=0,  # 0 is all
      retriever=dict(
          # cooccurrence | sasrec | generative | file: candidates.jsonl. A
          # trained one has a section of its name, see _TRAINED.
          kind=retriever,
          path='',
          window=20,
          distance_decay=0.45,
          backward=0.2,
          recency_decay=1.4,
          source_power=0.2,
          target_power=0.05,
          backoff=1e-4))
  if retriever in _TRAINED:
    c.data.retriever[retriever] = _TRAINED[retriever]
  c.semantic_ids = dict(
      levels=4, codes=256, svd_dim=128, seed=c.get_ref('seed'),
      rqvae=dict(  # without the section: residual k-means
          embeddings=dict(
              kind='tfidf',  # npy: a matrix; huggingface: a sentence encoder
              path=''),  # of the matrix, or the encoder's directory
          hidden=(256,),  # widths of the encoder; the decoder mirrors them
          latent=4,
          init='kmeans',  # random
          codebook='ema',  # gradient
          reset_after=50,  # batches without use, of a code; 0 is never
          commitment_weight=0.25,
          diversity_weight=0.1,
          last_level='collision_aware',  # nearest | random: ids may be shared
          batch_size=512,
          steps=600,
          learning_rate=3e-3))
  c.boosted = dict(
      seed=c.get_ref('seed'),
      folds=5,  # for the orders of training requests
      iterations=150,
      learning_rate=0.1,
      leaves=8,
      min_samples_leaf=100,
      request_share=0.5,
      fact_share=0.5,
      user_power=0.5)

  c.prompt = dict(
      response_format='compact',  # json: GR2's published form
      item_fields=('category', 'brand'),  # sid, title
      # Facts by name: dgr2_jax/data/facts.py; a + joins them into one token.
      evidence=('category+brand+follows', 'score+popularity',
                'bought_with_last+bought_with_recent',
                'bought_with_history+similarity',
                'bought_after_last+bought_after_second_last'),
      max_history=6,
      max_prompt=132,
      max_response=36,
      pad_multiple=12,
      answer_order='teacher',  # target: GR2's target-first order
      counterfactuals=0.5,  # responses to other grades, a share
      trace=dict(
          pattern=('last_category', 'brand', 'wanted_category'),
          facts=('category', 'brand', 'bought_with_history'),
          combine_facts=True,
          show_index=False,
          grades=True))
  c.tokenizer = dict(
      kind='bpe',  # huggingface: tokenizer.json in `path`
      path='',
      vocab_size=300,
      num_brands=255,
      pad_vocab_to=64)

  c.model = dict(
      num_layers=4,
      width=80,
      num_heads=4,
      num_kv_heads=2,
      head_dim=20,
      mlp_dim=216,
      rope_theta=1e4,
      qk_norm=True,
      attention_bias=False,
      tie_embeddings=True,
      dtype='float32',
      param_dtype='float32',
      remat='none',  # full | dots
      unroll_layers=True,
      canvas_chunk=0)
  c.canvas = dict(
      block_size=12,
      clean_stream='token_causal',  # block_causal: the paper's
      alignment='shifted')  # same_position

  training = dict(
      warmup_steps=50,
      schedule='cosine',  # constant
      weight_decay=0.01,
      grad_clip=1.0,
      b1=0.9,
      b2=0.98,
      log_every=20,
      checkpoint_every=100,
      keep=2,
      best_metric='ndcg@3',
      eval_requests=256,  # validation requests decoded, 0 is all
      head_chunk=0)  # response tokens that meet the LM head at a time, 0: all
  weights = dict(reasoning_weight=0.9, answer_weight=1.0, ar_weight=0.0)
  noise = dict(full_block_prob=0.0, min_ratio=0.0, mask_pairs=1)
  policy = dict(
      training, batch_size=16, warmup_steps=5, schedule='constant',
      weight_decay=0.0, log_every=5, checkpoint_every=20,
      # Validated on sampled responses: their mean reward is what RL maximises.
      eval_requests=512, best_metric='reward',
      rollout=dict(
          num_rollouts=8,
          updates=1,  # from one round of rollouts
          threshold=0.9,
          temperature=1.0,
          top_k=0,
          top_p=1.0,
          max_denoising_steps=64,
          canvases='all',  # one: a random step of every block
          canvases_per_row=6,  # about what most responses take
          refill=1),  # rounds of prompts decoded for groups that differ
      reward=dict(
          condition='diffusion_gr2',  # gr2
          format_weight=0.2,
          invalid=-1.0,
          overlong_buffer=0))
  surrogate = dict(
      **weights, **noise, clip_low=0.2, clip_high=0.2, kl_weight=0.0,
      cft_weight=0.0)  # of the supervised objective, mixed in

  c.recipe = ('ar_sft', 'ar_rl', 'convert', 'cft', 'opd', 'rl')
  c.ar_sft = dict(training, **weights, **noise, batch_size=32, steps=1500,
                  learning_rate=3e-3, eval_every=750)
  c.ar_rl = dict(policy, **surrogate, steps=40, learning_rate=1e-4,
                 eval_every=20)
  c.ar_rl.reward.condition = 'gr2'
  c.cft = dict(training, **weights, **noise, batch_size=32, steps=1800,
               learning_rate=3e-3, eval_every=900)
  # NDCG can rise while parallel decoding breaks: the reward sees both.
  c.cft.update(eval_threshold=0.9, best_metric='reward')
  c.cft.ar_weight = 0.5
  c.opd = dict(
      policy, **weights, **noise, steps=60, learning_rate=1e-4, eval_every=30,
      # The paper's; self: the student's clean stream; or a stage, also another
      # run's: DIR/checkpoints/STAGE, whose model may be larger
      teacher='ar',
      divergence='forward',  # reverse | none
      positions='nothing_right',  # all: the paper's | corrected
      elsewhere='cross_entropy',  # none
      teacher_top_k=0,  # 0 is the full vocabulary
      cft_weight=0.0)  # of the CFT objective, mixed in
  c.opd.schedule = 'cosine'
  c.opd.rollout.update(num_rollouts=4, temperature=0.5, canvases='one',
                       canvases_per_row=3)  # one of every block
  c.rl = dict(policy, **surrogate, steps=100, learning_rate=5e-5,
              eval_every=50)
  c.rl.warmup_steps = 20  # Adam's first steps are its least certain
  # Where many tokens are committed together they clash: that teaches most.
  c.rl.rollout.update(threshold=0.4, temperature=0.5)
  # Keeps what the others taught; the paper's RL has no such term.
  c.rl.update(cft_weight=1.0, ar_weight=0.5)
  # Half as many requests as are decoded: those whose responses differ.
  c.rl.batch_size = 8
  c.rl.rollout.refill = 2

  c.evaluate = dict(
      batch_size=64,
      thresholds=(1.0, 0.9, 0.6, 0.4),
      max_denoising_steps=64,
      # Drafts of so many denoising steps, verified by the clean stream where
      # that is an AR model; windows begin at a pivot or on the training grid.
      verify=dict(steps=1, window='pivot', threshold=0.9),
      constrained_ar=True,  # a row of the AR model with used candidates masked
      bootstrap_resamples=2000,
      num_examples=5,
      timing_batch_size=1,
      timing_requests=24,
      timing_repetitions=3)
  if 'smoke' in variants:
    sweeps.smoke(c)
  return c


def sweep(variant: str = ''):
  """name -> fields that differ; --print_sweep lists the commands."""
  return sweeps.ablations(get_config(variant))
