# Three sources in fixed shares, and another mix for the last fifth, where the learning rate falls.
#
#   python prepare_data.py --dataset=fineweb-10BT --tokenizer=gpt2 --name=web
#   python prepare_data.py --dataset=my_code/ --tokenizer=gpt2 --name=code
#   python prepare_data.py --dataset=my_books/ --tokenizer=gpt2 --name=books
#   torchrun --nproc_per_node=4 train_fsdp.py config/mixture.py --dry_run     # epochs of each source, and warnings
#   torchrun --nproc_per_node=4 train_fsdp.py config/mixture.py

out_dir = 'out/mixture'
dataset = 'web:0.7,code:0.2,books:0.1'
dataset_stages = ((0.8, 'web:0.3,code:0.3,books:0.4'),)  # wsd decays from 80% of the run on

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
batch_size = 16
global_batch_size = 512  # x 1024 = 524,288 tokens per step

max_iters = 10000  # 5.2B tokens
learning_rate = 6e-4
lr_schedule = 'wsd'
warmup_iters = 500
eval_interval = 500
eval_sequences = 1536  # 512 from each source: val_loss/web, val_loss/code, val_loss/books
