"""What the compiled loops do not do: copy the cache, encode the prompt anew.

XLA:CPU copies a cache that a conditional returns, once before it and once in
every branch (`test_the_check_notices...`), so conditionals return new entries,
which are written behind them. Nothing here depends on the platform: the
programs have no copies on CPUs, so none had to be excused. Ahead of time for a
TPU (v5e, libtpu of jax 0.10.2) conditionals have none either; but where layers
are unrolled, a step lays the responses' keys out anew for its dots, heads
before positions, which is XLA's choice of layout and not seen on CPUs.
"""

import re

import jax
import jax.numpy as jnp
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

V = tiny.VOCABULARY
BLOCKS, AR = canvas_lib.CanvasConfig(4), canvas_lib.AUTOREGRESSIVE
ROWS, PROMPT, LENGTH = 3, 37, 52
SHAPE = dict(vocab_size=48, num_layers=3, width=24, num_heads=4,
             num_kv_heads=2, head_dim=6, mlp_dim=28)
# [layers, rows, positions, key heads, head dim]; no other array is as large.
CACHES = {3 * ROWS * size * 2 * 6 for size in (PROMPT, LENGTH)}
# Scores of windows of so many tokens: the only products of the prompt's length.
SCORES = {ROWS * 4 * window * PROMPT for window in (1, 2, 4, 8)}
IN_PLACE = ('parameter', 'get-tuple-element', 'bitcast', 'scatter', 'fusion',
            'dynamic-update-slice', 'while')


def instructions(text, loops=True):
  """(operation, size) of all that a program's loops run, or the rest of it."""
  lines, calls, bodies = {}, {}, set()
  name = None
  for line in text.splitlines():
    if head := re.match(r'(?:ENTRY )?%(\S+) \(.*\{$', line):
      name = head[1]
      lines[name], calls[name] = [], set()
    elif name and (found := re.match(
        r' +(?:ROOT )?%\S+ = (?:\w+\[([\d,]*)\]\S*|\(.*?\)) ([\w-]+)\(', line)):
      if found[1]:  # not a tuple, nor a scalar
        size = int(np.prod([int(n) for n in found[1].split(',')]))
        lines[name].append((found[2], size, line[:200]))
      called = {n for names in re.findall(
          r'(?:calls|body|condition|to_apply|\w+_computations?)='
          r'\{?((?:%[\w.-]+(?:, )?)+)', line)
                for n in re.findall(r'%([\w.-]+)', names)}
      calls[name] |= called
      if found[2] == 'while':
        bodies |= called
  todo = list(bodies)
  while todo:
    new = calls[todo.pop()] - bodies
    bodies |= new
    todo += new
  return [x for name in lines if (name in bodies) == loops
          for x in lines[name]]


def copies(program):
  """Arrays as large as a cache that are no cache, or no longer in place."""
  return [line for operation, size, line in program
          if size in CACHES and operation not in IN_PLACE]


def encodings(program):
  """Products with the prompt's tokens among the queries."""
  return [line for operation, size, line in program
          if operation == 'dot' and size % PROMPT == 0 and size not in SCORES]


def compiled(how=None, draft=None, other=False, batched=True):
  """The optimised program of a batch's loop, or of decoding at once.

  There layers are unrolled: the prefill is no loop, then.
  """
  model = transformer.Transformer(transformer.ModelConfig(
      **SHAPE, unroll_layers=not batched))
  params = transformer.abstract_params(model.config)
  how = dict(how or {})
  how = dict(canvas=how.pop('canvas', BLOCKS), vocabulary=V,
             config=block_decoder.DecodeConfig(max_response=LENGTH, **how))
  rule = commit.Threshold(.9)
  if batched:
    mesh = sharding.make_mesh(dict(data=-1, fsdp=1, tensor=1),
                              jax.devices()[:1])
    with jax.set_mesh(mesh):
      batch = jax.eval_shape(lambda: batching._empty(
          model, ROWS, PROMPT, draft=draft, **how))
      return batching._run.lower(
          model, (params, None), batch, jax.random.key(0), rule, np.int32(ROWS),
          draft=draft, **how).compile().as_text()
  ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  args = (model, params, ints(ROWS, PROMPT), ints(ROWS), ints(ROWS),
          jax.random.key(0))
  if draft is None:
    return block_decoder.decode.lower(*args, rule, **how).compile().as_text()
  verifier = dict(verifier=model, verifier_params=params) if other else {}
  return verification.decode.lower(
      *args, draft=draft, **verifier, **how).compile().as_text()


@pytest.mark.parametrize('options', [
    dict(batched=False),
    dict(how=dict(fused=True)),
    dict(how=dict(canvas=AR)),
    dict(how=dict(temperature=.7), draft=verification.DraftConfig()),
    dict(draft=verification.DraftConfig(lengths=(2, 8))),
    dict(draft=verification.DraftConfig(), other=True, batched=False),
], ids=['blocks-at-once', 'fused', 'ar', 'verify-sampled', 'verify-lengths',
        'verify-other-at-once'])
def test_a_step_copies_no_cache_and_encodes_no_prompt(options):
  text = compiled(**options)
  loop = instructions(text)
  assert not copies(loop)
  assert not encodings(loop)
  # Caches and scores are there, under these sizes.
  assert max(CACHES) in {size for _, size, _ in loop}
  assert SCORES & {size for operation, size, _ in loop if operation == 'dot'}
  if not options.get('batched', True):  # The prefill would be noticed.
    assert encodings(instructions(text, loops=False))


@pytest.mark.parametrize('within', [True, False])
def test_the_check_notices_a_copy_in_a_loop(within):
  line = f'  ROOT %copy.1 = f32[{max(CACHES)},1]{{1,0}} copy(%param)'
  loop, rest = (line, '') if within else ('', line)
  text = f"""%body.1 (param: f32[1]) -> f32[1] {{
{loop}
}}

ENTRY %main (param: f32[1]) -> f32[1] {{
  %while.1 = f32[1]{{0}} while(%param), body=%body.1
{rest}
}}
"""
  assert copies(instructions(text)) == ([line] if within else [])
  assert copies(instructions(text, loops=False)) == ([] if within else [line])


@pytest.mark.skipif(not jax.__version__.startswith('0.10.'),
                    reason='jax 0.12 compiles it without a copy')
def test_the_check_notices_a_cache_that_a_conditional_returns():
  def step(carry, inside):
    cache, i = carry
    write = lambda x: jax.lax.dynamic_update_slice(
        cache, x * jnp.ones((1, 1)), (i, 0))
    even = cache.sum(-1)[i] > 0
    if inside:
      cache = jax.lax.cond(even, lambda: write(1.), lambda: write(cache[0, 0]))
    else:
      cache = write(jax.lax.cond(even, lambda: 1., lambda: cache[0, 0]))
    return cache, i + 1

  for inside in (True, False):
    text = jax.jit(lambda carry, inside=inside: jax.lax.while_loop(
        lambda carry: carry[1] < 9, lambda carry: step(carry, inside), carry),
                   donate_argnums=0).lower(
                       (jnp.zeros((max(CACHES), 1)), 0)).compile().as_text()
    assert bool(copies(instructions(text))) == inside
