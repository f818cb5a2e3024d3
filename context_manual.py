r"""
Context parallelism by hand: each sequence is cut over several ranks, for lengths whose activations fit no single GPU.

    context = context_manual.Context(ranks=4, impl='ring', device=device, timeout_s=600)  # collective
    batch = context.part((x, y))  # of (B, T) this rank's (B, T/4), and an attention layout, which looks at all of T
    loss_sum, ce_sum = model(*batch)  # sums over this rank's targets: those of all ranks add up to the loss

Each layer but attention looks at one token at a time, and needs no change. Attention looks back at keys and values of
other ranks. Queries stay where they are, and keys and values travel (ring attention, arXiv 2310.01889).

Who holds what?         Of N ranks and 2N chunks rank r has the chunks r and 2N-1-r ("zigzag"), an early and a late one:
                        a late token looks back at more than an early one, and so all ranks have as much to compute.

    N = 2      chunk  0  1  2  3      keys  0  1  2  3
        rank 0 has    x        x      of 0  \                 \ h  step 0: each rank with its own keys, causal
        rank 1 has       x  x            1  a  \              a    step 1: rank 1, its chunks 1 and 2 with chunk 0
                                         2  a  h  \           b    step 1: rank 0, its chunk 3 with chunks 1 and 2
                                queries  3  h  b  b  \             two squares each: nobody waits for nobody

How do keys travel?     impl='ring': in N - 1 steps from rank to rank, the next ones while these are at work.
                        impl='gather': to all ranks at once (Llama 3, arXiv 2407.21783), not hidden, but one collective.
How do parts add up?    A kernel returns, per query, out = softmax(scores) values and lse = log sum exp(scores), of the
                        keys it has seen. Two of them merge to that of all keys: see merge().
And in backward?        Keys and values travel again. With the final out and lse, the gradients of each part are those
                        of the whole, and simply add up: those of queries here, those of keys and values in fp32 on
                        their way round, one hop more and they are home. With 'gather' a reduce-scatter brings them.
What crosses the wire?  Per rank, layer and sequence, with K heads of D numbers for keys, in b bytes (4 on a CPU, where
                        attention computes in fp32): (N-1) * 2 (T/N) K D b in forward, the same in backward, and for
                        gradients 2 (T/N) K D 4 bytes N times (ring) or N - 1 times (gather).
Packed documents?       A document is a stretch of the sequence. So only one of them can reach from the keys of another
                        rank to these queries, and what it has of both is a rectangle: no mask again, see tiles().

A custom operator rather than an autograd.Function: selective checkpointing knows it by its name and keeps its results,
where it would run a Function's forward, with all hops, once more; and torch.compile takes it for one kernel.
"""

import bisect
import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

import meshes
from model import place_in_documents

aten = torch.ops.aten


# --- whose tokens -----------------------------------------------------------------------------------------------------


class Context:
    """The ranks that work on the same sequences, N consecutive ones, and what this one has of a batch."""

    def __init__(self, ranks, impl, device, timeout_s, tensor=1):
        """ranks: N, 2 or more. tensor: of tensor_manual.py, ranks that have the same tokens; N * tensor divides the
        world's. Collective over the world: a group of its own, beside those of FSDP."""
        self.ranks, self.impl = ranks, impl
        axes = {'batch': dist.get_world_size() // (ranks * tensor), 'context': ranks, 'tensor': tensor}
        mesh = meshes.make(axes, device, timeout_s)
        self.group = mesh.get_group('context')

    @classmethod
    def from_keys(cls, config, device):
        """From a script's config, a dict."""
        names = ('context_parallel', 'context_impl', 'timeout_s', 'tensor_parallel')
        ranks, impl, timeout_s, tensor = (config[name] for name in names)
        return cls(ranks, impl, device, timeout_s, tensor)

    def part(self, batch):
        """The arguments of the model, from (x, y) or (x, y, starts) of whole sequences; T divides by 2N.

        starts: in host memory (data.batches(starts_on_host=True)), for the host decides which tiles there are.

        That is x, y, None, layout: this rank's columns (B, T/N) of tokens and of targets, no starts, and the layout.
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
        layout = SharedLayout(positions, documents, self.impl, self.group.group_name)
        return x[:, mine], y[:, mine], None, layout


def tiles(rank, source, ranks, T, documents=None):
    """What the queries of `rank` compute with the keys of `source`: yields (rows, queries, keys, causal), slices.

    T: tokens of a rank. documents: int64 (B, M), where the documents of each row begin in the whole sequence, in their
    order; unused places hold its length. None: a row is one document. In a causal tile query i sees the keys up to i.
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
        if source == rank:  # each document alone; one that reaches over both chunks holds all that lies between them
            for begin, end in itertools.pairwise(sorted({before(rank, border) for border in borders})):
                yield rows, slice(begin, end), slice(begin, end), True
            continue
        # From an earlier source all queries see its first chunk; of a later one, the late queries see both its chunks.
        # All these keys stand before all these queries. So the only document in both is that of the first query.
        first, last = (0, c) if source < rank else (c, T)
        position = (rank if source < rank else 2 * ranks - 1 - rank) * c
        number = bisect.bisect_right(borders, position)
        begin, end = before(source, borders[number - 1]), before(rank, borders[number])
        if begin < last:
            yield rows, slice(first, end), slice(begin, last), False


# --- attention over ranks ---------------------------------------------------------------------------------------------


@dataclass
class SharedLayout:
    """An attention layout (see model.py) of sequences of which this rank has T/N tokens."""

    positions: Tensor  # int64 (1 or B, T/N): of this rank's tokens in their sequence or document
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
    """(out as q, lse (B, H, T/N)), from the keys and values of all ranks of the group."""
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
    """Gradients by q, k and v, from that by out. out, lse: what forward returned, over all keys."""
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
        else:  # what the ranks before this one have found for this block has arrived meanwhile; on the sum goes
            hop = Hop(grad_kv if hop is None else grad_kv.add_(hop.wait()), group, tag=1)
    if impl == 'gather':  # a reduce-scatter; gloo's own is an all-reduce inside
        gradients = torch.stack(gradients)  # (N, 2, B, K, T/N, D)
        received = torch.empty_like(gradients)
        dist.all_to_all_single(received, gradients, group=group)
        grad_k, grad_v = received.sum(0)
    else:
        grad_k, grad_v = hop.wait()  # of this rank's own keys, after N hops
    return grad_q.to(q.dtype), grad_k.to(k.dtype, copy=True), grad_v.to(v.dtype, copy=True)


def empty_results(q):
    """out and lse before the first keys: a sum of no exponentials. In memory out is (B, T, H, D), as the next layer
    wants it."""
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
    """Yields (source, its keys and values) for each rank of the group. kv: this rank's, (2, B, K, T/N, D)."""
    if impl == 'gather':
        gathered = kv.new_empty(group.size(), *kv.shape)
        dist.all_gather([*gathered], kv, group=group)
        yield from enumerate(gathered)
        return
    for step in range(group.size()):
        hop = Hop(kv, group, tag=0) if step < group.size() - 1 else None  # beside what the caller computes with kv
        yield (group.rank() - step) % group.size(), kv
        if hop:
            kv = hop.wait()


class Hop:
    """A tensor on its way to the next rank, and its like from the rank before. Both stay alive until they are there."""

    def __init__(self, tensor, group, tag):
        # Both are posted before either is waited for: of gloo a send waits for the receiver, and all would wait.
        self.sent, self.arriving = tensor, torch.empty_like(tensor)
        rank, ranks = group.rank(), group.size()
        send = dist.P2POp(dist.isend, tensor, group=group, tag=tag, group_peer=(rank + 1) % ranks)
        receive = dist.P2POp(dist.irecv, self.arriving, group=group, tag=tag, group_peer=(rank - 1) % ranks)
        self.requests = dist.batch_isend_irecv([send, receive])

    def wait(self):
        """What has arrived."""
        for request in self.requests:
            request.wait()
        return self.arriving


# --- one tile ---------------------------------------------------------------------------------------------------------


def merge(out, lse, part_out, part_lse):
    """Take further keys in, in place. out (B, H, T, D): softmax(scores) v over the keys so far, lse (B, H, T): log sum
    exp(scores). Over both kinds of keys lse is log(e^lse + e^part_lse), and each out counts by its share in that."""
    total = torch.logaddexp(lse, part_lse)
    out *= (lse - total).exp()[..., None]
    out += part_out * (part_lse - total).exp()[..., None]
    lse.copy_(total)


def forward_kernel(q, k, v, causal, scale):
    """(out, lse (B, H, T)) by the fused kernel of the device."""
    if q.is_cpu:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    if q.dtype.itemsize == 2:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], 1) for heads in (k, v))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]]  # it is padded to a multiple of 32


def backward_kernel(grad, q, out, lse, k, v, causal, scale):
    """Gradients by q, k, v. out and lse are those over all keys, of which k and v are a part: P = exp(scores - lse)."""
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
