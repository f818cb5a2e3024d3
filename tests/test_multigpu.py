"""fsdp_manual.py on several GPUs (`pytest -m multigpu`): the numbers of fully_shard, and a trace that shows overlap."""

import json

import pytest
import torch
import torch.distributed as dist
from launch import run_function
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import fsdp
import fsdp_manual
from model import GPT, ModelConfig

pytestmark = [pytest.mark.multigpu]


def train(implementation, dtype, steps=10, trace=None):
    """The losses of a model under one implementation. trace: path for a Chrome trace of the last step."""
    device = torch.device('cuda', dist.get_rank())
    config = ModelConfig(arch='llama', n_layer=6, n_head=16, n_embd=1024, vocab_size=4096, block_size=1024)
    model = GPT(config, dtype).to(device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.initial_value(name, parameter, 7, device))
    mesh = init_device_mesh('cuda', (dist.get_world_size(),))
    shard = fsdp_manual.shard if implementation == 'manual' else fsdp.by_torch
    shard(model, model.blocks, mesh, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    losses = []
    for step in range(steps):
        generator = torch.Generator(device).manual_seed(1000 * step + dist.get_rank())
        x, y = torch.randint(0, 4096, (2, 4, 1024), generator=generator, device=device)
        profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) if trace else None
        if profiler and step == steps - 1:
            profiler.start()
        loss, _ = model(x, y)
        (loss / y.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if profiler and step == steps - 1:
            torch.cuda.synchronize()
            profiler.stop()
            profiler.export_chrome_trace(trace)
        losses.append(loss.item() / y.numel())
    return losses


def run_cases(folder):
    """{implementation and dtype: losses}. Each rank leaves the trace of a step in `folder`."""
    torch.cuda.set_device(dist.get_rank())
    losses = {
        f'{implementation} {dtype}': train(implementation, getattr(torch, dtype))
        for implementation in ('torch', 'manual')
        for dtype in ('float32', 'bfloat16')
    }
    train('manual', torch.bfloat16, steps=4, trace=f'{folder}/trace_{dist.get_rank()}.json')
    return losses


@pytest.fixture(scope='module')
def ran(tmp_path_factory):
    """(losses of rank 0, folder with the traces)."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f'needs 2 GPUs, this machine has {torch.cuda.device_count()}')
    folder = tmp_path_factory.mktemp('multigpu')
    ranks = min(4, torch.cuda.device_count())
    return run_function(ranks, run_cases, folder, backend='cpu:gloo,cuda:nccl')[0], folder


@pytest.mark.parametrize('dtype, tolerance', [('float32', 1e-5), ('bfloat16', 2e-3)])
def test_losses_are_those_of_fully_shard(ran, dtype, tolerance):
    results, _ = ran
    for ours, theirs in zip(results[f'manual {dtype}'], results[f'torch {dtype}'], strict=True):
        assert abs(ours - theirs) <= tolerance * theirs


def test_collectives_run_beside_the_computation_in_streams_of_their_own(ran):
    """In the trace of a step, most of the time in NCCL's kernels is covered by kernels of the computation."""
    _, folder = ran
    events = json.loads((folder / 'trace_0.json').read_text())['traceEvents']
    kernels = [event for event in events if event.get('cat') == 'kernel']
    gathers = [event for event in kernels if 'AllGather' in event['name']]
    reductions = [event for event in kernels if 'ReduceScatter' in event['name']]
    compute = [event for event in kernels if 'nccl' not in event['name'].lower()]
    assert len(gathers) >= 11 and len(reductions) >= 6  # 6 blocks: 2n - 1 and n, and the root's
    streams = [{event['tid'] for event in group} for group in (gathers, reductions)]
    main_stream = max({event['tid'] for event in compute}, key=lambda tid: sum(e['tid'] == tid for e in compute))
    assert main_stream not in streams[0] | streams[1] and streams[0].isdisjoint(streams[1])
    for group in (gathers, reductions):
        overlapped = sum(
            any(work['ts'] < event['ts'] + event['dur'] and event['ts'] < work['ts'] + work['dur'] for work in compute)
            for event in group
        )
        assert overlapped >= len(group) / 2
