"""
Train a language model with DiLoCo (arXiv 2311.08105): replicas of the model train alone and exchange what they have
learned only once every inner_steps steps. Each replica, usually one per node, is sharded as in train_fsdp.py.

    torchrun --nproc_per_node=4 train_diloco.py config/diloco_quickstart.py --num_replicas=2    # 2 replicas x 2 shards
    sbatch --nodes=4 slurm/diloco.sh                          # one replica per node, no server process
    torchrun ... train_diloco.py CONFIG --plan                # how slow may the link between the nodes be?
    torchrun ... train_diloco.py CONFIG --verify              # does it compute what it should, here?
    python train_diloco.py --help                             # every key with its default and meaning

`diff train_fsdp.py train_diloco.py` shows what that takes; the exchange itself is in diloco.py. If your replicas are
separate jobs that come and go, use train_pool.py.
"""

import functools
import math
from datetime import timedelta

from configurator import configure
from keys import BestKeys, Keys, OuterKeys, ShardingKeys, TaskKeys


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config(Keys, TaskKeys, BestKeys, ShardingKeys, OuterKeys):
    # I/O [per job, if eval_sequences]
    eval_interval = 500  # steps between evaluations of outer and inner parameters; 0 = only after the last step [>= 0]
    # fsdp [per job]
    expert_parallel = 1  # ranks of a replica that divide the experts of a mixture; 1 = off [>= 1]
    # diloco [result]
    num_fragments = 1  # P: the model is exchanged in P parts, one every inner_steps / P steps (Streaming DiLoCo) [>= 1]
    overlap_steps = 0  # inner steps that go on while an exchange is in flight; its result is applied after them [>= 0]
    # diloco [per job]
    verify = False  # check on this model and these machines that replicas compute what they should, and stop


# ----------------------------------------------------------------------------------------------------------------------
config, explicit = configure(Config)  # config files and --key=value; before `import torch`, so --help is quick

import torch

import data
import diloco
import expert_manual
import fsdp
import optim
from exchange import diloco_check
from layout import Ranks
from model import is_load
from runtime import checkpoint, health
from runtime.begin import begin, make_model
from runtime.checkpoint_parts import in_whole
from runtime.first_weights import initialize
from runtime.log import Journal
from runtime.watch import Watch
from system import collectives, processes

run = begin(config, explicit, 'diloco')  # ranks, device, data; every key that the run needs now has a value
if config.dry_run:  # a run says so once it knows how many steps are left
    run.notes += diloco_check.advice(config.max_iters, config.inner_steps, config.outer_momentum)
found = run.join()  # --dry_run ends here; else init_process_group, and find the checkpoint to resume from
rank, world_size, device = run.rank, run.world_size, run.device
batch_size, global_batch_size = config.batch_size, config.global_batch_size
run.notes += diloco_check.mesh_lines(config.num_replicas, processes.local_world_size())
diloco_check.refuse_differences(run)

# --- SHARD ------------------------------------------------------------------------------------------------------------
raw_model = make_model(run)  # on the meta device; activation checkpointing and compilation come before sharding
whole_mesh = run.layout.mesh(device, config.timeout_s)
mesh = whole_mesh['shard']  # the ranks of this replica, which is sharded as if there were no others
replica, shard_size = whole_mesh.get_local_rank('replica'), mesh.size()
expert_mesh, experts = None, []
if config.expert_parallel > 1:  # experts are sharded over fewer ranks than other weights: those that hold the same ones
    expert_mesh = run.layout.expert_mesh(device, config.timeout_s)
    experts = expert_manual.split(raw_model, Ranks.of(expert_mesh['expert']), run.share)
    expert_mesh = expert_mesh['shard']
model = fsdp.shard(raw_model, mesh, run, experts, expert_mesh)  # by fully_shard, or by fsdp_manual.py

# --- WEIGHTS AND INNER OPTIMIZER --------------------------------------------------------------------------------------
initialize(raw_model, run)  # fp32 master weights, the same in every replica
opt = fsdp.optimizer(raw_model, run)  # its moments in host memory, where cpu_offload says so
scaler = torch.amp.GradScaler(device.type, enabled=run.compute_dtype == torch.float16)


# --- OUTER OPTIMIZER --------------------------------------------------------------------------------------------------
def outer_step(theta, pseudo_gradient, momentum):
    """A Nesterov step as torch.optim.SGD takes it, in place, on a slice of the outer parameters (all flat fp32)."""
    momentum.mul_(config.outer_momentum).add_(pseudo_gradient)
    theta.sub_(pseudo_gradient, alpha=config.outer_lr).sub_(momentum, alpha=config.outer_lr * config.outer_momentum)


trained = {name: parameter for name, parameter in raw_model.named_parameters() if parameter.requires_grad}
loads = {name: buffer for name, buffer in raw_model.named_buffers() if is_load(name)}
make_outer = functools.partial(
    diloco.Outer, trained, update=outer_step, group=whole_mesh.get_group('replica'), inner_steps=config.inner_steps,
    num_fragments=config.num_fragments, overlap_steps=config.overlap_steps,
    dtype=config.exchange_dtype, error_feedback=config.error_feedback, on_host=config.outer_on_host,
    timeout=timedelta(seconds=config.timeout_s), own=loads, in_whole=functools.partial(in_whole, run.share),
)  # fmt: skip
outer = make_outer()

# --- RESUME -----------------------------------------------------------------------------------------------------------
step, saved = 0, {}
if found:
    saved = checkpoint.read_state(found)
    run.check_resume(saved)
    # Outer parameters, and the moments of this replica.
    checkpoint.load(found, raw_model, opt, outer.optimizer_key(saved), run.share)
    # Then the state that only DiLoCo has; checkpoints of train_ddp.py and train_fsdp.py lack it.
    step = outer.resume(saved, functools.partial(checkpoint.read_tensors, found, missing_ok=True))
    scalers = saved.get('scalers', [saved['scaler']])
    health.resume_loss_scale(scaler, scalers[replica % len(scalers)])
diloco_check.check_start(outer, step, config.max_iters)  # raises unless all replicas hold the same outer parameters

looks_only = config.eval_only or config.verify  # these two leave all rows of the log in place
watch = Watch(run, saved['step'] if found and looks_only else step, saved)  # the log and whatever else only observes
watch.self_test(model, raw_model)
for line in diloco_check.advice(config.max_iters - step, config.inner_steps, config.outer_momentum):
    watch.say(line)


def batches_from(step):
    """This rank's micro-batches from `step` on: replicas split the global batch, and their ranks split each part."""
    return data.batches(
        run.train_data, config.seed, first_sample=step * global_batch_size, global_batch_size=global_batch_size,
        batch_size=batch_size, rank=replica * shard_size + mesh.get_local_rank(), world_size=world_size, device=device,
    )  # fmt: skip


def targets_of(step):
    """Number of targets in this replica's share of a step: all tokens, or in conversations those that are learned."""
    share = global_batch_size // config.num_replicas
    return run.train_data.count_targets(config.seed, step * global_batch_size + replica * share, share)


if config.verify:
    outer.restart_from_anchors()
    passed = diloco_check.verify(model, trained, batches_from, targets_of, make_outer, config, watch.say)
    processes.leave(0 if passed else 1)
if config.eval_only:
    with outer.outer_parameters():
        watch.evaluate_only(model, step)


# --- LOOP -------------------------------------------------------------------------------------------------------------
def save(step):
    """Save the outer parameters, and what each replica needs to continue in the middle of a round."""
    states = diloco_check.everybodys((scaler.state_dict(), watch.numbers.state()), whole_mesh.get_group('replica'))
    scalers, of_replicas = zip(*states, strict=True)
    more = {'numbers': of_replicas[0], 'scalers': scalers, 'numbers_of_replicas': of_replicas}
    more |= {'diloco': outer.state(step), 'step_of_weights': outer.step_of_anchors()}
    tensors = outer.tensors(outer.is_mid_round(step))
    watch.save(step, raw_model, opt, scalers[0], more, more_tensors=tensors, optimizer_key=outer.optimizer_key())


before = saved.get('numbers_of_replicas', [saved.get('numbers')])  # what is known of skipped steps
also_log = model.communication if config.fsdp_impl == 'manual' else None  # bytes and milliseconds of gathers and sums
watch.begin_training(model, save, group=mesh.get_group(), numbers=before[replica % len(before)], also_log=also_log)
numbers = watch.numbers  # all else in watch only observes; this decides whether a step is skipped (health.py)
if found and step < saved['step']:
    watch.say(f'{found} has {saved["diloco"]["num_replicas"]} replicas: back to where they last met, step {step}')
    save(step)
    watch.saver.wait()
    is_permanent = config.permanent_interval and int(found[-8:]) % config.permanent_interval == 0
    if config.keep_checkpoints and not is_permanent:  # keep_checkpoints=0: nothing was saved to replace it
        collectives.on_rank_0(checkpoint.discard, found)
planner = diloco_check.RoundCosts(outer, watch.meter, watch.say) if config.plan else None  # measures the link
journal = Journal(watch.log)
train_batches = batches_from(step)
while step < config.max_iters and not watch.must_stop:
    lr = optim.learning_rate_at(step, config)
    for group in opt.param_groups:
        group['lr'] = lr * group['lr_factor']  # lr_factor is 1 unless parametrization is mup or completep
    if config.dropout or config.lora_dropout:  # noise depends on (seed, step, rank, ranks) only, so a resume repeats it
        torch.manual_seed((config.seed * 1_000_003 + step) * world_size + rank)
    # The model returns a sum over this rank's targets, and gradients are averaged over the ranks of a replica. This
    # factor turns that into the mean over the replica's targets.
    targets = targets_of(step)
    loss_scale = shard_size / targets

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
    # The step is skipped if loss or gradient is not finite on any rank of the replica; all its ranks decide alike.
    # In fp16 a gradient may overflow because the loss scale is too large. Then scaler.step() skips by itself and
    # update() halves the scale. That does not count as a bad step, unless the scale has already fallen below 1.
    may_overflow = scaler.is_enabled() and scaler.get_scale() >= 1
    skip = numbers.must_skip(step + 1, step_loss, targets, grad_norm, may_overflow)
    scaler.step(opt, skip=skip)  # GradScaler hands skip on to opt.step()
    optim.balance_experts(raw_model, skip, mesh.get_group())  # mixtures of experts only; each replica by its own load
    watch.measure_state(raw_model, opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)
    step += 1
    watch.end_step()

    row, due = {}, watch.due(step)
    round_ends = due.last or step % config.inner_steps == 0
    # loss of the replicas' own weights, each replica on its share of the windows, before they are averaged
    if due.evaluate and outer.is_mid_round(step):
        row['diloco/inner_val_loss'] = watch.val_loss(step)['val_loss']

    # outer step: average what the replicas have learned, and let all of them restart from the result
    if outer.has_work(step, due.last):
        with watch.part('outer', 10 * config.timeout_s):  # each message may take timeout_s
            for fragment in outer.to_land(step, due.last):  # exchanges that began overlap_steps ago
                outer.land(fragment, step)
            for fragment in outer.to_send(step, due.last):  # every inner_steps, each fragment at its own time
                outer.send(fragment, step, last=due.last)
    if planner:
        planner.after_step()

    # Rows of the log are shown at once, but written when the replicas meet. The outer parameters are the run's result,
    # so it is these that are evaluated.
    replicas_meet = round_ends or due.evaluate or due.score or due.save
    if due.log:
        row |= watch.measured({'lr': lr, 'grad_norm': grad_norm})
        if not replicas_meet:
            journal.show(step, row)
    if round_ends:
        row |= outer.health()
    if due.evaluate or due.score:
        with outer.outer_parameters():
            row |= watch.evaluated(step) if due.evaluate else {}
            row |= watch.scores(step) if due.score else {}
    if row:
        journal.keep(step, watch.with_totals(step, row))
    if replicas_meet:  # only then do ranks of different replicas wait for each other
        journal.write()
        ends_early = bool(watch.best.why_end())  # val_loss has stopped falling
        watch.must_stop = round_ends and (ends_early or watch.stop_request.agreed(now=True))  # a signal or a file STOP
    if due.save or watch.must_stop or watch.best.is_now(step):
        save(step)

if planner:
    planner.compare()
watch.end(step)
