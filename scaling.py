"""
Arithmetic before a run: batches, parameters, memory per rank, FLOPs, disk. `--dry_run` prints all of it.

    scaling.accumulation_steps(global_batch_size=512, batch_size=8, world_size=4)  # 16
    print(scaling.report(config, model_config.to_dict(), world_size, strategy='fsdp'))
    python scaling.py --heads=8 --arch=enoki  # sizes, steps and learning rates by the published rules; or --ladder

Nothing is allocated and torch is not imported: every figure follows from the keys. `config` is a script's resolved
config (dtype 'bfloat16' rather than 'auto'), `model` is to_dict() of a ModelConfig, or of an hf.Pretrained, which has
the shapes of its parameters in it. Sizes are bytes, 1 GB = 1e9 bytes.
"""

import argparse
import math
from fractions import Fraction

BYTES = {'float32': 4, 'bfloat16': 2, 'float16': 2}  # per number
FP32 = BYTES['float32']
OPTIMIZER_MOMENTS = {'adamw': 2, 'adamw-decay': 2, 'adana': 2, 'adana-released': 2, 'dana-mk4': 2}  # fp32 per parameter
OPTIMIZER_MOMENTS |= {'dana-star-mk4': 3, 'ademamix': 3, 'muon': 2}  # muon has 1 in hidden matrices, 2 in the others
LOSS_CHUNK_BYTES = {'cpu': 2**26, 'cuda': 2**29}  # = model.LOGITS_BYTES, fp32 logits of one chunk of the loss
VOCAB_MULTIPLE = 64  # as in ModelConfig.padded_vocab_size
STRATEGIES = ('ddp', 'fsdp', 'diloco')


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


def cautions(config, n_windows):
    """Lines for the log where a run is legal, but hardly meant. n_windows: sequences in the training data."""
    lines = []
    if config['warmup_iters'] >= config['max_iters']:
        lines.append(
            f'warning: warmup_iters={config["warmup_iters"]} of max_iters={config["max_iters"]} steps: the learning '
            'rate never reaches its peak'
        )
    if config['global_batch_size'] > n_windows:
        lines.append(
            f'warning: global_batch_size={config["global_batch_size"]} is more than the {n_windows} sequences of the '
            'training data: each step repeats them'
        )
    return lines


def iterations_of_epochs(num_epochs, n_windows, global_batch_size):
    """Optimizer steps for num_epochs passes over n_windows sequences. ValueError: num_epochs is not above 0."""
    if not 0 < num_epochs < math.inf:
        raise ValueError(f'num_epochs={num_epochs}: expected a number above 0')
    return math.ceil(Fraction(str(num_epochs)) * n_windows / global_batch_size)  # in floats 0.1 * 30 is above 3


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
    if zero_stage not in (2, 3) and (zero_stage, config['fsdp_impl']) != (1, 'manual'):
        raise ValueError(f'zero_stage={zero_stage}: expected 3, 2 or, with --fsdp_impl=manual, 1')
    if config['blocks_per_unit'] < 1:
        raise ValueError(f'blocks_per_unit={config["blocks_per_unit"]}: expected 1 or more')
    return world_size // replicate_size


def number_of_replicas(num_replicas, world_size, local_world_size):
    """num_replicas of DiLoCo, or one per node when it is None. Raises ValueError if the ranks do not divide."""
    if num_replicas is None:
        if world_size % local_world_size:
            raise ValueError(f'{world_size} ranks on nodes of {local_world_size}: start equally many on every node')
        return world_size // local_world_size
    if num_replicas < 1 or world_size % num_replicas:
        divisors = ', '.join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ValueError(f'num_replicas={num_replicas} does not divide {world_size} ranks: use one of {divisors}')
    return num_replicas


def check_rounds(config):
    """Raises ValueError if the keys of DiLoCo do not fit together."""
    steps, fragments, overlap = config['inner_steps'], config['num_fragments'], config['overlap_steps']
    if not 1 <= steps <= config['max_iters']:
        raise ValueError(
            f'inner_steps={steps}: expected 1 to max_iters={config["max_iters"]}, a round is part of the run'
        )
    if fragments > config['n_layer']:
        raise ValueError(
            f'num_fragments={fragments}: expected at most n_layer={config["n_layer"]}, a block is in one fragment'
        )
    if not 1 <= fragments <= steps:
        raise ValueError(
            f'num_fragments={fragments}: expected 1 to inner_steps={steps}, each is sent after a step of its own'
        )
    if overlap < 0 or (overlap and overlap * fragments >= steps):
        raise ValueError(
            f'overlap_steps={overlap}: expected less than inner_steps / num_fragments = {steps / fragments:g}, '
            'an exchange lands before the next one begins'
        )
    if not 0 <= config['fragment_mix'] < 1:
        raise ValueError(f'fragment_mix={config["fragment_mix"]}: expected 0 (the outer parameters alone) to below 1')
    if config['outer_repeats'] < 1 or config['outer_lr'] <= 0 or not 0 <= config['outer_momentum'] < 1:
        given = ', '.join(f'{key}={config[key]}' for key in ('outer_lr', 'outer_momentum', 'outer_repeats'))
        raise ValueError(f'{given}: expected a rate above 0, a momentum from 0 to below 1, and 1 or more repeats')


# --- PARAMETERS -------------------------------------------------------------------------------------------------------


def block_shapes(model):
    """{name: shape} of the parameters of one block, as in model.py; C is the width, D the dimension of a head."""
    if is_from_transformers(model):
        return model['block_shapes']
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
    if is_from_transformers(model):
        return model['root_shapes']
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


def is_from_transformers(model):
    """Whether the shapes came with the model. All of them but GPT-2 are taken to compute as a Llama does."""
    return 'root_shapes' in model


def has_rms_norm(model):
    """RMSNorm and SwiGLU instead of LayerNorm and GELU."""
    return model['arch'] in ('llama', 'qwen3') or (is_from_transformers(model) and model['arch'] != 'gpt2')


def has_qk_norm(model):
    of_block = model.get('block_shapes')
    return any('q_norm' in name for name in of_block) if of_block else model['arch'] in ('enoki', 'qwen3')


def padded_vocab_size(model):
    if is_from_transformers(model):
        return model['vocab_size']
    return math.ceil(model['vocab_size'] / VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def count(shapes, shard_size=1):
    """Numbers on one rank; every parameter is cut along its first dimension, and the pieces are padded to one size."""
    return sum(math.ceil(shape[0] / shard_size) * math.prod(shape[1:]) for shape in shapes.values())


# The first part with a word that is in a parameter's name, here or in transformers, has it.
WORDS_OF_PARTS = {'norms': ('norm', 'ln_'), 'embedding': ('embed', 'wte', 'wpe'), 'attention': ('attn', 'attention')}
WORDS_OF_PARTS |= {'mlp': ('mlp',), 'head': ('head',)}


def parameter_parts(model):
    """{part: number of parameters}, exact, and 'total'. A norm within the attention counts as a norm."""
    parts = dict.fromkeys(('embedding', 'attention', 'mlp', 'norms', 'head'), 0)
    for shapes, copies in ((root_shapes(model), 1), (block_shapes(model), model['n_layer'])):
        for name, shape in shapes.items():
            part = next((part for part, words in WORDS_OF_PARTS.items() if any(w in name for w in words)), 'other')
            parts[part] = parts.get(part, 0) + copies * math.prod(shape)
    return parts | {'total': sum(parts.values())}


def trainable_parameters(model):
    """All, or those that LoRA and `freeze` leave to be trained."""
    return model.get('trainable') or parameter_parts(model)['total']


def flops_per_token(model):
    """
    FLOPs of forward and backward per token: 6 (N - N_embedding) + 12 n_layer (n_head head_dim) block_size.

    PaLM (arXiv 2204.02311, appendix B), no discount for causal attention. The head counts as a matmul, tied or not. A
    frozen weight takes 4 instead of 6: it gets no gradient. (The embedding is taken to be among the frozen ones.)
    """
    parts = parameter_parts(model)
    head = padded_vocab_size(model) * model['n_embd']
    in_matmuls = parts['total'] - parts['embedding'] - parts['head'] + head
    frozen = max(0, in_matmuls - trainable_parameters(model))
    attention = 12 * model['n_layer'] * model['n_head'] * model['head_dim'] * model['block_size']
    return 6 * in_matmuls - 2 * frozen + attention


# --- RULES ------------------------------------------------------------------------------------------------------------
# From a number of heads to a whole run: arXiv 2602.05298 and its code (github.com/mlexpos/adana).

RULE_VOCAB_SIZE = 50304  # GPT-2's 50257, padded; what the paper counts
RULE_BLOCK_SIZE = 2048  # tokens per sequence in the fits
LADDER = (6, 8, 12, 16, 24)  # heads of the published runs
RULES = {  # n_layer = a * heads // b; head_dim = n_embd / heads; mlp_hidden_dim / n_embd; attention_gate
    'enoki': (3, 4, 64, 4, False),
    'qwen3': (2, 1, 128, 3, True),
}
DANA_FAMILY = ('adana', 'adana-released', 'dana-mk4', 'dana-star-mk4')
# (arch, sequences per step, optimizer, kappa): (a, b, d) of learning rate = a * (b + non-embedding parameters)^d
LEARNING_RATE_FITS = {
    ('enoki', 32, 'adamw', None): (12.8, 1.67e4, -0.515),
    ('enoki', 32, 'adamw-decay', None): (65.7, 9.83e3, -0.608),
    ('enoki', 32, 'adana', 0.75): (12.7, 9.55e3, -0.624),
    ('enoki', 32, 'adana', 0.8): (17.6, 3.66e4, -0.624),
    ('enoki', 32, 'adana', 0.85): (22.5, 1.22e5, -0.618),
    ('enoki', 32, 'adana', 0.9): (68.9, 2.95e4, -0.667),
    ('enoki', 32, 'dana-mk4', 0.75): (56.0, 5.71e3, -0.708),
    ('enoki', 32, 'dana-mk4', 0.85): (23.0, 1.46e4, -0.627),
    ('enoki', 32, 'dana-star-mk4', 0.75): (41.0, 3.03e4, -0.661),
    ('enoki', 32, 'dana-star-mk4', 0.85): (223, 2.40e6, -0.724),
    ('enoki', 32, 'ademamix', None): (4.51, 6.71e3, -0.503),
    ('enoki', 32, 'muon', None): (2.19, 5.64e4, -0.417),
    ('enoki', 512, 'adamw', None): (16.7, 1.58e7, -0.464),
    ('enoki', 512, 'adana', 0.85): (85.3, 3.04e4, -0.654),
    ('enoki', 512, 'dana-mk4', 0.85): (2470, 2.24e7, -0.826),
    ('enoki', 512, 'dana-star-mk4', 0.85): (310, 1.40e4, -0.701),
    ('qwen3', 32, 'adamw', None): (2.16e4, 7.20e4, -0.873),
    ('qwen3', 32, 'adana', 0.85): (3.17, 3.99e4, -0.553),
    ('qwen3', 32, 'dana-mk4', 0.85): (1.20, 3.44e4, -0.501),
    ('qwen3', 32, 'dana-star-mk4', 0.85): (93.9, 1.71e4, -0.701),
}


def fill_from_heads(config, explicit):
    """
    (filled, notes): the keys that `heads` and `arch` decide, and lines for the log. Without heads: wd_ts and weight
    decay of optimizers whose decay follows the length of the run.

    A key in `explicit` (a file or the command line set it, not to None) is kept, and the others follow its value. What
    is counted has config's vocabulary, or the paper's while that is None. Raises ValueError where there is no rule.
    """
    heads, arch, optimizer, lr_rule = (config[key] for key in ('heads', 'arch', 'optimizer', 'lr_rule'))
    if heads is None and optimizer in (*DANA_FAMILY, 'adamw-decay'):  # the rules of decay need no heads
        filled = {'wd_ts': config['wd_ts'] or max(1, config['max_iters'] // 10)}
        if optimizer in DANA_FAMILY and 'weight_decay' not in explicit:
            filled['weight_decay'] = config['omega'] / filled['wd_ts']
        return filled, [f'optimizer={optimizer!r} set ' + ', '.join(f'{key}={filled[key]:.4g}' for key in filled)]
    if heads is None:
        return {}, []
    if arch not in RULES:
        raise ValueError(f'arch={arch!r}: expected {" or ".join(RULES)} with heads={heads}, no other has a rule')
    layers, of_heads, head_dim, mlp_ratio, gate = RULES[arch]
    fewest = 1 if 'n_layer' in explicit else math.ceil(of_heads / layers)  # that make a layer
    if heads < fewest:
        raise ValueError(f'heads={heads}: expected {fewest} or more with arch={arch!r}')
    run, filled, notes = dict(config), {}, []

    def settle(above=0, **by_rule):
        for key, value in by_rule.items():
            if key not in explicit or config[key] is None:
                run[key] = filled[key] = value
            elif config[key] <= above:
                raise ValueError(f'{key}={config[key]}: expected more than {above}')

    settle(n_layer=heads * layers // of_heads, n_head=heads, head_dim=head_dim, n_embd=head_dim * heads)
    settle(mlp_hidden_dim=mlp_ratio * run['n_embd'], attention_gate=gate, above=-1)
    non_embedding, total = rule_counts(run)
    batch = (config['global_batch_size'], config['block_size'])  # sequences x tokens
    settle(max_iters=max(1, 20 * total // max(1, math.prod(batch))))  # 20 tokens per parameter
    settle(warmup_iters=run['max_iters'] // 50, above=-1)
    if 'learning_rate' in explicit:
        settle(learning_rate=None)
    else:
        settle(learning_rate=fitted_learning_rate(arch, optimizer, non_embedding, lr_rule, config['kappa']))
        if batch != (lr_rule, RULE_BLOCK_SIZE):
            notes.append(
                f'warning: learning rate fitted at {lr_rule} sequences x {RULE_BLOCK_SIZE} tokens per step, this run '
                f'has {batch[0]} x {batch[1]}; --lr_rule chooses the fit'
            )
        if arch == 'qwen3':
            notes.append(
                f'learning rate for the true {non_embedding:,} parameters, not for 12 n_embd^2 n_layer as published'
            )
    steps = run['max_iters']
    if optimizer in (*DANA_FAMILY, 'adamw-decay'):
        settle(wd_ts=max(1, steps // 10))
        steps = run['wd_ts']
    rate = 1 if optimizer in DANA_FAMILY else run['learning_rate']  # the others decay by learning rate x weight_decay
    settle(weight_decay=config['omega'] / (rate * steps), above=-1)
    values = [f'{key}={value:.4g}' if isinstance(value, float) else f'{key}={value}' for key, value in filled.items()]
    return filled, [f'heads={heads}, arch={arch!r} set {", ".join(values)}', *notes]


def rule_counts(model):
    """(non-embedding parameters, total), without norms as in the paper: at 8 heads 18,874,368 and 70,385,664."""
    unset = {'n_kv_head': model['n_head'], 'vocab_size': RULE_VOCAB_SIZE}
    parts = parameter_parts({**model, **{key: model[key] or value for key, value in unset.items()}})
    non_embedding = parts['attention'] + parts['mlp']
    return non_embedding, non_embedding + parts['embedding'] + parts['head']


def fitted_learning_rate(arch, optimizer, non_embedding, lr_rule=32, kappa=0.85):
    """a * (b + non_embedding)^d; adana-released has adana's fit. Raises ValueError with the fits that there are."""
    name = optimizer.removesuffix('-released')
    fit = LEARNING_RATE_FITS.get((arch, lr_rule, name, None)) or LEARNING_RATE_FITS.get((arch, lr_rule, name, kappa))
    if fit is None:
        fits = [f'{key[2]} {key[3] or ""}'.strip() for key in LEARNING_RATE_FITS if key[:2] == (arch, lr_rule)]
        given = f'optimizer={optimizer!r}, kappa={kappa}, lr_rule={lr_rule}'
        there = f'one of {", ".join(fits)}' if fits else 'lr_rule=32'
        raise ValueError(f'{given}: expected {there}, fitted for arch={arch!r}, or a --learning_rate')
    a, b, d = fit
    return a * (b + non_embedding) ** d


def rule_rows(run):
    """{name: text}: what `heads` decides. run: a config with the filled keys."""
    counts = (*rule_counts(run), run['global_batch_size'] * run['block_size'])
    rows = {'n_head': run['n_head'], 'n_layer': run['n_layer'], 'n_embd': run['n_embd'], 'mlp': run['mlp_hidden_dim']}
    rows |= dict(zip(('non-embedding', 'total', 'tokens per step'), (f'{number:,}' for number in counts), strict=True))
    rows |= {'iterations': run['max_iters'], 'warm-up': run['warmup_iters'], 'wd_ts': run['wd_ts']}
    rows |= {'weight decay': f'{run["weight_decay"]:.3g}', 'learning rate': f'{run["learning_rate"]:.2e}'}
    return {name: str(value).replace('e-0', 'e-') for name, value in rows.items()}


# --- MEMORY -----------------------------------------------------------------------------------------------------------


def estimate(config, model, world_size, strategy='ddp', shard_size=None):
    """
    {part: bytes} that one rank holds in a training step; parts that begin with 'host' are in the host's memory.

    weights       fp32 masters: whole under ddp, 1/shard_size under fsdp
    gradients     fp32, like the weights; whole while fsdp accumulates without communication; none of frozen weights
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
            'optimizer': FP32 * OPTIMIZER_MOMENTS[config['optimizer']] * trainable,
            'activations': activations,
            'logits': logits,
        }

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
        f'{host_of_moments}optimizer': FP32 * OPTIMIZER_MOMENTS[config['optimizer']] * trained,
    }
    if strategy == 'diloco':
        outer = FP32 * (2 + (config['error_feedback'] and config['exchange_dtype'] != 'float32')) * trained
        outer += FP32 * trained // config['num_fragments'] if config['overlap_steps'] else 0  # in flight
        parts['host outer' if config['outer_on_host'] or host else 'outer'] = outer
    if accumulates_whole:
        parts['gradients'] = FP32 * trainable  # each unit's turns into its shard when the last micro-step reduces it
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


def out_of_memory_advice(config, world_size):
    """
    One line for a run that ran out of memory: the predicted need and the keys to lower, the most effective first.

    config: with the model's keys filled in, config.update(model_config.to_dict()); before that there is no prediction.
    """
    strategy = 'diloco' if 'num_replicas' in config else 'fsdp' if 'zero_stage' in config else 'ddp'
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
    if largest in ('optimizer', 'gradients') and is_from_transformers(config) and not config['lora_rank']:
        state_keys.insert(0, 'set --lora_rank=16')  # neither exists of frozen weights
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
    checkpoint = FP32 * (parameters['total'] + OPTIMIZER_MOMENTS[config['optimizer']] * trainable)
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


# --- COMMAND LINE -----------------------------------------------------------------------------------------------------

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description='What heads and arch decide, and the learning rates of all optimizers')
    keys = {'arch': 'enoki', 'optimizer': 'adana', 'kappa': 0.85, 'lr_rule': 32, 'global_batch_size': 512}
    for key, default in {'heads': 8, **keys}.items():
        parser.add_argument(f'--{key}', type=type(default), default=default, help=f'key of train_*.py, here {default}')
    parser.add_argument('--ladder', action='store_true', help=f'all published sizes: heads {LADDER}')
    config = vars(parser.parse_args()) | {'omega': 4.0, 'block_size': RULE_BLOCK_SIZE}
    config |= dict.fromkeys(('n_kv_head', 'vocab_size', 'bias', 'tie_embeddings', 'wd_ts'))
    columns = []
    for heads in LADDER if config['ladder'] else [config['heads']]:
        try:
            run = config | fill_from_heads({**config, 'heads': heads}, explicit=())[0]
        except ValueError as error:
            raise SystemExit(f'error: {error}') from None
        columns.append(rule_rows(run))
        for arch, lr_rule, optimizer, kappa in LEARNING_RATE_FITS:
            if (arch, lr_rule) == (run['arch'], run['lr_rule']):
                lr = fitted_learning_rate(arch, optimizer, rule_counts(run)[0], lr_rule, kappa)
                columns[-1][f'lr {optimizer} {kappa or ""}'] = f'{lr:.3e}'.replace('e-0', 'e-')
    for name in columns[0]:
        print(f'{name:22}', *(f'{column[name]:>13}' for column in columns))
