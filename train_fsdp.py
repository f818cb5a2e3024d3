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


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config:
    # I/O
    out_dir = 'out/train'  # checkpoints, metrics.jsonl and train.log are written here: one folder per run
    resume: Literal['auto', 'never', 'must'] = 'auto'  # continue the run in out_dir; 'never' refuses one that is there
    eval_interval = 500  # steps between evaluations; 0 = only after the last step
    eval_iters = 20  # evaluate on this many global batches, always the same ones: more = less noise; 0 = none
    eval_tasks = []  # files of tasks that the model is scored on, as by evaluate.py: tasks/piqa.jsonl,tasks/mine.jsonl
    eval_tasks_interval = 1000  # steps between these; 0 = only after the last step
    eval_only = False  # evaluate the newest checkpoint and stop
    log_interval = 10  # steps between log lines
    trace_step = 0  # record this step for chrome://tracing, as out_dir/trace_rank0.json, ...: where does time go?
    checkpoint_interval = 1000  # steps between checkpoints: what a crash may cost; 0 = only after the last step
    keep_checkpoints = 2  # older ones are deleted; 0 = no checkpoint is written at all
    permanent_interval = 0  # steps between checkpoints that are never deleted, to study later; 0 = none
    save_errors: Literal['stop', 'continue'] = 'stop'  # if a checkpoint cannot be written: end, or train on without
    async_checkpoint = False  # train on while a checkpoint is written: for large models, it takes host memory
    dry_run = False  # print dimensions, memory per rank, batch arithmetic, FLOPs and disk, then stop
    # logging
    wandb_log = False  # needs `pip install wandb`; WANDB_MODE=offline on nodes without internet
    wandb_project = 'distributed-training'  # wandb project; its team is WANDB_ENTITY
    wandb_group: str | None = None  # wandb group, to lay runs side by side
    wandb_run_name: str | None = None  # None = the name of out_dir
    tensorboard_log = False  # write event files to out_dir/tensorboard
    # data
    dataset = 'stdlib-bpe2048'  # a folder in data_dir, made by prepare_data.py, or shares: 'web:0.7,code:0.3'
    dataset_stages = ()  # other shares from a step or a part of the run on: ((0.9, 'web:0.3,books:0.7'),)
    max_epochs = 4.0  # over a source of a mixture: more are a WARNING before the run (arXiv 2305.16264)
    windows: Literal['stream', 'documents'] = 'stream'  # documents: packed whole, and attention stays inside of each
    data_dir = 'data'  # where datasets live
    batch_size = 8  # sequences per rank per micro-step: what must fit into memory
    global_batch_size: int | None = None  # sequences per optimizer step, over all ranks; None = batch_size * ranks
    block_size = 1024  # tokens per sequence
    context_parallel = 1  # ranks that share each sequence, which then count as one rank: for long block_size; 1 = off
    context_impl: Literal['ring', 'gather'] = 'ring'  # keys and values travel from rank to rank, or to all at once
    tensor_parallel = 1  # ranks that hold each matrix together, and work on the same tokens: for wide models; 1 = off
    # model
    init_from = 'scratch'  # or the weights of a run (its out_dir), of a Hugging Face folder, of OWNER/NAME in HF_HOME
    trust_remote_code = False  # run the Python that came with init_from
    arch: Literal['gpt2', 'enoki', 'llama', 'qwen3'] = 'gpt2'  # model.py begins with what tells them apart
    heads: int | None = None  # enoki and qwen3: the published rules set size, learning rate, steps and weight decay
    n_layer = 12  # transformer blocks
    n_head = 12  # query heads
    n_kv_head: int | None = None  # key/value heads (grouped-query attention); None = n_head
    head_dim: int | None = None  # None = n_embd / n_head
    n_embd = 768  # width of the residual stream
    mlp_hidden_dim: int | None = None  # None = 4 * n_embd (gpt2, enoki), or 8/3 * n_embd to a multiple of 64
    vocab_size: int | None = None  # None = that of the dataset; the embedding is padded to a multiple of 64
    dropout = 0.0  # 0 for pretraining; 0.1 or more where the data is seen many times
    bias: bool | None = None  # None = True for gpt2 (False: nanoGPT's model, exact GELU), False for the others
    tie_embeddings: bool | None = None  # the output head is the embedding; None = True for gpt2, False for the others
    rope_theta: float | None = None  # base of the rotary embedding; None = 10000 (qwen3: 1000000), or init_from's
    yarn = []  # init_from: as many times its block_size, by YaRN: 4, or 4,1024 with that; docs/long_context.md
    attention_gate = False  # qwen3: sigmoid gate on the attention output
    parametrization: Literal['standard', 'mup', 'completep'] = 'standard'  # rates hold for wider (mup), deeper models
    base_width: int | None = None  # mup, completep: n_embd of the model that the learning rate was tuned on
    base_depth: int | None = None  # completep: its n_layer
    freeze: str | None = None  # init_from: parameters whose names this regular expression matches are not trained
    # lora
    lora_rank = 0  # init_from: train two thin matrices beside each weight instead (LoRA), of this rank; 0 = off
    lora_alpha = 16.0  # what they add is scaled by lora_alpha / lora_rank
    lora_targets = 'all'  # 'all' linear layers of the blocks, or ends of their names: 'q_proj,v_proj'
    # optimizer
    optimizer: Literal[
        'adamw', 'adamw-decay', 'adana', 'adana-released', 'dana-mk4', 'dana-star-mk4', 'ademamix', 'muon', 'sgd'
    ] = 'adamw'  # docs/optimizers.md compares them
    learning_rate = 6e-4  # peak: the first thing to tune; larger models want less
    max_iters = 10000  # optimizer steps
    num_epochs: float | None = None  # passes over the training data: sets max_iters
    weight_decay = 0.1  # on matrices; never on embeddings, norms and biases; DANA family and heads: see omega
    beta1 = 0.9  # Adam: decay of the first moment
    beta2 = 0.95  # Adam: decay of the second moment; 0.999 for small batches
    grad_clip = 1.0  # global gradient norm; 0 = off
    lr_rule: Literal[32, 512] = 32  # with heads, the learning rate is the one fitted at this many sequences per step
    kappa = 0.85  # DANA family: the long momentum counts (1 + step)^(1 - kappa) times
    delta = 8.0  # DANA family: moments average over the last 1/delta of the run so far
    omega = 4.0  # weight_decay = omega / wd_ts (DANA family), with heads also omega / (learning_rate * max_iters)
    wd_ts: int | None = None  # DANA family, adamw-decay: steps until weight decay has halved; None = max_iters / 10
    z_loss = 0.0  # coefficient of mean(logsumexp(logits)^2), keeps logits small (Enoki: 1e-4)
    # schedule
    lr_schedule: Literal['cosine', 'cos_inf', 'wsd', 'linear', 'constant'] = 'cosine'  # optim.py, learning_rate_at()
    warmup_iters = 100  # linear warm-up: longer if the loss jumps early
    lr_decay_iters: int | None = None  # None = max_iters
    min_lr: float | None = None  # None = learning_rate / 10
    # system
    device = 'auto'  # 'auto', 'cpu', 'cuda', 'cuda:1'
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # of compute; auto = bfloat16 where it is fast
    tf32 = False  # float32 on a GPU: matmuls round their inputs to 10 bits (TensorFloat-32), faster
    compile: bool | None = None  # torch.compile each block; None = on CUDA
    seed = 1337  # of the initial weights, the order of the data and dropout
    deterministic = False  # bit-equal repetitions, at a cost in speed
    activation_checkpointing: Literal['none', 'full', 'selective', 'offload'] = 'none'  # recompute: docs/strategies.md
    timeout_s = 600  # a collective that takes longer is an error; a rank without progress is named before that
    stop_before_end_s = 300  # in a Slurm job: save and leave this many seconds before its time is over; 0 = do not
    max_failures = 5  # refuse to start from the same step more often in a row than this; 0 = never refuse
    max_bad_steps = 10  # skip steps whose loss or gradient is not finite on some rank, at most this many in a row
    loss_spike_guard = False  # skip steps, too, whose loss is 6 sigma above the mean of the last 128
    # fsdp
    fsdp_impl: Literal['torch', 'manual'] = 'torch'  # PyTorch's fully_shard, or our own, fsdp_manual.py
    zero_stage = 3  # what is sharded: 1 (not torch) = moments; 2 = gradients, too; 3 = weights, too
    replicate_size = 1  # HSDP: copies of the sharded model, e.g. one per node; their gradients are averaged
    cpu_offload: Literal['none', 'optimizer', 'params'] = 'none'  # to the host: moments, or all state; saves memory
    accumulate: Literal['unsharded', 'sharded'] = 'unsharded'  # of gradients: less communication, or less memory
    blocks_per_unit = 1  # blocks that are gathered together: more = fewer, larger messages
    prefetch = 1  # manual: blocks gathered ahead of the one at work; 0 = communication and computation take turns


# ----------------------------------------------------------------------------------------------------------------------
config, explicit = configure(Config)  # config files and --key=value; before `import torch`, so --help is quick

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import context_manual
import data
import fsdp_manual
import meshes
import optim
import tensor_manual
from runtime import health, offload, processes
from runtime.begin import begin, initialise, make_model
from runtime.watch import Watch

run = begin(config, explicit, 'fsdp')  # ranks, device and data; from here on no key is None that the run needs
found = run.join()  # --dry_run ends here; the process group, and the checkpoint that this run goes on from
rank, world_size, device, on_cuda = run.rank, run.world_size, run.device, run.on_cuda
batch_size, global_batch_size = config.batch_size, config.global_batch_size

# --- MODEL ------------------------------------------------------------------------------------------------------------
raw_model = make_model(run)  # on the meta device; activation checkpointing and compilation come before sharding

# --- SHARD ------------------------------------------------------------------------------------------------------------
# Ranks that hold each matrix together, or share each sequence, stand beside each other, since they talk most.
mesh = meshes.make(meshes.fsdp_axes(vars(config), world_size), device, config.timeout_s)
context = context_manual.Context.from_keys(vars(config), device) if config.context_parallel > 1 else None
tensor = None
if config.tensor_parallel > 1:
    tensor = tensor_manual.Split(raw_model, tensor_manual.Ranks.of(mesh['tensor']))
    mesh = mesh[mesh.mesh_dim_names[:-1]]
# A unit is what is gathered at once: some blocks, or the root with what is left (embedding, final norm, head).
units = [raw_model.blocks[n:][: config.blocks_per_unit] for n in range(0, config.n_layer, config.blocks_per_unit)]
offloads = config.cpu_offload == 'params'
if config.fsdp_impl == 'manual':
    model = fsdp_manual.shard(raw_model, units, mesh, run.compute_dtype, config.zero_stage, config.prefetch, offloads)
else:
    precision = MixedPrecisionPolicy(param_dtype=run.compute_dtype, reduce_dtype=torch.float32)
    sharding = {'mesh': mesh, 'mp_policy': precision}
    if offloads:
        sharding['offload_policy'] = CPUOffloadPolicy(pin_memory=on_cuda)
    for unit in units:
        fully_shard(list(unit), reshard_after_forward=config.zero_stage == 3, **sharding)
    model = fully_shard(raw_model, reshard_after_forward=False, **sharding)  # its head is needed again at once

# --- WEIGHTS AND OPTIMIZER --------------------------------------------------------------------------------------------
initialise(raw_model, run, 'cpu' if offloads else device)  # fp32 masters; each rank keeps its slice
opt = optim.from_config(raw_model, config, device)
scaler = torch.amp.GradScaler(device.type, enabled=run.compute_dtype == torch.float16)
step, state = run.resume(raw_model, opt, scaler)
if config.cpu_offload == 'optimizer':
    opt = offload.StateOnHost(opt)  # from here on, since a checkpoint has filled the moments by now

watch = Watch(run, step, state)  # the log, and all else that only watches
watch.self_test(model, raw_model)


# --- EVALUATION -------------------------------------------------------------------------------------------------------
@torch.no_grad()
def evaluate():
    """Cross-entropy over the first eval_iters * global_batch_size validation windows, shared out over the ranks."""
    model.eval()
    windows = config.eval_iters * global_batch_size
    nats_and_tokens = torch.zeros(len(run.val_data.sources), 2, dtype=torch.float64, device=device)
    for batch, source in data.eval_batches(run.val_data, windows, batch_size, rank, world_size, device):
        watch.at('evaluation', step)
        if context:
            batch = context.part(batch)
        _, ce_sum = model(*batch)
        nats_and_tokens[source] += torch.stack((ce_sum.double(), (batch[1] >= 0).sum()))
    dist.all_reduce(nats_and_tokens)
    model.train()
    processes.reshard(model)  # free what forward left gathered, for no backward pass will
    return run.val_data.losses(nats_and_tokens.tolist())


if config.eval_only:
    watch.evaluate_only(model, step, evaluate)


# --- LOOP -------------------------------------------------------------------------------------------------------------
def save(step):
    watch.save(step, raw_model, opt, scaler.state_dict())


if config.fsdp_impl == 'manual':
    watch.also_log = model.communication  # bytes and milliseconds of gathers and reductions
watch.begin_training(model, save)
train_batches = data.batches(
    run.train_data, config.seed, step * global_batch_size, global_batch_size, batch_size, rank, world_size, device
)
while step < config.max_iters and not watch.must_stop:
    # the learning rate of this step
    lr = optim.learning_rate_at(
        step, config.learning_rate, config.lr_schedule, config.warmup_iters, config.lr_decay_iters, config.min_lr
    )
    for group in opt.param_groups:
        group['lr'] = lr * group['lr_factor']  # 1, but for a parametrization
    if config.dropout:  # noise is a pure function of (seed, step, rank, ranks), so a resumed run draws the same
        torch.manual_seed((config.seed * 1_000_003 + step) * world_size + rank)
    # The model returns a sum over this rank's targets, and gradients are averaged over the ranks. This factor turns
    # that into the mean over all targets of the global batch, each of which tensor_parallel ranks count.
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
        health.share_overflow(scaler, opt)
    norm_groups = tensor.norm_groups() if tensor else ()
    grad_norm = optim.clip_grad_norm_(raw_model.parameters(), config.grad_clip or math.inf, *norm_groups)
    # update, but not where loss or gradient is not finite on some rank; all ranks decide alike, by one all-reduce
    may_overflow = scaler.is_enabled() and scaler.get_scale() >= 1
    skip = watch.numbers.must_skip(step + 1, step_loss, targets, grad_norm, may_overflow)
    scaler.step(opt, skip=skip)
    watch.measure_state(raw_model, opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)
    step += 1
    watch.after_step(step, {'lr': lr, 'grad_norm': grad_norm}, evaluate)  # logs, evaluates and saves what is due

watch.end(step)
