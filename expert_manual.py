"""
Expert parallelism by hand: the experts of a mixture lie on different ranks, and tokens travel to those that they chose.

    mesh = init_device_mesh('cuda', (2, 4), mesh_dim_names=('shard', 'expert'))  # 4 ranks share the experts, 2 times
    expert_manual.split(model, Ranks.of(mesh['expert']))  # in place, before FSDP; this rank keeps a quarter of them
    loss_sum, ce_sum = model(x, y)  # each rank calls it with tokens of its own, all ranks as often
    loss_sum.backward()

Most weights of a mixture belong to experts, and a token meets only a few of them. FSDP alone would gather all experts
in every layer and micro-step, to use each for a few tokens. Here an expert stays where it is, and computes the tokens
of t ranks that chose it. One layer with 4 experts, 2 for each token, on t = 2 ranks; a1 is token a for expert 1:

                         rank 0: tokens a, b         rank 1: tokens c, d
    sorted by expert     a0 b0 a1 | b2               d0 | c2 d2 c3              what is behind | is rank 1's
    dispatch             a0 b0 a1 d0                 b2 c2 d2 c3                an all-to-all
    sorted again         a0 b0 d0 | a1               b2 c2 d2 | c3              what is behind | is the next expert's
    compute              expert 0, expert 1          expert 2, expert 3
    sorted back          a0 b0 a1 d0                 b2 c2 d2 c3
    combine              a0 b0 a1 | b2               d0 | c2 d2 c3              the same all-to-all backwards
    weigh and sum        a = a0 + a1, b = b0 + b2    c = c2 + c3, d = d0 + d2   as without, in experts.MoE

Who holds what?         Rank i of the t has the experts i E/t to (i+1) E/t, which are consecutive rows of each weight.
                        The rest of the model is the same on all ranks. The data is not: each rank has its own.
How do sizes arrive?    How many rows travel is not known before the routers have chosen. So the ranks first exchange
                        these counts, t x E/t numbers, and the host waits for them, because it has to tell an all-to-all
                        its sizes. It is the one wait in a layer (torchtitan has it as well).
In backward?            The gradients of the rows go back the way that the rows came: the same all-to-all, with the two
                        lists of sizes exchanged. A part may be empty, and a rank may have nothing to compute at all.
And FSDP?               Dense weights are sharded over all W ranks. An expert is on only W/t ranks, one in each group of
                        t, and is sharded over those.
What is its gradient?   An expert has seen the tokens of t ranks, so its gradient is already the sum over these. The sum
                        over its W/t ranks is then that over all W, and the average divides by W, as for dense weights.
                        (FSDP, left to itself, would divide by the number of ranks that it has summed over, W/t.)
What crosses the wire?  Per rank, layer and micro-step, with N tokens of C numbers on a rank, k experts for each, and as
                        many tokens for every expert: (t-1)/t N k C numbers in the compute dtype for dispatch and again
                        for combine, in forward and again in backward, so 4 of them. activation_checkpointing=full and
                        offload do forward twice, which makes 6. selective keeps the results.
When is that less?      FSDP alone gathers all experts of a layer, 3 E M C numbers, twice in each micro-step. With E/t
                        experts on a rank it gathers a t-th of that. This saves more than is sent if 2 * 3 E M > 4 N k,
                        so with many small experts, and not too many tokens on a rank.
And a checkpoint?       It has whole weights. Share.slices says which rows of them this rank has.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group

from experts import Experts, TakeRows
from layout import Share, Slice
from model import SAVED_OPS, ModelConfig
from system import collectives

# --- the split --------------------------------------------------------------------------------------------------------


def check(keys, layout, shape):
    """Raise ValueError for a model whose experts cannot be divided among ranks, or a run that needs whole ones."""
    given = f'expert_parallel={layout.expert}'
    n_experts = shape.n_experts if isinstance(shape, ModelConfig) else 0
    if not n_experts and not isinstance(shape, ModelConfig):
        way = 'use --native=True, or ' if shape.arch in ('qwen2_moe', 'qwen3_moe', 'dots1', 'glm4_moe') else ''
        raise ValueError(
            f'{given} with init_from={keys["init_from"]}: of mixtures model.py computes those of Qwen2, Qwen3, '
            f'dots.llm1 and GLM-4.5: {way}leave it at 1, FSDP shards all weights'
        )
    if not n_experts:
        raise ValueError(f'{given} with n_experts=0: there are none to divide: leave it at 1, or take a mixture')
    of = 'ranks that shard the model'
    if layout.is_diloco:
        of = f'ranks of a replica (num_replicas={layout.replica})'
    elif layout.replicate > 1:
        of += f' (replicate_size={layout.replicate})'
    together = math.gcd(layout.shard, n_experts)
    if together % layout.expert:
        divisors = ', '.join(str(n) for n in range(1, together + 1) if together % n == 0)
        raise ValueError(
            f'{given} does not divide n_experts={n_experts} and the {layout.shard} {of}: use one of {divisors}, or '
            'start other ranks'
        )
    if keys['activation_checkpointing'] == 'selective' and keys['fsdp_impl'] == 'torch':
        raise ValueError(
            f'{given} with activation_checkpointing=selective: fully_shard gathers experts inside of what is '
            'checkpointed, which torch refuses: use --fsdp_impl=manual, or --activation_checkpointing=full'
        )


def rows_of_experts(plan):
    """Rows that arrive at a rank's experts per layer and micro-step, if all experts get equally many: as many as its
    own tokens send. At most it is expert_parallel times that, if all ranks choose only this rank's experts."""
    return plan.tokens * plan.keys['experts_per_token']


def holds(plan):
    """Nothing more: the rows that travel are activations, and count as such."""
    return {}


def sends(plan):
    """See "What crosses the wire?" above. If routers are not balanced, some ranks send more, others less."""
    ranks, exchanges = plan.layout.expert, 6 if plan.recomputes else 4
    nbytes = rows_of_experts(plan) * plan.keys['n_embd'] * plan.compute_bytes
    layers = plan.blocks - plan.keys['dense_layers']
    return {'tokens of experts': plan.layout.micro_steps * layers * exchanges * (ranks - 1) / ranks * nbytes}


def split(model, ranks, share=None):
    """Keep this rank's part of a GPT's experts, in place; from here on the model computes together with other ranks.

    ranks: layout.Ranks, whose size divides the number of experts. share: the Share that is told of the rows that are
    here. Call it before FSDP. A model on the meta device stays there.

    Returns the modules with experts, which FSDP has to shard over the ranks that have the same ones.
    """
    share = share or Share()
    mixtures = [block.mlp for block in model.blocks if block.is_mixture]
    for mixture in mixtures:
        mixture.experts = SharedExperts(mixture.experts, ranks)
    for name, parameter in [*model.named_parameters()]:
        if '.experts.' in name:
            module_name, _, own_name = name.rpartition('.')
            rows = parameter.shape[0] // ranks.size
            share.slices[name] = Slice(parameter.shape, 0, ((ranks.rank * rows, rows),))
            part = share.slices[name].of(parameter.detach()).clone()
            setattr(model.get_submodule(module_name), own_name, nn.Parameter(part))
    return [mixture.experts for mixture in mixtures]


class SharedExperts(Experts):
    """Some of the experts, for rows of several ranks. Seen from outside it is Experts: rows for all E, by expert."""

    def __init__(self, experts, ranks):
        nn.Module.__init__(self)
        self.gate, self.up, self.down, self.ranks = experts.gate, experts.up, experts.down, ranks
        self.here = self.gate.n_matrices // ranks.size  # E/t
        for linear in (self.gate, self.up, self.down):
            linear.n_matrices = self.here

    def forward(self, rows, ends):
        """rows (R, C), sorted by expert; ends (E) int32, as in Experts.forward(). Returns (R, C), in the same order."""
        counts = ends.diff(prepend=ends.new_zeros(1)).view(-1, self.here)  # (t, E/t): to each rank, for its experts
        arriving = send_counts(counts, self.ranks.group)  # (t, E/t): from each rank, for the experts of this one
        sent, received = rows_by_rank(counts, arriving, rows)
        rows = send_rows(rows, sent, received, self.ranks.group)  # sorted by rank, those of a rank by expert

        expert = torch.arange(self.here, device=rows.device).repeat(len(sent))  # of each of the t x E/t parts
        expert = expert.repeat_interleave(arriving.flatten(), output_size=sum(received))  # (R'), of each row
        order = expert.argsort(stable=True)
        place = order.argsort()
        rows = TakeRows.apply(rows, order, place[:, None])
        rows = super().forward(rows, arriving.sum(0).cumsum(0, dtype=torch.int32))
        rows = TakeRows.apply(rows, place, order[:, None])
        return send_rows(rows, received, sent, self.ranks.group)


def rows_by_rank(counts, arriving, rows):
    """How many of the rows (R, C) go to each rank, and how many come from each, as lists. The host waits for them."""
    return torch.stack((counts.sum(1), arriving.sum(1))).tolist()


# --- sending ----------------------------------------------------------------------------------------------------------
# Custom operators rather than an autograd.Function, because selective checkpointing knows operators by their names.

SAVED_OPS += ['expert_manual.send_rows.default', 'expert_manual.send_counts.default']


@torch.library.custom_op('expert_manual::send_rows', mutates_args=())
def send_rows(rows: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    """Send consecutive rows (R, C) to the ranks in turn, and return those that arrive, (R', C), by rank. Collective.

    sent, received: how many rows go to each rank and come from it; 0 is fine. Backward sends the gradients back.
    """
    collectives.begun += 1
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=_resolve_process_group(group))
    return arrived


@torch.library.custom_op('expert_manual::send_counts', mutates_args=())
def send_counts(counts: Tensor, group: str) -> Tensor:
    """Send row i of counts (t, n), integers, to rank i; row i of what is returned comes from rank i. Collective."""
    collectives.begun += 1
    arrived = torch.empty_like(counts)
    dist.all_to_all_single(arrived, counts.contiguous(), group=_resolve_process_group(group))
    return arrived


@send_rows.register_fake
def shape_of_rows(rows, sent, received, group):  # for planning/activations.py
    return rows.new_empty(sum(received), *rows.shape[1:])


@send_counts.register_fake
def shape_of_counts(counts, group):
    return torch.empty_like(counts)


def keep_sizes(ctx, inputs, output):
    _, ctx.sent, ctx.received, ctx.group = inputs


def way_back(ctx, gradient):
    return send_rows(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


send_rows.register_autograd(way_back, setup_context=keep_sizes)
