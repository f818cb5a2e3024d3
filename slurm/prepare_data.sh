#!/bin/bash
#SBATCH --job-name=prepare_data
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=32G
#SBATCH --time=0-03:00
#SBATCH --output=slurm/logs/%x-%j.out
#
# Text to token shards in DATASETS_DIR. What has to be fetched is fetched on a login node, the work is a job without GPU:
#
#     bash slurm/prepare_data.sh --cache_tokenizer=gpt2
#     bash slurm/prepare_data.sh --dataset=fineweb-10BT --download_only
#     sbatch slurm/prepare_data.sh --dataset=fineweb-10BT --tokenizer=gpt2
#
# Cut by its time limit, the same command goes on where it was.
# shellcheck source=slurm/common.sh
source slurm/common.sh || exit 1 # sbatch copies this file, but starts it where it was called
require_datasets_dir
prepare_environment
if [[ ${OFFLINE:-0} == 1 ]]; then
    # tiktoken has no offline switch: a proxy that refuses makes a missing file an error now, not after minutes.
    export https_proxy=http://127.0.0.1:9
fi
exec "$PYTHON" prepare_data.py --data_dir="$DATASETS_DIR" --num_proc="${SLURM_CPUS_PER_TASK:-2}" "$@"
