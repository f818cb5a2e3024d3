"""
What a run takes, before it runs: memory per rank, bytes on the wire per step, FLOPs, disk. `--dry_run` prints it.

    print(estimate.report(config, model_config.to_dict(), world_size, strategy='fsdp'))
    model = estimate.empty_model(config)
    estimate.estimate(config, model, world_size, 'fsdp')  # {'weights': bytes, 'gradients': ...}

Nothing large is allocated: parameters are counted on the meta device, activations on tensors without data. `config` is
a script's resolved config (dtype 'bfloat16' rather than 'auto') with the keys of the model in it, those of
ModelConfig.to_dict() or Pretrained.to_dict(). Sizes are bytes, 1 GB = 1e9 bytes.
"""

import itertools
import math
from functools import lru_cache, partial

import torch

import meshes
import optim
import tensor_manual
from exchange import codec
from huggingface import finetune
from model import GPT, ModelConfig
from planning import activations
from runtime.scaling import batch_line, counted, rule_rows

BYTES = {'float32': 4, 'bfloat16': 2, 'float16': 2}  # per number
FP32 = BYTES['float32']
# fp32 numbers per parameter; of Muon in the matrices of blocks 1, see moments()
OPTIMIZER_MOMENTS = {'adamw': 2, 'muon': 2, 'sgd': 0} | {
    name: len(update.moments) for name, update in optim.UPDATES.items()
}
# Numbers of DeepSpeed: reduced together (deepspeed_engine.py asks for it); and its defaults in 0.19: parameters up to
# this size stay whole, and so do larger ones if at most this many numbers are used before their turn comes again.
DEEPSPEED_BUCKET, DEEPSPEED_PERSISTENT, DEEPSPEED_REUSE = 2**25, 10**5, 10**9

# Of a block in a micro-step, under tensor_parallel: 4 in forward, 4 in backward, and those that are done again.
TENSOR_COLLECTIVES = {'none': 8, 'selective': 10, 'full': 11, 'offload': 11}
# Keys that change nothing of one micro-step on one rank
OF_SHARDING = {'zero_stage', 'fsdp_impl', 'replicate_size', 'accumulate', 'global_batch_size', 'num_replicas'}
OF_SHARDING |= {'pipeline_stages', 'pipeline_chunks'}
known_activations = {}


# --- MEMORY -----------------------------------------------------------------------------------------------------------


def estimate(config, model, world_size, strategy='ddp'):
    """
    {part: bytes} that one rank holds in a training step; parts that begin with 'host' are in the host's memory.

    weights       fp32 masters: whole under ddp, 1/shard_size under fsdp; deepspeed: see there
    gradients     fp32, like the weights; none of frozen weights
    accumulated   fsdp: what whole gradients need beyond that, while micro-steps add up without communication
    optimizer     fp32 moments, none of frozen weights
    outer         diloco: fp32 outer parameters and momentum, and with error feedback what was lost
    gathered      fsdp: whole weights in the compute dtype; pipeline: those of its blocks, for half a precision
    reduction     fsdp: gradients on their way into the reduce-scatter
    activations   what forward keeps for backward, and what backward needs beyond the room that the logits leave
    logits        what the loss of one chunk of tokens needs, and the gradients by hidden states and head it hands on
    travelling    fsdp with context_parallel: keys and values of other ranks, and in fp32 their gradients, of a layer;
                  with tensor_parallel: activations that arrive and leave
    not at once   fsdp, negative: what is not there yet, or gone again, when the others peak

    model: empty_model(config). shard_size: ranks that hold one copy of the model.
    Not counted: fragments of the allocator, CUDA's context (0.5 GB), NCCL's buffers. Eager mode is assumed;
    torch.compile keeps less. The tests measure the CPU, and follow a step as on CUDA without a GPU.
    strategy: 'ddp', 'fsdp', 'diloco', 'deepspeed' or 'pipeline' (its fullest stage). ValueError: ranks do not divide.
    """
    if config.get('tensor_parallel', 1) > 1:
        model = part_of_rank(config)
    if strategy == 'pipeline':
        stages = [stage_memory(config, model, world_size, stage) for stage in range(config['pipeline_stages'])]
        return max(stages, key=lambda parts: totals(parts)['total on the device'])
    compute = BYTES[config['dtype']]
    counts = counts_of(model)
    whole, trainable = counts['total'], counts['trainable']
    activations = activation_bytes(config, strategy)
    of_step = sum(size for part, size in activations.items() if not part.startswith('host'))
    if strategy == 'ddp':
        return {
            'weights': FP32 * whole,
            'gradients': FP32 * trainable,  # the buckets of the all-reduce: .grad are views of them
            'optimizer': FP32 * moments(config, model),
            **activations,
        }

    if strategy == 'deepspeed':
        return deepspeed_states(config, model, world_size) | activations
    is_diloco = strategy == 'diloco'
    shard_size = world_size // config['num_replicas'] if is_diloco else meshes.ranks_per_shard_group(config, world_size)
    shard = count(model.parameters(), shard_size)
    trained = shard * trainable // whole  # as if frozen weights were spread evenly
    micro_steps = meshes.micro_steps(config, world_size)
    host = 'host ' if config['cpu_offload'] == 'params' else ''
    host_of_moments = 'host ' if config['cpu_offload'] != 'none' else ''
    parts = {
        f'{host}weights': FP32 * shard,
        f'{host}gradients': FP32 * trained,
        f'{host_of_moments}optimizer': FP32 * moments(config, model, shard_size),
    }
    if is_diloco:
        dtype = config['exchange_dtype']
        keeps_error = dtype == 'top2bit' or (config['error_feedback'] and dtype != 'float32')
        outer = FP32 * (2 + keeps_error) * trained
        outer += FP32 * trained // config['num_fragments'] if config.get('overlap_steps') else 0  # in flight
        parts['host outer' if config['outer_on_host'] or host else 'outer'] = outer
    if config['accumulate'] == 'unsharded' and micro_steps > 1:
        # Each unit's turns into its shard when the last micro-step reduces it.
        parts['accumulated'] = FP32 * (trainable - (0 if host else trained))
    # The unit at work, or all of them below stage 3, and the flat buffers in which others arrive; fully_shard: and the
    # unit after it.
    at_once = config['blocks_per_unit'] * (max(1, config['prefetch']) if config['fsdp_impl'] == 'manual' else 2)
    n_layer = len(model.blocks)
    blocks_gathered = at_once + config['blocks_per_unit'] if config['zero_stage'] == 3 else at_once + n_layer
    blocks_gathered = min(blocks_gathered, n_layer + 1)
    # A unit's gradients as autograd made them, and the flat fp32 input of the reduce-scatter.
    block, root = count(model.blocks[0].parameters()), count(root_parameters(model))
    of_block, of_root = ((compute + FP32) * size * trainable // whole for size in (block, root))
    parts |= {
        'gathered': compute * (root + blocks_gathered * block),
        'reduction': max(of_block, of_root),
        **activations,
    }
    if (sharing := config.get('context_parallel', 1)) > 1:  # of ranks: two at a time, with three gradients; or of all
        numbers, of_number = keys_and_values(config)
        blocks = (2, 3) if config['context_impl'] == 'ring' else (sharing, 2 * sharing)
        parts['travelling'] = numbers * (blocks[0] * of_number + blocks[1] * FP32)
    if config.get('tensor_parallel', 1) > 1:
        parts['travelling'] = parts.get('travelling', 0) + travelling_bytes(config)
    # Activations go while gradients come. So the peak is either where backward begins, without gradients unless
    # micro-steps add up, or where it ends with those of the root.
    begin = of_block + of_step - (parts.get('gradients', 0) if micro_steps == 1 else 0)
    return parts | {'not at once': max(begin, of_root) - parts['reduction'] - of_step}


def stage_memory(config, model, world_size, stage):
    """
    estimate() of one stage of a pipeline: its blocks; the first has the embedding, the last the head.
    activations are those of all micro-steps on their way, reduction is what is sent beyond the room that they leave.
    model: part_of_rank(config).
    """
    stages, chunks, n_layer = config['pipeline_stages'], config['pipeline_chunks'], config['n_layer']
    of_stage = meshes.ranks_of_stage(config, world_size)
    copies, micro_steps = meshes.ranks_for_batches(config, of_stage), meshes.micro_steps(config, of_stage)
    in_blocks, at_ends = map(count, parameters_of_stage(config, model, stage))
    held = in_blocks + at_ends
    hidden = count(hidden_matrices(model)) // stages if config['optimizer'] == 'muon' else 0
    # What a block adds to what one block alone keeps, or two of which two inputs are not offloaded; the rest is of both
    # ends.
    first = 2 if config['activation_checkpointing'] == 'offload' else 1
    few, more = (activation_bytes({**config, 'n_layer': n}, 'pipeline') for n in (first, first + 1))
    of_block = more['activations'] - few['activations']
    warm_up = stages - 1 - stage if chunks == 1 else 2 * (stages - 1 - stage) + (chunks - 1) * stages
    in_flight = min(warm_up + 1, chunks * micro_steps)
    of_part = n_layer // stages // chunks * of_block + message_bytes(config)
    activations = in_flight * of_part + max(0, few['activations'] - first * of_block)
    logits = few['logits'] if stage == stages - 1 else 0
    reduction = max(at_ends, count(model.blocks[0].parameters())) if copies > 1 else at_ends * (stages > 1)
    of_block_on_host = {part: more[part] - few[part] for part in few if part.startswith('host')}
    on_host = {part: in_flight * (n_layer // stages // chunks) * size for part, size in of_block_on_host.items()}
    parts = {
        'weights': FP32 * held,
        'gradients': FP32 * held,
        'optimizer': FP32 * (OPTIMIZER_MOMENTS[config['optimizer']] * held - hidden),
        'gathered': in_blocks * BYTES[config['dtype']] * (config['dtype'] != 'float32'),
        'activations': activations,
        'logits': logits,
        'reduction': max(0, FP32 * reduction - activations - logits),
        **on_host,
    }
    return parts | ({'travelling': travelling_bytes(config)} if config.get('tensor_parallel', 1) > 1 else {})


def parameters_of_stage(config, model, stage):
    """(those in its blocks, of which all stages have as many; those in none)."""
    last, ends = config['pipeline_stages'] - 1, []
    if stage == 0 or (stage == last and config['tie_embeddings']):
        ends.append(model.embed)
    if stage == 0 and model.pos_embed is not None:
        ends.append(model.pos_embed)
    if stage == last:
        ends += [model.final_norm] if config['tie_embeddings'] else [model.final_norm, model.head]
    blocks = model.blocks[: len(model.blocks) // (last + 1)]
    return [*blocks.parameters()], [parameter for module in ends for parameter in module.parameters()]


def message_bytes(config):
    """Of the activations of one micro-step, where a part of a pipeline ends; with tensor_parallel of some tokens."""
    tokens = config['batch_size'] * config['block_size'] // config.get('tensor_parallel', 1)
    return tokens * config['n_embd'] * BYTES[config['dtype']]


def deepspeed_states(config, model, world_size):
    """
    estimate() of what ZeRO has besides activations and logits, as in DeepSpeed 0.19 with its defaults.

    Unlike fsdp it has weights in the compute dtype (in fp32, too) beside the fp32 ones: whole, or in stage 3 a slice
    and all small parameters whole. Stage 1 in bf16 keeps a whole fp32 gradient, else one of several micro-steps.
    In fp32 stages 1 and 2 have whole parameters' gradients, see reaching_into_slices().
    """
    stage, compute = config['zero_stage'], BYTES[config['dtype']]
    counts = counts_of(model)
    whole, trainable = counts['total'], counts['trainable']
    small = small_parameters(model) if world_size > 1 else 0  # alone, a slice is the whole
    part = math.ceil(trainable / world_size)
    host = 'host ' if config['cpu_offload'] != 'none' else ''
    host_of_slices = 'host ' if config['cpu_offload'] == 'params' else ''
    micro_steps = meshes.micro_steps(config, world_size)
    sums_whole = stage == 1 and config['dtype'] == 'bfloat16' and not host
    of_gradients = trainable if sums_whole else part
    if stage < 3 and config['dtype'] == 'float32' and not host and trainable == whole:
        of_gradients = reaching_into_slices(model, world_size)

    weights = {'weights': compute * (small if stage == 3 else whole)}
    for place, size in ((host_of_slices, compute * math.ceil(whole / world_size) * (stage == 3)), (host, FP32 * part)):
        weights[f'{place}weights'] = weights.get(f'{place}weights', 0) + size
    parts = weights | {
        f'{host}gradients': FP32 * of_gradients,
        f'{host}optimizer': FP32 * OPTIMIZER_MOMENTS[config['optimizer']] * part,
    }
    if stage == 1 and micro_steps > 1 and not sums_whole:
        parts['accumulated'] = FP32 * (trainable - (0 if host else of_gradients))
    if stage == 3 and world_size > 1:
        parts['gathered'] = compute * min(whole - small, DEEPSPEED_REUSE)
    on_cuda = config['device'].startswith('cuda')
    used = min(DEEPSPEED_BUCKET, trainable)
    bucket = 2 * DEEPSPEED_BUCKET if on_cuda else used  # one is filled while one is reduced; unused memory of a host
    of_bucket = compute if stage == 2 else FP32
    return parts | {'reduction': of_bucket * bucket + (FP32 * used if of_bucket < FP32 else 0)}


def reaching_into_slices(model, world_size):
    """
    Numbers in the parameters of which rank 0's slices have a part, all being trained. ZeRO lays each group of the
    optimizer out in its order and cuts it into equal slices, of even sizes.
    """
    numbers = 0
    for group in optim.parameter_groups(model, weight_decay=0.0):
        ends = [*itertools.accumulate((parameter.numel() for parameter in group['params']), initial=0)]
        end_of_slice = 2 * math.ceil(ends[-1] / 2 / world_size)
        numbers += next((end for end in ends if end >= end_of_slice), ends[-1])
    return numbers


def small_parameters(model):
    """Numbers in parameters that DeepSpeed's stage 3 keeps whole on every rank."""
    return sum(p.numel() for p in model.parameters() if p.numel() <= DEEPSPEED_PERSISTENT)


def moments(config, model, shard_size=1):
    """Numbers that the optimizer keeps on one rank; none of frozen weights, as if these were spread evenly."""
    numbers = OPTIMIZER_MOMENTS[config['optimizer']] * count(model.parameters(), shard_size)
    if config['optimizer'] == 'muon':
        numbers -= count(hidden_matrices(model), shard_size)
    counts = counts_of(model)
    return numbers * counts['trainable'] // counts['total']


def empty_model(config, device='meta'):
    """The model that a train script would make, without values. Raises ValueError for keys that make none."""
    with torch.device(device):
        if 'transformers' in config:
            return finetune.for_training(finetune.Pretrained.from_keys(config, explicit=()))
        return GPT(ModelConfig.from_keys(config))


def part_of_rank(config, device='meta'):
    """What a rank has of that model before FSDP shards it: with tensor_parallel a part of each matrix."""
    model = empty_model(config, device)
    model.compute_dtype = getattr(torch, config['dtype'])
    if (ranks := config.get('tensor_parallel', 1)) > 1:
        tensor_manual.Split(model, tensor_manual.Ranks(0, ranks, group=''))
    return model


@lru_cache(maxsize=64)
def counts_of(model):
    """model.parameter_counts(), kept: compare.py --plan asks thousands of times for those of the same few models."""
    return model.parameter_counts()


@lru_cache(maxsize=64)
def root_parameters(model):
    """The parameters outside of the blocks; a tied head is the embedding and counts once."""
    in_blocks = {parameter for block in model.blocks for parameter in block.parameters()}
    return [parameter for parameter in model.parameters() if parameter not in in_blocks]


def hidden_matrices(model):
    """What Muon trains."""
    return [parameter for block in model.blocks for parameter in block.parameters() if parameter.dim() == 2]


def count(parameters, shard_size=1):
    """Numbers on one rank; every parameter is cut along its first dimension, and the pieces are padded to one size."""
    return sum(math.ceil(p.shape[0] / shard_size) * math.prod(p.shape[1:]) for p in parameters)


# --- ACTIVATIONS ------------------------------------------------------------------------------------------------------


def activation_bytes(config, strategy):
    """{'activations', 'logits': bytes} of one micro-step, as explained at estimate(); {} where they cannot be found.

    All blocks are alike: from few of them follow as many as there are, in a tenth of the time. What is found is
    kept, for compare.py --plan asks again and again.
    """
    first = 2 if config['activation_checkpointing'] == 'offload' else 1  # two inputs stay on the GPU
    is_long = config['n_layer'] > first + 1 and 'transformers' not in config
    sizes = [first, first + 1] if is_long else [config['n_layer']]
    found = []
    for size in sizes:
        one = {**config, 'n_layer': size}
        key = strategy != 'ddp', repr(sorted((name, one[name]) for name in one.keys() - OF_SHARDING))
        if key not in known_activations:
            known_activations[key] = activations.of_micro_step(partial(part_of_rank, one), one, strategy != 'ddp')
        found.append(known_activations[key])
    return {part: size + (config['n_layer'] - sizes[0]) * (found[-1][part] - size) for part, size in found[0].items()}


def keys_and_values(config):
    """(numbers in the keys and values of a layer on one rank, bytes of each): on a CPU attention computes in fp32."""
    numbers = 2 * config['batch_size'] * config['block_size'] * config['n_kv_head'] * config['head_dim']
    of_number = BYTES[config['dtype']] if config['device'].startswith('cuda') else FP32
    return numbers // config['context_parallel'] // config.get('tensor_parallel', 1), of_number


def tokens_of_rank(config):
    """In one micro-step, those that all ranks of tensor_parallel have together."""
    return config['batch_size'] * config['block_size'] // config.get('context_parallel', 1)


def travelling_bytes(config):
    """Of tensor_parallel: what arrives and what is sent, before it is put in order."""
    return 2 * tokens_of_rank(config) * config['n_embd'] * BYTES[config['dtype']]


# --- COMMUNICATION ----------------------------------------------------------------------------------------------------


def communication_bytes(config, model, world_size, strategy='ddp'):
    """
    {'all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all': bytes} that one rank sends per optimizer step, and
    their sum 'sent'. config, model, strategy: as for estimate().

    On n ranks all-gather and reduce-scatter send (n-1)/n of the whole, all-reduce twice that (rings of NCCL and gloo).
    On a CPU gloo's own reduce-scatter, which fully_shard uses, is an all-reduce of which most is thrown away: twice the
    bytes. fsdp_manual.py goes without, see send_gradients() there. The exchanges of DiLoCo count as 1/inner_steps.
    DeepSpeed reduces in fp32, in stage 1 after the last micro-step and else after each; in stages 1 and 2 all-reducing.
    It gathers the updated weights, in stage 3 in each micro-step, twice what is used too far apart to be kept (that
    part is from its source, no test has such a model), and in a run's first step more.
    Left out, since they do not grow with the model: the norm of the gradient, the loss, whether all agree to go on.
    Raises ValueError as estimate() does.
    """
    if config.get('tensor_parallel', 1) > 1:
        model = part_of_rank(config)
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

    micro_steps = meshes.micro_steps(config, world_size)
    if strategy == 'deepspeed':
        large, share = whole - small_parameters(model), (world_size - 1) / world_size
        if config['zero_stage'] < 3:
            sent['all-reduce'] = 2 * share * FP32 * trainable * (micro_steps if config['zero_stage'] == 2 else 1)
            sent['all-gather'] = share * compute * trainable
        else:
            sent['reduce-scatter'] = share * FP32 * trainable * micro_steps * (2 if on_gloo else 1)
            again = max(0, large - DEEPSPEED_REUSE // 2)  # from a block to the last one and back
            sent['all-gather'] = share * compute * (whole - large + micro_steps * (large + again))
        return sent | {'sent': sum(sent.values())}

    replicas = config['num_replicas'] if strategy == 'diloco' else config['replicate_size']
    ranks = world_size // replicas if strategy == 'diloco' else meshes.ranks_per_shard_group(config, world_size)
    # Numbers on a rank, with padding.
    block, root = count(model.blocks[0].parameters(), ranks), count(root_parameters(model), ranks)
    trained = (n_layer * block + root) * trainable / whole
    reductions = micro_steps if config['accumulate'] == 'sharded' else 1
    is_manual, stage, unit = config['fsdp_impl'] == 'manual', config['zero_stage'], config['blocks_per_unit']
    blocks_gathered, roots_gathered = micro_steps * n_layer * (2 if stage == 3 else 1), micro_steps
    if is_manual:
        roots_gathered = 1
        if stage == 1:
            blocks_gathered = n_layer
        elif stage == 3:  # the last unit stays for backward, and the first one for the forward of the next micro-step
            last = n_layer % unit or unit
            blocks_gathered -= micro_steps * last + (micro_steps - 1) * min(unit, n_layer)
    sent['all-gather'] = (ranks - 1) * compute * (blocks_gathered * block + roots_gathered * root)

    in_half = is_manual and on_gloo and (micro_steps == 1 or config['accumulate'] == 'sharded')
    reduced = (ranks - 1) * (compute if in_half else FP32) * trained * reductions
    sent['reduce-scatter'] = reduced * (2 if on_gloo and not is_manual else 1)
    if strategy == 'fsdp':
        sent['all-reduce'] = 2 * (replicas - 1) * FP32 * trained * reductions / replicas
        if (sharing := config.get('context_parallel', 1)) > 1:  # context_manual.py, "What crosses the wire?"
            numbers, of_number = keys_and_values(config)
            passes = 3 if config['activation_checkpointing'] in ('full', 'offload') else 2
            hops = sharing if config['context_impl'] == 'ring' else sharing - 1
            of_layer = numbers * (passes * (sharing - 1) * of_number + hops * FP32)
            sent['keys and values'] = micro_steps * n_layer * of_layer
        if config.get('tensor_parallel', 1) > 1:
            sent['activations'], of_gradients = sent_by_tensor(config, model, model.parameters(), micro_steps, ranks)
            sent['all-reduce'] += of_gradients
    elif (dtype := config['exchange_dtype']) == 'top2bit':  # as if all chunks were whole
        kept = trained * config['exchange_k'] / codec.CHUNK
        sent['all-gather'] += (replicas - 1) * codec.BYTES[dtype] * kept / config['inner_steps']
    else:
        of_number = codec.BYTES[dtype] + (codec.SCALES[dtype] / codec.BLOCKS[dtype] if dtype in codec.SCALES else 0)
        half = (replicas - 1) * of_number * trained / replicas / config['inner_steps']
        sent['reduce-scatter'] += half
        sent['all-gather'] += half
    if config['optimizer'] == 'muon' and ranks > 1:  # hidden matrices travel to the rank that works on them, and back
        hidden = count(hidden_matrices(model), ranks) * trainable / whole
        sent['all-to-all'] = 2 * (ranks - 1) * (FP32 if on_gloo else 2) * hidden / ranks
    return sent | {'sent': sum(sent.values())}


def stage_traffic(config, model, world_size, stage):
    """{'point-to-point', 'all-reduce', 'sent': bytes} that a rank of one stage of a pipeline sends per optimizer step.

    Each micro-step's activations go on behind every part but the last one, their gradients back before every part but
    the first. The gradients of a tied embedding are exchanged between both ends. model: part_of_rank(config).
    """
    stages, chunks = config['pipeline_stages'], config['pipeline_chunks']
    of_stage = meshes.ranks_of_stage(config, world_size)
    copies, micro_steps = meshes.ranks_for_batches(config, of_stage), meshes.micro_steps(config, of_stage)
    mine = sum(parameters_of_stage(config, model, stage), [])
    messages = micro_steps * (2 * chunks - (stage == 0) - (stage == stages - 1))
    tied = config['tie_embeddings'] and stages > 1 and stage in (0, stages - 1)
    sent = {
        'point-to-point': messages * message_bytes(config) + FP32 * tied * count(model.embed.parameters()),
        'all-reduce': 2 * (copies - 1) * FP32 * count(mine) / copies,
    }
    if config.get('tensor_parallel', 1) > 1:
        ends = stage == 0, stage == stages - 1
        sent['activations'], of_gradients = sent_by_tensor(config, model, mine, micro_steps, 1, stages, ends)
        sent['all-reduce'] += of_gradients
    return sent | {'sent': sum(sent.values())}


def sent_by_tensor(config, model, parameters, micro_steps, shard_size, stages=1, ends=(True, True)):
    """
    Bytes (of activations and the loss, of gradients that are partial): tensor_manual.py, "What crosses the wire?"
    parameters: of this rank, each spread over shard_size ranks. ends: whether a stage has the embedding, the head.
    """
    tensor, of_block = config['tensor_parallel'], TENSOR_COLLECTIVES[config['activation_checkpointing']]
    times = config['n_layer'] // stages * of_block + 2 * sum(ends)
    of_token = times * config['n_embd'] * BYTES[config['dtype']] / tensor + 3 * FP32 * ends[1]
    is_whole = {model.get_parameter(name) for name, part in model.slices.items() if part.dim is None}
    partial_gradients = count((parameter for parameter in parameters if parameter in is_whole), shard_size)
    activations = micro_steps * (tensor - 1) * tokens_of_rank(config) * of_token
    return activations, 2 * (tensor - 1) * FP32 * partial_gradients / tensor


def out_of_memory_advice(config, world_size, strategy):
    """
    One line for a run that ran out of memory: the predicted need and the keys to lower, the most effective first.

    config: with the model's keys filled in, config.update(model_config.to_dict()); before that there is no prediction.
    strategy: as for estimate().
    """
    try:
        parts = estimate(config, empty_model(config), world_size, strategy)
    except (KeyError, TypeError, ValueError):  # not resolved yet
        return 'lower batch_size or block_size'
    device_parts = {part: size for part, size in parts.items() if not part.startswith('host')}
    largest = max(device_parts, key=device_parts.get)
    need = f'predicted need {sum(device_parts.values()) / 1e9:.2f} GB per rank, most of it {largest}'

    on_cuda = config['device'].startswith('cuda')
    of_batch = {
        f'lower batch_size={config["batch_size"]}': config['batch_size'] > 1,
        'set --activation_checkpointing=full': config['activation_checkpointing'] not in ('full', 'offload'),
        'set --activation_checkpointing=offload': on_cuda and config['activation_checkpointing'] == 'full',
        f'lower block_size={config["block_size"]}': True,
    }
    has_untrained = largest in ('optimizer', 'gradients', 'accumulated') and 'transformers' in config
    of_states = {  # of frozen weights there are none
        'set --lora_rank=16': has_untrained and not config['lora_rank'],
        'use train_fsdp.py on several GPUs': strategy == 'ddp',
        'set --zero_stage=3': config.get('zero_stage', 3) != 3,
        'set --accumulate=sharded': config.get('accumulate', 'sharded') != 'sharded',
        'set --cpu_offload=params': config.get('cpu_offload') == 'none',
    }
    helps = of_batch | of_states if largest in ('activations', 'logits') else of_states | of_batch
    return f'{need}: ' + ', or '.join(key for key, is_left in helps.items() if is_left)


# --- REPORT -----------------------------------------------------------------------------------------------------------


def report(config, shape, world_size, strategy='ddp'):
    """
    What --dry_run prints. shape: to_dict() of the ModelConfig, or of the Pretrained.
    Raises ValueError as estimate() and micro_steps() do.
    """
    config = {**config, **shape}
    model = empty_model(config)
    is_fine_tuned, counts = 'transformers' in config, counts_of(model)
    stages = range(config['pipeline_stages'] if strategy == 'pipeline' else 0)
    memory = {} if stages else estimate(config, model, world_size, strategy)
    ranks = world_size // len(stages) if stages else world_size  # that share out the global batch
    micro_steps = meshes.micro_steps(config, ranks)
    tokens = config['global_batch_size'] * config['block_size']
    flops = model.flops_per_token()
    checkpoint = FP32 * (counts['total'] + moments(config, model))
    if strategy == 'diloco':  # in the middle of a round each replica has parameters of its own
        checkpoint = FP32 * 2 * counts['trainable'] + checkpoint * config['num_replicas']

    names = ('n_layer', 'n_head', 'n_kv_head', 'head_dim', 'n_embd', 'mlp_hidden_dim', 'vocab_size', 'block_size')
    of_what = f'{config["arch"]} of {config["init_from"]}' if is_fine_tuned else config['arch']
    lines = section(f'model: {of_what}', {name: f'{config[name]:,}' for name in names})
    if config.get('heads'):
        lines += section(f'rules of heads={config["heads"]} (parameters without norms)', rule_rows(config))
    parameters = {part: f'{n:,}' for part, n in counts.items() if part != 'trainable' or n < counts['total']}
    parameters['attention and mlp'] = f'{counts["attention"] + counts["mlp"]:,}'
    padding = '' if is_fine_tuned else f' (vocabulary padded to {model.config.padded_vocab_size:,})'
    lines += section(f'parameters{padding}', parameters)

    held = {part: f'{size / 1e9:.3f}' for part, size in memory.items()}
    if stages:
        part = part_of_rank(config)
        of_stages = [stage_memory(config, part, world_size, stage) for stage in stages]
        held = columns([parts | totals(parts) for parts in of_stages])
    elif 'activations' not in memory:
        held['activations'] = 'not known: this model does not run without data'
    held |= {part: f'{size / 1e9:.3f}' for part, size in totals(memory).items()}
    of_run = (
        f'{strategy}, {counted(world_size, "rank")}, {config["dtype"]}, device={config["device"].partition(":")[0]}'
    )
    lines += section(f'memory per rank at the peak of a step, in GB ({of_run})', held)
    if stages:
        sent = columns([stage_traffic(config, part, world_size, stage) for stage in stages])
        lines += section('sent per rank per step, in GB, by stages 0, 1, ... as above', sent)

    sharing = config.get('context_parallel', 1) * config.get('tensor_parallel', 1)
    of_batch = batch_line(config['batch_size'], micro_steps, ranks, config['block_size'], sharing)
    lines += ['', 'batch', f'  {of_batch}']
    sent = communication_bytes(config, model, world_size, strategy)['sent'] if world_size > 1 else 0
    lines.append(f'  {sent / 1e9:.3f} GB sent per rank per step')
    lines += ['', 'schedule', *(f'  {line}' for line in schedule_lines(config, tokens))]
    flops = {'per token': flops, 'per step': flops * tokens, 'per run': flops * tokens * config['max_iters']}
    lines += section('FLOPs, forward and backward', {name: f'{number:.3e}' for name, number in flops.items()})
    copies = config['keep_checkpoints'] + (config['keep_checkpoints'] > 0)  # the oldest goes when the newest is there
    disk = {'per checkpoint': checkpoint, f'at most ({copies} of them)': copies * checkpoint}
    lines += section('disk, in GB', {name: f'{size / 1e9:.3f}' for name, size in disk.items()})
    return '\n'.join(lines[1:])


def totals(parts):
    """{'total on the device', 'total on the host': bytes} of what estimate() returns, if there is something."""
    places = {'device': False, 'host': True}
    sizes = {
        place: [size for part, size in parts.items() if part.startswith('host') == on_host]
        for place, on_host in places.items()
    }
    return {f'total on the {place}': sum(of_place) for place, of_place in sizes.items() if of_place}


def columns(of_stages):
    """{part: its GB on stage 0, on stage 1, ...} from [{part: bytes}, ...]."""
    return {part: ' '.join(f'{parts[part] / 1e9:8.3f}' for parts in of_stages) for part in of_stages[0]}


def section(title, rows):
    """Lines of a table with two columns, after an empty line."""
    return ['', title, *(f'  {name:22}{value:>16}' for name, value in rows.items())]


def schedule_lines(config, tokens_per_step):
    """Steps, tokens and learning rates of the run, in words."""
    peak = config['learning_rate']
    lines = [f'{config["max_iters"]:,} steps x {tokens_per_step:,} = {config["max_iters"] * tokens_per_step:,} tokens']
    lines.append(f'{config["optimizer"]}: warm-up over {config["warmup_iters"]:,} steps to learning rate {peak:.3g}')
    if config['lr_schedule'] != 'constant':
        lines.append(f'{config["lr_schedule"]}: down to {config["min_lr"]:.3g} at step {config["lr_decay_iters"]:,}')
    return lines
