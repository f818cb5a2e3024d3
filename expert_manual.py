"""
Expert parallelism by hand: the experts of a mixture lie on different ranks, and tokens travel to those that they chose.

    mesh = init_device_mesh('cuda', (2, 4), mesh_dim_names=('shard', 'expert'))  # 4 ranks share the experts, 2 times
    expert_manual.split(model, Ranks.of(mesh['expert']))  # in place, before FSDP; this rank keeps a quarter of them
    loss_sum, ce_sum = model(x, y)  # each rank calls it with tokens of its own, all ranks as often
    loss_sum.backward()

Most weights of a mixture are experts', and each token meets only a few of them. FSDP alone would gather them all, in
every layer and micro-step, to use each for a few tokens. Here an expert stays where it is and computes the tokens of
all t ranks. One layer with 4 experts, of which each token chose 2, on t = 2 ranks; a1 is token a for expert 1:

                         rank 0: tokens a, b         rank 1: tokens c, d
    sorted by expert     a0 b0 a1 | b2               d0 | c2 d2 c3              what is behind | is rank 1's
    dispatch             a0 b0 a1 d0                 b2 c2 d2 c3                an all-to-all
    sorted again         a0 b0 d0 | a1               b2 c2 d2 | c3              what is behind | is the next expert's
    compute              expert 0, expert 1          expert 2, expert 3
    sorted back          a0 b0 a1 d0                 b2 c2 d2 c3
    combine              a0 b0 a1 | b2               d0 | c2 d2 c3              the same all-to-all backwards
    weigh and sum        a = a0 + a1, b = b0 + b2    c = c2 + c3, d = d0 + d2   as without, in model.MoE

Who holds what?         Rank i of the t has the experts i E/t to (i+1) E/t, which are consecutive rows of each weight.
                        Everything else of the model is on all ranks alike; the data is not: each rank has its own.
How do sizes arrive?    How many rows travel is known when the routers have chosen, and not before. So the ranks first
                        exchange counts, t x E/t numbers, and the host waits for them: an all-to-all needs its sizes as
                        numbers of the host. It is the one wait in a layer (torchtitan has it as well).
In backward?            The gradient of what was sent comes back the way that it went: the same all-to-all with the two
                        lists of sizes exchanged. A part may be empty, and a rank may have nothing to compute at all.
And FSDP?               Dense weights are sharded over all W ranks. An expert is only on the W/t ranks with the same
                        part; it is sharded over these.
What is its gradient?   An expert has seen the tokens of t ranks, and its gradient is their sum already. So the sum over
                        the W/t ranks is that over all of them, and the average divides by W as for dense weights.
                        (FSDP, left to itself, divides by the number of ranks that it has summed over: W/t.)
What crosses the wire?  Per rank, layer and micro-step, if all experts have as many tokens: (t-1)/t N k C numbers in the
                        compute dtype for each of dispatch and combine, in forward and again in backward: 4 of them.
                        With activation_checkpointing=full or offload forward is done twice: 6. selective keeps them.
When is that less?      FSDP alone gathers all experts of a layer, 3 E M C numbers, twice in each micro-step; of E/t
                        experts it is a t-th of that. What is saved is more than what is sent if 2 * 3 E M > 4 N k:
                        many small experts, and not too many tokens on a rank.
And a checkpoint?       Has whole weights. model.slices says which rows of them this rank has.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group

from model import Experts, TakeRows
from tensor_manual import Slice

# --- the split --------------------------------------------------------------------------------------------------------


def split(model, ranks):
    """Leave this rank its part of the experts of a GPT, which computes with the others from here on, in place.

    ranks: tensor_manual.Ranks, whose size divides the number of experts. model.slices is then {name of an expert's
    parameter: which rows of it are here}. Before FSDP; a model on the meta device stays there.

    Returns the modules of experts, which FSDP shards over the ranks that have the same ones.
    """
    model.slices, whole_value = {}, model.initial_value
    for block in model.blocks:
        block.mlp.experts = SharedExperts(block.mlp.experts, ranks)
    for name, parameter in [*model.named_parameters()]:
        if '.experts.' in name:
            module_name, _, own_name = name.rpartition('.')
            rows = parameter.shape[0] // ranks.size
            model.slices[name] = Slice(parameter.shape, 0, ((ranks.rank * rows, rows),))
            part = model.slices[name].of(parameter.detach()).clone()
            setattr(model.get_submodule(module_name), own_name, nn.Parameter(part))

    def initial_value(name, parameter, seed, device):
        """GPT.initial_value(), of which this rank keeps its part: the same model for any number of ranks."""
        if name not in model.slices:
            return whole_value(name, parameter, seed, device)
        part = model.slices[name]
        return part.of(whole_value(name, torch.empty(part.shape, device='meta'), seed, device))

    model.initial_value = initial_value
    return [block.mlp.experts for block in model.blocks]


class SharedExperts(Experts):
    """Some of the experts, for rows of several ranks. Rows go in and come out as in Experts: by expert, of all E."""

    def __init__(self, experts, ranks):
        nn.Module.__init__(self)
        self.gate, self.up, self.down, self.ranks = experts.gate, experts.up, experts.down, ranks
        self.here = self.gate.n_matrices // ranks.size  # E/t
        for linear in (self.gate, self.up, self.down):
            linear.n_matrices = self.here

    def forward(self, rows, ends):
        """rows (R, C), sorted by expert; ends (E) int32, as in Experts.forward(): the same of what they computed."""
        counts = ends.diff(prepend=ends.new_zeros(1)).view(-1, self.here)  # (t, E/t): to each rank, for its experts
        arriving = exchange_counts(counts, self.ranks.group)  # (t, E/t): from each rank, for the experts of this one
        sent, received = rows_by_rank(counts, arriving, rows)
        rows = exchange(rows, sent, received, self.ranks.group)  # by rank, and of each rank by expert

        expert = torch.arange(self.here, device=rows.device).repeat(len(sent))  # of each of these t x E/t parts
        expert = expert.repeat_interleave(arriving.flatten(), output_size=sum(received))  # (R') of each row
        order = expert.argsort(stable=True)
        place = order.argsort()
        rows = TakeRows.apply(rows, order, place[:, None])
        rows = super().forward(rows, arriving.sum(0).cumsum(0, dtype=torch.int32))
        rows = TakeRows.apply(rows, place, order[:, None])
        return exchange(rows, received, sent, self.ranks.group)


def rows_by_rank(counts, arriving, rows):
    """How many of the rows (R, C) go to each rank, and how many come from each: two lists, for which the host waits."""
    return torch.stack((counts.sum(1), arriving.sum(1))).tolist()


# --- the exchange -----------------------------------------------------------------------------------------------------
# Custom operators rather than an autograd.Function: selective activation checkpointing knows them by their names.

begun = 0  # exchanges of this process. Of ranks that stand still in one layer, the others wait for who has begun fewer.


@torch.library.custom_op('expert_manual::exchange', mutates_args=())
def exchange(rows: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    """To each rank the next so many rows (R, C), and from each as many: (R', C). Collective. Backward: the way back.

    sent, received: how many, one number per rank; 0 is fine.
    """
    global begun
    begun += 1
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=_resolve_process_group(group))
    return arrived


@torch.library.custom_op('expert_manual::exchange_counts', mutates_args=())
def exchange_counts(counts: Tensor, group: str) -> Tensor:
    """Row i of counts (t, n), whole numbers, goes to rank i; row i of what is returned is from there. Collective."""
    global begun
    begun += 1
    arrived = torch.empty_like(counts)
    dist.all_to_all_single(arrived, counts.contiguous(), group=_resolve_process_group(group))
    return arrived


@exchange.register_fake
def shape_of_exchanged(rows, sent, received, group):  # what planning/activations.py has to know
    return rows.new_empty(sum(received), *rows.shape[1:])


@exchange_counts.register_fake
def shape_of_counts(counts, group):
    return torch.empty_like(counts)


def keep_sizes(ctx, inputs, output):
    _, ctx.sent, ctx.received, ctx.group = inputs


def way_back(ctx, gradient):
    return exchange(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


exchange.register_autograd(way_back, setup_context=keep_sizes)
