"""Has a language model write the reasoning traces of the training requests.

    python -m dgr2_jax.tools.generate_traces --workdir=DIR \\
        --base_url=http://localhost:8000/v1 --model=Qwen/Qwen3-32B \\
        --mode=rejection --output=traces.jsonl

DIR is a working directory whose prepare stage is complete. The endpoint speaks
OpenAI's chat completion protocol; its key, if it wants one, is read from the
environment variable TRACES_API_KEY.

Answers go to OUTPUT.answers.jsonl as they come. When every request is settled
the traces are written to OUTPUT, costs and the requests that were given up to
OUTPUT.report.json, and the exit code is 0. The same command again goes on where
it was stopped.

Without an endpoint the AR model of a run can be its own teacher, by rejection
sampling; DIR needs json responses and a complete --stage:

    python -m dgr2_jax.tools.generate_traces --workdir=DIR --stage=ar_sft \\
        --output=traces.jsonl
"""

from __future__ import annotations

from collections.abc import Sequence
import logging as std_logging
import os
import pathlib
import sys

from absl import app
from absl import flags
from absl import logging

from dgr2_jax.trace_generation import cache
from dgr2_jax.trace_generation import chat
from dgr2_jax.trace_generation import generation
from dgr2_jax.trace_generation import questions
from dgr2_jax.trace_generation import sampling
from dgr2_jax.training import workdir

_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'A working directory of dgr2_jax.main, prepared.')
_BASE_URL = flags.DEFINE_string(
    'base_url', None, 'The endpoint, such as http://localhost:8000/v1.')
_MODEL = flags.DEFINE_string('model', None, 'The model to ask.')
_STAGE = flags.DEFINE_enum(
    'stage', None, ['ar_sft', 'ar_rl'],
    'Instead of an endpoint: the stage of the working directory whose AR '
    'weights write the traces; --concurrency is its batch size.')
_MODE = flags.DEFINE_enum(
    'mode', 'rejection', ['rejection', 'targeted'],
    'rejection hides the target and asks until it is put first; targeted shows '
    'it.')
_OUTPUT = flags.DEFINE_string('output', None, 'The file of traces to write.')
_MAX_REQUESTS = flags.DEFINE_integer(
    'max_requests', 0, 'Only the first so many training requests; 0 is all.',
    lower_bound=0)
_HINT = flags.DEFINE_string(
    'hint', questions.HINT, 'Domain knowledge for the prompt.')
_TEMPERATURE = flags.DEFINE_float('temperature', 0.8, 'Of sampling.')
_MAX_TOKENS = flags.DEFINE_integer(
    'max_tokens', 1024, 'Of an answer, thinking included.')
_EXTRA_BODY = flags.DEFINE_string(
    'extra_body', '{}', 'Further fields of the request body, as JSON; such as '
    '{"chat_template_kwargs": {"enable_thinking": false}}.')
_MAX_ATTEMPTS = flags.DEFINE_integer(
    'max_attempts', 8, 'Answers to a request before it is given up.')
_CONCURRENCY = flags.DEFINE_integer(
    'concurrency', 16, 'Requests under way at a time.')
_TIMEOUT = flags.DEFINE_float('timeout', 120, 'Seconds for one answer.')
_RETRIES = flags.DEFINE_integer(
    'retries', 8, 'Further tries after an error of the endpoint.')
_BACKOFF = flags.DEFINE_float(
    'backoff', 1, 'Seconds before the first retry, doubled for each further.')
_LONGEST_WAIT = flags.DEFINE_float(
    'longest_wait', 120, 'Seconds: most of a backoff; a longer Retry-After '
    'ends the run.')
_REQUESTS_PER_MINUTE = flags.DEFINE_float(
    'requests_per_minute', 0, 'Rate limit; 0 is none.')
_TOKENS_PER_MINUTE = flags.DEFINE_float(
    'tokens_per_minute', 0, 'Rate limit, tokens in and out; 0 is none.')
_PROMPT_PRICE = flags.DEFINE_float(
    'prompt_price', 0, 'Of a million tokens, for the report.')
_COMPLETION_PRICE = flags.DEFINE_float(
    'completion_price', 0, 'Of a million tokens, for the report.')

_KEY_VARIABLE = 'TRACES_API_KEY'


def main(argv: Sequence[str]) -> None:
  """Maps what users can mend to one line and an exit code."""
  if len(argv) > 1:
    _fail(f'unexpected argument {argv[1]!r}; values are given as --flag=value.')
  asked = (_STAGE,) if _STAGE.value else (_BASE_URL, _MODEL)
  for flag in (_WORKDIR, *asked, _OUTPUT):
    if not flag.value:
      _fail(f'--{flag.name} is required; see --help.')
  if not flags.FLAGS['verbosity'].present:
    logging.set_verbosity(logging.INFO)
  for name in ('httpx2', 'httpcore2'):  # a line for every request
    std_logging.getLogger(name).setLevel(std_logging.WARNING)
  try:
    _generate()
  except generation.NotComplete as e:
    _fail(str(e), e.code)
  except KeyboardInterrupt:
    _fail('interrupted. The same command goes on.', 130)
  # ValueError covers bad flags and the data's DataError.
  except (cache.CacheError, ValueError, OSError) as e:
    _fail(str(e))


def _fail(message: str, code: int = 1) -> None:
  print(f'error: {message}', file=sys.stderr)
  sys.exit(code)


def _generate() -> None:
  if _STAGE.value:
    if _BASE_URL.value or _MODE.value != questions.REJECTION:
      raise ValueError('--stage asks no endpoint and shows no target: '
                       'expected neither --base_url nor --mode=targeted.')
    # Only this way of asking needs the model.
    from dgr2_jax.trace_generation import own_model

    own_model.generate(
        pathlib.Path(_WORKDIR.value).absolute(), pathlib.Path(_OUTPUT.value),
        own_model.ModelConfig(_STAGE.value, _TEMPERATURE.value,
                              _CONCURRENCY.value),
        _MAX_ATTEMPTS.value, _MAX_REQUESTS.value)
    return
  generation.generate(
      pathlib.Path(_WORKDIR.value), pathlib.Path(_OUTPUT.value),
      chat.EndpointConfig(
          base_url=_BASE_URL.value, timeout=_TIMEOUT.value,
          retries=_RETRIES.value, backoff=_BACKOFF.value,
          longest_wait=_LONGEST_WAIT.value,
          requests_per_minute=_REQUESTS_PER_MINUTE.value,
          tokens_per_minute=_TOKENS_PER_MINUTE.value),
      questions.QuestionConfig(
          model=_MODEL.value, mode=_MODE.value, hint=_HINT.value,
          temperature=_TEMPERATURE.value, max_tokens=_MAX_TOKENS.value,
          extra_body=chat.extra_body(_EXTRA_BODY.value)),
      sampling.SamplingConfig(
          max_attempts=_MAX_ATTEMPTS.value, concurrency=_CONCURRENCY.value,
          prompt_price=_PROMPT_PRICE.value,
          completion_price=_COMPLETION_PRICE.value),
      api_key=os.environ.get(_KEY_VARIABLE), max_requests=_MAX_REQUESTS.value)


if __name__ == '__main__':
  app.run(main)
