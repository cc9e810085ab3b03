"""Small random datasets for tests of retrieval and facts."""

from hypothesis import strategies as st
import numpy as np

from dgr2_jax.data import interactions


def make(seed, num_users=12, num_items=20, longest=9):
  """Random sequences of at least three purchases over a small catalogue."""
  rng = np.random.default_rng(seed)
  items = tuple(
      interactions.Item(
          f'i{i}', f'soap number{i} w{i % 4}',
          ('Root', f'Leaf{i % 5}') if i % 7 else (), f'B{i % 3}' if i % 4
          else '')
      for i in range(num_items))
  # Popular items share many users, so that counts overlap.
  weight = 1 / np.arange(1, num_items + 1)
  sequences = tuple(
      rng.choice(num_items, rng.integers(3, longest + 1), False,
                 weight / weight.sum()).astype(np.int32)
      for _ in range(num_users))
  return interactions.Dataset(
      'toy', items, tuple(f'u{u}' for u in range(num_users)), sequences)


datasets = st.integers(0, 2 ** 20).map(make)


def queries(dataset):
  """Every (user, position) of all splits."""
  return [(u, p) for u, s in enumerate(dataset.sequences)
          for p in range(1, len(s))]
