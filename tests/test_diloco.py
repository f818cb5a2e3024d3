"""diloco.py against a loop in one process: the same numbers, equal bits on all replicas, and as many bytes as promised.

The ranks run all cases once and return what each of them saw, and the tests look at that.
"""

import copy
import json
import math
import re
import time
import traceback
import warnings
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from launch import run_function
from precision import apart
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import diloco
import fsdp_manual
from exchange import codec, diloco_check
from system import processes

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
# Each of these cases is compared with reference().
COMPARED = {
    'whole': dict(steps=12, inner_steps=4),
    'partial_last_round': dict(steps=10, inner_steps=4),
    'shorter_than_a_round': dict(steps=3, inner_steps=4),
    'every_step': dict(steps=4, inner_steps=1),
    'small_buckets': dict(steps=8, inner_steps=4, bucket=7),
    'strided_2': dict(steps=12, inner_steps=4, num_fragments=2),
    'partial_2': dict(steps=11, inner_steps=4, num_fragments=2),
    'uneven_3': dict(steps=13, inner_steps=5, num_fragments=3),
    'one_a_step': dict(steps=9, inner_steps=4, num_fragments=4),
    'overlap_whole': dict(steps=14, inner_steps=4, overlap_steps=2),
    'overlap_round': dict(steps=14, inner_steps=4, overlap_steps=4),
    'overlap_2': dict(steps=17, inner_steps=6, num_fragments=2, overlap_steps=2),
    'three_in_flight': dict(steps=19, inner_steps=6, num_fragments=3, overlap_steps=5),
    'three_in_flight_small_buckets': dict(steps=19, inner_steps=6, num_fragments=3, overlap_steps=5, bucket=11),
}
SHARDED = [
    ('partial_last_round', 'manual'),
    ('partial_last_round', 'torch'),
    ('small_buckets', 'manual'),
    ('overlap_2', 'torch'),
    ('three_in_flight_small_buckets', 'manual'),
]
RESUMED = {
    'whole': dict(inner_steps=4),
    'in_flight': dict(inner_steps=4, num_fragments=2, overlap_steps=2),
    'in_flight_int8': dict(inner_steps=4, num_fragments=2, overlap_steps=2, dtype='int8', error_feedback=True),
}


class Block(nn.Linear):
    def forward(self, x):
        return x + torch.tanh(super().forward(x))


class Net(nn.Module):
    """Blocks between two tied matrices; a scale of one row, of which one of 2 shards has nothing; a frozen vector."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Parameter(torch.randn(7, 5) / 3)
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.0, 5), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(Block(5, 5) for _ in range(4))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed

    def forward(self, x):
        x = x @ self.embed
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale * self.frozen)


def trainable(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def batch(step, replica):
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return torch.randn(2, 8, 7, generator=generator)  # inputs and targets of 8 samples


def inner_optimizer(kind, parameters):
    return torch.optim.AdamW(parameters, lr=1e-2) if kind == 'adamw' else torch.optim.SGD(parameters, lr=0.1)


# --- THE REFERENCE ----------------------------------------------------------------------------------------------------


def reference(
    replicas, steps, inner_steps, num_fragments=1, overlap_steps=0, inner='adamw',
    lr=OUTER_LR, momentum=OUTER_MOMENTUM, bucket=None,
):  # fmt: skip
    """[(anchors, [parameters of replica 0, of 1, ...]) after each step], each as {name: tensor}, by one process.

    The outer optimizer is that of torch. Fragment p of P is sent after steps (p + 1) H / P + k H. What lands later is
    mixed half and half with what the replica has learned meanwhile.
    """
    models = [Net() for _ in range(replicas)]
    optimizers = [inner_optimizer(inner, trainable(model).values()) for model in models]
    thetas = [trainable(model) for model in models]
    anchors = {name: nn.Parameter(theta.detach().clone()) for name, theta in thetas[0].items()}
    fragments = diloco.assign_to_fragments(thetas[0], num_fragments)
    steppers = [
        torch.optim.SGD([anchors[name] for name in names], lr, momentum, nesterov=momentum > 0) for names in fragments
    ]
    flying, equal_at, history = {}, [0] * num_fragments, []

    def land(number, alpha, step):
        for name, delta in flying.pop(number)[1].items():
            anchors[name].grad = delta
        steppers[number].step()
        for name in fragments[number]:
            for theta in thetas:
                theta[name].data = alpha * theta[name].data + (1 - alpha) * anchors[name].data
        if alpha == 0:
            equal_at[number] = step

    for step in range(1, steps + 1):
        for replica, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            x, y = batch(step, replica)
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        last = step == steps
        for number in sorted(flying, key=lambda number: flying[number][0]):
            if flying[number][0] == step or last:
                land(number, 0.5, step)
        for number, names in enumerate(fragments):
            regular = (step - (number + 1) * inner_steps // num_fragments) % inner_steps == 0
            if equal_at[number] < step if last else regular:
                delta = {
                    name: sum((anchors[name].data - theta[name].data) / replicas for theta in thetas) for name in names
                }
                flying[number] = (step + overlap_steps, delta)
                if last or not overlap_steps:
                    land(number, 0.0, step)
        history.append((copied(anchors), [copied(theta) for theta in thetas]))
    return history


def copied(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


# --- WHAT THE RANKS RUN -----------------------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Notes (operator, bytes of the first tensor, of the second) of all collectives of the thread that entered it."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == 'c10d':
            sizes = [argument.nbytes for argument in args[:2] if isinstance(argument, torch.Tensor)]
            self.calls.append([function._schema.name.split('::')[1], *sizes])
        return function(*args, **(kwargs or {}))


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def nesterov(anchor, delta, momentum):
    momentum.mul_(OUTER_MOMENTUM).add_(delta)
    anchor.sub_(delta, alpha=OUTER_LR).sub_(momentum, alpha=OUTER_LR * OUTER_MOMENTUM)


def average(anchor, delta, momentum):
    """Outer learning rate 1, no momentum."""
    anchor.sub_(delta)


def begin(layout, sharding=None, inner='adamw', update=nesterov, seed=0, **settings):
    """A run at step 0. sharding: None, 'manual' (fsdp_manual.py) or 'torch' (fully_shard). Its `updates` are the sizes
    of the buckets that were updated."""
    model, updates = Net(seed), []
    if sharding == 'manual':
        fsdp_manual.shard(model, model.blocks, layout.shard_mesh)
    elif sharding == 'torch':
        for block in model.blocks:
            fully_shard(block, mesh=layout.shard_mesh)
        fully_shard(model, mesh=layout.shard_mesh)
    optimizer = inner_optimizer(inner, trainable(model).values())

    def noting(anchor, delta, momentum):
        updates.append(len(delta))
        update(anchor, delta, momentum)

    outer = diloco.Outer(trainable(model), noting, layout.group, **settings)
    parts = {'index': layout.shard, 'count': layout.shards} if sharding else {'index': 0, 'count': 1}
    return SimpleNamespace(model=model, optimizer=optimizer, outer=outer, updates=updates, log=[], **parts)


def train_inner(run, step):
    x, y = (part.chunk(run.count)[run.index] for part in batch(step, run.outer.replica))
    (run.model(x) - y).square().mean().backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


def go(run, first, end, last_step=None, after_step=None):
    """Take steps first to end as in the docstring of diloco.py. What happens goes to the log as (what, fragment,
    step)."""
    for step in range(first, end + 1):
        train_inner(run, step)
        last = step == last_step
        for fragment in run.outer.to_land(step, last):
            run.outer.land(fragment, step)
            run.log.append(['land', fragment.index, step])
        for fragment in run.outer.to_send(step, last):
            run.outer.send(fragment, step, last)
            run.log.append(['send', fragment.index, step])
        if after_step:
            after_step(step)
    return run


def anchors_of(outer):
    views = [fragment.views(fragment.anchor) for fragment in outer.fragments]
    return {name: whole(view) for of_fragment in views for name, view in of_fragment.items()}


def agreement(run, layout):
    """[of the anchors, of the parameters]: whether all replicas hold the same bits."""
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (layout.shard, run.outer.checksums()))
    shards = [[sums for index, sums in everybody if index == shard] for shard in range(layout.shards)]
    return [all(len({sums[kind] for sums in shard}) == 1 for shard in shards) for kind in (0, 1)]


def compare(layout, sharding=None, steps=0, inner='adamw', update=nesterov, optimizer=None, **settings):
    """A run beside the reference: its errors after each step, and what happened when."""
    replicas = layout.replicas
    run = begin(layout, sharding, inner, update, **settings)
    frozen, start = whole(run.model.frozen).clone(), time.perf_counter()
    expected = reference(replicas, steps, inner=inner, **(optimizer or {}), **settings)
    errors, agreed = {'anchors': [], 'parameters': []}, {}

    def after_step(step):
        anchors, parameters = expected[step - 1]
        mine = {name: whole(parameter) for name, parameter in trainable(run.model).items()}
        for kind, ours, theirs in (
            ('anchors', anchors_of(run.outer), anchors),
            ('parameters', mine, parameters[run.outer.replica]),
        ):
            assert ours.keys() == theirs.keys()
            errors[kind].append(max((ours[name] - theirs[name]).abs().max().item() for name in theirs))
        if run.log and run.log[-1][2] == step:
            agreed[str(step)] = agreement(run, layout)

    go(run, 1, steps, steps, after_step)
    moments = [state['exp_avg'] for state in run.optimizer.state.values()] if inner == 'adamw' else []
    parameters, anchors = trainable(run.model), anchors_of(run.outer)
    bits = torch.cat([whole(moment).flatten() for moment in moments]).view(torch.int32).sum().item() if moments else 0
    return {
        'errors': errors,
        'agreed': agreed,
        'log': run.log,
        'updates': run.updates,
        'sizes': [len(fragment.anchor) for fragment in run.outer.fragments],
        'moments': bits,
        'frozen_moved': (whole(run.model.frozen) - frozen).abs().max().item(),
        'numbers': sum(parameter.numel() for parameter in trainable(run.model).values()),
        'equals_anchors': all(torch.equal(whole(parameters[name]), anchor) for name, anchor in anchors.items()),
        'mid_round': run.outer.is_mid_round(steps),
        'seconds': time.perf_counter() - start,
    }


def golden(layout):
    """MaxText's unit test: w, b after the first outer step, and the losses of the first four steps."""
    w, b = nn.Parameter(torch.tensor([2.0, 1.0])), nn.Parameter(torch.tensor([1.0]))

    def update(anchor, delta, momentum):
        momentum.mul_(0.9).add_(delta)
        anchor.sub_(delta).sub_(momentum, alpha=0.9)

    outer = diloco.Outer({'w': w, 'b': b}, update, layout.group, inner_steps=3, bucket=2)
    x, y = ([[0.0, 1], [1, 0]], [1.0, 2]) if outer.replica == 0 else ([[1.0, 0], [0, 1]], [2.0, 3])
    optimizer, losses, after = torch.optim.SGD([w, b], lr=0.1), [], []
    for step in range(1, 5):
        loss = (torch.tensor(x) @ w + b - torch.tensor(y)).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for fragment in outer.to_send(step):
            outer.send(fragment, step)
            after.append([*w.tolist(), *b.tolist()])
    return {'losses': losses, 'after': after}


def buckets(layout, sharding=None):
    """Whether the size of the buckets changes a bit, and how often the update is called."""
    rows = {}
    for size in (7, 64, 2**22):
        run = begin(layout, sharding, inner_steps=4, num_fragments=2, overlap_steps=1, bucket=size)
        go(run, 1, 10, 10)
        sends = sum(what == 'send' for what, *_ in run.log)
        per_round = [math.ceil(len(fragment.anchor) / size) for fragment in run.outer.fragments]
        expected = sum(per_round[index] for what, index, _ in run.log if what == 'send')
        rows[str(size)] = {'sums': run.outer.checksums(), 'updates': len(run.updates), 'expected': expected}
        assert sends and sum(per_round) >= 2
    return rows


def vector(layout, numbers, update=average, **settings):
    """(parameter, Outer) of a model that is one vector of zeros."""
    parameter = nn.Parameter(torch.zeros(numbers))
    return parameter, diloco.Outer({'w': parameter}, update, layout.group, 1, **settings)


def pseudo_gradients(replicas, numbers):
    return torch.randn(replicas, numbers, generator=torch.Generator().manual_seed(7))


def exchange(parameter, outer, delta, step=1):
    """Take an outer step in which this replica's pseudo-gradient is delta; returns what it did with the average."""
    before = outer.fragments[0].anchor.clone()
    with torch.no_grad():
        parameter.copy_(before.view_as(parameter) - delta)
    for fragment in outer.to_send(step):
        outer.send(fragment, step)
    return before - outer.fragments[0].anchor


def quantized(layout):
    """For each dtype: the error of the mean, whether all replicas decoded the same bits, and what is not finite."""
    deltas, rows = pseudo_gradients(layout.replicas, 700), {}
    for dtype in codec.BYTES:
        parameter, outer = vector(layout, 700, dtype=dtype, bucket=300)
        result = exchange(parameter, outer, deltas[outer.replica])
        error = result - deltas.mean(0)
        row = {'max': error.abs().max().item(), 'rms': error.square().mean().sqrt().item(), 'mean': error.mean().item()}
        row['sums'] = outer.checksums()
        for name, value in (('nan', math.nan), ('inf', math.inf), ('-inf', -math.inf)):
            broken = deltas[outer.replica].clone()
            if outer.replica == layout.replicas - 1:
                broken[417] = value
            parameter, outer = vector(layout, 700, dtype=dtype, bucket=300)
            result = exchange(parameter, outer, broken)
            row[name] = [bool(result[417].isfinite()), int((~result.isfinite()).sum())]
        rows[dtype] = row
    return {**rows, 'largest': deltas.abs().max().item()}


def error_feedback(layout):
    """Error of the mean of 40 exchanges of constant pseudo-gradients, with and without error feedback. A component of
    0.03 is smaller than what int4 can tell from 0."""
    deltas = 0.03 * pseudo_gradients(layout.replicas, 512).clamp(-1, 1)
    deltas[:, ::256] = 1.0
    rows = {}
    for dtype in ('bfloat16', 'int8', 'int4'):
        for feedback in (False, True):
            parameter, outer = vector(layout, 512, dtype=dtype, error_feedback=feedback)
            for step in range(1, 41):
                exchange(parameter, outer, deltas[outer.replica], step)
            error = -outer.fragments[0].anchor / 40 - deltas.mean(0)
            rows[f'{dtype} {feedback}'] = error.abs().max().item()
            assert any('error' in key for key in outer.tensors(False)) == feedback
    return rows


def alone(layout):
    """One replica, sharded over all ranks: SNOO (arXiv 2510.15830) in float64, on random changes of K = 3 steps."""
    world, (inner_steps, eta, mu) = dist.get_world_size(), (3, 0.8, 0.75)
    mesh = init_device_mesh('cpu', (1, world), mesh_dim_names=('replica', 'shard'))
    generator = torch.Generator().manual_seed(5)
    shapes = {'matrix': (7, 5), 'vector': (11,), 'one': (1,)}
    start = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    parameters = {
        name: nn.Parameter(distribute_tensor(theta, mesh['shard'], [Shard(0)])) for name, theta in start.items()
    }

    def update(anchor, delta, momentum):
        momentum.mul_(mu).add_(delta)
        anchor.sub_(delta, alpha=eta).sub_(momentum, alpha=eta * mu)

    outer = diloco.Outer(parameters, update, mesh['replica'].get_group(), inner_steps, dtype='int4')
    slow = {name: theta.double() for name, theta in start.items()}
    b, fast, worst, sent = {name: 0.0 for name in slow}, copied(slow), 0.0, []
    for step in range(1, 32):  # the last round has one step
        last = step == 31
        for name, parameter in parameters.items():
            change = torch.randn(shapes[name], generator=generator)
            fast[name] = fast[name] + change
            with torch.no_grad():
                parameter.add_(distribute_tensor(change, mesh['shard'], [Shard(0)]))
        if step % inner_steps == 0 or last:
            for name in slow:
                s = slow[name] - fast[name]
                b[name] = mu * b[name] + s
                slow[name] = fast[name] = slow[name] - eta * (s + mu * b[name])
        for fragment in outer.to_send(step, last):
            outer.send(fragment, step, last)
            sent.append(step)
        for name, anchor in anchors_of(outer).items():
            scale = slow[name].abs().max().clamp(min=1)
            worst = max(worst, ((anchor - slow[name]).abs().max() / scale).item())
            worst = max(worst, ((whole(parameters[name]) - fast[name]).abs().max() / scale).item())
    return {'worst': worst, 'sent': sent, 'bytes': outer.health()['diloco/bytes']}


def bf16_parameters(layout):
    """Two rounds in which replicas move by about 1e-3. Looks at how many entries of the pseudo-gradient are not zero,
    and how many are no bf16 number."""
    generator = torch.Generator().manual_seed(3)
    parameter = nn.Parameter(torch.randn(4000, generator=generator).bfloat16())
    seen = []

    def update(anchor, delta, momentum):
        seen.append((anchor.dtype, delta.dtype, momentum.dtype, delta.clone()))
        nesterov(anchor, delta, momentum)

    outer = diloco.Outer({'w': parameter}, update, layout.group, inner_steps=1)
    mine = torch.randn(2, layout.replicas, 4000, generator=generator)[:, outer.replica] * 1e-3
    for step in (1, 2):
        anchor = outer.fragments[0].anchor.clone()
        with torch.no_grad():
            parameter.add_(mine[step - 1])
        exact, naive = anchor - parameter.detach().float(), anchor.bfloat16() - parameter.detach()
        dist.all_reduce(exact)
        outer.send(outer.fragments[0], step)
    return {
        'dtypes': sorted({str(dtype) for *dtypes, _ in seen for dtype in dtypes}),
        'error': (seen[1][3] - exact / layout.replicas).abs().max().item(),
        'nonzero': (seen[1][3] != 0).double().mean().item(),
        'naive': (naive != 0).double().mean().item(),
        'between': (outer.fragments[0].anchor != outer.fragments[0].anchor.bfloat16()).double().mean().item(),
        'parameter_is_rounded_anchor': torch.equal(parameter.detach(), outer.fragments[0].anchor.bfloat16()),
    }


class Wide(nn.Module):
    """About 200 thousand numbers."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(223, 223) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def traffic(layout):
    """Bytes of a round, as Outer counts them, by the formula, and as torch sees them; also the collectives that run
    between sends."""
    rows, replicas = {}, layout.replicas
    for dtype in codec.BYTES:
        for num_fragments in (1, 2):
            torch.manual_seed(0)
            model = Wide()
            outer = diloco.Outer(
                dict(model.named_parameters()), nesterov, layout.group, inner_steps=4,
                num_fragments=num_fragments, overlap_steps=num_fragments - 1, dtype=dtype, bucket=2**16,
            )  # fmt: skip
            optimizer, between, modes = torch.optim.AdamW(model.parameters()), [], [Collectives(), Collectives()]
            outer.thread.submit(modes[1].__enter__).result()  # a mode sees only the thread that has entered it
            with modes[0]:
                for step in range(1, 9):
                    before = sum(len(mode.calls) for mode in modes)
                    model(torch.randn(2, 223)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    flying = any(fragment.lands_at is not None for fragment in outer.fragments)
                    for fragment in outer.to_land(step):
                        outer.land(fragment, step)
                    if not flying:
                        between.append(sum(len(mode.calls) for mode in modes) - before)
                    for fragment in outer.to_send(step):
                        outer.send(fragment, step)
                for fragment in outer.to_land(8, last=True):
                    outer.land(fragment, 8)
            outer.thread.submit(modes[1].__exit__, None, None, None).result()
            calls = [call for mode in modes for call in mode.calls]
            sent = {'alltoall_base_': lambda output, sent: sent * (replicas - 1) // replicas}  # one part stays here
            health = outer.health()
            rows[f'{dtype} {num_fragments}'] = {
                'operators': sorted({name for name, *_ in calls}),
                'seen': sum(sent[name](*sizes) for name, *sizes in calls if name in sent),
                'counted': health['diloco/bytes'],
                'formula': 2 * outer.round_bytes(dtype),  # two rounds
                'health_formula': health['diloco/bytes_formula'],
                'between': between,
                'numbers': sum(parameter.numel() for parameter in model.parameters()),
            }
    return rows


def health(layout, sharding=None):
    """What health() says of a round, and the same computed in float64 from the whole pseudo-gradients."""
    run, replicas = begin(layout, sharding, inner_steps=4, bucket=29), layout.replicas
    go(run, 1, 4)  # one round, so that there is momentum
    run.outer.health()
    for step in range(5, 9):
        train_inner(run, step)
    anchors = anchors_of(run.outer)
    mine = torch.cat([
        (anchors[name].double() - whole(parameter).double()).flatten()
        for name, parameter in trainable(run.model).items()
    ])  # fmt: skip
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (run.outer.replica, mine))
    deltas = torch.stack([next(delta for number, delta in everybody if number == r) for r in range(replicas)])
    run.outer.send(run.outer.fragments[0], 8)
    row = run.outer.health()
    tensors = run.outer.tensors(False)
    momentum = torch.cat([whole(tensors[f'outer.{name}.momentum']).flatten() for name in anchors])
    pairs = [(i, j) for i in range(replicas) for j in range(i + 1, replicas)]
    cosines = [torch.cosine_similarity(deltas[i], deltas[j], dim=0).item() for i, j in pairs]
    mean = deltas.mean(0)
    expected = {
        'diloco/cosine': sum(cosines) / len(cosines),
        'diloco/cosine_min': min(cosines),
        'diloco/replica_norm': deltas.square().sum(1).mean().sqrt().item(),
        'diloco/delta_norm': mean.norm().item(),
        'diloco/drift': (deltas - mean).square().sum(1).mean().sqrt().item(),
        'diloco/momentum_norm': momentum.norm().item(),
    }
    empty = run.outer.health()
    return {'row': row, 'expected': expected, 'after_reset': sorted(empty), 'after_reset_bytes': empty['diloco/bytes']}


def health_in_flight(layout):
    """Sums of what health() says over 30 rounds, asked while exchanges are in flight, which land one by one."""
    parameter, outer = vector(layout, 4000, overlap_steps=1, bucket=400)
    rows, (fragment,) = [], outer.fragments
    for step in range(1, 31):
        for flying in outer.to_land(step):
            outer.land(flying, step)
        with torch.no_grad():
            parameter.sub_(outer.replica + 1.0)
        outer.send(fragment, step)
        rows.append(outer.health())
    outer.land(fragment, 31)
    rows.append(outer.health())
    anchor, thetas, squares = 0.0, [0.0] * layout.replicas, 0.0  # the same by hand, of one number
    for _ in range(30):
        thetas = [theta - replica - 1.0 for replica, theta in enumerate(thetas)]
        deltas = [anchor - theta for theta in thetas]
        squares += sum(delta**2 for delta in deltas) / layout.replicas
        anchor -= sum(deltas) / layout.replicas
        thetas = [(theta + anchor) / 2 for theta in thetas]
    return {
        'squares': sum(row.get('diloco/replica_norm', 0.0) ** 2 for row in rows),
        'expected': 4000 * squares,
        'bytes': sum(row['diloco/bytes'] for row in rows),
        'formula': 30 * sum(row['diloco/bytes_formula'] for row in rows[:1]),
    }


def saved_copy(run, step):
    """A checkpoint of `step` in memory: (state, {key: tensor}, inner optimizer's state)."""
    state = {'step': step, 'diloco': json.loads(json.dumps(run.outer.state(step)))}
    return state, copied(run.outer.tensors(run.outer.is_mid_round(step))), copy.deepcopy(run.optimizer.state_dict())


def load(run, checkpoint):
    """Do with a checkpoint what a train script does; returns the step at which to go on, and the keys asked for."""
    state, tensors, moments = checkpoint
    asked = {}
    with torch.no_grad():
        for name, parameter in trainable(run.model).items():
            parameter.copy_(tensors[f'model.{name}'])
    run.optimizer.load_state_dict(copy.deepcopy(moments))

    def read(wanted):
        for key, tensor in wanted.items():
            asked[key] = key in tensors
            if key in tensors:
                with torch.no_grad():
                    tensor.copy_(tensors[key])

    return run.outer.resume(state, read), asked


def resume(layout, sharding=None, **settings):
    """Whether a run that was saved after 7 of 14 steps, and one that was resumed there, equal a run without a stop."""
    unstopped = go(begin(layout, sharding, **settings), 1, 14, 14)
    saved = go(begin(layout, sharding, **settings), 1, 7)
    checkpoint = saved_copy(saved, 7)
    go(saved, 8, 14, 14)
    resumed = begin(layout, sharding, seed=1, **settings)
    step, asked = load(resumed, checkpoint)
    there = [resumed.outer.state(7) == checkpoint[0]['diloco'], resumed.outer.checksums() != saved.outer.checksums()]
    go(resumed, step + 1, 14, 14)
    return {
        'step': step,
        'missing': [key for key, found in asked.items() if not found],
        'kinds': sorted({key.split('.')[0] + '.' + key.split('.')[-1] for key in asked}),
        'there': there,
        'sums': [run.outer.checksums() for run in (unstopped, saved, resumed)],
        'log': [[entry for entry in run.log if entry[2] > 7] for run in (unstopped, resumed)],
    }


def resume_at_a_rounds_end(layout):
    """Resume at the end of a round with other fragments: momentum and anchors are the same, to the bit."""
    saved = go(begin(layout, inner_steps=4), 1, 8)
    checkpoint = saved_copy(saved, 8)
    resumed = begin(layout, seed=1, inner_steps=4, num_fragments=2)
    step, _ = load(resumed, checkpoint)
    theirs = saved.outer.tensors(False)
    same = all(torch.equal(tensor, theirs[key]) for key, tensor in resumed.outer.tensors(False).items())
    plain = begin(layout, seed=1, inner_steps=4)
    without = plain.outer.resume({'step': 8}, lambda tensors: None)
    return {'step': step, 'same': same, 'mid_round': resumed.outer.is_mid_round(step), 'without': without}


def resume_other_fragments(layout):
    saved = go(begin(layout, inner_steps=4, num_fragments=2), 1, 7)
    checkpoint, messages = saved_copy(saved, 7), []
    for num_fragments in (1, 4):
        try:
            load(begin(layout, inner_steps=4, num_fragments=num_fragments), checkpoint)
        except ValueError as error:
            messages.append(str(error))
    return messages


def resume_other_replicas(layout, smaller):
    """3 replicas saved after 7 steps with a fragment in flight; 2 replicas and 1 replica go on from there."""
    settings = dict(inner_steps=4, num_fragments=2, overlap_steps=2, dtype='int8', error_feedback=True)
    saved = go(begin(layout, **settings), 1, 7)
    state, tensors, moments = saved_copy(saved, 7)
    everybody = [None] * 3
    dist.all_gather_object(everybody, tensors)
    union = {key: tensor for theirs in everybody for key, tensor in theirs.items()}
    run = begin(layout, seed=1, **settings)
    run.outer = diloco.Outer(trainable(run.model), nesterov, smaller, **settings)
    step, _ = load(run, (state, union, moments))
    errors, in_flight = [], [key for key in union if key.endswith('.average')]
    for name, parameter in trainable(run.model).items():
        anchor, momentum = union[f'model.{name}'].clone(), union[f'outer.{name}.momentum'].clone()
        if f'outer.{name}.average' in union:
            nesterov(anchor, union[f'outer.{name}.average'], momentum)
        errors.append((parameter.detach() - anchor).abs().max().item())
        errors.append((run.outer.tensors(False)[f'model.{name}'] - anchor).abs().max().item())
        errors.append((run.outer.tensors(False)[f'outer.{name}.momentum'] - momentum).abs().max().item())
    mid_round = run.outer.is_mid_round(step)
    go(run, step + 1, 10, 10)
    keys = [run.outer.optimizer_key({'diloco': state['diloco']}), saved.outer.optimizer_key()]
    return {
        'step': step, 'error': max(errors), 'in_flight': len(in_flight), 'mid_round': mid_round,
        'sums': run.outer.checksums(), 'log': run.log, 'keys': keys,
    }  # fmt: skip


def evaluation(layout, sharding=None):
    """Within outer_parameters() the parameters are the anchors, and afterwards what they were before. rehearse() leaves
    no trace."""
    run = go(begin(layout, sharding, inner_steps=4), 1, 6)
    before, anchors = copied(trainable(run.model)), anchors_of(run.outer)
    with run.outer.outer_parameters():
        inside = all(torch.equal(whole(p), anchors[name]) for name, p in trainable(run.model).items())
    after = all(torch.equal(whole(p), whole(before[name])) for name, p in trainable(run.model).items())
    differ = any(not torch.equal(anchors[name], whole(before[name])) for name in anchors)
    for step in range(7, 27):  # steps that a rehearsal must not change
        run.outer.send(run.outer.fragments[0], step)
    sums, updates = run.outer.checksums(), len(run.updates)
    seconds, computing = run.outer.rehearse(10_000, 'int8')
    return {
        'inside': inside, 'after': after, 'differ': differ,
        'rehearsal_leaves_no_trace': run.outer.checksums() == sums and run.outer.dtype == 'float32',
        'rehearsed': 0 < computing < seconds, 'updates': [updates, len(run.updates)],
    }  # fmt: skip


def checksums_see(layout):
    """Whether checksums() notices one other bit on one replica, and two numbers that have changed places."""
    rows = {}
    for change in ('none', 'bit', 'order'):
        run = begin(layout, inner_steps=4)
        if run.outer.replica == 1 and change != 'none':
            weight = run.model.blocks[2].weight.data.view(-1)
            if change == 'bit':
                weight.view(torch.int32)[3] ^= 1
            else:
                weight[[3, 4]] = weight[[4, 3]]
        rows[change] = agreement(run, layout)
    return rows


def meanwhile(layout):
    """A sum over all ranks while a fragment is in flight, where not all ranks begin the two in the same order."""
    parameter, outer = vector(layout, 1000, overlap_steps=1)
    assert layout.group is dist.group.WORLD  # what torch gives for a mesh without shards
    with torch.no_grad():
        parameter.sub_(pseudo_gradients(2, 1000)[outer.replica])
    total, (fragment,) = torch.ones(()), outer.fragments
    if outer.replica == 0:
        outer.send(fragment, 1)
        time.sleep(0.3)
    work = dist.all_reduce(total, async_op=True)
    if outer.replica == 1:
        time.sleep(0.3)
        outer.send(fragment, 1)
    work.wait()
    outer.land(fragment, 2)
    error = (fragment.anchor + pseudo_gradients(2, 1000).mean(0)).abs().max().item()
    return {'total': total.item(), 'error': error}


def cases_for(world_size, smaller):
    """{name: function without arguments} of the cases for so many ranks."""
    replicas, shards = (2, 2) if world_size == 4 else (world_size, 1)
    mesh = init_device_mesh('cpu', (replicas, shards), mesh_dim_names=('replica', 'shard'))
    layout = SimpleNamespace(
        replicas=replicas, shards=shards, shard=mesh.get_local_rank('shard'), shard_mesh=mesh['shard'],
        group=mesh.get_group('replica'),
    )  # fmt: skip
    cases = {'alone': lambda: alone(layout)}
    if world_size == 4:
        for name, sharding in SHARDED:
            cases[f'compare {name} {sharding}'] = lambda n=name, s=sharding: compare(layout, s, **COMPARED[n])
        cases['buckets'] = lambda: buckets(layout, 'manual')
        cases['health'] = lambda: health(layout, 'manual')
        cases['evaluation'] = lambda: evaluation(layout, 'manual')
        cases['resume in_flight_int8'] = lambda: resume(layout, 'manual', **RESUMED['in_flight_int8'])
        return cases
    for name, settings in COMPARED.items():
        cases[f'compare {name} None'] = lambda s=settings: compare(layout, **s)
    cases['compare sgd None'] = lambda: compare(
        layout, steps=10, inner='sgd', update=average, optimizer=dict(lr=1.0, momentum=0.0), inner_steps=4
    )
    for function in (
        buckets,
        quantized,
        error_feedback,
        bf16_parameters,
        traffic,
        health,
        health_in_flight,
    ):
        cases[function.__name__] = lambda function=function: function(layout)
    if world_size == 2:
        for function in (golden, resume_at_a_rounds_end, resume_other_fragments, evaluation, checksums_see):
            cases[function.__name__] = lambda function=function: function(layout)
        for name, settings in RESUMED.items():
            cases[f'resume {name}'] = lambda s=settings: resume(layout, **s)
        cases['meanwhile'] = lambda: meanwhile(layout)  # comes last: if it fails, so do the cases after it
    else:
        cases['compare whole manual'] = lambda: compare(layout, 'manual', **COMPARED['whole'])
        cases['compare overlap_2 torch'] = lambda: compare(layout, 'torch', **COMPARED['overlap_2'])
        cases['resume_other_replicas'] = lambda: resume_other_replicas(layout, smaller)
    return cases


def run_cases():
    """{name of a case: what this rank saw}."""
    warnings.filterwarnings('ignore')
    world_size, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [world_size - 1])] if world_size == 3 else [None, None]
    results = {}
    for name, case in cases_for(world_size, groups[rank == world_size - 1]).items():
        try:
            results[name] = case()
        except Exception:
            results[name] = {'failed': traceback.format_exc()}
    return json.loads(json.dumps(results))  # keys are strings


def run_alone():
    return alone(None)


def lose_a_rank():
    """What rank 0 sees when rank 1 dies before an exchange, with and without overlap."""
    rows = []
    for overlap_steps in (0, 2):
        model, updates = Net(), []
        outer = diloco.Outer(
            trainable(model), lambda *_, updates=updates: updates.append(1), dist.group.WORLD, 2,
            overlap_steps=overlap_steps, bucket=50, timeout=timedelta(seconds=60),
        )  # fmt: skip
        rows.append((model, outer, updates))
    for _, outer, updates in rows:  # both have met once
        outer.rehearse(100, 'float32')
        updates.clear()
    if dist.get_rank() == 1:
        processes.leave()
    seen = []
    for model, outer, updates in rows:
        with torch.no_grad():
            model.scale.add_(1)
        before, raised = outer.checksums(), []
        for what in (outer.send, outer.land, outer.land):
            try:
                what(outer.fragments[0], 2)
                raised.append('')
            except Exception as error:
                raised.append(type(error).__name__)
                if what == outer.send:
                    break
        seen.append({'raised': raised, 'unchanged': outer.checksums() == before, 'updates': len(updates)})
    return seen


# --- WHAT THE TESTS READ ----------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def ranks():
    """{world size: [what each rank saw]}; started when a test asks for that size."""
    started = set()

    class Results(dict):
        def __missing__(self, world_size):
            assert world_size not in started, f'{world_size} ranks failed, see the first test that needed them'
            started.add(world_size)
            self[world_size] = run_function(world_size, run_cases)
            return self[world_size]

    return Results()


THREE, FOUR = (pytest.param(ranks, marks=pytest.mark.slow) for ranks in (3, 4))


def seen(ranks, world_size, name):
    """What each rank saw in a case."""
    rows = [rank[name] for rank in ranks[world_size]]
    for row in rows:
        assert 'failed' not in row, row['failed']
    return rows


ON_THREE = [f'compare {name} None' for name in (*COMPARED, 'sgd')]
ON_THREE += ['compare whole manual', 'compare overlap_2 torch']
COMPARISONS = [
    *((2, f'compare {name} None') for name in (*COMPARED, 'sgd')),
    *(pytest.param(3, name, marks=pytest.mark.slow) for name in ON_THREE),
    *(pytest.param(4, f'compare {name} {sharding}', marks=pytest.mark.slow) for name, sharding in SHARDED),
]


@pytest.mark.parametrize('world_size, name', COMPARISONS)
def test_every_step_is_that_of_the_loop_in_one_process(ranks, world_size, name):
    """Anchors and each replica's parameters after every step, for 2 and 3 replicas, and for 2 replicas of 2 shards."""
    rows = seen(ranks, world_size, name)
    for row in rows:
        assert max(row['errors']['anchors'] + row['errors']['parameters']) <= apart(), row['errors']
        assert row['log'] == rows[0]['log'] and row['frozen_moved'] == 0
    settings = COMPARED.get(name.split()[1], {})
    for step, (anchors, parameters) in rows[0]['agreed'].items():
        assert anchors, f'replicas hold different anchors after step {step}'
        in_parts = any(settings.get(key) for key in ('num_fragments', 'overlap_steps'))
        assert in_parts or parameters, f'replicas hold different parameters after step {step}'
    last_step = str(len(rows[0]['errors']['anchors']))
    assert rows[0]['agreed'][last_step] == [True, True]  # nothing trained is left behind
    assert all(row['equals_anchors'] and not row['mid_round'] for row in rows)
    if world_size < 4 and 'sgd' not in name:
        assert len({row['moments'] for row in rows}) == world_size  # AdamW's state is each replica's own


def sends(row):
    return [entry[1:] for entry in row['log'] if entry[0] == 'send']


@pytest.mark.parametrize(
    'name, expected',
    [
        ('whole', [[0, 4], [0, 8], [0, 12]]),  # rounds of H steps, the first one too; as many updates; no empty one
        ('partial_last_round', [[0, 4], [0, 8], [0, 10]]),
        ('shorter_than_a_round', [[0, 3]]),
        ('every_step', [[0, 1], [0, 2], [0, 3], [0, 4]]),
        ('strided_2', [[0, 2], [1, 4], [0, 6], [1, 8], [0, 10], [0, 12], [1, 12]]),
        ('partial_2', [[0, 2], [1, 4], [0, 6], [1, 8], [0, 10], [0, 11], [1, 11]]),
        ('uneven_3', [[0, 1], [1, 3], [2, 5], [0, 6], [1, 8], [2, 10], [0, 11], [0, 13], [1, 13], [2, 13]]),
    ],
)
def test_when_a_fragment_is_sent(ranks, name, expected):
    for world_size in (2, 3):
        for row in seen(ranks, world_size, f'compare {name} None'):
            assert sends(row) == expected
            assert row['updates'] == [row['sizes'][index] for index, _ in expected]  # one bucket holds a fragment


def test_an_exchange_lands_exactly_overlap_steps_later_and_all_at_the_end(ranks):
    """With H=6, 3 fragments and an overlap of 5 steps up to three are in flight. At the end each is sent once more,
    since half of what replicas hold after an overlap is their own."""
    row = seen(ranks, 2, 'compare three_in_flight None')[0]
    starts, at_the_end = [[0, 2], [1, 4], [2, 6], [0, 8], [1, 10], [2, 12], [0, 14], [1, 16], [2, 18]], [0, 1, 2]
    assert sends(row) == [*starts, *([index, 19] for index in at_the_end)]
    landed = [entry[1:] for entry in row['log'] if entry[0] == 'land']
    assert landed == [[index, min(step + 5, 19)] for index, step in starts]
    assert len(row['updates']) == len(starts) + len(at_the_end)
    row = seen(ranks, 2, 'compare overlap_2 None')[0]  # H=6
    assert sends(row) == [[0, 3], [1, 6], [0, 9], [1, 12], [0, 15], [0, 17], [1, 17]]
    assert [entry[1:] for entry in row['log'] if entry[0] == 'land'] == [[0, 5], [1, 8], [0, 11], [1, 14], [0, 17]]


def test_an_exchange_in_flight_lands_before_a_shorter_round_sends_its_fragment_again():
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    try:
        first, resumed = (
            diloco.Outer(trainable(Net()), average, dist.group.WORLD, inner_steps, overlap_steps=3)
            for inner_steps in (4, 2)
        )
        first.send(first.fragments[0], 4)
        resumed.resume({'step': 4, 'diloco': first.state(4)}, read=lambda tensors: None)
        assert resumed.to_land(5) == [] and resumed.fragments[0].lands_at == 7
        assert resumed.to_land(6) == resumed.to_send(6) == resumed.fragments
    finally:
        dist.destroy_process_group()


def test_the_golden_values_of_maxtext(ranks):
    first, second = seen(ranks, 2, 'golden')
    assert first['losses'] == pytest.approx([1, 0.49, 0.2401, 0.2075], abs=1e-4)
    assert second['losses'] == pytest.approx([1, 0.81, 0.6561, 0.9409], abs=1e-4)
    for row in (first, second):
        assert row['after'] == [pytest.approx([1.5345, 1.0494, 0.5839], abs=1e-4)]


@pytest.mark.parametrize('world_size', [2, THREE, FOUR])
def test_buckets_change_no_bit_and_each_is_updated_once(ranks, world_size):
    """A parameter fills several buckets of 7 numbers; several parameters share one of 2**22."""
    for row in seen(ranks, world_size, 'buckets'):
        assert row['7']['sums'] == row['64']['sums'] == row[str(2**22)]['sums']
        assert row['7']['updates'] > row['64']['updates'] >= row[str(2**22)]['updates']
        for size in row.values():
            assert size['updates'] == size['expected']


@pytest.mark.parametrize('world_size', [2, THREE])
def test_a_quantized_mean_is_as_exact_as_its_dtype_and_the_same_everywhere(ranks, world_size):
    """Rounding to a grid of width w has an error of w / sqrt(12). The errors of the replicas are averaged, and then
    their mean is rounded, too."""
    rows = seen(ranks, world_size, 'quantized')
    for dtype, levels in (('float32', None), ('bfloat16', None), ('int8', 127), ('int4', 7)):
        first = rows[0][dtype]
        assert all(row[dtype]['sums'] == first['sums'] for row in rows)
        if levels:
            width = rows[0]['largest'] / levels  # of the block with the largest number
            assert first['max'] <= width
            rms = width / math.sqrt(12) * math.sqrt(1 / world_size + 1)
            assert 0.4 * rms < first['rms'] <= rms and abs(first['mean']) < 0.1 * rms
        else:
            assert first['max'] <= rows[0]['largest'] * {'float32': 2**-22, 'bfloat16': 2**-8}[dtype]
        for value in ('nan', 'inf', '-inf'):
            finite, broken = first[value]
            assert not finite and broken == {None: 1, 127: 256, 7: 256}[levels]  # a block in the integers
            assert all(row[dtype][value] == first[value] for row in rows)


@pytest.mark.parametrize('world_size', [2, THREE, FOUR])
def test_one_replica_takes_the_outer_step_of_snoo(ranks, world_size):
    """Sharded over 2, 3 and 4 ranks (over one: test_one_replica_on_one_rank). Nothing happens at step 0, and nothing is
    sent."""
    for row in seen(ranks, world_size, 'alone'):
        assert row['worst'] <= apart() and row['bytes'] == 0
        assert row['sent'] == [*range(3, 31, 3), 31]


def test_one_replica_on_one_rank():
    (row,) = run_function(1, run_alone)
    assert row['worst'] <= apart() and row['sent'] == [*range(3, 31, 3), 31]


@pytest.mark.parametrize('world_size', [2, THREE])
def test_error_feedback_makes_the_sum_of_many_rounds_exact(ranks, world_size):
    for row in seen(ranks, world_size, 'error_feedback'):
        for dtype in ('bfloat16', 'int8', 'int4'):
            assert row[f'{dtype} True'] < 0.2 * row[f'{dtype} False']
        assert row['int4 False'] > 0.02  # without error feedback a component of 0.03 is lost in every round
        assert row['int4 True'] < 0.005


def test_between_bf16_parameters_anchors_and_pseudo_gradients_are_fp32(ranks):
    for world_size in (2, 3):
        for row in seen(ranks, world_size, 'bf16_parameters'):
            assert row['dtypes'] == ['torch.float32'] and row['error'] <= 1e-3 * apart()  # moves are about 1e-3
            assert row['nonzero'] > 1.5 * row['naive']  # differences of bf16 numbers lose what the anchors keep
            assert row['between'] > 0.3 and row['parameter_is_rounded_anchor']


@pytest.mark.parametrize('world_size', [2, THREE])
def test_bytes_are_those_that_torch_sees_and_the_formula_and_none_between_sends(ranks, world_size):
    for row in seen(ranks, world_size, 'traffic'):
        for name, case in row.items():
            dtype = name.split()[0]
            formula = 2 * 2 * case['numbers'] * codec.BYTES[dtype] * (world_size - 1) / world_size  # two rounds
            assert case['operators'] == ['alltoall_base_']  # over gloo both halves of an exchange are
            assert case['counted'] == case['seen'] and case['formula'] == pytest.approx(formula)
            assert 2 * case['health_formula'] == pytest.approx(formula)
            assert formula <= case['counted'] <= 1.05 * formula, (name, case)
            assert len(case['between']) >= 4 and not any(case['between'])


@pytest.mark.parametrize('world_size', [2, THREE, FOUR])
def test_health_is_that_of_the_replicas_pseudo_gradients(ranks, world_size):
    for row in seen(ranks, world_size, 'health'):
        for key, value in row['expected'].items():
            assert row['row'][key] == pytest.approx(value, rel=1e-5), key
        assert all(row['row'][f'diloco/{kind}_s'] > 0 for kind in ('wait', 'transfer', 'compute'))
        assert 'diloco/cosine' not in row['after_reset'] and row['after_reset_bytes'] == 0


def test_health_between_send_and_land_counts_every_exchange_once(ranks):
    for world_size in (2, 3):
        for row in seen(ranks, world_size, 'health_in_flight'):
            assert row['squares'] == pytest.approx(row['expected'], rel=1e-5)
            assert row['formula'] <= row['bytes'] <= 1.05 * row['formula']


def test_a_replica_that_has_moved_nothing_has_no_direction():
    row = diloco.norms_of_replicas(torch.tensor([[4.0, 0.0], [0.0, 0.0]], dtype=torch.float64))
    assert row == pytest.approx({'diloco/replica_norm': 2**0.5, 'diloco/delta_norm': 1.0, 'diloco/drift': 1.0})


@pytest.mark.parametrize('world_size, name', [*((2, name) for name in RESUMED), (4, 'in_flight_int8')])
def test_a_resumed_run_equals_one_without_a_stop_to_the_bit(ranks, world_size, name):
    for row in seen(ranks, world_size, f'resume {name}'):
        unstopped, saved, resumed = row['sums']
        assert saved == unstopped, 'saving changed the run'
        assert resumed == unstopped
        assert row['step'] == 7 and row['missing'] == [] and row['there'] == [True, True]
        assert row['log'][1] == row['log'][0] and len(row['log'][0]) >= 3
        assert any(kind == 'outer.average' for kind in row['kinds']) == ('in_flight' in name)
        assert any(kind.endswith('.error') for kind in row['kinds']) == ('int8' in name)


def test_other_fragments_at_a_rounds_end_and_a_checkpoint_of_train_ddp(ranks):
    for row in seen(ranks, 2, 'resume_at_a_rounds_end'):
        assert row == {'step': 8, 'same': True, 'mid_round': False, 'without': 8}


def test_other_fragments_in_the_middle_of_a_round_are_refused(ranks):
    for messages in seen(ranks, 2, 'resume_other_fragments'):
        assert len(messages) == 2
        assert all('num_fragments=2' in message and '\n' not in message for message in messages)


@pytest.mark.slow
def test_with_another_number_of_replicas_the_round_begins_again_at_the_outer_parameters(ranks):
    """A run of 3 replicas goes on with 2 and with 1. What was in flight has landed."""
    rows = seen(ranks, 3, 'resume_other_replicas')
    for row in rows:
        assert row['step'] == 4 and row['error'] == 0 and not row['mid_round'] and row['in_flight'] > 0
        assert sends(row) == [[0, 6], [1, 8], [0, 10], [1, 10]]
    assert rows[0]['sums'] == rows[1]['sums'] != rows[2]['sums']
    assert [row['keys'] for row in rows] == [['optim', 'optim'], ['replica1.optim'] * 2, ['optim', 'replica2.optim']]


@pytest.mark.parametrize('world_size', [2, 4])
def test_outer_parameters_for_an_evaluation_and_a_rehearsal_leave_no_trace(ranks, world_size):
    for row in seen(ranks, world_size, 'evaluation'):
        assert row['inside'] and row['after'] and row['differ']
        assert row['rehearsal_leaves_no_trace'] and row['rehearsed'] and row['updates'] == [21, 22]


def test_other_collectives_do_not_disturb_an_exchange_in_flight(ranks):
    for row in seen(ranks, 2, 'meanwhile'):
        assert row['total'] == 2 and row['error'] <= apart()


def test_checksums_notice_one_bit_and_the_order(ranks):
    for row in seen(ranks, 2, 'checksums_see'):
        assert row == {'none': [True, True], 'bit': [True, False], 'order': [True, False]}


def test_a_failed_exchange_raises_and_no_outer_step_is_taken():
    """When one of two replicas is gone, the other one must not go on with its own pseudo-gradient alone."""
    at_once, overlapped = run_function(2, lose_a_rank)[0]
    assert at_once['raised'] == ['RuntimeError']
    assert overlapped['raised'] == ['', 'RuntimeError', 'RuntimeError']  # send() only starts it; land() raises again
    assert all(row['unchanged'] and row['updates'] == 0 for row in (at_once, overlapped))


# --- fragments, in this process ---


def test_fragments_have_every_parameter_once_and_equal_sizes():
    sizes = {f'blocks.{i}.{name}': n for i in range(12) for name, n in (('mlp', 600), ('attn', 380), ('norm', 20))}
    sizes |= {'embed': 3000, 'head': 2500, 'norm': 10}
    parameters = {name: torch.empty(n) for name, n in sizes.items()}
    for num_fragments in range(1, 13):
        fragments = diloco.assign_to_fragments(parameters, num_fragments)
        assert len(fragments) == num_fragments and all(fragments)
        names = [name for fragment in fragments for name in fragment]
        assert sorted(names) == sorted(parameters)
        totals = [sum(sizes[name] for name in fragment) for fragment in fragments]
        assert max(totals) - min(totals) <= 3000  # the embedding cannot be split
        blocks = [sorted({int(name.split('.')[1]) for name in names if '.' in name}) for names in fragments]
        assert blocks == [list(range(index, 12, num_fragments)) for index in range(num_fragments)]
    with pytest.raises(ValueError, match='num_fragments=13: .* 12'):
        diloco.assign_to_fragments(parameters, 13)


def test_blocks_are_found_under_the_names_of_hugging_face_models_too():
    names = [f'model.layers.{i}.self_attn.q_proj.weight' for i in range(4)] + ['model.embed_tokens.weight']
    fragments = diloco.assign_to_fragments({name: torch.empty(4) for name in names}, 2)
    assert [sorted(fragment) for fragment in fragments] == [
        sorted([names[0], names[2], names[4]]),
        [names[1], names[3]],
    ]


def test_a_run_of_few_rounds_is_warned_of_its_momentum_with_values_that_pass():
    assert diloco_check.advice(40_000, 100, 0.9) == diloco_check.advice(1000, 100, 0.0) == []
    assert diloco_check.advice(0, 100, 0.9) == [], 'a finished run, started again'
    (line,) = diloco_check.advice(2000, 20, 0.9)
    momentum, steps = re.search(r'--outer_momentum=([\d.]+), or --inner_steps=(\d+)', line).groups()
    assert '100 rounds' in line and (momentum, steps) == ('0.8', '5')
    assert diloco_check.advice(2000, 20, float(momentum)) == diloco_check.advice(2000, int(steps), 0.9) == []
    assert '--outer_momentum=0 --outer_lr=1' in diloco_check.advice(100, 25, 0.9)[0]


@pytest.mark.parametrize('place', ['cpu', 'cuda'])
@pytest.mark.parametrize('overlap_steps', [0, 1])
def test_nccl_may_keep_few_multiprocessors_busy_while_the_gpu_computes(monkeypatch, overlap_steps, place):
    """A fake GPU has neither streams nor NCCL, so the test only looks at the options with which the group would be
    made."""

    class Options:
        def __init__(self):
            self.config, self._timeout = SimpleNamespace(max_ctas=None), timedelta(minutes=10)

    class Made(Exception):
        pass

    def new_group(ranks, timeout, use_local_synchronization, pg_options):
        raise Made(pg_options)

    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, 'ProcessGroupNCCL', SimpleNamespace(Options=Options), raising=False)
        monkeypatch.setattr(dist, 'new_group', new_group)
        with FakeTensorMode(), pytest.raises(Made) as made:
            parameters = {'w': nn.Parameter(torch.zeros(4, device=place))}
            timeout = timedelta(seconds=60)
            diloco.Outer(parameters, average, dist.group.WORLD, 4, overlap_steps=overlap_steps, timeout=timeout)
    finally:
        dist.destroy_process_group()
    options = made.value.args[0]
    if overlap_steps and place == 'cuda':
        assert options.config.max_ctas == diloco.OVERLAPPED_CTAS and options._timeout == timeout
    else:
        assert options is None


class Offloaded(nn.Module):
    """At the first forward another tensor replaces its weight, as sharding does with page-locked memory."""

    def __init__(self):
        super().__init__()
        self.weight, self.is_pinned = nn.Parameter(torch.randn(8)), False

    def forward(self, x):
        if not self.is_pinned:
            self.weight.data, self.is_pinned = self.weight.data.clone(), True
        return ((self.weight * x).square().sum(),)

    def set_requires_gradient_sync(self, sync):
        pass

    def set_reshard_after_backward(self, reshard, recurse):
        pass


@pytest.mark.parametrize('is_broken', [False, True])
def test_verify_looks_at_the_weights_that_train_also_where_others_have_taken_their_place(is_broken):
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, said = Offloaded(), []
        parameters = {'weight': model.weight}

        def make_outer(**keys):
            keys = {'update': average, 'inner_steps': 2, **keys}
            if is_broken:
                keys['update'] = lambda theta, delta, momentum: None  # nothing is ever learned
            return diloco.Outer(parameters, group=dist.group.WORLD, **keys)

        def batches_from(step):
            yield (torch.full((8,), 1.0 + step),)

        config = SimpleNamespace(
            global_batch_size=1,
            batch_size=1,
            num_replicas=1,
            accumulate='unsharded',
            dtype='float32',
            matmul_dtype=None,
        )
        passed = diloco_check.verify(model, parameters, batches_from, lambda step: 1, make_outer, config, said.append)
    finally:
        dist.destroy_process_group()
    assert passed is not is_broken and any('FAIL' in line for line in said) is is_broken, said
