"""
How the ranks of a run are arranged: the axes of every script, from the outermost to the innermost, and their checks.

    axes = meshes.fsdp_axes(vars(config), world_size=8)     # {'replicate': 2, 'shard': 2, 'tensor': 2}
    mesh = meshes.make(axes, device, config.timeout_s)      # a DeviceMesh; mesh['shard'] are the ranks along one axis

Ranks with neighbouring numbers are mostly on one node, and ranks along the innermost axis are neighbours. So the axis
whose ranks communicate most comes last. The axes are:

    replica      copies of the model that train alone for a while (train_diloco.py)
    stage        parts of the model's depth (train_pipeline.py); copy: the copies of each stage
    replicate    copies of a sharded model, whose gradients are averaged in every step (HSDP)
    shard        ranks that divide one copy among them; context: those of them that share a sequence
    tensor       ranks that split each matrix
    expert       neighbouring ranks of a shard group that divide the experts of a mixture
"""

import math
from datetime import timedelta

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from huggingface import finetune
from model import LLAMA_STYLE, ModelConfig
from runtime.batches import accumulation_steps, counted


def fsdp_axes(config, world_size):
    """{axis: size} of train_fsdp.py. Axes of size 1 are left out (but 'shard'): they would make groups nobody uses."""
    replicate, tensor = config['replicate_size'], config['tensor_parallel']
    axes = {'replicate': replicate, 'shard': world_size // (replicate * tensor), 'tensor': tensor}
    return {name: size for name, size in axes.items() if size > 1 or name == 'shard'}


def pipeline_axes(config, world_size):
    stages, tensor = config['pipeline_stages'], config['tensor_parallel']
    return {'stage': stages, 'copy': world_size // (stages * tensor), 'tensor': tensor}


def diloco_axes(config, world_size):
    return {'replica': config['num_replicas'], 'shard': world_size // config['num_replicas']}


def expert_axes(axes, expert_parallel):
    """The ranks of `axes` arranged for the experts: ranks along `shard` hold the same ones, along `expert` others."""
    return axes | {'shard': axes['shard'] // expert_parallel, 'expert': expert_parallel}


def make(axes, device, timeout_s):
    """A DeviceMesh of {name: size} over all ranks. Its collectives get our timeout, as the default is half an hour."""
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    for group in mesh.get_all_groups():
        _set_pg_timeout(timedelta(seconds=timeout_s), group)
    return mesh


# --- checks: before the processes meet --------------------------------------------------------------------------------


def ranks_for_batches(config, world_size):
    """
    How many ranks work on different sequences: all of them, or with context_parallel and tensor_parallel, under which
    several ranks work on the same ones, the corresponding fraction.

    Raises ValueError if ranks or tokens cannot be divided so, or for dropout with context_parallel, since the noise of
    the ranks would have to fit together.
    """
    sharing, block_size = config.get('context_parallel', 1), config['block_size']
    refuse_unless_it_divides('context_parallel', sharing, world_size)
    refuse_unless_it_divides('tensor_parallel', config.get('tensor_parallel', 1), world_size // sharing)
    if sharing > 1 and block_size % (2 * sharing):
        nearest = [n * 2 * sharing for n in (block_size // (2 * sharing), block_size // (2 * sharing) + 1) if n > 0]
        raise ValueError(
            f'block_size={block_size} is not a multiple of {2 * sharing}, two chunks for each of '
            f'context_parallel={sharing} ranks: use --block_size={" or ".join(map(str, nearest))}'
        )
    if sharing > 1 and config['dropout'] > 0:
        given = f'dropout={config["dropout"]} with context_parallel={sharing}'
        raise ValueError(f'{given}, whose attention has none: use --dropout=0')
    return world_size // sharing // config.get('tensor_parallel', 1)


def micro_steps(config, world_size):
    """Micro-steps per optimizer step of a run with these keys. Ranks that share their sequences count as one."""
    ranks = ranks_for_batches(config, world_size)
    return accumulation_steps(config['global_batch_size'], config['batch_size'], ranks)


def ranks_per_shard_group(config, world_size):
    """
    How many ranks divide one copy of the model among them: all, or with replicate_size (HSDP) that fraction of them.

    Raises ValueError if the ranks cannot be divided so, or for a zero_stage that the implementation does not have.
    """
    replicate_size, zero_stage = config['replicate_size'], config['zero_stage']
    world_size //= config.get('tensor_parallel', 1)  # each of these ranks holds a part of every matrix
    refuse_unless_it_divides('replicate_size', replicate_size, world_size)
    if zero_stage == 1 and config['fsdp_impl'] == 'torch':
        raise ValueError('zero_stage=1: expected 3, 2 or, with --fsdp_impl=manual, 1')
    on_cuda = config['device'].startswith('cuda')
    if on_cuda and config['cpu_offload'] == 'params' and config['dtype'] == 'float16':
        raise ValueError(
            'cpu_offload=params with dtype=float16: the loss scale is on the GPU; use bfloat16, or float32'
        )
    return world_size // replicate_size


def ranks_of_stage(config, world_size):
    """How many ranks hold the same stage of a pipeline. Raises ValueError for impossible stages or chunks."""
    stages, chunks = config['pipeline_stages'], config['pipeline_chunks']
    refuse_unless_it_divides('pipeline_stages', stages, world_size)
    if chunks > 1 and stages == 1:
        raise ValueError(f'pipeline_chunks={chunks} with pipeline_stages=1: expected 1, or more on 2 or more stages')
    return world_size // stages


def blocks_of_parts(config, parts):
    """
    [number of blocks] of each part of a pipeline. All parts work at the same time and wait for the slowest, so the
    blocks are divided such that the largest amount of work of any part is smallest. The last part also has the head.

    config: a run's keys, with those of the model; n_layer is `parts` or more.
    """
    if parts == 1:
        return [config['n_layer']]
    choices = []
    for last in range(1, config['n_layer'] // parts + 1):
        each, more = divmod(config['n_layer'] - last, parts - 1)
        # Later parts get the one block more, because earlier stages keep the activations of more micro-steps.
        choices.append([each + (part >= parts - 1 - more) for part in range(parts - 1)] + [last])
    head = head_in_blocks(config)
    return min(choices, key=lambda blocks: (max(*blocks[:-1], blocks[-1] + head), -blocks[-1]))


def head_in_blocks(config):
    """The work of the output head in units of a block's, counted in multiplications per token. A token multiplies each
    weight once, and in causal attention on average half of block_size keys and as many values."""
    C, H, K, D, M = (config[key] for key in ('n_embd', 'n_head', 'n_kv_head', 'head_dim', 'mlp_hidden_dim'))
    matrices = 3 if config['arch'] in LLAMA_STYLE else 2
    block = C * (H + 2 * K) * D + H * D * C + matrices * C * M + config['block_size'] * H * D
    return config['vocab_size'] * C / block


def blocks_of_stages(config):
    """[number of blocks] of each stage: the sum over its parts."""
    stages, chunks = config['pipeline_stages'], config.get('pipeline_chunks', 1)
    blocks = blocks_of_parts(config, stages * chunks)
    return [sum(blocks[stage::stages]) for stage in range(stages)]


def check_pipeline(config, stage_ranks):
    """Check the keys of a pipeline; returns [a line for the log]. stage_ranks: ranks_of_stage().

    Raises ValueError unless every part has a block and there are enough micro-steps. With several chunks their number
    must be a multiple of the stages, which otherwise would wait for each other in the order of arXiv 2104.04473.
    """
    stages, chunks, n_layer = config['pipeline_stages'], config['pipeline_chunks'], config['n_layer']
    parts, copies = stages * chunks, ranks_for_batches(config, stage_ranks)
    if n_layer < parts:
        raise ValueError(
            f'n_layer={n_layer} is less than {parts} = pipeline_stages={stages} x pipeline_chunks={chunks}: '
            f'each part needs a block, so use {n_layer} parts or fewer'
        )
    micro_steps = accumulation_steps(config['global_batch_size'], config['batch_size'], copies)
    if micro_steps < stages or (chunks > 1 and micro_steps % stages):
        several = f'a multiple of pipeline_stages={stages}' if chunks > 1 else f'one per stage, {stages}, or more'
        enough = -(-micro_steps // stages) * stages * config['batch_size'] * copies
        raise ValueError(
            f'global_batch_size={config["global_batch_size"]} is {counted(micro_steps, "micro-step")} of batch_size='
            f'{config["batch_size"]} on {counted(copies, "pipeline")}: expected {several}; use '
            f'--global_batch_size={enough}, or another batch_size'
        )
    blocks = blocks_of_parts(config, parts)
    blocks = counted(blocks[0], 'block') if len({*blocks}) == 1 else f'{", ".join(map(str, blocks))} blocks'
    return [
        f'pipeline: {counted(stages, "stage")} x {counted(chunks, "chunk")} of {blocks}; '
        f'{counted(copies, "pipeline")}; bubble {stages - 1}/{chunks * micro_steps} of the work'
    ]


def number_of_replicas(num_replicas, world_size, local_world_size):
    """num_replicas of DiLoCo, or one per node if it is None. Raises ValueError if the ranks cannot be divided so."""
    if num_replicas is None:
        if world_size % local_world_size:
            raise ValueError(f'{world_size} ranks on nodes of {local_world_size}: start equally many on every node')
        return world_size // local_world_size
    refuse_unless_it_divides('num_replicas', num_replicas, world_size)
    return num_replicas


def refuse_unless_it_divides(key, value, world_size):
    if world_size % value:
        divisors = ', '.join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ValueError(
            f'{key}={value} does not divide {world_size} ranks: use one of {divisors}, or start other ranks'
        )


def check_context_parallel(config, pretrained):
    """Raise ValueError for a model whose attention cannot be divided over ranks (context_manual.py)."""
    given = f'context_parallel={config.context_parallel}'
    if config.device.startswith('cuda') and (config.head_dim % 8 or config.head_dim > 256):
        raise ValueError(f'{given} with head_dim={config.head_dim}: flash attention takes multiples of 8 up to 256')
    if not pretrained:
        return
    text, reason = pretrained.config.get_text_config(), None
    rope = getattr(text, 'rope_parameters', None) or getattr(text, 'rope_scaling', None) or {}
    if pretrained.arch not in finetune.OWN_ATTENTION:
        reason = f'its attention is not one that runs here (those of {", ".join(finetune.OWN_ATTENTION)})'
    elif (getattr(text, 'sliding_window', None) or config.block_size) < config.block_size:
        reason = f'it sees {text.sliding_window} tokens back, and block_size={config.block_size} is more'
    elif rope.get('rope_type') in ('dynamic', 'longrope'):
        reason = f'its rotation depends on the length of what a rank has (rope_type={rope["rope_type"]})'
    if reason:
        raise ValueError(f'{given}: {pretrained.arch} cannot share sequences: {reason}; leave it at 1')


def check_expert_parallel(config, model_config, world_size):
    """Raise ValueError for a model whose experts cannot be divided among ranks, or a run that needs whole ones."""
    ranks, given = config.expert_parallel, f'expert_parallel={config.expert_parallel}'
    n_experts = getattr(model_config, 'n_experts', 0)
    if not n_experts and not isinstance(model_config, ModelConfig):
        way = 'use --native=True, or ' if model_config.arch == 'qwen3_moe' else ''
        raise ValueError(
            f'{given} with init_from={config.init_from}: of mixtures model.py computes Qwen3-MoE in this way: '
            f'{way}leave it at 1, FSDP shards all weights'
        )
    if not n_experts:
        raise ValueError(f'{given} with n_experts=0: there are none to divide: leave it at 1, or take a mixture')
    if hasattr(config, 'num_replicas'):
        axes, of = diloco_axes(vars(config), world_size), f'ranks of a replica (num_replicas={config.num_replicas})'
    else:
        axes, of = fsdp_axes(vars(config), world_size), 'ranks that shard the model'
        if config.replicate_size > 1:
            of += f' (replicate_size={config.replicate_size})'
    together = math.gcd(axes['shard'], n_experts)
    if together % ranks:
        divisors = ', '.join(str(n) for n in range(1, together + 1) if together % n == 0)
        raise ValueError(
            f'{given} does not divide n_experts={n_experts} and the {axes["shard"]} {of}: use one of {divisors}, or '
            'start other ranks'
        )
    if config.optimizer == 'muon':
        raise ValueError(
            f'{given} with optimizer=muon, which sends all matrices round the same ranks: use adamw, or leave it at 1'
        )
    if config.activation_checkpointing == 'selective' and config.fsdp_impl == 'torch':
        raise ValueError(
            f'{given} with activation_checkpointing=selective: fully_shard gathers experts inside of what is '
            'checkpointed, which torch refuses: use --fsdp_impl=manual, or --activation_checkpointing=full'
        )


def check_tensor_parallel(config, model_config):
    """Raise ValueError for a model that cannot be cut over ranks, or a run that needs whole matrices."""
    ranks, given = config.tensor_parallel, f'tensor_parallel={config.tensor_parallel}'
    if not isinstance(model_config, ModelConfig):
        raise ValueError(f'{given}: models of transformers are not cut; leave it at 1, FSDP shards them')
    if config.optimizer == 'muon':
        raise ValueError(
            f'{given} with optimizer=muon, which orthogonalises whole matrices: use adamw, or leave it at 1'
        )
    if config.optimizer_dtype == 'int8':
        raise ValueError(
            f'{given} with optimizer_dtype=int8, whose blocks are not cut: use --optimizer_dtype=bfloat16, '
            'or leave it at 1'
        )
    sizes = {key: getattr(config, key) for key in ('n_head', 'n_kv_head', 'mlp_hidden_dim')}
    units = dict.fromkeys(sizes, ranks)  # of which the sizes have to be multiples
    names = {key: f'{key}={size}' for key, size in sizes.items()}
    sizes['vocab_size'], units['vocab_size'] = model_config.padded_vocab_size, math.lcm(ranks, 64)
    names['vocab_size'] = f'the padded vocabulary of {sizes["vocab_size"]}'
    sharing = vars(config).get('context_parallel', 1)
    sizes['block_size'], units['block_size'] = config.block_size // sharing, math.lcm(ranks * sharing, 64)
    names['block_size'] = f'block_size={config.block_size}'
    if sharing > 1:
        names['block_size'] = f'the {sizes["block_size"]} tokens of a rank, block_size / context_parallel={sharing}'
    for key, size in sizes.items():
        if size % ranks:
            below = getattr(config, key) // units[key] * units[key]
            # Suggest no smaller vocabulary, for that would need another tokenizer.
            others = [n for n in (below, below + units[key]) if n and (key != 'vocab_size' or n > below)]
            common = math.gcd(*sizes.values())
            divisors = [str(n) for n in range(2, common + 1) if common % n == 0]
            or_so = f', or tensor_parallel={" or ".join(divisors)} with all sizes as they are' if divisors else ''
            advice = f'use --{key}={" or ".join(map(str, others))}{or_so}'
            raise ValueError(f'{given} does not divide {names[key]}: {advice}')
