# One replica with an outer Nesterov step every 100 steps (SNOO, arXiv 2510.15830): its settings for 125M parameters, on
# top of any run. Nothing is sent for it. It holds two more fp32 copies of the weights: the slow ones, and the momentum.
#
#   torchrun --nproc_per_node=8 train_diloco.py config/gpt2_124m.py config/snoo.py
#
# With s = slow weights - fast weights: b = 0.75 b + s; slow weights -= 0.8 (s + 0.75 b); the fast continue from there.

num_replicas = 1  # all ranks hold the one replica between them, as in train_fsdp.py
inner_steps = 100  # K: the paper finds 5 to 100 alike
outer_lr = 0.8  # eta
outer_momentum = 0.75  # mu; wants 4 / (1 - mu)^2 = 64 rounds, 6400 steps. Shorter runs: a smaller mu, or a smaller K
