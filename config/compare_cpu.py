# Every strategy and ZeRO stage, where arithmetic outweighs Python: a table in docs/log.md. 20 min, 2 cores.
#
#   python prepare_data.py
#   python compare.py config/compare_cpu.py

strategies = ['single', 'ddp', 'fsdp', 'fsdp_manual', 'deepspeed', 'diloco']
nproc = [2]
zero_stages = [1, 2, 3]
inner_steps = [10]
repeats = 3
out_dir = 'out/compare_cpu'

arch = 'llama'
n_layer = 6
n_head = 4
n_embd = 256  # 6 x (4 x 256^2 + 3 x 256 x 704) + 2 x 2048 x 256 = 5.9M parameters
block_size = 256
batch_size = 4  # x 2 ranks x 256 = 2048 tokens per step
dataset = 'stdlib-bpe2048'
dtype = 'float32'
max_iters = 50
learning_rate = 5e-4  # with 1e-3 it has a spike at step 23, which magnifies rounding a thousandfold
warmup_iters = 10
log_interval = 5
