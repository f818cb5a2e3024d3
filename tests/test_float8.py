"""Matmuls in 8 bits: the numbers of one layer, and of models under every layout; what is kept, and what is refused."""

import math

import pytest
import torch
from launch import TINY_RUN, refusals, run_many
from layouts import layout_of
from on_cuda import Contracts
from outputs import column
from precision import apart, assert_as_close_to_float64, error
from short import slow_but

import float8
from huggingface import finetune, loading
from huggingface.pretrained import Pretrained
from model import GPT, Linear, ModelConfig
from planning.sizes import make_part

SHAPE = dict(n_layer=2, n_head=3, n_embd=48, mlp_hidden_dim=80, vocab_size=257, block_size=24)  # of 16, not of 32
ARCHITECTURES = ('gpt2', 'enoki', 'llama', 'qwen3')
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EPS = {torch.float32: torch.finfo(torch.float32).eps, torch.bfloat16: torch.finfo(torch.bfloat16).eps}


def all_codes(dtype):
    """All finite numbers of an 8-bit format, in float64."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return numbers[numbers.isfinite()].unique()


def rounded(tensor, dtype):
    """The tensor in float64, with each number replaced by the nearest of scale * (all numbers of the format).

    The scale is amax / largest, in fp32. A number in the middle between two goes to the even one; so does one so near
    to it that number / scale in fp32 is the middle.
    """
    codes = all_codes(dtype)
    scale = torch.tensor(tensor.double().abs().max().item(), dtype=torch.float32) / codes.max().float()
    exact = (tensor.float() / scale).double()[..., None]
    distance = (exact - codes).abs()
    nearest = distance.min(-1, keepdim=True).values
    even = torch.arange(256, dtype=torch.uint8).view(dtype)
    is_even = torch.tensor([(even.double() == code).nonzero()[0].item() % 2 == 0 for code in codes])
    chosen = (distance == nearest).double() * (1 + is_even.double())
    return codes[chosen.argmax(-1)] * scale.double()


class WhatTensorCoresTake(Contracts):
    """Refuses a matmul in 8 bits that a GPU would refuse, and notes the formats of the others."""

    def __init__(self):
        super().__init__()
        self.matmuls = []  # (formats, fast accumulation)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._scaled_mm.default:
            a, b, *_ = args
            fast = (kwargs or {}).get('use_fast_accum', args[7] if len(args) > 7 else False)
            self.matmuls.append((a.dtype, b.dtype, fast))
        return super().__torch_dispatch__(function, types, args, kwargs)


def model_in_8_bits(arch='llama', dtype=torch.float32, mode='none', converts=True, **changes):
    model = GPT(ModelConfig(arch=arch, **{**SHAPE, **changes}), dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.initial_value(name, parameter, 0, 'cpu'))
    if converts:
        float8.convert(model)
    model.checkpoint_activations(mode)
    return model


def batch(generator=None, rows=2):
    return torch.randint(257, (2, rows, 24), generator=torch.Generator().manual_seed(1)).unbind()


# --- one layer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('format', [E4M3, E5M2])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_each_number_becomes_the_nearest_of_its_format(format, dtype):
    generator = torch.Generator().manual_seed(0)
    spread = torch.exp2(30 * torch.rand(3000, generator=generator) - 30)  # down to where both formats end
    tensor = (spread * torch.randn(3000, generator=generator).sign()).to(dtype)
    scale = float8.scale_of(tensor, format)
    codes = float8.quantize(tensor, scale, format)
    assert codes.dtype is format and scale.dtype is torch.float32 and scale.dim() == 0
    assert codes.double().abs().max() == all_codes(format).max()
    assert torch.equal(codes.double() * scale.double(), rounded(tensor, format))


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('bad', [None, torch.inf, -torch.inf, torch.nan])
def test_the_scale_found_row_by_row_is_that_of_the_whole(bad, dtype):
    for number, shape in enumerate([(48,), (1, 1), (33, 17), (2, 3, 16)]):
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype)
        if bad is not None:
            tensor.view(-1)[number % tensor.numel()] = bad
        for seen in (tensor, tensor.mT if tensor.dim() > 1 else tensor):  # as it lies in memory, and across that
            scale, expected = float8.scale_of(seen, E5M2), seen.abs().max().float() / 57344
            assert torch.equal(scale.nan_to_num(nan=-1), expected.nan_to_num(nan=-1))


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('has_bias', [False, True])
@pytest.mark.parametrize('shape', [(48,), (3, 16), (1, 2, 8)])
def test_the_three_matmuls_are_those_of_the_rounded_operands(shape, has_bias, dtype):
    generator = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(size, generator=generator)

    x, weight, dy = normal(*shape, 80).to(dtype), 0.02 * normal(112, 80), (1e-6 * normal(*shape, 112)).to(dtype)
    bias = normal(112).requires_grad_() if has_bias else None
    x.requires_grad_(), weight.requires_grad_()
    with WhatTensorCoresTake() as matmuls:
        y = float8.linear_in_8_bits(x, weight, bias, dtype=dtype)
        y.backward(dy)
    assert y.dtype is x.grad.dtype is dtype and weight.grad.dtype is torch.float32
    assert y.shape == dy.shape and x.grad.shape == x.shape
    assert matmuls.matmuls == [(E4M3, E4M3, True), (E5M2, E4M3, False), (E5M2, E4M3, False)]

    x8, w8 = rounded(x.detach().flatten(0, -2), E4M3), rounded(weight.detach().to(dtype), E4M3)
    dy8 = rounded(dy.flatten(0, -2), E5M2)
    gradient = dy.double().flatten(0, -2).sum(0)
    for found, a, b, bias_of in ((y, x8, w8.T, bias), (x.grad, dy8, w8, None), (weight.grad, dy8.T, x8, None)):
        exact, terms = a @ b, a.abs() @ b.abs()
        # A sum of K terms in fp32 is off by at most K/2 eps of their absolute values. Then it is rounded to dtype, with
        # a bias twice; not so the gradient of a weight in fp32. On another CPU the result may be the number beside it.
        most = a.shape[1] / 2 * EPS[torch.float32] * terms + 1.5 * EPS[found.dtype] * exact.abs()
        if bias_of is not None:
            exact = exact + bias_of.detach().to(dtype).double()
            most += 1.5 * EPS[dtype] * (exact.abs() + most)
        assert ((found.detach().double().flatten(0, -2) - exact).abs() <= most).all()
    if has_bias:
        assert (bias.grad - gradient).abs().max() <= math.prod(shape) * EPS[dtype] * dy.abs().sum()


@pytest.mark.parametrize('value', [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize('place', ['x', 'weight', 'dy'])
def test_an_inf_or_nan_is_never_rounded_away(place, value):
    tensors = {'x': torch.randn(32, 48), 'weight': torch.randn(16, 48), 'dy': torch.randn(32, 16)}
    tensors[place].view(-1)[5] = value
    x, weight = tensors['x'].requires_grad_(), tensors['weight'].requires_grad_()
    y = float8.linear_in_8_bits(x, weight, dtype=torch.float32)
    y.backward(tensors['dy'])
    wrong = {'x': (y, weight.grad), 'weight': (y, x.grad), 'dy': (x.grad, weight.grad)}[place]
    assert all(not tensor.isfinite().any() for tensor in wrong)


@pytest.mark.parametrize('place', ['x', 'weight', 'dy'])
def test_zeros_stay_zeros(place):
    tensors = {'x': torch.randn(32, 48), 'weight': torch.randn(16, 48), 'dy': torch.randn(32, 16)}
    tensors[place].zero_()
    x, weight = tensors['x'].requires_grad_(), tensors['weight'].requires_grad_()
    y = float8.linear_in_8_bits(x, weight, dtype=torch.float32)
    y.backward(tensors['dy'])
    are_zero = [not tensor.any() for tensor in (y, x.grad, weight.grad)]
    assert are_zero == {'x': [True, False, True], 'weight': [True, True, False], 'dy': [False, True, True]}[place]


@pytest.mark.parametrize('size', [1e-44, 1e-38, 1e-33, 1e-30, 1e-20, 1e20, 1e38])
def test_what_is_tiny_or_huge_as_a_whole_loses_no_more_than_other_tensors(size):
    """Each number may be off by one unit in its last place, or by half of the smallest code."""
    tensor = size * (torch.rand(32, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1)
    for format, digits in ((E4M3, 4), (E5M2, 3)):
        scale = float8.scale_of(tensor, format)
        found = float8.quantize(tensor, scale, format).double() * scale.double()
        smallest = all_codes(format).abs()
        smallest = smallest[smallest > 0].min().item()
        most = 2**-digits * tensor.double().abs() + smallest / 2 * scale.double()
        assert ((found - tensor.double()).abs() <= most).all()
        largest = float8.quantize(tensor, scale, format).double().abs().max() == all_codes(format).max()
        assert largest == (size >= 1e-33)  # the scale is the tensor's own, not the smallest there is


def test_a_layer_keeps_its_input_in_8_bits_and_of_its_weight_no_copy():
    x, weight = torch.randn(32, 48, requires_grad=True), torch.randn(16, 48, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        float8.linear_in_8_bits(x, weight, dtype=torch.bfloat16)
    own = [tensor for tensor in kept if tensor.data_ptr() != weight.data_ptr()]
    assert sum(tensor.nbytes for tensor in own) == 32 * 48 + 2 * 4  # and two scales


# --- a model ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('arch', ARCHITECTURES)
def test_the_blocks_linears_multiply_in_8_bits_and_nothing_else_changes(arch):
    plain, model = model_in_8_bits(arch, converts=False), model_in_8_bits(arch)
    facts = [{name: (p.shape, p.dtype) for name, p in one.named_parameters()} for one in (plain, model)]
    assert facts[0] == facts[1]
    x, y = batch()
    with WhatTensorCoresTake() as matmuls:
        loss, _ = model(x, y)
        loss.backward()
    linears = 2 * (5 if arch in ('llama', 'qwen3') else 4)
    assert len(matmuls.matmuls) == 3 * linears
    expected = plain(x, y)[0].item()
    assert 1e-6 < abs(loss.item() / expected - 1) < 1e-2  # at the start logits are small, and so is their error
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_checkpointing_gives_the_same_gradients_to_the_bit(dtype):
    gradients, counts = {}, {}
    for mode in ('none', 'full', 'selective'):
        model = model_in_8_bits('llama', dtype, mode)
        with WhatTensorCoresTake() as matmuls:
            model(*batch())[0].backward()
        gradients[mode] = {name: parameter.grad for name, parameter in model.named_parameters()}
        counts[mode] = len(matmuls.matmuls)
    for mode in ('full', 'selective'):
        for name, gradient in gradients['none'].items():
            assert torch.equal(gradients[mode][name], gradient), (mode, name)
    assert counts == {'none': 30, 'full': 40, 'selective': 30}  # the results of matmuls are kept


def test_weights_give_the_same_numbers_as_masters_and_gathered_in_bf16():
    """DDP has whole fp32 masters, FSDP gathers weights in bf16."""
    masters, gathered = (model_in_8_bits('qwen3', torch.bfloat16) for _ in range(2))
    gathered.bfloat16()
    losses = [model(*batch())[0] for model in (masters, gathered)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for ours, theirs in zip(masters.parameters(), gathered.parameters(), strict=True):
        assert error(theirs.grad, ours.grad) <= EPS[torch.bfloat16] / 2  # rounded once


def test_one_bad_weight_makes_the_loss_and_every_gradient_of_its_layer_bad():
    model = model_in_8_bits()
    with torch.no_grad():
        model.blocks[1].mlp.up.weight[3, 4] = torch.inf
    loss, ce = model(*batch())
    loss.backward()
    assert not math.isfinite(loss.item()) and not math.isfinite(ce.item())
    assert not model.blocks[0].attn.qkv.weight.grad.isfinite().all()


@pytest.fixture
def folder(tmp_path):
    """A function that writes a tiny transformers model, with sizes that are multiples of 16, and returns its folder."""
    import transformers

    def write(kind):
        sizes = dict(vocab_size=259, initializer_range=0.1, tie_word_embeddings=False, eos_token_id=None)
        if kind == 'gpt2':
            config = transformers.GPT2Config(n_embd=48, n_layer=2, n_head=3, n_positions=64, bos_token_id=None, **sizes)
        else:
            sizes |= dict(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=3)
            config = transformers.LlamaConfig(num_key_value_heads=1, max_position_embeddings=64, **sizes)
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / kind)
        return str(tmp_path / kind)

    return write


def test_models_of_transformers_multiply_in_8_bits_too(folder):
    pretrained, losses, gradients = Pretrained(folder('llama'), block_size=24), {}, {}
    for case in ('plain', 'masters', 'paused'):
        with torch.device('meta'):
            model = finetune.for_training(pretrained, torch.bfloat16)
        names = {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
        if case != 'plain':
            float8.convert(model)
        assert {name: (p.shape, p.dtype) for name, p in model.named_parameters()} == names
        loading.load(model.to_empty(device='cpu'), pretrained)
        outputs = []
        for layer in model.blocks[0].modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_hook(lambda layer, args, output, found=outputs: found.append(output.dtype))
        with WhatTensorCoresTake() as matmuls:
            if case == 'paused':
                with float8.paused(model):
                    loss, _ = model(*batch())
            else:
                loss, _ = model(*batch())
            loss.backward()
        assert len(matmuls.matmuls) == (2 * 7 * 3 if case == 'masters' else 0)
        assert outputs == [torch.bfloat16] * 7  # under autocast, from fp32 masters, as without float8
        losses[case] = loss.item()
        gradients[case] = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert losses['paused'] == losses['plain'] and torch.equal(gradients['paused'], gradients['plain'])
    assert 1e-5 < abs(losses['masters'] / losses['plain'] - 1) < 0.02
    assert 0.01 < error(gradients['masters'], gradients['plain']) < 0.3


# --- runs -------------------------------------------------------------------------------------------------------------

MODEL = '--n_layer=2 --n_head=4 --head_dim=16 --n_embd=48 --mlp_hidden_dim=96 --block_size=48 --batch_size=2'.split()
MANUAL = '--fsdp_impl=manual'
LAYOUTS = {  # name: (ranks, script, keys); micro-batches are the same 2 sequences in all
    'fsdp1': (1, 'train_fsdp.py'),
    'manual1': (1, 'train_fsdp.py', MANUAL),
    'ddp2': (2, 'train_ddp.py'),
    'fsdp2': (2, 'train_fsdp.py'),
    'manual2': (2, 'train_fsdp.py', MANUAL),
    'full2': (2, 'train_fsdp.py', '--activation_checkpointing=full'),
    'selective2': (2, 'train_fsdp.py', MANUAL, '--activation_checkpointing=selective'),
    'hsdp2': (2, 'train_fsdp.py', '--replicate_size=2'),
    'stage1': (2, 'train_fsdp.py', MANUAL, '--zero_stage=1'),
    'sharded2': (2, 'train_fsdp.py', '--accumulate=sharded'),
    'offload2': (2, 'train_fsdp.py', '--cpu_offload=params'),
    'diloco2': (2, 'train_diloco.py', '--num_replicas=1', '--inner_steps=5', '--outer_lr=1', '--outer_momentum=0'),
    'pipeline2': (2, 'train_pipeline.py', '--pipeline_stages=2'),
    'ddp3': (3, 'train_ddp.py'),
    'fsdp3': (3, 'train_fsdp.py'),
    'manual3': (3, 'train_fsdp.py', MANUAL),
}
# Layouts with other scales, since these are taken of the tokens, or of the part of a matrix, that a rank has.
OTHER_SCALES = {
    'tensor2': (2, 'train_parallel.py', '--tensor_parallel=2'),
    'tensor_manual2': (2, 'train_parallel.py', MANUAL, '--tensor_parallel=2'),
    'context2': (2, 'train_parallel.py', '--context_parallel=2'),
    'batch6': (1, 'train_ddp.py', '--batch_size=6'),
}
SHORT = {'fsdp2', 'manual2'}


@pytest.fixture(scope='module')
def runs(data_dir, tmp_path_factory, has_slow_tests):
    """A folder with 10 steps in fp32: with float8 under each layout and in one process ('float8'), and without
    ('exact')."""
    folder = tmp_path_factory.mktemp('runs')
    keys = [*MODEL, *TINY_RUN, '--dtype=float32', '--dataset=tiny', f'--data_dir={data_dir}', '--global_batch_size=12']
    keys += ['--max_iters=10', '--lr_decay_iters=50', '--keep_checkpoints=0', '--eval_sequences=8']

    def case(name, script, *more, matmul_dtype='float8'):
        more = [f'--out_dir={folder / name}', f'--matmul_dtype={matmul_dtype}', *more]
        return {'name': name, 'script': script, 'arguments': [*keys, *more]}

    one = [case('float8', 'train_ddp.py'), case('exact', 'train_ddp.py', matmul_dtype=None)]
    for ranks in (1, 2, 3):
        chosen = {name: layout for name, layout in (LAYOUTS | OTHER_SCALES).items() if layout[0] == ranks}
        chosen = {name: layout for name, layout in chosen.items() if has_slow_tests or name in SHORT}
        cases = [case(name, script, *more) for name, (_, script, *more) in chosen.items()]
        run_many(one * (ranks == 1) + cases, ranks, folder)
    return folder


@pytest.mark.parametrize('name', slow_but(SHORT, [*LAYOUTS, *OTHER_SCALES]))
def test_every_layout_is_as_near_to_the_run_without_float8_as_one_process(runs, name):
    """
    The first loss is that of one process, up to rounding in fp32, because micro-batches and therefore scales are equal.

    After that, runs are no longer equal up to rounding in fp32. If a sum ends a bit higher, a number near the middle
    between two codes goes to the other one, an eighth away. So the test compares how far each run is from the exact
    one, by the rule of tests/precision.py and with the losses of all steps as one vector: at most TIMES as far as one
    process in float8.
    """
    found, one_process, exact = (column(runs / run, 'loss') for run in (name, 'float8', 'exact'))
    assert len(found) == len(exact) == 10
    assert 1e-6 < error(one_process, exact) < 1e-2  # the key does something, and not too much
    if name in LAYOUTS:
        assert abs(found[0] / one_process[0] - 1) <= apart()
    assert_as_close_to_float64(found, one_process, exact, name)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['fsdp1', 'manual1'])
def test_on_one_rank_losses_are_equal_to_the_bit(runs, name):
    assert column(runs / name, 'loss') == column(runs / 'float8', 'loss')


# --- mistakes ---------------------------------------------------------------------------------------------------------


def config_of(**changes):
    """A run's keys as they are when they are checked."""
    keys = {'device': 'cpu', 'dtype': 'bfloat16', 'compile': False, 'batch_size': 2, 'matmul_dtype': 'float8'}
    shape = ModelConfig(arch='llama', **SHAPE | {key: changes.pop(key) for key in [*changes] if key in SHAPE})
    return {**keys, **shape.to_dict(), **changes}


@pytest.mark.parametrize(
    ('changes', 'strategy', 'expected'),
    [
        ({'n_embd': 72}, 'ddp', 'attn.qkv has 72 inputs.* --n_embd=48 or 96, or leave matmul_dtype out'),
        ({'mlp_hidden_dim': 100}, 'ddp', 'mlp.up has 100 outputs.* --mlp_hidden_dim=96 or 112'),
        ({'mlp_hidden_dim': 8}, 'ddp', 'mlp.up has 8 outputs.* --mlp_hidden_dim=16,'),
        (
            {'n_experts': 4, 'shared_expert_dim': 100, 'shared_expert_gate': True},
            'ddp',
            'mlp.shared.up has 100 outputs.* --shared_expert_dim=96 or 112',
        ),
        ({'tensor_parallel': 5}, 'fsdp', 'qkv has 36 outputs on each rank.*n_head, n_kv_head and head_dim'),
        ({'block_size': 20}, 'ddp', '2 x 20 tokens are 40 .* --batch_size=4'),
        ({'block_size': 21, 'batch_size': 3}, 'ddp', '3 x 21 tokens are 63 .* --batch_size=16'),
        ({'block_size': 48, 'context_parallel': 4}, 'fsdp', '2 x 12 tokens are 24 .* --batch_size=4'),
        ({'dtype': 'float16'}, 'ddp', 'dtype=float16.* --dtype=bfloat16'),
        ({'lora_rank': 4}, 'ddp', 'lora_rank=4.* leave matmul_dtype out'),
    ],
)
def test_what_cannot_be_is_refused_with_what_mends_it(changes, strategy, expected):
    if 'tensor_parallel' in changes:
        changes |= {'n_head': 5, 'n_embd': 80}
    config = config_of(**changes)
    if changes.get('tensor_parallel'):
        config |= dict(head_dim=12, n_kv_head=5)
    with pytest.raises(ValueError, match=f'matmul_dtype=float8.*{expected}') as raised:
        tensor, context = changes.get('tensor_parallel', 1), changes.get('context_parallel', 1)
        layout = layout_of(strategy, tensor * context, tensor=tensor, context=context)
        float8.check(config, layout, make_part({**config, 'lora_rank': 0})[0])
    assert '\n' not in str(raised.value)


def test_a_gpu_before_8_9_is_refused_and_one_that_is_not_here_is_not(monkeypatch):
    config = config_of(device='cuda:0')
    model, _ = make_part(config)
    assert (
        'WARNING: slower' in float8.check(config, layout_of('ddp', 1), model)[0]
    )  # planned for that GPU on a machine without one
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'NVIDIA A100')
    for capability in ((8, 0), (8, 9), (9, 0)):
        monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device, found=capability: found)
        if capability < (8, 9):
            with pytest.raises(
                ValueError, match=r'NVIDIA A100 \(compute capability 8.0\).* 8.9.* leave matmul_dtype out'
            ):
                float8.check(config, layout_of('ddp', 1), model)
        else:
            assert 'WARNING' not in float8.check(config | {'compile': True}, layout_of('ddp', 1), model)[0]


def test_gpt2_of_transformers_has_no_linear_and_is_sent_to_native(folder):
    pretrained = Pretrained(folder('gpt2'), block_size=24)
    with torch.device('meta'):
        model = finetune.for_training(pretrained)
    assert not [layer for block in model.blocks for layer in block.modules() if isinstance(layer, Linear)]
    with pytest.raises(ValueError, match='Conv1D.* --native=True'):
        float8.check({**config_of(), **pretrained.to_dict()}, layout_of('ddp', 1), model)


@pytest.mark.parametrize('script', ['train_ddp.py', pytest.param('train_pipeline.py', marks=pytest.mark.slow)])
def test_both_ranks_end_with_one_line_before_anything_is_made(data_dir, tmp_path, script):
    keys = [*MODEL, *TINY_RUN, '--dataset=tiny', f'--data_dir={data_dir}', f'--out_dir={tmp_path / "out"}']
    keys += [
        '--matmul_dtype=float8',
        '--mlp_hidden_dim=90',
        '--dtype=float32',
        '--max_iters=2',
        '--global_batch_size=8',
    ]
    lines = refusals([[script, *keys]] * 2)
    assert len(set(lines)) == 1 and 'mlp.up has 90 outputs' in lines[0] and '--mlp_hidden_dim=80 or 96' in lines[0]
    assert not (tmp_path / 'out').exists()
