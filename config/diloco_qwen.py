# Qwen3 with 0.6B parameters (see config/finetune_qwen.py), sharded inside of each node by FSDP and trained across nodes
# by DiLoCo: nodes meet every 25 steps, to average what they have learned.
#
#   sbatch --nodes=4 slurm/diloco.sh config/diloco_qwen.py
#   torchrun --nproc_per_node=4 train_diloco.py config/diloco_qwen.py --num_replicas=2

out_dir = 'out/diloco_qwen'
init_from = 'models/Qwen3-0.6B-Base'
dataset = 'raw_text-Qwen3-0.6B-Base'

block_size = 2048
batch_size = 4
global_batch_size = 64  # over all replicas: 4 sequences x 16 GPUs; or x 8 GPUs x 2 micro-steps
activation_checkpointing = 'full'

num_epochs = 2
learning_rate = 2e-5
min_lr = 2e-6
warmup_iters = 20
weight_decay = 0.0
beta2 = 0.95
grad_clip = 1.0  # of each replica by itself

inner_steps = 25
outer_lr = 1.0  # with outer_momentum=0 the parameters are averaged: fine-tuning has too few rounds for a momentum
outer_momentum = 0.0
exchange_dtype = 'bfloat16'
error_feedback = True  # updates of 2e-5 are small compared with what bfloat16 rounds away

eval_interval = 50
eval_sequences = 256
checkpoint_interval = 100  # a multiple of inner_steps: another number of replicas can resume such a checkpoint
