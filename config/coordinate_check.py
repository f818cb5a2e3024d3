# Do activations keep their size as a model gets wider and deeper? Under the standard parametrization they do not, so
# each size wants a learning rate of its own. A minute or two on 2 CPU cores.
#
#   python prepare_data.py --tokenizer=bytes --name=stdlib-bytes
#   python compare.py config/coordinate_check.py
#   python compare.py config/coordinate_check.py --arch=llama --out_dir=out/coordinates_llama    # or --optimizer=muon
#
# 10 steps at a constant rate, then the mean |activation|: of the embedding, of the outputs of attention and MLP (mean
# over the blocks), of what leaves the last block, of the logits.

coordinates = {  # axis -> size -> keys
    'width': {n: {'n_embd': n, 'n_head': n // 16, 'mlp_hidden_dim': 4 * n} for n in (64, 128, 256, 512, 1024)},
    'depth': {n: {'n_layer': n} for n in (2, 4, 8, 16, 32)},
}
recipes = {
    'standard': {},
    'mup': {'parametrization': 'mup', 'base_width': 16},
    'completep': {'parametrization': 'completep', 'base_width': 16, 'base_depth': 1},
}
seeds = [1, 2, 3]
out_dir = 'out/coordinates'

arch = 'gpt2'
n_layer = 2
n_head = 4
n_embd = 64
mlp_hidden_dim = 256
block_size = 64
batch_size = 8
dataset = 'stdlib-bytes'
dtype = 'float32'
max_iters = 10
learning_rate = 1e-3
