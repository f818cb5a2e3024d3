"""
The processes of a run: which rank this is, on which device, in which dtype; decisions of rank 0; how a process ends.
"""

import contextlib
import ctypes
import fcntl
import os
import pickle
import shutil
import signal
import socket
import struct
import sys
from datetime import timedelta

PATIENCE_S = 7200  # of ranks that wait while others hash a checkpoint, or rank 0 reads a model: hours for TBs over NFS
# How many copies of a command a launcher has started, where that is not torchrun: srun, Open MPI, MPICH and Intel MPI.
COPIES = {'srun': 'SLURM_STEP_NUM_TASKS', 'mpirun': 'OMPI_COMM_WORLD_SIZE', 'mpiexec': 'PMI_SIZE'}
TORCHRUN_VARIABLES = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')


def ranks_from_environment():
    """(rank, local_rank, world_size) as torchrun set them; (0, 0, 1) when none of its variables is set.

    Raises ValueError when only some are set: a leftover `export RANK=0` would otherwise hang at the rendezvous. And
    where another launcher has started this script several times: each copy would take itself for the whole run.
    """
    missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
    if len(missing) == len(TORCHRUN_VARIABLES):
        for launcher, name in COPIES.items():
            if (copies := os.environ.get(name, '1')) not in ('', '1'):
                script = os.path.basename(sys.argv[0])
                raise ValueError(
                    f'{launcher} has started {copies} copies of this script, each by itself ({name}={copies}): start '
                    f'them with `torchrun --nproc_per_node=N {script} ...`, one torchrun per node, as slurm/generic.sh'
                )
        return 0, 0, 1
    if missing:
        found = ', '.join(f'{name}={os.environ[name]}' for name in TORCHRUN_VARIABLES if name in os.environ)
        raise ValueError(
            f'{found} set in the environment but not {", ".join(missing)}: start with `torchrun --nproc_per_node=N '
            f'{os.path.basename(sys.argv[0])} ...`, or unset them to run as one process'
        )
    return int(os.environ['RANK']), int(os.environ['LOCAL_RANK']), int(os.environ['WORLD_SIZE'])


def local_world_size():
    """Ranks on this node."""
    return int(os.environ.get('LOCAL_WORLD_SIZE', 1))


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
    """Leave the process group and end this process, without the interpreter's own finalization. The caller has closed
    its files.

    2 of 30 finished runs on 2 ranks ended in SIGABRT there, on the rank that does least after its last collective. The
    cause is probably a thread of gloo's that drops a tensor: asking for the GIL then ends it in the middle of C++.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def reshard(model):
    """Have a model that is sharded, by either implementation, free the weights that forward has gathered."""
    for module in model.modules():
        if hasattr(module, 'reshard'):
            module.reshard()


def on_rank_0(decide, *arguments, patience_s=None):
    """
    Call decide(*arguments) on rank 0 and return its result, or raise its error, on every rank (one broadcast).

    patience_s: for how long the others wait; None = as for any collective (timeout_s), too short for rank 0 to read
    many gigabytes.
    """
    import torch
    import torch.distributed as dist

    group = dist.new_group(backend='gloo', timeout=timedelta(seconds=patience_s)) if patience_s else None
    outcome, error = [None, None], None
    if dist.get_rank() == 0:
        try:
            outcome[0] = decide(*arguments)
        except Exception as raised:  # a bug, too: the others would wait for the answer
            error, outcome[1] = raised, for_other_ranks(raised)
    dist.broadcast_object_list(outcome, group=group, device=torch.device('cpu'))
    if group is not None:
        dist.destroy_process_group(group)
    if outcome[1] is not None:
        raise error or outcome[1]
    return outcome[0]


def for_other_ranks(error):
    """A user's mistake as it is, if it can travel; of anything else its name, for the traceback is on rank 0."""
    if isinstance(error, (ValueError, OSError)):
        with contextlib.suppress(Exception):  # some classes of libraries cannot be made again from what pickle keeps
            return pickle.loads(pickle.dumps(error))
        return (ValueError if isinstance(error, ValueError) else OSError)(str(error))
    return RuntimeError(f'rank 0 has stopped: {type(error).__name__}: {error}')


def ranks_in_words(ranks):
    return f'rank {ranks[0]}' if len(ranks) == 1 else f'ranks {", ".join(map(str, ranks))}'


def choose_device(device, local_rank, must_exist=True):
    """torch.device for this rank from the key `device` ('auto', 'cpu', 'cuda', 'cuda:1').

    Raises ValueError when there is no such GPU, more processes on this node than GPUs, or a driver too old for this
    torch, with which it would train on the CPU; not without must_exist.
    """
    import torch

    if device != 'cpu' and must_exist:
        refuse_old_driver()
    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if device == 'cpu':
        return torch.device('cpu')
    kind, _, index = device.partition(':')
    if kind != 'cuda' or not (index == '' or index.isdigit()):
        raise ValueError(f"device={device}: expected 'auto', 'cpu', 'cuda' or 'cuda:N'")
    local_size = local_world_size()
    if index and local_size > 1 and must_exist:
        raise ValueError(f'device={device} puts {local_size} ranks on one GPU: --device=cuda gives each its own')
    gpus = torch.cuda.device_count()
    index = int(index) if index else local_rank
    if index >= gpus and must_exist:
        raise ValueError(
            f'device={device}: GPU {index} asked for (local rank {local_rank}), this node has {gpus}: '
            f'use --nproc_per_node={max(gpus, 1)}' + ('' if gpus else ' and --device=cpu')
        )
    return torch.device('cuda', index)


def refuse_old_driver():
    """Raise ValueError if the NVIDIA driver here is too old for the CUDA that torch was built with."""
    import torch

    if torch.version.cuda and not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:  # also where there is no driver at all
            if 'too old' in str(error):
                raise ValueError(
                    f'torch {torch.__version__} is built for CUDA {torch.version.cuda}, and the NVIDIA driver is too '
                    'old for it: update the driver, install a torch for an older CUDA, or train with --device=cpu'
                ) from None


def choose_dtype(dtype, device):
    """torch dtype of the computation from the key `dtype`; 'auto' is bfloat16 where the device has it in hardware.

    Raises ValueError for bfloat16 on a GPU without it, which would emulate it.
    """
    import torch

    if device.type == 'cuda':  # planning for a GPU that is not here: every one since 2020 has it
        has_bfloat16 = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
        if dtype == 'bfloat16' and not has_bfloat16:
            raise ValueError(f'{torch.cuda.get_device_name(device)} has no bfloat16: --dtype=float16, or float32')
    else:
        has_bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if dtype != 'auto':
        return getattr(torch, dtype)
    return torch.bfloat16 if has_bfloat16 else torch.float32


def has_compiler(device):
    """Whether torch.compile can work: its kernels for CPUs are C++, those for GPUs are launched by code in C."""
    return shutil.which(os.environ.get('CXX', 'g++') if device == 'cpu' else os.environ.get('CC', 'gcc')) is not None


def configure_allocator():
    """For a GPU, unless the user has: segments that grow, so that less memory is lost between tensors, and where torch
    can, page-locked memory that is not rounded up to a power of two, which takes up to twice as much."""
    import torch

    settings = 'expandable_segments:True'
    if torch.torch_version.TorchVersion(torch.__version__) >= (2, 13):
        settings += ',pinned_max_round_threshold_mb:16'
    if 'PYTORCH_CUDA_ALLOC_CONF' not in os.environ:
        os.environ.setdefault('PYTORCH_ALLOC_CONF', settings)  # read when the first tensor is made there


def interface_to(host):
    """Name of the network interface from which this machine reaches `host`; None if that is not known."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # sends nothing: only asks for the route
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                SIOCGIFADDR = 0x8915  # linux/sockios.h
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack('256s', name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def make_deterministic():
    """Bit-equal repetitions: deterministic kernels only; an operation without one raises."""
    import torch

    os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')  # cuBLAS: fixed workspaces, or results vary by stream
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that writes every new tensor twice
    torch.backends.cudnn.benchmark = False
