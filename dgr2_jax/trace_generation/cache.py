"""Answers on disk, so that nothing is asked (and paid for) twice.

One JSON object a line, only ever appended to:

    {"key": "2:9b1e...", "content": "{...}", "finish": "stop",
     "prompt_tokens": 913, "completion_tokens": 140}

The key is a digest of the whole question: model, prompt and sampling, and what
it is asked for, such as a request with its target: of two requests with one
prompt, each has answers of its own. Whatever changes the question changes the
key. A question that was asked several times has several lines, in order.

A process that is killed may leave half a line at the end, which the next one
cuts off; damage elsewhere is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
import collections
import fcntl
import hashlib
import json
import os
import pathlib
from typing import Any

from absl import logging

from dgr2_jax.data import interactions
from dgr2_jax.trace_generation import chat


# What keys begin with. Those of version 1 had none, and left out what was asked
# for: whose answers those are can't be told.
_VERSION = '2:'


class CacheError(Exception):
  """The cache can't be used; the message says why."""


def key_of(body: Mapping[str, Any], fingerprint: str) -> str:
  """The key of a question.

  Args:
    body: asks it.
    fingerprint: tells what it is asked for from all else that has this body.
  """
  text = json.dumps([body, fingerprint], sort_keys=True)
  return _VERSION + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def parse(data: bytes, name: str) -> tuple[list[tuple[str, chat.Reply]], int]:
  """Reads the lines of a cache.

  Args:
    data: the file's content.
    name: what errors call it.

  Returns:
    (key, answer) in order, and how many bytes they take: what is behind them is
    a line that was not finished.

  Raises:
    interactions.DataError: a finished line is damaged, or of an earlier
      version; file, line and reason.
  """
  entries, end = [], data.rfind(b'\n') + 1
  for number, line in enumerate(data[:end].split(b'\n')[:-1], 1):
    try:
      fields = json.loads(line)
      key = fields.pop('key')
      reply = chat.Reply(**fields)
      if not (isinstance(key, str) and isinstance(reply.content, str)
              and isinstance(reply.finish, str)
              and isinstance(reply.prompt_tokens, int)
              and isinstance(reply.completion_tokens, int)):
        raise TypeError('a field has another type')
    except (ValueError, TypeError, LookupError, AttributeError,
            RecursionError) as e:
      raise interactions.DataError(
          f'{name}:{number}: damaged ({e!r}); expected an answer. Delete this '
          'line to ask again.') from e
    if not key.startswith(_VERSION):
      raise interactions.DataError(
          f'{name}:{number}: an answer of an earlier version, which did not '
          'keep requests with the same prompt apart. Move this file away to '
          'ask again.')
    entries.append((key, reply))
  return entries, end


class AnswerCache:
  """The answers of a file, and a place for more."""

  def __init__(self, path: str | os.PathLike):
    """Opens a cache, new or not, and holds it until `close`.

    Raises:
      CacheError: another process holds it.
      interactions.DataError: it is damaged, see `parse`.
      OSError: it can't be read or written.
    """
    path = pathlib.Path(path)
    self._answers = collections.defaultdict(list)
    # Unbuffered: a line is with the system before its answer is used.
    self._file = open(path, 'a+b', buffering=0)
    try:
      try:
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError as e:
        raise CacheError(f'{path} is in use by another run.') from e
      data = path.read_bytes()
      entries, end = parse(data, str(path))
      if end < len(data):
        logging.warning('%s: cut off %d bytes of a line that was not finished.',
                        path, len(data) - end)
        self._file.truncate(end)
    except BaseException:
      self._file.close()
      raise
    for key, reply in entries:
      self._answers[key].append(reply)

  def __enter__(self) -> AnswerCache:
    return self

  def __exit__(self, *unused_args) -> None:
    self.close()

  def close(self) -> None:
    """Lets go of the file."""
    self._file.close()

  def answers(self, key: str) -> tuple[chat.Reply, ...]:
    """What was answered to a question, oldest first."""
    return tuple(self._answers.get(key, ()))

  def add(self, key: str, reply: chat.Reply) -> None:
    """Appends an answer.

    Raises:
      OSError: it could not be written whole; nothing of it is left.
    """
    line = json.dumps({'key': key, **reply._asdict()}).encode() + b'\n'
    size = os.fstat(self._file.fileno()).st_size
    if self._file.write(line) != len(line):
      # The next answer would go on in the middle of this line.
      self._file.truncate(size)
      raise OSError(f'{self._file.name}: an answer could not be written whole; '
                    'is the disk full?')
    self._answers[key].append(reply)
