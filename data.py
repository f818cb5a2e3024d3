"""
Token shards on disk, the order in which a run sees them, and batches made ahead of time.

    dataset = open_dataset('data', 'stdlib-bpe2048', 'train', block_size=1024)
    for x, y in batches(dataset, seed, first_sample, global_batch_size, batch_size, rank, world_size, device): ...

A split is the concatenation of its shards, cut into windows: window w has the inputs tokens[w*T : w*T + T] with
T = block_size, and as targets the same shifted by one. Sample i of a run is one window, a pure function of (seed, i)
whatever the number of ranks: there is no loader state to save, the step in a checkpoint says where to go on. With masks
(chats) windows hold whole conversations and batches positions.

Files are shards with a header (ours, llm.c's, modded-nanogpt's), nanoGPT's headerless train.bin and val.bin, or .npy
rows; what they hold is in prepare_data.py's meta.json. To read another format of token files, add the end of their
names to ENDINGS below, and their layout to read_shard() in text/shards.py: it returns the tokens of a file, a numpy
array or memmap of one dimension, of integers. To read another format of texts, see docs/data.md.
"""

import bisect
import collections
import difflib
import functools
import hashlib
import itertools
import json
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from text.shards import read_shard

ENDINGS = ('.bin', '.npy')  # of the files in a dataset's folder that hold tokens
OF_PREPARED = ('meta.json', 'unfinished.json')  # prepare_data.py's: the second until it writes the first
# The split in a file's name is a word of its own: fineweb_train_000001.bin yes, constrained.bin no.
SPLIT_WORDS = {'train': 'train|training', 'val': 'val|valid|validation'}
GPT2_VOCAB_SIZE = 50257  # assumed of files that come without meta.json
SYNTHETIC_VOCAB_SIZE, SYNTHETIC_TOKENS = 50304, 10**11  # GPT-2's padded to a multiple of 64; per split
MAX_MAPPED_SHARDS = 256  # each holds a file descriptor, of which 1,024 is a common limit; 100B tokens: 1,000 shards
BATCHES_AHEAD = 8  # that are made while the model computes
SAMPLES_AT_ONCE = 1024  # their windows are computed together: numpy takes as long for 12 numbers as for 500


# --- random numbers without state -------------------------------------------------------------------------------------

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


class RandomTokens:
    """A shard that is not there: SYNTHETIC_TOKENS uniform token ids, each a hash of its position, made when sliced."""

    def __init__(self, vocab_size, split):
        self.vocab_size = np.uint64(vocab_size)
        self.first = list(SPLIT_WORDS).index(split) * SYNTHETIC_TOKENS  # splits do not overlap

    def __len__(self):
        return SYNTHETIC_TOKENS

    def __getitem__(self, positions):
        half = np.uint64(32)
        hashes = np.arange(self.first + positions.start, self.first + positions.stop, dtype=np.uint64) * GOLDEN_GAMMA
        hashes = (hashes ^ (hashes >> half)) * MULTIPLIER  # one round of _scramble: it has to be cheap, not good
        return (hashes >> half) * self.vocab_size >> half  # the upper 32 bits as a fraction of 2^32, times vocab_size


# --- datasets ---------------------------------------------------------------------------------------------------------


class TokenDataset:
    """One split of a dataset as windows of block_size tokens and their successors.

    n_tokens, n_windows   n_windows = (n_tokens - 1) // block_size: the last token is only ever a target
    vocab_size            every id is below it; read() checks what it reads
    fingerprint           changes when the tokens change: a resumed run must find the same ones
    bytes_per_token       of the split's text in UTF-8, for bits per byte; None where meta.json does not tell
    is_packed             a PackedDataset: its batches are (x, y, starts)
    """

    def __init__(self, name, split, block_size, vocab_size, meta, shards, open_shard):
        """shards: names, in order; open_shard(name): its tokens, something with a length that can be sliced."""
        self.name, self.split, self.block_size, self.vocab_size = name, split, block_size, vocab_size
        self._shards, self.is_packed = shards, bool(meta.get('masked'))
        self._open_shard = functools.lru_cache(MAX_MAPPED_SHARDS)(open_shard)
        self._ends = list(itertools.accumulate(len(self._open_shard(shard)) for shard in shards))
        self.n_tokens = self._ends[-1]
        facts = meta.get('splits', {}).get(split, {})
        counted = facts.get('bytes') and facts.get('tokens') and not self.is_packed  # there not all text is learned
        self.bytes_per_token = facts['bytes'] / facts['tokens'] if counted else None
        self.fingerprint = self._fingerprint(facts)
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

    def losses(self, nats, tokens):
        """Metrics of an evaluation, from the sum of the cross-entropy over so many targets of this split."""
        loss = nats / tokens
        row = {'val_loss': loss, 'val_ppl': math.exp(min(loss, 700))}
        if self.bytes_per_token:
            row['val_bpb'] = loss / math.log(2) / self.bytes_per_token
        return row

    def read(self, windows):
        """Tokens of some windows: int64 (len(windows), block_size + 1). ValueError: an id outside the vocabulary."""
        return self._read_spans([int(window) * self.block_size for window in windows], self.block_size + 1)

    def _read_spans(self, starts, length):
        """`length` tokens from each of `starts` on: int64 (len(starts), length), all of them in the vocabulary."""
        tokens = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(tokens, starts, strict=True):
            self._copy_tokens(start, row)
        unsigned = tokens.view(np.uint64)  # in which a negative id of a .npy file is a huge one
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
        """Hash of the shards' and masks' own sha256 from meta.json; else of the length and up to 64 x 1024 tokens."""
        keys = ('sha256', 'mask_sha256')[: 1 + self.is_packed]
        digests = [shard.get(key) for shard in facts.get('shards', []) for key in keys]
        digest = hashlib.sha256(str(self.n_tokens).encode())
        if digests and all(digests):
            digest.update(' '.join(digests).encode())
        else:
            sample = np.empty(min(1024, self.n_tokens), dtype=np.int64)
            for start in np.linspace(0, self.n_tokens - len(sample), 64, dtype=np.int64):
                self._copy_tokens(int(start), sample)
                digest.update(sample)
        return digest.hexdigest()[:16]


class PackedDataset(TokenDataset):
    """One split of conversations: a window of block_size positions holds whole ones, then padding.

    A conversation of L tokens takes L - 1 positions: its tokens but the last are inputs, those but the first targets,
    -1 where they are not learned. Of more than block_size + 1 tokens the first are kept. A mask has a byte per token of
    its shard; bit 0: the token is learned, bit 1: it begins a conversation.
    n_targets: int64 (n_windows,), the targets that count. longest: the tokens of the longest conversation.
    n_starts: the most conversations in a window, and one for its padding.
    """

    def _cut(self, facts):
        """Find the conversations, drop those with nothing to learn, and pack the rest into windows."""
        mask = self._read_masks(facts)
        self._learned = mask & 1  # stays in memory, 1 byte per token
        starts = np.flatnonzero(mask >= 2)
        whole = np.diff(starts, append=self.n_tokens)
        lengths = np.minimum(whole, self.block_size + 1)
        # How many targets of each conversation are learned: reduceat adds up from each border to the next one. Every
        # second sum is over a conversation's targets, those between them are over what lies behind its end.
        borders = np.stack((starts + 1, starts + lengths), axis=1).ravel()
        learned = np.add.reduceat(self._learned, borders, dtype=np.int64)[::2]
        learned[lengths == 1] = 0  # an empty range, of which reduceat returns its first element
        kept = np.flatnonzero(learned)

        n_cut, n_dropped = np.count_nonzero(whole > lengths), len(starts) - len(kept)
        self.longest = int(whole.max(initial=2))
        line = (
            f'{self.name}: {n_cut:,} of {len(starts):,} chats ({self.split}) are cut to {self.block_size + 1:,} tokens'
            f', {n_dropped:,} dropped with nothing learned left; the longest has {self.longest:,}'
        )
        if not len(kept):
            raise ValueError(f'{line}: use a larger --block_size')
        if n_cut or n_dropped:
            _say_once(f'WARNING: {line}' if n_dropped > 0.05 * len(starts) else line)

        # The longest conversations are packed first. So the windows are shuffled: evaluation reads the first of them.
        order, bins = pack(lengths[kept] - 1, self.block_size)
        self.n_windows = int(bins.max()) + 1
        windows = sample_windows(bins, self.n_windows, seed=0)
        by_window = np.argsort(windows, kind='stable')
        kept = kept[order[by_window]]
        self._starts, self._lengths = starts[kept], lengths[kept]
        # Window w holds the conversations from borders[w] up to borders[w + 1].
        self._borders = np.searchsorted(windows[by_window], np.arange(self.n_windows + 1))
        self.n_targets = np.add.reduceat(learned[kept], self._borders[:-1])
        self.n_starts = int(np.diff(self._borders).max()) + 1

    def _read_masks(self, facts):
        """The masks of all shards, uint8 (n_tokens + 1,): an end in reduceat has to be an index."""
        mask, begin = np.zeros(self.n_tokens + 1, dtype=np.uint8), 0
        for shard, end in zip(facts['shards'], self._ends, strict=True):
            path = f'{self.name}/{shard["mask_file"]}'
            piece = np.fromfile(path, dtype=np.uint8)
            if len(piece) != end - begin or piece.max(initial=0) > 3:
                sizes = f'its size is {len(piece):,} bytes, expected are {end - begin:,} of 0 to 3, one per token'
                raise ValueError(f'{path}: {sizes}; copy or prepare it again')
            mask[begin:end] = piece
            begin = end
        return mask

    def read(self, windows):
        """Inputs, targets (len(windows), block_size) and starts (len(windows), n_starts), int64; see batches()."""
        batch = np.empty((2, len(windows), self.block_size), dtype=np.int64)
        starts = np.full((len(windows), self.n_starts), self.block_size)
        starts[:, 0] = 0
        for (x, y), starts_of_row, window in zip(batch.swapaxes(0, 1), starts, windows, strict=True):
            spans, begin = slice(*self._borders[window : window + 2]), 0
            conversations = zip(self._starts[spans].tolist(), self._lengths[spans].tolist(), strict=True)
            for number, (start, length) in enumerate(conversations, start=1):
                tokens, end = self._read_spans([start], length)[0], begin + length - 1
                x[begin:end] = tokens[:-1]
                y[begin:end] = np.where(self._learned[start + 1 : start + length], tokens[1:], -1)
                begin = starts_of_row[number] = end
            x[begin:], y[begin:] = 0, -1
        return *batch, starts


def pack(sizes, capacity):
    """(items, bins): the items by decreasing size, and the bin of each. sizes: array of 1 to capacity.

    Best fit decreasing: an item goes where the least room is left for it. Items of one size keep their order.
    """
    order = np.argsort(-sizes, kind='stable')
    bins, unused = [], itertools.count()
    free = [[] for _ in range(capacity + 1)]  # [room]: the bins that have it
    rooms = []  # those that some bin has, sorted
    for size in sizes[order].tolist():
        place = bisect.bisect_left(rooms, size)  # of the least room that is enough
        if place == len(rooms):
            room, bin = capacity, next(unused)
        else:
            room = rooms[place]
            bin = free[room].pop()
            if not free[room]:
                rooms.pop(place)
        bins.append(bin)
        if not free[room - size]:
            bisect.insort(rooms, room - size)
        free[room - size].append(bin)
    return order, np.array(bins)


def count_targets(dataset, seed, first_sample, n_samples):
    """Targets with y >= 0 in the samples first_sample .. first_sample + n_samples - 1 of a run, exactly."""
    if not dataset.is_packed:
        return n_samples * dataset.block_size
    return int(dataset.n_targets[sample_windows(first_sample + np.arange(n_samples), dataset.n_windows, seed)].sum())


def open_dataset(data_dir, dataset, split, block_size, vocab_size=None):
    """Open a split ('train' or 'val') of the folder data_dir/dataset; a PackedDataset if its meta.json says "masked".

    vocab_size: None takes the dataset's. dataset='synthetic': random tokens, a pure function of their position.
    No token is read but a few for the fingerprint. Raises FileNotFoundError for a dataset, split or file that is not
    there, ValueError for a damaged one, an id known to be outside the vocabulary, data that block_size does not fit.
    """
    if block_size < 1 or (vocab_size is not None and vocab_size < 1):
        raise ValueError(f'block_size={block_size}, vocab_size={vocab_size}: expected 1 or more')
    if dataset == 'synthetic':
        tokens = RandomTokens(vocab_size or SYNTHETIC_VOCAB_SIZE, split)
        return TokenDataset(dataset, split, block_size, int(tokens.vocab_size), {}, [dataset], lambda name: tokens)
    folder, command = Path(data_dir) / dataset, _prepare_command(data_dir, dataset)
    raw = folder if folder.exists() else Path(dataset)  # as the user sees it, outside of data_dir
    if raw.exists() and not any(path.suffix in ENDINGS or path.name in OF_PREPARED for path in raw.glob('*')):
        raise ValueError(
            f'dataset={dataset}: {raw} holds no tokens; if it is text, first `python prepare_data.py --dataset={raw}`, '
            'to fine-tune with --tokenizer=MODEL_FOLDER: its last line says how to train on that'
        )
    if not folder.is_dir():
        found = sorted({path.parent.name for path in Path(data_dir).glob('*/*') if path.suffix in ENDINGS})
        holds = f'{os.path.abspath(data_dir)} holds: {", ".join(found) or "no dataset"}'
        close = difflib.get_close_matches(dataset, found, n=1)
        hint = f'did you mean {close[0]}? If not, ' if close else ''
        raise FileNotFoundError(f'dataset={dataset}: there is no {folder}; {hint}make it with {command}; {holds}')
    meta = _read_meta(folder)
    if not meta and (folder / 'unfinished.json').exists():
        raise ValueError(f'{folder}: half prepared; finish it with the same {command}')
    facts = meta.get('splits', {}).get(split, {})
    allowed = vocab_size or meta.get('vocab_size', math.inf)
    if facts.get('max_token', -1) >= allowed:
        given = f'{folder}: split {split!r} has token id {facts["max_token"]}, not below vocab_size={allowed}'
        raise ValueError(f'{given}; without --vocab_size the dataset says it: {meta.get("vocab_size")}')
    if 'vocab_size' not in meta:
        assumed = f'vocab_size={vocab_size} as given' if vocab_size else f"GPT-2's vocab_size={GPT2_VOCAB_SIZE}"
        aside = 'for other tokens give --vocab_size; a meta.pkl is never opened, for it can run code'
        _say_once(f'{folder}: no vocab_size in a meta.json; assuming {assumed}, and uint16 without a header ({aside})')
    vocab_size = vocab_size or meta.get('vocab_size', GPT2_VOCAB_SIZE)
    lengths = {str(folder / shard['file']): shard['tokens'] for shard in facts.get('shards', [])}

    def open_shard(path):
        tokens = read_shard(path, meta.get('dtype', 'uint16'))
        if (n := lengths.get(path, len(tokens))) != len(tokens):
            raise ValueError(f'{path}: its size is {len(tokens):,} tokens, meta.json says {n:,}; prepare both again')
        return tokens.view(np.ndarray)  # a plain array: slicing an np.memmap takes four times as long

    shards = _find_shards(folder, split, meta)
    kind = PackedDataset if meta.get('masked') else TokenDataset
    return kind(str(folder), split, block_size, vocab_size, meta, shards, open_shard)


def _read_meta(folder):
    """The dict in a dataset's meta.json; {} when there is none."""
    path = folder / 'meta.json'
    if not path.exists():
        return {}
    with open(path, encoding='utf-8') as file:
        try:
            return dict(json.load(file))
        except (ValueError, TypeError) as error:
            raise ValueError(f'{path}: not a JSON object ({error}); prepare the dataset again') from error


def _find_shards(folder, split, meta):
    """Paths of a split's shards in order: those that meta.json lists, or those with the split in their names."""
    if 'splits' in meta:
        shards = meta['splits'].get(split, {}).get('shards', [])
        names = [shard['file'] for shard in shards]
        files = names + [shard['mask_file'] for shard in shards if meta.get('masked')]
        absent = [name for name in files if not (folder / name).exists()]
        if absent:
            raise FileNotFoundError(
                f'{folder}: meta.json lists {len(names)} shards of split {split!r}, {len(absent)} files are missing, '
                f'first {absent[0]}; copy or prepare the dataset again'
            )
    else:
        word = re.compile(rf'(?<![a-z])({SPLIT_WORDS[split]})(?![a-z])')
        names = [name for name in os.listdir(folder) if name.endswith(ENDINGS) and word.search(name.lower())]
        # Digits compare as numbers: train_10 comes after train_9.
        names.sort(key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r'(\d+)', name)])
    if not names:
        here = f'it holds {", ".join(sorted(os.listdir(folder))[:10]) or "nothing"}'
        raise FileNotFoundError(f'{folder}: no split {split!r}, {here}; prepare it again, with a --val_fraction')
    return [str(folder / name) for name in names]


def _prepare_command(data_dir, dataset):
    """The command that makes a dataset of this name, as far as the name tells."""
    arguments = f'--dataset=FILE_FOLDER_OR_HUB_NAME --name={dataset}'
    if known := re.fullmatch(r'(stdlib|fineweb-10BT|fineweb-100BT|fineweb-edu-10BT)-(.+)', dataset):
        tokenizer = re.sub(r'^bpe(\d+)$', r'bpe --vocab_size=\1', known[2])
        arguments = f'--dataset={known[1]} --tokenizer={tokenizer}'
    return f'`python prepare_data.py {arguments} --data_dir={data_dir}`'


@functools.cache
def _say_once(line):
    """Print on rank 0, and only once: every rank opens both splits."""
    if os.environ.get('RANK', '0') == '0':
        print(line, flush=True)


# --- batches ----------------------------------------------------------------------------------------------------------


def batches(dataset, seed, first_sample, global_batch_size, batch_size, rank, world_size, device):
    """Endless iterator over this rank's training batches, one (x, y) per micro-step; close() it when done.

    x, y: int64 (batch_size, block_size) on `device`; y is x one token later, and may hold -1 where no loss is counted.
    Of a packed dataset (x, y, starts): int64 (batch_size, n_starts), where each conversation of a row begins, which
    attention must not leave; unused places hold block_size.
    first_sample: steps done x global_batch_size. With B = global_batch_size, step s of the run reads the samples
    [s*B, (s+1)*B); of these rank r takes B/world_size from r*B/world_size on, batch_size per micro-step.
    A background thread makes them ahead, see run_ahead().
    """
    assert global_batch_size % (batch_size * world_size) == 0, f'{global_batch_size=}, {batch_size=}, {world_size=}'
    per_rank = global_batch_size // world_size
    steps_at_once = max(1, SAMPLES_AT_ONCE // per_rank)

    def host_batches():
        steps = np.arange(steps_at_once, dtype=np.int64)[:, None]
        of_rank = rank * per_rank + np.arange(per_rank, dtype=np.int64)
        for first in itertools.count(first_sample, steps_at_once * global_batch_size):
            windows = sample_windows(first + steps * global_batch_size + of_rank, dataset.n_windows, seed)
            for of_micro_step in windows.reshape(-1, batch_size):
                yield _host_batch(dataset, of_micro_step, batch_size, device)

    return run_ahead(host_batches(), device)


def eval_batches(dataset, n_sequences, batch_size, rank, world_size, device):
    """Iterator over this rank's share of the windows 0 .. min(n_sequences, n_windows) - 1, the same ones every time.

    Every rank gets the same number of batches, made as in batches(), because a sharded model's forward is a collective.
    Rows that no window is left for have y = -1, which the loss ignores: all ranks together see each window once.
    """
    n_sequences, per_round = min(n_sequences, dataset.n_windows), batch_size * world_size

    def host_batches():
        for first in range(rank * batch_size, -(-n_sequences // per_round) * per_round, per_round):
            yield _host_batch(dataset, range(first, min(first + batch_size, n_sequences)), batch_size, device)

    return run_ahead(host_batches(), device)


def _host_batch(dataset, windows, batch_size, device):
    """Inputs, targets (batch_size, block_size), where packed starts (batch_size, n_starts); int64 on the host, with
    filler rows at the end.

    numpy does the copying: a large torch operator would start a second pool of compute threads for this thread.
    """
    pinned = torch.device(device).type == 'cuda'  # a copy from pageable memory would make the host wait
    new = functools.partial(torch.empty, dtype=torch.int64, pin_memory=pinned)
    parts, rows, fillers = [*new(2, batch_size, dataset.block_size)], dataset.read(windows), [0, -1]
    if dataset.is_packed:
        parts.append(new(batch_size, dataset.n_starts))
        fillers.append([0] + [dataset.block_size] * (dataset.n_starts - 1))  # one document
    else:
        rows = rows[:, :-1], rows[:, 1:]
    for part, of_windows, filler in zip(parts, rows, fillers, strict=True):
        part.numpy()[: len(windows)], part.numpy()[len(windows) :] = of_windows, filler
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
