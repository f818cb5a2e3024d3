# Which of two sums is the right one? Preference optimisation of the model of sums.py, in half a minute on a CPU.
#
#   python prepare_data.py --pairs --dataset=sums/pairs.jsonl --tokenizer=bytes --name=sums_pairs --val_fraction=0.1
#   python train_dpo.py config/dpo_sums.py
#   python train_dpo.py config/dpo_sums.py --sft_weight=0.2 --out_dir=out/dpo_sums_sft

out_dir = 'out/dpo_sums'
init_from = 'out/sums'  # where it begins, and the reference
dataset = 'sums_pairs'
eval_tasks = ['sums/sums.jsonl']  # 810 sums that are in neither of the two data sets

batch_size = 8
global_batch_size = 8  # sequences of three pairs each

loss_type = 'sigmoid'
beta = 0.1
max_iters = 150
learning_rate = 1e-4
lr_schedule = 'constant'
warmup_iters = 10
weight_decay = 0.0
dtype = 'float32'

log_interval = 10
eval_interval = 50
eval_iters = 20
eval_tasks_interval = 50
checkpoint_interval = 150
keep_checkpoints = 1
