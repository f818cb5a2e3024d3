"""
What keeps a run from ending badly: ranks that agree, errors that read as one line, workers that end with the launcher.

A user's mistake is raised in this project as ValueError or OSError with a one-line message, and report_errors() prints
that line. Anything else is a bug and keeps its traceback.
"""

import collections
import contextlib
import ctypes
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import traceback

TORCHRUN_VARIABLES = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The folders whose Python files are this project's. Not all below ROOT: .venv is there, too.
ROOMS = ('runtime', 'text', 'huggingface', 'comparison', 'benchmarks')
FOLDERS = {ROOT, *(os.path.join(ROOT, room) for room in ROOMS)}


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
    if not is_lost_peer(error):
        note_error(line.splitlines()[0] if is_users_mistake(error) else f'{type(error).__name__}: {first_line(error)}')
    # Not sys.stderr: init_process_group() wraps this hook and holds back what is written there until the hook returns.
    # In one write: print() makes two, and the lines of two ranks that fail together would run into each other.
    sys.__stderr__.write(line + '\n')
    sys.__stderr__.flush()
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
    return bool(frames) and os.path.dirname(os.path.abspath(frames[-1].filename)) in FOLDERS


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
        if os.getppid() == 1:  # it died before, or it is the first process of a container
            with open('/proc/1/cmdline', 'rb') as file:
                if b'torch' not in file.read():
                    os._exit(1)


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


# --- stop requests ----------------------------------------------------------------------------------------------------

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
STOP_FILE, END_OF_JOB = 65, 66  # what is no signal, told apart from signals by numbers above theirs
received = []  # signals, in the order in which this process got them


def catch_signals(signals=(signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)):
    """From here on these signals ask this rank to stop at a step boundary; a second one changes nothing.

    Without SIGINT: until there is something to save, Ctrl-C ends the process.
    """
    for number in signals:
        signal.signal(number, lambda number, frame: received.append(number))


def end_of_slurm_job():
    """When Slurm will end this job, in seconds of time.time(); infinity outside of a job, or where nobody says."""
    if 'SLURM_JOB_END_TIME' in os.environ:
        return float(os.environ['SLURM_JOB_END_TIME'])
    if 'SLURM_JOB_ID' in os.environ:  # Slurm before 23.02 sets no such variable, but tells what is left: D-HH:MM:SS
        command = ['squeue', '-h', '-j', os.environ['SLURM_JOB_ID'], '-o', '%L']
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            left = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
            if found := re.fullmatch(r'(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)', left):
                days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
                return time.time() + ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return math.inf


class StopRequest:
    """A request to stop early: a signal to any rank, the file STOP in out_dir, or the end of the Slurm job's time.

    All ranks make one and call agreed() at the same step boundaries. Leaves PREEMPTED, with the step, when it is over.
    """

    def __init__(self, out_dir, stop_before_end_s=0, say=print):
        """stop_before_end_s: seconds that a job needs to save and to end; 0 = do not look at the job's time. say: on
        rank 0, called with a line on when that will be."""
        import torch.distributed as dist

        catch_signals(SIGNALS)
        self.out_dir, self.stop_file = out_dir, os.path.join(out_dir, 'STOP')
        self.rank, self.looked_at, self.reason = dist.get_rank(), -math.inf, ''
        self.stops_at, self.met_at, self.between = math.inf, time.monotonic(), 0.0
        if self.rank == 0:
            if stop_before_end_s:
                self._plan(end_of_slurm_job() - time.time(), stop_before_end_s, say)
            for marker in ('PREEMPTED', 'DONE'):  # of an earlier, shorter run: this one is under way
                remove_if_there(os.path.join(out_dir, marker))
        self._send()

    def _plan(self, left, stop_before_end_s, say):
        """When to stop, so that a job with so many seconds left is over in time; a short one keeps 3/4 of them."""
        if left < math.inf:
            self.stops_at = time.time() + max(left - stop_before_end_s, 0.75 * left)
            say(f'the job has {left:.0f} s left: saving at {time.strftime("%H:%M:%S", time.localtime(self.stops_at))}')

    def agreed(self, now=False):
        """Whether any rank had seen a request one step ago: the same answer on every rank, and no rank waits for it.

        now: ask all ranks now, and wait for them; for those that meet rarely. Then the time is up, too, when it would
        be before they meet again.
        """
        flag, work = self.exchange
        work.wait()  # of the step before, so it has long arrived
        if now and not flag.item():
            self.between, self.met_at = time.monotonic() - self.met_at, time.monotonic()
            self._send()
            flag, work = self.exchange
            work.wait()
        rank, cause = divmod(int(flag.item()), 128)
        if cause:
            what = {STOP_FILE: f'there is a file {self.stop_file}', END_OF_JOB: "the job's time is nearly over"}
            self.reason = what.get(cause) or f'rank {rank} got {signal.Signals(cause).name}'
        elif not now:
            self._send()
        return bool(cause)

    def _send(self):
        """Start an exchange of what the ranks have seen."""
        import torch
        import torch.distributed as dist

        cause = self.seen()
        flag = torch.tensor([float(self.rank * 128 + cause if cause else 0)])
        self.exchange = flag, dist.all_reduce(flag, op=dist.ReduceOp.MAX, async_op=True)  # on the host, over gloo

    def seen(self):
        """What asks this rank to stop: the number of a signal, STOP_FILE or END_OF_JOB; 0 = nothing."""
        if received:
            return int(received[0])
        if self.rank != 0 or time.monotonic() - self.looked_at < 0.5:  # a shared file system need not be asked more
            return 0
        self.looked_at = time.monotonic()
        if time.time() + self.between > self.stops_at:
            return END_OF_JOB
        return STOP_FILE if os.path.exists(self.stop_file) else 0

    def obeyed(self, step):
        """The run stops here, saved at `step`: leave PREEMPTED in place of STOP. For rank 0."""
        with open(os.path.join(self.out_dir, 'PREEMPTED'), 'w') as file:
            file.write(f'{step}\n')
        remove_if_there(self.stop_file)
        forget_starts(self.out_dir)


# --- repeated failures ------------------------------------------------------------------------------------------------

STARTS = '.starts.json'  # from which step, with which command the run was started, and how often in a row
starts_file = None


def count_start(out_dir, step, max_failures):
    """Note that training starts at `step`. For every rank. A checkpoint in between, an orderly end or another command
    begins a new count.

    Raises ValueError when the same command has been started max_failures times from there and has come no further:
    another repetition would fail as well. 0 = never.
    """
    global starts_file
    starts_file = os.path.join(out_dir, STARTS)
    on_rank_0(_count_start, out_dir, step, max_failures)


def _count_start(out_dir, step, max_failures):
    now = {'step': step, 'command': sys.argv, 'count': 1, 'error': ''}
    with contextlib.suppress(FileNotFoundError, ValueError):
        with open(starts_file) as file:
            before = dict(json.load(file))
        if (before.get('step'), before.get('command')) == (step, sys.argv):
            if 0 < max_failures <= before['count']:
                last = f'; the last error: {before["error"]}' if before['error'] else ''
                raise Repeated(
                    f'out_dir={out_dir}: {before["count"]} starts in a row from step {step} have failed before the '
                    f'next checkpoint{last}; mend that, then delete {starts_file}, or raise --max_failures'
                )
            now['count'] = before['count'] + 1
    with open(starts_file, 'w') as file:
        json.dump(now, file)


class Repeated(OSError):
    """The run has failed too often; no ValueError, which a damaged file raises, too."""


def forget_starts(out_dir):
    """The run has come to an orderly end. For rank 0."""
    remove_if_there(os.path.join(out_dir, STARTS))


def note_error(line):
    """Keep the error that ends this run, for the message of count_start(). The first rank's stays."""
    if starts_file and os.path.exists(starts_file):
        with contextlib.suppress(OSError, ValueError):
            with open(starts_file) as file:
                starts = json.load(file)
            if not starts['error']:
                with open(starts_file, 'w') as file:
                    json.dump(starts | {'error': line[:300]}, file)


# --- numbers ----------------------------------------------------------------------------------------------------------

SPIKE_WINDOW, SPIKE_SIGMAS = 128, 6


class Numbers:
    """One decision of all ranks, before each optimizer step, whether its loss and gradient can be trusted."""

    def __init__(self, max_bad_steps, loss_spike_guard, say, group=None, state=None):
        """max_bad_steps: so many steps in a row may be skipped. loss_spike_guard: skip a step, too, whose loss is
        SPIKE_SIGMAS standard deviations above the mean of the last SPIKE_WINDOW. say: on rank 0, called with a line.
        group: the ranks that train together. state: of state(), from a checkpoint."""
        import torch.distributed as dist

        self.max_bad_steps, self.loss_spike_guard, self.say, self.group = max_bad_steps, loss_spike_guard, say, group
        self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.skipped, self.in_a_row, self.losses = 0, 0, collections.deque(maxlen=SPIKE_WINDOW)
        if state:
            self.skipped, self.in_a_row = state['skipped'], state['in_a_row']
            self.losses.extend(state['losses'])

    def state(self):
        return {'skipped': self.skipped, 'in_a_row': self.in_a_row, 'losses': list(self.losses)}

    def are_good(self, step, loss_sum, targets, grad_norm, may_overflow, last_good):
        """Whether to take the optimizer step `step`; self.loss is then the mean loss. Collective; waits for the device.

        loss_sum: this rank's, 0-d; targets: what it is a sum over, on all ranks. grad_norm: of the gradient, or of this
        rank's part of it. may_overflow: in fp16, where GradScaler skips such a step and lowers its scale.
        Raises ValueError, on every rank, after max_bad_steps in a row; last_good(): where the last good checkpoint is.
        """
        import torch
        import torch.distributed as dist

        local = grad_norm.to_local() if hasattr(grad_norm, 'to_local') else grad_norm
        gradient_is_bad = torch.zeros_like(loss_sum) if may_overflow else (~local.isfinite()).to(loss_sum)
        # The loss, and two flags of each rank: after one all-reduce all have the same numbers.
        n, own = len(self.ranks), self.ranks.index(dist.get_rank())
        numbers = torch.zeros(1 + 2 * n, dtype=torch.float64, device=loss_sum.device)
        numbers[0], numbers[1 + own], numbers[1 + n + own] = loss_sum.detach(), ~loss_sum.isfinite(), gradient_is_bad
        if n > 1:
            dist.all_reduce(numbers, group=self.group)
        total, *flags = numbers.tolist()
        self.loss = total / targets
        bad_loss, bad_gradient = (
            [rank for rank, flag in zip(self.ranks, of_ranks, strict=True) if flag]
            for of_ranks in (flags[:n], flags[n:])
        )
        if bad_loss:
            problem = f'loss not finite on {ranks_in_words(bad_loss)}'
        elif bad_gradient:
            problem = f'gradient not finite on {ranks_in_words(bad_gradient)}'
        else:
            problem = self._spike()
        if problem is None:
            self.losses.append(self.loss)
            self.in_a_row = 0
            return True
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row > self.max_bad_steps:
            raise ValueError(
                f'{problem} at step {step}, and so {self.in_a_row} bad steps in a row (max_bad_steps='
                f'{self.max_bad_steps}): the last good checkpoint is {last_good()}; go on from it with a lower '
                '--learning_rate, or look at the data of this step'
            )
        line = f'WARNING: {problem} at step {step}: the step is skipped on all ranks ({self.skipped} so far)'
        if dist.get_rank() == 0:
            self.say(line)
        elif dist.get_rank() == self.ranks[0]:  # of another replica
            print(f'[{self.ranks[0]}] {line}', flush=True)
        return False

    def _spike(self):
        if not self.loss_spike_guard or len(self.losses) < SPIKE_WINDOW:
            return None
        mean, sigma = statistics.fmean(self.losses), statistics.pstdev(self.losses)
        if self.loss <= mean + SPIKE_SIGMAS * sigma:
            return None
        return (
            f'loss {self.loss:.4g} is above {mean:.4g} + {SPIKE_SIGMAS} x {sigma:.2g} of the last {SPIKE_WINDOW} steps'
        )


def ranks_in_words(ranks):
    return f'rank {ranks[0]}' if len(ranks) == 1 else f'ranks {", ".join(map(str, ranks))}'


def refuse_different_weights(named_parameters, step, last_good):
    """Compare checksums of what all ranks should hold alike, as under DistributedDataParallel. Collective.

    Raises ValueError on every rank that names the ranks and the first parameter that differ from most.
    """
    import torch
    import torch.distributed as dist

    names, tensors = zip(*named_parameters, strict=True)
    # Of the bits: two sums of floats may be equal where two numbers are not.
    mine = torch.stack([tensor.detach().view(torch.int32).sum(dtype=torch.int64) for tensor in tensors])
    everybodys = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, mine)
    everybodys = [tuple(checksums.tolist()) for checksums in everybodys]
    if len(set(everybodys)) == 1:
        return
    usual, count = collections.Counter(everybodys).most_common(1)[0]
    others = [rank for rank, checksums in enumerate(everybodys) if checksums != usual]
    of_whom = f'{ranks_in_words(others)} differ from those of the others'
    if 2 * count <= len(everybodys):
        of_whom = f'{ranks_in_words(list(range(len(everybodys))))} differ'
    first = next(name for column, name in enumerate(names) if len({checksums[column] for checksums in everybodys}) > 1)
    raise ValueError(
        f'weights of {of_whom} after step {step} ({first} first): memory or hardware of a machine; the last good '
        f'checkpoint is {last_good()}'
    )


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
