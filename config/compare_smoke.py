# Every strategy of compare.py once, small: do all of them train, save and resume? A minute or two on 2 CPU cores.
# Whether they compute the same is what prove.py asks, also of tensor, context, pipeline and expert parallelism.
#
#   python compare.py config/compare_smoke.py

strategies = ['single', 'ddp', 'fsdp', 'fsdp_manual', 'deepspeed', 'diloco']
nproc = [2]
zero_stages = [3]
inner_steps = [5]
variants = {
    'fsdp_manual-zero1': {'strategy': 'fsdp_manual', 'zero_stage': 1},
    'deepspeed-zero1': {'strategy': 'deepspeed', 'zero_stage': 1},
}
repeats = 1
resume_check = True
out_dir = 'out/compare_smoke'

arch = 'llama'
n_layer = 2
n_head = 2
n_embd = 64  # 2 x 12 x 64 x 64 + 2 x 512 x 64 = 0.16M parameters: a step takes milliseconds
block_size = 64
batch_size = 2
dataset = 'synthetic'
vocab_size = 512
dtype = 'float32'
max_iters = 20
learning_rate = 3e-3
warmup_iters = 2
log_interval = 1
eval_sequences = 8
