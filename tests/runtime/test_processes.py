"""What a run finds out before it starts (its device, a compiler, the network), and one line if that cannot work."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from launch import REPO, TINY_MODEL, TINY_RUN, environment, run_function, run_script
from outputs import column

import deepspeed_engine
from runtime import begin, processes


@pytest.mark.parametrize('name', ['SLURM_STEP_NUM_TASKS', 'OMPI_COMM_WORLD_SIZE', 'PMI_SIZE'])
def test_copies_of_a_script_that_do_not_know_of_each_other_are_refused(name, monkeypatch):
    for variable in processes.TORCHRUN_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, '1')
    assert processes.ranks_from_environment() == (0, 0, 1)
    monkeypatch.setenv(name, '4')
    with pytest.raises(ValueError, match=f'4 copies .*{name}=4.*`torchrun --nproc_per_node'):
        processes.ranks_from_environment()
    for number, variable in enumerate(processes.TORCHRUN_VARIABLES):  # of one torchrun per node, under srun
        monkeypatch.setenv(variable, str(number))
    assert processes.ranks_from_environment() == (0, 1, 2)


def test_long_work_says_on_rank_0_how_far_it_is(monkeypatch, capsys):
    sizes = {'large': 3 * 10**9, 'none': 0, 'small': 10**8}
    monkeypatch.setattr(processes, 'LINE_EVERY_S', 0)
    for rank, lines in (('0', ['3.0 of 3.1 GB', '3.0 of 3.1 GB', '3.1 of 3.1 GB']), ('1', [])):
        monkeypatch.setenv('RANK', rank)
        assert list(processes.progress('loading it', sizes)) == list(sizes)
        shown = capsys.readouterr().out.splitlines()
        assert [re.fullmatch(r'\d\d:\d\d:\d\d loading it: (.*)', line)[1] for line in shown] == lines


def test_a_terminal_shows_a_bar(monkeypatch):
    monkeypatch.setattr(processes, 'BAR_AFTER_S', 0)
    terminal, its_end = pty.openpty()
    os.set_blocking(terminal, False)
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack('4H', 24, 120, 0, 0))  # a bar wants columns
    with open(its_end, 'w') as stderr:
        monkeypatch.setattr(sys, 'stderr', stderr)
        assert list(processes.progress('loading it', {'large': 3 * 10**9, 'small': 10**9})) == ['large', 'small']
        shown = os.read(terminal, 1 << 16).decode()
    assert re.match(r'\rloading it: +0%\| *\| 0.00/4.00G ', shown), shown


def test_two_ranks_on_one_gpu_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    assert processes.choose_device('cuda:1', local_rank=0) == torch.device('cuda:1')
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '2')
    with pytest.raises(ValueError, match='device=cuda:1 .*2 ranks .*--device=cuda '):
        processes.choose_device('cuda:1', local_rank=1)
    assert processes.choose_device('cuda', local_rank=1) == torch.device('cuda:1')


def test_a_device_that_there_is_not_is_refused():
    for device in ('gpu', 'cuda:one', 'mps'):
        with pytest.raises(ValueError, match=f"device={device}: expected 'auto', 'cpu', 'cuda' or 'cuda:N'"):
            processes.choose_device(device, local_rank=0)


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    with pytest.raises(ValueError, match='GPU 2 .*local rank 2.* 2: .*--nproc_per_node='):
        processes.choose_device('cuda', local_rank=2)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 0)
    with pytest.raises(ValueError, match=' 0: .*--nproc_per_node=1 .*--device=cpu'):
        processes.choose_device('cuda', local_rank=0)


def test_a_driver_too_old_for_torch_does_not_mean_training_on_the_cpu(monkeypatch):
    def init():
        raise RuntimeError('The NVIDIA driver on your system is too old (found version 11040). Please update ...')

    monkeypatch.setattr(torch.version, 'cuda', '13.2')
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert processes.choose_device('auto', local_rank=0) == torch.device('cpu')  # as it is here: there is no driver
    monkeypatch.setattr(torch.cuda, 'init', init)
    for device in ('auto', 'cuda'):
        with pytest.raises(ValueError, match='CUDA 13.2.* driver .*--device=cpu'):
            processes.choose_device(device, local_rank=0)
    assert processes.choose_device('cpu', local_rank=0) == torch.device('cpu')


def test_bfloat16_is_refused_on_a_gpu_without_it_and_auto_does_not_choose_it(monkeypatch):
    cuda = torch.device('cuda', 0)
    assert processes.choose_dtype('auto', cuda) == torch.bfloat16  # for planning without a GPU
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda including_emulation: including_emulation)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'Tesla V100')
    assert processes.choose_dtype('auto', cuda) == torch.float32
    assert processes.choose_dtype('float16', cuda) == torch.float16
    with pytest.raises(ValueError, match='Tesla V100 .*bfloat16: .*--dtype=float16'):
        processes.choose_dtype('bfloat16', cuda)


def wait_for_rank_0(folder, patience_s):
    """What each rank gets, or its error, if rank 0 takes longer for an answer than the process group waits."""
    store = dist.FileStore(f'{folder}/short_{patience_s}', 2)
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group('gloo', store=store, rank=rank, world_size=2, timeout=timedelta(seconds=1))
    try:
        return processes.on_rank_0(lambda: time.sleep(3) or 'read', patience_s=patience_s)
    except RuntimeError as error:
        return str(error)


def test_ranks_wait_longer_for_what_rank_0_reads_than_for_a_collective(tmp_path):
    assert run_function(2, wait_for_rank_0, tmp_path, 60) == ['read', 'read']
    assert 'imed out' in run_function(2, wait_for_rank_0, tmp_path, None)[1]


def errors_of_rank_0():
    """What on_rank_0() raises on this rank, for each error on rank 0."""

    class NotToBeCopied(OSError):
        def __init__(self, first, second):
            super().__init__(f'{first} {second}')

    def fail(error):
        raise error

    found = []
    for error in (
        ValueError('a key'),
        PermissionError(13, 'a file'),
        NotToBeCopied('of a', 'library'),
        KeyError('bug'),
    ):
        with pytest.raises(Exception) as raised:
            processes.on_rank_0(fail, error)
        found.append((type(raised.value).__name__, str(raised.value)))
    return found


def test_whatever_ends_rank_0_is_raised_on_all_ranks():
    """Otherwise the others would wait for its answer until they time out."""
    first, second = run_function(2, errors_of_rank_0)
    assert first == [
        ('ValueError', 'a key'),
        ('PermissionError', '[Errno 13] a file'),
        ('NotToBeCopied', 'of a library'),
        ('KeyError', "'bug'"),
    ]
    assert second[:2] == first[:2] and second[2] == ('OSError', 'of a library')
    assert second[3] == ('RuntimeError', "rank 0 has stopped: KeyError: 'bug'")


def test_the_allocators_settings_are_those_that_this_torch_knows_and_the_users_win(monkeypatch):
    monkeypatch.delenv('PYTORCH_ALLOC_CONF', raising=False)
    monkeypatch.setenv('PYTORCH_CUDA_ALLOC_CONF', 'max_split_size_mb:128')
    processes.configure_allocator()
    assert 'PYTORCH_ALLOC_CONF' not in os.environ
    monkeypatch.delenv('PYTORCH_CUDA_ALLOC_CONF')
    processes.configure_allocator()
    torch._C._accelerator_setAllocatorSettings(os.environ['PYTORCH_ALLOC_CONF'])  # raises for a name it does not know
    assert 'expandable_segments:True' in os.environ['PYTORCH_ALLOC_CONF']


RECORD = """
import json, sys, torch, torch.distributed as dist
from runtime import health
health.record_flights(sys.argv[1])
dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
for _ in range(3):
    dist.all_reduce(torch.ones(1))
print(len(json.loads(torch._C._distributed_c10d._dump_fr_trace_json())['entries']))
"""


@pytest.mark.parametrize('given, recorded', [({}, 3), ({'TORCH_FR_BUFFER_SIZE': '2'}, 2)])
def test_collectives_are_recorded_under_names_that_this_torch_does_not_call_deprecated(tmp_path, given, recorded):
    """Over gloo, which keeps the same record as NCCL."""
    env = {name: value for name, value in environment().items() if not name.startswith(('TORCH_FR', 'TORCH_NCCL'))}
    command = [sys.executable, '-c', RECORD, str(tmp_path)]
    result = subprocess.run(command, cwd=REPO, env=env | given, capture_output=True, text=True)
    assert result.stdout == f'{recorded}\n' and 'deprecated' not in result.stderr, result.stderr


def test_the_interface_to_a_host_is_that_of_the_route():
    assert processes.interface_to('127.0.0.1') == 'lo'
    assert processes.interface_to('no-such-host.invalid') is None


def test_on_several_machines_gloo_takes_that_interface_unless_the_user_chose_one(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, 'interface_to', lambda host: {'10.0.0.1': 'ib0'}[host])
    monkeypatch.setattr(torch.distributed, 'init_process_group', lambda *_, **__: None)
    config = SimpleNamespace(out_dir=tmp_path, timeout_s=60)
    for name, value in {'RANK': '0', 'WORLD_SIZE': '4', 'LOCAL_WORLD_SIZE': '2', 'MASTER_ADDR': '10.0.0.1'}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv('GLOO_SOCKET_IFNAME', 'eth1')
    begin.make_process_group(config, torch.device('cpu'))
    assert os.environ['GLOO_SOCKET_IFNAME'] == 'eth1'
    monkeypatch.delenv('GLOO_SOCKET_IFNAME')
    begin.make_process_group(config, torch.device('cpu'))
    assert os.environ['GLOO_SOCKET_IFNAME'] == 'ib0'
    monkeypatch.delenv('GLOO_SOCKET_IFNAME')
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '4')  # one machine
    begin.make_process_group(config, torch.device('cpu'))
    assert 'GLOO_SOCKET_IFNAME' not in os.environ


def test_the_ranks_of_gpus_meet_by_nccl_each_on_its_own_and_by_gloo_on_the_host(monkeypatch):
    devices, joined = [], []
    monkeypatch.delenv('RANK', raising=False)
    monkeypatch.setattr(torch.cuda, 'set_device', devices.append)
    monkeypatch.setattr(torch.distributed, 'init_process_group', lambda *given, **_: joined.append((*given, *devices)))
    begin.join_ranks(60, torch.device('cpu'))
    begin.join_ranks(60, torch.device('cuda', 1))
    assert joined == [('gloo',), ('cpu:gloo,cuda:nccl', torch.device('cuda', 1))]


def test_tf32_and_deterministic_set_what_they_say(monkeypatch):
    monkeypatch.setattr(processes, 'end_with_parent', lambda: None)
    config = SimpleNamespace(eval_only=True, device='cpu', dry_run=False, dtype='float32', compile=False)
    filling = torch.utils.deterministic.fill_uninitialized_memory
    try:
        for on in (True, False):
            torch.utils.deterministic.fill_uninitialized_memory = True
            torch.use_deterministic_algorithms(False)
            config.tf32 = config.deterministic = on
            begin.start_process(config)
            assert torch.backends.cuda.matmul.allow_tf32 == torch.are_deterministic_algorithms_enabled() == on
            assert torch.utils.deterministic.fill_uninitialized_memory != on  # it would write every new tensor twice
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filling
        torch.use_deterministic_algorithms(False)


def test_a_run_without_a_compiler_says_so_and_goes_on(data_dir, tmp_path):
    keys = [*TINY_MODEL, *TINY_RUN, '--dataset=tiny', f'--data_dir={data_dir}', f'--out_dir={tmp_path}']
    result = run_script('train_ddp.py', *keys, '--compile', '--max_iters=2', CXX='no-such-compiler')
    assert 'no C compiler' in result.stdout and column(tmp_path, 'step') == [1, 2]


@pytest.mark.parametrize(
    'strategy, optimizer, dtype, cpu_offload, needs_cxx',
    [
        ('fsdp', 'adana', 'float32', 'none', False),
        ('fsdp', 'adana', 'float32', 'optimizer', False),  # its moments travel to the GPU, which updates
        ('fsdp', 'adana', 'float32', 'params', True),
        ('fsdp', 'adamw', 'float32', 'params', False),  # PyTorch's fused kernel
        ('fsdp', 'adamw', 'int8', 'params', True),
        ('deepspeed', 'adana', 'float32', 'optimizer', True),
    ],
)
def test_an_update_that_is_compiled_for_the_host_needs_a_compiler_for_it(
    monkeypatch, tmp_path, strategy, optimizer, dtype, cpu_offload, needs_cxx
):
    monkeypatch.setenv('CC', sys.executable)  # some program
    monkeypatch.setenv('CXX', 'no-such-compiler')
    config = SimpleNamespace(device='cuda:0', compile=True, optimizer=optimizer, cpu_offload=cpu_offload)
    config.optimizer_dtype = dtype
    run = SimpleNamespace(config=config, strategy=strategy, notes=[])
    begin.fill_compile(run)
    assert config.compile is not needs_cxx and any('CXX' in note for note in run.notes) == needs_cxx
    monkeypatch.setenv('CXX', sys.executable)
    config.compile = True
    begin.fill_compile(run)
    assert config.compile


def test_without_nvcc_deepspeed_is_missing_in_one_line(monkeypatch, tmp_path):
    (tmp_path / 'deepspeed.py').write_text(
        'class MissingCUDAException(Exception): pass\nraise MissingCUDAException("no nvcc")'
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, 'deepspeed', raising=False)
    for name in ('DS_ACCELERATOR', 'LOCAL_RANK'):
        monkeypatch.setenv(name, '0')  # package() sets them
    with pytest.raises(ValueError, match=re.escape('needs the package deepspeed (no nvcc)')):
        deepspeed_engine.package(torch.device('cpu'))


def test_ddp_does_not_split_compiled_blocks(data_dir, tmp_path):
    (tmp_path / 'wrapper.py').write_text(f"""
import runpy, sys, torch
from torch._dynamo.backends.distributed import DDPOptimizer
def refuse(*_):
    raise AssertionError('dynamo splits a block')
DDPOptimizer.compile_fn = refuse
compile = torch.compile
torch.compile = lambda function: compile(function, backend='eager')
sys.path.insert(0, {str(REPO)!r})
sys.argv[0] = {str(REPO / 'train_ddp.py')!r}
runpy.run_path(sys.argv[0], run_name='__main__')
""")
    keys = [*TINY_MODEL, *TINY_RUN, '--dataset=tiny', f'--data_dir={data_dir}', f'--out_dir={tmp_path / "out"}']
    run_script(tmp_path / 'wrapper.py', *keys, '--compile', '--max_iters=2', nproc=2)
    assert column(tmp_path / 'out', 'step') == [1, 2]
