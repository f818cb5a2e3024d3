# A model that writes sums, most of them wrong, for dpo_sums.py to begin with: 0.4M parameters, a minute on a CPU.
#
#   python benchmarks/make_sums.py
#   python prepare_data.py --dataset=sums/texts.jsonl --tokenizer=bytes --name=sums --val_fraction=0.05
#   python train_ddp.py config/sums.py

out_dir = 'out/sums'
dataset = 'sums'
eval_tasks = ['sums/sums.jsonl']  # 810 sums that are in no text: how many does it get right?

arch = 'qwen3'
n_layer = 3
n_head = 4
n_embd = 96
block_size = 64  # about six sums
batch_size = 16
global_batch_size = 16

max_iters = 700  # it still makes many mistakes
learning_rate = 3e-3
warmup_iters = 100
weight_decay = 0.1
dtype = 'float32'

log_interval = 100
eval_interval = 350
eval_tasks_interval = 350
checkpoint_interval = 350
keep_checkpoints = 1
