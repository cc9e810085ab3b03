"""Published figures of accelerators: for the planner, and for MFU in the log.

They are the vendors' (Cloud TPU's system architecture pages; NVIDIA's data
sheets), peaks of dense bfloat16 products; nothing here was measured.
"""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Chip:
  """One chip.

  Attributes:
    name: as in `--topology=v5p:2x2x2`.
    kind: regular expression of JAX's `device_kind`.
    flops: peak of dense bfloat16 products a second.
    memory: bytes of high-bandwidth memory.
    bandwidth: bytes a second to and from it.
    links: bytes a second over the links between chips, both ways together.
    tpu: whether programs are compiled for it without one at hand.
  """
  name: str
  kind: str
  flops: float
  memory: float
  bandwidth: float
  links: float
  tpu: bool = False


CHIPS = (
    Chip('v4', r'TPU v4$', 275e12, 32 * 2 ** 30, 1228e9, 300e9, tpu=True),
    Chip('v5e', r'TPU v5 ?(e|lite)', 197e12, 16 * 2 ** 30, 819e9, 400e9,
         tpu=True),
    Chip('v5p', r'TPU v5p?$', 459e12, 95 * 2 ** 30, 2765e9, 1200e9, tpu=True),
    Chip('v6e', r'TPU v6 ?(e|lite)', 918e12, 32 * 2 ** 30, 1640e9, 800e9,
         tpu=True),
    Chip('a100', r'NVIDIA A100.*80GB', 312e12, 80e9, 2039e9, 600e9),
    Chip('h100', r'NVIDIA H100( 80GB HBM3|.*SXM)', 989e12, 80e9, 3350e9, 900e9),
    Chip('h200', r'NVIDIA H200', 989e12, 141e9, 4800e9, 900e9),
    Chip('b200', r'NVIDIA B200', 2250e12, 180e9, 7700e9, 1800e9),
)


def named(name: str) -> Chip:
  """The chip of that name.

  Raises:
    ValueError: there is none; the message lists them.
  """
  for chip in CHIPS:
    if chip.name == name:
      return chip
  raise ValueError(f'chip {name!r} is not known: expected one of '
                   + ', '.join(chip.name for chip in CHIPS))


def of_kind(device_kind: str) -> Chip | None:
  """The chip that JAX calls `device_kind`; None for others, such as CPUs."""
  return next((chip for chip in CHIPS if re.match(chip.kind, device_kind)),
              None)
