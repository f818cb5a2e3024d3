"""
What a model writes behind many prompts, on all ranks of a run.

    texts = write_answers(model, prompts, encoder, batch_size, device)  # [text of each tasks.Prompt]

A sharded model gathers weights in each forward pass, so all ranks have to make equally many; but answers end when they
end. So before each pass the ranks count how many of them still write. One that has nothing left makes a pass over a
token that nobody asks for, until all are done.
"""

import functools

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from evaluation import sampling
from runtime import processes


def batches_of(prompts, batch_size):
    """Lists of numbers of prompts whose answers end alike, with about equal lengths, the longest first."""
    batches = []
    for number in sorted(range(len(prompts)), key=lambda number: (prompts[number][1:], -len(prompts[number].tokens))):
        last = batches[-1] if batches else []
        if not last or len(last) == batch_size or prompts[last[0]][1:] != prompts[number][1:]:
            batches.append([])
        batches[-1].append(number)
    return batches


def ends(ids, stop, encoder):
    """Whether what is written holds one of the texts `stop`; of that its end alone is looked at, for a token has a byte
    or more, and earlier ones have been looked at before."""
    longest = max(len(text.encode()) for text in stop)
    text = encoder.decode(ids[-longest - 8 :])
    return any(end in text for end in stop)


@torch.no_grad()
def write_answers(model, prompts, encoder, batch_size, device, bar=None, beat=lambda: None):
    """[text of each prompt, without what ends it], on every rank; each token is the likeliest one. Collective.

    model: as it is called, wrapped or sharded, in eval mode. prompts: tasks.Prompt. encoder: of tasks. batch_size:
    prompts per rank and forward pass. bar: its title, to draw one. beat: called before each forward pass. Batches do
    not depend on the number of ranks, so neither do the texts.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = model.module if isinstance(model, DistributedDataParallel) else model  # every rank has all weights
    batches, busy, written = batches_of(prompts, batch_size), torch.zeros(1, device=device), {}

    def count_the_busy(is_busy):
        beat()
        busy.fill_(is_busy)
        dist.all_reduce(busy)
        return busy.item()

    # Before FSDP's hook, which gathers weights: ranks without work count first, too.
    hook = model.register_forward_pre_hook(lambda *_: count_the_busy(1) and None, prepend=True)
    for numbers in tqdm(batches[rank::world_size], desc=bar, disable=None if bar and rank == 0 else True):
        _, stop, longest = prompts[numbers[0]]
        stops = {'stop': functools.partial(ends, stop=stop, encoder=encoder)} if stop else {}
        stop_tokens = [*encoder.stop_tokens, *encoder.tokens_spelled(stop)]
        tokens = [prompts[number].tokens for number in numbers]
        found = sampling.generate_batch(model, tokens, longest, stop_tokens, **stops)
        for number, ids in zip(numbers, found, strict=True):
            text = encoder.decode(ids)
            for end in stop:
                text = text.partition(end)[0]
            written[number] = text
    hook.remove()
    while count_the_busy(0):
        model(torch.zeros(1, 1, dtype=torch.int64, device=device), then=lambda hidden, _: hidden)
    processes.reshard(model)  # free what forward left gathered, for no backward pass will
    of_ranks = [None] * world_size
    dist.all_gather_object(of_ranks, written)
    whole = {number: text for part in of_ranks for number, text in part.items()}
    return [whole[number] for number in range(len(prompts))]
