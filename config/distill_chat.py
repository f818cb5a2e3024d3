# Teach a small chat model by a larger one of its family, on what the small one writes: here word problems (GSM8K).
#
#   python prepare_data.py --tasks=gsm8k
#   torchrun --nproc_per_node=4 train_distill.py config/distill_chat.py --strategy=fsdp
#   less out/distill_chat/rollouts.jsonl

out_dir = 'out/distill_chat'
init_from = 'models/Qwen3-0.6B'
teacher = 'models/Qwen3-1.7B'  # as many rows in its embedding, and the same tokenizer
prompts = ['tasks/gsm8k.fewshot.jsonl']  # the training split: prepare_data.py writes it for examples
prompts_chat = True
num_fewshot = 0
eval_tasks = ['tasks/gsm8k.jsonl']
eval_tasks_limit = 200

prompts_per_step = 32
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

log_interval = 1
eval_tasks_interval = 25
checkpoint_interval = 25
