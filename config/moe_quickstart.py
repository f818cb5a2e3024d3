# The quickstart as a mixture of experts: 8 of them in each block, of which 2 compute a token. Per token it computes as
# much as the dense model, with 2.4 times the parameters.
#
#   python prepare_data.py
#   torchrun --nproc_per_node=2 train_fsdp.py config/moe_quickstart.py
#   python sample.py --out_dir=out/moe_quickstart --prompt="def "
#   python compare.py --plot out/moe_quickstart --keys=router/violation,router/violation_of_layers

import os

out_dir = 'out/moe_quickstart'
dataset = 'stdlib-bpe2048'  # 2.3M tokens of 3.2 bytes each

arch = 'qwen3'  # exported, it is transformers' Qwen3-MoE
n_layer = 4
n_head = 6
n_embd = 192
n_experts = 8
experts_per_token = 2
expert_hidden_dim = 256  # two of them are as wide as the 512 of the dense model
# 4 x (4 x 192^2 + 8 x 192 + 8 x 3 x 192 x 256) + 2 x 2048 x 192 = 6.1M parameters, of which a token meets 2.6M
router_aux = 0.01  # ten times what large models take: this one has few steps in which to find a balance
block_size = 256  # about 800 bytes of code

global_batch_size = 8  # 8 x 256 = 2048 tokens per step: small, because the clock allows few tokens and each step learns
dtype = 'float32'  # on a GPU bfloat16; a CPU compiles a bfloat16 kernel for each number of rows that an expert gets
batch_size = global_batch_size // int(os.environ.get('WORLD_SIZE', '1'))  # no accumulation on 1, 2, 4 or 8 ranks
max_iters = 800  # 1.6M tokens: two thirds of the training text, once
learning_rate = 3e-3
min_lr = 0.0  # down to nothing: the last steps are what the validation loss gains most from
warmup_iters = 80

log_interval = 20
eval_interval = 200
eval_sequences = 880  # of 942: nearly the whole validation split
checkpoint_interval = 200
keep_checkpoints = 1
