"""
What a run refuses because of its keys: each lesson answers for itself, and here they are asked, by a run when it begins
and by compare.py --plan.

    lines = checks.check(keys, layout, shape)   # raises ValueError, whose text is what the user reads
"""

import optim
from model import ModelConfig
from planning import sizes, strategies


def check(keys, layout, shape):
    """
    Lines for the log. Raises ValueError for keys that contradict each other.

    keys: all of a script, with values, and with those of the model. shape: the ModelConfig, or Pretrained.
    """
    check_optimizer(keys)
    lines = []
    for lesson in strategies.of(layout):  # before check_experts(): some have no mixtures, whatever their dtype
        lines += lesson.check(keys, layout, shape) or []
    if isinstance(shape, ModelConfig) and shape.n_experts:
        check_experts(keys, layout, shape.n_experts)
    if keys['matmul_dtype']:
        import float8

        lines += float8.check(keys, layout, sizes.part_of_rank(keys)[0])
    return lines


def check_optimizer(keys):
    """Raise ValueError if the optimizer has no moments that could be stored in optimizer_dtype."""
    optimizer, dtype = keys['optimizer'], keys['optimizer_dtype']
    if dtype != 'float32' and optimizer not in optim.UPDATES:
        why = 'has no moments' if optimizer == 'sgd' else 'orthogonalizes its momentum, which stays float32'
        raise ValueError(
            f'optimizer_dtype={dtype} with optimizer={optimizer}, which {why}: '
            'use --optimizer=adamw, or leave optimizer_dtype out'
        )


def check_experts(keys, layout, n_experts):
    """Raise ValueError if a mixture of experts cannot be trained as the keys ask. ModelConfig checks its sizes."""
    given = f'n_experts={n_experts}'
    if keys['heads']:
        why = 'the published rules are of dense models: leave heads out'
        raise ValueError(f'{given} with heads={keys["heads"]}: {why}')
    if keys['dtype'] == 'float16':
        raise ValueError(f'{given} with dtype=float16: use --dtype=bfloat16, or float32')
    if keys['router_bias'] and layout.is_diloco:
        raise ValueError(f'router_bias={keys["router_bias"]}: each replica would have its own: use --router_bias=0')
    is_grouped = keys['device'].startswith('cuda') and keys['dtype'] == 'bfloat16'  # one kernel for all experts,
    for key in ('n_embd', 'expert_hidden_dim') if is_grouped else ():  # which reads 16 bytes at a time
        size = keys[key]
        if size % 8:
            sizes = ' or '.join(f'--{key}={n}' for n in (size // 8 * 8, size // 8 * 8 + 8) if n)
            raise ValueError(
                f'{given} with {key}={size}: experts in bfloat16 on a GPU take multiples of 8: use {sizes}'
            )
