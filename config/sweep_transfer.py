# Does the learning rate of a small model suit one that is 8 times as wide? Both parametrizations, two widths, 7 rates.
# 11 minutes of CPU time.
#
#   python prepare_data.py --tokenizer=bytes --name=stdlib-bytes
#   python compare.py config/sweep_transfer.py

strategies = ['single']  # a run is one process
at_once = 2
sweep = {'learning_rate': [5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2]}
seeds = [1]
sizes = {f'width{n}': {'n_embd': n, 'n_head': n // 16, 'mlp_hidden_dim': 3 * n} for n in (32, 256)}
recipes = {'standard': {}, 'completep': {'parametrization': 'completep', 'base_width': 32, 'base_depth': 2}}
out_dir = 'out/sweep_transfer'

arch = 'llama'
n_layer = 2
block_size = 64
batch_size = 16
max_iters = 200
warmup_iters = 20
min_lr = 0.0
dataset = 'stdlib-bytes'
dtype = 'float32'
log_interval = 50
eval_sequences = 800
