"""Exports the weights of a stage as a Hugging Face directory.

    python -m dgr2_jax.tools.huggingface --workdir=DIR --stage=cft --output=OUT

OUT holds config.json, the tensors and the tokenizer, as `transformers` loads
them: the AR model of the stage. How the weights decode in blocks stands in
config.json under `block_diffusion`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import pathlib
import sys

from dgr2_jax.models import huggingface_weights
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import logging as metrics_logging
from dgr2_jax.training import losses
from dgr2_jax.training import workdir as workdir_lib


def export(workdir: pathlib.Path, stage: str, output: pathlib.Path,
           max_positions: int = 0) -> None:
  """Writes the best weights of `stage` to `output`.

  Raises:
    workdir.WorkdirError: it is no working directory.
    ValueError: the stage is not complete, or see `huggingface_weights.save`.
  """
  config = workdir_lib.read_config(workdir)
  experiment = experiment_lib.Experiment.here(config, workdir)
  data = experiment.data
  huggingface_weights.save(
      output, experiment.restore(stage), experiment.model.config,
      experiment.vocabulary,
      losses.canvas_of(experiment, stage),
      max_positions or data.prompt_length + data.response_length,
      data.tokenizer.huggingface_files())


def main(argv: Sequence[str] | None = None) -> None:
  """Exports; what users can mend is one line on stderr and exit code 1."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--workdir', type=pathlib.Path, required=True,
                      help='the working directory of a run')
  parser.add_argument('--stage', required=True,
                      help='the stage whose best weights are exported')
  parser.add_argument('--output', type=pathlib.Path, required=True,
                      help='the directory to make')
  parser.add_argument('--max_positions', type=int, default=0,
                      help='the longest sequence that a server should accept; '
                      "0: the run's longest prompt with a response")
  args = parser.parse_args(argv)
  metrics_logging.hide_library_chatter()
  try:
    export(args.workdir.absolute(), args.stage, args.output,
           args.max_positions)
  except (ValueError, OSError) as e:
    sys.exit(f'error: {e}')
  print(f'Wrote {args.output}')


if __name__ == '__main__':
  main()
