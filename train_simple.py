"""
The page to try an idea in: pretraining with all of it in sight. On a CPU its losses are train_ddp.py's, bit for bit.

    python prepare_data.py                                            # 2.3M tokens of Python code
    python train_simple.py                                            # one process: a CPU or one GPU
    torchrun --nproc_per_node=2 train_simple.py --n_layer=6           # two, with DistributedDataParallel
    python sample.py --out_dir=out/simple --prompt='def '

Change what you like: the model is model.py, and everything else is below. A long run needs more: to resume after a
crash, to skip a bad step, to notice a hang, to hold a model that one GPU cannot. `diff train_simple.py train_ddp.py`
shows what that takes; an idea that works here moves there.
"""

import json
import math
import os
import time

from configurator import configure


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config:
    # I/O [per job]
    out_dir = 'out/simple'  # metrics.jsonl and, at the end, a checkpoint that every other script opens [per job, path]
    log_interval = 20  # steps between log lines [>= 1]
    eval_interval = 200  # steps between evaluations; the last step is always evaluated [>= 1]
    eval_sequences = 880  # validate on the first ones, nearly the whole validation split [>= 1]
    # data and model: 2.6M parameters, minutes on 2 CPU cores [result]
    dataset = 'stdlib-bpe2048'  # folder in data_dir, which prepare_data.py has written [result, per job]
    data_dir = 'data'  # where datasets live [result, per job, path]
    n_layer = 4  # transformer blocks [>= 1]
    n_head = 6  # attention heads [>= 1]
    n_embd = 192  # width of the residual stream [>= 1]
    block_size = 256  # tokens per sequence [>= 1]
    # schedule [result]
    global_batch_size = 8  # sequences per optimizer step, of all ranks [>= 1]
    batch_size = 8  # sequences per rank and micro-step, fewer where ranks share a smaller global batch [per job, >= 1]
    max_iters = 800  # optimizer steps [>= 1]
    learning_rate = 3e-3  # peak, after warmup_iters steps; from there half a cosine down to 0 [> 0]
    warmup_iters: int | None = None  # linear warm-up; None = a tenth of max_iters [>= 0]
    seed = 1337  # of the initial weights and the order of the data [>= 0, < 4294967296]


# ----------------------------------------------------------------------------------------------------------------------
config, explicit = configure(Config)  # config files and --key=value; the defaults are config/quickstart.py's

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import data
import optim
from layout import accumulation_steps
from model import GPT, ModelConfig
from system import errors

errors.report_errors()  # a mistake of the user's ends in one line
if config.warmup_iters is None:
    config.warmup_iters = config.max_iters // 10

# --- RANKS ------------------------------------------------------------------------------------------------------------
rank, world_size = int(os.environ.get('RANK', '0')), int(os.environ.get('WORLD_SIZE', '1'))  # torchrun sets them
device, compute_dtype = torch.device('cpu'), torch.float32
if torch.cuda.is_available():
    device, compute_dtype = torch.device('cuda', int(os.environ.get('LOCAL_RANK', '0'))), torch.bfloat16
    torch.cuda.set_device(device)
alone = {} if 'RANK' in os.environ else {'store': dist.HashStore(), 'rank': 0, 'world_size': 1}
dist.init_process_group('cpu:gloo,cuda:nccl' if device.type == 'cuda' else 'gloo', **alone)

batch_size = min(config.batch_size, max(1, config.global_batch_size // world_size))
micro_steps = accumulation_steps(config.global_batch_size, batch_size, world_size)

# --- DATA -------------------------------------------------------------------------------------------------------------
source = {'dataset': config.dataset, 'data_dir': config.data_dir, 'dataset_stages': (), 'windows': 'stream'}
source |= {'block_size': config.block_size, 'vocab_size': None}
train_data, val_data = (data.open_mixture(source, split) for split in ('train', 'val'))
for split in (train_data, val_data):
    split.plan(config.max_iters, config.global_batch_size)
train_batches = data.batches(  # the same samples in the same order on any number of ranks
    train_data, config.seed, first_sample=0, global_batch_size=config.global_batch_size,
    batch_size=batch_size, rank=rank, world_size=world_size, device=device,
)  # fmt: skip

# --- MODEL ------------------------------------------------------------------------------------------------------------
sizes = {'n_layer': config.n_layer, 'n_head': config.n_head, 'n_embd': config.n_embd}
sizes |= {'block_size': config.block_size, 'vocab_size': train_data.vocab_size}
with torch.device(device):
    raw_model = GPT(ModelConfig(arch='llama', **sizes), compute_dtype)  # fp32 weights, cast where they are used
with torch.no_grad():
    for name, parameter in raw_model.named_parameters():
        parameter.copy_(raw_model.initial_value(name, parameter, config.seed, device))
if device.type == 'cuda':
    for block in raw_model.blocks:
        block.forward = torch.compile(block.forward)
model = raw_model
if world_size > 1:
    model = DistributedDataParallel(raw_model, device_ids=[device] if device.type == 'cuda' else None)
    model.broadcast_buffers = False

# --- OPTIMIZER --------------------------------------------------------------------------------------------------------
optimizer = optim.make_optimizer(
    raw_model, 'adamw', config.learning_rate, beta1=0.9, beta2=0.95, weight_decay=0.1, max_iters=config.max_iters
)


def learning_rate_at(step):
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    progress = (step - config.warmup_iters) / (config.max_iters - config.warmup_iters)
    return config.learning_rate * (1 + math.cos(math.pi * progress)) / 2


# --- VALIDATION -------------------------------------------------------------------------------------------------------
@torch.no_grad()
def evaluate():
    """The mean loss over the first windows of the validation split, which the ranks divide: {'val_loss': 3.2, ...}."""
    raw_model.eval()
    sums = torch.zeros(1, 2, dtype=torch.float64, device=device)  # of the loss, and of the targets
    for (x, y), _ in data.eval_batches(val_data, config.eval_sequences, batch_size, rank, world_size, device):
        _, ce_sum = raw_model(x, y)
        sums += torch.stack((ce_sum.double(), (y >= 0).sum()))
    dist.all_reduce(sums)
    raw_model.train()
    return val_data.losses(sums.tolist(), config.eval_sequences)


# --- LOOP -------------------------------------------------------------------------------------------------------------
if os.path.exists(os.path.join(config.out_dir, 'checkpoints')):
    raise ValueError(f'out_dir={config.out_dir} holds a run: use another --out_dir, or delete it first')
dist.barrier()  # until all ranks have looked
os.makedirs(config.out_dir, exist_ok=True)
log = open(os.path.join(config.out_dir, 'metrics.jsonl'), 'w') if rank == 0 else None
targets = config.global_batch_size * config.block_size
began, logged = time.perf_counter(), 0
for step in range(config.max_iters):
    lr = learning_rate_at(step)
    for group in optimizer.param_groups:
        group['lr'] = lr

    step_loss = torch.zeros((), device=device)
    for micro_step in range(micro_steps):
        x, y = next(train_batches)  # (batch_size, block_size) each
        model.require_backward_grad_sync = micro_step == micro_steps - 1  # DDP averages in the last backward alone
        loss_sum, ce_sum = model(x, y)  # sums over this rank's targets
        (loss_sum * (world_size / targets)).backward()  # averaged over ranks: the mean over all targets
        step_loss += ce_sum
    for name, parameter in raw_model.named_parameters() if step == 0 else ():
        if parameter.requires_grad and parameter.grad is None:  # in the next step DDP would wait for it
            raise ValueError(f'{name} gets no gradient: use it in the loss, or take it out of the model')
    grad_norm = optim.clip_grad_norm_(raw_model.parameters(), 1.0, optimizer=optimizer)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    done = step + 1
    row = {}
    if done == 1 or done % config.log_interval == 0:
        total = step_loss.double()
        dist.all_reduce(total)
        row = {'loss': total.item() / targets, 'lr': lr, 'grad_norm': grad_norm.item()}
        seconds = (time.perf_counter() - began) / (done - logged)  # of a step
        row |= {'tokens_per_sec': targets / seconds, 'time/total': 1000 * seconds}
        began, logged = time.perf_counter(), done
    if done % config.eval_interval == 0 or done == config.max_iters:
        paused = time.perf_counter()
        row |= evaluate()
        began += time.perf_counter() - paused
    if row and rank == 0:
        print(f'step {done}/{config.max_iters} | ' + ', '.join(f'{key} {value:.4g}' for key, value in row.items()))
        log.write(json.dumps({'step': done, 'tokens': done * targets, **row}) + '\n')
        log.flush()

# --- CHECKPOINT -------------------------------------------------------------------------------------------------------


def save():
    """Write the checkpoint, and beside it the tokenizer of the data. train_ddp.py also goes on from it."""
    from runtime import checkpoint_saver
    from runtime.identity import identity_of
    from runtime.kept import keep_language

    checkpoint_saver.prepare(config.out_dir)
    if rank == 0:
        keep_language(config.out_dir, [source.name for source in train_data.sources])
    keys = {**source, **vars(config), **raw_model.config.to_dict(), 'init_from': 'scratch'}
    keys['optimizer'] = type(optimizer).__name__.lower()  # 'adamw': a run that resumes must have the same
    state = {'config': keys, 'identity': identity_of(keys, raw_model.config, train_data), 'scaler': {}}
    checkpoint_saver.Saver(config.out_dir, keep=1).save(config.max_iters, raw_model, optimizer, state)


train_batches.close()
save()
dist.destroy_process_group()
