# One optimizer step of a tiny model on random tokens and one small checkpoint: the first thing to run on a new cluster.
#
#   torchrun --nproc_per_node=4 train_fsdp.py config/sanity_check.py    # or any other train script
#
# The last line says `done`. A second run finds it done: remove out/sanity_check to repeat it.

out_dir = 'out/sanity_check'
dataset = 'synthetic'  # random tokens made on the fly: nothing to prepare
vocab_size = 512

arch = 'llama'
n_layer = 2
n_head = 2
n_embd = 64  # 2 blocks x 12 x 64 x 64 + 2 x 512 x 64 = about 0.2M parameters
block_size = 64

batch_size = 2  # per rank; the global batch is 2 x ranks, so that it fits any number of them
max_iters = 1
warmup_iters = 0
learning_rate = 1e-3
log_interval = 1
eval_sequences = 8
