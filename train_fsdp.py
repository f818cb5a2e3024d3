"""
Train a language model with fully sharded data parallelism: every rank holds a slice of each weight, of its gradient and
of its optimizer state, and gathers one block at a time to compute (ZeRO, arXiv 1910.02054; FSDP, arXiv 2304.11277).

    python train_fsdp.py config/quickstart.py                         # one process: a CPU or one GPU
    torchrun --nproc_per_node=4 train_fsdp.py config/quickstart.py    # 4 GPUs, or 4 CPU processes (gloo)
    python train_fsdp.py --help                                       # every key with its default and meaning

`diff train_ddp.py train_fsdp.py` shows what sharding the same run takes.
"""

import gc
import math
import os
import sys
from datetime import timedelta

from configurator import configure

# --- KNOBS ------------------------------------------------------------------------------------------------------------
# I/O
out_dir = 'out/train'  # checkpoints, metrics.jsonl and train.log are written here
resume = 'auto'  # 'auto' | 'never' | 'must': continue the run in out_dir; 'never' refuses one that is there
eval_interval = 500  # steps between evaluations; 0 = only after the last step
eval_iters = 20  # evaluate on so many batches of global_batch_size sequences, always the same ones; 0 = no evaluation
eval_only = False  # evaluate the newest checkpoint and stop
log_interval = 10  # steps between log lines
trace_step = 0  # record this step on every rank, for chrome://tracing: out_dir/trace_rank0.json, ...; 0 = none
checkpoint_interval = 1000  # steps between checkpoints; 0 = only after the last step
keep_checkpoints = 2  # older ones are deleted; 0 = no checkpoint is written at all
permanent_interval = 0  # steps between checkpoints that are never deleted; 0 = none
save_errors = 'stop'  # 'stop' | 'continue': a checkpoint that cannot be written ends the run, or it trains on without
async_checkpoint = False  # train on while a checkpoint is written
dry_run = False  # print dimensions, memory per rank, batch arithmetic, FLOPs and disk, then stop
# logging
wandb_log = False  # needs `pip install wandb`; WANDB_MODE=offline on nodes without internet
wandb_project = 'distributed-training'  # wandb project
wandb_entity: str | None = None  # wandb team or user
wandb_group: str | None = None  # wandb group, to lay runs side by side
wandb_run_name: str | None = None  # None = the name of out_dir
tensorboard_log = False  # write event files to out_dir/tensorboard
# data
dataset = 'stdlib-bpe2048'  # a folder in data_dir, made by prepare_data.py; synthetic = random tokens, no files
data_dir = 'data'  # where datasets live
batch_size = 8  # sequences per rank per micro-step: what must fit into memory
global_batch_size: int | None = None  # sequences per optimizer step, over all ranks; None = batch_size * ranks
block_size = 1024  # tokens per sequence
# model
init_from = 'scratch'  # or a Hugging Face folder, or OWNER/NAME in the local HF_HOME cache: fine-tune that model
trust_remote_code = False  # run the Python that came with init_from
arch = 'gpt2'  # 'gpt2' | 'enoki' | 'llama' | 'qwen3'
heads: int | None = None  # enoki and qwen3: size, learning rate, steps and decay by the published rules (scaling.py)
n_layer = 12  # transformer blocks
n_head = 12  # query heads
n_kv_head: int | None = None  # key/value heads (grouped-query attention); None = n_head
head_dim: int | None = None  # None = n_embd / n_head
n_embd = 768  # width of the residual stream
mlp_hidden_dim: int | None = None  # None = 4 * n_embd (gpt2, enoki), 8/3 * n_embd to a multiple of 64 (llama, qwen3)
vocab_size: int | None = None  # None = that of the dataset; the embedding is padded to a multiple of 64
dropout = 0.0  # 0 for pretraining
bias: bool | None = None  # None = True for gpt2 (False: nanoGPT's model, exact GELU), False for the others
tie_embeddings: bool | None = None  # the output head is the embedding; None = True for gpt2, False for the others
rope_theta: float | None = None  # base of the rotary embedding; None = 10000 (qwen3: 1000000)
attention_gate = False  # qwen3: sigmoid gate on the attention output
freeze: str | None = None  # init_from: parameters whose names this regular expression matches are not trained
# lora
lora_rank = 0  # init_from: train two thin matrices beside each weight instead (LoRA), of this rank; 0 = off
lora_alpha = 16.0  # what they add is scaled by lora_alpha / lora_rank
lora_targets = 'all'  # 'all' linear layers of the blocks, or ends of their names: 'q_proj,v_proj'
# optimizer
optimizer = 'adamw'  # 'adamw'|'adamw-decay'|'adana'|'adana-released'|'dana-mk4'|'dana-star-mk4'|'ademamix'|'muon'|'sgd'
learning_rate = 6e-4  # peak
max_iters = 10000  # optimizer steps
num_epochs: float | None = None  # passes over the training data: sets max_iters
weight_decay = 0.1  # on matrices; never on embeddings, norms and biases; DANA family and heads: see omega
beta1 = 0.9  # Adam: decay of the first moment
beta2 = 0.95  # Adam: decay of the second moment
grad_clip = 1.0  # global gradient norm; 0 = off
lr_rule = 32  # 32 | 512: with heads, the learning rate is the one fitted at so many sequences per step
kappa = 0.85  # DANA family: the long momentum counts (1 + step)^(1 - kappa) times
delta = 8.0  # DANA family: moments average over the last 1/delta of the run so far
omega = 4.0  # weight_decay = omega / wd_ts (DANA family), with heads also omega / (learning_rate * max_iters)
wd_ts: int | None = None  # DANA family, adamw-decay: steps after which weight decay has halved; None = max_iters / 10
z_loss = 0.0  # coefficient of mean(logsumexp(logits)^2), keeps logits small (Enoki: 1e-4)
# schedule
lr_schedule = 'cosine'  # 'cosine' | 'cos_inf' | 'wsd' | 'linear' | 'constant'
warmup_iters = 100  # linear warm-up
lr_decay_iters: int | None = None  # None = max_iters
min_lr: float | None = None  # None = learning_rate / 10
# system
device = 'auto'  # 'auto', 'cpu', 'cuda', 'cuda:1'
dtype = 'auto'  # 'auto' | 'float32' | 'bfloat16' | 'float16': of compute; auto = bfloat16 where the hardware has it
compile: bool | None = None  # torch.compile each block; None = on CUDA
seed = 1337  # of the initial weights, the order of the data and dropout
deterministic = False  # bit-equal repetitions, at a cost in speed
activation_checkpointing = 'none'  # 'none' | 'full' | 'selective': recompute; selective keeps matmul results
timeout_s = 600  # a collective that takes longer is an error; a rank without progress is named before that
stop_before_end_s = 300  # in a Slurm job: save and leave so many seconds before its time is over; 0 = do not
max_failures = 5  # refuse to start from the same step more often in a row than this; 0 = never refuse
max_bad_steps = 10  # skip steps whose loss or gradient is not finite on some rank, at most so many in a row
loss_spike_guard = False  # skip steps, too, whose loss is 6 sigma above the mean of the last 128
# fsdp
fsdp_impl = 'torch'  # 'torch' | 'manual': PyTorch's fully_shard, or our own, fsdp_manual.py
zero_stage = 3  # 3 = a block is whole while it computes; 2 = from its forward to its backward; 1 (not torch) = all step
replicate_size = 1  # HSDP: so many copies of the sharded model, e.g. one per node; gradients are averaged over them
cpu_offload = 'none'  # 'none' | 'optimizer' | 'params': on the host: moments (deepspeed: and fp32 weights), all state
accumulate = 'unsharded'  # 'unsharded' | 'sharded': unsharded saves communication, sharded saves memory
blocks_per_unit = 1  # blocks that are gathered together: more = fewer, larger messages
prefetch = 1  # manual: blocks gathered ahead of the one at work; 0 = communication and computation take turns
# ----------------------------------------------------------------------------------------------------------------------
config, explicit = configure(globals())  # config files and --key=value; before `import torch`, so --help is quick

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

import data
import fsdp_manual
import optim
from huggingface import finetune
from model import GPT, ModelConfig
from runtime import checkpoint, errors, estimate, health, processes, scaling, stopping
from runtime.log import Log
from runtime.meter import Meter
from text.tokenizer import check_same_tokenizer

# --- PROCESSES AND DEVICE ---------------------------------------------------------------------------------------------
errors.report_errors(lambda: estimate.out_of_memory_advice(config, world_size))  # one line for a user's mistake
processes.end_with_parent()
if not eval_only:
    stopping.catch_signals()  # SIGTERM, SIGUSR1 and SIGUSR2 ask for a checkpoint, as soon as there is one to save
rank, local_rank, world_size = processes.ranks_from_environment()  # (0, 0, 1) without torchrun
device = processes.choose_device(device, local_rank, must_exist=not dry_run)  # a login node may plan for GPUs
compute_dtype = processes.choose_dtype(dtype, device)
on_cuda = device.type == 'cuda'
if deterministic:
    processes.make_deterministic()
compile = on_cuda if compile is None else compile

# --- BATCH AND DATA ---------------------------------------------------------------------------------------------------
# The global batch is fixed. The number of ranks only decides how many micro-steps each of them runs per optimizer step.
global_batch_size = global_batch_size or batch_size * world_size
accumulation_steps = scaling.accumulation_steps(global_batch_size, batch_size, world_size)
shard_size = scaling.ranks_per_shard_group(config, world_size)  # ranks that hold one copy of the model between them
tokens_per_step = global_batch_size * block_size
pretrained = None if init_from == 'scratch' else finetune.Pretrained.from_keys(config, explicit)
if pretrained:
    vocab_size = pretrained.vocab_size
    check_same_tokenizer(os.path.join(data_dir, dataset), pretrained.folder)
train_data = data.open_dataset(data_dir, dataset, 'train', block_size, vocab_size)
val_data = data.open_dataset(data_dir, dataset, 'val', block_size, vocab_size)
vocab_size = vocab_size or train_data.vocab_size
if train_data.is_packed and not pretrained:
    raise ValueError(f'dataset={dataset} holds conversations, for a model that knows language: give its --init_from')
if num_epochs is not None and not any(argument.startswith('--max_iters') for argument in sys.argv):
    max_iters = scaling.iterations_of_epochs(num_epochs, train_data.n_windows, global_batch_size)
    config.update(max_iters=max_iters)
config.update(global_batch_size=global_batch_size, vocab_size=vocab_size, packed=train_data.is_packed)
filled, notes = scaling.fill_from_heads(config, explicit)  # wd_ts ..., and with heads sizes and rates
notes += scaling.cautions({**config, **filled}, train_data.n_windows)
config.update(filled)
globals().update(filled)
lr_decay_iters = lr_decay_iters or max_iters
min_lr = learning_rate / 10 if min_lr is None else min_lr
config.update(
    device=str(device),
    dtype=str(compute_dtype).removeprefix('torch.'),
    compile=compile,
    lr_decay_iters=lr_decay_iters,
    min_lr=min_lr,
)
model_config = pretrained or ModelConfig.from_keys(config)  # fills from the architecture what is None
config.update(model_config.to_dict())
if dry_run:
    if rank == 0:
        print(*notes, sep='\n')
        print(estimate.report(config, model_config.to_dict(), world_size, strategy='fsdp'))
    sys.exit()
notes += [f'dtypes: weights float32, compute {config["dtype"]}, gradient reduction float32, optimizer state float32']

# --- PROCESS GROUP ----------------------------------------------------------------------------------------------------
checkpoint.prepare(out_dir)  # an out_dir that cannot be written is found here, on every rank
if on_cuda:
    torch.cuda.set_device(device)
    health.record_flights(out_dir)
backend = 'cpu:gloo,cuda:nccl' if on_cuda else 'gloo'  # gloo beside NCCL, for what ranks exchange on the host
if 'RANK' in os.environ:
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
else:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
processes.on_rank_0(checkpoint.claim, out_dir)  # one job per out_dir
resume = 'must' if eval_only else resume
found = processes.on_rank_0(checkpoint.choose, out_dir, resume)  # all ranks resume from the same checkpoint
if pretrained and found is None:
    processes.on_rank_0(pretrained.keep_files, out_dir)  # from its first checkpoint on the run does not need init_from

# --- MODEL ------------------------------------------------------------------------------------------------------------
with torch.device('meta'):  # shapes only: no rank ever allocates what it will not keep
    raw_model = (
        finetune.for_training(pretrained, compute_dtype, device) if pretrained else GPT(model_config, compute_dtype)
    )
raw_model.checkpoint_activations(activation_checkpointing)
if compile:
    for block in raw_model.blocks:
        block.forward = torch.compile(block.forward)  # one small graph, compiled once and shared by equal blocks

# --- SHARD ------------------------------------------------------------------------------------------------------------
# A unit is what is gathered at once: each block, and the root with what is left (embedding, final norm, head).
if on_cuda and cpu_offload == 'params' and compute_dtype == torch.float16:
    raise ValueError('cpu_offload=params with dtype=float16: the loss scale is on the GPU; use bfloat16, or float32')
mesh = init_device_mesh(device.type, (replicate_size, shard_size), mesh_dim_names=('replicate', 'shard'))
processes.set_timeouts(mesh, timeout_s)
if replicate_size == 1:
    mesh = mesh['shard']
units = [raw_model.blocks[i : i + blocks_per_unit] for i in range(0, len(raw_model.blocks), blocks_per_unit)]
if fsdp_impl == 'manual':
    model = fsdp_manual.shard(
        raw_model, units, mesh, compute_dtype, zero_stage, prefetch, offload=cpu_offload == 'params'
    )
else:
    sharding = {
        'mesh': mesh,
        'mp_policy': MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32),
        'offload_policy': CPUOffloadPolicy(pin_memory=on_cuda) if cpu_offload == 'params' else OffloadPolicy(),
    }
    for unit in units:
        fully_shard(list(unit), reshard_after_forward=zero_stage == 3, **sharding)
    model = fully_shard(raw_model, reshard_after_forward=False, **sharding)  # its head is needed again at once

# --- WEIGHTS: fp32 masters, those of init_from, or a pure function of (seed, name) ------------------------------------
raw_model.to_empty(device='cpu' if cpu_offload == 'params' else device)
if found is None and pretrained:
    finetune.load(raw_model, pretrained, seed)  # every rank reads the rows that it keeps
elif found is None:
    with torch.no_grad():
        for name, parameter in raw_model.named_parameters():
            value = raw_model.initial_value(name, parameter, seed, device)
            # Every rank has the whole value and keeps its slice: no communication.
            parameter.copy_(distribute_tensor(value, mesh, parameter.placements, src_data_rank=None))

# --- OPTIMIZER --------------------------------------------------------------------------------------------------------
opt = optim.make_optimizer(
    raw_model, optimizer, learning_rate, beta1, beta2, weight_decay, kappa, delta, wd_ts, max_iters,
    compile=compile and optim.compiling_repays(max_iters, raw_model.parameter_counts()['total'], device),
)  # fmt: skip
scaler = torch.amp.GradScaler(device.type, enabled=compute_dtype == torch.float16)

# --- RESUME -----------------------------------------------------------------------------------------------------------
shape = model_config.to_dict()
for changeable in ('dropout', 'z_loss'):
    del shape[changeable]
identity = {  # what a checkpoint must have in common with the run that continues it
    'model': shape,
    'data': train_data.fingerprint,
    'optimizer': optimizer,
    'global_batch_size': global_batch_size,
    'seed': seed,
}
step, state = 0, {}
if found is not None:
    checkpoint.check_identity(checkpoint.read_state(found)['identity'], identity)
    state = checkpoint.load(found, raw_model, opt)
    step = state['step']
    scaler.load_state_dict(state['scaler'])

# --- LOG --------------------------------------------------------------------------------------------------------------
log = Log(out_dir, rank, step, max_iters, config, explicit, raw_model.flops_per_token())
log.say(f'{dataset}: {train_data.n_tokens:,} training tokens, {val_data.n_tokens:,} validation tokens')
log.say(scaling.batch_line(batch_size, accumulation_steps, world_size, block_size))
log.say(f'{model_config.arch}: {raw_model.parameter_counts()["total"]:,} parameters on {world_size} x {device.type}')
log.say('\n'.join(notes))
log.say(f'resuming {found} at step {step}' if found else f'starting from {init_from}')
if pretrained:
    log.say(finetune.self_test(model, raw_model, pretrained, found is None, train_data.is_packed, device))
dog = health.Watchdog(out_dir, timeout_s)


# --- EVALUATION -------------------------------------------------------------------------------------------------------
@torch.no_grad()
def evaluate():
    """Cross-entropy over the first eval_iters * global_batch_size validation windows, shared out over the ranks."""
    model.eval()
    nats_and_tokens = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in data.eval_batches(val_data, eval_iters * global_batch_size, batch_size, rank, world_size, device):
        dog.at('evaluation', step)
        _, ce_sum = model(*batch)
        nats_and_tokens += torch.stack((ce_sum.double(), (batch[1] >= 0).sum()))
    dist.all_reduce(nats_and_tokens)
    model.train()
    for module in model.modules():  # without a backward pass what forward left gathered would stay so
        if hasattr(module, 'reshard'):
            module.reshard()
    nats, tokens = nats_and_tokens.tolist()
    bits_per_byte = {}
    if val_data.bytes_per_token:
        bits_per_byte = {'val_bpb': nats / tokens / math.log(2) / val_data.bytes_per_token}
    return {'val_loss': nats / tokens, 'val_ppl': math.exp(min(nats / tokens, 700)), **bits_per_byte}


if eval_only:
    log.row(step, evaluate())
    log.close()
    dog.close()
    dist.destroy_process_group()
    processes.leave()

# --- LOOP -------------------------------------------------------------------------------------------------------------
if cpu_offload == 'optimizer':
    optim.keep_state_on_host(opt)
train_batches = data.batches(
    train_data, seed, step * global_batch_size, global_batch_size, batch_size, rank, world_size, device
)
stopping.count_start(out_dir, step, max_failures)  # a run that fails again and again at the same step is refused
stop_request = stopping.StopRequest(out_dir, stop_before_end_s, log.say)
saver = checkpoint.Saver(
    out_dir, keep_checkpoints, async_checkpoint, log.say, permanent_interval, save_errors == 'continue'
)
tracing = {'trace_step': trace_step - step, 'out_dir': out_dir}
meter = Meter(device, world_size, tokens_per_step, raw_model.flops_per_token(), beat=dog.at, **tracing)
numbers = health.Numbers(max_bad_steps, loss_spike_guard, log.say, state=state.get('numbers'))
gc.collect()
gc.freeze()  # what start-up left lives as long as the run: a later collection need not walk it, 0.5 s in a step
must_stop = stop_request.agreed()  # a signal that came before there was a step
while step < max_iters and not must_stop:
    lr = optim.learning_rate_at(step, learning_rate, lr_schedule, warmup_iters, lr_decay_iters, min_lr)
    for group in opt.param_groups:
        group['lr'] = lr
    if dropout:  # noise is a pure function of (seed, step, rank), so a resumed run draws the same
        torch.manual_seed((seed * 1_000_003 + step) * world_size + rank)
    # model() returns a sum over this rank's targets and ranks' gradients are averaged: this makes it the global mean.
    targets = data.count_targets(train_data, seed, step * global_batch_size, global_batch_size)
    loss_scale = world_size / targets
    dog.at('data', step + 1)
    meter.begin_step()
    step_loss = torch.zeros((), device=device)
    for micro_step in range(accumulation_steps):
        meter.mark('data')
        batch = next(train_batches)  # x, y (batch_size, block_size) each; of conversations positions, too
        # Gradients add up locally; only the last micro-step's backward averages them over the ranks.
        last_micro_step = micro_step == accumulation_steps - 1
        model.set_requires_gradient_sync(accumulate == 'sharded' or last_micro_step)
        model.set_is_last_backward(last_micro_step)
        meter.mark('forward')
        loss_sum, ce_sum = model(*batch)
        meter.mark('backward')
        scaler.scale(loss_sum * loss_scale).backward()
        step_loss += ce_sum
    meter.mark('update')
    scaler.unscale_(opt)
    grad_norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or math.inf)
    may_overflow = scaler.is_enabled() and scaler.get_scale() >= 1
    if numbers.are_good(step + 1, step_loss, targets, grad_norm, may_overflow, saver.last_good):
        scaler.step(opt)
        meter.measure_state(raw_model.parameters(), opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)
    step += 1
    meter.end_step()

    row = {}
    last_step = step == max_iters
    must_stop = stop_request.agreed()  # a signal, or a file STOP in out_dir: save and leave
    saving = last_step or any(every and step % every == 0 for every in (checkpoint_interval, permanent_interval))
    saving = saving or must_stop
    if step % log_interval == 0 or step == 1 or last_step:
        row = {'loss': numbers.loss, 'lr': lr, **meter.interval()}
        row['grad_norm'] = grad_norm.full_tensor().item()
        if fsdp_impl == 'manual':
            row.update(model.communication())
    if eval_iters and (last_step or (eval_interval and step % eval_interval == 0 and not must_stop)):
        row.update(evaluate())
    if row and numbers.skipped:
        row['skipped'] = numbers.skipped
    if row:
        log.row(step, {'tokens': step * tokens_per_step, **row})
    if saving:
        position = {'tokens': step * tokens_per_step, 'scaler': scaler.state_dict(), 'numbers': numbers.state()}
        with dog.allow('checkpoint', checkpoint.SLOWEST_SAVE_S):
            saver.save(step, raw_model, opt, {**position, 'identity': identity, 'config': config})

# --- END --------------------------------------------------------------------------------------------------------------
with dog.allow('checkpoint', checkpoint.SLOWEST_SAVE_S):
    saver.wait()
dog.close()
if rank == 0 and step == max_iters:
    checkpoint.mark_done(out_dir, max_iters)
    stopping.forget_starts(out_dir)
elif rank == 0:
    stop_request.obeyed(step)
why = 'done' if step == max_iters else f'stopped as asked ({stop_request.reason})'
log.say(f'{why}: {step} of {max_iters} steps, files in {out_dir}')
log.close()
train_batches.close()
dist.destroy_process_group()
processes.leave()
