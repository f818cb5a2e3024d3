#!/bin/bash
#SBATCH --job-name=multi_node
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=h100:4
#SBATCH --cpus-per-task=48
#SBATCH --mem=0
#SBATCH --time=0-03:00
#SBATCH --array=1-8%1
#SBATCH --signal=B:USR1@600
#SBATCH --output=slurm/logs/%x-%A_%a.out
#
# Several nodes of any cluster: one torchrun on each, which meet on the first node. The defaults fit Rorqual and Fir.
#
#     sbatch --nodes=4 slurm/multi_node.sh config/enoki_8h.py --replicate_size=4
#     sbatch --gpus-per-node=a100:4 slurm/multi_node.sh ...     # Narval; 4 on Trillium, h100:8 on Nibi
#     SLURM_NNODES=4 bash slurm/multi_node.sh config/llama_1b.py --dry_run    # the plan of four nodes, on a login node
#
# replicate_size: copies of the sharded model. One per node keeps gathers inside of nodes; between them gradients travel.
# shellcheck source=slurm/common.sh
source slurm/common.sh || exit 1 # sbatch copies this file, but starts it where it was called
launch "$@"
