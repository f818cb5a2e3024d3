"""
A split of a dataset on its way to disk, so that a kill at any moment costs seconds and leaves no half shard.

    writer = ShardWriter(folder, 'train', dtype, shard_tokens, data.write_shard)
    writer.add(tokens, documents, text_bytes)
    writer.sync(); save writer.totals; writer.delete_full_partials()    # now and then: from here a later run goes on
    writer.finish()                                                     # the rest becomes the last shard

    writer = ShardWriter(..., totals)                                   # goes on from saved totals

Tokens collect in train_000000.partial. When they fill a shard, write_shard copies them to train_000000.bin, and
train_000001.partial is begun. The full one stays until totals that do not need it have been saved.
"""

import hashlib
import os
from pathlib import Path

import numpy as np


class ShardWriter:
    """
    totals      what meta.json says of the split: tokens, bytes, documents, max_token, shards (file, tokens, sha256);
                and in_partial, the tokens that are in no shard yet
    """

    def __init__(self, folder, split, dtype, shard_tokens, write_shard, totals=None):
        """write_shard(path, tokens, dtype): writes a file that is there entirely or not at all."""
        self.folder, self.split = Path(folder), split
        self.dtype, self.shard_tokens, self.write_shard = np.dtype(dtype), shard_tokens, write_shard
        nothing = {'tokens': 0, 'bytes': 0, 'documents': 0, 'max_token': 0, 'shards': [], 'in_partial': 0}
        self.totals = totals or nothing
        self._open_partial()

    def add(self, tokens, documents, text_bytes):
        """Append tokens: an array of self.dtype, not empty. documents, text_bytes: what they add to the totals."""
        assert tokens.dtype == self.dtype, f'{tokens.dtype} tokens for a {self.dtype} shard'
        totals = self.totals
        totals['tokens'] += len(tokens)
        totals['documents'] += documents
        totals['bytes'] += text_bytes
        totals['max_token'] = max(totals['max_token'], int(tokens.max()))
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
        saved = self.totals['in_partial'] * self.dtype.itemsize
        if self.file.tell() < saved:
            raise OSError(
                f'{self.path} has {self.file.tell():,} bytes of {saved:,}: delete {self.folder} and start over'
            )
        self.file.truncate(saved)  # what is behind was written after the totals had been saved

    def _finish_shard(self):
        self.file.close()
        shard = self.path.with_suffix('.bin')
        self.write_shard(shard, np.memmap(self.path, self.dtype, 'r'), self.dtype)
        digest = hashlib.sha256()
        with open(shard, 'rb') as file:
            while block := file.read(1 << 20):
                digest.update(block)
        self.totals['shards'].append(
            {'file': shard.name, 'tokens': self.totals['in_partial'], 'sha256': digest.hexdigest()}
        )
        self.totals['in_partial'] = 0
