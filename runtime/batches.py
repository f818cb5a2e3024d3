"""
The arithmetic of batches in words, epochs, and warnings about settings that are legal but probably a mistake.

`config` is a script's config as a dict.
"""

import math
from fractions import Fraction

from layout import counted


def cautions(config, n_windows):
    """
    Warnings for the log about settings that are legal but probably a mistake. n_windows: sequences in the training
    data. Raises ValueError for settings that are not legal.
    """
    if config['eval_only'] and config['eval_iters'] == 0:
        raise ValueError('eval_iters=0 with eval_only=True: expected 1 or more')
    trace_step, max_iters = config['trace_step'], config['max_iters']
    lines = []
    if trace_step > max_iters:
        lines.append(f'WARNING: trace_step={trace_step} of max_iters={max_iters} steps: nothing is recorded')
    if config['warmup_iters'] >= max_iters:
        warmup_in_words = f'warmup_iters={config["warmup_iters"]} of max_iters={max_iters} steps'
        lines.append(f'WARNING: {warmup_in_words}: the learning rate never reaches its peak')
    decayed = config['lr_decay_iters'] or max_iters
    if config['min_lr'] == 0 and decayed < max_iters and config['lr_schedule'] != 'constant':
        lines.append(f'WARNING: min_lr=0 from lr_decay_iters={decayed} to max_iters={max_iters}: nothing is learned')
    if config['global_batch_size'] > n_windows:
        lines.append(
            f'WARNING: global_batch_size={config["global_batch_size"]} is more than the {n_windows} sequences of the '
            'training data: each step repeats them'
        )
    return lines


def iterations_of_epochs(num_epochs, n_windows, global_batch_size):
    """Optimizer steps for num_epochs passes over n_windows sequences."""
    return math.ceil(Fraction(str(num_epochs)) * n_windows / global_batch_size)  # in floats 0.07 * 100 is above 7


def batch_line(batch_size, layout, block_size):
    """The batch arithmetic with its numbers, on one line."""
    sequences = batch_size * layout.micro_steps * layout.reading
    rank_factor = (layout.reading, 'rank' if layout.sharing == 1 else 'rank group')
    factors = ((batch_size, 'sequence'), (layout.micro_steps, 'micro-step'), rank_factor)
    per_step = ' x '.join(counted(number, noun) for number, noun in factors)
    return (
        f'{per_step} = {counted(sequences, "sequence")} x {counted(block_size, "token")} '
        f'= {sequences * block_size:,} tokens per step'
    )
