"""
Forked ranks: a process that has imported torch once serves many layouts, each in ranks of its own.

    results = run_ranks(4, function)     # [function(rank) on rank 0, 1, ...]; raises RankFailed with the first error
"""

import gc
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from system.errors import first_line, is_lost_peer, is_users_mistake

GRACE_S = 10  # for the others, once a rank has failed: they may have seen the same mistake


class RankFailed(Exception):
    """A rank ended with an error. is_refusal: it is one line of this project's, for a user's mistake."""

    def __init__(self, line, text, is_refusal):
        super().__init__(line)
        self.text, self.is_refusal = text, is_refusal


def run_ranks(size, function, timeout_s=600, log=os.devnull):
    """Call function(rank) in `size` forked processes, which find what torchrun would tell them in their environment.

    log: the file that gets what they print. Returns what each has returned, by way of torch.save. Call it before this
    process computes a gradient or uses a GPU: forks of one that has cannot.
    """
    with tempfile.TemporaryDirectory(prefix='prove-') as folder:
        with socket.create_server(('127.0.0.1', 0)) as server:
            port = server.getsockname()[1]
        sys.stdout.flush()
        running = {}
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_PORT=port)
                os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR='127.0.0.1')
                be_a_rank(rank, function, Path(folder), log)
            running[pid] = rank
        lost = wait_for(running, timeout_s)
        errors = {rank: torch.load(path) for rank in lost if (path := Path(folder, f'error_{rank}')).exists()}
        for *error, has_lost_a_peer in errors.values():
            if not has_lost_a_peer:
                raise RankFailed(*error)
        if lost:
            silent = [rank for rank in lost if rank not in errors]
            rank = (silent or [*lost])[0]
            raise RankFailed(f'rank {rank} {lost[rank]}', '', False)
        return [torch.load(f'{folder}/result_{rank}', weights_only=False) for rank in range(size)]


def be_a_rank(rank, function, folder, log):
    """Call the function, leave its result or its error in the folder, and end this process."""
    os.environ.setdefault('GLOO_SOCKET_IFNAME', 'lo')
    os.environ['TORCHELASTIC_RUN_ID'] = 'forked'  # a rank ends with this program
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    gc.freeze()  # what was forked is no garbage: looking through it would take longer than a small step
    torch.set_num_threads(1)  # OpenMP would wait for the threads with which the parent has computed: a fork has none
    code = 1
    try:
        torch.save(function(rank), folder / f'result_{rank}')
        code = 0
    except BaseException as error:
        is_refusal = is_users_mistake(error) or isinstance(error, SystemExit)
        line = first_line(error)
        if 'forked subprocess' in line or 'fork-based' in line:  # said by CUDA and by autograd
            line = f'ranks are forked: call this before this process computes a gradient or uses a GPU ({line})'
        said = (line, traceback.format_exc(), is_refusal, is_lost_peer(error))
        torch.save(said, folder / f'error_{rank}')
    finally:
        sys.stdout.flush()
        os._exit(code)  # finalizing Python after gloo aborts now and then


def wait_for(running, timeout_s):
    """Wait for {pid: rank}; returns {a rank that failed: how}. After the first, or timeout_s, the others are killed."""
    deadline, failed = time.monotonic() + timeout_s, {}
    while running:
        for pid in [*running]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended and status:
                number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
                more = ' (out of memory?)' if number == signal.SIGKILL else ''
                how = f'was killed by {signal.Signals(number).name}{more}' if number else 'failed'
                failed.setdefault(running[pid], how)
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if ended:
                del running[pid]
        if running and time.monotonic() > deadline:
            how = 'waited for the others' if failed else f'took longer than {timeout_s} s'
            for pid, rank in running.items():
                failed.setdefault(rank, how)
                os.kill(pid, signal.SIGKILL)
            deadline = float('inf')
        time.sleep(0.005)
    return failed
