"""
What torch's DistributedDataParallel makes a rank of train_ddp.py hold and send. Lessons say this of themselves.
"""

from itertools import accumulate

from torch import nn

import muon
from layout import FP32, numbers


def check(keys, layout, shape):
    """Raise ValueError for keys of sharding, which only a script with both strategies has."""
    for key, off in (('cpu_offload', 'none'), ('replicate_size', 1)):
        if keys.get(key, off) != off:
            raise ValueError(f'{key}={keys[key]} with strategy=ddp, which shards nothing: use --strategy=fsdp')


def holds(plan):
    """Weights, gradients and moments are whole."""
    step, gradients = plan.activations, FP32 * numbers(plan.weights.trained)
    # Of several ranks the gradients are in the buckets of the all-reduce, of which .grad are views.
    states = {'weights': plan.weights.stored_bytes(), 'gradients': gradients, 'optimizer': plan.moment_bytes()}
    overlap = 0
    if plan.layout.ranks == plan.layout.micro_steps == 1:
        # There are neither buckets nor sums before backward makes gradients.
        overlap = peak_of_one_rank(plan, step, gradients) - step.peak() - gradients
    return states | step.parts() | plan.parts_that_overlap(overlap)


def peak_of_one_rank(plan, step, gradients):
    """
    Bytes of gradients and activations together, if backward makes the ones while it frees the others: block by block,
    so the peak is in the loss, in the backward of a block, or at the gradient of the embedding.
    """

    def gradient_bytes(parameters):
        return FP32 * numbers(parameter for parameter in parameters if parameter.requires_grad)

    modules = [*plan.model.modules()]
    tables = {module.weight for module in modules if isinstance(module, nn.Embedding)}
    tables -= {module.weight for module in modules if isinstance(module, nn.Linear)}  # not those of a tied head
    by_the_loss = [parameter for parameter in plan.weights.root if parameter not in tables]
    last = step.kept + step.backward + gradient_bytes(by_the_loss)
    changes = (gradient_bytes(block) - step.block for block in reversed(plan.weights.blocks[1:]))
    return max(step.kept + step.loss, *accumulate(changes, initial=last), gradients + step.end)


def sends(plan):
    """One all-reduce of all gradients in fp32, after the last micro-step: 2 (n-1)/n of them on n ranks. And what Muon
    sends."""
    ranks = plan.layout.ranks
    all_reduce = 2 * (ranks - 1) * FP32 * numbers(plan.weights.trained) / ranks
    return {'all-reduce': all_reduce} | muon.sends(plan, ranks)
