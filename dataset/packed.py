"""
Windows that hold whole documents, conversations or pairs of answers, packed side by side; attention stays within each.

    Documents        text with windows='documents'
    Conversations    of which some tokens are learned: masks beside the shards say which
    Pairs            a better and a worse answer side by side, for train_dpo.py
"""

import bisect
import itertools

import numpy as np

from dataset.shards import AS_END, FIRST, LEARNED
from dataset.shuffle import permuted
from dataset.windows import TokenDataset, say_once


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
            say_once(f'WARNING: {line}' if n_dropped > 0.05 * len(starts) else line)
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
            say_once(f'WARNING: {line}' if n_dropped > 0.05 * len(sizes) else line)
        self._pack(starts[fits], lengths[fits], np.ones(np.count_nonzero(fits), dtype=np.int64))


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
