#!/usr/bin/env bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --signal=TERM@300
#SBATCH --requeue
# One process a node, all its GPUs: sbatch experiments/launch/slurm.sh --config=...
#
# JAX reads the hosts from Slurm. Five minutes before the time limit, or when the
# node is wanted back, SIGTERM ends the run after a step (of several hosts: after
# one that is logged), with a checkpoint and exit code 130, or at once where it
# does not train (143); the job is put into the queue again and goes on from
# there.
set -euo pipefail
: "${WORKDIR:?a directory that all nodes share}"
# Slurm's number of a process on its node is no choice of one GPU here.
JAX_LOCAL_DEVICE_IDS=$(seq -s, 0 $((SLURM_GPUS_ON_NODE - 1)))
export JAX_LOCAL_DEVICE_IDS
code=0
srun .venv/bin/python -m dgr2_jax.main --multihost=auto \
    --workdir="$WORKDIR" "$@" || code=$?
if ((code == 130 || code == 143)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
