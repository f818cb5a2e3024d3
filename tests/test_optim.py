"""optim.py: which weights decay; every optimizer beside its equation, plain, sharded, resumed; values of schedules."""

import contextlib
import math
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from equations import HIDDEN, KEYS, RATES, STEPS, piece, reference
from launch import run_function
from on_cuda import on_cuda
from precision import apart, error
from short import slow_but
from streams import load
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import muon
import optim
from model import ARCHITECTURES, GPT, Attention, ModelConfig
from optim import OPTIMIZERS, SCHEDULES, learning_rate_at, make_optimizer, parameter_groups
from runtime import checkpoint, checkpoint_saver

ADAMW = dict(optimizer='adamw', learning_rate=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1)
SCHEDULE = dict(learning_rate=1.0, lr_schedule='cosine', warmup_iters=10, lr_decay_iters=110, min_lr=0.1)

# A step rounds once or twice, and the rounded numbers are far smaller than the weights. Newton-Schulz applies a
# polynomial with slope 3.4 at 0 five times, which enlarges the rounding errors of small singular values.
TOLERANCE = {name: apart() for name in OPTIMIZERS} | {'muon': 5 * apart()}
ELEMENTWISE = [name for name in optim.UPDATES if name != 'adamw']


class TinyModel(nn.Module):
    """An embedding, a matrix with a bias, a norm and a head: every kind of parameter for which there is a rule."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.norm(self.linear(self.embed(x))))


def names_of_groups(model):
    """Two lists of parameter names: decayed, not decayed."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[name_of[id(parameter)] for parameter in group['params']] for group in parameter_groups(model, 0.1)]


def train(model, steps):
    """A few steps on fixed data; returns the full parameters by name."""
    optimizer = make_optimizer(model, **ADAMW)
    x = torch.arange(20).reshape(2, 10) % 11
    for _ in range(steps):
        nn.functional.cross_entropy(model(x).flatten(0, 1), (x.flatten() + 1) % 11).backward()
        optimizer.step()
        optimizer.zero_grad()
    full = {}
    for name, parameter in model.named_parameters():
        parameter = parameter.detach()
        full[name] = (parameter.full_tensor() if hasattr(parameter, 'full_tensor') else parameter).clone()
    return full


class ThreeInOne(Attention):
    """Like that of model.py, its matrix holds the matrices of 2 heads of queries, 1 of keys and 1 of values."""

    def __init__(self):
        nn.Module.__init__(self)
        self.heads_of_qkv, self.head_dim = (2, 1, 1), 3
        self.qkv = nn.Linear(5, 12)


class Zoo(nn.Module):
    """Its first dimensions (11, 12, 17, 5, 1, ...) do not divide by 2 and 3 ranks, or leave some ranks nothing."""

    def __init__(self):
        nn.Module.__init__(self)
        self.embed = nn.Embedding(11, 8)
        self.attn = ThreeInOne()
        self.tall = nn.Linear(5, 17, bias=False)
        self.wide = nn.Linear(17, 5)
        self.single = nn.Linear(8, 1)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)


def values():
    """({name: initial value}, {name: gradients of all steps}) of Zoo, which are the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    start, gradients = {}, {}
    for name, parameter in Zoo().named_parameters():
        start[name] = torch.randn(parameter.shape, generator=generator) + 1
        mean = torch.randn(parameter.shape, generator=generator)  # from noise to signal, which MK4 clips
        noise = torch.randn(STEPS, *parameter.shape, generator=generator) + mean
        # Some rows rarely have a gradient, and the sizes of gradients differ by orders of magnitude.
        rare = torch.rand(STEPS, len(parameter), generator=generator) < torch.linspace(0.1, 2, len(parameter))
        size = 10 ** torch.linspace(-3, 1, len(parameter))
        gradients[name] = noise * (rare * size).reshape(STEPS, -1, *[1] * (parameter.dim() - 1))
    return start, gradients


def build(name, start, mesh=None, **keys):
    """(model, optimizer), sharded over a mesh or plain."""
    model = Zoo()
    for key, value in start.items():
        module = model.get_submodule(key.rpartition('.')[0])
        value = value.clone() if mesh is None else piece(value, mesh)
        module._parameters[key.rpartition('.')[2]] = nn.Parameter(value)
    return model, make_optimizer(model, name, **KEYS | keys)


def take_steps(model, optimizer, gradients, steps, mesh=None, **skip):
    for step in steps:
        for name, parameter in model.named_parameters():
            gradient = gradients[name][step]
            parameter.grad = gradient.clone() if mesh is None else piece(gradient, mesh)
        for group in optimizer.param_groups:
            group['lr'] = RATES[step] * group.get('lr_factor', 1)  # torch's own optimizers have none
        optimizer.step(**skip)


def full_values(model):
    full = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: x.full_tensor() if isinstance(x, DTensor) else x.clone() for name, x in full.items()}


def errors(found, expected):
    """{name: norm of the difference / norm}."""
    return {name: error(found[name], x) for name, x in expected.items()}


@pytest.fixture(scope='module')
def expected():
    """{optimizer: {name: value after 100 steps}}, computed by the equations."""
    start, gradients = values()
    return {
        optimizer: {name: reference(optimizer, name, start[name], gradients[name]) for name in start}
        for optimizer in OPTIMIZERS
    }


# --- groups -----------------------------------------------------------------------------------------------------------


def test_matrices_decay_and_embeddings_norms_and_biases_do_not():
    decayed, not_decayed = names_of_groups(TinyModel())
    assert decayed == ['linear.weight', 'head.weight']
    assert not_decayed == ['embed.weight', 'linear.bias', 'norm.weight', 'norm.bias']


def test_a_tied_embedding_stands_in_one_group_and_decays():
    decayed, not_decayed = names_of_groups(TinyModel(tied=True))
    assert sorted(decayed) == ['embed.weight', 'linear.weight']
    assert 'embed.weight' not in not_decayed


@pytest.mark.parametrize('arch', ARCHITECTURES)
@pytest.mark.parametrize('tied', [False, True])
def test_of_a_models_tables_only_a_tied_one_decays(arch, tied):
    with torch.device('meta'):
        model = GPT(ModelConfig(arch=arch, n_layer=1, n_head=2, n_embd=8, vocab_size=9, bias=True, tie_embeddings=tied))
    decayed, not_decayed = names_of_groups(model)
    assert all(name.endswith('.weight') and 'norm' not in name and 'pos_embed' not in name for name in decayed)
    tables = {'pos_embed.weight'} if arch == 'gpt2' else set()
    tables |= set() if tied else {'embed.weight'}
    kept = {name for name in not_decayed if 'norm' not in name and not name.endswith('.bias')}
    assert kept == tables and ('embed.weight' in decayed) == tied


def test_frozen_parameters_are_in_no_group():
    model = TinyModel()
    model.linear.requires_grad_(False)
    assert sum(names_of_groups(model), []) == ['head.weight', 'embed.weight', 'norm.weight', 'norm.bias']


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_each_parameter_is_in_one_group_of_every_optimizer(name):
    for model in (TinyModel(), TinyModel(tied=True), Zoo()):
        grouped = [p for group in make_optimizer(model, name, **KEYS).param_groups for p in group['params']]
        assert len(grouped) == len(set(map(id, grouped))) == len(list(model.parameters()))
    twice = [{'params': [model.head.weight]}, {'params': [model.head.weight]}]
    with pytest.raises(AssertionError, match='2 parameters in groups, the model has 11'):
        optim.assert_each_in_one_group(model, twice)


def test_muon_takes_hidden_matrices_and_neither_embedding_nor_head():
    for model in (Zoo(), TinyModel(), TinyModel(tied=True)):
        hidden = make_optimizer(model, 'muon', **KEYS).param_groups[0]
        name_of = {id(parameter): name for name, parameter in model.named_parameters()}
        names = [name_of[id(parameter)] for parameter in hidden['params']]
        assert names == (list(HIDDEN) if isinstance(model, Zoo) else ['linear.weight'])
    assert list(muon.hidden_matrices(Zoo()).values()) == [list(rows) for rows in HIDDEN.values()]


def test_muon_leaves_the_head_of_transformers_models_to_adamw():
    model = nn.ModuleDict({'embed': nn.Embedding(11, 8), 'q_proj': nn.Linear(8, 8), 'lm_head': nn.Linear(8, 11)})
    assert list(muon.hidden_matrices(model)) == [model['q_proj'].weight]


# --- update ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_plain_tensors_follow_the_equation(name, expected):
    start, gradients = values()
    model, optimizer = build(name, start)
    take_steps(model, optimizer, gradients, range(STEPS))
    assert max(errors(full_values(model), expected[name]).values()) <= TOLERANCE[name]


class Wide(Zoo, GPT):
    """Zoo as a GPT that is 4 times as wide and 3 times as deep as the one for which the rates were tuned."""

    config = ModelConfig(n_layer=6, n_embd=48, parametrization='completep', base_width=12, base_depth=2, vocab_size=11)

    @property
    def blocks(self):
        return nn.ModuleList([self.attn, self.tall, self.wide, self.single, self.norm])


@pytest.mark.parametrize('name', [name for name in OPTIMIZERS if name != 'sgd'])
def test_rates_decay_and_eps_are_those_of_completep(name, monkeypatch):
    """With m_N = 4, m_L = 3, and gradients so small that eps matters."""
    monkeypatch.setitem(globals(), 'Zoo', Wide)
    start, gradients = values()
    gradients = {key: 1e-7 * gradient for key, gradient in gradients.items()}
    model, optimizer = build(name, start)
    take_steps(model, optimizer, gradients, range(STEPS))
    expected, independent = {}, name in ('adana', 'adana-released', 'dana-mk4', 'dana-star-mk4')
    for key in start:
        table = {'eps': 1e-8 if key.startswith(('embed', 'head')) else 1e-8 / (4 * 3)}
        if key in HIDDEN:
            rate = 1 / 2 if name == 'muon' else 1 / 4
            table |= {'rate': rate, 'decays': 1 if independent else 1 / rate}
        expected[key] = reference(name, key, start[key], gradients[key], **table)
    assert max(errors(full_values(model), expected).values()) <= TOLERANCE[name]
    plain = reference(name, 'tall.weight', start['tall.weight'], gradients['tall.weight'])
    assert errors({'': plain}, {'': expected['tall.weight']})[''] > 1e-3


def test_an_optimizer_whose_steps_grow_with_the_gradients_is_refused_under_completep():
    with pytest.raises(ValueError, match=r"optimizer=sgd with parametrization='completep': .* --optimizer=adamw"):
        make_optimizer(Wide(), 'sgd', **KEYS)


@pytest.mark.parametrize('name', ELEMENTWISE)
def test_a_list_of_tensors_follows_the_equation(name, expected, monkeypatch):
    """In the form for GPUs: all tensors by torch._foreach_*, at most FOREACH elements at once."""
    start, gradients = values()
    model, optimizer = build(name, start)
    monkeypatch.setattr(optim, 'FOREACH', 100)
    monkeypatch.setattr(optim, 'run_in_chunks', optim.run_on_lists)
    take_steps(model, optimizer, gradients, range(STEPS))
    assert max(errors(full_values(model), expected[name]).values()) <= TOLERANCE[name]


@pytest.mark.slow
@pytest.mark.parametrize('name', ELEMENTWISE)
def test_compiled_follows_the_equation_and_compiles_once(name, expected):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    start, gradients = values()
    model, optimizer = build(name, start, compile=True)
    take_steps(model, optimizer, gradients, range(STEPS))
    assert max(errors(full_values(model), expected[name]).values()) <= TOLERANCE[name]
    # One graph for any number of elements, and one for a single element, a bias of Zoo.
    assert torch._dynamo.utils.counters['stats']['unique_graphs'] == 2


class Launches(TorchDispatchMode):
    """with Launches() as launches: ...; launches.count is the number of operations on the device `meta`."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.count += any(tensor.is_meta for tensor in tensors) and not function.is_view
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize('name', [name for name in OPTIMIZERS if name not in ('muon', 'sgd')])
def test_a_step_on_a_gpu_is_as_many_launches_for_many_tensors_as_for_few(name):
    """On the device 'meta', where the code does the same as on a GPU. PyTorch's calls with lists launch one kernel for
    every few dozen tensors."""
    counts = []
    for n_layer in (2, 8):
        with torch.device('meta'):
            model = GPT(ModelConfig(arch='llama', n_layer=n_layer, n_head=2, n_embd=32, vocab_size=64, block_size=16))
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        optimizer = make_optimizer(model, name, **KEYS)
        optimizer.step()  # makes the state
        with Launches() as launches:
            optimizer.step()
        counts.append(launches.count / len(optimizer.param_groups))
    of_a_group = {'adamw': 1, 'dana-mk4': 14, 'dana-star-mk4': 30, 'ademamix': 12}
    assert counts == [of_a_group.get(name, 10)] * 2


def test_muon_on_a_gpu_is_as_many_launches_for_many_matrices_of_a_shape_as_for_few():
    """Except for one launch for each matrix, which puts its parts together again."""
    counts = {}
    for matrices in (4, 16):
        weights = [torch.zeros(16, 8, device='meta') for _ in range(matrices)]
        with Launches() as launches:
            muon.muon_updates(weights, [16] * matrices)
        counts[matrices] = launches.count
    assert counts[16] - counts[4] == 16 - 4 and counts[4] <= 30


@pytest.mark.parametrize('max_norm', [0.5, 1e6])
def test_on_a_gpu_adamw_clips_gradients_on_its_way_through_them(max_norm):
    """As a CPU does it before, but for rounding. A step without clipping follows, which forgets the one before."""
    layers = [nn.Linear(40, 30), nn.Linear(40, 30)]
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = [optim.make_optimizer(layer, 'adamw', 1e-2, 0.9, 0.95, 0.1) for layer in layers]
    for clip in (max_norm, math.inf):
        start = [10 * torch.randn(parameter.shape) for parameter in layers[0].parameters()]
        norms = []
        for layer, optimizer, context in zip(layers, optimizers, (contextlib.nullcontext(), on_cuda()), strict=True):
            for parameter, gradient in zip(layer.parameters(), start, strict=True):
                parameter.grad = gradient.clone()
            with context:
                norms.append(optim.clip_grad_norm_(layer.parameters(), clip, optimizer=optimizer))
                if optimizer is optimizers[1]:
                    assert torch.equal(layer.weight.grad, start[0]), 'they were scaled before'
                optimizer.step()
        assert torch.equal(*norms)
        for ours, other in zip(*(layer.parameters() for layer in layers), strict=True):
            assert error(other.grad, ours.grad) <= apart() and error(other, ours) <= apart()


def test_muon_on_a_gpu_iterates_in_bfloat16_and_moves_the_matrices_alike():
    """The condition that asks for a GPU is made true here, so the numbers are those of a CPU in bfloat16. Each of five
    iterations rounds three products to it."""
    on_gpu = load('optim.py', ('if u[0].is_cuda:', 'if True:'))
    start, gradients = values()
    moved, dtypes = [], []
    for module in (optim, on_gpu):
        model, orthogonalize = Zoo(), muon.orthogonalize
        for name, parameter in model.named_parameters():
            parameter.data, parameter.grad = start[name].clone(), gradients[name][0].clone()
        note_dtype = mock.Mock(side_effect=lambda x, f=orthogonalize: dtypes.append(x.dtype) or f(x))
        with mock.patch.object(muon, 'orthogonalize', note_dtype):
            module.make_optimizer(model, 'muon', **KEYS).step()
        moved.append({name: parameter.detach() - start[name] for name, parameter in model.named_parameters()})
    assert dtypes == len(dtypes) // 2 * [torch.float32] + len(dtypes) // 2 * [torch.bfloat16]
    for name, expected in moved[0].items():
        difference = (moved[1][name] - expected).norm()
        assert difference <= (15 * 2**-8 * expected.norm() if name in HIDDEN else 0), name


def test_a_large_tensor_is_updated_in_chunks(monkeypatch):
    full = [torch.randn(1000, 300) for _ in range(2)]
    results = []
    for chunk in (10**6, 4096):  # the last chunk of 300,000 elements is a short one
        monkeypatch.setattr(optim, 'CHUNK', chunk)
        model = nn.Linear(300, 1000, bias=False)
        model.weight = nn.Parameter(full[0].clone())
        model.weight.grad = full[1]
        make_optimizer(model, 'dana-star-mk4', **KEYS).step()
        results.append(model.weight.detach())
    assert error(*results) <= apart()
    assert not torch.equal(results[0], full[0])


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_state_is_tensors_and_as_many_moments_as_documented(name):
    start, gradients = values()
    model, optimizer = build(name, start)
    take_steps(model, optimizer, gradients, range(2))
    moments = int(re.search(rf'^    {name} .*  (?:1 \(rest: )?(\d)', optim.__doc__, re.M)[1])  # the table's last column
    for key, parameter in model.named_parameters():
        state = dict(optimizer.state[parameter])
        if name == 'sgd':
            assert not any(isinstance(value, torch.Tensor) for value in state.values())
            continue
        if name == 'muon' and key in HIDDEN:
            assert list(state) == ['momentum_buffer']
        else:
            step = state.pop('step')
            assert step.dtype == torch.float32 and step.shape == () and step == 2
            assert len(state) == moments
        assert all(x.shape == parameter.shape and x.dtype == torch.float32 for x in state.values())


def test_adamw_is_torchs_fused_one_to_the_bit():
    start, gradients = values()
    model, optimizer = build('adamw', start)
    theirs, _ = build('adamw', start)
    groups = parameter_groups(theirs, KEYS['weight_decay'])
    reference = torch.optim.AdamW(groups, lr=KEYS['learning_rate'], betas=(KEYS['beta1'], KEYS['beta2']), fused=True)
    for step in range(STEPS):
        take_steps(model, optimizer, gradients, [step])
        take_steps(theirs, reference, gradients, [step])
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), theirs.parameters(), strict=True))
    for a, b in zip(model.parameters(), theirs.parameters(), strict=True):
        ours, of_torch = optimizer.state[a], reference.state[b]
        assert ours.keys() == of_torch.keys() and all(torch.equal(ours[slot], of_torch[slot]) for slot in ours)


COMPILED = [pytest.param(name, True, marks=pytest.mark.slow) for name in ('adana', 'muon')]


@pytest.mark.parametrize('name', [name for name in OPTIMIZERS if name != 'sgd'])
def test_hooks_of_a_step_run_once_whatever_was_made_before(name):
    """torch wraps step() of a class when the first instance is made; a step() that calls another would run them twice,
    if such an instance was made in this process."""
    parameter, called = nn.Parameter(torch.ones(3, 3)), []
    optim.Elementwise([parameter], {}, compile=False)
    model = nn.Linear(3, 3)
    optimizer = optim.make_optimizer(model, name, 1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, wd_ts=10)
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert called == [1]


@pytest.mark.parametrize('flag', [bool, lambda skip: torch.tensor(float(skip))], ids=['host', 'device'])
@pytest.mark.parametrize('name, compile', [*((name, False) for name in OPTIMIZERS), *COMPILED])
def test_a_step_that_is_skipped_changes_nothing_and_does_not_count(name, compile, flag):
    start, gradients = values()
    plain, its_optimizer = build(name, start, compile=compile)
    model, optimizer = build(name, start, compile=compile)
    for step in range(5):
        if step in (0, 3):
            bad = {key: torch.full_like(g, math.nan) for key, g in gradients.items()}
            take_steps(model, optimizer, bad, [step], skip=flag(True))
        take_steps(model, optimizer, gradients, [step], skip=flag(False))
        take_steps(plain, its_optimizer, gradients, [step])
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert error(a, b) <= apart()
            for slot, value in its_optimizer.state[b].items():
                assert error(optimizer.state[a][slot], value) <= apart(), slot


@pytest.fixture
def compile_by(monkeypatch):
    """compile_by(backend): how the updates of this test are compiled. 'eager' takes no C++ compiler, which needs most
    of the time, and runs what would be compiled."""
    compile = torch.compile
    optim.compiled.cache_clear()
    yield lambda backend: monkeypatch.setattr(
        torch, 'compile', lambda function, **keys: compile(function, backend=backend, **keys)
    )
    optim.compiled.cache_clear()


BY_INDUCTOR = pytest.param('adana', 'inductor', marks=pytest.mark.slow)


@pytest.mark.parametrize('name, backend', [('adamw', None), ('adana', 'eager'), BY_INDUCTOR])
def test_the_count_of_a_skipped_step_is_taken_back_when_the_state_is_read(name, backend, compile_by):
    """The host has already counted a step when it learns that the device has skipped it."""
    compile_by(backend)
    start, gradients = values()
    model, optimizer = build(name, start, compile=backend is not None)
    take_steps(model, optimizer, gradients, [0])
    moments = [value.clone() for state in optimizer.state.values() for value in state.values()]
    take_steps(
        model,
        optimizer,
        {key: torch.full_like(g, math.nan) for key, g in gradients.items()},
        [1],
        skip=torch.tensor(1.0),
    )
    after = [value for state in optimizer.state_dict()['state'].values() for value in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(after, moments, strict=True))


def test_clipping_is_torchs_to_the_bit():
    for most in (0.5, 1e9, math.inf):
        theirs, ours = ([nn.Parameter(torch.empty(size)) for size in (7, 1, 30)] for _ in range(2))
        for a, b in zip(theirs[:2], ours[:2], strict=True):  # the third has no gradient
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        expected = nn.utils.clip_grad_norm_(theirs, most)
        assert torch.equal(optim.clip_grad_norm_(ours, most), expected) and expected > 0.5
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(theirs[:2], ours[:2], strict=True))


@pytest.mark.parametrize('shape', [(40, 60), (60, 40)])
def test_orthogonalized_matrices_have_singular_values_near_1_together_as_alone(shape):
    matrices = torch.randn(5, *shape)
    found = muon.orthogonalize(matrices)
    for matrix, alone in zip(found, matrices, strict=True):
        singular_values = torch.linalg.svdvals(matrix)
        assert 0.6 < singular_values.min() and singular_values.max() < 1.3
        assert error(matrix, muon.orthogonalize(alone[None])[0]) <= apart()


def test_matrices_are_dealt_out_evenly():
    shapes = [(1536, 512), (512, 512), (2048, 512), (512, 2048)] * 6
    costs = [muon.flops(*shape) for shape in shapes]
    owned_by = muon.deal_matrices(shapes, 4)
    assert sorted(sum(owned_by, [])) == list(range(len(shapes)))
    assert max(sum(costs[i] for i in owned) for owned in owned_by) < 1.05 * sum(costs) / 4
    # The large one comes first. If it came last, it would go to a rank that has a small one already.
    assert muon.deal_out([1, 1, 2], 2) == [[2], [0, 1]]


def test_a_parameter_that_had_no_gradient_starts_at_step_1():
    model = TinyModel()
    optimizer = make_optimizer(model, 'adana', **KEYS)
    for step in range(2):
        for name, parameter in model.named_parameters():
            parameter.grad = None if step == 0 and name == 'head.weight' else torch.ones_like(parameter)
        optimizer.step()
    assert optimizer.state[model.head.weight]['step'] == 1 and optimizer.state[model.linear.weight]['step'] == 2


def test_compiling_repays_only_in_long_runs_of_large_shards():
    cpu, cuda = torch.device('cpu'), torch.device('cuda')
    small, large = (torch.empty(size, device='meta') for size in (19_000_000, 1_000_000_000))
    assert not optim.compiling_repays(500, [small], cpu) and optim.compiling_repays(5000, [small], cpu)
    assert not optim.compiling_repays(5000, [small], cuda)
    assert not optim.compiling_repays(100, [large], cuda) and optim.compiling_repays(5000, [large], cuda)


# --- several ranks ----------------------------------------------------------------------------------------------------


def optimizers_on_ranks(folder, names, layouts):
    """On one rank: train Zoo with every optimizer in every layout, and save what it finds as {(name, layout): ...}."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    meshes = {
        'plain': lambda: None,
        'shard': lambda: init_device_mesh('cpu', (world_size,)),
        'hsdp': lambda: init_device_mesh('cpu', (2, world_size // 2)),
    }
    start, gradients = values()
    found = {}
    for layout in layouts:
        mesh = meshes[layout]()
        for name in names:
            keys = {'copies': dist.group.WORLD} if layout == 'plain' else {}  # as train_ddp.py
            model, optimizer = build(name, start, mesh, **keys)
            take_steps(model, optimizer, gradients, range(STEPS // 2), mesh)
            out_dir = f'{folder}/{name}_{layout}'
            checkpoint_saver.prepare(out_dir)
            saver = checkpoint_saver.Saver(out_dir, 1, False, lambda line: None)
            saver.save(STEPS // 2, model, optimizer, {'step': STEPS // 2})
            take_steps(model, optimizer, gradients, range(STEPS // 2, STEPS - 1), mesh)
            with CommDebugMode() as communication:
                take_steps(model, optimizer, gradients, [STEPS - 1], mesh)

            zeros = {key: torch.zeros_like(value) for key, value in start.items()}
            resumed, its_optimizer = build(name, zeros, mesh, **keys)
            state = checkpoint.load(f'{out_dir}/checkpoints/step_{STEPS // 2:08d}', resumed, its_optimizer)
            take_steps(resumed, its_optimizer, gradients, range(state['step'], STEPS), mesh)
            saved = [
                checkpoint_saver.tensors_to_save(model, optimizer),
                checkpoint_saver.tensors_to_save(resumed, its_optimizer),
            ]
            found[name, layout] = {
                'full': full_values(model),
                'collectives in a step': communication.get_total_counts(),
                'resumed equals': saved[0].keys() == saved[1].keys()
                and all(torch.equal(optim.local(x), optim.local(saved[1][key])) for key, x in saved[0].items()),
            }
    if 'adamw' in names and world_size == 2:
        sharded_training(rank, folder)
    torch.save(found, f'{folder}/found_{rank}.pt')


def sharded_training(rank, folder):
    """On one of two ranks, where the 11 rows of embedding and head do not divide evenly."""
    torch.manual_seed(0)
    model = TinyModel()
    for unit in (model.linear, model):
        fully_shard(unit)
    full = train(model, steps=5)
    torch.save(full, f'{folder}/sharded_{rank}.pt')

    # As in fp16: the gradient of rank 1 overflows, and that of rank 0 does not.
    optimizer = make_optimizer(model, 'adana', **KEYS)
    scaler = torch.amp.GradScaler('cpu', init_scale=4.0)
    scaler.scale(model(torch.arange(10)).square().mean()).backward()
    if rank == 1:
        model.linear.weight.grad.to_local().fill_(math.inf)
    before = model.norm.weight.to_local().clone()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    after = {'moved': not torch.equal(model.norm.weight.to_local(), before), 'scale': scaler.get_scale()}
    torch.save(after, f'{folder}/overflow_{rank}.pt')


@pytest.fixture(scope='module')
def ranks(has_slow_tests):
    """{world size: folder with what its ranks saved}."""
    jobs = {2: (OPTIMIZERS, ('plain', 'shard'))}
    if has_slow_tests:
        jobs |= {3: (OPTIMIZERS, ('shard',)), 4: (('muon',), ('hsdp',))}
    with tempfile.TemporaryDirectory() as parent:
        folders = {world_size: Path(parent, str(world_size)) for world_size in jobs}
        for world_size, (names, layouts) in jobs.items():
            folders[world_size].mkdir()
            run_function(world_size, optimizers_on_ranks, str(folders[world_size]), names, layouts)
        yield folders


def found_by(ranks, world_size, name, layout):
    """What each rank found."""
    return [torch.load(ranks[world_size] / f'found_{rank}.pt')[name, layout] for rank in range(world_size)]


RUNS = [(2, name, layout) for name in OPTIMIZERS for layout in ('plain', 'shard')]
RUNS += [(3, name, 'shard') for name in OPTIMIZERS] + [(4, 'muon', 'hsdp')]


@pytest.mark.parametrize('world_size, name, layout', slow_but([2], RUNS))
def test_shards_follow_the_equation_and_resume_bit_for_bit(world_size, name, layout, ranks, expected):
    for found in found_by(ranks, world_size, name, layout):
        assert max(errors(found['full'], expected[name]).values()) <= TOLERANCE[name]
        assert found['resumed equals']


@pytest.mark.parametrize('world_size, name, layout', slow_but([2], RUNS))
def test_elementwise_optimizers_do_not_communicate_and_muon_does_in_one_or_two(world_size, name, layout, ranks):
    found, of_muon = found_by(ranks, world_size, name, layout), 1 if layout == 'plain' else 2
    assert all(rank['collectives in a step'] == (of_muon if name == 'muon' else 0) for rank in found)


def muon_dealt_out():
    """On one rank, beside the same by this rank alone: (whether all bits are equal, [(FLOPs, alone)] of updates)."""
    start, gradients = values()
    bad = {key: torch.full_like(g, math.nan) for key, g in gradients.items()}
    (model, optimizer), alone = build('muon', start, copies=dist.group.WORLD), build('muon', start)
    for step in range(5):
        take_steps(model, optimizer, bad, [step], skip=True)
        take_steps(model, optimizer, gradients, [step])
        take_steps(*alone, gradients, [step])
    saved, expected = (checkpoint_saver.tensors_to_save(*both) for both in ((model, optimizer), alone))
    are_equal = [saved.keys() == expected.keys(), *(torch.equal(saved[key], expected[key]) for key in saved)]

    # Of odd sizes, since matrices of these come out in other bits beside others. With small batches there are more
    # batches than ranks, otherwise there are three.
    shapes, counts = [(17, 5)] * 3 + [(14, 19)] * 5 + [(8, 8)], []
    matrices, split_rows = [torch.randn(shape) for shape in shapes], [[7, 7] if n == 14 else [n] for n, _ in shapes]
    for matrix in matrices:
        dist.broadcast(matrix, 0)
    for chunk in (muon.CHUNK, 300):
        with mock.patch.object(muon, 'CHUNK', chunk):
            with FlopCounterMode(display=False) as by_one:
                expected = muon.muon_updates(matrices, split_rows)
            with FlopCounterMode(display=False) as dealt:
                found = muon.muon_updates(matrices, split_rows, dist.group.WORLD)
        are_equal += map(torch.equal, found, expected)
        counts.append((dealt.get_total_flops(), by_one.get_total_flops()))
    return all(are_equal), counts


@pytest.mark.parametrize('world_size', slow_but([4], [1, 2, 3, 4]))
def test_ranks_with_the_same_gradients_deal_muon_out_and_compute_what_one_process_does(world_size):
    found = run_function(world_size, muon_dealt_out)
    assert all(are_equal for are_equal, _ in found)
    of_one = 3 * muon.flops(17, 5) + 10 * muon.flops(7, 19) + muon.flops(8, 8)
    for number, largest in enumerate((10 * muon.flops(7, 19), 2 * muon.flops(7, 19))):  # the most expensive batch
        counts = [rank[1][number] for rank in found]
        assert {alone for _, alone in counts} == {of_one} and sum(mine for mine, _ in counts) == of_one
        assert max(mine for mine, _ in counts) <= of_one / world_size + largest


def test_sharded_training_equals_plain_training(ranks):
    torch.manual_seed(0)
    plain = train(TinyModel(), steps=5)
    for rank in (0, 1):
        full = torch.load(ranks[2] / f'sharded_{rank}.pt')
        assert full.keys() == plain.keys()
        for name in plain:
            assert error(full[name], plain[name]) <= apart(5), name


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks):
    for rank in (0, 1):
        assert torch.load(ranks[2] / f'overflow_{rank}.pt') == {'moved': False, 'scale': 2.0}


# --- schedules --------------------------------------------------------------------------------------------------------


def rate_at(step, **changed):
    return learning_rate_at(step, SimpleNamespace(**SCHEDULE | changed))


@pytest.mark.parametrize('lr_schedule', SCHEDULES)
def test_schedules_rise_to_the_peak_and_end_at_min_lr(lr_schedule):
    rates = [rate_at(step, lr_schedule=lr_schedule) for step in range(150)]
    assert rates[:11] == sorted(rates[:11]) and rates[0] > 0
    assert rates[10] == max(rates) == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert set(rates[110:]) == ({1.0} if lr_schedule == 'constant' else {0.1})


@pytest.mark.parametrize(
    'lr_schedule, step, expected',
    [
        ('cosine', 0, 1 / 11),
        ('cosine', 60, 0.55),  # half-way down
        ('cosine', 35, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2),
        ('cos_inf', 0, 0.01),  # 1% of the peak
        ('cos_inf', 5, 0.505),
        ('cos_inf', 60, 0.55),
        ('linear', 60, 0.55),
        ('linear', 35, 0.775),
        ('wsd', 88, 1.0),  # the last 20% of 110 steps begin here
        ('wsd', 99, 0.55),
    ],
)
def test_schedule_values(lr_schedule, step, expected):
    assert rate_at(step, lr_schedule=lr_schedule) == pytest.approx(expected)


def test_wsd_with_a_warm_up_into_its_last_fifth_decays_from_the_peak():
    rates = [rate_at(step, lr_schedule='wsd', warmup_iters=100) for step in (100, 105, 109)]
    assert rates == pytest.approx([1.0, 0.55, 0.19])


def test_a_run_shorter_than_its_warm_up_just_warms_up():
    rates = [rate_at(step, lr_decay_iters=4) for step in range(12)]
    assert rates[:10] == sorted(rates[:10]) and rates[11] == 0.1


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('lr_schedule', SCHEDULES)
def test_no_schedule_divides_by_zero(lr_schedule):
    for warmup_iters, lr_decay_iters in ((0, 0), (0, 1), (1, 1)):
        keys = dict(lr_schedule=lr_schedule, warmup_iters=warmup_iters, lr_decay_iters=lr_decay_iters)
        assert all(0 < rate_at(step, **keys) <= 1 for step in range(3))


@pytest.mark.parametrize(
    'changed',
    [
        {'optimizer': 'adam'},
        {'wd_ts': None, 'optimizer': 'adana'},
        {'beta1': 0, 'optimizer': 'ademamix'},
    ],
)
def test_optimizer_values_that_do_not_fit_get_one_line(changed):
    with pytest.raises(ValueError, match=rf'^{next(iter(changed))}=.*expected .*$'):
        make_optimizer(TinyModel(), **ADAMW | changed)


@pytest.mark.parametrize('changed', [{'lr_schedule': 'cos'}, {'min_lr': 2.0}])
def test_schedule_values_that_do_not_fit_get_one_line(changed):
    with pytest.raises(ValueError, match=rf'^{next(iter(changed))}=.*expected .*$'):
        rate_at(0, **changed)
