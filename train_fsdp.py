"""
Train a language model with fully sharded data parallelism: every rank holds a slice of each weight, of its gradient and
of its optimizer state, and gathers one block at a time to compute (ZeRO, arXiv 1910.02054; FSDP, arXiv 2304.11277).

    python train_fsdp.py config/quickstart.py                         # one process: a CPU or one GPU
    torchrun --nproc_per_node=4 train_fsdp.py config/quickstart.py    # 4 GPUs, or 4 CPU processes (gloo)
    python train_fsdp.py --help                                       # every key with its default and meaning

`diff train_ddp.py train_fsdp.py` shows what sharding the same run takes.
"""

import math
from typing import Literal

from configurator import configure
from keys import BestKeys, Keys, ShardingKeys, TaskKeys


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config(Keys, TaskKeys, BestKeys, ShardingKeys):
    # data
    context_parallel = 1  # ranks that share each sequence, which then count as one rank: for long block_size; 1 = off
    context_impl: Literal['ring', 'gather'] = 'ring'  # keys and values travel from rank to rank, or to all at once
    tensor_parallel = 1  # ranks that hold each matrix together, and work on the same tokens: for wide models; 1 = off
    expert_parallel = 1  # ranks that share the experts of a mixture, and send them their tokens; 1 = off
    # fsdp
    replicate_size = 1  # HSDP: copies of the sharded model, e.g. one per node; their gradients are averaged


# ----------------------------------------------------------------------------------------------------------------------
config, explicit = configure(Config)  # config files and --key=value; before `import torch`, so --help is quick

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import context_manual
import data
import expert_manual
import fsdp_manual
import meshes
import optim
import tensor_manual
from model import balance_experts
from runtime import health, offload, processes
from runtime.begin import begin, initialise, make_model
from runtime.watch import Watch

run = begin(config, explicit, 'fsdp')  # ranks, device and data; from here on no key is None that the run needs
run.join()  # --dry_run ends here; the process group, and the checkpoint that this run goes on from
rank, world_size, device, on_cuda = run.rank, run.world_size, run.device, run.on_cuda
batch_size, global_batch_size = config.batch_size, config.global_batch_size

# --- MODEL ------------------------------------------------------------------------------------------------------------
raw_model = make_model(run)  # on the meta device; activation checkpointing and compilation come before sharding

# --- SHARD ------------------------------------------------------------------------------------------------------------
# Ranks that hold each matrix together, or share each sequence, stand beside each other, since they talk most.
axes = meshes.fsdp_axes(vars(config), world_size)
mesh = meshes.make(axes, device, config.timeout_s)
context = context_manual.Context.from_keys(vars(config), device) if config.context_parallel > 1 else None
tensor = None
if config.tensor_parallel > 1:
    tensor = tensor_manual.Split(raw_model, tensor_manual.Ranks.of(mesh['tensor']))
    mesh = mesh[mesh.mesh_dim_names[:-1]]
expert_mesh, experts = None, []
if config.expert_parallel > 1:  # experts are sharded over fewer ranks than the rest: those that have the same ones
    expert_mesh = meshes.make(meshes.expert_axes(axes, config.expert_parallel), device, config.timeout_s)
    experts = expert_manual.split(raw_model, tensor_manual.Ranks.of(expert_mesh['expert']))
    expert_mesh = expert_mesh[expert_mesh.mesh_dim_names[:-1]]
# A unit is what is gathered at once: some blocks, or the root with what is left (embedding, final norm, head).
blocks, size = raw_model.blocks, config.blocks_per_unit
units = [blocks[first : first + size] for first in range(0, len(blocks), size)]
offloads = config.cpu_offload == 'params'
if config.fsdp_impl == 'manual':
    model = fsdp_manual.shard(
        raw_model, units, mesh, run.compute_dtype, config.zero_stage, config.prefetch, offloads, experts, expert_mesh
    )
else:
    precision = MixedPrecisionPolicy(param_dtype=run.compute_dtype, reduce_dtype=torch.float32)
    sharding = {'mp_policy': precision}
    if offloads:
        sharding['offload_policy'] = CPUOffloadPolicy(pin_memory=on_cuda)
    for module in experts:
        fully_shard(module, mesh=expert_mesh, reshard_after_forward=config.zero_stage == 3, **sharding)
        module.set_gradient_divide_factor(world_size)  # they have seen the tokens of all ranks
        if expert_mesh.size(-1) > 1:  # gloo cannot divide in a reduce-scatter; alone, a rank divides by itself
            module.set_force_sum_reduction_for_comms(True)
    for unit in units:
        fully_shard(list(unit), mesh=mesh, reshard_after_forward=config.zero_stage == 3, **sharding)
    # The root stays whole: backward begins with its head, which would be gathered again.
    model = fully_shard(raw_model, mesh=mesh, reshard_after_forward=False, **sharding)

# --- WEIGHTS AND OPTIMIZER --------------------------------------------------------------------------------------------
home = torch.device('cpu') if offloads else device  # of weights and optimizer
initialise(raw_model, run, home)  # fp32 masters; each rank keeps its slice
opt = optim.from_config(raw_model, config, home)
if config.cpu_offload == 'optimizer':
    opt = offload.StateOnHost(opt)  # before a checkpoint is loaded: not all moments may fit on the GPU
scaler = torch.amp.GradScaler(device.type, enabled=run.compute_dtype == torch.float16)
step, state = run.resume(raw_model, opt, scaler)

watch = Watch(run, step, state)  # the log, and all else that only watches
watch.self_test(model, raw_model)


# --- EVALUATION -------------------------------------------------------------------------------------------------------
@torch.no_grad()
def evaluate():
    """Cross-entropy over the first eval_iters * global_batch_size validation windows, shared out over the ranks."""
    model.eval()
    windows = config.eval_iters * global_batch_size
    nats_and_tokens = torch.zeros(len(run.val_data.sources), 2, dtype=torch.float64, device=device)
    place = batch_size, rank, world_size, device
    for batch, source in data.eval_batches(run.val_data, windows, *place, starts_on_host=context is not None):
        watch.at('evaluation', step)
        if context:
            batch = context.part(batch)
        _, ce_sum = model(*batch)
        nats_and_tokens[source] += torch.stack((ce_sum.double(), (batch[1] >= 0).sum()))
    dist.all_reduce(nats_and_tokens)
    model.train()
    processes.reshard(model)  # there is no backward pass that would free the gathered weights
    return run.val_data.losses(nats_and_tokens.tolist())


if config.eval_only:
    watch.evaluate_only(model, step, evaluate)


# --- LOOP -------------------------------------------------------------------------------------------------------------
def save(step):
    watch.save(step, raw_model, opt, scaler.state_dict())


if config.fsdp_impl == 'manual':
    watch.also_log = model.communication  # bytes and milliseconds of gathers and reductions
watch.begin_training(model, save, evaluate)
train_batches = data.batches(
    run.train_data, config.seed, step * global_batch_size, global_batch_size, batch_size, rank, world_size, device,
    starts_on_host=context is not None,
)  # fmt: skip
while step < config.max_iters and not watch.must_stop:
    # the learning rate of this step
    lr = optim.learning_rate_at(
        step, config.learning_rate, config.lr_schedule, config.warmup_iters, config.lr_decay_iters, config.min_lr
    )
    for group in opt.param_groups:
        group['lr'] = lr * group['lr_factor']  # lr_factor is 1 unless parametrization is mup or completep
    if config.dropout or config.lora_dropout:  # noise is a pure function of (seed, step, rank, ranks), also resumed
        torch.manual_seed((config.seed * 1_000_003 + step) * world_size + rank)
    # The model returns a sum over this rank's targets, and gradients are averaged over the ranks. This factor turns
    # that into the mean over all targets of the global batch. With tensor parallelism several ranks work on the same
    # tokens and report the same loss, so each target is counted that many times.
    targets = run.train_data.count_targets(config.seed, step * global_batch_size, global_batch_size)
    targets *= config.tensor_parallel
    loss_scale = world_size / targets

    # forward and backward, micro-step by micro-step; the gradients add up
    watch.begin_step(step)
    step_loss = torch.zeros((), device=device)
    for micro_step in range(run.accumulation_steps):
        watch.mark('data')
        batch = next(train_batches)  # x, y (batch_size, block_size) each; where documents are packed their starts, too
        if context:
            batch = context.part(batch)  # this rank's columns
        # Gradients add up locally until the last backward averages them over ranks, or with 'sharded' each one does.
        last_micro_step = micro_step == run.accumulation_steps - 1
        model.set_requires_gradient_sync(config.accumulate == 'sharded' or last_micro_step)
        model.set_reshard_after_backward(last_micro_step, recurse=False)  # the root stays whole until then
        watch.mark('forward')
        loss_sum, ce_sum = model(*batch)
        watch.mark('backward')
        scaler.scale(loss_sum * loss_scale).backward()
        step_loss += ce_sum

    watch.mark('update')
    # gradients: add what the ranks of a matrix have each a part of, undo the loss scale, clip the global norm
    if tensor:
        tensor.sum_partial_gradients()
    scaler.unscale_(opt)
    if tensor and scaler.is_enabled():
        health.share_overflow(scaler, opt)  # DTensor tells the ranks of a shard of an overflow, not those of a matrix
    norm_groups = tensor.norm_groups() if tensor else ()
    grad_norm = optim.clip_grad_norm_(raw_model.parameters(), config.grad_clip or math.inf, *norm_groups)
    # Update, but not where loss or gradient is not finite on some rank: all ranks decide alike, by one all-reduce.
    # In fp16 a gradient may overflow because the loss scale is too large. Then scaler.step() skips by itself and
    # update() halves the scale, which is no fault of the run, as long as there is something to halve.
    may_overflow = scaler.is_enabled() and scaler.get_scale() >= 1
    skip = watch.numbers.must_skip(step + 1, step_loss, targets, grad_norm, may_overflow)
    scaler.step(opt, skip=skip)
    balance_experts(raw_model, skip)  # if there are any, by the load of this step; the next one knows it
    watch.measure_state(raw_model, opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)
    step += 1
    watch.after_step(step, {'lr': lr, 'grad_norm': grad_norm})  # logs, evaluates and saves what is due

watch.end(step)
