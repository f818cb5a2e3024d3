#!/bin/bash
#SBATCH --job-name=nibi
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=h100:8
#SBATCH --cpus-per-task=112
#SBATCH --mem=0
#SBATCH --time=0-03:00
#SBATCH --array=1-8%1
#SBATCH --signal=B:USR1@600
#SBATCH --output=slurm/logs/%x-%A_%a.out
#
# Nibi: a node of 8 H100 80GB, 112 cores, 2000 GB; compute nodes reach the internet; at most 7 days.
# Nodes are joined by Ethernet, so prefer one node, or train_diloco.py over several.
# shellcheck source=slurm/common.sh
source slurm/common.sh || exit 1 # sbatch copies this file, but starts it where it was called
launch "$@"
