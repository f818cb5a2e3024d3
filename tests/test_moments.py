"""moments.py: codes and rounding beside float64; every optimizer with moments in fewer bits, in all layouts, saved and
resumed."""

import collections
import importlib.util
import math
import re
import shutil
import zlib

import numpy as np
import pytest
import torch
from equations import KEYS, RATES, piece, reference
from launch import TINY_MODEL, TINY_RUN, refusals, run_forked, run_function, run_many
from outputs import checkpoint_of, column, metrics, tensors_of
from precision import EPS, FLOOR, TIMES, apart, assert_same_run, error
from short import slow_but
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import expert_manual
import moments
import optim
from layout import Ranks, Share, Slice
from model import GPT, ModelConfig
from planning import memory, sizes
from runtime import checkpoint, checkpoint_saver

CPU = torch.device('cpu')
FEWER = ('bfloat16', 'int8')
CASES = [(name, dtype) for name in optim.UPDATES for dtype in FEWER]
STEPS = 50


def signed_or_not(signed, *shape, seed=0):
    """fp32 numbers over ten decades, like moments; each block has another size."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator) * 10 ** (5 * torch.rand(shape, generator=generator) - 5)
    numbers *= 10 ** (6 * torch.rand((*shape[:-1], 1), generator=generator) - 8)
    return numbers if signed else numbers.square()


# --- int8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', optim.UPDATES)
def test_moments_without_a_sign_are_those_that_are_never_negative(name):
    layer, generator = torch.nn.Linear(40, 30), torch.Generator().manual_seed(5)
    optimizer = optim.make_optimizer(layer, name, 1e-2, 0.9, 0.95, 0.1, wd_ts=10)
    for _ in range(5):
        for parameter in layer.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    state = optimizer.state[layer.weight]
    for moment in optim.UPDATES[name].moments:
        assert (state[moment] >= 0).all() == (moment in moments.UNSIGNED), moment


@pytest.mark.parametrize('signed', [True, False])
def test_the_values_of_codes_are_those_of_the_paper_but_for_the_ends(signed):
    """The position of the first bit that is set gives the decade, and the bits behind it divide the decade evenly."""
    values, _ = moments.levels(signed, CPU)
    assert len(values) == 256 and (values.diff() > 0).all()
    positive = [1.0]
    for zeros in range(7):  # before that bit; 6 - zeros bits are left, or 7 - zeros without a sign
        parts = 2 ** (6 - zeros + (not signed))
        positive += [10.0**-zeros * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
    published = sorted([*positive, 0.0, *(-x for x in positive if x < 1)] if signed else [*positive, 0.0])
    published[0] = -1.0 if signed else 0.55e-7
    assert error(values, published) <= FLOOR


@pytest.mark.parametrize('signed', [True, False])
@pytest.mark.parametrize('width', [256, 37, 1])
def test_codes_are_the_nearest_in_float64(signed, width):
    numbers = signed_or_not(signed, 40, 3, width)
    numbers[0, 0] = 0
    codes, scales = moments.quantize(numbers, moments.levels(signed, CPU))
    assert torch.equal(scales, numbers.abs().amax(-1))
    values = moments.levels(signed, CPU)[0].double()
    ratios = numbers.double() / scales.double().clamp_min(1e-300).unsqueeze(-1)
    distances = (ratios.unsqueeze(-1) - values).abs()
    found = distances.gather(-1, codes.long().unsqueeze(-1)).squeeze(-1)
    assert (found <= distances.amin(-1) + 2 * FLOOR * ratios.abs()).all()  # except for ties, as far as fp32 can tell
    assert (codes == distances.argmin(-1)).double().mean() > 0.999


@pytest.mark.parametrize('signed', [True, False])
def test_what_codes_stand_for_is_made_those_codes_again(signed):
    table = moments.levels(signed, CPU)
    codes, scales = moments.quantize(signed_or_not(signed, 3000, 2, 256), table)
    assert not signed or (codes.amin(-1) == 0).float().mean() > 0.4  # in half of the blocks the largest is negative
    again = moments.quantize(moments.dequantize(codes, scales, table), table)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


def test_a_second_moment_does_not_become_0_unless_its_block_is():
    numbers = torch.tensor([[1.0, 1e-12, 0.0], [0.0, 0.0, 0.0]])
    first, second = (moments.table_of(name, CPU) for name in ('exp_avg', 'exp_avg_sq'))
    found = moments.dequantize(*moments.quantize(numbers, second), second)
    assert (found[0] > 0).all() and (found[1] == 0).all()
    assert moments.dequantize(*moments.quantize(numbers, first), first)[0, 2] == 0


# --- bfloat16 ---------------------------------------------------------------------------------------------------------


def chance_by_numpy(index, key):
    """The hash by numpy, in 32-bit integers that overflow."""
    x = (np.asarray(index) + key).astype(np.uint32)
    for _ in range(2):
        x = ((x >> np.uint32(16)) ^ x) * np.uint32(0x45D9F3B)
    return ((x >> np.uint32(16)) ^ x) & np.uint32(0xFFFF)


def test_chance_is_the_hash_and_is_spread_evenly():
    index = torch.arange(2**18)
    keys = [zlib.crc32(f'1 w exp_avg {t}'.encode()) for t in range(8)]
    bits = torch.stack([moments.chance(index, key) for key in keys])
    assert torch.equal(bits, torch.stack([moments.chance(index, torch.tensor(key)) for key in keys]))
    for found, key in zip(bits, keys, strict=True):
        assert np.array_equal(found.numpy(), chance_by_numpy(index.numpy(), key))
    assert moments.chance(torch.tensor([0, 1, 2**40]), 12345).tolist() == chance_by_numpy([0, 1, 2**40], 12345).tolist()
    # 64 bins of 2^18 / 64 = 4096 +- 64 each. Neighbors are not correlated, and neither are consecutive steps.
    assert all((torch.bincount(row >> 10, minlength=64) - 4096).abs().max() < 5 * 64 for row in bits)
    uniform = bits.double() / 2**16 - 0.5
    for a, b in ((uniform[:, 1:], uniform[:, :-1]), (uniform[1:], uniform[:-1]), (uniform[:, 40:], uniform[:, :-40])):
        assert abs((a * b).mean() * 12) < 5 / math.sqrt(a.numel())


@pytest.mark.parametrize('part', [Slice((6, 8), 1, ((4, 4),)), Slice((6, 8), 0, ((1, 2), (4, 1))), None])
def test_noise_is_that_of_the_whole_parameter_also_where_it_is_cut(part):
    whole = torch.arange(6 * 8).view(6, 8)  # each number says where it lies
    mine = part.of(whole) if part else whole
    assert moments.first_of_lines(mine, part).tolist() == mine[:, 0].tolist()


def test_rounding_by_chance_goes_to_a_neighbor_and_is_right_in_the_mean():
    numbers = signed_or_not(True, 500)
    exact = numbers.bfloat16()
    rounded = torch.stack([moments.round_by_chance(numbers, moments.chance(torch.arange(500), k)) for k in range(2000)])
    distance = 2.0 ** (numbers.abs().log2().floor() - 7)  # between the numbers of bfloat16 there
    assert ((rounded.float() - numbers).abs() < distance).all()
    # The mean of 2000 draws has a standard deviation of at most distance / 2 / sqrt(2000); 5 of these are allowed.
    assert ((rounded.double().mean(0) - numbers).abs() <= 5 * distance / 2 / math.sqrt(2000)).all()
    for k in range(4):
        assert torch.equal(moments.round_by_chance(exact.float(), moments.chance(torch.arange(500), k)), exact)


def test_second_moments_that_are_rounded_to_the_nearest_only_grow():
    """With gradients of size 1, beta2 = 0.999 and 3000 steps: the figures in the docstring of moments.py."""
    generator, index = torch.Generator().manual_seed(0), torch.arange(4000)
    exact, nearest, by_chance = torch.zeros(4000), torch.zeros(4000).bfloat16(), torch.zeros(4000).bfloat16()
    for t in range(3000):
        g2 = torch.randn(4000, generator=generator).square()
        exact.lerp_(g2, 0.001)
        nearest = nearest.float().lerp_(g2, 0.001).bfloat16()
        by_chance = moments.round_by_chance(by_chance.float().lerp_(g2, 0.001), moments.chance(index, 17 * t))
    means = [x.double().mean().item() for x in (exact, nearest, by_chance)]
    assert means == pytest.approx([0.95, 1.24, 0.95], abs=0.01)


# --- which moments, and how many bytes --------------------------------------------------------------------------------


class Net(nn.Module):
    """Lines of 600 columns, which are 2 blocks and 88 more; lines of 70; two lines of 2500; and what stays fp32 under
    int8."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 70)
        self.long = nn.Linear(600, 7)
        self.short = nn.Linear(70, 71, bias=False)
        self.few = nn.Linear(2500, 2, bias=False)
        self.small = nn.Linear(60, 60, bias=False)
        self.experts = nn.Parameter(torch.empty(5, 3, 300))
        self.norm = nn.LayerNorm(70)
        self.lm_head = nn.Linear(70, 100, bias=False)


IN_8_BITS = {'long.weight': 7 * 600 + 4 * 7 * 3, 'short.weight': 71 * 70 + 4 * 71, 'few.weight': 2 * 2500 + 4 * 2 * 10}
IN_8_BITS['experts'] = 5 * 3 * 300 + 4 * 5 * 3 * 2  # a line lies along the last dimension


def values_of_net(steps):
    """({name: initial value}, {name: gradients of all steps}), the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    start, gradients = {}, {}
    for name, parameter in Net().named_parameters():
        start[name] = torch.randn(parameter.shape, generator=generator) + 1
        size = 10 ** (2 * torch.randn(parameter.shape, generator=generator))
        noise = torch.randn(steps, *parameter.shape, generator=generator)
        gradients[name] = size * (noise + torch.randn(parameter.shape, generator=generator))
    return start, gradients


def build(name, dtype, start, mesh=None, **keys):
    """(model, optimizer), sharded over a mesh or plain."""
    model = Net()
    for key, value in start.items():
        module = model.get_submodule(key.rpartition('.')[0])
        value = value.clone() if mesh is None else piece(value, mesh)
        module._parameters[key.rpartition('.')[2]] = nn.Parameter(value)
    return model, optim.make_optimizer(model, name, **KEYS | {'dtype': dtype, 'seed': 7} | keys)


def take_steps(model, optimizer, gradients, steps, mesh=None, **skip):
    for step in steps:
        for name, parameter in model.named_parameters():
            gradient = gradients[name][step]
            parameter.grad = gradient.clone() if mesh is None else piece(gradient, mesh)
        for group in optimizer.param_groups:
            group['lr'] = RATES[step]
        optimizer.step(**skip)


def moments_of(model, optimizer):
    """{name.slot: tensor or DTensor} of the optimizer's state, with `step`."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {f'{names[p]}.{slot}': x for p, slots in optimizer.state.items() for slot, x in slots.items()}


def in_full(tensors):
    return {key: x.detach().full_tensor() if isinstance(x, DTensor) else x.detach() for key, x in tensors.items()}


@pytest.mark.parametrize('dtype', moments.DTYPES)
def test_matrices_have_8_bits_and_all_moments_16(dtype):
    start, gradients = values_of_net(1)
    model, optimizer = build('adamw', dtype, start)
    take_steps(model, optimizer, gradients, [0])
    for name, parameter in model.named_parameters():
        slots = optimizer.state[parameter]
        expected = {'bfloat16': 2, 'float32': 4, 'int8': 4}[dtype] * parameter.numel()
        if dtype == 'int8' and name in IN_8_BITS:
            expected = IN_8_BITS[name]
        for slot in ('exp_avg', 'exp_avg_sq'):
            held = sum(value.nbytes for key, value in slots.items() if key.removesuffix(moments.SCALES) == slot)
            rests_in = dtype if dtype != 'int8' or name in IN_8_BITS else 'float32'
            assert held == expected == moments.bytes_held(parameter.shape, rests_in), (name, slot)


def test_a_tied_head_and_what_is_frozen_have_no_8_bits():
    model = Net()
    model.short.weight = model.lm_head.weight = nn.Parameter(torch.zeros(100, 70))
    model.few.weight.requires_grad_(False)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert {names[p] for p in moments.forms_of(model, 'int8', 0, slices={})} == {'long.weight', 'experts'}


def test_where_ranks_share_experts_the_same_moments_have_8_bits():
    """The size of the whole parameter decides, since a quarter of these experts has fewer than moments.SMALLEST
    numbers."""
    sizes = {'n_layer': 1, 'n_head': 2, 'n_embd': 40, 'mlp_hidden_dim': 48, 'vocab_size': 64, 'block_size': 8}
    found = []
    for ranks in (1, 4):
        model = GPT(ModelConfig(arch='qwen3', n_experts=8, **sizes))
        share = Share()
        expert_manual.split(model, Ranks(0, ranks, 'of so many'), share)
        eligible = moments.in_8_bits(model, share.slices)
        found.append({name for name, p in model.named_parameters() if p in eligible})
    assert found[0] == found[1] and 'blocks.0.mlp.experts.up.weight' in found[0]
    assert model.blocks[0].mlp.experts.up.weight.numel() < moments.SMALLEST


# --- the update -------------------------------------------------------------------------------------------------------


class Roundings:
    """The rounding of moments in float64. If fp32 cannot tell to which side a number goes, this takes the side that the
    optimizer has taken; `left_open` counts such numbers."""

    def __init__(self, name, history, gradients, seed=7):
        """history[t - 1]: the state of the parameter `name` after step t."""
        self.name, self.history, self.gradients, self.seed = name, history, gradients.double(), seed
        self.shape = gradients.shape[1:] if gradients.dim() > 2 else (*gradients.shape[1:], 1)
        self.before = collections.defaultdict(float)  # {slot: its moment at the step before}, 0 before the first
        self.left_open = self.numbers = 0

    def __call__(self, t, slot, moment):
        state = self.history[t - 1]
        if slot not in state or state[slot].dtype == torch.float32:
            return moment
        self.numbers += moment.numel()
        # The error that fp32 may have: a few roundings of numbers as large as those that were added up.
        g = self.gradients[t - 1]
        added = {'exp_avg_sq': g.square(), 'tau': torch.ones_like(g)}.get(slot, g.abs())
        off = (4 * EPS * (moment.abs() + abs(self.before[slot]) + added)).view(self.shape)
        rounded = self.to_16_bits if state[slot].dtype == torch.bfloat16 else self.to_8_bits
        found = rounded(t, slot, moment.view(self.shape), state[slot].view(self.shape), off).view(moment.shape)
        self.before[slot] = found
        return found

    def to_8_bits(self, t, slot, moment, taken, off):
        values = moments.levels((moment < 0).any().item(), CPU)[0].double()
        found = torch.empty_like(moment)
        for begin in range(0, moment.shape[-1], 256):
            block, taken_block = moment[..., begin : begin + 256], taken[..., begin : begin + 256].long()
            scales = block.abs().amax(-1, keepdim=True)
            distances = (block.unsqueeze(-1) - values * scales.unsqueeze(-1)).abs()
            nearest, codes = distances.min(-1)
            further = distances.gather(-1, taken_block.unsqueeze(-1)).squeeze(-1) - nearest
            off_block = 2 * (off[..., begin : begin + 256] + EPS * block.abs())
            assert (further <= off_block).all(), (self.name, slot, t)
            self.left_open += (codes != taken_block).sum().item()
            found[..., begin : begin + 256] = values[taken_block] * scales
        return found

    def to_16_bits(self, t, slot, moment, taken, off):
        key = zlib.crc32(f'{self.seed} {self.name} {slot} {t}'.encode())
        bits = torch.from_numpy(chance_by_numpy(np.arange(moment.numel()), key).astype(np.float64)).view(self.shape)
        distance = 2.0 ** (moment.abs().clamp_min(1e-37).log2().floor() - 7)
        below = (moment.abs() / distance).floor()
        beyond = (moment.abs() / distance - below) * 2**16 + bits - 2**16  # 0 or more: rounded away from 0
        ours = moment.sign() * (below + (beyond >= 0)) * distance
        others = taken.double() != ours
        assert (beyond[others].abs() <= 1 + (off / distance * 2**16)[others]).all(), (self.name, slot, t)
        self.left_open += others.sum().item()
        return taken.double()


@pytest.mark.parametrize('name, dtype', slow_but(['adamw bfloat16', 'adana int8'], CASES, '{} {}'.format))
def test_50_steps_are_those_of_float64_with_the_same_rounding(name, dtype):
    start, gradients = values_of_net(STEPS)
    histories, found = collections.defaultdict(list), {}
    for rests_in in ('float32', dtype):
        model, optimizer = build(name, rests_in, start)
        for step in range(STEPS):
            take_steps(model, optimizer, gradients, [step])
            for key, parameter in model.named_parameters():
                if rests_in == dtype:
                    histories[key].append({slot: x.clone() for slot, x in optimizer.state[parameter].items()})
        found[rests_in] = in_full(dict(model.named_parameters()))
    counts = collections.Counter()
    for key in start:
        roundings = Roundings(key, histories[key], gradients[key])
        decays = 'tall.weight' if start[key].dim() > 1 and key != 'embed.weight' else 'norm.weight'  # as equations.py's
        fp32 = error(found['float32'][key], reference(name, decays, start[key], gradients[key]))
        ours = error(found[dtype][key], reference(name, decays, start[key], gradients[key], at_rest=roundings))
        assert fp32 <= apart() and ours <= TIMES * max(fp32, FLOOR), (key, ours, fp32)
        counts += collections.Counter(left_open=roundings.left_open, numbers=roundings.numbers)
    in_fewer_bits = sum(start[key].numel() for key in start if dtype == 'bfloat16' or key in IN_8_BITS)
    assert counts['numbers'] == STEPS * len(optim.UPDATES[name].moments) * in_fewer_bits
    assert counts['left_open'] < 1e-3 * counts['numbers'], counts


@pytest.mark.parametrize('name, dtype', slow_but(['adana int8'], CASES, '{} {}'.format))
def test_a_gpus_way_of_a_piece_at_a_time_is_the_same(name, dtype, monkeypatch):
    """With lists of one tensor, which are computed with plain numbers, and with pieces of few lines."""
    start, gradients = values_of_net(5)
    plain, its_optimizer = build(name, dtype, start)
    take_steps(plain, its_optimizer, gradients, range(5))
    in_pieces = moments.run_parts_in_pieces

    def as_on_a_gpu(kernel, scalars, *arguments):
        def on_lists(*tensors, **_):
            optim.on_lists(kernel, *tensors, **scalars)

        in_pieces(on_lists, scalars, *arguments)

    monkeypatch.setattr(moments, 'CHUNK', 700)
    monkeypatch.setattr(moments, 'run_parts_in_pieces', as_on_a_gpu)
    model, optimizer = build(name, dtype, start)
    take_steps(model, optimizer, gradients, range(5))
    assert_same_moments(model, optimizer, plain, its_optimizer)


def assert_same_moments(model, optimizer, others, their_optimizer, steps=5):
    """Equal as far as fp32 can tell: weights within rounding, and at most one code in a thousand differs."""
    ours, theirs = (in_full(dict(x.named_parameters())) for x in (model, others))
    assert max(error(ours[name], theirs[name]) for name in theirs) <= apart(steps)
    ours, theirs = in_full(moments_of(model, optimizer)), in_full(moments_of(others, their_optimizer))
    assert ours.keys() == theirs.keys()
    different = numbers = 0
    for key, value in theirs.items():
        assert ours[key].dtype == value.dtype, key
        if value.dtype == torch.float32:
            assert error(ours[key], value) <= apart(steps), key
        else:
            different, numbers = different + (ours[key] != value).sum().item(), numbers + value.numel()
    assert different <= 1e-3 * numbers, (different, numbers)


COMPILED = [('adamw', 'int8'), ('dana-star-mk4', 'bfloat16'), ('ademamix', 'int8')]


@pytest.mark.slow
@pytest.mark.parametrize('name, dtype', COMPILED)
def test_compiled_is_the_same(name, dtype):
    start, gradients = values_of_net(5)
    plain, its_optimizer = build(name, dtype, start)
    take_steps(plain, its_optimizer, gradients, range(5))
    model, optimizer = build(name, dtype, start, compile=True)
    take_steps(model, optimizer, gradients, range(5))
    assert_same_moments(model, optimizer, plain, its_optimizer)


@pytest.mark.parametrize('flag', [bool, lambda skip: torch.tensor(float(skip))], ids=['host', 'device'])
@pytest.mark.parametrize(
    'name, dtype, compile',
    [
        ('adamw', 'int8', False),
        ('adana', 'bfloat16', False),
        pytest.param('adamw', 'bfloat16', True, marks=pytest.mark.slow),
        pytest.param('adana', 'int8', True, marks=pytest.mark.slow),
    ],
)
def test_a_step_that_is_skipped_changes_nothing_and_does_not_count(name, dtype, compile, flag):
    """Neither codes nor scales change, nor the noise of the step that takes its place."""
    start, gradients = values_of_net(4)
    bad = {key: torch.full_like(g, math.nan) for key, g in gradients.items()}
    plain, its_optimizer = build(name, dtype, start, compile=compile)
    model, optimizer = build(name, dtype, start, compile=compile)
    for step in range(4):
        if step in (0, 2):
            take_steps(model, optimizer, bad, [step], skip=flag(True))
        take_steps(model, optimizer, gradients, [step], skip=flag(False))
        take_steps(plain, its_optimizer, gradients, [step])
        ours, theirs = moments_of(model, optimizer), moments_of(plain, its_optimizer)
        assert ours.keys() == theirs.keys()
        if compile:  # with and without a flag there are two graphs
            assert_same_moments(model, optimizer, plain, its_optimizer)
        else:
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize('dtype', FEWER)
def test_where_the_device_says_so_nothing_changes(dtype):
    """Looks at what torch.compile makes into one pass."""
    start, gradients = values_of_net(2)
    model, optimizer = build('adana', dtype, start)
    take_steps(model, optimizer, gradients, [0])
    state, parameter = optimizer.state[model.long.weight], model.long.weight.detach()
    part = moments.Part(optimizer.forms[model.long.weight], parameter, state, optim.UPDATES['adana'].moments)
    scalars = optim.adana_scalars(optimizer.param_groups[0], 2)
    scalars = {key: torch.tensor(value) for key, value in scalars.items()}

    def step(g, skip):
        before = [x.clone() for x in (parameter, *state.values())]
        for width, *piece_of_it in part.pieces(g, 2000):
            moments.update(optim.adana, scalars, width, part.tables, part.keys(2), skip, *piece_of_it)
        return [torch.equal(x, old) for x, old in zip((parameter, *state.values()), before, strict=True)]

    assert all(step(torch.full_like(parameter, math.nan), torch.tensor(1.0)))
    changed = [not same for same in step(gradients['long.weight'][1], torch.tensor(0.0))]
    assert changed == [True, False, *([True] * (len(changed) - 2))]  # `step` is counted elsewhere


def test_a_parameter_that_had_no_gradient_has_the_noise_of_step_1_when_it_has_one():
    start, gradients = values_of_net(2)
    model, optimizer = build('adana', 'bfloat16', start)
    for step in range(2):
        for name, parameter in model.named_parameters():
            parameter.grad = None if step == 0 and name == 'long.weight' else gradients[name][0].clone()
        optimizer.step()
    alone, its_optimizer = build('adana', 'bfloat16', start)
    take_steps(alone, its_optimizer, gradients, [0])
    state, expected = optimizer.state[model.long.weight], its_optimizer.state[alone.long.weight]
    assert state['step'] == 1 and torch.equal(state['exp_avg'], expected['exp_avg'])
    assert optimizer.state[model.short.weight]['step'] == 2


# --- several ranks ----------------------------------------------------------------------------------------------------


def layout(world_size):
    return init_device_mesh('cpu', (world_size,)) if world_size else None


def train_and_save(folder, cases, world_size, steps):
    """Train and save a checkpoint, as one rank or, with world_size=0, as a process that holds everything whole."""
    start, gradients = values_of_net(steps)
    for name, dtype in cases:
        mesh = layout(world_size)
        model, optimizer = build(name, dtype, start, mesh)
        take_steps(model, optimizer, gradients, range(steps), mesh)
        save(f'{folder}/{name} {dtype} {world_size}', steps, model, optimizer)


def save(out_dir, step, model, optimizer, **options):
    checkpoint_saver.prepare(out_dir)
    saver = checkpoint_saver.Saver(out_dir, 1, say=lambda line: None, **options)
    saver.save(step, model, optimizer, {})
    saver.wait()


def load_and_save_again(folder, cases, step, world_size, as_dtypes=()):
    """Load what was saved and save it again, where each rank holds the part that it would have in training."""
    start, _ = values_of_net(1)
    empty = {key: torch.zeros_like(value) for key, value in start.items()}
    for name, dtype in cases:
        path = f'{folder}/{name} {dtype} 2'
        for rests_in in (dtype, *as_dtypes):
            model, optimizer = build(name, rests_in, empty, layout(world_size))
            checkpoint.load(checkpoint_of(path, step), model, optimizer)
            path = f'{folder}/{name} {dtype} again as {rests_in} on {world_size}'
            save(path, step, model, optimizer, async_save=rests_in == 'int8')


def saved(folder, case, suffix, step):
    return tensors_of(checkpoint_of(f'{folder}/{" ".join(case)} {suffix}', step))


ON_RANKS = [('adamw', 'int8'), ('dana-star-mk4', 'bfloat16'), ('ademamix', 'int8')]


@pytest.fixture(scope='module')
def on_ranks(tmp_path_factory, has_slow_tests):
    """(folder with checkpoints after step 5, numbers of ranks) of ON_RANKS. The lines divide neither by 2 nor by 3."""
    folder, worlds = tmp_path_factory.mktemp('on_ranks'), (2, 3) if has_slow_tests else (2,)
    run_function(1, train_and_save, str(folder), ON_RANKS, 0, 5)
    for ranks in worlds:
        run_function(ranks, train_and_save, str(folder), ON_RANKS, ranks, 5)
    for ranks in (1, *worlds):
        run_function(ranks, load_and_save_again, str(folder), ON_RANKS, 5, ranks, ('float32', 'int8'))
    return folder, worlds


@pytest.mark.parametrize('case', ON_RANKS, ids=' '.join)
def test_moments_of_shards_are_those_of_one_process(on_ranks, case):
    """Blocks and noise do not depend on where a number lies, so equal gradients give moments that are equal to the bit.
    Numbers in fp32, such as the weights, are sometimes rounded differently at the end of a shorter tensor."""
    folder, worlds = on_ranks
    alone = saved(folder, case, '0', 5)
    assert all(tensor.dtype == torch.float32 for tensor in alone.values())
    for ranks in worlds:
        found = saved(folder, case, f'{ranks}', 5)
        assert found.keys() == alone.keys()
        for key in alone:
            kind, _, name = key.partition('.')
            if kind == 'optim' and (case[1] == 'bfloat16' or name.rpartition('.')[0] in IN_8_BITS):
                assert torch.equal(found[key], alone[key]), (ranks, key)
            assert error(found[key], alone[key]) <= FLOOR, (ranks, key)


@pytest.mark.parametrize('case', ON_RANKS, ids=' '.join)
def test_a_checkpoint_of_2_ranks_is_the_same_on_1_2_and_3_and_by_way_of_float32(on_ranks, case):
    """int8 -> float32 -> int8, each on another number of ranks. Not by way of bfloat16, of which int8 makes other
    numbers."""
    folder, worlds = on_ranks
    written = saved(folder, case, '2', 5)
    for ranks in (1, *worlds):
        for rests_in in {case[1], 'float32', 'int8'} - ({'int8'} if case[1] == 'bfloat16' else set()):
            again = saved(folder, case, f'again as {rests_in} on {ranks}', 5)
            assert again.keys() == written.keys()
            assert all(torch.equal(again[key], written[key]) for key in written), (ranks, rests_in)


# --- runs -------------------------------------------------------------------------------------------------------------

SIZES = ['--n_layer=2', '--n_head=2', '--n_embd=68', '--mlp_hidden_dim=300', '--block_size=32', '--batch_size=2']
RUN = [*SIZES, *TINY_RUN, '--dataset=tiny', '--global_batch_size=12', '--dtype=float32', '--lr_decay_iters=12']
RUN += ['--arch=llama', '--beta2=0.999', '--eval_sequences=8', '--keep_checkpoints=1']
WAYS = {
    'ddp': ('train_ddp.py',),
    'fsdp': ('train_fsdp.py',),
    'manual': ('train_fsdp.py', '--fsdp_impl=manual'),
    'offload': ('train_fsdp.py', '--cpu_offload=optimizer'),
    'diloco': ('train_diloco.py', '--num_replicas=2', '--inner_steps=2'),
    'pipeline': ('train_pipeline.py',),
    'tensor': ('train_parallel.py', '--tensor_parallel=2'),
    'deepspeed': ('train_deepspeed.py', '--zero_stage=2'),
}
HALF, WHOLE = 6, 12


def case(data_dir, folder, name, *more, steps=WHOLE, **options):
    """A case of run_many(). name: such as 'fsdp int8 on 2', perhaps with more words."""
    way, dtype, _, ranks = name.split()[:4]
    script, *keys = WAYS[way]
    keys += [f'--optimizer_dtype={dtype}', f'--max_iters={steps}', *(['--batch_size=1'] if ranks == '3' else [])]
    keys = [*RUN, *keys, f'--data_dir={data_dir}', f'--out_dir={folder / name}', *more]
    return {'name': name, 'script': script, 'arguments': keys, **options}


class Runs:
    """Runs of 12 steps, and runs that were interrupted after 6. Each has a name and is started once."""

    def __init__(self, data_dir, folder):
        self.data_dir, self.folder, self.held = data_dir, folder, {}

    def start(self, names, *more, **options):
        """Start those of these runs that are not there yet, on as many ranks as their names say."""
        for ranks in '123':
            of_ranks = [n for n in names if n.split()[3] == ranks and n not in self.held]
            cases = [case(self.data_dir, self.folder, name, *more, **options) for name in of_ranks]
            for one in cases:  # the folders into which a run saves again what it reads
                place = str(self.folder / f'{one["name"]} again')
                one.update({'save_again': dict.fromkeys(one['save_again'], place)} if 'save_again' in one else {})
            self.held |= run_many(cases, int(ranks), self.folder)

    def resume(self, saved, names, **options):
        """Go on from the checkpoint of step 6 of `saved`, each of the names in a copy of its own."""
        self.start([f'{saved} half'], steps=HALF)
        for name in names:
            shutil.copytree(self.folder / f'{saved} half', self.folder / name)
        self.start(names, **options)


@pytest.fixture(scope='module')
def runs(tmp_path_factory, data_dir):
    return Runs(data_dir, tmp_path_factory.mktemp('runs'))


RESUMED = [(way, dtype) for way in ('ddp', 'fsdp', 'manual') for dtype in FEWER]


@pytest.mark.parametrize('way, dtype', slow_but(['manual int8'], RESUMED, '{} {}'.format))
def test_a_resumed_run_is_the_same_run_and_on_other_ranks_as_close_as_in_fp32(runs, way, dtype):
    whole, again = f'{way} {dtype} on 2', f'{way} {dtype} on 2 again'
    others = [f'{way} {dtype} on {ranks} of {way}' for ranks in (1, 3)]
    runs.start([whole])
    runs.resume(whole, [again, *others])
    ours, theirs = (tensors_of(checkpoint_of(runs.folder / name, WHOLE)) for name in (again, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)
    losses = column(runs.folder / whole, 'loss')
    assert column(runs.folder / again, 'loss') == losses and len(losses) == WHOLE
    for name in others:
        assert_same_run(column(runs.folder / name, 'loss'), losses, name)


HELD = [f'{way} {dtype} on {ranks}' for way, dtype in RESUMED for ranks in (1, 2, 3)]


@pytest.mark.parametrize('name', slow_but(['manual int8 on 2'], HELD))
def test_a_rank_holds_what_is_planned(runs, name):
    runs.start([name])
    config = checkpoint.read_state(checkpoint_of(runs.folder / name, WHOLE))['config']
    strategy = 'ddp' if name.startswith('ddp') else 'fsdp'
    planned = memory.memory_bytes(config, sizes.empty_model(config), int(name.split()[3]), strategy)
    assert runs.held[name]['optimizer_bytes'] == planned['optimizer']
    row = metrics(runs.folder / name)[0]
    steps = 4 * len(list(sizes.empty_model(config).parameters()))
    assert 1e9 * row['mem/optimizer_gb'] == pytest.approx(planned['optimizer'] + steps, rel=0.01)  # storages are padded


@pytest.mark.slow
@pytest.mark.parametrize('dtype', FEWER)
def test_moments_on_the_host_are_the_same_to_the_bit(runs, dtype):
    whole, again = f'offload {dtype} on 2', f'offload {dtype} on 2 again'
    runs.start([f'fsdp {dtype} on 2', whole])
    runs.resume(f'fsdp {dtype} on 2', [again])
    expected = tensors_of(checkpoint_of(runs.folder / f'fsdp {dtype} on 2', WHOLE))
    for name in (whole, again):
        found = tensors_of(checkpoint_of(runs.folder / name, WHOLE))
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected), name


READERS = ['ddp float32 on 1', 'manual int8 on 3', 'ddp int8 on 2', 'diloco int8 on 2', 'offload int8 on 1']
READERS += ['pipeline int8 on 2', 'tensor float32 on 2', 'fsdp float32 on 2']


@pytest.mark.slow
def test_what_int8_has_saved_every_layout_and_float32_load_and_save_again_bit_for_bit(runs):
    saved = 'fsdp int8 on 2'
    runs.start([f'{saved} half'], steps=HALF)
    path = checkpoint_of(runs.folder / f'{saved} half', HALF)
    written = tensors_of(path)
    runs.start([f'{name} reads' for name in READERS], steps=2, save_again=[path])
    for name in READERS:
        again = tensors_of(checkpoint_of(runs.folder / f'{name} reads again', HALF))
        assert all(torch.equal(again[key], tensor) for key, tensor in written.items()), name


@pytest.mark.slow
def test_replicas_of_diloco_resume_with_moments_of_their_own(runs):
    whole = 'diloco int8 on 2'
    runs.start([whole])
    runs.resume(whole, [f'{whole} again'])
    ours, theirs = (tensors_of(checkpoint_of(runs.folder / name, WHOLE)) for name in (f'{whole} again', whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)
    first, second = ({k for k in ours if k.startswith(f'{key}.')} for key in ('optim', 'replica1.optim'))
    assert len(first) == len(second) > 0


@pytest.mark.slow
def test_a_job_of_a_pool_trains_and_saves_as_a_replica_of_diloco(runs, tmp_path):
    keys = [f'--exchange={tmp_path / "pool"}', '--num_replicas=1', '--inner_steps=2', '--optimizer_dtype=int8', *RUN]
    keys += [f'--data_dir={runs.data_dir}', f'--out_dir={tmp_path / "job"}']
    run_forked('train_pool.py', *keys, f'--max_iters={WHOLE}', log=tmp_path / 'log')
    runs.start(['diloco int8 on 1'], '--num_replicas=1')
    ours, theirs = (column(folder, 'loss') for folder in (tmp_path / 'job', runs.folder / 'diloco int8 on 1'))
    assert_same_run(ours, theirs)
    ours = tensors_of(checkpoint_of(tmp_path / 'job', WHOLE))
    theirs = tensors_of(checkpoint_of(runs.folder / 'diloco int8 on 1', WHOLE))
    assert ours.keys() >= {key for key in theirs if 'optim' in key}


@pytest.mark.slow
def test_noise_is_the_same_where_tensor_parallelism_has_cut_the_matrices(runs):
    """It is the noise of the whole matrix. Numbers of bfloat16 are 2^-8 apart, so other noise would move losses by
    1e-4."""
    names = ['tensor bfloat16 on 2', 'ddp bfloat16 on 1', 'pipeline bfloat16 on 2']
    runs.start(names)
    for name in names[::2]:
        assert_same_run(column(runs.folder / name, 'loss'), column(runs.folder / names[1], 'loss'), name)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec('deepspeed'), reason='pip install -r requirements-deepspeed.txt')
def test_deepspeed_goes_on_from_int8_as_fsdp_in_float32(runs):
    runs.resume('fsdp int8 on 2', ['deepspeed float32 on 2', 'fsdp float32 on 2 of int8'])
    ours, theirs = (
        column(runs.folder / name, 'loss') for name in ('deepspeed float32 on 2', 'fsdp float32 on 2 of int8')
    )
    assert len(ours) == WHOLE
    assert_same_run(ours, theirs)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'script, keys, words',
    [
        ('train_ddp.py', ['--optimizer=muon', '--optimizer_dtype=int8'], 'optimizer_dtype=int8 .*--optimizer=adamw'),
        ('train_ddp.py', ['--optimizer=sgd', '--optimizer_dtype=bfloat16'], 'no moments: use --optimizer=adamw'),
        ('train_parallel.py', ['--tensor_parallel=2', '--optimizer_dtype=int8'], '--optimizer_dtype=bfloat16'),
        ('train_pipeline.py', ['--tensor_parallel=2', '--optimizer_dtype=int8'], '--optimizer_dtype=bfloat16'),
        ('train_deepspeed.py', ['--optimizer_dtype=int8'], 'DeepSpeed cannot .* leave it out, or .*train_fsdp.py'),
        (
            'train_ddp.py',
            ['--optimizer_dtype=int4'],
            "optimizer_dtype expects 'float32' or 'bfloat16' or 'int8', given 'int4'",
        ),
    ],
)
def test_what_cannot_be_ends_in_one_line_before_anything_is_loaded(data_dir, tmp_path, script, keys, words):
    keys = [*TINY_MODEL, *TINY_RUN, '--dataset=tiny', f'--data_dir={data_dir}', f'--out_dir={tmp_path / "out"}', *keys]
    for line in refusals([[script, *keys]] * 2):
        assert re.search(words, line), line
    assert not (tmp_path / 'out').exists()
