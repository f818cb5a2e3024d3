"""
Which device and which dtype a rank computes with, and how the device is set up.
"""

import atexit
import contextlib
import ctypes
import errno
import getpass
import importlib.util
import mmap
import os
import shutil
import stat
import tempfile
from datetime import timedelta

from system.processes import interface_to, local_world_size, ranks_in_words

# Dense bfloat16 FLOP/s of whole cards (NVIDIA's data sheets), by the names that the driver gives them. Other names hold
# these, too: a part of a card (MIG), one that virtual machines share, and boards that are slower (H100 PCIe, H200 NVL).
H100, A100 = 989e12, 312e12
PEAK_FLOPS = {
    r'^(NVIDIA )?(H100 80GB HBM3|H200)$': H100,
    r'^(NVIDIA )?A100(-SXM4-40GB|-SXM4-80GB|-PCIE-40GB| 80GB PCIe)$': A100,
}


def cast_parameters(model, dtype):
    """Cast the weights of a model that will not be trained. Buffers stay in fp32, such as RoPE's frequencies and the
    biases of routers, and bytes (nf4) stay bytes."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


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


def choose_dtype(dtype, device, is_elsewhere=False):
    """torch dtype of the computation from the key `dtype`; 'auto' is bfloat16 if the device has it in hardware,
    otherwise float32. is_elsewhere: the device is none of this machine.

    Raises ValueError for bfloat16 on a GPU that would only emulate it.
    """
    import torch

    if device.type == 'cuda':  # if planning for a GPU that is not here, assume bfloat16: every one since 2020 has it
        is_elsewhere = is_elsewhere or not torch.cuda.is_available()
        has_bfloat16 = is_elsewhere or torch.cuda.is_bf16_supported(including_emulation=False)
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


def make_compile_caches():
    """
    Make sure that torch's compiler can have its folders, or let it have temporary ones: parts of torch import it where
    nothing is compiled, too, and it ends without them. Returns lines for the log. Call it before anything imports it.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container in which this user has no name: torch takes another folder
        user = 'nobody'
    lines = []
    default = os.path.join(tempfile.gettempdir(), f'torchinductor_{user}')
    for name, folder in {'TORCHINDUCTOR_CACHE_DIR': default, 'TRITON_CACHE_DIR': None}.items():
        folder = os.environ.get(name) or folder
        try:
            if folder:
                os.makedirs(folder, exist_ok=True)
                if (about := os.stat(folder)).st_uid != os.getuid() or about.st_mode & stat.S_IWOTH:
                    raise PermissionError(errno.EPERM, 'by you alone, and it is loaded as code')
                tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            os.environ[name] = tempfile.mkdtemp(prefix='compiled_')
            atexit.register(shutil.rmtree, os.environ[name], ignore_errors=True)
            lines.append(
                f'WARNING: {name}={folder} cannot be written ({error.strerror}): what is compiled goes to '
                f'{os.environ[name]} for now, and the next run compiles it again'
            )
    return lines


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


def configure_heap():
    """
    Have this process keep the memory that it frees, and have the system give it pages of 2 MB. For training on a CPU
    under Linux with glibc; elsewhere nothing happens.

    By default glibc hands large blocks back, so that every step gets its activations as new pages of 4 KB, which the
    system fills with zeros one by one: 30,000 in each step of config/quickstart.py.
    """
    trim_threshold, mmap_max, size = -1, -4, 2**32  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h; bytes
    with contextlib.suppress(AttributeError, OSError):  # another system, or another C library
        libc = ctypes.CDLL('libc.so.6')
        libc.mallopt(mmap_max, 0)  # blocks of all sizes come from the heap
        libc.mallopt(trim_threshold, -1)  # which never shrinks
        libc.malloc.restype = ctypes.c_void_p
        # Untouched, this block takes no memory. It is where the heap grows for now, and will have the large pages.
        if begin := libc.malloc(ctypes.c_size_t(size)):
            libc.free(ctypes.c_void_p(begin))
            begin -= begin % mmap.PAGESIZE
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


def use_flash_attention_3(device):
    """
    Have packed rows and the ring run FlashAttention 3 in place of torch's own 2, if its package is installed and the
    GPU is a Hopper, for which it is made. Returns the lines for the log: one if the package is there, else none.
    """
    import torch

    if importlib.util.find_spec('flash_attn_interface') is None or torch.cuda.get_device_capability(device)[0] != 9:
        return []
    try:
        torch.nn.attention.activate_flash_attention_impl('FA3')
    except (AttributeError, ImportError, OSError, RuntimeError, ValueError) as error:  # another torch or CUDA
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return [f'attention: FlashAttention 2, as flash_attn_interface cannot be used with this torch ({reason})']
    return ['attention: FlashAttention 3, by the package flash_attn_interface']


def make_deterministic():
    """Make repeated runs bit-equal: allow only deterministic kernels. An operation without such a kernel raises."""
    import torch

    os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')  # cuBLAS: fixed workspaces, or results vary by stream
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that writes every new tensor twice
    torch.backends.cudnn.benchmark = False


def join_ranks(timeout_s, device):
    """The process group alone, for scripts without an out_dir: NCCL for tensors on GPUs, gloo for those on hosts."""
    import torch
    import torch.distributed as dist

    backend = 'gloo'
    if device.type == 'cuda':
        torch.cuda.set_device(device)
        backend = 'cpu:gloo,cuda:nccl'
    if 'RANK' in os.environ:
        if os.environ['WORLD_SIZE'] != os.environ['LOCAL_WORLD_SIZE']:  # several machines
            # By itself gloo takes the interface that the machine's own name resolves to: 127.0.1.1 on many images.
            interface = interface_to(os.environ['MASTER_ADDR'])
            if interface not in (None, 'lo'):
                os.environ.setdefault('GLOO_SOCKET_IFNAME', interface)
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        if device.type == 'cuda':
            refuse_shared_gpus(device)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
