"""
How long does a step of each optimizer take beside fused AdamW's? Each updates 19M parameters, in turns.

    python benchmarks/optimizer_step.py                       # every optimizer, eager
    python benchmarks/optimizer_step.py --compile adana       # compiled, and only this one
    OMP_NUM_THREADS=1 python benchmarks/optimizer_step.py     # with one thread
    python benchmarks/optimizer_step.py --dispatch            # what 290 tiny sharded tensors cost the host

Each round times every optimizer once. Printed are the smallest time of all rounds and its ratio to that of AdamW, which
optim.py computes by PyTorch's fused kernel. --dispatch compares AdamW and clipping of optim.py with torch's own.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

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


def dispatch():
    """Print the milliseconds that AdamW and clipping take the host on 290 DTensors of 8 x 8, ours and torch's."""
    torch.set_num_threads(1)
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh('cpu', (1,))
    model = nn.ParameterList(
        nn.Parameter(DTensor.from_local(torch.randn(8, 8), mesh, [Shard(0)], run_check=False)) for _ in range(290)
    )
    for parameter in model:
        parameter.grad = 0.1 * parameter.detach()
    ours = optim.make_optimizer(model, 'adamw', learning_rate=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1)
    calls = {
        'torch.optim.AdamW(fused=True).step()': torch.optim.AdamW(model, lr=1e-3, fused=True).step,
        'optim.AdamW.step()': ours.step,
        'torch.nn.utils.clip_grad_norm_()': lambda: nn.utils.clip_grad_norm_(model, 1.0),
        'optim.clip_grad_norm_()': lambda: optim.clip_grad_norm_(model, 1.0),
    }
    times = {name: [] for name in calls}
    for _ in range(30):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))
    for name, call_ms in times.items():
        print(f'{name:38} {min(call_ms):6.2f} ms')


def main():
    others = [name for name in optim.OPTIMIZERS if name not in ('adamw', 'muon')]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('names', nargs='*', default=others, metavar='optimizer', help=', '.join(others))
    parser.add_argument('--compile', action='store_true')
    parser.add_argument('--dispatch', action='store_true')
    given = parser.parse_args()
    if given.dispatch:
        return dispatch()
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
