"""
Train a language model with data parallelism: every rank holds the whole model, and gradients are averaged over ranks.

    python train_ddp.py config/quickstart.py                          # one process: a CPU or one GPU
    torchrun --nproc_per_node=4 train_ddp.py config/quickstart.py     # 4 GPUs, or 4 CPU processes (gloo)
    python train_ddp.py --help                                        # every key with its default and meaning

`diff train_ddp.py train_fsdp.py` shows what sharding the same run takes.
"""

import math

from configurator import configure
from keys import BestKeys, Keys, TaskKeys


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config(Keys, TaskKeys, BestKeys):
    # system
    checksum_interval = 0  # steps between comparisons of all ranks' weights, bit for bit; 0 = off [>= 0]


# ----------------------------------------------------------------------------------------------------------------------
config, explicit = configure(Config)  # config files and --key=value; before `import torch`, so --help is quick

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import data
import optim
from runtime.begin import begin, make_model, order_buckets
from runtime.first_weights import initialize
from runtime.watch import Watch

run = begin(config, explicit, 'ddp')  # ranks, device, data; every key that the run needs now has a value
run.join()  # --dry_run ends here; else init_process_group, and find the checkpoint to resume from
rank, world_size, device = run.rank, run.world_size, run.device
batch_size, global_batch_size = config.batch_size, config.global_batch_size

# --- MODEL AND WEIGHTS ------------------------------------------------------------------------------------------------
raw_model = make_model(run)  # on the meta device
initialize(raw_model, run)  # fp32 master weights, the same on every rank
model = raw_model
if world_size > 1:
    if config.compile:  # dynamo would split blocks at ends of gradient buckets, but DDP's hooks run between blocks
        torch._dynamo.config.optimize_ddp = False
    model = DistributedDataParallel(
        raw_model, device_ids=[device] if run.on_cuda else None, gradient_as_bucket_view=True
    )
    # DDP would overwrite all buffers with rank 0's in every forward. Here they are constants, or hold what a router has
    # counted on its own rank.
    model.broadcast_buffers = False

# --- OPTIMIZER --------------------------------------------------------------------------------------------------------
opt = optim.from_config(raw_model, config, device, copies=dist.group.WORLD)  # all ranks have the same gradients
scaler = torch.amp.GradScaler(device.type, enabled=run.compute_dtype == torch.float16)
step, state = run.resume(raw_model, opt, scaler)

watch = Watch(run, step, state)  # the log and whatever else only observes
watch.self_test(model, raw_model)
if config.eval_only:
    watch.evaluate_only(model, step)


# --- LOOP -------------------------------------------------------------------------------------------------------------
def save(step):
    watch.save(step, raw_model, opt, scaler.state_dict())


watch.begin_training(model, save, checksum_interval=config.checksum_interval)
numbers = watch.numbers  # all else in watch only observes; this decides whether a step is skipped (health.py)
train_batches = data.batches(
    run.train_data, config.seed, first_sample=step * global_batch_size, global_batch_size=global_batch_size,
    batch_size=batch_size, rank=rank, world_size=world_size, device=device,
)  # fmt: skip
order_buckets(model, opt, run)  # so that a resumed run adds up gradients in the order of an uninterrupted one
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
        # Gradients add up locally; only the last micro-step's backward averages them over the ranks.
        model.require_backward_grad_sync = micro_step == run.layout.micro_steps - 1
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
