"""
Train a language model with DiLoCo in a pool of jobs that may come and go: each replica is a job of its own, and the
jobs share nothing but a folder or a bucket (the key `exchange`). Inside a job the model is sharded as in train_fsdp.py.

    torchrun --nproc_per_node=4 train_pool.py CONFIG --exchange=s3://bucket/run --num_replicas=8    # founds the pool
    torchrun --nproc_per_node=2 train_pool.py CONFIG --exchange=s3://bucket/run                     # one more, anywhere
    sbatch --array=1-8 slurm/pool.sh CONFIG --exchange=FOLDER                                       # as a Slurm array
    torchrun ... train_pool.py CONFIG --exchange=s3://bucket/run --plan      # what does a round cost with this store?
    torchrun ... train_pool.py CONFIG --exchange=s3://bucket/run --replay    # was every outer step what it should be?
    python train_pool.py --help                                              # every key with its default and meaning

`diff train_diloco.py train_pool.py` shows what that takes; pool/replica.py has a job's part in the pool.
"""

import functools
import math
from datetime import timedelta

from configurator import configure
from keys import Keys, OuterKeys, ShardingKeys, TaskKeys


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config(Keys, TaskKeys, ShardingKeys, OuterKeys):
    # diloco [result]
    num_replicas: int | None = None  # replicas per global batch, in more or fewer jobs; None = the pool's [>= 1]
    # pool [per job]
    exchange = ''  # where the jobs meet: a folder, or s3://bucket/name [per job, path]
    quorum = 1  # a round closes only once this many deltas (what jobs have learned) are there [>= 1]
    grace_s = 60.0  # seconds that a round with a quorum waits for more; a job silent for this long counts as dead [> 0]
    keep_deltas = False  # never delete deltas, so that --replay can start from the first round
    replay = False  # recompute the outer parameters from the jobs' deltas, compare them bit for bit, and stop


# ----------------------------------------------------------------------------------------------------------------------
config, explicit = configure(Config)  # config files and --key=value; before `import torch`, so --help is quick

import torch

import data
import diloco
import fsdp
import optim
from exchange import diloco_check
from layout import make_mesh
from pool.replica import Replica, take_from_pool
from pool.round_costs import StoreRoundCosts
from pool.rows import checksums_of_frozen
from runtime import checkpoint, health
from runtime.begin import begin, make_model
from runtime.first_weights import initialize
from runtime.log import Journal
from runtime.watch import NOTHING_DUE, Watch
from system import errors, processes

errors.report_errors()
take_from_pool(config)  # num_replicas and global_batch_size, unless they are given
# The global batch is divided as if every replica had as many ranks as this job.
jobs_ranks = config.num_replicas * processes.ranks_from_environment()[2]
run = begin(config, explicit, 'pool', jobs_ranks)  # ranks, device, data; every key that the run needs now has a value
if config.dry_run:  # a run says so once it knows how many steps are left
    run.notes += diloco_check.advice(config.max_iters, config.inner_steps, config.outer_momentum)
found = run.join()  # --dry_run ends here; else init_process_group, and find this job's own checkpoint
rank, world_size, device = run.rank, run.world_size, run.device
batch_size, global_batch_size = config.batch_size, config.global_batch_size
diloco_check.refuse_differences(run)

# --- SHARD ------------------------------------------------------------------------------------------------------------
raw_model = make_model(run)  # on the meta device; activation checkpointing and compilation come before sharding
whole_mesh = make_mesh({'replica': 1, 'shard': world_size}, device, config.timeout_s)
mesh = whole_mesh['shard']  # this job is one replica, and exchanges through files
model = fsdp.shard(raw_model, mesh, run)  # by fully_shard, or by fsdp_manual.py

# --- WEIGHTS AND INNER OPTIMIZER --------------------------------------------------------------------------------------
initialize(raw_model, run)  # fp32 master weights
opt = fsdp.optimizer(raw_model, run)  # its moments in host memory, where cpu_offload says so
scaler = torch.amp.GradScaler(device.type, enabled=run.compute_dtype == torch.float16)


# --- OUTER OPTIMIZER --------------------------------------------------------------------------------------------------
def outer_step(theta, pseudo_gradient, momentum):
    """A Nesterov step as torch.optim.SGD takes it, in place, on a slice of the outer parameters (all flat fp32)."""
    momentum.mul_(config.outer_momentum).add_(pseudo_gradient)
    theta.sub_(pseudo_gradient, alpha=config.outer_lr).sub_(momentum, alpha=config.outer_lr * config.outer_momentum)


trained = {name: parameter for name, parameter in raw_model.named_parameters() if parameter.requires_grad}
outer = diloco.Outer(
    trained, update=outer_step, group=whole_mesh.get_group('replica'), inner_steps=config.inner_steps,
    dtype=config.exchange_dtype, error_feedback=config.error_feedback, on_host=config.outer_on_host,
    timeout=timedelta(seconds=config.timeout_s),
)  # fmt: skip

# --- JOIN THE POOL ----------------------------------------------------------------------------------------------------
step, saved = 0, {}
if found:  # its inner moments continue; its outer parameters count only if this job founds the pool
    saved = checkpoint.read_state(found)
    run.check_resume(saved)
    checkpoint.load(found, raw_model, opt, outer.optimizer_key(saved), run.share)
    step = outer.resume(saved, functools.partial(checkpoint.read_tensors, found, missing_ok=True))
    health.resume_loss_scale(scaler, saved.get('scalers', [saved['scaler']])[0])
diloco_check.check_start(outer, step, config.max_iters)  # raises if max_iters ends inside a round
replica = None
if not config.eval_only:  # from here on step and outer parameters are those of the pool
    replica = Replica(config, outer, run.identity | checksums_of_frozen(raw_model), run.notes.append)
    step = replica.ledger.step

watch = Watch(run, saved['step'] if found and config.eval_only else step, saved)
if config.replay:
    watch.say(f'replay: {replica.replay()}')
    processes.leave()
watch.self_test(model, raw_model, as_loaded=found is None and step == 0)  # a joining job has the pool's weights by now
for line in diloco_check.advice(config.max_iters - step, config.inner_steps, config.outer_momentum):
    watch.say(line)
if config.eval_only:
    with outer.outer_parameters():
        watch.evaluate_only(model, step)


# --- LOOP -------------------------------------------------------------------------------------------------------------
def batches_of(replica_number, at):
    """This rank's micro-batches of what replica `replica_number` reads, from step `at` on."""
    return data.batches(
        run.train_data, config.seed, first_sample=at * global_batch_size, global_batch_size=global_batch_size,
        batch_size=batch_size, rank=replica_number * world_size + rank, world_size=jobs_ranks, device=device,
    )  # fmt: skip


def save(step):
    """Save this job's copy of the pool's outer parameters, and the moments of its inner optimizer."""
    scale = scaler.state_dict()
    more = {'scalers': [scale], 'numbers_of_replicas': [numbers.state()]}
    more |= {'diloco': outer.state(step), 'step_of_weights': outer.step_of_anchors()}
    tensors = outer.tensors(outer.is_mid_round(step))
    watch.save(step, raw_model, opt, scale, more, more_tensors=tensors, optimizer_key=outer.optimizer_key())


def may_leave():
    """Whether the job is asked to stop. Called now and then while it waits for others, so that it waits no longer."""
    watch.at('outer', step)
    return watch.stop_request.agreed()


own_tokens = run.tokens_per_step / config.num_replicas  # tokens of one step of this job
before = saved.get('numbers_of_replicas', [saved.get('numbers')])[0]  # what is known of skipped steps
also_log = model.communication if config.fsdp_impl == 'manual' else None  # bytes and milliseconds of gathers and sums
watch.begin_training(model, save, group=mesh.get_group(), numbers=before, tokens_per_step=own_tokens, also_log=also_log)
numbers = watch.numbers  # all else in watch only observes; this decides whether a step is skipped (health.py)
planner = StoreRoundCosts(replica, watch.meter, watch.say) if config.plan else None  # measures the store
journal = Journal(watch.log)
replica.say, replica.waiting = watch.say, may_leave
replica_number, at, end = 0, step, step  # whose data is read, and the steps [at, end) of it that are claimed
train_batches = None
looked_at = step if step < config.max_iters else saved.get('step', 0)  # the last step at which something was due
while not watch.must_stop:
    # claim the next part of the data that no job has: what replica `replica_number` reads in steps [at, end)
    if at == end:
        if (part := replica.claim()) is None:  # nothing is left to train
            break
        if train_batches:
            train_batches.close()
        replica_number, at, end = part
        step = replica.step
        train_batches = batches_of(replica_number, at)
    lr = optim.learning_rate_at(step, config)
    for group in opt.param_groups:
        group['lr'] = lr * group['lr_factor']  # lr_factor is 1 unless parametrization is mup or completep
    if config.dropout or config.lora_dropout:  # noise depends on (seed, step, replica, rank, ranks) only
        torch.manual_seed((config.seed * 1_000_003 + at) * jobs_ranks + replica_number * world_size + rank)
    # The model returns a sum over this rank's targets, and gradients are averaged over the ranks of this job. This
    # factor turns that into the mean over the replica's targets.
    share = global_batch_size // config.num_replicas
    targets = run.train_data.count_targets(config.seed, at * global_batch_size + replica_number * share, share)
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
    at += 1
    watch.end_step()

    # when the claimed part is done, or the others are: hand in what was learned, and take the outer step of all
    row = {}
    watch.must_stop = watch.stop_request.agreed()
    round_ends = replica.round_is_over() or watch.must_stop
    if round_ends:
        with watch.part('outer', 10 * config.timeout_s):
            row = replica.meet(leaves=watch.must_stop, facts={'tokens': round(replica.steps * own_tokens)})
        at, watch.must_stop = end, watch.stop_request.agreed()  # perhaps asked while it waited
    step = replica.step
    if planner:
        planner.after_step()

    # Evaluate and save only when a round ends, because `step` is an estimate in between; rows of the log go by `at`.
    due = watch.due(step, since=looked_at) if round_ends else NOTHING_DUE
    if at == 1 or due.last or (config.log_interval and at % config.log_interval == 0):
        row |= watch.measured({'lr': lr, 'grad_norm': grad_norm, 'pool/pace': replica.ledger.pace})
        if not round_ends:
            journal.show(step, row)
    if due.evaluate or due.score:
        with outer.outer_parameters():
            row |= watch.val_loss(step) if due.evaluate else {}
            row |= watch.scores(step) if due.score else {}
    if row:
        journal.keep(step, watch.with_totals(step, row))
    if round_ends:
        journal.write()
        looked_at = step
    if due.save or watch.must_stop:
        save(step)

if replica.ledger.is_complete and looked_at < config.max_iters:  # others finished it: save this job's copy
    step = config.max_iters
    watch.log.row(
        step, watch.with_totals(step, (watch.val_loss(step) if config.eval_sequences else {}) | watch.scores(step))
    )
    save(step)
replica.leave()
if planner:
    planner.compare()
watch.end(step)
