#!/bin/bash
#SBATCH --job-name=pool
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=h100:4
#SBATCH --cpus-per-task=48
#SBATCH --mem=0
#SBATCH --time=0-12:00
#SBATCH --array=1-4
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --output=slurm/logs/%x-%A_%a.out
#
# DiLoCo: each element of this array is a job of its own and a replica. They start when the queue lets them.
#
#     sbatch --array=1-8 slurm/pool.sh config/diloco_enoki.py --exchange="$RESULTS_DIR/enoki_pool"
#     sbatch --array=1 --nodes=4 slurm/pool.sh ...     # one more, of 16 GPUs, joins at the next round
#
# Before its time limit a job gives what it has learned, leaves, and is queued again until the pool has trained all.
: "${SCRIPT:=train_pool.py}" "${CONFIG:=config/diloco_enoki.py}"
# shellcheck source=slurm/common.sh
source slurm/common.sh || exit 1 # sbatch copies this file, but starts it where it was called

pool=$(argument exchange "$@")
# shellcheck disable=SC2016  # the user's shell is to expand it
[[ -n $pool ]] || fail 'where do the replicas meet? --exchange="$RESULTS_DIR/NAME", or an address such as s3://bucket/name'
if [[ $pool != *://* && ! -f $pool/pool.json && -z $(argument num_replicas "$@") ]]; then
    set -- "$@" --num_replicas="${SLURM_ARRAY_TASK_COUNT:-1}" # of a new pool; others take it from there
fi
folder=$(argument out_dir "$@")
if [[ -z $folder ]]; then
    folder=${RESULTS_DIR:?see slurm/local.example.sh}/$(run_name "$@")
fi
end_chain() { :; } # the other elements are jobs of their own,
try_again() { :; } # and none follows this one
launch "$@" --out_dir="$folder/replica_${SLURM_ARRAY_TASK_ID:-0}"
if [[ -f $OUT_DIR/PREEMPTED ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
