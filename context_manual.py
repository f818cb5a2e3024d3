r"""
Context parallelism by hand: each sequence is cut over several ranks, for lengths whose activations fit no single GPU.

    context = context_manual.Context(run.layout, 'ring', device, timeout_s=600)  # collective
    batch = context.part((x, y))  # of (B, T) this rank's (B, T/4), and an attention that looks at all of T
    loss_sum, ce_sum = model(*batch)  # sums over this rank's targets: those of all ranks add up to the loss

Every layer but attention looks at one token at a time, so it needs no change. Attention also needs the keys and values
of other ranks. Queries stay where they are, and keys and values travel (ring attention, arXiv 2310.01889).

Who holds what?         A sequence is cut into 2N chunks for N ranks. Rank r has the chunks r and 2N-1-r ("zigzag"), an
                        early and a late one. A late token attends to more keys than an early one, so with one chunk of
                        each kind all ranks have the same amount to compute.

    N = 2      chunk  0  1  2  3      keys  0  1  2  3
        rank 0 has    x        x      of 0  \                 \ h  step 0: each rank with its own keys, causal
        rank 1 has       x  x            1  a  \              a    step 1: rank 1, its chunks 1 and 2 with chunk 0
                                         2  a  h  \           b    step 1: rank 0, its chunk 3 with chunks 1 and 2
                                queries  3  h  b  b  \             two squares each: nobody waits for nobody

How do keys travel?     impl='ring': in N - 1 steps from rank to rank, the next ones while these are at work.
                        impl='gather': to all ranks at once (Llama 3, arXiv 2407.21783), not hidden, but one collective.
How do parts add up?    For the keys that it has seen, a kernel returns for each query out = softmax(scores) values and
                        lse = log sum exp(scores). From two such results merge() makes that of all their keys.
And in backward?        Keys and values travel again. Given the final out and lse, the kernel returns each part's share
                        in the gradients of the whole, and these shares simply add up. Those of queries are summed here.
                        Those of keys and values follow them around the ring in fp32: each rank adds its share, and one
                        more hop brings the sum home. With 'gather' a reduce-scatter does that.
What crosses the wire?  Per rank, layer and sequence, with K heads of D numbers for keys, in b bytes (4 on a CPU, where
                        attention computes in fp32): (N-1) * 2 (T/N) K D b in forward, the same in backward, and for
                        gradients 2 (T/N) K D 4 bytes N times (ring) or N - 1 times (gather).
Packed documents?       A document is one stretch of the sequence. So at most one document has both keys of another rank
                        and queries of this one that may see them, and all these keys come before all these queries.
                        What is to be computed is a rectangle, and needs no mask either: see tiles().

This is a custom operator rather than an autograd.Function for two reasons. Selective checkpointing knows an operator by
its name and keeps its results, whereas it would run a Function's forward, with all its hops, a second time. And
torch.compile treats it as a single kernel.
"""

import bisect
import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from attention import place_in_documents
from layout import FP32, make_mesh
from model import SAVED_OPS, ModelConfig

aten = torch.ops.aten


# --- whose tokens -----------------------------------------------------------------------------------------------------


def check(keys, layout, shape):
    """Raise ValueError for sequences or an attention that cannot be divided over the ranks, or dropout, since the noise
    of the ranks would have to fit together."""
    ranks, block_size, given = layout.context, keys['block_size'], f'context_parallel={layout.context}'
    if block_size % (2 * ranks):
        nearest = [n * 2 * ranks for n in (block_size // (2 * ranks), block_size // (2 * ranks) + 1) if n > 0]
        raise ValueError(
            f'block_size={block_size} is not a multiple of {2 * ranks}, two chunks for each of {given} ranks: '
            f'use --block_size={" or ".join(map(str, nearest))}'
        )
    if keys['dropout'] > 0:
        raise ValueError(f'dropout={keys["dropout"]} with {given}, whose attention has none: use --dropout=0')
    if keys['device'].startswith('cuda') and (keys['head_dim'] % 8 or keys['head_dim'] > 256):
        raise ValueError(f'{given} with head_dim={keys["head_dim"]}: flash attention takes multiples of 8 up to 256')
    if isinstance(shape, ModelConfig):
        if shape.window_size:
            windows = f'window_pattern={shape.window_pattern}, whose windows do not end at a rank'
            raise ValueError(
                f'{given} with {windows}: leave context_parallel at 1, or window_pattern and window_size out'
            )
        return
    from huggingface.finetune import OWN_ATTENTION  # here, since a model of model.py needs none of it

    text, reason = shape.config.get_text_config(), None
    rope = getattr(text, 'rope_parameters', None) or getattr(text, 'rope_scaling', None) or {}
    if shape.arch not in OWN_ATTENTION:
        reason = f'its attention is not one that runs here (those of {", ".join(OWN_ATTENTION)})'
    elif (getattr(text, 'sliding_window', None) or block_size) < block_size:
        reason = f'it sees {text.sliding_window} tokens back, and block_size={block_size} is more'
    elif rope.get('rope_type') in ('dynamic', 'longrope'):
        reason = f'its rotation depends on the length of what a rank has (rope_type={rope["rope_type"]})'
    if reason:
        raise ValueError(f'{given}: {shape.arch} cannot share sequences: {reason}; leave it at 1')


def keys_and_values(plan):
    """(numbers in the keys and values of a layer on one rank, bytes of each). On a CPU attention computes in fp32."""
    each = 2 * plan.keys['n_kv_head'] * plan.keys['head_dim'] // plan.layout.tensor
    return plan.tokens * each, plan.compute_bytes if plan.on_cuda else FP32


def holds(plan):
    """Of one layer, what travels: keys and values, and their gradients in fp32. A ring has those of 2 ranks, and 3
    gradients; 'gather' has those of all ranks, and their gradients as they are computed and as they are sent."""
    (numbers, size), ranks = keys_and_values(plan), plan.layout.context
    kept, gradients = (2, 3) if plan.keys['context_impl'] == 'ring' else (ranks, 2 * ranks)
    return {'travelling': numbers * (kept * size + gradients * FP32)}


def sends(plan):
    """See "What crosses the wire?" above. If backward repeats forward, keys and values travel once more."""
    (numbers, size), ranks = keys_and_values(plan), plan.layout.context
    passes = 3 if plan.recomputes else 2
    hops = ranks if plan.keys['context_impl'] == 'ring' else ranks - 1
    of_layer = numbers * (passes * (ranks - 1) * size + hops * FP32)
    return {'keys and values': plan.layout.micro_steps * plan.blocks * of_layer}


class Context:
    """The N ranks that share each sequence (consecutive ones), and this rank's part of a batch."""

    def __init__(self, layout, impl, device, timeout_s):
        """Collective over the world: makes a group besides those of FSDP. Ranks that hold each matrix together
        (tensor_manual.py) have the same tokens."""
        self.ranks, self.impl = layout.context, impl
        axes = {'batch': layout.reading, 'context': layout.context, 'tensor': layout.tensor}
        mesh = make_mesh(axes, device, timeout_s)
        self.group = mesh.get_group('context')

    def part(self, batch):
        """This rank's arguments for the model, from a batch of whole sequences, (x, y) or (x, y, starts).

        x, y: (B, T), where T is a multiple of 2N. starts: in host memory (data.batches(starts_on_host=True)), because
        the host decides which tiles there are.
        Returns x, y, None, attention: this rank's columns (B, T/N) of tokens and targets, no starts, and how they
        attend to those of the other ranks.
        """
        x, y, *starts = batch
        c = x.shape[1] // (2 * self.ranks)
        chunks = torch.arange(x.shape[1], device=x.device).view(2 * self.ranks, c)
        rank = dist.get_rank(self.group)
        mine = torch.cat((chunks[rank], chunks[-1 - rank]))  # (T/N)
        positions, documents = mine[None], None
        if starts:
            documents = starts[0]
            positions = place_in_documents(documents.to(x.device, non_blocking=True), x.shape[1])[1][:, mine]
        attention = SharedAttention(positions, documents, self.impl, self.group.group_name)
        return x[:, mine], y[:, mine], None, attention


def tiles(rank, source, ranks, T, documents=None):
    """The tiles in which the queries of `rank` meet the keys of `source`: yields (rows, queries, keys, causal).

    rows, queries and keys are slices of the batch and of the two ranks' tokens. In a causal tile query i sees the keys
    up to i, in any other tile all of them.

    T: tokens of a rank. documents: int64 (B, M), where the documents of each row begin in the whole sequence, in order;
    unused places hold the sequence's length. None: each row is one document.
    """
    c = T // 2

    def before(owner, position):
        """How many tokens of a rank stand before this position of the sequence."""
        return sum(min(max(position - chunk * c, 0), c) for chunk in (owner, 2 * ranks - 1 - owner))

    rows_and_starts = [(slice(None), [0])]
    if documents is not None:
        rows_and_starts = [(slice(row, row + 1), starts) for row, starts in enumerate(documents.tolist())]
    for rows, starts in rows_and_starts:
        borders = [*starts, ranks * T]
        if source == rank:  # each document alone; one in both chunks also has all the tokens between them
            for begin, end in itertools.pairwise(sorted({before(rank, border) for border in borders})):
                yield rows, slice(begin, end), slice(begin, end), True
            continue
        # All queries see the first chunk of an earlier source; only the late queries see a later one, both its chunks.
        # Either way all these keys come before these queries, so only the first query's document can have some of each.
        first, last = (0, c) if source < rank else (c, T)
        position = (rank if source < rank else 2 * ranks - 1 - rank) * c
        number = bisect.bisect_right(borders, position)
        begin, end = before(source, borders[number - 1]), before(rank, borders[number])
        if begin < last:
            yield rows, slice(first, end), slice(begin, last), False


# --- attention over ranks ---------------------------------------------------------------------------------------------

SAVED_OPS.append('context_manual.attend.default')


@dataclass
class SharedAttention:
    """For sequences of T tokens, of which this rank has T/N."""

    positions: Tensor  # int64 (1 or B, T/N): places of this rank's tokens in their sequence or document
    documents: Tensor | None  # int64 (B, M), on the host: where each document of a whole sequence begins
    impl: str
    group: str  # its name: custom operators take no objects
    cos_sin: Tensor | None = None

    def attend(self, q, k, v, dropout=0.0, scale=None, window=None):
        """Collective. q (B, H, T/N, D), k and v (B, K, T/N, D) -> (B, H, T/N, D)."""
        tokens, dtype = q.shape[2] * _resolve_process_group(self.group).size(), q.dtype
        assert window is None or window >= tokens, f'a sliding window over {window} of {tokens} tokens'
        assert not dropout, f'dropout={dropout}: the ranks would have to agree on the noise'
        if q.is_cpu and dtype.itemsize == 2:  # half precision is slow there
            q, k, v = q.float(), k.float(), v.float()
        scale = scale or q.shape[-1] ** -0.5
        return attend_over_ranks(q, k, v, self.documents, self.impl, self.group, scale)[0].to(dtype)


@torch.library.custom_op('context_manual::attend', mutates_args=())
def attend_over_ranks(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, impl: str, group: str, scale: float
) -> tuple[Tensor, Tensor]:
    """This rank's queries over the keys and values of all ranks of the group: (out as q, lse (B, H, T/N))."""
    out, lse = empty_results(q)
    group = _resolve_process_group(group)
    for source, (keys, values) in blocks_in_turn(torch.stack((k, v)), impl, group):
        for rows, q_slice, k_slice, causal in tiles(group.rank(), source, group.size(), q.shape[2], documents):
            part = forward_kernel(q[rows, :, q_slice], keys[rows, :, k_slice], values[rows, :, k_slice], causal, scale)
            merge(out[rows, :, q_slice], lse[rows, :, q_slice], *part)
    return out.to(q.dtype), lse


@torch.library.custom_op('context_manual::attend_backward', mutates_args=())
def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    documents: Tensor | None, impl: str, group: str, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v. grad: that of out. out, lse: what forward returned, over all keys."""
    group = _resolve_process_group(group)
    grad_q = q.new_zeros(q.shape, dtype=lse.dtype)
    hop, gradients = None, []
    for source, (keys, values) in blocks_in_turn(torch.stack((k, v)), impl, group):
        grad_kv = torch.zeros(2, *k.shape, dtype=lse.dtype, device=k.device)
        for rows, q_slice, k_slice, causal in tiles(group.rank(), source, group.size(), q.shape[2], documents):
            query_tensors = (tensor[rows, :, q_slice] for tensor in (grad, q, out, lse))
            key_tensors = (tensor[rows, :, k_slice] for tensor in (keys, values))
            parts = backward_kernel(*query_tensors, *key_tensors, causal, scale)
            for total, part in zip((grad_q[rows, :, q_slice], *grad_kv[:, rows, :, k_slice]), parts, strict=True):
                total += part
        if impl == 'gather':
            gradients.append(grad_kv)
        else:  # add this rank's share to those of the ranks before it, which have arrived, and send the sum on
            hop = Hop(grad_kv if hop is None else grad_kv.add_(hop.wait()), group, tag=1)
    if impl == 'gather':  # a reduce-scatter, by an all-to-all: gloo's own is an all-reduce inside
        gradients = torch.stack(gradients)  # (N, 2, B, K, T/N, D)
        received = torch.empty_like(gradients)
        dist.all_to_all_single(received, gradients, group=group)
        grad_k, grad_v = received.sum(0)
    else:
        grad_k, grad_v = hop.wait()  # of this rank's own keys, after N hops
    return grad_q.to(q.dtype), grad_k.to(k.dtype, copy=True), grad_v.to(v.dtype, copy=True)


def empty_results(q):
    """out and lse before any keys: 0, and -inf, the log of an empty sum. In memory out is (B, T, H, D), as the next
    layer wants it."""
    B, H, T, D = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_zeros(B, T, H, D, dtype=dtype).transpose(1, 2), q.new_full((B, H, T), -torch.inf, dtype=dtype)


def save_for_backward(ctx, inputs, output):
    q, k, v, documents, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, documents)
    ctx.set_materialize_grads(False)


def backward(ctx, grad, _):
    return *attend_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None


attend_over_ranks.register_autograd(backward, setup_context=save_for_backward)


@attend_over_ranks.register_fake
def shapes_of_forward(q, *_):  # what torch.compile has to know
    out, lse = empty_results(q)
    return out.to(q.dtype), lse


@attend_backward.register_fake
def shapes_of_backward(grad, q, k, v, *_):
    return tuple(tensor.new_empty(tensor.shape) for tensor in (q, k, v))


# --- what travels -----------------------------------------------------------------------------------------------------


def blocks_in_turn(kv, impl, group):
    """Yields (rank, its keys and values) for each rank of the group. kv: this rank's own, (2, B, K, T/N, D)."""
    if impl == 'gather':
        gathered = kv.new_empty(group.size(), *kv.shape)
        dist.all_gather([*gathered], kv, group=group)
        yield from enumerate(gathered)
        return
    for step in range(group.size()):
        hop = Hop(kv, group, tag=0) if step < group.size() - 1 else None  # travels while the caller computes with kv
        yield (group.rank() - step) % group.size(), kv
        if hop:
            kv = hop.wait()


class Hop:
    """A tensor on its way to the next rank, while one like it comes from the rank before. It keeps both alive."""

    def __init__(self, tensor, group, tag):
        # Both are posted before either is waited for: a send of gloo waits for its receiver, so all ranks would hang.
        self.sent, self.arriving = tensor, torch.empty_like(tensor)
        rank, ranks = group.rank(), group.size()
        send = dist.P2POp(dist.isend, tensor, group=group, tag=tag, group_peer=(rank + 1) % ranks)
        receive = dist.P2POp(dist.irecv, self.arriving, group=group, tag=tag, group_peer=(rank - 1) % ranks)
        self.requests = dist.batch_isend_irecv([send, receive])

    def wait(self):
        """The tensor that has arrived."""
        for request in self.requests:
            request.wait()
        return self.arriving


# --- one tile ---------------------------------------------------------------------------------------------------------


def merge(out, lse, part_out, part_lse):
    """Merge the result for further keys into that for the keys so far, in place.

    out (B, H, T, D): softmax(scores) v over the keys so far. lse (B, H, T): log sum exp(scores). Over all these keys
    lse is log(e^lse + e^part_lse), and each of the two outs is weighted by its share in that sum.
    """
    total = torch.logaddexp(lse, part_lse)
    out *= (lse - total).exp()[..., None]
    out += part_out * (part_lse - total).exp()[..., None]
    lse.copy_(total)


def forward_kernel(q, k, v, causal, scale):
    """(out, lse (B, H, T)) of one tile, by the fused kernel of the device."""
    if q.is_cpu:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    if q.dtype.itemsize == 2:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], 1) for heads in (k, v))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]]  # it is padded to a multiple of 32


def backward_kernel(grad, q, out, lse, k, v, causal, scale):
    """The gradients of q, k and v of one tile. out and lse are those over all keys, so that P = exp(scores - lse) is
    this tile's part of the whole softmax."""
    lse = lse.contiguous()
    if q.is_cpu:
        arguments = (grad, q, k, v, out, lse, 0.0, causal)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*arguments, scale=scale)
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of dropout's random numbers
    if q.dtype.itemsize == 2:
        arguments = (grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused)
        return aten._scaled_dot_product_flash_attention_backward(*arguments, scale=scale)
    groups = q.shape[1] // k.shape[1]
    k, v = (heads.repeat_interleave(groups, 1) for heads in (k, v))
    lse = F.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf)
    arguments = (grad, q, k, v, None, out, lse, unused, unused, 0.0, [True, True, True, False], causal)
    grad_q, *kv_gradients, _ = aten._scaled_dot_product_efficient_attention_backward(*arguments, scale=scale)
    return grad_q, *(heads.unflatten(1, (-1, groups)).sum(2) for heads in kv_gradients)
