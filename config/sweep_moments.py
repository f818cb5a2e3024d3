# What moments in fewer bits do to the loss: quickstart's model at equal tokens, two optimizers, three dtypes, 3 seeds.
# 18 runs of 800 steps, each as long as quickstart in one process: 75 minutes on 2 CPU cores.
#
#   python prepare_data.py
#   python compare.py config/sweep_moments.py

strategies = ['single']
at_once = 2
recipes = {
    f'{optimizer}_{dtype}': {'optimizer': optimizer, 'optimizer_dtype': dtype}
    for optimizer in ('adamw', 'adana')
    for dtype in ('float32', 'bfloat16', 'int8')
}
seeds = [1, 2, 3]
out_dir = 'out/sweep_moments'

arch = 'llama'
n_layer = 4
n_head = 6
n_embd = 192  # 2.6M parameters, of which 1.8M are in matrices that int8 is for
block_size = 256
batch_size = 8
max_iters = 800
learning_rate = 3e-3
beta2 = 0.999  # where rounding to the nearest would stall; of ADANA delta=8 after 800 steps is about 0.99
min_lr = 0.0
warmup_iters = 80
dataset = 'stdlib-bpe2048'
dtype = 'float32'
log_interval = 20
eval_interval = 200
eval_sequences = 880
keep_checkpoints = 0
