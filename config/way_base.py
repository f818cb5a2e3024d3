# First stage of docs/whole_way.md: 1.3M parameters read the documentation of Python. 3 minutes on two cores.
#
#   python benchmarks/make_chats.py
#   python prepare_data.py --dataset=way/pages.jsonl --name=way_pages
#   torchrun --nproc_per_node=2 train_fsdp.py config/way_base.py

import os

out_dir = 'out/way/base'
dataset = 'way_pages'
windows = 'documents'  # each page is read from its beginning

arch = 'llama'
n_layer = 4
n_head = 4
n_embd = 128
block_size = 256

global_batch_size = 8
batch_size = global_batch_size // int(os.environ.get('WORLD_SIZE', '1'))
max_iters = 600  # 1.2M tokens: the pages, twice
learning_rate = 4e-3
min_lr = 0.0
warmup_iters = 60
dtype = 'float32'

log_interval = 50
eval_interval = 200
checkpoint_interval = 200
keep_checkpoints = 1
