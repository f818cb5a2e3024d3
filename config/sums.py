# A model that writes sums, a third of them right: dpo_sums.py and grpo_sums.py begin with it. 0.4M parameters, half a
# minute on a CPU.
#
#   python benchmarks/make_sums.py
#   python prepare_data.py --dataset=sums/texts.jsonl --tokenizer=bytes --name=sums --val_fraction=0.05
#   python train_ddp.py config/sums.py

import os

out_dir = 'out/sums'
dataset = 'sums'
windows = 'documents'  # each sum attends to itself alone
eval_tasks = ['sums/sums.jsonl']  # 810 sums that are in no text: how many does it get right?

arch = 'qwen3'
n_layer = 3
n_head = 4
n_embd = 96
block_size = 64  # about six sums
global_batch_size = 16
batch_size = global_batch_size // int(os.environ.get('WORLD_SIZE', '1'))

# It reads 665 of the 8,100 sums, 47 times each. Then 31% of unseen sums are right when sampled at temperature 1, and of
# the likeliest answers 49%. (Another seed may need 50 steps more or 100.) After 800 steps 60% are right, and it is as
# sure of the others: its samples say the same over and over.
max_iters = 320
learning_rate = 1.5e-3
warmup_iters = 100
weight_decay = 0.1
dtype = 'float32'

log_interval = 100
eval_interval = 160
eval_tasks_interval = 160
checkpoint_interval = 320
keep_checkpoints = 1
