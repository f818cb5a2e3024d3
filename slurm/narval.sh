#!/bin/bash
#SBATCH --job-name=narval
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=a100:4
#SBATCH --cpus-per-task=48
#SBATCH --mem=0
#SBATCH --time=0-03:00
#SBATCH --array=1-8%1
#SBATCH --signal=B:USR1@600
#SBATCH --output=slurm/logs/%x-%A_%a.out
#
# Narval: a node of 4 A100 40GB, 48 cores, 498 GB; no internet on compute nodes; at most 7 days.
# Half the memory of an H100: if --dry_run says so, lower batch_size; global_batch_size keeps the run the same.
# shellcheck source=slurm/common.sh
source slurm/common.sh || exit 1 # sbatch copies this file, but starts it where it was called
launch "$@"
