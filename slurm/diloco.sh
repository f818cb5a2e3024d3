#!/bin/bash
#SBATCH --job-name=diloco
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=h100:4
#SBATCH --cpus-per-task=48
#SBATCH --mem=0
#SBATCH --time=0-12:00
#SBATCH --array=1-8%1
#SBATCH --signal=B:USR1@1800
#SBATCH --no-kill
#SBATCH --output=slurm/logs/%x-%A_%a.out
#
# DiLoCo: one replica per node, sharded over its GPUs; nodes exchange every inner_steps steps. There is no server process.
#
#     sbatch --nodes=4 slurm/diloco.sh                                          # config/diloco_enoki.py
#     sbatch --nodes=4 slurm/diloco.sh config/diloco_enoki.py --inner_steps=200 --exchange_dtype=int8
#     sbatch --nodes=2 --time=0:15:00 --array=1 slurm/diloco.sh config/diloco_enoki.py --verify
#
# A run stops at the end of a round: the warning, 1800 s before the time limit, leaves time for one. A node that is lost
# (--no-kill) leaves the others to go on from the last checkpoint; MIN_NODES=4 in the environment ends the job instead.
: "${SCRIPT:=train_diloco.py}" "${CONFIG:=config/diloco_enoki.py}" "${MIN_NODES:=1}"
# shellcheck source=slurm/common.sh
source slurm/common.sh || exit 1 # sbatch copies this file, but starts it where it was called
launch "$@"
