"""
A dataset of text as windows of block_size tokens. Each sample of a run is one window.

A split is the concatenation of its shards, cut into windows: window w has the inputs tokens[w*T : w*T + T] with
T = block_size, and the same shifted by one as targets. Where documents are kept apart or the data are conversations,
windows hold whole ones instead: dataset/packed.py. dataset/opening.py opens either.
"""

import bisect
import functools
import hashlib
import itertools
import os

import numpy as np

from dataset.shuffle import GOLDEN_GAMMA, MULTIPLIER

SPLITS = ('train', 'val')
SYNTHETIC_TOKENS = 10**11  # per split
WINDOWS_AT_ONCE = 256  # counted together: of 2,048 tokens they take 8 MB
MAX_MAPPED_SHARDS = 256  # each takes a file descriptor, often limited to 1,024; 100B tokens have 1,000 shards


class RandomTokens:
    """A shard without a file: SYNTHETIC_TOKENS uniform token ids, each a hash of its position, computed when sliced."""

    def __init__(self, vocab_size, split):
        self.vocab_size = np.uint64(vocab_size)
        self.first = SPLITS.index(split) * SYNTHETIC_TOKENS  # splits do not overlap

    def __len__(self):
        return SYNTHETIC_TOKENS

    def __getitem__(self, positions):
        half = np.uint64(32)
        hashes = np.arange(self.first + positions.start, self.first + positions.stop, dtype=np.uint64) * GOLDEN_GAMMA
        hashes = (hashes ^ (hashes >> half)) * MULTIPLIER  # one round of _scramble: it has to be cheap, not good
        return (hashes >> half) * self.vocab_size >> half  # the upper 32 bits as a fraction of 2^32, times vocab_size


class TokenDataset:
    """One split of a dataset as windows of block_size tokens and their successors.

    n_tokens, n_windows   n_windows = (n_tokens - 1) // block_size: the last token is only ever a target
    vocab_size            every id is below it; read() checks what it reads
    fingerprint           changes when the tokens change; a resumed run must find the same tokens
    name, split, eot      eot: the token that ends a document; None if meta.json does not tell
    packing               whether windows of whole pieces hold as many as fit; False = a window for each piece
    """

    is_packed = is_chat = is_pairs = is_absent = False
    line = None  # for the log
    padding = 0.0  # share of the positions of all windows
    longest = 0  # tokens of the longest conversation

    def __init__(self, name, split, block_size, vocab_size, meta, shards, open_shard, packing=True):
        """shards: names, in order. open_shard(name): returns its tokens, an object with a length that can be sliced."""
        self.name, self.split, self.block_size, self.vocab_size = name, split, block_size, vocab_size
        self._shards, self.eot, self.packing = shards, meta.get('eot_token'), packing
        self._open_shard = functools.lru_cache(MAX_MAPPED_SHARDS)(open_shard)
        self._ends = list(itertools.accumulate(len(self._open_shard(shard)) for shard in shards))
        self.n_tokens = self._ends[-1]
        facts = meta.get('splits', {}).get(split, {})
        self.fingerprint = self._fingerprint(facts)
        if self.is_packed and not packing:
            self.fingerprint += '-unpacked'  # the same tokens in other samples
        self._cut(facts)

    def _cut(self, facts):
        """Set n_windows."""
        self.n_windows = (self.n_tokens - 1) // self.block_size
        if self.n_windows < 1:
            raise ValueError(
                f'block_size={self.block_size} is longer than the data: a window has {self.block_size + 1:,} tokens, '
                f'split {self.split!r} of {self.name} {self.n_tokens:,}; use at most '
                f'--block_size={max(1, self.n_tokens - 1)}'
            )

    def read(self, windows):
        """Tokens of some windows: int64 (len(windows), block_size + 1). Raises ValueError for an id outside the
        vocabulary."""
        return self._read_spans([int(window) * self.block_size for window in windows], self.block_size + 1)

    def count_ids(self, n_windows):
        """How often each id is a target in the first n_windows windows: int64 (vocab_size,)."""
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for first in range(0, n_windows, WINDOWS_AT_ONCE):
            read = self.read(range(first, min(first + WINDOWS_AT_ONCE, n_windows)))
            targets = read[1] if self.is_packed else read[:, 1:]
            counts += np.bincount(targets[targets >= 0], minlength=self.vocab_size)
        return counts

    def _read_spans(self, starts, length):
        """`length` tokens from each of `starts` on: int64 (len(starts), length). Raises ValueError for an id outside
        the vocabulary."""
        tokens = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(tokens, starts, strict=True):
            self._copy_tokens(start, row)
        unsigned = tokens.view(np.uint64)  # a negative id, which a .npy file may hold, becomes a huge one
        if unsigned.max(initial=0) >= self.vocab_size:
            row, column = np.argwhere(unsigned >= self.vocab_size)[0]
            position = starts[row] + int(column)
            shard = self._shards[bisect.bisect_right(self._ends, position)]
            token = f'token id {tokens[row, column]} (token {position:,} of split {self.split!r})'
            mend = "give its tokenizer's --vocab_size, or prepare it again"
            raise ValueError(f'{shard}: {token} is not below vocab_size={self.vocab_size}: {mend}')
        return tokens

    def _copy_tokens(self, start, out):
        """Fill `out` with the tokens from `start` on, across shard borders."""
        shard, filled = bisect.bisect_right(self._ends, start), 0
        while filled < len(out):
            tokens = self._open_shard(self._shards[shard])
            begin = start + filled - (self._ends[shard] - len(tokens))  # within this shard
            piece = tokens[begin : begin + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            shard, filled = shard + 1, filled + len(piece)

    def _fingerprint(self, facts):
        """A hash of the sha256 of shards and masks in meta.json; without these, of the length and of up to 64 x 1024
        tokens."""
        if found := fingerprint_of(facts, self.n_tokens, self.is_chat):
            return found
        digest, sample = hashlib.sha256(str(self.n_tokens).encode()), np.empty(min(1024, self.n_tokens), dtype=np.int64)
        for start in np.linspace(0, self.n_tokens - len(sample), 64, dtype=np.int64):
            self._copy_tokens(int(start), sample)
            digest.update(sample)
        return digest.hexdigest()[:16]


def fingerprint_of(facts, n_tokens, is_chat):
    """What TokenDataset.fingerprint begins with, from what meta.json says of a split; None if it lacks the sha256 of a
    file."""
    keys = ('sha256', 'mask_sha256')[: 1 + is_chat]
    digests = [shard.get(key) for shard in facts.get('shards', []) for key in keys]
    if not (digests and all(digests)):
        return None
    return hashlib.sha256(f'{n_tokens}{" ".join(digests)}'.encode()).hexdigest()[:16]


@functools.cache
def say_once(line):
    """Print a line on rank 0, and only once, although each split may be opened several times."""
    if os.environ.get('RANK', '0') == '0':
        print(line, flush=True)
