"""
Token shards on disk, the order in which a run sees them, and batches made ahead of time.

    dataset = open_dataset('data', 'stdlib-bpe2048', 'train', block_size=1024)
    for x, y in batches(dataset, seed, first_sample, global_batch_size, batch_size, rank, world_size, device): ...

A split is the concatenation of its shards, cut into windows: window w has the inputs tokens[w*T : w*T + T] with
T = block_size, and as targets the same shifted by one. Sample i of a run is one window, a pure function of (seed, i)
whatever the number of ranks: there is no loader state to save, the step in a checkpoint says where to go on. Files are
shards with a header (ours, llm.c's, modded-nanogpt's), nanoGPT's headerless train.bin and val.bin, or .npy files with
one row of integers; meta.json, written by prepare_data.py, tells what they hold.
"""

import bisect
import functools
import hashlib
import itertools
import json
import math
import os
import queue
import re
import struct
import threading
import weakref
from pathlib import Path

import numpy as np
import torch

# A shard: 256 little-endian int32 (magic, version, number of tokens, zeros), then the tokens. llm.c's layout.
HEADER_BYTES = 256 * 4
FORMATS = {np.dtype('<u2'): (20240520, 1), np.dtype('<u4'): (20240801, 7)}  # dtype -> magic, version
# nanoGPT's names, the only ones that may lack a header. As uint16 tokens both magics begin with an id above 55,000,
# which GPT-2's vocabulary does not have: a headerless file is not taken for one with a header.
HEADERLESS_NAMES = ('train.bin', 'val.bin')
# The split in a file's name is a word of its own: fineweb_train_000001.bin yes, constrained.bin no.
SPLIT_WORDS = {'train': 'train|training', 'val': 'val|valid|validation'}

GPT2_VOCAB_SIZE = 50257  # assumed of files that come without meta.json
SYNTHETIC_VOCAB_SIZE, SYNTHETIC_TOKENS = 50304, 10**11  # GPT-2's padded to a multiple of 64; per split

# A mapped file holds a file descriptor and 1,024 of them is a common limit: 100B tokens may be 1,000 shards per split.
MAX_MAPPED_SHARDS = 256
SAMPLES_AT_ONCE = 1024  # their windows are computed together: numpy takes as long for 12 numbers as for 500


# --- shards -----------------------------------------------------------------------------------------------------------


def write_shard(path, tokens, dtype):
    """Write a 1-D array of token ids as the shard `path`, as np.uint16 or np.uint32.

    The name appears only when every byte is on disk, so a killed run leaves no half-written shard.
    Raises ValueError when an id does not fit: numpy alone would store 128,000 in a uint16 as 62,464.
    """
    tokens = np.asarray(tokens)
    dtype = np.dtype(dtype).newbyteorder('<')
    magic, version = FORMATS[dtype]
    largest = np.iinfo(dtype).max
    assert tokens.ndim == 1 and tokens.dtype.kind in 'iu' and len(tokens) < 2**31, (path, tokens.dtype, tokens.shape)
    if len(tokens) and (tokens.min() < 0 or tokens.max() > largest):
        raise ValueError(
            f'{path}: token ids {tokens.min()} to {tokens.max()} do not fit into {dtype.name} (0 to {largest}); '
            f'a vocabulary above 65,536 needs uint32'
        )

    header = np.zeros(256, dtype='<i4')
    header[:3] = magic, version, len(tokens)
    unfinished = f'{path}.tmp'
    with open(unfinished, 'wb') as file:
        file.write(header.data)
        file.write(np.ascontiguousarray(tokens, dtype=dtype).data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def read_shard(path, headerless_dtype='uint16'):
    """Map the tokens of a shard or .npy file: a read-only np.memmap of shape (number of tokens,).

    headerless_dtype: of a train.bin or val.bin without a header.
    Raises ValueError, with the file's name, when its magic is unknown or its size is not what its header says: to read
    beyond the end of a mapped file kills the process with SIGBUS.
    """
    path = str(path)
    if path.endswith('.npy'):
        return _read_npy(path)
    with open(path, 'rb') as file:
        size = os.fstat(file.fileno()).st_size
        magic, version, n_tokens = struct.unpack('<3i', file.read(12).ljust(12, b'\0'))
    for dtype, magic_and_version in FORMATS.items():
        if (magic, version) == magic_and_version:
            expected = HEADER_BYTES + n_tokens * dtype.itemsize
            if size != expected:
                raise ValueError(
                    f'{path}: its size is {size:,} bytes, but with the {n_tokens:,} tokens of its header it takes '
                    f'{expected:,}: half-copied or damaged; copy or prepare it again'
                )
            return np.memmap(path, dtype=dtype, mode='r', offset=HEADER_BYTES, shape=(n_tokens,))
    if os.path.basename(path) not in HEADERLESS_NAMES:
        known = ' or '.join(f'{magic}, {version} ({dtype.name})' for dtype, (magic, version) in FORMATS.items())
        raise ValueError(
            f'{path}: its magic and version are {magic}, {version}, those of a shard {known}: copy or prepare it again '
            f'(without a header only {" and ".join(HEADERLESS_NAMES)} are read)'
        )
    dtype = np.dtype(headerless_dtype).newbyteorder('<')
    if size == 0 or size % dtype.itemsize:
        raise ValueError(f'{path}: its size, {size:,} bytes, is no whole number of {dtype.name} tokens; copy it again')
    return np.memmap(path, dtype=dtype, mode='r')


def _read_npy(path):
    """Map a .npy file of token ids."""
    try:
        tokens = np.load(path, mmap_mode='r', allow_pickle=False)  # a pickle can run code
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f'{path}: size or content is not that of a .npy file: {error}') from error
    if tokens.ndim != 1 or tokens.dtype.kind not in 'iu':
        raise ValueError(f'{path}: expected one row of integers, found {tokens.dtype} of shape {tokens.shape}')
    return tokens


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

    A permutation of 100B tokens does not fit into memory, so it is computed: an unbalanced Feistel network on a grid of
    rows x columns >= n_windows (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). A position is a
    cell. Each round shifts its row by a hash of its column, or its column by a hash of its row (keyed by seed, epoch
    and round); that can be undone, so no two positions meet. With ceil(sqrt(n_windows)) rows, fewer cells than rows lie
    outside the data: what lands there goes through again until it does not (cycle walking), still a bijection.
    """
    epochs, positions = np.divmod(np.asarray(indices, dtype=np.uint64), np.uint64(n_windows))
    run_key = _scramble(np.array([seed % 2**64], dtype=np.uint64))
    keys = _scramble(run_key + epochs * GOLDEN_GAMMA)
    rows = math.isqrt(n_windows - 1) + 1
    columns = -(-n_windows // rows)

    windows = _shuffle_grid(positions, keys, rows, columns)
    outside = windows >= n_windows
    while outside.any():
        windows[outside] = _shuffle_grid(windows[outside], keys[outside], rows, columns)
        outside = windows >= n_windows
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
    meta                  the dict of meta.json, {} without one
    fingerprint           changes when the tokens change: a resumed run must find the same ones
    bytes_per_token       of the split's text in UTF-8, for bits per byte; None where meta.json does not tell
    """

    def __init__(self, name, split, block_size, vocab_size, meta, shards, open_shard):
        """shards: names, in order; open_shard(name): its tokens, something with a length that can be sliced."""
        self.name, self.split, self.block_size, self.vocab_size, self.meta = name, split, block_size, vocab_size, meta
        self._shards = shards
        self._open_shard = functools.lru_cache(MAX_MAPPED_SHARDS)(open_shard)
        self._ends = list(itertools.accumulate(len(self._open_shard(shard)) for shard in shards))
        self.n_tokens = self._ends[-1]
        self.n_windows = (self.n_tokens - 1) // block_size
        if self.n_windows < 1:
            raise ValueError(
                f'block_size={block_size} is longer than the data: {block_size + 1:,} tokens make one window, split '
                f'{split!r} of {name} has {self.n_tokens:,}; use --block_size={max(1, self.n_tokens - 1)} or less'
            )
        facts = meta.get('splits', {}).get(split, {})
        self.bytes_per_token = facts['bytes'] / facts['tokens'] if facts.get('bytes') and facts.get('tokens') else None
        self.fingerprint = self._fingerprint(facts)

    def window(self, index):
        """The block_size + 1 tokens of one window, int64."""
        return self.read([index])[0]

    def read(self, windows):
        """Tokens of some windows: int64 (len(windows), block_size + 1). ValueError: an id outside the vocabulary."""
        tokens = np.empty((len(windows), self.block_size + 1), dtype=np.int64)
        for row, window in zip(tokens, windows, strict=True):
            self._copy_tokens(int(window) * self.block_size, row)
        unsigned = tokens.view(np.uint64)  # in which a negative id of a .npy file is a huge one
        if unsigned.max(initial=0) >= self.vocab_size:
            row, column = np.argwhere(unsigned >= self.vocab_size)[0]
            position = int(windows[row]) * self.block_size + int(column)
            raise ValueError(
                f'{self._shards[bisect.bisect_right(self._ends, position)]}: token id {tokens[row, column]} (token '
                f'{position:,} of split {self.split!r}) is not below vocab_size={self.vocab_size}: give its '
                f"tokenizer's --vocab_size, or prepare it again"
            )
        return tokens

    def _copy_tokens(self, start, out):
        """Fill `out` with the tokens from `start` on, across shard borders."""
        shard = bisect.bisect_right(self._ends, start)
        filled = 0
        while filled < len(out):
            tokens = self._open_shard(self._shards[shard])
            begin = start + filled - (self._ends[shard] - len(tokens))  # within this shard
            piece = tokens[begin : begin + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard += 1

    def _fingerprint(self, facts):
        """Hash of the shards' own sha256 where meta.json has them; else of the length and up to 64 x 1024 tokens."""
        digests = [shard.get('sha256') for shard in facts.get('shards', [])]
        digest = hashlib.sha256(str(self.n_tokens).encode())
        if digests and all(digests):
            digest.update(' '.join(digests).encode())
        else:
            sample = np.empty(min(1024, self.n_tokens), dtype=np.int64)
            for start in np.linspace(0, self.n_tokens - len(sample), 64, dtype=np.int64):
                self._copy_tokens(int(start), sample)
                digest.update(sample)
        return digest.hexdigest()[:16]


def open_dataset(data_dir, dataset, split, block_size, vocab_size=None):
    """Open a split ('train' or 'val') of the folder data_dir/dataset; no token is read but a few for the fingerprint.

    vocab_size: None takes the dataset's. dataset='synthetic': random tokens, a pure function of their position.
    Returns a TokenDataset. Raises FileNotFoundError for a dataset, split or shard that is not there, ValueError for a
    damaged shard, a token id that is known to be outside the vocabulary, and data shorter than block_size.
    """
    if block_size < 1 or (vocab_size is not None and vocab_size < 1):
        raise ValueError(f'block_size={block_size}, vocab_size={vocab_size}: expected 1 or more')
    if dataset == 'synthetic':
        tokens = RandomTokens(vocab_size or SYNTHETIC_VOCAB_SIZE, split)
        return TokenDataset(dataset, split, block_size, int(tokens.vocab_size), {}, [dataset], lambda name: tokens)

    folder = Path(data_dir) / dataset
    if not folder.is_dir():
        found = sorted({path.parent.name for end in ('bin', 'npy') for path in Path(data_dir).glob(f'*/*.{end}')})
        raise FileNotFoundError(
            f'dataset={dataset}: there is no {folder}; make it with {_prepare_command(data_dir, dataset)}; '
            f'{data_dir} holds: {", ".join(found) or "no dataset"}'
        )
    meta = _read_meta(folder)
    if not meta and (folder / 'unfinished.json').exists():  # prepare_data.py's, until it writes meta.json
        raise ValueError(f'{folder}: half prepared; finish it with the same {_prepare_command(data_dir, dataset)}')
    facts = meta.get('splits', {}).get(split, {})
    allowed = vocab_size or meta.get('vocab_size', math.inf)
    if facts.get('max_token', -1) >= allowed:
        raise ValueError(
            f'{folder}: split {split!r} has token id {facts["max_token"]}, not below vocab_size={allowed}; without '
            f'--vocab_size the dataset says it: {meta.get("vocab_size")}'
        )
    if 'vocab_size' not in meta:
        assumed = f'vocab_size={vocab_size} as given' if vocab_size else f"GPT-2's vocab_size={GPT2_VOCAB_SIZE}"
        _say_once(
            f'{folder}: no meta.json with a vocab_size; assuming {assumed}, and uint16 where a file has no header '
            f'(for other tokens give --vocab_size; a meta.pkl is never opened, for it can run code)'
        )
    vocab_size = vocab_size or meta.get('vocab_size', GPT2_VOCAB_SIZE)
    lengths = {str(folder / shard['file']): shard['tokens'] for shard in facts.get('shards', [])}

    def open_shard(path):
        tokens = read_shard(path, meta.get('dtype', 'uint16'))
        if len(tokens) != lengths.get(path, len(tokens)):
            raise ValueError(
                f'{path}: its size is {len(tokens):,} tokens, meta.json says {lengths[path]:,}; prepare both again'
            )
        return tokens.view(np.ndarray)  # a plain array: slicing an np.memmap takes four times as long

    shards = _find_shards(folder, split, meta)
    return TokenDataset(str(folder), split, block_size, vocab_size, meta, shards, open_shard)


def _read_meta(folder):
    """The dict in a dataset's meta.json; {} when there is none."""
    path = folder / 'meta.json'
    if not path.exists():
        return {}
    with open(path, encoding='utf-8') as file:
        text = file.read()
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise ValueError(f'{path}: not a JSON object ({error}); prepare the dataset again') from error


def _find_shards(folder, split, meta):
    """Paths of a split's shards in order: those that meta.json lists, or those with the split in their names."""
    if 'splits' in meta:
        names = [shard['file'] for shard in meta['splits'].get(split, {}).get('shards', [])]
        absent = [name for name in names if not (folder / name).exists()]
        if absent:
            raise FileNotFoundError(
                f'{folder}: meta.json lists {len(names)} shards of split {split!r}, {len(absent)} are missing, first '
                f'{absent[0]}; copy or prepare the dataset again'
            )
    else:
        word = re.compile(rf'(?<![a-z])({SPLIT_WORDS[split]})(?![a-z])')
        names = [name for name in os.listdir(folder) if name.endswith(('.bin', '.npy')) and word.search(name.lower())]
        # Digits compare as numbers: train_10 comes after train_9.
        names.sort(key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r'(\d+)', name)])
    if not names:
        here = ', '.join(sorted(os.listdir(folder))[:10]) or 'nothing'
        raise FileNotFoundError(
            f'{folder}: no split {split!r} ({split}_*.bin), it holds {here}; prepare it again, with a --val_fraction'
        )
    return [str(folder / name) for name in names]


def _prepare_command(data_dir, dataset):
    """The command that makes a dataset of this name, as far as the name tells."""
    arguments = f'--dataset=FILE_FOLDER_OR_HUB_NAME --name={dataset}'
    if known := re.fullmatch(r'(stdlib|fineweb-10BT|fineweb-100BT|fineweb-edu-10BT)-(.+)', dataset):
        source, tokenizer = known.groups()
        tokenizer = re.sub(r'^bpe(\d+)$', r'bpe --vocab_size=\1', tokenizer)
        arguments = f'--dataset={source} --tokenizer={tokenizer}'
    return f'`python prepare_data.py {arguments} --data_dir={data_dir}`'


@functools.cache
def _say_once(line):
    """Print on rank 0, and only once: every rank opens both splits."""
    if os.environ.get('RANK', '0') == '0':
        print(line, flush=True)


# --- batches ----------------------------------------------------------------------------------------------------------


def batches(dataset, seed, first_sample, global_batch_size, batch_size, rank, world_size, device, prefetch=8):
    """Endless iterator over this rank's training batches, one (x, y) per micro-step; close() it when done.

    x, y: int64 (batch_size, block_size) on `device`; y is x one token later, and may hold -1 where no loss is counted.
    first_sample: steps done x global_batch_size. With B = global_batch_size, step s of the run reads the samples
    [s*B, (s+1)*B); of these rank r takes B/world_size from r*B/world_size on, batch_size per micro-step.
    prefetch: batches that a background thread makes ahead; an error in it is raised by next() in its turn.
    """
    assert global_batch_size % (batch_size * world_size) == 0, (
        f'global_batch_size={global_batch_size} is no multiple of batch_size={batch_size} x {world_size} ranks'
    )
    per_rank = global_batch_size // world_size
    steps_at_once = max(1, SAMPLES_AT_ONCE // per_rank)

    def host_batches():
        steps = np.arange(steps_at_once, dtype=np.int64)[:, None]
        of_rank = rank * per_rank + np.arange(per_rank, dtype=np.int64)
        for first in itertools.count(first_sample, steps_at_once * global_batch_size):
            windows = sample_windows(first + steps * global_batch_size + of_rank, dataset.n_windows, seed)
            for of_micro_step in windows.reshape(-1, batch_size):
                yield _host_batch(dataset, of_micro_step, batch_size, device)

    return Prefetcher(host_batches(), device, prefetch)


def eval_batches(dataset, n_sequences, batch_size, rank, world_size, device):
    """Iterator over this rank's share of the windows 0 .. min(n_sequences, n_windows) - 1, the same ones every time.

    Every rank gets the same number of batches (x, y), because a sharded model's forward is a collective. Rows that no
    window is left for have y = -1, which the loss ignores: all ranks together see each window once.
    """
    n_sequences = min(n_sequences, dataset.n_windows)
    per_round = batch_size * world_size

    def host_batches():
        for first in range(rank * batch_size, -(-n_sequences // per_round) * per_round, per_round):
            yield _host_batch(dataset, range(first, min(first + batch_size, n_sequences)), batch_size, device)

    return Prefetcher(host_batches(), device)


def _host_batch(dataset, windows, batch_size, device):
    """Inputs and targets: int64 (2, batch_size, block_size) on the host, with filler where no window is left.

    numpy does the copying: a large torch operator would start a second pool of compute threads for this thread.
    """
    pinned = torch.device(device).type == 'cuda'  # a copy from pageable memory would make the host wait
    batch = torch.empty((2, batch_size, dataset.block_size), dtype=torch.int64, pin_memory=pinned)
    inputs, targets = batch.numpy()
    tokens = dataset.read(windows)
    inputs[: len(tokens)], inputs[len(tokens) :] = tokens[:, :-1], 0
    targets[: len(tokens)], targets[len(tokens) :] = tokens[:, 1:], -1
    return batch


class Prefetcher:
    """Iterator over (x, y) on `device`, from an iterator over host batches that a background thread runs ahead.

    The thread ends when the iterator is exhausted, closed or garbage-collected, and before the interpreter shuts down.
    It works in bursts, when half of its batches are used up: Python runs one thread at a time, so the training loop
    waits for it, and a step has emptied the caches: one batch of 12 x 64 takes 400 us then, each further one 30 us.

    On CUDA the copy is queued on the current stream, so whatever uses x and y comes after it. For 8 sequences of 2048
    tokens that is 2 x 8 x 2048 x 8 bytes = 262 KB, some 10 us of PCIe: a second stream would save nothing. The pinned
    memory of a batch is not rewritten during its copy: torch's allocator of pinned memory records an event with each
    such copy and hands the block out again only when that has passed.
    """

    def __init__(self, host_batches, device, depth=8):
        self._device = torch.device(device)
        self._burst = max(1, depth // 2)
        self._taken = 0
        # SimpleQueue because close() may run inside garbage collection: its put() is reentrant, queue.Queue's is not.
        self._ready = queue.SimpleQueue()  # host batches, then None at the end, or an exception
        self._tickets = queue.SimpleQueue()  # how many more batches to make; 0 = stop
        self._tickets.put(depth)
        self._stopped = threading.Event()
        arguments = (host_batches, self._device, self._ready, self._tickets, self._stopped)
        # A daemon: for any other the interpreter waits before it runs the finalizer, which ends this one.
        thread = threading.Thread(target=_run_ahead, args=arguments, name='prefetch', daemon=True)
        self.close = weakref.finalize(self, _stop, thread, self._tickets, self._stopped)
        thread.start()

    def __iter__(self):
        return self

    def __next__(self):
        if self._stopped.is_set():
            raise StopIteration
        batch = self._ready.get()
        if isinstance(batch, torch.Tensor):
            self._taken += 1
            if self._taken % self._burst == 0:
                self._tickets.put(self._burst)
            return tuple(batch.to(self._device, non_blocking=True))  # (x, y), each contiguous
        self.close()
        raise batch or StopIteration


def _run_ahead(host_batches, device, ready, tickets, stopped):
    """The background thread. It does not refer to the Prefetcher, which could not be garbage-collected otherwise."""
    try:
        if device.type == 'cuda':
            torch.cuda.set_device(device)  # a thread starts on GPU 0: pinning must not open a context there
        while n_batches := tickets.get():
            for _ in range(n_batches):
                if stopped.is_set():
                    return
                ready.put(next(host_batches, None))
    except Exception as error:
        ready.put(error)


def _stop(thread, tickets, stopped):
    """End the background thread and wait for it, unless garbage collection runs this in that very thread."""
    stopped.set()
    tickets.put(0)
    if thread is not threading.current_thread():
        thread.join(timeout=5)  # one batch takes microseconds; a file system that hangs must not hang the exit
