# A chat model of 135M parameters practises small products with LoRA, from right and wrong alone: docs/grpo.md.
#
#   python benchmarks/real_model.py
#   python benchmarks/make_sums.py
#   python train_grpo.py config/grpo_products.py

out_dir = 'out/grpo_products'
init_from = 'real/smollm2'
lora_rank = 16
lora_alpha = 32
prompts = ['sums/products.jsonl']
prompts_chat = True
eval_tasks = ['sums/unseen.jsonl']  # 64 products that are not among the prompts, answered greedily

prompts_per_step = 4
num_generations = 8
block_size = 256
batch_size = 4

max_iters = 40
learning_rate = 2e-4
lr_schedule = 'constant'
warmup_iters = 5
weight_decay = 0.0
beta2 = 0.99

log_interval = 1
eval_tasks_interval = 20
keep_checkpoints = 1
