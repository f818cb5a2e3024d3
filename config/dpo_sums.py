# Which of two sums is the right one? Preference optimisation of the model of sums.py, in half a minute on a CPU.
#
#   python prepare_data.py --pairs --dataset=sums/pairs.jsonl --tokenizer=bytes --name=sums_pairs --val_fraction=0.1
#   python train_dpo.py config/dpo_sums.py
#   python train_dpo.py config/dpo_sums.py --sft_weight=0.2 --out_dir=out/dpo_sums_sft

import os

out_dir = 'out/dpo_sums'
init_from = 'out/sums'  # where it begins, and the reference
dataset = 'sums_pairs'
eval_tasks = ['sums/sums.jsonl']  # 810 sums that are in neither of the two data sets, answered greedily

global_batch_size = 8  # sequences of three pairs each
batch_size = global_batch_size // int(os.environ.get('WORLD_SIZE', '1'))

loss_type = 'sigmoid'
beta = 0.1
max_iters = 600  # the 1,781 pairs eight times
learning_rate = 2e-4
lr_schedule = 'linear'
min_lr = 0.0
warmup_iters = 10
weight_decay = 0.0
dtype = 'float32'

log_interval = 50
eval_interval = 100
eval_sequences = 160
eval_tasks_interval = 100
checkpoint_interval = 600
keep_checkpoints = 1
