"""
Train a language model with pipeline parallelism: every rank holds some of the blocks, micro-steps run through them one
behind the other, and what crosses the wire are activations (1F1B, arXiv 2006.09503; interleaved, arXiv 2104.04473).

    torchrun --nproc_per_node=2 train_pipeline.py config/quickstart.py                         # 2 stages
    torchrun --nproc_per_node=4 train_pipeline.py config/quickstart.py --pipeline_stages=2     # 2 copies of 2 stages
    torchrun --nproc_per_node=4 train_pipeline.py config/quickstart.py --tensor_parallel=2     # 2 ranks in each stage
    python train_pipeline.py --help                          # every key with its default and meaning

`diff train_fsdp.py train_pipeline.py` shows what a pipeline takes; pipeline_manual.py has its schedule.
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
    # pipeline
    pipeline_stages: int | None = None  # ranks that hold the model between them; None = all ranks; the rest is copies
    pipeline_chunks = 1  # parts of the model per stage: more = a shorter bubble, as many times the messages
    tensor_parallel = 1  # ranks that hold each matrix together, and work on the same tokens: for wide models; 1 = off


# ----------------------------------------------------------------------------------------------------------------------
config, explicit = configure(Config)  # config files and --key=value; before `import torch`, so --help is quick

import torch
import torch.distributed as dist

import data
import meshes
import optim
import pipeline_manual
import tensor_manual
from runtime import health
from runtime.begin import begin, initialise, make_model
from runtime.watch import Watch

run = begin(config, explicit, 'pipeline')  # ranks, device and data; from here on no key is None that the run needs
if run.pretrained:
    raise ValueError(f'init_from={config.init_from}: a model of transformers is not cut into stages; use train_fsdp.py')
stages, chunks = config.pipeline_stages, config.pipeline_chunks
run.notes += meshes.check_pipeline(vars(config), run.world_size)
found = run.join()  # --dry_run ends here; the process group, and the checkpoint that this run goes on from
rank, world_size, device = run.rank, run.world_size, run.device
batch_size, global_batch_size = config.batch_size, config.global_batch_size

# --- STAGE ------------------------------------------------------------------------------------------------------------
# Neighbours are the ranks that send each other most: those of a matrix, then the copies of a stage, then the stages.
mesh = meshes.make(meshes.pipeline_axes(vars(config), world_size), device, config.timeout_s)
ranks_of_stage = world_size // stages
stage, rank_of_stage = divmod(rank, ranks_of_stage)
raw_model = make_model(run)  # on the meta device
raw_model = pipeline_manual.Stage(raw_model, stage, stages, chunks)  # its blocks; all others stay on meta, and go
tensor = None
if config.tensor_parallel > 1:
    tensor = tensor_manual.Split(raw_model, tensor_manual.Ranks.of(mesh['tensor']))
model = pipeline_manual.Pipeline(raw_model, mesh, batch_size)
timetable = pipeline_manual.timetable(stages, chunks, run.accumulation_steps)

# --- WEIGHTS AND OPTIMIZER --------------------------------------------------------------------------------------------
initialise(raw_model, run)  # fp32 masters of this stage, the same on all its copies
opt = optim.from_config(raw_model, config, device)
scaler = torch.amp.GradScaler(device.type, enabled=run.compute_dtype == torch.float16)
step, state = run.resume(raw_model, opt, scaler)

watch = Watch(run, step, state)  # the log, and all else that only watches


# --- EVALUATION -------------------------------------------------------------------------------------------------------
@torch.no_grad()
def evaluate():
    """Cross-entropy over the first eval_iters * global_batch_size validation windows, shared out over the copies."""
    raw_model.eval()
    windows = config.eval_iters * global_batch_size
    nats_and_tokens = torch.zeros(len(run.val_data.sources), 2, dtype=torch.float64, device=device)
    batches = list(data.eval_batches(run.val_data, windows, batch_size, rank_of_stage, ranks_of_stage, device))
    with model.weights_cast():
        for actions in pipeline_manual.timetable(stages, chunks, len(batches), backward=False):
            watch.at('evaluation', step)
            if action := actions[stage]:
                batch, source = batches[action.micro_step]
                ce_sum = model.forward(action, *batch)
                if action.part == raw_model.last:
                    nats_and_tokens[source] += torch.stack((ce_sum.double(), (batch[1] >= 0).sum()))
            model.exchange(actions)
    dist.all_reduce(nats_and_tokens)
    raw_model.train()
    return run.val_data.losses(nats_and_tokens.tolist())


if config.eval_only:
    watch.evaluate_only(model, step, evaluate)


# --- LOOP -------------------------------------------------------------------------------------------------------------
def save(step):
    watch.save(step, raw_model, opt, scaler.state_dict())


watch.begin_training(model, save)
first_sample = step * global_batch_size
train_batches = data.batches(
    run.train_data, config.seed, first_sample, global_batch_size, batch_size, rank_of_stage, ranks_of_stage, device
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
    # The last stage returns a sum over its targets, and gradients are summed over the copies. This factor turns that
    # into the mean over all targets of the global batch, and before backward, since gradients travel as they are.
    targets = run.train_data.count_targets(config.seed, step * global_batch_size, global_batch_size)
    loss_factor = scaler.scale(torch.tensor(1 / targets, device=device))
    targets *= config.tensor_parallel  # so many ranks count each of them

    # forward and backward of all micro-steps, in the order of the timetable; the gradients add up
    watch.begin_step(step)
    watch.mark('data')
    batches = [next(train_batches) for _ in range(run.accumulation_steps)]  # x, y (batch_size, block_size), starts
    step_loss = torch.zeros((), device=device)
    with model.weights_cast():
        for actions in timetable:  # [what stage 0 does, what stage 1 does, ...], at one time
            action = actions[stage]
            # A mark for each time, idle or not: the rank that has made fewest is the one that the others wait for.
            watch.mark('backward' if action and action.kind == 'backward' else 'forward')
            if action and action.kind == 'forward':
                step_loss += model.forward(action, *batches[action.micro_step])
            elif action:
                model.backward(action, loss_factor)
            # activations to the next part, their gradients to the one before
            model.exchange(actions)

    watch.mark('update')
    # gradients: sum over the copies, undo the loss scale, clip the global norm
    if tensor:
        tensor.sum_partial_gradients()
    model.sum_gradients()
    scaler.unscale_(opt)
    if scaler.is_enabled():
        health.share_overflow(scaler, opt)
    norm_groups = [*model.norm_groups(), *(tensor.norm_groups() if tensor else ())]
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
