# The run of docs/tour.md: 60 steps of a small model on the text that quickstart.sh has prepared, about 15 seconds.
#
#   python train_ddp.py config/tour.py
#   torchrun --nproc_per_node=2 train_fsdp.py config/tour.py --out_dir=out/tour/two

out_dir = 'out/tour/one'
dataset = 'stdlib-bpe2048'

arch = 'llama'
n_layer = 4
n_head = 4
n_embd = 128  # 4 blocks x (4 x 128^2 + 3 x 128 x 384) + 2 x 2048 x 128 = 1.4M parameters
block_size = 128

batch_size = 4  # sequences per rank; on one process two micro-steps make the global batch, on two processes one each
global_batch_size = 8
max_iters = 60
lr_decay_iters = 60  # so that a run that is cut short with --max_iters is the beginning of the whole one
warmup_iters = 10
learning_rate = 1e-3
dtype = 'float32'  # so that what differs between two runs is a mistake, and not rounding to 8 bits

log_interval = 1
eval_sequences = 64
eval_interval = 30
checkpoint_interval = 10
