"""
Milliseconds of an optimizer's step beside torch.optim.AdamW(fused=True), each on 19M parameters, in turns.

    python benchmarks/optimizer_step.py                       # every optimizer, eager
    python benchmarks/optimizer_step.py --compile adana       # compiled, these only
    OMP_NUM_THREADS=1 python benchmarks/optimizer_step.py     # with one thread

Each round times every optimizer once; printed is the smallest of the rounds' times, and the ratio to fused AdamW's.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import optim

C, LAYERS, ROUNDS = 512, 6, 15  # the blocks of Enoki with 8 heads: 12 * 512^2 * 6 = 18,874,368 parameters


def blocks():
    sizes = [(C, 3 * C), (C, C), (C, 4 * C), (4 * C, C)]  # qkv, proj, up, down
    layers = [nn.Linear(*size, bias=False) for _ in range(LAYERS) for size in sizes]
    return nn.Sequential(*layers, *(nn.LayerNorm(C, bias=False) for _ in range(2 * LAYERS)))


def step_ms(optimizer):
    start = time.perf_counter()
    optimizer.step()
    return 1e3 * (time.perf_counter() - start)


def main():
    others = [name for name in optim.OPTIMIZERS if name not in ('adamw', 'muon')]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('names', nargs='*', default=others, metavar='optimizer', help=', '.join(others))
    parser.add_argument('--compile', action='store_true')
    given = parser.parse_args()
    names = ['adamw', *given.names]
    optimizers = {}
    for name in names:
        model = blocks()
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        keys = dict(learning_rate=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.01, wd_ts=100)
        optimizers[name] = optim.make_optimizer(model, name, **keys, compile=given.compile)
        first = step_ms(optimizers[name]), step_ms(optimizers[name])
        print(f'{name}: first step {first[0] / 1e3:.1f} s, {sum(p.numel() for p in model.parameters()):,} parameters')
    times = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name in names:
            times[name].append(step_ms(optimizers[name]))
    print(f'{torch.get_num_threads()} threads')
    for name in names:
        best = min(times[name])
        print(f'{name:15} {best:7.1f} ms   {best / min(times["adamw"]):.2f} x fused AdamW')


if __name__ == '__main__':
    main()
