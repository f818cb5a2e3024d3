"""
What a run reads and in which order: one dataset or a mixture of several, and batches that are made ahead of time.

    train_data = data.open_mixture(vars(config), 'train')  # dataset = 'web' or 'web:0.7,code:0.3'
    train_data.plan(max_iters, global_batch_size)
    for x, y in batches(train_data, seed, first_sample, global_batch_size, batch_size, rank, world_size, device): ...

Sample i of a run is one window of one dataset. It depends on (seed, i, shares) alone, not on the number of ranks:

    sample i  ->  sample n of a source, in the order in which sources take turns (dataset/mixture.py)
              ->  window w of that source, by a shuffle of n (dataset/shuffle.py)
              ->  its tokens (dataset/windows.py, packed.py)

So there is no loader state to save, because the step in a checkpoint says where to go on. Every source has epochs of
its own, each in a new order.
"""

import bisect
import collections
import functools
import itertools
import math
import operator
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from dataset.mixture import MAX_EPOCHS, SourceOrder, names_in, parse_stages
from dataset.opening import TOKEN_BYTES, Absent, has_split, is_absent, open_dataset, read_meta
from dataset.shards import read_shard
from dataset.shuffle import permuted
from system.errors import one_line

BATCHES_AHEAD = 8  # batches made ahead while the model computes
SAMPLES_AT_ONCE = 1024  # located together, because numpy takes as long for 12 numbers as for 500


class Mixture:
    """One split of one dataset, or of several in shares that may change during the run.

    sources: {name: dataset}. stages: [(start, {name: share})], see parse_stages(). ranks_per_sequence: this many
    consecutive ranks read the same samples (context_manual.py, tensor_manual.py). Attributes: n_tokens and n_windows
    are totals over all sources; has_starts says that rows hold several documents each, so batches are (x, y, starts);
    changes: the steps from which on other shares are read; filled: the share of the run's positions that hold tokens,
    and not padding. Call plan() before the first batch.
    """

    def __init__(self, sources, stages, ranks_per_sequence=1):
        self.names, self.sources, self.stages = list(sources), list(sources.values()), stages
        self.ranks_per_sequence = ranks_per_sequence
        self.n_tokens = sum(source.n_tokens for source in self.sources)
        self.n_windows = sum(source.n_windows for source in self.sources)
        self.vocab_size = max(source.vocab_size for source in self.sources)
        self.is_packed = any(source.is_packed for source in self.sources)
        self.is_chat = any(source.is_chat for source in self.sources)
        self.is_pairs = self.sources[0].is_pairs
        self.is_absent = any(source.is_absent for source in self.sources)
        self.block_size = self.sources[0].block_size
        self.has_starts = any(source.is_packed and (source.packing or source.is_pairs) for source in self.sources)
        if self.is_packed:
            self.n_starts = max(source.n_starts for source in self.sources)
            for source in self.sources:
                source.n_starts = self.n_starts

    def plan(self, max_iters, global_batch_size):
        """Compute where stages begin. Returns them for a checkpoint, as [[first step, {fingerprint: share as text}]].

        Raises ValueError unless each stage begins after the one before it.
        """
        self.global_batch_size, self.total = global_batch_size, max_iters * global_batch_size
        steps = [start if isinstance(start, int) else round(start * max_iters) for start, _ in self.stages]
        if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
            raise ValueError(f'dataset_stages begin at the steps {steps[1:]}: expected one after another, from 1 on')
        self.orders, planned = [], []
        for step, (_, shares) in zip(steps, self.stages, strict=True):
            first = step * global_batch_size
            counted = self.orders[-1].counts(first) if self.orders else np.zeros(len(self.sources), dtype=np.int64)
            # Sorted by fingerprint, so that neither names nor the order in which they are given change the samples.
            numbers = [self.names.index(name) for name in shares]
            numbers.sort(key=lambda number: self.sources[number].fingerprint)
            by_number = {number: shares[self.names[number]] for number in numbers}
            self.orders.append(SourceOrder(first, by_number, counted))
            planned.append([step, {self.sources[number].fingerprint: str(by_number[number]) for number in numbers}])
        self.changes = steps[1:]
        shares = (self.counts(self.total) / self.total).tolist()
        self.filled = 1 - sum(share * source.padding for share, source in zip(shares, self.sources, strict=True))
        return planned

    def lines(self):
        """The plan in words, for the log."""
        lines, is_mixture = [source.line for source in self.sources if source.line], len(self.sources) > 1
        for order, (_, shares) in zip(self.orders, self.stages, strict=True) if is_mixture else ():
            in_words = ', '.join(f'{name} {float(share):.4g}' for name, share in shares.items())
            never = 'WARNING: the run ends before: ' if order.first >= self.total else ''
            lines.append(f'{never}from step {order.first // self.global_batch_size}: {in_words}')
        passes = self.passes()
        for name, source, count in zip(self.names, self.sources, self.counts(self.total), strict=True):
            if name not in passes:
                continue
            line = f'{name}: {count:,} samples of {source.n_windows:,} windows, {passes[name]:.2f} epochs'
            is_often = passes[name] > MAX_EPOCHS
            if is_often and not is_mixture and not self.is_chat:
                line += f'; after {MAX_EPOCHS} text that is read again teaches little'
            lines.append(line)
            if is_often and is_mixture:
                lines.append(
                    f'WARNING: {name} is too small for its share: {passes[name]:.1f} epochs, and after {MAX_EPOCHS} '
                    'text that is read again teaches little; give it a smaller share, more text, or fewer --max_iters'
                )
        return lines

    def counts(self, n):
        """How many of the run's first n samples come from each source; int64 (sources,)."""
        return self.orders[bisect.bisect_right([order.first for order in self.orders], n) - 1].counts(n)

    def passes(self):
        """{name of a source: epochs over it in the whole run}, of those whose size is known and that end."""
        counted = zip(self.names, self.sources, self.counts(self.total).tolist(), strict=True)
        return {
            name: count / source.n_windows
            for name, source, count in counted
            if math.isfinite(source.n_windows) and self.names != ['synthetic']
        }

    def epochs(self, n):
        """{'epochs/web': passes over that source in the run's first n samples, ...}; {} of a single dataset."""
        if len(self.sources) == 1:
            return {}
        counts = self.counts(n).tolist()
        return {
            f'epochs/{name}': count / source.n_windows
            for name, source, count in zip(self.names, self.sources, counts, strict=True)
        }

    def locate(self, slots, seed):
        """(source, window) of each slot of the run; slot j of step s is s * global_batch_size + j. int64, same shape.

        The samples of a step are shuffled over its slots. Otherwise, as shares and ranks often have common factors, one
        rank might read one source only: with web:0.5,code:0.5 rank 0 of 2 would never read code.
        """
        sources, windows = np.empty_like(slots), np.empty_like(slots)
        order_of_slot = np.searchsorted([order.first for order in self.orders], slots, side='right') - 1
        for number, order in enumerate(self.orders):
            here = order_of_slot == number
            samples = slots[here]
            if len(order.table) > 1:
                first_of_step = samples - samples % self.global_batch_size
                samples = first_of_step + permuted(samples, self.global_batch_size, ~seed)
            sources[here], windows[here] = order.locate(samples)
        for number, source in enumerate(self.sources):
            here = sources == number
            windows[here] = permuted(windows[here], source.n_windows, seed)
        return sources, windows

    def count_targets(self, seed, first, n):
        """Targets with y >= 0 in the slots first .. first + n - 1 of a run, exactly; of pairs, how many of these."""
        if not self.is_packed:
            return n * self.block_size
        sources, windows = self.locate(first + np.arange(n), seed)
        return sum(
            int(source.n_targets[windows[sources == number]].sum()) for number, source in enumerate(self.sources)
        )

    def windows_to_evaluate(self, n_sequences):
        """How many windows of each source are evaluated, its first ones, if about n_sequences are asked for in all."""
        return [min(-(-n_sequences // len(self.sources)), source.n_windows) for source in self.sources]

    def losses(self, sums, n_sequences, metrics=()):
        """Metrics of an evaluation, from [sum of the losses, number of targets] of each source over the windows of
        eval_batches(..., n_sequences, ...). metrics: names of other sums that stand between the two.

        With several sources each has a loss of its own, and val_loss weights them by their shares in the whole run.
        """
        weights = (self.counts(self.total) / self.total).tolist()
        means = [[total / number for total in totals] for *totals, number in sums]
        losses = [of_source[0] for of_source in means]
        loss, *others = (sum(map(operator.mul, weights, column)) for column in zip(*means, strict=True))
        row = {'val_loss': loss, **dict(zip(metrics, others, strict=True))}
        if not self.is_pairs:  # whose loss is not that of a token
            row['val_ppl'] = math.exp(min(loss, 700))
        bytes_per_token = [
            bytes_per_target(source, windows)
            for source, windows in zip(self.sources, self.windows_to_evaluate(n_sequences), strict=True)
        ]
        if all(bytes_per_token):
            mean = sum(weight * size for weight, size in zip(weights, bytes_per_token, strict=True))
            row['val_bpb'] = loss / math.log(2) / mean
        if len(self.sources) > 1:
            row |= {f'val_loss/{name}': loss for name, loss in zip(self.names, losses, strict=True)}
        return row


@functools.cache
def bytes_per_target(source, n_windows):
    """Mean bytes of text of the targets in a dataset's first windows, counted once on rank 0, which logs them; None on
    others, for conversations, whose templates are no text, and if the tokens of the tokenizer cannot be looked up."""
    if source.is_chat or os.environ.get('RANK', '0') != '0' or 'tokenizer' not in read_meta(Path(source.name)):
        return None
    counts, table = source.count_ids(n_windows), os.path.join(source.name, TOKEN_BYTES)
    ids = np.flatnonzero(counts)
    if os.path.exists(table):
        sizes = read_shard(table)
        if len(ids) and ids[-1] >= len(sizes):
            raise ValueError(f'{table} has {len(sizes):,} tokens, the data {ids[-1] + 1:,}: delete it')
        sizes = sizes[ids].astype(np.int64)
    else:  # of a dataset of an earlier version
        from text.tokenizer import tokenizer_of

        try:
            sizes = np.array(tokenizer_of(source.name).count_bytes(ids.tolist()))
        except (ValueError, OSError) as error:
            print(f'no bits per byte: {one_line(error)}', flush=True)
            return None
    return (counts[ids] @ sizes).item() / counts.sum().item()


def open_mixture(keys, split):
    """
    The Mixture that a run's keys describe. Raises ValueError, also if sources do not go together.

    split: 'train', 'val', or 'whole': the 'val' split of each dataset, or 'train' if it has no other, like a test set.
    """
    stages = parse_stages(keys)

    def open_source(name):
        own = split if split != 'whole' else 'val' if has_split(keys['data_dir'], name, 'val') else 'train'
        is_planned = keys.get('dry_run') and is_absent(keys['data_dir'], name)
        is_planned = is_planned and 'simpo_gamma' not in keys  # of train_dpo.py, which counts the pairs
        if is_planned and keys.get('gpu'):
            return Absent(os.path.join(keys['data_dir'], name), own, keys['block_size'], keys['vocab_size'])
        options = {'windows': keys['windows'], 'packing': keys.get('packing') is not False}
        try:
            return open_dataset(keys['data_dir'], name, own, keys['block_size'], keys['vocab_size'], **options)
        except FileNotFoundError as error:
            hint = '; the plan for a card, as --gpu=H100, needs no data' if is_planned else ''
            raise FileNotFoundError(f'{error}{hint}') from None

    sources = {name: open_source(name) for name in names_in(stages)}
    first, *others = sources.values()
    before = [first.name]
    for source in others:
        from text.tokenizer import as_argument, same_tokenizer  # here: one dataset has one tokenizer

        if not same_tokenizer(*before, source.name) or source.vocab_size != first.vocab_size:
            raise ValueError(
                f'{source.name} has the tokens of another tokenizer than {" and ".join(before)}: prepare it with '
                f'`python prepare_data.py --dataset=... --name=... --tokenizer={as_argument(*before)}`'
            )
        if source.is_pairs != first.is_pairs:
            pairs, other = (source, first) if source.is_pairs else (first, source)
            raise ValueError(f'{pairs.name} holds pairs of answers, and {other.name} does not: they cannot be mixed')
        if source.is_packed != first.is_packed:
            chats = source if source.is_packed else first
            raise ValueError(f'{chats.name} holds conversations: mix it with text under --windows=documents')
        before.append(source.name)
    return Mixture(sources, stages, keys.get('context_parallel', 1) * keys.get('tensor_parallel', 1))


def open_validation(keys, train_data):
    """The Mixture on which val_loss is computed: val_dataset, or the validation split of dataset. Raises ValueError,
    also if val_dataset has the tokens of another tokenizer than train_data."""
    if keys['val_dataset'] is None:
        return open_mixture(keys, 'val')
    facts = {'dataset': keys['val_dataset'], 'dataset_stages': (), 'vocab_size': train_data.vocab_size}
    trained = [source.name for source in train_data.sources]
    folders = [os.path.join(keys['data_dir'], name) for name in names_in(parse_stages({**keys, **facts}))]
    from text.tokenizer import as_argument, same_tokenizer

    if not same_tokenizer(*trained, *folders):
        raise ValueError(
            f'val_dataset={keys["val_dataset"]} has the tokens of another tokenizer than {" and ".join(trained)}: '
            f'prepare it with `python prepare_data.py --dataset=... --name=... --val_fraction=0 '
            f'--tokenizer={as_argument(*trained)}`'
        )
    return open_mixture({**keys, **facts}, 'whole')


# --- batches ----------------------------------------------------------------------------------------------------------


def batches(
    mixture, seed, first_sample, global_batch_size, batch_size, rank, world_size, device, starts_on_host=False
):  # fmt: skip
    """Endless iterator over this rank's training batches, one (x, y) per micro-step; close() it when done.

    x, y: int64 (batch_size, block_size) on `device`; y is x one token later, and may hold -1 where no loss is counted.
    With packed documents a batch is (x, y, starts). starts: int64 (batch_size, n_starts), where each document of a row
    begins, so that attention stays inside of documents; unused places hold block_size. starts_on_host: keep them in
    host memory.
    first_sample: steps done x global_batch_size. With B = global_batch_size, step s of the run, from 0 on (the log
    counts it as s + 1), reads the slots [s*B, (s+1)*B); of these rank r takes B/world_size from r*B/world_size on,
    batch_size per micro-step.
    Ranks that share their sequences count as one. A background thread makes the batches ahead, see run_ahead().
    """
    rank, world_size = rank // mixture.ranks_per_sequence, world_size // mixture.ranks_per_sequence
    assert global_batch_size % (batch_size * world_size) == 0, f'{global_batch_size=}, {batch_size=}, {world_size=}'
    per_rank = global_batch_size // world_size
    steps_at_once = max(1, SAMPLES_AT_ONCE // per_rank)

    def host_batches():
        steps = np.arange(steps_at_once, dtype=np.int64)[:, None]
        slots_of_rank = rank * per_rank + np.arange(per_rank, dtype=np.int64)
        for first in itertools.count(first_sample, steps_at_once * global_batch_size):
            located = mixture.locate(first + steps * global_batch_size + slots_of_rank, seed)
            by_micro_step = (numbers.reshape(-1, batch_size) for numbers in located)
            for sources, windows in zip(*by_micro_step, strict=True):
                yield _host_batch(mixture, sources, windows, batch_size, device)

    return run_ahead(host_batches(), device, starts_on_host)


def eval_batches(mixture, n_sequences, batch_size, rank, world_size, device, starts_on_host=False):
    """Iterator over (batch, number of its source): this rank's share of the first windows of every source, the same
    windows every time, about n_sequences in all.

    Batches are made as in batches(). Every rank gets equally many, because a sharded model's forward is a collective;
    rows for which no window is left have y = -1, which the loss ignores. So all ranks together see each window once,
    where ranks that share their sequences count as one.
    """
    rounds = rounds_of(mixture, n_sequences, batch_size, rank, world_size)

    def host_batches():
        for number, windows in rounds:
            yield _host_batch(mixture, np.full_like(windows, number), windows, batch_size, device)

    return zip(run_ahead(host_batches(), device, starts_on_host), [number for number, _ in rounds], strict=True)


def rounds_of(mixture, n_sequences, batch_size, rank, world_size):
    """[(number of the source, its windows)] of the batches of eval_batches()."""
    rank, world_size = rank // mixture.ranks_per_sequence, world_size // mixture.ranks_per_sequence
    per_round, rounds = batch_size * world_size, []
    for number, n in enumerate(mixture.windows_to_evaluate(n_sequences)):
        for first in range(rank * batch_size, -(-n // per_round) * per_round, per_round):
            rounds.append((number, np.arange(first, max(first, min(first + batch_size, n)))))
    return rounds


def _host_batch(mixture, sources, windows, batch_size, device):
    """Inputs and targets (batch_size, block_size), and with packed documents starts (batch_size, n_starts): int64 on
    the host, with filler rows at the end. Pairs may have a reference beside their starts, float32.

    numpy does the copying, since a large torch operator would start a second pool of compute threads for this thread.
    """
    pinned = torch.device(device).type == 'cuda'  # a copy from pageable memory would make the host wait
    sizes = [mixture.block_size, mixture.block_size, *([mixture.n_starts] if mixture.has_starts else [])]
    parts = [torch.empty((batch_size, size), dtype=torch.int64, pin_memory=pinned) for size in sizes]
    if mixture.is_pairs and mixture.sources[0].reference is not None:
        parts.append(torch.zeros((batch_size, mixture.n_starts), pin_memory=pinned))
    x, y, *others = (part.numpy() for part in parts)
    n = len(windows)
    x[n:], y[n:] = 0, -1
    for rows in others[:1]:
        rows[n:], rows[n:, 0] = mixture.block_size, 0  # one document
    for number in set(sources.tolist()):
        rows = np.flatnonzero(sources == number)
        read = mixture.sources[number].read(windows[rows])
        values = read if mixture.is_packed else (read[:, :-1], read[:, 1:])
        for part, of_rows in zip((x, y, *others), values, strict=False):  # a row with one document needs no starts
            part[rows] = of_rows
    return parts


def run_ahead(host_batches, device, starts_on_host=False):
    """Iterate over (x, y, ...) on `device`. A background thread runs ahead in the iterator over host batches.

    The thread ends when this iterator is exhausted, closed or dropped. An error is raised where its batch is due.
    On CUDA the copy is queued on the current stream, so whatever uses x and y comes after it. For 8 sequences of 2048
    tokens it moves 2 x 8 x 2048 x 8 bytes = 262 KB, which takes PCIe some 10 us, so a second stream would save nothing.
    Pinned memory is not overwritten while it is copied: torch's allocator records an event, and waits for it.
    """
    device, moving = torch.device(device), 2 if starts_on_host else None

    def make_batch():
        if device.type == 'cuda':
            torch.cuda.set_device(device)  # a thread starts on GPU 0: pinning must not open a context there
        return next(host_batches, None)

    thread, coming = ThreadPoolExecutor(max_workers=1, thread_name_prefix='prefetch'), collections.deque()
    try:
        while True:
            # Batches are made in bursts. Python runs one thread at a time, so the training loop waits for this one, and
            # after a step the caches are cold: the first batch of 12 x 64 then takes 400 us, each further one 30 us.
            if len(coming) <= BATCHES_AHEAD // 2:
                coming.extend(thread.submit(make_batch) for _ in range(BATCHES_AHEAD - len(coming)))
            batch = coming.popleft().result()
            if batch is None:
                return
            moved = tuple(part.to(device, non_blocking=True) for part in batch[:moving])
            yield (*moved, *batch[len(moved) :])
    finally:
        thread.shutdown(cancel_futures=True)
