"""Many requests of many lengths, as a server sees them."""

import functools

import jax
import numpy as np

from dgr2_jax.decoding import batching
from tests.serving.prepared import Request
from tests.serving.prepared import prompts_of
from tests.serving.prepared import requests_of


def test_requests_compile_no_more_than_its_buckets(reranker):
  """Some are asked again, alone; 1,000 are in `decoding/test_batching.py`."""
  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
      lambda name, *_, **__: compiled.append(name)
      if name.endswith('backend_compile_duration') else None)
  rng = np.random.default_rng(0)
  good = requests_of(reranker)
  items = [item.item_id for item in reranker._experiment.data.items]

  def request():
    candidates = good[rng.integers(len(good))].candidates
    history = rng.choice(items, rng.integers(1, 30)).tolist()
    return Request([x for x in history if x not in candidates] or [
        next(x for x in items if x not in candidates)], candidates)

  day = [request() for _ in range(200)]
  ask = functools.partial(reranker.rerank, threshold=.01, batch_size=16)
  answers = ask(day)
  longest = reranker._experiment.config.prompt.max_prompt
  # One a bucket; the empty batch, the step loop and the key.
  assert 0 < len(compiled) <= len(batching.buckets(longest)) + 3
  assert len({len(ids) for ids in prompts_of(reranker, day[:50])}) > 3
  compiled.clear()
  for i in rng.choice(200, 4):
    assert ask([day[i]]) == [answers[i]]
  assert not compiled
