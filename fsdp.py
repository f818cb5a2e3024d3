"""
How the train scripts shard a model: by torch's fully_shard, or by our own in fsdp_manual.py, where one can read how it
works. Both get the same units, dtypes and meshes from here, so that their numbers differ in rounding at most.

    model = fsdp.shard(raw_model, mesh, run)     # in place; mesh: (shard), or (replicate, shard), which is HSDP
    opt = fsdp.optimizer(raw_model, run)

A unit is gathered as a whole: some blocks, or what is outside of all blocks (embedding, final norm, head). What a rank
then holds and sends, planning/fsdp.py predicts.
"""

import contextlib

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import fsdp_manual
import optim
from system import processes


def shard(model, mesh, run, experts=(), their_mesh=None):
    """
    Shard a model on the meta device, in place, as the keys ask. Returns what to call in its place.

    experts: modules inside of the blocks that are units of their own, sharded over the ranks of their_mesh, which hold
    the same ones (expert_manual.py).
    """
    refuse_scalars(model)
    config, blocks, size = run.config, model.blocks, run.config.blocks_per_unit
    units = [[*blocks[first : first + size]] for first in range(0, len(blocks), size)]
    options = {'compute_dtype': run.compute_dtype, 'zero_stage': config.zero_stage}
    options |= {'offload': config.cpu_offload == 'params', 'experts': experts, 'their_mesh': their_mesh}
    if config.fsdp_impl == 'manual':
        return fsdp_manual.shard(model, units, mesh, prefetch=config.prefetch, **options)
    return by_torch(model, units, mesh, **options)


def refuse_scalars(model):
    """Raise ValueError if the model has a parameter without dimensions, as a model's own code may have: there are no
    rows to divide among ranks."""
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        advice = 'train it under DDP, evaluate it with --shard=none'
        raise ValueError(f'parameter {scalars[0]} has no dimensions, so it cannot be sharded: {advice}')


def by_torch(model, units, mesh, compute_dtype=torch.float32, zero_stage=3, offload=False, experts=(), their_mesh=None):
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
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=frees, **sharding)
    # The root stays gathered after forward, because backward begins with its head.
    return fully_shard(model, mesh=mesh, reshard_after_forward=False, **sharding)


@contextlib.contextmanager
def gathered(model, run):
    """A context in which each rank has all weights, in the compute dtype, so that ranks can make different numbers of
    forward passes without gradients. Collective where it begins. fsdp_manual.py has no room for that at stage 3."""
    is_torch = run.config.fsdp_impl == 'torch'
    if is_torch:
        model.set_reshard_after_forward(False)
    eager = torch.compiler.set_stance('force_eager') if run.config.compile else contextlib.nullcontext()
    with torch.no_grad(), eager:  # this pass gathers the weights, and those after it find them
        model(torch.zeros(1, 1, dtype=torch.int64, device=run.device), then=lambda hidden, _: hidden)
    yield
    processes.reshard(model)
    if is_torch:  # as shard() has set it
        model.set_reshard_after_forward(run.config.zero_stage == 3)
        model.set_reshard_after_forward(False, recurse=False)


def optimizer(model, run):
    """The optimizer of a sharded model. With cpu_offload its moments are in host memory, or it runs there."""
    opt = optim.from_config(model, run.config, run.home, run.share)
    if run.config.cpu_offload == 'optimizer':
        from offload import StateOnHost

        opt = StateOnHost(opt)  # before a checkpoint is loaded, whose moments might not all fit on the GPU
    return opt
