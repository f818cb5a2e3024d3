# Teach a chat model by rewards, where a program can tell right answers from wrong ones: here word problems (GSM8K).
#
#   python prepare_data.py --tasks=gsm8k
#   torchrun --nproc_per_node=4 train_grpo.py config/grpo_chat.py --strategy=fsdp
#   less out/grpo_chat/rollouts.jsonl

out_dir = 'out/grpo_chat'
init_from = 'models/Qwen3-0.6B'
prompts = ['tasks/gsm8k.fewshot.jsonl']  # the training split: prepare_data.py writes it for examples
prompts_chat = True
num_fewshot = 0
reward = 'flexible_extract'  # of GSM8K's rule: the last number is right; with your own rows use acc
eval_tasks = ['tasks/gsm8k.jsonl']
eval_tasks_limit = 200

prompts_per_step = 32
num_generations = 8
max_new_tokens = 512
generation_batch_size = 64
block_size = 1024  # a prompt and its answer have to fit
batch_size = 4
activation_checkpointing = 'full'

max_iters = 200
learning_rate = 1e-6  # with a lora_rank ten times as much
lr_schedule = 'constant'
warmup_iters = 10
weight_decay = 0.0
beta2 = 0.99
grad_clip = 1.0

log_interval = 1
eval_tasks_interval = 25
checkpoint_interval = 25
