# A Llama of 1.2B parameters from scratch, on your own text and 4 nodes of 4x H100 (docs/slurm.md).
#
#   python prepare_data.py --dataset=/path/to/jsonl --tokenizer=gpt2 --name=mytext
#   sbatch --nodes=4 slurm/multi_node.sh config/llama_1b.py --replicate_size=4
#   torchrun --nproc_per_node=4 train_fsdp.py config/llama_1b.py --dataset=synthetic --device=cuda --dry_run
#
# Parameters: 16 blocks x (2 x 2048 x 2048 + 2 x 512 x 2048 of attention + 3 x 2048 x 8192 of the MLP) = 973M, and the
# embedding and the head, 50,304 x 2048 = 103M each: 1.18B.

out_dir = 'out/llama_1b'
dataset = 'mytext'

arch = 'llama'
n_layer = 16
n_head = 32
n_kv_head = 8
n_embd = 2048
mlp_hidden_dim = 8192
vocab_size = 50304  # gpt2's 50,257, padded to a multiple of 64
rope_theta = 500000.0
block_size = 4096

batch_size = 4  # 4 sequences x 16 ranks x 4 micro-steps = 256; 8 ranks take 8 micro-steps, 64 ranks 1
global_batch_size = 256  # x 4096 = 1,048,576 tokens per step
activation_checkpointing = 'selective'

max_iters = 24000  # x 1,048,576 = 25B tokens, 21 for each parameter
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 1000
weight_decay = 0.1
beta2 = 0.95
grad_clip = 1.0

eval_interval = 500
eval_sequences = 1024  # x 4096 = 4.2M tokens
checkpoint_interval = 500
