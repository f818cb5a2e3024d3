#!/bin/bash
#SBATCH --job-name=tamia
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=h100:4
#SBATCH --cpus-per-task=48
#SBATCH --mem=0
#SBATCH --time=0-24:00
#SBATCH --array=1-8%1
#SBATCH --signal=B:USR1@600
#SBATCH --output=slurm/logs/%x-%A_%a.out
#
# tamIA: whole nodes of 4 H100, 48 cores, 512 GB; no internet on compute nodes; at most 24 hours.
# The nodes of 8 H200, 64 cores, 1024 GB: sbatch --gpus-per-node=h200:8 --cpus-per-task=64 slurm/tamia.sh ...
# shellcheck source=slurm/common.sh
source slurm/common.sh || exit 1 # sbatch copies this file, but starts it where it was called
launch "$@"
