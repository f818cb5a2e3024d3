"""
A mixture of experts (MoE), which takes the place of the MLP of a block.

A block has E small MLPs, the experts, and each token is computed by only k of them, so the block has E/k times as many
MLP weights as a token uses. A router, a matrix with one row per expert, learns which k to choose. Beside them there may
be a shared expert, which computes every token, so that the others need not all learn what every token needs
(DeepSeekMoE, arXiv 2401.06066).

The rule is that of Qwen3-MoE in transformers; the keys router_scores, router_normalize, router_scale, shared_expert_dim
and shared_expert_gate make it that of Qwen2-MoE or of DeepSeek-V3 (arXiv 2412.19437). An expert takes any number of
tokens: with a limit some tokens would have to be dropped, and which ones would depend on what else is in the batch.

Letters for shapes are those of model.py, and R rows, each of a token and one of its k experts.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Balance(nn.Module):
    """What keeps the experts of one router in balance. It is the base class of Router, and stands beside a
    router of transformers (huggingface/).

    Left alone, training sends more and more tokens to a few experts, which learn from them and so are chosen again,
    while other experts die. The usual remedy is the loss in loss_sum(); another one is `bias`. Both depend on `load`
    (E), a buffer that is saved in checkpoints: how many of a token's k choices went to each expert in the step before,
    on average over the global batch, so that the loads sum to k. optim.balance_experts() updates it once a step.
    """

    def __init__(self, n_experts, k, aux, z, bias_rate=0.0, scores='softmax'):
        super().__init__()
        self.n_experts, self.k, self.scores = n_experts, k, scores
        self.aux, self.z, self.bias_rate = aux, z, bias_rate
        self.register_buffer('load', torch.empty(self.n_experts))
        has_bias = bias_rate or scores == 'sigmoid'  # DeepSeek-V3's; where the rate is 0 it stays as it was loaded
        self.register_buffer('bias', torch.empty(self.n_experts) if has_bias else None)
        # This rank's counts in the step so far: the tokens of each expert, and last the sum over tokens of the router's
        # entropy. In float64, which counts up to 2^53 one by one.
        self.register_buffer('seen', torch.empty(self.n_experts + 1, dtype=torch.float64), persistent=False)
        self.seen_by_all = None  # the same of all ranks in the last step, for the log
        self.begin()

    def begin(self):
        """Reset to the state before the first step: a uniform load."""
        self.load.fill_(self.k / self.n_experts)
        self.seen.zero_()
        if self.bias is not None:
            self.bias.zero_()

    def loss_sum(self, chosen, logits, valid):
        """
        What this router adds to the loss: an fp32 sum over the `valid` (N) tokens, which are counted in `seen` on the
        way. chosen: (N, k); logits: (N, E). The model takes the mean over the routers of its layers.

            router_aux * E * sum over e of load[e] * p[e]  +  router_z * logsumexp(logits)^2

        p is the softmax of the logits, or their sigmoids divided by the sum of these (DeepSeek-V3, equation 19).
        The first term is the balancing loss of the Switch Transformer (arXiv 2101.03961) as transformers scales it, so
        that E * sum is k under perfect balance; its gradient lowers p where the load is high. Usually the load is that
        of the same tokens. But then the loss of a micro-batch on one rank is not its part of the loss of the global
        batch, which knows the load of the whole (and works better, arXiv 2501.11873), and the gradient would depend on
        the number of ranks and of micro-steps. With the load of the step before, the term is a sum over tokens like the
        cross-entropy, and the gradient depends on neither. The second term keeps logits small (arXiv 2202.08906).
        """
        lse = logits.logsumexp(-1)  # (N)
        log_p = logits - lse[:, None] if self.scores == 'softmax' else F.logsigmoid(logits).log_softmax(-1)
        p = log_p.exp()  # (N, E)
        with torch.no_grad():
            entropy = -(p * log_p).sum(-1)  # (N)
            self.seen[-1] += (entropy * valid).sum()
            counted = valid.double().repeat_interleave(self.k)  # (N*k)
            self.seen.scatter_add_(0, chosen.flatten(), counted)  # sums of ones: the same in any order
        return ((self.aux * self.n_experts * (p @ self.load) + self.z * lse**2) * valid).sum()


class Router(Balance):
    """Chooses k of E experts for each token, and the weight of each of their outputs."""

    def __init__(self, config):
        rates = config.router_aux, config.router_z, config.router_bias
        super().__init__(config.n_experts, config.experts_per_token, *rates, config.router_scores)
        self.normalize, self.scale = config.router_normalize, config.router_scale
        self.groups, self.groups_per_token = config.expert_groups, config.groups_per_token
        self.weight = nn.Parameter(torch.empty(self.n_experts, config.n_embd))

    def forward(self, x, choice=None):
        """x (N, C) -> weights (N, k); chosen (N, k), numbers of experts; logits (N, E).

        The score of an expert is its part of the softmax of all logits, or the sigmoid of its own. The k highest scores
        win, and are the weights: divided by their sum (normalize), and times `scale`.

        This is computed in fp32 whatever the dtype of x, because with bf16 logits 1 token in 30 has a tie between the
        last expert that is chosen and the next one. The router's weight is rounded to the dtype of x first, since under
        fully_shard it arrives rounded.
        choice: a list for activation checkpointing, empty at first, in which the first forward leaves its choice for
        the second. If a GPU chose again, a near tie could end differently, and backward would not match forward.
        """
        logits = F.linear(x.float(), self.weight.to(x.dtype).float())  # (N, E)
        p = logits.softmax(-1) if self.scores == 'softmax' else logits.sigmoid()
        if choice:
            chosen = choice[0]
        else:
            chosen = self.ranked(p.detach())[0].topk(self.k).indices
            if choice is not None:
                choice.append(chosen)
        weights = p.gather(1, chosen)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights if self.scale == 1 else weights * self.scale, chosen, logits

    def ranked(self, p):
        """What a token's choice goes by, from its scores p (N, E): scores of experts (N, E), and of groups (N, G) of
        consecutive experts, None without groups. The bias counts here alone. A group's score is the sum of the best two
        in it, and experts outside the best groups are excluded."""
        scores = p if self.bias is None else p + self.bias
        if self.groups == 1:
            return scores, None
        scores = scores.unflatten(1, (self.groups, -1))
        of_groups = scores.topk(2).values.sum(-1)
        best = of_groups.topk(self.groups_per_token).indices
        is_out = torch.ones_like(of_groups, dtype=torch.bool).scatter(1, best, False)
        return scores.masked_fill(is_out[..., None], -math.inf).flatten(1), of_groups


class ExpertLinear(nn.Module):
    """One matrix (out, in) for each expert, stacked by rows in one weight (E*out, in).

    Having two dimensions, the weight is an ordinary matrix for initial values, FSDP, checkpoints and optimizers: it is
    cut by rows into any number of parts, and its fan_in is the number of columns. Only this class views it as
    (E, out, in).
    """

    def __init__(self, config, inputs, outputs):
        super().__init__()
        self.n_matrices = config.n_experts  # fused in the weight; Muon treats each by itself
        self.active = config.experts_per_token / config.n_experts  # the share of the weights that a token meets
        self.weight = nn.Parameter(torch.empty(config.n_experts * outputs, inputs))

    def forward(self, rows, where):
        """rows (R, in) -> (R, out); both as in multiply_by_expert()."""
        matrices = self.weight.to(rows.dtype).unflatten(0, (self.n_matrices, -1))  # (E, out, in)
        return multiply_by_expert(rows, matrices.mT, where)


def multiply_by_expert(rows, matrices, where):
    """rows (R, in), first those of the first expert, then those of the second, ..., each times the matrix of its expert
    -> (R, out). matrices: (E, in, out).

    where: how many rows each expert has, as a list; or the index behind its last row, as a tensor on the device.
    """
    if isinstance(where, torch.Tensor):
        return F.grouped_mm(rows, matrices, offs=where)
    parts = zip(rows.split(where), matrices.unbind(), strict=True)  # some may be empty
    return torch.cat([part @ matrix for part, matrix in parts])


class Experts(nn.Module):
    """E MLPs with a SiLU gate (SwiGLU), each for rows of its own."""

    def __init__(self, config):
        super().__init__()
        self.gate = ExpertLinear(config, config.n_embd, config.expert_hidden_dim)
        self.up = ExpertLinear(config, config.n_embd, config.expert_hidden_dim)
        self.down = ExpertLinear(config, config.expert_hidden_dim, config.n_embd)

    def forward(self, rows, ends):
        """rows (R, C), sorted by expert -> (R, C). ends (E) int32: the index behind the last row of each expert."""
        where = where_of_each(ends, rows)
        return self.down(F.silu(self.gate(rows, where)) * self.up(rows, where), where)


def where_of_each(ends, rows, is_even=True):
    """The rows (R, C) of each expert as multiply_by_expert() takes them.

    In bf16 a GPU computes all experts at once, and the host need not know how many rows each of them has. Otherwise
    one matmul follows the other: a CPU loses nothing by that, and a GPU has no other way in fp32, or if is_even is
    False: some matrix's size is no multiple of 8.
    """
    at_once = rows.dtype == torch.bfloat16 and rows.device.type in ('cuda', 'meta') and rows.shape[0] > 0
    return ends if at_once and is_even else rows_of_each(ends, rows)


def rows_of_each(ends, rows):
    """How many of the rows (R, C) each expert has: a list, for which the host waits."""
    return ends.diff(prepend=ends.new_zeros(1)).tolist()


class TakeRows(torch.autograd.Function):
    """x[index] of x (N, C), where it is known to which rows of the result each row of x goes: `places` (N, n).

    The gradient of a row of x can therefore be gathered from these places and summed. Autograd does not know them. It
    would scatter gradients and add those that meet: on a GPU in an order that changes (index_add), or after it has
    sorted the index once more.
    """

    @staticmethod
    def forward(ctx, x, index, places):
        ctx.save_for_backward(places)
        return x[index]

    @staticmethod
    def backward(ctx, gradient):
        (places,) = ctx.saved_tensors
        return gradient[places].sum(1), None, None


class MoE(nn.Module):
    """A mixture of experts in the place of the MLP."""

    def __init__(self, config, shared=None):
        """shared: a module that computes every token, beside the experts; None = there is none."""
        super().__init__()
        self.router, self.experts, self.shared = Router(config), Experts(config), shared

    def forward(self, x, choice=None):
        """x (B, T, C) -> y (B, T, C), and what the router needs for its loss: (chosen (N, k), logits (N, E)).

        choice: as in Router.forward().
        """
        tokens = x.flatten(0, 1)  # (N, C)
        weights, chosen, logits = self.router(tokens, choice)
        y = through_experts(tokens, chosen, weights.to(x.dtype), self.router.n_experts, self.experts)
        if self.shared is not None:
            y = y + self.shared(tokens)
        return y.view_as(x), (chosen, logits)


def through_experts(tokens, chosen, weights, n_experts, experts):
    """tokens (N, C), each through the k experts that it chose -> (N, C), the sum of their outputs by weights (N, k).

    chosen: (N, k), numbers of experts. experts: a function of (rows (R, C), sorted by expert; ends (E) int32, the index
    behind the last row of each expert) -> (R, C).
    """
    k = chosen.shape[1]
    # A row for each choice of each token: first those of the first expert, then those of the second, ...
    # Row r is choice order[r] % k of token order[r] // k.
    expert, order = chosen.flatten().sort(stable=True)  # (N*k) both
    numbers = torch.arange(n_experts, device=tokens.device)
    ends = torch.searchsorted(expert, numbers, right=True, out_int32=True)  # (E)
    row = order.argsort()  # (N*k): the row of each choice
    rows = TakeRows.apply(tokens, order // k, row.view(-1, k))  # (N*k, C)
    rows = experts(rows, ends)
    rows = TakeRows.apply(rows, row, order[:, None]).unflatten(0, (-1, k))  # (N, k, C), back to their tokens
    return (rows * weights[..., None]).sum(1)
