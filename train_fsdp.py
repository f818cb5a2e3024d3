"""
Train a language model with fully sharded data parallelism: every rank holds a slice of each weight, of its gradient and
of its optimizer state, and gathers one block at a time to compute (ZeRO, arXiv 1910.02054; FSDP, arXiv 2304.11277).

    python train_fsdp.py config/quickstart.py                         # one process: a CPU or one GPU
    torchrun --nproc_per_node=4 train_fsdp.py config/quickstart.py    # 4 GPUs, or 4 CPU processes (gloo)
    python train_fsdp.py --help                                       # every key with its default and meaning

`diff train_ddp.py train_fsdp.py` shows what sharding the same run takes. Context, tensor and expert parallelism are in
train_parallel.py.
"""

import math

from configurator import configure
from keys import BestKeys, Keys, ShardingKeys, TaskKeys


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config(Keys, TaskKeys, BestKeys, ShardingKeys):
    # fsdp
    replicate_size = 1  # HSDP: copies of the sharded model, e.g. one per node; their gradients are averaged [>= 1]


# ----------------------------------------------------------------------------------------------------------------------
config, explicit = configure(Config)  # config files and --key=value; before `import torch`, so --help is quick

import torch

import data
import fsdp
import optim
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
model = fsdp.shard(raw_model, mesh, run)  # by fully_shard, or by fsdp_manual.py
initialize(raw_model, run)  # fp32 master weights; each rank keeps its slice

# --- OPTIMIZER --------------------------------------------------------------------------------------------------------
opt = fsdp.optimizer(raw_model, run)  # its moments in host memory, where cpu_offload says so
scaler = torch.amp.GradScaler(device.type, enabled=run.compute_dtype == torch.float16)
step, state = run.resume(raw_model, opt, scaler)

watch = Watch(run, step, state)  # the log and whatever else only observes
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
    batch_size=batch_size, rank=rank, world_size=world_size, device=device,
)  # fmt: skip
while step < config.max_iters and not watch.must_stop:
    lr = optim.learning_rate_at(step, config)
    for group in opt.param_groups:
        group['lr'] = lr * group['lr_factor']  # lr_factor is 1 unless parametrization is mup or completep
    if config.dropout or config.lora_dropout:  # noise depends on (seed, step, rank, ranks) only, so a resume repeats it
        torch.manual_seed((config.seed * 1_000_003 + step) * world_size + rank)
    # The model returns a sum over this rank's targets, and gradients are averaged over the ranks. This factor turns
    # that into the mean over all targets of the global batch.
    targets = run.train_data.count_targets(config.seed, step * global_batch_size, global_batch_size)
    loss_scale = world_size / targets

    # forward and backward, micro-step by micro-step; the gradients add up
    watch.begin_step(step)
    step_loss = torch.zeros((), device=device)
    for micro_step in range(run.layout.micro_steps):
        watch.mark('data')
        batch = next(train_batches)  # x, y: (batch_size, block_size) each; with packed documents also their starts
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
    # gradients: undo the loss scale, clip the global norm
    scaler.unscale_(opt)
    grad_norm = optim.clip_grad_norm_(raw_model.parameters(), config.grad_clip or math.inf, optimizer=opt)
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
