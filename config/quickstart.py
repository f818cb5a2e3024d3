# A small model of Python code, trained on the standard library's own sources: at most 5 minutes on 2 CPU cores.
#
#   python prepare_data.py
#   torchrun --nproc_per_node=2 train_fsdp.py config/quickstart.py
#   python sample.py --out_dir=out/quickstart --prompt="def "

import os

out_dir = 'out/quickstart'
dataset = 'stdlib-bpe2048'  # 2.3M tokens of 3.2 bytes each

arch = 'llama'
n_layer = 4
n_head = 6
n_embd = 192  # 4 x (4 x 192^2 + 3 x 192 x 512) + 2 x 2048 x 192 = 2.6M parameters
block_size = 256  # about 800 bytes of code

global_batch_size = 8  # 8 x 256 = 2048 tokens per step: small, because the clock allows few tokens and each step learns
batch_size = global_batch_size // int(os.environ.get('WORLD_SIZE', '1'))  # no accumulation on 1, 2, 4 or 8 ranks
max_iters = 800  # 1.6M tokens: two thirds of the training text, once
learning_rate = 3e-3
min_lr = 0.0  # down to nothing: the last steps are what the validation loss gains most from
warmup_iters = 80

log_interval = 20
eval_interval = 200
eval_sequences = 880  # of 942: nearly the whole validation split
checkpoint_interval = 200
keep_checkpoints = 1
