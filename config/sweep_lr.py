# Which learning rate? A small model at five rates, three seeds at the best one. Some 7 minutes on 2 CPU cores.
#
#   python prepare_data.py
#   python compare.py config/sweep_lr.py
#   python compare.py config/sweep_lr.py --optimizer=muon --out_dir=out/sweep_muon     # of another optimizer
#
# If the best rate is at an edge, more are tried beyond it, a step of the grid each.

strategies = ['single']  # a run is one process
at_once = 2
sweep = {'learning_rate': [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]}
seeds = [1, 2, 3]  # the first for all rates
out_dir = 'out/sweep_lr'

arch = 'llama'
n_layer = 4
n_head = 4
n_embd = 128  # 4 x (4 x 128^2 + 3 x 128 x 384) + 2 x 2048 x 128 = 1.4M parameters
block_size = 128
batch_size = 16
max_iters = 400
warmup_iters = 40
min_lr = 0.0
dataset = 'stdlib-bpe2048'
dtype = 'float32'
log_interval = 50
eval_sequences = 1600  # what a difference of losses is measured on
