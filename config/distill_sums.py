# A small model learns to add from a larger one, which reads what it writes: on-policy distillation, in a minute on a
# CPU. It has 0.2M parameters, its teacher 0.7M.
#
#   python benchmarks/make_sums.py
#   python prepare_data.py --dataset=sums/texts.jsonl --tokenizer=bytes --name=sums --val_fraction=0.05
#   python train_ddp.py config/sums.py --n_embd=64 --out_dir=out/student
#   python prepare_data.py --dataset=sums/prompts.jsonl --text_field=$'{prompt}{answer}\n' --tokenizer=bytes --name=told
#   python train_ddp.py config/sums.py --dataset=told --n_embd=128 --max_iters=1500 --out_dir=out/teacher
#   python train_distill.py config/distill_sums.py

out_dir = 'out/distill_sums'
init_from = 'out/student'
teacher = 'out/teacher'
prompts = ['sums/prompts.jsonl']
eval_tasks = ['sums/sums.jsonl']  # 810 sums that are not among the prompts, answered greedily

beta = 0.0  # forward KL; with the reverse KL it needs twice as many answers here
prompts_per_step = 64
batch_size = 16  # sequences of about seven answers each

max_iters = 400
learning_rate = 1e-3
lr_schedule = 'linear'
min_lr = 0.0
warmup_iters = 10
weight_decay = 0.0
beta2 = 0.99
dtype = 'float32'

log_interval = 50
eval_tasks_interval = 100
checkpoint_interval = 400
keep_checkpoints = 1
