# Second stage of docs/whole_way.md: the model of way_base.py learns to answer. 3 minutes on two cores.
#
#   python prepare_data.py --dataset=way/chats.jsonl --name=way_chats --tokenizer=out/way/base
#   torchrun --nproc_per_node=2 train_fsdp.py config/way_chat.py
#   python sample.py --out_dir=out/way/chat

import os

out_dir = 'out/way/chat'
init_from = 'out/way/base'
dataset = 'way_chats'

global_batch_size = 8
batch_size = global_batch_size // int(os.environ.get('WORLD_SIZE', '1'))
num_epochs = 3  # then a quarter to a half of the sums are right, which leaves something to the stages behind it
learning_rate = 2e-3
min_lr = 0.0
warmup_iters = 50
dtype = 'float32'

log_interval = 50
eval_interval = 300
checkpoint_interval = 300
keep_checkpoints = 1
