"""Has a language model judge the reasoning of two re-rankers.

    python -m dgr2_jax.tools.judge DIR/responses/ar.jsonl \\
        DIR/responses/rl-tau_0.9.jsonl --base_url=http://localhost:8000/v1 \\
        --model=Qwen/Qwen3-32B --output=judge.json

`dgr2_jax.main --stage=evaluate` writes the files (A and B) into its working
directory; they must be of the same requests. The endpoint speaks OpenAI's chat
completion protocol; its key, if it wants one, is read from the environment
variable JUDGE_API_KEY. A second --model (and --base_url, if it has another) is
a second judge of the same pairs.

Answers go to OUTPUT.answers.jsonl as they come; the same command again goes on
where it was stopped. When all is settled the table is printed and OUTPUT holds
it as JSON, with every verdict.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import json
import logging as std_logging
import os
import pathlib
import sys
from typing import Any

from absl import logging

from dgr2_jax.evaluation import judging
from dgr2_jax.evaluation import outcomes
from dgr2_jax.evaluation import paper
from dgr2_jax.evaluation import tables
from dgr2_jax.trace_generation import cache as cache_lib
from dgr2_jax.trace_generation import chat
from dgr2_jax.trace_generation import generation
from dgr2_jax.trace_generation import sampling
from dgr2_jax.training import workdir as workdir_lib

_KEY_VARIABLE = 'JUDGE_API_KEY'


@dataclasses.dataclass(frozen=True)
class Question:
  """A `sampling.Question` of a pair."""
  index: int
  name: str
  body: Mapping[str, Any]
  url: str  # another endpoint's model of the same name is another judge

  @property
  def fingerprint(self) -> str:
    return f'{self.url} {self.index} {self.name}'

  def read(self, reply: chat.Reply) -> tuple[dict | None, str | None]:
    """The answer, or why there is none."""
    answer = judging.read(self.name, reply.content)
    if answer is None:
      return None, 'cut_off' if reply.finish == 'length' else 'unparseable'
    return {'answer': answer}, None

  def line(self, **fields: Any) -> dict[str, Any]:
    return {'pair': self.index, 'question': self.name, **fields}


def ask(pairs: Sequence[judging.Pair], endpoint: chat.EndpointConfig,
        model: str, config: sampling.SamplingConfig,
        cache: cache_lib.AnswerCache, *, api_key: str | None = None,
        temperature: float = 0., max_tokens: int = 1024,
        extra_body: Mapping[str, Any] | None = None
        ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
  """Asks a judge about all pairs.

  Args:
    pairs: what to judge.
    endpoint: whom to ask.
    model: the name that the endpoint knows it by.
    config: how long and how fast to ask.
    cache: keeps the answers.
    api_key: of the endpoint, if it wants one.
    temperature: of sampling.
    max_tokens: of an answer, thinking included.
    extra_body: further fields of the request body.

  Returns:
    By pair the answers by question, and what asking took; a question that is
    given up has no answer.

  Raises:
    generation.NotComplete: questions are left; what was answered is kept.
  """
  def questions() -> Iterator[Question]:
    for index, pair in enumerate(pairs):
      for name in judging.QUESTIONS:
        yield Question(index, name, {
            'model': model, 'messages': judging.messages(pair, name),
            'temperature': temperature, 'max_tokens': max_tokens,
            **(extra_body or {})}, endpoint.base_url)

  outcome = asyncio.run(generation.settle(
      config, lambda stop: chat.Client(endpoint, api_key, stop), cache,
      questions(), len(pairs) * len(judging.QUESTIONS)))
  answers = [{} for _ in pairs]
  for line in outcome.accepted.values():
    answers[line['pair']][line['question']] = line['answer']
  return answers, outcome.statistics(config)


def run(args: argparse.Namespace) -> None:
  """Judges, prints the table and writes the JSON."""
  extra_body = chat.extra_body(args.extra_body)
  shown = args.a.parent / outcomes.REQUESTS
  requests = outcomes.read(shown, 'history', 'candidates')
  a, b = (outcomes.read(path, 'order', 'explanation', 'failure')
          for path in (args.a, args.b))
  _check_output(args.output, (shown, args.a, args.b))
  outcomes.check_same_requests({shown: requests, args.a: a, args.b: b})
  pairs = judging.pairs(requests, a, b, args.pairs, args.seed)
  config = sampling.SamplingConfig(
      max_attempts=args.max_attempts, concurrency=args.concurrency)
  urls = args.base_url * (len(args.model) if len(args.base_url) == 1 else 1)
  if len(urls) != len(args.model):
    raise ValueError(f'--base_url: {len(args.base_url)} for {len(args.model)} '
                     'models; expected one, or one a model.')
  if len(set(zip(urls, args.model))) < len(urls):
    raise ValueError('--model: the same judge twice')
  judges, answers = [], []
  with cache_lib.AnswerCache(f'{args.output}.answers.jsonl') as cache:
    for url, model in zip(urls, args.model, strict=True):
      said, cost = ask(
          pairs, chat.EndpointConfig(
              base_url=url, timeout=args.timeout, retries=args.retries,
              backoff=args.backoff), model, config, cache,
          api_key=os.environ.get(_KEY_VARIABLE), temperature=args.temperature,
          max_tokens=args.max_tokens, extra_body=extra_body)
      if not any(said):
        raise ValueError(f'{model} at {url} gave no answer that can be read: '
                         f'see {args.output}.answers.jsonl')
      answers.append(said)
      judges.append({'model': model, **judging.statistics(said, seed=args.seed),
                     'asking': cost})
  agreement = (judging.agreement(*answers) if len(answers) == 2 else None)
  workdir_lib.write_text(args.output, json.dumps({
      'A': str(args.a), 'B': str(args.b), 'judges': judges,
      'agreement_of_judges': agreement, 'published': paper.JUDGE,
      'pairs': [{'request': pair.request['request'],
                 'answers': [said[i] for said in answers]}
                for i, pair in enumerate(pairs)]}, indent=1) + '\n')
  found = judging.table(judges)
  print(f'A: {args.a}\nB: {args.b}\n\n{tables.as_text(found)}\n\n{found.note}')
  if agreement:
    print(f'Two judges on {agreement["pairs"]} pairs: '
          f'kappa {tables.number(agreement["kappa"])}, agreement '
          f'{tables.number((agreement["agreement"] or {}).get("rate"))}.')


def _check_output(output: pathlib.Path,
                  inputs: Sequence[pathlib.Path]) -> None:
  """Raises ValueError before anything is asked for what can't be kept."""
  if output.is_dir() or not output.parent.is_dir():
    raise ValueError(f'--output={output}: expected a file in a directory that '
                     'is there')
  if output.exists() and any(map(output.samefile, inputs)):
    raise ValueError(f'--output={output} would overwrite what is judged')


def main(argv: Sequence[str] | None = None) -> None:
  """Judges; what users can mend is one line on stderr and an exit code."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  parser.add_argument('a', type=pathlib.Path, metavar='A',
                      help='responses of the first re-ranker')
  parser.add_argument('b', type=pathlib.Path, metavar='B',
                      help='responses of the second')
  parser.add_argument('--base_url', action='append', required=True,
                      help='the endpoint, such as http://localhost:8000/v1')
  parser.add_argument('--model', action='append', required=True,
                      help='the judge; twice for two')
  parser.add_argument('--output', type=pathlib.Path,
                      default=pathlib.Path('judge.json'), help='JSON to write')
  for name, kind, default, text in (
      ('pairs', int, 50, 'how many to draw; 0: all'),
      ('seed', int, 0, 'of the draw'),
      ('temperature', float, 0., 'of the judge'),
      ('max_tokens', int, 1024, 'of an answer, thinking included'),
      ('max_attempts', int, 3, 'answers to a question before it is given up'),
      ('concurrency', int, 8, 'questions under way at a time'),
      ('timeout', float, 120., 'seconds for one answer'),
      ('retries', int, 8, 'further tries after an error of the endpoint'),
      ('backoff', float, 1., 'seconds before the first retry, then doubled'),
      ('extra_body', str, '{}', 'further fields of the request, as JSON')):
    parser.add_argument(f'--{name}', type=kind, default=default,
                        help=f'{text} (default: {default})')
  args = parser.parse_args(argv)
  logging.set_verbosity(logging.INFO)
  for name in ('httpx2', 'httpcore2'):  # a line for every request
    std_logging.getLogger(name).setLevel(std_logging.WARNING)
  try:
    if not 1 <= len(args.model) <= 2:
      raise ValueError(f'{len(args.model)} judges: expected one or two.')
    if not 0 <= args.temperature < float('inf'):
      raise ValueError(f'--temperature is {args.temperature}: expected a '
                       'number of at least 0.')
    if args.pairs < 0:
      raise ValueError(f'--pairs is {args.pairs}: expected at least 0.')
    run(args)
  except generation.NotComplete as e:
    print(f'error: {e}', file=sys.stderr)
    sys.exit(e.code)
  # ValueError covers bad flags and the data's DataError.
  except (cache_lib.CacheError, ValueError, OSError) as e:
    sys.exit(f'error: {e}')


if __name__ == '__main__':
  main()
