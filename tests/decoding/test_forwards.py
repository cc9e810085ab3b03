"""Forwards a response, counted while the program runs."""

import jax
import numpy as np
import pytest

from dgr2_jax.decoding import batching
from dgr2_jax.decoding import block_decoder
from dgr2_jax.decoding import commit
from dgr2_jax.decoding import verification
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import transformer
from dgr2_jax.training import sharding
from tests.models import tiny

LENGTH, B = 12, 4
COUNT = [0]


class Counted(transformer.Transformer):
  """Counts every forward that a device runs."""

  def hidden(self, *args, **options):
    jax.debug.callback(lambda: COUNT.__setitem__(0, COUNT[0] + 1))
    return super().hidden(*args, **options)


def steps_and_commits(call, shifted):
  """Denoising steps, and commit passes, of a response's calls [L].

  Shifted, a block's seed comes with the commit pass of the block before.
  """
  blocks = [row[row < block_decoder.NEVER] for row in call.reshape(-1, B)]
  steps = sum(len(set((row[1:] if shifted else row).tolist()))
              for row in blocks)
  return steps, sum(len(row) > 0 for row in blocks) - 1


WAYS = {
    'ar': dict(canvas=canvas_lib.AUTOREGRESSIVE),
    'blocks': dict(canvas=canvas_lib.CanvasConfig(B)),
    'blocks, same position': dict(canvas=canvas_lib.CanvasConfig(
        B, 'block_causal', 'same_position')),
    'fused': dict(canvas=canvas_lib.CanvasConfig(B), fused=True),
    'verify': dict(draft=verification.DraftConfig(steps=2)),
    'verify, another model': dict(draft=verification.DraftConfig(), other=True),
}


@pytest.mark.parametrize('name', WAYS)
def test_forwards_are_those_of_the_formula(name):
  way = dict(WAYS[name])
  draft, other = way.pop('draft', None), way.pop('other', False)
  canvas = way.pop('canvas', canvas_lib.CanvasConfig(B))
  network, params = tiny.model()
  model = Counted(network.config)
  batch = tiny.batch(n=2)
  verifier = dict(verifier=model, verifier_params=jax.tree.map(
      lambda x: 1.02 * x, params)) if other else {}
  for n in range(2):
    prompt = batch['prompt'][n, :int(batch['prompt_length'][n])]
    COUNT[0] = 0
    (_, rollout), = batching.decode(
        model, params, [batching.Prompt(np.asarray(prompt))],
        rule=commit.Threshold(.3), vocabulary=tiny.VOCABULARY, canvas=canvas,
        config=block_decoder.DecodeConfig(max_response=LENGTH, **way),
        mesh=sharding.make_mesh(dict(data=1, fsdp=1, tensor=1),
                                jax.devices()[:1]),
        rows=1, max_prompt=9, draft=draft, **verifier)
    jax.effects_barrier()
    call, length = rollout.call[0], int(rollout.length[0])
    steps, commits = steps_and_commits(call, canvas.shifted)
    counted = COUNT[0]
    assert counted == rollout.calls[0]
    if draft is not None:  # Each verification gave one token at least.
      verifications = len(set(call[1:length].tolist()))
      # Another model reads the prompt, too; its commits are not the drafter's.
      want = 1 + other + verifications * (draft.steps + 1 + other)
    elif canvas.block_size == 1:
      want = length
    elif name == 'fused':
      want = 1 + len(set(call[call < block_decoder.NEVER].tolist()) - {0})
    else:
      want = 1 + steps + commits
    assert counted == want
