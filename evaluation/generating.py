"""
Answers of a model to many prompts, which all ranks of a run share.

    texts = write_answers(model, prompts, encoder, batch_size, device)  # [text of each tasks.Prompt]

A sharded model gathers weights in each forward pass, so all ranks have to make equally many passes, although their
answers differ in length. Before each pass the ranks therefore count how many of them still write. A rank that has
finished runs the model on a dummy token until all are done.
"""

import functools

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from evaluation import sampling
from system import processes


def batches_of(prompts, batch_size):
    """[[index into prompts, ...] of each batch], the longest prompts first. The prompts of a batch have about equal
    lengths, and the same stop texts and max_new_tokens."""
    batches = []
    for number in sorted(range(len(prompts)), key=lambda number: (prompts[number][1:], -len(prompts[number].tokens))):
        last = batches[-1] if batches else []
        if not last or len(last) == batch_size or prompts[last[0]][1:] != prompts[number][1:]:
            batches.append([])
        batches[-1].append(number)
    return batches


def ends(ids, stop, encoder):
    """Whether the text of the ids contains one of the texts `stop`. A look at its end is enough: it is called after
    each token, and a token has at least one byte."""
    longest = max(len(text.encode()) for text in stop)
    text = encoder.decode(ids[-longest - 8 :])
    return any(end in text for end in stop)


@torch.no_grad()
def write_answers(model, prompts, encoder, batch_size, device, bar=None, beat=lambda: None):
    """[text of each prompt, without the stop text that ended it], the same on every rank. Each token is the likeliest
    one. Collective.

    model: as it is called, wrapped or sharded, in eval mode. prompts: [tasks.Prompt]. encoder: one of tasks.py.
    batch_size: prompts per rank and forward pass. bar: the title of a progress bar; None = no bar. beat: called before
    each forward pass. Batches do not depend on the number of ranks, so the texts do not, either. Raises
    sampling.NotFinite on all ranks.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = model.module if isinstance(model, DistributedDataParallel) else model  # DDP: every rank has all weights
    batches, busy, written = batches_of(prompts, batch_size), torch.zeros(1, device=device), {}
    problem = None  # raised on all ranks together, since the others count on this one's passes

    def count_the_busy(is_busy):
        beat()
        busy.fill_(is_busy)
        dist.all_reduce(busy)
        return busy.item()

    # This hook runs before FSDP's, which gathers weights, because ranks without work count before their pass, too.
    hook = model.register_forward_pre_hook(lambda *_: count_the_busy(1) and None, prepend=True)
    for numbers in tqdm(batches[rank::world_size], desc=bar, disable=None if bar and rank == 0 else True):
        _, stop, longest = prompts[numbers[0]]
        stops = {'stop': functools.partial(ends, stop=stop, encoder=encoder)} if stop else {}
        stop_tokens = [*encoder.stop_tokens, *encoder.tokens_spelled(stop)]
        tokens = [prompts[number].tokens for number in numbers]
        try:
            found = sampling.generate_batch(model, tokens, longest, stop_tokens, **stops)
        except sampling.NotFinite as error:
            problem = str(error)
            break
        for number, ids in zip(numbers, found, strict=True):
            text = encoder.decode(ids)
            for end in stop:
                text = text.partition(end)[0]
            written[number] = text
    hook.remove()
    while count_the_busy(0):
        model(torch.zeros(1, 1, dtype=torch.int64, device=device), then=lambda hidden, _: hidden)
    processes.reshard(model)  # free what forward left gathered, as there is no backward pass to do it
    of_ranks = [None] * world_size
    dist.all_gather_object(of_ranks, (written, problem))
    if problems := [problem for _, problem in of_ranks if problem]:
        raise sampling.NotFinite(problems[0])
    whole = {number: text for part, _ in of_ranks for number, text in part.items()}
    return [whole[number] for number in range(len(prompts))]
