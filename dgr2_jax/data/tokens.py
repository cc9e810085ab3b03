"""Names of the tokens that a vocabulary is extended by.

A prompt or a response is a sequence of *pieces*: text, which the text
tokenizer encodes, or a special token, which is looked up by its name. Text
never turns into a special token, whatever it says, because the text tokenizer
doesn't know the names on this page.

    json     <|im_start|>user\\n ... <|im_end|>   <think>   <s_a_57>
    compact  <|history|> ... <|candidates|> <|c1|> ... <|reason|> ... <|answer|>

The names follow GR2 (arXiv 2602.07774) for semantic ids and Qwen3 for the chat
template, so that a Qwen3 vocabulary is reused where it has them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
import collections
import dataclasses
import itertools
import math
import re
import string

from dgr2_jax.data import facts
from dgr2_jax.data import interactions


@dataclasses.dataclass(frozen=True)
class Text:
  """A piece of plain text."""
  text: str


@dataclasses.dataclass(frozen=True)
class Special:
  """A piece that is one special token."""
  name: str


Piece = Text | Special

MASK = '<|mask|>'
PAD = '<|endoftext|>'
EOS = '<|im_end|>'

# The json form: Qwen3's chat template.
TURN = '<|im_start|>'
THINK_BEGIN = '<think>'
THINK_END = '</think>'

# The compact form.
HISTORY = '<|history|>'
CANDIDATES = '<|candidates|>'
REASON = '<|reason|>'
ANSWER = '<|answer|>'

SID_BEGIN = '<|sid_begin|>'
SID_END = '<|sid_end|>'
# A whole semantic id in a text.
SEMANTIC_ID = re.compile(
    rf'{re.escape(SID_BEGIN)}(?:<s_[a-z]_[0-9]+>)+{re.escape(SID_END)}')

# Mid-training: each opens an example of a task.
PERSONA = '<|persona|>'
NEXT = '<|next|>'
DESCRIBE = '<|describe|>'
IDENTIFY = '<|identify|>'

NO_CATEGORY = '<|no_category|>'
OTHER_CATEGORY = '<|other_category|>'
NO_BRAND = '<|no_brand|>'
OTHER_BRAND = '<|other_brand|>'

# Most tokens that joined trace facts may add to a vocabulary.
MAX_JOINED = 4096


def candidate(index: int) -> str:
  """The token of candidate `index`, counted from one."""
  return f'<|c{index}|>'


def semantic_id(codes: Sequence[int]) -> list[Special]:
  """A semantic id, int [levels], as pieces."""
  names = (f'<s_{letter}_{code}>'
           for letter, code in zip(string.ascii_lowercase, codes, strict=False))
  return [Special(SID_BEGIN), *map(Special, names), Special(SID_END)]


def semantic_id_text(codes: Sequence[int]) -> str:
  """A semantic id, int [levels], as text."""
  return ''.join(piece.name for piece in semantic_id(codes))


def from_semantic_id_text(text: str) -> list[Special]:
  """A semantic id that `SEMANTIC_ID` matches, as pieces."""
  return [Special(name) for name in re.findall('<[^<>]+>', text)]


def fact(name: str, level: int) -> str:
  """The token of a fact at a level."""
  return f'<|{name}_{level}|>'


def grade(level: int) -> str:
  """The token of a candidate's grade."""
  return f'<|grade_{level}|>'


def joined_facts(names: Sequence[str], levels: Sequence[int]) -> str:
  """The token of several facts at their levels."""
  return '<|' + ' '.join(
      f'{n}_{level}' for n, level in zip(names, levels, strict=True)) + '|>'


def category(path: Sequence[str], known: Container[str]) -> str:
  """The token of a leaf category, given by its path; `known` has the names."""
  if not path:
    return NO_CATEGORY
  name = f'<|category: {" > ".join(path)}|>'
  return name if name in known else OTHER_CATEGORY


def brand(name: str, known: Container[str]) -> str:
  """The token of a brand; `known` has the names."""
  if not name:
    return NO_BRAND
  name = f'<|brand: {name}|>'
  return name if name in known else OTHER_BRAND


def chat_names() -> list[str]:
  """Structure tokens of the json form."""
  return [PAD, EOS, TURN, THINK_BEGIN, THINK_END]


def compact_names(num_candidates: int) -> list[str]:
  """Structure and candidate tokens of the compact form."""
  return [PAD, EOS, HISTORY, CANDIDATES, REASON, ANSWER,
          *(candidate(i + 1) for i in range(num_candidates))]


def semantic_id_names(levels: int, codes: int) -> list[str]:
  """All tokens of semantic ids.

  Raises:
    ValueError: there are more levels than letters.
  """
  if levels > len(string.ascii_lowercase):
    raise ValueError(
        f'semantic_ids.levels is {levels}: expected at most '
        f'{len(string.ascii_lowercase)}.')
  return [SID_BEGIN,
          *(f'<s_{letter}_{code}>' for letter in string.ascii_lowercase[:levels]
            for code in range(codes)),
          SID_END]


def fact_names(names: Iterable[str]) -> list[str]:
  """All tokens of the facts called `names`."""
  return [fact(name, level) for name in names
          for level in range(facts.FACTS[facts.index(name)].levels)]


def joined_fact_names(names: Sequence[str]) -> list[str]:
  """All tokens that join the facts called `names`.

  Raises:
    ValueError: the product of the levels is above `MAX_JOINED`.
  """
  levels = [facts.FACTS[facts.index(name)].levels for name in names]
  if math.prod(levels) > MAX_JOINED:
    raise ValueError(
        f'prompt.trace.combine_facts or prompt.evidence joins {tuple(names)}: '
        f'{"x".join(map(str, levels))} = {math.prod(levels)} levels, expected '
        f'at most {MAX_JOINED}; join fewer facts.')
  return [joined_facts(names, combination)
          for combination in itertools.product(*map(range, levels))]


def attribute_names(
    items: Iterable[interactions.Item], num_brands: int) -> list[str]:
  """Tokens of every leaf category and of the most frequent brands.

  Args:
    items: the catalogue.
    num_brands: brands with a token of their own, most items first; the rest
      share `OTHER_BRAND`.
  """
  items = tuple(items)
  paths = sorted({item.categories for item in items if item.categories})
  counts = collections.Counter(item.brand for item in items if item.brand)
  brands = sorted(counts, key=lambda b: (-counts[b], b))[:num_brands]
  return list(dict.fromkeys([
      NO_CATEGORY, OTHER_CATEGORY,
      *(f'<|category: {" > ".join(path)}|>' for path in paths),
      NO_BRAND, OTHER_BRAND, *(f'<|brand: {b}|>' for b in brands)]))
