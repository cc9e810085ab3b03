"""Exports the weights of a stage as a Hugging Face directory.

    python -m dgr2_jax.tools.huggingface --workdir=DIR --stage=cft --output=OUT

OUT holds config.json, the tensors and the tokenizer, as `transformers` loads
them: the AR model of the stage. How the weights decode in blocks stands in
config.json under `block_diffusion`.
"""

from __future__ import annotations

from collections.abc import Sequence
import pathlib
import sys

from absl import app
from absl import flags
import ml_collections

from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import huggingface
from dgr2_jax.models import huggingface_weights
from dgr2_jax.training import experiment as experiment_lib

_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'The working directory of a run.', required=True)
_STAGE = flags.DEFINE_string(
    'stage', None, 'The stage whose best weights are exported.', required=True)
_OUTPUT = flags.DEFINE_string(
    'output', None, 'The directory to make.', required=True)
_MAX_POSITIONS = flags.DEFINE_integer(
    'max_positions', 0, 'The longest sequence that a server should accept; 0: '
    "the run's longest prompt with a response.")

# These stages come before the model has learned to fill blocks.
_AUTOREGRESSIVE = ('ar_sft', 'ar_rl')


def export(workdir: pathlib.Path, stage: str, output: pathlib.Path,
           max_positions: int = 0) -> None:
  """Writes the best weights of `stage` to `output`.

  Raises:
    ValueError: the run or the stage is not complete, or see
      `huggingface_weights.save`.
  """
  config = ml_collections.ConfigDict(
      huggingface.read_json(workdir / 'config.json'))
  experiment = experiment_lib.Experiment(config, workdir)
  data = experiment.data
  huggingface_weights.save(
      output, experiment.restore(stage), experiment.model.config,
      experiment.vocabulary,
      canvas_lib.AUTOREGRESSIVE if stage in _AUTOREGRESSIVE
      else experiment.canvas,
      max_positions or data.prompt_length + data.response_length,
      data.tokenizer.huggingface_files())


def main(argv: Sequence[str]) -> None:
  """Exports; what users can mend is one line on stderr and exit code 1."""
  del argv
  try:
    export(pathlib.Path(_WORKDIR.value).absolute(), _STAGE.value,
           pathlib.Path(_OUTPUT.value), _MAX_POSITIONS.value)
  except (ValueError, OSError) as e:
    sys.exit(f'error: {e}')


if __name__ == '__main__':
  app.run(main)
