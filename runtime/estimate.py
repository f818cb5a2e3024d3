"""
What a run takes, before it runs: memory per rank, bytes on the wire per step, FLOPs, disk. `--dry_run` prints it.

    print(footprint.report(config, model_config.to_dict(), world_size, strategy='fsdp'))
    footprint.estimate(config, model_config.to_dict(), world_size, 'fsdp')  # {'weights': bytes, 'gradients': ...}

Nothing is allocated and torch is not imported: every figure follows from the keys. `config` and `model` as in
scaling.py, which counts the parameters. Sizes are bytes, 1 GB = 1e9 bytes.
"""

import itertools
import math

from runtime.scaling import (
    accumulation_steps,
    batch_line,
    block_shapes,
    count,
    flops_per_token,
    has_qk_norm,
    has_rms_norm,
    is_from_transformers,
    matrices,
    padded_vocab_size,
    parameter_parts,
    ranks_per_shard_group,
    root_shapes,
    rule_rows,
    trainable_parameters,
)

BYTES = {'float32': 4, 'bfloat16': 2, 'float16': 2}  # per number
FP32 = BYTES['float32']
OPTIMIZER_MOMENTS = {'adamw': 2, 'adamw-decay': 2, 'adana': 2, 'adana-released': 2, 'dana-mk4': 2}  # fp32 per parameter
OPTIMIZER_MOMENTS |= {'dana-star-mk4': 3, 'ademamix': 3, 'sgd': 0}
OPTIMIZER_MOMENTS['muon'] = 2  # and 1 in the matrices of blocks, see moments()
LOSS_CHUNK_BYTES = {'cpu': 2**26, 'cuda': 2**29}  # = model.LOGITS_BYTES, fp32 logits of one chunk of the loss
STRATEGIES = ('ddp', 'fsdp', 'diloco', 'deepspeed')
# Numbers of DeepSpeed: reduced together (deepspeed_engine.py asks for it); and its defaults in 0.19: parameters up to
# this size stay whole, and so do larger ones if so many numbers at most are used before their turn comes again.
DEEPSPEED_BUCKET, DEEPSPEED_PERSISTENT, DEEPSPEED_REUSE = 2**25, 10**5, 10**9


# --- MEMORY -----------------------------------------------------------------------------------------------------------


def estimate(config, model, world_size, strategy='ddp', shard_size=None):
    """
    {part: bytes} that one rank holds in a training step; parts that begin with 'host' are in the host's memory.

    weights       fp32 masters: whole under ddp, 1/shard_size under fsdp; deepspeed: see there
    gradients     fp32, like the weights; none of frozen weights
    accumulated   fsdp: what whole gradients need beyond that, while micro-steps add up without communication
    optimizer     fp32 moments, none of frozen weights
    outer         diloco: fp32 outer parameters and momentum, and with error feedback what was lost
    gathered      fsdp: whole weights in the compute dtype
    reduction     fsdp: gradients on their way into the reduce-scatter
    activations   what forward keeps for backward, and what backward needs beyond the room that the logits leave
    logits        what the loss of one chunk of tokens needs, and the gradients by hidden states and head it hands on

    shard_size: ranks that hold one copy of the model; None = from world_size and replicate_size.
    Under fsdp not all parts peak at once: their sum is above the peak, by up to a quarter when the batch is small. Not
    counted: fragments of the allocator, CUDA's context (0.5 GB), NCCL's buffers. Eager mode is assumed; torch.compile
    keeps less. CPU and CUDA differ in attention and norms (see kept_per_token); the tests measure the CPU.
    Raises ValueError for an unknown strategy, dtype or optimizer, or ranks that do not divide.
    """
    known = {'strategy': STRATEGIES, 'dtype': BYTES, 'optimizer': OPTIMIZER_MOMENTS}
    for name, value in {'strategy': strategy, 'dtype': config['dtype'], 'optimizer': config['optimizer']}.items():
        if value not in known[name]:
            raise ValueError(f'{name}={value!r}: expected one of {", ".join(known[name])}')

    compute = BYTES[config['dtype']]
    n_layer, block, root = model['n_layer'], block_shapes(model), root_shapes(model)
    whole = count(root) + n_layer * count(block)
    trainable = trainable_parameters(model)
    activations, logits = activation_bytes(config, model, casts_weights=strategy == 'ddp' and compute < FP32)
    if strategy == 'ddp':
        return {
            'weights': FP32 * whole,
            'gradients': FP32 * trainable,  # the buckets of the all-reduce: .grad are views of them
            'optimizer': FP32 * moments(config, model),
            'activations': activations,
            'logits': logits,
        }

    if strategy == 'deepspeed':
        return deepspeed_states(config, model, world_size) | {'activations': activations, 'logits': logits}
    if strategy == 'diloco':
        shard_size = world_size // config['num_replicas']
    shard_size = shard_size or ranks_per_shard_group(config, world_size)
    shard = count(root, shard_size) + n_layer * count(block, shard_size)
    trained = shard * trainable // whole  # as if frozen weights were spread evenly
    micro_steps = accumulation_steps(config['global_batch_size'], config['batch_size'], world_size)
    accumulates_whole = config['accumulate'] == 'unsharded' and micro_steps > 1
    host = 'host ' if config['cpu_offload'] == 'params' else ''
    host_of_moments = 'host ' if config['cpu_offload'] != 'none' else ''
    parts = {
        f'{host}weights': FP32 * shard,
        f'{host}gradients': FP32 * trained,
        f'{host_of_moments}optimizer': FP32 * moments(config, model, shard_size),
    }
    if strategy == 'diloco':
        outer = FP32 * (2 + (config['error_feedback'] and config['exchange_dtype'] != 'float32')) * trained
        outer += FP32 * trained // config['num_fragments'] if config['overlap_steps'] else 0  # in flight
        parts['host outer' if config['outer_on_host'] or host else 'outer'] = outer
    if accumulates_whole:  # each unit's turns into its shard when the last micro-step reduces it
        parts['accumulated'] = FP32 * (trainable - (0 if host else trained))
    # The unit at work, or all of them below stage 3, and the flat buffers in which others arrive; fully_shard: and the
    # unit after it.
    at_once = config['blocks_per_unit'] * (max(1, config['prefetch']) if config['fsdp_impl'] == 'manual' else 2)
    blocks_gathered = at_once + config['blocks_per_unit'] if config['zero_stage'] == 3 else at_once + n_layer
    blocks_gathered = min(blocks_gathered, n_layer + 1)
    # A unit's gradients as autograd made them, and the flat fp32 input of the reduce-scatter. The root comes last, when
    # the activations are gone.
    of_block, of_root = ((compute + FP32) * count(shapes) * trainable // whole for shapes in (block, root))
    return parts | {
        'gathered': compute * (count(root) + blocks_gathered * count(block)),
        'reduction': max(of_block, of_root - activations - logits),
        'activations': activations,
        'logits': logits,
    }


def deepspeed_states(config, model, world_size):
    """
    estimate() of what ZeRO has besides activations and logits, as in DeepSpeed 0.19 with its defaults.

    Unlike fsdp it has weights in the compute dtype (in fp32, too) beside the fp32 ones: whole, or in stage 3 a slice
    and all small parameters whole. Stage 1 in bf16 keeps a whole fp32 gradient, else one of several micro-steps.
    In fp32 stages 1 and 2 have whole parameters' gradients, see reaching_into_slices().
    """
    stage, compute = config['zero_stage'], BYTES[config['dtype']]
    whole = parameter_parts(model)['total']
    small = small_parameters(model) if world_size > 1 else 0  # alone, a slice is the whole
    trainable = trainable_parameters(model)
    part = math.ceil(trainable / world_size)
    host = 'host ' if config['cpu_offload'] != 'none' else ''
    host_of_slices = 'host ' if config['cpu_offload'] == 'params' else ''
    micro_steps = accumulation_steps(config['global_batch_size'], config['batch_size'], world_size)
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
    optimizer (optim.parameter_groups()) out in the order of the modules and cuts it into equal slices, of even sizes.
    """
    root, of_blocks = root_shapes(model), model['n_layer'] * [*block_shapes(model).values()]
    tables = {name: shape for name, shape in root.items() if any(word in name for word in ('embed', 'wte', 'wpe'))}
    others = [shape for name, shape in root.items() if name not in tables]
    head = [tables.pop(next(iter(tables)))] if model['tie_embeddings'] else []  # met as the head, behind the blocks
    decayed = [shape for shape in (*of_blocks, *others, *head) if len(shape) >= 2]
    not_decayed = [*tables.values(), *(shape for shape in (*of_blocks, *others) if len(shape) < 2)]
    numbers = 0
    for group in (decayed, not_decayed):
        ends = [*itertools.accumulate(map(math.prod, group))]
        end_of_slice = 2 * math.ceil(ends[-1] / 2 / world_size)
        numbers += next((end for end in ends if end >= end_of_slice), ends[-1])
    return numbers


def small_parameters(model):
    """Numbers in parameters that DeepSpeed's stage 3 keeps whole on every rank."""
    shapes = [*root_shapes(model).values(), *model['n_layer'] * [*block_shapes(model).values()]]
    return sum(size for size in map(math.prod, shapes) if size <= DEEPSPEED_PERSISTENT)


def moments(config, model, shard_size=1):
    """Numbers that the optimizer keeps on one rank; none of frozen weights, as if these were spread evenly."""
    block, root = block_shapes(model), root_shapes(model)
    n_layer, of_each = model['n_layer'], OPTIMIZER_MOMENTS[config['optimizer']]
    numbers = of_each * (count(root, shard_size) + n_layer * count(block, shard_size))
    if config['optimizer'] == 'muon':
        numbers -= n_layer * count(matrices(block), shard_size)
    return numbers * trainable_parameters(model) // (count(root) + n_layer * count(block))


def activation_bytes(config, model, casts_weights):
    """
    (activations, logits) of one micro-step, as explained at estimate().

    casts_weights: autograd keeps a copy in the compute dtype of every weight that a matmul has cast.
    """
    on_cpu, compute, residual, _ = bytes_per_number(config, model, casts_weights)
    tokens = config['batch_size'] * config['block_size']
    width, hidden, vocab = model['n_embd'], model['mlp_hidden_dim'], padded_vocab_size(model)

    weight_copies = compute * count(block_shapes(model)) if casts_weights else 0
    all_of_block = tokens * kept_per_token(config, model, casts_weights) + weight_copies
    kept_of_block = {
        'none': all_of_block,
        'selective': tokens * kept_selectively_per_token(config, model, casts_weights),
        'full': tokens * residual * width,  # its input
    }[config['activation_checkpointing']]
    final_norm = tokens * norm_input_bytes(width, residual, model, on_cpu)
    has_input_mask = model['dropout'] and not (is_from_transformers(model) and has_rms_norm(model))
    input_mask = tokens * width * (compute if on_cpu else 1) if has_input_mask else 0
    kept = model['n_layer'] * kept_of_block + final_norm + input_mask

    # The loss (model.ChunkedCrossEntropy) takes a chunk of tokens at a time: its logits, its log-probabilities in fp32
    # and, in half precision, the fp32 copy of the logits that log_softmax makes. From the second chunk on, two results
    # of the one before are there, too: the gradient by its logits, and its product for the head's gradient.
    chunk = min(tokens, max(1, LOSS_CHUNK_BYTES['cpu' if on_cpu else 'cuda'] // (FP32 * vocab)))
    second_chunk = min(chunk, tokens - chunk)
    per_logit = compute + FP32 + (FP32 if compute < FP32 else 0)
    in_first = chunk * vocab * per_logit
    in_second = second_chunk * vocab * per_logit + compute * vocab * (chunk + width)
    weight_copy = compute * vocab * width if casts_weights else 0
    hidden_states_and_gradient = 2 * tokens * compute * width
    head_gradient = FP32 * vocab * width
    logits = max(in_first, in_second if second_chunk else 0) + weight_copy + hidden_states_and_gradient + head_gradient

    # Then the last block's backward: what its checkpoint dropped is there again, and beside it the gradients in the MLP
    # (SwiGLU has two branches). It sets the peak if that is more than what the loss has left behind by then.
    branches = 2 if has_rms_norm(model) else 1
    in_backward = all_of_block - kept_of_block + tokens * compute * branches * (hidden + width)
    waiting = head_gradient if model['tie_embeddings'] else 0  # tied: to be added to the embedding's
    freed = final_norm + logits - waiting
    return kept + max(0, in_backward - freed), logits


def bytes_per_number(config, model, casts_weights):
    """
    (on_cpu, compute, residual, attention): bytes per number in matmuls, in the residual stream and within attention.
    On CPUs attention is in fp32. Under ddp transformers models run in autocast: there the residual stream, a sum with
    the fp32 embedding, is, too.
    """
    compute, on_cpu = BYTES[config['dtype']], not config['device'].startswith('cuda')
    autocast = casts_weights and is_from_transformers(model)
    return on_cpu, compute, FP32 if autocast else compute, FP32 if on_cpu else compute


def kept_per_token(config, model, casts_weights=False):
    """
    Bytes per token that one block keeps for backward when nothing is recomputed.

    CUDA: attention in the compute dtype, and the flash kernel keeps q, k, v, its output and a logsumexp per row, with
    dropout too. CPU: attention in fp32, in a flash kernel only without dropout; RMSNorm is made of several operations.
    """
    if is_from_transformers(model):
        return kept_by_transformers_per_token(config, model, casts_weights)
    on_cpu, compute, _, attention = bytes_per_number(config, model, casts_weights)
    width, hidden = model['n_embd'], model['mlp_hidden_dim']
    queries, keys = model['n_head'] * model['head_dim'], model['n_kv_head'] * model['head_dim']
    gates = queries if model['attention_gate'] else 0
    has_rope = model['arch'] != 'gpt2'

    size = 2 * (norm_input_bytes(width, compute, model, on_cpu) + compute * width)  # two norms, input and output
    if model['dropout'] and on_cpu:
        # No flash kernel: scaled copies of q, k and v for each head, and scores, mask and their product for each pair.
        size += FP32 * (3 * queries + 3 * model['n_head'] * config['block_size'])
    else:
        size += attention * (queries + gates + 2 * keys)  # q, k, v (and gate) in one storage
        size += attention * (queries + keys) if has_rope else 0  # q and k rotated
        size += attention * queries + FP32 * model['n_head']  # output, and the logsumexp of each row of scores
    if has_qk_norm(model) and has_rms_norm(model) and on_cpu:
        size += FP32 * (queries + keys)  # q and k divided by their norms
    size += attention * gates  # the gate's sigmoid
    copied = attention != compute or gates or (on_cpu and (has_rope or model['dropout']))  # to another dtype or layout
    size += compute * queries if copied else 0  # input of the output projection
    size += compute * hidden * (4 if has_rms_norm(model) else 2)  # gate, silu(gate), up and product, or up and gelu(up)
    if model['dropout']:
        size += 2 * width * (compute if on_cpu else 1)  # masks of the two residual branches
    return size


def kept_by_transformers_per_token(config, model, casts_weights):
    """
    The same of a block of transformers, whose norms, RoPE and activations are several operations on CUDA, too: as
    saved_tensors_hooks shows, in bf16 and (in autocast), with C = width,
    RMSNorm        4 C + 4 input in fp32, 2 C (4 C) divided by its norm, 2 C result (one for each of 3 + 2 matmuls)
    LayerNorm      2 C (4 C) input, mean and deviation, 2 C result
    norms of q, k  as RMSNorm without the result
    attention      rotated q and k, v, output and a logsumexp per head; where it is in fp32 the output in bf16, too
    MLP            SwiGLU: gate, silu(gate), up, product. gelu_new: x, tanh, 1 + tanh, x / 2, product
    Not counted: cos and sin, one for all blocks; with a mask (chats) a copy of it, and of k and v for each query head.
    Frozen norms (LoRA) keep no numbers divided by the norm: up to a sixth less.
    """
    on_cpu, compute, residual, attention = bytes_per_number(config, model, casts_weights)
    width, hidden = model['n_embd'], model['mlp_hidden_dim']
    queries, keys = model['n_head'] * model['head_dim'], model['n_kv_head'] * model['head_dim']
    results = 5 if has_rms_norm(model) and residual != compute else 2
    size = 2 * norm_input_bytes(width, residual, model, on_cpu) + results * compute * width
    if has_qk_norm(model):
        size += (FP32 + compute) * (queries + keys) + FP32 * (model['n_head'] + model['n_kv_head'])
    if model['dropout'] and on_cpu:  # no flash kernel, see kept_per_token
        size += FP32 * (3 * queries + 3 * model['n_head'] * config['block_size']) + compute * queries
    else:
        size += attention * (2 * queries + 2 * keys) + FP32 * model['n_head']
        size += compute * queries if attention != compute else 0
    size += compute * hidden * (4 if has_rms_norm(model) else 5)
    if model['dropout'] and not has_rms_norm(model):  # the others have it in attention alone
        size += 2 * width * (compute if on_cpu else 1)
    return size


def kept_selectively_per_token(config, model, casts_weights=False):
    """Bytes per token that one block keeps with selective checkpointing: its input and model.SAVED_OPS' results."""
    on_cpu, compute, residual, attention = bytes_per_number(config, model, casts_weights)
    queries, keys = model['n_head'] * model['head_dim'], model['n_kv_head'] * model['head_dim']
    gates = queries if model['attention_gate'] else 0
    matmuls = queries + gates + 2 * keys + 2 * model['n_embd']  # qkv, and the projections back to the residual stream
    matmuls += model['mlp_hidden_dim'] * (2 if has_rms_norm(model) else 1)
    size = residual * model['n_embd'] + compute * matmuls
    if not (model['dropout'] and on_cpu):
        size += attention * queries + FP32 * model['n_head']
    return size


def norm_input_bytes(width, compute, model, on_cpu):
    """Bytes per token that a norm over the residual stream, of `compute` bytes per number, keeps of its input."""
    if has_rms_norm(model) and is_from_transformers(model):  # the input in fp32, and divided by its norm
        return (FP32 + compute) * width + FP32
    if has_rms_norm(model) and on_cpu:  # no fused kernel: the input in fp32, and divided by its norm
        return 2 * FP32 * width + FP32
    return compute * width + 2 * FP32  # the input, its mean and standard deviation


# --- COMMUNICATION ----------------------------------------------------------------------------------------------------


def communication_bytes(config, model, world_size, strategy='ddp'):
    """
    {'all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all': bytes} that one rank sends per optimizer step, and
    their sum 'sent'. config, model, strategy: as for estimate().

    On n ranks all-gather and reduce-scatter send (n-1)/n of the whole, all-reduce twice that (rings of NCCL and gloo).
    On a CPU gloo's own reduce-scatter, which fully_shard uses, is an all-reduce of which most is thrown away: twice the
    bytes. fsdp_manual.py goes without, see start_reduction() there. The exchanges of DiLoCo count as 1/inner_steps.
    DeepSpeed reduces in fp32, in stage 1 after the last micro-step and else after each; in stages 1 and 2 all-reducing.
    It gathers the updated weights, in stage 3 in each micro-step, twice what is used too far apart to be kept (that
    part is from its source, no test has such a model), and in a run's first step more.
    Left out, since they do not grow with the model: the norm of the gradient, the loss, whether all agree to go on.
    Raises ValueError as estimate() does.
    """
    on_gloo = not config['device'].startswith('cuda')
    compute, n_layer = BYTES[config['dtype']], model['n_layer']
    whole = count(root_shapes(model)) + n_layer * count(block_shapes(model))
    trainable = trainable_parameters(model)
    sent = dict.fromkeys(('all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all'), 0)
    if strategy == 'ddp':
        sent['all-reduce'] = 2 * (world_size - 1) * FP32 * trainable / world_size
        return sent | {'sent': sum(sent.values())}

    micro_steps = accumulation_steps(config['global_batch_size'], config['batch_size'], world_size)
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
    ranks = world_size // replicas if strategy == 'diloco' else ranks_per_shard_group(config, world_size)
    block, root = count(block_shapes(model), ranks), count(root_shapes(model), ranks)  # numbers on a rank, with padding
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
    else:  # int8 and int4 come with an fp32 scale for each block of 256 numbers
        of_number = {**BYTES, 'int8': 1 + FP32 / 256, 'int4': 0.5 + FP32 / 256}[config['exchange_dtype']]
        half = (replicas - 1) * of_number * trained / replicas / config['inner_steps']
        sent['reduce-scatter'] += half
        sent['all-gather'] += half
    if config['optimizer'] == 'muon' and ranks > 1:  # hidden matrices travel to the rank that works on them, and back
        hidden = n_layer * count(matrices(block_shapes(model)), ranks) * trainable / whole
        sent['all-to-all'] = 2 * (ranks - 1) * (FP32 if on_gloo else 2) * hidden / ranks
    return sent | {'sent': sum(sent.values())}


def out_of_memory_advice(config, world_size):
    """
    One line for a run that ran out of memory: the predicted need and the keys to lower, the most effective first.

    config: with the model's keys filled in, config.update(model_config.to_dict()); before that there is no prediction.
    """
    keys_of = {'deepspeed': 'deepspeed_config', 'diloco': 'num_replicas', 'fsdp': 'fsdp_impl'}
    strategy = next((strategy for strategy, key in keys_of.items() if key in config), 'ddp')
    try:
        parts = estimate(config, config, world_size, strategy)
    except (KeyError, TypeError, ValueError):  # not resolved yet
        return 'lower batch_size or block_size'
    device_parts = {part: size for part, size in parts.items() if not part.startswith('host')}
    largest = max(device_parts, key=device_parts.get)
    need = f'predicted need {sum(device_parts.values()) / 1e9:.2f} GB per rank, most of it {largest}'

    batch_keys = [f'lower batch_size={config["batch_size"]}'] if config['batch_size'] > 1 else []
    if config['activation_checkpointing'] != 'full':
        batch_keys.append('set --activation_checkpointing=full')
    batch_keys.append(f'lower block_size={config["block_size"]}')
    state_keys = []
    if strategy == 'ddp':
        state_keys.append('use train_fsdp.py on several GPUs')
    else:
        state_keys += ['set --zero_stage=3'] if config['zero_stage'] != 3 else []
        state_keys += ['set --accumulate=sharded'] if config.get('accumulate', 'sharded') != 'sharded' else []
        state_keys += ['set --cpu_offload=params'] if config['cpu_offload'] == 'none' else []
    of_trained = largest in ('optimizer', 'gradients', 'accumulated')  # there are none of frozen weights
    if of_trained and is_from_transformers(config) and not config['lora_rank']:
        state_keys.insert(0, 'set --lora_rank=16')
    from_batch = largest in ('activations', 'logits')
    return f'{need}: ' + ', or '.join(batch_keys + state_keys if from_batch else state_keys + batch_keys)


# --- REPORT -----------------------------------------------------------------------------------------------------------


def report(config, model, world_size, strategy='ddp', shard_size=None):
    """What --dry_run prints. Raises ValueError as estimate() and accumulation_steps() do."""
    parameters = parameter_parts(model)
    memory = estimate(config, model, world_size, strategy, shard_size)
    micro_steps = accumulation_steps(config['global_batch_size'], config['batch_size'], world_size)
    tokens = config['global_batch_size'] * config['block_size']
    flops = flops_per_token(model)
    trainable = trainable_parameters(model)
    checkpoint = FP32 * (parameters['total'] + moments(config, model))
    if strategy == 'diloco':  # in the middle of a round each replica has parameters of its own
        checkpoint = FP32 * 2 * trainable + checkpoint * config['num_replicas']

    names = ('n_layer', 'n_head', 'n_kv_head', 'head_dim', 'n_embd', 'mlp_hidden_dim', 'vocab_size', 'block_size')
    lines = [f'model: {model["arch"]}' + (f' of {config.get("init_from")}' if is_from_transformers(model) else '')]
    lines += [f'  {name:22}{model[name]:>16,}' for name in names]
    if config.get('heads'):
        lines += ['', f'rules of heads={config["heads"]} (parameters without norms)']
        lines += [f'  {name:22}{value:>16}' for name, value in rule_rows({**config, **model}).items()]
    padding = '' if is_from_transformers(model) else f' (vocabulary padded to {padded_vocab_size(model):,})'
    parameters |= {'trainable': trainable} if trainable < parameters['total'] else {}
    lines += ['', f'parameters{padding}', *(f'  {part:22}{number:>16,}' for part, number in parameters.items())]
    lines.append(f'  {"attention and mlp":22}{parameters["attention"] + parameters["mlp"]:>16,}')

    lines += ['', f'memory per rank at the peak of a step, in GB ({strategy}, {world_size} ranks, {config["dtype"]})']
    lines += [f'  {part:22}{size / 1e9:>16.3f}' for part, size in memory.items()]
    for place in ('device', 'host'):
        sizes = [size for part, size in memory.items() if part.startswith('host') == (place == 'host')]
        if sizes:
            lines.append(f'  {"total on the " + place:22}{sum(sizes) / 1e9:>16.3f}')

    lines += ['', 'batch', f'  {batch_line(config["batch_size"], micro_steps, world_size, config["block_size"])}']
    sent = communication_bytes(config, model, world_size, strategy)['sent'] if world_size > 1 else 0
    lines.append(f'  {sent / 1e9:.3f} GB sent per rank per step')
    lines += ['', 'schedule', *(f'  {line}' for line in schedule_lines(config, tokens))]
    lines += ['', 'FLOPs, forward and backward']
    for name, number in (('token', flops), ('step', flops * tokens), ('run', flops * tokens * config['max_iters'])):
        lines.append(f'  {"per " + name:22}{number:>16.3e}')
    lines += ['', 'disk, in GB', f'  {"per checkpoint":22}{checkpoint / 1e9:>16.3f}']
    copies = config['keep_checkpoints'] + (config['keep_checkpoints'] > 0)  # the oldest goes when the newest is there
    lines.append(f'  {f"at most ({copies} of them)":22}{copies * checkpoint / 1e9:>16.3f}')
    return '\n'.join(lines)


def schedule_lines(config, tokens_per_step):
    """Steps, tokens and learning rates of the run, in words."""
    peak = config['learning_rate']
    lines = [f'{config["max_iters"]:,} steps x {tokens_per_step:,} = {config["max_iters"] * tokens_per_step:,} tokens']
    lines.append(f'{config["optimizer"]}: warm-up over {config["warmup_iters"]:,} steps to learning rate {peak:.3g}')
    if config['lr_schedule'] != 'constant':
        end = config['lr_decay_iters'] or config['max_iters']
        lowest = peak / 10 if config['min_lr'] is None else config['min_lr']
        lines.append(f'{config["lr_schedule"]}: down to {lowest:.3g} at step {end:,}')
    return lines
