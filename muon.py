"""
Muon's update of a matrix, and how ranks share the work: most of it is Newton-Schulz, which needs whole matrices.

    momentum         optim.Muon: m = mu*m + (1-mu)*g and u = (1-mu)*g + mu*m, elementwise on what a rank holds
    gather           each sharded matrix of u goes to one rank, its owner              sharded_muon_updates()
    orthogonalize    the owner replaces it by roughly U V^T of its SVD                 orthogonalize()
    scatter          each rank gets its rows of the update back
    step             optim.Muon: theta -= lr * (weight_decay*theta + update)

Gather and scatter are one all-to-all each per step, for all matrices together. With copies of the shards (HSDP) each
copy does this for itself. Of whole matrices (DDP) each rank has the momentum already, so the ranks deal them out, and
only the updates travel, in one all-gather: dealt_updates().

With tensor parallelism, what FSDP shards or DDP copies is only a part of a matrix. Its owner then has that part, and
gathers and scatters once more, among the tensor-parallel ranks: updates_of_parts(). With expert parallelism an expert's
matrices go round the ranks that hold this expert, in collectives of their own.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _resolve_process_group

from layout import FP32
from model import Attention
from pieces import CHUNK, FOREACH, in_parts

MOMENTUM = 0.95  # mu
NOT_HIDDEN = ('head', 'lm_head', 'score', 'shared_expert_gate')


class Cut(NamedTuple):
    """How tensor parallelism cuts matrices: each rank of `group` has an equal part of each, in the order of ranks."""

    group: dist.ProcessGroup
    dims: list | dict  # of each matrix: 0 if a part is some of its rows, 1 if it is some of its columns

    def of(self, matrices):
        """That of some of the matrices, in their order."""
        return self._replace(dims=[self.dims[matrix] for matrix in matrices])


def cut_of(model, share):
    """The Cut of a model's parameters; None without tensor parallelism."""
    if share.tensor is None:
        return None
    dims = {parameter: share.slices[name].dim for name, parameter in model.named_parameters()}
    return Cut(_resolve_process_group(share.tensor.group), dims)


def hidden_matrices(model):
    """The parameters that Muon trains, as {parameter: [rows of each matrix that is fused in it]}.

    These are the weights of all Linear modules except three kinds. In the head (`head`, `lm_head`), as in embeddings,
    Muon's author finds AdamW better; the gate of a shared expert is a single row; and in LoRA's matrices tiny first
    gradients would become full-size steps. Fused q, k and v count as three matrices, and the experts of a mixture as
    one each.
    """
    hidden, others = {}, set()
    for name, module in model.named_modules():
        if isinstance(module, Attention):  # numbers of heads: queries (and gates), keys, values
            hidden[module.qkv.weight] = [heads * module.head_dim for heads in module.heads_of_qkv]
        for own_name, parameter in module.named_parameters(recurse=False):
            is_hidden = parameter.dim() == 2 and not isinstance(module, nn.Embedding) and parameter.requires_grad
            if is_hidden and hasattr(module, 'n_matrices'):  # experts.ExpertLinear
                hidden[parameter] = [parameter.shape[0] // module.n_matrices] * module.n_matrices
            if is_hidden and name.split('.')[-1] not in NOT_HIDDEN and own_name not in ('lora_A', 'lora_B'):
                hidden.setdefault(parameter, [parameter.shape[0]])
            else:
                others.add(parameter)
    return {parameter: rows for parameter, rows in hidden.items() if parameter not in others}


def sharded_muon_updates(u, parameters, split_rows, group, cut=None):
    """muon_updates() of sharded matrices: this rank's rows of each update. u: its rows of each momentum. Collective."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    shapes = [shapes_of_shards(*parameter.shape, ranks) for parameter in parameters]  # [matrix][rank]
    assert [tuple(x.shape) for x in u] == [x[me] for x in shapes], f'rank {me} does not hold rows as Shard(0) does'
    owned_by = deal_out([flops(*parameter.shape) for parameter in parameters], ranks)
    mine = owned_by[me]

    rows = [0] * len(u)  # FSDP shards by rows
    whole = gather_to_owners(u, owned_by, shapes, group, rows)
    updates = muon_updates(whole, [split_rows[i] for i in mine], cut=cut and cut.of(mine))
    return scatter_from_owners(updates, owned_by, shapes, group, rows, like=u[0])


def gather_to_owners(parts, owned_by, shapes, group, dims):
    """Send this rank's part of each matrix to the matrix's owner. Returns the matrices that this rank owns, whole.

    parts: [matrix]. owned_by: [rank][number of a matrix]. shapes: [matrix][rank], of the part that a rank holds. dims:
    [matrix], 0 if parts are rows, 1 if they are columns.
    """
    mine, ranks = owned_by[dist.get_rank(group)], range(len(owned_by))
    outgoing = [[parts[i] for i in owned] for owned in owned_by]
    incoming = [[shapes[i][rank] for i in mine] for rank in ranks]
    pieces = all_to_all(outgoing, incoming, group, like=parts[0])  # [rank][matrix of mine]
    return [torch.cat(of_matrix, dims[i]) for i, of_matrix in zip(mine, zip(*pieces, strict=True), strict=True)]


def scatter_from_owners(matrices, owned_by, shapes, group, dims, like):
    """The way back: send each rank its part of the matrices that this rank owns. Returns this rank's part of each
    matrix, [matrix]. like: any tensor of the same dtype and device."""
    me, ranks = dist.get_rank(group), range(len(owned_by))
    pieces = [  # [matrix of mine][rank]
        matrix.split([shape[dims[i]] for shape in shapes[i]], dims[i])
        for i, matrix in zip(owned_by[me], matrices, strict=True)
    ]
    outgoing = [[of_matrix[rank] for of_matrix in pieces] for rank in ranks]
    incoming = [[shapes[i][me] for i in owned] for owned in owned_by]
    returned = all_to_all(outgoing, incoming, group, like)  # [owner][matrix of the owner]
    parts = dict(zip(sum(owned_by, []), sum(returned, []), strict=True))
    return [parts[i] for i in range(len(shapes))]


def all_to_all(outgoing, shapes, group, like):
    """One collective. outgoing[r]: tensors for rank r. Returns [r][i], the tensors from rank r, of shapes[r][i]. like:
    any tensor of their dtype and device, of which a rank with nothing to send makes none."""
    send = torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensors in outgoing for tensor in tensors)])
    sizes_out = [sum(tensor.numel() for tensor in tensors) for tensors in outgoing]
    sizes = [[math.prod(shape) for shape in from_rank] for from_rank in shapes]
    received = send.new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(received, send, list(map(sum, sizes)), sizes_out, group=group)
    pieces = iter(received.split(sum(sizes, [])))
    return [[next(pieces).view(shape) for shape in from_rank] for from_rank in shapes]


def muon_updates(matrices, split_rows, copies=None, cut=None):
    """0.2*sqrt(max(rows, columns)) * orthogonalize(.) of each matrix that is fused in one of `matrices`.

    copies: process group of the ranks that have the same ones, and divide the work; then it is collective. cut: how
    tensor parallelism cuts them, if it does: then this rank has a part of each, and it is collective, too.
    """
    fused = [matrix.split(rows) for matrix, rows in zip(matrices, split_rows, strict=True)]
    cut = cut and cut.of([i for i, of_matrix in enumerate(fused) for _ in of_matrix])
    parts = sum(fused, ())
    updates = iter(dealt_updates(parts, copies, cut) if copies else updates_of(parts, cut))
    return [torch.cat([next(updates) for _ in of_matrix]) for of_matrix in fused]


def updates_of(matrices, cut=None):
    """The updates of single matrices. Those of one shape go together, on a GPU up to FOREACH numbers at a time, so that
    17 launches serve all of them. On a CPU only small ones go together; large ones are as fast alone."""
    if cut:
        return updates_of_parts(matrices, cut)
    updates = [None] * len(matrices)
    most = FOREACH if matrices and matrices[0].is_cuda else CHUNK
    for batch in batches_of([matrix.shape for matrix in matrices], most):
        rows, columns = matrices[batch[0]].shape
        found = orthogonalize(torch.stack([matrices[i] for i in batch])).mul_(0.2 * math.sqrt(max(rows, columns)))
        for i, update in zip(batch, found, strict=True):
            updates[i] = update
    return updates


def updates_of_parts(parts, cut):
    """updates_of() matrices of which each rank of cut.group has a part: its part of each update. Collective.

    A rank sends (t-1)/t of its parts to their owners, and as much comes back, 2 (t-1)/t numbers for each that it has.
    """
    if not parts:
        return []
    ranks = dist.get_world_size(cut.group)
    whole = [whole_shape(part.shape, dim, ranks) for part, dim in zip(parts, cut.dims, strict=True)]
    shapes, owned_by = [[part.shape] * ranks for part in parts], deal_matrices(whole, ranks)
    matrices = gather_to_owners(parts, owned_by, shapes, cut.group, cut.dims)
    return scatter_from_owners(updates_of(matrices), owned_by, shapes, cut.group, cut.dims, like=parts[0])


def whole_shape(shape, dim, ranks):
    """Of a matrix whose parts on each of the ranks have this shape."""
    return tuple(size * ranks if number == dim else size for number, size in enumerate(shape))


def dealt_updates(matrices, group, cut=None):
    """updates_of() matrices that all ranks of `group` have alike: each computes some, and all gather all of them.

    If all iterations together take the time T, on n ranks they take T/n, and each rank sends (n-1)/n of the updates. A
    matrix (rows, columns) of which the smaller side is m takes 20 m rows columns + 10 m^3 FLOPs and as an update of
    bfloat16 2 rows columns bytes, which is 10 m to 15 m FLOPs for a byte. So wide models gain on any link, and narrow
    ones within a node. Estimated for the 124M parameters of GPT-2 (m = 768, 85M of them in such matrices) on 8 H100:
    1.6 TFLOP at 400 TFLOP/s are 4.1 ms, an eighth is 0.5 ms, and 170 MB at 360 GB/s another 0.4 ms.

    The momenta stay on every rank. To update them takes one pass through memory, and in return memory, checkpoints and
    what a run may go on with do not depend on the ranks. (Who wants them divided wants FSDP, zero_stage=1.)
    What arrives is what its owner has computed, bit for bit, so ranks that were equal stay equal.
    """
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    owned_by = deal_matrices([matrix.shape for matrix in matrices], ranks)
    sizes = [[matrices[i].numel() for i in owned] for owned in owned_by]  # [rank][matrix of the rank]
    length = max(map(sum, sizes))  # ranks gather rows of one length, with zeros at the end

    mine = updates_of([matrices[i] for i in owned_by[me]], cut and cut.of(owned_by[me]))
    row = torch.cat([*(update.reshape(-1) for update in mine), matrices[0].new_zeros(length - sum(sizes[me]))])
    gathered = row.new_empty(ranks, length)
    dist.all_gather([*gathered], row, group=group)

    updates = [None] * len(matrices)
    for owned, row, its_sizes in zip(owned_by, gathered, sizes, strict=True):
        for i, update in zip(owned, row[: sum(its_sizes)].split(its_sizes), strict=True):
            updates[i] = update.view(matrices[i].shape)
    return updates


def deal_matrices(shapes, ranks):
    """[rank][number of a matrix], for whole matrices.

    Small ones go in the batches in which one process on a CPU computes them, since there a matrix of odd size may come
    out in other bits beside others (its place in memory decides how BLAS adds). So the ranks compute what one process
    does. On a GPU batches are larger than these, and cuBLAS may choose another kernel for another number of matrices.
    """
    batches = batches_of(shapes, CHUNK)
    owned_by = deal_out([len(batch) * flops(*shapes[batch[0]]) for batch in batches], ranks)
    return [sorted(i for number in owned for i in batches[number]) for owned in owned_by]


def batches_of(shapes, most):
    """[[number of a matrix, ...], ...]: matrices of one shape, together `most` numbers or less unless it is one."""
    alike = {}
    for i, shape in enumerate(shapes):
        alike.setdefault(tuple(shape), []).append(i)
    return [batch for same in alike.values() for batch in in_parts(same, lambda i: math.prod(shapes[i]), most)]


def sends(plan, copies):
    """What a rank sends in dealt_updates(), as the lessons' sends(plan): rows of equal length to each other copy."""
    if copies == 1 or plan.keys['optimizer'] != 'muon':
        return {}
    hidden = hidden_matrices(plan.model)
    shapes = [(rows, parameter.shape[1]) for parameter, split_rows in hidden.items() for rows in split_rows]
    length = max(sum(math.prod(shapes[i]) for i in owned) for owned in deal_matrices(shapes, copies))
    return {'all-gather': (copies - 1) * bytes_of_number(plan) * length}


def sends_of_parts(plan):
    """And in updates_of_parts(). Under FSDP a rank has parts as large as its pieces; copies in a pipeline deal them."""
    if plan.keys['optimizer'] != 'muon':
        return {}
    ranks, copies = plan.layout.tensor, plan.layout.replicate if plan.layout.strategy == 'pipeline' else 1
    parts = plan.weights.count(hidden_matrices(plan.model)) / copies
    return {'all-to-all': 2 * (ranks - 1) / ranks * parts * bytes_of_number(plan)}


def bytes_of_number(plan):
    return 2 if plan.on_cuda else FP32  # on a GPU the iterations run in bfloat16


def orthogonalize(matrices):
    """Roughly U V^T, for matrices (n, rows, columns) whose singular value decompositions are U S V^T: the singular
    values come out between 0.7 and 1.2.

    Five Newton-Schulz iterations X <- 3.4445 X - 4.7750 X X^T X + 2.0315 (X X^T)^2 X, in the dtype of the matrices.
    """
    x = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT  # X X^T is the smaller of the two products
    x = x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + 1e-7)  # no singular value above 1
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x if matrices.shape[1] <= matrices.shape[2] else x.mT.contiguous()


def shapes_of_shards(rows, columns, ranks):
    """[shape on each rank] under Shard(0), which cuts like torch.chunk: ceil(rows / ranks) each, the rest, then 0."""
    piece = -(-rows // ranks)
    return [(max(0, min(piece, rows - rank * piece)), columns) for rank in range(ranks)]


def deal_out(costs, ranks):
    """[rank][number of an item]: the most expensive go first, each to the rank with the least work so far."""
    work, owned_by = [0] * ranks, [[] for _ in range(ranks)]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        rank = work.index(min(work))
        owned_by[rank].append(item)
        work[rank] += costs[item]
    return [sorted(owned) for owned in owned_by]


def flops(rows, columns):
    """Of orthogonalize(), with the smaller side m: five times X X^T, its square, and that times X."""
    m, n = sorted((rows, columns))
    return 5 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)
