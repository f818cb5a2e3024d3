# Learning to add from right and wrong alone: GRPO of the model of sums.py, in some minutes on a CPU.
#
#   python train_grpo.py config/grpo_sums.py

out_dir = 'out/grpo_sums'
init_from = 'out/sums'
prompts = ['sums/prompts.jsonl']
eval_tasks = ['sums/sums.jsonl']  # 810 sums that are not among the prompts, answered greedily

prompts_per_step = 64
num_generations = 8
batch_size = 16  # sequences of about seven answers each

max_iters = 800
learning_rate = 1e-4  # with ten times as much it forgets within 50 steps what it knew
lr_schedule = 'linear'
min_lr = 0.0
warmup_iters = 10
weight_decay = 0.0
beta2 = 0.99  # gradients are noisy: most of a step's answers say little
dtype = 'float32'

log_interval = 50
eval_tasks_interval = 100
checkpoint_interval = 400
keep_checkpoints = 1
