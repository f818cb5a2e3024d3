"""The two collectives of an exchange, on bytes: all_to_all() sends each rank its own row, gather() the same to all."""

import torch
import torch.distributed as dist

# torch 2.13 has new names for these two and warns about the old names, but torch 2.11 has only the old ones.
all_gather = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, 'reduce_scatter_single', None) or dist.reduce_scatter_tensor

SEGMENT = 2**16  # bytes of a message from one rank to another over gloo


def all_to_all(to_send, group):
    """Row j of to_send, uint8 (M, n), goes to rank j of the group; row i of the result comes from rank i.

    Over gloo it sends short messages, two at a time. If two hosts send each other several MB in one message over a slow
    link, each direction reaches only half to two thirds of its rate: of 100 Mbit/s 60, but 99 in messages of 64 kB.
    """
    if to_send.is_cuda:
        received = torch.empty_like(to_send)
        dist.all_to_all_single(received, to_send, group=group)
        return received
    sources = [segment.contiguous() for segment in to_send.split(SEGMENT, dim=1)]
    targets = [torch.empty_like(source) for source in sources]
    works = []
    for number, (target, source) in enumerate(zip(targets, sources, strict=True)):
        if number >= 2:
            works[number - 2].wait()
        works.append(dist.all_to_all_single(target, source, group=group, async_op=True))
    for work in works[-2:]:
        work.wait()
    return torch.cat(targets, dim=1)


def gather(payload, replicas, group):
    """uint8 (n) of this replica -> (replicas, n), where row m comes from replica m."""
    if not payload.is_cuda:
        return all_to_all(payload.expand(replicas, -1), group)
    gathered = torch.empty(replicas, len(payload), dtype=torch.uint8, device=payload.device)
    all_gather(gathered.flatten(), payload, group=group)
    return gathered
