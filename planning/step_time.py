"""
Predict the seconds of a training step on many GPUs, from the work of one GPU, the bytes that travel, and the speed of
the links.

    cluster = step_time.assumed('h100', gpus=64, node_gpus=4)  # or with a step and links that were measured
    step_time.step(config, 'fsdp', cluster)  # {'step': seconds, 'exposed': ..., 'bubble': ..., ...}

Nothing is fitted to runs on several GPUs. docs/strategies.md says how far off the predictions are.

A rank computes all layers, or with a pipeline those of its stage; 1/tensor_parallel of each matrix and of the heads;
and 1/context_parallel of each sequence. So its work is that of a smaller model, see model_of_rank().
"""

import math
import statistics
from collections import namedtuple
from functools import cache

import torch

import context_manual
import expert_manual
import fsdp
import pipeline_manual
import tensor_manual
from layout import FP32, Layout
from model import ModelConfig, has_flash_attention, idle_numbers
from planning import sizes, traffic
from planning.memory import Plan
from system.devices import A100, H100

# What a GPU reaches, for use if nothing was measured. peak: FLOP/s. matmul: share of it in large ones. attention:
# the same for FlashAttention-2, forward and backward (arXiv 2407.08608: 35% on an H100; 2307.08691: 50 to 73% on an
# A100). memory: bytes/s, 0.9 of the data sheet. within: bytes/s of NVLink one way. between: bytes/s of the network card
# that each GPU has. Both are 0.8 of the data sheet, which all-reduces of nccl-tests reach. gb: GB of memory.
Gpu = namedtuple('Gpu', 'peak matmul attention memory within between gb')
GPUS = {
    'h100': Gpu(H100, 0.70, 0.35, 0.9 * 3.35e12, 0.8 * 450e9, 0.8 * 50e9, 80),
    'h200': Gpu(H100, 0.70, 0.35, 0.9 * 4.80e12, 0.8 * 450e9, 0.8 * 50e9, 141),
    'a100': Gpu(A100, 0.75, 0.55, 0.9 * 2.04e12, 0.8 * 300e9, 0.8 * 25e9, 80),
}
# Seconds of a step of a ring within a node, of one between nodes, and of starting a collective, from NCCL's own table
# for the protocol that it uses for large messages (src/graph/tuning.cc).
WITHIN_S, BETWEEN_S, START_S = 3.4e-6, 9.6e-6, 8.4e-6
DDP_BUCKET = 25 * 2**20  # bytes: DistributedDataParallel's default

# The speed of one rank. matmul, attention: FLOP/s. memory: bytes/s. update: seconds per parameter that the rank holds.
# peak: FLOP/s for the MFU, or None if not known, as on a CPU. The last two correct the times of (forward, backward),
# and come from measured steps. scale: factors for the times that follow from the rates above; (1, 1) if not measured.
# beside: seconds that each block takes in addition, for 'ddp' and for each implementation of FSDP.
Device = namedtuple('Device', 'matmul attention memory update peak scale beside')
NOTHING_BESIDE = {'ddp': (0.0, 0.0)}
# The link of one rank. bandwidth: bytes/s that it sends in all-reduces. gather: the same in all-gathers, which are
# slower on gloo. step: seconds that a step of a ring takes besides the bytes. start: seconds to start a collective.
Link = namedtuple('Link', 'bandwidth gather step start')
# within: the Link inside a node. between: the Link of a rank to other nodes, with its share of the node's network.
# crowd: ranks per core (1 on GPUs). host: a core's seconds for each byte sent (gloo; 0 for NCCL). gb: GB of memory per
# rank.
Cluster = namedtuple('Cluster', 'gpus node_gpus within between device crowd host gb')
Ring = namedtuple('Ring', 'bandwidth gather latency')  # latency: seconds of once around the ring


# --- CLUSTER ----------------------------------------------------------------------------------------------------------


def assumed(gpu, gpus, node_gpus):
    """The Cluster with a kind of GPU from GPUS. Raises ValueError for another kind, or if nodes are not full."""
    if gpu not in GPUS:
        raise ValueError(f'gpu={gpu!r}: expected {", ".join(GPUS)}, or cpu with --measured and --links')
    check_nodes(gpus, node_gpus)
    kind = GPUS[gpu]
    # In fp32 AdamW reads weight, gradient and two moments, and writes all but the gradient, which clipping reads again.
    update = 8 * FP32 / kind.memory
    rates = kind.matmul * kind.peak, kind.attention * kind.peak, kind.memory, update, kind.peak
    device = Device(*rates, (1.0, 1.0), NOTHING_BESIDE)
    within = Link(kind.within, kind.within, WITHIN_S, START_S)
    between = Link(kind.between, kind.between, BETWEEN_S, START_S)
    return Cluster(gpus, node_gpus, within, between, device, 1.0, 0.0, kind.gb)


def cpu_cluster(gpus, node_gpus, cores, gb):
    """The Cluster of ranks on CPUs. Its rates mean nothing until with_measured_step() and with_measured_links()."""
    check_nodes(gpus, node_gpus)
    unknown = Link(math.inf, math.inf, 0.0, 0.0)
    device = Device(1.0, 1.0, math.inf, 0.0, None, (1.0, 1.0), NOTHING_BESIDE)
    return Cluster(gpus, node_gpus, unknown, unknown, device, max(1.0, node_gpus / cores), 0.0, gb)


def check_nodes(gpus, node_gpus):
    if gpus > node_gpus and gpus % node_gpus:
        nearest = [n * node_gpus for n in (gpus // node_gpus, gpus // node_gpus + 1)]
        raise ValueError(
            f'gpus={gpus} on nodes of node_gpus={node_gpus}: expected full nodes, as '
            f'--gpus={" or ".join(map(str, nearest))}'
        )


def with_measured_step(cluster, runs):
    """
    The Cluster with the speed that was measured in runs of the model in one process. runs: [(configuration, rows of
    metrics.jsonl after the warm-up)].

    Two runs with different batch_size also tell what a block of a micro-step costs apart from its tokens: Python,
    kernel launches, adding up gradients. A run of train_fsdp.py tells what copies FSDP makes, which differ between its
    two implementations. Ranks that share cores are slower together than alone, so start as many runs at the same time
    as a node will have ranks.
    """
    plain = cluster.device._replace(scale=(1.0, 1.0), beside=NOTHING_BESIDE)
    points = {}  # implementation -> [([forward, backward seconds by plain rates], [as measured], update)]
    for config, rows in runs:
        model, m = sizes.empty_model(config), Layout.of(config, 'ddp', 1).micro_steps
        block, root = work(config, model, plain)
        forward, backward, update = (
            statistics.median(row[f'time/{phase}'] for row in rows) / 1000
            for phase in ('forward', 'backward', 'update')
        )
        by_rates = [config['n_layer'] * b + r for b, r in zip(block, root, strict=True)]
        point = by_rates, [forward / m, backward / m], update / model.parameter_counts()['total']
        points.setdefault(config.get('fsdp_impl', 'ddp'), []).append(point)
    parts = config['n_layer'] + 1  # the blocks, and everything else
    base = points.get('ddp') or next(iter(points.values()))
    (rates_a, seconds_a, _), (rates_b, seconds_b, _) = min(base), max(base)
    scale = [
        (seconds_b[phase] - seconds_a[phase]) / (rates_b[phase] - rates_a[phase])
        if rates_b[phase] > rates_a[phase]
        else seconds_b[phase] / rates_b[phase]
        for phase in (0, 1)
    ]
    beside = {}
    for implementation, its_points in points.items():
        rates, seconds, _ = max(its_points)
        beside[implementation] = [max(0.0, seconds[phase] - scale[phase] * rates[phase]) / parts for phase in (0, 1)]
    beside.setdefault('ddp', next(iter(beside.values())))
    update = min(update for _, _, update in base)
    return cluster._replace(device=plain._replace(update=update, scale=scale, beside=beside))


def with_measured_links(cluster, rows):
    """The Cluster with links that were measured. rows: from the file that benchmarks/links.py --json writes. Raises
    ValueError if they were measured on other nodes."""
    found, one_node = {}, cluster.node_gpus >= cluster.gpus
    # links.py measures no link twice: on a single node, and on nodes of one rank, there is only one kind of link.
    names = {'within': 'all ranks' if one_node else 'within a node'}
    names |= (
        {} if one_node else {'between': 'all ranks' if cluster.node_gpus == 1 else 'between nodes, all ranks of each'}
    )
    for link, name in names.items():
        *small, before, last = [row for row in rows if row['link'] == name] or [None, None]
        if last is None and link == 'within':  # each rank is alone on its node
            continue
        if not small:
            raise ValueError(f'links: nothing of {name!r}: measure on nodes of {cluster.node_gpus} ranks each')
        # An all-reduce on n ranks is 2 (n-1) steps of a ring. For the smallest messages, that is all the time.
        n = last['ranks']
        step = min(row['ms'] for row in small) / 1000 / (2 * (n - 1))
        ring_bytes = 2 * (n - 1) / n * (last['bytes'] - before['bytes'])
        bandwidth, gather = (
            1000 * part * ring_bytes / (last[key] - before[key]) for key, part in (('ms', 1), ('gather_ms', 1 / 2))
        )
        found[link] = Link(bandwidth, gather, step, 0.0)
        found['host'] = (
            last['cpu_ms'] / 1000 / last['bytes'] / (2 * (n - 1) / n) if cluster.device.peak is None else 0.0
        )
    return cluster._replace(**found)


def ring(cluster, ranks, stride):
    """The Ring of a group of ranks that are `stride` apart. Those on one node use all of their network cards."""
    per_node = min(ranks, max(1, cluster.node_gpus // stride))
    nodes = -(-ranks // per_node)
    bandwidth, gather = cluster.within[:2] if per_node > 1 else (math.inf, math.inf)
    if nodes > 1:
        bandwidth = min(bandwidth, per_node * cluster.between.bandwidth)
        gather = min(gather, per_node * cluster.between.gather)
    link = cluster.between if nodes > 1 else cluster.within
    latency = link.start + (ranks - nodes) * cluster.within.step + (nodes - 1) * cluster.between.step
    return Ring(bandwidth, gather, latency)


def slices_per_s(cluster, ranks, stride):
    """Bytes/s if a rank sends each slice straight to the rank that needs it, as fsdp_manual.py does on gloo. Slices for
    other nodes use the network."""
    near = min(ranks, max(1, cluster.node_gpus // stride))
    return cluster.between.gather * (ranks - 1) / (ranks - near) if ranks > near else cluster.within.gather


# --- ONE GPU ----------------------------------------------------------------------------------------------------------


def model_of_rank(config):
    """The keys of the smaller model whose work one rank does, with its share of layers (of the stage that has most),
    heads, hidden units and vocabulary. head_dim stays. Raises ValueError if something does not divide."""
    tensor, stages = config.get('tensor_parallel', 1), config.get('pipeline_stages', 1)
    refuse_to_cut_experts(config)
    for key in ('n_head', 'n_kv_head', 'mlp_hidden_dim'):
        if config[key] % tensor:
            raise ValueError(f'{key}={config[key]} is not a multiple of tensor_parallel={tensor}')
    if config['n_layer'] < stages:
        raise ValueError(f'n_layer={config["n_layer"]} is less than pipeline_stages={stages}')
    most = max(pipeline_manual.blocks_of_stages({**config, 'pipeline_stages': stages}))
    sizes = {key: config[key] // tensor for key in ('n_head', 'n_kv_head', 'mlp_hidden_dim')}
    sizes |= {'vocab_size': -(-config['vocab_size'] // tensor), 'n_layer': most}
    return {**config, **sizes, 'tensor_parallel': 1, 'pipeline_stages': 1}


def refuse_to_cut_experts(config):
    """Raise ValueError for a mixture of experts in a layout that cannot have one."""
    for key in ('tensor_parallel', 'pipeline_stages'):
        if config.get('n_experts') and config.get(key, 1) > 1:
            given = f'n_experts={config["n_experts"]} with {key}={config[key]}'
            raise ValueError(f'{given}, which has no mixtures of experts: leave it at 1, expert_parallel divides them')


def work(config, model, device):
    """
    ((forward, backward) of a block, (forward, backward) of the rest): seconds of one micro-step on one rank.

    A matmul with P weights takes 2 P FLOPs per token, and its two gradients take twice that. Causal attention over T
    tokens takes 2 T H D per token (two products, each with T/2 keys; others by keys_of_a_query()), and backward 2.5
    times that, since it recomputes the scores. Everything else is bound by memory: when compiled, a block
    reads or writes 8 C numbers per token for norms and residuals, 2 (H + K) D for the rotation and 3 M for the
    activation, and twice as many in backward. The loss computes its gradients by hidden states and head in forward
    already, and moves 8 bytes per logit.
    """
    tokens = config['batch_size'] * config['block_size'] // config.get('context_parallel', 1)
    C, H, K, D, M = (config[key] for key in ('n_embd', 'n_head', 'n_kv_head', 'head_dim', 'mlp_hidden_dim'))
    if config.get('n_experts'):  # count their hidden units, and k C each to sort by expert, read, sort back and weigh
        k = config['experts_per_token']  # with expert_parallel what arrives is sorted and sorted back once more
        M = k * config['expert_hidden_dim'] + (8 if config.get('expert_parallel', 1) > 1 else 4) / 3 * k * C
    in_matmuls = sum(p.numel() for p in model.blocks[0].parameters() if p.dim() == 2)
    matmul = 2 * (in_matmuls - idle_numbers(model.blocks[0])) / device.matmul
    attention = 4 * keys_of_a_query(config) * H * D / device.attention
    other = sizes.BYTES[config['dtype']] * (8 * C + 2 * (H + K) * D + 3 * M) / device.memory
    forward, backward = matmul + attention + other, 2 * matmul + 2.5 * attention + 2 * other
    vocabulary = model.head.weight.shape[0]
    root = 6 * vocabulary * C / device.matmul + 8 * vocabulary / device.memory
    # Recomputed in backward: everything, or all but matmuls and attention. 'half', as in torchtitan: half the matmuls,
    # too.
    again = {'none': 0.0, 'full': forward, 'offload': forward, 'selective': other, 'half': matmul / 2 + other}
    backward += again[config['activation_checkpointing']]
    (scale_f, scale_b), beside = device.scale, device.beside.get(config.get('fsdp_impl'), device.beside['ddp'])
    block = tokens * forward * scale_f + beside[0], tokens * backward * scale_b + beside[1]
    return block, (tokens * root * scale_f + beside[0], beside[1])


def keys_of_a_query(config):
    """
    The keys that a query is multiplied with, the mean over queries and layers.

    Of causal attention these are T/2, with a window of w tokens w - w^2 / 2T. FlashAttention skips all others. A mask
    only hides them, so where model.py takes one (MaskedAttention), all T are computed: on a CPU, in fp32, with dropout
    and for odd heads, in layers with a window and in all layers where documents are kept apart. (By how much that
    kernel is slower besides is not known, nor how long documents are.) context_manual.py has no masks.
    """
    T, pattern = config['block_size'], config.get('window_pattern') or 'L'
    device = torch.device('cpu' if config['device'] == 'cpu' else 'meta')  # the latter stands for a GPU since Ampere
    has_flash = not config['dropout'] and has_flash_attention(
        device, getattr(torch, config['dtype']), config['head_dim']
    )
    documents = config['windows'] == 'documents'
    by_mask = config.get('context_parallel', 1) == 1 and not has_flash
    met = []
    for letter in pattern:
        seen = config['window_size'] if letter == 'S' else T
        met.append(T if by_mask and (documents or letter == 'S') else seen - seen * seen / (2 * T))
    return sum(met) / len(met)


def attention_share(config, model, device):
    """The share of attention in the time of a block's forward."""
    bare = {**config, 'activation_checkpointing': 'none'}
    whole = work(bare, model, device)[0][0]
    without = work(bare, model, device._replace(attention=math.inf))[0][0]
    return (whole - without) / whole


# --- A STEP -----------------------------------------------------------------------------------------------------------


def step(config, strategy, cluster):
    """
    {'compute', 'exposed', 'bubble', 'update', 'step': seconds} of an optimizer step, and its 'micro_steps'.

    'exposed' is communication for which computation waits, 'bubble' the time in which a stage is idle, 'step' the sum.
    config: a run's keys, with those of the model. strategy: 'ddp', 'fsdp', 'diloco' or 'pipeline'; 'fsdp' may also have
    tensor_parallel and pipeline_stages. Raises ValueError if ranks or sizes do not divide.
    """
    device, gpus = cluster.device, cluster.gpus
    tensor, context = config.get('tensor_parallel', 1), config.get('context_parallel', 1)
    stages, chunks = config.get('pipeline_stages', 1), config.get('pipeline_chunks', 1)
    if gpus % (tensor * stages * context):
        raise ValueError(f'{gpus} ranks: {tensor} x {context} x {stages} do not divide them')
    ranks = gpus // (tensor * stages)  # which share the data, and the weights
    mine = model_of_rank(config)
    model = model_of(**model_keys(mine))
    plan = Plan.of(mine, model, Layout.of(mine, 'ddp' if strategy == 'pipeline' else strategy, ranks))
    m, layers = plan.layout.micro_steps, mine['n_layer']
    (forward, backward), root = work(mine, model, device)
    root = sum(root)
    waits_f, waits_b = waits_in_a_layer(plan, model, cluster, tensor, forward, backward)
    blocks = pipeline_manual.blocks_of_stages({**config, 'pipeline_stages': stages})
    block_seconds, block_waits = forward + backward, waits_f + waits_b  # per micro-step
    waits, waits_ends = statistics.mean(blocks) * block_waits, waits_at_ends(plan, cluster, tensor)

    # Ranks are numbered with tensor fastest, then context, then data (both are shards of FSDP), then stages.
    sent, held = traffic.sent(plan), held_by_rank(plan.weights)
    copies, has_copies = ring(cluster, ranks, tensor), ranks > 1
    if strategy == 'ddp':
        buckets = has_copies * math.ceil(FP32 * held / DDP_BUCKET)
        wire = 2 * buckets * copies.latency + sent['all-reduce'] / copies.bandwidth
        last = wire / max(1, buckets)  # the last bucket is sent after backward
        size = sent['all-reduce'] * (wire - last) / wire if wire else 0.0
        exposed = last + beside(wire - last, layers * backward, size, cluster)
    elif strategy == 'pipeline':  # after the last backward, block by block
        buckets = has_copies * (layers + 1)
        exposed = 2 * buckets * copies.latency + sent['all-reduce'] / copies.bandwidth
    else:
        exposed = waits_of_fsdp(plan, model, sent, cluster, tensor, (forward, backward))

    # 1F1B takes the time of one micro-step through all stages, plus the slowest stage's time for each other micro-step.
    # The last stage has the head, and here also the waits of both ends. Chunks shorten the first part, since a stage
    # can start after 1/chunks of the work of the stages before it.
    stage_times = [count * (block_seconds + block_waits) for count in blocks]
    stage_times[-1] += root + waits_ends
    slowest = max(stage_times)
    running = sum(stage_times) / chunks + (m - 1 / chunks) * slowest
    alone = running / cluster.crowd
    # If stages share cores, the others are faster while some stages are idle. These are half of the stages on average,
    # for (stages - 1) units of time at the beginning and as many at the end.
    idle = 1 - max(1.0, cluster.crowd / 2) / cluster.crowd
    running -= idle * 2 * (stages - 1) * statistics.mean(stage_times) / chunks
    hops = 0.0
    if stages > 1:
        size = pipeline_manual.message_bytes(plan) / tensor
        hop, part = hop_seconds(cluster, gpus // stages, stages, size), slowest / chunks
        # Filling and draining the pipeline crosses every border once. In between, stage 0 has `stages` micro-steps in
        # flight, each for as long as all stages and 2 (stages - 1) hops take, so no hop is hidden. With chunks it has
        # twice as many parts in flight as computation needs, so a hop is hidden if it takes up to half the time of a
        # part.
        hops = 2 * (stages - 1) * hop
        hops += (m - 1) * 2 * (stages - 1) / stages * hop if chunks == 1 else m * chunks * max(0.0, hop - part / 2)
        hops = max(0.0, alone + hops - running)  # while a rank waits, others use its core
    compute = m * (statistics.mean(blocks) * block_seconds + root / stages)
    update = held * device.update
    bubble = running - m * statistics.mean(stage_times)
    exposed += m * (waits + waits_ends / stages) + hops
    total = compute + bubble + exposed + update
    return {
        'micro_steps': m, 'compute': compute, 'exposed': exposed, 'bubble': bubble, 'update': update, 'step': total
    }  # fmt: skip


def model_keys(config):
    keys = {key: config[key] for key in ModelConfig.__dataclass_fields__}
    # model_of() is cached, so its arguments have to be hashable.
    return {key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()}


@cache
def model_of(**keys):
    return sizes.empty_model(keys)


@cache
def held_by_rank(weights):
    """Numbers of all parameters on a rank, with padding. Cached, since most layouts need the same ones."""
    return weights.count(weights.all)


@cache
def shares_of_rings(weights):
    """[(share of the bytes that a rank sends in a pass of gathers, number of ranks)], for the weights that all ranks of
    a copy shard and for experts, which fewer ranks shard."""
    found = []
    for _, parameters in weights.by_unit(weights.all):
        ranks = weights.pieces(parameters[0])
        found.append(((ranks - 1) * weights.count(parameters), ranks))
    total = sum(size for size, _ in found)
    return [(size / total, ranks) for size, ranks in found if ranks > 1]


def rings_of_shards(plan, cluster, stride):
    """
    The Ring in which FSDP gathers and reduces. Experts that ranks share use another ring, of the ranks with the same
    experts, which are further apart. Since the two take turns, the result has their mean speed, weighted by bytes, and
    the sum of their latencies.
    """
    straight = plan.keys['fsdp_impl'] == 'manual' and not plan.on_cuda  # see slices_per_s()
    seconds_r, seconds_g, latency = 0.0, 0.0, 0.0  # the first two per byte
    for share, ranks in shares_of_rings(plan.weights):
        apart = stride * (plan.layout.shard // ranks)
        group = ring(cluster, ranks, apart)
        seconds_r += share / (slices_per_s(cluster, ranks, apart) if straight else group.bandwidth)
        seconds_g += share / group.gather
        latency += group.latency
    return Ring(*(1 / seconds if seconds else math.inf for seconds in (seconds_r, seconds_g)), latency)


def beside(wire, compute, sent, cluster):
    """
    Seconds that a transfer adds to the computation which runs at the same time: those by which it takes longer, but at
    least the time that the host's cores spend on it. wire, compute: seconds of transfer and computation. sent: bytes of
    the transfer. (If computation waits for a transfer, the wire's seconds include the host's part already.)
    """
    return max(wire - compute, sent * cluster.host * cluster.crowd, 0.0)


def hop_seconds(cluster, copies, stages, size):
    """Seconds of a message of `size` bytes between neighbouring stages, the mean over the borders. copies: ranks of a
    stage, which all send."""
    per_node = max(1, cluster.node_gpus // copies)  # stages on a node
    across = (stages - 1) // per_node if per_node > 1 else stages - 1  # borders between nodes
    on_node, over = (link.start + link.step + size / link.bandwidth for link in (cluster.within, cluster.between))
    if cluster.node_gpus >= cluster.gpus:
        across = 0
    elif copies < cluster.node_gpus:  # only a node's last stage uses its network, and so has all of it
        over = (
            cluster.between.start + cluster.between.step + size * copies / cluster.node_gpus / cluster.between.bandwidth
        )
    return (across * over + (stages - 1 - across) * on_node) / (stages - 1)


def waits_in_a_layer(plan, model, cluster, tensor, forward, backward):
    """(forward, backward) seconds that a layer waits for tensor, context and expert parallelism in a micro-step. model:
    with all experts."""
    config, context, mode = plan.keys, plan.layout.context, plan.keys['activation_checkpointing']
    waits_f = waits_b = 0.0
    if tensor > 1:
        # Forward has two all-gathers before the matrices and two reduce-scatters after them. Backward has as many, and
        # those that are recomputed. Each is of B T C numbers, and there is nothing to compute meanwhile.
        collective = tensor_collective(plan, cluster, tensor, config['n_embd'] * plan.compute_bytes)
        waits_f, waits_b = 4 * collective, (tensor_manual.COLLECTIVES.get(mode, 8) - 4) * collective
        if config.get('async_tensor_parallel'):  # as in torchtitan: in pieces, during the matmuls
            waits_f, waits_b = max(0.0, waits_f - forward), max(0.0, waits_b - backward)
    if context > 1:
        sharing = ring(cluster, context, tensor)
        travelling, bytes_per_number = context_manual.keys_and_values(plan)
        step_s = sharing.latency / max(1, context - 1)
        hop, home = (step_s + travelling * size / sharing.bandwidth for size in (bytes_per_number, FP32))
        share = attention_share(config, model, cluster.device)
        tile_f = share * forward / context  # one tile of attention, during which the next keys travel
        tile_b = 2.5 * tile_f * cluster.device.scale[1] / cluster.device.scale[0]
        hops = context - 1
        if config.get('context_impl', 'ring') == 'ring':
            context_waits_f = beside(hops * hop, hops * tile_f, hops * travelling * bytes_per_number, cluster)
            both = travelling * (bytes_per_number + FP32)
            context_waits_b = home + beside(hops * (hop + home), hops * tile_b, hops * both, cluster)
        else:
            context_waits_f, context_waits_b = hops * hop, hops * (hop + home)
        waits_f += context_waits_f
        waits_b += context_waits_b + (context_waits_f if plan.recomputes else 0.0)
    if (experts := plan.layout.expert) > 1:
        # Rows travel to their experts and back, and so do their gradients in backward. Nothing hides this, since
        # experts can only compute what has arrived. In forward the ranks first tell each other how many rows will come.
        size = expert_manual.rows_of_experts(plan) * config['n_embd'] * plan.compute_bytes
        latency = ring(cluster, experts, tensor).latency
        there_and_back = 2 * (latency + (experts - 1) / experts * size / slices_per_s(cluster, experts, tensor))
        expert_waits_f = latency + there_and_back
        waits_f += expert_waits_f
        waits_b += there_and_back + (expert_waits_f if plan.recomputes else 0.0)
    return waits_f, waits_b


def tensor_collective(plan, cluster, tensor, bytes_per_token):
    """Seconds of a collective of tensor parallelism on t ranks, each of which sends (t-1)/t of it. bytes_per_token: of
    the whole."""
    sharing, size = ring(cluster, tensor, 1), plan.tokens * bytes_per_token
    per_s = sharing.bandwidth if plan.on_cuda else slices_per_s(cluster, tensor, 1)
    return sharing.latency + (tensor - 1) / tensor * size / per_s


def waits_at_ends(plan, cluster, tensor):
    """Seconds of a micro-step's collectives outside the layers: two each for embedding and head, one for the loss."""
    if tensor == 1:
        return 0.0
    collective = tensor_collective(plan, cluster, tensor, plan.keys['n_embd'] * plan.compute_bytes)
    return 4 * collective + tensor_collective(plan, cluster, tensor, 3 * FP32 * tensor)


def waits_of_fsdp(plan, model, sent, cluster, stride, block_seconds):
    """Seconds per optimizer step in which computation waits for communication of FSDP and DiLoCo. model: with
    all experts."""
    config, layout, m = plan.keys, plan.layout, plan.layout.micro_steps
    is_diloco, is_manual, on_cpu = layout.is_diloco, config['fsdp_impl'] == 'manual', not plan.on_cuda
    replicas, shard = layout.replica * layout.replicate, layout.shard
    exposed, inner = 0.0, sent
    if is_diloco:
        alone = {**config, 'num_replicas': 1, 'global_batch_size': config['global_batch_size'] // replicas}
        inner = traffic.communication_bytes(alone, model, shard, 'fsdp')
        between = ring(cluster, replicas, stride * shard)
        outer = (sent['sent'] - inner['sent']) / between.bandwidth
        outer += 2 * between.latency * (config['n_layer'] + 1) / config['inner_steps']
        exposed += 0.0 if config['overlap_steps'] else outer
    if shard > 1:
        group = rings_of_shards(plan, cluster, stride)
        units = math.ceil(config['n_layer'] / config['blocks_per_unit'])
        block, root, _ = fsdp.bytes_to_others(plan.weights, plan.compute_bytes)
        one_pass = config['n_layer'] * block + root
        root_share = root / one_pass
        hidden_f, hidden_b = (config['n_layer'] * seconds for seconds in block_seconds)
        # fully_shard overlaps by CUDA streams. A CPU has none, and waits for each collective.
        overlaps = is_manual or not on_cpu

        def added(wire, compute, size):
            return beside(wire, compute, size, cluster) if overlaps else wire

        # Gathers: one pass over the model in forward and, in stage 3, another in backward. Computation has to wait for
        # the first unit and the root.
        forward_bytes = min(inner['all-gather'] / m, one_pass)
        backward_bytes = inner['all-gather'] / m - forward_bytes
        wire_f = (units + 1) * group.latency + forward_bytes / group.gather
        wire_b = (units * group.latency + backward_bytes / group.gather) if backward_bytes > 0 else 0.0
        first = root_share + (1 - root_share) / units if overlaps else 0.0  # share of what is gathered
        # Reductions, in the last micro-step or in each. The root's comes last, when nothing is left to hide it.
        reductions = m if config['accumulate'] == 'sharded' else 1
        gloo_twice = 2 if on_cpu and not is_manual else 1
        reduction_bytes = inner['reduce-scatter'] / reductions
        wire_r = (units + 1) * gloo_twice * group.latency + reduction_bytes / group.bandwidth
        if replicas > 1 and not is_diloco:
            across = ring(cluster, replicas, stride * shard)
            wire_r += 2 * (units + 1) * across.latency + sent['all-reduce'] / reductions / across.bandwidth
        last = root_share if overlaps else 0.0  # share of what is reduced
        exposed += m * (first * wire_f + added((1 - first) * wire_f, hidden_f, (1 - first) * forward_bytes))
        exposed += (m - reductions) * added(wire_b, hidden_b, backward_bytes)
        gather_and_reduction = wire_b + (1 - last) * wire_r, hidden_b, backward_bytes + (1 - last) * reduction_bytes
        exposed += reductions * (last * wire_r + added(*gather_and_reduction))
    return exposed
