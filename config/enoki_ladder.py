# One rung of the Enoki ladder (arXiv 2602.05298), heads on the command line: 46M to 664M parameters, 20 tokens each.
#
#   for heads in 6 8 12 16 24; do
#       torchrun --nproc_per_node=4 train_fsdp.py config/enoki_ladder.py --heads=$heads --out_dir=out/enoki_${heads}h
#   done
#   python -m planning.rules --ladder    # the sizes, steps and learning rates of all rungs
#
#   heads                                           6       8      12      16      24
#   published final validation loss, AdamW      3.861   3.619   3.316   3.102   2.817
#   ADANA (read off a figure, +-0.005)          3.822   3.578   3.276   3.063   2.777

out_dir = 'out/enoki_ladder'  # give each rung its own
dataset = 'fineweb-10BT-gpt2'  # 24 heads take 13.3B tokens: more than one pass over 10B

arch = 'enoki'
heads = 6  # the smallest, unless the command line says another
block_size = 2048
z_loss = 1e-4

batch_size = 8  # what must fit: 16 and 24 heads may need 4, or --activation_checkpointing=selective
global_batch_size = 512

optimizer = 'adana'  # or dana-mk4, dana-star-mk4; with --beta2=0.999 adamw, adamw-decay, ademamix, muon
grad_clip = 0.5
lr_schedule = 'cos_inf'

eval_interval = 200
eval_sequences = 5120
checkpoint_interval = 1000
wandb_group = 'enoki-ladder'  # each rung is a run in it, named after its out_dir
wandb_log = False  # --wandb_log
