# The model of config/quickstart.py, trained by replicas that meet every 20 steps: at most 5 minutes on 2 CPU cores.
#
#   python prepare_data.py
#   torchrun --nproc_per_node=2 train_diloco.py config/diloco_quickstart.py --num_replicas=2
#   python sample.py --out_dir=out/diloco_quickstart --prompt="def "

import os

out_dir = 'out/diloco_quickstart'
dataset = 'stdlib-bpe2048'

arch = 'llama'
n_layer = 4
n_head = 6
n_embd = 192
block_size = 256

global_batch_size = 8  # over all replicas: with two, each trains on 4 sequences per step
batch_size = global_batch_size // int(os.environ.get('WORLD_SIZE', '1'))
max_iters = 800
learning_rate = 3e-3
min_lr = 0.0
warmup_iters = 80

inner_steps = 20  # 40 rounds
outer_lr = 0.7
outer_momentum = 0.6

log_interval = 20
eval_interval = 200
eval_sequences = 880
checkpoint_interval = 200
keep_checkpoints = 1
