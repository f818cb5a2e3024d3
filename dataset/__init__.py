"""The data that a run reads: the format of shards, windows of tokens, the shuffle, mixtures."""
