# SparseLoCo (arXiv 2508.15706), its settings for 512M parameters and 8 replicas, on top of a run of train_diloco.py: of
# 4096 numbers 128 are sent, in 2 bits each and 12 for where.
#
#   torchrun --nproc_per_node=4 train_diloco.py config/diloco_quickstart.py config/sparseloco.py --num_replicas=2
#
# 128 / 4096 x 1.75 bytes = 0.055 bytes per parameter, to each other replica; fp32 with 2 replicas sends 4. The paper's
# learning rate with it, 1e-3, is a little above that of its DiLoCo, 8e-4.

inner_steps = 15
exchange_dtype = 'top2bit'
exchange_k = 128  # Covenant-72B (arXiv 2603.08163): 64, with inner_steps = 30
error_decay = 0.95
outer_lr = 1.0  # alpha; Covenant-72B went down to 0.65 when the loss stood still
outer_momentum = 0.0  # what has not been sent yet is the momentum
