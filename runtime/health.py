"""
Three checks that a run is healthy: losses and gradients are finite, ranks that should hold the same weights do, and
every rank makes progress.

    health.record_flights(out_dir)  # before the process group is made
    watchdog = health.Watchdog(out_dir, timeout_s)
    watchdog.at('forward', step)  # at the beginning of each phase; cheap, since it only sets a few variables
    with watchdog.allow('checkpoint', 7200): ...  # a phase that may take this many seconds
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

from system import collectives
from system.files import check_form, no_link
from system.processes import ranks_in_words
from system.stopping import note_error

# --- bad steps --------------------------------------------------------------------------------------------------------

SPIKE_WINDOW, SPIKE_SIGMAS = 128, 6
SCALER = {
    'scale': float,
    'growth_factor': float,
    'backoff_factor': float,
    'growth_interval': int,
    '_growth_tracker': int,
}


def runs_ahead(device):
    """Whether work on this device is only queued by the host, which has to wait before it can read a result."""
    return device.type == 'cuda'


class Numbers:
    """Decides for each optimizer step, on all ranks alike, whether to skip it because its loss or gradient is bad.

    On a GPU the decision is never read by the host before the update: the optimizer gets it as a flag in GPU memory and
    changes nothing if the flag is set. Otherwise the GPU would idle while the host waits for the answer and then queues
    the update. The host reads the decision one step later, to log and count it.
    """

    def __init__(self, max_bad_steps, loss_spike_guard, say, last_good, group=None, state=None, changes=()):
        """max_bad_steps: how many steps in a row may be skipped. loss_spike_guard: also skip a step whose loss is more
        than SPIKE_SIGMAS standard deviations above the mean of the last SPIKE_WINDOW steps. say: called on rank 0 with
        a line. last_good(): returns the path of the last good checkpoint. group: the ranks that train together.
        state: what state() returned, from a checkpoint. changes: after so many steps other data are read, whose loss is
        another one, so the guard begins anew."""
        self.max_bad_steps, self.loss_spike_guard, self.say, self.group = max_bad_steps, loss_spike_guard, say, group
        self.last_good, self.changes = last_good, changes
        self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.skipped, self.in_a_row, self.losses = 0, 0, collections.deque(maxlen=SPIKE_WINDOW)
        self.unread = None  # must_skip()'s results for the last step, until read() has read them
        self.loss = math.nan
        if state:
            self.skipped, self.in_a_row = state['skipped'], state['in_a_row']
            self.losses.extend(state['losses'])

    def state(self):
        self.read()
        return {'skipped': self.skipped, 'in_a_row': self.in_a_row, 'losses': list(self.losses)}

    def mean_loss(self):
        """The last step's loss, averaged over the targets of all ranks. Waits for the device."""
        self.read()
        return self.loss

    def must_skip(self, step, loss_sum, targets, grad_norm, may_overflow):
        """Whether the optimizer must skip step `step`, for optimizer.step(skip=...); the same on all ranks. Collective.

        Returns a bool, or on a GPU a 0-d float tensor on that GPU (1 = skip). With loss_spike_guard it is always a
        bool, because the host has to compare the losses.

        loss_sum: 0-d, the sum of this rank's losses. targets: the number of targets on all ranks, by which the sum over
        ranks is divided. grad_norm: 0-d, of the whole gradient or of this rank's part of it. may_overflow: true in fp16
        while the loss scale can still be lowered; GradScaler then deals with gradients that are not finite, and only
        the loss is checked here.
        Raises ValueError on every rank when more than max_bad_steps in a row are bad.
        """
        self.read()
        gradient_is_bad = torch.zeros_like(loss_sum) if may_overflow else (~grad_norm.isfinite()).to(loss_sum)
        # One all-reduce gives all ranks the loss and two flags for each rank.
        n, own = len(self.ranks), self.ranks.index(dist.get_rank())
        numbers = torch.zeros(1 + 2 * n, dtype=torch.float64, device=loss_sum.device)
        numbers[0], numbers[1 + own], numbers[1 + n + own] = loss_sum.detach(), ~loss_sum.isfinite(), gradient_is_bad
        if n > 1:
            dist.all_reduce(numbers, group=self.group)
        if runs_ahead(grad_norm.device) and not self.loss_spike_guard:
            skip, arrived = (numbers[1:].sum() > 0).float(), None
            if numbers.is_cuda:
                numbers = numbers.to('cpu', non_blocking=True)  # queued behind the kernels that compute them
                arrived = torch.cuda.current_stream().record_event()
            self.unread = step, targets, numbers, arrived
            return skip
        self.unread = step, targets, numbers, None
        return self.read()

    def read(self):
        """Read the decision about the last step, if that has not been done yet: log it and count it. Waits for the
        device. Returns whether the step is skipped, or None if there was nothing to read."""
        if self.unread is None:
            return None
        (step, targets, numbers, arrived), self.unread = self.unread, None
        if step - 1 in self.changes:
            self.losses.clear()
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
            is_spike = not (bad_loss or bad_gradient)
            advice = '; if the loss is higher for good, with --loss_spike_guard=False' if is_spike else ''
            raise ValueError(
                f'{problem} at step {step}, and so {self.in_a_row} bad steps in a row (max_bad_steps='
                f'{self.max_bad_steps}): the last good checkpoint is {self.last_good()}; go on from it with a lower '
                f'--learning_rate, or look at the data of this step{advice}'
            )
        line = f'WARNING: {problem} at step {step}: the step is skipped on all ranks ({self.skipped} so far)'
        if dist.get_rank() == 0:
            self.say(line)
        elif dist.get_rank() == self.ranks[0]:  # the first rank of another replica, which has no log
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
    """fp16: continue with the loss scale of a checkpoint. A checkpoint of a run in another dtype has none ({}); then
    the scaler starts as in a new run."""
    if saved and scaler.is_enabled():
        check_form(saved, SCALER, "the checkpoint's state.json", 'scaler')
        scaler.load_state_dict(saved)


def share_overflow(scaler, optimizer):
    """fp16, after unscale_(): if any rank's part of the gradient has overflowed, make all ranks skip the step."""
    for found_inf in scaler._found_inf_per_device(optimizer).values():
        dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)


def refuse_different_weights(named_parameters, step, last_good):
    """Compare checksums of weights of which all ranks should hold the same copy, as in data parallelism. Collective.

    Raises ValueError on every rank if they differ. It names the ranks whose copies differ from those of the majority,
    and the first parameter that does.
    """
    names, tensors = zip(*named_parameters, strict=True)
    # Sums of the bits as integers: sums of floats may agree, by rounding, although the numbers differ.
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
    Ends a job that hangs and names the rank to blame. It acts before the collectives time out, because their error does
    not say which rank is missing.

    A thread on every rank keeps a heartbeat file in out_dir/.heartbeat: the current phase, and a count of the phases
    begun so far. A rank that makes no progress for 0.8 timeout_s reads the files of all ranks twice, after half of that
    time and at its end. If any count has changed in between, the job is only slow, and the watchdog lets it go on. If
    none has, the others are waiting for the rank with the lowest count, so every rank prints which rank that is, and
    exits. A single process is not watched, since no other rank waits for it.

    Exchanges within a phase, which are in collectives.begun, count as well, because ranks that wait for each other in
    one phase would otherwise have equal counts.
    """

    def __init__(self, out_dir, timeout_s):
        self.rank, self.world_size, self.out_dir = dist.get_rank(), dist.get_world_size(), out_dir
        self.folder, self.patience = os.path.join(out_dir, '.heartbeat'), 0.8 * timeout_s
        self.tick = timeout_s / 60
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
        """This rank begins `phase` now. step: the optimizer step that it belongs to; None = the same as before."""
        self.count += 1
        self.phase, self.step, self.since = phase, self.step if step is None else step, time.monotonic()
        self.first_step = self.step if self.first_step is None else self.first_step

    @contextlib.contextmanager
    def allow(self, phase, seconds):
        """A context for a phase that may take this many seconds."""
        self.allowed = max(seconds, self.patience)
        self.at(phase)
        yield
        self.allowed = self.patience
        self.at(phase)

    def close(self):
        self.closed.set()
        faulthandler.cancel_dump_traceback_later()

    def _beat(self):
        return {'count': self.count + collectives.begun, 'phase': self.phase, 'step': self.step}

    def _write_heartbeats(self):
        """Runs in a thread of its own, so that a hanging file system blocks this one but not _watch(), which reports
        it."""
        path = os.path.join(self.folder, f'rank_{self.rank}.json')
        for written in itertools.count(1):
            # If the main thread keeps the GIL, so that no Python thread runs, faulthandler writes the stack from C.
            faulthandler.dump_traceback_later(self.patience, file=self.stack)
            with contextlib.suppress(OSError):
                with open(f'{path}.tmp', 'w', opener=no_link) as file:
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
                look = threading.Thread(target=self._look, daemon=True)  # reading files may hang, so not in this thread
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
        """{rank: its heartbeat}; this rank's own is not read from its file. A rank without a file counts -1: it was
        stopped before it could write the first one."""
        beats = {rank: {'count': -1, 'phase': 'start', 'step': 0, 'written': 0} for rank in range(self.world_size)}
        beats[self.rank] = {**self._beat(), 'written': time.time()}
        for rank in set(range(self.world_size)) - {self.rank}:
            with contextlib.suppress(OSError, ValueError):
                with open(os.path.join(self.folder, f'rank_{rank}.json')) as file:
                    beats[rank] = json.load(file)
        return beats

    def _look(self):
        """Compare the ranks' heartbeats with those of half a patience ago, and end this rank if none has moved."""
        with contextlib.suppress(OSError, ValueError):
            self.stack.seek(0)
            self.stack.write(self._now())
            self.stack.truncate()
            self.stack.flush()
        before, beats = self.baseline, self._beats()
        self.baseline = beats
        if before is None or any(before[rank]['count'] != beat['count'] for rank, beat in beats.items()):
            return  # they are slow, but they move; whether that is too slow is for the collectives' own timeout
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
        if self.rank == behind[0] or self.rank == min(set(beats) - {behind[0]}):  # another one, if it cannot itself
            with contextlib.suppress(OSError):
                with open(os.path.join(self.folder, f'rank_{behind[0]}.stack')) as file:
                    stack = file.read()
            stack = stack or '  (unknown: its process is stopped, or its machine is gone)'
            stack = f'stack of rank {behind[0]}:\n{stack}'
        self._end(line, stack)

    def _end(self, line, stack):
        lines = [f'error: {line}', *([stack.rstrip()] if stack else [])]
        # In one write, so that it does not mix with lines of other ranks.
        sys.__stderr__.write(''.join(f'[{self.rank}] {line}\n' for line in lines))
        sys.__stderr__.flush()
        with contextlib.suppress(Exception):  # NCCL would dump its record at its timeout, which this process won't see
            if torch.cuda.is_available():
                with open(os.path.join(self.out_dir, f'flight_recorder_{self.rank}'), 'wb') as file:
                    file.write(torch._C._distributed_c10d._dump_nccl_trace())
        note_error(line)
        os._exit(1)


def record_flights(out_dir):
    """Have NCCL record its last collectives, and write the record into out_dir when one of them times out. Call it
    before the process group is made."""
    # torch 2.11 to 2.15 know these names; the older TORCH_NCCL_TRACE_BUFFER_SIZE warns, even beside the new one.
    os.environ.setdefault('TORCH_FR_BUFFER_SIZE', '2000')
    os.environ.setdefault('TORCH_FR_DUMP_TEMP_FILE', os.path.join(os.path.abspath(out_dir), 'flight_recorder_'))
    os.environ.setdefault('TORCH_NCCL_DUMP_ON_TIMEOUT', '1')
