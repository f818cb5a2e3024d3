"""Around every training loop, the same for every strategy: processes, errors, checkpoints, health, measurements."""

PHASES = ('data', 'forward', 'backward', 'update', 'outer')  # of a step, as time/data and so on in metrics.jsonl
