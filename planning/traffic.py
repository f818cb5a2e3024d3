"""
Predict the bytes that a rank sends in an optimizer step, by the kind of collective.

    communication_bytes(config, empty_model(config), world_size, 'fsdp')  # {'all-gather': bytes, ..., 'sent': sum}

`config` is as in sizes.py.
"""

from functools import lru_cache

from exchange import codec
from layout import Layout
from pipeline_manual import blocks_of_stages
from planning.sizes import (
    BYTES,
    DEEPSPEED_REUSE,
    FP32,
    count,
    counts_of,
    gathered_bytes,
    held_model,
    held_slices,
    hidden_matrices,
    keys_and_values,
    message_bytes,
    parameters_of_stage,
    pieces,
    root_parameters,
    rows_of_experts,
    small_parameters,
    tokens_of_rank,
    trained_of,
)

# Collectives of a block in a micro-step under tensor_parallel: 4 in forward, 4 in backward, and those recomputed.
TENSOR_COLLECTIVES = {'none': 8, 'selective': 10, 'full': 11, 'offload': 11}


def communication_bytes(config, model, world_size, strategy='ddp'):
    """
    {'all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all': bytes} that one rank sends per optimizer step, and
    their sum 'sent'. With context_parallel there are also 'keys and values', with tensor_parallel 'activations', and
    with expert_parallel 'tokens of experts' for balanced routers (if they are not, some ranks send more, others less).
    config, model, strategy and what raises ValueError: as for memory_bytes().

    On n ranks, all-gather and reduce-scatter send (n-1)/n of the whole, and all-reduce twice that (rings of NCCL and
    gloo). On a CPU, gloo's own reduce-scatter, which fully_shard uses, is an all-reduce whose result is mostly thrown
    away, so it sends twice the bytes. fsdp_manual.py avoids it, see send_gradients() there. DiLoCo's exchanges count as
    1/inner_steps.
    DeepSpeed reduces gradients in fp32: stage 1 after the last micro-step, the others after each; stages 1 and 2 by
    all-reduce. It gathers the updated weights, in stage 3 in each micro-step, and there twice for those that are used
    too far apart to be kept (this follows from its source; no test has such a model). A run's first step gathers more.
    Left out, because they do not grow with the model, are the gradient norm, the loss, the agreement to continue, and
    8 bytes for each expert, layer and forward pass, in which ranks tell each other how many rows will come.
    """
    model = held_model(config, model)
    if strategy == 'pipeline':
        stages = [stage_traffic(config, model, world_size, stage) for stage in range(config['pipeline_stages'])]
        return max(stages, key=lambda sent: sent['sent'])
    on_gloo = not config['device'].startswith('cuda')
    compute, n_layer = BYTES[config['dtype']], len(model.blocks)
    counts = counts_of(model)
    whole, trainable = counts['total'], counts['trainable']
    sent = dict.fromkeys(('all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all'), 0)
    if strategy == 'ddp':
        sent['all-reduce'] = 2 * (world_size - 1) * FP32 * trainable / world_size
        return sent | {'sent': sum(sent.values())}

    layout = Layout.of(config, strategy, world_size)
    micro_steps = layout.micro_steps
    if strategy == 'deepspeed':
        large, share = whole - small_parameters(model), (world_size - 1) / world_size
        if config['zero_stage'] < 3:
            sent['all-reduce'] = 2 * share * FP32 * trainable * (micro_steps if config['zero_stage'] == 2 else 1)
            sent['all-gather'] = share * compute * trainable
        else:
            sent['reduce-scatter'] = share * FP32 * trainable * micro_steps * (2 if on_gloo else 1)
            again = max(0, large - DEEPSPEED_REUSE // 2)  # forward and backward pass what lies behind it: twice
            sent['all-gather'] = share * compute * (whole - large + micro_steps * (large + again))
        return sent | {'sent': sum(sent.values())}

    replicas, ranks = layout.replica * layout.replicate, layout.shard
    trained = count(trained_of(model.parameters()), ranks)  # numbers on a rank, with padding
    reductions = micro_steps if config['accumulate'] == 'sharded' else 1
    is_manual, stage, unit = config['fsdp_impl'] == 'manual', config['zero_stage'], config['blocks_per_unit']
    blocks_gathered = micro_steps * n_layer * (2 if stage == 3 else 1)
    if is_manual and stage == 1:
        blocks_gathered = n_layer
    elif is_manual and stage == 3:  # the last unit is kept for backward, the first one for the next micro-step
        last = n_layer % unit or unit
        blocks_gathered -= micro_steps * last + (micro_steps - 1) * min(unit, n_layer)
    # The root is gathered once, and stays whole from a step's first forward to its last backward.
    block, root, _ = bytes_to_others(model, compute, ranks)
    sent['all-gather'] = blocks_gathered * block + root

    in_half = is_manual and on_gloo and (micro_steps == 1 or config['accumulate'] == 'sharded')
    reduced = reductions * bytes_to_others(model, compute if in_half else FP32, ranks)[2]
    sent['reduce-scatter'] = reduced * (2 if on_gloo and not is_manual else 1)
    if strategy == 'fsdp':
        sent['all-reduce'] = 2 * (replicas - 1) * FP32 * trained * reductions / replicas
        if (sharing := layout.context) > 1:  # context_manual.py, "What crosses the wire?"
            numbers, bytes_per_number = keys_and_values(config)
            passes = 3 if config['activation_checkpointing'] in ('full', 'offload') else 2
            hops = sharing if config['context_impl'] == 'ring' else sharing - 1
            layer_bytes = numbers * (passes * (sharing - 1) * bytes_per_number + hops * FP32)
            sent['keys and values'] = micro_steps * n_layer * layer_bytes
        if layout.tensor > 1:
            sent['activations'], gradient_bytes = sent_by_tensor(
                config, model, model.parameters(), micro_steps, ranks, n_layer
            )
            sent['all-reduce'] += gradient_bytes
    else:
        dtype = config['exchange_dtype']
        bytes_per_number = codec.BYTES[dtype] + (
            codec.SCALES[dtype] / codec.BLOCKS[dtype] if dtype in codec.SCALES else 0
        )
        half = (replicas - 1) * bytes_per_number * trained / replicas / config['inner_steps']
        sent['reduce-scatter'] += half
        sent['all-gather'] += half
    if (sharing := layout.expert) > 1:  # expert_manual.py, "What crosses the wire?"
        exchanges = 6 if config['activation_checkpointing'] in ('full', 'offload') else 4
        bytes_of_rows = rows_of_experts(config) * config['n_embd'] * compute
        sent['tokens of experts'] = micro_steps * n_layer * exchanges * (sharing - 1) / sharing * bytes_of_rows
    if config['optimizer'] == 'muon' and ranks > 1:  # hidden matrices go to the rank that works on them, and back
        hidden = count(hidden_matrices(model), ranks)
        sent['all-to-all'] = 2 * (ranks - 1) * (FP32 if on_gloo else 2) * hidden / ranks
    return sent | {'sent': sum(sent.values())}


@lru_cache(maxsize=1024)
def bytes_to_others(model, bytes_per_number, ranks):
    """(gathering a block, gathering the root, reducing all gradients): bytes that each rank sends, which is its piece
    of each parameter to every other rank with a piece of the same one. Cached like counts_of()."""

    def of(parameters):
        return sum((pieces(p, ranks) - 1) * gathered_bytes([p], bytes_per_number, ranks) for p in parameters)

    return of(model.blocks[0].parameters()), of(root_parameters(model)), of(trained_of(model.parameters()))


def stage_traffic(config, model, world_size, stage):
    """{'point-to-point', 'all-reduce', 'sent': bytes} that a rank of one stage of a pipeline sends per optimizer step.

    In each micro-step every part but the last sends activations to the next one, and every part but the first sends
    their gradients back. The first and the last stage exchange the gradients of a tied embedding.
    model: part_of_rank(config).
    """
    layout = Layout.of(config, 'pipeline', world_size)
    stages, chunks, copies, micro_steps = layout.stage, layout.chunks, layout.replicate, layout.micro_steps
    mine = sum(parameters_of_stage(config, model, stage), [])
    messages = micro_steps * (2 * chunks - (stage == 0) - (stage == stages - 1))
    tied = config['tie_embeddings'] and stages > 1 and stage in (0, stages - 1)
    sent = {
        'point-to-point': messages * message_bytes(config) + FP32 * tied * count(model.embed.parameters()),
        'all-reduce': 2 * (copies - 1) * FP32 * count(mine) / copies,
    }
    if layout.tensor > 1:
        ends = stage == 0, stage == stages - 1
        blocks = blocks_of_stages(config)[stage]
        sent['activations'], gradient_bytes = sent_by_tensor(config, model, mine, micro_steps, 1, blocks, ends)
        sent['all-reduce'] += gradient_bytes
    return sent | {'sent': sum(sent.values())}


def sent_by_tensor(config, model, parameters, micro_steps, shard_size, blocks, ends=(True, True)):
    """
    (bytes of activations and the loss, bytes of partial gradients), see "What crosses the wire?" in tensor_manual.py.
    parameters: those of this rank, each sharded over shard_size ranks. blocks: how many blocks it has. ends: whether it
    has (the embedding, the head).
    """
    tensor, collectives_per_block = config['tensor_parallel'], TENSOR_COLLECTIVES[config['activation_checkpointing']]
    times = blocks * collectives_per_block + 2 * sum(ends)
    bytes_per_token = times * config['n_embd'] * BYTES[config['dtype']] / tensor + 3 * FP32 * ends[1]
    is_whole = {model.get_parameter(name) for name, part in held_slices(config).items() if part.dim is None}
    partial_gradients = count((parameter for parameter in parameters if parameter in is_whole), shard_size)
    activations = micro_steps * (tensor - 1) * tokens_of_rank(config) * bytes_per_token
    return activations, 2 * (tensor - 1) * FP32 * partial_gradients / tensor
