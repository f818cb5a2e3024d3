#!/bin/bash
#SBATCH --job-name=compare
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=0-03:00
#SBATCH --output=slurm/logs/%x-%A_%a.out
#
# A run of a sweep: each element of an array does one. compare.py submits it, with other requests where you give some:
#
#     python compare.py config/sweep_lr.py --slurm='--gpus-per-node=h100:1 --time=1:00:00' --data_dir="$DATASETS_DIR"
# shellcheck source=slurm/common.sh
source slurm/common.sh || exit 1 # sbatch copies this file, but starts it where it was called
prepare_environment
exec "$PYTHON" compare.py "$@" --element="$SLURM_ARRAY_TASK_ID"
