#!/bin/bash
#SBATCH --job-name=generic
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=0-03:00
#SBATCH --array=1-8%1
#SBATCH --signal=B:USR1@600
#SBATCH --output=slurm/logs/%x-%A_%a.out
#
# Any Slurm cluster: one GPU of any kind. What differs goes to sbatch, or into SBATCH_ variables in slurm/local.sh:
#
#     sbatch --partition=gpu --gpus-per-node=4 --cpus-per-task=32 --mem=128G slurm/generic.sh config/enoki_8h.py
#
# MODULES in slurm/local.sh names what to load (MODULES='' loads nothing); OFFLINE=1 where nodes have no internet.
# shellcheck source=slurm/common.sh
source slurm/common.sh || exit 1 # sbatch copies this file, but starts it where it was called
launch "$@"
