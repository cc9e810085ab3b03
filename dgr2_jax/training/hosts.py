"""Joining the other processes of a job that spans hosts."""

from __future__ import annotations

import re

from absl import logging
import jax

_EXPLICIT = re.compile(r'(?P<address>[^,\s]+:\d+),(?P<index>\d+)/(?P<count>\d+)')


def join(where: str) -> None:
  """Connects this process to its job; before anything else asks for devices.

  Args:
    where: 'auto' where JAX finds the others by itself (TPU pods, Slurm, GKE,
      Open MPI), else 'HOST:PORT,I/N': process I of N, counted from zero, and
      the address at which process 0 listens.

  Raises:
    ValueError: `where` is neither, or the others could not be reached.
  """
  match = _EXPLICIT.fullmatch(where)
  explicit = {}
  if match:
    explicit = dict(coordinator_address=match['address'],
                    num_processes=int(match['count']),
                    process_id=int(match['index']))
  if where != 'auto' and not (match and int(match['index'])
                              < int(match['count'])):
    raise ValueError(f'--multihost={where}: expected auto, or HOST:PORT,I/N '
                     'with I below N')
  # JAX would keep SIGTERM to itself, and a run could not be ended by it.
  jax.config.update('jax_enable_preemption_service', False)
  try:
    jax.distributed.initialize(**explicit)
  except (RuntimeError, ValueError) as e:
    raise ValueError(f'--multihost={where}: {e}') from e
  logging.info('Process %d of %d, with %d of %d devices.', jax.process_index(),
               jax.process_count(), jax.local_device_count(),
               jax.device_count())
