"""
How much of a fine-tuned model survives rounding. Neighboring numbers in bfloat16 are 1/128 to 1/256 of their value
apart, so a step of 1e-5 is lost on every weight above 0.005. Most of what a short run has learned is gone once its
weights are rounded to bfloat16.

    compute_dtype = dtype_to_compute(config.dtype, device, pretrained, is_tuned=True)
    counts = count(model, base_of(state), torch.bfloat16)  # how many weights: all, moved, still moved once rounded
    print(in_words(counts, 'bfloat16'), keeps_enough(counts))
"""

import torch
import torch.distributed as dist

from huggingface.files import ROWS_AT_ONCE, Weights, find_folder, local_rows
from system import devices

ENOUGH = 0.9  # the share of the moved weights that must still differ once rounded; docs/finetuning.md measures it


def dtype_to_compute(dtype, device, pretrained, is_tuned):
    """As devices.choose_dtype(), except that 'auto' is float32 for weights that are float32: those that a run has
    tuned, and those of a folder that stores them in float32, as an export does."""
    if dtype == 'auto' and (is_tuned or pretrained.config.dtype == torch.float32):
        return torch.float32
    return devices.choose_dtype(dtype, device)


def base_of(state):
    """The Weights with which a run has begun, from the state of its checkpoint; None if they are gone."""
    try:
        return Weights(find_folder(state['config']['init_from']))
    except (ValueError, OSError):
        return None


@torch.no_grad()
def count(model, base, dtype, seen=lambda name, rows: rows):
    """Count weights of this rank's part of a model without LoRA: (all, those that differ from the base's, those that
    still differ when both are rounded to dtype). None if base is None or has other tensors.
    seen: loading.seen_in_training(), if LoRA was merged into a base that had been rounded."""
    if base is None:
        return None
    total = moved = kept = 0
    found, _ = base.find(model)
    for name, parameter in model.named_parameters():
        if name not in found or base.shape(found[name]) != tuple(parameter.shape):
            return None
        local, rows = local_rows(parameter)
        if not local.dim():
            continue
        total += local.numel()
        for first in range(0, len(local), ROWS_AT_ONCE):  # so that it takes little memory
            ours, begin = local[first : first + ROWS_AT_ONCE], (rows.start or 0) + first
            theirs = seen(name, base.read(found[name], slice(begin, begin + len(ours)))).to(ours.device)
            has_moved = ours != theirs
            moved += int(has_moved.sum())
            kept += int((has_moved & (ours.to(dtype) != theirs.to(dtype))).sum())
    return total, moved, kept


def keeps_enough(counts):
    """Whether a model with these counts, from count(), may be rounded."""
    _, moved, kept = counts
    return kept >= ENOUGH * moved


def in_words(counts, dtype):
    """What count() has found, in words. dtype: its name."""
    total, moved, kept = counts
    if not moved:
        return f'none of {total:,} weights moved'
    return f'of {total:,} weights {moved / total:.2%} moved, and {kept / moved:.0%} of these stay moved in {dtype}'


def line_before_casting(model, state, compute_dtype, is_sharded=False):
    """A warning that what a fine-tuned model has learned gets lost when it is cast to the dtype of computation; None if
    most of it stays. is_sharded: each rank has only its rows, and the call is collective."""
    if compute_dtype == torch.float32:
        return None
    counts = count(model, base_of(state), compute_dtype)
    if is_sharded:
        everybodys = [None] * dist.get_world_size()
        dist.all_gather_object(everybodys, counts)
        counts = None if None in everybodys else tuple(map(sum, zip(*everybodys, strict=True)))
    if counts is None or keeps_enough(counts):
        return None
    words = in_words(counts, str(compute_dtype).removeprefix('torch.'))
    return f'{words}: --dtype=float32 keeps what was learned'
