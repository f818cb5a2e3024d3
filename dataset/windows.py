"""
Token shards on disk as windows of block_size tokens. Each sample of a run is one window.

    dataset = open_dataset('data', 'stdlib-bpe2048', 'train', block_size=1024)
    rows = dataset.read([0, 17])  # windows by their numbers

A split is the concatenation of its shards, cut into windows: window w has the inputs tokens[w*T : w*T + T] with
T = block_size, and the same shifted by one as targets. If documents are kept apart (windows='documents'), or if the
data are conversations, windows hold whole documents or conversations instead.

Files are shards with a header (this project's, llm.c's, modded-nanogpt's), nanoGPT's headerless train.bin and val.bin,
or .npy files; prepare_data.py's meta.json describes them. To read another format of token files, add their ending to
ENDINGS below and their layout to read_shard() in dataset/shards.py, which returns the tokens of a file as a numpy array
or memmap of one dimension, of integers. To read another format of texts, see CONTRIBUTING.md.
"""

import bisect
import difflib
import functools
import hashlib
import itertools
import math
import os
import re
from pathlib import Path

import numpy as np

from dataset.shards import AS_END, FIRST, LEARNED, read_meta, read_shard
from dataset.shuffle import GOLDEN_GAMMA, MULTIPLIER, permuted

ENDINGS = ('.bin', '.npy')  # of the files in a dataset's folder that hold tokens
PREPARED_FILES = ('meta.json', 'unfinished.json')  # prepare_data.py keeps the second until it writes the first
# In a file's name, the split must be a word of its own: fineweb_train_000001.bin yes, constrained.bin no.
SPLIT_WORDS = {'train': 'train|training', 'val': 'val|valid|validation'}
TOKEN_BYTES = 'token_bytes.npy'  # beside the shards: bytes of text that each token stands for
GPT2_VOCAB_SIZE = 50257  # assumed for files without meta.json
SYNTHETIC_VOCAB_SIZE, SYNTHETIC_TOKENS = 50304, 10**11  # GPT-2's padded to a multiple of 64; per split
WINDOWS_AT_ONCE = 256  # counted together: of 2,048 tokens they take 8 MB
MAX_MAPPED_SHARDS = 256  # each takes a file descriptor, often limited to 1,024; 100B tokens have 1,000 shards


class RandomTokens:
    """A shard without a file: SYNTHETIC_TOKENS uniform token ids, each a hash of its position, computed when sliced."""

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


class Absent(TokenDataset):
    """A split that is not on this machine, for a plan of a run elsewhere: nobody knows more of it than its name says,
    as fineweb-10BT-gpt2 does. It counts as text in full windows; n_tokens and n_windows may be inf."""

    is_absent = True

    def __init__(self, name, split, block_size, vocab_size):
        self.name, self.split, self.block_size, self.packing, self.eot = name, split, block_size, True, None
        self.fingerprint = name
        size = re.search(r'-(\d+)BT\b', name)  # of the hub's samples: tokens of GPT-2, in billions
        self.n_tokens = int(size[1]) * 10**9 if size else math.inf
        self.n_windows = self.n_tokens // block_size if size else math.inf
        tokenizer = re.search(r'-(?:(gpt2)|(bytes)|bpe(\d+))$', name)
        if not vocab_size and not tokenizer:
            raise ValueError(
                f'{name} is not on this machine, and its name does not say how many tokens its vocabulary has: give '
                'that, as in --vocab_size=50304'
            )
        self.vocab_size = vocab_size or int(tokenizer[3] or (GPT2_VOCAB_SIZE if tokenizer[1] else 257))
        known = f'some {size[1]}B tokens, by its name' if size else 'how many tokens it has is not known'
        self.line = f'{name} is not on this machine: {known}'


def is_absent(data_dir, dataset):
    """Whether there is nothing of that name, neither prepared nor as text."""
    return dataset != 'synthetic' and not (Path(data_dir, dataset).exists() or Path(dataset).exists())


class PackedDataset(TokenDataset):
    """Windows of block_size positions that hold whole pieces of text, then padding; attention stays within a piece.

    A piece of L tokens takes L - 1 positions: all its tokens except the last are inputs, all except the first targets.
    n_targets: int64 (n_windows,), how many targets count. n_starts: the largest number of pieces in a window, plus one
    for the padding. padding: its share of all positions.
    """

    is_packed = True
    _learned = None  # uint8 (n_tokens,): which tokens are learned; None = all
    _as_end = None  # uint8 (n_tokens,), not 0 where the target is end-of-text in place of the token; None = nowhere

    def _pack(self, starts, lengths, learned):
        """Pack pieces of the split into windows. starts, lengths: in tokens, (n,), or (n, k) for units of k pieces that
        stay side by side. learned: how many targets of each piece, or unit, count."""
        starts, lengths = starts.reshape(len(learned), -1), lengths.reshape(len(learned), -1)
        self._sizes = (lengths - 1).sum(1)  # in positions
        # The longest pieces are packed first, so the windows are shuffled afterwards: evaluation reads the first ones.
        order = bins = np.arange(len(learned))
        if self.packing:
            order, bins = pack(self._sizes, self.block_size)
        self.n_windows = int(bins.max()) + 1
        windows = permuted(bins, self.n_windows, seed=0)
        by_window = np.argsort(windows, kind='stable')
        order = order[by_window]
        self._starts, self._lengths = starts[order].ravel(), lengths[order].ravel()
        # Window w holds the units from borders[w] up to borders[w + 1].
        borders = np.searchsorted(windows[by_window], np.arange(self.n_windows + 1))
        self.n_targets = np.add.reduceat(learned[order], borders[:-1])
        self._borders = borders * starts.shape[1]  # of the pieces
        self.n_starts = int(np.diff(self._borders).max()) + 1
        self.padding = 1 - self._sizes.sum() / (self.n_windows * self.block_size)

    def count_packed(self):
        """How many windows would hold these pieces with packing."""
        return int(pack(self._sizes, self.block_size)[1].max()) + 1

    def read(self, windows):
        """Inputs and targets (len(windows), block_size) and starts (len(windows), n_starts), all int64; see
        data.batches()."""
        batch = np.empty((2, len(windows), self.block_size), dtype=np.int64)
        starts = np.full((len(windows), self.n_starts), self.block_size)
        starts[:, 0] = 0
        for (x, y), starts_of_row, window in zip(batch.swapaxes(0, 1), starts, windows, strict=True):
            spans, begin = slice(*self._borders[window : window + 2]), 0
            pieces = zip(self._starts[spans].tolist(), self._lengths[spans].tolist(), strict=True)
            for number, (start, length) in enumerate(pieces, start=1):
                tokens, end = self._read_spans([start], length)[0], begin + length - 1
                x[begin:end], y[begin:end] = tokens[:-1], tokens[1:]
                if self._learned is not None:
                    y[begin:end][self._learned[start + 1 : start + length] == 0] = -1
                if self._as_end is not None:
                    y[begin:end][self._as_end[start + 1 : start + length] > 0] = self.eot
                begin = starts_of_row[number] = end
            x[begin:], y[begin:] = 0, -1
        return *batch, starts


class Documents(PackedDataset):
    """One split of texts whose documents are kept apart (windows='documents').

    A piece begins with the end-of-text token that precedes a document, as generation does, and ends with the document's
    own end-of-text. So each token is a target once, as in a stream. A document that is longer than a window is cut into
    several pieces (arXiv 2404.10830). line: a line for the log that compares cuts and padding with those of a stream.
    """

    def _cut(self, facts):
        if self.eot is None:
            raise ValueError(
                f'{self.name}: no eot_token in a meta.json says where documents end: use --windows=stream, or prepare '
                'it with prepare_data.py'
            )
        super()._cut(facts)  # raises for a split that is too short
        T, stream_windows = self.block_size, self.n_windows
        ends = [np.zeros(1, dtype=np.int64)]
        for shard, end in zip(self._shards, self._ends, strict=True):
            tokens = self._open_shard(shard)
            ends.append(np.flatnonzero(tokens == self.eot) + (end - len(tokens)))
        starts = np.concatenate(ends)
        sizes = np.diff(starts, append=self.n_tokens - 1)  # in positions
        starts, sizes = starts[sizes > 0], sizes[sizes > 0]
        n_pieces = -(-sizes // T)
        number = np.arange(n_pieces.sum()) - np.repeat(np.cumsum(n_pieces) - n_pieces, n_pieces)  # in the document
        piece_sizes = np.minimum(np.repeat(sizes, n_pieces) - number * T, T)
        self._pack(np.repeat(starts, n_pieces) + number * T, piece_sizes + 1, piece_sizes)

        n_cut = np.count_nonzero(n_pieces > 1)
        cut_in_stream = np.count_nonzero(starts // T != (starts + sizes - 1) // T)
        self.line = (
            f'{self.name}: {len(starts):,} documents ({self.split}). windows=documents: {n_cut / len(starts):.1%} are '
            f'cut, {self.padding:.2%} of {self.n_windows:,} windows is padding. windows=stream: '
            f'{cut_in_stream / len(starts):.1%} are cut, no padding in {stream_windows:,} windows'
        )

    def _fingerprint(self, facts):
        return f'{super()._fingerprint(facts)}-documents'  # the same tokens in other samples


class Conversations(PackedDataset):
    """One split of conversations, packed whole; a conversation of more than block_size + 1 tokens loses its end.

    A mask has one byte per token of its shard, the sum of LEARNED, FIRST and AS_END. Targets that are not learned are
    -1. longest: the number of tokens of the longest conversation.
    """

    is_chat = True

    def _find(self, facts):
        """(where each conversation starts, its length): in tokens. Reads the masks."""
        mask = self._read_masks(facts)
        self._learned = mask & LEARNED  # stays in memory, 1 byte per token
        starts = np.flatnonzero(mask & FIRST)
        self._as_end = as_end if (as_end := mask & AS_END).any() else None
        return starts, np.diff(starts, append=self.n_tokens)

    def _cut(self, facts):
        """Find the conversations, drop those with nothing to learn, and pack the rest into windows."""
        starts, whole = self._find(facts)
        lengths = np.minimum(whole, self.block_size + 1)
        # How many targets of each conversation are learned. reduceat sums from each border to the next, and the borders
        # are each conversation's first target and its end. So every second sum is what we want; the sums in between are
        # over tokens after a conversation's end, and are dropped.
        borders = np.stack((starts + 1, starts + lengths), axis=1).ravel()
        learned = np.add.reduceat(self._learned, borders, dtype=np.int64)[::2]
        learned[lengths == 1] = 0  # for an empty range reduceat returns the element at its beginning
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
        self._pack(starts[kept], lengths[kept], learned[kept])

    def _read_masks(self, facts):
        """The masks of all shards, uint8 (n_tokens + 1,): one more, because reduceat's borders must be indices."""
        mask, begin = np.zeros(self.n_tokens + 1, dtype=np.uint8), 0
        for shard, end in zip(facts['shards'], self._ends, strict=True):
            path = f'{self.name}/{shard["mask_file"]}'
            piece = np.fromfile(path, dtype=np.uint8)
            if len(piece) != end - begin or piece.max(initial=0) > (LEARNED | FIRST | AS_END):
                sizes = f'its size is {len(piece):,} bytes, expected are {end - begin:,} of 0 to 7, one per token'
                raise ValueError(f'{path}: {sizes}; copy or prepare it again')
            mask[begin:end] = piece
            begin = end
        return mask


class Pairs(Conversations):
    """One split of pairs of a better and a worse answer to the same prompt, for train_dpo.py.

    Conversations 2k and 2k + 1 are the chosen and the rejected one of pair k. They stay side by side in a window, so
    that in each row of `starts` documents 2k and 2k + 1 are a pair, and what is left over is padding. A pair that does
    not fit is dropped: cut answers would lose their end. n_targets: pairs, since the loss is a mean over pairs.
    longest: such that block_size = longest - 1 holds every pair.
    """

    is_pairs = True
    reference = None  # float32 (n_windows, n_starts), see runtime/reference.py; read() then returns its rows, too

    def read(self, windows):
        parts = super().read(windows)
        return parts if self.reference is None else (*parts, self.reference[windows])

    def _cut(self, facts):
        starts, lengths = (found.reshape(-1, 2) for found in self._find(facts))
        sizes = (lengths - 1).sum(1)
        self.longest = int(sizes.max(initial=1)) + 1
        fits = sizes <= self.block_size
        n_dropped = np.count_nonzero(~fits)
        line = (
            f'{self.name}: {n_dropped:,} of {len(sizes):,} pairs ({self.split}) are dropped, since both answers with '
            f'their prompts take more than block_size={self.block_size} tokens, the longest {self.longest - 1:,}'
        )
        if not fits.any():
            raise ValueError(f'{line}: use --block_size={sizes.min()} or more')
        if n_dropped:
            _say_once(f'WARNING: {line}' if n_dropped > 0.05 * len(sizes) else line)
        self._pack(starts[fits], lengths[fits], np.ones(np.count_nonzero(fits), dtype=np.int64))


DATASET_CLASSES = {'stream': TokenDataset, 'documents': Documents}


def pack(sizes, capacity):
    """Pack items into bins: (items by decreasing size, the bin of each). sizes: array of sizes from 1 to capacity.

    Best fit decreasing: each item goes into the bin with the least room that still holds it. Items of equal size keep
    their order.
    """
    order = np.argsort(-sizes, kind='stable')
    bins, unused = [], itertools.count()
    free = [[] for _ in range(capacity + 1)]  # [room]: the bins with that much room
    rooms = []  # the values of room that some bin has, sorted
    for size in sizes[order].tolist():
        place = bisect.bisect_left(rooms, size)  # of the least room that suffices
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


def open_dataset(data_dir, dataset, split, block_size, vocab_size=None, windows='stream', packing=True):
    """Open a split ('train' or 'val') of the folder data_dir/dataset; Conversations if its meta.json says "masked", and
    Pairs if it also says "pairs".

    windows: 'stream' joins documents, 'documents' keeps them apart. vocab_size: None = the dataset's. packing: whether
    windows of conversations, or of documents that are kept apart, hold several of them.
    dataset='synthetic': random tokens, a pure function of their position.
    No tokens are read except a few for the fingerprint, or all of them where the documents' borders are looked for.
    Raises FileNotFoundError for a dataset, split or file that does not exist; ValueError for a damaged one, for an id
    known to be outside the vocabulary, and for data that are too short for block_size.
    """
    if dataset == 'synthetic':
        tokens = RandomTokens(vocab_size or SYNTHETIC_VOCAB_SIZE, split)
        return DATASET_CLASSES[windows](
            dataset, split, block_size, int(tokens.vocab_size), {}, [dataset], lambda name: tokens, packing
        )
    folder, command = Path(data_dir) / dataset, _prepare_command(data_dir, dataset)
    raw = folder if folder.exists() else Path(dataset)  # as the user sees it, outside of data_dir
    if raw.exists() and not any(path.suffix in ENDINGS or path.name in PREPARED_FILES for path in raw.glob('*')):
        raise ValueError(
            f'dataset={dataset}: {raw} holds no tokens; if it is text, first `python prepare_data.py --dataset={raw}`, '
            'to fine-tune with --tokenizer=MODEL_FOLDER: its last lines say how to train on that'
        )
    if not folder.is_dir():
        found = sorted({path.parent.name for path in Path(data_dir).glob('*/*') if path.suffix in ENDINGS})
        holds = f'{os.path.abspath(data_dir)} holds: {", ".join(found) or "no dataset"}'
        close = difflib.get_close_matches(dataset, found, n=1)
        hint = f'did you mean {close[0]}? If not, ' if close else ''
        raise FileNotFoundError(f'dataset={dataset}: there is no {folder}; {hint}make it with {command}; {holds}')
    meta = read_meta(folder)
    if meta.get('masked') and 'splits' not in meta:
        raise ValueError(f'{folder}/meta.json: found masked without splits, expected the names of the masks')
    if not meta and (folder / 'unfinished.json').exists():
        raise ValueError(f'{folder}: half prepared; finish it with the same {command}')
    facts = meta.get('splits', {}).get(split, {})
    allowed = vocab_size or meta.get('vocab_size', math.inf)
    if facts.get('max_token', -1) >= allowed:
        given = f'{folder}: split {split!r} has token id {facts["max_token"]}, not below vocab_size={allowed}'
        n = meta.get('vocab_size', facts['max_token'] + 1)
        raise ValueError(
            f"{given}: leave out --vocab_size, or give its tokenizer's {n}; where --init_from decides it, prepare the "
            f"data with that model's tokenizer, or save the model after transformers' resize_token_embeddings({n})"
        )
    if 'vocab_size' not in meta:
        assumed = f'vocab_size={vocab_size} of the run' if vocab_size else f"GPT-2's vocab_size={GPT2_VOCAB_SIZE}"
        aside = 'for other tokens give --vocab_size; a meta.pkl is never opened, for it can run code'
        if vocab_size is None:
            meta['eot_token'] = GPT2_VOCAB_SIZE - 1
        _say_once(f'{folder}: no vocab_size in a meta.json; assuming {assumed}, and uint16 without a header ({aside})')
    vocab_size = vocab_size or meta.get('vocab_size', GPT2_VOCAB_SIZE)
    lengths = {str(folder / shard['file']): shard['tokens'] for shard in facts.get('shards', [])}

    def open_shard(path):
        tokens = read_shard(path, meta.get('dtype'))
        if (n := lengths.get(path, len(tokens))) != len(tokens):
            raise ValueError(f'{path}: its size is {len(tokens):,} tokens, meta.json says {n:,}; prepare both again')
        return tokens.view(np.ndarray)  # a plain array: slicing an np.memmap takes four times as long

    shards = _find_shards(folder, split, meta)
    kind = DATASET_CLASSES[windows]
    if meta.get('masked'):
        kind = Pairs if meta.get('pairs') else Conversations
    return kind(str(folder), split, block_size, vocab_size, meta, shards, open_shard, packing)


def has_split(data_dir, dataset, split):
    """Whether the folder data_dir/dataset has files of a split."""
    folder = Path(data_dir) / dataset
    if not folder.is_dir():
        return dataset == 'synthetic'
    return bool(_names_of_shards(folder, split, read_meta(folder)))


def _names_of_shards(folder, split, meta):
    """Names of a split's files in order: those that meta.json lists, else those that have the split in their names.
    Raises ValueError if these differ in more than numbers, since some may be masks or lengths."""
    if 'splits' in meta:
        return [shard['file'] for shard in meta['splits'].get(split, {}).get('shards', [])]
    word = re.compile(rf'(?<![a-z])({SPLIT_WORDS[split]})(?![a-z])')
    names = sorted(name for name in os.listdir(folder) if name.endswith(ENDINGS) and word.search(name.lower()))
    stems = [name.rpartition('.')[0] for name in names]
    if len({re.sub(r'\d+', '', stem) for stem in stems}) > 1 or len({*stems}) < len(stems):
        kinds = {re.sub(r'\d+', '', name): name for name in names}
        found = f'{len(names)} files may be the tokens of split {split!r}, among them {", ".join(kinds.values())}'
        raise ValueError(
            f'{folder}: {found}: leave only the files of tokens, whose names may differ in numbers; tokens of another '
            'source go into a folder of their own, for --dataset=ONE:0.5,OTHER:0.5'
        )
    # Digits are compared as numbers, so that train_10 comes after train_9.
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r'(\d+)', name)])


def fingerprint_of(facts, n_tokens, is_chat):
    """What TokenDataset.fingerprint begins with, from what meta.json says of a split; None if it lacks the sha256 of a
    file."""
    keys = ('sha256', 'mask_sha256')[: 1 + is_chat]
    digests = [shard.get(key) for shard in facts.get('shards', []) for key in keys]
    if not (digests and all(digests)):
        return None
    return hashlib.sha256(f'{n_tokens}{" ".join(digests)}'.encode()).hexdigest()[:16]


def fingerprints_of(meta):
    """fingerprint_of() each split of a meta.json, as far as it has one."""
    splits = meta.get('splits', {}).values()
    return {fingerprint_of(facts, facts.get('tokens'), bool(meta.get('masked'))) for facts in splits} - {None}


def _find_shards(folder, split, meta):
    """Paths of a split's shards in order."""
    names = _names_of_shards(folder, split, meta)
    if 'splits' in meta:
        shards = meta['splits'].get(split, {}).get('shards', [])
        files = names + [shard['mask_file'] for shard in shards if meta.get('masked')]
        absent = [name for name in files if not (folder / name).exists()]
        if absent:
            raise FileNotFoundError(
                f'{folder}: meta.json lists {len(names)} shards of split {split!r}, {len(absent)} files are missing, '
                f'first {absent[0]}; copy or prepare the dataset again'
            )
    if not names:
        here = f'it holds {", ".join(sorted(os.listdir(folder))[:10]) or "nothing"}'
        other = ', or validate on another dataset, --val_dataset=NAME, or on none, --eval_sequences=0'
        other = other if split == 'val' else ''
        raise FileNotFoundError(f'{folder}: no split {split!r}, {here}; prepare it again, with a --val_fraction{other}')
    return [str(folder / name) for name in names]


def _prepare_command(data_dir, dataset):
    """The command that makes a dataset of this name, as far as the name reveals it."""
    arguments = f'--dataset=FILE_FOLDER_OR_HUB_NAME --name={dataset}'
    if known := re.fullmatch(r'(stdlib|fineweb-10BT|fineweb-100BT|fineweb-edu-10BT)-(.+)', dataset):
        tokenizer = re.sub(r'^bpe(\d+)$', r'bpe --vocab_size=\1', known[2])
        if not re.match(r'(bpe|bytes|gpt2|\w+_(base|edit|harmony))\b', tokenizer):  # of a model, whose folder it was
            tokenizer = f'models/{tokenizer}'
        arguments = f'--dataset={known[1]} --tokenizer={tokenizer}'
    return f'`python prepare_data.py {arguments} --data_dir={data_dir}`'


@functools.cache
def _say_once(line):
    """Print a line on rank 0, and only once, although each split may be opened several times."""
    if os.environ.get('RANK', '0') == '0':
        print(line, flush=True)
