# Teach a chat model which of two answers is the better one: direct preference optimisation, after sft_chat.py.
#
#   python prepare_data.py --pairs --dataset=pairs.jsonl --tokenizer=models/sft_chat --name=pairs
#   torchrun --nproc_per_node=4 train_dpo.py config/dpo_chat.py --strategy=fsdp
#   python sample.py --out_dir=out/dpo_chat --prompt="What did I ask you to remember?"

out_dir = 'out/dpo_chat'
init_from = 'models/sft_chat'  # `python export_model.py --out_dir=out/sft_chat`: the reference, and where it begins
dataset = 'pairs'

block_size = 2048  # both answers of a pair with their prompts; longer pairs are left out, and you are told
batch_size = 2
global_batch_size = 32  # sequences; the log says how many pairs these hold: 64 to 128 are usual
activation_checkpointing = 'full'

loss_type = 'sigmoid'
beta = 0.1
num_epochs = 1
learning_rate = 5e-7  # with a lora_rank ten times as much
min_lr = 0.0
lr_schedule = 'linear'
warmup_iters = 10
weight_decay = 0.0
beta2 = 0.95
grad_clip = 1.0

eval_interval = 20
eval_sequences = 128
checkpoint_interval = 50
