"""NF4: codes, bytes, rows, and the linear layer that computes with them."""

import math

import pytest
import torch
import torch.nn.functional as F
from pretrained import save_model
from short import slow_but
from torch import nn
from torch._inductor import metrics

from huggingface import finetune, loading, lora, nf4, self_test
from huggingface.pretrained import Pretrained

LEVELS = torch.tensor(nf4.LEVELS, dtype=torch.float64)


def some_weights(rows=37, columns=192, dtype=torch.float32):
    """Normal numbers, and among them a block of zeros, a block of a single number, ties between two levels, 1e-30 and
    1e30."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 0.02
    weight[3, :64] = 0
    weight[4] = 0
    weight[4, 7], weight[4, 70] = -3.0, 1e-30
    weight[5] *= 1e30
    middles = (LEVELS[1:] + LEVELS[:-1]) / 2
    weight[6, :64] = torch.cat((torch.ones(1), middles.float(), torch.zeros(48)))
    return weight.to(dtype)


def unpacked(packed):
    """(codes (rows, columns), scales (rows, blocks)), byte by byte as the docstring of nf4.py says."""
    columns = packed.shape[1] * 64 // 34
    codes, scales = [], []
    for row in packed.tolist():
        codes.append([code for byte in row[: columns // 2] for code in (byte >> 4, byte & 15)])
        bits = [low + 256 * high for low, high in zip(row[columns // 2 :: 2], row[columns // 2 + 1 :: 2], strict=True)]
        scales.append(
            [torch.tensor(b << 16 if b < 2**15 else (b << 16) - 2**32).int().view(torch.float32) for b in bits]
        )
    return torch.tensor(codes), torch.tensor(scales, dtype=torch.float64)


def test_the_levels_are_quantiles_of_the_normal_distribution():
    end = 1 - (1 / 32 + 1 / 30) / 2
    positive, negative = (torch.linspace(0.5, end, steps, dtype=torch.float64) for steps in (9, 8))
    levels = torch.cat((-torch.special.ndtri(negative).flip(0), torch.special.ndtri(positive)[1:]))
    assert (levels / levels[-1] - LEVELS).abs().max() < 2e-7  # the paper's are of fp32
    assert LEVELS[7] == 0 and len(LEVELS) == 16


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_the_nearest_of_all_sixteen_in_float64(dtype):
    weight = some_weights(dtype=dtype) if dtype != torch.float16 else some_weights().clamp(-6e4, 6e4).half()
    codes, scales = unpacked(nf4.quantize(weight))
    blocks = weight.double().view(37, 3, 64)
    assert torch.equal(scales, weight.view(37, 3, 64).abs().amax(2).bfloat16().double())
    steps = scales.clone()
    steps[steps == 0] = 1
    distances = (blocks[..., None] / steps[..., None, None] - LEVELS).abs()  # to each of 16 levels
    taken = distances.gather(3, codes.view(37, 3, 64, 1))[..., 0]
    assert torch.equal(taken, distances.amin(3))
    found = nf4.dequantize(nf4.quantize(weight))
    assert torch.equal(found, (LEVELS.float()[codes].view(37, 3, 64) * scales[..., None].float()).view(37, 192))
    assert torch.equal(nf4.dequantize(nf4.quantize(weight), torch.bfloat16), found.bfloat16())
    assert not found[3, :64].any() and found[4, 7] == -3


@pytest.mark.parametrize(('dtype', 'digits'), [(torch.bfloat16, 8), (torch.float16, 11)])
def test_float32_finds_the_codes_of_float64_for_all_numbers_of_16_bits(dtype, digits):
    """All mantissas of a weight beside all mantissas of its scale, in all exponents down to a ratio below the smallest
    middle, and both signs. In float32 a quotient and a middle are each off by at most 2^-24 of themselves; no quotient
    is as near to a middle as both together, so the codes are the same on every device that divides correctly."""
    mantissas = torch.arange(2 ** (digits - 1), 2**digits).double() / 2 ** (digits - 1)  # 1 to 2
    scales = torch.arange(128, 256).double() / 128
    ratios = (mantissas[:, None] / scales).flatten().frexp().mantissa
    for middle in nf4.MIDDLES:
        mantissa = math.frexp(abs(middle))[0]
        nearest = min((ratios * 2.0**shift - mantissa).abs().min() for shift in (-1, 0, 1))
        assert nearest > 2 * 2**-24 * mantissa

    weights = (mantissas * 2.0 ** torch.arange(-6, 2)[:, None]).flatten()
    weights = torch.cat((weights, -weights))
    rows = scales[:, None, None].expand(128, -(-len(weights) // 63), 64).clone()  # each block begins with its scale
    rows[:, :, 1:] = torch.cat((weights, torch.zeros(-len(weights) % 63))).view(1, -1, 63)
    rows = torch.where(rows.abs() > scales[:, None, None], 0, rows).flatten(1)
    in_float32 = nf4.quantize(rows.to(dtype))
    assert torch.equal(rows.to(dtype).double(), rows) and torch.equal(in_float32, nf4.quantize(rows))


def test_a_large_matrix_is_packed_in_pieces():
    weight = torch.randn(5, 2**19)
    assert torch.equal(nf4.quantize(weight), torch.cat([nf4.quantized(row[None]) for row in weight]))


def test_the_error_on_normal_weights_is_a_tenth_of_them():
    weight = torch.randn(256, 1024)
    assert 0.09 < (nf4.dequantize(nf4.quantize(weight)) - weight).norm() / weight.norm() < 0.095


@pytest.mark.parametrize('ranks', [2, 3, 5])
def test_rows_packed_alone_are_those_of_the_whole_and_packing_again_changes_no_bit(ranks):
    weight = some_weights()
    packed = nf4.quantize(weight)
    assert packed.shape == (37, nf4.bytes_of(192)) == (37, 102) and packed.dtype == torch.uint8
    assert nf4.columns_of(packed.shape[1]) == 192
    assert torch.equal(torch.cat([nf4.quantize(rows) for rows in weight.chunk(ranks)]), packed)
    assert torch.equal(nf4.quantize(nf4.dequantize(packed)), packed)
    with pytest.raises(ValueError, match='rows of 100 weights are not made of blocks of 64'):
        nf4.bytes_of(100)


@pytest.mark.parametrize(('is_transposed', 'rows'), [(False, 128), (True, 128), (True, 192)])  # and a square one
@pytest.mark.parametrize('autocast', [False, True])
@pytest.mark.parametrize('stored', ['nf4', 'bfloat16'])
def test_output_and_gradients_are_those_of_the_dequantized_matrix_to_the_bit(stored, autocast, is_transposed, rows):
    """For a Linear or Conv1D with LoRA, whose two matrices get gradients, too."""
    weight, generator = some_weights(rows, 192), torch.Generator().manual_seed(1)
    packed = nf4.quantize(weight) if stored == 'nf4' else weight.bfloat16()
    plain = nf4.whole(packed, torch.float32)
    inputs, outputs = plain.shape if is_transposed else plain.T.shape

    def draw(*shape):
        return torch.randn(shape, generator=generator).requires_grad_()

    x, bias, A, B = draw(2, 7, inputs), draw(outputs), draw(4, inputs), draw(outputs, 4)
    upstream = torch.randn(2, 7, outputs, generator=generator)
    leaf, found = x, {}
    for name in ('ours', 'plain'):
        x = leaf * 1  # as between layers: of a leaf autocast would keep the cast one for both matmuls
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
            if name == 'ours':
                y = nf4.frozen_linear(x, packed, bias, is_transposed)
            else:
                y = F.linear(x, plain.T if is_transposed else plain, bias)
            y = y + F.linear(F.linear(x, A), B)
        y.backward(upstream.to(y.dtype))
        found[name] = [y.detach(), *(each.grad for each in (leaf, bias, A, B))]
        for each in (leaf, bias, A, B):
            each.grad = None
    for ours, theirs in zip(found['ours'], found['plain'], strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_between_forward_and_backward_the_bytes_alone_are_kept():
    packed, x = nf4.quantize(some_weights(128, 192)), torch.randn(3, 192, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        nf4.frozen_linear(x, packed)
    assert [tensor.data_ptr() for tensor in kept] == [packed.data_ptr()]


@pytest.mark.parametrize('stored', slow_but(['nf4'], ['nf4', 'bfloat16']))
def test_compiled_no_whole_matrix_is_kept_either(stored):
    """Tested with the partitioner that all backends of torch.compile use for training."""
    weight = some_weights(128, 192)
    packed = nf4.quantize(weight) if stored == 'nf4' else weight.bfloat16()
    x = torch.randn(3, 192, requires_grad=True)

    def forward(x, packed):
        return nf4.frozen_linear(x * 2, packed).square()

    kept, upstream = [], torch.randn(3, 128)
    torch._dynamo.reset()
    compiled = torch.compile(forward, backend='aot_eager_decomp_partition', fullgraph=True)
    compiled(x, packed).backward(upstream)
    first, x.grad = x.grad, None
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = compiled(x, packed)
    y.backward(upstream)
    assert max(tensor.nbytes for tensor in kept) == packed.nbytes  # a whole matrix has more
    eager = torch.autograd.grad(forward(x, packed), x, upstream)[0]
    assert torch.equal(x.grad, first) and torch.equal(eager, first)


@pytest.mark.slow
def test_compiled_a_weight_moves_as_few_bytes_in_backward_as_in_forward():
    """Not 22.5 bytes and more, which dequantize() moves one operation after the other."""
    torch._dynamo.reset()
    packed, x = nf4.quantize(some_weights(1024, 2048)), torch.randn(1, 2048, requires_grad=True)
    compiled, upstream, moved = torch.compile(nf4.frozen_linear, fullgraph=True), torch.randn(1, 1024).bfloat16(), []
    torch._logging.set_logs(inductor_metrics=True)  # else Inductor does not count
    try:
        for step in ('forward', 'backward'):
            metrics.reset()
            if step == 'forward':
                with torch.autocast('cpu', torch.bfloat16):
                    y = compiled(x, packed)
            else:
                y.backward(upstream)
            moved.append(metrics.num_bytes_accessed)
    finally:
        torch._logging.set_logs()
    # A weight's half byte is read, and its 2 of bfloat16 are written, and read by the matmul; the rest is scales.
    assert all(4 < bytes_moved / (1024 * 2048) < 5 for bytes_moved in moved)
    with torch.autocast('cpu', torch.bfloat16):
        (eager,) = torch.autograd.grad(nf4.frozen_linear(x, packed), x, upstream)
    assert torch.equal(x.grad, eager)


# --- a model ----------------------------------------------------------------------------------------------------------


def training_model(folder, **keys):
    pretrained = Pretrained(str(folder), lora_rank=2, **keys)
    with torch.device('meta'):
        model = finetune.for_training(pretrained)
        lora.compute_from_stored(model)
    model.to_empty(device='cpu')
    loading.load(model, pretrained)
    return pretrained, model


@pytest.mark.parametrize('kind', ['llama_64', 'qwen2_64', 'gpt2_64', 'gemma_64', 'mixtral_64'])
@pytest.mark.parametrize('frozen_dtype', ['bfloat16', 'nf4'])
def test_a_model_computes_what_its_class_does_with_the_weights_that_it_stands_for(
    one_rank, tmp_path, kind, frozen_dtype
):
    """With tied weights, biases, a scaled embedding, Conv1D and experts; from an fp32 folder, so that bfloat16 rounds,
    too."""
    save_model(tmp_path, kind)
    pretrained, model = training_model(tmp_path, frozen_dtype=frozen_dtype)
    held = {parameter.dtype for parameter in model.parameters()}
    assert (torch.uint8 in held) == (frozen_dtype == 'nf4') and pretrained.frozen_rounding == frozen_dtype
    weights = {name: p for name, p in model.state_dict().items() if lora.is_lora(name)}
    plain = loading.for_inference(pretrained, weights)  # B = 0, so this is the rounded base
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))
    expected = plain(tokens).logits
    with torch.no_grad():
        found = model.eval()(tokens)
    assert (found - expected).norm() <= 1e-6 * expected.norm()
    original = loading.whole_model(pretrained)(tokens).logits
    assert (found - original).norm() > 1e-4 * original.norm(), 'it was rounded'
    if frozen_dtype == 'bfloat16':
        stored = [p for p in model.parameters() if p.dim() > 1 and not p.requires_grad]
        assert {p.dtype for p in stored} == {torch.bfloat16}
    line = self_test.run(model, model, pretrained, True, False, torch.device('cpu'))
    assert f'logits are those of {tmp_path} rounded to {frozen_dtype} (difference ' in line


def test_the_self_test_finds_a_layer_that_is_packed_wrongly(one_rank, tmp_path):
    save_model(tmp_path, 'llama_64')
    pretrained, model = training_model(tmp_path, frozen_dtype='nf4')
    packed = model.blocks[1].mlp.down_proj.weight
    packed.data[:, :64] = packed[:, :64].clone() // 16 + packed[:, :64] % 16 * 16  # the two codes of a byte exchanged
    with pytest.raises(ValueError, match=r'logits differ from those of the folder by \S+ of their norm'):
        self_test.run(model, model, pretrained, True, False, torch.device('cpu'))


def test_the_self_test_computes_with_all_digits_of_float32(one_rank, tmp_path):
    save_model(tmp_path, 'llama_64')
    pretrained, model = training_model(tmp_path)
    seen, backends = set(), (torch.backends.cuda.matmul, torch.backends.cudnn)
    model.register_forward_pre_hook(lambda *_: seen.update(backend.allow_tf32 for backend in backends))
    with self_test.without_tf32():  # which puts back what was there before the test
        for backend in backends:
            backend.allow_tf32 = True
        self_test.run(model, model, pretrained, True, False, torch.device('cpu'))
        assert seen == {False} and all(backend.allow_tf32 for backend in backends)


def test_bfloat16_is_the_default_where_it_loses_nothing(tmp_path):
    for dtype, expected in ((torch.bfloat16, 'bfloat16'), (torch.float16, 'float32'), (torch.float32, 'float32')):
        folder = save_model(tmp_path / str(dtype), 'llama_64', dtype)
        assert Pretrained(folder, lora_rank=2).frozen_dtype == expected
        assert Pretrained(folder, freeze='embed').frozen_dtype == expected
        assert Pretrained(folder).frozen_dtype is None
        assert Pretrained(folder, lora_rank=2).frozen_rounding == 'float32'
        rounding = Pretrained(folder, lora_rank=2, frozen_dtype='bfloat16').frozen_rounding
        assert rounding == ('float32' if dtype == torch.bfloat16 else 'bfloat16')
        assert Pretrained(folder, lora_rank=2, frozen_dtype='nf4').frozen_rounding == 'nf4'


def test_what_nf4_does_not_pack_is_as_by_default(tmp_path):
    for dtype in (torch.bfloat16, torch.float32):
        _, model = training_model(save_model(tmp_path / str(dtype), 'llama_64', dtype), frozen_dtype='nf4')
        kinds = {name: parameter.dtype for name, parameter in model.named_parameters()}
        packed = {name for name, kind in kinds.items() if kind == torch.uint8}
        linear = {f'{n}.weight' for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != 'lm_head'}
        assert packed == linear and len(packed) == 7 * len(model.blocks)
        assert kinds['model.embed_tokens.weight'] == kinds['lm_head.weight'] == dtype
        assert kinds['model.norm.weight'] == torch.float32


def test_parameters_and_flops_are_counted_as_weights_and_not_as_bytes(tmp_path):
    folder = save_model(tmp_path, 'llama_64')
    plain, packed = (
        finetune.for_training(Pretrained(folder, lora_rank=2, frozen_dtype=dtype)) for dtype in ('float32', 'nf4')
    )
    assert packed.parameter_counts() == plain.parameter_counts()
    assert packed.flops_per_token() == plain.flops_per_token()
