"""exchange/codec.py: what becomes of numbers when they are sent, beside float64 references made from the formulas."""

import math

import pytest
import torch
from precision import apart
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from exchange import codec

DENSE = [dtype for dtype in codec.BYTES if dtype != 'top2bit']
# Shards can have any size: less than a chunk, a chunk and one more, blocks at both edges, one number, three dimensions.
SHAPES = [
    (1,),
    (3,),
    (4096,),
    (4097,),
    (9000,),
    (1, 1),
    (64, 64),
    (65, 63),
    (130, 200),
    (1, 300),
    (300, 1),
    (7, 11, 60),
]


def random(*shape, seed=0):
    """Normal numbers; rows have different scales."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(shape[0], *[1] * (len(shape) - 1), generator=generator) + 0.1
    return torch.randn(shape, generator=generator) * scale


# --- dense ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('dtype', DENSE)
def test_a_round_trip_through_the_codec(dtype):
    block = codec.BLOCKS.get(dtype, 256)
    numbers = random(3, 4 * block)
    numbers *= torch.logspace(-20, 20, 12).repeat_interleave(block).view(3, -1)  # each block has its own scale
    numbers[1, 10] = 0.0
    payload = codec.encode(numbers, dtype)
    scales = 4 * codec.SCALES.get(dtype, 0)
    assert payload.shape == (3, 4 * block * codec.BYTES[dtype] + scales) and payload.dtype == torch.uint8
    decoded = codec.decode(payload, dtype)
    assert decoded.dtype == torch.float32 and decoded.shape == numbers.shape
    blocks = decoded.view(3, 4, -1)
    if dtype == 'float32':
        assert torch.equal(decoded, numbers)
    elif dtype == 'bfloat16':
        assert torch.equal(decoded, numbers.bfloat16().float())
    else:
        largest = numbers.view(3, 4, -1).abs().amax(2, keepdim=True)
        error = (decoded - numbers).view(3, 4, -1).abs() / largest
        assert error.max() <= 0.5001 / codec.LEVELS[dtype]  # half a step
        assert len((blocks[0, 0] / largest[0, 0]).unique()) <= 2 * codec.LEVELS[dtype] + 1
        assert torch.allclose(blocks.abs().amax(2, keepdim=True), largest)  # the largest is kept
    again = codec.encode(decoded, dtype)  # if a replica sends on what it has decoded, the next one gets the same
    assert torch.allclose(codec.decode(again, dtype), decoded, rtol=apart())


@pytest.mark.parametrize('dtype', DENSE)
@pytest.mark.parametrize('n', [0, 1, 2048, codec.STRETCH + 300])
def test_a_flat_tensor_of_any_length_is_rounded_as_it_would_be_at_once(dtype, n):
    numbers = torch.randn(n, generator=torch.Generator().manual_seed(n))
    payload = codec.encode_flat(numbers, dtype)
    assert payload.dtype == torch.uint8 and payload.ndim == 1
    decoded = codec.decode_flat(payload, dtype)[:n]
    padded = torch.nn.functional.pad(numbers, (0, -n % codec.BLOCKS.get(dtype, 1)))[None]
    assert decoded.equal(codec.decode(codec.encode(padded, dtype), dtype)[0, :n] if n else numbers)


@pytest.mark.parametrize('dtype', DENSE)
def test_zeros_stay_zeros_and_what_is_not_finite_never_becomes_a_number(dtype):
    block = codec.BLOCKS.get(dtype, 256)
    numbers = torch.zeros(2, 2 * block)
    assert torch.equal(codec.decode(codec.encode(numbers, dtype), dtype), numbers)
    for value in (math.nan, math.inf, -math.inf):
        numbers[1, 5] = value
        decoded = codec.decode(codec.encode(numbers, dtype), dtype)
        assert not decoded[1, 5].isfinite()
        assert torch.equal(decoded[0], numbers[0]) and torch.equal(decoded[1, block:], numbers[1, block:])


@pytest.mark.parametrize('dtype', DENSE)
def test_a_payload_is_read_back_from_between_other_bytes(dtype):
    """Rows that are cut out of a larger tensor are not contiguous there."""
    payload = codec.encode(random(2, codec.BLOCKS.get(dtype, 256)), dtype)
    framed = torch.cat((torch.zeros(2, 8, dtype=torch.uint8), payload), dim=1)
    assert torch.equal(codec.decode(framed[:, 8:], dtype), codec.decode(payload, dtype))


# --- the statistical quantiser ----------------------------------------------------------------------------------------


def two_bits(numbers):
    """The formula of SparseLoCo, number by number in float64: (codes, the values that they stand for)."""
    numbers = [float(number) for number in numbers]
    mean = math.fsum(numbers) / len(numbers)
    sigma = math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / len(numbers))
    codes = [min(max(round((x - mean) / (1.5 * sigma)) + 2, 0), 3) if sigma else 2 for x in numbers]
    bins = [[x for x, code in zip(numbers, codes, strict=True) if code == wanted] for wanted in range(4)]
    means = [math.fsum(of_bin) / len(of_bin) if of_bin else 0.0 for of_bin in bins]
    return codes, torch.tensor([means[code] for code in codes], dtype=torch.float64)


@pytest.mark.parametrize('seed', range(20))
def test_two_bits_are_those_of_the_formula(seed):
    for n in (1, 2, 3, 5, 64, 777, 4096):
        numbers = random(2, n, seed=seed) + seed % 3  # not always around zero
        codes, table = codec.two_bits(numbers)
        for row in range(2):
            expected, decoded = two_bits(numbers[row])
            assert codes[row].tolist() == expected
            error = (table[row][codes[row].long()] - decoded).abs().max()
            assert error <= apart() * numbers.abs().max()


def test_two_bits_halve_the_error_of_a_grid_of_three_values():
    """For normal numbers, for which the statistics are made. A grid of -max, 0 and max would make nearly all of them
    0."""
    numbers = torch.randn(64, 2048, generator=torch.Generator().manual_seed(0))
    codes, table = codec.two_bits(numbers)
    error = (table.gather(1, codes.long()) - numbers).square().mean().sqrt()
    largest = numbers.abs().amax(dim=1, keepdim=True)
    linear = ((numbers / largest).round() * largest - numbers).square().mean().sqrt()
    assert error < linear / 2, (error, linear)  # 0.42 and 0.89


@pytest.mark.parametrize('n', [4, 64, 2048])
def test_codes_are_packed_without_loss(n):
    codes = torch.randint(0, 4, (3, n), generator=torch.Generator().manual_seed(n), dtype=torch.uint8)
    packed = codec.pack_codes(codes)
    assert packed.shape == (3, n // 4) and torch.equal(codec.unpack_codes(packed), codes.long())


# --- the k largest ----------------------------------------------------------------------------------------------------


def top2bit(tensor, k):
    """(the tensor after encoding and decoding, how many numbers are sent), chunk by chunk in float64."""
    matrix = tensor.double() if tensor.dim() == 2 else tensor.double().reshape(1, -1)
    height, width = (64, 64) if tensor.dim() == 2 else (1, 4096)
    places = []
    for row in range(0, matrix.shape[0], height):
        for column in range(0, matrix.shape[1], width):
            chunk = [
                (i, j)
                for i in range(row, min(row + height, matrix.shape[0]))
                for j in range(column, min(column + width, matrix.shape[1]))
            ]
            chunk.sort(key=lambda place: -abs(matrix[place].item()))
            places += chunk[: math.ceil(k * len(chunk) / 4096)]
    _, decoded = two_bits([matrix[place].item() for place in places])
    result = torch.zeros_like(matrix)
    for place, value in zip(places, decoded, strict=True):
        result[place] = value
    return result.view(tensor.shape), len(places)


@pytest.mark.parametrize('k', [1, 64, 1000, 4096])
@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_the_k_largest_of_each_chunk_are_sent_in_two_bits(shape, k):
    tensor = random(*shape, seed=k)
    payload = codec.encode_top2bit([tensor], k)
    places, numbers = codec.decode_top2bit(payload, [tensor.shape], k)
    decoded = torch.zeros(tensor.numel())
    decoded[places] = numbers
    expected, n = top2bit(tensor, k)
    assert (decoded.view(shape) - expected).abs().max() <= apart() * tensor.abs().max()
    assert len(places.unique()) == len(places) == n == codec.kept(tensor.shape, k).sum()
    assert payload.dtype == torch.uint8 and len(payload) == sum(codec.sizes_of_parts(tensor.shape, k))
    assert 16 + 1.75 * n <= len(payload) <= 16 + 1.75 * n + 3  # a table, 14 bits each, padding to bytes


def test_tensors_laid_end_to_end_are_those_alone():
    tensors, k = [random(*shape, seed=3) for shape in SHAPES], 100
    shapes = [tensor.shape for tensor in tensors]
    places, numbers = codec.decode_top2bit(codec.encode_top2bit(tensors, k), shapes, k)
    together = torch.zeros(sum(tensor.numel() for tensor in tensors))
    together[places] = numbers
    for tensor, part in zip(tensors, together.split([tensor.numel() for tensor in tensors]), strict=True):
        places, numbers = codec.decode_top2bit(codec.encode_top2bit([tensor], k), [tensor.shape], k)
        alone = torch.zeros(tensor.numel())
        alone[places] = numbers
        assert torch.equal(part, alone)


def test_the_host_neither_waits_for_the_device_nor_copies_to_it():
    """The device 'meta' stands for a GPU. Reading a number from it raises an error, and copies to it from the host's
    pageable memory are noted."""
    copies = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            devices = {t.device.type for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)}
            if len(devices) > 1:
                copies.append(str(function))
            return result

    shapes = [torch.Size(shape) for shape in SHAPES]
    with Watch():
        tensors = [torch.empty(shape, device='meta') for shape in shapes]
        payload = codec.encode_top2bit(tensors, k=64)
        places, numbers = codec.decode_top2bit(payload, shapes, k=64)
        for dtype in DENSE:
            codec.decode(codec.encode(torch.empty(3, 1024, device='meta'), dtype), dtype)
    assert not copies and places.shape == numbers.shape and places.is_meta


def test_zeros_and_what_is_not_finite_in_the_largest():
    tensor, shapes = torch.zeros(70, 70), [torch.Size((70, 70))]
    places, numbers = codec.decode_top2bit(codec.encode_top2bit([tensor], 64), shapes, 64)
    assert len(places.unique()) == 64 + 6 + 6 + 1 and not numbers.any()  # 64 x 64, 64 x 6, 6 x 64, 6 x 6
    for value in (math.nan, math.inf, -math.inf):
        tensor[66, 3] = value
        places, numbers = codec.decode_top2bit(codec.encode_top2bit([tensor], 64), shapes, 64)
        assert 66 * 70 + 3 in places and not numbers.isfinite().any()
