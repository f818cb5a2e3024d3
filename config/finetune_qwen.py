# Go on training Qwen3 with 0.6B parameters on a folder of texts; one GPU of 24 GB is enough.
#
#   python download_model.py --model=Qwen/Qwen3-0.6B-Base
#   python prepare_data.py --dataset=raw_text/ --tokenizer=models/Qwen3-0.6B-Base
#   python train_fsdp.py config/finetune_qwen.py
#   python train_fsdp.py config/finetune_qwen.py --lora_rank=16 --learning_rate=2e-4 --out_dir=out/qwen_lora
#   python export_model.py --out_dir=out/finetune_qwen --to=models/my-qwen

out_dir = 'out/finetune_qwen'
init_from = 'models/Qwen3-0.6B-Base'
dataset = 'raw_text-Qwen3-0.6B-Base'  # the name that prepare_data.py gives to raw_text/ with this tokenizer

block_size = 2048
batch_size = 4
global_batch_size = 32  # x 2048 = 65,536 tokens per step
activation_checkpointing = 'full'

num_epochs = 2
learning_rate = 2e-5
min_lr = 2e-6
warmup_iters = 20
weight_decay = 0.0  # it would pull weights to 0 that somebody else has trained
beta2 = 0.95
grad_clip = 1.0

eval_interval = 50
eval_sequences = 256
checkpoint_interval = 100
