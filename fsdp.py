"""
How the train scripts shard a model: by torch's fully_shard, or by our own in fsdp_manual.py, where one can read how it
works. Both get the same units, dtypes and meshes from here, so that their numbers differ in rounding at most.

    model = fsdp.shard(raw_model, mesh, run)     # in place; mesh: (shard), or (replicate, shard), which is HSDP
    opt = fsdp.optimizer(raw_model, run)

A unit is gathered as a whole: some blocks, or what is outside of all blocks (embedding, final norm, head).
"""

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import fsdp_manual
import offload
import optim


def shard(model, mesh, run, experts=(), their_mesh=None):
    """
    Shard a model on the meta device, in place, as the keys ask. Returns what to call in its place.

    experts: modules inside of the blocks that are units of their own, sharded over the ranks of their_mesh, which hold
    the same ones (expert_manual.py).
    """
    config, blocks, size = run.config, model.blocks, run.config.blocks_per_unit
    units = [[*blocks[first : first + size]] for first in range(0, len(blocks), size)]
    options = {'compute_dtype': run.compute_dtype, 'zero_stage': config.zero_stage}
    options |= {'offload': config.cpu_offload == 'params', 'experts': experts, 'their_mesh': their_mesh}
    if config.fsdp_impl == 'manual':
        return fsdp_manual.shard(model, units, mesh, prefetch=config.prefetch, **options)
    return by_torch(model, units, mesh, **options)


def by_torch(
    model, blocks, mesh, compute_dtype=torch.float32, zero_stage=3, offload=False, experts=(), their_mesh=None
):
    """By fully_shard what fsdp_manual.shard does with these arguments. It decides by itself what to gather ahead."""
    sharding = {'mp_policy': MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)}
    if offload:
        sharding['offload_policy'] = CPUOffloadPolicy(pin_memory=mesh.device_type == 'cuda')
    frees = zero_stage == 3
    for module in experts:
        fully_shard(module, mesh=their_mesh, reshard_after_forward=frees, **sharding)
        module.set_gradient_divide_factor(mesh.size())  # an expert has computed tokens of all ranks
        if their_mesh.size(-1) > 1:  # gloo's reduce-scatter can only sum: FSDP divides after it, as for a single rank
            module.set_force_sum_reduction_for_comms(True)
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=frees, **sharding)
    # The root stays gathered after forward, because backward begins with its head.
    return fully_shard(model, mesh=mesh, reshard_after_forward=False, **sharding)


def optimizer(model, run):
    """The optimizer of a sharded model. With cpu_offload its moments are in host memory, or it runs there."""
    opt = optim.from_config(model, run.config, run.home, run.share)
    # Before a checkpoint is loaded, whose moments might not all fit on the GPU.
    return offload.StateOnHost(opt) if run.config.cpu_offload == 'optimizer' else opt


def check(keys, layout, shape):
    """Raise ValueError for a way of sharding that the implementation does not have."""
    if keys['zero_stage'] == 1 and keys['fsdp_impl'] == 'torch':
        raise ValueError('zero_stage=1: expected 3, 2 or, with --fsdp_impl=manual, 1')
    on_cuda = keys['device'].startswith('cuda')
    if on_cuda and keys['cpu_offload'] == 'params' and keys['dtype'] == 'float16':
        raise ValueError(
            'cpu_offload=params with dtype=float16: the loss scale is on the GPU; use bfloat16, or float32'
        )
