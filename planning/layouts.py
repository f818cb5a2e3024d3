"""
Which layout is fastest for a model on a cluster? Predicts memory and time of all layouts of the scripts, for
compare.py --plan.

    rows = layouts.rank(keys, step_time.assumed('h100', gpus=64, node_gpus=4))  # those that fit, the fastest first
"""

import itertools
from pathlib import Path

from configurator import read_knobs
from layout import Layout
from model import ModelConfig
from planning import checks, memory, rules, step_time, traffic
from system.files import ROOT, read_json

TIE = 0.03  # relative difference up to which two step times count as equal
RESERVED_GB = 2  # of a GPU's memory, for CUDA's context, NCCL's buffers and fragments


# --- ALL LAYOUTS ------------------------------------------------------------------------------------------------------


def keys_of(script, keys, on_cpu):
    """All keys of a run: the script's defaults, those given, those set by published rules, and the model's. Raises
    ValueError if the model or its vocabulary is not known."""
    knobs = read_knobs(Path(ROOT) / script)
    config = {key: knob.default for key, knob in knobs.items()} | {k: v for k, v in keys.items() if k in knobs}
    if config['init_from'] != 'scratch':
        raise ValueError(f'init_from={config["init_from"]}: --plan knows the layouts of a model from scratch')
    meta = Path(config['data_dir'], config['dataset'], 'meta.json')
    if config['vocab_size'] is None and not meta.exists():
        raise ValueError(f'vocab_size is not known, there is no {meta}: give it, as in --vocab_size=50304')
    config['vocab_size'] = config['vocab_size'] or read_json(meta, {'vocab_size': int})['vocab_size']
    config['device'] = 'cpu' if on_cpu else 'cuda'
    if config['dtype'] == 'auto':
        config['dtype'] = 'float32' if on_cpu else 'bfloat16'
    config |= rules.fill_from_heads(config, keys)[0]
    return config | ModelConfig.from_keys(config).to_dict()


def powers(most):
    """1, 2, 4, ... up to `most`."""
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def candidates(keys, cluster):
    """Yield (strategy, script, keys) of all layouts that the scripts have, also of those that do not divide or fit."""
    node = min(cluster.gpus, cluster.node_gpus)
    nodes = cluster.gpus // node
    stages_of_zero = [('torch', 3), ('torch', 2), ('manual', 1)]
    if cluster.device.peak is None:  # on CPUs the two implementations do not send the same
        stages_of_zero += [('manual', 3), ('manual', 2)]
    is_mixture = bool(keys.get('n_experts'))
    tensors, pipelines, experts = powers(node), powers(cluster.gpus)[1:], [1]
    if is_mixture:
        tensors, pipelines, experts = [1], [], powers(cluster.gpus)

    def stated(**sizes):  # as the command has them: also 1, where a file sets another
        return {key: size for key, size in sizes.items() if size > 1 or keys.get(key, 1) > 1}

    modes = dict.fromkeys((keys.get('activation_checkpointing', 'none'), 'selective', 'full'))
    for mode, batch_size in itertools.product(modes, powers(keys['global_batch_size'])):
        common = {'batch_size': batch_size, 'activation_checkpointing': mode}
        yield 'ddp', 'train_ddp.py', common
        for (impl, stage), tensor, context in itertools.product(stages_of_zero, tensors, powers(cluster.gpus)):
            for replicas, share, accumulate in itertools.product(sorted({1, nodes}), experts, ('unsharded', 'sharded')):
                layout = {'zero_stage': stage, 'accumulate': accumulate}
                if impl == 'manual' or (share > 1 and mode == 'selective'):  # fully_shard cannot do this
                    layout['fsdp_impl'] = 'manual'
                layout |= stated(replicate_size=replicas)
                inside = stated(tensor_parallel=tensor, context_parallel=context, expert_parallel=share)
                yield 'fsdp', 'train_parallel.py' if inside else 'train_fsdp.py', common | layout | inside
        for stages, chunks, tensor in itertools.product(pipelines, (1, 2, 4), tensors):
            layout = {'pipeline_stages': stages, 'pipeline_chunks': chunks}
            layout |= stated(tensor_parallel=tensor)
            yield 'pipeline', 'train_pipeline.py', common | layout
        for share in experts if nodes > 1 else ():
            layout = {'num_replicas': nodes} | stated(expert_parallel=share)
            yield 'diloco', 'train_diloco.py', common | layout


def rank(keys, cluster, most=12):
    """
    Rows of the layouts that fit, in_order(): of each kind of layout one, with its best batch_size, checkpointing and
    accumulation. keys: those given, of train scripts. Raises ValueError if nothing fits, with the layout that comes
    nearest.
    """
    if not keys.get('global_batch_size'):
        raise ValueError('global_batch_size is not known: give it, as in --global_batch_size=512')
    step_time.refuse_to_cut_experts(keys)
    on_cpu = cluster.device.peak is None
    configs, found = {}, []
    for strategy, script, layout in candidates(keys, cluster):
        if script not in configs:
            configs[script] = keys_of(script, keys, on_cpu)
        config = configs[script] | layout
        try:
            checks.check(config, Layout.of(config, strategy, cluster.gpus), ModelConfig.from_keys(config))
            found.append(
                {'strategy': strategy, 'script': script, 'keys': layout, **step_time.step(config, strategy, cluster)}
            )
        except ValueError:  # it does not divide
            continue
    rows, least = {}, None
    for row in sorted(found, key=lambda row: row['step']):
        name, config = name_of(row), configs[row['script']] | row['keys']
        if name in rows or len(rows) == most:
            continue
        model = step_time.model_of(**step_time.model_keys(config))
        row |= {'name': name, 'gb': memory_gb(config, model, row['strategy'], cluster.gpus)}
        row['sent'] = traffic.communication_bytes(config, model, cluster.gpus, row['strategy'])['sent']
        least = min(row, least or row, key=lambda row: row['gb'])
        if row['gb'] + RESERVED_GB <= cluster.gb:
            row['tokens_per_s'] = config['global_batch_size'] * config['block_size'] / row['step']
            if cluster.device.peak:
                row['mfu'] = model.flops_per_token() * row['tokens_per_s'] / cluster.gpus / cluster.device.peak
            rows[name] = row
    if not rows:
        nearest = f'{least["name"]} comes nearest with {least["gb"]:.1f} GB' if least else 'no layout divides the ranks'
        raise ValueError(
            f'nothing fits {cluster.gb:g} GB with {RESERVED_GB} GB of reserve: {nearest}; use more --gpus, a shorter '
            '--block_size or a smaller model'
        )
    return in_order(rows.values())


def in_order(rows):
    """
    Rows with 'step', 'name' and 'strategy', the fastest first. Among the rows within TIE of the fastest, however, the
    one with the fewest dimensions is put first, because the prediction is no better than TIE, and less can go wrong
    with a simple layout. That row is never DiLoCo, whose losses differ.
    """
    rows = sorted(rows, key=lambda row: row['step'])
    close = [row for row in rows if row['step'] <= (1 + TIE) * rows[0]['step'] and row['strategy'] != 'diloco']
    if close:
        simplest = min(close, key=lambda row: len(row['name'].split()))
        rows.remove(simplest)
        rows.insert(0, simplest)
    return rows


def memory_gb(config, model, strategy, gpus):
    """The memory of a rank that --dry_run would print with --compile=False, in GB: what compiled blocks keep, up to a
    fifth less, takes eight times as long to find, and there are a hundred layouts."""
    return memory.totals(memory.memory_bytes(config, model, gpus, strategy))['total on the device'] / 1e9


def name_of(row):
    """The name of a kind of layout, such as 'fsdp3 hsdp4 cp2': a word for each dimension; 3 is ZeRO's stage."""
    keys = row['keys']
    parts = {'replicate_size': 'hsdp', 'tensor_parallel': 'tp', 'context_parallel': 'cp', 'pipeline_stages': 'pp'}
    parts |= {'pipeline_chunks': 'chunks', 'num_replicas': 'diloco', 'expert_parallel': 'ep'}
    words = [f'fsdp{keys["zero_stage"]}'] if 'zero_stage' in keys else []
    words += ['manual'] if keys.get('fsdp_impl') == 'manual' else []
    words += [f'{short}{keys[key]}' for key, short in parts.items() if keys.get(key, 1) > 1]
    return ' '.join(words) or 'ddp'
