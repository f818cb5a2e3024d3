"""
What does a GPU do when in an optimizer step, under each strategy? Planned, not measured, for
benchmarks/draw_strategies.py.

    bars = timelines.of('ZeRO 3 (FSDP)')     # [(lane, kind, begin, end)], in seconds

How long a block computes and how long a message takes is what planning/step_time.py assumes for H100s. The order is
that of the scripts: fsdp_manual.py gathers one block ahead and reduces each block after its backward, DDP all-reduces
during backward, and a pipeline follows pipeline_manual.timetable(). A GPU sends one message at a time. step_time.step()
computes the length of the same step as one sum.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fsdp
import pipeline_manual
from layout import FP32, Layout, numbers
from planning import layouts, sizes, step_time
from planning.memory import Plan, plans

GPUS, NODE_GPUS = 4, 2
# 8 blocks as wide as those of Llama 3 8B, and four sequences per step.
MODEL = dict(
    arch='llama', n_layer=8, n_head=32, n_kv_head=8, n_embd=4096, mlp_hidden_dim=14336, vocab_size=32000,
    block_size=4096, global_batch_size=4, batch_size=1,
)  # fmt: skip
STRATEGIES = {  # name in the picture -> strategy, script, keys
    'DDP': ('ddp', 'train_ddp.py', {}),
    'ZeRO 3 (FSDP)': ('fsdp', 'train_fsdp.py', dict(fsdp_impl='manual')),
    'HSDP, 2 × 2': ('fsdp', 'train_fsdp.py', dict(fsdp_impl='manual', replicate_size=2)),
    'tensor 2 × FSDP 2': ('fsdp', 'train_parallel.py', dict(fsdp_impl='manual', tensor_parallel=2, batch_size=2)),
    'DiLoCo, 2 × 2': ('diloco', 'train_diloco.py', dict(fsdp_impl='manual', num_replicas=2)),
    'pipeline, 4 stages': ('pipeline', 'train_pipeline.py', dict(pipeline_stages=4)),
}


class Lane:
    """Something that does one thing after the other: a GPU's computing, or its network."""

    def __init__(self, name, bars):
        self.name, self.bars, self.free = name, bars, 0.0

    def run(self, kind, ready, seconds):
        """Do this for so many seconds, as soon as it is `ready` and the lane is free; returns when it ends."""
        begin = max(ready, self.free)
        self.free = begin + seconds
        if seconds > 0:
            self.bars.append((self.name, kind, begin, self.free))
        return self.free


def of(name):
    strategy, script, own = STRATEGIES[name]
    config = layouts.keys_of(script, {**MODEL, **own}, on_cpu=False)
    cluster = step_time.assumed('h100', GPUS, NODE_GPUS)
    return {'ddp': of_ddp, 'pipeline': of_pipeline}.get(strategy, of_fsdp)(config, strategy, cluster)


def planned(name):
    """Seconds that step_time.step() predicts for the same step."""
    strategy, script, own = STRATEGIES[name]
    config = layouts.keys_of(script, {**MODEL, **own}, on_cpu=False)
    return step_time.step(config, strategy, step_time.assumed('h100', GPUS, NODE_GPUS))['step']


def model_and_work(config, cluster):
    mine = step_time.model_of_rank(config)
    model = step_time.model_of(**step_time.model_keys(mine))
    return mine, model, step_time.work(mine, model, cluster.device)


def of_ddp(config, strategy, cluster):
    config, model, ((forward, backward), root) = model_and_work(config, cluster)
    group = step_time.ring(cluster, GPUS, 1)

    def all_reduce(parameters):
        size = FP32 * numbers(parameters)
        return 2 * size / step_time.DDP_BUCKET * group.latency + 2 * (GPUS - 1) / GPUS * size / group.bandwidth

    bars = []
    compute, network = Lane('computes', bars), Lane('sends', bars)
    for _ in model.blocks:
        compute.run('forward', 0.0, forward)
    done = compute.run('forward', 0.0, sum(root))
    network.run('sends', done, all_reduce(model.head.parameters()))
    for block in model.blocks:
        done = compute.run('backward', 0.0, backward)
        network.run('sends', done, all_reduce(block.parameters()))
    network.run('sends', done, all_reduce(model.embed.parameters()))
    compute.run('update', network.free, numbers(model.parameters()) * cluster.device.update)
    return bars


def of_fsdp(config, strategy, cluster):
    """ZeRO 3 over all ranks, or over the ranks of each copy. Copies average their gradients under HSDP; under DiLoCo
    they exchange nothing in this step."""
    tensor = config.get('tensor_parallel', 1)
    ranks = GPUS // tensor
    mine, model, ((forward, backward), root) = model_and_work(config, cluster)
    plan = Plan.of(mine, model, Layout.of(mine, strategy, ranks))
    waits = step_time.waits_in_a_layer(plan, model, cluster, tensor, forward, backward)
    copies = config['num_replicas'] if strategy == 'diloco' else config['replicate_size']
    shard = ranks // copies
    group = step_time.ring(cluster, shard, tensor)
    across = step_time.ring(cluster, copies, tensor * shard) if strategy == 'fsdp' and copies > 1 else None
    block_bytes, root_bytes, _ = fsdp.bytes_to_others(plan.weights, plan.compute_bytes)
    widened = FP32 / plan.compute_bytes  # gradients are reduced in fp32
    gather, gather_root = (group.latency + size / group.gather for size in (block_bytes, root_bytes))

    def reduction(size, parameters):
        seconds = group.latency + widened * size / group.bandwidth
        if across:
            of_rank = FP32 * plan.weights.count(parameters)
            seconds += 2 * across.latency + 2 * (copies - 1) / copies * of_rank / across.bandwidth
        return seconds

    reduce_block = reduction(block_bytes, plan.weights.block)
    reduce_root = reduction(root_bytes, plan.weights.root)
    bars = []
    compute, network = Lane('computes', bars), Lane('sends', bars)

    def run_block(kind, ready, seconds, seconds_waited):
        """A block. Under tensor parallelism its halves, attention and MLP, lie between messages that nothing hides."""
        if not seconds_waited:
            return compute.run(kind, ready, seconds)
        for _ in range(2):
            for is_message in (True, False, True):
                begin, ready = ready, ready + (seconds_waited / 4 if is_message else seconds / 2)
                # These go between the GPUs of a node, so FSDP's messages between nodes do not hold them up.
                bars.append((network.name, 'sends', begin, ready) if is_message else (compute.name, kind, begin, ready))
        compute.free = ready
        return ready

    blocks = len(model.blocks)
    root_there = network.run('sends', 0.0, gather_root)
    arrives = network.run('sends', 0.0, gather)
    for number in range(blocks):
        begin = max(arrives, root_there, compute.free)
        if number + 1 < blocks:  # one block ahead
            arrives = network.run('sends', begin, gather)
        run_block('forward', begin, forward, waits[0])
    compute.run('forward', 0.0, sum(root))
    arrives = compute.free  # the last block is still gathered
    for number in reversed(range(blocks)):
        begin = max(arrives, compute.free)
        if number > 0:
            arrives = network.run('sends', begin, gather)
        done = run_block('backward', begin, backward, waits[1])
        network.run('sends', done, reduce_block)
    network.run('sends', compute.free, reduce_root)
    compute.run('update', network.free, step_time.held_by_rank(plan.weights) * cluster.device.update)
    return bars


def of_pipeline(config, strategy, cluster):
    stages, micro_steps = config['pipeline_stages'], config['global_batch_size'] // config['batch_size']
    mine, model, ((forward, backward), root) = model_and_work(config, cluster)
    blocks = pipeline_manual.blocks_of_stages(config)
    ranks = plans(config, sizes.empty_model(config), Layout.of(config, 'pipeline', GPUS))
    hop = step_time.hop_seconds(cluster, GPUS // stages, stages, pipeline_manual.message_bytes(ranks[0]))
    bars, arrived = [], {}
    lanes = [Lane(f'stage {stage}', bars) for stage in range(stages)]
    for actions in pipeline_manual.timetable(stages, 1, micro_steps):
        for stage, (lane, action) in enumerate(zip(lanes, actions, strict=True)):
            if action is None:
                continue
            seconds = blocks[stage] * (forward if action.kind == 'forward' else backward)
            seconds += sum(root) if stage == stages - 1 and action.kind == 'forward' else 0.0
            done = lane.run(action.kind, arrived.get(action, 0.0), seconds)
            follower = pipeline_manual.used_by(action, stages - 1)
            if follower:
                arrived[follower] = done + (hop if follower.part != action.part else 0.0)
    over = max(lane.free for lane in lanes)  # clipping needs the norm of all gradients, so all stages wait
    for plan, lane in zip(ranks, lanes, strict=True):
        lane.run('update', over, numbers(plan.weights.all) * cluster.device.update)
    return bars
