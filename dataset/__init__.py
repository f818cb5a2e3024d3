"""What a run reads: the format of shards, windows, the shuffle."""
