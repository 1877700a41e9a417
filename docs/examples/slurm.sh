#!/bin/bash
# A sweep under SLURM: eight tasks with a GPU each, every one with a fixed part of the shards. A task that is requeued goes on with what
# is missing.
#     sbatch docs/examples/slurm.sh spec.toml /shared/sweep
#SBATCH --job-name=fastar-sweep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=4
#SBATCH --requeue
set -e
spec=$1
out=$2
# torchrun sets the same variables.
srun bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID \
  python -m fastar_nodes.lab sweep "$0" --images 50000 --out "$1"' "$spec" "$out"
# All shards are finished: this draws nothing and prints the table.
python -m fastar_nodes.lab sweep "$spec" --images 50000 --out "$out" --device cuda
