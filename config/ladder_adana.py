# Which optimizer needs the least compute, and does its lead grow? Four sizes, four optimizers, each with its best rate.
#
#   python prepare_data.py --tokenizer=bytes --name=stdlib-bytes
#   python compare.py config/ladder_adana.py           # about 6 hours on 2 CPU cores; stopped, the same command goes on
#
# Enoki's rules (arXiv 2602.05298) with narrow heads; every size sees 20 tokens per parameter. Weight decay follows each
# optimizer's own rule, which `heads` brings. Twice the grid's step from a best rate costs about 0.01.

strategies = ['single']
at_once = 2
_vocabulary, _head, _tokens_per_step = 256, 32, 2048


def _size(heads, layers):
    width = _head * heads
    parameters = 12 * layers * width**2 + 2 * _vocabulary * width
    steps = 20 * parameters // _tokens_per_step
    return {'heads': heads, 'head_dim': _head, 'n_layer': layers, 'max_iters': steps, 'warmup_iters': steps // 50}


sizes = {'0.1M': _size(2, 2), '0.2M': _size(3, 2), '0.4M': _size(3, 3), '0.9M': _size(4, 4)}
recipes = {
    'adamw': {'optimizer': 'adamw', 'beta2': 0.999},
    'adana': {'optimizer': 'adana'},
    'dana-mk4': {'optimizer': 'dana-mk4'},
    'muon': {'optimizer': 'muon'},
}
sweep = {'learning_rate': [2e-3, 4e-3, 8e-3]}
seeds = [1, 2, 3]
out_dir = 'out/ladder_adana'

arch = 'enoki'
block_size = 128
batch_size = 16
z_loss = 1e-4
grad_clip = 0.5
lr_schedule = 'cos_inf'
dataset = 'stdlib-bytes'
dtype = 'float32'
log_interval = 100
eval_iters = 100
