"""
The processes of a run: finding out the rank, choosing the device and the dtype, sharing decisions of rank 0, ending.
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
import time
from datetime import timedelta

PATIENCE_S = 7200  # for ranks that wait while others hash a checkpoint or rank 0 reads a model: TBs over NFS take hours
BAR_AFTER_S, LINE_EVERY_S = 3, 10  # see progress()
# Variables in which launchers other than torchrun say how many copies of a command they have started: srun, Open MPI,
# MPICH and Intel MPI.
COPIES = {'srun': 'SLURM_STEP_NUM_TASKS', 'mpirun': 'OMPI_COMM_WORLD_SIZE', 'mpiexec': 'PMI_SIZE'}
TORCHRUN_VARIABLES = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')


def ranks_from_environment():
    """(rank, local_rank, world_size) as torchrun has set them; (0, 0, 1) if none of its variables is set.

    Raises ValueError if only some are set, because a leftover `export RANK=0` would hang at the rendezvous. Also raises
    it if another launcher has started several copies of this script, since each would take itself for the whole run.
    """
    script = os.path.basename(sys.argv[0])
    missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
    if len(missing) == len(TORCHRUN_VARIABLES):
        for launcher, name in COPIES.items():
            if (copies := os.environ.get(name, '1')) not in ('', '1'):
                raise ValueError(
                    f'{launcher} has started {copies} copies of this script, each by itself ({name}={copies}): start '
                    f'them with `torchrun --nproc_per_node=N {script} ...`, one torchrun per node, as '
                    f'slurm/generic.sh, or `unset {name}` if this is the only one'
                )
        return 0, 0, 1
    set_ones = {name: os.environ[name] for name in TORCHRUN_VARIABLES if name in os.environ}
    found = ', '.join(f'{name}={value}' for name, value in set_ones.items())
    advice = f'start with `torchrun --nproc_per_node=N {script} ...`, or unset them to run as one process'
    if missing:
        raise ValueError(f'{found} set in the environment but not {", ".join(missing)}: {advice}')
    numbers = [set_ones[name] for name in TORCHRUN_VARIABLES[:4]]
    if not all(number.isdigit() for number in numbers):
        raise ValueError(f'{found} set in the environment, of which the first four are no numbers: {advice}')
    rank, local_rank, world_size, local_size = map(int, numbers)
    if not (rank < world_size and local_rank < local_size <= world_size):
        raise ValueError(f'{found} set in the environment, which contradict each other: {advice}')
    return rank, local_rank, world_size


def local_world_size():
    """Ranks on this node."""
    return int(os.environ.get('LOCAL_WORLD_SIZE', 1))


def signal_when_parent_dies(number):
    """Have Linux send this signal to this process when its parent dies."""
    if sys.platform == 'linux':
        PR_SET_PDEATHSIG = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def end_with_parent():
    """Have Linux kill this worker when torchrun dies; otherwise a killed torchrun leaves its workers on the GPUs."""
    if 'TORCHELASTIC_RUN_ID' in os.environ and sys.platform == 'linux':
        signal_when_parent_dies(signal.SIGKILL)
        if os.getppid() == 1:  # torchrun has died already, or is itself the first process of a container
            with open('/proc/1/cmdline', 'rb') as file:
                if b'torch' not in file.read():
                    os._exit(1)


def leave(code=0):
    """Leave the process group and end this process, without the interpreter's finalization. The caller must have closed
    its files.

    In that finalization, 2 of 30 finished runs on 2 ranks ended with SIGABRT, on the rank that does least after its
    last collective. Probably one of gloo's threads drops a tensor there: it asks for the GIL, and the finalizing
    interpreter ends the thread in the middle of C++.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def reshard(model):
    """Free the weights that a forward pass has gathered, in a model sharded by either implementation of FSDP."""
    for module in model.modules():
        if hasattr(module, 'reshard'):
            module.reshard()


def on_rank_0(decide, *arguments, patience_s=None):
    """
    Call decide(*arguments) on rank 0 and return its result, or raise its error, on every rank (one broadcast).

    patience_s: how long the other ranks wait; None = timeout_s, as for any collective, which is too short if rank 0
    reads many gigabytes.
    """
    import torch
    import torch.distributed as dist

    group = dist.new_group(backend='gloo', timeout=timedelta(seconds=patience_s)) if patience_s else None
    outcome, error = [None, None], None
    if dist.get_rank() == 0:
        try:
            outcome[0] = decide(*arguments)
        except Exception as raised:  # bugs as well, since the other ranks are waiting for an answer
            error, outcome[1] = raised, for_other_ranks(raised)
    dist.broadcast_object_list(outcome, group=group, device=torch.device('cpu'))
    if group is not None:
        dist.destroy_process_group(group)
    if outcome[1] is not None:
        raise error or outcome[1]
    return outcome[0]


def raise_together(problem):
    """Raise ValueError(problem) on every rank if any rank has one, the first one's; None = none. Collective, unless
    there is no process group."""
    import torch.distributed as dist

    problems = [problem]
    if dist.is_initialized():
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    for found in filter(None, problems):
        raise ValueError(found)


def progress(what, sizes):
    """
    Iterate over the keys of `sizes`, {key: bytes}, and show on rank 0 how many of the bytes are done: on a terminal by
    a bar, elsewhere, as in the log of a Slurm job, by a line now and then. Short work shows nothing.
    """
    from tqdm import tqdm

    is_shown = os.environ.get('RANK', '0') == '0'
    total, done, said = sum(sizes.values()), 0, time.monotonic()
    options = {'unit': 'B', 'unit_scale': True, 'delay': BAR_AFTER_S, 'leave': False}
    with tqdm(desc=what, total=total, disable=None if is_shown else True, **options) as bar:
        for key, size in sizes.items():
            yield key
            done += size
            bar.update(size)
            if is_shown and bar.disable and time.monotonic() - said >= LINE_EVERY_S:
                said = time.monotonic()
                print(f'{time.strftime("%H:%M:%S")} {what}: {done / 1e9:.1f} of {total / 1e9:.1f} GB', flush=True)


def for_other_ranks(error):
    """The error to raise on other ranks: a user's mistake itself, if it can be pickled; for a bug only its name and
    message, since rank 0 prints the traceback."""
    if isinstance(error, (ValueError, OSError)):
        with contextlib.suppress(Exception):  # some libraries' errors cannot be unpickled
            return pickle.loads(pickle.dumps(error))
        return (ValueError if isinstance(error, ValueError) else OSError)(str(error))
    return RuntimeError(f'rank 0 has stopped: {type(error).__name__}: {error}')


def ranks_in_words(ranks):
    return f'rank {ranks[0]}' if len(ranks) == 1 else f'ranks {", ".join(map(str, ranks))}'


def choose_device(device, local_rank, must_exist=True):
    """torch.device for this rank from the key `device` ('auto', 'cpu', 'cuda', 'cuda:1').

    With must_exist, raises ValueError if there is no such GPU, if this node runs more processes than it has GPUs, or if
    the driver is too old for this torch, since 'auto' would then silently train on the CPU.
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
    if not must_exist:
        return torch.device('cuda', int(index) if index else local_rank)
    asked = int(index) if index else None
    return torch.device('cuda', gpu_of_rank(asked, local_rank, local_world_size(), torch.cuda.device_count()))


def gpu_of_rank(asked, local_rank, local_size, gpus):
    """
    The number of a rank's GPU among the `gpus` that it sees. asked: the N of device=cuda:N, or None.

    If there is one, several ranks of a node may each see their own, as `srun --gpus-per-task=1` and wrappers that set
    CUDA_VISIBLE_DEVICES for each rank arrange it. refuse_shared_gpus() finds out whether it is the same one.
    Raises ValueError if there is no such GPU, or if some rank of this node has none.
    """
    if local_size > 1 and gpus == 1:
        local_rank = 0
    elif local_size > 1 and asked is not None:
        raise ValueError(f'device=cuda:{asked} puts {local_size} ranks on one GPU: --device=cuda gives each its own')
    number = local_rank if asked is None else asked
    if number >= gpus:
        given = f'local rank {local_rank}' if asked is None else f'device=cuda:{asked}'
        advice = '--device=cpu' if gpus == 0 else f'--nproc_per_node={gpus}' if asked is None else '--device=cuda'
        raise ValueError(f'{given}: GPU {number} asked for, of the {gpus} that this process sees: use {advice}')
    return number


def refuse_shared_gpus(device):
    """Raise ValueError on every rank if two ranks are on one GPU. NCCL would find that out only later, in its own
    words. Collective, over the whole process group."""
    import torch
    import torch.distributed as dist

    ids = [None] * dist.get_world_size()
    dist.all_gather_object(ids, str(torch.cuda.get_device_properties(device).uuid))
    for one in ids:
        if ids.count(one) > 1:
            sharing = ranks_in_words([rank for rank, other in enumerate(ids) if other == one])
            raise ValueError(
                f'{sharing} are on the same GPU ({one}): start as many ranks on a node as it has GPUs '
                f'(--nproc_per_node={len({*ids})} on a single node), or let each see one of its own'
            )


def refuse_old_driver():
    """Raise ValueError if the NVIDIA driver here is too old for the CUDA that torch was built with."""
    import torch

    if torch.version.cuda and not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:  # also raised if there is no driver at all
            if 'too old' in str(error):
                raise ValueError(
                    f'torch {torch.__version__} is built for CUDA {torch.version.cuda}, and the NVIDIA driver is too '
                    'old for it: update the driver, install a torch for an older CUDA, or train with --device=cpu'
                ) from None


def choose_dtype(dtype, device):
    """torch dtype of the computation from the key `dtype`; 'auto' is bfloat16 if the device has it in hardware,
    otherwise float32.

    Raises ValueError for bfloat16 on a GPU that would only emulate it.
    """
    import torch

    if device.type == 'cuda':  # if planning for a GPU that is not here, assume bfloat16: every one since 2020 has it
        has_bfloat16 = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
        if dtype == 'bfloat16' and not has_bfloat16:
            raise ValueError(f'{torch.cuda.get_device_name(device)} has no bfloat16: --dtype=float16, or float32')
    else:
        has_bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if dtype != 'auto':
        return getattr(torch, dtype)
    return torch.bfloat16 if has_bfloat16 else torch.float32


def has_compiler(device):
    """Whether torch.compile finds the compiler it needs: its CPU kernels are C++, and its GPU kernels are launched by
    code in C."""
    return shutil.which(os.environ.get('CXX', 'g++') if device == 'cpu' else os.environ.get('CC', 'gcc')) is not None


def configure_allocator():
    """Configure the GPU's memory allocator, unless the user has: segments that can grow, so that fragmentation wastes
    less memory. If torch supports it, also page-locked memory without rounding up to a power of two, which takes up to
    twice as much."""
    import torch

    settings = 'expandable_segments:True'
    if torch.torch_version.TorchVersion(torch.__version__) >= (2, 13):
        settings += ',pinned_max_round_threshold_mb:16'
    if 'PYTORCH_CUDA_ALLOC_CONF' not in os.environ:
        os.environ.setdefault('PYTORCH_ALLOC_CONF', settings)  # torch reads it when the first GPU tensor is made


def interface_to(host):
    """Name of the network interface from which this machine reaches `host`; None if that is not known."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # sends nothing: only asks for the route
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # this interface has no address
                SIOCGIFADDR = 0x8915  # linux/sockios.h
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack('256s', name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def make_deterministic():
    """Make repeated runs bit-equal: allow only deterministic kernels. An operation without such a kernel raises."""
    import torch

    os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')  # cuBLAS: fixed workspaces, or results vary by stream
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that writes every new tensor twice
    torch.backends.cudnn.benchmark = False
