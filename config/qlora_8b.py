# Fine-tune Llama 3 with 8B parameters on conversations, on one GPU of 24 GB: linear layers in 4 bits, plus LoRA.
#
#   python download_model.py --model=meta-llama/Llama-3.1-8B-Instruct
#   python prepare_data.py --dataset=chats.jsonl --tokenizer=models/Llama-3.1-8B-Instruct --name=chats
#   python train_ddp.py config/qlora_8b.py --dry_run --device=cuda    # what it takes, predicted: 9.9 GB
#   python train_ddp.py config/qlora_8b.py    # with --frozen_dtype=bfloat16: 20.1 GB, the first choice if that fits
#   python export_model.py --out_dir=out/qlora_8b --to=models/my-llama    # merged into its base of 4 bits
#
# The dry run needs the config.json in the model's folder, and the dataset or --dataset=synthetic: no GPU, no weights.
# The export takes two copies of the fp32 weights in host memory, 64 GB, with --adapter as well. For a few thousand
# rows fewer steps have to do: docs/lora.md says which keys to change.
#
# On several GPUs `torchrun --nproc_per_node=4 train_fsdp.py config/qlora_8b.py` divides the bytes, too.

out_dir = 'out/qlora_8b'
init_from = 'models/Llama-3.1-8B-Instruct'
dataset = 'chats'

frozen_dtype = 'nf4'  # 3.7 GB for the blocks, where bfloat16 takes 14; embedding and head stay bfloat16, 2.1 GB
lora_rank = 16
lora_alpha = 16.0

dtype = 'bfloat16'
block_size = 4096
batch_size = 1
global_batch_size = 16
activation_checkpointing = 'full'

num_epochs = 2
learning_rate = 2e-4
min_lr = 2e-5
warmup_iters = 20
weight_decay = 0.0
beta2 = 0.95
grad_clip = 1.0

eval_interval = 50
eval_sequences = 64
checkpoint_interval = 100
