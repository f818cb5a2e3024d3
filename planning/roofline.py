"""
Which layouts of a model fit a cluster, what each makes a rank send, and in which order to try them (compare.py --plan).

    rows = roofline.rank(keys, roofline.cluster_of('h100', gpus=64, node_gpus=4))  # of the layouts that fit

A roofline, which orders layouts and predicts no speed: measure the first ones with compare.py --bench. The seconds of a
step are those of

    compute   FLOPs / (ranks x peak x MFU), and a third more where backward repeats all of forward
    exposed   the bytes that computation waits for, over their link, and how much longer than compute all others take
    bubble    of a pipeline: (stages - 1) / (chunks x micro-steps) of compute

Memory and bytes are those of --dry_run. Left out are kernels, latency, what memory has to read and write ('selective'
recomputes for free), and stages with unequal work.
"""

import itertools
from collections import namedtuple
from pathlib import Path

from knobs import read_knobs
from layout import Layout
from model import ModelConfig
from planning import checks, memory, rules, sizes, strategies, traffic
from system.devices import A100, H100
from system.files import ROOT, read_json

# peak: FLOP/s in bfloat16. within, between: bytes/s that a GPU sends over NVLink, and over its own network card, one
# way, by the data sheets. gb: GB of memory.
Gpu = namedtuple('Gpu', 'peak within between gb')
GPUS = {
    'h100': Gpu(H100, 450e9, 50e9, 80),
    'h200': Gpu(H100, 450e9, 50e9, 141),
    'a100': Gpu(A100, 300e9, 25e9, 80),
}
MFU = 0.4  # assumed: one H100 had 34 to 53% (docs/gpu.md)
OF_A_LINK = 0.8  # of the data sheet, which all-reduces of nccl-tests reach
RESERVED_GB = 2  # of a GPU's memory, for CUDA's context, NCCL's buffers and fragments
A_DIMENSION = 0.03  # has to save this share of a step, since no order is better than that and simple layouts break less
Cluster = namedtuple('Cluster', 'gpus node_gpus peak within between gb')


def cluster_of(gpu, gpus, node_gpus, links=(), gb=None):
    """The Cluster with a kind of GPU from GPUS. links: measured bytes/s (within, between); gb: other memory. Raises
    ValueError for another kind, or if nodes are not full."""
    if gpu not in GPUS:
        raise ValueError(f'gpu={gpu!r}: expected {", ".join(GPUS)}')
    if gpus > node_gpus and gpus % node_gpus:
        nearest = [n * node_gpus for n in (gpus // node_gpus, gpus // node_gpus + 1)]
        raise ValueError(
            f'gpus={gpus} on nodes of node_gpus={node_gpus}: expected full nodes, as '
            f'--gpus={" or ".join(map(str, nearest))}'
        )
    kind = GPUS[gpu]
    links = links or (OF_A_LINK * kind.within, OF_A_LINK * kind.between)
    return Cluster(gpus, min(gpus, node_gpus), kind.peak, *links, gb or kind.gb)


def step(config, model, strategy, cluster, flops_per_token):
    """{'compute', 'exposed', 'bubble', 'step': seconds} of an optimizer step, its 'micro_steps', and the bytes 'sent'
    by a rank, in a pipeline by one of the middle stage. Raises ValueError if ranks or sequences do not divide."""
    layout = Layout.of(config, strategy, cluster.gpus)
    plan = memory.Plan.of(config, model, layout, stage=layout.stage // 2)
    flops = flops_per_token * config['global_batch_size'] * config['block_size'] * (4 / 3 if plan.recomputes else 1)
    compute = flops / (cluster.gpus * MFU * cluster.peak)
    sent, beside, exposed = 0.0, 0.0, 0.0
    for lesson in strategies.of(layout):
        name = lesson.__name__.rpartition('.')[2]
        for kind, nbytes in lesson.sends(plan).items():
            seconds = nbytes / bandwidth(cluster, *ranks_of(name, kind, layout), is_all_to_all=name == 'expert_manual')
            is_beside = name in ('ddp', 'fsdp', 'context_manual') or (name == 'diloco' and config['overlap_steps'])
            sent, beside, exposed = sent + nbytes, beside + seconds * is_beside, exposed + seconds * (not is_beside)
    exposed += max(0.0, beside - compute)
    bubble = (layout.stage - 1) / (layout.chunks * layout.micro_steps) * compute
    found = {'micro_steps': layout.micro_steps, 'sent': sent, 'compute': compute, 'exposed': exposed, 'bubble': bubble}
    return found | {'step': compute + exposed + bubble}


def ranks_of(lesson, kind, layout):
    """(how many ranks exchange what a lesson sends, how far their numbers are apart), see layout.py."""
    if lesson == 'fsdp' and kind == 'all-reduce':  # between the copies of HSDP
        return layout.replicate, layout.tensor * layout.shard
    if lesson == 'pipeline_manual' and kind != 'point-to-point':  # between the copies of a stage
        return layout.replicate, layout.tensor
    return {
        'ddp': (layout.ranks, 1),
        'fsdp': (layout.shard, layout.tensor),
        'context_manual': (layout.context, layout.tensor),
        'tensor_manual': (layout.tensor, 1),
        'expert_manual': (layout.expert, layout.tensor),
        'pipeline_manual': (layout.stage, layout.ranks // layout.stage),
        'diloco': (layout.replica, layout.ranks // layout.replica),
    }[lesson]


def bandwidth(cluster, ranks, stride, is_all_to_all=False):
    """Bytes/s of each of `ranks` that are `stride` apart. Rings over nodes use the cards of all their ranks on a node;
    where all send to all, each has its own."""
    on_a_node = min(ranks, max(1, cluster.node_gpus // stride))
    if on_a_node == ranks:
        return cluster.within
    return min(cluster.within, cluster.between * (1 if is_all_to_all else on_a_node))


def keys_of(script, keys, on_cpu=False):
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
    nodes, ranks = cluster.gpus // cluster.node_gpus, powers(cluster.gpus)
    tensors, pipelines, experts = powers(cluster.node_gpus), ranks[1:], [1]
    if keys.get('n_experts'):  # expert_parallel alone divides a mixture
        tensors, pipelines, experts = [1], [], ranks

    def stated(**sizes):  # as the command has them: also 1, where a file sets another
        return {key: size for key, size in sizes.items() if size > 1 or keys.get(key, 1) > 1}

    modes = dict.fromkeys((keys.get('activation_checkpointing', 'none'), 'selective', 'full'))
    for mode, batch_size in itertools.product(modes, reversed(powers(keys['global_batch_size']))):
        common = {'batch_size': batch_size, 'activation_checkpointing': mode}
        yield 'ddp', 'train_ddp.py', common
        zeros = (('torch', 3), ('torch', 2), ('manual', 1))
        for (impl, stage), tensor, context, share in itertools.product(zeros, tensors, ranks, experts):
            inside = stated(tensor_parallel=tensor, context_parallel=context, expert_parallel=share)
            script = 'train_parallel.py' if inside else 'train_fsdp.py'
            if share > 1 and mode == 'selective':  # fully_shard cannot do this
                impl = 'manual'
            layout = {'zero_stage': stage} | ({'fsdp_impl': impl} if impl == 'manual' else {})
            for replicas, accumulate in itertools.product(sorted({1, nodes}), ('unsharded', 'sharded')):
                copies = stated(replicate_size=replicas)
                yield 'fsdp', script, common | layout | {'accumulate': accumulate} | copies | inside
        for stages, chunks, tensor in itertools.product(pipelines, (1, 2, 4), tensors):
            layout = {'pipeline_stages': stages, 'pipeline_chunks': chunks} | stated(tensor_parallel=tensor)
            yield 'pipeline', 'train_pipeline.py', common | layout
        for share in experts if nodes > 1 else ():
            yield 'diloco', 'train_diloco.py', common | {'num_replicas': nodes} | stated(expert_parallel=share)


def rank(keys, cluster, most=12):
    """
    Rows of the layouts that fit, the one to try first first: of each kind of layout one, with its best batch_size,
    checkpointing and accumulation. keys: those given, of train scripts; those that divide ranks do not count. Raises
    ValueError if nothing fits, with the layout that comes nearest.
    """
    if not keys.get('global_batch_size'):
        raise ValueError('global_batch_size is not known: give it, as in --global_batch_size=512')
    known, found = {}, []  # of a script: its keys, the model, and the FLOPs of a token
    for strategy, script, layout in candidates(keys, cluster):
        if script not in known:
            model = sizes.empty_model(config := keys_of(script, keys))
            known[script] = config, model, model.flops_per_token()
        config, model, flops = known[script]
        config = config | layout
        try:
            checks.check(config, Layout.of(config, strategy, cluster.gpus), model.config)
            row = step(config, model, strategy, cluster, flops)
        except ValueError:  # it does not divide, or the script refuses it
            continue
        found.append({'name': name_of(layout), 'strategy': strategy, 'script': script, 'keys': layout} | row)

    def order(row):  # what is equal in both keeps the order of candidates()
        dimensions = len(row['name'].split()) + (row['strategy'] == 'diloco')  # its losses differ
        return row['step'] * (1 + A_DIMENSION * dimensions), row['sent']

    rows, least = {}, None
    for row in sorted(found, key=order):
        if row['name'] in rows or len(rows) == most:
            continue
        config, model, _ = known[row['script']]
        # Compiled blocks keep up to a fifth less, which takes eight times as long to find.
        asked = config | row['keys'] | {'compile': False}, model, cluster.gpus, row['strategy']
        row['gb'] = memory.totals(memory.memory_bytes(*asked))['total on the device'] / 1e9
        row['sent'] = traffic.communication_bytes(*asked)['sent']
        least = min(row, least or row, key=lambda row: row['gb'])
        if row['gb'] + RESERVED_GB <= cluster.gb:
            rows[row['name']] = row
    if not rows:
        nearest = f'{least["name"]} comes nearest with {least["gb"]:.1f} GB' if least else 'no layout divides the ranks'
        raise ValueError(
            f'nothing fits {cluster.gb:g} GB with {RESERVED_GB} GB of reserve: {nearest}; use more --gpus, a shorter '
            '--block_size or a smaller model'
        )
    return [*rows.values()]


def name_of(keys):
    """The name of a kind of layout, such as 'fsdp3 hsdp4 cp2': a word for each dimension; 3 is ZeRO's stage."""
    parts = {'replicate_size': 'hsdp', 'tensor_parallel': 'tp', 'context_parallel': 'cp', 'pipeline_stages': 'pp'}
    parts |= {'pipeline_chunks': 'chunks', 'num_replicas': 'diloco', 'expert_parallel': 'ep'}
    words = [f'fsdp{keys["zero_stage"]}'] if 'zero_stage' in keys else []
    words += ['manual'] if keys.get('fsdp_impl') == 'manual' else []
    words += [f'{short}{keys[key]}' for key, short in parts.items() if keys.get(key, 1) > 1]
    return ' '.join(words) or 'ddp'
