"""
How an exchange of train_diloco.py encodes numbers as bytes, and decodes them.

    float32, bfloat16   as they are                                                              4, 2 bytes per number
    int8, int4          -127 to 127 or -7 to 7, times a scale that 256 numbers share             1.016, 0.516
    top2bit             the k largest of each 4096 numbers: place (12 bits) and one of 4 values  1.75 per number sent

    payload = encode(numbers, 'int4')                       # dense: (rows, n) -> (rows, bytes)
    numbers = decode(payload, 'int4')
    payload = encode_top2bit(tensors, k=64)                 # sparse: [tensors] -> (bytes)
    places, numbers = decode_top2bit(payload, shapes, k=64)

The size of a payload depends on shapes alone. A number that is not finite decodes as NaN, and so do all numbers that
share its scale.
"""

import math

import torch
from torch.nn import functional as F

BYTES = {'float32': 4, 'bfloat16': 2, 'int8': 1, 'int4': 0.5, 'top2bit': 1.75}  # per number, no scales
LEVELS = {'int8': 127, 'int4': 7}  # a number is -LEVELS to LEVELS times its block's scale
BLOCKS = {'int8': 256, 'int4': 256}  # numbers that share a scale
SCALES = {'int8': 4, 'int4': 4}  # bytes of a scale
TABLE = 16  # bytes of the 4 values that all numbers of a tensor share in top2bit
STRETCH = 2**20  # encode_flat() encodes so many numbers at a time, since encoding takes several times their memory
CHUNK, SIDE = 4096, 64  # k numbers of each chunk are sent, addressed by 12 bits; in a matrix a chunk is 64 x 64


# --- dense ------------------------------------------------------------------------------------------------------------


def encode(numbers, dtype):
    """fp32 (rows, n) -> uint8 (rows, bytes). n: a multiple of BLOCKS[dtype]; any for float32 and bfloat16.

    int8 and int4 round to the nearest of 2 x LEVELS + 1 values, from minus to plus the largest absolute value of the
    block. In each row the scales come first.
    """
    if dtype == 'float32':
        return numbers.contiguous().view(torch.uint8)
    if dtype == 'bfloat16':
        return numbers.bfloat16().view(torch.uint8)
    rows = len(numbers)
    blocks = numbers.reshape(rows, -1, BLOCKS[dtype])
    scales = blocks.abs().amax(dim=2) / LEVELS[dtype]  # (rows, blocks)
    codes = blocks.div(scales.clamp(min=torch.finfo(torch.float32).tiny)[:, :, None]).round_()
    codes = codes.clamp_(-LEVELS[dtype], LEVELS[dtype]).nan_to_num_().to(torch.int8).view(rows, -1)
    if dtype == 'int4':
        low, high = (codes + 8).view(torch.uint8).view(rows, -1, 2).unbind(dim=2)
        codes = low | high << 4
    return torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)), dim=1)


def decode(payload, dtype):
    """The inverse of encode(), up to rounding: uint8 (rows, bytes) -> fp32 (rows, n)."""
    if dtype == 'float32':
        return payload.view(torch.float32)
    if dtype == 'bfloat16':
        return payload.view(torch.bfloat16).float()
    rows, size = payload.shape
    n_blocks = size // int(BLOCKS[dtype] * BYTES[dtype] + SCALES[dtype])
    scales = payload[:, : SCALES[dtype] * n_blocks].contiguous().view(torch.float32)
    codes = payload[:, SCALES[dtype] * n_blocks :]
    if dtype == 'int4':
        codes = torch.stack((codes & 15, codes >> 4), dim=2).view(torch.int8) - 8
    else:
        codes = codes.contiguous().view(torch.int8)
    return (codes.reshape(rows, n_blocks, BLOCKS[dtype]) * scales[:, :, None]).view(rows, -1)


def encode_flat(numbers, dtype):
    """fp32 (n) -> uint8 (bytes), for any n: encoded in stretches, of which the last is padded with zeros."""
    if dtype == 'float32' or not len(numbers):
        return numbers.view(torch.uint8)
    block = BLOCKS.get(dtype, 1)
    return torch.cat([encode(F.pad(part, (0, -len(part) % block))[None], dtype)[0] for part in numbers.split(STRETCH)])


def decode_flat(payload, dtype):
    """The inverse of encode_flat(); the zeros of the padding may follow."""
    if dtype == 'float32' or not len(payload):
        return payload.view(torch.float32)
    size = int(STRETCH * BYTES[dtype]) + STRETCH // BLOCKS.get(dtype, 1) * SCALES.get(dtype, 0)
    numbers, end = torch.empty(-(-len(payload) // size) * STRETCH), 0
    for part in payload.split(size):
        decoded = decode(part[None], dtype)[0]
        numbers[end : end + len(decoded)] = decoded
        end += len(decoded)
    return numbers[:end]


# --- the statistical quantiser ----------------------------------------------------------------------------------------


def two_bits(numbers):
    """fp32 (rows, n) -> codes 0 to 3, uint8 (rows, n), and the values that they stand for in each row, fp32 (rows, 4).

    Each row has four bins, 1.5 of its standard deviations wide; bin 2 is centred at its mean. A code is a bin, and
    stands for the mean of all numbers in it (SparseLoCo, arXiv 2508.15706):

        code = clamp(round((x - mean) / (1.5 sigma)) + 2, 0, 3)
    """
    numbers = numbers.double()  # so few bits remain that rounding errors should not decide which
    centred = numbers - numbers.mean(dim=1, keepdim=True)
    width = 1.5 * centred.square().mean(dim=1, keepdim=True).sqrt()
    codes = centred.div_(width.clamp(min=torch.finfo(torch.float32).tiny)).round_().add_(2).clamp_(0, 3)
    codes = codes.nan_to_num_().to(torch.uint8)
    table = []
    for code in range(4):
        is_in = codes == code
        table.append((numbers * is_in).sum(dim=1) / is_in.sum(dim=1).clamp(min=1))  # inf * False = NaN, in all 4
    return codes, torch.stack(table, dim=1).float()


def pack_codes(codes):
    """uint8 (rows, n) of codes 0 to 3 -> (rows, n / 4), with the first of each four codes in the lowest bits."""
    first, second, third, fourth = codes.view(len(codes), -1, 4).unbind(dim=2)
    return first | second << 2 | third << 4 | fourth << 6


def unpack_codes(packed):
    """The inverse of pack_codes(), as int64 (rows, n)."""
    return torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=2).flatten(1).long()


# --- the k largest ----------------------------------------------------------------------------------------------------


def grid(shape):
    """(rows, columns, height, width) of a tensor as a matrix, and of its chunks. A matrix has chunks of 64 x 64; any
    other tensor counts as one row, in chunks of 4096."""
    return (*shape, SIDE, SIDE) if len(shape) == 2 else (1, math.prod(shape), 1, CHUNK)


def kept(shape, k, device='cpu'):
    """How many numbers of each chunk are sent, int64 (chunks), row of chunks by row of chunks. That is k for a whole
    chunk; a chunk at the edge, which has fewer numbers, sends the same share of them, rounded up."""
    rows, columns, height, width = grid(shape)
    heights = (rows - torch.arange(0, rows, height, device=device)).clamp(max=height)
    widths = (columns - torch.arange(0, columns, width, device=device)).clamp(max=width)
    return (k * heights[:, None] * widths + CHUNK - 1).flatten() // CHUNK


def chunks_of(shape, k, device):
    """For each number sent, its chunk and its index among those that this chunk sends: both int64 (numbers sent), chunk
    by chunk.

    They are computed on the device. A copy from pageable memory would make the host wait until everything queued on the
    device is done, which in an overlapped exchange means until the slowest replica has sent.
    """
    sent = int(kept(shape, k).sum())
    counts = kept(shape, k, device)
    chunk = torch.arange(len(counts), device=device).repeat_interleave(counts, output_size=sent)
    return chunk, torch.arange(sent, device=device) - (counts.cumsum(0) - counts)[chunk]


def places_of(places_in_chunks, shape, k):
    """Places within chunks as indices into the flat tensor: int64 (numbers sent), in the order of the chunks."""
    _, columns, height, width = grid(shape)
    chunk, _ = chunks_of(shape, k, places_in_chunks.device)
    per_row = -(-columns // width)
    row = chunk // per_row * height + places_in_chunks // width
    return row * columns + chunk % per_row * width + places_in_chunks % width


def largest(tensor, k):
    """Places within their chunks, int64 (numbers sent), of the largest numbers of each chunk, as many as kept() says;
    chunk by chunk."""
    rows, columns, height, width = grid(tensor.shape)
    sizes = tensor.reshape(rows, columns).abs()
    sizes = F.pad(sizes, (0, -columns % width, 0, -rows % height), value=-1.0)  # padding is never chosen
    chunks = sizes.view(-1, height, sizes.shape[1] // width, width).transpose(1, 2).reshape(-1, CHUNK)
    return chunks.topk(k, dim=1).indices[chunks_of(tensor.shape, k, tensor.device)]


def encode_top2bit(tensors, k):
    """Encode the k largest numbers of each chunk of fp32 tensors as uint8 (bytes). 1 <= k <= CHUNK; no tensor is empty.

    For each tensor: the table of two_bits(), which all its numbers share; their codes, four in a byte; their places in
    the chunks, 12 bits each, two in 3 bytes.
    """
    payload = []
    for tensor in tensors:
        in_chunks = largest(tensor, k)
        codes, table = two_bits(tensor.flatten()[places_of(in_chunks, tensor.shape, k)][None])
        first, second = F.pad(in_chunks, (0, len(in_chunks) % 2)).view(-1, 2).unbind(dim=1)
        places = torch.stack((first & 255, first >> 8 | (second & 15) << 4, second >> 4), dim=1).to(torch.uint8)
        packed = pack_codes(F.pad(codes, (0, -len(in_chunks) % 4)))
        payload += [table.view(torch.uint8).flatten(), packed.flatten(), places.flatten()]
    return torch.cat(payload)


def decode_top2bit(payload, shapes, k):
    """(places, numbers): int64 and fp32 (numbers sent). Places are indices into the tensors of these shapes laid end to
    end, so that flat[places] = numbers; all other numbers are zero."""
    parts = iter(payload.split([size for shape in shapes for size in sizes_of_parts(shape, k)]))
    places, numbers, first = [], [], 0
    for shape in shapes:
        table, packed, triples = next(parts), next(parts), next(parts)
        n = int(kept(shape, k).sum())
        low, middle, high = triples.view(-1, 3).long().unbind(dim=1)
        in_chunks = torch.stack((low | (middle & 15) << 8, middle >> 4 | high << 4), dim=1).flatten()[:n]
        places.append(first + places_of(in_chunks, shape, k))
        numbers.append(table.clone().view(torch.float32)[unpack_codes(packed[None])[0, :n]])
        first += math.prod(shape)
    return torch.cat(places), torch.cat(numbers)


def sizes_of_parts(shape, k):
    """Bytes of the table, the codes and the places in the payload of a tensor of this shape."""
    n = int(kept(shape, k).sum())
    return TABLE, -(-n // 4), 3 * -(-n // 2)
