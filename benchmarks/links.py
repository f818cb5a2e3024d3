"""
How fast are the links between the ranks? Times all-reduces of 1 KiB to 256 MiB (on CPUs 64 MiB).

    torchrun --nproc_per_node=2 benchmarks/links.py
    python compare.py --bench_links                     # the same, started with the cores divided among the ranks

algbw = size / time, and busbw = algbw x 2 (n-1) / n for n ranks, as in nccl-tests. busbw is what each rank of a ring
sends and receives, so for any number of ranks it can be compared with the data sheet of a link.
"""

import argparse
import os
import socket
import statistics
import sys
import time
from datetime import timedelta

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import torch.distributed as dist

from system import devices, errors, processes

SIZES = tuple(2**power for power in range(10, 30, 2))  # bytes: 1 KiB, 4 KiB, ..., 256 MiB
LARGEST_ON_CPU = 2**26
COLUMNS = ('link', 'size', 'ms', 'algbw GB/s', 'busbw GB/s')


def nodes_of_ranks():
    """Lists of the ranks on each node, in order. torchrun's GROUP_RANK tells the nodes apart, else the host name."""
    node_of = [None] * dist.get_world_size()
    dist.all_gather_object(node_of, os.environ.get('GROUP_RANK') or socket.gethostname())
    return [[rank for rank, node in enumerate(node_of) if node == wanted] for wanted in dict.fromkeys(node_of)]


def links_between(nodes):
    """
    {name of a link: groups of ranks that all-reduce over it at the same time}. nodes: the list of each node's ranks.

    In 'between nodes, 1 rank of each' one group has the network for itself. In 'between nodes, all ranks of each' the
    i-th ranks of all nodes exchange with each other, for every i at once, as sharded strategies with replicas do.
    """
    columns = [list(ranks) for ranks in zip(*nodes, strict=False)]  # as many as the smallest node has ranks
    return {
        'all ranks': [sorted(sum(nodes, []))],
        'within a node': nodes,
        'between nodes, 1 rank of each': columns[:1],
        'between nodes, all ranks of each': columns,
    }


def measure(group, size, device, seconds):
    """
    Seconds that one all-reduce of `size` bytes of fp32 takes, by the median of the slowest rank. All ranks of the job
    call it together.

    group: this rank's, or None on a rank that only waits. seconds: about how long to repeat it, at least 3 times.
    """
    tensor = torch.zeros(size // 4, device=device)

    def seconds_per_call(calls):
        slowest(0.0)  # all begin together
        begin = time.perf_counter()
        for _ in range(calls if group is not None else 0):
            dist.all_reduce(tensor, group=group)
        if device.type == 'cuda':
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) / calls

    calls = max(1, min(20, 2**20 // size))  # small ones in a row, since one takes less time than to start it
    seconds_per_call(1)  # connects
    once = slowest(seconds_per_call(calls)) * calls
    repeats = max(3, min(20, round(seconds / once)))
    return slowest(statistics.median(seconds_per_call(calls) for _ in range(repeats)))


def slowest(value):
    """The largest number of all ranks. They find it on the host over gloo, which loads no link between GPUs."""
    value = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def bench(device, sizes=None, seconds=0.5):
    """
    Measure every link in the running process group, which needs gloo for CPU tensors; rank 0 prints the table.

    sizes: bytes of the messages, multiples of 4; None: SIZES, on a CPU those up to 64 MiB. Returns on every rank rows
    of 'link', 'ranks' (in the largest group), 'bytes', 'ms', 'algbw' and 'busbw' (GB/s, 1e9 bytes).
    """
    nodes, rank, rows, done = nodes_of_ranks(), dist.get_rank(), [], {}
    sizes = sizes or [size for size in SIZES if device.type == 'cuda' or size <= LARGEST_ON_CPU]

    def say(*cells):
        if rank == 0:
            print('{:38} {:>8} {:>10} {:>11} {:>11}'.format(*cells, *[''] * (5 - len(cells))).rstrip(), flush=True)

    if rank == 0:
        print(f'all-reduce on {len(nodes)} node(s) of {", ".join(str(len(ranks)) for ranks in nodes)} rank(s)')
    say(*COLUMNS)
    for link, groups in links_between(nodes).items():
        groups = [ranks for ranks in groups if len(ranks) > 1]
        if not groups or str(groups) in done:
            reason = f'the same as {done[str(groups)]}' if groups else 'left out, it has no second member'
            if rank == 0:
                print(f'{link}: {reason}', flush=True)
            continue
        done[str(groups)] = link
        n = max(map(len, groups))
        group, _ = dist.new_subgroups_by_enumeration(groups)  # None on a rank that is in none of them
        for size in sizes:
            took = measure(group, size, device, seconds)
            algbw = size / took / 1e9
            busbw = algbw * 2 * (n - 1) / n
            rows.append({'link': link, 'ranks': n, 'bytes': size, 'ms': took * 1000, 'algbw': algbw, 'busbw': busbw})
            say(f'{link} ({n})', human(size), f'{took * 1000:.3f}', f'{algbw:.3f}', f'{busbw:.3f}')
        if group is not None:
            dist.destroy_process_group(group)
    return rows


def human(size):
    """2**20 -> '1 MiB'."""
    power = min(3, (size.bit_length() - 1) // 10)
    return f'{size / 1024**power:g} {("B", "KiB", "MiB", "GiB")[power]}'


def measure_links(device, sizes=None, seconds=0.5, timeout_s=600):
    """
    Make the process group, measure, print, leave the group. device: torch.device of this rank.

    Returns the rows of bench(). Raises ValueError in a job of one rank.
    """
    if int(os.environ.get('WORLD_SIZE', 1)) < 2:
        raise ValueError(
            'one rank has no link to another: start two or more, such as '
            'torchrun --nproc_per_node=2 benchmarks/links.py; another launcher has to set RANK and WORLD_SIZE'
        )
    backend = 'gloo'
    if device.type == 'cuda':
        torch.cuda.set_device(device)
        backend = 'cpu:gloo,cuda:nccl'
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    if device.type == 'cuda':
        devices.refuse_shared_gpus(device)
    rows = bench(device, sizes, seconds)
    dist.destroy_process_group()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--device', default='auto', help='auto, cpu, cuda or cuda:N (default: %(default)s)')
    parser.add_argument('--largest', type=int, help='bytes of the largest message (default: 64 MiB on a CPU, 256 MiB)')
    arguments = parser.parse_args()
    errors.report_errors(prints_result=True)
    _, local_rank, _ = processes.ranks_from_environment()
    sizes = [size for size in SIZES if size <= arguments.largest] if arguments.largest else None
    measure_links(devices.choose_device(arguments.device, local_rank), sizes)


if __name__ == '__main__':
    main()
