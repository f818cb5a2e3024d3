"""
Fully sharded data parallelism by hand: what `fully_shard` does, in one file to read from top to bottom.

    model = fsdp_manual.shard(raw_model, raw_model.blocks, mesh, compute_dtype=torch.bfloat16, zero_stage=3)
    optimizer = torch.optim.AdamW(raw_model.parameters())  # they are sharded now: each rank steps its own slices
    model(x).backward()  # all-gathers the weights and reduce-scatters the gradients by itself

Each parameter is a DTensor: every rank keeps a slice of its rows in fp32, the master weight; one that is not trained
keeps its own dtype. A *unit* is what is gathered at once: a block, or a parameter of the root (what is in no block:
embedding, final norm, head).

One block under stage 3, with its neighbours; time runs to the right, each line is a stream (on a CPU, gloo's threads):

    forward     gather   | gather i+1  |             backward     gather   | gather i-1  |
                compute  |   block i   | block i+1                compute  |   block i   | block i-1
                                                                  reduce   |  reduce i+1 | reduce i

When is a weight whole?  From before_forward() to after_forward(), and from before_backward() to after_backward().
Who frees it?            Nobody needs to: all blocks of one model are whole in the same memory, a Room, one after the
                         other. The next block overwrites the last, so what autograd saved of block i's weights in
                         forward is valid again as soon as block i is back in the room. The root has rooms of its own.
Where does its gradient  In .grad of the whole weight until after_backward(), then in a flat buffer, until the ranks
wait?                    have summed it. From then on in .grad of the DTensor, where clipping and optimizer find it.
What crosses the wire?   Weights in compute_dtype: (ranks - 1) / ranks of the unit per gather; bytes, as nf4 packs
                         frozen weights, as they are. Of gradients as many numbers per reduction; they are summed in
                         fp32, and send_gradients() says how they travel.
                         With n blocks and stage 3: 2n - 1 gathers of blocks and n reductions per backward pass.

The stages of ZeRO (arXiv 1910.02054) shard the moments (1), the gradients, too (2), and the weights, too (3). For the
code that means how long a block stays whole; see reshard_unit() and finish_backward():

    3  while it computes, one block at a time       2  from its forward to its backward, each block in its own room
    1  from the first forward of an optimizer step to the last backward

Where a block has parts that lie on other ranks (the experts of expert_manual.py), these are sharded over fewer of them:
a mesh of their own. Such a block has two units, each with its process group, its room and its buffers, a ShardGroup.
They are gathered and reduced one after the other, and all of the above holds for each.

Gradients of several micro-steps add up where set_requires_gradient_sync() says: False keeps a whole fp32 gradient on
every rank, 4 bytes for every parameter of the model, and sends nothing; True (the default) sends and keeps a shard.
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
    compute_dtype: of the whole weights, and so of the computation. The shards are fp32 whatever the parameters were,
        but that one which is not trained keeps its dtype, as bfloat16; what is uint8 stays so when it is whole, too.
    zero_stage: 3, 2 or 1, see above. prefetch: blocks gathered ahead of the one at work; 0 = no overlap.
    offload: shards and their gradients in the host's memory; the optimizer then runs there.
    experts: modules inside of the blocks whose parameters are sharded over their_mesh, of as many dimensions as mesh:
        ranks with the same part of the model. Their gradients are divided by the ranks of mesh as well.

    Call it after activation checkpointing and torch.compile of the blocks, before the optimizer is made. A model on
    the meta device stays there: to_empty() and initialization follow.
    Raises ValueError, with one line, for blocks or parameters that cannot be sharded; then nothing has been changed.
    """
    blocks = [[*block] if isinstance(block, (list, tuple, nn.ModuleList)) else [block] for block in blocks]
    check_blocks(model, blocks)
    units, root = assign_parameters(model, blocks)
    theirs = {parameter for module in experts for parameter in module.parameters()}
    units = [split_unit(parameters, theirs) for parameters in units]
    if compute_dtype not in GATHERABLE or zero_stage not in (1, 2, 3) or prefetch < 0:
        raise ValueError(
            f'compute_dtype={compute_dtype}, zero_stage={zero_stage}, prefetch={prefetch}: expected a dtype of '
            f'{GATHERABLE}, stage 1, 2 or 3 and prefetch >= 0'
        )
    meshes = [mesh, their_mesh][: 2 if theirs else 1]
    sharded = ShardedModel(model, meshes, units, root, compute_dtype, zero_stage, prefetch, offload)
    for units, modules in zip(sharded.blocks, blocks, strict=True):
        sharded.hook_block(units, first=modules[0], last=modules[-1])
    sharded.hook_root()
    return sharded


def check_blocks(model, blocks):
    """Raise ValueError unless `blocks` lists all of the model's modules of that kind, each once."""
    listed = [module for modules in blocks for module in modules]
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

    A tied parameter has several places. A parameter of the root that is larger than a block, like an embedding, is a
    unit of its own; the rest of the root is one unit. Raises ValueError for a parameter that cannot be sharded.
    """
    units, root = [{} for _ in blocks], {}
    unit_of = {}  # module, or a module inside of it -> its unit
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
    """The parameters of a block's unit as one or two: what is in `theirs` has a mesh of its own."""
    parts = [{}, {}]
    for parameter, places in parameters.items():
        parts[parameter in theirs][parameter] = places
    return parts if theirs else parts[:1]


class Weight:
    """One parameter: its slice on this rank, its whole in the unit's room, and its place in the flat buffers.

    A flat buffer is of bytes, since what is gathered may be of two dtypes: (ranks, bytes per rank), of which columns
    offset:offset+nbytes of row r are rank r's slice: ceil(rows/ranks) rows, `size` numbers, padded where a rank has
    fewer, as the last ones may, or none.
    """

    def __init__(self, places, parameter, group, offset, device, compute_dtype):
        self.places = places  # [(module, attribute)]; several if tied
        self.shape, self.stride = parameter.shape, torch.empty(parameter.shape, device='meta').stride()
        self.dtype = compute_dtype if parameter.is_floating_point() else parameter.dtype  # when it is whole
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
        self.sharded = self.whole = None  # the DTensor; the parameter that computes, see Unit.move_into()
        self.gradient_sum = None  # of micro-steps that were not reduced

    def as_dtensor(self, local):
        """The DTensor whose slice on this rank is `local`. (DTensor.from_local() would move it to the GPU.)"""
        return DTensor(local, self.spec, requires_grad=False)

    def register(self, parameter):
        """Make `parameter` what the modules see, under all its names."""
        for module, attribute in self.places:
            module._parameters[attribute] = parameter

    def local_shard(self, pin):
        """This rank's slice. The DTensor is looked up, since to_empty() and the like put another one in its place."""
        module, attribute = self.places[0]
        if self.sharded is not module._parameters[attribute]:
            self.sharded = module._parameters[attribute]
            if pin:  # page-locked host memory: copied to the GPU while the host goes on
                self.sharded._local_tensor = self.sharded._local_tensor.pin_memory()
        return self.sharded._local_tensor

    def take_gradient(self):
        """What backward left in .grad of the whole weight, added to that of earlier micro-steps; None if nothing."""
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
    """Memory in which one unit at a time is whole: its occupant. Blocks share one under stage 3."""

    def __init__(self, nbytes, device):
        self.flat, self.occupant = torch.empty(nbytes, dtype=torch.uint8, device=device), None

    def has_memory(self, wanted):
        """Give the memory back, or have it again. The tensors that lie in this room do not notice."""
        storage = self.flat.untyped_storage()
        if wanted != (storage.size() > 0):
            storage.resize_(self.flat.nbytes if wanted else 0)


class ShardGroup:
    """The ranks that hold the slices of units between them, and the memory in which their blocks take turns."""

    def __init__(self, mesh):
        self.mesh, self.process_group = mesh, mesh.get_group(mesh.ndim - 1)
        self.replicate_group = mesh.get_group(0) if mesh.ndim == 2 else None
        self.ranks, self.rank = dist.get_world_size(self.process_group), dist.get_rank(self.process_group)
        self.reduction = None  # the one in flight, see start_reduce_scatter()
        self.reduce_buffers = {}

    def make_room(self, units, device, shared, prefetch):
        """Have rooms for these units, one of each block: shared by all, or for each its own."""
        self.units, largest = units, max(unit.nbytes for unit in units)
        room = Room(largest, device) if shared else None
        for unit in units:
            unit.move_into(room or Room(unit.nbytes, device))
        buffers = max(1, prefetch) if self.ranks > 1 else 0  # alone, a gather is a copy on this device
        self.free_buffers = [Room(largest, device).flat for _ in range(buffers)]


class Unit:
    """
    Parameters that are gathered together and reduced together. Where its whole weights are, and what modules see:

        state                   is_whole   room.occupant   in ShardedModel.in_flight
        sharded                 no         another, None   no
        on its way (prefetch)   no         another, None   yes: in a buffer
        at work                 yes        this unit       no
        done for now (stage 3)  no         this unit       no: free to stay, the next unit that needs the room takes it
    """

    def __init__(self, parameters, index, group, device, compute_dtype):
        """parameters: {parameter: [(module, attribute), ...]}. index: of the block, None for the root."""
        self.index, self.group, self.weights, self.shard_bytes = index, group, [], 0

        # Matrices first: vectors may leave an odd offset behind them, and matmuls want weights at multiples of 16. Last
        # what is bytes already, behind which no float may begin.
        def order(parameter):
            return not parameter.is_floating_point(), -parameter.dim()

        for parameter, places in sorted(parameters.items(), key=lambda item: order(item[0])):
            self.weights.append(Weight(places, parameter, group, self.shard_bytes, device, compute_dtype))
            self.shard_bytes += self.weights[-1].nbytes  # per rank, with padding
        self.shard_bytes += -self.shard_bytes % compute_dtype.itemsize  # the next rank's slice begins with floats
        self.nbytes = group.ranks * self.shard_bytes
        # The slices of one parameter, rank after rank, are that parameter: it can be gathered into its room as it is.
        # Not so a block, while another one computes in that room.
        self.needs_no_buffer = group.ranks == 1 or (index is None and len(self.weights) == 1)
        self.is_whole = self.awaits_backward = False

    def move_into(self, room):
        """Lay out the whole weights in a room. What they hold comes with fill()."""
        self.room, self.places, offset, ranks = room, [], 0, self.group.ranks
        for weight in self.weights:
            # set_() and no view of the room: a view shares the room's version counter, and autograd would take every
            # refill for a change of what it has saved.
            place = (room.flat.untyped_storage(), offset // weight.dtype.itemsize, weight.shape, weight.stride)
            whole = torch.empty(0, dtype=weight.dtype, device=room.flat.device).set_(*place)
            weight.whole = nn.Parameter(whole, requires_grad=weight.dtype.is_floating_point)
            self.places.append(room.flat[offset : offset + ranks * weight.nbytes].view(ranks, weight.nbytes))
            offset += ranks * weight.nbytes

    def load_shards(self, row, pin):
        """Copy this rank's slices into `row` of a flat buffer, which casts them to the compute dtype."""
        shards = [weight.local_shard(pin).flatten() for weight in self.weights]
        if shards[0].device != row.device:  # from the host as they are, and cast on the GPU
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
    """Work beside the computation: in a stream of the GPU, or in the threads that run gloo's collectives."""

    def __init__(self, device):
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == 'cuda' else None

    def begin(self):
        """A context for work that is to follow all that was issued so far. The host does not wait."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)

    def run(self, collective, output, source, group):
        """Start a collective. wait() of what this returns holds up the host (gloo) or the current stream (NCCL)."""
        if self.stream is None:
            return collective(output, source, group=group, async_op=True)
        collective(output, source, group=group)
        return self.mark()

    def mark(self):
        """Something to wait for: the end of what was issued in this lane."""
        return self.stream.record_event() if self.stream else None


def differentiable(tree):
    """The tensors among the inputs or outputs of a module that get a gradient."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


# In flight: the weights whose gradients travel, those among them without one on this rank, the memory for the average,
# what is sent (kept until it has left), what arrives (gloo), and what to wait for.
Reduction = namedtuple('Reduction', 'weights unused average sent received handle')


class ShardedModel(nn.Module):
    """A model whose units are unsharded and reduced around its computation; called like the model itself.

    As under DistributedDataParallel, `module` is the model: its parameters keep their names. Methods that the training
    loop calls have the names that they have in fully_shard.
    """

    def __init__(self, model, meshes, units, root, compute_dtype, zero_stage, prefetch, offload):
        """meshes: one, or two where blocks have two units each. units: of each block {parameter: places} of every unit;
        root: of each unit of the root."""
        super().__init__()
        self.module, self.zero_stage, self.offload = model, zero_stage, offload
        self.on_cuda = meshes[0].device_type == 'cuda'
        self.device = torch.device('cuda', torch.cuda.current_device()) if self.on_cuda else torch.device('cpu')
        self.compute_dtype = compute_dtype
        self.groups, self.world_size = [ShardGroup(mesh) for mesh in meshes], meshes[0].size()

        home = 'cpu' if offload else self.device
        self.blocks = [
            [Unit(part, index, group, home, compute_dtype) for part, group in zip(parts, self.groups, strict=True)]
            for index, parts in enumerate(units)
        ]
        for number, group in enumerate(self.groups):
            of_blocks = [of_block[number] for of_block in self.blocks]
            group.make_room(of_blocks, self.device, zero_stage == 3, prefetch)
        self.root = [Unit(parameters, None, self.groups[0], home, compute_dtype) for parameters in root]
        for unit in self.root:
            unit.move_into(Room(unit.nbytes, self.device))
        self.units = [*itertools.chain(*self.blocks), *self.root]

        self.prefetch = prefetch
        self.gather_lane, self.reduce_lane = Lane(self.device), Lane(self.device)
        self.in_flight = {}  # unit -> (buffer, handle) of the gathers that were started ahead
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
        """Whether the next backward pass ends with the root resharded: the optimizer steps then. Blocks: zero_stage."""
        self.reshards_root = reshard

    # --- when -----------------------------------------------------------------------------------------------------

    def hook_block(self, units, first, last):
        """Have a block whole while it computes, in forward and in backward. first, last: its modules, often one."""
        index = units[0].index

        def before_forward(module, args, kwargs):
            for unit in units:
                self.unshard(unit)
            if not self.in_backward:  # else activation checkpointing computes this forward again
                self.prefetch_blocks(index, 1)
            if torch.is_grad_enabled() and (inputs := differentiable((args, kwargs))):
                register_multi_grad_hook(inputs, after_backward, mode='any')

        def after_forward(module, args, output):
            outputs = differentiable(output)
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

        def after_backward(gradient):  # an input has its gradient: the backward of the block is through
            for unit in units:
                if unit.awaits_backward:  # unshard() of the block that comes next in backward may have finished it
                    self.after_backward(unit)

        first.register_forward_pre_hook(before_forward, with_kwargs=True)
        last.register_forward_hook(after_forward)

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
        """All gradients of a block are there: free its weights, then see to the gradients."""
        unit.awaits_backward = False
        if self.zero_stage >= 2:
            self.reshard_unit(unit)
        self.keep_or_reduce(unit)

    def finish_backward(self):
        """The end of a backward pass: the root's turn, and that of blocks whose inputs needed no gradient."""
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
        """The block is done for now. Stage 3: its room is the next one's. Stage 2: the memory goes back."""
        unit.register_shards()
        if self.zero_stage == 2 and unit.room.occupant is unit:
            self.occupy(unit.room, None)
            unit.room.has_memory(False)

    def reshard(self):
        """Let everyone see the shards, and forget the whole weights: the shards may change now."""
        for unit in list(self.in_flight):
            self.finish_all_gather(unit)  # started ahead for a block that then did not run
        for unit in self.units:
            unit.register_shards()
            if unit.room.occupant is not None:
                self.occupy(unit.room, None)

    # --- gather -----------------------------------------------------------------------------------------------------

    def unshard(self, unit):
        """Return with the unit's weights whole: they still are, or are on their way, or are gathered now."""
        if unit.is_whole:
            return
        occupant = unit.room.occupant
        if occupant is not None and occupant.is_whole:
            assert self.in_backward, f'block {unit.index} runs inside of block {occupant.index}'
            self.after_backward(occupant)  # it is done: this block's backward needs what that one's has found
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
        """Send this rank's slices to the others and receive theirs, all in one flat buffer: (buffer, handle).

        Neither the buffer nor the room is used by what was issued after this call; so the lane has to wait only for
        what was issued before it, and runs beside the block whose computation the caller issues next.
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
            else:  # gloo's all-gather copies more: sending to each rank with one all-to-all takes 0.6 of its time
                to_send = mine.repeat(group.ranks)
                handle = self.gather_lane.run(dist.all_to_all_single, gathered.flatten(), to_send, group.process_group)
        self.count('gathers', (group.ranks - 1) * unit.shard_bytes)
        self.now_alive(0 if unit.needs_no_buffer else unit.nbytes)
        return buffer, handle

    def gather_buffer(self, unit):
        if unit.index is None:
            return torch.empty(unit.nbytes, dtype=torch.uint8, device=self.device)  # once a step
        group = unit.group
        if not group.free_buffers:  # taken by a block that then did not run
            self.finish_all_gather(next(other for other in self.in_flight if other in group.units))
        return group.free_buffers.pop()

    def finish_all_gather(self, unit, into_room=False):
        """Wait for a gather, copy it into the unit's room if it is wanted, and have the buffer back."""
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
        """unit (or None) is now what is whole in the room."""
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
        """Send each rank its slice of this rank's gradients, see send_gradients(); the result is taken up later."""
        weights = [weight for weight in unit.weights if weight.whole.requires_grad]
        gradients = [weight.take_gradient() for weight in weights]
        unused = {weight for weight, gradient in zip(weights, gradients, strict=True) if gradient is None}
        if len(unused) == len(weights):
            return
        group = unit.group
        self.finish_reduce_scatter(group)  # at most one of a group in flight: its buffers are free then
        dtype = torch.float32 if self.holds_sums else self.compute_dtype
        for number, weight in enumerate(weights):
            if weight in unused:  # it counts as 0: on another rank there may be a gradient
                gradients[number] = torch.zeros(weight.shape, dtype=dtype, device=self.device)
        gradients = [gradient.to(dtype) for gradient in gradients]
        size = sum(weight.size for weight in weights)  # numbers per rank, with padding
        group.reduction = Reduction(weights, unused, *self.send_gradients(unit, gradients, size, dtype))

    def send_gradients(self, unit, gradients, size, dtype):
        """(room for the average of this rank's slices, what is sent, what arrives (gloo), handle).

        Under NCCL it is one reduce-scatter in fp32. gloo's reduce-scatter is an all-reduce inside, which sends twice
        the bytes. So under gloo the ranks exchange their slices (all-to-all), and finish_reduce_scatter() sums them.
        There the gradient of a single half-precision micro-step travels as it is, and is widened when it is summed: to
        widen it before it is sent would cost twice the bytes and change no bit of the sum.
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
        if self.offload and self.on_cuda:  # not to be waited for, unless the host reads it below
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
        """Flat memory for gradients on their way: one for all blocks, and one for the root, at the end of backward."""
        if unit.index is None:
            return torch.empty(size, dtype=dtype, device=self.device)
        group = unit.group
        buffer = group.reduce_buffers.get((kind, dtype))
        if buffer is None or buffer.numel() < size:  # for the block of which most is trained
            trained = [sum(w.size for w in unit.weights if w.whole.requires_grad) for unit in group.units]
            buffer = torch.empty(group.ranks * max(trained), dtype=dtype, device=self.device)
            group.reduce_buffers[kind, dtype] = buffer
        return buffer[:size]

    # --- count ------------------------------------------------------------------------------------------------------

    def wait(self, handle):
        """Wait for a collective, and note for how long: that is communication which the computation does not hide."""
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
        """So many bytes more, or fewer, are in rooms with whole weights or in buffers that these arrive in."""
        self.alive += nbytes
        self.peak = max(self.peak, self.alive)

    def reset_counts(self):
        kinds = ('gathers', 'gathers_gb', 'reductions', 'reductions_gb', 'all_reduces', 'all_reduces_gb', 'wait')
        self.counts, self.steps, self.waits, self.peak = Counter(dict.fromkeys(kinds, 0)), 0, [], self.alive

    def communication(self):
        """Metrics since the last call. Per optimizer step: collectives, GB (1e9 bytes) that this rank received in them,
        and fsdp/wait, the milliseconds that the computation waited for them. whole_gb, whole_peak_gb: whole weights and
        buffers in which they arrive, now and at most. On CUDA it waits for the device."""
        if self.on_cuda:
            torch.cuda.synchronize()
        self.read_waits()
        row = {f'fsdp/{key}': value / max(1, self.steps) for key, value in self.counts.items()}
        row |= {'fsdp/whole_gb': self.alive / 1e9, 'fsdp/whole_peak_gb': self.peak / 1e9}
        self.reset_counts()
        return row
