"""
Frozen weights in 4 bits: NF4 of QLoRA (arXiv 2305.14314), and the linear layer that computes with them.

    packed = quantize(weight)  # (rows, columns), floats -> (rows, bytes_of(columns)), uint8
    weight = dequantize(packed, torch.float32)
    y = frozen_linear(x, packed, bias)  # the same bits as F.linear(x, dequantize(packed, x.dtype), bias)

A code.   The weights of a trained layer look like draws from a normal distribution. A code of 4 bits stands for one of
    16 LEVELS between -1 and 1. They are quantiles of the normal distribution, so they are dense where most weights are,
    and all codes are used about equally often. A weight is its level times the scale of its block.
A block.  64 neighbors in a row share a scale, which is the largest of their absolute values, as bfloat16. A single
    large weight therefore spoils the resolution of only 63 others. For normal weights the error is 9% of the norm.
A row.    First its codes, two in a byte, then its scales: 64 / 2 + 2 bytes per block, 0.53 per weight.

      | 32 bytes of codes | 32 bytes of codes | ... | 2 bytes | 2 bytes | ...      a row of the packed matrix
        block 0             block 1                   scales of blocks 0, 1, ...

So a row is only bytes, and depends on no other row. FSDP cuts matrices between rows, so each rank can quantize the rows
that it reads, and the bits are the same on any number of ranks. Ranks exchange whole rows, which nothing casts on the
way; if the scales were a parameter of their own, fully_shard would cast them to the dtype of computation. Quantizing a
dequantized row gives its codes again.

The whole weights exist only during a matmul: y = x W^T needs them, and so does backward, dL/dx = dL/dy W. In between,
autograd keeps the bytes (FrozenLinear). W is frozen and needs no gradient; LoRA trains beside it.
"""

import itertools

import torch
import torch.nn.functional as F

BLOCK = 64  # weights that share a scale
BYTES_OF_BLOCK = BLOCK // 2 + 2
# Figure 3 and appendix E of the paper. Let q be the quantile function of the normal distribution, and let p go from 1/2
# to 1 - (1/32 + 1/30) / 2 in 8 equal steps: the 8 positive levels are q(p) divided by the last q(p). The 7 negative
# levels are the same with 7 steps, mirrored. Zero is itself a level, so that a weight of 0 stays 0.
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
MIDDLES = [(low + high) / 2 for low, high in itertools.pairwise(LEVELS)]


def bytes_of(columns):
    """Bytes of a packed row of so many weights. Raises ValueError if these are not whole blocks."""
    if columns % BLOCK:
        raise ValueError(f'rows of {columns} weights are not made of blocks of {BLOCK}')
    return columns // BLOCK * BYTES_OF_BLOCK


def columns_of(size):
    """Weights in a packed row of this many bytes."""
    return size // BYTES_OF_BLOCK * BLOCK


def quantize(weight):
    """(rows, columns) of any float dtype -> (rows, bytes_of(columns)), uint8. Takes the level nearest to each weight,
    which is the same on every device."""
    # In pieces, whose temporaries take 100 MB on a GPU, and on a CPU 6 MB, which stay in its cache.
    rows = max(1, (2**24 if weight.is_cuda else 2**20) // weight.shape[1])
    return torch.cat([quantized(piece) for piece in weight.split(rows)])


def quantized(weight):
    """quantize() for a few rows.

    For bfloat16 and float16 weights float32 is enough, because none of them, divided by any scale, is so near to the
    middle between two levels that float32 would round it across (tests/huggingface/test_nf4.py goes through all
    quotients). float32 weights need float64.
    """
    rows, columns = weight.shape
    blocks = weight.reshape(rows, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax(2).bfloat16()  # (rows, blocks)
    divisors = torch.where(scales == 0, 1, scales)  # a block of zeros
    ratios = blocks / divisors[..., None].to(torch.float32 if weight.dtype.itemsize == 2 else torch.float64)
    codes = torch.zeros_like(ratios, dtype=torch.uint8)
    for middle in MIDDLES:  # on a CPU 2.5 times as fast as torch.bucketize(), which searches for each weight
        codes += ratios > middle
    codes = codes.view(rows, columns // 2, 2)
    return torch.cat((codes[..., 0] * 16 + codes[..., 1], scales.view(torch.uint8)), 1)


def table_of(device):
    """(256, 2): for each byte the two levels that it stands for."""
    levels = torch.tensor(LEVELS)
    return torch.stack((levels.repeat_interleave(16), levels.repeat(16)), 1).to(device)


tables = {torch.device('cpu'): table_of('cpu')}  # device -> its table, made once


def dequantize(packed, dtype=torch.float32):
    """(rows, bytes) -> (rows, columns): level times scale, computed in fp32 and rounded once, to dtype."""
    if packed.device not in tables:
        tables[packed.device] = table_of(packed.device)
    rows, columns = packed.shape[0], columns_of(packed.shape[1])
    codes, scales = packed.split((columns // 2, columns // BLOCK * 2), 1)
    levels = F.embedding(codes.int(), tables[packed.device])  # (rows, columns / 2, 2)
    weight = levels.view(rows, columns // BLOCK, BLOCK) * scales.view(torch.bfloat16)[..., None]
    return weight.view(rows, columns).to(dtype)


def whole(stored, dtype):
    """A matrix to compute with, from packed rows or from floats of another dtype."""
    return dequantize(stored, dtype) if stored.dtype == torch.uint8 else stored.to(dtype)


def gradient_by_input(grad_y, stored, is_transposed):
    """dL/dx = dL/dy W, with W dequantized, or cast, once more."""
    weight = whole(stored, grad_y.dtype)
    return grad_y @ (weight.T if is_transposed else weight)


@torch.library.custom_op('nf4::never', mutates_args=())
def never(grad_y: torch.Tensor) -> torch.Tensor:
    """False, as an operation that torch.compile cannot look into, and that has to wait for grad_y."""
    return torch.zeros((), dtype=torch.bool, device=grad_y.device)


@never.register_fake
def shape_of_never(grad_y):
    return grad_y.new_empty((), dtype=torch.bool)


class FrozenLinear(torch.autograd.Function):
    """A linear layer with a frozen weight that is stored in fewer bytes than it computes with.

    (Under FSDP `stored` is the gathered weight, and it is gathered again in backward, like any weight.)
    """

    @staticmethod
    def forward(ctx, x, stored, bias, is_transposed):
        """x (..., in); stored (out, in), or (in, out) with is_transposed, as in GPT-2's Conv1D; bias (out) or None."""
        ctx.save_for_backward(stored)
        ctx.is_transposed = is_transposed
        weight = whole(stored, x.dtype)
        return F.linear(x, weight.T if is_transposed else weight, bias)

    @staticmethod
    def backward(ctx, grad_y):
        (stored,) = ctx.saved_tensors
        _, _, needs_bias, _ = ctx.needs_input_grad
        if torch.compiler.is_compiling() and stored.dtype != grad_y.dtype:
            # The compiler would see that forward has computed the same matrix, and keep it until now.
            stored = torch.where(never(grad_y), 0, stored)
        grad_x = gradient_by_input(grad_y, stored, ctx.is_transposed)
        return grad_x, None, grad_y.flatten(0, -2).sum(0) if needs_bias else None, None


def frozen_linear(x, stored, bias=None, is_transposed=False):
    """x W^T + bias, in the dtype of x, or in autocast's if that is on. Differentiable with respect to x and bias."""
    dtype = autocast_dtype(x) or x.dtype
    return FrozenLinear.apply(x.to(dtype), stored, None if bias is None else bias.to(dtype), is_transposed)


def autocast_dtype(x):
    """The dtype in which autocast lets matmuls compute; None if it is off."""
    on = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if on else None
