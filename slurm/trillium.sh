#!/bin/bash
#SBATCH --job-name=trillium
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=96
#SBATCH --mem=0
#SBATCH --time=0-24:00
#SBATCH --array=1-8%1
#SBATCH --signal=B:USR1@600
#SBATCH --output=slurm/logs/%x-%A_%a.out
#
# Trillium: a node of 4 H100 80GB, 96 cores, 749 GB, asked for without a type name; no internet on compute nodes; at
# most 24 hours. HOME and PROJECT are read-only in jobs: clone this project below $SCRATCH and submit from there.
# shellcheck source=slurm/common.sh
source slurm/common.sh || exit 1 # sbatch copies this file, but starts it where it was called
launch "$@"
