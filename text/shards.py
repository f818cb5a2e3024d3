"""
A split of a dataset on its way to disk, so that a kill at any moment costs seconds and leaves no half shard.

    writer = ShardWriter(folder, 'train', dtype, shard_tokens, data.write_shard)
    writer.add(tokens, documents, text_bytes)
    writer.sync(); save writer.totals; writer.delete_full_partials()    # now and then: from here a later run goes on
    writer.finish()                                                     # the rest becomes the last shard

    writer = ShardWriter(..., totals)                                   # goes on from saved totals
    writer = ShardWriter(..., masked=True)                              # of conversations: train_000000.mask, too

Tokens collect in train_000000.partial. When they fill a shard, write_shard copies them to train_000000.bin, and
train_000001.partial is begun. The full one stays until totals that do not need it have been saved.

A masked dataset has one byte of flags per token. In .partial both are one uint32, token + (flags << 30), so that they
cannot come apart; a full shard becomes .mask and .bin.
"""

import hashlib
import os
from pathlib import Path

import numpy as np

LEARNED = 1  # the flag of tokens that count in the loss; chat.py, which sets the flags, has them all
FLAG_BITS = 30  # where the flags begin in .partial: vocabularies stay far below 2^30
TOKENS_AT_ONCE = 1 << 22  # of a masked shard, while it is taken apart: 28 MB


class ShardWriter:
    """
    totals      what meta.json says of the split: tokens, bytes, documents, max_token, shards (file, tokens, sha256);
                when masked also learned_tokens, longest (tokens of the longest conversation), and of each shard
                mask_file, mask_sha256; and in_partial, the tokens that are in no shard yet
    """

    def __init__(self, folder, split, dtype, shard_tokens, write_shard, totals=None, masked=False):
        """write_shard(path, tokens, dtype): writes a file that is there entirely or not at all."""
        self.folder, self.split = Path(folder), split
        self.dtype, self.shard_tokens, self.write_shard = np.dtype(dtype), shard_tokens, write_shard
        self.masked, self.partial_dtype = masked, np.dtype('uint32') if masked else self.dtype
        nothing = {'tokens': 0, 'bytes': 0, 'documents': 0, 'max_token': 0, 'shards': [], 'in_partial': 0}
        self.totals = totals or nothing | ({'learned_tokens': 0, 'longest': 0} if masked else {})
        self._open_partial()

    def add(self, tokens, documents, text_bytes, flags=None, longest=0):
        """Append tokens: an array of self.dtype, not empty. documents, text_bytes: what they add to the totals.

        When masked, flags: uint8, as many, of whole conversations; longest: the tokens of the longest among them.
        """
        assert tokens.dtype == self.dtype, f'{tokens.dtype} tokens for a {self.dtype} shard'
        assert (flags is not None) == self.masked and (flags is None or len(flags) == len(tokens))
        totals = self.totals
        totals['tokens'] += len(tokens)
        totals['documents'] += documents
        totals['bytes'] += text_bytes
        totals['max_token'] = max(totals['max_token'], int(tokens.max()))
        if self.masked:
            totals['learned_tokens'] += int((flags & LEARNED).sum())
            totals['longest'] = max(totals['longest'], longest)
            tokens = tokens.astype(np.uint32) | flags.astype(np.uint32) << FLAG_BITS
        while len(tokens):
            fitting = tokens[: self.shard_tokens - totals['in_partial']]
            self.file.write(fitting.data)
            totals['in_partial'] += len(fitting)
            tokens = tokens[len(fitting) :]
            if totals['in_partial'] == self.shard_tokens:
                self._finish_shard()
                self._open_partial()

    def sync(self):
        """Bring all that was added to disk. The totals of this moment may be saved then."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def delete_full_partials(self):
        """To be called when the totals have been saved: they no longer need the partial files of finished shards."""
        for path in self.folder.glob(f'{self.split}_*.partial'):
            if path != self.path:
                path.unlink()

    def finish(self):
        """Make the rest the last shard. The partial file stays, for the totals saved last refer to it."""
        if self.totals['in_partial']:
            self._finish_shard()
        self.file.close()
        del self.totals['in_partial']

    def _open_partial(self):
        self.path = self.folder / f'{self.split}_{len(self.totals["shards"]):06}.partial'
        self.file = open(self.path, 'ab')
        saved = self.totals['in_partial'] * self.partial_dtype.itemsize
        if self.file.tell() < saved:
            raise OSError(
                f'{self.path} has {self.file.tell():,} bytes of {saved:,}: delete {self.folder} and start over'
            )
        self.file.truncate(saved)  # what is behind was written after the totals had been saved

    def _finish_shard(self):
        self.file.close()
        shard, mask = self.path.with_suffix('.bin'), self.path.with_suffix('.mask')
        content = np.memmap(self.path, self.partial_dtype, 'r')
        if self.masked:
            self._take_apart(content, mask)  # before the shard: where that is, its mask is
            tokens = Path(f'{shard}.tokens')
            self.write_shard(shard, np.memmap(tokens, self.dtype, 'r'), self.dtype)
            tokens.unlink()
        else:
            self.write_shard(shard, content, self.dtype)
        facts = {'file': shard.name, 'tokens': self.totals['in_partial'], 'sha256': _sha256_of(shard)}
        if self.masked:
            facts |= {'mask_file': mask.name, 'mask_sha256': _sha256_of(mask)}
        self.totals['shards'].append(facts)
        self.totals['in_partial'] = 0

    def _take_apart(self, content, mask):
        """Write the flags of a partial file as `mask`, and its tokens beside the shard, from where they are copied."""
        with open(f'{mask}.tmp', 'wb') as flags, open(mask.with_suffix('.bin.tokens'), 'wb') as tokens:
            for start in range(0, len(content), TOKENS_AT_ONCE):
                block = content[start : start + TOKENS_AT_ONCE]
                flags.write((block >> FLAG_BITS).astype(np.uint8).data)
                tokens.write((block & (1 << FLAG_BITS) - 1).astype(self.dtype).data)
            flags.flush()
            os.fsync(flags.fileno())
        os.replace(f'{mask}.tmp', mask)


def _sha256_of(path):
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
