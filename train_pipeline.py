"""
Train a language model with pipeline parallelism: every rank holds some of the blocks, micro-steps follow each other
through them, and ranks pass on activations and their gradients (1F1B, arXiv 2006.09503; interleaved, arXiv 2104.04473).

    torchrun --nproc_per_node=2 train_pipeline.py config/quickstart.py                         # 2 stages
    torchrun --nproc_per_node=4 train_pipeline.py config/quickstart.py --pipeline_stages=2     # 2 copies of 2 stages
    torchrun --nproc_per_node=4 train_pipeline.py config/quickstart.py --tensor_parallel=2     # 2 ranks in each stage
    python train_pipeline.py --help                          # every key with its default and meaning

`diff train_fsdp.py train_pipeline.py` shows what a pipeline takes; its schedule is in pipeline_manual.py.
"""

import math

from configurator import configure
from keys import BestKeys, Keys


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config(Keys, BestKeys):
    # pipeline
    pipeline_stages: int | None = None  # stages of the model; None = ranks / tensor_parallel; fewer = copies [>= 1]
    pipeline_chunks = 1  # parts of the model per stage: more = a shorter bubble, that many times the messages [>= 1]
    tensor_parallel = 1  # ranks that split each matrix and work on the same tokens: for wide models; 1 = off [>= 1]


# ----------------------------------------------------------------------------------------------------------------------
config, explicit = configure(Config)  # config files and --key=value; before `import torch`, so --help is quick

import torch

import data
import optim
import pipeline_manual
import tensor_manual
from layout import Ranks
from runtime import health
from runtime.begin import begin, make_model
from runtime.first_weights import initialize
from runtime.watch import Watch

run = begin(config, explicit, 'pipeline')  # ranks, device, data; every key that the run needs now has a value
stages, chunks = config.pipeline_stages, config.pipeline_chunks
run.join()  # --dry_run ends here; else init_process_group, and find the checkpoint to resume from
rank, world_size, device = run.rank, run.world_size, run.device
batch_size, global_batch_size = config.batch_size, config.global_batch_size

# --- STAGE ------------------------------------------------------------------------------------------------------------
# Ranks that exchange the most get neighboring numbers: those of a matrix, then the copies of a stage, then the stages.
mesh = run.layout.mesh(device, config.timeout_s)
stage, ranks_of_stage = mesh.get_local_rank('stage'), world_size // stages
raw_model = make_model(run)  # on the meta device
# Its blocks; the others are dropped, still on meta.
raw_model = pipeline_manual.Stage(raw_model, stage, stages, chunks, run.share)
tensor = None
if config.tensor_parallel > 1:
    tensor = tensor_manual.Split(raw_model, Ranks.of(mesh['tensor']), run.share)
model = pipeline_manual.Pipeline(raw_model, mesh, batch_size)
timetable = pipeline_manual.timetable(stages, chunks, run.layout.micro_steps)

# --- WEIGHTS AND OPTIMIZER --------------------------------------------------------------------------------------------
initialize(raw_model, run)  # fp32 master weights of this stage, the same on all its copies
opt = optim.from_config(raw_model, config, device, run.share, copies=model.copies)
scaler = torch.amp.GradScaler(device.type, enabled=run.compute_dtype == torch.float16)
step, state = run.resume(raw_model, opt, scaler)

watch = Watch(run, step, state, losses=model.losses)  # the log and whatever else only observes
watch.self_test(model, raw_model)
if config.eval_only:
    watch.evaluate_only(raw_model, step)


# --- LOOP -------------------------------------------------------------------------------------------------------------
def save(step):
    watch.save(step, raw_model, opt, scaler.state_dict())


watch.begin_training(raw_model, save)
numbers = watch.numbers  # all else in watch only observes; this decides whether a step is skipped (health.py)
train_batches = data.batches(
    run.train_data, config.seed, first_sample=step * global_batch_size, global_batch_size=global_batch_size,
    batch_size=batch_size, rank=rank % ranks_of_stage, world_size=ranks_of_stage, device=device,
)  # fmt: skip
while step < config.max_iters and not watch.must_stop:
    lr = optim.learning_rate_at(step, config)
    for group in opt.param_groups:
        group['lr'] = lr * group['lr_factor']  # lr_factor is 1 unless parametrization is mup or completep
    if config.dropout:  # noise depends on (seed, step, rank, ranks) only, so a resume repeats it
        torch.manual_seed((config.seed * 1_000_003 + step) * world_size + rank)
    # The last stage returns a sum over its targets, and gradients are summed over the copies. This factor turns that
    # into the mean over all targets of the global batch. It is applied to the loss, before backward, because stages
    # hand on gradients as they are and nobody scales them later.
    targets = run.train_data.count_targets(config.seed, step * global_batch_size, global_batch_size)
    loss_factor = scaler.scale(torch.full((), 1 / targets, device=device))  # torch.tensor() would wait for the device
    targets *= config.tensor_parallel  # this many ranks report the same loss, and all are summed

    # forward and backward of all micro-steps, in the order of the timetable; the gradients add up
    watch.begin_step(step)
    watch.mark('data')
    batches = [next(train_batches) for _ in range(run.layout.micro_steps)]  # x, y (batch_size, block_size), starts
    step_loss = torch.zeros((), device=device)
    with model.weights_cast():
        for actions in timetable:  # [what stage 0 does, what stage 1 does, ...] at the same time
            action = actions[stage]
            # Idle ranks make a mark, too, so that the rank with the fewest marks is the one that the others wait for.
            watch.mark('backward' if action and action.kind == 'backward' else 'forward')
            if action and action.kind == 'forward':
                step_loss += model.forward(action, *batches[action.micro_step])
            elif action:
                model.backward(action, loss_factor)
            # send activations to the next part, and their gradients to the one before
            model.send_and_receive(actions)

    watch.mark('update')
    # gradients: sum over the copies, undo the loss scale, clip the global norm
    if tensor:
        tensor.sum_partial_gradients()
    model.sum_gradients()
    scaler.unscale_(opt)
    if scaler.is_enabled():
        health.share_overflow(scaler, opt)
    norm_groups = [*model.norm_groups(), *(tensor.norm_groups() if tensor else ())]
    grad_norm = optim.clip_grad_norm_(raw_model.parameters(), config.grad_clip or math.inf, *norm_groups, optimizer=opt)
    # The step is skipped if loss or gradient is not finite on any rank; an all-reduce lets all ranks decide alike.
    # In fp16 a gradient may overflow because the loss scale is too large. Then scaler.step() skips by itself and
    # update() halves the scale. That does not count as a bad step, unless the scale has already fallen below 1.
    may_overflow = scaler.is_enabled() and scaler.get_scale() >= 1
    skip = numbers.must_skip(step + 1, step_loss, targets, grad_norm, may_overflow)
    scaler.step(opt, skip=skip)  # GradScaler hands skip on to opt.step()
    watch.measure_state(raw_model, opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)
    step += 1
    watch.after_step(step, {'lr': lr, 'grad_norm': grad_norm})  # logs, evaluates and saves if they are due

watch.end(step)
