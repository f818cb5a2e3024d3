"""
What keeps a run from ending badly: ranks that agree, errors that read as one line, workers that end with the launcher.

A user's mistake is raised in this project as ValueError or OSError with a one-line message, and report_errors() prints
that line. Anything else is a bug and keeps its traceback.
"""

import contextlib
import ctypes
import math
import os
import re
import signal
import sys
import time
import traceback

TORCHRUN_VARIABLES = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')
HERE = os.path.dirname(os.path.abspath(__file__))


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


# --- errors -----------------------------------------------------------------------------------------------------------


def report_errors(out_of_memory_advice=None):
    """Install the hook that prints what ends this process: one line for a user's mistake, a traceback for a bug.

    out_of_memory_advice: function without arguments that returns a line of text: predicted need and the keys to lower.
    """

    def hook(kind, error, trace):
        report(error.with_traceback(trace), out_of_memory_advice)
        sys.stdout.flush()
        if 'torch' in sys.modules and sys.modules['torch'].distributed.is_initialized():
            # Finalizing Python with collectives in flight can block. A closed socket tells the other ranks at once.
            os._exit(1)

    sys.excepthook = hook


def report(error, out_of_memory_advice=None):
    """Print what ended this rank, and leave it for torchrun's summary."""
    prefix = f'[{os.environ.get("RANK", "0")}]'
    if is_out_of_memory(error):
        advice = out_of_memory_advice() if out_of_memory_advice else 'lower batch_size or block_size'
        line = f'{prefix} error: out of memory{peak_memory()}: {first_line(error)}; {advice}'
    elif joined := re.search(r'out after (\d+) seconds waiting for clients. (\d+/\d+) clients joined', str(error)):
        hint = 'start the others, with the same address, port and number of nodes'
        line = f'{prefix} error: only {joined[2]} processes joined within timeout_s={joined[1]}: {hint}'
    elif address := re.search(r'out after (\d+)ms while trying to connect to \((.*?), (\d+)\)', str(error)):
        hint = f'start the node of rank 0, or see whether {address[2]} is its address from here'
        where = f'{address[2]}:{address[3]} within timeout_s={int(address[1]) / 1000:g}'
        line = f'{prefix} error: nobody answers at {where}: {hint}'
    elif timed_out_after(error) is not None:
        hint = 'another rank hangs or is that slow: look at its log, or raise --timeout_s'
        line = f'{prefix} error: waited for another rank longer than timeout_s={timed_out_after(error):g}; {hint}'
    elif is_lost_peer(error):
        # The rank that failed first has the reason. Give torchrun time to see that one before this one.
        line = f'{prefix} stopped because another rank stopped: look for the first error ({first_line(error)[:200]})'
        time.sleep(1)
    elif isinstance(error, KeyboardInterrupt):
        line = f'{prefix} interrupted'
    elif is_users_mistake(error):
        line = f'{prefix} error: {first_line(error)}'
    else:
        line = f'{prefix} ' + ''.join(traceback.format_exception(error))
    # Not sys.stderr: init_process_group() wraps this hook and holds back what is written there until the hook returns.
    print(line, file=sys.__stderr__, flush=True)
    if 'TORCHELASTIC_ERROR_FILE' in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            raise error  # it records the exception that is being handled
        except type(error):
            get_error_handler().record_exception(error)


def is_users_mistake(error):
    """Whether a line of this project (not of a library it calls) raised a ValueError or an OSError."""
    if not isinstance(error, (ValueError, OSError)):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and os.path.dirname(os.path.abspath(frames[-1].filename)) == HERE


def is_out_of_memory(error):
    """CUDA raises its own class, the CPU's allocator a RuntimeError, Python a MemoryError."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == 'OutOfMemoryError'
        or (isinstance(error, RuntimeError) and 'DefaultCPUAllocator' in str(error))
    )


def is_lost_peer(error):
    """Whether a collective failed because its other end went away."""
    if type(error).__name__ in ('DistBackendError', 'DistNetworkError'):
        return True
    signs = (
        'Connection closed by peer',
        'Connection reset by peer',
        'Connection refused',
        'Broken pipe',
        'Socket closed',
    )
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def timed_out_after(error):
    """The seconds that a collective waited for, if that was longer than the process group's timeout; else None."""
    waited = re.search(r'[Tt]imed out waiting (\d+) ?ms', str(error)) if isinstance(error, RuntimeError) else None
    return int(waited[1]) / 1000 if waited else None


def first_line(error):
    """The message without the C++ stack that torch appends."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def peak_memory():
    """' (peak 12.3 GB)' on the device that ran out, or '' where nothing counted it."""
    torch = sys.modules.get('torch')
    if torch is None or not torch.cuda.is_available():
        return ''
    return f' (peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB)'


# --- processes --------------------------------------------------------------------------------------------------------


def end_with_parent():
    """Ask Linux to kill this worker when torchrun dies: a killed torchrun would leave its workers on the GPUs."""
    if 'TORCHELASTIC_RUN_ID' in os.environ and sys.platform == 'linux':
        PR_SET_PDEATHSIG = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def leave(code=0):
    """End this process, without the interpreter's own finalization. Everything has to be closed by now.

    2 of 30 finished runs on 2 ranks ended in SIGABRT there, on the rank that does least after its last collective. The
    cause is probably a thread of gloo's that drops a tensor: asking for the GIL then ends it in the middle of C++.
    """
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


class StopRequest:
    """A request to stop early: the file STOP in out_dir, as a job script's time-limit trap or a user leaves it there.

    All ranks make one and call agreed() at the same step boundaries. Leaves PREEMPTED, with the step, when it is over.
    """

    def __init__(self, out_dir):
        import torch.distributed as dist

        self.stop_file, self.marker = os.path.join(out_dir, 'STOP'), os.path.join(out_dir, 'PREEMPTED')
        self.is_rank_0, self.looked_at, self.exchange = dist.get_rank() == 0, -math.inf, None
        if self.is_rank_0:
            for marker in ('PREEMPTED', 'DONE'):  # of an earlier, shorter run: this one is under way
                remove_if_there(os.path.join(out_dir, marker))

    def agreed(self):
        """Whether rank 0 had seen the request one step ago: the same answer on every rank, and no rank waits for it."""
        import torch
        import torch.distributed as dist

        stop = False
        if self.exchange is not None:
            flag, work = self.exchange
            work.wait()  # of the step before, so it has long arrived
            stop = bool(flag.item())
        flag = torch.full((1,), float(self.seen()))
        self.exchange = flag, dist.broadcast(flag, src=0, async_op=True)  # on the host, over gloo
        return stop

    def seen(self):
        """Whether there is a request, on rank 0; other ranks do not look."""
        if not self.is_rank_0 or time.monotonic() - self.looked_at < 0.5:  # a shared file system need not be asked more
            return False
        self.looked_at = time.monotonic()
        return os.path.exists(self.stop_file)

    def obeyed(self, step):
        """The run stops here, saved at `step`: leave PREEMPTED in place of STOP. For rank 0."""
        with open(self.marker, 'w') as file:
            file.write(f'{step}\n')
        remove_if_there(self.stop_file)


def remove_if_there(path):
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


# --- device -----------------------------------------------------------------------------------------------------------


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
