"""All blocks of a model share one graph for training and one for evaluation, and nothing is compiled again later."""

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from on_cuda import kernels_of_cuda
from pretrained import save_model
from short import covering, slow_but
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import attention
import diloco
import experts
import float8
import fsdp
import fsdp_manual
import offload
from huggingface import finetune, lora
from huggingface.pretrained import Pretrained
from model import GPT, ModelConfig
from runtime import begin, log

SHAPE = dict(n_layer=3, n_head=2, n_embd=16, vocab_size=64, block_size=8)
EXPERTS = dict(n_experts=4, experts_per_token=2, expert_hidden_dim=16)


@pytest.fixture(autouse=True)
def nothing_compiled():
    """What tests before this one, also of other files, have compiled decides which sizes the compiler takes to vary."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def ranks(strategy):
    """Make this process one of two ranks in each replica, with collectives that do nothing. DDP does not work with such
    a group, so there it is the only rank."""
    backend, store, world_size = ('gloo', dist.HashStore(), 1) if strategy == 'ddp' else ('fake', FakeStore(), 2)
    world_size *= 2 if 'diloco' in strategy else 1
    dist.init_process_group(backend, store=store, rank=0, world_size=world_size)
    with torch._dynamo.config.patch(optimize_ddp=False):  # as train_ddp.py sets it
        yield
    dist.destroy_process_group()


def wrap(model, strategy):
    if strategy == 'ddp':
        return DistributedDataParallel(model)
    mesh = init_device_mesh('cpu', (dist.get_world_size() // 2, 2), mesh_dim_names=('replica', 'shard'))['shard']
    shard = fsdp_manual.shard if 'manual' in strategy else fsdp.by_torch
    return shard(model, model.blocks, mesh, torch.bfloat16)


def outer_step(theta, delta, momentum):
    theta.sub_(delta, alpha=0.7)


MODELS = [('gpt2', 'none'), ('enoki', 'none'), ('qwen3', 'none'), ('llama', 'selective'), ('enoki', 'full')]
CASES = [(strategy, *model) for strategy in ('ddp', 'fsdp', 'manual') for model in MODELS]
CASES += [(strategy, 'llama', 'selective') for strategy in ('fsdp diloco', 'manual diloco')]
CASES += [(strategy, 'llama float8', mode) for strategy in ('ddp', 'fsdp', 'manual') for mode in ('none', 'selective')]
MODES = ('none', 'full', 'selective')
CASES += [(strategy, 'qwen3 experts', mode) for strategy in ('ddp', 'fsdp', 'manual') for mode in MODES]


@pytest.fixture
def in_one_kernel(monkeypatch):
    """Compute experts in bf16 as a GPU does, in one kernel and without their numbers of rows on the host. A CPU can do
    that, too."""
    monkeypatch.setattr(experts, 'rows_of_each', lambda ends, rows: ends)


@pytest.mark.slow
@pytest.mark.parametrize(('strategy', 'arch', 'mode'), CASES)
def test_blocks_share_two_graphs_for_good(ranks, in_one_kernel, strategy, arch, mode):
    shape = SHAPE | (EXPERTS if 'experts' in arch else {})
    model = GPT(ModelConfig(arch=arch.split()[0], **shape), torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    if 'float8' in arch:
        float8.convert(model)
    model.checkpoint_activations(mode)
    counter = CompileCounterWithBackend('eager')
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=counter)
    model = wrap(model, strategy)
    outer = None
    if 'diloco' in strategy:  # rounds of five steps; the outer parameters are evaluated
        replicas = init_device_mesh('cpu', (2, 2), mesh_dim_names=('replica', 'shard')).get_group('replica')
        outer = diloco.Outer(dict(model.named_parameters()), outer_step, replicas, inner_steps=5)
    tokens = torch.randint(64, (2, 8))
    graphs = []
    for step in range(50):
        model(tokens, tokens)[0].backward()
        model.zero_grad()
        if step % 10 == 0:
            model.eval()
            with torch.no_grad(), outer.outer_parameters() if outer else contextlib.nullcontext():
                model(tokens, tokens)
            model.train()
            for module in model.modules():
                if hasattr(module, 'reshard'):
                    module.reshard()
        for fragment in outer.to_send(step + 1) if outer else ():
            outer.send(fragment, step + 1)
        graphs.append(counter.frame_count)
    assert graphs == [2] * 50  # the first evaluation comes right after the first step


@pytest.mark.parametrize('mode', [MODES[0], *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES[1:])])
def test_a_block_with_experts_is_one_graph_for_its_first_batch_and_one_for_any_other(in_one_kernel, mode):
    """There is no graph break, because only the sum of the experts' rows is a size of a tensor. Compiling changes no
    bit."""
    counter, found = CompileCounterWithBackend('aot_eager'), []
    for compiles in (False, True):
        model = GPT(ModelConfig(arch='qwen3', **SHAPE, **EXPERTS), torch.bfloat16)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(5 * model.initial_value(name, parameter, 0, 'cpu'))
        model.checkpoint_activations(mode)
        if compiles:
            for block in model.blocks:
                block.forward = torch.compile(block.forward, backend=counter, fullgraph=True)
        numbers, graphs = [], []
        for rows in (2, 3, 2, 5):
            tokens = torch.randint(64, (rows, 8), generator=torch.Generator().manual_seed(rows))
            model.zero_grad()
            loss, _ = model(tokens, tokens)
            loss.backward()
            numbers += [loss, *(parameter.grad for parameter in model.parameters())]
            graphs.append(counter.frame_count)
        found.append(numbers)
    assert graphs == [1, 2, 2, 2]
    for eager, compiled in zip(*found, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize('on_cuda', [False, True])
def test_on_a_gpu_the_loss_is_one_graph_and_the_same_number(monkeypatch, on_cuda):
    counter, compile = CompileCounterWithBackend('eager'), torch.compile
    monkeypatch.setattr(torch, 'compile', lambda function, **keys: compile(function, backend=counter, **keys))
    tokens, losses = torch.randint(64, (2, 8)), []
    for compiles in (False, True):
        keys = SimpleNamespace(compile=compiles, activation_checkpointing='none', native=False, matmul_dtype=None)
        keys.init_from, keys.eval_only = 'scratch', True
        shape = ModelConfig(arch='llama', **SHAPE)
        run = SimpleNamespace(
            config=keys, pretrained=None, model_config=shape, compute_dtype=torch.bfloat16, on_cuda=on_cuda
        )  # fmt: skip
        model = begin.make_model(run).to_empty(device='cpu')
        for name, parameter in model.named_parameters():
            parameter.data.copy_(model.initial_value(name, parameter, 0, 'cpu'))
        for _ in range(3):
            loss, *_ = model(tokens, tokens)
            loss.backward()
            losses.append(loss.item())
    assert losses[:3] == losses[:1] * 3 and losses[3:] == losses[3:4] * 3
    # On a GPU the loss has its pointwise form, which adds up in another order: at most one rounding for each of 16
    # tokens.
    one_rounding = torch.finfo(torch.float32).eps * losses[0] if on_cuda else 0
    assert abs(losses[3] - losses[0]) <= tokens.numel() * one_rounding
    assert counter.frame_count == 1 + on_cuda  # one for all blocks, one for the loss


AXES = {
    'model': ['llama_64', 'mistral_64', 'gemma2_64', 'gpt2_64'],
    'strategy': ['ddp', 'fsdp', 'manual'],
    'trained': ['all', 'float32', 'bfloat16', 'nf4'],  # all weights, or LoRA beside a base that is stored so
    'mode': ['none', 'selective', 'full', 'offload'],
    'rows': ['plain', 'packed'],
}
FINE_TUNED = [*itertools.product(*AXES.values())]
FINE_TUNED = [*dict.fromkeys([*covering(FINE_TUNED, 1), *covering(FINE_TUNED, 2)])]
SHORT = [', '.join(case) for case in covering(FINE_TUNED, 1)]


@pytest.mark.parametrize(tuple(AXES), slow_but(SHORT, FINE_TUNED, lambda *case: ', '.join(case)))
def test_twelve_blocks_of_a_hugging_face_class_share_two_graphs(
    ranks, tmp_path, monkeypatch, model, strategy, trained, mode, rows
):
    """Whatever is trained, stored and recomputed, and also where the first block's input needs no gradient."""
    layers = {'n_layer': 12} if model.startswith('gpt2') else {'num_hidden_layers': 12}
    keys = {} if trained == 'all' else {'lora_rank': 4, 'frozen_dtype': trained}
    folder = save_model(tmp_path, model, torch.bfloat16, **layers)
    raw_model = finetune.for_training(Pretrained(folder, 32, **keys), torch.bfloat16)
    if strategy == 'ddp':
        lora.compute_from_stored(raw_model)
    offload.checkpoint_activations(raw_model, mode)
    counter = CompileCounterWithBackend('eager')
    for block in raw_model.blocks:
        block.forward = torch.compile(block.forward, backend=counter)
    wrapped = wrap(raw_model, strategy)
    # Rows of several documents as a GPU computes them: without a mask, which would be an input of every block.
    monkeypatch.setattr(attention, 'has_flash_attention', lambda *_: True)
    tokens, starts = torch.randint(250, (2, 32)), [torch.tensor([[0, 9, 32], [0, 32, 32]])] * (rows == 'packed')
    kernels_of_cuda()
    for _ in range(2):
        wrapped(tokens, tokens, *starts)[0].backward()
        wrapped.eval()
        with torch.no_grad():
            wrapped(tokens, tokens, *starts)
        wrapped.train()
    assert counter.frame_count == 2


def test_a_function_that_is_compiled_too_often_is_one_line_of_the_log():
    lines = []
    log.say_when_compiling_ends(lines.append)

    def times(x, factor):
        return x * factor

    compiled = torch.compile(times, backend='eager', dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=3):
        results = [compiled(torch.ones(2), factor).sum().item() for factor in range(1, 9)]
    assert results == [2 * factor for factor in range(1, 9)]
    (line,) = lines
    assert line.startswith("WARNING: compile: 'times' (") and '--compile=False' in line
