# Every strategy of compare.py once, small: do all of them train, agree, save and resume? Some 2 minutes on 2 CPU cores.
# Tensor, context, pipeline and expert parallelism are not among them; tests/test_layouts.py and their own tests have
# those.
#
#   python compare.py config/compare_smoke.py
#
# Two runs are there for a proof: DiLoCo whose replicas average their parameters after every step of plain SGD computes
# what data parallelism does, which averages gradients.

strategies = ['single', 'ddp', 'fsdp', 'fsdp_manual', 'deepspeed', 'diloco']
nproc = [2]
zero_stages = [3]
inner_steps = [5]
_sgd = {'optimizer': 'sgd', 'learning_rate': 0.1, 'grad_clip': 0.0}
_averages = {'inner_steps': 1, 'outer_lr': 1.0, 'outer_momentum': 0.0}
variants = {
    'fsdp_manual-zero1': {'strategy': 'fsdp_manual', 'zero_stage': 1},
    'deepspeed-zero1': {'strategy': 'deepspeed', 'zero_stage': 1},
    'ddp-sgd': {'strategy': 'ddp', **_sgd},
    'diloco-sgd-H1': {'strategy': 'diloco', **_sgd, **_averages},
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
