#!/usr/bin/env bash
# Runs a config on every host of a TPU slice, over gcloud.
#
#   TPU=name ZONE=us-east5-a WORKDIR=/mnt/shared/run \
#       bash experiments/launch/tpu_pod.sh --config=configs/beauty_qwen3_8b.py ...
#
# WORKDIR, data and checkpoint lie on a file system that all hosts mount; the
# project is in ~/dgr2_jax on every host (first: `setup`, with a Python of 3.11 or
# newer that the hosts have, PYTHON=python3 by default). JAX finds the hosts
# by itself. The same command again goes on from the last checkpoint.
set -euo pipefail
: "${TPU:?name of the slice}" "${ZONE:?its zone}"

everywhere() {
  gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all \
      --command="$1"
}

if [[ "${1:-}" == setup ]]; then
  everywhere "cd dgr2_jax && ${PYTHON:-python3} -m venv .venv &&
      .venv/bin/python -m pip install -e '.[tpu,hf]'"
  exit
fi
: "${WORKDIR:?a directory that all hosts share}"
printf -v flags '%q ' "$@"
everywhere "cd dgr2_jax && .venv/bin/python -m dgr2_jax.main --multihost=auto \
    --workdir=$(printf %q "$WORKDIR") $flags"
