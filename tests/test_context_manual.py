"""context_manual.py against one process: the same losses and gradients, and the bytes that its docstring promises.

The ranks run all cases once and return what each of them saw, and the tests look at that.
"""

import contextlib
import json
import re
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launch import (
    TINY_MODEL,
    TINY_RUN,
    refusals,
    run_function,
    run_many,
)
from layouts import layout_of
from on_cuda import on_cuda
from outputs import column
from precision import TIMES, all_times_further, assert_as_close_to_float64, assert_same_run, in_float64, times_further
from pretrained import POSITIONS, save_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import context_manual
import fsdp
import fsdp_manual
import optim
from huggingface import finetune
from model import GPT, ModelConfig, attention_of_documents
from planning import traffic
from runtime import meter

CPU = torch.device('cpu')
BATCH, T, VOCABULARY = 4, 32, 97
SIZES = dict(n_layer=2, n_head=4, n_embd=24, mlp_hidden_dim=40, vocab_size=VOCABULARY)
GPT2 = dict(arch='gpt2', **SIZES)
ENOKI = dict(arch='enoki', head_dim=8, **SIZES)
LLAMA = dict(arch='llama', n_kv_head=2, head_dim=8, **SIZES)
QWEN3 = dict(arch='qwen3', n_kv_head=1, head_dim=8, attention_gate=True, **SIZES)
# Where documents begin in rows of 32 tokens: one whole row, short documents across the borders of chunks (8 tokens on 2
# ranks, 4 on 4), and padding at the end.
STARTS = [[0, 32, 32, 32, 32, 32], [0, 1, 5, 17, 20, 21], [0, 8, 16, 24, 32, 32], [0, 3, 7, 11, 30, 31]]
DEFAULTS = dict(model=LLAMA, ranks=2, impl='ring', fsdp='torch', dtype='float32', packed=False, checkpointing='none')
CASES = {
    2: {
        'llama': {},
        'llama_gather': dict(impl='gather', fsdp='manual'),
        'gpt2_tied': dict(model=GPT2, fsdp='manual'),
        'gpt2_untied': dict(model={**GPT2, 'tie_embeddings': False}, impl='gather'),
        'enoki': dict(model=ENOKI),
        'qwen3': dict(model=QWEN3, fsdp='manual', checkpointing='full'),
        'packed': dict(packed=True, checkpointing='selective'),
        'packed_gather': dict(packed=True, impl='gather', fsdp='manual', model=GPT2),
        'bf16': dict(dtype='bfloat16'),
        'bf16_packed': dict(dtype='bfloat16', fsdp='manual', packed=True),
    },
    4: {
        'cp4': dict(ranks=4),
        'cp4_gather_gpt2': dict(ranks=4, impl='gather', fsdp='manual', model=GPT2, packed=True),
        'cp4_packed': dict(ranks=4, packed=True, fsdp='manual', model=QWEN3),
        'cp2_dp2': dict(packed=True),
        'cp2_dp2_gather': dict(impl='gather', fsdp='manual', model=ENOKI, checkpointing='selective'),
    },
}
SHORT = ['cp4', 'cp4_gather_gpt2', 'cp2_dp2']  # on 4 ranks: ring and gather, packed and not, a second mesh dimension
STEPS = [*range(19), 0]  # the last batch is the first one again, so that its loss must have fallen


# --- WHAT THE RANKS RUN -----------------------------------------------------------------------------------------------


def over(ranks):
    """The Layout in which so many ranks of the world share each sequence."""
    return layout_of('fsdp', dist.get_world_size(), context=ranks)


def batch_of(step, packed):
    """x, y (BATCH, T); if packed, also where documents begin. Some targets are ignored, in step 0 all of the middle
    half."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (3, BATCH, T + 1), generator=generator).amin(0)  # small ones are likelier
    x, y = tokens[:, :-1], tokens[:, 1:].clone()
    y[:, ::5] = -1
    if step == 0:
        y[:, T // 4 : 3 * T // 4] = -1  # all targets of the second of 2 ranks, or of two of 4
    return (x, y, torch.tensor(STARTS)) if packed else (x, y)


def make_model(case):
    model = GPT(ModelConfig(**case['model'], block_size=T), getattr(torch, case['dtype']))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.initial_value(name, parameter, 7, 'cpu'))
    model.checkpoint_activations(case['checkpointing'])
    return model


def shard(model, case):
    """The model to call, sharded over all ranks."""
    dtype, mesh = getattr(torch, case['dtype']), init_device_mesh('cpu', (dist.get_world_size(),))
    by = fsdp_manual.shard if case['fsdp'] == 'manual' else fsdp.by_torch
    return by(model, model.blocks, mesh, dtype)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model, raw, optimizer, steps, case, context=None, gradients=None):
    """[(loss, gradient norm) of each step], trained as in train_fsdp.py. context=None: one process. Fills
    `gradients`."""
    world_size = dist.get_world_size() if context else 1
    groups = world_size // (context.ranks if context else 1)
    history = []
    for step in steps:
        batch = batch_of(step, case['packed'])
        valid = (batch[1] >= 0).sum()
        if context:
            rows = BATCH // groups
            first = dist.get_rank() // context.ranks * rows
            batch = context.part([part[first : first + rows] for part in batch])
        loss, ce = model(*batch)
        (loss * world_size / valid).backward()
        if gradients == {}:
            gradients |= {name: whole(p.grad).clone() for name, p in raw.named_parameters()}
        norm = optim.clip_grad_norm_(raw.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if context:
            dist.all_reduce(ce)
        history.append((ce.item() / valid.item(), whole(norm).item()))
    return history


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def compare(case):
    """
    How many times as far from a float64 run this case is as one process in the same precision, on rank 0.

    Compared are 'loss' and 'norm' over 20 steps, and 'gradient': the worst tensor of the first step. Also says by how
    much the loss fell.
    """
    raw, gradients = make_model(case), {}
    model = shard(raw, case)
    context = context_manual.Context(over(case['ranks']), case['impl'], CPU, 60)
    ours = torch.tensor(train(model, raw, optimizer_of(raw), STEPS, case, context, gradients))
    if dist.get_rank() > 0:
        return None
    plain, expected = make_model(case), {}
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    theirs = torch.tensor(train(plain, plain, optimizer_of(plain), STEPS, case, None, expected))
    with in_float64():
        double, exact = make_model({**case, 'dtype': 'float64'}), {}
        double.load_state_dict(start)
        truth = torch.tensor(train(double, double, optimizer_of(double), STEPS, case, None, exact))
    loss, norm = (times_further(ours[:, n], theirs[:, n], truth[:, n]) for n in (0, 1))
    gradient = max(all_times_further(gradients, expected, exact).values())
    return {'loss': loss, 'norm': norm, 'gradient': gradient, 'fell': theirs[0, 0] - theirs[-1, 0]}


def exact(impl, packed, model):
    """The largest errors of a model's loss and gradients, and of attention alone, in float64 and without FSDP."""
    errors, context = [], context_manual.Context(over(dist.get_world_size()), impl, CPU, 60)
    with in_float64():
        case = DEFAULTS | dict(dtype='float64', model=model, packed=packed)
        results = []
        for part in (lambda batch: batch, context.part):
            raw = make_model(case)
            loss, _ = raw(*part(batch_of(1, packed)))
            loss.backward()
            results.append([loss.detach(), *(parameter.grad for parameter in raw.parameters())])
        for ours, theirs in zip(results[1], results[0], strict=True):
            dist.all_reduce(ours)
            errors.append((ours - theirs).norm() / theirs.norm())

    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(BATCH, heads, T, 8, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads in (4, 2, 2)
    )
    batch = [torch.arange(T).repeat(BATCH, 1)] * 2 + [torch.tensor(STARTS)] * packed
    mask = torch.ones(T, T).bool().tril()
    if packed:
        mask = attention_of_documents(torch.tensor(STARTS), T, torch.float32, dropout=0.0, head_dim=8).mask
    expected = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    mine, _, _, attention = context.part(batch)
    mine = mine[0]
    out = attention.attend(*(tensor[:, :, mine] for tensor in (q, k, v)))
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    of_ours, of_theirs = (
        torch.autograd.grad(result, (q, k, v), of_result)
        for result, of_result in ((out, weights[:, :, mine]), (expected, weights))
    )
    errors.append((out - expected[:, :, mine]).abs().max())
    for ours, theirs in zip(of_ours, of_theirs, strict=True):
        errors.append((ours - theirs)[:, :, mine].abs().max())
    return max(error.item() for error in errors)


def perturbed(impl):
    """Change one token of a document: (whether logits of another document change, whether all of its own from that
    token on do)."""
    context, model = context_manual.Context(over(dist.get_world_size()), impl, CPU, 60), make_model(DEFAULTS)
    x, y, starts = batch_of(1, packed=True)
    changed = x.clone()
    changed[3, 11] += 1  # the first token of the document at 11 to 29, which lies in chunks of all ranks
    logits = []
    with torch.no_grad():
        for tokens in (x, changed):
            mine, *_, attention = context.part((tokens, y, starts))
            logits.append(model(mine, attention=attention))
    columns = context.part((torch.arange(T).repeat(BATCH, 1), y, starts))[0]  # (BATCH, T/N)
    inside = (columns >= 11) & (columns < 30) & (torch.arange(BATCH) == 3)[:, None]
    differs = (logits[0] != logits[1]).any(-1)
    return {'others': bool((differs & ~inside).any()), 'own': bool(differs[inside].all()), 'tokens': int(inside.sum())}


def sent_bytes(impl, checkpointing):
    """Bytes that this rank sends in forward and backward of one step: as counted here, by Linux, and by the formula."""
    context = context_manual.Context(over(dist.get_world_size()), impl, CPU, 60)
    model = make_model(DEFAULTS | dict(checkpointing=checkpointing))
    counted = []

    def spy(function, size_of):
        def call(*args, **kwargs):
            counted.append(size_of(*args))
            return function(*args, **kwargs)

        return mock.patch.object(dist, function.__name__, call)

    N = context.ranks
    with (
        spy(dist.batch_isend_irecv, lambda operations: sum(o.tensor.nbytes for o in operations if o.op is dist.isend)),
        spy(dist.all_gather, lambda outputs, tensor: (N - 1) * tensor.nbytes),
        spy(dist.all_to_all_single, lambda output, tensor: (N - 1) * tensor.nbytes // N),
    ):
        dist.barrier()
        before = meter.written(Path('/proc/self/io'))  # of all threads: gloo's and this one, which sends the hops
        model(*context.part(batch_of(1, packed=False)))[0].backward()
        by_linux = meter.written(Path('/proc/self/io')) - before
    keys = {'context_parallel': N, 'context_impl': impl, 'activation_checkpointing': checkpointing, 'device': 'cpu'}
    keys |= {'dtype': 'float32', 'batch_size': BATCH, 'global_batch_size': BATCH, 'replicate_size': 1, 'zero_stage': 3}
    keys |= {'fsdp_impl': 'torch', 'blocks_per_unit': 1, 'accumulate': 'unsharded', 'optimizer': 'adamw'}
    keys |= {'cpu_offload': 'none', **model.config.to_dict()}
    formula = traffic.communication_bytes(keys, model, N, 'fsdp')['keys and values']
    return {'counted': sum(counted), 'by_linux': by_linux, 'formula': formula}


def activations():
    """Bytes that the blocks of a model save for backward on this rank, and in one process."""
    config = ModelConfig(**LLAMA | dict(n_embd=64, head_dim=16, mlp_hidden_dim=160), block_size=512)
    model, context = GPT(config), context_manual.Context(over(dist.get_world_size()), 'ring', CPU, 60)
    tokens, weights = (
        torch.zeros(1, 512, dtype=torch.long),
        {p.untyped_storage().data_ptr() for p in model.parameters()},
    )
    sizes = []
    for batch in ((tokens, tokens), context.part((tokens, tokens))):
        saved = {}

        def note(tensor, saved=saved):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            result = model(batch[0], None, *batch[2:], then=lambda hidden, head: hidden.sum())
        sizes.append(sum(saved.values()))
        del result
    return sizes


def hugging_face(folder, kind):
    """
    How far from float64 are loss and gradients of a transformers model whose ranks share packed sequences?

    Returns how many times as far as with one process, which has whole sequences, for the worst tensor.
    """
    if dist.get_rank() == 0:
        path = Path(save_model(f'{folder}/{kind}', kind), 'config.json')
        path.write_text(json.dumps({**json.loads(path.read_text()), 'sliding_window': None}))
    dist.barrier()
    context = context_manual.Context(over(dist.get_world_size()), 'ring', CPU, 60)
    x, y, starts = batch_of(1, packed=True)
    assert T <= POSITIONS

    def pretrained():
        raw = finetune.for_training(finetune.Pretrained(f'{folder}/{kind}', block_size=T))
        raw.to_empty(device='cpu')
        finetune.load(raw, finetune.Pretrained(f'{folder}/{kind}', block_size=T))
        return raw

    def loss_and_gradients(raw, batch):
        loss, _ = raw(*batch)
        loss.backward()
        gradients = {name: p.grad for name, p in raw.named_parameters() if p.grad is not None}
        return {'loss': loss.detach(), **gradients}

    shared = loss_and_gradients(pretrained(), context.part((x, y, starts)))
    for tensor in shared.values():
        dist.all_reduce(tensor)
    one_process, double = loss_and_gradients(pretrained(), (x, y, starts)), pretrained().double()
    double.set_experts_implementation('eager')  # the fast one has no kernel for float64
    with in_float64():
        exact = loss_and_gradients(double, (x, y, starts))
    return max(all_times_further(shared, one_process, exact).values())


def run_cases(folder, has_slow_tests):
    """{name of a case: what this rank saw}."""
    world_size = dist.get_world_size()
    cases = {name: case for name, case in CASES[world_size].items() if has_slow_tests or name in SHORT}
    results = {name: compare(DEFAULTS | case) for name, case in cases.items()}
    models = (GPT2, ENOKI, LLAMA, QWEN3) if world_size == 2 else (LLAMA, QWEN3) if has_slow_tests else (QWEN3,)
    results['exact'] = [
        exact(impl, packed, model) for impl in ('ring', 'gather') for packed in (False, True) for model in models
    ]
    results['perturbed'] = [perturbed(impl) for impl in ('ring', 'gather')]
    results['sent'] = [sent_bytes(impl, mode) for impl in ('ring', 'gather') for mode in ('none', 'selective', 'full')]
    results['activations'] = activations()
    if world_size == 2:
        results['transformers'] = {kind: hugging_face(folder, kind) for kind in finetune.OWN_ATTENTION}
    return results


# --- TESTS ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module', params=[pytest.param(2, marks=pytest.mark.slow), 4])
def world_size(request):
    return request.param


RESULTS = {}


@pytest.fixture
def seen(world_size, tmp_path_factory, has_slow_tests):
    """What each rank saw, [{name: ...}, ...]; the ranks run once."""
    if world_size not in RESULTS:
        RESULTS[world_size] = []  # stays empty if the ranks fail, so that they are not started again
        RESULTS[world_size] = run_function(
            world_size, run_cases, str(tmp_path_factory.mktemp('checkpoints')), has_slow_tests, timeout=280
        )
    return RESULTS[world_size]


def test_losses_gradients_and_norms_are_those_of_one_process(seen, world_size):
    names = CASES[world_size].keys() & seen[0].keys()
    assert world_size == 2 or names >= {*SHORT}
    for name in names:
        result = seen[0][name]
        assert max(result['loss'], result['norm'], result['gradient']) <= TIMES, (name, result)
        assert result['fell'] > 0.05, name


def test_in_float64_loss_gradients_and_attention_are_exact(seen):
    assert max(error for of_rank in seen for error in of_rank['exact']) <= 1e-12


def test_a_token_of_a_document_changes_nothing_in_others_and_its_own_on_all_ranks(seen):
    for of_rank in seen:
        for result in of_rank['perturbed']:
            assert result['tokens'] > 0 and result['own'] and not result['others'], result


def test_bytes_sent_are_those_of_the_formula_and_selective_checkpointing_repeats_no_hop(seen):
    for of_rank in seen:
        for result in of_rank['sent']:
            assert result['counted'] == result['formula']
            assert result['formula'] <= result['by_linux'] <= 1.1 * result['formula'], result  # with headers
        ring, gather = ([result['counted'] for result in of_rank['sent']][i : i + 3] for i in (0, 3))
        for none, selective, full in (ring, gather):
            assert selective == none < full


def test_a_rank_holds_its_share_of_the_activations(seen, world_size):
    for of_rank in seen:
        whole, mine = of_rank['activations']
        assert mine / whole == pytest.approx(1 / world_size, rel=0.1)


def test_every_transformers_class_with_our_attention_can_share_sequences(seen, world_size):
    if world_size == 2:
        assert len(seen[0]['transformers']) == len(finetune.OWN_ATTENTION)
        for kind, times in seen[0]['transformers'].items():
            assert times <= TIMES, (kind, times)


def test_the_script_logs_what_one_process_logs(data_dir, tmp_path):
    """Losses, norms, tokens and evaluations, of a run on packed documents and of one on a stream of them."""
    run = [*TINY_MODEL, *TINY_RUN, '--arch=llama', '--global_batch_size=4', '--dtype=float32', '--eval_interval=3']
    run += ['--dataset=tiny', f'--data_dir={data_dir}', '--max_iters=6', '--keep_checkpoints=0']
    cases = {'stream': ['--fsdp_impl=manual'], 'packed': ['--windows=documents', '--context_impl=gather']}
    for nproc in (1, 2):
        runs = [
            {'name': name, 'script': 'train_parallel.py'}
            | {'arguments': [*run, *keys, f'--context_parallel={nproc}', f'--out_dir={tmp_path}/{name}{nproc}']}
            for name, keys in cases.items()
        ]
        run_many(runs, nproc, tmp_path)
    for name in cases:
        one, two = tmp_path / f'{name}1', tmp_path / f'{name}2'
        assert column(one, 'tokens') == column(two, 'tokens')
        for key, length in (('loss', 6), ('val_loss', 2), ('grad_norm', 6)):
            assert len(column(two, key)) == length
            assert_same_run(column(two, key), column(one, key), (name, key), every=6 // length)


# --- bad input --------------------------------------------------------------------------------------------------------


def test_the_script_refuses_in_one_line_before_there_is_a_process_group(tmp_path):
    keys = [*TINY_MODEL, *TINY_RUN, '--dataset=synthetic', '--vocab_size=97', f'--out_dir={tmp_path}/out']
    for line in refusals([['train_parallel.py', *keys, '--context_parallel=2', '--block_size=30']] * 2):
        assert re.match('error: .*--block_size=28 or 32$', line)
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (dict(block_size=4), ' 8, .*context_parallel=4 .*--block_size=8'),
        (dict(dropout=0.1), 'dropout=0.1 .*context_parallel=4.*--dropout=0'),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(changes, message):
    with pytest.raises(ValueError, match=message):
        context_manual.check({'block_size': 64, 'dropout': 0.0, **changes}, layout_of('fsdp', 4, context=4), None)


def test_windows_are_refused():
    shape = ModelConfig(vocab_size=97, block_size=64, window_pattern='SSL', window_size=16)
    with pytest.raises(ValueError, match='context_parallel=4 with window_pattern=SSL') as error:
        keys = {'block_size': 64, 'dropout': 0.0, 'device': 'cpu', 'head_dim': 64}
        context_manual.check(keys, layout_of('fsdp', 4, context=4), shape)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('kind', 'message'),
    [('mistral', ' 8 tokens .*block_size=32'), ('gpt_neox', 'its attention')],
)
def test_a_model_that_cannot_share_sequences_is_refused(tmp_path, kind, message):
    pretrained = finetune.Pretrained(save_model(tmp_path / kind, kind), block_size=32)
    keys = {'block_size': 32, 'dropout': 0.0, 'device': 'cpu', 'head_dim': 10}
    with pytest.raises(ValueError, match=message):
        context_manual.check(keys, layout_of('fsdp', 2, context=2), pretrained)
    with pytest.raises(ValueError, match='head_dim=10: .* 8'):
        context_manual.check({**keys, 'device': 'cuda:0'}, layout_of('fsdp', 2, context=2), pretrained)


def test_where_documents_begin_stays_on_the_host_and_the_device_is_asked_for_nothing(monkeypatch):
    """The tokens are on the device 'meta', where reading a number is an error. On a GPU it would make the host wait in
    every micro-step."""
    monkeypatch.setattr(context_manual.dist, 'get_rank', lambda group: 1)
    context = context_manual.Context.__new__(context_manual.Context)
    context.ranks, context.impl, context.group = 2, 'ring', types.SimpleNamespace(group_name='of two')
    x = torch.zeros(2, 16, dtype=torch.int64, device='meta')
    x, y, starts, attention = context.part((x, x, torch.tensor([[0, 5, 16], [0, 16, 16]])))
    assert x.shape == y.shape == attention.positions.shape == (2, 8) and starts is None
    assert attention.positions.is_meta and attention.documents.tolist() == [[0, 5, 16], [0, 16, 16]]


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernels_of_a_gpu_compute_a_tile(dtype, causal):
    """Results and gradients, beside float64 and a CPU's kernel."""
    B, H, K, T, D, scale = 2, 4, 2, 24, 16, 0.25
    generator = torch.Generator().manual_seed(0)
    q, grad = (torch.randn(B, H, T, D, generator=generator).to(dtype) for _ in range(2))
    k, v = (torch.randn(B, K, T if causal else T + 8, D, generator=generator).to(dtype) for _ in range(2))
    k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (k, v))  # as projections leave them
    found = []
    for precision, context in ((dtype, on_cuda()), (dtype, contextlib.nullcontext()), (torch.float64, in_float64())):
        with context:
            tensors = [tensor.to(precision) for tensor in (q, k, v, grad)]
            out, lse = context_manual.forward_kernel(*tensors[:3], causal, scale)
            gradients = context_manual.backward_kernel(tensors[3], tensors[0], out, lse, *tensors[1:3], causal, scale)
        found.append(dict(zip(('out', 'lse', 'q', 'k', 'v'), (out, lse, *gradients), strict=True)))
    assert_as_close_to_float64(*found)
