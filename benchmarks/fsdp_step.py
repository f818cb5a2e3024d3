"""
Is fsdp_manual.py as fast as PyTorch's fully_shard and DistributedDataParallel? Tokens/s of all three, in turns in
the same processes.

    torchrun --nproc_per_node=2 benchmarks/fsdp_step.py               # a 10.9M-parameter model on a CPU, or a GPU
    torchrun --nproc_per_node=8 benchmarks/fsdp_step.py --size=1b --dtype=bfloat16 --zero_stage=2

Each round times `--steps` optimizer steps of each strategy, in an order that changes from round to round. Ratios are
taken within a round, because a machine that is slow for a while is then slow for all of them. On CUDA the peak memory
of each strategy is printed, too.
"""

import argparse
import os
import statistics
import sys
import time
import warnings

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fsdp
import fsdp_manual
from model import GPT, ModelConfig
from system import devices, processes

SIZES = {
    '10m': dict(n_layer=6, n_head=6, n_embd=384, vocab_size=512, block_size=256),
    '124m': dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50304, block_size=1024),
    '1b': dict(arch='llama', n_layer=16, n_head=32, n_kv_head=8, n_embd=2048, mlp_hidden_dim=8192, vocab_size=50304,
               block_size=2048, tie_embeddings=True),
}  # fmt: skip


def build(strategy, arguments, dtype, device):
    """(model, optimizer)."""
    with torch.device('meta'):
        raw = GPT(ModelConfig(**SIZES[arguments.size]), dtype)
    raw.checkpoint_activations(arguments.activation_checkpointing)
    if arguments.compile:
        for block in raw.blocks:
            block.forward = torch.compile(block.forward)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = raw
    if strategy == 'manual':
        model = fsdp_manual.shard(raw, raw.blocks, mesh, dtype, arguments.zero_stage, arguments.prefetch)
    elif strategy == 'torch':
        model = fsdp.by_torch(raw, raw.blocks, mesh, dtype, arguments.zero_stage)
    raw.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in raw.parameters():
            parameter.normal_(std=0.02)
    if strategy == 'ddp':
        model = DistributedDataParallel(raw, gradient_as_bucket_view=True)
    return model, torch.optim.AdamW(raw.parameters(), lr=1e-4, fused=True)


def run(model, optimizer, batches, synchronize):
    """Seconds that one optimizer step per batch takes."""
    dist.barrier()
    synchronize()
    began = time.perf_counter()
    for x, y in batches:
        loss, _ = model(x, y)
        (loss / y.numel()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    synchronize()
    dist.barrier()
    return time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--size', default='10m', choices=SIZES)
    parser.add_argument('--dtype', default='float32', choices=('float32', 'bfloat16'))
    parser.add_argument('--batch_size', type=int, default=4)
    parser.add_argument('--steps', type=int, default=4)
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--zero_stage', type=int, default=3)
    parser.add_argument('--prefetch', type=int, default=1)
    parser.add_argument('--activation_checkpointing', default='none')
    parser.add_argument('--compile', action='store_true')
    parser.add_argument('--strategies', default='manual,torch,ddp')
    arguments = parser.parse_args()

    warnings.filterwarnings('ignore')
    device = devices.choose_device('auto', int(os.environ['LOCAL_RANK']))
    synchronize = torch.cuda.synchronize if device.type == 'cuda' else lambda: None
    if device.type == 'cuda':
        torch.cuda.set_device(device)
    dist.init_process_group('cpu:gloo,cuda:nccl' if device.type == 'cuda' else 'gloo')
    dtype = getattr(torch, arguments.dtype)
    size = SIZES[arguments.size]
    torch.manual_seed(dist.get_rank())
    shape = (arguments.steps, 2, arguments.batch_size, size['block_size'])
    batches = list(torch.randint(0, size['vocab_size'], shape, device=device))

    strategies = arguments.strategies.split(',')
    built, memory = {}, {}
    for strategy in strategies:
        before = torch.cuda.memory_allocated() if device.type == 'cuda' else 0
        built[strategy] = build(strategy, arguments, dtype, device)
        run(*built[strategy], batches[:2], synchronize)  # warm-up: buffers, compilation, optimizer state
        if device.type == 'cuda':
            torch.cuda.reset_peak_memory_stats()
            run(*built[strategy], batches[:2], synchronize)
            memory[strategy] = (torch.cuda.max_memory_allocated() - before) / 1e9
    seconds = {strategy: [] for strategy in strategies}
    for number in range(arguments.rounds):
        order = strategies[number % len(strategies) :] + strategies[: number % len(strategies)]
        for strategy in order[:: -1 if number % 2 else 1]:
            seconds[strategy].append(run(*built[strategy], batches, synchronize))

    if dist.get_rank() == 0:
        tokens = arguments.steps * arguments.batch_size * size['block_size'] * dist.get_world_size()
        print(f'{arguments.size} {arguments.dtype}, {dist.get_world_size()} x {device.type}, {arguments.rounds} rounds')
        for strategy in strategies:
            rates = [tokens / s for s in seconds[strategy]]
            line = f'  {strategy:8} {statistics.median(rates):12,.0f} tokens/s ({min(rates):,.0f} to {max(rates):,.0f})'
            if strategy in memory:
                line += f', peak {memory[strategy]:.2f} GB'
            if strategy != strategies[0]:
                ratios = [theirs / ours for ours, theirs in zip(seconds[strategies[0]], seconds[strategy], strict=True)]
                line += (
                    f'; {strategies[0]} is {statistics.median(ratios):.3f}x ({min(ratios):.2f} to {max(ratios):.2f})'
                )
            print(line)
    processes.leave()


if __name__ == '__main__':
    main()
