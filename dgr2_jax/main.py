"""Trains, evaluates and reports a generative re-ranker.

    python -m dgr2_jax.main --config=configs/quickstart.py --workdir=DIR
    python -m dgr2_jax.main --config=configs/quickstart.py --workdir=OTHER \\
        --stage=prepare --config.cft.steps=500

    python -m dgr2_jax.main --config=configs/quickstart.py --workdir=SWEEP \\
        --print_sweep

Without --stage every stage of the config's recipe runs in order:

    prepare    data: requests, candidates, prompts and responses
    mid_train  a language model of the catalogue, where the recipe has it
    ar_sft     the autoregressive re-ranker, fine-tuned
    ar_rl      and trained by its rewards
    convert    its weights as a block-diffusion model
    cft        conversion fine-tuning
    opd        on-policy distillation from the autoregressive one
    rl         reinforcement learning
    evaluate   report.html, report.md and report.json in the workdir

configs/ has one commented file an experiment: quickstart.py (an embedded
catalogue, minutes on a CPU; quickstart.py:smoke to see that all runs),
beauty_small.py, forkme.py to copy for data of your own, and beauty_qwen3_8b.py.
Any field can be set as --config.section.field=value, in a new workdir. The same
command again goes on from where it was stopped. --print_sweep lists the runs of
the config's sweep() as commands, and runs none. The exit code is 0 only when
the work is complete.

Then: python -m dgr2_jax.rerank --model=DIR answers requests, and python -m
dgr2_jax.tools.compare DIR OTHER puts reports side by side. docs/ says more.
"""

from __future__ import annotations

from collections.abc import Sequence
import difflib
import re
import sys

from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags

from dgr2_jax import interruption

_CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'A file of configs/; its get_config() returns the config.')
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Directory for checkpoints, metrics and the report.')
_STAGE = flags.DEFINE_string(
    'stage', None, 'Run this stage only; an unknown name lists them.')
_MULTIHOST = flags.DEFINE_string(
    'multihost', None, 'One process a host of a job: "auto" where JAX finds '
    'the others (TPU pods, Slurm, GKE, MPI), else HOST:PORT,I/N for process I '
    'of N, from zero, with the address of the first. All share --workdir.')
_PRINT_SWEEP = flags.DEFINE_bool(
    'print_sweep', False, "List the commands of the config's sweep() and end.")
_INTERRUPTED = (
    'interrupted; the same command goes on from the last checkpoint.')
_DEBUG = flags.DEFINE_bool(
    'debug', False, 'Show the traceback of errors in config or data.')


class UsageError(Exception):
  """The command line is wrong; the message says how."""


def _fields(config, prefix: str = 'config') -> list[str]:
  names = []
  for name, value in config.items():
    names.append(f'{prefix}.{name}')
    if hasattr(value, 'items'):
      names += _fields(value, names[-1])
  return names


def _unknown_field(argv: Sequence[str]) -> str | None:
  """Names the first --config.x that the config has not, and likely ones."""
  override = re.compile(r'--?(?:no)?(config(?:\.\w+)+)')
  rest = [arg for arg in argv if not override.match(arg)]
  # The flags proper are half-parsed by now: read the config file afresh.
  values = flags.FlagValues()
  config = config_flags.DEFINE_config_file('config', None, '', values,
                                           sys_argv=rest)
  values(rest, known_only=True)
  known = _fields(config.value)
  for match in filter(None, map(override.match, argv)):
    field = match.group(1)
    if field not in known:
      leaves = [name for name in known
                if not any(other.startswith(f'{name}.') for other in known)]
      likely = [name for name in leaves
                if name.split('.')[-1] == field.split('.')[-1]]
      likely = likely or difflib.get_close_matches(field, leaves, 2, 0.75)
      return f'The config has no field --{field}.' + (
          f' Did you mean --{" or --".join(likely)}?' if likely else '')
  return None


def parse_flags(argv: Sequence[str]) -> list[str]:
  """Parses the command line, explaining a mistyped config field."""
  try:
    args = flags.FLAGS(list(argv))
    if len(args) > 1:
      raise UsageError(f'Unexpected argument {args[1]!r}; values are given as '
                       '--flag=value.')
    for flag in (_CONFIG, _WORKDIR):
      if flags.FLAGS[flag.name].value is None:
        raise UsageError(f'--{flag.name} is required; see --help.')
    _CONFIG.value.items()  # a config file that could not be read raises here
    return args
  except (UsageError, OSError, ImportError, flags.Error) as e:
    _fail(_one_line(str(e)), e)
  except Exception as e:
    # ml_collections raises several types for fields that are not there.
    message = _unknown_field(argv)
    if message is None:
      raise
    _fail(message, e)


def _one_line(message: str) -> str:
  """A message on one line; a traceback in it shrinks to what was raised."""
  what, traceback, rest = message.partition('Traceback')
  if traceback:  # ml_collections', of a config file that raises
    message = f'{what} {rest.strip().splitlines()[-1]}'
  return ' '.join(message.split())


def _fail(message: str, error: BaseException, code: int = 1) -> None:
  """Ends the process with one line on stderr."""
  if flags.FLAGS.is_parsed() and _DEBUG.value:
    raise error
  print(f'error: {message}', file=sys.stderr)
  sys.exit(code)


def _print_sweep() -> None:
  # JAX is slow to import.
  from dgr2_jax.training import sweeps

  given = []
  for arg in sys.argv[1:]:  # --flag value is --flag=value
    if arg.startswith('-'):
      given.append(arg)
    else:
      given[-1] += f'={arg}'
  own = {name: next((arg.partition('=')[2] for arg in given
                     if re.match(f'--?{name}(=|$)', arg)), '')
         for name in ('config', 'workdir', 'print_sweep')}
  if any(re.match('--?stage(=|$)', arg) for arg in given):
    raise ValueError('--print_sweep lists whole runs: leave out --stage')
  others = [arg for arg in given
            if arg.lstrip('-').partition('=')[0] not in own]
  for line in sweeps.commands(own['config'], own['workdir'], others,
                              sweeps.of(own['config'])):
    print(line)


def main(argv: Sequence[str]) -> None:
  """Runs the stages; maps what users can mend to one line and exit code 1."""
  del argv
  if _PRINT_SWEEP.value:
    try:
      return _print_sweep()
    except ValueError as e:
      _fail(str(e), e)
  # JAX is slow to import: the command line is checked first.
  from dgr2_jax.training import hosts
  from dgr2_jax.training import logging as metrics_logging
  from dgr2_jax.training import loop
  from dgr2_jax.training import stages
  from dgr2_jax.training import validation
  from dgr2_jax.training import workdir

  if not flags.FLAGS['verbosity'].present:
    logging.set_verbosity(logging.INFO)
  metrics_logging.hide_library_chatter()
  try:
    if _STAGE.value is not None and _STAGE.value not in stages.STAGES:
      raise UsageError(f'--stage={_STAGE.value}: unknown; the stages are '
                       f'{", ".join(stages.STAGES)}.')
    validation.check(_CONFIG.value)
    if _MULTIHOST.value is not None:
      hosts.join(_MULTIHOST.value)
    stages.plan(_CONFIG.value, _STAGE.value)
    with workdir.open_workdir(_WORKDIR.value, _CONFIG.value) as directory:
      stages.run(_CONFIG.value, directory, _STAGE.value)
  except loop.Interrupted as e:
    _fail(str(e), e, code=130)
  except KeyboardInterrupt as e:
    _fail(_INTERRUPTED, e, code=130)
  except (UsageError, workdir.WorkdirError, loop.TrainingError) as e:
    _fail(str(e), e)
  # ValueError covers bad fields of the config and the data's DataError.
  except (ValueError, OSError) as e:
    _fail(f'{e} (--debug shows where)', e)


def run() -> None:
  """The entry point, also of an installed console script."""
  app.run(main, flags_parser=parse_flags)


if __name__ == '__main__':
  interruption.ends_with(_INTERRUPTED)
  run()
