"""
Checks of train_diloco.py on the user's own machines: what the exchange will cost (--plan), whether it computes what it
should (--verify), and, at every start, whether all replicas are about to train the same thing.
"""

import math
import os

import torch
import torch.distributed as dist

from exchange.codec import BYTES
from pieces import local

ROUNDS = (10, 20, 50, 100, 200, 500, 1000)  # values of inner_steps that a plan compares, beside the run's own
ENOUGH = 0.96  # a plan recommends the shortest rounds that spend this share of the time on inner steps
WARM_UP_STEPS, TIMED_STEPS = 3, 20
SMALLEST_PROBE, LARGEST_PROBE = 2**14, 2**24  # numbers exchanged; the largest takes 200 MB for a moment
PROBE_SECONDS = 1.0  # no larger probe follows one that takes longer

# --- before the first step --------------------------------------------------------------------------------------------


def mesh_lines(num_replicas, local_world_size):
    """Lines that say which ranks on which hosts form each replica. Collective.

    Raises ValueError on every rank if nodes have unequal numbers of ranks, since replicas would then cross nodes.
    """
    hosts = everybodys((os.uname().nodename, local_world_size))
    if len({ranks for _, ranks in hosts}) > 1:
        counts = ', '.join(f'{ranks} on {host}' for host, ranks in dict.fromkeys(hosts))
        raise ValueError(f'nodes have unequal numbers of ranks ({counts}): start as many on each, --nproc_per_node=N')
    shards = len(hosts) // num_replicas
    lines = [f'mesh: {num_replicas} replicas x {shards} shards']
    if num_replicas == 1:
        lines.append(
            '  one replica takes the outer step alone (SNOO); --num_replicas=2 makes two of the ranks of one node'
        )
    for replica in range(num_replicas):
        ranks = range(replica * shards, (replica + 1) * shards)
        on = ', '.join(dict.fromkeys(hosts[rank][0] for rank in ranks))
        lines.append(f'  replica {replica}: ranks {", ".join(map(str, ranks))} on {on}')
    return lines


def refuse_differences(run):
    """Raise ValueError on every rank if the keys or data of any rank differ from rank 0's, except for device and
    data_dir."""
    values = {key: value for key, value in vars(run.config).items() if key not in ('device', 'data_dir')}
    prints = {f'{name} data': [source.fingerprint for source in split.sources] for name, split in run.splits.items()}
    values_by_rank = everybodys(values | prints)
    for rank, theirs in enumerate(values_by_rank):
        for key, value in values_by_rank[0].items():
            if theirs[key] != value:
                raise ValueError(
                    f'rank {rank} has {key}={theirs[key]!r}, rank 0 has {value!r}: '
                    'start every node with the same command on the same files'
                )


def check_start(outer, step, max_iters):
    """Raise ValueError on every rank if the replicas' outer parameters differ in any bit, or if the checkpoint is in
    the middle of a round and max_iters allows no further step."""
    if step >= max_iters and outer.is_mid_round(step):
        raise ValueError(
            f'max_iters={max_iters}: step {step} of the checkpoint is inside of a round, go on to a later one'
        )
    replicas = everybodys(outer.checksums()[0], outer.group)
    different = [replica for replica in range(outer.replicas) if replicas[replica] != replicas[0]]
    for differing in everybodys(different):  # every group of ranks has compared its own shard
        if differing:
            raise ValueError(
                f'replica {differing[0]} starts from other weights than replica 0: '
                'give every node the same checkpoint or seed, and the same version of torch'
            )


def everybodys(value, group=None):
    """[value of rank 0, of rank 1, ...] of a process group; group=None: of all ranks. Collective."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


# --- what rounds cost -------------------------------------------------------------------------------------------------


class RoundCosts:
    """Predicts from measurements what rounds of other lengths would cost, and at the end compares the prediction with
    the run.

    Making one times exchanges of growing size over the real link, in every dtype; this is collective and takes some
    seconds. After the first few steps, from which the time of a step is known, rank 0 prints the table.
    pool/round_costs.py has those of a pool.
    """

    SIZE, WAITS = 'MB sent per rank', ''

    def __init__(self, outer, meter, say):
        self.outer, self.meter, self.say = outer, meter, say
        numbers = torch.tensor(sum(len(fragment.anchor) for fragment in outer.fragments))
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)  # shards may be uneven
        self.numbers = numbers.item()
        self.models = {dtype: self._time_exchanges(dtype) for dtype in BYTES}
        self.steps, self.warm, self.step_seconds = 0, None, None

    def _time_exchanges(self, dtype):
        """(constant seconds, seconds per number, seconds of computing per number) of an exchange, on the slowest
        rank."""
        sizes = [min(self.numbers, LARGEST_PROBE)]
        while sizes[0] >= 4 * SMALLEST_PROBE:
            sizes.insert(0, sizes[0] // 4)
        self.outer.rehearse(sizes[0], dtype)  # connections, first allocations
        times = [(0, 0.0, 0.0)]
        for numbers in sizes:
            timed = torch.tensor(min(self.outer.rehearse(numbers, dtype) for _ in range(2)), dtype=torch.float64)
            dist.all_reduce(timed, op=dist.ReduceOp.MAX)
            times.append((numbers, *timed.tolist()))
            if timed[0] > PROBE_SECONDS:
                break
        (fewer, quick, _), (more, slow, computing) = times[-2:]
        per_number = max(slow - quick, 0.1 * slow) / (more - fewer)
        return max(0.0, slow - per_number * more), per_number, computing / more

    def exchange_seconds(self, dtype):
        """Seconds per round in which training waits for the exchange."""
        fragments, overlap = len(self.outer.fragments), self.outer.overlap_steps
        constant, per_number, computing = self.models[dtype]
        fragment_seconds = constant + per_number * self.numbers / fragments
        hidden = overlap * self.step_seconds
        return fragments * max(fragment_seconds - hidden, computing * self.numbers / fragments if overlap else 0.0)

    def share(self, dtype, inner_steps):
        """The share of the time that is spent on inner steps."""
        training = inner_steps * self.step_seconds
        return training / (training + self.exchange_seconds(dtype))

    def after_step(self):
        """Count a step; print the table once enough of them have been timed."""
        self.steps += 1
        if self.steps == WARM_UP_STEPS:
            self.warm = self.inner_seconds()
        if self.steps == WARM_UP_STEPS + TIMED_STEPS:
            self.step_seconds = (self.inner_seconds() - self.warm) / TIMED_STEPS
            self.say('\n'.join(self.table()))

    def inner_seconds(self):
        """Seconds spent on inner steps so far."""
        self.meter.read_all()
        return self.meter.training_seconds - self.meter.seconds['outer']

    def table(self):
        """The plan, as lines of text."""
        mine, rounds = self.outer.dtype, sorted({*ROUNDS, self.outer.inner_steps})
        lines = [
            f'plan: {1000 * self.step_seconds:.1f} ms per inner step; {self.speed()}',
            f'  exchange   {self.SIZE:>16}   seconds   share of the time spent on inner steps, by inner_steps',
            ' ' * 40 + ''.join(f'{inner_steps:8}' for inner_steps in rounds),
        ]
        for dtype in self.models:
            shares = ''.join(f'{self.share(dtype, inner_steps):8.1%}' for inner_steps in rounds)
            size, seconds = self.megabytes(dtype), self.exchange_seconds(dtype)
            lines.append(f'  {dtype:9}{size:18.2f}{seconds:10.3f} {shares}')
        best = next((n for n in rounds if self.share(mine, n) >= ENOUGH), rounds[-1])
        said = f'the shortest of these rounds with {ENOUGH:.0%} or more in {mine}'
        return [*lines, *self.more(rounds), f'  recommended: --inner_steps={best}, {said}']

    def speed(self):
        mine = self.outer.dtype
        rate = 8e-6 * self.outer.round_bytes(mine) / (self.numbers * self.models[mine][1])
        return f'exchanges in {mine} run at {rate:,.0f} Mbit/s per rank'

    def megabytes(self, dtype):
        return self.outer.round_bytes(dtype) / 1e6

    def more(self, rounds):  # lines about these inner_steps
        return []

    def compare(self):
        """Print the times of the run beside those that were predicted."""
        if self.step_seconds is None:
            self.say(f'plan: {self.steps} steps are too few to measure the time of one')
            return
        inner_steps, exchange = self.outer.inner_steps, self.exchange_seconds(self.outer.dtype)
        training = inner_steps * (self.inner_seconds() - self.warm) / (self.steps - WARM_UP_STEPS)
        outer = inner_steps * self.meter.seconds['outer'] / self.steps
        self.say(
            f'plan: rounds of {inner_steps} steps: '
            f'predicted {inner_steps * self.step_seconds:.2f} s + exchange {exchange:.3f} s, '
            f'measured {training:.2f} s + {outer:.3f} s{self.WAITS}'
        )


def advice(steps, inner_steps, outer_momentum):
    """[a warning] if a run may have too few rounds for its outer momentum; [] if it has enough, or is over.

    An outer momentum mu averages over about the last 1 / (1 - mu) rounds, and with outer learning rate lr it moves the
    parameters up to lr / (1 - mu) times as far as they went in a round: 7 times with lr=0.7 and mu=0.9. So in the first
    rounds the parameters overshoot, and a short run ends before that has decayed. A small lr is no way out, because
    then a short run ends before the momentum has built up. How many rounds are enough is a rule of thumb from runs of
    small models over 20 to 200 rounds: 4 / (1 - mu)^2 rounds separated the runs that did well from those that did not
    (docs/diloco.md).
    """
    rounds = steps / inner_steps
    if rounds <= 0 or outer_momentum == 0 or rounds * (1 - outer_momentum) ** 2 >= 4 - 1e-6:
        return []
    lower = math.floor(10 * (1 - math.sqrt(4 / rounds)) + 1e-6) / 10
    shorter = int(steps * (1 - outer_momentum) ** 2 / 4 + 1e-6)
    return [
        f'WARNING: {rounds:.0f} rounds are few for outer_momentum={outer_momentum}, they may overshoot: use '
        + (f'--outer_momentum={lower}' if lower > 0 else '--outer_momentum=0 --outer_lr=1')
        + (f', or --inner_steps={shorter}' if shorter else '')
    ]


# --- verify -----------------------------------------------------------------------------------------------------------


def verify(model, parameters, batches_from, targets_of, make_outer, config, say):
    """Check DiLoCo's promises on the real model, data, machines and process groups; True if all hold. Collective.

    parameters: {name: parameter} that are trained; at the end they have their old values.
    batches_from(step): this rank's micro-batches from that step on. targets_of(step): targets in its replica's share.
    make_outer: function (**settings) that makes a diloco.Outer with these settings instead of the run's own.
    """
    micro_steps = config.global_batch_size // (config.batch_size * dist.get_world_size())
    shards = dist.get_world_size() // config.num_replicas
    steps, passed = 3, []

    def weights():
        """This rank's part of the parameters. It is looked up each time, since FSDP with offloading replaces it by a
        pinned copy."""
        return [local(parameter.detach()) for parameter in parameters.values()]

    start = [tensor.clone() for tensor in weights()]

    def gradients_of(step):
        for parameter in parameters.values():
            parameter.grad = None
        batches = batches_from(step)
        for micro_step in range(micro_steps):
            last = micro_step == micro_steps - 1
            model.set_requires_gradient_sync(config.accumulate == 'sharded' or last)
            model.set_reshard_after_backward(last, recurse=False)
            (model(*next(batches))[0] * shards / targets_of(step)).backward()
        batches.close()
        return [torch.zeros_like(weight) if parameter.grad is None else local(parameter.grad)
                for weight, parameter in zip(weights(), parameters.values(), strict=True)]  # fmt: skip

    def train(outer, steps):
        """Train in rounds. Returns whether the replicas agree in every bit after each outer step."""
        equal = True
        for step in range(1, steps + 1):
            gradients = gradients_of(step - 1)
            torch._foreach_sub_(weights(), gradients, alpha=rate)
            for fragment in outer.to_send(step, step == steps):
                outer.send(fragment, step, last=step == steps)
            if not outer.is_mid_round(step):
                equal &= len(set(everybodys(outer.checksums(), outer.group))) == 1
        return equal

    def check(name, holds, detail):
        passed.append(all(everybodys(holds)))
        say(f'verify: {"pass" if passed[-1] else "FAIL"}: {name} ({detail})')

    def average(theta, pseudo_gradient, momentum):
        theta.sub_(pseudo_gradient)

    # Data parallelism by hand: gradients averaged over the replicas in every step, plain SGD.
    outer = make_outer(update=average, inner_steps=1, num_fragments=1, overlap_steps=0, dtype='float32')
    for step in range(steps):
        gradients = gradients_of(step)
        for gradient in gradients:
            dist.all_reduce(gradient, group=outer.group)
        torch._foreach_div_(gradients, outer.replicas)
        if step == 0:
            rate = 0.01 * norm(start) / max(norm(gradients), 1e-30)  # a step moves the weights by 1%
        torch._foreach_sub_(weights(), gradients, alpha=rate)
    reference = [tensor.clone() for tensor in weights()]
    moved = norm(torch._foreach_sub(reference, start))
    torch._foreach_copy_(weights(), start)

    # The same steps as DiLoCo with rounds of one step.
    equal = train(outer, steps)
    difference = norm(torch._foreach_sub(weights(), reference)) / max(moved, 1e-30)
    torch._foreach_copy_(weights(), start)
    is_fine = config.dtype == 'float32' and not config.matmul_dtype
    limit = 1e-4 if is_fine else 1e-2  # half precision, and float8 even more, round that much more coarsely
    detail = f'{steps} steps, difference {difference:.1e} of the movement, limit {limit:.0e}'
    check('rounds of one step, averaged, are data-parallel SGD', difference <= limit and moved > 0, detail)
    check('all replicas hold the same bits after each outer step', equal, f'{steps} outer steps, float32')

    # Rounds with the run's own outer settings, shortened.
    rounds, fragments = 2, len(make_outer().fragments)
    outer = make_outer(inner_steps=max(2, fragments), overlap_steps=0)
    equal = train(outer, rounds * outer.inner_steps)
    torch._foreach_copy_(weights(), start)
    detail = f'{rounds} rounds, {outer.dtype}, {fragments} fragments'
    check('all replicas hold the same bits with the outer settings of this run', equal, detail)
    say(f'verify: {"passed" if all(passed) else "FAILED"}')
    return all(passed)


def norm(tensors):
    """The norm of all numbers in the tensors of all ranks. Collective."""
    square = sum((tensor.square().sum().double().cpu() for tensor in tensors), start=torch.zeros(()).double())
    dist.all_reduce(square)
    return square.sqrt().item()
