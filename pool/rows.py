"""
Which rows of each parameter a rank holds, so that jobs of other numbers of ranks can read what it has written, and a
checksum that does not depend on that number.
"""

import torch
import torch.distributed as dist


def rows_of(rows, ranks, rank):
    """(first, end) of the rows of a parameter that one of several ranks holds: those of DTensor's Shard(0)."""
    each = -(-rows // ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def copies(shapes, mine, theirs):
    """[(first, end, target)]: which numbers of what rank `theirs` holds are to be had, and where they go in `mine`.

    shapes: of the parameters, whole; a rank's rows of all of them lie end to end. mine, theirs: (ranks, rank).
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
    """A number that depends on every bit of what all ranks hold together, and on its place, but not on how many ranks
    hold it: sum over i of bits_i * (i * odd + 1) mod 2^64. flat: this rank's rows, fp32 on the host. Collective."""
    total, here, before = torch.zeros((), dtype=torch.int64), 0, 0
    for rows, *others in shapes:
        width = torch.Size(others).numel()
        first, end = (row * width for row in rows_of(rows, ranks, rank))
        for start in range(first, end, 2**20):
            stop = min(start + 2**20, end)
            places = torch.arange(before + start, before + stop) * -7046029254386353131 + 1  # odd; splitmix64's
            total += (flat[here + start - first : here + stop - first].view(torch.int32).long() * places).sum()
        here, before = here + end - first, before + rows * width
    dist.all_reduce(total)
    return f'{total.item() % 2**64:016x}'
