"""
Measures what a step costs: the time of its phases, communication, memory; and how busy the experts of a mixture were.
All strategies are measured by this code.

Values that cannot be measured on a machine are left out of its rows.
"""

import contextlib
import math
import os
import platform
import re
import threading
import time
from collections import Counter, namedtuple
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from layout import counted
from model import GPT
from runtime import PHASES, PROFILED_STEP
from system.devices import PEAK_FLOPS

# Profiling may take this share of the training time. It is promised to cost at most 1%; the other half is left for
# costs that are not counted, such as ranks that wait for one which is still reading its profile.
PROFILING_SHARE = 0.005
ALLOCATIONS = 100_000  # a step of 12 blocks makes a few thousand; the file takes some kB for each
STEPS_BEFORE_PROFILING = 5  # compilation, first allocations, DDP's new buckets after its first step


class HostEvent:
    """Stands in for torch.cuda.Event on a CPU, where work is done when the call returns."""

    def record(self):
        self.seconds = time.perf_counter()

    def elapsed_time(self, end):
        return 1000 * (end.seconds - self.seconds)

    def query(self):
        return True

    def synchronize(self):
        pass


# A step, or a part that is added to the one before it, whose events the device may not have reached yet. kind: one of
# KINDS. marks: [(phase, event)] in order
Step = namedtuple('Step', 'begin marks end kind')
KINDS = ('ordinary', 'profiled', 'part')


class Meter:
    """
    Times the phases of a training step and measures throughput, communication and memory, on this rank.

    device: torch.device. world_size: number of ranks; if there are several, all make the same calls, and the default
    process group needs a backend for CPU tensors ('gloo', or 'cpu:gloo,cuda:nccl').
    tokens_per_step: of the global batch; 0 = each step has another number, and no speed is measured.
    flops_per_token: of forward and backward together, for the MFU.
    group: process group of the ranks that make these calls together; None = all (the replicas of DiLoCo have one each).
    beat: called with the name of each phase as it begins.
    trace_step: a trace of this step, counted from here, is written on every rank as out_dir/trace_rank0.json and so on,
        for chrome://tracing or ui.perfetto.dev. Below 1: no step is traced. The step before it is in the trace as well:
        profiling begins with an empty queue, so a GPU waits for the host in the first step, as it does in no other.
    trace_memory: write_allocations() after that step.
    say: called with a line that says what to do with these files, or that one could not be written.

    The clock runs from begin_step() to end_step(), so evaluations and checkpoints between two steps do not count.
    From time to time a step is profiled (see communication_milliseconds()). Because this makes it slower, it is left
    out of the times and the throughput, unless the interval has no other step. `profiling_seconds` sums up what
    profiling has cost.
    """

    def __init__(
        self, device, world_size, tokens_per_step, flops_per_token, group=None, beat=None, trace_step=0, out_dir='.',
        trace_memory=False, say=None,
    ):  # fmt: skip
        self._beat, self._say = beat or (lambda phase: None), say or (lambda line: None)
        self._trace_step, self._out_dir, self._trace_memory = trace_step, out_dir, trace_memory
        self.training_seconds = 0.0  # sum of all steps
        self.seconds = Counter()  # of each phase
        self.profiling_seconds = 0.0  # what profiling added to them
        self._knows_state = False  # see measure_state()
        self._device = device
        self._on_cuda = device.type == 'cuda'
        self._synchronize = getattr(torch, device.type).synchronize  # does nothing on a CPU
        self._world_size = world_size
        self._group, self._group_size = group, dist.get_world_size(group) if world_size > 1 else 1
        self._tokens_per_step = tokens_per_step
        name = device_name(device)
        peak_flops = next((peak for pattern, peak in PEAK_FLOPS.items() if re.search(pattern, name)), None)
        self._mfu_per_token = flops_per_token / world_size / peak_flops if peak_flops else None

        self._unread = []  # the Steps whose times are not in the sums yet
        # of each kind: number of steps, milliseconds in total and of each phase, in this interval
        self._sums = {kind: Counter() for kind in KINDS}
        self._steps = 0
        self._mean_step = 0.0  # milliseconds of an ordinary step, in the last interval that had one
        self._next_row = {}  # values for the next row: of a profiled step, and of the state once it is measured
        self._counts_bytes = world_size > 1 and not self._on_cuda and bytes_sent() is not None
        self._sent = 0  # bytes in this interval
        self._profile_next = False
        self._profiler = None
        memory_gb(device)  # the first interval's peak begins here

    def begin_step(self):
        """Start the clock of an optimizer step, and on some steps the profiler. Call mark() right after this."""
        if not self._profiler and (self._profile_next or self._trace_step - self._steps in (1, 2)):
            self._start_profiler()
        if self._profiler:
            self._profiled_step = torch.autograd.profiler.record_function(PROFILED_STEP)
            self._profiled_step.__enter__()
        self._count_sent(-1)
        self._begin, self._marks = self._event(), []

    def mark(self, phase):
        """The named phase (one of PHASES) begins here, and the one before it ends. A phase may come several times."""
        assert phase in PHASES, f'phase {phase!r}: expected one of {PHASES}'
        self._marks.append((phase, self._event()))
        self._beat(phase)

    def end_step(self):
        """Stop the clock: the step and its last phase end here."""
        kind = 'profiled' if self._profiler else 'ordinary'
        self._unread.append(Step(self._begin, self._marks, self._event(), kind))
        self._steps += 1
        self._count_sent(1)
        if self._profiler and self._trace_step - self._steps == 1:
            self._profiled_step.__exit__(None, None, None)  # and the next step is the one to trace
        elif self._profiler:
            self._stop_profiler()
        # Read the steps that the device has finished, without waiting for others, so that few events accumulate.
        while self._unread and self._unread[0].end.query():
            self._read(self._unread.pop(0))

    @contextlib.contextmanager
    def part(self, phase):
        """A context whose time is added to the step that has just ended, as for DiLoCo's outer step."""
        self._count_sent(-1)
        begin, mark = self._event(), (phase, self._event())
        self._beat(phase)
        yield
        self._count_sent(1)
        self._unread.append(Step(begin, [mark], self._event(), 'part'))

    def measure_state(self, parameters, optimizer):
        """
        Measure the memory of this rank's weights, gradients and optimizer state, for the next row. Call it between
        optimizer.step() and zero_grad(). Only the first call that finds an optimizer state has an effect.
        """
        if self.wants_state(optimizer):
            parameters = list(parameters)
            moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
            self.note_state(parameters, [parameter.grad for parameter in parameters], moments)

    def wants_state(self, optimizer):
        """Whether the state has not been measured yet and can be. In fp16 the first steps may be skipped, so that there
        is none yet; SGD never has one, which counts as 0."""
        return not self._knows_state and bool(optimizer.state or isinstance(optimizer, torch.optim.SGD))

    def note_state(self, weights, gradients, optimizer):
        """As measure_state(), for an engine that keeps its tensors elsewhere. Three lists of tensors; other items, such
        as None, count nothing."""
        held = {'weights': weights, 'gradients': gradients, 'optimizer': optimizer}
        self._next_row |= {f'mem/{name}_gb': round(held_gb(tensors), 9) for name, tensors in held.items()}
        self._knows_state = True

    def interval(self):
        """
        Metrics of the steps since the last call, under the keys of metrics.jsonl; unknown values are left out.

        docs/reference/metrics.md explains each key. time/*: means per optimizer step, on CUDA of the time in the GPU's
        queue. comm/sent_gb: what this rank wrote to sockets in its steps and parts (Linux, gloo). mem/weights_gb and
        the like come once, in the first row after measure_state(). mem/rank_*: peaks since the last call.

        This is the only call that waits for the device. With several ranks it is collective (one small all-gather).
        """
        self.read_all()
        ordinary, profiled, parts = self._sums.values()
        self._sums = {kind: Counter() for kind in KINDS}
        if ordinary['steps']:
            self._mean_step = ordinary['total'] / ordinary['steps']
        if profiled['steps']:
            self.profiling_seconds += max(0.0, profiled['total'] - profiled['steps'] * self._mean_step) / 1000

        row = {}
        steps, steps_in_all = ordinary if ordinary['steps'] else profiled, ordinary['steps'] + profiled['steps']
        if steps['steps']:
            milliseconds = {
                key: steps[key] / steps['steps'] + parts[key] / steps_in_all
                for key in ('total', *PHASES)
                if key in steps or key in parts
            }
            if self._tokens_per_step:
                tokens_per_sec = 1000 * self._tokens_per_step / milliseconds['total']
                row['tokens_per_sec'] = round(tokens_per_sec, 3)
                row['tokens_per_sec_per_rank'] = round(tokens_per_sec / self._world_size, 3)
            if self._tokens_per_step and self._mfu_per_token:
                row['mfu'] = round(tokens_per_sec * self._mfu_per_token, 5)
            row |= {f'time/{key}': round(value, 4) for key, value in milliseconds.items()}
        if self._counts_bytes and steps_in_all:
            row['comm/sent_gb'] = round(self._sent / steps_in_all / 1e9, 9)
        row |= self._next_row
        self._next_row, self._sent = {}, 0
        return row | self._ranks_and_memory()

    def read_all(self):
        """Add all steps so far to training_seconds and seconds. Waits for the device."""
        while self._unread:
            self._unread[0].end.synchronize()
            self._read(self._unread.pop(0))

    def _ranks_and_memory(self):
        """The mem/* keys. With them the ranks exchange their times, by which all decide alike whether to profile the
        next step."""
        memory = memory_gb(self._device)
        highest = memory.get('mem/peak_gb', memory.get('mem/current_gb', math.nan))
        peaks = [highest]
        if self._group_size > 1:
            mine = torch.tensor([highest, self.profiling_seconds, self.training_seconds])
            ranks = mine.new_empty(self._group_size, len(mine))
            dist.all_gather(list(ranks), mine, group=self._group)
            peaks, costs, seconds = ranks.T.tolist()
            self._profile_next = self._steps >= STEPS_BEFORE_PROFILING and max(costs) <= PROFILING_SHARE * min(seconds)
        if not any(map(math.isnan, peaks)):
            memory |= {'mem/rank_min_gb': min(peaks), 'mem/rank_max_gb': max(peaks)}
        return {key: round(value, 4) for key, value in memory.items()}

    def _event(self):
        """An event, recorded now; on CUDA in the current stream, which takes microseconds and does not wait."""
        event = torch.cuda.Event(enable_timing=True) if self._on_cuda else HostEvent()
        event.record()
        return event

    def _read(self, step):
        """Add the times of a step to the sums of its interval."""
        sums = self._sums[step.kind]
        events = [*(event for _, event in step.marks), step.end]
        for (phase, start), end in zip(step.marks, events[1:], strict=True):
            sums[phase] += start.elapsed_time(end)
            self.seconds[phase] += start.elapsed_time(end) / 1000
        total = step.begin.elapsed_time(step.end)
        sums['total'] += total
        sums['steps'] += 1
        self.training_seconds += total / 1000

    def _count_sent(self, sign):
        if self._counts_bytes:
            self._sent += sign * bytes_sent()

    def _start_profiler(self):
        """Start recording. The ranks begin together: one that starts late would make a collective look slow."""
        self._synchronize()  # the GPU runs behind the host, and the profile should hold no earlier kernels
        os.environ.setdefault('KINETO_LOG_LEVEL', '99')  # torch 2.13 writes two lines to stderr per profile otherwise
        start = time.perf_counter()
        # Not torch.profiler: starting that one imports the compiler, 1 to 6 seconds (torch 2.13).
        self._profiler = torch.autograd.profiler.profile(use_device='cuda' if self._on_cuda else None, use_kineto=True)
        self._profiler.__enter__()
        dist.all_reduce(torch.zeros(1), group=self._group)
        self.profiling_seconds += time.perf_counter() - start

    def _stop_profiler(self):
        """Stop recording and read the communication times out of it."""
        self._synchronize()
        start = time.perf_counter()
        self._profiled_step.__exit__(None, None, None)
        self._profiler.__exit__(None, None, None)
        activities = recorded_activities(self._profiler)
        steps = sum(one.name == PROFILED_STEP for one in activities)
        comm, exposed = (milliseconds / steps for milliseconds in communication_milliseconds(activities))
        if self._world_size > 1:
            self._next_row |= {'time/comm': round(comm, 4), 'time/comm_exposed': round(exposed, 4)}
        self.profiling_seconds += time.perf_counter() - start
        if self._steps == self._trace_step:
            self._say(write_trace(self._profiler, self._out_dir, dist.get_rank()))
            if self._trace_memory:
                self._say(write_allocations(self._out_dir, dist.get_rank()))
        self._profiler, self._profile_next = None, False


# --- COMMUNICATION ----------------------------------------------------------------------------------------------------

# Something that a profile recorded: start and end in nanoseconds; thread is None for work on the GPU
Activity = namedtuple('Activity', 'name start end thread')


def recorded_activities(profiler):
    """The Activities of the profiled step, or of the two of a trace."""
    activities = []
    for event in profiler.kineto_results.events():
        on_gpu = event.device_type() == torch.autograd.DeviceType.CUDA
        if not (on_gpu and event.is_user_annotation()):  # those are labels that the host has laid over kernels
            thread = None if on_gpu else event.start_thread_id()
            activities.append(Activity(event.name(), event.start_ns(), event.end_ns(), thread))
    steps = [one for one in activities if one.name == PROFILED_STEP]
    # The first began after a barrier. Work that goes on beyond the last (an overlapped exchange) counts up to its end.
    end = max(step.end for step in steps)
    within = [one for one in activities if any(step.start <= one.start <= step.end for step in steps)]
    return [one._replace(end=min(one.end, end)) for one in within]


def communication_milliseconds(activities):
    """
    How many milliseconds the collectives among the Activities of a step took: (all, exposed).

    A collective is a kernel named nccl* on the GPU, or on the CPU the time that one of gloo's worker threads spends on
    it (`gloo:all_reduce` and so on; torch 2.11 to 2.15). Both begin when this rank enters the collective, so waiting
    for a slower rank is included. Collectives that run at the same time are counted once. Exposed is the time in which
    this rank computed nothing meanwhile: no other kernel or copy ran on the GPU, or without a GPU no operation outside
    gloo's threads.
    """
    gpu = [one for one in activities if one.thread is None]
    gloo = [one for one in activities if one.thread is not None and one.name.startswith('gloo:')]
    collectives = gloo + [one for one in gpu if one.name.startswith('nccl')]
    if gpu:
        compute = [one for one in gpu if not one.name.startswith('nccl')]
    else:
        gloo_threads = {one.thread for one in gloo}
        compute = host_compute([one for one in activities if one.thread not in gloo_threads])
    exposed = covered(collectives + compute) - covered(compute)
    return covered(collectives) / 1e6, exposed / 1e6


def host_compute(activities):
    """
    The CPU operations that compute, without those in which the host waits.

    These are all ATen operations and compiled graphs, except for a DTensor's operation that contains a collective: it
    lasts until the collective is done. (ATen operations inside of it are in the list by themselves.)
    """
    compute = set()
    around = []  # the operations that the current one runs in, outermost first
    for one in sorted(activities, key=lambda one: (one.thread, one.start, -one.end)):
        while around and (around[-1].thread != one.thread or around[-1].end <= one.start):
            around.pop()
        if one.name.startswith(('aten::', '## Call CompiledFxGraph')):
            compute.add(one)
        elif one.name.startswith(('c10d::', '_c10d_functional::')):
            compute.difference_update(around)
        around.append(one)
    return list(compute)


def covered(activities):
    """Nanoseconds during which at least one of the Activities ran."""
    length, latest_end = 0, 0
    for one in sorted(activities, key=lambda one: one.start):
        length += max(0, one.end - max(one.start, latest_end))
        latest_end = max(latest_end, one.end)
    return length


def bytes_sent():
    """
    Bytes that gloo and the main thread have written since the process began, or None if /proc does not tell.

    wchar counts write() and writev() of the whole process (man 5 proc). gloo uses these to write to its sockets, in its
    own threads or, if the receiver waits already, in isend(). What Python's other threads write (checkpoints) is
    subtracted. On 2 ranks an all-reduce of S bytes adds 1.000 S. NCCL's traffic does not pass through the process.
    """
    try:
        everything = written(Path('/proc/self/io'))
    except OSError:
        return None
    for thread in set(threading.enumerate()) - {threading.main_thread()}:
        with contextlib.suppress(OSError):  # it has ended
            everything -= written(Path(f'/proc/self/task/{thread.native_id}/io'))
    return everything


def written(path):
    return int(path.read_bytes().split(b'wchar: ')[1].split()[0])


# --- MEMORY -----------------------------------------------------------------------------------------------------------


def memory_gb(device):
    """mem/current_gb, mem/peak_gb (since the last call) and, on CUDA, mem/reserved_gb of this rank, if known."""
    if device.type == 'cuda':
        memory = {
            'mem/current_gb': torch.cuda.memory_allocated(device) / 1e9,
            'mem/peak_gb': torch.cuda.max_memory_allocated(device) / 1e9,
            'mem/reserved_gb': torch.cuda.memory_reserved(device) / 1e9,
        }
        torch.cuda.reset_peak_memory_stats(device)
        return memory
    status = Path('/proc/self/status')
    if not status.exists():
        return {}
    kib = dict(re.findall(r'^(VmRSS|VmHWM):\s+(\d+) kB', status.read_text(), re.MULTILINE))
    memory = {'mem/current_gb': int(kib['VmRSS']) * 1024 / 1e9, 'mem/peak_gb': int(kib['VmHWM']) * 1024 / 1e9}
    try:
        Path('/proc/self/clear_refs').write_text('5')  # man 5 proc: 5 resets the peak resident set size
    except OSError:
        del memory['mem/peak_gb']  # no permission to reset it, so it would be the peak since the process began
    return memory


def write_trace(profiler, out_dir, rank):
    """Write what a profiler of torch.autograd has recorded. Returns what to do with the file, or that there is none."""
    path = os.path.join(out_dir, f'trace_rank{rank}.json')
    profiler.export_chrome_trace(path)  # neither raises nor returns whether it could write
    try:
        with open(path, 'rb') as file:
            file.seek(-2, os.SEEK_END)
            is_whole = file.read().strip().endswith(b'}')
    except OSError:
        is_whole = False
    if not is_whole:
        return f'the trace could not be written to {path}: is there room for it, and may you write there?'
    return f'trace: drop {path} on ui.perfetto.dev, or open it in chrome://tracing'


def record_allocations():
    """Have the GPU's allocator note from here on which lines of Python ask for memory, for the newest ALLOCATIONS and
    for all that is held. It takes 2 us for each (PyTorch's figure)."""
    torch.cuda.memory._record_memory_history(stacks='python', max_entries=ALLOCATIONS)


def write_allocations(out_dir, rank):
    """Write what record_allocations() has noted. Returns what to do with the file, or why there is none."""
    path = os.path.join(out_dir, f'memory_rank{rank}.pickle')
    try:
        torch.cuda.memory._dump_snapshot(path)
    except (OSError, MemoryError, RuntimeError) as error:
        reason = getattr(error, 'strerror', None) or type(error).__name__
        return f'who held memory could not be written to {path}: {reason}'
    return (
        f'for who held memory: python -m torch.cuda._memory_viz trace_plot {path} -o memory.html, or drop the file on '
        'pytorch.org/memory_viz'
    )


def held_gb(tensors):
    """
    GB (1e9 bytes) of the memory behind these tensors, on the host or the device; of a DTensor this rank's shard.

    Memory that several tensors share, such as a buffer with views, counts once and in full. None counts nothing.
    """
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
            storages[storage.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values()) / 1e9


def device_name(device):
    """A GPU's name, as 'NVIDIA H200', or the CPU's model, its cores and the threads that this process uses."""
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    cpuinfo = Path('/proc/cpuinfo')
    model = re.search(r'model name\s*: (.*)', cpuinfo.read_text()) if cpuinfo.exists() else None
    name = model[1] if model else platform.machine()
    return f'{name}, {counted(os.cpu_count(), "core")}, {counted(torch.get_num_threads(), "thread")} per process'


def router_metrics(model):
    """
    How the routers divided the last step's global batch: {name: number} for a row of the log, {} without experts. Waits
    for the device.

    router/violation       tokens of the fullest expert over the mean, less 1 (MaxVio, arXiv 2408.15664): 0 is balance
    router/dead            share of the experts with less than a hundredth of the mean
    router/entropy         of the routers' probabilities, over ln E: 1 is undecided, 0 certain
    router/fullest_rank    where ranks divide the experts: tokens of the fullest rank over the mean, less 1. First the
                           micro-steps, and the groups of such ranks, are added up; in a single one it may be more
    Each is the mean over the layers, and router/worst_... is the value of the worst layer. Lists show which one it is:
    router/violation_of_layers, router/dead_of_layers    for each layer with experts, from the first to the last
    router/load_of_worst_layer    in the layer with the largest violation: tokens of each expert over the mean
    """
    if not model.routers or model.routers[0].seen_by_all is None:
        return {}
    # The host waits here. With so few numbers a CPU is quicker than a GPU.
    seen = torch.stack([router.seen_by_all for router in model.routers]).cpu()
    counts, entropy = seen[:, :-1], seen[:, -1]  # (L, E) and (L)
    load = counts / counts.mean(1, keepdim=True)  # (L, E)
    tokens, experts = counts.sum(1) / model.routers[0].k, counts.shape[1]
    of_layers = {'violation': load.amax(1) - 1, 'dead': (load < 1 / 100).double().mean(1)}
    of_layers['entropy'] = entropy / tokens / math.log(max(2, experts))
    on_a_rank = model.blocks[-1].mlp.experts.gate.n_matrices if isinstance(model, GPT) else experts
    if on_a_rank < experts:  # each rank holds equally many consecutive ones
        of_layers['fullest_rank'] = load.unflatten(1, (-1, on_a_rank)).mean(2).amax(1) - 1
    row = {f'router/{name}': values.mean().item() for name, values in of_layers.items()}
    for name, values in of_layers.items():
        row[f'router/worst_{name}'] = (values.amin() if name == 'entropy' else values.amax()).item()
    lists = {f'{name}_of_layers': of_layers[name] for name in ('violation', 'dead')}
    lists['load_of_worst_layer'] = load[of_layers['violation'].argmax()]
    return row | {f'router/{name}': [round(value, 4) for value in values.tolist()] for name, values in lists.items()}
