"""fsdp_manual.py: the collectives that its text promises, and models with which nothing is even.
proving/test_lessons.py has losses and gradients of the runs that use it.

The ranks run all cases once and return what each of them saw, and the tests look at that.
"""

import collections
import contextlib
import itertools
import json
import signal
import unittest.mock
import warnings

import pytest
import torch
import torch.distributed as dist
from faults import send
from launch import Job, run_function
from outputs import last_step
from precision import (
    EPS,
    TIMES,
    all_times_further,
    in_float64,
    times_further,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_manual
from model import GPT, ModelConfig

MICRO_STEPS, BLOCK_SIZE = 2, 16
# Hardly anything here divides evenly: there are 30, 41 and 90 rows.
GPT2 = dict(arch='gpt2', n_layer=3, n_head=3, n_embd=30, mlp_hidden_dim=41, vocab_size=97, bias=False)


# --- WHAT THE RANKS RUN -----------------------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Notes (operator, bytes that this rank receives) of all collectives, as torch sees them."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == 'c10d':
            name = function._schema.name.split('::')[1]
            output = args[0]
            size = output.nbytes if isinstance(output, torch.Tensor) else 0
            self.calls.append((name, size))
        return function(*args, **(kwargs or {}))


def build(replicate_size=1, prefetch=1, zero_stage=3, dtype=torch.float32, **changes):
    """(raw model, model to call)"""
    raw = GPT(ModelConfig(**GPT2 | changes, block_size=BLOCK_SIZE), dtype)
    with torch.no_grad():
        for name, parameter in raw.named_parameters():
            parameter.copy_(raw.initial_value(name, parameter, 7, 'cpu'))
    return raw, fsdp_manual.shard(raw, raw.blocks, make_mesh(replicate_size), dtype, zero_stage, prefetch)


def batch():
    """Tokens and targets, of which some are ignored."""
    tokens = torch.randint(0, 97, (2, BLOCK_SIZE + 1), generator=torch.Generator().manual_seed(0))
    x, y = tokens[:, :-1], tokens[:, 1:].clone()
    y[:, ::5] = -1
    return x, y


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def make_mesh(replicate_size):
    shape = (replicate_size, dist.get_world_size() // replicate_size)
    mesh = init_device_mesh('cpu', shape, mesh_dim_names=('replicate', 'shard'))
    return mesh if replicate_size > 1 else mesh['shard']


def count_collectives(zero_stage, accumulate, dtype='float32'):
    """Collectives of one optimizer step and of an evaluation, as torch sees them and as the engine counts them."""
    _, model = build(zero_stage=zero_stage, dtype=getattr(torch, dtype))
    rows = {}
    with Collectives() as seen:
        for micro_step in range(MICRO_STEPS):
            last = micro_step == MICRO_STEPS - 1
            model.set_requires_gradient_sync(accumulate == 'sharded' or last)
            model.set_reshard_after_backward(last, recurse=False)
            model(*batch())[0].backward()
        rows['step'], seen.calls = seen.calls, []
        rows['counted'] = model.communication()
        with torch.no_grad():
            model.eval()
            for _ in range(2):
                model(*batch())
            model.reshard()
        rows['evaluation'] = seen.calls
        rows['counted_in_evaluation'] = model.communication()
    return rows


def error_of_a_sum():
    """How far a bfloat16 gradient of three equal micro-steps, sent as a sum, is from three times that of one."""
    found = []
    for micro_steps in (1, 3):
        raw, model = build(dtype=torch.bfloat16)
        for micro_step in range(micro_steps):
            model.set_requires_gradient_sync(micro_step == micro_steps - 1)
            model(*batch())[0].backward()
        found.append(raw.blocks[1].mlp.up.weight.grad.to_local())
    return ((found[1] - 3 * found[0]).norm() / found[1].norm()).item()


def count_all_reduces():
    """The all-reduces in a step of two replicas of the whole model, as torch sees them and as the engine counts."""
    _, model = build(replicate_size=2)
    with Collectives() as seen:
        model(*batch())[0].backward()
    names = [name for name, _ in seen.calls]
    numbers = sum(parameter.numel() for parameter in model.parameters())
    return {'seen': names.count('allreduce_'), 'counted': model.communication(), 'numbers': numbers}


def padded_sizes(model):
    """([of block 0, ...], of the root): numbers of each unit, with the rows of a parameter padded to divide evenly."""
    world_size = dist.get_world_size()
    blocks, root = collections.Counter(), 0
    for name, parameter in model.named_parameters():
        padded = -(-parameter.shape[0] // world_size) * world_size * parameter.shape[1:].numel()
        if name.startswith('blocks.'):
            blocks[name.split('.')[1]] += padded
        else:
            root += padded
    return list(blocks.values()), root


def order_of_events(prefetch):
    """What happens in one step, in order: g is a gather, r a reduction, F0 and B0 are forward, backward of block 0."""
    raw, model = build(prefetch=prefetch)
    events, seen = [], Collectives()

    def noting(letter, method):
        def wrapper(engine, unit):
            before = len(seen.calls)
            result = method(engine, unit)
            events.extend(letter * (len(seen.calls) - before))
            return result

        return wrapper

    for number, block in enumerate(raw.blocks):
        # What a block computes first: its attention norm in forward, its MLP's last projection in backward.
        block.attn_norm.register_forward_pre_hook(lambda *_, number=number: events.append(f'F{number}'))
        block.mlp.down.register_full_backward_hook(lambda *_, number=number: events.append(f'B{number}'))
    Sharded = fsdp_manual.ShardedModel
    with (
        seen,
        unittest.mock.patch.object(Sharded, 'start_all_gather', noting('g', Sharded.start_all_gather)),
        unittest.mock.patch.object(Sharded, 'start_reduce_scatter', noting('r', Sharded.start_reduce_scatter)),
    ):
        loss, _ = model(*batch())
        events.append('loss')
        loss.backward()
    return events


class Partial(nn.Module):
    """Two blocks whose second weight is used only where `use` says."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.sometimes = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x, use):
            x = x + self.always(x)
            return x + self.sometimes(x) if use else x

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x, use):
        for block in self.blocks:
            x = block(x, use)
        return x


def train_partial(sharded, uses, micro_steps, dtype=torch.float32):
    """The final weights. uses: for every micro-step, whether each rank uses the second weights."""
    model = Partial().to(dtype)
    if sharded:
        engine = fsdp_manual.shard(model, model.blocks, make_mesh(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    world_size = dist.get_world_size()
    for step, use in enumerate(uses):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(world_size, 4, 5, generator=generator).to(dtype)
        is_last = (step + 1) % micro_steps == 0
        if sharded:
            engine.set_requires_gradient_sync(is_last)
            model(inputs[dist.get_rank()], use[dist.get_rank()]).square().mean().backward()
        else:
            (sum(model(inputs[r], use[r]).square().mean() for r in range(world_size)) / world_size).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return {name: whole(parameter).detach().clone() for name, parameter in model.named_parameters()}


def unused_parameters():
    """How many times as far from float64 as in one process weights are if some of them are unused in some steps or
    micro-steps, on all ranks or only on some."""
    world_size = dist.get_world_size()
    patterns = {
        'by_all': [[step % 2 == 0] * world_size for step in range(6)],
        'by_some': [[rank == 0 for rank in range(world_size)] for _ in range(6)],
    }
    worst = {}
    for (name, uses), n in itertools.product(patterns.items(), (1, 2)):
        runs = train_partial(True, uses, n), train_partial(False, uses, n), train_partial(False, uses, n, torch.float64)
        worst[f'{name}, {n} micro-steps'] = max(all_times_further(*runs).values())
    return worst


def hugging_face_model(checkpointing):
    """Gradients and generated tokens of a sharded transformers model, beside the plain model and one in float64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=37, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, use_cache=True, attn_implementation='sdpa',
    )  # fmt: skip
    tokens = torch.randint(0, 61, (4 * dist.get_world_size(), 9), generator=torch.Generator().manual_seed(0))
    models = []
    for dtype in (torch.float32, torch.float32, torch.float64):
        torch.manual_seed(5)
        models.append(LlamaForCausalLM(config).to(dtype).train())
    plain, sharded, exact = models
    if checkpointing:
        sharded.gradient_checkpointing_enable()
    fsdp_manual.shard(sharded, sharded.model.layers, make_mesh(1))
    plain(tokens, labels=tokens).loss.backward()
    mine = tokens.chunk(dist.get_world_size())[dist.get_rank()]
    sharded(mine, labels=mine, use_cache=False).loss.backward()
    with in_float64():
        exact(tokens, labels=tokens).loss.backward()
    gradients = [{name: whole(p.grad) for name, p in model.named_parameters()} for model in (sharded, plain, exact)]
    worst = max(all_times_further(*gradients).values())
    generated = sharded.eval().generate(tokens[:2, :4], max_new_tokens=5, do_sample=False)
    same = torch.equal(generated, plain.eval().generate(tokens[:2, :4], max_new_tokens=5, do_sample=False))
    tied = sharded.lm_head.weight is sharded.model.embed_tokens.weight
    return {'gradient': worst, 'generates_the_same': same, 'tied': tied}


def peak_bytes(prefetch):
    """In bytes: the peak of whole weights and of the buffers in which they arrive; sizes of a block and of the root."""
    raw, model = build(n_layer=5, prefetch=prefetch)
    blocks, root = padded_sizes(raw)
    model(*batch())[0].backward()
    seen = model.communication()
    bytes_of = {'peak': seen['fsdp/whole_peak_gb'] * 1e9, 'now': seen['fsdp/whole_gb'] * 1e9}
    return {**bytes_of, 'block': 4 * blocks[0], 'root': 4 * root}


def state_stays_usable():
    """Evaluation between steps, a state_dict in the middle of one, and an exception in forward leave the model
    trainable."""
    raw, model = build()
    optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-3)
    with torch.no_grad():
        before = model(*batch())[0].item()
    kinds = {type(value.data) for value in raw.state_dict(keep_vars=True).values()}
    with contextlib.suppress(ValueError):
        model(torch.zeros(1, BLOCK_SIZE + 1, dtype=torch.long))  # longer than block_size
    model(*batch())[0].backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        after = model(*batch())[0].item()
    model.reshard()
    with contextlib.suppress(ValueError):
        model(torch.zeros(1, BLOCK_SIZE + 1, dtype=torch.long))  # block 0 is on its way
    model.reshard()
    of_new_weights = []
    with torch.no_grad():
        for parameter in raw.parameters():
            parameter.mul_(1.5)
        for _ in range(2):
            of_new_weights.append(model(*batch())[0].item())
            model.reshard()
    return {'only_dtensors': kinds == {DTensor}, 'before': before, 'after': after, 'of_new_weights': of_new_weights}


class HandsOn(nn.Linear):
    """A block that hands on what the first one has given beside its output, as a value residual does."""

    def forward(self, x, scale, given=None):
        y = super().forward(x)
        return (torch.tanh(y) * scale, y) if given is None else (torch.tanh(y + given) * scale, given)


class Scaled(nn.Sequential):
    """A block that ends with a parameter of the root, whose gradient is there before those of the block's weights."""

    def __init__(self, *sizes, bias):
        super().__init__(nn.Linear(*sizes, bias), nn.Linear(*sizes, bias))

    def forward(self, x, scale, given=None):
        return torch.tanh(super().forward(x)) * scale, given


class Plain(nn.Module):
    """Blocks between vectors. A gather of one weight needs no untangling, and must not enter a room too early."""

    def __init__(self, block):
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(block(48, 48, bias=False) for _ in range(4))
        self.scale, self.of_blocks = nn.Parameter(torch.rand(48)), nn.Parameter(torch.rand(48))

    def forward(self, x):
        x, given = x * self.scale, None
        for block in self.blocks:
            x, given = block(x, self.of_blocks, given)
        return x


def plain_blocks(block, zero_stage, prefetch=1):
    """How many times as far from float64 as in one process output and gradients are with such blocks."""
    model, sharded, exact = Plain(block), Plain(block), Plain(block).double()
    fsdp_manual.shard(sharded, sharded.blocks, make_mesh(1), zero_stage=zero_stage, prefetch=prefetch)
    inputs = torch.randn(dist.get_world_size(), 512, 48, generator=torch.Generator().manual_seed(1))
    expected, in_double = model(inputs), exact(inputs.double())
    expected.square().mean().backward()
    in_double.square().mean().backward()
    output = sharded(inputs[dist.get_rank()])
    output.square().mean().backward()
    factors = [times_further(output, *(of_all[dist.get_rank()] for of_all in (expected, in_double)))]
    for name, parameter in sharded.named_parameters():
        others = (other.get_parameter(name).grad for other in (model, exact))
        factors.append(times_further(whole(parameter.grad), *others))
    return max(factors)


def run_cases():
    """{name of a case: what this rank saw}."""
    warnings.filterwarnings('ignore')
    world_size = dist.get_world_size()
    results = {}
    results['partial'] = unused_parameters()
    results['usable'] = state_stays_usable()
    results['plain'] = [plain_blocks(HandsOn, 3, prefetch) for prefetch in (0, 1, 2)]
    results['plain'] += [plain_blocks(Scaled, zero_stage) for zero_stage in (3, 2)]
    if world_size == 2:
        results['all_reduces'] = count_all_reduces()
        results['error of a sum'] = error_of_a_sum()
    if world_size == 3:
        results['hf'] = {str(flag): hugging_face_model(flag) for flag in (False, True)}
    if world_size in (2, 3):
        results['peak'] = {str(prefetch): peak_bytes(prefetch) for prefetch in (0, 1, 2)}
        results['counts'] = {
            f'{stage} {accumulate} {dtype}': count_collectives(stage, accumulate, dtype)
            for stage in (3, 2, 1)
            for accumulate in ('unsharded', 'sharded')
            for dtype in ('float32', 'bfloat16')
        }
        blocks, root = padded_sizes(build()[0])
        results['sizes'] = {'block': blocks[0], 'root': root}
        results['order'] = {str(prefetch): order_of_events(prefetch) for prefetch in (0, 1, 2)}
    return json.loads(json.dumps(results))  # keys are strings


# --- WHAT THE TESTS READ ----------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def ranks():
    """{world size: [what each rank saw]}; started when a test asks for that size."""
    started = set()

    class Results(dict):
        def __missing__(self, world_size):
            assert world_size not in started, f'{world_size} ranks failed, see the first test that needed them'
            started.add(world_size)
            self[world_size] = run_function(world_size, run_cases)
            return self[world_size]

    return Results()


SIZES = [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow), 4]
TWO_OR_THREE = SIZES[1:3]


@pytest.mark.parametrize('world_size', TWO_OR_THREE)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('accumulate', ['unsharded', 'sharded'])
@pytest.mark.parametrize('zero_stage', [3, 2, 1])
def test_collectives_and_their_bytes_are_the_formula(ranks, world_size, zero_stage, accumulate, dtype):
    """There are n = 3 blocks, a root, which is one more unit, and m = 2 micro-steps. torch sees the whole output of a
    collective."""
    results = ranks[world_size][0]
    rows, sizes = results['counts'][f'{zero_stage} {accumulate} {dtype}'], results['sizes']
    n, m = 3, MICRO_STEPS
    # Stage 3: n gathers for forward, and n - 1 for backward, as the last block is still there; in the forward of the
    # next micro-step the first block is still there. Stage 2: once per micro-step. Stage 1: once per optimizer step.
    of_blocks = {3: (2 * n - 1) + (m - 1) * (2 * n - 2), 2: m * n, 1: n}[zero_stage]
    reductions = (m if accumulate == 'sharded' else 1) * (n + 1)
    itemsize = 4 if dtype == 'float32' else 2
    wire = itemsize if accumulate == 'sharded' else 4  # sums over micro-steps are fp32

    seen = collections.Counter((name, size) for name, size in rows['step'])
    gathers = {sizes['root'] * itemsize: 1, sizes['block'] * itemsize: of_blocks}
    reduces = {sizes['root'] * wire: reductions // (n + 1), sizes['block'] * wire: reductions * n // (n + 1)}
    expected = collections.Counter(gathers) + collections.Counter(reduces)
    assert seen == {('alltoall_base_', size): number for size, number in expected.items()}  # gloo: both are that
    received = (world_size - 1) / world_size  # a rank already has its own part of an output
    counted = rows['counted']
    assert counted['fsdp/gathers'] == of_blocks + 1 and counted['fsdp/reductions'] == reductions
    gathered = received * itemsize * (sizes['root'] + of_blocks * sizes['block'])
    reduced = received * wire * reductions * (sizes['root'] + n * sizes['block']) / (n + 1)
    assert counted['fsdp/gathers_gb'] * 1e9 == pytest.approx(gathered, rel=1e-12)
    assert counted['fsdp/reductions_gb'] * 1e9 == pytest.approx(reduced, rel=1e-12)
    assert counted['fsdp/wait'] > 0

    # An evaluation of two batches reduces nothing and gathers the root once. Figures of the engine are of training.
    evaluation = collections.Counter(name for name, _ in rows['evaluation'])
    assert evaluation == {'alltoall_base_': 1 + (2 * n if zero_stage == 3 else n)}
    counted = rows['counted_in_evaluation']
    assert [counted[f'fsdp/{key}'] for key in ('gathers', 'gathers_gb', 'wait')] == [0, 0, 0]


def test_half_precision_loses_no_digit_of_a_sum_over_micro_steps(ranks):
    assert ranks[2][0]['error of a sum'] <= 4 * EPS  # four roundings in fp32; bfloat16's are 65,536 times as large


def test_all_reduces_of_replicas_and_their_bytes_are_the_formula(ranks):
    """2 (r-1)/r of what is reduced, in fp32, here with r = 2 replicas of 1 shard."""
    found = ranks[2][0]['all_reduces']
    assert found['seen'] == found['counted']['fsdp/all_reduces'] == 4  # 3 blocks and the root
    assert found['counted']['fsdp/all_reduces_gb'] * 1e9 == pytest.approx(4 * found['numbers'], rel=1e-12)


@pytest.mark.parametrize('world_size', TWO_OR_THREE)
def test_at_most_two_blocks_and_the_root_are_whole_under_stage_3(ranks, world_size):
    for prefetch, seen in ranks[world_size][0]['peak'].items():
        blocks = max(2, int(prefetch) + 1)  # the one that computes, and those that are being gathered
        assert seen['peak'] == seen['root'] + blocks * seen['block'], prefetch
        assert seen['now'] == 0  # after backward nothing is


def test_gathers_run_ahead_of_the_computation_and_reductions_behind_it(ranks):
    """g: a gather starts, r: a reduction starts, F0, B0: block 0 computes forward, backward."""
    order = {prefetch: ' '.join(events) for prefetch, events in ranks[2][0]['order'].items()}
    assert order['1'] == 'g g g F0 g F1 F2 loss g B2 r g B1 r B0 r r'
    assert order['0'] == 'g g F0 g F1 g F2 loss B2 r g B1 r g B0 r r'
    assert order['2'] == 'g g g g F0 F1 F2 loss g g B2 r B1 r B0 r r'


@pytest.mark.parametrize('world_size', SIZES)
def test_parameters_that_are_unused_in_some_steps_or_on_some_ranks(ranks, world_size):
    assert max(ranks[world_size][0]['partial'].values()) <= TIMES


@pytest.mark.parametrize('world_size', SIZES)
def test_blocks_between_vectors(ranks, world_size):
    assert max(ranks[world_size][0]['plain']) <= TIMES


@pytest.mark.slow
@pytest.mark.parametrize('checkpointing', ['False', 'True'])
def test_a_transformers_model_trains_and_generates(ranks, checkpointing):
    result = ranks[3][0]['hf'][checkpointing]
    assert result['gradient'] <= TIMES
    assert result['generates_the_same'] and result['tied']


@pytest.mark.parametrize('world_size', SIZES)
def test_evaluation_state_dict_and_an_exception_leave_a_model_that_trains(ranks, world_size):
    result = ranks[world_size][0]['usable']
    assert result['only_dtensors'] and result['after'] < result['before']
    first, again = result['of_new_weights']
    assert first == again != result['after']


# --- BAD INPUT --------------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self, tied=False, scalar=False):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.embed = nn.Embedding(4, 4)
        if tied:
            self.second.weight = self.first.weight
        if scalar:
            self.temperature = nn.Parameter(torch.ones(()))


@pytest.fixture(scope='module')
def mesh():
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh('cpu', (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    'make, blocks, options, message',
    [
        (Pair, lambda m: [m.first], {}, '1 modules (Linear): '),
        (Pair, lambda m: [m.first, m.second, m.first], {}, '3 modules'),
        (Pair, lambda m: [], {}, '0 modules'),
        (Pair, lambda m: [m, m.first, m.second], {}, 'inside of another'),
        (Pair, lambda m: [nn.Linear(4, 4)], {}, '1 modules (Linear): '),
        (Pair, lambda m: [m.first, nn.Identity()], {}, 'block 1 has no parameters'),
        (lambda: Pair(tied=True), lambda m: [m.first, m.second], {}, 'second.weight is tied '),
        (lambda: Pair(scalar=True), lambda m: [m.first, m.second], {}, 'temperature '),
        (Pair, lambda m: [m.first, m.second], {'compute_dtype': torch.float8_e4m3fn}, 'float8_e4m3fn'),
    ],
)
def test_what_cannot_be_sharded_gets_one_line(mesh, make, blocks, options, message):
    model = make()
    with pytest.raises(ValueError) as caught:
        fsdp_manual.shard(model, blocks(model), mesh, **options)
    assert message in str(caught.value) and '\n' not in str(caught.value)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())  # nothing was begun


def test_a_model_is_sharded_once(mesh):
    model = Pair()
    fsdp_manual.shard(model, [model.first, model.second], mesh)
    with pytest.raises(ValueError, match='first.weight .*already'):
        fsdp_manual.shard(model, [model.first, model.second], mesh)


def test_a_stage_that_the_implementation_lacks_gets_one_line(tmp_path):
    job = Job('train_fsdp.py', ['--dataset=synthetic', '--vocab_size=97', '--zero_stage=1'], 1, tmp_path / 'log')
    assert job.wait() == [1]
    (line,) = job.text().splitlines()
    assert 'error: zero_stage=1' in line and '--fsdp_impl=manual' in line


def test_a_rank_that_stops_answering_ends_the_others_within_timeout_s(tmp_path):
    """Rank 1 freezes (SIGSTOP) in the middle of training: the other says so within timeout_s, and ends."""
    arguments = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--block_size=32', '--batch_size=2', '--vocab_size=97']
    arguments += ['--dataset=synthetic', '--device=cpu', '--max_iters=100000', '--log_interval=1', '--eval_sequences=8']
    arguments += ['--fsdp_impl=manual', '--timeout_s=10', f'--out_dir={tmp_path / "run"}']
    job = Job('train_fsdp.py', arguments, 2, tmp_path / 'log')
    job.wait_for(lambda: last_step(tmp_path / 'run') > 0)
    frozen = job.ranks()[1]
    send(frozen, signal.SIGSTOP)
    job.wait_for(lambda: '\n[0] ' in job.text())
    send(frozen)
    assert 0 not in job.wait()
    line = next(line for line in job.text().splitlines() if line.startswith('[0] '))
    assert 'rank 1 made no progress' in line or 'timeout_s=10' in line, line  # whoever notices first
