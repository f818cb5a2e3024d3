# The Qwen3-like model of the ADANA paper's code with 6 heads: 12 layers of 768, 176M parameters, on 3.5B tokens.
#
#   python prepare_data.py --dataset=fineweb-10BT --tokenizer=gpt2
#   torchrun --nproc_per_node=4 train_fsdp.py config/qwen3_6h.py
#
# heads decides sizes, steps and learning rate (planning/rules.py). Each block has 14 n_embd^2 weights: queries and
# their gates 2, keys, values and output 3, SwiGLU 3 x 3. The published rule counts 12; the learning rate follows the
# true count.

out_dir = 'out/qwen3_6h'
dataset = 'fineweb-10BT-gpt2'

arch = 'qwen3'
heads = 6  # of 128 dimensions; sets attention_gate, too
rope_theta = 10000.0  # as in that code; Qwen3 itself has 1,000,000
block_size = 2048
z_loss = 1e-4

batch_size = 8
global_batch_size = 512  # x 2048 = 1,048,576 tokens per step, 3363 steps

optimizer = 'adana'  # or --optimizer=adamw --beta2=0.999, as in the paper
grad_clip = 0.5
lr_schedule = 'cos_inf'

eval_interval = 200
eval_sequences = 5120
checkpoint_interval = 1000
