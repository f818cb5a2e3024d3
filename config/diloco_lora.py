# LoRA on Qwen3 with 0.6B parameters (see config/finetune_qwen.py), by replicas that meet every 16 steps: only the two
# thin matrices added to each weight travel, 10M numbers of rank 16 instead of 596M.
#
#   torchrun --nproc_per_node=4 train_diloco.py config/diloco_lora.py --num_replicas=4
#   sbatch --nodes=4 slurm/diloco.sh config/diloco_lora.py

out_dir = 'out/diloco_lora'
init_from = 'models/Qwen3-0.6B-Base'
dataset = 'raw_text-Qwen3-0.6B-Base'

lora_rank = 16
block_size = 2048
batch_size = 4
global_batch_size = 64  # over all replicas
activation_checkpointing = 'full'

num_epochs = 2
learning_rate = 2e-4  # LoRA wants about 10 times that of all weights
min_lr = 2e-5
warmup_iters = 20
weight_decay = 0.0
beta2 = 0.95
grad_clip = 1.0  # of each replica by itself

inner_steps = 16
outer_lr = 1.0  # averaging: an outer momentum made LoRA worse at 16 and at 256 steps (a draft's figures, one seed)
outer_momentum = 0.0

eval_interval = 48
eval_sequences = 256
checkpoint_interval = 96  # a multiple of inner_steps: another number of replicas can resume such a checkpoint
