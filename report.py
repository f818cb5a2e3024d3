"""
What a bug report should say, as text to paste into an issue: versions, hardware, a few checks, and what a run has left.

    python report.py                            # this machine: also where a run never came to begin
    python report.py --out_dir=out/quickstart   # and a run: its keys, its checkpoints and the last lines of its log
    python report.py --help

It changes nothing, needs no package, and says so where one is missing. Your home folder is written as ~, and of the
environment only the variables that decide how ranks find each other and how they compute. Read it before you post it.
"""

import contextlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
from importlib import metadata
from pathlib import Path

from conditions import say_without_effect
from configurator import VERSION, configure
from system.files import ROOT, code_version, meant, read_json


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config:
    out_dir: str | None = None  # a run's folder; None = only what concerns the machine [path]
    lines = 40  # of the end of its train.log [>= 0, if out_dir]


# ----------------------------------------------------------------------------------------------------------------------
config, explicit = configure(Config)
say_without_effect('report.py', config, explicit)

PACKAGES = ('torch', 'numpy', 'triton', 'tiktoken', 'gigatoken', 'transformers', 'tokenizers', 'safetensors')
PACKAGES += ('datasets', 'pyarrow', 'matplotlib', 'wandb', 'tensorboard', 'deepspeed', 'boto3', 'pytest')
# Whole names: what begins like one of them may be a key, as MASTER_KEY is.
VARIABLES = set(
    """
CUDA_DEVICE_MAX_CONNECTIONS CUDA_DEVICE_ORDER CUDA_HOME CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING CUDA_PATH
CUDA_VISIBLE_DEVICES GLOO_SOCKET_IFNAME HF_HOME HF_HUB_OFFLINE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
MKL_NUM_THREADS MKL_THREADING_LAYER NCCL_ALGO NCCL_ASYNC_ERROR_HANDLING NCCL_BLOCKING_WAIT NCCL_BUFFSIZE
NCCL_CROSS_NIC NCCL_CUMEM_ENABLE NCCL_DEBUG NCCL_DEBUG_FILE NCCL_DEBUG_SUBSYS NCCL_IB_DISABLE NCCL_IB_GID_INDEX
NCCL_IB_HCA NCCL_IB_TIMEOUT NCCL_MAX_NCHANNELS NCCL_MIN_NCHANNELS NCCL_NET NCCL_NET_GDR_LEVEL NCCL_NET_PLUGIN
NCCL_NVLS_ENABLE NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_PROTO NCCL_SHM_DISABLE NCCL_SOCKET_IFNAME NCCL_TIMEOUT
NCCL_TOPO_FILE OMP_NUM_THREADS OMP_PLACES OMP_PROC_BIND PET_LOCAL_ADDR PET_MASTER_ADDR PET_MASTER_PORT PET_NNODES
PET_NPROC_PER_NODE PET_RDZV_BACKEND PET_RDZV_ENDPOINT PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF RANK
SLURM_CPUS_PER_TASK SLURM_JOB_NUM_NODES SLURM_NTASKS TORCHDYNAMO_DISABLE TORCHINDUCTOR_CACHE_DIR
TORCHINDUCTOR_COMPILE_THREADS TORCH_CPP_LOG_LEVEL TORCH_CUDA_ARCH_LIST TORCH_DISTRIBUTED_DEBUG
TORCH_DISABLE_SHARE_RDZV_TCP_STORE TORCH_HOME TORCH_LOGS TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_BLOCKING_WAIT
TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_ENABLE_MONITORING TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_TRACE_BUFFER_SIZE
WORLD_SIZE
""".split()
)


def without_home(text):
    return text.replace(str(Path.home()), '~') if len(str(Path.home())) > 1 else text


def say(text=''):
    try:
        print(without_home(text), flush=True)
    except BrokenPipeError:  # `| head` has seen enough
        os._exit(0)
    except OSError as error:  # not system.errors, which imports torch
        print(f'error: stdout: {error}', file=sys.stderr, flush=True)
        os._exit(1)  # sys.exit() would write once more, and complain


def output_of(*command):
    """What a program prints, or None if there is no such program, or it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()


def check(name, function):
    """Run one check. It returns what is to be said of what works, and raises what does not."""
    try:
        say(f'  ok      {name}: {function()}')
    except Exception as error:
        reason = ' '.join(traceback.format_exception_only(error)[-1].split())
        say(f'  FAILED  {name}: {reason}')


# --- THE MACHINE ------------------------------------------------------------------------------------------------------


def versions():
    say(f'version {VERSION}, {code_version(Path(ROOT))} (-dirty: with changes that are not committed)')
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    say(f'python {platform.python_version()}, ' + ', '.join(f'{name} {version}' for name, version in found.items()))
    say('not installed: ' + (', '.join(name for name in PACKAGES if name not in found) or 'none of what can be used'))


def hardware():
    say(f'system  {platform.platform()}')
    model = output_of('sh', '-c', "grep -m1 'model name' /proc/cpuinfo | cut -d: -f2") or platform.machine()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    say(f'CPU     {model.strip()}, {os.cpu_count()} cores, of which this process may use {usable}')
    with contextlib.suppress(OSError, ValueError):
        say(f'memory  {os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9:.1f} GB')
    gpus = output_of('nvidia-smi', '--query-gpu=name,memory.total,driver_version', '--format=csv,noheader')
    for line in (gpus or 'none that nvidia-smi sees').splitlines():
        say(f'GPU     {line}')
    if gpus:
        say(output_of('nvidia-smi', 'topo', '-m') or 'nvidia-smi topo says nothing')
    for name, value in sorted(os.environ.items()):
        if name in VARIABLES:
            say(f'  {name}={value}')


# --- CHECKS -----------------------------------------------------------------------------------------------------------


def torch_computes():
    import torch

    nccl = '.'.join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else 'not there'
    devices = [torch.device('cuda', index) for index in range(torch.cuda.device_count())] or [torch.device('cpu')]
    for device in devices:
        ones = torch.ones(256, 256, dtype=torch.bfloat16, device=device)
        if (ones @ ones).sum().item() != 256**3:
            raise ArithmeticError(f'a product of ones on {device} is wrong')
    return (
        f'CUDA {torch.version.cuda or "not built in"}, NCCL {nccl}; a matmul is right on {", ".join(map(str, devices))}'
    )


def own_name_has_an_address():
    """As gloo looks it up, if no GLOO_SOCKET_IFNAME says another way."""
    return f'{socket.gethostbyname(socket.gethostname())}'


def two_processes_meet():
    """An all-reduce of two processes over gloo, as `torchrun --nproc_per_node=2` starts them."""
    program = (
        'import torch, torch.distributed as dist; dist.init_process_group("gloo"); one = torch.ones(1); '
        'dist.all_reduce(one); assert one.item() == 2; dist.destroy_process_group()'
    )
    with tempfile.NamedTemporaryFile('w', suffix='.py') as file:  # of a name that nobody can have taken before
        file.write(program)
        file.flush()
        command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', file.name]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if answer.returncode:
        lines = [line for line in answer.stderr.splitlines() if 'Error' in line]
        raise ConnectionError(lines[-1] if lines else answer.stderr[-300:])
    return 'their all-reduce over gloo adds up'


def compiler():
    found = [name for name in (os.environ.get('CXX', 'g++'), os.environ.get('CC', 'gcc')) if shutil.which(name)]
    if not found:
        raise FileNotFoundError('neither g++ nor gcc is found, so compile=True falls back to eager')
    return ' and '.join(found)


def room_on_disk():
    folders = [config.out_dir or 'out', 'data', tempfile.gettempdir(), '/dev/shm']
    there = [folder for folder in folders if os.path.isdir(folder)]
    return ', '.join(f'{folder} {shutil.disk_usage(folder).free / 1e9:.1f} GB free' for folder in there)


# --- A RUN ------------------------------------------------------------------------------------------------------------


def newest_checkpoint():
    """Its step, after every file was compared with the checksum of the manifest."""
    from runtime import checkpoint

    complaints = []
    path = checkpoint.choose_to_read(config.out_dir, say=lambda line: complaints.append(line))
    return '; '.join([path, *complaints])


def run_left():
    folder = Path(config.out_dir)
    if not folder.is_dir():
        say(f'run     {folder}: {meant(folder) or "there is no such folder"}')
        return
    with contextlib.suppress(OSError, ValueError):
        about = read_json(folder / 'config.json', {'config': dict})
        keys = ' '.join(f'{key}={value!r}' for key, value in about.pop('config').items())
        say(f'run     {folder}: {json.dumps(about)}')
        say(keys)
    check('newest checkpoint', newest_checkpoint)
    log = folder / 'train.log'
    if not log.is_file():
        say(f'{log}: there is no such file: the run has not come as far as its first line')
        return
    lines = log.read_text(encoding='utf-8', errors='replace').splitlines()
    last = next((number for number in range(len(lines) - 1, -1, -1) if ' command: ' in lines[number]), 0)
    say(f'the last {config.lines} lines of {log}, and how its last start began:')
    shown = sorted({*range(last, min(last + 4, len(lines))), *range(max(0, len(lines) - config.lines), len(lines))})
    for number in shown:
        say(f'  {lines[number]}')


if __name__ == '__main__':
    say('```')
    versions()
    say()
    hardware()
    say()
    say('checks')
    check('torch', torch_computes)
    check("this machine's name", own_name_has_an_address)
    check('two processes', two_processes_meet)
    check('C and C++ compiler', compiler)
    check('disk', room_on_disk)
    if config.out_dir is not None:
        say()
        run_left()
    say('```')
