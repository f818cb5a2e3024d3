"""
Predict the bytes that a rank sends in an optimizer step, by the kind of collective.

    communication_bytes(config, empty_model(config), world_size, 'fsdp')  # {'all-gather': bytes, ..., 'sent': sum}

What a lesson makes a rank send, its sends(plan) says, beside the words "What crosses the wire?". `config` is as in
sizes.py.
"""

from layout import Layout
from planning import strategies
from planning.memory import combined, plans


def sent(plan):
    """communication_bytes() of the rank of a Plan."""
    kinds = combined(lesson.sends(plan) for lesson in strategies.of(plan.layout))
    return kinds | {'sent': sum(kinds.values())}


def communication_bytes(config, model, world_size, strategy='ddp'):
    """
    {kind: bytes} that one rank sends per optimizer step, and their sum 'sent'; of a pipeline, the stage that sends
    most. Kinds are 'all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all' and 'point-to-point', as far as a layout
    has them, 'keys and values' with context_parallel, 'activations' with tensor_parallel, and 'tokens of experts' with
    expert_parallel.
    config, model, strategy and what raises ValueError: as for memory_bytes().

    On n ranks, all-gather and reduce-scatter send (n-1)/n of the whole, and all-reduce twice that (rings of NCCL and
    gloo). Left out, because they do not grow with the model, are the gradient norm, the loss, the agreement to
    continue, and 8 bytes for each expert, layer and forward pass, in which ranks tell each other how many rows will
    come.
    """
    ranks = plans(config, model, Layout.of(config, strategy, world_size))
    return max(map(sent, ranks), key=lambda kinds: kinds['sent'])
