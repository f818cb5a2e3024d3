"""
How tests start processes: scripts as a user starts them, or ranks forked from a server that has imported torch. Forking
is what most tests do, since importing torch takes longer than most of their runs.

    run_script      a script as a user starts it, by python or by torchrun
    Job             the same in the background; forked, unless it is to be started by torchrun
    run_forked      a Job that has to end well; returns what it printed
    run_many        several runs, one after the other, in the same ranks
    run_ranks       forked ranks, each with its own command; returns exit code and output of each
    fork_script     the same, where all have one command
    refusals        the same, where each rank has to end with one line; returns the lines
    function_of     a function of a script, without the script
    run_function    a function on forked ranks, in one gloo group; returns what it returned on each
    in_own_process  a test that runs in a forked process
    start_and_stop_behind    a forked script that stands still in the middle of what it writes
    start_agent     torchrun's agent of one of several nodes

    python tests/launch.py 2 train_ddp.py --max_iters=5     # what torchrun does, with one import of torch for all ranks
"""

import ast
import contextlib
import fcntl
import fnmatch
import functools
import gc
import importlib
import itertools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import namedtuple
from pathlib import Path
from unittest import mock

from faults import REPO, children_of, inject, is_stopped, send, wait_until

if str(REPO) not in sys.path:  # where this file is started as a script
    sys.path.insert(0, str(REPO))

# Tests import these from here, as they do everything that starts processes.
from benchmarks.runs import (  # noqa: F401
    LAUNCHERS_VARIABLES,
    SHARED,
    TINY_EXPERTS,
    TINY_MODEL,
    TINY_RUN,
    TINY_SYNTHETIC,
    command_of,
    environment,
    run_script,
)

if 'TEST_SEED' in os.environ:
    import seeds  # noqa: F401 - other random numbers, see there

GRACE = 10  # seconds from SIGTERM to SIGKILL when fork_ranks() ends the other ranks; torchrun waits 30
Ended = namedtuple('Ended', 'returncode stdout stderr')  # of one rank


# Ports below those that Linux hands out (32768 and above); each process begins to look at another one. A process that
# takes a port locks the byte of that number in a file for as long as it lives, so no other test takes the same one.
PORTS = itertools.cycle(range(10_000, 30_000))
PORTS = itertools.islice(PORTS, os.getpid() * 16 % 20_000, None)
LOCKS = Path(tempfile.gettempdir(), f'ports_of_tests_{os.getuid()}')


@functools.cache
def locks_of(pid):
    """The file with the locks, opened by the process `pid`. A forked process opens it anew, since closing an inherited
    one would give up the locks. Its folder is everybody's: a link that another user has put there is not followed."""
    return os.open(LOCKS, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def free_ports(count):
    """Ports on which nobody listens, and which no other test is given as long as this process lives."""
    ports, locks = [], locks_of(os.getpid())
    while len(ports) < count:
        port = next(PORTS)
        with contextlib.suppress(OSError):
            fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            socket.create_server(('', port)).close()
            ports.append(port)
    return ports


# --- as a user does ---------------------------------------------------------------------------------------------------


def prepare_tiny(folder):
    """Make a data_dir with the dataset 'tiny', 40 modules of the standard library as bytes, and return it."""
    text, data_dir = Path(folder, 'text'), Path(folder, 'data')
    text.mkdir()
    for number, path in enumerate(sorted(Path(os.__file__).parent.glob('*.py'))[:40]):
        (text / f'{number:02}.txt').write_bytes(path.read_bytes()[:20000])
    keys = [f'--dataset={text}', '--tokenizer=bytes', f'--data_dir={data_dir}', '--name=tiny', '--val_fraction=0.1']
    run_script('prepare_data.py', *keys)
    return data_dir


def start_agent(script, *arguments, nproc, torchrun, log, **env):
    """Start torchrun's agent of one node. torchrun: its options for the rendezvous. log: file for its output."""
    command = command_of(script, *arguments, nproc=nproc, torchrun=torchrun)
    with open(log, 'w') as file:
        return subprocess.Popen(command, cwd=REPO, env=environment(**env), stdout=file, stderr=file)


# --- forked ranks -----------------------------------------------------------------------------------------------------

# Importing torch takes longer than these short runs, so ranks are forked from a server that has imported it.
CONTEXT = multiprocessing.get_context('forkserver')
IMPORTED = (
    'torch torch.distributed.checkpoint torch.distributed.fsdp torch._dynamo data diloco fsdp_manual model optim '
    'pipeline_manual tensor_manual '
    'runtime.checkpoint system.errors planning.report runtime.health runtime.log runtime.meter runtime.begin '
    'huggingface.finetune exchange.diloco_check text.tokenizer transformers.models.llama.modeling_llama '
    'transformers.models.gpt2.modeling_gpt2 transformers.models.auto.modeling_auto'.split()
)
CONTEXT.set_forkserver_preload(IMPORTED)


def fork(target, *arguments):
    """Start target(*arguments) in a process forked from the server; returns the multiprocessing.Process."""
    with mock.patch.dict(os.environ, OMP_NUM_THREADS='1', HF_HUB_OFFLINE='1', TOKENIZERS_PARALLELISM='false'):
        multiprocessing.forkserver.ensure_running()  # with these, since OpenMP and transformers read them at import
    process = CONTEXT.Process(target=target, args=arguments)
    process.start()
    return process


def join_all(processes, timeout):
    """Wait for processes, and kill those that still run after `timeout` seconds. Returns the indices of these."""
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
    hung = [number for number, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    return hung


def write_output_to(stdout, stderr):
    """Send what this process prints to two files, or to one."""
    for descriptor, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)


def run_rank(command, place, fault=None):
    """Be the rank that the variables in `place` describe: run a script, and end this process with its exit code."""
    import torch

    gc.freeze()  # what was forked is no garbage: looking through it would take longer than the steps of most runs
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the suite runs in the background of a shell
    if place:
        os.environ.update(MASTER_ADDR='127.0.0.1', **{name: str(value) for name, value in place.items()})
        os.environ.update(TORCHELASTIC_RUN_ID='forked')  # so that ranks end with their launcher
    os.environ.setdefault('GLOO_SOCKET_IFNAME', 'lo')
    sys.argv = command
    # A test that has loaded a model's own code has left its folder here, which would hide the one of this rank.
    sys.path[:] = [folder for folder in sys.path if not Path(folder, 'transformers_modules').is_dir()]
    sys.path.insert(0, str(REPO))
    os.chdir(REPO)
    code = 1
    try:
        if fault:
            inject(**fault)
        runpy.run_path(command[0], run_name='__main__')
        code = 0
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else int(bool(request.code))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(code)  # finalizing all imported modules would take seconds


def places_of(nproc):
    """What torchrun tells each of nproc ranks on one node."""
    return [{'RANK': n, 'LOCAL_RANK': n, 'WORLD_SIZE': nproc, 'LOCAL_WORLD_SIZE': nproc} for n in range(nproc)]


def run_ranks(commands, places=None, **env):
    """
    Run one forked rank for each of `commands` (lists: a script and its arguments), and wait for all.

    places: the variables by which a launcher tells each rank its place, {} where none has started it; None: those of
    one node.
    Returns [Ended(returncode, stdout, stderr), ...]. A rank that takes longer than 15 minutes is killed.
    """
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for number, (command, place) in enumerate(zip(commands, places or places_of(len(commands)), strict=True)):
            script, *arguments = command
            command = [str(REPO / script), *map(str, arguments)]
            place = {'MASTER_PORT': port, **place} if place else {}
            processes.append(fork(run_alone, command, f'{folder}/{number}', place, {**environment(), **env}))
        join_all(processes, 900)
        said = [[Path(f'{folder}/{n}.{name}').read_text() for name in ('out', 'err')] for n in range(len(commands))]
    return [Ended(process.exitcode, *texts) for process, texts in zip(processes, said, strict=True)]


def fork_script(script, *arguments, nproc=1, check=True, **env):
    """run_ranks() with the same command on each of nproc ranks, all of which have to exit with 0 if `check`."""
    ranks = run_ranks([[script, *arguments]] * nproc, **env)
    for rank in ranks if check else ():
        assert rank.returncode == 0, f'{script} {arguments}\n{rank.stdout}\n{rank.stderr}'
    return ranks


def refusals(commands, places=None):
    """The line with which each rank of run_ranks() ends, without the rank. The test fails unless it is one line."""
    places, lines = places or places_of(len(commands)), []
    for place, ended in zip(places, run_ranks(commands, places), strict=True):
        said = ended.stdout + ended.stderr
        found = re.findall(rf'^\[{place["RANK"]}\] (error: .*|stopped .*)', said, re.MULTILINE)
        assert ended.returncode in (1, 2) and len(found) == 1 and 'Traceback' not in said, said
        lines += found
    return lines


def run_alone(command, output, place, env):
    os.environ.clear()
    os.environ.update(env)
    write_output_to(f'{output}.out', f'{output}.err')
    run_rank(command, place)


def start_and_stop_behind(path, script, *arguments, before='*'):
    """
    Fork a script and wait until it has stopped (SIGSTOP) at the first rename after it has made the file `path`.

    before: a pattern for the name that is about to be given. Returns the multiprocessing.Process.
    """
    (place,), (port,) = places_of(1), free_ports(1)
    command = [str(REPO / script), *map(str, arguments)]
    process = fork(stop_behind, str(path), before, command, {'MASTER_PORT': port, **place}, environment())
    wait_until(lambda: is_stopped(process.pid) or not process.is_alive(), 900)
    assert process.is_alive(), f'{script} has ended without {path}'
    return process


def stop_behind(path, before, command, place, env):
    def stop(event, arguments):
        if event == 'os.rename' and os.path.exists(path) and fnmatch.fnmatch(os.path.basename(arguments[1]), before):
            os.kill(os.getpid(), signal.SIGSTOP)

    sys.addaudithook(stop)
    os.environ.clear()
    os.environ.update(env)
    write_output_to('/dev/null', '/dev/stderr')
    run_rank(command, place)


def run_function(world_size, function, *arguments, timeout=1200, backend='gloo'):
    """[function(*arguments) on rank 0, 1, ...], each rank a forked process, all in one process group.

    backend: None = without a group. Returns None for a rank that has ended its own process. Raises AssertionError with
    the tracebacks of ranks that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = start_function(world_size, folder, function, *arguments, backend=backend)
        hung = join_all(processes, timeout)
        results = results_in(folder, world_size)
        assert not hung, f'ranks {hung} still ran after {timeout} s'
        assert [process.exitcode for process in processes] == [0] * world_size
        return results


def in_own_process(test):
    """A test that runs in a process of its own, where nothing has computed a gradient: see proving/ranks.py."""

    @functools.wraps(test)
    def run(**arguments):
        run_function(1, call_wrapped, test.__module__, test.__name__, arguments, backend=None)

    return run


def call_wrapped(module, name, arguments):
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


def start_function(world_size, folder, function, *arguments, backend='gloo'):
    """Start the processes of run_function(), which leave what their function returns in `folder`; returns them."""
    pickled = pickle.dumps((function, arguments))
    return [fork(call_on_rank, rank, world_size, folder, backend, pickled) for rank in range(world_size)]


def results_in(folder, world_size):
    """What the ranks of start_function() have left in `folder`. Raises AssertionError with their tracebacks."""
    errors = [path.read_text() for path in sorted(Path(folder).glob('error_*'))]
    assert not errors, '\n'.join(errors)
    results = [Path(folder, f'result_{rank}') for rank in range(world_size)]
    return [pickle.loads(path.read_bytes()) if path.exists() else None for path in results]


def call_on_rank(rank, world_size, folder, backend, pickled):
    import torch
    import torch.distributed as dist

    os.environ.setdefault('GLOO_SOCKET_IFNAME', 'lo')
    torch.set_num_threads(1)
    gc.freeze()  # as in run_rank()
    try:
        function, arguments = pickle.loads(pickled)
        if backend:
            dist.init_process_group(backend, init_method=f'file://{folder}/store', rank=rank, world_size=world_size)
        Path(folder, f'result_{rank}').write_bytes(pickle.dumps(function(*arguments)))
        if backend:
            dist.destroy_process_group()
    except BaseException:
        Path(folder, f'error_{rank}').write_text(f'rank {rank}: {traceback.format_exc()}')
    sys.stdout.flush()
    os._exit(0)  # finalizing Python after gloo aborts now and then


# --- jobs -------------------------------------------------------------------------------------------------------------


class Job:
    """A train script in the background, started by torchrun or forked, which saves 3 seconds per start."""

    def __init__(self, script, arguments, nproc, log, fault=None, torchrun=False, **env):
        """log: file for the output of all ranks. fault: {'kind': ..., ...} as for inject(). env: more variables."""
        self.nproc, self.log, self.torchrun = nproc, Path(log), torchrun
        command = [str(REPO / script), *map(str, arguments)]
        if torchrun:
            if fault:
                options = [f'--{key}={value}' for key, value in fault.items() if key != 'kind']
                command = ['tests/faults.py', fault['kind'], *options, '--', *command]
            self.process = start_agent(*command, nproc=nproc, torchrun=['--standalone'], log=log, **env)
        else:
            self.log.write_text('')
            self.process = fork(lead_ranks, command, nproc, str(log), fault, environment(**env))
        self.pid = self.process.pid

    def ranks(self):
        """The ranks' processes, once all have been started."""
        return children_of(self.pid)[: self.nproc]

    def is_running(self):
        return self.process.poll() is None if self.torchrun else self.process.is_alive()

    def text(self):
        return self.log.read_text()

    def wait(self, seconds=1800):
        """The exit codes of all ranks of a forked job, or the one of torchrun. AssertionError if it does not end."""
        try:
            wait_until(lambda: not self.is_running(), seconds, self.text)
        finally:
            self.end()
        if self.torchrun:
            return self.process.returncode
        codes = Path(f'{self.log}.codes')
        return json.loads(codes.read_text()) if codes.exists() else None

    def wait_for(self, condition, seconds=900):
        """Wait for a condition that comes true while the job runs."""
        wait_until(lambda: condition() or not self.is_running(), seconds, self.text)
        assert condition(), f'the job ended before that\n{self.text()}'

    def end(self):
        """Kill the processes that still run."""
        for pid in [*children_of(self.pid), self.pid] if self.is_running() else []:
            send(pid)
        if self.torchrun:
            self.process.wait()
        else:
            self.process.join()


def lead_ranks(command, nproc, log, fault, env):
    """Do what torchrun does, in a process of its own: start the ranks, and when one fails ask the others to end.

    Leaves the exit codes of the ranks in LOG.codes.
    """
    Path(f'{log}.codes').unlink(missing_ok=True)
    os.environ.clear()
    os.environ.update(env)
    write_output_to(log, log)
    Path(f'{log}.codes').write_text(json.dumps(fork_ranks(command, nproc, fault)))


def fork_ranks(command, nproc, fault=None):
    """Fork the ranks from this process; returns their exit codes."""
    (port,) = free_ports(1)
    ranks = []
    for place in places_of(nproc):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            run_rank(command, {**place, 'MASTER_PORT': port}, fault)
    codes, kill_at = {}, None
    while len(codes) < nproc:
        pid, status = os.waitpid(-1, os.WNOHANG)
        left = [pid for rank, pid in enumerate(ranks) if rank not in codes]
        if pid == 0:
            time.sleep(0.005)
            if kill_at is not None and time.monotonic() > kill_at:
                for pid in left:
                    send(pid)
            continue
        codes[ranks.index(pid)] = os.waitstatus_to_exitcode(status)
        if status != 0 and kill_at is None:
            kill_at = time.monotonic() + GRACE
            for pid in left:
                send(pid, signal.SIGTERM)
    return [codes[rank] for rank in range(nproc)]


def run_forked(script, *arguments, nproc=1, log, **env):
    """Run a script in nproc forked ranks, all of which have to exit with 0. Returns what they printed."""
    job = Job(script, arguments, nproc, log, **env)
    codes = job.wait()
    command = f'{script} {" ".join(map(str, arguments))}'
    assert codes == [0] * nproc, f'{command}\n{job.text()}\nended with {codes}'  # last: of a long text CI shows the end
    return job.text()


def function_of(script, name, **names):
    """A function as it stands in a script, which sees `names` as its globals: without starting the script."""
    import torch
    import torch.nn.functional as F

    tree = ast.parse((REPO / script).read_text())
    (node,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    names |= {'torch': torch, 'F': F}
    exec(compile(ast.Module([node], []), script, 'exec'), names)
    return names[name]


def run_many(cases, nproc, folder):
    """Run cases (see tests/many_runs.py) in nproc processes that are started once; {name: what rank 0 held}."""
    if not cases:
        return {}
    path = Path(folder) / f'cases_{nproc}_{len(os.listdir(folder))}.json'
    path.write_text(json.dumps(cases))
    run_forked('tests/many_runs.py', path, nproc=nproc, log=f'{path}.log')
    return json.loads(Path(f'{path}.results').read_text())


if __name__ == '__main__':
    sys.path.insert(0, str(REPO))
    for name in IMPORTED[:4]:
        importlib.import_module(name)
    sys.exit(int(any(fork_ranks(sys.argv[2:], int(sys.argv[1])))))
