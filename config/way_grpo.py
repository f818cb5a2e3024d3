# Last stage of docs/whole_way.md: the chat model practises sums that nobody tells it. 7 minutes on two cores.
#
#   torchrun --nproc_per_node=2 train_grpo.py config/way_grpo.py --eval_tasks=way/sums.jsonl

out_dir = 'out/way/grpo'
init_from = 'out/way/chat'
prompts = ['way/practise.jsonl']

prompts_per_step = 64
num_generations = 8
batch_size = 64
max_iters = 150
learning_rate = 2e-4
lr_schedule = 'constant'
warmup_iters = 10
weight_decay = 0.0
beta2 = 0.99
dtype = 'float32'

log_interval = 10
checkpoint_interval = 50
keep_checkpoints = 1
