"""
What a run reads, in which order: one dataset or a mixture of several, and batches made ahead of time.

    train_data = data.open_mixture(vars(config), 'train')  # dataset = 'web' or 'web:0.7,code:0.3'
    train_data.plan(max_iters, global_batch_size)
    for x, y in batches(train_data, seed, first_sample, global_batch_size, batch_size, rank, world_size, device): ...

Sample i of a run is one window of one dataset (dataset/windows.py), a pure function of (seed, i, shares) whatever the
number of ranks:

    sample i  ->  source, by a table of the shares, and its how-manieth sample n this is  ->  window, by a shuffle of n

So there is no loader state to save: the step in a checkpoint says where to go on. Every source has epochs of its own,
each in a new order.
"""

import bisect
import collections
import functools
import heapq
import itertools
import math
import os
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from dataset.shuffle import sample_windows
from dataset.windows import open_dataset
from text.tokenizer import as_argument, same_tokenizer, tokenizer_of

LONGEST_TABLE = 10**6  # entries: shares of up to 6 decimals; it takes a second
MAX_EPOCHS = 4  # over a source of a mixture: until then repeated text is nearly as good as new (arXiv 2305.16264)
BATCHES_AHEAD = 8  # that are made while the model computes
SAMPLES_AT_ONCE = 1024  # their windows are computed together: numpy takes as long for 12 numbers as for 500


# --- shares -----------------------------------------------------------------------------------------------------------


def shares_of(text, data_dir):
    """{name: share}, Fractions that sum to 1, of 'web:0.7,code:0.3', of 'web:2,code:1', or of the one name 'web'."""
    shares = {}
    for part in text.split(','):
        name, colon, share = part.strip().partition(':')
        if Path(name).parent == Path(data_dir):  # data/mine, as a shell completes it
            name = Path(name).name
        try:
            share = Fraction(share if colon else 1)
        except (ValueError, ZeroDivisionError):
            share = Fraction(-1)
        if not name or share < 0 or name in shares:
            problem = 'is there twice' if name in shares else 'has no share of 0 or more'
            raise ValueError(f'dataset={text}: {name!r} {problem}: expected NAME, or NAME:SHARE,NAME:SHARE')
        shares[name] = share
    total = sum(shares.values())
    if not total:
        raise ValueError(f'dataset={text}: the shares sum to 0: give one of them more')
    shares = {name: share / total for name, share in shares.items() if share}
    if table_length(shares) > LONGEST_TABLE:
        raise ValueError(f'dataset={text}: these shares are too fine: round them, as to 4 decimals')
    return shares


def table_length(shares):
    """After how many samples every source has had a whole number of them."""
    return math.lcm(*(share.denominator for share in shares.values()))


def stages_of(keys):
    """[(start, {name: share})] of a run's keys. start: int = a step, float = a part of max_iters."""
    stages = list(keys['dataset_stages'])
    for stage in stages:
        is_pair = isinstance(stage, (tuple, list)) and list(map(type, stage)) in ([int, str], [float, str])
        if not is_pair or stage[0] < 0 or (isinstance(stage[0], float) and stage[0] >= 1):
            raise ValueError(
                f"dataset_stages: {stage!r} is no stage: expected ((0.9, 'NAME:SHARE,...'), ...), each from a part of "
                'the run below 1.0 on, or from a step on, as 9000'
            )
    if not stages or stages[0][0] > 0:
        stages.insert(0, (0, keys['dataset']))
    return [(start, shares_of(text, keys['data_dir'])) for start, text in stages]


@functools.cache
def in_turn(weights):
    """Which source each of sum(weights) samples comes from, so that every beginning has them in shares; int64.

    After n samples source s has had n * weights[s] / sum(weights) of them, to less than one sample (R. Tijdeman, "The
    chairman assignment problem", Discrete Mathematics 32, 1980). With k sources, c = 2k - 2 and P = sum(weights), the
    m-th sample of s, from 1 on, may not come before n = P (m - 1 + 1/c) / weights[s], nor after n = P (m - 1/c) /
    weights[s]. Of those that may come, the one whose time runs out first does.
    """
    if len(weights) == 1:
        return np.zeros(weights[0], dtype=np.int64)
    P, c = sum(weights), 2 * len(weights) - 2
    sources = np.repeat(np.arange(len(weights)), weights)
    weight = np.repeat(weights, weights)
    m = 1 + np.concatenate([np.arange(weight) for weight in weights])
    first = -(-P * (c * (m - 1) + 1) // (c * weight))
    last = P * (c * m - 1) // (c * weight)
    by_first = np.argsort(first, kind='stable')
    coming = zip(*(of_samples[by_first].tolist() for of_samples in (first, last, sources)), strict=True)
    table, waiting, sample = [], [], next(coming)
    for n in range(1, P + 1):
        while sample and sample[0] <= n:
            heapq.heappush(waiting, sample[1:])
            sample = next(coming, None)
        table.append(heapq.heappop(waiting)[1])
    return np.array(table)


class Stage:
    """Samples first <= i < end of a run, in fixed shares; the sources are counted from where the last stage left them.

    shares: {source: Fraction}. counted: int64 (sources,), samples of each before this stage.
    """

    def __init__(self, first, end, shares, counted):
        self.first, self.end, self.counted = first, end, counted
        length = table_length(shares)
        weights = tuple(int(share * length) for share in shares.values())
        self.sources = np.array(list(shares))[in_turn(weights)]
        self.weights, self.rank = np.zeros_like(counted), np.empty(length, dtype=np.int64)
        for source, weight in zip(shares, weights, strict=True):
            self.weights[source] = weight
            self.rank[self.sources == source] = np.arange(weight)

    def counts(self, n):
        """How many of the run's first n samples each source has had, for n in this stage; int64 (sources,)."""
        periods, rest = divmod(n - self.first, len(self.sources))
        return self.counted + periods * self.weights + np.bincount(self.sources[:rest], minlength=len(self.counted))

    def locate(self, samples):
        """(source, number) of samples of this stage: the number-th sample of that source, from 0 on."""
        periods, places = np.divmod(samples - self.first, len(self.sources))
        sources = self.sources[places]
        return sources, self.counted[sources] + periods * self.weights[sources] + self.rank[places]


class Mixture:
    """One split of one dataset, or of several in shares that may change on the way.

    sources: {name: dataset}. stages: [(start, {name: share})], see stages_of(). plan() comes before the first batch.
    n_tokens, n_windows: of all sources. is_packed: batches are (x, y, starts). ranks_per_sequence: so many consecutive
    ranks read the same samples (context_manual.py, tensor_manual.py).
    """

    def __init__(self, sources, stages, ranks_per_sequence=1):
        self.names, self.sources, self._stages = list(sources), list(sources.values()), stages
        self.ranks_per_sequence = ranks_per_sequence
        self.n_tokens = sum(source.n_tokens for source in self.sources)
        self.n_windows = sum(source.n_windows for source in self.sources)
        self.vocab_size = max(source.vocab_size for source in self.sources)
        self.is_packed = any(source.is_packed for source in self.sources)
        self.is_chat = any(source.is_chat for source in self.sources)
        self.block_size = self.sources[0].block_size
        if self.is_packed:
            self.n_starts = max(source.n_starts for source in self.sources)
            for source in self.sources:
                source.n_starts = self.n_starts

    def plan(self, max_iters, global_batch_size):
        """Set where stages begin and end. Returns them as [[step, {fingerprint: share as text}]], for a checkpoint."""
        starts = [start if isinstance(start, int) else round(start * max_iters) for start, _ in self._stages]
        if any(later <= earlier for earlier, later in itertools.pairwise(starts)):
            raise ValueError(f'dataset_stages begin at the steps {starts[1:]}: expected one after another, from 1 on')
        self.global_batch_size, self.stages = global_batch_size, []
        counted, planned = np.zeros(len(self.sources), dtype=np.int64), []
        for start, (_, shares) in zip(starts, self._stages, strict=True):
            first = start * global_batch_size
            if self.stages:
                self.stages[-1].end = first
                counted = self.stages[-1].counts(first)
            # By fingerprint, so that neither names nor the order in which they are given decide anything.
            numbers = [self.names.index(name) for name in shares]
            numbers.sort(key=lambda number: self.sources[number].fingerprint)
            of_numbers = {number: shares[self.names[number]] for number in numbers}
            self.stages.append(Stage(first, math.inf, of_numbers, counted))
            planned.append([start, {self.sources[number].fingerprint: str(of_numbers[number]) for number in numbers}])
        self.total = max_iters * global_batch_size
        return planned

    def lines(self):
        """What the plan comes to, for the log."""
        lines = [source.line for source in self.sources if getattr(source, 'line', None)]
        if len(self.sources) == 1:
            return lines
        for stage, (_, shares) in zip(self.stages, self._stages, strict=True):
            of_sources = ', '.join(f'{name} {float(share):.4g}' for name, share in shares.items())
            never = 'WARNING: the run ends before: ' if stage.first >= self.total else ''
            lines.append(f'{never}from step {stage.first // self.global_batch_size}: {of_sources}')
        epochs = self.epochs(self.total).values()
        for name, source, count, passes in zip(self.names, self.sources, self.counts(self.total), epochs, strict=True):
            lines.append(f'{name}: {count:,} samples of {source.n_windows:,} windows, {passes:.2f} epochs')
            if passes > MAX_EPOCHS:
                lines.append(
                    f'WARNING: {name} is too small for its share: {passes:.1f} epochs, and after {MAX_EPOCHS} '
                    'text that is read again teaches little; give it a smaller share, more text, or fewer --max_iters'
                )
        return lines

    def counts(self, n):
        """How many of the run's first n samples come from each source; int64 (sources,)."""
        return self.stages[bisect.bisect_right([stage.first for stage in self.stages], n) - 1].counts(n)

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
        """(source, window) of slots of the run: slot j of step s is s * global_batch_size + j. int64, same shape.

        Shares and ranks often have common factors: of web:0.5,code:0.5 rank 0 of 2 would never read code. So which
        sample of its step stands in which slot is shuffled.
        """
        sources, windows = np.zeros_like(slots), np.empty_like(slots)
        for stage in self.stages:
            here = (slots >= stage.first) & (slots < stage.end)
            if not here.any():
                continue
            samples = slots[here]
            if len(stage.sources) > 1:
                first_of_step = samples - samples % self.global_batch_size
                samples = first_of_step + sample_windows(samples, self.global_batch_size, ~seed)
            sources[here], windows[here] = stage.locate(samples)
        for number, source in enumerate(self.sources):
            of_source = sources == number
            windows[of_source] = sample_windows(windows[of_source], source.n_windows, seed)
        return sources, windows

    def count_targets(self, seed, first, n):
        """Targets with y >= 0 in the slots first .. first + n - 1 of a run, exactly."""
        if not self.is_packed:
            return n * self.block_size
        pairs = zip(*self.locate(first + np.arange(n), seed), strict=True)
        return sum(int(self.sources[source].n_targets[window]) for source, window in pairs)

    def losses(self, nats_and_tokens):
        """Metrics of an evaluation, from [the sum of the cross-entropy, over so many targets] of each source.

        Where there are several, each has its own, and in val_loss it counts as much as in the whole run.
        """
        weights = (self.counts(self.total) / self.total).tolist()
        losses = [nats / tokens for nats, tokens in nats_and_tokens]
        loss = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
        row = {'val_loss': loss, 'val_ppl': math.exp(min(loss, 700))}
        if all(source.bytes_per_token for source in self.sources):
            of_sources = zip(weights, self.sources, strict=True)
            row['val_bpb'] = loss / math.log(2) / sum(weight * source.bytes_per_token for weight, source in of_sources)
        if len(self.sources) > 1:
            row |= {f'val_loss/{name}': loss for name, loss in zip(self.names, losses, strict=True)}
        return row


def open_mixture(keys, split):
    """The Mixture of a run's keys. Raises ValueError, also where sources do not go together."""
    stages = stages_of(keys)
    options = (split, keys['block_size'], keys['vocab_size'], keys['windows'])
    sources = {name: open_dataset(keys['data_dir'], name, *options) for name in names_of(stages)}
    first, *others = sources.values()
    before = [first.name]
    for source in others:
        if not same_tokenizer(*before, source.name) or source.vocab_size != first.vocab_size:
            raise ValueError(
                f'{source.name} has the tokens of another tokenizer than {" and ".join(before)}: prepare it with '
                f'`python prepare_data.py --dataset=... --name=... --tokenizer={as_argument(*before)}`'
            )
        if source.is_packed != first.is_packed:
            chats = source if source.is_packed else first
            raise ValueError(f'{chats.name} holds conversations: mix it with text under --windows=documents')
        before.append(source.name)
    return Mixture(sources, stages, keys.get('context_parallel', 1) * keys.get('tensor_parallel', 1))


def names_of(stages):
    """The datasets of all stages, each once."""
    return list(dict.fromkeys(name for _, shares in stages for name in shares))


def folder_of(keys, data_dir=None):
    """Folder of a run's first dataset, of those with a meta.json if there are any: it tells the tokenizer of all.

    data_dir: where the datasets are now; None = where they were.
    """
    names = names_of(stages_of({'dataset_stages': (), **keys}))
    folders = [os.path.join(data_dir or keys['data_dir'], name) for name in names]
    return next((folder for folder in folders if os.path.exists(os.path.join(folder, 'meta.json'))), folders[0])


def peek(dataset, data_dir, n_windows=8, n_tokens=256):
    """Print the beginnings of a run's first windows, with their source and the borders of documents."""
    keys = {'dataset': dataset, 'data_dir': data_dir, 'dataset_stages': (), 'windows': 'stream'}
    mixture = open_mixture({**keys, 'block_size': n_tokens, 'vocab_size': None}, 'train')
    mixture.plan(1, n_windows)
    decode = tokenizer_of(folder_of(keys)).decode
    for number, window in zip(*mixture.locate(np.arange(n_windows), seed=1337), strict=True):
        source = mixture.sources[number]
        tokens = np.array(source.read([window])[0]).ravel()[:n_tokens]  # of conversations the inputs
        parts = np.split(tokens, np.flatnonzero(tokens == source.eot) + 1)
        text = '【end of document】\n'.join(decode(part[part != source.eot]) for part in parts)
        where = f'window {window:,} of {source.n_windows:,}, {len(parts) - 1} documents end in it'
        print(f'--- {mixture.names[number]}, {where}:\n{text}')


# --- batches ----------------------------------------------------------------------------------------------------------


def batches(mixture, seed, first_sample, global_batch_size, batch_size, rank, world_size, device):
    """Endless iterator over this rank's training batches, one (x, y) per micro-step; close() it when done.

    x, y: int64 (batch_size, block_size) on `device`; y is x one token later, and may hold -1 where no loss is counted.
    Where documents are packed (x, y, starts): int64 (batch_size, n_starts), where each document of a row begins, which
    attention must not leave; unused places hold block_size.
    first_sample: steps done x global_batch_size. With B = global_batch_size, step s of the run reads the slots
    [s*B, (s+1)*B); of these rank r takes B/world_size from r*B/world_size on, batch_size per micro-step.
    Ranks that share their sequences count as one. A background thread makes the batches ahead, see run_ahead().
    """
    rank, world_size = rank // mixture.ranks_per_sequence, world_size // mixture.ranks_per_sequence
    assert global_batch_size % (batch_size * world_size) == 0, f'{global_batch_size=}, {batch_size=}, {world_size=}'
    per_rank = global_batch_size // world_size
    steps_at_once = max(1, SAMPLES_AT_ONCE // per_rank)

    def host_batches():
        steps = np.arange(steps_at_once, dtype=np.int64)[:, None]
        of_rank = rank * per_rank + np.arange(per_rank, dtype=np.int64)
        for first in itertools.count(first_sample, steps_at_once * global_batch_size):
            sources, windows = mixture.locate(first + steps * global_batch_size + of_rank, seed)
            for of_micro_step in zip(sources.reshape(-1, batch_size), windows.reshape(-1, batch_size), strict=True):
                yield _host_batch(mixture, *of_micro_step, batch_size, device)

    return run_ahead(host_batches(), device)


def eval_batches(mixture, n_sequences, batch_size, rank, world_size, device):
    """Iterator over (batch, source): this rank's share of the first windows of every source, the same ones every time,
    about n_sequences in all; source is its number.

    Every rank gets the same number of batches, made as in batches(), because a sharded model's forward is a collective.
    Rows that no window is left for have y = -1, which the loss ignores: all ranks together see each window once, or
    those that share their sequences do.
    """
    rank, world_size = rank // mixture.ranks_per_sequence, world_size // mixture.ranks_per_sequence
    per_round, of_batches = batch_size * world_size, []
    for number, source in enumerate(mixture.sources):
        n = min(-(-n_sequences // len(mixture.sources)), source.n_windows)
        for first in range(rank * batch_size, -(-n // per_round) * per_round, per_round):
            of_batches.append((number, np.arange(first, max(first, min(first + batch_size, n)))))

    def host_batches():
        for number, windows in of_batches:
            yield _host_batch(mixture, np.full_like(windows, number), windows, batch_size, device)

    return zip(run_ahead(host_batches(), device), [number for number, _ in of_batches], strict=True)


def _host_batch(mixture, sources, windows, batch_size, device):
    """Inputs, targets (batch_size, block_size), where packed starts (batch_size, n_starts); int64 on the host, with
    filler rows at the end.

    numpy does the copying: a large torch operator would start a second pool of compute threads for this thread.
    """
    pinned = torch.device(device).type == 'cuda'  # a copy from pageable memory would make the host wait
    sizes = [mixture.block_size] * 2 + ([mixture.n_starts] if mixture.is_packed else [])
    parts = [torch.empty((batch_size, size), dtype=torch.int64, pin_memory=pinned) for size in sizes]
    fillers = [0, -1, [0] + [mixture.block_size] * (sizes[-1] - 1)]  # of starts: one document
    for part, filler in zip(parts, fillers, strict=False):
        part.numpy()[len(windows) :] = filler
    for number in set(sources.tolist()):
        rows = np.flatnonzero(sources == number)
        read = mixture.sources[number].read(windows[rows])
        read = read if mixture.is_packed else (read[:, :-1], read[:, 1:])
        for part, of_rows in zip(parts, read, strict=True):
            part.numpy()[rows] = of_rows
    return parts


def run_ahead(host_batches, device):
    """Iterate over (x, y, ...) on `device`, from an iterator over host batches that a background thread runs ahead.

    The thread ends with the iterator: when this is exhausted, closed or dropped. An error comes where its batch is due.
    On CUDA the copy is queued on the current stream, so whatever uses x and y comes after it. For 8 sequences of 2048
    tokens that is 2 x 8 x 2048 x 8 bytes = 262 KB, some 10 us of PCIe: a second stream would save nothing. The pinned
    memory is not rewritten during its copy: torch's allocator records an event with it, and waits for that to pass.
    """
    device = torch.device(device)

    def make_batch():
        if device.type == 'cuda':
            torch.cuda.set_device(device)  # a thread starts on GPU 0: pinning must not open a context there
        return next(host_batches, None)

    thread, coming = ThreadPoolExecutor(max_workers=1, thread_name_prefix='prefetch'), collections.deque()
    try:
        while True:
            # In bursts: Python runs one thread at a time, so the training loop waits for this one, and a step has
            # emptied the caches. The first batch of 12 x 64 takes 400 us then, each further one 30 us.
            if len(coming) <= BATCHES_AHEAD // 2:
                coming.extend(thread.submit(make_batch) for _ in range(BATCHES_AHEAD - len(coming)))
            batch = coming.popleft().result()
            if batch is None:
                return
            yield tuple(part.to(device, non_blocking=True) for part in batch)
    finally:
        thread.shutdown(cancel_futures=True)
