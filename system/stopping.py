"""
How a run stops before its last step: by a signal, a file STOP, or the end of a Slurm job's time. And how it refuses to
start again after it has failed repeatedly at the same step.
"""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from system import errors
from system.collectives import on_rank_0
from system.files import read_json, remove_if_there, write_file

INTERRUPTIONS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # end a run that nobody planned to cut into parts
STOP_FILE, END_OF_JOB = 65, 66  # reasons other than a signal; signals have smaller numbers
AGAIN_AFTER_S = 2  # a second Ctrl-C counts after this time, since torchrun hands the first one on to its ranks, too
received = []  # the signals that this process has received, in order


def catch_signals(more=()):
    """From here on signals only ask this rank to stop at a step boundary. A second Ctrl-C ends it at once; any other
    second signal changes nothing.

    more: SIGINT, once there is something to save; until then Ctrl-C ends the process. SIGHUP, which a terminal sends
    when it goes away, stays ignored where it is, as under nohup.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, *more):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: received.append(number))


def end_of_slurm_job():
    """
    When Slurm will end this job, in seconds of time.time(); infinity outside of a job or if it is unknown.

    A shell may hold the variables of a job that has ended, or of another one (tmux outlives jobs; a login shell that
    one of them started). An end that has passed, and the end of a job other than that of this process, say nothing.
    """
    job = os.environ.get('SLURM_JOB_ID')
    if job_of_process() not in (None, job):
        return math.inf
    with contextlib.suppress(KeyError, ValueError):
        end = float(os.environ['SLURM_JOB_END_TIME'])
        return end if end > time.time() else math.inf
    if job:  # Slurm before 23.02 lacks that variable; squeue prints the time left: D-HH:MM:SS
        command = ['squeue', '-h', '-j', job, '-o', '%L']
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            left = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
            if found := re.fullmatch(r'(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)', left):
                days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
                return time.time() + ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return math.inf


def job_of_process(cgroup='/proc/self/cgroup'):
    """The id of the Slurm job whose control group this process is in; None if there is none or it cannot be seen."""
    with contextlib.suppress(OSError):
        if found := re.search(r'/job_(\d+)(/|$)', Path(cgroup).read_text(), re.MULTILINE):
            return found[1]
    return None


class StopRequest:
    """A request to stop early: a signal to any rank, the file STOP in out_dir, or the end of the Slurm job's time.

    All ranks make one and call agreed() at the same step boundaries. What a rank sees during a step it tells the others
    at the end of it, and all of them stop at the end of the next one: so nobody waits for an answer. A run that stops
    early leaves the file PREEMPTED, which holds the step.
    """

    def __init__(self, out_dir, stop_before_end_s=0, say=print, when=None):
        """stop_before_end_s: how many seconds before the end of the job's time to stop, in order to save; 0 = ignore
        the job's time. say: called on rank 0 with a line that says when that will be. when: called on each signal with
        how often agreed() has been called; returns in words when the run will stop. None = nothing is said."""
        import torch.distributed as dist

        catch_signals(more=[signal.SIGINT])
        self.out_dir, self.stop_file = out_dir, os.path.join(out_dir, 'STOP')
        self.rank, self.looked_at, self.reason = dist.get_rank(), -math.inf, ''
        self.exit_code = 0  # of a run that ended with end()
        self.say, self.when, self.asked = say, when, 0
        if when:
            self._answer_signals()
        self.stops_at, self.met_at, self.between = math.inf, time.monotonic(), 0.0
        if self.rank == 0:
            left = end_of_slurm_job() - time.time() if stop_before_end_s else math.inf
            if left < math.inf:  # but a short job trains for 3/4 of its time
                self.stops_at = time.time() + max(left - stop_before_end_s, 0.75 * left)
                at = time.strftime('%H:%M:%S', time.localtime(self.stops_at))
                say(f'the job has {left:.0f} s left: saving at {at}')
            for marker in ('PREEMPTED', 'DONE'):  # left by an earlier start; now the run is under way again
                remove_if_there(os.path.join(out_dir, marker))
        self._send()

    def agreed(self, now=False):
        """Whether any rank had seen a request one step ago: the same answer on every rank, and no rank waits for it.

        now: ask all ranks now and wait for their answers, for ranks that meet rarely. These also have to stop if the
        job's time would be over before they meet again.
        """
        self.asked += 1
        flag, work = self.exchange
        work.wait()  # it was sent one step ago, so it has long arrived
        if now and not flag.item():
            self.between, self.met_at = time.monotonic() - self.met_at, time.monotonic()
            self._send()
            flag, work = self.exchange
            work.wait()
        rank, cause = divmod(int(flag.item()), 128)
        if cause:
            what = {STOP_FILE: f'there is a file {self.stop_file}', END_OF_JOB: "the job's time is nearly over"}
            self.reason = what.get(cause) or f'rank {rank} got {signal.Signals(cause).name}'
            self.exit_code = 128 + cause if cause in INTERRUPTIONS else 0
        elif not now:
            self._send()
        return bool(cause)

    def _answer_signals(self):
        """Say at once, on rank 0, what a signal to it will do, and end the process at a second Ctrl-C. In a thread, to
        which Python's handler in C writes: others wait until the main thread is back from a kernel or a collective."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

        def answer():
            first = {}  # number of a signal: when it came first
            while numbers := os.read(reading, 1):
                number, now = numbers[0], time.monotonic()
                if number not in first:
                    first[number] = now
                    more = '; Ctrl-C again ends it now' if number == signal.SIGINT else ''
                    if 'TORCHELASTIC_RUN_ID' in os.environ and number in INTERRUPTIONS:
                        more += '; torchrun ends it after 30 s'
                    self._tell(f'{signal.Signals(number).name}: {self.when(self.asked)}{more}')
                elif number == signal.SIGINT and now - first[number] > AGAIN_AFTER_S:
                    self._tell('ended by a second Ctrl-C, without saving: the same command goes on from what is saved')
                    os._exit(128 + number)

        threading.Thread(target=answer, name='signals', daemon=True).start()

    def _tell(self, line):
        if self.rank == 0:
            self.say(line)

    def _send(self):
        """Start an all-reduce of what the ranks have seen."""
        import torch
        import torch.distributed as dist

        cause = self.seen()
        flag = torch.tensor([float(self.rank * 128 + cause if cause else 0)])
        self.exchange = flag, dist.all_reduce(flag, op=dist.ReduceOp.MAX, async_op=True)  # on the host, over gloo

    def seen(self):
        """The request that this rank has seen: the number of a signal, STOP_FILE or END_OF_JOB; 0 = none."""
        if received:
            return int(received[0])
        if self.rank != 0 or time.monotonic() - self.looked_at < 0.5:  # spares a shared file system
            return 0
        self.looked_at = time.monotonic()
        if time.time() + self.between > self.stops_at:
            return END_OF_JOB
        return STOP_FILE if os.path.exists(self.stop_file) else 0

    def end(self, step, max_iters, early=''):
        """
        The run ends here, saved at `step`. Rank 0 writes the file DONE, or after a request PREEMPTED and removes STOP.

        early: why it ends before max_iters although nobody asked for it; '' = it does not. Returns a line that says why
        it ended. Then exit_code is what a shell makes of the interruption (130 after Ctrl-C), so that in
        `train && export` nothing is exported. It is 0 where the run is meant to go on later, since torchrun would start
        its ranks again otherwise; and on other ranks than 0, since torchrun kills the rest 30 s after one has failed,
        and rank 0 is the last to end.
        """
        is_done = step == max_iters or early
        self.exit_code = self.exit_code if self.rank == 0 and not is_done else 0
        if self.rank == 0:
            if is_done:
                reason = f'{step} of {max_iters} steps: {early}' if early and step < max_iters else max_iters
                write_file(os.path.join(self.out_dir, 'DONE'), f'{reason}\n')
            else:
                write_file(os.path.join(self.out_dir, 'PREEMPTED'), f'{step}\n')
                remove_if_there(self.stop_file)
            remove_if_there(os.path.join(self.out_dir, STARTS))
        if is_done:
            why = f': {early}; a larger --patience goes on' if early and step < max_iters else ''
            return f'done: {step} of {max_iters} steps{why}, files in {self.out_dir}'
        after = '; what torchrun prints below is harmless' * bool(
            self.exit_code and 'TORCHELASTIC_RUN_ID' in os.environ
        )
        return f'stopped as asked ({self.reason}): {step} of {max_iters} steps; the same command goes on{after}'


# --- repeated failures ------------------------------------------------------------------------------------------------

STARTS = '.starts.json'  # from which step and with which command the run was started, and how many times in a row
starts_file = None


def count_start(out_dir, step, max_failures):
    """Count a start of training at `step`. For every rank. The count begins anew after a checkpoint, after an orderly
    end, and with another command.

    Raises ValueError if the same command has already been started max_failures times from this step without getting
    further, since it would fail again. max_failures=0: never.
    """
    global starts_file
    starts_file = os.path.join(out_dir, STARTS)
    errors.take_note = note_error
    on_rank_0(_count_start, out_dir, step, max_failures)


def _count_start(out_dir, step, max_failures):
    now, before = {'step': step, 'command': sys.argv, 'count': 1, 'error': ''}, read_starts()
    if (before.get('step'), before.get('command')) == (step, sys.argv):
        if 0 < max_failures <= before['count']:
            last = f'; the last error: {before["error"]}' if before['error'] else ''
            raise ValueError(
                f'out_dir={out_dir}: {before["count"]} starts in a row from step {step} have failed before the '
                f'next checkpoint{last}; mend that, then delete {starts_file}, or raise --max_failures'
            )
        now['count'] = before['count'] + 1
    write_file(starts_file, json.dumps(now))


def read_starts():
    """The content of STARTS, {} if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(Path(starts_file), {'step': int, 'command': [str], 'count': int, 'error': str})
    return {}


def note_error(line):
    """Keep the error that ends this run for count_start()'s message. The first rank to fail is kept."""
    starts = read_starts() if starts_file else {}
    if starts and not starts['error']:
        with contextlib.suppress(OSError):
            write_file(starts_file, json.dumps(starts | {'error': line[:300]}))
