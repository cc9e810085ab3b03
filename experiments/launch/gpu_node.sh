#!/usr/bin/env bash
# A node of GPUs, one process: bash experiments/launch/gpu_node.sh --config=...
set -euo pipefail
: "${WORKDIR:?where checkpoints and the report go}"
# Memory is taken as it is needed up to this share, the rest is left to NCCL.
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-.92}"
exec .venv/bin/python -m dgr2_jax.main --workdir="$WORKDIR" "$@"
