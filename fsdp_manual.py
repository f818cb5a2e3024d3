"""
Fully sharded data parallelism by hand: what `fully_shard` does, in one file to read from top to bottom.

    model = fsdp_manual.shard(raw_model, raw_model.blocks, mesh, compute_dtype=torch.bfloat16, zero_stage=3)
    optimizer = torch.optim.AdamW(raw_model.parameters())  # they are sharded now: each rank steps its own slices
    model(x).backward()  # all-gathers the weights and reduce-scatters the gradients by itself

Every parameter becomes a DTensor, of which each rank keeps a slice of the rows. This slice is the fp32 master weight;
only a parameter that is not trained keeps its own dtype. Weights are gathered by the *unit*, which is usually one
block. Parameters outside of all blocks (embedding, final norm, head) are called the root. A root parameter that is
larger than a block is a unit of its own, and the others together are one more.

Block i under stage 3, between its neighbors. Time runs to the right, and each line is a stream (on a CPU, gloo's
threads gather and reduce):

    forward     gather   | gather i+1  |             backward     gather   | gather i-1  |
                compute  |   block i   | block i+1                compute  |   block i   | block i-1
                                                                  reduce   |  reduce i+1 | reduce i

When is a weight whole?  From before_forward() to after_forward(), and from before_backward() to after_backward().
Who frees it?            Nobody has to. All blocks of a model take turns in the same memory, a Room, where the next
                         block overwrites the last. The tensors that autograd saved of block i's weights in forward lie
                         in this room, too, so they are valid again as soon as block i has been gathered back into it.
                         The root has rooms of its own.
Where does its gradient  In .grad of the whole weight until after_backward(), then in a flat buffer until the ranks have
wait?                    summed it, and from then on in .grad of the DTensor, where clipping and the optimizer find it.
What crosses the wire?   In a gather each rank receives (ranks - 1) / ranks of the unit, in compute_dtype (frozen nf4
                         weights as the bytes in which they are packed). A reduction moves as many numbers; gradients
                         are summed in fp32, and send_gradients() says in which dtype they travel.
                         With n blocks, stage 3 takes 2n - 1 gathers and n reductions of blocks for one forward and
                         backward pass.

The stages of ZeRO (arXiv 1910.02054) shard the optimizer's moments (1), the gradients as well (2), and the weights as
well (3). In this code the stage decides how long a block stays whole; see reshard_unit() and finish_backward():

    3  while it computes, one block at a time       2  from its forward to its backward, each block in its own room
    1  from the first forward of an optimizer step to the last backward

With expert parallelism (expert_manual.py) different ranks hold different experts, so an expert can be sharded only over
those ranks that hold the same one. They form a mesh of their own, and a block with experts has two units: the experts,
and the rest. A ShardGroup holds the process group, the room and the buffers for one of the two. The two units of a
block are gathered and reduced one after the other, and everything said above holds for each.

set_requires_gradient_sync() decides where the gradients of several micro-steps add up. With True (the default) each
micro-step sends its gradients, and a rank keeps the sum of its shard. With False nothing is sent, and every rank keeps
a whole gradient in fp32, which is 4 bytes for every parameter of the model.
"""

import itertools
import math
import time
from collections import Counter, namedtuple
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.cuda import Event
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_flatten

from exchange.collectives import all_gather, reduce_scatter

GATHERABLE = (torch.float32, torch.bfloat16, torch.float16)  # what gloo and NCCL both carry and both can sum


def shard(
    model,
    blocks,
    mesh,
    compute_dtype=torch.float32,
    zero_stage=3,
    prefetch=1,
    offload=False,
    experts=(),
    their_mesh=None,
):
    """Shard the parameters of `model` over the ranks of `mesh`, in place, and return the ShardedModel around it.

    blocks: modules of the model in the order in which they run; or lists of consecutive modules, each list one unit.
    mesh: DeviceMesh of one dimension, or of two: (replicate, shard), which is HSDP.
    compute_dtype: dtype of the whole weights, and so of the computation. Shards are fp32, whatever dtype the parameters
        had, unless they are not trained: then they keep their dtype. uint8 stays uint8 when it is whole, too.
    zero_stage: 3, 2 or 1, see above. prefetch: blocks gathered ahead of the one at work; 0 = no overlap.
    offload: keep shards and their gradients in the host's memory, where the optimizer then runs.
    experts: modules inside of the blocks whose parameters are sharded over their_mesh, the ranks that hold the same
        experts; it has as many dimensions as mesh. Their gradients, too, are divided by the number of ranks in mesh.

    Call it after activation checkpointing and torch.compile of the blocks, and before the optimizer is made. A model on
    the meta device stays there, and you call to_empty() and initialize it afterwards.
    Raises ValueError, with one line, for blocks or parameters that cannot be sharded, before it changes anything.
    """
    blocks = [[*block] if isinstance(block, (list, tuple, nn.ModuleList)) else [block] for block in blocks]
    check_blocks(model, blocks)
    units, root = assign_parameters(model, blocks)
    theirs = {parameter for module in experts for parameter in module.parameters()}
    units = [split_unit(parameters, theirs) for parameters in units]
    if compute_dtype not in GATHERABLE:
        raise ValueError(f'compute_dtype={compute_dtype}: expected one of {GATHERABLE}')
    meshes = [mesh, their_mesh][: 2 if theirs else 1]
    sharded = ShardedModel(model, meshes, units, root, compute_dtype, zero_stage, prefetch, offload)
    for units, modules in zip(sharded.blocks, blocks, strict=True):
        sharded.hook_block(units, first=modules[0], last=modules[-1])
    sharded.hook_root()
    return sharded


def check_blocks(model, blocks):
    """Raise ValueError unless `blocks` lists, each once, all modules of the model that are of the same types."""
    listed = [module for modules in blocks for module in modules]
    for number, modules in enumerate(blocks):
        if not any(True for module in modules for _ in module.parameters()):
            raise ValueError(f'block {number} has no parameters, so nothing to shard: leave it out of blocks')
    kinds = {type(module) for module in listed}
    inside = {inner for module in listed for inner in module.modules() if inner is not module}
    wanted = [module for module in model.modules() if type(module) in kinds and module not in inside]
    if not listed or len(listed) != len(wanted) or set(listed) != set(wanted):
        raise ValueError(
            f'blocks lists {len(listed)} modules ({", ".join(sorted(kind.__name__ for kind in kinds))}): expected all '
            f'that the model has, {len(wanted)}, each once and none inside of another'
        )


def assign_parameters(model, blocks):
    """(units of the blocks, units of the root), each a list of {parameter: [(module, attribute), ...]}.

    A tied parameter has several places. A parameter of the root that is larger than any block, like an embedding, is a
    unit of its own; the rest of the root is one unit. Raises ValueError for a parameter that cannot be sharded.
    """
    units, root = [{} for _ in blocks], {}
    unit_of = {}  # module of a block, or any module inside of it -> its unit
    for unit, modules in zip(units, blocks, strict=True):
        for module in modules:
            unit_of |= dict.fromkeys(module.modules(), unit)
    first_unit = {}  # parameter -> the unit in which it was met first
    for module_name, module in model.named_modules():
        unit = unit_of.get(module, root)
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f'{module_name}.{attribute}'.lstrip('.')
            if isinstance(parameter, DTensor):
                raise ValueError(f'parameter {name} is sharded already: shard a model once, with one implementation')
            is_known = parameter.is_floating_point() or (parameter.dtype == torch.uint8 and unit is not root)
            if parameter.dim() == 0 or not is_known:
                kind = f'{parameter.dtype} of shape {tuple(parameter.shape)}'
                raise ValueError(
                    f'parameter {name} is {kind}: only floats with rows can be sharded, and in blocks uint8 with rows'
                )
            if first_unit.setdefault(parameter, unit) is not unit:
                raise ValueError(f'{name} is tied to a parameter of another unit: have both in one block, or in none')
            unit.setdefault(parameter, []).append((module, attribute))

    largest_block = max(sum(parameter.numel() for parameter in unit) for unit in units)  # a byte counts as a number
    large = [{parameter: places} for parameter, places in root.items() if parameter.numel() > largest_block]
    rest = {parameter: places for parameter, places in root.items() if parameter.numel() <= largest_block}
    return units, large + ([rest] if rest else [])


def split_unit(parameters, theirs):
    """Split a block's parameters into two units, those not in `theirs` and those in it, which may be none; into one if
    `theirs` is empty."""
    parts = [{}, {}]
    for parameter, places in parameters.items():
        parts[parameter in theirs][parameter] = places
    return parts if theirs else parts[:1]


class Weight:
    """One parameter: this rank's slice, the whole weight in the unit's room, and its place in the flat buffers.

    A flat buffer holds bytes, (ranks, bytes per rank), because a unit may have weights of two dtypes. Rank r's slice of
    this parameter is in row r, columns offset:offset+nbytes. It has room for ceil(rows/ranks) rows, which are `size`
    numbers. The last ranks may hold fewer rows, or none, and the rest is padding.
    """

    def __init__(self, places, parameter, group, offset, device, compute_dtype):
        self.places = places  # [(module, attribute)]; several if tied
        self.shape, self.stride = parameter.shape, torch.empty(parameter.shape, device='meta').stride()
        self.dtype = compute_dtype if parameter.is_floating_point() else parameter.dtype  # of the whole weight
        dtype = torch.float32 if parameter.requires_grad else parameter.dtype
        placements = (Replicate(),) * (group.mesh.ndim - 1) + (Shard(0),)
        self.spec = DTensorSpec(group.mesh, placements, TensorMeta(self.shape, self.stride, dtype))
        rows = math.ceil(self.shape[0] / group.ranks)  # as Shard(0) cuts: 10 rows on 4 ranks are 3, 3, 3, 1
        columns = self.shape[1:].numel()
        first = min(group.rank * rows, self.shape[0])
        end = min(first + rows, self.shape[0])
        self.offset, self.size = offset, rows * columns
        self.nbytes = self.size * self.dtype.itemsize
        self.local_size = (end - first) * columns  # without padding
        device = 'meta' if parameter.is_meta else device
        local = parameter.detach()[first:end].to(device, dtype, copy=True)
        self.local_shape = local.shape
        self.register(nn.Parameter(self.as_dtensor(local), requires_grad=parameter.requires_grad))
        self.sharded = self.whole = None  # the DTensor; the whole weight, from Unit.move_into()
        self.gradient_sum = None  # over micro-steps that were not reduced

    def as_dtensor(self, local):
        """The DTensor whose slice on this rank is `local`. (DTensor.from_local() would move it to the GPU.)"""
        return DTensor(local, self.spec, requires_grad=False)

    def register(self, parameter):
        """Make `parameter` what the modules see, under all its names."""
        for module, attribute in self.places:
            module._parameters[attribute] = parameter

    def local_shard(self, pin):
        """This rank's slice. The DTensor is looked up each time, since to_empty() and similar calls replace it."""
        module, attribute = self.places[0]
        if self.sharded is not module._parameters[attribute]:
            self.sharded = module._parameters[attribute]
            if pin:  # page-locked, so that the copy to the GPU does not hold up the host
                self.sharded._local_tensor = self.sharded._local_tensor.pin_memory()
        return self.sharded._local_tensor

    def take_gradient(self):
        """Take the gradient that backward left in the whole weight, plus the sum of earlier micro-steps; or None."""
        gradient, total = self.whole.grad, self.gradient_sum
        self.whole.grad = self.gradient_sum = None
        if gradient is None:
            return total
        return gradient if total is None else total.add_(gradient)

    def add_to_shard(self, flat):
        """Add this rank's slice of the averaged gradient (size numbers, padding at the end) to .grad of the DTensor."""
        local = flat[: self.local_size].view(self.local_shape)
        if self.sharded.grad is None:
            self.sharded.grad = self.as_dtensor(local)
        else:
            self.sharded.grad._local_tensor.add_(local)


class Room:
    """Memory for the whole weights of one unit at a time, the occupant. Under stage 3 all blocks share one room."""

    def __init__(self, nbytes, device):
        self.flat, self.occupant = torch.empty(nbytes, dtype=torch.uint8, device=device), None

    def has_memory(self, wanted):
        """Allocate the memory, if it is wanted, or free it. The tensors that lie in this room stay as they are."""
        storage = self.flat.untyped_storage()
        if wanted != (storage.size() > 0):
            storage.resize_(self.flat.nbytes if wanted else 0)


class ShardGroup:
    """The ranks over which some units are sharded, and the memory in which the units of blocks take turns."""

    def __init__(self, mesh):
        self.mesh, self.process_group = mesh, mesh.get_group(mesh.ndim - 1)
        self.replicate_group = mesh.get_group(0) if mesh.ndim == 2 else None
        self.ranks, self.rank = dist.get_world_size(self.process_group), dist.get_rank(self.process_group)
        self.reduction = None  # the one in flight, see start_reduce_scatter()
        self.reduce_buffers = {}

    def make_room(self, units, device, shared, prefetch):
        """Give these units, at most one per block, their rooms: a single one for all if it is shared, else one each."""
        self.units, largest = units, max(unit.nbytes for unit in units)
        room = Room(largest, device) if shared else None
        for unit in units:
            unit.move_into(room or Room(unit.nbytes, device))
        buffers = max(1, prefetch) if self.ranks > 1 else 0  # alone, a gather is a copy on this device
        self.free_buffers = [Room(largest, device).flat for _ in range(buffers)]


class Unit:
    """
    Parameters that are gathered together and reduced together. is_whole: whether modules see their whole weights.

        state                   is_whole   room.occupant     in ShardedModel.in_flight
        sharded                 no         another or None   no
        on its way (prefetch)   no         another or None   yes: it arrives in a buffer
        at work                 yes        this unit         no
        done for now (stage 3)  no         this unit         no: it stays until another unit needs the room
    """

    def __init__(self, parameters, index, group, device, compute_dtype):
        """parameters: {parameter: [(module, attribute), ...]}. index: of the block, None for the root."""
        self.index, self.group, self.weights, self.shard_bytes = index, group, [], 0

        # Matmuls want weights at multiples of 16 bytes (grouped_mm takes no others), which a vector may not end at, nor
        # a matrix with odd rows. So first come matrices whose rows are such multiples, then the other matrices.
        # uint8 comes last, because it may end at any byte, and no float may begin there.
        def order(parameter):
            row = parameter[:1].numel() * compute_dtype.itemsize
            return not parameter.is_floating_point(), -parameter.dim(), row % 16 != 0

        for parameter, places in sorted(parameters.items(), key=lambda item: order(item[0])):
            self.weights.append(Weight(places, parameter, group, self.shard_bytes, device, compute_dtype))
            self.shard_bytes += self.weights[-1].nbytes  # per rank, with padding
        self.shard_bytes += -self.shard_bytes % compute_dtype.itemsize  # as the next rank's slice begins with floats
        self.nbytes = group.ranks * self.shard_bytes
        # The slices of a single parameter, rank after rank, are the whole parameter, so it can be gathered right into
        # its room. A block cannot, because another one computes in that room meanwhile.
        self.needs_no_buffer = group.ranks == 1 or (index is None and len(self.weights) == 1)
        self.is_whole = self.awaits_backward = False

    def move_into(self, room):
        """Lay out the whole weights in a room; fill() will bring their values."""
        self.room, self.places, offset, ranks = room, [], 0, self.group.ranks
        for weight in self.weights:
            # set_() rather than a view of the room: a view shares the room's version counter, so that autograd would
            # take every refill of the room for a change of the weights that it has saved.
            place = (room.flat.untyped_storage(), offset // weight.dtype.itemsize, weight.shape, weight.stride)
            whole = torch.empty(0, dtype=weight.dtype, device=room.flat.device).set_(*place)
            weight.whole = nn.Parameter(whole, requires_grad=weight.dtype.is_floating_point)
            self.places.append(room.flat[offset : offset + ranks * weight.nbytes].view(ranks, weight.nbytes))
            offset += ranks * weight.nbytes

    def load_shards(self, row, pin):
        """Copy this rank's slices into `row` of a flat buffer, which casts them to the compute dtype."""
        shards = [weight.local_shard(pin).flatten() for weight in self.weights]
        if shards[0].device != row.device:  # from the host: cast on the GPU, after the copy
            shards = [local.to(row.device, non_blocking=True) for local in shards]
        places = [row[weight.offset : weight.offset + weight.nbytes].view(weight.dtype) for weight in self.weights]
        places = [place[: weight.local_size] for weight, place in zip(self.weights, places, strict=True)]
        torch._foreach_copy_(places, shards)

    def fill(self, gathered):
        """Copy a flat buffer (ranks, bytes per rank) into the room, where all slices of a weight lie together."""
        sizes, places = [weight.nbytes for weight in self.weights], self.places
        torch.split_with_sizes_copy(gathered[:, : sum(sizes)], sizes, dim=1, out=places)

    def register_whole(self):
        """Let the modules see whole weights."""
        for weight in self.weights:
            weight.whole.requires_grad_(weight.sharded.requires_grad)  # it may have been frozen since
            weight.register(weight.whole)
        self.is_whole = True

    def register_shards(self):
        """Let the modules, and with them the optimizer and checkpoints, see the shards again."""
        if self.is_whole:
            for weight in self.weights:
                weight.register(weight.sharded)
        self.is_whole = False

    def has_gradients(self):
        return any(weight.whole.grad is not None or weight.gradient_sum is not None for weight in self.weights)


class Lane:
    """Where work runs beside the computation: a stream of the GPU, or the threads that run gloo's collectives."""

    def __init__(self, device):
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == 'cuda' else None

    def begin(self):
        """A context for work that has to wait for all that was issued so far. The host does not wait."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)

    def run(self, collective, output, source, group):
        """Start a collective. The wait() of its handle holds up the host (gloo) or the current stream (NCCL)."""
        if self.stream is None:
            return collective(output, source, group=group, async_op=True)
        collective(output, source, group=group)
        return self.mark()

    def mark(self):
        """A handle for the end of all that was issued in this lane so far; None on a CPU."""
        return self.stream.record_event() if self.stream else None


def differentiable(tree):
    """The tensors among the inputs or outputs of a module that get a gradient."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


# A reduction in flight: the weights whose gradients travel, those among them that have no gradient on this rank, memory
# for the average, what is sent (kept alive until it has left), what arrives (under gloo), and the handle to wait for.
Reduction = namedtuple('Reduction', 'weights unused average sent received handle')


class ShardedModel(nn.Module):
    """A model whose units are gathered before they compute and reduced after their backward. Call it like the model.

    As under DistributedDataParallel, `module` is the model, and its parameters keep their names. The methods that the
    training loop calls have the same names as in fully_shard.
    """

    def __init__(self, model, meshes, units, root, compute_dtype, zero_stage, prefetch, offload):
        """meshes: one, or two if blocks have two units. units: for each block a list with {parameter: places} of
        each of its units. root: {parameter: places} of each unit of the root."""
        super().__init__()
        self.module, self.zero_stage, self.offload = model, zero_stage, offload
        self.on_cuda = meshes[0].device_type == 'cuda'
        self.device = torch.device('cuda', torch.cuda.current_device()) if self.on_cuda else torch.device('cpu')
        self.compute_dtype = compute_dtype
        self.groups, self.world_size = [ShardGroup(mesh) for mesh in meshes], meshes[0].size()

        home = 'cpu' if offload else self.device
        self.blocks = [
            [
                Unit(part, index, group, home, compute_dtype)
                for part, group in zip(parts, self.groups, strict=True)
                if part  # a dense block of a mixture has no experts
            ]
            for index, parts in enumerate(units)
        ]
        for group in self.groups:
            of_blocks = [unit for unit in itertools.chain(*self.blocks) if unit.group is group]
            group.make_room(of_blocks, self.device, zero_stage == 3, prefetch)
        self.root = [Unit(parameters, None, self.groups[0], home, compute_dtype) for parameters in root]
        for unit in self.root:
            unit.move_into(Room(unit.nbytes, self.device))
        self.units = [*itertools.chain(*self.blocks), *self.root]

        self.prefetch = prefetch
        self.gather_lane, self.reduce_lane = Lane(self.device), Lane(self.device)
        self.in_flight = {}  # unit -> (buffer, handle) of gathers that were started ahead
        self.sync_gradients = self.reshards_root = True
        self.in_backward = self.holds_sums = False  # holds_sums: gradients of a micro-step that was not reduced
        self.alive = 0
        self.reset_counts()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def set_requires_gradient_sync(self, sync):
        """Whether backward reduces gradients over the ranks, or keeps the sum of micro-steps on each rank."""
        self.sync_gradients = sync

    def set_reshard_after_backward(self, reshard, recurse=False):
        """Whether the next backward pass ends with the root resharded, for the optimizer's step. Blocks: zero_stage."""
        self.reshards_root = reshard

    # --- when -----------------------------------------------------------------------------------------------------

    def hook_block(self, units, first, last):
        """Keep a block whole while it computes, in forward and in backward. first, last: of its modules, often one."""
        index = units[0].index

        def before_forward(module, args, kwargs):
            for unit in units:
                self.unshard(unit)
            if not self.in_backward:  # else activation checkpointing computes this forward again
                self.prefetch_blocks(index, 1)
            # Not leaves, such as a parameter of the root: they may get theirs in the middle of the block's backward.
            inputs = [tensor for tensor in differentiable((args, kwargs)) if tensor.grad_fn]
            if torch.is_grad_enabled() and inputs:
                register_multi_grad_hook(inputs, after_backward, mode='any')

        def after_forward(module, args, kwargs, output):
            # What a block only hands on is an earlier one's output: its gradient comes when this one is done.
            handed_on = {id(tensor) for tensor in differentiable((args, kwargs))}
            outputs = [tensor for tensor in differentiable(output) if id(tensor) not in handed_on]
            for tensor in outputs:
                tensor.register_hook(before_backward)
            for unit in units:
                unit.awaits_backward = bool(outputs)
                if self.zero_stage == 3 and not self.in_backward:
                    self.reshard_unit(unit)

        def before_backward(gradient):
            self.begin_backward()
            for unit in units:
                self.unshard(unit)
            self.prefetch_blocks(index, -1)  # issued before this block's backward, so ahead of its reduction

        def after_backward(gradient):  # an input has its gradient, so the block's backward is done
            for unit in units:
                if unit.awaits_backward:  # unshard() of the next block in backward may have done it already
                    self.after_backward(unit)

        first.register_forward_pre_hook(before_forward, with_kwargs=True)
        last.register_forward_hook(after_forward, with_kwargs=True)

    def hook_root(self):
        """The root stays whole from a step's first forward to its last backward: backward begins with its head."""

        def before_forward(module, args):
            for unit in self.root:
                if unit.room.occupant is not unit:
                    self.in_flight[unit] = self.start_all_gather(unit)
            self.prefetch_blocks(-1, 1)
            for unit in self.root:
                self.unshard(unit)

        def after_forward(module, args, output):
            for tensor in differentiable(output):
                tensor.register_hook(before_backward)

        def before_backward(gradient):
            self.begin_backward()
            self.prefetch_blocks(len(self.blocks), -1)

        self.module.register_forward_pre_hook(before_forward)
        self.module.register_forward_hook(after_forward)
        self.module.register_state_dict_pre_hook(lambda *_: self.reshard())
        self.module.register_load_state_dict_pre_hook(lambda *_: self.reshard())

    def begin_backward(self):
        if not self.in_backward:
            self.in_backward = True
            Variable._execution_engine.queue_callback(self.finish_backward)  # called when all gradients are there

    def after_backward(self, unit):
        """A unit has all its gradients: free its whole weights (stages 2, 3), then keep or reduce the gradients."""
        unit.awaits_backward = False
        if self.zero_stage >= 2:
            self.reshard_unit(unit)
        self.keep_or_reduce(unit)

    def finish_backward(self):
        """End a backward pass, with the gradients of the root and of blocks whose inputs needed no gradient."""
        for unit in itertools.chain(*reversed(self.blocks)):
            if unit.awaits_backward or unit.has_gradients():
                self.after_backward(unit)
        for unit in self.root:
            self.keep_or_reduce(unit)
        for group in self.groups:
            self.finish_reduce_scatter(group)
        self.in_backward, self.holds_sums = False, not self.sync_gradients
        if self.offload and self.on_cuda:
            torch.cuda.current_stream().synchronize()  # clipping and the optimizer read the gradients on the host
        if self.reshards_root:
            self.reshard()  # the optimizer changes the masters next
            self.steps += 1

    def reshard_unit(self, unit):
        """A unit of a block is done for now. Stage 3: the next block may have its room. Stage 2: free the room."""
        unit.register_shards()
        if self.zero_stage == 2 and unit.room.occupant is unit:
            self.occupy(unit.room, None)
            unit.room.has_memory(False)

    def reshard(self):
        """Let the modules see the shards again, and forget all whole weights, because the shards may change now."""
        for unit in list(self.in_flight):
            self.finish_all_gather(unit)  # started ahead for a block that did not run after all
        for unit in self.units:
            unit.register_shards()
            if unit.room.occupant is not None:
                self.occupy(unit.room, None)

    # --- gather -----------------------------------------------------------------------------------------------------

    def unshard(self, unit):
        """Make the unit's weights whole: they may be in their room still, or on their way, or are gathered now."""
        if unit.is_whole:
            return
        occupant = unit.room.occupant
        if occupant is not None and occupant.is_whole:
            assert self.in_backward, f'block {unit.index} runs inside of block {occupant.index}'
            self.after_backward(occupant)  # it is done, since this block's backward begins with its gradient
        if occupant is not unit:
            if unit not in self.in_flight:
                self.in_flight[unit] = self.start_all_gather(unit)
            self.finish_all_gather(unit, into_room=True)
        unit.register_whole()

    def prefetch_blocks(self, index, direction):
        """Start the gathers of the next `prefetch` blocks of forward (direction 1) or of backward (-1)."""
        for distance in range(1, self.prefetch + 1):
            number = index + direction * distance
            if not 0 <= number < len(self.blocks):
                return
            for unit in self.blocks[number]:
                needed = (direction > 0 or unit.awaits_backward) and not unit.needs_no_buffer
                if needed and unit.room.occupant is not unit and unit not in self.in_flight:
                    self.in_flight[unit] = self.start_all_gather(unit)

    def start_all_gather(self, unit):
        """Send this rank's slices to the others and receive theirs in one flat buffer; returns (buffer, handle).

        Nothing that is issued after this call uses the buffer or the room. So the gather waits only for what was issued
        before it, and runs beside the block whose computation the caller issues next.
        """
        group = unit.group
        unit.room.has_memory(True)
        buffer = unit.room.flat if unit.needs_no_buffer else self.gather_buffer(unit)
        gathered = buffer[: unit.nbytes].view(group.ranks, unit.shard_bytes)
        with self.gather_lane.begin():
            unit.load_shards(gathered[group.rank], pin=self.offload and self.on_cuda)
            mine, handle = gathered[group.rank], None
            if group.ranks == 1:
                handle = self.gather_lane.mark()
            elif self.on_cuda:
                handle = self.gather_lane.run(all_gather, gathered.flatten(), mine, group.process_group)
            else:  # gloo's all-gather copies more: an all-to-all with the same for each rank takes 0.6 of its time
                to_send = mine.repeat(group.ranks)
                handle = self.gather_lane.run(dist.all_to_all_single, gathered.flatten(), to_send, group.process_group)
        self.count('gathers', (group.ranks - 1) * unit.shard_bytes)
        self.now_alive(0 if unit.needs_no_buffer else unit.nbytes)
        return buffer, handle

    def gather_buffer(self, unit):
        if unit.index is None:
            return torch.empty(unit.nbytes, dtype=torch.uint8, device=self.device)  # once a step
        group = unit.group
        if not group.free_buffers:  # taken for a block that did not run after all
            self.finish_all_gather(next(other for other in self.in_flight if other in group.units))
        return group.free_buffers.pop()

    def finish_all_gather(self, unit, into_room=False):
        """Wait for a gather, copy it into the unit's room if it is wanted there, and take the buffer back."""
        buffer, handle = self.in_flight.pop(unit)
        self.wait(handle)
        if into_room:
            self.occupy(unit.room, unit)
        if unit.needs_no_buffer:
            return
        if into_room:
            unit.fill(buffer[: unit.nbytes].view(unit.group.ranks, unit.shard_bytes))
        self.now_alive(-unit.nbytes)
        if unit.index is not None:
            unit.group.free_buffers.append(buffer)

    def occupy(self, room, unit):
        """Note that from now on this unit, or none, is whole in the room."""
        self.now_alive((unit.nbytes if unit else 0) - (room.occupant.nbytes if room.occupant else 0))
        room.occupant = unit

    # --- reduce -----------------------------------------------------------------------------------------------------

    def keep_or_reduce(self, unit):
        """Reduce the unit's gradients, or keep them for the next micro-step: in fp32, or the sum would lose digits."""
        if self.sync_gradients:
            self.start_reduce_scatter(unit)
            return
        for weight in unit.weights:
            gradient = weight.take_gradient()
            weight.gradient_sum = None if gradient is None else gradient.float()

    def start_reduce_scatter(self, unit):
        """Start to send each rank its slice of this rank's gradients; finish_reduce_scatter() takes up the result."""
        weights = [weight for weight in unit.weights if weight.whole.requires_grad]
        gradients = [weight.take_gradient() for weight in weights]
        unused = {weight for weight, gradient in zip(weights, gradients, strict=True) if gradient is None}
        if len(unused) == len(weights):
            return
        group = unit.group
        self.finish_reduce_scatter(group)  # at most one of a group in flight: its buffers are free then
        dtype = torch.float32 if self.holds_sums else self.compute_dtype
        for number, weight in enumerate(weights):
            if weight in unused:  # it counts as 0, since another rank may have a gradient
                gradients[number] = torch.zeros(weight.shape, dtype=dtype, device=self.device)
        gradients = [gradient.to(dtype) for gradient in gradients]
        size = sum(weight.size for weight in weights)  # numbers per rank, with padding
        group.reduction = Reduction(weights, unused, *self.send_gradients(unit, gradients, size, dtype))

    def send_gradients(self, unit, gradients, size, dtype):
        """Returns (memory for the average of this rank's slices, what is sent, what arrives (gloo), handle).

        Under NCCL this is one reduce-scatter in fp32. gloo's reduce-scatter is an all-reduce inside, which sends twice
        the bytes, so under gloo the ranks exchange their slices (all-to-all), and finish_reduce_scatter() sums them.
        There the gradient of a single micro-step in half precision is sent as it is, and becomes fp32 when it is
        summed. To make it fp32 before it is sent would cost twice the bytes and change no bit of the sum.
        """
        group, ranks = unit.group, unit.group.ranks
        average = torch.empty(size, device=self.device)
        wire = torch.float32 if self.on_cuda or ranks == 1 else dtype
        to_send = average if ranks == 1 else self.reduce_buffer('send', unit, ranks * size, wire)
        torch._chunk_cat(gradients, dim=0, num_chunks=ranks, out=to_send.view(ranks, -1))  # (ranks, size)
        self.count('reductions', (ranks - 1) * size * wire.itemsize)
        with self.reduce_lane.begin():
            if ranks > 1 and not self.on_cuda:
                received = self.reduce_buffer('receive', unit, ranks * size, wire)
                handle = self.reduce_lane.run(dist.all_to_all_single, received, to_send, group.process_group)
                return average, to_send, received, handle
            if ranks > 1:
                self.reduce_lane.run(reduce_scatter, average, to_send, group.process_group)
            self.average_over_ranks(average, group)
            return average, to_send, None, self.reduce_lane.mark()

    def finish_reduce_scatter(self, group):
        """Wait for the reduction in flight, if there is one, and add its result to the gradients of the shards."""
        if group.reduction is None:
            return
        (weights, unused, average, _, received, handle), group.reduction = group.reduction, None
        self.wait(handle)
        if received is not None:
            mine, *others = received.chunk(group.ranks)
            average.copy_(mine)
            for other in others:
                average.add_(other)
            self.average_over_ranks(average, group)
        if self.offload and self.on_cuda:  # the host waits for this only if it reads it below
            is_read = unused or any(weight.sharded.grad is not None for weight in weights)
            average = average.to('cpu', non_blocking=not is_read)
        for weight, flat in zip(weights, average.split([weight.size for weight in weights]), strict=True):
            if weight not in unused or flat.any():  # unused on all ranks: no gradient, as in one process
                weight.add_to_shard(flat)

    def average_over_ranks(self, total, group):
        """From the sum over a shard group to the average over all ranks, replicas included (HSDP)."""
        if group.replicate_group is not None:
            dist.all_reduce(total, group=group.replicate_group)
            replicas = dist.get_world_size(group.replicate_group)
            self.count('all_reduces', 2 * (replicas - 1) / replicas * total.nbytes)
        if self.world_size > 1:
            total.mul_(1 / self.world_size)

    def reduce_buffer(self, kind, unit, size, dtype):
        """Flat memory for gradients on their way: blocks share one, and a unit of the root gets its own."""
        if unit.index is None:
            return torch.empty(size, dtype=dtype, device=self.device)
        group = unit.group
        buffer = group.reduce_buffers.get((kind, dtype))
        if buffer is None or buffer.numel() < size:  # enough for the block with the most trained numbers
            trained = [sum(w.size for w in unit.weights if w.whole.requires_grad) for unit in group.units]
            buffer = torch.empty(group.ranks * max(trained), dtype=dtype, device=self.device)
            group.reduce_buffers[kind, dtype] = buffer
        return buffer[:size]

    # --- count ------------------------------------------------------------------------------------------------------

    def wait(self, handle):
        """Wait for a collective, and note for how long: this is communication that the computation does not hide."""
        if handle is not None:
            began = self.now()
            handle.wait()
            if self.module.training:
                self.waits.append((began, self.now()))
            self.read_waits()

    def read_waits(self):
        """Add up the waits that are over; on CUDA the last ones may not be."""
        while self.waits and (not self.on_cuda or self.waits[0][1].query()):
            began, end = self.waits.pop(0)
            self.counts['wait'] += began.elapsed_time(end) if self.on_cuda else end - began

    def now(self):
        """A point in time: of the host, or of the GPU's current stream."""
        if self.on_cuda:
            return torch.cuda.current_stream().record_event(Event(enable_timing=True))
        return 1000 * time.perf_counter()

    def count(self, kind, received):
        """One more collective, in which this rank receives this many bytes. Evaluations do not count."""
        if self.module.training:
            self.counts.update({kind: 1, f'{kind}_gb': received / 1e9})

    def now_alive(self, nbytes):
        """Count so many bytes more, or fewer, in rooms with whole weights and in buffers in which these arrive."""
        self.alive += nbytes
        self.peak = max(self.peak, self.alive)

    def reset_counts(self):
        kinds = ('gathers', 'gathers_gb', 'reductions', 'reductions_gb', 'all_reduces', 'all_reduces_gb', 'wait')
        self.counts, self.steps, self.waits, self.peak = Counter(dict.fromkeys(kinds, 0)), 0, [], self.alive

    def communication(self):
        """Metrics since the last call. Per optimizer step: the number of collectives, the GB (1e9 bytes) that this rank
        received in them, and fsdp/wait, the milliseconds that the computation waited for them. fsdp/whole_gb and
        fsdp/whole_peak_gb: whole weights and the buffers in which they arrive, now and at most, in GB. On CUDA this
        call waits for the device."""
        if self.on_cuda:
            torch.cuda.synchronize()
        self.read_waits()
        row = {f'fsdp/{key}': value / max(1, self.steps) for key, value in self.counts.items()}
        row |= {'fsdp/whole_gb': self.alive / 1e9, 'fsdp/whole_peak_gb': self.peak / 1e9}
        self.reset_counts()
        return row
