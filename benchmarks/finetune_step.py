"""
How fast is fine-tuning here beside a plain loop around the same transformers model, and what memory does the loss take?

    python benchmarks/finetune_step.py              # Llamas of 11 and 23 million parameters, one process, on a CPU
    python benchmarks/finetune_step.py --dtypes=bfloat16 --rounds=15

Three ways to train are timed, each with fp32 weights. `plain` is the loop that transformers documents: the model's own
loss, fused AdamW, autocast for bf16. `whole` is our model as in train_ddp.py, and `manual` the same sharded as in
train_fsdp.py --fsdp_impl=manual; both run on one rank. Each round times `--steps` optimizer steps of each way, in an
order that changes from round to round, and a ratio is taken within a round.

Then the loss over a vocabulary of 128,256 is computed in chunks and with all logits at once, each in a fresh process.
Its memory is the anonymous memory above what the head and the hidden states take.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

import fsdp_manual
from huggingface import finetune
from system import devices, processes

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHAPE = dict(num_hidden_layers=6, hidden_size=384, intermediate_size=1024, num_attention_heads=6, num_key_value_heads=2)
VOCABULARIES = (2048, 16384)
KINDS = ('whole', 'manual', 'plain')


def build(kind, folder, dtype):
    """(model, its loss as a function of x and y, optimizer)."""
    if kind == 'plain':
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()

        def loss(x, y):
            with torch.autocast('cpu', dtype, enabled=dtype != torch.float32):
                return model(input_ids=x, labels=y, shift_labels=y, use_cache=False).loss  # y is shifted already

    else:
        pretrained = finetune.Pretrained(folder)
        with torch.device('meta'):
            model = finetune.for_training(pretrained, dtype)
        if kind == 'manual':
            fsdp_manual.shard(model, model.blocks, init_device_mesh('cpu', (1,)), dtype)
        model.to_empty(device='cpu')
        finetune.load(model, pretrained)

        def loss(x, y):
            return model(x, y)[0] / y.numel()

    return model, loss, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def run(loss, optimizer, batches):
    """Seconds that one optimizer step per batch takes, and the last loss."""
    began = time.perf_counter()
    for x, y in batches:
        value = loss(x, y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - began, value.item()


def compare_speed(vocabulary, dtype, arguments):
    """Print tokens/s of each, and the ratios to the plain loop, by pairs."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=vocabulary, max_position_embeddings=arguments.block_size, **SHAPE)
    shape = (arguments.steps, 2, arguments.batch_size, arguments.block_size)
    batches = list(torch.randint(vocabulary, shape))
    with tempfile.TemporaryDirectory() as folder:
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder)
        built = {kind: build(kind, folder, dtype) for kind in KINDS}
    seconds, losses = {kind: [] for kind in KINDS}, {}
    for number in range(arguments.rounds + 1):
        order = KINDS[number % len(KINDS) :] + KINDS[: number % len(KINDS)]
        for kind in order[:: -1 if number % 2 else 1]:
            taken, losses[kind] = run(*built[kind][1:], batches)
            seconds[kind] += [taken] if number else []  # the first round warms up
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    assert all(abs(loss / losses['plain'] - 1) < tolerance for loss in losses.values()), f'not the same work: {losses}'
    tokens = arguments.steps * arguments.batch_size * arguments.block_size
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f'{parameters / 1e6:.0f}M parameters, vocabulary {vocabulary:,}, {str(dtype).removeprefix("torch.")}')
    for kind in KINDS:
        rates = [tokens / s for s in seconds[kind]]
        line = f'  {kind:8} {statistics.median(rates):10,.0f} tokens/s ({min(rates):,.0f} to {max(rates):,.0f})'
        if kind != 'plain':
            ratios = [theirs / ours for ours, theirs in zip(seconds[kind], seconds['plain'], strict=True)]
            line += f'; {statistics.median(ratios):.3f}x the plain loop ({min(ratios):.2f} to {max(ratios):.2f})'
        print(line, flush=True)


def compare_memory(tokens, width, vocabulary):
    """Print the peak memory of a loss over this vocabulary, forward and backward, in chunks and with all logits."""
    peaks = {}
    for kind in ('chunked', 'full'):
        with tempfile.NamedTemporaryFile('r') as result:
            arguments = ['loss', kind, tokens, width, vocabulary, result.name]
            command = [
                sys.executable,
                os.path.join(REPO, 'tests', 'huggingface', 'test_finetune_runs.py'),
                *map(str, arguments),
            ]
            subprocess.run(command, check=True)
            peaks[kind] = json.load(result)[0] / 1e6
    print(
        f'loss of {tokens:,} tokens x {width} over {vocabulary:,}: {peaks["full"]:,.0f} MB with all logits, '
        f'{peaks["chunked"]:,.0f} MB in chunks, {peaks["full"] / peaks["chunked"]:.1f}x less'
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--dtypes', default=None, help='float32,bfloat16; all that the CPU has')
    parser.add_argument('--batch_size', type=int, default=4)
    parser.add_argument('--block_size', type=int, default=256)
    parser.add_argument('--steps', type=int, default=3)
    parser.add_argument('--rounds', type=int, default=9)
    arguments = parser.parse_args()

    warnings.filterwarnings('ignore')
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    has_bfloat16 = devices.choose_dtype('auto', torch.device('cpu')) == torch.bfloat16
    dtypes = arguments.dtypes or ('float32,bfloat16' if has_bfloat16 else 'float32')
    print(f'{torch.get_num_threads()} threads, {arguments.rounds} rounds')
    for vocabulary in VOCABULARIES:
        for dtype in dtypes.split(','):
            compare_speed(vocabulary, getattr(torch, dtype), arguments)
    compare_memory(4096, 512, 128_256)
    processes.leave()


if __name__ == '__main__':
    main()
