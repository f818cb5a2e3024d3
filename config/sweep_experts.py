# Does a mixture of experts pay? A dense model and two mixtures that compute as much per token, at equal tokens, each at
# its own best rate, three seeds. 18 runs of 800 steps: 50 minutes on one CPU core.
#
#   python prepare_data.py
#   python compare.py config/sweep_experts.py
#   python compare.py config/sweep_experts.py --max_iters=2400 --warmup_iters=120 --out_dir=out/sweep_long  # whole text

strategies = ['single']
recipes = {
    'dense': {'mlp_hidden_dim': 384},
    '8_of_2': {'n_experts': 8},  # each 192 wide: two of them are as wide as the dense model's MLP
    '16_of_2': {'n_experts': 16},
}
sweep = {'learning_rate': [1.5e-3, 3e-3, 6e-3]}
seeds = [1, 2, 3]  # the first for all rates
out_dir = 'out/sweep_experts'

arch = 'qwen3'
n_layer = 4
n_head = 4
n_embd = 128  # 4 x (4 x 128^2 + 3 x 128 x 384) + 2 x 2048 x 128 = 1.4M parameters meet a token
experts_per_token = 2
expert_hidden_dim = 192
router_aux = 0.01
block_size = 128
batch_size = 8
max_iters = 800  # 0.8M tokens: a third of the training text, once
warmup_iters = 40
min_lr = 0.0
dataset = 'stdlib-bpe2048'
dtype = 'float32'
log_interval = 50
eval_sequences = 1600
keep_checkpoints = 0
