#!/bin/bash
#SBATCH --job-name=rorqual
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=h100:4
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=0-03:00
#SBATCH --array=1-8%1
#SBATCH --signal=B:USR1@600
#SBATCH --output=slurm/logs/%x-%A_%a.out
#
# Rorqual: a node of 4 H100 80GB, 64 cores, 498 GB; no internet on compute nodes; at most 7 days.
#
#     sbatch slurm/rorqual.sh config/enoki_8h.py --learning_rate=1e-3
#     SCRIPT=train_ddp.py sbatch --time=1-00:00 --array=1-3%1 slurm/rorqual.sh config/enoki_8h.py
#
# Jobs of up to 3 hours start soonest there; the array makes a long run of them. %1: one element after the other.
# shellcheck source=slurm/common.sh
source slurm/common.sh || exit 1 # sbatch copies this file, but starts it where it was called
launch "$@"
