"""
How an exchange of train_diloco.py encodes numbers as bytes, and decodes them.

    float32, bfloat16   as they are                                                    4, 2 bytes per number
    int8, int4          -127 to 127 or -7 to 7, times a scale that 256 numbers share   1.016, 0.516

    payload = encode(numbers, 'int4')                       # (rows, n) -> (rows, bytes)
    numbers = decode(payload, 'int4')

The size of a payload depends on shapes alone. A number that is not finite decodes as NaN, and so do all numbers that
share its scale.
"""

import torch
from torch.nn import functional as F

BYTES = {'float32': 4, 'bfloat16': 2, 'int8': 1, 'int4': 0.5}  # per number, no scales
LEVELS = {'int8': 127, 'int4': 7}  # a number is -LEVELS to LEVELS times its block's scale
BLOCKS = {'int8': 256, 'int4': 256}  # numbers that share a scale
SCALES = {'int8': 4, 'int4': 4}  # bytes of a scale
STRETCH = 2**20  # encode_flat() encodes so many numbers at a time, since encoding takes several times their memory


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


def encoded_bytes(n, dtype):
    """How many bytes encode_flat() makes of n numbers."""
    block = BLOCKS.get(dtype, 1)
    blocks = -(-n // block)
    return int(blocks * block * BYTES[dtype]) + blocks * SCALES.get(dtype, 0)


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
