"""
Log-likelihoods of many requests by one model, which all ranks of a run share.

    totals = log_likelihoods(model, requests, longest, batch_size, device)  # [[(nats, greedy), ...] of each item]

The requests of an item begin alike: choices share their context, and if they are single letters, all input tokens. To
compute the common beginning once, the requests become one row, a trunk with branches: `Question ... Answer:` | `red` |
`blue`. A token attends to the trunk and to the earlier tokens of its own branch, and has the position that it would
have without the other branches.
"""

import math
import os
from typing import NamedTuple

import torch
import torch.distributed as dist
from tqdm import tqdm

from attention import MaskedAttention
from system import processes

LOGITS_BYTES = {'cpu': 1 << 25, 'cuda': 1 << 28}  # at most, for one chunk of tokens


class Row(NamedTuple):
    tokens: list  # (T): the trunk, then the branches one after the other
    positions: list  # (T)
    branches: list  # (T): number of the branch, 0 = trunk
    wanted: list  # [(place in the row, token whose probability at the next place is wanted, request's number)]


def rows_of(requests, first_number, longest, shares):
    """The requests of one item as Rows of at most `longest` tokens. Requests are numbered from first_number on. shares:
    whether requests may share a row; otherwise each has its own."""
    inputs = [request.tokens[:-1] for request in requests]
    trunk = len(os.path.commonprefix(inputs)) if shares else 0  # works for lists, too
    rows, row = [], None
    for number, (request, tokens) in enumerate(zip(requests, inputs, strict=True), start=first_number):
        branch = tokens[trunk:]
        if row is None or not trunk or len(row.tokens) + len(branch) > longest:
            row = Row(tokens[:trunk], list(range(trunk)), [0] * trunk, [])
            rows.append(row)
        shift = len(row.tokens) - trunk
        row.tokens.extend(branch)
        row.positions.extend(range(trunk, len(tokens)))
        row.branches.extend([1 + shift if trunk else 0] * len(branch))  # a number that no other branch of the row has
        for place in range(len(tokens) - request.n_targets, len(tokens)):
            row.wanted.append((place + shift * (place >= trunk), request.tokens[place + 1], number))
    return rows


def batches_of(rows, batch_size):
    """[[Row, ...] of each batch], the longest rows first, each batch with at most batch_size requests and with rows of
    about equal lengths."""
    batches, count = [], 0
    for row in sorted(rows, key=lambda row: -len(row.tokens)):  # sorted() is stable, so all ranks agree
        size = len({number for _, _, number in row.wanted})
        if not batches or count + size > batch_size:
            batches.append([])
            count = 0
        batches[-1].append(row)
        count += size
    return batches


def tensors_of(rows, device, multiple=1, turning_point=math.inf):
    """(tokens (B, T), tree, places (N), targets (N), requests (N)) of a batch, with T padded to a multiple of
    `multiple`. tree: the rows' attention, or None if no row has branches, and padding changes nothing in front of it.
    places: in the flattened tokens. turning_point: of the model, see rotation.py."""
    T = -(-max(len(row.tokens) for row in rows) // multiple) * multiple

    def padded(lists, value):
        return torch.tensor([[*values, *[value] * (T - len(values))] for values in lists], device=device)

    wanted = [(n * T + place, token, number) for n, row in enumerate(rows) for place, token, number in row.wanted]
    places, targets, numbers = torch.tensor(wanted, device=device).unbind(1)
    tree = None
    if T > turning_point or any(row.branches[-1] for row in rows):
        branches = padded([row.branches for row in rows], -1)
        query, key = branches[:, None, :, None], branches[:, None, None, :]
        tree = MaskedAttention(padded([row.positions for row in rows], 0), ((query == key) | (key == 0)).tril())
    return padded([row.tokens for row in rows], 0), tree, places, targets, numbers


@torch.no_grad()
def log_likelihoods(
    model, requests, longest, batch_size, device, shares=True, bar=None, beat=lambda: None, ranks_per_batch=1
):
    """[[(nats, whether all targets are the likeliest tokens), ...] of each item], the same on every rank. Collective.

    model: as it is called, wrapped or sharded, in eval mode. requests: [[tasks.Request, ...] of each item]. longest:
    the most tokens of a row. batch_size: requests per rank and forward pass. shares: whether the model's attention
    takes rows with branches. bar: the title of a progress bar; None = no bar. beat: called before each forward pass.
    ranks_per_batch: how many neighboring ranks compute each batch together. Batches do not depend on the number of
    ranks, so the log-likelihoods do not, either.
    """
    rank, world_size = dist.get_rank() // ranks_per_batch, dist.get_world_size() // ranks_per_batch
    turning_point = processes.unwrapped(model).turning_point
    flat, rows = [request for item_requests in requests for request in item_requests], []
    first_number = 0
    for item_requests in requests:
        # Beyond the turning point, branches of other lengths would want their trunk rotated in other ways.
        may_share = shares and max(len(request.tokens) for request in item_requests) <= turning_point
        rows += rows_of(item_requests, first_number, longest, may_share)
        first_number += len(item_requests)
    batches = batches_of(rows, batch_size)
    totals = torch.zeros(2, len(flat), dtype=torch.float64, device=device)  # nats, and how many targets are likeliest
    has_bar = bar and dist.get_rank() == 0
    for first in tqdm(range(0, len(batches), world_size), desc=bar, disable=None if has_bar else True):
        beat()
        mine = first + rank
        # Every rank makes equally many forward passes, because sharded models gather weights in them. One without a
        # batch left computes the last one again, and its result is not counted.
        batch = batches[min(mine, len(batches) - 1)]
        tokens, tree, places, targets, numbers = tensors_of(batch, device, ranks_per_batch, turning_point)

        def score(hidden, logits_of, places=places, targets=targets):
            return score_tokens(hidden.flatten(0, 1)[places], logits_of, targets)

        nats, is_likeliest = model(tokens, attention=tree, then=score)
        if mine < len(batches):
            totals[0].index_add_(0, numbers, nats.double())
            totals[1].index_add_(0, numbers, is_likeliest.double())
    processes.reshard(model)  # free what forward left gathered, as there is no backward pass to do it
    dist.all_reduce(totals)
    totals /= ranks_per_batch  # as many ranks have counted each request
    found = iter([(nats, hits == r.n_targets) for nats, hits, r in zip(*totals.tolist(), flat, strict=True)])
    return [[next(found) for _ in item_requests] for item_requests in requests]


def score_tokens(hidden, logits_of, tokens):
    """(log-probability (N) of each token given hidden (N, C), whether it is the likeliest token (N)). Computed in
    chunks, so that the logits of all tokens never exist at once. logits_of: from (n, C) to (n, V)."""
    columns = logits_of(hidden[:1]).shape[1]
    most = max(1, LOGITS_BYTES['cpu' if hidden.is_cpu else 'cuda'] // (4 * columns))
    scores = []
    for some, targets in zip(hidden.split(most), tokens.split(most), strict=True):
        log_probs = torch.log_softmax(logits_of(some), -1, dtype=torch.float32)
        found = log_probs.gather(1, targets[:, None])[:, 0]
        scores.append((found, log_probs.argmax(-1) == targets))
    return [torch.cat(parts) for parts in zip(*scores, strict=True)]
