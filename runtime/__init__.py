"""Around every training loop, the same for every strategy: processes, errors, checkpoints, health, measurements."""
