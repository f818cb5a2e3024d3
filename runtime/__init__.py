"""What every training loop needs, whatever its strategy: its beginning, checkpoints, health, measurements."""

PHASES = (
    'data',
    'forward',
    'backward',
    'update',
    'outer',
    'rollout',
)  # of a step; metrics.jsonl has time/data and so on
PROFILED_STEP = 'telemetry: profiled step'  # the label of such a step in a trace
