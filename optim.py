"""
Optimizers and learning-rate schedules.

    optimizer = make_optimizer(model, 'adamw', learning_rate=6e-4, beta1=0.9, beta2=0.95, weight_decay=0.1)
    learning_rate = learning_rate_at(step, learning_rate=6e-4, lr_schedule='cosine', ...)

Everything here runs on plain tensors and on sharded ones (DTensor) alike: a parameter keeps its name, its group and its
update whatever strategy trains it.
"""

import math

import torch
from torch import nn

OPTIMIZERS = ('adamw',)
SCHEDULES = ('cosine', 'cos_inf', 'wsd', 'linear', 'constant')
WSD_DECAY_FRACTION = 0.2  # of lr_decay_iters; arXiv 2405.18392 finds 10-20% enough to match cosine


# --- optimizers -------------------------------------------------------------------------------------------------------


def make_optimizer(model, optimizer, learning_rate, beta1, beta2, weight_decay):
    """The optimizer named by the key `optimizer`, over the trainable parameters of `model`.

    'adamw': Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), in PyTorch's own fused kernel:
        m = beta1*m + (1-beta1)*g;   v = beta2*v + (1-beta2)*g*g
        theta -= learning_rate * (weight_decay*theta + m/(1-beta1^t) / (sqrt(v/(1-beta2^t)) + 1e-8))

    Call this after the model is sharded: sharding replaces the parameters. Raises ValueError for a value out of range.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f'optimizer={optimizer!r}: expected one of {", ".join(OPTIMIZERS)}')
    if not 0 < learning_rate < math.inf:
        raise ValueError(f'learning_rate={learning_rate}: expected a number above 0')
    for name, beta in (('beta1', beta1), ('beta2', beta2)):
        if not 0 <= beta < 1:
            raise ValueError(f'{name}={beta}: expected at least 0 and below 1')
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f'weight_decay={weight_decay}: expected 0 or more')

    groups = parameter_groups(model, weight_decay)
    # One kernel for the whole update instead of a dozen per tensor.
    fused = all(parameter.device.type in ('cpu', 'cuda') for group in groups for parameter in group['params'])
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2), fused=fused)


def parameter_groups(model, weight_decay):
    """Two groups for the optimizer: what decays, and what does not.

    Decayed: matrices that multiply activations. Not decayed: norms, biases, and embedding tables, whose rows are looked
    up and get no gradient in most steps. A table that is also the output head (tied) is a matrix too, and decays.
    """
    decayed, not_decayed = {}, {}  # id -> parameter; a tied parameter is met in two modules and kept once
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                is_matrix = parameter.dim() >= 2 and not isinstance(module, nn.Embedding)
                (decayed if is_matrix else not_decayed)[id(parameter)] = parameter
    not_decayed = {key: parameter for key, parameter in not_decayed.items() if key not in decayed}

    trainable = sum(parameter.requires_grad for parameter in model.parameters())
    assert len(decayed) + len(not_decayed) == trainable, (
        f'{len(decayed)} + {len(not_decayed)} parameters in groups, the model has {trainable}'
    )
    return [
        {'params': list(decayed.values()), 'weight_decay': weight_decay},
        {'params': list(not_decayed.values()), 'weight_decay': 0.0},
    ]


# --- schedules --------------------------------------------------------------------------------------------------------


def learning_rate_at(step, learning_rate, lr_schedule, warmup_iters, lr_decay_iters, min_lr):
    """Learning rate of the optimizer step that is about to run (`step` counts from 0).

    All schedules rise linearly to `learning_rate` over `warmup_iters` steps. From there to step `lr_decay_iters`:
        'cosine'    half a cosine down to min_lr (arXiv 1608.03983, one cycle)
        'cos_inf'   the same, and the warm-up begins at 1% of the peak (Enoki, arXiv 2602.05298)
        'wsd'       warm-up, stable, decay: the peak, and over the last 20% a line down to min_lr (arXiv 2404.06395)
        'linear'    a line down to min_lr
        'constant'  the peak, for ever
    After lr_decay_iters the rate stays at min_lr. Raises ValueError for an unknown schedule or a value out of range.
    """
    if lr_schedule not in SCHEDULES:
        raise ValueError(f'lr_schedule={lr_schedule!r}: expected one of {", ".join(SCHEDULES)}')
    if not 0 <= min_lr <= learning_rate:
        raise ValueError(f'min_lr={min_lr}: expected between 0 and learning_rate={learning_rate}')
    if warmup_iters < 0 or lr_decay_iters < 0:
        raise ValueError(f'warmup_iters={warmup_iters}, lr_decay_iters={lr_decay_iters}: expected 0 or more')

    if step < warmup_iters:
        if lr_schedule == 'cos_inf':
            return learning_rate * (0.01 + 0.99 * step / warmup_iters)
        return learning_rate * (step + 1) / (warmup_iters + 1)  # the first step learns something, too
    if lr_schedule == 'constant':
        return learning_rate
    if step >= lr_decay_iters:
        return min_lr

    decay_start = warmup_iters
    if lr_schedule == 'wsd':
        decay_start = max(warmup_iters, int((1 - WSD_DECAY_FRACTION) * lr_decay_iters))
    progress = max(0.0, (step - decay_start) / (lr_decay_iters - decay_start))  # 0 at the peak, 1 at min_lr
    remaining = 1 - progress if lr_schedule in ('wsd', 'linear') else (1 + math.cos(math.pi * progress)) / 2
    return min_lr + remaining * (learning_rate - min_lr)
