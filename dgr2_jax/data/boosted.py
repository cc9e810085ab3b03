"""A gradient-boosted ranker on the bucketed facts.

What a user would pick instead of a language model, and the teacher of the
order that one learns. The score of a candidate is a sum of shallow trees over
its own facts; the list enters through the loss alone, the listwise softmax

    L = - sum over requests of w log softmax(s)[target]

boosted with Newton steps: per candidate, gradient y - p and curvature
p (1 - p), one scikit-learn regression tree an iteration. (Measured on Amazon
Beauty: a classifier of single candidates is clearly worse.) Order within equal
scores is the retriever's.

w = (requests of the user)^-user_power: evaluation has one request a user,
training many from the users with long histories.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

from ml_collections import config_dict
import numpy as np
from sklearn import tree

from dgr2_jax.data import requests as requests_lib

# Added to the curvature: keeps Newton steps finite for sure candidates.
_DAMPING = 1e-2
# Lower edges of grades 1 and up, as probabilities of being the target; ten
# equal candidates have .1 each.
GRADE_EDGES = (.05, .1, .18, .3)
NUM_GRADES = len(GRADE_EDGES) + 1


def default_config() -> config_dict.ConfigDict:
  """Returns parameters chosen on the validation users of Amazon Beauty."""
  return config_dict.ConfigDict(dict(
      iterations=150,
      learning_rate=0.1,
      leaves=8,
      min_samples_leaf=100,  # candidates
      request_share=0.5,  # of the requests, drawn for every tree
      fact_share=0.5,  # of the facts, drawn for every split
      user_power=0.5,
      folds=5,  # of `cross_fitted_scores`
      seed=0,
  ))


@dataclasses.dataclass(frozen=True)
class BoostedRanker:
  """A fitted ranker: trees over facts, and the factor of their sum."""
  trees: tuple[tree.DecisionTreeRegressor, ...]
  learning_rate: float

  def scores(self, requests: Sequence[requests_lib.Request]) -> np.ndarray:
    """Scores candidates: float64 [n, C], higher is better."""
    levels = _levels(requests)
    flat = levels.reshape(-1, levels.shape[-1])
    total = np.zeros(len(flat))
    for fitted in self.trees:
      total += self.learning_rate * fitted.predict(flat)
    return total.reshape(levels.shape[:2])


def _levels(requests: Sequence[requests_lib.Request]) -> np.ndarray:
  """The facts of requests: float32 [n, C, F]."""
  if not requests:
    raise ValueError('the boosted ranker got no requests')
  return np.stack([r.facts for r in requests]).astype(np.float32)


def _parameters(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
  """`default_config` with the fields of `config` put in."""
  parameters = default_config()
  parameters.update(config)
  return parameters


def fit(
    requests: Sequence[requests_lib.Request], config: config_dict.ConfigDict
) -> BoostedRanker:
  """Fits the ranker; the same requests and seed give the same ranker.

  Args:
    requests: training requests; those without their target teach nothing and
      are left out.
    config: fields of `default_config`, absent ones as there.

  Raises:
    ValueError: no request has its target among the candidates.
  """
  c = _parameters(config)
  requests = [r for r in requests if r.target in r.candidates]
  levels = _levels(requests)  # [n, C, F]
  n, num_candidates, num_facts = levels.shape
  target = np.stack([r.candidates == r.target for r in requests])  # [n, C]
  users = np.array([r.user for r in requests])
  _, user, count = np.unique(users, return_inverse=True, return_counts=True)
  weight = count[user] ** -float(c.user_power)
  weight /= weight.mean()

  rng = np.random.default_rng(c.seed)
  score = np.zeros((n, num_candidates))
  trees = []
  for _ in range(c.iterations):
    p = np.exp(score - score.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    curvature = p * (1 - p) + _DAMPING
    drawn = np.sort(rng.choice(
        n, max(1, round(n * c.request_share)), replace=False))
    fitted = tree.DecisionTreeRegressor(
        max_leaf_nodes=c.leaves,
        min_samples_leaf=c.min_samples_leaf,
        max_features=c.fact_share,
        random_state=int(rng.integers(2 ** 31)))
    fitted.fit(
        levels[drawn].reshape(-1, num_facts),
        ((target - p) / curvature)[drawn].ravel(),
        sample_weight=(curvature * weight[:, None])[drawn].ravel())
    score += c.learning_rate * fitted.predict(
        levels.reshape(-1, num_facts)).reshape(score.shape)
    trees.append(fitted)
  return BoostedRanker(tuple(trees), c.learning_rate)


def orders(scores: np.ndarray) -> np.ndarray:
  """Candidate positions by score, best first: int64 [n, C]."""
  return np.argsort(-scores, axis=1, kind='stable')


def grades(scores: np.ndarray) -> np.ndarray:
  """How well candidates match, 0 to NUM_GRADES - 1: int64 [n, C].

  A grade is a level of the listwise probability softmax(scores).
  """
  p = np.exp(scores - scores.max(axis=1, keepdims=True))
  return np.searchsorted(
      GRADE_EDGES, p / p.sum(axis=1, keepdims=True), side='right')


def cross_fitted_scores(
    requests: Sequence[requests_lib.Request], config: config_dict.ConfigDict
) -> np.ndarray:
  """Scores training requests by rankers that have not seen their users.

  Args:
    requests: n training requests.
    config: fields of `default_config`, absent ones as there.

  Returns:
    float64 [n, C], higher is better.

  Raises:
    ValueError: fewer users than folds, or fewer than two folds.
  """
  c = _parameters(config)
  users, user = np.unique([r.user for r in requests], return_inverse=True)
  if not 2 <= c.folds <= len(users):
    raise ValueError(
        f'config.boosted.folds is {c.folds}: expected 2 to the number of '
        f'training users, {len(users)}')
  fold_of_user = np.random.default_rng(c.seed).permutation(len(users)) % c.folds
  fold = fold_of_user[user]
  scores = np.zeros((len(requests), len(requests[0].candidates)))
  for k in range(c.folds):
    held = np.flatnonzero(fold == k)
    ranker = fit([requests[i] for i in np.flatnonzero(fold != k)], c)
    scores[held] = ranker.scores([requests[i] for i in held])
  return scores
