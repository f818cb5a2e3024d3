"""
Moments of an optimizer in fewer bits: how Adam and the like store what they keep for each weight (`optimizer_dtype`).

                bytes a number          where
    float32     4                       the default
    bfloat16    2, rounded by chance    all moments
    int8        1 + 4/256               those of matrices; embeddings, head, norms and biases keep float32

AdamW keeps two moments, so with a weight and its gradient in fp32 a parameter takes 16, 12 or 10 bytes. A step reads a
piece of the moments, lets optim.py's kernel update it in fp32, and writes it back, so that never more than one piece is
in fp32. Checkpoints hold fp32, and nothing is lost on the way there and back, because the value that a code stands for
gives the same code again.

int8 (Dettmers et al., arXiv 2110.02861). A number is stored as a code from 0 to 255, whose value is multiplied by the
largest magnitude of its block. These values are not evenly spaced, since most moments are far smaller than the largest:

    a second moment    128 values between 0.1 and 1, 64 between 0.01 and 0.1, ... down to 1e-7, and 1 itself
    a first moment     half as many, of either sign, down to 1e-6, and 0, 1, -1

    block 0 | block 1 | ... | the rest      a block is 256 columns of one line (the last dimension), or what is left:
    block 0 | block 1 | ... | the rest      FSDP cuts between lines, so that no block is on two ranks, however many
    block 0 | block 1 | ... | the rest      there are, and each rank has the codes and scales that one process has

Three things differ from what is published. First, -1 is among the values (there -0.993 is the lowest), since otherwise
a block whose largest magnitude is negative would get another scale each time it is read and written. Second, a second
moment never becomes 0, after which a small gradient would make a step out of all proportion; one more decade takes the
place of 0. Third, the whole parameter decides which moments have 8 bits, rather than a rank's part of it.

Embeddings and head keep fp32. Most rows of an embedding have no gradient in a step, and the gradients of the few others
differ by orders of magnitude, with the frequency of their tokens. This is where training in 8 bits becomes unstable
(section 2.3 of the paper). The head has the same tokens in its rows, and is often the same matrix. Parameters of fewer
than 4096 numbers keep fp32, too, because they are too small to matter.

bfloat16 has 8 bits of the fraction. In a step a second moment falls by at most (1 - beta2) of itself. With 0.999 this
is at most a quarter of the way to the next number of bfloat16. Rounding to the nearest would undo it each time, so such
moments would only grow (to 1.24 instead of 0.95 in an example of tests/test_moments.py). Moments are therefore rounded
up or down by chance, in proportion to the distances, so that they are right in the mean. The chance is a function of
(seed, parameter, moment, step, index in the whole parameter), so it is the same on any number of ranks, and in a run
that was resumed.
"""

import functools
import math
import zlib
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from pieces import CHUNK, local

DTYPES = ('float32', 'bfloat16', 'int8')
BLOCK = 256  # numbers that share a scale
SMALLEST = 4096  # numbers of a parameter whose moments are worth 8 bits
SCALES = '_scales'  # exp_avg_scales: the scales of exp_avg
UNSIGNED = ('exp_avg_sq', 'tau')  # moments that are never negative
TINY = torch.finfo(torch.float32).tiny
PIECE = 2**23  # on a GPU, for moments in fewer bits: rounding them takes some 60 bytes a number meanwhile, 0.5 GB

# --- int8 -------------------------------------------------------------------------------------------------------------


@functools.cache
def levels(signed, device):
    """(the values of the codes 0 to 255, in rising order; the 255 points half-way between them), fp32."""
    positive = [1.0]
    # Between 1e-7 and 1e-6 (unsigned: 1e-8 and 1e-7) 1 value, then twice as many in each decade, 64 (128) below 1.
    for decade in range(0 if signed else -1, 7):
        count, unit = 2**decade if signed else 2 ** (decade + 1), 10.0 ** (decade - 6)
        positive += [unit * (0.1 + 0.9 * (i + 0.5) / count) for i in range(count)]  # middles of equal parts
    values = sorted(positive + [0.0] + [-x for x in positive if x < max(positive[1:])] + [-1.0] if signed else positive)
    values = torch.tensor(values, dtype=torch.float64)
    return values.float().to(device), ((values[1:] + values[:-1]) / 2).float().to(device)


def table_of(name, device):
    """levels() for the moment of this name."""
    return levels(name not in UNSIGNED, device)


def quantize(numbers, table):
    """fp32 (..., width) -> codes, uint8 of the same shape, and scales, fp32 (...). Rounds to the nearest value."""
    scales = numbers.abs().amax(-1)
    ratios = numbers / scales.clamp_min(TINY).unsqueeze(-1)
    return torch.bucketize(ratios, table[1], out_int32=True).to(torch.uint8), scales


def dequantize(codes, scales, table):
    """The inverse of quantize(), which gives the same codes and scales again for what this returns."""
    return table[0][codes.int()] * scales.unsqueeze(-1)


def stretches(columns):
    """A line's [(slice of columns, slice of blocks, width of a block), ...]: its full blocks, then what is left."""
    whole = columns // BLOCK
    found = [(slice(0, whole * BLOCK), slice(0, whole), BLOCK)] if whole else []
    rest = columns - whole * BLOCK
    return found + ([(slice(whole * BLOCK, columns), slice(whole, whole + 1), rest)] if rest else [])


# --- bfloat16 ---------------------------------------------------------------------------------------------------------


def chance(index, key):
    """16 pseudo-random bits (int64, 0 to 65535) for each of these indices, by Thomas Mueller's 32-bit hash. 64-bit
    integers hold all products, so that a CPU and a GPU agree."""
    x = (index + key) & 0xFFFFFFFF
    x = ((x >> 16) ^ x) * 0x45D9F3B & 0xFFFFFFFF
    x = ((x >> 16) ^ x) * 0x45D9F3B & 0xFFFFFFFF
    return ((x >> 16) ^ x) & 0xFFFF


def round_by_chance(numbers, bits):
    """fp32 -> bfloat16, to one of the two neighbors, the more often the nearer the number is to it. bits: chance().

    bfloat16 is the upper half of fp32. Where the lower half, 0 to 65535, and the bits add up to 65536 or more, a carry
    goes into the upper half, which makes it the next number away from 0.
    """
    return ((numbers.view(torch.int32) + bits.int()) & -65536).view(torch.float32).bfloat16()


# --- of a parameter ---------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """How the moments of one parameter are stored."""

    dtype: str  # 'bfloat16' or 'int8'
    name: str  # seed and name of the parameter, for chance()
    part: object = None  # layout.Slice, if the parameter is cut


def forms_of(model, dtype, seed, slices):
    """{parameter: Form} for the parameters whose moments are not fp32. Call it after `model` is sharded, if it is.
    slices: layout.Share.slices."""
    assert dtype in DTYPES, dtype
    eligible = in_8_bits(model, slices) if dtype == 'int8' else set(model.parameters()) if dtype == 'bfloat16' else ()
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {p: Form(dtype, f'{seed} {name}', slices.get(name)) for name, p in named if p in eligible}


def in_8_bits(model, slices):
    """The parameters whose moments `int8` stores in 8 bits, see above. slices: layout.Share.slices."""
    matrices, tables = set(), set()
    for name, module in model.named_modules():
        is_table = isinstance(module, nn.Embedding) or name.rpartition('.')[2] in ('head', 'lm_head')
        for own_name, parameter in module.named_parameters(recurse=False):
            whole = slices.get(f'{name}.{own_name}', parameter)  # expert_manual.py keeps only some of the rows
            if parameter.dim() >= 2 and whole.shape.numel() >= SMALLEST:
                (tables if is_table else matrices).add(parameter)
    return matrices - tables  # a head may be the embedding


def bytes_held(shape, dtype):
    """The bytes that one moment takes, of a parameter or of a rank's part of it."""
    blocks = math.prod(shape[:-1]) * math.ceil(shape[-1] / BLOCK) if shape else 0
    return {'float32': 4, 'bfloat16': 2, 'int8': 1}[dtype] * math.prod(shape) + (4 * blocks if dtype == 'int8' else 0)


def zeros(form, parameter, name):
    """{slot: tensor} of the moment `name` before the first step, sharded like the parameter."""
    if form.dtype == 'bfloat16':
        return {name: torch.zeros_like(parameter, dtype=torch.bfloat16)}
    return {name: torch.zeros_like(parameter, dtype=torch.uint8), name + SCALES: zero_scales(parameter)}


def zero_scales(parameter):
    """Scales (..., blocks of a line), sharded by rows like the parameter, so that a rank has those of its own codes."""
    blocks = math.ceil(parameter.shape[-1] / BLOCK)
    part = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    scales = part.new_zeros((*part.shape[:-1], blocks), dtype=torch.float32, requires_grad=False)
    if not isinstance(parameter, DTensor):
        return scales
    whole = torch.empty((*parameter.shape[:-1], blocks), device='meta')
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(scales, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def in_fp32(slots, name):
    """This rank's part of the moment `name`, in fp32 as a checkpoint holds it. slots: the parameter's state."""
    value = local(slots[name])
    if value.dtype == torch.bfloat16:
        return value.float()
    found = torch.empty(value.shape, device=value.device)
    lines, codes, scales = as_lines(found), as_lines(value), as_lines(local(slots[name + SCALES]))
    for columns, blocks, width in stretches(codes.shape[1]):
        some = codes[:, columns].unflatten(1, (-1, width))
        lines[:, columns] = dequantize(some, scales[:, blocks], table_of(name, value.device)).flatten(1)
    return found


def from_fp32(form, parameter, name, value):
    """{slot: tensor} of the moment `name`, from this rank's part of it in fp32: the inverse of in_fp32().

    Moments that were saved by an fp32 run are rounded to the nearest.
    """
    slots = zeros(form, parameter, name)
    if form.dtype == 'bfloat16':
        local(slots[name]).copy_(value)
        return slots
    lines, codes, scales = as_lines(value), as_lines(local(slots[name])), as_lines(local(slots[name + SCALES]))
    for columns, blocks, width in stretches(codes.shape[1]):
        some, scales[:, blocks] = quantize(lines[:, columns].unflatten(1, (-1, width)), table_of(name, value.device))
        codes[:, columns] = some.flatten(1)
    return slots


# --- a step -----------------------------------------------------------------------------------------------------------


class Part:
    """This rank's part of a parameter and of its moments, which are stored in fewer bits."""

    def __init__(self, form, parameter, state, names):
        self.form, self.names, self.theta = form, names, local(parameter)
        suffixes = ('', SCALES) if form.dtype == 'int8' else ('',)
        self.tensors = [[local(state[name + suffix]) for suffix in suffixes] for name in names]
        self.tables = [table_of(name, self.theta.device) if form.dtype == 'int8' else None for name in names]
        self.first = first_of_lines(parameter, form.part) if form.dtype == 'bfloat16' else None

    def keys(self, t):
        """The keys for chance() in step t, one for each moment."""
        return [zlib.crc32(f'{self.form.name} {name} {t:.0f}'.encode()) for name in self.names]

    def pieces(self, g, most):
        """Yields consecutive lines in pieces of at most `most` numbers, or of one line: (width of a block, theta, g,
        tensors of the moments, index of each line's first number). g: the gradient."""
        theta, g = as_lines(self.theta), as_lines(g)
        tensors = [[as_lines(tensor) for tensor in moment] for moment in self.tensors]
        columns, at_once = theta.shape[1], max(1, most // theta.shape[1])
        ranges = stretches(columns) if self.form.dtype == 'int8' else [(slice(None), slice(None), columns)]
        for begin in range(0, theta.shape[0], at_once):
            lines = slice(begin, begin + at_once)
            first = None if self.first is None else self.first[lines]
            for some, blocks, width in ranges:
                places = (some, blocks)  # of codes, of scales
                cut = [[x[lines, place] for x, place in zip(moment, places, strict=False)] for moment in tensors]
                yield width, theta[lines, some], g[lines, some], cut, first


def update(kernel, scalars, width, tables, keys, skip, theta, g, moments, first):
    """One step of optim.py's kernel on a piece from Part.pieces(), in place.

    tables: for each moment the table of its codes, or None. keys: from Part.keys(). skip: None, or a flag on the
    device; if it is 1, nothing changes.
    """
    before = None if skip is None else theta.clone()
    theta_blocks, g = theta.unflatten(1, (-1, width)), g.unflatten(1, (-1, width))  # (lines, blocks, width)
    numbers = []
    for tensors, table in zip(moments, tables, strict=True):
        blocks = tensors[0].unflatten(1, (-1, width))
        numbers.append(blocks.float() if table is None else dequantize(blocks, tensors[1], table))
    kernel(theta_blocks, g, *numbers, **scalars)
    if first is not None:
        index = first[:, None] + torch.arange(theta.shape[1], device=theta.device)
    for tensors, table, key, value in zip(moments, tables, keys, numbers, strict=True):
        if table is None:
            found = [round_by_chance(value.flatten(1), chance(index, key))]
        else:
            codes, scales = quantize(value, table)
            found = [codes.flatten(1), scales]
        for tensor, new in zip(tensors, found, strict=True):
            tensor.copy_(new if skip is None else torch.where(skip == 1, tensor, new))
    if skip is not None:
        theta.copy_(torch.where(skip == 1, before, theta))


# The ways to run a kernel of optim.py. parts: [(Part, g), ...]; t: the step, on which the rounding depends.


def run_parts_in_pieces(kernel, scalars, t, parts, skip):
    """Piece by piece, so that no more than one piece of the moments is in fp32 at a time."""
    most = PIECE
    if parts[0][1].is_cpu:
        most, scalars = CHUNK, dict(zip(scalars, torch.tensor([*scalars.values()]).unbind(), strict=True))
    for part, g in parts:
        for width, *piece in part.pieces(g, most):
            update(kernel, scalars, width, part.tables, part.keys(t), skip, *piece)


def run_parts_compiled(kernel, scalars, t, parts, skip):
    """In one piece, because the fp32 values stay in registers."""
    device, names = parts[0][1].device, tuple(scalars)
    # All that changes from step to step arrives in two copies.
    values, keys = torch.tensor([*scalars.values()]), torch.tensor([part.keys(t) for part, _ in parts])
    if device.type == 'cuda':
        values, keys = (x.pin_memory().to(device, non_blocking=True) for x in (values, keys))
    for (part, g), part_keys in zip(parts, keys, strict=True):
        for width, *piece in part.pieces(g, g.numel()):
            compiled_in_fewer_bits(kernel, names, width)(skip, values, part_keys, part.tables, *piece)


@functools.cache
def compiled_in_fewer_bits(kernel, names, width):
    def run(skip, values, keys, tables, *piece):
        scalars = dict(zip(names, values.unbind(), strict=True))
        update(kernel, scalars, width, tables, keys.unbind(), skip, *piece)

    return torch.compile(run, dynamic=True)


def first_of_lines(parameter, part):
    """For each line that this rank holds, the index of its first number in the whole parameter, int64 (lines)."""
    is_cut = part is not None and part.dim is not None
    whole = part.shape if is_cut else parameter.shape
    rows = torch.arange(whole[0])
    if is_cut and part.dim == 0:
        rows = torch.cat([rows.narrow(0, *one) for one in part.ranges])
    begin = 0
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        begin = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)[1][0]
    rows = rows[begin : begin + local(parameter).shape[0]]
    columns, per_row = (whole[-1], math.prod(whole[1:-1])) if len(whole) > 1 else (1, 1)
    column = part.ranges[0][0] if is_cut and part.dim == 1 else 0
    first = (rows[:, None] * per_row + torch.arange(per_row)).flatten() * columns + column
    return first.to(local(parameter).device)


def as_lines(tensor):
    """As (lines, columns). A line is the last dimension; in a vector each number is a line."""
    return tensor.view(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)
