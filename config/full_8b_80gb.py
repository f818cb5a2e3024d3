# Train all weights of Llama 3.1 8B on one GPU of 80 GB: the moments rest in host memory, in 8 bits. Try it before:
#
#   python download_model.py --model=meta-llama/Llama-3.1-8B-Instruct
#   python prepare_data.py --dataset=raw_text/ --tokenizer=models/Llama-3.1-8B-Instruct
#   python train_fsdp.py config/full_8b_80gb.py --device=cuda --dtype=bfloat16 --dry_run
#   python train_fsdp.py config/full_8b_80gb.py
#
# In GB of 1e9 bytes, of 8.03e9 parameters, of which 1.05e9 are in embedding and head:
#
#   weights and gradients in fp32      8.03 x (4 + 4)                       64.2
#   weights of two blocks and head     in bf16                               3.4
#   the gradient of the head           in bf16, and in fp32 on its way       6.3, when the activations are gone
#   activations, logits of a chunk     1.1 + 4.9                             6.0, before that
#   the matmuls' workspace                                                   0.1
#   in all                                                                  74.0     an "80 GB" card has 85
#
#   moments, in host memory            6.98 x 2 x (1 + 4/256) + 1.05 x 8    22.6     in fp32 64.2
#
# On the GPU these moments do not fit: 74.0 + 22.6 = 96.6. Two GPUs hold them: leave cpu_offload out there.
# They cross PCIe in both directions in every step, 22.6 GB each: 0.4 s at 55 GB/s, beside 8 s of computing for 65,536
# tokens (5.1e10 FLOPs each, 4e14 a second).

out_dir = 'out/full_8b'
init_from = 'models/Llama-3.1-8B-Instruct'
dataset = 'raw_text-Llama-3.1-8B-Instruct'

cpu_offload = 'optimizer'
optimizer_dtype = 'int8'

block_size = 4096
batch_size = 1
global_batch_size = 16  # x 4096 = 65,536 tokens per step
activation_checkpointing = 'full'  # 32 blocks keep 4096 x 4096 numbers each: 1.1 GB in bf16

num_epochs = 2
learning_rate = 1e-5
min_lr = 1e-6
warmup_iters = 20
weight_decay = 0.0
beta2 = 0.95
grad_clip = 1.0

eval_interval = 50
eval_sequences = 64
checkpoint_interval = 200  # 96 GB each: moments are fp32 there, so that every other layout reads them
keep_checkpoints = 1
