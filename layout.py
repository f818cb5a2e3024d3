"""
How the ranks of a run divide a model, its data and a step. It is found once, from the keys, and does not change.

    layout = Layout.of(vars(config), 'fsdp', ranks=16)     # with replicate_size=2, tensor_parallel=2: shard=4
    layout.reading                                         # 8 ranks read different sequences
    mesh = layout.mesh(device, config.timeout_s)           # DeviceMesh (replicate, shard, tensor)

Every size is 1 or more, and 1 means that nothing is divided in this way. The ranks are the product of five of them:

    ranks = replica x stage x replicate x shard x tensor       from the outermost to the innermost

Ranks with neighboring numbers are mostly on one node, so those that communicate most are innermost. The other two
divide what is in these five: ranks that share a sequence (context) are neighbors among the ranks outside of `tensor`,
and shard weights like any others; ranks that divide the experts of a mixture (expert) are neighbors within `shard`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

KEYS = {  # the size of an axis: the key that sets it. A script without the key has 1.
    'replica': 'num_replicas',  # copies of the model that train alone for a while (train_diloco.py, train_pool.py)
    'stage': 'pipeline_stages',  # parts of its depth
    'chunks': 'pipeline_chunks',  # parts of the model on each stage
    'context': 'context_parallel',  # ranks that share each sequence
    'tensor': 'tensor_parallel',  # ranks that split each matrix, and work on the same tokens
    'replicate': 'replicate_size',  # copies of what is sharded, whose gradients are averaged in every step (HSDP)
    'expert': 'expert_parallel',  # ranks that divide the experts
}
COPIES = ('ddp', 'pipeline')  # in these each rank outside of the other axes is one more copy; in the others a shard


@dataclass(frozen=True)
class Layout:
    strategy: str  # 'ddp', 'fsdp', 'diloco', 'pool', 'pipeline', 'deepspeed'
    ranks: int  # that share a global batch: in a pool those of all jobs, so train_pool.py makes a mesh of its own
    replica: int
    stage: int
    chunks: int
    replicate: int
    shard: int
    context: int
    tensor: int
    expert: int
    micro_steps: int  # of an optimizer step, on each rank

    @classmethod
    def of(cls, keys, strategy, ranks):
        """
        From a script's keys, of which num_replicas, pipeline_stages and global_batch_size have values.

        Raises ValueError if ranks or sequences cannot be divided so.
        """
        size = {axis: keys.get(key, 1) for axis, key in KEYS.items()}
        refuse_unless_they_divide(ranks, size, 'replica', 'stage', 'context', 'tensor')
        refuse_unless_they_divide(ranks, size, 'replica', 'stage', 'tensor', 'replicate')
        left = ranks // (size['replica'] * size['stage'] * size['tensor'] * size['replicate'])
        if strategy in COPIES:
            size['replicate'], left = left, 1
        reading = ranks // (size['stage'] * size['context'] * size['tensor'])
        micro_steps = accumulation_steps(keys['global_batch_size'], keys['batch_size'], reading)
        return cls(strategy, ranks, shard=left, micro_steps=micro_steps, **size)

    @property
    def reading(self):
        """How many ranks read different sequences. Those that work on the same ones count as one."""
        return self.ranks // self.sharing

    @property
    def sharing(self):
        """How many ranks work on the same sequences."""
        return self.stage * self.context * self.tensor

    def batch_line(self, batch_size, block_size):
        """The batch arithmetic with its numbers, on one line."""
        sequences = batch_size * self.micro_steps * self.reading
        rank_factor = (self.reading, 'rank' if self.sharing == 1 else 'rank group')
        factors = ((batch_size, 'sequence'), (self.micro_steps, 'micro-step'), rank_factor)
        per_step = ' x '.join(counted(number, noun) for number, noun in factors)
        return (
            f'{per_step} = {counted(sequences, "sequence")} x {counted(block_size, "token")} '
            f'= {sequences * block_size:,} tokens per step'
        )

    @property
    def is_diloco(self):
        return self.strategy in ('diloco', 'pool')

    def axes(self):
        """{axis of the DeviceMesh: size}. Axes of size 1 make groups that nobody uses, so they are left out, unless the
        script asks for their group."""
        always = {'diloco': ('replica', 'shard'), 'pipeline': ('stage', 'replicate', 'tensor')}
        kept = always.get(self.strategy, ('shard',))
        names = ('replica', 'stage', 'replicate', 'shard', 'tensor')
        return {name: getattr(self, name) for name in names if name in kept or getattr(self, name) > 1}

    def mesh(self, device, timeout_s):
        """A DeviceMesh of axes(). Collective."""
        return make_mesh(self.axes(), device, timeout_s)

    def expert_mesh(self, device, timeout_s):
        """The ranks of mesh() arranged for the experts: ranks along `shard` hold the same ones, along `expert` others.
        Collective."""
        axes = self.axes() | {'shard': self.shard // self.expert, 'expert': self.expert}
        return make_mesh(axes, device, timeout_s)


def make_mesh(axes, device, timeout_s):
    """A DeviceMesh of {name: size} over all ranks. Its collectives get our timeout, as the default is half an hour."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.distributed_c10d import _set_pg_timeout

    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    for group in mesh.get_all_groups():
        _set_pg_timeout(timedelta(seconds=timeout_s), group)
    return mesh


def without(mesh, axis):
    """The mesh of the other axes: the ranks that have the same place along this one."""
    return mesh[tuple(name for name in mesh.mesh_dim_names if name != axis)]


def choose_sizes(config, strategy, ranks, ranks_per_node, kept=None):
    """
    Give a value to those keys of the layout that are None: one stage for each rank of a matrix's, one replica per node,
    and a global batch of one micro-step; in a pipeline of one for each stage, which fills it just once.

    kept: the global batch of the run in out_dir, which goes on with it on any ranks. Raises ValueError if it cannot.
    """
    keys = vars(config)
    if keys.get('pipeline_stages', 1) is None:
        config.pipeline_stages = max(1, ranks // config.tensor_parallel)
    if keys.get('num_replicas', 1) is None:
        if ranks % ranks_per_node:
            raise ValueError(f'{ranks} ranks on nodes of {ranks_per_node}: start equally many on every node')
        config.num_replicas = ranks // ranks_per_node
    if config.global_batch_size is None:
        layout = Layout.of({**keys, 'global_batch_size': 0}, strategy, ranks)
        config.global_batch_size = kept or config.batch_size * layout.reading * layout.stage
        if config.global_batch_size % (config.batch_size * layout.reading):
            smaller = range(config.batch_size, 0, -1)
            fits = next((n for n in smaller if kept % (n * layout.reading) == 0), None)
            raise ValueError(
                f'out_dir={config.out_dir} has a run of global_batch_size={kept}, not a multiple of batch_size='
                f'{config.batch_size} x {counted(layout.reading, "rank")}: use '
                + (f'--batch_size={fits}' if fits else f'a number of ranks that divides {kept}')
            )


def refuse_unless_they_divide(ranks, size, *axes):
    """Raise ValueError unless each of these axes divides what those before it leave of the ranks."""
    left, of, taken_by = ranks, f'{ranks} ranks', []
    for axis in axes:
        given = f'{KEYS[axis]}={size[axis]}'
        if left % size[axis]:
            divisors = ', '.join(str(n) for n in range(1, left + 1) if left % n == 0)
            raise ValueError(f'{given} does not divide {of}: use one of {divisors}, or start other ranks')
        if size[axis] > 1:
            left //= size[axis]
            taken_by.append(given)
            are_left = f'{counted(left, "rank")} that {"is" if left == 1 else "are"} left'
            of = f'the {are_left} of {ranks} by {" and ".join(taken_by)}'


# --- what a rank has --------------------------------------------------------------------------------------------------


class Ranks(NamedTuple):
    """Ranks that hold something together: which one this is, how many there are, and their process group."""

    rank: int
    size: int
    group: str  # its name: custom operators take no objects

    @classmethod
    def of(cls, mesh):
        """From a DeviceMesh of one dimension."""
        return cls(mesh.get_local_rank(), mesh.size(), mesh.get_group().group_name)


class Slice(NamedTuple):
    """A rank's part of a parameter: ranges of its rows (dim 0) or columns (dim 1), one behind the other."""

    shape: tuple  # torch.Size of the whole parameter
    dim: int | None  # None: the parameter is not cut
    ranges: tuple  # ((first, length), ...)

    def of(self, whole):
        """This rank's part of the whole parameter; a view, unless there are several ranges."""
        import torch  # here, so that --help is quick

        if self.dim is None:
            return whole
        parts = [whole.narrow(self.dim, *one) for one in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


@dataclass
class Share:
    """What this rank has of the model's parameters, which keep the names of the whole model. FSDP's sharding by rows
    is not in it: a DTensor says so itself."""

    slices: dict = field(default_factory=dict)  # {name: Slice}, where the rank has some rows or columns
    tensor: Ranks | None = None  # tensor parallelism: the ranks that have the other parts of the same matrices
    elsewhere: frozenset = frozenset()  # names that other stages of a pipeline hold
    of_base: frozenset = frozenset()  # frozen weights that init_from has, so that checkpoints leave them out
    first_value: Callable | None = None  # in place of the model's own initial_value

    def initial_value(self, model, name, parameter, seed, device):
        """This rank's part of the first value of a parameter, so that the model is the same for any number of ranks."""
        import torch

        whole_value, part = self.first_value or model.initial_value, self.slices.get(name)
        if part is None:
            return whole_value(name, parameter, seed, device)
        return part.of(whole_value(name, torch.empty(part.shape, device='meta'), seed, device))


WHOLE = Share()  # of a rank that has everything


# --- counting ---------------------------------------------------------------------------------------------------------

FP32 = 4  # bytes of a number of the master weights, their gradients and moments


def numbers(parameters):
    return sum(parameter.numel() for parameter in parameters)


def accumulation_steps(global_batch_size, batch_size, ranks):
    """
    Micro-steps per optimizer step: global_batch_size = batch_size * ranks * accumulation_steps, in sequences.

    Raises ValueError if that has no solution in whole numbers; the message names the batch size that has one, since a
    run that goes on keeps its global batch, and the nearest global batches.
    """
    per_micro_step = batch_size * ranks
    steps, rest = divmod(global_batch_size, per_micro_step)
    if rest:
        fits = [f'--batch_size={n}, or' for n in range(1, batch_size) if global_batch_size % (n * ranks) == 0]
        nearest = [n * per_micro_step for n in (steps, steps + 1) if n > 0]
        raise ValueError(
            f'global_batch_size={global_batch_size} is not a multiple of {per_micro_step} = batch_size={batch_size} x '
            f'{counted(ranks, "rank")}: use {" ".join([*fits[-1:], ""])}--global_batch_size='
            f'{" or ".join(map(str, nearest))}'
        )
    return steps


def counted(number, noun):
    return f'{number:,} {noun}' if number == 1 else f'{number:,} {noun}{"es" if noun.endswith("s") else "s"}'
