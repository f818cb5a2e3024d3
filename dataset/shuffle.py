"""
Random numbers without state: a permutation of any length whose every entry is computed alone, in O(1) memory.

    windows = sample_windows(np.arange(100, 200), n_windows=10**9, seed=1337)
"""

import math

import numpy as np

# Of SplitMix64 (Steele, Lea and Flood 2014): the increment, 2^64 / golden ratio, whose multiples lie far apart, and the
# first multiplier of its hash. Products of uint64 arrays wrap, as they must.
GOLDEN_GAMMA, MULTIPLIER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


def _scramble(numbers):
    """Hash each element of a uint64 array: SplitMix64's finaliser."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * MULTIPLIER
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


# 3 rounds make a pseudo-random permutation of a large set (Luby and Rackoff, 1988), a tiny one takes more: over 20,000
# epochs of 5 windows, which comes in which place is biased with 6 rounds (chi-squared 130, expected 16), not with 12.
FEISTEL_ROUNDS = 12


def sample_windows(indices, n_windows, seed):
    """The window that each sample of a run reads: without replacement within an epoch, reshuffled in every epoch.

    indices: array of sample indices, >= 0; sample i is in epoch i // n_windows. Returns int64, same shape, < n_windows.
    A table for 100B tokens would not fit into memory, so it is computed: an unbalanced Feistel network on a grid of
    rows x columns >= n_windows (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Positions are cells.
    Each round shifts its row by a hash of its column, or its column by one of its row (keyed by seed, epoch, round);
    that can be undone, so no two positions meet. With ceil(sqrt(n_windows)) rows, fewer cells than rows lie outside the
    data: what lands there goes through again until it does not (cycle walking), still a bijection.
    """
    epochs, positions = np.divmod(np.asarray(indices, dtype=np.uint64), np.uint64(n_windows))
    keys = _scramble(_scramble(np.array([seed % 2**64], dtype=np.uint64)) + epochs * GOLDEN_GAMMA)
    rows = math.isqrt(n_windows - 1) + 1
    columns = -(-n_windows // rows)
    windows = _shuffle_grid(positions, keys, rows, columns)
    while (outside := windows >= n_windows).any():
        windows[outside] = _shuffle_grid(windows[outside], keys[outside], rows, columns)
    return windows.astype(np.int64)


def _shuffle_grid(cells, keys, rows, columns):
    """A permutation of 0 .. rows*columns - 1 per key, applied to each cell under its own key."""
    rows, columns = np.uint64(rows), np.uint64(columns)
    row, column = np.divmod(cells, columns)
    for number in range(FEISTEL_ROUNDS):
        round_keys = keys + np.uint64(number << 32)  # rows and columns are below 2^32: no number is hashed twice
        if number % 2 == 0:
            row = (row + _scramble(round_keys + column) % rows) % rows
        else:
            column = (column + _scramble(round_keys + row) % columns) % columns
    return row * columns + column
