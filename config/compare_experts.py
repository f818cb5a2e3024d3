# What a step of a mixture of experts takes, compared with the dense model that computes as much per token and the dense
# model with as many parameters; in one process, and on 2 ranks that shard all of it or share the experts. 6 minutes on
# 2 CPU cores.
#
#   python compare.py config/compare_experts.py
#   python compare.py config/compare_experts.py --dtype=bfloat16 --compile=False --batch_size=32 --global_batch_size=64

strategies = []
_dense, _large = {'mlp_hidden_dim': 512}, {'mlp_hidden_dim': 2048}  # of 8 experts a token meets 2: 2/8 of 2048 is 512
_experts = {'n_experts': 8, 'expert_hidden_dim': 256}
_on_2 = {'strategy': 'fsdp_manual', 'nproc': 2}
variants = {
    'dense': {'strategy': 'single', **_dense},
    'dense_large': {'strategy': 'single', **_large},
    'experts': {'strategy': 'single', **_experts},
    'dense-2': {**_on_2, **_dense},
    'dense_large-2': {**_on_2, **_large},
    'experts-2': {**_on_2, **_experts},
    'experts-2-ep2': {**_on_2, **_experts, 'strategy': 'parallel', 'fsdp_impl': 'manual', 'expert_parallel': 2},
}
repeats = 3
out_dir = 'out/compare_experts'

arch = 'qwen3'
n_layer = 4
n_head = 4
n_embd = 256  # dense 2.6M parameters in blocks and as many are computed with 8 experts, of 7.3M
experts_per_token = 2
router_aux = 0.01
block_size = 256
batch_size = 8
global_batch_size = 16
dataset = 'synthetic'
vocab_size = 2048
dtype = 'float32'  # in bfloat16 a CPU compiles a kernel for each number of rows that an expert gets
max_iters = 12
learning_rate = 1e-3
warmup_iters = 5
compile = False
