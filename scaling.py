"""
Arithmetic before a run: batches, parameters, memory per rank, FLOPs, disk. `--dry_run` prints all of it.

    scaling.accumulation_steps(global_batch_size=512, batch_size=8, world_size=4)  # 16
    print(scaling.report(config, model_config.to_dict(), world_size, strategy='fsdp'))

Nothing is allocated and torch is not imported: every figure follows from the keys. `config` is a script's resolved
config (dtype 'bfloat16' rather than 'auto'), `model` is ModelConfig.to_dict(). Sizes are bytes, 1 GB = 1e9 bytes.
"""

import math

BYTES = {'float32': 4, 'bfloat16': 2, 'float16': 2}  # per number
FP32 = BYTES['float32']
OPTIMIZER_MOMENTS = {'adamw': 2}  # fp32 numbers per parameter
LOSS_CHUNK_BYTES = {'cpu': 2**26, 'cuda': 2**29}  # = model.LOGITS_BYTES, fp32 logits of one chunk of the loss
VOCAB_MULTIPLE = 64  # as in ModelConfig.padded_vocab_size
STRATEGIES = ('ddp', 'fsdp')


# --- BATCHES ----------------------------------------------------------------------------------------------------------


def accumulation_steps(global_batch_size, batch_size, world_size):
    """
    Micro-steps per optimizer step: global_batch_size = batch_size * world_size * accumulation_steps, in sequences.

    Raises ValueError with the numbers and the nearest global batches that work if that has no solution.
    """
    for name, value in (('global_batch_size', global_batch_size), ('batch_size', batch_size)):
        if value < 1:
            raise ValueError(f'{name}={value}: expected 1 or more')
    per_micro_step = batch_size * world_size
    steps, rest = divmod(global_batch_size, per_micro_step)
    if rest:
        nearest = [n * per_micro_step for n in (steps, steps + 1) if n > 0]
        raise ValueError(
            f'global_batch_size={global_batch_size} is not a multiple of {per_micro_step} = batch_size={batch_size} x '
            f'{world_size} ranks: use --global_batch_size={" or ".join(map(str, nearest))}, or another batch_size'
        )
    return steps


def batch_line(batch_size, accumulation_steps, world_size, block_size):
    """The batch arithmetic with its numbers, on one line."""
    sequences = batch_size * accumulation_steps * world_size
    return (
        f'{batch_size} sequences x {accumulation_steps} micro-steps x {world_size} ranks = {sequences:,} sequences '
        f'x {block_size:,} tokens = {sequences * block_size:,} tokens per step'
    )


def ranks_per_shard_group(config, world_size):
    """
    The ranks that hold one copy of the model between them: all, or with replicate_size (HSDP) that fraction of them.

    Raises ValueError if the ranks do not divide, or for a zero_stage that the implementation does not have.
    """
    replicate_size, zero_stage = config['replicate_size'], config['zero_stage']
    if replicate_size < 1 or world_size % replicate_size:
        divisors = ', '.join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ValueError(f'replicate_size={replicate_size} does not divide {world_size} ranks: use one of {divisors}')
    if zero_stage not in (2, 3):
        raise ValueError(f"zero_stage={zero_stage}: expected 2 or 3 with fsdp_impl='torch'")
    return world_size // replicate_size


# --- PARAMETERS -------------------------------------------------------------------------------------------------------


def block_shapes(model):
    """{name: shape} of the parameters of one block, as in model.py; C is the width, D the dimension of a head."""
    C, D, hidden = model['n_embd'], model['head_dim'], model['mlp_hidden_dim']
    query_heads = model['n_head'] * (2 if model['attention_gate'] else 1)
    shapes = norm_shapes(model, 'attn_norm', C)
    shapes |= linear_shapes(model, 'attn.qkv', C, (query_heads + 2 * model['n_kv_head']) * D)
    shapes |= linear_shapes(model, 'attn.proj', model['n_head'] * D, C)
    if has_qk_norm(model):
        shapes |= norm_shapes(model, 'attn.q_norm', D) | norm_shapes(model, 'attn.k_norm', D)
    shapes |= norm_shapes(model, 'mlp_norm', C)
    for name in ('mlp.gate', 'mlp.up') if has_rms_norm(model) else ('mlp.up',):
        shapes |= linear_shapes(model, name, C, hidden)
    return shapes | linear_shapes(model, 'mlp.down', hidden, C)


def root_shapes(model):
    """{name: shape} of the parameters outside of the blocks; a tied head is the embedding and counts once."""
    table = (padded_vocab_size(model), model['n_embd'])
    shapes = {'embed.weight': table}
    if model['arch'] == 'gpt2':
        shapes['pos_embed.weight'] = (model['block_size'], model['n_embd'])
    shapes |= norm_shapes(model, 'final_norm', model['n_embd'])
    if not model['tie_embeddings']:
        shapes['head.weight'] = table
    return shapes


def linear_shapes(model, name, inputs, outputs):
    return {f'{name}.weight': (outputs, inputs)} | ({f'{name}.bias': (outputs,)} if model['bias'] else {})


def norm_shapes(model, name, width):
    has_bias = model['bias'] and not has_rms_norm(model)
    return {f'{name}.weight': (width,)} | ({f'{name}.bias': (width,)} if has_bias else {})


def has_rms_norm(model):
    """RMSNorm and SwiGLU instead of LayerNorm and GELU."""
    return model['arch'] in ('llama', 'qwen3')


def has_qk_norm(model):
    return model['arch'] in ('enoki', 'qwen3')


def padded_vocab_size(model):
    return math.ceil(model['vocab_size'] / VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def count(shapes, shard_size=1):
    """Numbers on one rank; every parameter is cut along its first dimension, and the pieces are padded to one size."""
    return sum(math.ceil(shape[0] / shard_size) * math.prod(shape[1:]) for shape in shapes.values())


def parameter_parts(model):
    """{part: number of parameters}, exact, and 'total'. A norm within the attention counts as a norm."""
    parts = dict.fromkeys(('embedding', 'attention', 'mlp', 'norms', 'head'), 0)
    for shapes, copies in ((root_shapes(model), 1), (block_shapes(model), model['n_layer'])):
        for name, shape in shapes.items():
            if 'norm' in name:
                part = 'norms'
            elif 'embed' in name:
                part = 'embedding'
            else:
                part = {'attn': 'attention', 'mlp': 'mlp', 'head': 'head'}[name.split('.')[0]]
            parts[part] += copies * math.prod(shape)
    return parts | {'total': sum(parts.values())}


def flops_per_token(model):
    """
    FLOPs of forward and backward per token: 6 (N - N_embedding) + 12 n_layer (n_head head_dim) block_size.

    PaLM (arXiv 2204.02311, appendix B), no discount for causal attention. The head counts as a matmul, tied or not.
    """
    parts = parameter_parts(model)
    head = padded_vocab_size(model) * model['n_embd']
    in_matmuls = parts['total'] - parts['embedding'] - parts['head'] + head
    return 6 * in_matmuls + 12 * model['n_layer'] * model['n_head'] * model['head_dim'] * model['block_size']


# --- MEMORY -----------------------------------------------------------------------------------------------------------


def estimate(config, model, world_size, strategy='ddp', shard_size=None):
    """
    {part: bytes} that one rank holds in a training step; parts that begin with 'host' are in the host's memory.

    weights       fp32 masters: whole under ddp, 1/shard_size under fsdp
    gradients     fp32, like the weights; whole while fsdp accumulates without communication
    optimizer     fp32 moments
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
    activations, logits = activation_bytes(config, model, casts_weights=strategy == 'ddp' and compute < FP32)
    if strategy == 'ddp':
        return {
            'weights': FP32 * whole,
            'gradients': FP32 * whole,  # the buckets of the all-reduce: .grad are views of them
            'optimizer': FP32 * OPTIMIZER_MOMENTS[config['optimizer']] * whole,
            'activations': activations,
            'logits': logits,
        }

    shard_size = shard_size or ranks_per_shard_group(config, world_size)
    shard = count(root, shard_size) + n_layer * count(block, shard_size)
    micro_steps = accumulation_steps(config['global_batch_size'], config['batch_size'], world_size)
    accumulates_whole = config['accumulate'] == 'unsharded' and micro_steps > 1
    host = 'host ' if config['cpu_offload'] == 'params' else ''
    parts = {
        f'{host}weights': FP32 * shard,
        f'{host}gradients': FP32 * shard,
        f'{host}optimizer': FP32 * OPTIMIZER_MOMENTS[config['optimizer']] * shard,
    }
    if accumulates_whole:
        parts['gradients'] = FP32 * whole  # each unit's turns into its shard when the last micro-step reduces it
    # Stage 3: the block at work, the next one, and the flat buffer in which a block arrives. Stage 2 keeps all blocks.
    blocks_gathered = 1 + (n_layer if config['zero_stage'] == 2 else min(2, n_layer))
    # A unit's gradients as autograd made them, and the flat fp32 input of the reduce-scatter. The root comes last, when
    # the activations are gone.
    in_reduction = compute + FP32
    return parts | {
        'gathered': compute * (count(root) + blocks_gathered * count(block)),
        'reduction': max(in_reduction * count(block), in_reduction * count(root) - activations - logits),
        'activations': activations,
        'logits': logits,
    }


def activation_bytes(config, model, casts_weights):
    """
    (activations, logits) of one micro-step, as explained at estimate().

    casts_weights: autograd keeps a copy in the compute dtype of every weight that a matmul has cast.
    """
    compute = BYTES[config['dtype']]
    on_cpu = not config['device'].startswith('cuda')
    tokens = config['batch_size'] * config['block_size']
    width, hidden, vocab = model['n_embd'], model['mlp_hidden_dim'], padded_vocab_size(model)

    weight_copies = compute * count(block_shapes(model)) if casts_weights else 0
    all_of_block = tokens * kept_per_token(config, model) + weight_copies
    kept_of_block = {
        'none': all_of_block,
        'selective': tokens * kept_selectively_per_token(config, model),
        'full': tokens * compute * width,  # its input
    }[config['activation_checkpointing']]
    final_norm = tokens * norm_input_bytes(width, compute, model, on_cpu)
    input_mask = tokens * width * (compute if on_cpu else 1) if model['dropout'] else 0
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


def kept_per_token(config, model):
    """
    Bytes per token that one block of model.py keeps for backward when nothing is recomputed.

    CUDA: attention in the compute dtype, and the flash kernel keeps q, k, v, its output and a logsumexp per row, with
    dropout too. CPU: attention in fp32, in a flash kernel only without dropout; RMSNorm is made of several operations.
    """
    compute = BYTES[config['dtype']]
    on_cpu = not config['device'].startswith('cuda')
    attention = FP32 if on_cpu else compute  # dtype of the attention: model.py has it in fp32 on CPUs
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


def kept_selectively_per_token(config, model):
    """Bytes per token that one block keeps with selective checkpointing: its input and model.SAVED_OPS' results."""
    compute = BYTES[config['dtype']]
    on_cpu = not config['device'].startswith('cuda')
    attention = FP32 if on_cpu else compute
    queries, keys = model['n_head'] * model['head_dim'], model['n_kv_head'] * model['head_dim']
    gates = queries if model['attention_gate'] else 0
    matmuls = queries + gates + 2 * keys + 2 * model['n_embd']  # qkv, and the projections back to the residual stream
    matmuls += model['mlp_hidden_dim'] * (2 if has_rms_norm(model) else 1)
    size = compute * (model['n_embd'] + matmuls)
    if not (model['dropout'] and on_cpu):
        size += attention * queries + FP32 * model['n_head']
    return size


def norm_input_bytes(width, compute, model, on_cpu):
    """Bytes per token that a norm over the residual stream keeps of its input."""
    if has_rms_norm(model) and on_cpu:  # no fused kernel: the input in fp32, and divided by its norm
        return 2 * FP32 * width + FP32
    return compute * width + 2 * FP32  # the input, its mean and standard deviation


def out_of_memory_advice(config, world_size):
    """
    One line for a run that ran out of memory: the predicted need and the keys to lower, the most effective first.

    config: with the model's keys filled in, config.update(model_config.to_dict()); before that there is no prediction.
    """
    strategy = 'fsdp' if 'zero_stage' in config else 'ddp'
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
        state_keys += ['set --accumulate=sharded'] if config['accumulate'] != 'sharded' else []
        state_keys += ['set --cpu_offload=params'] if config['cpu_offload'] == 'none' else []
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
    checkpoint = FP32 * (1 + OPTIMIZER_MOMENTS[config['optimizer']]) * parameters['total']

    names = ('n_layer', 'n_head', 'n_kv_head', 'head_dim', 'n_embd', 'mlp_hidden_dim', 'vocab_size', 'block_size')
    lines = [f'model: {model["arch"]}']
    lines += [f'  {name:22}{model[name]:>16,}' for name in names]
    lines += ['', f'parameters (vocabulary padded to {padded_vocab_size(model):,})']
    lines += [f'  {part:22}{number:>16,}' for part, number in parameters.items()]
    lines.append(f'  {"attention and mlp":22}{parameters["attention"] + parameters["mlp"]:>16,}')

    lines += ['', f'memory per rank at the peak of a step, in GB ({strategy}, {world_size} ranks, {config["dtype"]})']
    lines += [f'  {part:22}{size / 1e9:>16.3f}' for part, size in memory.items()]
    for place in ('device', 'host'):
        sizes = [size for part, size in memory.items() if part.startswith('host') == (place == 'host')]
        if sizes:
            lines.append(f'  {"total on the " + place:22}{sum(sizes) / 1e9:>16.3f}')

    lines += ['', 'batch', f'  {batch_line(config["batch_size"], micro_steps, world_size, config["block_size"])}']
    lines += ['', 'schedule', *(f'  {line}' for line in schedule_lines(config, tokens))]
    lines += ['', 'FLOPs, forward and backward']
    for name, number in (('token', flops), ('step', flops * tokens), ('run', flops * tokens * config['max_iters'])):
        lines.append(f'  {"per " + name:22}{number:>16.3e}')
    lines += ['', 'disk, in GB', f'  {"per checkpoint":22}{checkpoint / 1e9:>16.3f}']
    copies = config['keep_checkpoints'] + 1  # the oldest goes when the newest is complete
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
