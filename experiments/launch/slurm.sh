#!/usr/bin/env bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --signal=TERM@120
#SBATCH --requeue
# One process a node, all its GPUs: sbatch experiments/launch/slurm.sh --config=...
#
# JAX reads the hosts from Slurm. Two minutes before the time limit, or when the
# node is wanted back, SIGTERM ends the run after its step, with a checkpoint and
# exit code 130; the requeued job goes on from there.
set -euo pipefail
: "${WORKDIR:?a directory that all nodes share}"
srun .venv/bin/python -m dgr2_jax.main --multihost=auto \
    --workdir="$WORKDIR" "$@"
