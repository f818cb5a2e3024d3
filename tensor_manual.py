"""
Tensor parallelism by hand: every matrix is cut over several ranks, which then compute each token together.

    mesh = init_device_mesh('cuda', (2, 4), mesh_dim_names=('shard', 'tensor'))  # 4 ranks hold each matrix, 2 times
    tensor = tensor_manual.Split(model, Ranks.of(mesh['tensor']))  # in place, before FSDP shards over mesh['shard']
    loss_sum, ce_sum = model(x, y)  # x, y (B, T): the same on these 4 ranks, and so are both sums
    loss_sum.backward()
    tensor.sum_partial_gradients()

Two matrices in a row need only one sum over the ranks (Megatron-LM, arXiv 1909.08053, section 3). With t ranks, and for
an f that works by columns, like GELU and SwiGLU, or by heads, like attention:

    Y = f(X A) B = sum_i f(X A_i) B_i       A = [A_1 ... A_t] cut by outputs, B by inputs: rank i needs X, A_i and B_i

Between these pairs come norms, dropout and residuals, which look at one token at a time. There is no need to compute
them, and to keep their activations, t times, so rank i does only tokens i T/t to (i+1) T/t of each sequence ("sequence
parallelism", arXiv 2205.05198, section 4.2). X then arrives by an all-gather, and Y leaves by a reduce-scatter:

      (B, T/t, C)            (B, T, C)             (B, T, H/t D)              (B, T, C) partial   (B, T/t, C)
    ---- norm ---- all-gather -- qkv, by heads ---- attention, H/t heads ---- proj -- reduce-scatter ---- + ----
    ---- norm ---- all-gather -- up, gate by rows -------- GELU, SwiGLU ----- down -- reduce-scatter ---- + ----

What is whose?          Cut by rows: qkv (each of q, k, v by heads), up, gate, embedding and head. Cut by columns: proj
                        and down. Norms, positions and the biases of proj and down have the same values on all ranks.
In backward?            Every rank has used all of X, so the gradient of X is a sum over ranks: the gradient of an
                        all-gather is a reduce-scatter, and the other way round. So backward sends as many bytes again.
Which gradients are     Those of matrices, since all tokens passed through them. A parameter that is on all ranks has on
whole?                  each seen only the tokens of this rank (q_norm and k_norm: its heads), so its gradients are
                        summed over the ranks, once per step.
Embedding and head?     Cut by tokens of the vocabulary. Each rank looks up the tokens that it has, and takes 0 for the
                        others; the reduce-scatter sums these. Of the logits each rank has some columns, and
                        log_softmax() asks the other ranks for three numbers.
What crosses the wire?  Per rank, micro-step and layer 8 (t-1)/t B T C numbers in the compute dtype: 4 in forward, 4 in
                        backward. Selective checkpointing gathers X again (10), full also repeats the first
                        reduce-scatter (11). Embedding and head together send 4 of these, the loss 3 fp32 numbers a
                        token.
What does a rank hold?  A smaller model, with H/t heads and an MLP of M/t. FSDP shards it over the ranks that have the
                        same part.
And a checkpoint?       It has whole matrices. Share.slices says which part of each this rank has.
"""

import math
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group

import muon
from exchange import collectives
from layout import FP32, Share, Slice
from loss import cross_entropy
from model import SAVED_OPS, Head, Linear, ModelConfig
from pieces import local

# How a module's parameters are cut: 0 by rows, which are outputs; 1 by the columns of the weight, which are inputs.
CUT_ALONG = {'qkv': 0, 'up': 0, 'gate': 0, 'embed': 0, 'head': 0, 'proj': 1, 'down': 1}


# --- the split --------------------------------------------------------------------------------------------------------


def check(keys, layout, shape):
    """Raise ValueError for a model that cannot be cut over ranks, or a run that needs whole matrices."""
    ranks, given = layout.tensor, f'tensor_parallel={layout.tensor}'
    if not isinstance(shape, ModelConfig):
        raise ValueError(f'{given}: models of transformers are not cut; leave it at 1, FSDP shards them')
    if shape.n_experts:
        raise ValueError(
            f'n_experts={shape.n_experts} with {given}: experts are not cut: leave it at 1, and use --expert_parallel, '
            'or FSDP alone'
        )
    if keys['optimizer_dtype'] == 'int8':
        raise ValueError(
            f'{given} with optimizer_dtype=int8, whose blocks are not cut: use --optimizer_dtype=bfloat16, '
            'or leave it at 1'
        )
    sizes = {key: keys[key] for key in ('n_head', 'n_kv_head', 'mlp_hidden_dim')}
    units = dict.fromkeys(sizes, ranks)  # of which the sizes have to be multiples
    names = {key: f'{key}={size}' for key, size in sizes.items()}
    sizes['vocab_size'], units['vocab_size'] = shape.padded_vocab_size, math.lcm(ranks, 64)
    names['vocab_size'] = f'the padded vocabulary of {sizes["vocab_size"]}'
    context = layout.context
    sizes['block_size'], units['block_size'] = keys['block_size'] // context, math.lcm(ranks * context, 64)
    names['block_size'] = f'block_size={keys["block_size"]}'
    if context > 1:
        names['block_size'] = f'the {sizes["block_size"]} tokens of a rank, block_size / context_parallel={context}'
    for key, size in sizes.items():
        if size % ranks:
            below = keys[key] // units[key] * units[key]
            # Suggest no smaller vocabulary, for that would need another tokenizer.
            others = [n for n in (below, below + units[key]) if n and (key != 'vocab_size' or n > below)]
            common = math.gcd(*sizes.values())
            divisors = [str(n) for n in range(2, common + 1) if common % n == 0]
            or_so = f', or tensor_parallel={" or ".join(divisors)} with all sizes as they are' if divisors else ''
            advice = f'use --{key}={" or ".join(map(str, others))}{or_so}'
            raise ValueError(f'{given} does not divide {names[key]}: {advice}')


# Collectives of a block in a micro-step: 4 in forward, 4 in backward, and those that are recomputed.
COLLECTIVES = {'none': 8, 'selective': 10, 'full': 11, 'offload': 11}


def holds(plan):
    """What arrives and what leaves, before it is put in order. (The rest is that of a smaller model.)"""
    return {'travelling': 2 * plan.tokens * plan.keys['n_embd'] * plan.compute_bytes}


def sends(plan):
    """See "What crosses the wire?" above; and once per step, in fp32, what sum_partial_gradients() sums, and what
    Muon sends."""
    keys, ranks, (has_embedding, has_head) = plan.keys, plan.layout.tensor, plan.ends
    times = plan.blocks * COLLECTIVES[keys['activation_checkpointing']] + 2 * (has_embedding + has_head)
    bytes_per_token = times * keys['n_embd'] * plan.compute_bytes / ranks + 3 * FP32 * has_head
    uncut = [parameter for name, parameter in plan.weights.named.items() if plan.share.slices[name].dim is None]
    return {
        'activations': plan.layout.micro_steps * (ranks - 1) * plan.tokens * bytes_per_token,
        'all-reduce': 2 * (ranks - 1) * FP32 * plan.weights.count(uncut) / ranks,
    } | muon.sends_of_parts(plan)


class Split:
    """Cuts a GPT in place: it keeps this rank's part of every matrix, and computes together with the other ranks."""

    def __init__(self, model, ranks, share=None):
        """model: a GPT, or a pipeline_manual.Stage of one, before FSDP. One on the meta device stays there. share: the
        Share that is told of all slices.

        ranks.size has to divide the numbers of query and key/value heads, mlp_hidden_dim, the rows of the embedding and
        the tokens of a sequence; check() refuses others.
        """
        self.model, self.ranks, self.share = model, ranks, share or Share()
        slices = {name: slice_of(model, name, p.shape, ranks) for name, p in model.named_parameters()}
        self.share.slices.update(slices)
        self.share.tensor = ranks
        for name, parameter in [*model.named_parameters()]:
            module_name, _, own_name = name.rpartition('.')
            part = slices[name].of(parameter.detach()).clone()
            setattr(model.get_submodule(module_name), own_name, nn.Parameter(part))
        blocks = [*model.blocks.children()]
        for block in blocks:
            attn, mlp = block.attn, block.mlp
            attn.n_head, attn.n_kv_head = attn.n_head // ranks.size, attn.n_kv_head // ranks.size
            attn.heads_of_qkv = tuple(heads // ranks.size for heads in attn.heads_of_qkv)
            attn.proj, mlp.down = SummedLinear(attn.proj, ranks), SummedLinear(mlp.down, ranks)
        # What follows a norm is cut, and needs the tokens of all ranks. (Only the last stage has a final norm.)
        norms = [norm for block in blocks for norm in (block.attn_norm, block.mlp_norm)]
        for norm in filter(None, [*norms, model.final_norm]):
            norm.register_forward_hook(lambda module, args, output: all_gather(output, ranks.size, ranks.group))
        if model.embed is not None:
            model.embed = VocabularyEmbedding(model.embed, ranks, model.compute_dtype)
        if model.pos_embed is not None:
            model.pos_embed = PositionEmbedding(model.pos_embed, ranks)
        if model.head is not None:
            model.head = SplitHead(model.head, model.config, ranks)
        model.tie()

    def on_all_ranks(self):
        """The parameters that are not cut, and so have the same values on all ranks."""
        return [self.model.get_parameter(name) for name, part in self.share.slices.items() if part.dim is None]

    def sum_partial_gradients(self):
        """Sum the gradients of uncut parameters: each rank has those of its tokens. One all-reduce, after backward."""
        gradients = [local(parameter.grad) for parameter in self.on_all_ranks() if parameter.grad is not None]
        gradients = [gradient for gradient in gradients if gradient.numel()]  # FSDP leaves some ranks no rows
        if gradients:
            total = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(total, group=_resolve_process_group(self.ranks.group))
            parts = total.split([gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])

    def norm_groups(self):
        """For optim.clip_grad_norm_(): [(process group, {uncut parameter: the number of ranks, which all hold it})]."""
        return [(_resolve_process_group(self.ranks.group), dict.fromkeys(self.on_all_ranks(), self.ranks.size))]


def slice_of(model, name, shape, ranks):
    """The Slice that this rank has of the parameter called `name`. shape: of the whole parameter."""
    *_, module, kind = name.split('.')  # blocks.3.attn, qkv, weight
    dim = CUT_ALONG.get(module)
    if dim is None or (dim == 1 and kind == 'bias'):
        return Slice(shape, None, ())
    fused = [shape[dim]]  # sizes of the matrices in it, each of which is cut by itself
    if module == 'qkv':
        attn = model.get_submodule(name.rpartition('.qkv')[0])
        fused = [heads * attn.head_dim for heads in attn.heads_of_qkv]
    ranges, begin = [], 0
    for size in fused:
        assert size % ranks.size == 0, f'{name}: {size} on {ranks.size} ranks'
        ranges.append((begin + ranks.rank * size // ranks.size, size // ranks.size))
        begin += size
    return Slice(shape, dim, tuple(ranges))


class SummedLinear(Linear):
    """A Linear cut by columns, for this rank's part of the inputs: (B, T, inputs/t) -> (B, T/t, outputs)."""

    def __init__(self, linear, ranks):
        super().__init__(linear.in_features // ranks.size, linear.out_features, bias=False, device='meta')
        self.weight, self.bias, self.ranks, self.matmul = linear.weight, linear.bias, ranks, linear.matmul

    def forward(self, x):
        y = reduce_scatter(self.matmul(x, self.weight), self.ranks.size, self.ranks.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)  # once, after the sum


class VocabularyEmbedding(nn.Embedding):
    """An embedding cut by rows, V/t on each rank: tokens (B, T) -> (B, T/t, C)."""

    def __init__(self, embedding, ranks, dtype):
        rows, columns = embedding.weight.shape
        super().__init__(rows, columns, device='meta')
        self.weight, self.ranks, self.dtype = embedding.weight, ranks, dtype  # dtype: of what is sent

    def forward(self, x):
        row = x - self.ranks.rank * self.weight.shape[0]
        is_elsewhere = (row < 0) | (row >= self.weight.shape[0])
        found = F.embedding(row.masked_fill(is_elsewhere, 0), self.weight)
        found = found.masked_fill(is_elsewhere[..., None], 0)  # and no gradient for row 0
        return reduce_scatter(found.to(self.dtype), self.ranks.size, self.ranks.group)


class SplitHead(Head):
    """A head cut by rows, V/t on each rank. The loss is found from all ranks' columns of the logits."""

    def __init__(self, head, config, ranks):
        with torch.device('meta'):
            super().__init__(config)
        self.weight, self.ranks = head.weight, ranks

    def whole(self):
        return all_gather(self.weight[None], self.ranks.size, self.ranks.group)[0]

    def loss(self, h, y, _):  # on a GPU also uncompiled: torch.compile's kernel does not ask other ranks
        first = self.ranks.rank * self.weight.shape[0]
        kernel = partial(cross_entropy, first=first, normalize=partial(log_softmax, ranks=self.ranks))
        return super().loss(h, y, kernel)


class PositionEmbedding(nn.Embedding):
    """The learned positions of this rank's tokens: positions (..., T) -> (..., T/t, C)."""

    def __init__(self, embedding, ranks):
        super().__init__(*embedding.weight.shape, device='meta')
        self.weight, self.ranks = embedding.weight, ranks

    def forward(self, positions):
        return super().forward(positions.chunk(self.ranks.size, -1)[self.ranks.rank])


# --- collectives that autograd knows ----------------------------------------------------------------------------------
# Custom operators rather than autograd.Functions, because torch.compile treats each as a single kernel, and selective
# checkpointing knows them by their names.

SAVED_OPS.append('tensor_manual.reduce_scatter.default')


@torch.library.custom_op('tensor_manual::all_gather', mutates_args=())
def all_gather(x: Tensor, ranks: int, group: str) -> Tensor:
    """The slices (B, T/t, ...) of all ranks, one behind the other: (B, T, ...). Backward: reduce_scatter()."""
    gathered = x.new_empty(ranks, *x.shape)
    if x.is_cuda:
        collectives.all_gather(gathered, x.contiguous(), group=_resolve_process_group(group))
    else:  # gloo's all-gather copies more than an all-to-all that sends the same to everyone, see fsdp_manual.py
        to_send = x.expand_as(gathered).contiguous()
        dist.all_to_all_single(gathered, to_send, group=_resolve_process_group(group))
    return gathered.transpose(0, 1).flatten(1, 2)


@torch.library.custom_op('tensor_manual::reduce_scatter', mutates_args=())
def reduce_scatter(x: Tensor, ranks: int, group: str) -> Tensor:
    """This rank's slice (B, T/t, ...) of the sum of all ranks' x (B, T, ...). Backward: all_gather().

    On a CPU the sum is computed in fp32 and rounded to x's dtype at the end. NCCL's ring adds in x's dtype, so a sum in
    bf16 is rounded at each of its t - 1 hops (NVIDIA/nccl issue 1026). For two ranks that is the same number, for more
    ranks a little less exact.
    """
    to_send = x.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()  # (t, B, T/t, ...)
    if x.is_cuda:
        total = torch.empty_like(to_send[0])
        collectives.reduce_scatter(total, to_send, group=_resolve_process_group(group))
        return total
    received = torch.empty_like(to_send)  # gloo's own reduce-scatter is an all-reduce inside: twice the bytes
    dist.all_to_all_single(received, to_send, group=_resolve_process_group(group))
    return received.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def keep_ranks(ctx, inputs, output):
    ctx.ranks = inputs[1:]


def gradient_of_gathered(ctx, grad):
    return reduce_scatter(grad, *ctx.ranks), None, None


def gradient_of_scattered(ctx, grad):
    return all_gather(grad, *ctx.ranks), None, None


all_gather.register_autograd(gradient_of_gathered, setup_context=keep_ranks)
reduce_scatter.register_autograd(gradient_of_scattered, setup_context=keep_ranks)


@all_gather.register_fake
def shape_gathered(x, ranks, group):
    return x.new_empty(x.shape[0], ranks * x.shape[1], *x.shape[2:])


@reduce_scatter.register_fake
def shape_scattered(x, ranks, group):
    return x.new_empty(x.shape[0], x.shape[1] // ranks, *x.shape[2:])


# --- the loss ---------------------------------------------------------------------------------------------------------


def log_softmax(logits, index, here, ranks):
    """loss.log_softmax() where each rank has some columns of the logits, (n, V/t). Every rank gets the same sums.

    The ranks exchange three numbers per token: the highest logit m_i of rank i's columns, s_i = sum exp(logit - m_i),
    and the target's logit, or 0 where another rank has it. Then m = max m_i and lse = m + log sum_i s_i exp(m_i - m).
    """
    logits = logits.float()
    m = logits.amax(-1).clamp(min=torch.finfo(torch.float32).min)  # (n); with nothing but padding it would be -inf
    s = (logits - m[:, None]).exp().sum(-1)
    target = logits.gather(1, index)[:, 0].masked_fill(~here, 0)
    m, s, target = all_gather(torch.stack((m, s, target))[:, None], ranks.size, ranks.group).unbind()  # (t, n) each
    highest = m.amax(0)
    lse = highest + (s * (m - highest).exp()).sum(0).log()  # (n)
    return logits - lse[:, None], target.sum(0) - lse, lse
