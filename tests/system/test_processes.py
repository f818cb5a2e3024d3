"""What a run finds out before it starts (its device, a compiler, the network), and one line if that cannot work."""

import fcntl
import importlib
import mmap
import os
import pty
import re
import resource
import struct
import subprocess
import sys
import termios
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launch import REPO, TINY_MODEL, TINY_RUN, environment, fork_script, run_function
from outputs import column

import deepspeed_engine
from runtime import begin, fill
from system import collectives, devices, processes

# What a launcher, a wrapper or an earlier job has left in the environment, and what a script makes of it: (rank, local
# rank, ranks), or what is said. TORCHRUN stands for RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE, with an address.
ENVIRONMENTS = {
    'nothing': ({}, (0, 0, 1)),
    'torchrun': ({'TORCHRUN': '3 3 4 4'}, (3, 3, 4)),
    'one torchrun per node under srun': ({'TORCHRUN': '5 1 8 4', 'SLURM_STEP_NUM_TASKS': '2'}, (5, 1, 8)),
    'an interactive shell of srun --pty': ({'SLURM_STEP_NUM_TASKS': '1', 'SLURM_PROCID': '0'}, (0, 0, 1)),
    'a job without a step': ({'SLURM_JOB_ID': '7', 'SLURM_NTASKS': '4', 'SLURM_PROCID': '0'}, (0, 0, 1)),
    'copies by srun': ({'SLURM_STEP_NUM_TASKS': '4'}, 'srun .*4 copies .*NUM_TASKS=4.*`torchrun .*`unset SLURM_STEP_'),
    'copies by mpirun': ({'OMPI_COMM_WORLD_SIZE': '4'}, 'mpirun .*4 copies .*WORLD_SIZE=4.*`torchrun --nproc_per_node'),
    'copies by mpiexec': ({'PMI_SIZE': '4'}, 'mpiexec .*4 copies .*PMI_SIZE=4.*`torchrun --nproc_per_node'),
    'a rank that was exported once': ({'RANK': '0'}, 'RANK=0 set .* but not LOCAL_RANK, .*unset them'),
    'a wrapper without LOCAL_WORLD_SIZE': (
        {'RANK': '3', 'LOCAL_RANK': '3', 'WORLD_SIZE': '4', 'MASTER_ADDR': 'n1', 'MASTER_PORT': '29500'},
        'RANK=3, LOCAL_RANK=3, .* but not LOCAL_WORLD_SIZE',
    ),
    'a wrapper whose variables were empty': ({'TORCHRUN': '0 0 1 '}, 'LOCAL_WORLD_SIZE=, .* no numbers'),
    'a rank beyond the last': ({'TORCHRUN': '4 0 4 1'}, 'RANK=4, .* contradict'),
    'more ranks on the node than in all': ({'TORCHRUN': '0 0 2 4'}, 'LOCAL_WORLD_SIZE=4, .* contradict'),
}


@pytest.mark.parametrize('case', ENVIRONMENTS)
def test_which_rank_this_is_follows_from_the_environment_or_is_refused(case, monkeypatch):
    given, expected = ENVIRONMENTS[case]
    for variable in (*processes.TORCHRUN_VARIABLES, *processes.COPIES.values()):
        monkeypatch.delenv(variable, raising=False)
    if numbers := given.get('TORCHRUN'):
        values = [*numbers.split(' '), '127.0.0.1', '29500']
        given = given | dict(zip(processes.TORCHRUN_VARIABLES, values, strict=True))
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, tuple):
        assert processes.ranks_from_environment() == expected
    else:
        with pytest.raises(ValueError, match=expected):
            processes.ranks_from_environment()


# (N of device=cuda:N, local rank, ranks on the node, GPUs that the rank sees): the GPU's number, or what is said.
GPUS = {
    'as many as ranks': ((None, 3, 4, 4), 3),
    'more than ranks': ((None, 1, 2, 8), 1),
    'one that was named': ((1, 0, 1, 2), 1),
    'one for each rank, as by srun --gpus-per-task=1': ((None, 3, 4, 1), 0),
    'the same, named': ((0, 3, 4, 1), 0),
    'a torchrun for each rank, of which each sees all GPUs': ((None, 0, 1, 4), 0),  # refuse_shared_gpus() sees it
    'fewer than ranks': ((None, 2, 4, 2), 'local rank 2: GPU 2 .* 2 that .*--nproc_per_node=2'),
    'none': ((None, 0, 1, 0), 'GPU 0 .* 0 that .*--device=cpu'),
    'none for several ranks': ((None, 1, 2, 0), 'GPU 1 .* 0 that .*--device=cpu'),
    'one that there is not': ((3, 0, 1, 2), 'device=cuda:3: GPU 3 .* 2 that .*--device=cuda$'),
    'one for several ranks': ((1, 1, 2, 2), 'device=cuda:1 .*2 ranks .*--device=cuda '),
}


@pytest.mark.parametrize('case', GPUS)
def test_which_gpu_a_rank_takes(case):
    given, expected = GPUS[case]
    if isinstance(expected, int):
        assert devices.gpu_of_rank(*given) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            devices.gpu_of_rank(*given)


def join_with_gpu(ids):
    """What refuse_shared_gpus() says on this rank, whose GPU has the id ids[rank]."""
    properties = SimpleNamespace(uuid=ids[dist.get_rank()])
    with mock.patch.object(torch.cuda, 'get_device_properties', lambda device: properties):
        try:
            devices.refuse_shared_gpus(torch.device('cuda', 0))
        except ValueError as error:
            return str(error)


def test_ranks_that_are_on_the_same_gpu_are_refused_by_all_ranks_and_others_are_not():
    assert run_function(2, join_with_gpu, ['a', 'b']) == [None, None]
    said = run_function(2, join_with_gpu, ['a', 'a'])
    assert said[0] == said[1] and 'ranks 0, 1 are on the same GPU (a): ' in said[0] and '--nproc_per_node=1' in said[0]


def test_long_work_says_on_rank_0_how_far_it_is(monkeypatch, capsys):
    sizes = {'large': 3 * 10**9, 'none': 0, 'small': 10**8}
    monkeypatch.setattr(processes, 'LINE_EVERY_S', 0)
    for rank, lines in (('0', ['3.0 of 3.1 GB', '3.0 of 3.1 GB', '3.1 of 3.1 GB']), ('1', [])):
        monkeypatch.setenv('RANK', rank)
        assert list(processes.progress('loading it', sizes)) == list(sizes)
        shown = capsys.readouterr().out.splitlines()
        assert [re.fullmatch(r'\d\d:\d\d:\d\d loading it: (.*)', line)[1] for line in shown] == lines
    monkeypatch.setenv('RANK', '0')
    assert list(processes.progress('reading', {'a': 2000, 'b': 1}, unit='pairs')) == ['a', 'b']
    assert capsys.readouterr().out.splitlines()[0].endswith(' reading: 2,000 of 2,001 pairs')


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


def test_a_device_that_there_is_not_is_refused():
    for device in ('gpu', 'cuda:one', 'mps'):
        with pytest.raises(ValueError, match=f"device={device}: expected 'auto', 'cpu', 'cuda' or 'cuda:N'"):
            devices.choose_device(device, local_rank=0)


def test_a_rank_asks_for_the_gpu_of_its_place(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '2')
    assert devices.choose_device('cuda', local_rank=1) == torch.device('cuda:1')
    with pytest.raises(ValueError, match='--device=cuda gives each its own'):
        devices.choose_device('cuda:1', local_rank=1)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    assert devices.choose_device('cuda', local_rank=1) == torch.device('cuda:0')
    assert devices.choose_device('cuda', local_rank=1, must_exist=False) == torch.device('cuda:1')  # a plan


FLASH_ATTENTION_3 = """
import torch
library = torch.library.Library('flash_attn_3', 'DEF')
library.define('fwd() -> ()'), library.define('bwd() -> ()')
"""


def test_flash_attention_3_is_used_where_its_package_is_and_a_line_says_if_it_cannot_be(monkeypatch, tmp_path):
    gpu, package = torch.device('cuda', 0), tmp_path / 'flash_attn_interface.py'
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: (9, 0))
    monkeypatch.syspath_prepend(tmp_path)
    assert devices.use_flash_attention_3(gpu) == []
    try:
        for code, said, used in (
            ('raise OSError("no libcudart.so.12")', 'cannot be used with this torch (no libcudart.so.12)', None),
            ('', 'cannot be used with this torch (Module', None),
            (FLASH_ATTENTION_3, 'attention: FlashAttention 3', 'FA3'),
        ):
            package.write_text(code)
            importlib.invalidate_caches()
            monkeypatch.delitem(sys.modules, 'flash_attn_interface', raising=False)
            (line,) = devices.use_flash_attention_3(gpu)
            assert said in line and torch.nn.attention.current_flash_attention_impl() == used
        monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: (8, 0))
        assert devices.use_flash_attention_3(gpu) == []
    finally:
        torch.nn.attention.restore_flash_attention_impl()


def test_a_driver_too_old_for_torch_does_not_mean_training_on_the_cpu(monkeypatch):
    def init():
        raise RuntimeError('The NVIDIA driver on your system is too old (found version 11040). Please update ...')

    monkeypatch.setattr(torch.version, 'cuda', '13.2')
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert devices.choose_device('auto', local_rank=0) == torch.device('cpu')  # as it is here: there is no driver
    monkeypatch.setattr(torch.cuda, 'init', init)
    for device in ('auto', 'cuda'):
        with pytest.raises(ValueError, match='CUDA 13.2.* driver .*--device=cpu'):
            devices.choose_device(device, local_rank=0)
    assert devices.choose_device('cpu', local_rank=0) == torch.device('cpu')


def test_bfloat16_is_refused_on_a_gpu_without_it_and_auto_does_not_choose_it(monkeypatch):
    cuda = torch.device('cuda', 0)
    assert devices.choose_dtype('auto', cuda) == torch.bfloat16  # for planning without a GPU
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda including_emulation: including_emulation)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'Tesla V100')
    assert devices.choose_dtype('auto', cuda) == torch.float32
    assert devices.choose_dtype('float16', cuda) == torch.float16
    with pytest.raises(ValueError, match='Tesla V100 .*bfloat16: .*--dtype=float16'):
        devices.choose_dtype('bfloat16', cuda)


def wait_for_rank_0(folder, patience_s):
    """What each rank gets, or its error, if rank 0 takes longer for an answer than the process group waits."""
    store = dist.FileStore(f'{folder}/short_{patience_s}', 2)
    rank = dist.get_rank()
    dist.barrier()  # a rank that leaves a group before another has joined it takes the connection away
    dist.destroy_process_group()
    dist.init_process_group('gloo', store=store, rank=rank, world_size=2)  # with time for ranks that start late
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    try:
        return collectives.on_rank_0(lambda: time.sleep(3) or 'read', patience_s=patience_s)
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
            collectives.on_rank_0(fail, error)
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
    devices.configure_allocator()
    assert 'PYTORCH_ALLOC_CONF' not in os.environ
    monkeypatch.delenv('PYTORCH_CUDA_ALLOC_CONF')
    devices.configure_allocator()
    torch._C._accelerator_setAllocatorSettings(os.environ['PYTORCH_ALLOC_CONF'])  # raises for a name it does not know
    assert 'expandable_segments:True' in os.environ['PYTORCH_ALLOC_CONF']


def heap_after_blocks(blocks=8, size=2**26):
    """How many pages the system gave this process for one block after another, each freed before the next, and the
    flags of the heap's parts."""
    devices.configure_heap()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(blocks):
        torch.ones(size // 4)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return faults, re.findall(r'\[heap\](?:.*\n)*?VmFlags: (.*)', Path('/proc/self/smaps').read_text())


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='malloc of glibc under Linux')
def test_on_a_cpu_freed_memory_is_used_again_and_may_come_in_large_pages():
    ((faults, flags),) = run_function(1, heap_after_blocks)
    pages = 2**26 // mmap.PAGESIZE  # of one block; fewer faults where the system has large pages to give
    assert faults < 1.5 * pages, f'{faults} for 8 blocks of {pages} pages'
    assert any('hg' in part.split() for part in flags)  # as madvise() leaves it


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
    monkeypatch.setattr(devices, 'interface_to', lambda host: {'10.0.0.1': 'ib0'}[host])
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
    chosen, joined = [], []
    monkeypatch.delenv('RANK', raising=False)
    monkeypatch.setattr(torch.cuda, 'set_device', chosen.append)
    monkeypatch.setattr(torch.distributed, 'init_process_group', lambda *given, **_: joined.append((*given, *chosen)))
    devices.join_ranks(60, torch.device('cpu'))
    devices.join_ranks(60, torch.device('cuda', 1))
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
    (rank,) = fork_script('train_ddp.py', *keys, '--compile', '--max_iters=2', CXX='no-such-compiler')
    assert 'no C compiler' in rank.stdout and column(tmp_path, 'step') == [1, 2]


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
    pretrained = SimpleNamespace(has_lora_of_experts=False)
    run = SimpleNamespace(config=config, strategy=strategy, model_config=None, pretrained=pretrained, notes=[])
    fill.fill_compile(run)
    assert config.compile is not needs_cxx and any('CXX' in note for note in run.notes) == needs_cxx
    monkeypatch.setenv('CXX', sys.executable)
    config.compile = True
    fill.fill_compile(run)
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
    # DeepSpeed takes LOCAL_RANK for the GPU's number: on rank 3 of 4 that see one GPU each, the first.
    for device, local_rank, expected in (('cuda:0', '3', '0'), ('cuda:1', '0', '1'), ('cpu', '3', '3')):
        monkeypatch.setenv('LOCAL_RANK', local_rank)
        with pytest.raises(ValueError):
            deepspeed_engine.package(torch.device(device))
        assert os.environ['LOCAL_RANK'] == expected


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
    fork_script(tmp_path / 'wrapper.py', *keys, '--compile', '--max_iters=2', nproc=2)
    assert column(tmp_path / 'out', 'step') == [1, 2]
