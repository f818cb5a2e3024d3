"""
Train a language model with DiLoCo: replicas of it train alone, and only every inner_steps steps they exchange what they
have learned (arXiv 2311.08105). Inside a replica, mostly one per node, it is sharded as in train_fsdp.py.

    torchrun --nproc_per_node=4 train_diloco.py config/diloco_quickstart.py --num_replicas=2    # 2 replicas x 2 shards
    sbatch --nodes=4 slurm/diloco.sh                          # one replica per node, no server process
    torchrun ... train_diloco.py CONFIG --exchange=s3://bucket/run      # one of many jobs that come and go (pool/)
    torchrun ... train_diloco.py CONFIG --plan                # how slow may the link between the nodes be?
    torchrun ... train_diloco.py CONFIG --verify              # does it compute what it should, here?
    python train_diloco.py --help                             # every key with its default and meaning

`diff train_fsdp.py train_diloco.py` shows what it takes; the exchange itself is in diloco.py.
"""

import functools
import math
from datetime import timedelta
from typing import Literal

from configurator import configure


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config:
    # I/O
    out_dir = 'out/train'  # checkpoints, metrics.jsonl and train.log are written here: one folder per run
    resume: Literal['auto', 'never', 'must'] = 'auto'  # continue the run in out_dir; 'never' refuses one that is there
    eval_interval = 500  # steps between evaluations of outer and inner parameters; 0 = only after the last step
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
    cpu_offload: Literal['none', 'optimizer', 'params'] = 'none'  # to the host: moments, or all state; saves memory
    accumulate: Literal['unsharded', 'sharded'] = 'unsharded'  # of gradients: less communication, or less memory
    blocks_per_unit = 1  # blocks that are gathered together: more = fewer, larger messages
    prefetch = 1  # manual: blocks gathered ahead of the one at work; 0 = communication and computation take turns
    # diloco
    num_replicas: int | None = None  # copies of the model that train alone; None = one per node; exchange: the pool's
    inner_steps = 100  # H: steps that replicas train alone; more for slower links, fewer for better losses
    outer_lr = 0.7  # of the outer Nesterov step; 1, with outer_momentum=0: parameters are averaged
    outer_momentum = 0.9  # of the outer Nesterov step; 0 = plain SGD; lower it for runs of few rounds
    num_fragments = 1  # P: the model is exchanged in P parts, one every inner_steps / P steps (Streaming DiLoCo)
    overlap_steps = 0  # inner steps during which an exchange is in flight; its result is applied then
    fragment_mix = 0.0  # alpha: what lands is alpha * the replica's own parameters + (1 - alpha) * the outer ones
    lora_residual = False  # averages of LoRA are exact: what those of A and B miss goes into the weights (FedEx-LoRA)
    exchange_dtype: Literal['float32', 'bfloat16', 'int8', 'int4', 'int2', 'top2bit'] = 'float32'  # what travels
    exchange_k = 64  # top2bit: of 4096 numbers (64 x 64 of a matrix) the largest so many are sent, in 2 bits each
    error_feedback = False  # keep what exchange_dtype cost (4 bytes per parameter), send it next time; top2bit: always
    error_decay: float | None = None  # ... times this; None = 0.95 for top2bit (SparseLoCo), 1 for the others
    outer_on_host = False  # outer parameters and momentum in host memory; with cpu_offload=params so is the exchange
    exchange = ''  # replicas are jobs that come and go, and share this folder, or s3://bucket/name; '' = all are here
    quorum = 1  # exchange: deltas without which no round is closed
    grace_s = 60.0  # exchange: a round with a quorum waits so long for others; a job silent for so long is dead
    keep_deltas = False  # exchange: delete none, so that --replay can begin with the first round
    replay = False  # exchange: compute the outer parameters again from what jobs gave, compare the bits, and stop
    plan = False  # measure steps and link, print the cost of other inner_steps and exchange_dtypes, and train
    verify = False  # check on this model and these machines that replicas compute what they should, and stop


# ----------------------------------------------------------------------------------------------------------------------
config, explicit = configure(Config)  # config files and --key=value; before `import torch`, so --help is quick

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

import data
import diloco
import fsdp_manual
import meshes
import optim
from exchange import diloco_check
from runtime import checkpoint, offload, processes
from runtime.begin import begin, initialise, make_model
from runtime.log import Journal
from runtime.watch import Watch

run = begin(config, explicit, 'diloco')  # ranks, device and data; from here on no key is None that the run needs
diloco.check_keys(vars(config))  # inner_steps, overlap_steps and the like fit together
found = run.join()  # --dry_run ends here; the process group, and the checkpoint that this run goes on from
rank, world_size, device, on_cuda = run.rank, run.world_size, run.device, run.on_cuda
batch_size, global_batch_size = config.batch_size, config.global_batch_size
run.notes += diloco_check.mesh_lines(config.num_replicas, processes.local_world_size())
diloco_check.refuse_differences(config, run.train_data, run.val_data)

# --- SHARD ------------------------------------------------------------------------------------------------------------
raw_model = make_model(run)  # on the meta device; activation checkpointing and compilation come before sharding
whole_mesh = meshes.make(meshes.diloco_axes(vars(config), world_size), device, config.timeout_s)
mesh = whole_mesh['shard']  # the ranks of this replica: it is sharded as if there were no others
replica, shard_size = whole_mesh.get_local_rank('replica'), mesh.size()
# A unit is what is gathered at once: some blocks, or the root with what is left (embedding, final norm, head).
blocks, size = raw_model.blocks, config.blocks_per_unit
units = [blocks[first : first + size] for first in range(0, len(blocks), size)]
offloads = config.cpu_offload == 'params'
if config.fsdp_impl == 'manual':
    model = fsdp_manual.shard(raw_model, units, mesh, run.compute_dtype, config.zero_stage, config.prefetch, offloads)
else:
    sharding = {
        'mesh': mesh,
        'mp_policy': MixedPrecisionPolicy(param_dtype=run.compute_dtype, reduce_dtype=torch.float32),
        'offload_policy': CPUOffloadPolicy(pin_memory=on_cuda) if offloads else OffloadPolicy(),
    }
    for unit in units:
        fully_shard(list(unit), reshard_after_forward=config.zero_stage == 3, **sharding)
    model = fully_shard(raw_model, reshard_after_forward=False, **sharding)  # its head is needed again at once

# --- WEIGHTS AND INNER OPTIMIZER --------------------------------------------------------------------------------------
initialise(raw_model, run, 'cpu' if offloads else device)  # fp32 masters, the same in every replica
opt = optim.from_config(raw_model, config, device)
scaler = torch.amp.GradScaler(device.type, enabled=run.compute_dtype == torch.float16)


# --- OUTER OPTIMIZER --------------------------------------------------------------------------------------------------
def outer_step(theta, pseudo_gradient, momentum):
    """Nesterov's step in PyTorch's form on a stretch of the outer parameters, all flat fp32, in place."""
    momentum.mul_(config.outer_momentum).add_(pseudo_gradient)
    theta.sub_(pseudo_gradient, alpha=config.outer_lr).sub_(momentum, alpha=config.outer_lr * config.outer_momentum)


trained = {name: parameter for name, parameter in raw_model.named_parameters() if parameter.requires_grad}
make_outer = functools.partial(
    diloco.Outer, trained, update=outer_step, group=whole_mesh.get_group('replica'), inner_steps=config.inner_steps,
    num_fragments=config.num_fragments, overlap_steps=config.overlap_steps, mix=config.fragment_mix,
    dtype=config.exchange_dtype, error_feedback=config.error_feedback, on_host=config.outer_on_host,
    timeout=timedelta(seconds=config.timeout_s), error_decay=config.error_decay, k=config.exchange_k,
)  # fmt: skip
outer = make_outer()

# --- RESUME -----------------------------------------------------------------------------------------------------------
step, saved = 0, {}
if found:
    saved = checkpoint.read_state(found)
    run.check_resume(saved)
    checkpoint.load(found, raw_model, opt, outer.optimizer_key(saved))  # the outer parameters, this replica's moments
    # And what there is besides: train_ddp.py and train_fsdp.py save no more than that.
    step = outer.resume(saved, functools.partial(checkpoint.read_tensors, found, missing_ok=True))
    scalers = saved.get('scalers', [saved['scaler']])
    scaler.load_state_dict(scalers[replica % len(scalers)])
if config.cpu_offload == 'optimizer':
    opt = offload.StateOnHost(opt)  # from here on, since a checkpoint has filled the moments by now
diloco_check.check_start(outer, step, config.max_iters)  # all replicas hold the same outer parameters

looks_only = config.eval_only or config.verify  # those two cut no rows of the log
watch = Watch(run, saved['step'] if found and looks_only else step, saved)  # the log, and all else that only watches
watch.self_test(model, raw_model)
watch.say(diloco_check.advice(config.max_iters - step, config.inner_steps, config.outer_momentum))


# --- EVALUATION -------------------------------------------------------------------------------------------------------
@torch.no_grad()
def evaluate():
    """Cross-entropy over the first eval_iters * global_batch_size validation windows, shared out over the ranks."""
    model.eval()
    windows = config.eval_iters * global_batch_size
    nats_and_tokens = torch.zeros(len(run.val_data.sources), 2, dtype=torch.float64, device=device)
    for batch, source in data.eval_batches(run.val_data, windows, batch_size, rank, world_size, device):
        watch.at('evaluation', step)
        _, ce_sum = model(*batch)
        nats_and_tokens[source] += torch.stack((ce_sum.double(), (batch[1] >= 0).sum()))
    dist.all_reduce(nats_and_tokens)
    model.train()
    processes.reshard(model)  # free what forward left gathered, for no backward pass will
    return run.val_data.losses(nats_and_tokens.tolist())


def batches_from(step):
    """This rank's micro-batches from a step on: the replicas split the global batch, and their ranks split that."""
    place, first = replica * shard_size + mesh.get_local_rank(), step * global_batch_size
    return data.batches(run.train_data, config.seed, first, global_batch_size, batch_size, place, world_size, device)


def targets_of(step):
    """Targets in this replica's share of a step: all its tokens, or of conversations those that are learned."""
    share = global_batch_size // config.num_replicas
    return run.train_data.count_targets(config.seed, step * global_batch_size + replica * share, share)


if config.verify:
    outer.restart_from_anchors()
    passed = diloco_check.verify(model, trained, batches_from, targets_of, make_outer, config, watch.say)
    processes.leave(0 if passed else 1)
if config.eval_only:
    with outer.outer_parameters():
        watch.evaluate_only(model, step, evaluate)


# --- LOOP -------------------------------------------------------------------------------------------------------------
def save(step):
    """A checkpoint of the outer parameters, and of what each replica needs to go on in the middle of a round."""
    states = diloco_check.everybodys((scaler.state_dict(), watch.numbers.state()), whole_mesh.get_group('replica'))
    scalers, numbers = zip(*states, strict=True)
    more = {'numbers': numbers[0], 'scalers': scalers, 'numbers_of_replicas': numbers}
    more |= {'diloco': outer.state(step), 'step_of_weights': outer.step_of_anchors()}
    tensors = outer.tensors(outer.is_mid_round(step))
    watch.save(step, raw_model, opt, scalers[0], more, more_tensors=tensors, optimizer_key=outer.optimizer_key())


numbers = saved.get('numbers_of_replicas', [saved.get('numbers')])
watch.begin_training(model, save, group=mesh.get_group(), numbers=numbers[replica % len(numbers)])
if found and step < saved['step']:
    watch.say(f'{found} has {saved["diloco"]["num_replicas"]} replicas: back to where they last met, step {step}')
    save(step)
    watch.saver.wait()
    if not (config.permanent_interval and int(found[-8:]) % config.permanent_interval == 0):
        processes.on_rank_0(checkpoint.discard, found)
if config.fsdp_impl == 'manual':
    watch.also_log = model.communication  # bytes and milliseconds of gathers and reductions
planner = diloco_check.Plan(outer, watch.meter, watch.say) if config.plan else None  # measures the link
journal = Journal(watch.log)
train_batches = batches_from(step)
while step < config.max_iters and not watch.must_stop:
    # the learning rate of this step
    lr = optim.learning_rate_at(
        step, config.learning_rate, config.lr_schedule, config.warmup_iters, config.lr_decay_iters, config.min_lr
    )
    for group in opt.param_groups:
        group['lr'] = lr * group['lr_factor']  # 1, but for a parametrization
    if config.dropout:  # noise is a pure function of (seed, step, rank, ranks), so a resumed run draws the same
        torch.manual_seed((config.seed * 1_000_003 + step) * world_size + rank)
    # The model returns a sum over this rank's targets, and gradients are averaged over the ranks of a replica. This
    # factor turns that into the mean over the replica's targets.
    targets = targets_of(step)
    loss_scale = shard_size / targets

    # forward and backward, micro-step by micro-step; the gradients add up
    watch.begin_step(step)
    step_loss = torch.zeros((), device=device)
    for micro_step in range(run.accumulation_steps):
        watch.mark('data')
        batch = next(train_batches)  # x, y (batch_size, block_size) each; where documents are packed their starts, too
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
    # gradients: undo the loss scale, clip the global norm
    scaler.unscale_(opt)
    grad_norm = optim.clip_grad_norm_(raw_model.parameters(), config.grad_clip or math.inf)
    # update, but not where loss or gradient is not finite on some rank; all ranks of a replica decide alike
    may_overflow = scaler.is_enabled() and scaler.get_scale() >= 1
    skip = watch.numbers.must_skip(step + 1, step_loss, targets, grad_norm, may_overflow)
    scaler.step(opt, skip=skip)
    watch.measure_state(raw_model, opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)
    step += 1
    watch.end_step()

    row, due = {}, watch.due(step)
    round_ends = due.last or step % config.inner_steps == 0
    # the replicas' own losses, each on its part of the text, before they meet
    if due.evaluate and outer.is_mid_round(step):
        row['diloco/inner_val_loss'] = evaluate()['val_loss']

    # outer step: average over the replicas what each has learned, and restart them from the result
    if outer.has_work(step, due.last):
        with watch.part('outer', 10 * config.timeout_s):  # each message may take timeout_s
            for fragment in outer.to_land(step, due.last):  # exchanges that began overlap_steps ago
                outer.land(fragment, step)
            for fragment in outer.to_send(step, due.last):  # every inner_steps, each fragment at its own time
                outer.send(fragment, step, last=due.last)
    if planner:
        planner.after_step()

    # log: shown as it comes, written when replicas meet; the outer parameters are evaluated, which the run is for
    replicas_meet = round_ends or due.evaluate or due.score or due.save
    if due.log:
        row |= watch.measured({'lr': lr, 'grad_norm': grad_norm})
        if not replicas_meet:
            journal.show(step, row)
    if round_ends:
        row |= outer.health()
    if due.evaluate or due.score:
        with outer.outer_parameters():
            row |= evaluate() if due.evaluate else {}
            row |= watch.scores(step) if due.score else {}
    if row:
        journal.keep(step, watch.with_totals(step, row))
    if replicas_meet:  # only then do ranks of different replicas wait for each other
        journal.write()
        watch.must_stop = round_ends and watch.stop_request.agreed(now=True)  # a signal, or a file STOP
    if due.save or watch.must_stop:
        save(step)

if planner:
    planner.compare()
watch.end(step)
