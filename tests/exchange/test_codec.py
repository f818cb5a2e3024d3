"""exchange/codec.py: what becomes of numbers when they are sent, beside float64 references made from the formulas. And
what collectives.py sends in several messages."""

import math
from types import SimpleNamespace

import pytest
import torch
from precision import apart

from exchange import codec, collectives


def random(*shape, seed=0):
    """Normal numbers; rows have different scales."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(shape[0], *[1] * (len(shape) - 1), generator=generator) + 0.1
    return torch.randn(shape, generator=generator) * scale


@pytest.mark.parametrize('dtype', codec.BYTES)
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


@pytest.mark.parametrize('dtype', codec.BYTES)
@pytest.mark.parametrize('n', [0, 1, 2048, codec.STRETCH + 300])
def test_a_flat_tensor_of_any_length_is_rounded_as_it_would_be_at_once(dtype, n):
    numbers = torch.randn(n, generator=torch.Generator().manual_seed(n))
    payload = codec.encode_flat(numbers, dtype)
    assert payload.dtype == torch.uint8 and payload.ndim == 1
    decoded = codec.decode_flat(payload, dtype)[:n]
    padded = torch.nn.functional.pad(numbers, (0, -n % codec.BLOCKS.get(dtype, 1)))[None]
    assert decoded.equal(codec.decode(codec.encode(padded, dtype), dtype)[0, :n] if n else numbers)


@pytest.mark.parametrize('dtype', codec.BYTES)
def test_zeros_stay_zeros_and_what_is_not_finite_never_becomes_a_number(dtype):
    block = codec.BLOCKS.get(dtype, 256)
    numbers = torch.zeros(2, 2 * block)
    assert torch.equal(codec.decode(codec.encode(numbers, dtype), dtype), numbers)
    for value in (math.nan, math.inf, -math.inf):
        numbers[1, 5] = value
        decoded = codec.decode(codec.encode(numbers, dtype), dtype)
        assert not decoded[1, 5].isfinite()
        assert torch.equal(decoded[0], numbers[0]) and torch.equal(decoded[1, block:], numbers[1, block:])


@pytest.mark.parametrize('dtype', codec.BYTES)
def test_a_payload_is_read_back_from_between_other_bytes(dtype):
    """Rows that are cut out of a larger tensor are not contiguous there."""
    payload = codec.encode(random(2, codec.BLOCKS.get(dtype, 256)), dtype)
    framed = torch.cat((torch.zeros(2, 8, dtype=torch.uint8), payload), dim=1)
    assert torch.equal(codec.decode(framed[:, 8:], dtype), codec.decode(payload, dtype))


@pytest.mark.parametrize('segments', [1, 2, 5])
def test_a_long_message_is_whole_as_all_its_segments_are_waited_for(monkeypatch, segments):
    def send(target, source, group, async_op):  # arrives when it is waited for
        return SimpleNamespace(wait=lambda: target.copy_(source))

    monkeypatch.setattr(collectives.dist, 'all_to_all_single', send)
    message = torch.randint(256, (3, segments * collectives.SEGMENT - 5), dtype=torch.uint8)
    assert collectives.all_to_all(message, None).equal(message)
