"""
What is packing worth in fine-tuning on conversations? Trains on the same chats, step for step, packed and unpacked.

    python benchmarks/packing.py --init_from=real/smollm2 --dataset=gsm8k --data_dir=data
    python benchmarks/packing.py --init_from=real/smollm2 --dataset=gsm8k --data_dir=data --block_size=512 --steps=10

A step has --sequences sequences of block_size tokens. `packed` packs chats into them as train_ddp.py does. `one in a
row` gives each chat of a sequence a row of its own, padded to the longest of them, as a trainer without packing does.
Each way trains its own model from init_from, in turns step by step, so that a busy machine slows down both. Since
attention stays within a conversation, their losses per learned token have to be equal, else the program stops. Tokens
are those of the conversations, so the work on padding takes time and adds no tokens.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from types import SimpleNamespace

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch

import data
import optim
from huggingface import finetune
from keys import Keys
from system import errors

WAYS = ('packed', 'one in a row')


def chats_of(x, y, starts):
    """[(inputs, targets)] of the conversations in packed sequences, each without its padding."""
    found = []
    for inputs, targets, begins in zip(x, y, starts, strict=True):
        edges = [*begins[begins < len(inputs)].tolist(), len(inputs)]
        for begin, end in itertools.pairwise(edges):
            learned = (targets[begin:end] >= 0).nonzero()
            if len(learned):  # else this is padding
                end = begin + int(learned[-1]) + 1  # a conversation ends with an answer, which is learned
                found.append((inputs[begin:end], targets[begin:end]))
    return found


def in_rows(chats):
    """(x, y) with one conversation per row, padded to the longest."""
    inputs, targets = zip(*chats, strict=True)
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(inputs, batch_first=True), pad(targets, batch_first=True, padding_value=-1)


def print_padding(source):
    """Print how much of a pass over a dataset is padding. Unpacked batches are drawn at random, each of as many chats
    as a packed sequence holds on average."""
    x, y, starts = (torch.from_numpy(part) for part in source.read(range(source.n_windows)))
    lengths = torch.tensor([len(inputs) for inputs, _ in chats_of(x, y, starts)])
    chats, per_batch = len(lengths), round(len(lengths) / len(x))
    batches = lengths[torch.randperm(chats, generator=torch.Generator().manual_seed(1337))].split(per_batch)
    sizes = {'packed': x.numel(), f'{per_batch} in rows': sum(len(batch) * int(batch.max()) for batch in batches)}
    sizes['each in a sequence'] = chats * x.shape[1]
    shares = ', '.join(f'{way} {1 - int(lengths.sum()) / size:.1%}' for way, size in sizes.items())
    print(f'{chats:,} chats, {int(lengths.sum()):,} tokens, {len(x):,} sequences of {x.shape[1]:,}; padding: {shares}')


def build(arguments, dtype):
    """(model, optimizer); the model starts with the weights of the folder."""
    pretrained = finetune.Pretrained(arguments.init_from, block_size=arguments.block_size)
    with torch.device('meta'):
        model = finetune.for_training(pretrained, dtype)
    model.to_empty(device='cpu')
    finetune.load(model, pretrained)
    keys = {key: value for key, value in vars(Keys).items() if not key.startswith('_')}
    config = SimpleNamespace(**keys | {'learning_rate': 1e-5, 'weight_decay': 0.0})
    return model, optim.from_config(model, config, torch.device('cpu'))


def step(model, optimizer, batches):
    """(seconds of an optimizer step over some micro-batches, its loss per learned token)."""
    learned = sum(int((batch[1] >= 0).sum()) for batch in batches)
    began, loss = time.perf_counter(), 0.0
    for batch in batches:
        loss_sum, ce_sum = model(*batch)
        (loss_sum / learned).backward()
        loss += ce_sum.item() / learned
    optim.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - began, loss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--init_from', required=True, help='a Hugging Face folder')
    parser.add_argument('--dataset', required=True, help='conversations that prepare_data.py has made, in data_dir')
    parser.add_argument('--data_dir', default='data')
    parser.add_argument('--block_size', type=int, default=2048)
    parser.add_argument('--sequences', type=int, default=2)
    parser.add_argument('--steps', type=int, default=20, help='0 = only say how much is padding')
    parser.add_argument('--dtype', choices=('float32', 'bfloat16'), default='bfloat16')
    arguments = parser.parse_args()
    errors.report_errors()
    dtype = getattr(torch, arguments.dtype)
    vocab_size = finetune.Pretrained(arguments.init_from).vocab_size
    keys = {'dataset': arguments.dataset, 'data_dir': arguments.data_dir, 'block_size': arguments.block_size}
    mixture = data.open_mixture({**keys, 'dataset_stages': (), 'vocab_size': vocab_size, 'windows': 'stream'}, 'train')
    print_padding(mixture.sources[0])
    if not arguments.steps:
        return
    mixture.plan(arguments.steps, arguments.sequences)
    built = {way: build(arguments, dtype) for way in WAYS}
    batches = data.batches(mixture, 1337, 0, arguments.sequences, 1, 0, 1, 'cpu')

    rates, losses, padding = {way: [] for way in WAYS}, {way: [] for way in WAYS}, {way: [] for way in WAYS}
    for number in range(arguments.steps):
        packed = list(itertools.islice(batches, arguments.sequences))
        chats = [chats_of(*batch) for batch in packed]
        tokens = sum(len(inputs) for in_sequence in chats for inputs, _ in in_sequence)
        work = {'packed': packed, 'one in a row': [in_rows(in_sequence) for in_sequence in chats]}
        for way in WAYS[:: -1 if number % 2 else 1]:
            seconds, loss = step(*built[way], work[way])
            rates[way].append(tokens / seconds)
            losses[way].append(loss)
            padding[way].append(1 - tokens / sum(batch[0].numel() for batch in work[way]))
        apart = abs(losses['packed'][-1] / losses['one in a row'][-1] - 1)
        assert apart < (1e-4 if dtype == torch.float32 else 0.02), f'not the same work in step {number + 1}: {losses}'
        shown = ', '.join(f'{way} {losses[way][-1]:.4f} ({rates[way][-1]:,.0f} tokens/s)' for way in WAYS)
        print(f'step {number + 1}: {sum(map(len, chats))} chats, {tokens:,} tokens; loss {shown}', flush=True)
    batches.close()
    for way in WAYS:
        of_way = rates[way][1:] or rates[way]  # the first step warms up
        print(
            f'{way:13} {statistics.median(of_way):8,.0f} tokens/s ({min(of_way):,.0f} to {max(of_way):,.0f}), '
            f'{statistics.fmean(padding[way]):.1%} padding, loss {statistics.fmean(losses[way]):.4f} over all steps'
        )
    ratios = [ours / theirs for ours, theirs in zip(*rates.values(), strict=True)][1:]
    differences = [abs(ours - theirs) for ours, theirs in zip(*losses.values(), strict=True)]
    print(f'packed: {statistics.median(ratios):.2f}x the tokens/s; losses within {max(differences):.1e} of each other')


if __name__ == '__main__':
    main()
