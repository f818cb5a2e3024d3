# How throughput grows with ranks and with the size of the model; the global batch, and so every loss, stays the same.
#
#   python compare.py config/compare_scaling.py               # a machine with 8 cores or 8 GPUs
#   python compare.py config/compare_scaling.py --nproc=1,2   # with 2: the larger models on their default of 2 ranks

strategies = ['ddp', 'fsdp', 'fsdp_manual']
nproc = [1, 2, 4, 8]
variants = {  # of the other sizes one pair each: what sharding costs shrinks as a model grows
    f'{strategy}-{n_embd}wide': {'strategy': strategy, 'nproc': 2, 'n_embd': n_embd, 'n_head': n_embd // 32}
    for n_embd in (256, 512)
    for strategy in ('ddp', 'fsdp_manual')
}
repeats = 3
out_dir = 'out/compare_scaling'

arch = 'llama'
n_layer = 4
n_head = 4
n_embd = 128
block_size = 128
batch_size = 2
global_batch_size = 16  # 2 sequences x 8 ranks x 1 micro-step, or x 1 rank x 8
max_iters = 30
learning_rate = 1e-3
warmup_iters = 5
