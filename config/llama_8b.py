# Llama 3 with 8B parameters from scratch (arXiv 2407.21783, table 3). Which layout fits your cluster, and how fast:
#
#   python compare.py --plan config/llama_8b.py --gpus=64 --gpu=h100 --node_gpus=4
#   python prepare_data.py --dataset=fineweb-100BT --tokenizer=models/Llama-3.1-8B
#   sbatch --nodes=16 slurm/generic.sh config/llama_8b.py

out_dir = 'out/llama_8b'
dataset = 'fineweb-100BT-Llama-3.1-8B'

arch = 'llama'
n_layer = 32
n_head = 32
n_kv_head = 8
n_embd = 4096
mlp_hidden_dim = 14336
vocab_size = 128256
rope_theta = 500000.0
block_size = 8192

batch_size = 1
global_batch_size = 512  # x 8192 = 4.2M tokens per step: Llama 3 began with 4M
activation_checkpointing = 'selective'  # 25 GB for each sequence, where 'none' takes 41

max_iters = 24000  # x 4.2M = 100B tokens
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 1000
weight_decay = 0.1
beta2 = 0.95
grad_clip = 1.0

eval_interval = 500
eval_sequences = 1024
checkpoint_interval = 500
