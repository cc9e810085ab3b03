"""Re-ranks a file of requests.

    python -m dgr2_jax.rerank --model=WORKDIR --input=requests.jsonl \\
        --output=rankings.jsonl

A request is a line {"id": ..., "history": [item_id...], "candidates":
[item_id...]}, with "scores" if the retriever has some; "user_id" is for
evaluation on users of the training data (see `Request`). Items that the
catalogue lacks are objects as in items.jsonl. An answer is a line {"id":,
"ranking":, "valid":, "explanation":, "forwards":, "request":}, with
"new_items", their ids, if the catalogue lacks some. Where "valid" is false
"failure" says why, as in `data/parsing.py`, and the ranking is the order that
came in, or, with --complete, a permutation made from the reasoning.

The same command again goes on where it was interrupted. "request" is a checksum
of what was asked, so that an id asked about anew is an error, not an old
answer; OUTPUT.settings.json keeps another model or mode from going on in the
place of the first. Lines that cannot be answered are listed with their numbers
in OUTPUT.errors.jsonl. Exit code: 0 if every line is answered, 2 if some are
listed as errors, 1 if it could not run, 130 if it was interrupted.
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Iterator
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import sys
from typing import Any, BinaryIO

import tqdm

from dgr2_jax import interruption

# Longer lines are not read: no request needs so much.
_MAX_LINE = 1 << 20
# Of an error, which may quote what is wrong.
_MAX_ERROR = 1000
# How a line of the output begins.
_HEAD = b'{"id": '
_INTERRUPTED = 'interrupted; the same command goes on from here.'
_STDERR = interruption.Stderr()
_FIELDS = {'id', 'history', 'candidates', 'scores', 'user_id'}


class _LineError(ValueError):
  """A line that cannot be answered; the message says why."""


@dataclasses.dataclass
class _Line:
  """One line of the input; `error` where it cannot be answered."""
  number: int
  id: str | int | None
  request: Any = None
  checksum: str = ''
  error: str = ''


def main(argv: list[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  parser = argparse.ArgumentParser(
      prog='python -m dgr2_jax.rerank', description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--model', required=True,
                      help='working directory of dgr2_jax.main, or its '
                      'checkpoints/STAGE')
  parser.add_argument('--input', required=True, type=pathlib.Path,
                      help='requests, one a line')
  parser.add_argument('--output', required=True, type=pathlib.Path,
                      help='answers, one a line, appended to')
  parser.add_argument('--stage', help="whose weights; the recipe's last")
  parser.add_argument('--mode', default='threshold',
                      help='threshold (default), verify or ar')
  parser.add_argument('--threshold', type=float,
                      help='tau of mode threshold (default: 0.9)')
  parser.add_argument('--answer_threshold', type=float,
                      help='tau of the answer, which a low one breaks first; '
                      'that of --threshold by default')
  parser.add_argument('--batch_size', type=int, default=16,
                      help='requests decoded together (default: 16)')
  parser.add_argument('--complete', action='store_true',
                      help='complete invalid answers to permutations; their '
                      'lines say "completed": true')
  args = parser.parse_args(argv)
  try:
    _check(args)
    return _rerank(args)
  except KeyboardInterrupt:
    print(f'error: {_INTERRUPTED}', file=_STDERR)
    return 130
  except (ValueError, OSError) as e:
    print(f'error: {e}', file=_STDERR)
    return 1


def _check(args: argparse.Namespace) -> None:
  """Raises ValueError at what is wrong whatever the model."""
  if args.batch_size < 1:
    raise ValueError(f'--batch_size={args.batch_size}: expected at least 1')
  for name in ('threshold', 'answer_threshold'):
    tau = getattr(args, name)
    if tau is not None and not 0 < tau <= 1:
      raise ValueError(f'--{name}={tau}: expected above 0 and at most 1')
  if not args.input.is_file():
    raise ValueError(f'--input={args.input}: ' + (
        'expected a file' if args.input.exists() else 'no such file'))
  if not args.output.absolute().parent.is_dir():
    raise ValueError(f'--output={args.output}: no such directory')
  if not args.output.name or args.output.exists() and (
      not args.output.is_file()):
    raise ValueError(f'--output={args.output}: expected a file')
  for path in (args.output, _beside(args, 'errors.jsonl'),
               _beside(args, 'settings.json')):
    if path.exists() and path.samefile(args.input):
      raise ValueError(f'--input={args.input} would be overwritten by what '
                       '--output names; choose another')


def _beside(args: argparse.Namespace, name: str) -> pathlib.Path:
  """A file that belongs to the output."""
  return args.output.with_name(f'{args.output.name}.{name}')


def _rerank(args: argparse.Namespace) -> int:
  # JAX is slow to import: after --help and `_check`.
  from dgr2_jax.serving import prompting
  from dgr2_jax.serving import reranker as reranker_lib
  from dgr2_jax.training import logging as metrics_logging

  if args.mode not in reranker_lib.MODES:
    raise ValueError(f'--mode={args.mode}: expected '
                     f'{", ".join(reranker_lib.MODES)}')
  if args.mode == 'threshold':
    args.threshold = args.threshold or .9
  elif args.threshold is not None:
    raise ValueError(f'--threshold is of --mode=threshold, not {args.mode}')
  errors = _beside(args, 'errors.jsonl')
  metrics_logging.hide_library_chatter()
  print(f'Loading {args.model}; first answers wait for the compiler.',
        file=_STDERR)
  reranker = reranker_lib.Reranker.load(args.model, args.stage)
  how = dict(mode=args.mode, threshold=args.threshold or .9,
             batch_size=args.batch_size, complete=args.complete,
             answer_threshold=args.answer_threshold)
  reranker.stream((), **how)  # a mode it lacks should not touch the output
  count = collections.Counter()
  with contextlib.ExitStack() as stack:
    out = stack.enter_context(open(args.output, 'ab+'))
    _lock(out, args.output)  # before anything of another process is touched
    answered = _answered(out, args.output)
    _keep_settings(args, reranker.identity, bool(answered))
    if answered:
      print(f'{len(answered)} answers are there already.', file=_STDERR)
    f = stack.enter_context(open(args.input, 'rb'))
    bad = stack.enter_context(open(errors, 'w', encoding='utf-8'))
    bar = stack.enter_context(tqdm.tqdm(
        total=args.input.stat().st_size, unit='B', unit_scale=True,
        file=_STDERR, **_pace(_STDERR.isatty())))
    waiting = collections.deque()

    def listed(line, error):
      bad.write(json.dumps({'line': line.number, 'id': line.id,
                            'error': error[:_MAX_ERROR]}) + '\n')
      bad.flush()
      count['errors'] += 1

    def requests():
      for line in _lines(f, prompting.Request, reranker.check):
        if line.error:
          listed(line, line.error)
        elif (before := answered.get(_key(line.id))) is not None:
          if before == line.checksum:
            count['before'] += 1
          else:
            listed(line, f'{args.output} has an answer to another request '
                   'with this id; choose another --output')
        else:
          waiting.append(line)
          yield line.request
        bar.update(f.tell() - bar.n)

    for result in reranker.stream(requests(), **how):
      out.write(_to_json(waiting.popleft(), result).encode())
      out.flush()
      count['answered'] += 1
      count['invalid'] += not result.valid
      count['kept'] += not result.valid and not result.completed
    os.fsync(out.fileno())
    if not args.output.exists() or not os.path.sameopenfile(
        out.fileno(), stack.enter_context(open(args.output, 'rb')).fileno()):
      raise ValueError(f'--output={args.output} was removed meanwhile, and '
                       'answers with it')
  if not count['errors']:
    errors.unlink(missing_ok=True)
  print(f'{count["answered"]} answered ({count["invalid"]} of them not valid), '
        f'{count["before"]} before, {count["errors"]} errors'
        + (f', see {errors}' if count['errors'] else ''), file=_STDERR)
  if count['kept'] > count['answered'] / 2:
    print('warning: most answers are not valid and keep the incoming order',
          file=_STDERR)
  return 2 if count['errors'] else 0


def _pace(terminal: bool) -> dict[str, float]:
  """How often progress is shown: less often in a log."""
  return {} if terminal else dict(
      delay=30, mininterval=30, maxinterval=60)


def _lock(out: BinaryIO, path: pathlib.Path) -> None:
  try:
    fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as e:
    raise ValueError(f'{path} is being written by another process') from e


def _keep_settings(args: argparse.Namespace, model: dict[str, str],
                   resumed: bool) -> None:
  """Writes what answers depend on, or compares it with what is there.

  Raises:
    ValueError: the answers that are there were made otherwise.
  """
  from dgr2_jax.training import workdir

  path = _beside(args, 'settings.json')
  settings = {
      **model, 'mode': args.mode, 'complete': args.complete,
      'threshold': args.threshold,
      'answer_threshold': args.answer_threshold}
  if resumed and path.exists():
    try:
      before = json.loads(path.read_text(encoding='utf-8'))
    except (ValueError, RecursionError) as e:
      raise ValueError(f'{path}: not JSON: {e}') from e
    if not isinstance(before, dict):
      raise ValueError(f'{path}: no settings of this command')
    differ = [f'{name} {before.get(name)!r}, now {settings.get(name)!r}'
              for name in {**settings, **before}
              if before.get(name) != settings.get(name)]
    if differ:
      raise ValueError(f'{args.output} holds answers made otherwise '
                       f'({"; ".join(differ)}): choose another --output')
  workdir.write_text(path, json.dumps(settings, indent=1) + '\n')


def _checksum(request: dict[str, Any]) -> str:
  """Of the fields, whatever their order: eight hexadecimal digits."""
  text = json.dumps(request, sort_keys=True)
  return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _key(identifier: str | int) -> str:
  """What tells ids apart: 1 and "1" are two."""
  return json.dumps(identifier)


def _answered(out: BinaryIO, path: pathlib.Path) -> dict[str, str]:
  """Answers of an earlier run: their requests' checksums by id.

  Cuts off what was left half-written.

  Raises:
    ValueError: a whole line is no answer: this is another file.
  """
  out.seek(0)
  found, end = {}, 0
  for number, line in enumerate(out, 1):
    half = not line.endswith(b'\n') and _HEAD.startswith(line[:len(_HEAD)])
    try:
      fields = json.loads(line)
      key, checksum = _key(fields['id']), fields['request']
    except (ValueError, TypeError, KeyError, RecursionError) as e:
      if half and not isinstance(e, KeyError):
        break
      raise ValueError(f'{path}:{number}: no answer of this command; choose '
                       'another --output') from e
    if not line.endswith(b'\n'):
      break
    found[key] = checksum
    end += len(line)
  out.truncate(end)
  out.seek(end)
  return found


def _lines(f: BinaryIO, request_class, check) -> Iterator[_Line]:
  """The lines that are not blank, checked."""
  seen, number = {}, 0
  while raw := f.readline(_MAX_LINE + 1):
    number += 1
    line = _Line(number, None)
    if len(raw) > _MAX_LINE:
      while raw and not raw.endswith(b'\n'):
        raw = f.readline(_MAX_LINE)
      line.error = f'longer than {_MAX_LINE} bytes'
      yield line
      continue
    if not raw.strip():
      continue
    try:
      fields = _json(raw)
      line.id = _identifier(fields)
      _check_types(fields)
      if _key(line.id) in seen:
        raise _LineError(f'id: the same as in line {seen[_key(line.id)]}')
      del fields['id']
      line.request = request_class(**fields)
      line.checksum = _checksum(fields)
      check(line.request)
      seen[_key(line.id)] = number
    except ValueError as e:
      line.error = str(e)
    yield line


def _json(raw: bytes) -> dict[str, Any]:
  try:
    fields = json.loads(raw.strip().decode('utf-8-sig'))
  except UnicodeDecodeError as e:
    raise _LineError(f'not UTF-8 text: {e.reason}') from e
  except (ValueError, RecursionError) as e:
    raise _LineError(f'not JSON: {e}') from e
  if not isinstance(fields, dict):
    raise _LineError('expected a JSON object')
  return fields


def _identifier(fields: dict[str, Any]) -> str | int:
  identifier = fields.get('id')
  if identifier is None:
    raise _LineError('id is missing')
  if not isinstance(identifier, (str, int)) or isinstance(identifier, bool):
    raise _LineError(f'id is {identifier!r}: expected a string or a whole '
                     'number')
  return identifier


def _check_types(fields: dict[str, Any]) -> None:
  """Raises _LineError if a field is missing, unknown or of the wrong type."""
  if unknown := sorted(fields.keys() - _FIELDS):
    raise _LineError(f'unknown field {unknown[0]!r}')
  for name, kind in (('history', (str, dict)), ('candidates', (str, dict)),
                     ('scores', (int, float))):
    value = fields.get(name)
    if name == 'scores' and value is None:
      continue
    expected = ('numbers' if name == 'scores' else
                'item ids, which are strings, or of items described')
    if not isinstance(value, list):
      raise _LineError(f'{name}: expected a list of {expected}')
    for x in value:
      if not isinstance(x, kind) or isinstance(x, bool):
        raise _LineError(f'{name}: {json.dumps(x)[:40]} in it, expected '
                         f'{expected}')
  if not isinstance(fields.get('user_id', ''), (str, type(None))):
    raise _LineError(f'user_id is {fields["user_id"]!r}: expected a string')


def _to_json(line: _Line, result) -> str:
  return json.dumps({
      'id': line.id, 'ranking': list(result.ranking), 'valid': result.valid,
      'explanation': result.explanation, 'forwards': result.forwards,
      'request': line.checksum,
      **({} if result.valid else {'failure': result.failure}),
      **({'completed': True} if result.completed else {}),
      **({'new_items': list(result.new_items)} if result.new_items else {})
  }) + '\n'


if __name__ == '__main__':
  interruption.ends_with(_INTERRUPTED)
  sys.exit(main())
