"""
How the error that ends a run is reported: in one line if it is a user's mistake.

This project raises ValueError or OSError with a one-line message for a user's mistake, and report_errors() prints that
line. Anything else is a bug and keeps its traceback.
"""

import atexit
import contextlib
import errno
import faulthandler
import io
import os
import re
import resource
import signal
import sys
import time
import traceback

from configurator import leave_for_torchrun
from system import console
from system.files import FOLDERS


def take_note(line):
    """Does nothing with the error that ends this process. stopping.count_start() puts note_error() in its place, which
    keeps the error for the next start of the run."""


def report_errors(out_of_memory_advice=None, prints_result=False):
    """Install the hook that prints the error which ends this process: one line for a user's mistake, otherwise the
    traceback.

    out_of_memory_advice: function without arguments that returns a line with the predicted need and the keys to lower.
    prints_result: whether the result of this script is what it prints, and not files. Only then does a console that is
    closed or full end it; without a word where its reader has seen enough, as `| head` has.
    """
    if prints_result:
        atexit.register(flush)  # or the interpreter does so, and complains
    else:
        console.outlive()

    def hook(kind, error, trace):
        if isinstance(error, BrokenPipeError) and place_of(error.with_traceback(trace)) == 'stdout: ':
            os._exit(0)  # sys.exit() would write once more
        report(error.with_traceback(trace), out_of_memory_advice)
        sys.stdout.flush()
        if 'torch' in sys.modules and sys.modules['torch'].distributed.is_initialized():
            # Finalizing Python with collectives in flight can block. Ending at once closes the sockets, by which the
            # other ranks notice it.
            os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)  # 130: as shells say it

    sys.excepthook = hook
    with contextlib.suppress(OSError, ValueError):  # stderr may be no file
        faulthandler.enable()  # a crash in native code, which raises nothing, says which line of Python it was in
    if hasattr(sys.stdout, 'reconfigure'):
        sys.stdout.reconfigure(errors='backslashreplace')  # as for stderr: names of files may not be UTF-8
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as configure() leaves it
        signal.signal(signal.SIGINT, signal.default_int_handler)


def flush():
    """Flush stdout, and end this process if its reader has gone: it has done what was asked of it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(0)
    except OSError as error:
        report(error)
        os._exit(1)


def report(error, out_of_memory_advice=None):
    """Print the error that ended this rank, and leave it for torchrun's summary."""
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
    elif waited := re.search(r'[Tt]imed out waiting (\d+) ?ms', str(error)):
        hint = 'another rank hangs or is that slow: look at its log, or raise --timeout_s'
        line = f'{prefix} error: waited for another rank longer than timeout_s={int(waited[1]) / 1000:g}; {hint}'
    elif is_lost_peer(error):
        # The rank that failed first knows the reason: give torchrun time to notice that rank before this one.
        line = f'{prefix} stopped because another rank stopped: look for the first error ({first_line(error)[:200]})'
        time.sleep(1)
    elif isinstance(error, OSError) and error.errno == errno.EMFILE:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        line = f'{prefix} error: more files are open than this shell allows ({most}): `ulimit -n 4096`, and start again'
    elif isinstance(error, KeyboardInterrupt):
        line = f'{prefix} interrupted'
    elif is_users_mistake(error):
        line = f'{prefix} error: {place_of(error)}{first_line(error)}'
    else:
        line = f'{prefix} ' + ''.join(traceback.format_exception(error))
    if not is_lost_peer(error):
        take_note(line.splitlines()[0] if is_users_mistake(error) else f'{type(error).__name__}: {first_line(error)}')
    # Not sys.stderr: init_process_group() wraps this hook and holds back what is written there until the hook returns.
    # In one write: print() makes two, and lines of ranks that fail at the same time would mix.
    sys.__stderr__.write(line + '\n')
    sys.__stderr__.flush()
    leave_for_torchrun(line.removeprefix(f'{prefix} '))


def place_of(error):
    """'PATH: ' of the file, or 'stdout: ', that an OSError is about if it names none, as that of write() or flush()
    on a full disk. The file is among the variables of the functions that were running."""
    if not isinstance(error, OSError) or error.errno is None or error.filename is not None:
        return ''
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        held = [*frame.f_locals.values()]
        held += vars(frame.f_locals['self']).values() if hasattr(frame.f_locals.get('self'), '__dict__') else []
        held += [value for part in held if isinstance(part, dict) for value in part.values()]
        for file in held:
            if isinstance(file, io.IOBase) and str(getattr(file, 'name', '<'))[0] != '<':
                return f'{file.name}: '
    try:
        print(flush=True)
    except OSError:
        return 'stdout: '
    return ''


def is_users_mistake(error):
    """Whether a line of this project (not of a library it calls) raised a ValueError or an OSError."""
    if not isinstance(error, (ValueError, OSError)):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and os.path.dirname(os.path.realpath(frames[-1].filename)) in FOLDERS


def is_out_of_memory(error):
    """Whether memory ran out. CUDA raises its own class, the CPU's allocator a RuntimeError, NCCL a DistBackendError,
    Python a MemoryError."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == 'OutOfMemoryError'
        or (isinstance(error, RuntimeError) and 'DefaultCPUAllocator' in str(error))
        or (type(error).__name__ == 'DistBackendError' and 'out of memory' in str(error))
    )


def is_lost_peer(error):
    """Whether a collective failed because its other end went away."""
    if type(error).__name__ in ('DistBackendError', 'DistNetworkError'):
        # Problems of this rank itself: wrong arguments, two ranks on one GPU, CUDA, a full /dev/shm, a port in use.
        own = 'ncclInvalid|ncclUnhandledCuda|out of memory|No space left|EADDRINUSE'
        return re.search(own, str(error)) is None
    signs = r'Connection (closed by peer|reset by peer|refused)|Broken pipe|Socket closed'
    return isinstance(error, RuntimeError) and re.search(signs, str(error)) is not None


def one_line(error, limit=200):
    """The message of an error in one line, of at most `limit` characters."""
    return ' '.join(str(error).split())[:limit] or type(error).__name__


def first_line(error):
    """The message without the C++ stack that torch appends."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def peak_memory():
    """The GPU's peak, as in ' (peak 12.3 GB)', or '' without a GPU."""
    torch = sys.modules.get('torch')
    if torch is None or not torch.cuda.is_available():
        return ''
    return f' (peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB)'
