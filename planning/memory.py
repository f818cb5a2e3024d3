"""
Predict the memory of a rank at the peak of a step: weights, gradients, optimizer state, activations.

    model = empty_model(config)
    memory_bytes(config, model, world_size, 'fsdp')  # {'weights': bytes, 'gradients': ...}

Nothing large is allocated: parameters are counted on the meta device, activations on tensors without data
(activations.py). `config` is as in sizes.py.
"""

import itertools
import math

from torch import nn

import optim
from layout import Layout
from moments import bytes_held, in_8_bits
from pipeline_manual import blocks_of_parts
from planning.activations import micro_step
from planning.sizes import (
    BYTES,
    DEEPSPEED_REUSE,
    FP32,
    count,
    counts_of,
    dense_and_experts,
    gathered_bytes,
    held_model,
    held_slices,
    hidden_matrices,
    keys_and_values,
    message_bytes,
    parameters_of_stage,
    pieces,
    root_parameters,
    small_parameters,
    stored_bytes,
    trained_of,
    travelling_bytes,
)

# Numbers that each optimizer keeps per parameter. (Muon keeps only 1 for matrices of blocks, see moments().)
OPTIMIZER_MOMENTS = {'adamw': 2, 'muon': 2, 'sgd': 0} | {
    name: len(update.moments) for name, update in optim.UPDATES.items()
}
OVERLAP = 'minus: not at the same moment'
DEEPSPEED_BUCKET = 2**25  # numbers that are reduced together; set by deepspeed_engine.py


def memory_bytes(config, model, world_size, strategy='ddp'):
    """
    {part: bytes} that one rank holds in a training step. Parts that begin with 'host' are in the host's memory.

    weights       fp32 masters, and frozen weights in their frozen_dtype: whole under ddp, 1/shard_size under fsdp;
                  for deepspeed see deepspeed_states()
    gradients     fp32, divided like the weights; none for frozen weights
    accumulated   fsdp: what whole gradients need beyond that, while micro-steps add up without communication
    optimizer     moments, none for frozen weights; in fp32 or, with optimizer_dtype, fewer bits and their scales
    outer         diloco: outer parameters and momentum in fp32, and with error feedback what compression lost
    gathered      fsdp: whole weights in the compute dtype; pipeline: the blocks' weights cast to half precision
    reduction     fsdp: gradients on their way into the reduce-scatter
    activations   what forward keeps for backward, and what backward needs beyond the room that the logits leave
    logits        what the loss of one chunk of tokens needs, and the gradients that it passes to hidden states and head
    travelling    fsdp with context_parallel: keys and values of other ranks for one layer, and their gradients in fp32;
                  with tensor_parallel: activations that arrive and leave
    workspace     of the matmuls, on a GPU
    minus: not at the same moment   negative: the parts do not all peak at the same moment; this is the overlap, so that
                  the sum is the true peak; absent if there is none

    shard_size is the number of ranks that together hold one copy of the model. With expert_parallel each of the ranks
    that share experts holds only some of them, which it shards with the ranks of the copy that hold the same ones;
    "whole" then means these experts. Activations are those of balanced routers, see activations.py.

    model: empty_model(config). strategy: 'ddp', 'fsdp', 'diloco', 'deepspeed' or 'pipeline' (its fullest stage).
    Raises ValueError if the ranks do not divide.
    Not counted are fragments of the allocator, CUDA's context (0.5 GB) and NCCL's buffers. Compiled blocks are counted
    as such on a GPU, else eager mode is assumed. The tests measure on the CPU, follow a step as on CUDA without a GPU,
    and hold the peaks that an H100 measured.
    """
    model = held_model(config, model)
    if strategy == 'pipeline':
        stages = [stage_memory(config, model, world_size, stage) for stage in range(config['pipeline_stages'])]
        return max(stages, key=lambda parts: totals(parts)['total on the device'])
    compute = BYTES[config['dtype']]
    counts = counts_of(model)
    trainable = counts['trainable']
    step = micro_step(config, strategy)
    if strategy == 'deepspeed':
        return deepspeed_states(config, model, world_size) | step.parts()
    layout = Layout.of(config, strategy, world_size)
    micro_steps = layout.micro_steps
    if strategy == 'ddp':
        gradients = FP32 * trainable  # of several ranks: in the buckets of the all-reduce, of which .grad are views
        states = {'weights': stored_bytes(model.parameters()), 'gradients': gradients}
        parts = states | {'optimizer': moment_bytes(config, model), **step.parts()}
        if world_size == micro_steps == 1:  # there are neither buckets nor sums before backward makes gradients
            parts[OVERLAP] = peak_of_one_rank(model, step, gradients) - step.peak() - gradients
        return parts

    is_diloco, shard_size = layout.is_diloco, layout.shard
    trained = count(trained_of(model.parameters()), shard_size)
    host = 'host ' if config['cpu_offload'] == 'params' else ''
    host_of_moments = 'host ' if config['cpu_offload'] != 'none' else ''
    parts = {
        f'{host}weights': stored_bytes(model.parameters(), shard_size),
        f'{host}gradients': FP32 * trained,
        f'{host_of_moments}optimizer': moment_bytes(config, model, shard_size),
    }
    if is_diloco:
        keeps_error = config['error_feedback'] and config['exchange_dtype'] != 'float32'
        outer = FP32 * (2 + keeps_error) * trained
        outer += FP32 * trained // config['num_fragments'] if config.get('overlap_steps') else 0  # in flight
        parts['host outer' if config['outer_on_host'] or host else 'outer'] = outer
    if config['accumulate'] == 'unsharded' and micro_steps > 1:
        # Whole gradients, summed over the micro-steps so far. When the last micro-step reduces them, they shrink to
        # this rank's shard, which 'gradients' counts already.
        parts['accumulated'] = FP32 * (trainable - (0 if host else trained))
    # The gradients of a unit exist as autograd makes them, and again in the flat fp32 input of the reduce-scatter.
    in_block, in_root = [*model.blocks[0].parameters()], root_parameters(model)
    block_reduction, root_reduction = ((compute + FP32) * count(trained_of(part)) for part in (in_block, in_root))
    if config['fsdp_impl'] == 'manual':
        adds_up = micro_steps > 1 and config['accumulate'] == 'sharded'
        root_reduction = reduction_of_root(model, compute, config['blocks_per_unit'], shard_size, adds_up)
    parts |= {
        'gathered': gathered_bytes(in_root, compute) + gathered_of_blocks(config, model, shard_size),
        'reduction': max(block_reduction, root_reduction),
        **step.parts(),
    }
    if (sharing := layout.context) > 1:  # a ring holds 2 ranks' keys and values and 3 gradients
        numbers, bytes_per_number = keys_and_values(config)
        blocks = (2, 3) if config['context_impl'] == 'ring' else (sharing, 2 * sharing)
        parts['travelling'] = numbers * (blocks[0] * bytes_per_number + blocks[1] * FP32)
    if layout.tensor > 1:
        parts['travelling'] = parts.get('travelling', 0) + travelling_bytes(config)
    # During backward, activations are freed while gradients are made. So the peak is in the loss, when no block has to
    # be whole; or at the beginning of backward, when the gradients of a block are on their way; or at the end, when the
    # root's gradients are reduced. At first there are no gradients yet, unless micro-steps add up. A compiled block has
    # freed what it kept before it returns its gradients, so they are on their way beside the next block's backward.
    blocks = gathered_of_blocks(config, model, shard_size)
    in_loss = step.kept + step.loss - blocks + gathered_of_blocks(config, model, shard_size, in_loss=True)
    begin = step.kept + step.backward + max(0, block_reduction - step.block * step.is_compiled)
    none_yet = parts.get('gradients', 0) if micro_steps == 1 else 0
    overlap = max(max(in_loss, begin) - none_yet, root_reduction) - parts['reduction'] - step.peak()
    return parts | ({OVERLAP: overlap} if overlap else {})


def peak_of_one_rank(model, step, gradients):
    """
    Bytes of gradients and activations together, if backward makes the ones while it frees the others: block by block,
    so the peak is in the loss, in the backward of the last block or of the first, or at the gradient of the embedding.
    """
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    tables -= {module.weight for module in model.modules() if isinstance(module, nn.Linear)}  # not those of a tied head
    by_the_loss = [parameter for parameter in root_parameters(model) if parameter not in tables]
    last = step.kept + step.backward + FP32 * count(trained_of(by_the_loss))
    of_block = FP32 * count(trained_of(model.blocks[0].parameters()))
    first = last + (len(model.blocks) - 1) * (of_block - step.block)
    return max(step.kept + step.loss, last, first, gradients + step.end)


def gathered_of_blocks(config, model, shard_size, in_loss=False):
    """
    Bytes of the blocks that are whole at the same time: the unit that computes (below stage 3, all units), and the flat
    buffers in which the next ones arrive. fully_shard also holds the unit after the next. Experts that ranks share are
    separate units, of one block each under fully_shard; they need no buffer if no other rank holds the same ones.
    in_loss: while the loss computes, when no unit arrives, and fully_shard has freed the last one.
    """
    is_manual, n_layer, nbytes = config['fsdp_impl'] == 'manual', len(model.blocks), 0
    for are_experts, parameters in dense_and_experts(model.blocks[0].parameters()):
        unit = 1 if are_experts and not is_manual else config['blocks_per_unit']
        buffers = unit * (max(1, config['prefetch']) if is_manual else 2)
        if are_experts and pieces(parameters[0], shard_size) == 1:
            buffers = 0
        blocks = buffers + (unit if config['zero_stage'] == 3 else n_layer)
        if in_loss:
            blocks -= buffers + (unit if config['zero_stage'] == 3 and not is_manual else 0)
        nbytes += min(blocks, n_layer + 1) * gathered_bytes(parameters, BYTES[config['dtype']])
    return nbytes


def reduction_of_root(model, compute, blocks_per_unit, shard_size, adds_up):
    """
    Bytes of gradients on their way at the end of fsdp_manual's backward: the root's gradients as autograd made them,
    the fp32 input to the reduction of its largest unit, and the one of the blocks, which is kept. adds_up: the shards
    hold gradients of earlier micro-steps, so the new averages need their own memory until they are added: those of the
    root, and of experts, whose last reduction is in flight.
    """
    in_block, in_root = trained_of(model.blocks[0].parameters()), trained_of(root_parameters(model))
    largest_block = blocks_per_unit * count(in_block)
    large = [p.numel() for p in in_root if p.numel() > largest_block]  # each is a unit by itself
    largest = max([count(in_root) - sum(large), *large])
    kept = blocks_per_unit * count(p for p in in_block if pieces(p, shard_size) > 1)
    averages = []
    if adds_up:
        averages = in_root + [p for are_experts, found in dense_and_experts(in_block) if are_experts for p in found]
    return compute * count(in_root) + FP32 * (largest + kept + count(averages, shard_size))


def stage_memory(config, model, world_size, stage):
    """
    memory_bytes() of one stage of a pipeline, which has some of the blocks; the first also has the embedding, the last
    the head. 'activations' are those of all micro-steps in flight. 'reduction' is what the exchange of gradients
    needs beyond the room that activations leave when they are freed. model: part_of_rank(config).
    """
    layout = Layout.of(config, 'pipeline', world_size)
    stages, chunks, copies, micro_steps = layout.stage, layout.chunks, layout.replicate, layout.micro_steps
    largest_part = max(blocks_of_parts(config, stages * chunks)[stage::stages])
    in_blocks, at_ends = parameters_of_stage(config, model, stage)
    moments_held = moment_bytes(config, model, parameters=[*in_blocks, *at_ends])
    in_blocks, at_ends = count(in_blocks), count(at_ends)
    held = in_blocks + at_ends
    # What a model of two blocks needs beyond them belongs to embedding and head. (With 'offload' the inputs of the last
    # two blocks stay on the GPU, so there it is three.)
    few = 3 if config['activation_checkpointing'] == 'offload' else 2
    step = micro_step({**config, 'n_layer': few}, 'pipeline')
    warm_up = stages - 1 - stage if chunks == 1 else 2 * (stages - 1 - stage) + (chunks - 1) * stages
    in_flight = min(warm_up + 1, chunks * micro_steps)
    part_activations = largest_part * step.block + message_bytes(config)
    activations = in_flight * part_activations + max(0, step.peak() - step.loss - few * step.block)
    logits = step.loss if stage == stages - 1 else 0
    reduction = max(at_ends, count(model.blocks[0].parameters())) if copies > 1 else at_ends * (stages > 1)
    in_blocks_on_host = in_flight * largest_part * step.block_on_host
    parts = {
        'weights': FP32 * held,
        'gradients': FP32 * held,
        'optimizer': moments_held,
        'gathered': in_blocks * BYTES[config['dtype']] * (config['dtype'] != 'float32'),
        'activations': activations,
        'logits': logits,
        'reduction': max(0, FP32 * reduction - activations - logits),
    }
    parts |= {'workspace': step.workspace} if step.workspace else {}
    parts |= {'host activations': in_blocks_on_host} if in_blocks_on_host else {}
    return parts | ({'travelling': travelling_bytes(config)} if layout.tensor > 1 else {})


def deepspeed_states(config, model, world_size):
    """
    memory_bytes() of ZeRO without activations and logits, as in DeepSpeed 0.19 with its defaults.

    Unlike fsdp, ZeRO holds a second copy of the weights in the compute dtype, even if that is fp32: whole, or in stage
    3 a slice, with small parameters whole. Stage 1 holds a whole fp32 gradient: in bf16 always, otherwise while several
    micro-steps add up. In fp32, stages 1 and 2 hold the gradients of whole parameters, see reaching_into_slices().
    """
    stage, compute = config['zero_stage'], BYTES[config['dtype']]
    counts = counts_of(model)
    whole, trainable = counts['total'], counts['trainable']
    small = small_parameters(model) if world_size > 1 else 0  # on one rank the slice is everything
    part = math.ceil(trainable / world_size)
    host = 'host ' if config['cpu_offload'] != 'none' else ''
    host_of_slices = 'host ' if config['cpu_offload'] == 'params' else ''
    micro_steps = Layout.of(config, 'deepspeed', world_size).micro_steps
    sums_whole = stage == 1 and config['dtype'] == 'bfloat16' and not host
    gradient_numbers = trainable if sums_whole else part
    if stage < 3 and config['dtype'] == 'float32' and not host and trainable == whole:
        gradient_numbers = reaching_into_slices(model, world_size)

    weights = {'weights': compute * (small if stage == 3 else whole)}
    for place, size in ((host_of_slices, compute * math.ceil(whole / world_size) * (stage == 3)), (host, FP32 * part)):
        weights[f'{place}weights'] = weights.get(f'{place}weights', 0) + size
    parts = weights | {
        f'{host}gradients': FP32 * gradient_numbers,
        f'{host}optimizer': FP32 * OPTIMIZER_MOMENTS[config['optimizer']] * part,
    }
    if stage == 1 and micro_steps > 1 and not sums_whole:
        parts['accumulated'] = FP32 * (trainable - (0 if host else gradient_numbers))
    if stage == 3 and world_size > 1:
        parts['gathered'] = compute * min(whole - small, DEEPSPEED_REUSE)
    on_cuda = config['device'].startswith('cuda')
    used = min(DEEPSPEED_BUCKET, trainable)
    bucket = 2 * DEEPSPEED_BUCKET if on_cuda else used  # 2: one fills, one is reduced; hosts touch only what is used
    bytes_per_number = compute if stage == 2 else FP32
    return parts | {'reduction': bytes_per_number * bucket + (FP32 * used if bytes_per_number < FP32 else 0)}


def reaching_into_slices(model, world_size):
    """
    Numbers in all parameters that rank 0's slices have a part of, if every parameter is trained. ZeRO lays out the
    parameters of each optimizer group in order, and cuts them into equal slices of an even number of elements.
    """
    numbers = 0
    for group in optim.parameter_groups(model, weight_decay=0.0):
        ends = [*itertools.accumulate((parameter.numel() for parameter in group['params']), initial=0)]
        end_of_slice = 2 * math.ceil(ends[-1] / 2 / world_size)
        numbers += next((end for end in ends if end >= end_of_slice), ends[-1])
    return numbers


def moment_bytes(config, model, shard_size=1, parameters=None):
    """Bytes of optimizer state on one rank, for the given parameters or for all of the model's."""
    dtype = config.get('optimizer_dtype', 'float32')
    if dtype == 'float32':
        return FP32 * moments(config, model, shard_size, parameters)
    parameters = parameters or list(model.parameters())
    eligible = in_8_bits(model, held_slices(config)) if dtype == 'int8' else {*parameters}
    trained = trained_of(parameters)
    shapes = {p: (math.ceil(p.shape[0] / pieces(p, shard_size)), *p.shape[1:]) for p in trained}
    per_moment = sum(bytes_held(shape, dtype if p in eligible else 'float32') for p, shape in shapes.items())
    return OPTIMIZER_MOMENTS[config['optimizer']] * per_moment


def moments(config, model, shard_size=1, parameters=None):
    """How many numbers the optimizer keeps on one rank; none for frozen weights."""
    parameters = trained_of(model.parameters() if parameters is None else parameters)
    numbers = OPTIMIZER_MOMENTS[config['optimizer']] * count(parameters, shard_size)
    if config['optimizer'] == 'muon':
        hidden = set(hidden_matrices(model))
        numbers -= count((p for p in parameters if p in hidden), shard_size)
    return numbers


def totals(parts):
    """{'total on the device', 'total on the host': bytes} from what memory_bytes() returns, without an empty total."""
    places = {'device': False, 'host': True}
    sizes = {
        place: [size for part, size in parts.items() if part.startswith('host') == on_host]
        for place, on_host in places.items()
    }
    return {f'total on the {place}': sum(place_sizes) for place, place_sizes in sizes.items() if place_sizes}
