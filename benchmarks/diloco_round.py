"""
What does an outer step of DiLoCo cost besides the exchange? The time of its arithmetic and its memory, on a CPU, with
one replica and no link.

    python benchmarks/diloco_round.py                                         # about 25 million parameters
    python benchmarks/diloco_round.py --numbers=100_000_000 --rounds=5

Each round times an outer step (the pseudo-gradient, the update, and resetting the parameters to the result) and, beside
it, the same arithmetic as one pass of torch._foreach_* over whole tensors. Which of the two goes first alternates, and
a ratio is taken within a round.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import torch.distributed as dist

import diloco
from system import processes

LR, MOMENTUM = 0.7, 0.9


def make_parameters(numbers):
    """{name: parameter} as in a model: a sixth of the numbers in an embedding, the rest in blocks."""
    width = 64 * max(1, round((numbers / 100) ** 0.5 / 64))
    shapes = {'embed': (numbers // 6 // width, width)}
    blocks = (numbers - numbers // 6) // (12 * width**2 + 2 * width) or 1
    for block in range(blocks):
        shapes |= {
            f'blocks.{block}.{name}': shape
            for name, shape in (
                ('norm', (width,)),
                ('qkv', (3 * width, width)),
                ('proj', (width, width)),
                ('mlp_norm', (width,)),
                ('up', (4 * width, width)),
                ('down', (width, 4 * width)),
            )
        }
    return {name: torch.nn.Parameter(torch.rand(shape)) for name, shape in shapes.items()}


def outer_step(theta, pseudo_gradient, momentum):
    """As in train_diloco.py."""
    momentum.mul_(MOMENTUM).add_(pseudo_gradient)
    theta.sub_(pseudo_gradient, alpha=LR).sub_(momentum, alpha=LR * MOMENTUM)


def plain_pass(parameters, anchors, momenta):
    """The same arithmetic over all tensors at once, which needs memory for all differences at the same time."""
    deltas = torch._foreach_sub(anchors, parameters)
    torch._foreach_mul_(momenta, MOMENTUM)
    torch._foreach_add_(momenta, deltas)
    torch._foreach_sub_(anchors, deltas, alpha=LR)
    torch._foreach_sub_(anchors, momenta, alpha=LR * MOMENTUM)
    torch._foreach_copy_(parameters, anchors)


def resident(key):
    """VmRSS or VmHWM (the peak since forget_peak()) of this process, in bytes."""
    line = next(line for line in Path('/proc/self/status').read_text().splitlines() if line.startswith(key))
    return 1024 * int(line.split()[1])


def forget_peak():
    Path('/proc/self/clear_refs').write_text('5')


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--numbers', type=int, default=25_000_000)
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--bucket', type=int, default=diloco.BUCKET)
    arguments = parser.parse_args()

    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    parameters = make_parameters(arguments.numbers)
    numbers = sum(parameter.numel() for parameter in parameters.values())
    without = resident('VmRSS')
    outer = diloco.Outer(parameters, outer_step, dist.group.WORLD, inner_steps=1, bucket=arguments.bucket)
    outer.fragments[0].momentum.zero_()  # a new tensor of zeros takes no memory until something is written to it
    with_states = resident('VmRSS')
    forget_peak()
    outer.send(outer.fragments[0], 1)
    peak = resident('VmHWM')

    plain = [parameter.detach().clone() for parameter in parameters.values()]
    anchors = [tensor.clone() for tensor in plain]
    momenta = [torch.zeros_like(tensor) for tensor in plain]

    def run(what):
        began = time.perf_counter()
        if what == 'outer':
            outer.send(outer.fragments[0], 1)
        else:
            plain_pass(plain, anchors, momenta)
        return time.perf_counter() - began

    seconds = {'outer': [], 'plain': []}
    for number in range(-2, arguments.rounds):  # two rounds to warm up
        for what in ('outer', 'plain')[:: -1 if number % 2 else 1]:
            took = run(what)
            if number >= 0:
                seconds[what].append(took)
    ratios = [ours / theirs for ours, theirs in zip(seconds['outer'], seconds['plain'], strict=True)]
    copy = 4 * numbers
    print(f'{numbers:,} parameters, {len(parameters)} tensors, {arguments.rounds} rounds, bucket {arguments.bucket:,}')
    for what, name in (('outer', 'outer step'), ('plain', '_foreach_* pass')):
        print(
            f'  {name:16} {1000 * statistics.median(seconds[what]):8.1f} ms ({1000 * min(seconds[what]):.1f} at best)'
        )
    print(f'  ratio            {statistics.median(ratios):8.2f} ({min(ratios):.2f} to {max(ratios):.2f})')
    print(f'  anchors, momentum {(with_states - without) / 1e6:7.1f} MB = {(with_states - without) / copy:.2f} copies')
    extra = (peak - with_states) / (4 * arguments.bucket)
    print(f'  peak of the step {(peak - without) / 1e6:8.1f} MB: {extra:.1f} buckets more')
    processes.leave()


if __name__ == '__main__':
    main()
