# Go on training Llama 3.2 with 3B parameters on a folder of texts. Another size: --init_from=models/Llama-3.2-1B, and
# the --dataset that was prepared with its tokenizer.
#
#   python download_model.py --model=meta-llama/Llama-3.2-3B-Instruct
#   python prepare_data.py --dataset=raw_text/ --tokenizer=models/Llama-3.2-3B-Instruct
#   torchrun --nproc_per_node=4 train_fsdp.py config/finetune_llama.py
#   python export_model.py --out_dir=out/finetune_llama --to=models/my-llama

out_dir = 'out/finetune_llama'
init_from = 'models/Llama-3.2-3B-Instruct'
dataset = 'raw_text-Llama-3.2-3B-Instruct'  # the name that prepare_data.py gives to raw_text/ with this tokenizer

block_size = 4096  # of 131,072 positions; attention's cost grows with it
batch_size = 2
global_batch_size = 64  # x 4096 = 262,144 tokens per step: 2 sequences x 4 GPUs x 8 micro-steps
activation_checkpointing = 'full'  # 28 blocks keep 2 x 4096 x 3072 numbers each: 1.4 GB in bf16

num_epochs = 2
learning_rate = 1e-5  # a tenth to a thirtieth of pretraining's peak: more forgets what the model knows
min_lr = 1e-6
warmup_iters = 20
weight_decay = 0.0  # it would pull weights to 0 that somebody else has trained
beta2 = 0.95
grad_clip = 1.0

eval_interval = 50
eval_sequences = 256
checkpoint_interval = 100
