"""
Train a language model with DeepSpeed's ZeRO (arXiv 1910.02054): the engine of the package `deepspeed` shards the
optimizer state (zero_stage=1), also the gradients (2), or also the weights (3) over all ranks.

    pip install -r requirements-deepspeed.txt
    python train_deepspeed.py config/quickstart.py                         # one process: a CPU or one GPU
    torchrun --nproc_per_node=4 train_deepspeed.py config/quickstart.py    # 4 GPUs, or 4 CPU processes (gloo)
    python train_deepspeed.py --help                                       # every key with its default and meaning

`diff train_fsdp.py train_deepspeed.py` shows what the engine takes over and what is left for the script. Checkpoints
are those of the other scripts, so each script resumes from any other's, with the optimizer state and on any number of
ranks. out_dir/deepspeed.json records the configuration that ran. cpu_offload=optimizer is ZeRO-Offload: fp32 weights,
moments and update on the host. Muon is not possible here, nor torch.compile under stage 3, where it is off by default.
DeepSpeed's own kernels are not used, because the update is optim.py's, so no compiler is needed.
"""

import json
from datetime import timedelta
from typing import Literal

from configurator import configure
from keys import BestKeys, Keys, TaskKeys


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config(Keys, TaskKeys, BestKeys):
    # deepspeed
    zero_stage = 3  # 1 shards optimizer state, 2 also gradients, 3 also weights [>= 1, <= 3]
    cpu_offload: Literal['none', 'optimizer', 'params'] = 'none'  # on the host, not the GPU: moments, or all state
    deepspeed_config: str | None = None  # a DeepSpeed JSON file to use instead of the one written to out_dir [path]


# ----------------------------------------------------------------------------------------------------------------------
config, explicit = configure(Config)  # config files and --key=value; before `import torch`, so --help is quick

import torch

import data
import deepspeed_engine
import optim
from runtime.begin import begin, make_model
from runtime.first_weights import initialize
from runtime.watch import Watch
from system import collectives
from system.files import write_file

if config.compile is None and config.zero_stage == 3:
    config.compile = False  # off by default, as DeepSpeed's hooks would break the graphs
run = begin(config, explicit, 'deepspeed')  # ranks, device, data; every key that the run needs now has a value
engine_config = deepspeed_engine.configuration(vars(config), run.layout.micro_steps, config.deepspeed_config)
if not config.dry_run:
    deepspeed = deepspeed_engine.package(run.device)  # the import, or one line on what to install
found = run.join()  # --dry_run ends here; else init_process_group, and find the checkpoint to resume from
rank, world_size, device = run.rank, run.world_size, run.device
batch_size, global_batch_size = config.batch_size, config.global_batch_size

# --- WEIGHTS AND OPTIMIZER --------------------------------------------------------------------------------------------
# raw_model computes nothing. It holds the run's weights as checkpoints do, rows of fp32 on the host, and is empty while
# the engine trains.
raw_model = make_model(run)
mesh = run.layout.mesh(torch.device('cpu'), config.timeout_s)
deepspeed_engine.shard_rows(raw_model, mesh)
initialize(raw_model, run, 'cpu')
opt = optim.from_config(raw_model, config, device if config.cpu_offload == 'none' else torch.device('cpu'))
scaler = torch.amp.GradScaler(device.type, enabled=run.compute_dtype == torch.float16)
step, state = run.resume(raw_model, opt, scaler)

# --- ENGINE -----------------------------------------------------------------------------------------------------------
# From here on opt updates the engine's slices. These begin with raw_model's weights and opt's state, matched by name.
timeout = timedelta(seconds=config.timeout_s)
model = deepspeed_engine.start(deepspeed, make_model(run), opt, raw_model, engine_config, device, timeout)
run.notes.append(deepspeed_engine.dtypes(model, config.dtype))
loss_scaler = deepspeed_engine.adapting_loss_scaler(model)  # in fp16 the engine scales; `scaler` only keeps the state
if found and loss_scaler:
    loss_scaler.cur_scale = scaler.get_scale()
collectives.on_rank_0(write_file, f'{config.out_dir}/deepspeed.json', json.dumps(engine_config, indent=1))

watch = Watch(run, step, state)  # the log and whatever else only observes
watch.self_test(model, raw_model)
if config.eval_only:
    watch.evaluate_only(model, step)


# --- LOOP -------------------------------------------------------------------------------------------------------------
def save(step):
    """Copy weights and moments from the engine's slices into raw_model's rows, save them, and free the rows again."""
    if config.keep_checkpoints == 0:
        return
    scale = scaler.state_dict()
    if loss_scaler:
        scale['scale'] = loss_scaler.cur_scale
    moments = deepspeed_engine.take_back(model, opt, raw_model)
    watch.save(step, raw_model, moments, scale)
    deepspeed_engine.drop(raw_model)


watch.begin_training(model, save)
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
        # The engine adds gradients up, and averages them over the ranks after the last micro-step's backward.
        model.set_gradient_accumulation_boundary(micro_step == run.layout.micro_steps - 1)
        watch.mark('forward')
        loss_sum, ce_sum = model(*batch)
        watch.mark('backward')
        model.backward(loss_sum * loss_scale, scale_wrt_gas=False)  # in fp16 the engine scales the loss itself
        step_loss += ce_sum

    watch.mark('update')
    # gradients: the norm of this rank's slices; the engine clips by the global norm
    gradients = deepspeed_engine.gradients(model)
    own_norm = torch.stack(torch._foreach_norm(gradients)).norm()
    # The step is skipped if loss or gradient is not finite on any rank; an all-reduce lets all ranks decide alike.
    # In fp16 a gradient may overflow because the loss scale is too large. Then the engine skips by itself and halves
    # the scale. That does not count as a bad step, unless the scale has already fallen below 1.
    may_overflow = loss_scaler is not None and loss_scaler.cur_scale >= 1
    skip = numbers.must_skip(step + 1, step_loss, targets, own_norm, may_overflow)
    deepspeed_engine.step(model, opt, bool(skip))  # clips, updates this rank's slices, gathers the weights
    if watch.meter.wants_state(opt):
        watch.meter.note_state(*deepspeed_engine.held(model, opt, gradients))
    del gradients
    step += 1
    values = {'lr': lr, 'grad_norm': float(model.get_global_grad_norm())}
    watch.after_step(step, values)  # logs, evaluates and saves if they are due

watch.end(step)
