# Third stage of docs/whole_way.md: which of two sums is right? 1 minute on two cores.
#
#   python prepare_data.py --dataset=way/pairs.jsonl --pairs --name=way_pairs --tokenizer=out/way/chat
#   python train_dpo.py config/way_dpo.py

import os

out_dir = 'out/way/dpo'
init_from = 'out/way/chat'
dataset = 'way_pairs'

global_batch_size = 8
batch_size = global_batch_size // int(os.environ.get('WORLD_SIZE', '1'))
sft_weight = 0.2  # without it the right answers become less likely, too, and fewer sums are right
num_epochs = 4
learning_rate = 2e-4
lr_schedule = 'linear'
min_lr = 0.0
warmup_iters = 10
weight_decay = 0.0
beta2 = 0.99
dtype = 'float32'

log_interval = 20
eval_interval = 100
checkpoint_interval = 100
keep_checkpoints = 1
