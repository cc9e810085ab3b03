"""Continuous batching: a row that is done takes the next request.

    waiting: f g h ...            row 0   a a a a a a a d d d g g g g ...
                                  row 1   b b b e e e e e e e f f f f ...
                                  row 2   c c c c . h h h h ...

Two programs take turns on one donated batch:

    admit   prefills a few prompts, padded to the next of a few lengths, and
            writes them into rows that are done
    run     decodes all rows until so many are done

The host looks at the batch once a `run`, not once a step. A response is a
function of its prompt, its example id and the seed, as in `block_decoder`:
neither neighbours nor the order of arrival change it.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
import numpy as np

from dgr2_jax.decoding import block_decoder
from dgr2_jax.decoding import commit
from dgr2_jax.decoding import verification
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import transformer
from dgr2_jax.models import vocabulary as vocabulary_lib

SMALLEST_BUCKET = 32
_STATIC = ('model', 'vocabulary', 'canvas', 'config', 'draft', 'verifier')


class Prompt(NamedTuple):
  """A request: its prompt, int [p], and the example id that seeds sampling."""
  tokens: np.ndarray
  example_id: int = 0


class Response(NamedTuple):
  """The request's place in the order of arrival, and its responses.

  `rollout` holds NumPy arrays without the request axis: [G, L] and [G].
  """
  index: int
  rollout: block_decoder.Rollout


def buckets(longest: int, smallest: int = SMALLEST_BUCKET) -> tuple[int, ...]:
  """Lengths that prompts are padded to: 2^i and 3 * 2^i, up to `longest`.

  A prompt becomes at most half as long again, and there are about
  2 log2(longest / smallest) of them, each of which is a compiled program.
  """
  sizes = [smallest]
  while sizes[-1] < longest:
    sizes.append(sizes[-1] * 3 // 2)
    sizes.append(sizes[-2] * 2)
  return (*(size for size in sizes if size < longest), longest)


def decode(model: transformer.Transformer, params: Any,
           prompts: Iterable[Prompt], *, rule: commit.Rule,
           vocabulary: vocabulary_lib.Vocabulary,
           canvas: canvas_lib.CanvasConfig, config: block_decoder.DecodeConfig,
           mesh: Mesh, rows: int, max_prompt: int,
           draft: verification.DraftConfig | None = None, seed: int = 0,
           admit: int | None = None,
           verifier: transformer.Transformer | None = None,
           verifier_params: Any = None) -> Iterator[Response]:
  """Decodes requests as they come, each as `block_decoder.decode` would.

  Greedily, equal prompts in flight are decoded once.

  Args:
    model: the decoder.
    params: its parameters, on `mesh`.
    prompts: any number; up to `rows` are taken ahead of those that decode.
    rule: which tokens a step commits; of no account if drafts are verified.
    vocabulary: special ids.
    canvas: block size and rules; B = 1 decodes autoregressively.
    config: length, rollouts and sampling.
    mesh: of devices; rows are split over `data` and `fsdp`.
    rows: N, requests that decode together; rounded up to what they are split
      over.
    max_prompt: room for prompt tokens in a row's cache.
    draft: how drafts are made if they are to be verified.
    seed: of sampling.
    admit: prompts that are prefilled together, which wait for as many rows to
      be done; rounded like `rows`. None is a quarter of the rows.
    verifier: another model that verifies drafts; see `verification.decode`.
    verifier_params: its parameters, on `mesh`.

  Yields:
    Responses in the order in which they are done.

  Raises:
    ValueError: arguments that do not fit together, or a prompt that is empty or
      longer than `max_prompt`.
  """
  if draft is None:
    block_decoder.check(rule, canvas, config)
  else:
    verification.check(canvas, config, draft, own_verifier=verifier is None)
  if draft is None and verifier is not None:
    raise ValueError('a verifier needs drafts, got draft=None')
  for name, value in (('rows', rows), ('admit', 1 if admit is None else admit),
                      ('max_prompt', max_prompt)):
    if value < 1:
      raise ValueError(f'{name}={value} must be at least 1')
  split = mesh.shape['data'] * mesh.shape['fsdp']
  rows = _multiple(rows, split)
  admit = min(_multiple(admit or max(rows // 4, 1), split), rows)
  how = dict(vocabulary=vocabulary, canvas=canvas, config=config, draft=draft,
             verifier=verifier)
  return _decode(model, (params, verifier_params), iter(prompts), rule, how,
                 mesh, rows, max_prompt, seed, admit)


def _decode(model, params, prompts: Iterator[Prompt], rule, how, mesh,
            rows: int, max_prompt: int, seed: int,
            admit: int) -> Iterator[Response]:
  """The host's loop; see `decode`."""
  sizes = buckets(max_prompt)
  key = jax.random.key(seed)
  with jax.set_mesh(mesh):
    batch = _empty(model, rows, max_prompt, **how)
  arrived, more = 0, True
  asked = {}  # work in flight -> the requests it is for, several if equal
  waiting = collections.deque()  # (work, prompt)
  owner = [None] * rows  # the work that a row does
  answered = []

  def take(count: int) -> None:
    """Lets `count` prompts wait, if there are so many more.

    Of prompts that are decoded already, at most `rows` are taken at a time.
    """
    nonlocal arrived, more
    limit = arrived + count + rows
    while more and len(waiting) < count and arrived < limit:
      prompt = next(prompts, None)
      if prompt is None:
        more = False
        return
      if not 0 < len(prompt.tokens) <= max_prompt:
        raise ValueError(f'prompt {arrived} has {len(prompt.tokens)} tokens: '
                         f'expected 1 to {max_prompt}')
      work = arrived
      if not how['config'].temperature:
        work = np.asarray(prompt.tokens, np.int32).tobytes()
      if work not in asked:
        waiting.append((work, prompt))
      asked.setdefault(work, []).append(arrived)
      arrived += 1

  take(rows)
  while True:
    free = [row for row in range(rows) if owner[row] is None]
    # A last, smaller group: nobody else is waiting for its prefill.
    while waiting and (len(free) >= admit or len(free) >= len(waiting)):
      group = [waiting.popleft() for _ in range(min(admit, len(waiting)))]
      for row, (work, _) in zip(free, group):
        owner[row] = work
      with jax.set_mesh(mesh):
        batch = _admit(model, params, batch, key, *_padded(
            [prompt for _, prompt in group], free, rows, admit, sizes), **how)
      free = free[len(group):]
    if len(free) == rows:
      yield from answered
      if not more:
        return
      answered = []
      take(rows)
      continue
    # If nobody waits any more, all are decoded to their end.
    wanted = admit if more else min(admit, len(waiting)) or rows
    with jax.set_mesh(mesh):
      batch, done, rollout = _run(
          model, params, batch, key, rule,
          np.int32(min(len(free) + wanted, rows)), **how)
    # Now the device is busy: time for everything else.
    yield from answered
    take(rows)
    done, rollout = jax.device_get((done, rollout))
    answered = []
    for row in np.flatnonzero(done):
      if owner[row] is not None:
        mine = jax.tree.map(lambda x, row=row: x[row], rollout)
        answered += [Response(index, mine) for index in asked.pop(owner[row])]
        owner[row] = None


@flax.struct.dataclass
class _Batch:
  """What stays on the device.

  Attributes:
    state: of all rows; those that decode nothing are done.
    example_id: int32 [N].
    own: the drafter's cache, where another model verifies.
  """
  state: block_decoder.State
  example_id: jax.Array
  own: canvas_lib.Cache | None = None


def _begin(model, params, prompt, prompt_length, example_id, key, *, verifier,
           draft, config, **how) -> _Batch:
  """The prefill; `params` are the model's and the verifier's."""
  begin, own = block_decoder.begin, None
  if draft is not None:
    begin = functools.partial(verification.begin, draft=draft)
  if verifier is not None:
    own, _ = block_decoder.prefill(
        model, params[0], prompt, prompt_length, config)
  judge = (model, params[0]) if verifier is None else (verifier, params[1])
  state, _ = begin(*judge, prompt, prompt_length, example_id, key,
                   config=config, **how)
  if verifier is not None:  # two prefills
    state = state.replace(calls=state.calls + 1)
  return _Batch(state, example_id, own)


@functools.partial(jax.jit, static_argnames=('rows', 'max_prompt', *_STATIC))
def _empty(model, rows: int, max_prompt: int, *, verifier=None,
           **how) -> _Batch:
  """A batch whose rows are all done."""
  ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
  params = tuple(m and transformer.abstract_params(m.config)
                 for m in (model, verifier))
  batch = jax.eval_shape(
      functools.partial(_begin, model, verifier=verifier, **how), params,
      ints((rows, max_prompt)), ints((rows,)), ints((rows,)),
      jax.random.key(0))
  batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch)
  state = batch.state.replace(done=jnp.ones_like(batch.state.done))
  return _placed(batch.replace(state=state))


@functools.partial(
    jax.jit, static_argnames=_STATIC, donate_argnames=('batch',))
def _admit(model, params, batch: _Batch, key, prompt, prompt_length, example_id,
           rows, **how) -> _Batch:
  """Prefills prompts [K, p] and writes them into `rows` [K]; N is nowhere."""
  new = _begin(model, params, prompt, prompt_length, example_id, key, **how)

  def put(old, new):
    return old.at[rows].set(new, mode='drop')

  def put_prompt(old, new):
    # Of the responses' keys nothing is seen before it is written.
    return old.replace(
        prompt_length=put(old.prompt_length, prompt_length),
        prompt=jax.tree.map(
            lambda old, new: old.at[:, rows, :prompt.shape[1]].set(
                new, mode='drop'), old.prompt, new.prompt))

  state = jax.tree.map(put, batch.state.replace(cache=None),
                       new.state.replace(cache=None))
  state = state.replace(cache=put_prompt(batch.state.cache, new.state.cache))
  own = None if batch.own is None else put_prompt(batch.own, new.own)
  return _placed(_Batch(state, put(batch.example_id, example_id), own))


@functools.partial(
    jax.jit, static_argnames=_STATIC, donate_argnames=('batch',))
def _run(model, params, batch: _Batch, key, rule, wanted, *, vocabulary, canvas,
         config, draft, verifier=None
         ) -> tuple[_Batch, jax.Array, block_decoder.Rollout]:
  """Decodes until `wanted` rows are done; which, and what they hold."""
  keys = block_decoder.keys_of(key, batch.example_id, config.num_rollouts)
  mine = model, params[0]
  judge = mine if verifier is None else (verifier, params[1])

  def step(carry):
    state, own = carry
    if draft is None:
      return block_decoder.step(*mine, state, keys, rule, vocabulary, canvas,
                                config), own
    return verification.step(mine, judge, state, own, keys, vocabulary, canvas,
                             config, draft)

  state, own = jax.lax.while_loop(
      lambda carry: carry[0].done.all(-1).sum() < wanted, step,
      (batch.state, batch.own))
  return (_placed(batch.replace(state=state, own=own)), state.done.all(-1),
          block_decoder.rollout_of(state, vocabulary))


def _placed(batch: _Batch) -> _Batch:
  """Splits the rows over the mesh, always alike."""
  def split(tree, axis):
    spec = P(*[None] * axis, ('data', 'fsdp'))
    return jax.tree.map(
        lambda x: jax.lax.with_sharding_constraint(x, spec), tree)

  def split_cache(cache):
    return canvas_lib.Cache(split(cache.prompt, 1), split(cache.clean, 1),
                            split(cache.prompt_length, 0))

  state = split(batch.state.replace(cache=None), 0)
  return _Batch(state.replace(cache=split_cache(batch.state.cache)),
                split(batch.example_id, 0),
                batch.own and split_cache(batch.own))


def _padded(prompts: list[Prompt], free: list[int], rows: int, admit: int,
            sizes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
  """K prompts, their lengths, ids and rows; those left over go nowhere."""
  longest = max(len(p.tokens) for p in prompts)
  size = next(size for size in sizes if size >= longest)
  prompt = np.zeros((admit, size), np.int32)
  length, example_id = np.ones(admit, np.int32), np.zeros(admit, np.int32)
  where = np.full(admit, rows, np.int32)
  for i, (p, row) in enumerate(zip(prompts, free)):
    prompt[i, :len(p.tokens)] = p.tokens
    length[i], example_id[i], where[i] = len(p.tokens), p.example_id, row
  return prompt, length, example_id, where


def _multiple(count: int, of: int) -> int:
  return -(-count // of) * of
