"""Which rows of each parameter a rank holds, so that a job with another number of ranks can read its files; and a
checksum that does not depend on the number of ranks."""

import hashlib

import torch
import torch.distributed as dist

from pieces import local

CHUNK, ODD = 2**15, -7046029254386353131  # so few numbers stay in a core's cache; ODD is splitmix64's multiplier


def rows_of(rows, ranks, rank):
    """(first, end) of the rows of a parameter that this rank holds, as with DTensor's Shard(0)."""
    each = -(-rows // ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def copies(shapes, mine, theirs):
    """What to copy from rank `theirs` of one job into rank `mine` of another: [(first, end, target)], where the numbers
    first to end - 1 of `theirs` go to `mine` from target on.

    shapes: those of the whole parameters; a rank's rows of all of them lie end to end. mine, theirs: (ranks, rank).
    """
    found, here, there = [], 0, 0
    for rows, *others in shapes:
        width = torch.Size(others).numel()
        (a, b), (c, d) = rows_of(rows, *mine), rows_of(rows, *theirs)
        first, end = max(a, c), min(b, d)
        if first < end:
            found.append((there + (first - c) * width, there + (end - c) * width, here + (first - a) * width))
        here, there = here + (b - a) * width, there + (d - c) * width
    return found


def checksum(flat, shapes, ranks, rank):
    """A checksum of the parameters that all ranks hold together, as 16 hexadecimal digits. It depends on every bit and
    on its place, but not on how the parameters are divided among ranks: sum over i of bits_i * (i * ODD + 1) mod 2^64.
    flat: this rank's rows, fp32 on the host. Collective."""
    weights = torch.arange(CHUNK) * ODD
    total, here, before = 0, 0, 0
    for rows, *others in shapes:
        width = torch.Size(others).numel()
        first, end = (row * width for row in rows_of(rows, ranks, rank))
        for start in range(first, end, CHUNK):
            stop = min(start + CHUNK, end)
            bits = flat[here + start - first : here + stop - first].view(torch.int32).long()
            total += (bits @ weights[: stop - start]).item() + ((before + start) * ODD + 1) * bits.sum().item()
        here, before = here + end - first, before + rows * width
    total = torch.tensor((total + 2**63) % 2**64 - 2**63)  # as a signed number, which wraps around alike
    dist.all_reduce(total)
    return f'{total.item() % 2**64:016x}'


def checksums_of_frozen(model):
    """{'frozen weights': one hash of their checksums}, or {} if all weights are trained. Frozen weights are not
    exchanged, so all jobs of a pool must have the same ones. model: its parameters are whole, or sharded over all
    ranks. Collective."""
    place = dist.get_world_size(), dist.get_rank()
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    words = [checksum(local(tensor).detach().float().cpu().flatten(), [tensor.shape], *place) for tensor in frozen]
    return {'frozen weights': hashlib.sha256(' '.join(words).encode()).hexdigest()[:16]} if frozen else {}
