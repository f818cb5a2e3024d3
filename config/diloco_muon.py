# MuLoCo (arXiv 2505.23725): DiLoCo whose replicas train with Muon, on top of a run. Outer settings for 8 replicas and
# 416M parameters; with 16 and 3.1B it has 1.0 and 0.9, with one 0.7 and 0.6.
#
#   torchrun --nproc_per_node=8 train_diloco.py config/gpt2_124m.py config/diloco_muon.py --num_replicas=8
#
# Its learning rates, 0.016 to 0.063, are not ours. It scales an update by sqrt(rows / columns), optim.py by
# 0.2 sqrt(max(rows, columns)). So with 768 columns, as in most matrices of that model, and as many rows or more
#
#   0.03 x sqrt(rows / 768) = learning_rate x 0.2 sqrt(rows):   learning_rate = 0.03 / (0.2 sqrt(768)) = 0.0054
#
# and for the 768 x 3072 that end an MLP 0.03 sqrt(768 / 3072) / (0.2 sqrt(3072)) = 0.0014. One rate cannot be
# both, and embedding, head and norms have the paper's 0.03 as it is: begin between the two, and sweep again.

optimizer = 'muon'
learning_rate = 3e-3
min_lr = 3e-4  # a cosine to a tenth
beta1 = 0.9  # of AdamW, which trains embedding, head and norms
beta2 = 0.99
grad_clip = 1.0

inner_steps = 30
outer_lr = 0.9
outer_momentum = 0.8  # wants 4 / (1 - 0.8)^2 = 100 rounds, 3000 steps; plain DiLoCo has 0.9 here
