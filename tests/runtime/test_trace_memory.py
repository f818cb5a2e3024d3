"""--trace_memory: when it is written who holds the GPU's memory, and whether PyTorch's own tool reads the file."""

import base64
import inspect
import re
import resource
import shlex
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from model import ModelConfig
from runtime import begin, meter
from system import errors

LINE = {'filename': 'model.py', 'line': 7, 'name': 'forward'}
ALLOCATED = {'action': 'alloc', 'addr': 4096, 'size': 512, 'stream': 0, 'frames': [LINE], 'time_us': 1}
BLOCK = {'address': 4096, 'size': 512, 'requested_size': 500, 'state': 'active_allocated', 'frames': [LINE]}
SEGMENT = {'address': 4096, 'total_size': 2**21, 'stream': 0, 'segment_type': 'small', 'allocated_size': 512}
SEGMENT |= {'active_size': 512, 'segment_pool_id': (0, 0), 'device': 0, 'blocks': [BLOCK]}


@pytest.fixture
def recording(monkeypatch):
    """A GPU's allocator, whose contract is in torch/cuda/memory.py: it takes these arguments and gives such a
    snapshot. Returns what it was told."""
    told = []
    contract = inspect.signature(torch.cuda.memory._record_memory_history)
    monkeypatch.setattr(
        torch.cuda.memory, '_record_memory_history', lambda *a, **k: told.append(contract.bind(*a, **k).arguments)
    )
    snapshot = {'segments': [SEGMENT], 'allocator_settings': {}}
    monkeypatch.setattr(torch.cuda.memory, '_snapshot', lambda **_: snapshot | {'device_traces': [[ALLOCATED]]})
    return told


def test_a_run_that_is_out_of_memory_writes_who_holds_it_and_its_line_is_the_command_that_shows_it(
    recording, tmp_path, capfd, monkeypatch
):
    shape = ModelConfig(vocab_size=64, dropout=0.1)
    keys = dict(dry_run=False, frozen_dtype=None, dtype='bfloat16', optimizer_dtype='float32')
    monkeypatch.setattr(begin, 'make_process_group', lambda *_: recording.append('joined'))
    monkeypatch.setattr(begin, 'find_checkpoint', mock.Mock(side_effect=InterruptedError))  # so that join() ends there
    for device, trace_memory in (('cpu', True), ('cuda', False), ('cuda', True)):
        config = SimpleNamespace(trace_memory=trace_memory, **keys)
        with pytest.raises(InterruptedError):
            begin.Run(config, {}, {}, 'ddp', 1, 2, torch.device(device), None, model_config=shape).join()
    # only when the process has its GPU
    assert recording == ['joined'] * 3 + [{'stacks': 'python', 'max_entries': 100_000}]

    monkeypatch.setenv('RANK', '1')
    errors.report(torch.OutOfMemoryError('CUDA out of memory.'), lambda: meter.write_allocations(tmp_path, rank=1))
    (line,) = capfd.readouterr().err.splitlines()
    command = shlex.split(re.search(r'python (-m torch.cuda._memory_viz .* -o )memory.html', line)[1])
    assert command[3] == str(tmp_path / 'memory_rank1.pickle')
    subprocess.run([sys.executable, *command, tmp_path / 'memory.html'], check=True, timeout=300)
    (shown,) = re.findall(r'"([A-Za-z0-9+/=]{200,})"', (tmp_path / 'memory.html').read_text())
    assert b'model.py' in base64.b64decode(shown)

    unwritable = meter.write_allocations(tmp_path / 'gone', rank=0)
    assert re.fullmatch(
        'who held memory could not be written to .*gone/memory_rank0.pickle: No such file.*', unwritable
    )


@pytest.mark.parametrize('trace_memory', [True, False])
def test_it_is_written_behind_the_traced_step(recording, tmp_path, trace_memory):
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    try:
        said, found = [], []
        watched = meter.Meter(
            torch.device('cpu'), 1, tokens_per_step=1, flops_per_token=1, trace_step=2, out_dir=tmp_path,
            trace_memory=trace_memory, say=said.append,
        )  # fmt: skip
        for _ in range(3):
            watched.begin_step()
            watched.mark('update')
            watched.end_step()
            found.append((tmp_path / 'memory_rank0.pickle').exists())
        assert found == [False, trace_memory, trace_memory]
        files = [tmp_path / 'trace_rank0.json', tmp_path / 'memory_rank0.pickle'][: 1 + trace_memory]
        assert [str(file) in line for file, line in zip(files, said, strict=True)] == [True] * len(files)
    finally:
        dist.destroy_process_group()


def test_a_trace_that_cannot_be_written_is_said_and_ends_no_run(tmp_path):
    def line_of(folder):
        with torch.autograd.profiler.profile(use_kineto=True) as profiler:
            for _ in range(100):
                torch.ones(3).sum()
        return meter.write_trace(profiler, folder, rank=0)

    assert (
        line_of(tmp_path)
        == f'trace: drop {tmp_path}/trace_rank0.json on ui.perfetto.dev, or open it in chrome://tracing'
    )
    missing = (
        f'the trace could not be written to {tmp_path}/gone/trace_rank0.json: is there room for it, and may you write'
    )
    assert line_of(tmp_path / 'gone').startswith(missing)
    (tmp_path / 'full').mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[0][1]))  # as if the disk were full behind 4096 bytes
    try:
        assert line_of(tmp_path / 'full').startswith(missing.replace('gone', 'full'))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[0])
        signal.signal(signal.SIGXFSZ, before[1])
