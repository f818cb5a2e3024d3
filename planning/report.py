"""
What a run will need: the text that `--dry_run` prints, and advice on what to lower after a run ran out of memory.

    print(dry_run(config, model_config.to_dict(), world_size, strategy='fsdp'))

Sizes are in GB of 1e9 bytes. `config` is as in sizes.py.
"""

import math

from expert_manual import rows_of_experts
from layout import FP32, Layout, counted
from optim import UPDATES, moments_of
from planning.memory import held, memory_bytes, plans, totals, while_writing
from planning.roofline import GPUS, RESERVED_GB
from planning.rules import rule_rows
from planning.sizes import empty_model
from planning.traffic import sent


def dry_run(config, shape, world_size, strategy='ddp', filled=1.0, card=None, also_held=None):
    """
    The text that --dry_run prints. shape: to_dict() of the ModelConfig or of the Pretrained. filled: the share of
    positions that hold no padding. card: one of roofline.GPUS, whose memory is put beside. also_held: {part: bytes} of
    a rank beyond the model. Raises ValueError as memory_bytes() and micro_steps() do.
    """
    config = {**config, **shape}
    model = empty_model(config)
    is_fine_tuned, counts = 'transformers' in config, model.parameter_counts()
    layout = Layout.of(config, strategy, world_size)
    ranks = plans(config, model, layout)
    also_held = also_held or {}
    parts_by_stage = [{**also_held, **held(plan)} for plan in ranks]
    tokens = config['global_batch_size'] * config['block_size']
    flops = model.flops_per_token()
    saved = counts['trainable' if config.get('lora_rank') else 'total']  # LoRA saves only what it trains
    moments = moments_of(model, config['optimizer']).items()
    checkpoint = FP32 * (saved + sum(number * parameter.numel() for parameter, number in moments))
    if layout.is_diloco:  # within a round each replica has its own parameters
        checkpoint = FP32 * 2 * counts['trainable'] + checkpoint * config['num_replicas']

    names = ['n_layer', 'n_head', 'n_kv_head', 'head_dim', 'n_embd', 'mlp_hidden_dim', 'vocab_size', 'block_size']
    if shape.get('n_experts'):
        names[5:6] = ['n_experts', 'experts_per_token', 'expert_hidden_dim']
        names[8:8] = ['shared_expert_dim'] * bool(shape.get('shared_expert_dim'))
        names[1:1] = ['dense_layers', 'mlp_hidden_dim'] * bool(shape['dense_layers'])
    model_name = f'{config["arch"]} of {config["init_from"]}' if is_fine_tuned else config['arch']
    lines = section(f'model: {model_name}', {name: f'{config[name]:,}' for name in names})
    if config.get('heads'):
        lines += section(f'rules of heads={config["heads"]} (parameters without norms)', rule_rows(config))
    parameters = {part: f'{n:,}' for part, n in counts.items() if part != 'trainable' or n < counts['total']}
    parameters['attention and mlp'] = f'{counts["attention"] + counts["mlp"]:,}'
    padding = '' if is_fine_tuned else f' (vocabulary padded to {model.config.padded_vocab_size:,})'
    lines += section(f'parameters{padding}', parameters)
    if (sharing := layout.expert) > 1:
        rows = rows_of_experts(ranks[0])
        experts = {'of a layer on a rank': f'{config["n_experts"] // sharing:,}', 'rows that arrive': f'{rows:,}'}
        experts['at most (all for one rank)'] = f'{sharing * rows:,}'
        lines += section(f'experts (expert_parallel={sharing}; memory and bytes below: balanced routers)', experts)

    memory = columns(parts_by_stage)
    if 'activations' not in memory:
        memory['activations'] = 'not known: this model does not run without data'
    memory |= columns([totals(parts) for parts in parts_by_stage])
    if 'num_generations' in config:
        memory |= columns([{'while it writes, at most': while_writing(ranks[0]) + sum(also_held.values())}])
    if card:
        memory[f'of an {card.upper()}'] = f'{GPUS[card].gb:8.3f}'
    dtypes = config['dtype'] + (f' and {config["matmul_dtype"]}' if config.get('matmul_dtype') else '')
    blocks = 'compiled' if ranks[0].activations.is_compiled else 'uncompiled'
    device = config['device'].partition(':')[0]
    run_in_words = f'{strategy}, {counted(world_size, "rank")}, {dtypes}, device={device}, {blocks}'
    lines += section(f'memory per rank at the peak of a step, in GB ({run_in_words})', memory)
    most = max(totals(parts)['total on the device'] for parts in parts_by_stage)
    if card and most > (GPUS[card].gb - RESERVED_GB) * 1e9:
        lines.append(f'  WARNING: it does not fit: {out_of_memory_advice(config, world_size, strategy, also_held)}')
    sent_by_stage = [sent(plan) for plan in ranks]
    if layout.stage > 1:
        lines += section('sent per rank per step, in GB, by stages 0, 1, ... as above', columns(sent_by_stage))

    at_most = 'at most ' if 'num_generations' in config else ''  # answers are packed when they are written
    lines += ['', 'batch', f'  {at_most}{layout.batch_line(config["batch_size"], config["block_size"])}']
    if (copies := config.get('replicate_size', 1)) > 1:
        shards = counted(world_size // copies, 'rank')
        lines.append(f'  layout: {copies} copies of the model, each sharded over {shards}')
    most = max(kinds['sent'] for kinds in sent_by_stage) if world_size > 1 else 0
    sent_in_words = f'{most / 1e9:.3f} GB' if most >= 1e8 else f'{most / 1e6:.3f} MB'
    lines.append(f'  {sent_in_words} sent per rank per step')
    lines += ['', 'schedule', *(f'  {line}' for line in schedule_lines(config, tokens, at_most, filled))]
    padded = ' (of padding, too)' if filled < 1 else ''
    flops = {'per token': flops, 'per step': flops * tokens, 'per run': flops * tokens * config['max_iters']}
    lines += section(
        f'FLOPs, forward and backward{padded}{at_most and ", at most, without writing answers"}',
        {name: f'{number:.3e}' for name, number in flops.items()},
    )
    copies = config['keep_checkpoints'] + (config['keep_checkpoints'] > 0)  # the newest comes before the oldest goes
    copies += bool(copies and (config.get('keep_best') or config.get('patience')))
    of_disk = f'at most ({copies}, one being written)' if copies else 'at most (0 of them)'
    disk = {'per checkpoint': checkpoint, of_disk: copies * checkpoint}
    lines += section('disk, in GB', {name: f'{size / 1e9:.3f}' for name, size in disk.items()})
    return '\n'.join(lines[1:])


def section(title, rows):
    """Lines of a table with two columns, after an empty line."""
    return ['', title, *(f'  {name:30}{value:>14}' for name, value in rows.items())]


def columns(parts_by_stage):
    """{part: its GB on stage 0, on stage 1, ...} from [{part: bytes}, ...]."""
    return {part: ' '.join(f'{parts[part] / 1e9:8.3f}' for parts in parts_by_stage) for part in parts_by_stage[0]}


def schedule_lines(config, tokens_per_step, at_most='', filled=1.0):
    """Lines on the steps, tokens and learning rates of the run."""
    peak = config['learning_rate']
    tokens = config['max_iters'] * tokens_per_step
    what = 'tokens' if filled == 1 else f'positions, of which {filled:.0%} hold tokens and the others padding'
    lines = [f'{config["max_iters"]:,} steps x {at_most}{tokens_per_step:,} = {at_most}{tokens:,} {what}']
    lines.append(f'{config["optimizer"]}: warm-up over {config["warmup_iters"]:,} steps to learning rate {peak:.3g}')
    if config['lr_schedule'] != 'constant':
        lines.append(f'{config["lr_schedule"]}: down to {config["min_lr"]:.3g} at step {config["lr_decay_iters"]:,}')
    return lines


def out_of_memory_advice(config, world_size, strategy, also_held=None):
    """
    One line for a run that ran out of memory: the predicted need, and the keys to change, the most effective first.

    config: with the model's keys, as after config.update(model_config.to_dict()). Without them nothing can be
    predicted, and the advice is general. strategy: as for memory_bytes(). also_held: as for dry_run().
    """
    also_held = also_held or {}
    try:
        layout = Layout.of(config, strategy, world_size)
        model = empty_model(config)
        parts = {**also_held, **memory_bytes(config, model, world_size, strategy)}
        writing = 0
        if 'num_generations' in config:
            writing = while_writing(plans(config, model, layout)[0]) + sum(also_held.values())
    except (KeyError, TypeError, ValueError):  # the model's keys are missing
        return 'lower batch_size or block_size'
    device_parts = {part: size for part, size in parts.items() if not part.startswith('host')}
    largest, in_all = max(device_parts, key=device_parts.get), sum(device_parts.values())
    if writing > in_all:
        need = f'predicted need {writing / 1e9:.2f} GB per rank while it writes answers, at most'
        return f'{need}: lower max_new_tokens and block_size, or set --generation_batch_size to fewer answers at once'
    need = f'predicted need {in_all / 1e9:.2f} GB per rank, most of it {largest}'
    sharing = layout.expert
    if sharing > 1:  # otherwise more rows come, see activations.py
        need += ', if its experts get their share of the tokens'

    on_cuda = config['device'].startswith('cuda')
    batch_helps = {
        f'lower batch_size={config["batch_size"]}': config['batch_size'] > 1,
        'set --activation_checkpointing=full': config['activation_checkpointing'] not in ('full', 'offload'),
        'set --activation_checkpointing=offload': on_cuda and config['activation_checkpointing'] == 'full',
        f'lower block_size={config["block_size"]}': True,
    }
    has_untrained = largest in ('optimizer', 'gradients', 'accumulated') and 'transformers' in config
    has_more_than_4_bits = config.get('lora_rank') and config.get('frozen_dtype') != 'nf4'
    has_fp32_moments = config['optimizer'] in UPDATES and config.get('optimizer_dtype', 'float32') == 'float32'
    if strategy == 'deepspeed':  # it keeps weights and moments in dtypes of its own
        has_more_than_4_bits = has_fp32_moments = False
    together = 1  # how many ranks could share experts: at most 8, a node, so that tokens stay within it
    if config.get('n_experts') and config['activation_checkpointing'] != 'selective':
        possible = math.gcd(layout.shard, config['n_experts'])
        together = max(n for n in range(1, 9) if possible % n == 0)
    shard_it = 'set --strategy=fsdp' if 'strategy' in config else 'use train_fsdp.py'
    is_whole = strategy == 'ddp'
    sharding = {} if is_whole else config  # a script with both strategies has the keys of FSDP under DDP, too
    divide = 'set' if 'expert_parallel' in config else 'use train_parallel.py'
    fewer_bits = 'bfloat16' if layout.tensor > 1 else 'int8'  # a cut would divide int8's blocks
    state_helps = {  # frozen weights have no state
        'set --teacher_dtype=nf4': largest == 'teacher' and not config.get('teacher_dtype'),
        'name a smaller teacher': largest == 'teacher',
        f'{divide} --expert_parallel={together}': largest in ('gathered', 'accumulated', 'reduction')
        and sharing < together,
        'set --frozen_dtype=nf4': largest in ('weights', 'gathered') and has_more_than_4_bits,
        'set --lora_rank=16': has_untrained and not config['lora_rank'],
        f'{shard_it} on several GPUs': is_whole,
        'set --zero_stage=3': sharding.get('zero_stage', 3) != 3,
        'set --accumulate=sharded': sharding.get('accumulate', 'sharded') != 'sharded',
        f'set --optimizer_dtype={fewer_bits}': largest == 'optimizer' and has_fp32_moments,
        'set --cpu_offload=params': sharding.get('cpu_offload') == 'none',
    }
    helps = batch_helps | state_helps if largest in ('activations', 'logits') else state_helps | batch_helps
    return f'{need}: ' + ', or '.join(key for key, is_left in helps.items() if is_left)
