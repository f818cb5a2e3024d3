"""
Shuffling without state: a pseudo-random permutation of any length, each entry of which is computed by itself, in O(1)
memory.

    windows = permuted(np.arange(100, 200), 10**9, seed=1337)  # which windows the samples 100 to 199 read
"""

import math

import numpy as np

# Constants of SplitMix64 (Steele, Lea and Flood 2014): its increment, 2^64 / golden ratio, whose multiples lie far
# apart, and the first multiplier of its hash. Products of uint64 arrays wrap around, as they should here.
GOLDEN_GAMMA, MULTIPLIER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


def _scramble(numbers):
    """Hash each element of a uint64 array: SplitMix64's finaliser."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * MULTIPLIER
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


# 3 rounds make a pseudo-random permutation of a large set (Luby and Rackoff, 1988), but a tiny set needs more: over
# 20,000 epochs of 5 windows, the place of each window is biased with 6 rounds (chi-squared 130, expected 16) and not
# with 12.
FEISTEL_ROUNDS = 12


def permuted(numbers, n, seed):
    """Where a random permutation of 0 .. n - 1 puts each number; numbers from n on get another permutation, and so on.

    numbers: array, >= 0. Returns int64, same shape, < n. If sample i of a run reads window permuted(i), the run reads
    each of n windows once per epoch, and every epoch, i // n, has an order of its own.

    A table for 100B tokens would not fit into memory, so the permutation is computed: by an unbalanced Feistel network
    on a grid of rows x columns >= n cells (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    A position is a cell. Each round shifts either its row by a hash of its column, or its column by a hash of its row;
    the hashes are keyed by seed, epoch and round. A shift can be undone, so no two positions end in one cell. With
    ceil(sqrt(n)) rows, fewer cells than rows are outside of the data. A position that ends there goes through the
    network again until it is inside (cycle walking), and the result is still a bijection.
    """
    epochs, positions = np.divmod(np.asarray(numbers, dtype=np.uint64), np.uint64(n))
    keys = _scramble(_scramble(np.array([seed % 2**64], dtype=np.uint64)) + epochs * GOLDEN_GAMMA)
    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    places = _shuffle_grid(positions, keys, rows, columns)
    while (outside := places >= n).any():
        places[outside] = _shuffle_grid(places[outside], keys[outside], rows, columns)
    return places.astype(np.int64)


def _shuffle_grid(cells, keys, rows, columns):
    """A permutation of 0 .. rows*columns - 1 per key, applied to each cell under its own key."""
    rows, columns = np.uint64(rows), np.uint64(columns)
    row, column = np.divmod(cells, columns)
    for number in range(FEISTEL_ROUNDS):
        round_keys = keys + np.uint64(number << 32)  # rows and columns are below 2^32, so no two rounds hash the same
        if number % 2 == 0:
            row = (row + _scramble(round_keys + column) % rows) % rows
        else:
            column = (column + _scramble(round_keys + row) % columns) % columns
    return row * columns + column
