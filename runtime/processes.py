"""
The processes of a run: which rank this is, on which device, in which dtype; decisions of rank 0; how a process ends.
"""

import ctypes
import os
import signal
import sys

TORCHRUN_VARIABLES = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')


def ranks_from_environment():
    """(rank, local_rank, world_size) as torchrun set them; (0, 0, 1) when none of its variables is set.

    Raises ValueError when only some are set: a leftover `export RANK=0` would otherwise hang at the rendezvous.
    """
    missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
    if len(missing) == len(TORCHRUN_VARIABLES):
        return 0, 0, 1
    if missing:
        found = ', '.join(f'{name}={os.environ[name]}' for name in TORCHRUN_VARIABLES if name in os.environ)
        raise ValueError(
            f'{found} set in the environment but not {", ".join(missing)}: start with `torchrun --nproc_per_node=N '
            f'{os.path.basename(sys.argv[0])} ...`, or unset them to run as one process'
        )
    return int(os.environ['RANK']), int(os.environ['LOCAL_RANK']), int(os.environ['WORLD_SIZE'])


def signal_when_parent_dies(number):
    """Have Linux send this signal to this process."""
    if sys.platform == 'linux':
        PR_SET_PDEATHSIG = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def end_with_parent():
    """Ask Linux to kill this worker when torchrun dies: a killed torchrun would leave its workers on the GPUs."""
    if 'TORCHELASTIC_RUN_ID' in os.environ and sys.platform == 'linux':
        signal_when_parent_dies(signal.SIGKILL)
        if os.getppid() == 1:  # it died before, or it is the first process of a container
            with open('/proc/1/cmdline', 'rb') as file:
                if b'torch' not in file.read():
                    os._exit(1)


def leave(code=0):
    """Leave the process group and end this process, without the interpreter's own finalization. All else is closed.

    2 of 30 finished runs on 2 ranks ended in SIGABRT there, on the rank that does least after its last collective. The
    cause is probably a thread of gloo's that drops a tensor: asking for the GIL then ends it in the middle of C++.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def set_timeouts(mesh, seconds):
    """Have collectives along every dimension of a DeviceMesh time out: its groups would wait for half an hour."""
    from datetime import timedelta

    from torch.distributed.distributed_c10d import _set_pg_timeout

    for group in mesh.get_all_groups():
        _set_pg_timeout(timedelta(seconds=seconds), group)


def on_rank_0(decide, *arguments):
    """Call decide(*arguments) on rank 0 and return its result, or raise its error, on every rank (one broadcast)."""
    import torch
    import torch.distributed as dist

    outcome = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = decide(*arguments)
        except (ValueError, OSError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, device=torch.device('cpu'))
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def ranks_in_words(ranks):
    return f'rank {ranks[0]}' if len(ranks) == 1 else f'ranks {", ".join(map(str, ranks))}'


def choose_device(device, local_rank, must_exist=True):
    """torch.device for this rank from the key `device` ('auto', 'cpu', 'cuda', 'cuda:1').

    Raises ValueError when there is no such GPU, or more processes on this node than GPUs; not without must_exist.
    """
    import torch

    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if device == 'cpu':
        return torch.device('cpu')
    kind, _, index = device.partition(':')
    if kind != 'cuda' or not (index == '' or index.isdigit()):
        raise ValueError(f"device={device}: expected 'auto', 'cpu', 'cuda' or 'cuda:N'")
    gpus = torch.cuda.device_count()
    index = int(index) if index else local_rank
    if index >= gpus and must_exist:
        raise ValueError(
            f'device={device}: GPU {index} asked for (local rank {local_rank}), this node has {gpus}: '
            f'use --nproc_per_node={max(gpus, 1)}' + ('' if gpus else ' and --device=cpu')
        )
    return torch.device('cuda', index)


def choose_dtype(dtype, device):
    """torch dtype of the computation from the key `dtype`; 'auto' is bfloat16 where the device has it in hardware."""
    import torch

    if dtype != 'auto':
        return getattr(torch, dtype)
    if device.type == 'cuda':  # planning for a GPU that is not here: every one since 2020 has it
        has_bfloat16 = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if has_bfloat16 else torch.float32


def make_deterministic():
    """Bit-equal repetitions: deterministic kernels only; an operation without one raises."""
    import torch

    os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')  # cuBLAS: fixed workspaces, or results vary by stream
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
