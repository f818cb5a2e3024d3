"""
Whether a run is well: losses and gradients that are numbers, weights that are the same on all ranks, ranks that make
progress.

    health.record_flights(out_dir)  # before the process group
    watchdog = health.Watchdog(out_dir, timeout_s)
    watchdog.at('forward', step)  # whenever something begins: cheap, it only sets a few variables
    with watchdog.allow('checkpoint', 7200): ...  # a phase of which nobody knows how long it takes
"""

import collections
import contextlib
import faulthandler
import itertools
import json
import math
import os
import shutil
import statistics
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist

from runtime.processes import ranks_in_words
from runtime.stopping import note_error

# --- bad steps --------------------------------------------------------------------------------------------------------

SPIKE_WINDOW, SPIKE_SIGMAS = 128, 6


def runs_ahead(device):
    """Whether the host only queues work there, and has to wait to know a result."""
    return device.type == 'cuda'


class Numbers:
    """One decision of all ranks, for each optimizer step, whether its loss and gradient can be trusted.

    On a GPU the decision stays there: the optimizer gets it as a flag and leaves everything as it is where that is set.
    If the host asked first, the GPU would be idle until the answer has come and the update has been queued. The host
    reads the decision a step later.
    """

    def __init__(self, max_bad_steps, loss_spike_guard, say, last_good, group=None, state=None):
        """max_bad_steps: this many steps in a row may be skipped. loss_spike_guard: skip a step, too, whose loss is
        SPIKE_SIGMAS standard deviations above the mean of the last SPIKE_WINDOW. say: on rank 0, called with a line.
        last_good(): where the last good checkpoint is. group: the ranks that train together. state: of state(), from a
        checkpoint."""
        self.max_bad_steps, self.loss_spike_guard, self.say, self.group = max_bad_steps, loss_spike_guard, say, group
        self.last_good = last_good
        self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.skipped, self.in_a_row, self.losses = 0, 0, collections.deque(maxlen=SPIKE_WINDOW)
        self.unread = None  # the step that must_skip() saw last, until read()
        self.loss = math.nan
        if state:
            self.skipped, self.in_a_row = state['skipped'], state['in_a_row']
            self.losses.extend(state['losses'])

    def state(self):
        self.read()
        return {'skipped': self.skipped, 'in_a_row': self.in_a_row, 'losses': list(self.losses)}

    def mean_loss(self):
        """Of the last step, over the targets of all ranks. Waits for the device."""
        self.read()
        return self.loss

    def must_skip(self, step, loss_sum, targets, grad_norm, may_overflow):
        """Whether the optimizer must skip step `step`; the same on all ranks. Collective.

        A bool, or on a GPU a 0-d float tensor there (1: skip), for optimizer.step(skip=...). With loss_spike_guard it
        is always a bool, since the host compares the losses.

        loss_sum: this rank's, 0-d; targets: what it is a sum over, on all ranks. grad_norm: of the gradient, or of this
        rank's part of it. may_overflow: true in fp16 while the loss scale can still be lowered; then GradScaler deals
        with gradients that are not finite, and only the loss is looked at here.
        Raises ValueError, on every rank, after max_bad_steps in a row.
        """
        self.read()
        gradient_is_bad = torch.zeros_like(loss_sum) if may_overflow else (~grad_norm.isfinite()).to(loss_sum)
        # The loss, and two flags of each rank: after one all-reduce all have the same numbers.
        n, own = len(self.ranks), self.ranks.index(dist.get_rank())
        numbers = torch.zeros(1 + 2 * n, dtype=torch.float64, device=loss_sum.device)
        numbers[0], numbers[1 + own], numbers[1 + n + own] = loss_sum.detach(), ~loss_sum.isfinite(), gradient_is_bad
        if n > 1:
            dist.all_reduce(numbers, group=self.group)
        if runs_ahead(grad_norm.device) and not self.loss_spike_guard:
            skip, arrived = (numbers[1:].sum() > 0).float(), None
            if numbers.is_cuda:
                numbers = numbers.to('cpu', non_blocking=True)  # into page-locked memory, behind what computes it
                arrived = torch.cuda.current_stream().record_event()
            self.unread = step, targets, numbers, arrived
            return skip
        self.unread = step, targets, numbers, None
        return self.read()

    def read(self):
        """Read the decision about the last step, where that has not been done: whether it is skipped. Waits for it."""
        if self.unread is None:
            return None
        (step, targets, numbers, arrived), self.unread = self.unread, None
        if arrived:
            arrived.synchronize()
        total, *flags = numbers.tolist()
        self.loss = total / targets
        n = len(self.ranks)
        bad_loss, bad_gradient = (
            [rank for rank, flag in zip(self.ranks, rank_flags, strict=True) if flag]
            for rank_flags in (flags[:n], flags[n:])
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
            return False
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row > self.max_bad_steps:
            raise ValueError(
                f'{problem} at step {step}, and so {self.in_a_row} bad steps in a row (max_bad_steps='
                f'{self.max_bad_steps}): the last good checkpoint is {self.last_good()}; go on from it with a lower '
                '--learning_rate, or look at the data of this step'
            )
        line = f'WARNING: {problem} at step {step}: the step is skipped on all ranks ({self.skipped} so far)'
        if dist.get_rank() == 0:
            self.say(line)
        elif dist.get_rank() == self.ranks[0]:  # of another replica
            print(f'[{self.ranks[0]}] {line}', flush=True)
        return True

    def _spike(self):
        if not self.loss_spike_guard or len(self.losses) < SPIKE_WINDOW:
            return None
        mean, sigma = statistics.fmean(self.losses), statistics.pstdev(self.losses)
        if self.loss <= mean + SPIKE_SIGMAS * sigma:
            return None
        return (
            f'loss {self.loss:.4g} is above {mean:.4g} + {SPIKE_SIGMAS} x {sigma:.2g} of the last {SPIKE_WINDOW} steps'
        )


def resume_loss_scale(scaler, saved):
    """fp16: go on with the loss scale of a checkpoint. A run in another dtype has saved none, {}: then as a new run."""
    if saved:
        scaler.load_state_dict(saved)


def share_overflow(scaler, optimizer):
    """fp16, after unscale_(): what overflows on one rank, in its part of the model, makes all of them skip the step."""
    for found_inf in scaler._found_inf_per_device(optimizer).values():
        dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)


def refuse_different_weights(named_parameters, step, last_good):
    """Compare checksums of what all ranks should hold alike, as under DistributedDataParallel. Collective.

    Raises ValueError on every rank that names the ranks and the first parameter that differ from most.
    """
    names, tensors = zip(*named_parameters, strict=True)
    # Of the bits: two sums of floats may be equal where two numbers are not.
    bits = {4: torch.int32, 2: torch.int16, 1: torch.int8}
    mine = torch.stack([tensor.detach().view(bits[tensor.itemsize]).sum(dtype=torch.int64) for tensor in tensors])
    everybodys = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, mine)
    everybodys = [tuple(checksums.tolist()) for checksums in everybodys]
    if len(set(everybodys)) == 1:
        return
    usual, count = collections.Counter(everybodys).most_common(1)[0]
    others = [rank for rank, checksums in enumerate(everybodys) if checksums != usual]
    who_differs = f'{ranks_in_words(others)} differ from those of the others'
    if 2 * count <= len(everybodys):
        who_differs = f'{ranks_in_words(list(range(len(everybodys))))} differ'
    first = next(name for column, name in enumerate(names) if len({checksums[column] for checksums in everybodys}) > 1)
    raise ValueError(
        f'weights of {who_differs} after step {step} ({first} first): memory or hardware of a machine; the last good '
        f'checkpoint is {last_good()}'
    )


# --- hangs ------------------------------------------------------------------------------------------------------------


class Watchdog:
    """
    Names the rank that hangs, before the collectives time out, which would name nobody.

    A thread on every rank writes into out_dir/.heartbeat what its rank is doing and how much it has done. A rank that
    has done nothing new for 0.8 timeout_s reads the others' files, twice. If no rank has moved in between, the one
    that has done least is the one that the others wait for: every rank prints which that is, and ends. While any rank
    moves, the job is only slow. A single process is not watched, for nobody waits for it.

    exchanges(): how many this rank has begun in all. It tells apart ranks that wait for each other within one phase.
    """

    def __init__(self, out_dir, timeout_s, exchanges=lambda: 0):
        self.rank, self.world_size, self.out_dir = dist.get_rank(), dist.get_world_size(), out_dir
        self.folder, self.patience = os.path.join(out_dir, '.heartbeat'), 0.8 * timeout_s
        self.tick, self.exchanges = timeout_s / 60, exchanges
        self.count, self.phase, self.step, self.since = 0, 'start', 0, time.monotonic()
        self.allowed, self.first_step, self.closed = self.patience, None, threading.Event()
        if self.world_size == 1:
            return
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.makedirs(self.folder, exist_ok=True)
        dist.barrier()
        self.stack = open(os.path.join(self.folder, f'rank_{self.rank}.stack'), 'w')
        self.main_thread = threading.main_thread().ident
        for work in (self._write_heartbeats, self._watch):
            threading.Thread(target=work, name='watchdog', daemon=True).start()

    def at(self, phase, step=None):
        """This rank begins `phase` now, of optimizer step `step` from here on."""
        self.count += 1
        self.phase, self.step, self.since = phase, self.step if step is None else step, time.monotonic()
        self.first_step = self.step if self.first_step is None else self.first_step

    @contextlib.contextmanager
    def allow(self, phase, seconds):
        """A phase that may take so long."""
        self.allowed = max(seconds, self.patience)
        self.at(phase)
        yield
        self.allowed = self.patience
        self.at(phase)

    def close(self):
        self.closed.set()
        faulthandler.cancel_dump_traceback_later()

    def _beat(self):
        return {'count': self.count + self.exchanges(), 'phase': self.phase, 'step': self.step}

    def _write_heartbeats(self):
        """A thread of its own: a file system that hangs must not keep the other one from seeing that."""
        path = os.path.join(self.folder, f'rank_{self.rank}.json')
        for written in itertools.count(1):
            # Where no thread can run, since the main one keeps Python's lock, the C library writes the stack.
            faulthandler.dump_traceback_later(self.patience, file=self.stack)
            with contextlib.suppress(OSError):
                with open(f'{path}.tmp', 'w') as file:
                    json.dump({**self._beat(), 'written': written}, file)
                os.replace(f'{path}.tmp', path)
            if self.closed.wait(self.tick):
                return

    def _watch(self):
        self.baseline, look_at = None, 0.0
        while not self.closed.wait(self.tick):
            limit = self.allowed * (4 if self.step == self.first_step else 1)  # torch.compile may take minutes there
            idle = time.monotonic() - self.since
            if idle < limit / 2:
                self.baseline = None
            elif self.baseline is None or time.monotonic() > look_at:
                look_at = time.monotonic() + limit / 2
                look = threading.Thread(target=self._look, daemon=True)  # files may hang: this one goes on without
                look.start()
                look.join(max(5 * self.tick, 1.0))
                if look.is_alive() and idle > limit:
                    self._end(
                        f'{ranks_in_words([self.rank])} made no progress, nor do files in {self.folder}', self._now()
                    )

    def _now(self):
        """The stack of the main thread, as text."""
        return ''.join(traceback.format_stack(sys._current_frames().get(self.main_thread)))

    def _beats(self):
        """{rank: its heartbeat}; this rank's own without a file. Who has no file was stopped before its first."""
        beats = {rank: {'count': -1, 'phase': 'start', 'step': 0, 'written': 0} for rank in range(self.world_size)}
        beats[self.rank] = {**self._beat(), 'written': time.time()}
        for rank in set(range(self.world_size)) - {self.rank}:
            with contextlib.suppress(OSError, ValueError):
                with open(os.path.join(self.folder, f'rank_{rank}.json')) as file:
                    beats[rank] = json.load(file)
        return beats

    def _look(self):
        """Compare the ranks with half a patience ago, and end this one if none has moved: somebody holds up the job."""
        with contextlib.suppress(OSError, ValueError):
            self.stack.seek(0)
            self.stack.write(self._now())
            self.stack.truncate()
            self.stack.flush()
        before, beats = self.baseline, self._beats()
        self.baseline = beats
        if before is None or any(before[rank]['count'] != beat['count'] for rank, beat in beats.items()):
            return  # they are slow, but they move: the collectives' own timeout decides
        if self.closed.is_set():
            return
        frozen = [rank for rank, beat in beats.items() if before[rank]['written'] == beat['written']]
        lowest = min(beat['count'] for beat in beats.values())
        behind = frozen or [rank for rank, beat in beats.items() if beat['count'] == lowest]
        where = f"phase '{beats[behind[0]]['phase']}' of step {beats[behind[0]]['step']}"
        seconds = f'{time.monotonic() - self.since:.0f} s'
        if len(behind) == self.world_size:
            line = f'all ranks have made no progress for {seconds} in {where}: they wait for each other, or the network'
        else:
            line = f'{ranks_in_words(behind)} made no progress for {seconds} in {where}; the others wait'
        stack = ''
        if self.rank == behind[0] or self.rank == min(set(beats) - {behind[0]}):  # itself may be stopped
            with contextlib.suppress(OSError):
                with open(os.path.join(self.folder, f'rank_{behind[0]}.stack')) as file:
                    stack = file.read()
            stack = stack or '  (unknown: its process is stopped, or its machine is gone)'
            stack = f'stack of rank {behind[0]}:\n{stack}'
        self._end(line, stack)

    def _end(self, line, stack):
        lines = [f'error: {line}', *([stack.rstrip()] if stack else [])]
        # In one write, since other ranks write there, too.
        sys.__stderr__.write(''.join(f'[{self.rank}] {line}\n' for line in lines))
        sys.__stderr__.flush()
        with contextlib.suppress(Exception):  # what NCCL has recorded, since its own timeout will not come
            if torch.cuda.is_available():
                with open(os.path.join(self.out_dir, f'flight_recorder_{self.rank}'), 'wb') as file:
                    file.write(torch._C._distributed_c10d._dump_nccl_trace())
        note_error(line)
        os._exit(1)


def record_flights(out_dir):
    """Have NCCL keep its last collectives, and write them into out_dir when one times out. Before the process group."""
    os.environ.setdefault('TORCH_NCCL_TRACE_BUFFER_SIZE', '2000')  # torch 2.11
    os.environ.setdefault('TORCH_FR_BUFFER_SIZE', '2000')  # its name from 2.12 on
    os.environ.setdefault('TORCH_NCCL_DUMP_ON_TIMEOUT', '1')
    os.environ.setdefault('TORCH_NCCL_DEBUG_INFO_TEMP_FILE', os.path.join(os.path.abspath(out_dir), 'flight_recorder_'))
