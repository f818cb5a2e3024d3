# Enoki with 8 heads, trained with ADANA on 1.4B tokens of FineWeb (arXiv 2602.05298): 70M parameters, 19M of them in
# the blocks. Published final validation losses at this size: ADANA 3.578 (read off a figure), AdamW 3.619.
#
#   python prepare_data.py --dataset=fineweb-10BT --tokenizer=gpt2
#   torchrun --nproc_per_node=4 train_fsdp.py config/enoki_8h.py              # or any other train script
#   torchrun --nproc_per_node=4 train_fsdp.py config/enoki_8h.py --dry_run    # what heads = 8 decides, and its memory
#
# heads decides the sizes, learning rate, steps, warm-up and weight decay (planning/rules.py); a key set here or on the
# command line wins: 6 layers of 512, 1342 steps, warm-up 26, learning rate 7.14e-4, weight decay 4 / 134 = 0.0299,
# wd_ts 134.

out_dir = 'out/enoki_8h'
dataset = 'fineweb-10BT-gpt2'

arch = 'enoki'
heads = 8
block_size = 2048
z_loss = 1e-4

batch_size = 8  # 8 sequences x 4 ranks x 16 micro-steps = 512; 16 ranks take 4 micro-steps, 64 ranks 1
global_batch_size = 512  # x 2048 = 1,048,576 tokens per step

optimizer = 'adana'  # baseline: --optimizer=adamw --beta2=0.999, which gets its own learning rate and weight decay
grad_clip = 0.5
lr_rule = 32  # learning rate as fitted at 32 sequences per step, hence one warning; 512: 1.49e-3
lr_schedule = 'cos_inf'  # warm-up from 1% of the peak, cosine down to 10%

eval_interval = 200
eval_sequences = 5120  # x 2048 = 10.5M tokens, some 3 steps' worth of time
checkpoint_interval = 1000
wandb_group = 'fsdp-experiment'
wandb_log = False  # so that it runs where wandb is not installed; --wandb_log, with WANDB_MODE=offline on a cluster
