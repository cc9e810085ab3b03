"""A language model as a judge of reasoning: what it is asked, what it answers.

Of a pair of responses to one request, by re-rankers A and B, a judge is asked
four questions:

    score A, score B      the four axes of Diffusion-GR2's evaluation
    prefer 1 or 2         with A shown first, and again with B shown first

It sees what the re-rankers saw, neither their names nor what was bought. A
preference counts where both orders give it; a judge that prefers whatever
stands first so calls every pair a tie, and `statistics` shows that it does:

    order_agreement   pairs where the two orders agree
    first_preferred   of the preferences, those for what stood first; .5 without
                      a bias
    kappa             Cohen's, between two judges' verdicts on the same pairs

How Diffusion-GR2 (arXiv 2607.01170) words its questions is not said; these are
ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import collections
import dataclasses
import itertools
import json
from typing import Any

import numpy as np

from dgr2_jax.data import parsing
from dgr2_jax.data import tokens
from dgr2_jax.data import traces
from dgr2_jax.evaluation import intervals
from dgr2_jax.evaluation import paper
from dgr2_jax.evaluation import tables

# Axes and their lowest and highest scores.
AXES = {'grounding': (1, 5), 'consistency': (1, 5), 'flow': (1, 5),
        'identifiers': (0, 1)}
A, B, TIE = 'A', 'B', 'tie'
VERDICTS = (A, B, TIE)
# What is asked of a pair: scores of A and of B, preference in both orders.
QUESTIONS = ('score_A', 'score_B', 'prefer_AB', 'prefer_BA')
_SHOWN = {'1': 0, '2': 1}  # preferences, by the place of the response

_SYSTEM = (
    'You are an expert in online retail who judges the reasoning of '
    're-rankers. A re-ranker is shown what a shopper bought, oldest first, and '
    'candidates in the order of a retriever; it reasons, and then puts the '
    'candidates into a new order. ')
_SCORE = _SYSTEM + (
    'Score one response:\n'
    'grounding, 1 to 5: what it says of purchases and candidates is so, and '
    'nothing is made up\n'
    'consistency, 1 to 5: the new order follows from the reasoning\n'
    'flow, 1 to 5: the reasoning goes from the history to the choice without '
    'gaps or repetition\n'
    'identifiers, 0 or 1: every product, category, brand and candidate number '
    'that it names is one of the request\n'
    'Reply with one JSON object and nothing else: {"grounding": 1-5, '
    '"consistency": 1-5, "flow": 1-5, "identifiers": 0-1}')
_PREFER = _SYSTEM + (
    'Compare two responses to the same request by their reasoning: is it '
    'grounded in the request, does the order follow from it, does it read '
    'well? Neither length nor the order in which they are shown counts. Reply '
    'with one JSON object and nothing else: {"preference": "1"}, '
    '{"preference": "2"} or {"preference": "tie"}')


@dataclasses.dataclass(frozen=True)
class Pair:
  """A request and the responses of A and B, lines of `outcomes`."""
  request: Mapping[str, Any]
  responses: tuple[Mapping[str, Any], Mapping[str, Any]]


def pairs(requests: Sequence[Mapping[str, Any]],
          a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]],
          count: int, seed: int) -> list[Pair]:
  """Draws pairs of responses; those without any reasoning are left out.

  Args:
    requests: lines of requests.jsonl, n.
    a: lines of A's responses, of the same requests.
    b: lines of B's.
    count: pairs to draw, or as many as there are; 0 is all.
    seed: of the draw.

  Raises:
    ValueError: there are no such pairs.
  """
  able = [Pair(request, (x, y)) for request, x, y in zip(
      requests, a, b, strict=True)
          if x['explanation'].strip() and y['explanation'].strip()]
  if not able:
    raise ValueError('no request has reasoning in both files: expected '
                     'responses of two language models.')
  drawn = np.random.default_rng(seed).permutation(len(able))
  return [able[i] for i in drawn[:count or None]]


def messages(pair: Pair, question: str) -> list[dict[str, str]]:
  """One of `QUESTIONS`, as messages of a chat."""
  kind, _, whose = question.partition('_')
  shown = [pair.responses['AB'.index(letter)] for letter in whose]
  lines = ['Purchases, oldest first:']
  cites = any(tokens.SID_BEGIN in x['explanation'] for x in pair.responses)
  lines += [_item(item, cites) for item in pair.request['history']]
  lines.append('Candidates, in the order of the retriever:')
  lines += [f'Candidate {number}: {_item(item, cites)}' for number, item in
            enumerate(pair.request['candidates'], 1)]
  for number, response in enumerate(shown, 1):
    name = 'Response' if len(shown) == 1 else f'Response {number}'
    order = ', '.join(str(position + 1) for position in response['order'])
    if response['failure'] != parsing.VALID:
      order = 'none that can be used'  # not the fallback, which it didn't write
    lines += [f'{name}, reasoning: {_quoted(response["explanation"])}',
              f'{name}, new order: {order}']
  # Lone surrogates, which JSON can spell, have no UTF-8 form.
  user = '\n'.join(lines).encode('utf-8', 'replace').decode()
  return [{'role': 'system', 'content': _SCORE if kind == 'score' else _PREFER},
          {'role': 'user', 'content': user}]


def _item(item: Mapping[str, Any], cites: bool) -> str:
  """An item in a line; its texts are quoted, so they can't pass for more."""
  fields = (('title', item['title']),
            ('categories', ' > '.join(item['categories'])),
            ('brand', item['brand']))
  parts = [item['sid']] if cites else []
  parts += [f'{name}: {_quoted(text)}' for name, text in fields if text]
  parts += list(itertools.starmap(
      traces.in_words, item.get('facts', {}).items()))
  return ', '.join(parts)


def _quoted(text: str) -> str:
  return json.dumps(text, ensure_ascii=False)


def read(question: str, content: str) -> dict[str, float] | str | None:
  """Reads a judge's answer.

  Args:
    question: one of `QUESTIONS`.
    content: a JSON object; thinking before it and text around it are
      overlooked.

  Returns:
    Scores by axis, or a preference of `VERDICTS`; None for anything else.
  """
  text = content.rpartition(tokens.THINK_END)[2]
  try:
    value = json.loads(text[text.find('{'):text.rfind('}') + 1])
  except (ValueError, RecursionError):
    return None
  if not isinstance(value, dict):
    return None
  kind, _, whose = question.partition('_')
  if kind == 'prefer':
    said = str(value.get('preference')).strip().lower()
    return whose[_SHOWN[said]] if said in _SHOWN else (
        TIE if said == TIE else None)
  scores = {}
  for axis, (low, high) in AXES.items():
    score = value.get(axis)
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not (
        low <= score <= high):
      return None
    scores[axis] = float(score)
  return scores


def verdict(first: str, second: str) -> str:
  """The verdict of both orders: a preference that they share, or a tie."""
  return first if first == second else TIE


def statistics(answers: Sequence[Mapping[str, Any]], *, seed: int,
               resamples: int = 2000) -> dict[str, Any]:
  """What a judge says of all pairs.

  Args:
    answers: by pair, what `read` gave by question; an answer that could not be
      had is missing or None.
    seed: of the bootstrap.
    resamples: of the bootstrap.

  Returns:
    Counts of verdicts over the pairs with preferences in both orders, how the
    orders agree, and mean scores with paired intervals of B - A. What no answer
    tells is None.
  """
  both = [(x['prefer_AB'], x['prefer_BA']) for x in answers
          if x.get('prefer_AB') and x.get('prefer_BA')]
  counts = collections.Counter(itertools.starmap(verdict, both))
  scored = [(x['score_A'], x['score_B']) for x in answers
            if x.get('score_A') and x.get('score_B')]
  result = {
      'pairs': len(answers), 'compared': len(both), 'scored': len(scored),
      'verdicts': {name: counts[name] for name in VERDICTS},
      'order_agreement': _share([x == y for x, y in both]),
      # In the first order A stands first, in the second B.
      'first_preferred': _share([
          said == first for x, y in both
          for said, first in ((x, A), (y, B)) if said != TIE]),
      'preferred_b_over_a': None, 'axes': None}
  if both:
    signs = [(v == B) - (v == A) for v in itertools.starmap(verdict, both)]
    result['preferred_b_over_a'] = {
        'mean': float(np.mean(signs)), 'interval': intervals.bootstrap(
            signs, seed=seed, resamples=resamples).tolist()}
  if scored:
    a, b = (np.array([[s[axis] for axis in AXES] for s in side])
            for side in zip(*scored))
    bounds = intervals.paired_bootstrap(b, a, seed=seed, resamples=resamples)
    result['axes'] = {
        axis: {A: float(a[:, i].mean()), B: float(b[:, i].mean()),
               'interval': bounds[:, i].tolist()}
        for i, axis in enumerate(AXES)}
  return result


def agreement(one: Sequence[Mapping[str, Any]],
              other: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """How two judges agree on the pairs that both compared.

  Args:
    one: as for `statistics`.
    other: the same of the other judge, on the same pairs.

  Returns:
    `pairs`, `agreement` and `kappa`; None for no pairs, or for a kappa where
    chance alone would make them agree.
  """
  verdicts = [tuple(verdict(x['prefer_AB'], x['prefer_BA']) for x in both)
              for both in zip(one, other, strict=True)
              if all(x.get(q) for x in both for q in QUESTIONS[2:])]
  return {'pairs': len(verdicts),
          'agreement': _share([x == y for x, y in verdicts]),
          'kappa': kappa(verdicts)}


def kappa(verdicts: Sequence[tuple[str, str]]) -> float | None:
  """Cohen's kappa (1960) of two judges: (agreement - chance) / (1 - chance).

  None where there are no verdicts or chance is 1.
  """
  if not verdicts:
    return None
  n = len(verdicts)
  one, other = (collections.Counter(side) for side in zip(*verdicts))
  chance = sum(one[v] * other[v] for v in one) / n**2
  observed = sum(x == y for x, y in verdicts) / n
  return None if chance == 1 else (observed - chance) / (1 - chance)


def _share(values: Sequence[bool]) -> dict[str, Any] | None:
  """A share with its interval."""
  if not values:
    return None
  rate = float(np.mean(values))
  return {'n': len(values), 'rate': rate,
          'interval': list(intervals.wilson(rate, len(values)))}


def table(judges: Sequence[Mapping[str, Any]]) -> tables.Table:
  """Judges side by side, the published figures in the last column.

  Args:
    judges: of each the `model`'s name and what `statistics` returns.
  """
  cell, number = tables.Cell, tables.number

  def share(found, neutral=None):
    if found is None:
      return cell(tables.NONE)
    low, high = found['interval']
    return cell(number(found['rate']), f'{number(low)}–{number(high)}',
                neutral is not None and not low <= neutral <= high)

  def axis(judge, name):
    found = (judge['axes'] or {}).get(name)
    if found is None:
      return cell(tables.NONE)
    return cell(
        f'{number(found["A"], 2)} / {number(found["B"], 2)}',
        tables.interval(found['interval']),
        tables.excludes_zero(found['interval']))

  def preferred(judge):
    found = judge['preferred_b_over_a']
    if found is None:
      return cell(tables.NONE)
    return cell(tables.signed(found['mean']),
                tables.interval(found['interval']),
                tables.excludes_zero(found['interval']))

  published = paper.JUDGE
  rows = [('pairs compared', [cell(f'{j["compared"]} of {j["pairs"]}')
                              for j in judges], published['pairs'])]
  rows += [(f'{name} preferred' if name != TIE else name,
            [cell(str(j['verdicts'][name])) for j in judges],
            published[name]) for name in VERDICTS]
  rows += [
      ('B over A', [preferred(j) for j in judges], tables.NONE),
      ('orders agree', [share(j['order_agreement']) for j in judges],
       tables.NONE),
      ('first preferred', [share(j['first_preferred'], .5) for j in judges],
       tables.NONE)]
  rows += [(f'{name} A / B', [axis(j, name) for j in judges],
            published[name]) for name in AXES]
  return tables.Table(
      'Judged reasoning',
      ('', *(j['model'] for j in judges), 'published (AR / diffusion)'),
      tuple((cell(name), *cells, cell(figure))
            for name, cells, figure in rows),
      'A preference counts where both orders of showing give it. First '
      'preferred: share of preferences for what was shown first; bold where '
      'its interval excludes .5, a bias. Small: 95% intervals, of scores that '
      'of B - A. '
      + paper.JUDGE_NOTE)
