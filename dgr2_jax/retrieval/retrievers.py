"""Which retriever a config names.

    config.data.retriever = dict(kind='sasrec', ..., sasrec=dict(width=128))

A section of a kind's name holds what differs from the defaults of its config
class; it may be absent. Fields beside the sections are the co-occurrence
retriever's, which also makes the lists that a file lacks.
"""

from __future__ import annotations

from ml_collections import config_dict
import numpy as np

from dgr2_jax.retrieval import cooccurrence
from dgr2_jax.retrieval import generative
from dgr2_jax.retrieval import sasrec
from dgr2_jax.retrieval import training

# Trained within `prepare`, by name.
LEARNED = {'sasrec': sasrec.SasRecConfig,
           'generative': generative.GenerativeConfig}
KINDS = ('cooccurrence', 'file', *LEARNED)


def check(section: config_dict.ConfigDict) -> None:
  """Checks `config.data.retriever`.

  Raises:
    ValueError: an unknown kind; or a field is unknown or wrong, also in the
      section of a kind that is not chosen.
  """
  if section.kind not in KINDS:
    raise ValueError(f'config.data.retriever.kind is {section.kind!r}: '
                     f'expected one of {", ".join(KINDS)}')
  known = {*cooccurrence.default_config(), *LEARNED}
  if unknown := sorted(set(section) - known):
    raise ValueError(f'config.data.retriever.{unknown[0]} is unknown: expected '
                     f'one of {", ".join(sorted(known))}')
  for kind in LEARNED:
    _learned_config(section, kind, seed=0)


def _learned_config(section: config_dict.ConfigDict, kind: str,
                    seed: int) -> training.TrainingConfig:
  try:
    return LEARNED[kind](**{'seed': seed, **section.get(kind, {})})
  except TypeError as e:
    raise ValueError(f'config.data.retriever.{kind}: a field too many, or no '
                     f'section ({e})') from e


def make(config: config_dict.ConfigDict, num_items: int,
         semantic_ids: np.ndarray | None) -> training.Retriever:
  """The learned retriever that `config.data` names, untrained.

  Args:
    config: the section `data`: `seed`, and `retriever` with a kind of
      `LEARNED`.
    num_items: I.
    semantic_ids: int [I, L], unique; for 'generative'.

  Raises:
    ValueError: a bad field, or semantic ids that are missing or not unique.
  """
  kind = config.retriever.kind
  learned = _learned_config(config.retriever, kind, config.seed)
  if kind == 'sasrec':
    return sasrec.SasRecRetriever(learned, num_items)
  if semantic_ids is None:
    raise ValueError("config.data.retriever.kind is 'generative': it needs "
                     'semantic ids')
  return generative.GenerativeRetriever(learned, semantic_ids)
