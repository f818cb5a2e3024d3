# GPT-2 with 124M parameters on 10B tokens of FineWeb, with nanoGPT's hyperparameters (its config/train_gpt2.py).
#
#   python prepare_data.py --dataset=fineweb-10BT --tokenizer=gpt2
#   torchrun --nproc_per_node=8 train_ddp.py config/gpt2_124m.py     # or python train_ddp.py, with one GPU

out_dir = 'out/gpt2_124m'
dataset = 'fineweb-10BT-gpt2'

arch = 'gpt2'
n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
bias = False  # nanoGPT's choice: a little faster, a little better

batch_size = 16  # 16 sequences x 8 ranks x 4 micro-steps = 512
global_batch_size = 512  # x 1024 = 524,288 tokens per step; nanoGPT has 480

max_iters = 19000  # x 524,288 = 10.0B tokens, about one pass; nanoGPT goes on to 600,000
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 700  # 367M tokens, about GPT-3's 375M; nanoGPT's 2000 belong to a longer run
weight_decay = 0.1
beta2 = 0.95
grad_clip = 1.0

eval_interval = 500
eval_sequences = 10240  # x 1024 = 10.5M tokens
checkpoint_interval = 1000
