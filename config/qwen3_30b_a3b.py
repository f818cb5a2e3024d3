# Qwen3-30B-A3B from scratch (arXiv 2505.09388): 30.5B parameters, of which 3.4B compute each token, on 8 nodes x 4 H100
# of 80 GB. docs/experts.md says what each of the keys does. What does it take, and which layouts are there?
#
#   RANK=0 LOCAL_RANK=0 WORLD_SIZE=32 LOCAL_WORLD_SIZE=4 MASTER_ADDR=none MASTER_PORT=0 \
#       python train_parallel.py config/qwen3_30b_a3b.py --dataset=synthetic --device=cuda --dtype=bfloat16 --dry_run
#   python compare.py --plan config/qwen3_30b_a3b.py --gpus=32 --gpu=h100 --node_gpus=4
#   python prepare_data.py --dataset=fineweb-100BT --tokenizer=models/Qwen3-30B-A3B
#   SCRIPT=train_parallel.py sbatch --nodes=8 --gpus-per-node=4 slurm/generic.sh config/qwen3_30b_a3b.py

out_dir = 'out/qwen3_30b_a3b'
dataset = 'fineweb-100BT-Qwen3-30B-A3B'

arch = 'qwen3'
n_layer = 48
n_head = 32
n_kv_head = 4
head_dim = 128
n_embd = 2048
n_experts = 128
experts_per_token = 8
expert_hidden_dim = 768
vocab_size = 151936
rope_theta = 1000000.0
tie_embeddings = False
router_aux = 0.001
block_size = 4096

# Weights, gradients and moments: 30.5B x 16 bytes / 32 ranks = 15.3 GB on each, with any expert_parallel. The experts
# of a block are 604M numbers, of which expert_parallel=4 leaves a rank a quarter: in bfloat16 0.3 GB while they compute
# in place of 1.2 GB, and three of these at once. The 4 ranks are those of a node: tokens travel over NVLink alone.
expert_parallel = 4
# A micro-step has 8 x 4096 tokens on a rank and so 262,144 rows for experts, 8 for each token; as many arrive if the
# routers are balanced. Without 'full' each layer would keep these rows several times: 'selective' does not fit.
batch_size = 8
activation_checkpointing = 'full'
global_batch_size = 1024  # = 8 sequences x 4 micro-steps x 32 ranks; x 4096 = 4.2M tokens per step
# Whole gradients of a rank's experts and of the rest would be 31 GB more ('unsharded'), for 6% fewer bytes sent.
accumulate = 'sharded'
# --dry_run says 34 GB on each GPU and 1170 GB sent per rank and step, of which 928 GB are tokens. The rest of the
# 80 GB is for routers that are not balanced yet: a rank may get up to four times as many rows.

max_iters = 24000  # x 4.2M = 100B tokens
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 1000
weight_decay = 0.1
beta2 = 0.95
grad_clip = 1.0

eval_interval = 500
eval_sequences = 2048
checkpoint_interval = 500
