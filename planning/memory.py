"""
Predict the memory of a rank at the peak of a step: weights, gradients, optimizer state, activations.

    model = empty_model(config)
    memory_bytes(config, model, world_size, 'fsdp')  # {'weights': bytes, 'gradients': ...}

Nothing large is allocated: parameters are counted on the meta device, activations on tensors without data
(activations.py). What a lesson makes a rank hold, its holds(plan) says. `config` is as in sizes.py.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from torch import nn

import optim
from layout import Layout, Share
from moments import bytes_held, in_8_bits
from planning import strategies
from planning.activations import few_blocks, micro_step
from planning.fsdp import reduction_that_stays, whole_bytes
from planning.sizes import BYTES, Weights, part_of_rank, weights_of

OVERLAP = 'peaks at different moments'
STATES = ('weights', 'gradients', 'optimizer', 'outer')  # parts that are there from step to step


@dataclass
class Plan:
    """A rank of a run that might be: what holds(plan) and sends(plan) of the lessons go by."""

    keys: dict  # all of the script, with values, and those of the model
    layout: Layout
    model: nn.Module  # on the meta device: what the rank has of it before FSDP shards it; in a pipeline a Stage
    share: Share  # which part of the whole model that is
    stage: int  # of a pipeline, else 0
    weights: Weights  # the model's parameters, and how FSDP cuts them

    @classmethod
    def of(cls, keys, model, layout, stage=0):
        """model: empty_model(keys)."""
        model, share = part_of_rank(keys, model)
        if layout.strategy == 'pipeline':
            from pipeline_manual import Stage

            model = Stage(model, stage, layout.stage, layout.chunks)
        return cls(keys, layout, model, share, stage, weights_of(model, share, layout.shard, layout.expert))

    @property
    def tokens(self):
        """Of a micro-step on this rank; with tensor_parallel, of all ranks that share its matrices together."""
        return self.keys['batch_size'] * self.keys['block_size'] // self.layout.context

    @property
    def compute_bytes(self):
        """Of a number in the dtype of computation."""
        return BYTES[self.keys['dtype']]

    @property
    def on_cuda(self):
        """Whether NCCL sends, and not gloo."""
        return self.keys['device'].startswith('cuda')

    @property
    def recomputes(self):
        """Whether backward repeats all of forward."""
        return self.keys['activation_checkpointing'] in ('full', 'offload')

    @property
    def blocks(self):
        """How many blocks the rank has."""
        return len(self.model.blocks)

    @property
    def ends(self):
        """Whether it has (the embedding, the head)."""
        return self.stage == 0, self.stage == self.layout.stage - 1

    @cached_property
    def activations(self):
        """The MicroStep of this rank; of a stage, whose blocks pass several micro-steps, with a few blocks."""
        keys, strategy = self.keys, self.layout.strategy
        few = {'n_layer': few_blocks(keys)} if strategy == 'pipeline' else {}
        return micro_step({**keys, **few}, strategy)

    def moment_bytes(self):
        """Bytes of the optimizer's state on this rank; none for frozen weights."""
        dtype = self.keys.get('optimizer_dtype', 'float32')
        fewer_bits = in_8_bits(self.model, self.share.slices) if dtype == 'int8' else self.weights.all
        fewer_bits = {*fewer_bits} if dtype != 'float32' else ()
        return sum(
            number * bytes_held(self.weights.piece(parameter), dtype if parameter in fewer_bits else 'float32')
            for parameter, number in optim.moments_of(self.model, self.keys['optimizer']).items()
        )

    def parts_that_overlap(self, nbytes):
        """The part of holds(plan) that corrects the sum of the others to the peak, if that is less by -nbytes."""
        return {OVERLAP: nbytes} if nbytes else {}


def plans(keys, model, layout):
    """The Plans of the ranks that differ: of a pipeline one for each stage, of all else one."""
    return [Plan.of(keys, model, layout, stage) for stage in range(layout.stage)]


def combined(parts):
    """One dict of several, with the sums of what they have in common."""
    total = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


def held(plan):
    """memory_bytes() of the rank of a Plan."""
    parts = combined(lesson.holds(plan) for lesson in strategies.of(plan.layout))
    # first what stays from step to step, then what comes and goes in one
    place = {part: 2 if part == OVERLAP else part.removeprefix('host ') not in STATES for part in parts}
    return {part: parts[part] for part in sorted(parts, key=place.get)}


def memory_bytes(config, model, world_size, strategy='ddp'):
    """
    {part: bytes} that one rank holds in a training step. Parts that begin with 'host' are in the host's memory.

    weights       fp32 masters, and frozen weights in their frozen_dtype: whole under ddp, 1/shard_size under fsdp;
                  for deepspeed see deepspeed_engine.holds()
    gradients     fp32, divided like the weights; none for frozen weights
    optimizer     moments, none for frozen weights; in fp32 or, with optimizer_dtype, fewer bits and their scales
    outer         diloco: outer parameters and momentum in fp32, and with error feedback what compression lost
    accumulated   fsdp: what whole gradients need beyond that, while micro-steps add up without communication
    gathered      fsdp: whole weights in the compute dtype; pipeline: the blocks' weights cast to half precision
    reduction     fsdp: gradients on their way into the reduce-scatter
    activations   what forward keeps for backward, and what backward needs beyond the room that the logits leave
    logits        what the loss of one chunk of tokens needs, and the gradients that it passes to hidden states and head
    travelling    fsdp with context_parallel: keys and values of other ranks for one layer, and their gradients in fp32;
                  with tensor_parallel: activations that arrive and leave
    workspace     of the matmuls, on a GPU
    peaks at different moments      negative: the parts do not all peak at the same moment; this is the overlap, so that
                  the sum is the true peak; absent if there is none

    shard_size is the number of ranks that together hold one copy of the model. With expert_parallel each of the ranks
    that share experts holds only some of them, which it shards with the ranks of the copy that hold the same ones;
    "whole" then means these experts. Activations are those of balanced routers, see activations.py.

    model: empty_model(config). strategy: as in Layout; the rank of a pipeline is on its fullest stage. Raises
    ValueError if the ranks do not divide.
    Not counted are fragments of the allocator, CUDA's context (0.5 GB) and NCCL's buffers. Compiled blocks are counted
    as such on a GPU, else eager mode is assumed. The tests measure on the CPU, follow a step as on CUDA without a GPU,
    and hold the peaks that an H100 measured.
    """
    ranks = plans(config, model, Layout.of(config, strategy, world_size))
    return max(map(held, ranks), key=lambda parts: totals(parts)['total on the device'])


def totals(parts):
    """{'total on the device', 'total on the host': bytes} from what memory_bytes() returns, without an empty total."""
    places = {'device': False, 'host': True}
    sizes = {
        place: [size for part, size in parts.items() if part.startswith('host') == on_host]
        for place, on_host in places.items()
    }
    return {f'total on the {place}': sum(place_sizes) for place, place_sizes in sizes.items() if place_sizes}


def while_writing(plan):
    """Bytes on the device while the model of train_grpo.py writes answers, at most: what stays from step to step, whole
    weights in the compute dtype, keys and values of the answers that are written at once, of block_size tokens each."""
    keys = plan.keys
    answers = keys['global_batch_size'] // plan.layout.ranks
    at_once = min(answers, keys['generation_batch_size'] or answers)
    per_token = 2 * keys['n_layer'] * keys['n_kv_head'] * keys['head_dim'] * plan.compute_bytes
    stays = sum(size for part, size in held(plan).items() if part in STATES)
    if plan.layout.strategy == 'fsdp' and keys['fsdp_impl'] == 'manual':
        stays += reduction_that_stays(plan)
    return stays + whole_bytes(plan.model.parameters(), plan.compute_bytes) + at_once * keys['block_size'] * per_token
