"""
Which source each sample of a run comes from: a mixture's shares, and the order in which its sources take turns.

    stages = parse_stages({'dataset': 'web:0.7,code:0.3', 'dataset_stages': (), 'data_dir': 'data'})
    order = SourceOrder(first=0, shares={0: Fraction(7, 10), 1: Fraction(3, 10)}, counted=np.zeros(2, dtype=np.int64))
    sources, numbers = order.locate(np.arange(100))  # sample 99 is the numbers[99]-th of source sources[99]

An order is a table of one period, in which every source has a whole number of samples; after that it repeats. So the
source of a sample follows from its index alone, on any number of ranks and from any step on.
"""

import functools
import math
import os
from fractions import Fraction
from pathlib import Path

import numpy as np

MAX_EPOCHS = 4  # over a source: up to here, repeated text is nearly as good as new (arXiv 2305.16264)
LONGEST_PERIOD = 10**6  # samples: enough for shares of 6 decimals; the table of two sources then takes a second


def parse_shares(text, data_dir):
    """{name: share}, Fractions that sum to 1, from a text as 'web:0.7,code:0.3', 'web:2,code:1', or 'web' alone."""
    shares = {}
    for part in text.split(','):
        name, colon, share = part.strip().partition(':')
        if Path(name).parent == Path(data_dir):  # data/mine, which is what a shell's completion gives
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
    if period(shares) > LONGEST_PERIOD:
        raise ValueError(f'dataset={text}: these shares are too fine: round them, as to 4 decimals')
    return shares


def parse_stages(keys):
    """[(start, {name: share})] from a run's keys. start: int = a step, float = a fraction of max_iters."""
    stages = list(keys['dataset_stages'])
    for stage in stages:
        is_pair = isinstance(stage, (tuple, list)) and list(map(type, stage)) in ([int, str], [float, str])
        if not is_pair or (isinstance(stage[0], float) and stage[0] >= 1):
            raise ValueError(
                f"dataset_stages: {stage!r} is no stage: expected ((0.9, 'NAME:SHARE,...'), ...), each from a part of "
                'the run below 1.0 on, or from a step on, as 9000'
            )
    if not stages or stages[0][0] > 0:
        stages.insert(0, (0, keys['dataset']))
    return [(start, parse_shares(text, keys['data_dir'])) for start, text in stages]


def names_in(stages):
    """The names of the datasets of all stages, each once."""
    return list(dict.fromkeys(name for _, shares in stages for name in shares))


def period(shares):
    """The fewest samples in which every source has a whole number of samples."""
    return math.lcm(*(share.denominator for share in shares.values()))


@functools.cache
def take_turns(weights):
    """The source of each of the P = sum(weights) samples of a period; int64 (P,).

    Source s has weights[s] of them. If its samples could be spread evenly, the m-th one, counted from 1, would cover
    the stretch of places from P (m - 1) / weights[s] to P m / weights[s]. It gets one place in this stretch but, with k
    sources, not in its first or last 1 / (2k - 2). Among the sources that may have a place, the one whose stretch ends
    first gets it. Then at every point of the run, each source is less than one sample away from its share (R. Tijdeman,
    "The chairman assignment problem", Discrete Mathematics 32, 1980). Always serving the source that is furthest behind
    is not as good: with many sources, one of them can fall more than a sample behind.
    """
    if len(weights) == 1:
        return np.zeros(weights[0], dtype=np.int64)
    P, c = sum(weights), 2 * len(weights) - 2
    opens = [-(-P // (c * weight)) for weight in weights]  # the first place that a source's next sample may have
    closes = [P * (c - 1) // (c * weight) for weight in weights]  # and the last one
    taken, table = [0] * len(weights), []
    for n in range(1, P + 1):
        _, source = min((closes[source], source) for source in range(len(weights)) if opens[source] <= n)
        table.append(source)
        taken[source] += 1
        opens[source] = -(-P * (c * taken[source] + 1) // (c * weights[source]))
        closes[source] = P * (c * (taken[source] + 1) - 1) // (c * weights[source])
    return np.array(table)


class SourceOrder:
    """The samples of a run from `first` on, in fixed shares. Each source continues where it was before.

    shares: {number of a source: Fraction}. counted: int64 (sources,), samples of each source before `first`.
    """

    def __init__(self, first, shares, counted):
        self.first, self.counted = first, counted
        weights = {source: int(share * period(shares)) for source, share in shares.items()}
        self.table = np.array(list(weights))[take_turns(tuple(weights.values()))]
        self.per_period = np.bincount(self.table, minlength=len(counted))
        self.earlier = np.empty_like(self.table)  # how many samples of the same source come before it in the table
        for source, weight in weights.items():
            self.earlier[self.table == source] = np.arange(weight)

    def counts(self, n):
        """How many of the run's first n samples come from each source, for n >= first; int64 (sources,)."""
        periods, rest = divmod(n - self.first, len(self.table))
        return self.counted + periods * self.per_period + np.bincount(self.table[:rest], minlength=len(self.counted))

    def locate(self, samples):
        """(source, number) of samples >= first: each is the number-th sample of its source, counted from 0."""
        periods, places = np.divmod(samples - self.first, len(self.table))
        sources = self.table[places]
        return sources, self.counted[sources] + periods * self.per_period[sources] + self.earlier[places]


def folder_of(keys, data_dir=None):
    """Folder of a run's first dataset that has a meta.json, from which the tokenizer of all of them is known; if none
    has one, of the first dataset.

    data_dir: where the datasets are now; None = where they were.
    """
    names = names_in(parse_stages({'dataset_stages': (), **keys}))
    folders = [os.path.join(data_dir or keys['data_dir'], name) for name in names]
    return next((folder for folder in folders if os.path.exists(os.path.join(folder, 'meta.json'))), folders[0])
