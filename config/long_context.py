# A trained model for four times as many tokens: that of config/quickstart.py, from 256 to 1024 by YaRN.
#
#   torchrun --nproc_per_node=4 train_parallel.py config/long_context.py --context_parallel=4
#   python sample.py --out_dir=out/long_context --prompt="def "
#
# The same for a model of transformers, from 32,768 to 131,072 tokens; 8 GPUs share each sequence:
#
#   torchrun --nproc_per_node=8 train_parallel.py config/long_context.py --context_parallel=8 --block_size=131072 \
#       --init_from=models/Qwen3-0.6B-Base --dataset=raw_text-Qwen3-0.6B-Base --learning_rate=2e-5

out_dir = 'out/long_context'
init_from = 'out/quickstart'  # a run of ours, or a folder of transformers
dataset = 'stdlib-bpe2048'

yarn = 4  # or rope_theta = 80000.0 in its place: docs/long_context.md compares them
block_size = 1024  # 4 x 256; with context_parallel a multiple of twice that

batch_size = 1
global_batch_size = 4
activation_checkpointing = 'offload'  # inputs of blocks wait in host memory; on a CPU as 'full'

max_iters = 40  # a model learns its new rotation from few tokens: YaRN's paper takes 0.1% of those of pretraining
learning_rate = 1e-3  # a third of what it was trained with
min_lr = 0.0
warmup_iters = 4

log_interval = 5
eval_interval = 0
checkpoint_interval = 0
keep_checkpoints = 1
