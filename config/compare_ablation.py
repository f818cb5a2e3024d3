# What one key does to speed and memory, everything else being equal. Some 9 minutes on 2 CPU cores.
#
#   python compare.py config/compare_ablation.py
#   python compare.py config/compare_ablation.py --nproc=8 --dtype=bfloat16 --global_batch_size=256  # on GPUs
#
# Compared is with fsdp_manual as it is: nothing recomputed, the next block gathered ahead, whole gradients accumulated.

strategies = []
nproc = [2]
_runs = {
    'fsdp_manual': {},
    'checkpoint-selective': {'activation_checkpointing': 'selective'},
    'checkpoint-full': {'activation_checkpointing': 'full'},
    'prefetch0': {'prefetch': 0},  # communication and computation take turns
    'zero2': {'zero_stage': 2},
    'zero1': {'zero_stage': 1},
    'accumulate-sharded': {'accumulate': 'sharded'},
    '2-blocks-per-unit': {'blocks_per_unit': 2},
    'offload-params': {'cpu_offload': 'params'},
    'compile': {'compile': True},
}
variants = {label: {'strategy': 'fsdp_manual', **keys} for label, keys in _runs.items()}
repeats = 3
out_dir = 'out/compare_ablation'

arch = 'llama'
n_layer = 6
n_head = 4
n_embd = 128
block_size = 256
batch_size = 16  # 4096 tokens: enough for activations to outweigh what the process itself takes
global_batch_size = 64  # 16 sequences x 2 ranks x 2 micro-steps: with one, nothing would accumulate
max_iters = 12
learning_rate = 1e-3
warmup_iters = 5
compile = False
