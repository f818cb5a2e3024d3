"""
What FSDP makes a rank hold and send, by torch's fully_shard or by fsdp_manual.py, for --dry_run and compare.py --plan.
"""

from functools import lru_cache

import muon
from layout import FP32, numbers


def check(keys, layout, shape):
    """Raise ValueError for a way of sharding that the implementation does not have."""
    if keys['zero_stage'] == 1 and keys['fsdp_impl'] == 'torch':
        raise ValueError('zero_stage=1: expected 3, 2 or, with --fsdp_impl=manual, 1')
    on_cuda = keys['device'].startswith('cuda')
    if on_cuda and keys['cpu_offload'] == 'params' and keys['dtype'] == 'float16':
        raise ValueError(
            'cpu_offload=params with dtype=float16: the loss scale is on the GPU; use bfloat16, or float32'
        )


def holds(plan):
    """
    A piece of all that stays, whole weights of the blocks at work and of the root, and gradients on their way: as
    autograd makes them in the compute dtype, and again in the flat fp32 input of the reduction.
    """
    keys, weights, step = plan.keys, plan.weights, plan.activations
    compute, micro_steps = plan.compute_bytes, plan.layout.micro_steps
    trained = weights.count(weights.trained)
    host = 'host ' if keys['cpu_offload'] == 'params' else ''
    host_of_moments = 'host ' if keys['cpu_offload'] != 'none' else ''
    parts = {
        f'{host}weights': weights.stored_bytes(),
        f'{host}gradients': FP32 * trained,
        f'{host_of_moments}optimizer': plan.moment_bytes(),
    }
    if keys['accumulate'] == 'unsharded' and micro_steps > 1:
        # Whole gradients, summed over the micro-steps so far. When the last micro-step reduces them, they shrink to
        # this rank's piece, which 'gradients' counts already.
        parts['accumulated'] = FP32 * (numbers(weights.trained) - (0 if host else trained))
    of_block, of_root = (
        (compute + FP32) * numbers(p for p in unit if p.requires_grad) for unit in (weights.block, weights.root)
    )
    stays = 0
    if keys['fsdp_impl'] == 'manual':
        stays = reduction_that_stays(plan)
        of_root = reduction_of_root(plan)
    blocks, reduction = bytes_of_whole_blocks(plan), max(of_block, of_root)
    parts |= {'gathered': whole_bytes(weights.root, compute) + blocks, 'reduction': reduction, **step.parts()}
    # During backward, activations are freed while gradients are made. So the peak is in the loss, when fully_shard has
    # freed all blocks; or at the beginning of backward, when the gradients of a block are on their way; or at the end,
    # when the root's gradients are reduced. At first there are no gradients yet, unless micro-steps add up. A compiled
    # block has freed what it kept before it returns its gradients, so they are on their way beside the next block's
    # backward.
    in_loss = step.kept + step.loss - blocks + bytes_of_whole_blocks(plan, in_loss=True) + stays
    begin = step.kept + step.backward + max(0, of_block - step.block * step.is_compiled)
    none_yet = parts.get('gradients', 0) if micro_steps == 1 else 0
    peak = max(max(in_loss, begin) - none_yet, of_root)
    return parts | plan.parts_that_overlap(peak - reduction - step.peak())


def whole_bytes(parameters, compute):
    """Bytes of these parameters while they are gathered and when they are whole: `compute` for each number, but nf4
    stays as it is."""
    return sum((compute if p.is_floating_point() else p.itemsize) * p.numel() for p in parameters)


def bytes_of_whole_blocks(plan, in_loss=False):
    """
    Bytes of the blocks that are whole at the same time: the unit that computes (below stage 3, all units), and the flat
    buffers in which the next ones arrive. fully_shard also holds the unit after the next. Experts that ranks divide are
    separate units, of one block each under fully_shard; they need no buffer if no other rank holds the same ones.
    in_loss: while the loss computes, when fully_shard has freed all of them, and fsdp_manual none.
    """
    keys, nbytes = plan.keys, 0
    is_manual, frees = keys['fsdp_impl'] == 'manual', keys['zero_stage'] == 3
    for are_experts, units in plan.weights.by_unit():
        unit = 1 if are_experts and not is_manual else keys['blocks_per_unit']
        buffers = unit * (max(1, keys['prefetch']) if is_manual else 2)
        if are_experts and plan.weights.pieces(units[-1][0]) == 1:
            buffers = 0
        sizes = [whole_bytes(parameters, plan.compute_bytes) for parameters in units if parameters]
        blocks = buffers + (unit if frees else len(sizes))
        if in_loss and not is_manual:
            blocks -= buffers + (unit if frees else 0)
        blocks = min(blocks, len(sizes) + 1)
        nbytes += blocks * max(sizes) if frees else sum(sizes) + (blocks - len(sizes)) * max(sizes)
    return nbytes


def reduction_that_stays(plan):
    """Bytes of the fp32 input to the reduction of a block, which fsdp_manual keeps from step to step."""
    in_block = (p for p in plan.weights.block if p.requires_grad and plan.weights.pieces(p) > 1)
    return FP32 * plan.keys['blocks_per_unit'] * numbers(in_block)


def reduction_of_root(plan):
    """
    Bytes of gradients on their way at the end of fsdp_manual's backward: the root's gradients as autograd made them,
    the fp32 input to the reduction of its largest unit, and the one of the blocks, which is kept. If the pieces hold
    gradients of earlier micro-steps, new averages need their own memory until they are added: those of the root, and of
    experts, whose last reduction is in flight.
    """
    keys, weights = plan.keys, plan.weights
    in_block, in_root = ([p for p in unit if p.requires_grad] for unit in (weights.block, weights.root))
    largest_block = keys['blocks_per_unit'] * numbers(in_block)
    large = [p.numel() for p in in_root if p.numel() > largest_block]  # each is a unit by itself
    largest = max([numbers(in_root) - sum(large), *large])
    averages = []
    if plan.layout.micro_steps > 1 and keys['accumulate'] == 'sharded':
        averages = in_root + [p for p in in_block if p in weights.experts]
    on_their_way = plan.compute_bytes * numbers(in_root) + FP32 * (largest + weights.count(averages))
    return on_their_way + reduction_that_stays(plan)


def sends(plan):
    """
    A rank sends its piece of a parameter, or of a gradient, to every other rank with a piece of the same one. Blocks
    are gathered as often as fsdp_manual.py says ("What crosses the wire?"), the root once in a step, since it stays
    whole from the first forward to the last backward. Copies (HSDP) all-reduce their pieces of the gradients.

    On a CPU, gloo's own reduce-scatter, which fully_shard uses, is an all-reduce whose result is mostly thrown away, so
    it sends twice the bytes. fsdp_manual.py avoids it, and sends what it need not add up first in the compute dtype,
    see send_gradients() there.
    """
    keys, layout, weights = plan.keys, plan.layout, plan.weights
    micro_steps, copies = layout.micro_steps, layout.replicate
    is_manual, stage = keys['fsdp_impl'] == 'manual', keys['zero_stage']
    of_blocks, gathered, _ = bytes_to_others(weights, plan.compute_bytes, keys['blocks_per_unit'])
    for units in of_blocks:
        gathered += sum(units) * (1 if is_manual and stage == 1 else micro_steps * (2 if stage == 3 else 1))
        if is_manual and stage == 3:  # the last unit is kept for backward, the first one for the next micro-step
            gathered -= micro_steps * sum(units[-1:]) + (micro_steps - 1) * sum(units[:1])

    reductions = micro_steps if keys['accumulate'] == 'sharded' else 1
    in_half = is_manual and not plan.on_cuda and reductions == micro_steps
    reduced = reductions * bytes_to_others(weights, plan.compute_bytes if in_half else FP32)[2]
    sent = {
        'all-gather': gathered,
        'reduce-scatter': reduced if plan.on_cuda or is_manual else 2 * reduced,
        'all-reduce': 2 * (copies - 1) * FP32 * weights.count(weights.trained) * reductions / copies,
        'all-to-all': 0,
    }
    if keys['optimizer'] == 'muon':  # muon.py: a hidden matrix goes to one rank, and its update back
        pieces = {p: weights.pieces(p) for p in muon.hidden_matrices(plan.model)}
        to_others = sum((n - 1) / n * weights.count([p]) for p, n in pieces.items())
        sent['all-to-all'] = 2 * to_others * muon.bytes_of_number(plan)
    return sent


@lru_cache(maxsize=1024)
def bytes_to_others(weights, bytes_per_number, size=1):
    """([gathering each unit of `size` blocks, of those that send] for each kind of by_unit(), gathering the root,
    reducing all gradients): bytes that each rank sends. Cached, since compare.py --plan asks for the same ones
    thousands of times."""

    def of(parameters):
        widths = ((p, bytes_per_number if p.is_floating_point() else p.itemsize) for p in parameters)
        return sum((weights.pieces(p) - 1) * width * weights.count([p]) for p, width in widths)

    starts = range(0, len(weights.blocks), size)
    units = [[sum(map(of, blocks[n : n + size])) for n in starts] for _, blocks in weights.by_unit()]
    return [[*filter(None, sent)] for sent in units], of(weights.root), of(weights.trained)
