"""A run that is killed within a round of rollouts, at an exact place.

    python -m tests.training.killed_run WHERE STAGE ROUND FLAGS_OF_MAIN ...

WHERE is `rollout`: some responses of the round are decoded, others not yet
parsed; or `update`: all are, and no step has been taken on them.
"""

import os
import signal
import sys

from dgr2_jax import main
from dgr2_jax.training import rollouts


def kill() -> None:
  os.kill(os.getpid(), signal.SIGKILL)


def arrange(where: str, stage: str, round_: int) -> None:
  """Makes rollouts kill the process."""
  collect, groups = rollouts.Rollouts.collect, rollouts.Rollouts._groups
  here = False

  def patched_collect(self, params, at, seed):
    nonlocal here
    here = self._stage == stage and at == round_
    batches = collect(self, params, at, seed)
    if here and where == 'update':
      kill()
    return batches

  def patched_groups(self, prompts, rollout):
    if here and where == 'rollout':
      kill()
    return groups(self, prompts, rollout)

  rollouts.Rollouts.collect = patched_collect
  rollouts.Rollouts._groups = patched_groups


if __name__ == '__main__':
  where, stage, round_ = sys.argv[1:4]
  arrange(where, stage, int(round_))
  del sys.argv[1:4]
  main.run()
