"""context_manual.py: documents stay apart, and the bytes are those that its docstring promises.
proving/test_lessons.py has its losses and gradients.

The ranks run all cases once and return what each of them saw, and the tests look at that.
"""

import contextlib
import re
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launch import TINY_MODEL, TINY_RUN, refusals, run_function
from layouts import layout_of
from on_cuda import on_cuda
from precision import assert_as_close_to_float64, in_float64
from pretrained import save_model

import context_manual
from huggingface.pretrained import Pretrained
from model import GPT, ModelConfig
from planning import traffic
from runtime import meter

CPU = torch.device('cpu')
BATCH, T, VOCABULARY = 4, 32, 97
LLAMA = dict(arch='llama', n_layer=2, n_head=4, n_kv_head=2, head_dim=8, n_embd=24, mlp_hidden_dim=40)
# Where documents begin in rows of 32 tokens: one whole row, short documents across the borders of chunks (8 tokens on 2
# ranks, 4 on 4), and padding at the end.
STARTS = [[0, 32, 32, 32, 32, 32], [0, 1, 5, 17, 20, 21], [0, 8, 16, 24, 32, 32], [0, 3, 7, 11, 30, 31]]


# --- WHAT THE RANKS RUN -----------------------------------------------------------------------------------------------


def over(ranks):
    """The Layout in which so many ranks of the world share each sequence."""
    return layout_of('fsdp', dist.get_world_size(), context=ranks)


def batch_of(packed):
    """x, y (BATCH, T); if packed, also where documents begin."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (BATCH, T + 1), generator=generator)
    x, y = tokens[:, :-1], tokens[:, 1:]
    return (x, y, torch.tensor(STARTS)) if packed else (x, y)


def make_model(checkpointing='none'):
    model = GPT(ModelConfig(**LLAMA, vocab_size=VOCABULARY, block_size=T))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.initial_value(name, parameter, 7, 'cpu'))
    model.checkpoint_activations(checkpointing)
    return model


def perturbed(impl):
    """Change one token of a document: (whether logits of another document change, whether all of its own from that
    token on do)."""
    context, model = context_manual.Context(over(dist.get_world_size()), impl, CPU, 60), make_model()
    x, y, starts = batch_of(packed=True)
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
    model = make_model(checkpointing)
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
        model(*context.part(batch_of(packed=False)))[0].backward()
        by_linux = meter.written(Path('/proc/self/io')) - before
    keys = {'context_parallel': N, 'context_impl': impl, 'activation_checkpointing': checkpointing, 'device': 'cpu'}
    keys |= {'dtype': 'float32', 'batch_size': BATCH, 'global_batch_size': BATCH, 'replicate_size': 1, 'zero_stage': 3}
    keys |= {'fsdp_impl': 'torch', 'blocks_per_unit': 1, 'accumulate': 'unsharded', 'optimizer': 'adamw'}
    keys |= {'cpu_offload': 'none', **model.config.to_dict()}
    formula = traffic.communication_bytes(keys, model, N, 'fsdp')['keys and values']
    return {'counted': sum(counted), 'by_linux': by_linux, 'formula': formula}


def activations():
    """Bytes that the blocks of a model save for backward on this rank, and in one process."""
    config = ModelConfig(
        **LLAMA | dict(n_embd=64, head_dim=16, mlp_hidden_dim=160), vocab_size=VOCABULARY, block_size=512
    )
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


def run_cases():
    """{name: what this rank saw}."""
    return {
        'perturbed': [perturbed(impl) for impl in ('ring', 'gather')],
        'sent': [sent_bytes(impl, mode) for impl in ('ring', 'gather') for mode in ('none', 'selective', 'full')],
        'activations': activations(),
    }


# --- TESTS ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module', params=[pytest.param(2, marks=pytest.mark.slow), 4])
def world_size(request):
    return request.param


RESULTS = {}


@pytest.fixture
def seen(world_size):
    """What each rank saw, [{name: ...}, ...]; the ranks run once."""
    if world_size not in RESULTS:
        RESULTS[world_size] = []  # stays empty if the ranks fail, so that they are not started again
        RESULTS[world_size] = run_function(world_size, run_cases, timeout=280)
    return RESULTS[world_size]


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
    pretrained = Pretrained(save_model(tmp_path / kind, kind), block_size=32)
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
