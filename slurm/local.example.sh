# shellcheck shell=bash
# Your settings. Copy to slurm/local.sh, which git ignores, fill in, and source it once per shell before sbatch:
#
#     cp slurm/local.example.sh slurm/local.sh
#     source slurm/local.sh
#
# sbatch reads the account before any script runs, hence the `source`; jobs read the rest by themselves.

export SBATCH_ACCOUNT=def-someprof # or sbatch --account=...; `sshare -U` lists yours
export SLURM_ACCOUNT=$SBATCH_ACCOUNT SALLOC_ACCOUNT=$SBATCH_ACCOUNT

export DATASETS_DIR=${SCRATCH:-$HOME}/datasets # what prepare_data.py writes: shards and the tokenizer's files
export RESULTS_DIR=${SCRATCH:-$HOME}/results   # checkpoints and logs, one folder per run
mkdir -p "$DATASETS_DIR" "$RESULTS_DIR"

# export COMPILE_CACHE=$SCRATCH/compiled # default: each job compiles anew, a minute or more
# export VENV=$SCRATCH/venv       # default: .venv in the project
# export MODULES='cuda/12.6'      # default: StdEnv/2023 gcc arrow python/3.12, where there is a module command
# export OFFLINE=1                # compute nodes without internet; known for Rorqual, Narval, Trillium and tamIA

# export WANDB_ENTITY=my-team
# The key never stands in a file of this project: `wandb login` keeps it in ~/.netrc, or keep it in a file of your own.
# WANDB_API_KEY=$(< "$HOME/.wandb_key") && export WANDB_API_KEY
# For gated models on the hub, on a login node: `hf auth login`, or
# HF_TOKEN=$(< "$HOME/.hf_token") && export HF_TOKEN
