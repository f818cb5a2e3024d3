"""
Is training code of your own correct? Compares what it computes on some ranks with what it computes in one process.

    from proving.check import check, rows_of_rank

    def build():                          # the whole model, on the CPU; the same in each call
        torch.manual_seed(0)
        return Net()

    def gradients(model, batches):        # forward and backward of a step, as in your loop; returns the loss to report
        targets = sum((y >= 0).sum() for x, y in batches)
        losses = [F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1, reduction='sum') / targets
                  for x, y in batches]
        sum(losses).backward()
        return sum(losses)

    def parallelize(model):               # on each rank: what your code makes of the model
        return fully_shard(model)

    check(build, parallelize, gradients, batches, ranks=2, part=rows_of_rank)

prints `ok`, or which parameters are wrong, by how much and why. No plan of the sharding is needed: where a rank's piece
lies in the whole weight is found by the values of the weights, which shows at the same time that they were loaded
rightly. Ranks are forked, so `check` belongs into a program that has not computed anything on a GPU.
"""

import copy
import time

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from proving.judge import KINDS, Record, judge
from proving.precision import in_float64
from proving.ranks import run_ranks
from proving.scripts import DISTURBED, SMALL_GRADIENT, gradient_of, noise_of, whole

WRAPPERS = ('_fsdp_wrapped_module.', '_orig_mod.', '_checkpoint_wrapped_module.')


def check(
    build,
    parallelize,
    gradients,
    batches,
    ranks=2,
    part=None,
    clip=None,
    optimizer=None,
    alone=None,
    steps=3,
    max_norm=0.1,
    title='',
):
    """
    Judge a parallel training step, print the verdict, and return it (a judge.Verdict).

    build(): the model, a module in fp32 on the CPU. parallelize(model): called on each rank, which has a gloo group;
    returns what gradients() is given. gradients(model, batches): lets the gradients of a step add up, with whatever
    your loop does before it clips, and returns the loss.
    batches: the micro-steps of a step, as one process has them: tensors, or lists or dicts of them. part(batch, rank,
    ranks): a rank's part of one; None = all of it, as ranks have it that split matrices.
    clip(model, max_norm): clips and returns the norm; None = torch.nn.utils.clip_grad_norm_. optimizer(parameters): its
    optimizer; None = AdamW. alone: gradients() of one process, where it is another function than on ranks.
    Raises ranks.RankFailed if a rank ends with an error.
    """
    began = time.monotonic()

    def of_one(dtype):
        model = disturbed(build()).to(dtype)
        own = tree_map(
            lambda leaf: leaf.to(dtype) if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf, batches
        )
        if dtype != torch.float64:
            return train(model, None, alone or gradients, own, clip_by_torch, optimizer, steps, max_norm)
        again = copy.deepcopy(model)  # with its first weights
        with in_float64():
            record = train(model, None, alone or gradients, own, clip_by_torch, optimizer, steps, max_norm)
            for micro_step, batch in enumerate(own):
                for rank in range(ranks if part else 1):
                    (alone or gradients)(again, [part(batch, rank, ranks) if part else batch])
                    record.parts[rank, micro_step] = {name: gradient_of(p) for name, p in trained(again).items()}
                    again.zero_grad()
        return record

    def on_rank(rank):
        dist.init_process_group('gloo')
        model = disturbed(build())
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        model = parallelize(model)
        own = [part(batch, rank, ranks) for batch in batches] if part else batches
        return train(model, weights, gradients, own, clip or clip_by_torch, optimizer, steps, max_norm)

    (one,), (exact,) = (
        run_ranks(1, lambda rank, dtype=dtype: of_one(dtype)) for dtype in (torch.float32, torch.float64)
    )
    verdict = judge(run_ranks(ranks, on_rank), one, exact)
    cells = '  '.join(f'{kind} {verdict.worst[kind]:.2g}' for kind in KINDS)
    said = f'{"ok" if verdict.is_right else "WRONG":6} times as far from float64 as one process: {cells}'
    print(f'{title}{": " if title else ""}{ranks} ranks, {said}  ({time.monotonic() - began:.0f} s)')
    print(*(f'    {line}\n' for line in verdict.lines()), sep='', end='', flush=True)
    return verdict


def rows_of_rank(batch, rank, ranks):
    """A part() of check(): a rank's rows of every tensor of a batch."""
    return tree_map(lambda tensor: tensor.chunk(ranks)[rank], batch)


@torch.no_grad()
def disturbed(model):
    """The model with all weights moved a little, so that no gradient is 0 and no two rows are equal."""
    for name, parameter in model.named_parameters():
        parameter += DISTURBED * noise_of(name, parameter.shape)
    return model


def trained(model):
    """{name in the model as it was built: parameter}"""
    found = {}
    for name, parameter in model.named_parameters():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, '')
        found[name.removeprefix('module.')] = parameter
    return {name: parameter for name, parameter in found.items() if parameter.requires_grad}


def place_in(weight, piece, name):
    """Where a rank's piece lies in the whole weight, by its values: None, or (dim, indices) as in a Record. Raises
    ValueError if it does not lie in it."""
    weight, piece = weight.float().cpu(), piece.float().cpu()
    if piece.shape == weight.shape and torch.equal(piece, weight):
        return None
    found = f'{name}: on a rank {tuple(piece.shape)}, in one process {tuple(weight.shape)}'
    dims = [dim for dim in range(piece.dim()) if piece.dim() == weight.dim() and piece.shape[dim] != weight.shape[dim]]
    for dim in dims[:1] if len(dims) < 2 else []:
        rows = {row.numpy().tobytes(): number for number, row in enumerate(weight.movedim(dim, 0).contiguous())}
        indices = [rows.get(row.numpy().tobytes()) for row in piece.movedim(dim, 0).contiguous()]
        if None not in indices:
            return dim, torch.tensor(indices)
    raise ValueError(f'{found}; its values are not among these before the first step: loaded or placed wrongly?')


def clip_by_torch(model, max_norm):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, eps=SMALL_GRADIENT, foreach=False)  # eps: see scripts.py


def train(model, weights, gradients, batches, clip, optimizer, steps, max_norm):
    """The Record of some steps. weights: {name: whole weight}, None = the model is whole."""
    named, record = trained(model), Record()
    before = {name: whole(p) for name, p in named.items()}
    record.places = {name: weights and place_in(weights[name], of, name) for name, of in before.items()}
    opt = (optimizer or adamw)([*named.values()])
    for step in range(steps):
        record.losses.append(float(whole(gradients(model, batches))))
        if step == 0:
            record.gradients = {name: gradient_of(p) for name, p in named.items()}
        record.norms.append(float(whole(clip(model, max_norm))))
        opt.step()
        opt.zero_grad()
        if step == 0:
            record.updates = {name: whole(p) - before[name] for name, p in named.items()}
    return record
