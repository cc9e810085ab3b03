"""Records: tokenised requests in ArrayRecord files.

A record is a prompt and the response that a model should give:

    int32 header [example_id, p, l, dropped, supervised_from]
    | prompt int32 [p] | response int32 [l] | answer uint8 [l]

Beside a file `train.array_record` lies `train.array_record.json` with its
statistics. A file is there only when it is complete: it's written under a
temporary name and renamed at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import json
import os
import pathlib

from array_record.python import array_record_module
import numpy as np

from dgr2_jax.data import boosted
from dgr2_jax.data import generated
from dgr2_jax.data import interactions
from dgr2_jax.data import prompts
from dgr2_jax.data import requests as requests_lib
from dgr2_jax.data import traces

_HEADER = 5
# Share of a counterfactual's grades that is drawn, any as likely as another.
_REDRAWN = 1 / 3


@dataclasses.dataclass(frozen=True)
class Record:
  """One example.

  Attributes:
    example_id: index of the request in its split.
    prompt: int32 [p].
    response: int32 [l], through EOS.
    is_answer: bool [l], answer tokens (EOS among them) as against reasoning.
    dropped: history items that didn't fit into the prompt.
    supervised_from: the first response token that a model learns to write;
      those before it are given.
  """
  example_id: int
  prompt: np.ndarray
  response: np.ndarray
  is_answer: np.ndarray
  dropped: int
  supervised_from: int = 0

  def to_bytes(self) -> bytes:
    """The record as it lies in a file, see the module."""
    header = np.array([
        self.example_id, len(self.prompt), len(self.response), self.dropped,
        self.supervised_from])
    return b''.join((
        header.astype('<i4').tobytes(), self.prompt.astype('<i4').tobytes(),
        self.response.astype('<i4').tobytes(),
        self.is_answer.astype(np.uint8).tobytes()))

  @classmethod
  def from_bytes(cls, data: bytes) -> Record:
    """Inverse of `to_bytes`."""
    example_id, p, l, dropped, supervised_from = np.frombuffer(
        data, '<i4', _HEADER).tolist()
    ids = np.frombuffer(data, '<i4', p + l, 4 * _HEADER).astype(np.int32)
    answer = np.frombuffer(data, np.uint8, l, 4 * (_HEADER + p + l))
    return cls(example_id, ids[:p], ids[p:], answer.astype(bool), dropped,
               supervised_from)


@dataclasses.dataclass(frozen=True)
class Statistics:
  """What a record file holds.

  Attributes:
    num_records: records.
    prompt_tokens: in all prompts.
    response_tokens: in all responses.
    max_prompt: longest prompt, tokens.
    max_response: longest response, tokens.
    num_dropped_history: prompts that lost history items to `max_prompt`.
    pad_id: the token that prompts are padded with.
  """
  num_records: int
  prompt_tokens: int
  response_tokens: int
  max_prompt: int
  max_response: int
  num_dropped_history: int
  pad_id: int

  @property
  def dropped_history_share(self) -> float:
    """Share of the prompts that lost history items."""
    return self.num_dropped_history / self.num_records

  def padding_share(self, prompt_length: int, response_length: int) -> float:
    """Share of padding in batches of P and L tokens."""
    used = self.prompt_tokens + self.response_tokens
    return 1 - used / (self.num_records * (prompt_length + response_length))


def build(
    requests: Sequence[requests_lib.Request],
    template: prompts.Template,
    teacher_scores: np.ndarray | None = None,
    written: generated.Traces | None = None) -> Iterator[Record]:
  """Writes the prompts and responses of requests.

  Args:
    requests: the requests of a split; a record's id is its index here.
    template: writes them.
    teacher_scores: float [R, C], higher is better; for answer_order 'teacher'.
    written: a language model's traces, of training requests; those too long for
      `max_response` are not used.

  Raises:
    ValueError: the answer order needs a teacher and none is given, or a
      training response is longer than `max_response`.
    interactions.DataError: none of the `written` traces could be used.
  """
  config = template.config
  teacher = config.answer_order == 'teacher'
  if teacher and teacher_scores is None:
    raise ValueError("prompt.answer_order is 'teacher': expected its scores.")
  if teacher and len(requests):
    grades = boosted.grades(teacher_scores)
    # Equal grades keep the retriever's order: the answer follows from a trace
    # that writes them down.
    orders = boosted.orders(
        grades if config.trace.grades else teacher_scores)
  for index, request in enumerate(requests):
    prompt = template.prompt(request)
    response = None
    if written is not None:
      response = _written_response(request, prompt.shown, template, written)
      if response is None and written.config.missing == generated.DROP:
        continue
    if response is None and teacher:
      response = template.response(
          request, orders[index], prompt.shown, grades[index])
    elif response is None:
      response = template.response(
          request, traces.target_first(request.candidates, request.target),
          prompt.shown)
    yield _record(index, request, config, prompt, response)
  if written is not None:
    written.finish()


def build_counterfactuals(
    requests: Sequence[requests_lib.Request],
    template: prompts.Template,
    teacher_scores: np.ndarray,
    seed: int) -> Iterator[Record]:
  """Writes training responses whose grades are not the teacher's.

  The teacher's are shuffled among the candidates, and a third of them is drawn
  anew, for more lists with many different grades. Choice and answer follow from
  them, and only these are to be learned: the answer follows what is written.
  Without such examples a model reads it off the prompt as well, and names
  candidates twice where its own grades and the prompt disagree. (Given tokens
  can be masked on a canvas: the choice, in a block with grades, is then learned
  as what it is without them, a guess.)

  Args:
    requests: R training requests, of which a random share
      `prompt.counterfactuals` is written; record ids go on after R.
    template: writes them.
    teacher_scores: float [R, C].
    seed: of the draw.
  """
  rng = np.random.default_rng(seed)
  for index, request in enumerate(requests):
    if rng.random() < template.config.counterfactuals:
      grades = rng.permutation(boosted.grades(teacher_scores[index][None])[0])
      drawn = rng.random(len(grades)) < _REDRAWN
      grades = np.where(
          drawn, rng.integers(boosted.NUM_GRADES, size=len(grades)), grades)
      prompt = template.prompt(request)
      response = template.response(
          request, boosted.orders(grades[None])[0], prompt.shown, grades)
      yield _record(
          len(requests) + index, request, template.config, prompt, response,
          supervised_from=response.conclusion)


def _written_response(
    request: requests_lib.Request, shown: int, template: prompts.Template,
    written: generated.Traces) -> prompts.Response | None:
  """The response that was written for a request, if it can be used."""
  answer = written.find(request, shown)
  if answer is None:
    return None
  response = template.written_response(answer)
  if len(response.ids) > template.config.max_response:
    written.reject('too_long')
    return None
  return response


def _record(
    example_id: int, request: requests_lib.Request,
    config: prompts.PromptConfig, prompt: prompts.Prompt,
    response: prompts.Response, supervised_from: int = 0) -> Record:
  """One request with one response; see `build`."""
  if request.split == 'train' and len(response.ids) > config.max_response:
    raise ValueError(
        f'The training response of user {request.user} takes '
        f'{len(response.ids)} tokens: prompt.max_response is '
        f'{config.max_response}; raise it or shorten the trace.')
  return Record(
      example_id=example_id, prompt=prompt.ids,
      response=response.ids[:config.max_response],
      is_answer=response.is_answer[:config.max_response],
      dropped=min(len(request.history), config.max_history) - prompt.shown,
      supervised_from=supervised_from)


def write(
    path: str | os.PathLike,
    records: Iterable[Record],
    pad_id: int) -> Statistics:
  """Writes records and their statistics, or nothing.

  Args:
    path: of the new file; its directory exists.
    records: what to write, in order.
    pad_id: what prompts are padded with.

  Raises:
    ValueError: there are no records.
    OSError: they cannot be written.
  """
  path = pathlib.Path(path)
  temporary = path.with_name(f'{path.name}.tmp')
  prompts_, responses, dropped = [], [], []
  try:
    # Groups of one: batches read single records in random order.
    writer = array_record_module.ArrayRecordWriter(
        str(temporary), 'group_size:1')
    try:
      for record in records:
        writer.write(record.to_bytes())
        prompts_.append(len(record.prompt))
        responses.append(len(record.response))
        dropped.append(record.dropped > 0)
    finally:
      try:
        writer.close()
      except RuntimeError as e:  # what it makes of a full disk
        raise OSError(f'{path}: {e}') from e
    if not prompts_:
      raise ValueError(f'{path}: there are no requests to write.')
    statistics = Statistics(
        num_records=len(prompts_), prompt_tokens=sum(prompts_),
        response_tokens=sum(responses), max_prompt=max(prompts_),
        max_response=max(responses), num_dropped_history=sum(dropped),
        pad_id=pad_id)
    # The records last: where they are, the statistics are too.
    statistics_path = _statistics_path(path)
    statistics_temporary = path.with_name(f'{path.name}.json.tmp')
    statistics_temporary.write_text(
        json.dumps(dataclasses.asdict(statistics), indent=1))
    os.replace(statistics_temporary, statistics_path)
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)
  return statistics


def read_statistics(path: str | os.PathLike) -> Statistics:
  """Reads the statistics of a record file.

  Raises:
    interactions.DataError: they are missing or malformed.
  """
  path = _statistics_path(pathlib.Path(path))
  try:
    return Statistics(**json.loads(path.read_text()))
  except (OSError, ValueError, TypeError) as e:
    raise interactions.DataError(
        f'{path}: expected the statistics of a record file: {e}. Delete both '
        'and prepare them again.') from e


def _statistics_path(path: pathlib.Path) -> pathlib.Path:
  return path.with_name(f'{path.name}.json')
