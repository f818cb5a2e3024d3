"""
Train a language model on ranks that share more than its state, on top of FSDP: several ranks compute one sequence
together (context parallelism), or each matrix (tensor parallelism), or hold different experts of a mixture (expert
parallelism).

    torchrun --nproc_per_node=4 train_parallel.py config/long_context.py --context_parallel=4   # a sequence on 4 ranks
    torchrun --nproc_per_node=4 train_parallel.py config/quickstart.py --tensor_parallel=2      # 2 x 2: FSDP of halves
    torchrun --nproc_per_node=2 train_parallel.py config/moe_quickstart.py --expert_parallel=2  # half the experts each
    python train_parallel.py --help                                   # every key with its default and meaning

`diff train_fsdp.py train_parallel.py` shows what that takes. How each works is in context_manual.py, tensor_manual.py
and expert_manual.py. Context parallelism can be combined with each of the others, and with all three at 1 this is
train_fsdp.py: each script resumes the other's checkpoints.
"""

import math
from typing import Literal

from configurator import configure
from keys import BestKeys, Keys, ShardingKeys, TaskKeys


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config(Keys, TaskKeys, BestKeys, ShardingKeys):
    # parallel
    context_parallel = 1  # ranks that share each sequence, for long block_size; they count as one rank; 1 = off [>= 1]
    context_impl: Literal['ring', 'gather'] = 'ring'  # keys, values: rank to rank, or to all [if context_parallel > 1]
    tensor_parallel = 1  # ranks that split each matrix and work on the same tokens: for wide models; 1 = off [>= 1]
    expert_parallel = 1  # ranks that divide the experts of a mixture and send each other tokens; 1 = off [>= 1]
    # fsdp
    replicate_size = 1  # HSDP: copies of the sharded model, e.g. one per node; their gradients are averaged [>= 1]


# ----------------------------------------------------------------------------------------------------------------------
config, explicit = configure(Config)  # config files and --key=value; before `import torch`, so --help is quick

import torch

import context_manual
import data
import expert_manual
import fsdp
import optim
import tensor_manual
from layout import Ranks, without
from runtime import health
from runtime.begin import begin, make_model
from runtime.first_weights import initialize
from runtime.watch import Watch

run = begin(config, explicit, 'fsdp')  # ranks, device, data; every key that the run needs now has a value
run.join()  # --dry_run ends here; else init_process_group, and find the checkpoint to resume from
rank, world_size, device = run.rank, run.world_size, run.device
batch_size, global_batch_size = config.batch_size, config.global_batch_size

# --- MODEL AND WEIGHTS ------------------------------------------------------------------------------------------------
raw_model = make_model(run)  # on the meta device; activation checkpointing and compilation come before sharding
mesh = run.layout.mesh(device, config.timeout_s)  # the ranks that shard; with replicate_size also the copies (HSDP)
context = tensor = expert_mesh = None
experts = []
if config.context_parallel > 1:
    context = context_manual.Context(run.layout, config.context_impl, device, config.timeout_s)
if config.tensor_parallel > 1:  # FSDP shards each rank's part of a matrix, over the ranks that have the same part
    tensor = tensor_manual.Split(raw_model, Ranks.of(mesh['tensor']), run.share)
    mesh = without(mesh, 'tensor')
if config.expert_parallel > 1:  # experts are sharded over fewer ranks than other weights: those that hold the same ones
    expert_mesh = run.layout.expert_mesh(device, config.timeout_s)
    experts = expert_manual.split(raw_model, Ranks.of(expert_mesh['expert']), run.share)
    expert_mesh = without(expert_mesh, 'expert')
model = fsdp.shard(raw_model, mesh, run, experts, expert_mesh)  # by fully_shard, or by fsdp_manual.py
initialize(raw_model, run)  # fp32 master weights; each rank keeps its slice

# --- OPTIMIZER --------------------------------------------------------------------------------------------------------
opt = fsdp.optimizer(raw_model, run)  # its moments in host memory, where cpu_offload says so
scaler = torch.amp.GradScaler(device.type, enabled=run.compute_dtype == torch.float16)
step, state = run.resume(raw_model, opt, scaler)

watch = Watch(run, step, state, context and context.part)  # the log and whatever else only observes
watch.self_test(model, raw_model)
if config.eval_only:
    watch.evaluate_only(model, step)


# --- LOOP -------------------------------------------------------------------------------------------------------------
def save(step):
    watch.save(step, raw_model, opt, scaler.state_dict())


also_log = model.communication if config.fsdp_impl == 'manual' else None  # bytes and milliseconds of gathers and sums
watch.begin_training(model, save, also_log=also_log)
numbers = watch.numbers  # all else in watch only observes; this decides whether a step is skipped (health.py)
train_batches = data.batches(
    run.train_data, config.seed, first_sample=step * global_batch_size, global_batch_size=global_batch_size,
    batch_size=batch_size, rank=rank, world_size=world_size, device=device, starts_on_host=context is not None,
)  # fmt: skip
while step < config.max_iters and not watch.must_stop:
    lr = optim.learning_rate_at(step, config)
    for group in opt.param_groups:
        group['lr'] = lr * group['lr_factor']  # lr_factor is 1 unless parametrization is mup or completep
    if config.dropout or config.lora_dropout:  # noise depends on (seed, step, rank, ranks) only, so a resume repeats it
        torch.manual_seed((config.seed * 1_000_003 + step) * world_size + rank)
    # The model returns a sum over this rank's targets, and gradients are averaged over the ranks. This factor turns
    # that into the mean over all targets of the global batch. With tensor parallelism the ranks that split a matrix
    # report the same loss, so each target counts that often; gradients are averaged over those with other tokens alone.
    targets = run.train_data.count_targets(config.seed, step * global_batch_size, global_batch_size)
    targets *= config.tensor_parallel
    loss_scale = world_size / targets

    # forward and backward, micro-step by micro-step; the gradients add up
    watch.begin_step(step)
    step_loss = torch.zeros((), device=device)
    for micro_step in range(run.layout.micro_steps):
        watch.mark('data')
        batch = next(train_batches)  # x, y: (batch_size, block_size) each; with packed documents also their starts
        if context:
            batch = context.part(batch)  # this rank's columns
        # Gradients add up locally until the last micro-step's backward averages them over the ranks; with
        # accumulate='sharded' the backward of every micro-step does so.
        last_micro_step = micro_step == run.layout.micro_steps - 1
        model.set_requires_gradient_sync(config.accumulate == 'sharded' or last_micro_step)
        model.set_reshard_after_backward(last_micro_step, recurse=False)  # the root stays gathered until then
        watch.mark('forward')
        loss_sum, ce_sum = model(*batch)
        watch.mark('backward')
        scaler.scale(loss_sum * loss_scale).backward()
        step_loss += ce_sum

    watch.mark('update')
    # gradients: sum those of which each tensor-parallel rank has a part, undo the loss scale, clip the global norm
    if tensor:
        tensor.sum_partial_gradients()
    scaler.unscale_(opt)
    if tensor and scaler.is_enabled():
        health.share_overflow(scaler, opt)  # DTensor reports an overflow along the shard axis, not the tensor axis
    norm_groups = tensor.norm_groups() if tensor else ()
    grad_norm = optim.clip_grad_norm_(raw_model.parameters(), config.grad_clip or math.inf, *norm_groups, optimizer=opt)
    # The step is skipped if loss or gradient is not finite on any rank; an all-reduce lets all ranks decide alike.
    # In fp16 a gradient may overflow because the loss scale is too large. Then scaler.step() skips by itself and
    # update() halves the scale. That does not count as a bad step, unless the scale has already fallen below 1.
    may_overflow = scaler.is_enabled() and scaler.get_scale() >= 1
    skip = numbers.must_skip(step + 1, step_loss, targets, grad_norm, may_overflow)
    scaler.step(opt, skip=skip)  # GradScaler hands skip on to opt.step()
    optim.balance_experts(raw_model, skip)  # mixtures of experts only: this step's load balances the next one
    watch.measure_state(raw_model, opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)
    step += 1
    watch.after_step(step, {'lr': lr, 'grad_norm': grad_norm})  # logs, evaluates and saves if they are due

watch.end(step)
