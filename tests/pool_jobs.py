"""
Jobs of a pool that train no model: an inner step moves a few small tensors by what its data says. Processes and stores
are real. A job can be slow, be killed at any write, write damaged deltas, or lose the answers of the store.
"""

import contextlib
import fnmatch
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from urllib.request import urlopen

from faults import wait_until
from launch import free_ports, join_all, results_in, start_function, write_output_to

SHAPES = {'0.weight': (7, 3), '1.weight': (5, 4), 'bias': (6,)}
RATE, MOMENTUM = 0.7, 0.6  # of the outer step
KEYS = {
    'max_iters': 24, 'inner_steps': 4, 'num_replicas': 2, 'exchange_dtype': 'float32', 'error_feedback': False,
    'grace_s': 60.0, 'quorum': 1, 'checkpoint_interval': 0, 'keep_deltas': True, 'replay': False, 'seed': 1,
}  # fmt: skip


# Not threaded: with a thread per request, moto tells two writers of the same object that it was not there before.
MOTO = """
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
run_simple('127.0.0.1', int(sys.argv[1]), DomainDispatcherApplication(create_backend_app), threaded=False)
"""


@contextlib.contextmanager
def s3_server(folder):
    """Start moto's S3 server in a process of its own, with the bucket s3://bucket. Yields the environment variables by
    which s3fs reaches it."""
    (port,) = free_ports(1)
    endpoint = f'http://127.0.0.1:{port}'
    with open(Path(folder, 'moto.log'), 'w') as log:
        command = [sys.executable, '-c', MOTO, str(port)]
        server = subprocess.Popen(command, stdout=log, stderr=log)
    env = {'AWS_ENDPOINT_URL': endpoint, 'AWS_ACCESS_KEY_ID': 'test', 'AWS_SECRET_ACCESS_KEY': 'test'}
    env |= {'AWS_DEFAULT_REGION': 'us-east-1'}

    def answers():
        with contextlib.suppress(OSError):
            return urlopen(endpoint).status == 200

    try:
        import boto3

        wait_until(answers, 60, Path(folder, 'moto.log').read_text)
        with mock.patch.dict(os.environ, env):
            boto3.client('s3').create_bucket(Bucket='bucket')
        yield env
    finally:
        server.kill()
        server.wait()


class Jobs:
    """Jobs of one pool. Each is one or more forked ranks that play(), and wait() returns what that returned."""

    def __init__(self, address, folder, env=None, **keys):
        self.address, self.folder, self.env, self.keys = address, Path(folder), env or {}, {**KEYS, **keys}
        self.running, self.meetings = {}, {}

    def start(self, name, ranks=1, **job):
        """job: arguments of play()."""
        out_dir, self.meetings[name] = self.folder / name, tempfile.mkdtemp(dir=self.folder)
        out_dir.mkdir(exist_ok=True)
        keys = {**self.keys, 'exchange': self.address, 'out_dir': str(out_dir)}
        self.running[name] = start_function(ranks, self.meetings[name], be_rank, self.env, keys, job)
        return self

    def wait(self, *names, timeout=900):
        """{name: what its rank 0 returned, or the text of its error, or minus the signal that killed it}."""
        deadline, results = time.monotonic() + timeout, {}
        for name in names or [*self.running]:
            processes = self.running.pop(name)
            if join_all(processes, deadline - time.monotonic()):
                for other in [*self.running]:
                    self.kill(other)
                raise AssertionError(f'{name} still runs after {timeout} s: {self.text(name)}')
            codes = [process.exitcode for process in processes]
            assert codes[0] or not any(codes), f'{name}: {codes}'
            results[name] = codes[0] or results_in(self.meetings[name], len(codes))[0]
        return results

    def text(self, name):
        return (self.folder / name / 'log').read_text()

    def kill(self, name):
        for process in self.running.pop(name):
            process.kill()
            process.join()


def be_rank(env, keys, job):
    os.environ.update(env)
    write_output_to(f'{keys["out_dir"]}/log', f'{keys["out_dir"]}/log')
    try:
        return play(SimpleNamespace(**keys), **job)
    except (ValueError, OSError) as error:
        return f'{type(error).__name__}: {error}'


def whole_matrices():
    import torch

    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def matrices():
    """This rank's rows of the parameters, as FSDP would shard them."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh('cpu', (dist.get_world_size(),))
    return {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in whole_matrices().items()}


def inner_step(tensors, k, step):
    """Move the parameters by the data of replica k in this step."""
    for tensor in tensors.values():
        tensor.mul_(0.99).add_(0.01 * (1 + k) * math.sin(7 * step + k + 1))


def play(
    config, pause=0.0, leave_after=None, die=None, harm=None, deaf=0, wait=None, nan=False, notices=True, skew=0.0,
    odd=None
):  # fmt: skip
    """
    Be a job of a pool until everything is trained. Returns {'state', 'trained': [(round, k, first, steps)], 'rows',
    'weights', 'name', 'step'}.

    pause: seconds per inner step
    leave_after: leave the pool after so many inner steps
    die: (pattern, 'before', 'within' or 'after', n): SIGKILL at the n-th write to a name that matches
    harm: (pattern, function): a matching name gets function(bytes) in place of its bytes; if that is None, nothing is
        written
    deaf: the answers to so many writes are lost, after the store has done what was asked
    wait: ('write' or 'read', pattern, function of the store): before the first such call, wait until function is true
    nan: the parameters become NaN in the first round; notices: whether the job sees that
    skew: seconds by which the clock of this job is ahead
    odd: after so many rounds one of the job's outer parameters changes
    """
    import torch.distributed as dist

    import diloco
    from pool import replica as replicas
    from pool import store

    create = {kind: kind._create for kind in (store.Folder, store.Bucket)}
    read = {kind: kind._read for kind in create}
    lost, seen, waiting = [deaf], [0], [wait]

    def wait_before(kind, self, name):
        if waiting[0] and waiting[0][0] == kind and fnmatch.fnmatch(name, waiting[0][1]):
            (_, _, condition), waiting[0] = waiting[0], None
            while not condition(self):
                time.sleep(0.01)

    def unreliable(self, name, data):
        wait_before('write', self, name)
        if harm and fnmatch.fnmatch(name, harm[0]):
            data = harm[1](bytes(data))
        seen[0] += bool(die and fnmatch.fnmatch(name, die[0]))
        dies = die[1] if die and fnmatch.fnmatch(name, die[0]) and seen[0] == die[2] else None
        if dies == 'before':
            os.kill(os.getpid(), signal.SIGKILL)
        if dies == 'within':  # the file is written, but does not have its final name yet
            sys.addaudithook(lambda event, _: event == 'os.link' and os.kill(os.getpid(), signal.SIGKILL))
        if data is not None:
            create[type(self)](self, name, data)
        if dies == 'after':
            os.kill(os.getpid(), signal.SIGKILL)
        if lost[0] and 'probe' not in name:
            lost[0] -= 1
            raise ConnectionError('the answer is lost')

    def read_when(self, name, *room):
        wait_before('read', self, name)
        return read[type(self)](self, name, *room)

    for kind in create:
        kind._create, kind._read = unreliable, read_when
    if not notices:
        replicas.is_finite = lambda tensor: True
    if skew:
        now = time.time
        time.time = lambda: now() + skew

    parameters = matrices()

    def nesterov(theta, delta, momentum):
        momentum.mul_(MOMENTUM).add_(delta)
        theta.sub_(delta, alpha=RATE).sub_(momentum, alpha=RATE * MOMENTUM)

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    outer = diloco.Outer(parameters, nesterov, alone, config.inner_steps, dtype=config.exchange_dtype)
    replica = replicas.Replica(config, outer, {'model': SHAPES}, lambda line: print(line, flush=True))
    if config.replay:
        return replica.replay()
    trained, rows, steps_done = [], [], 0
    while part := replica.claim():
        k, first, end = part
        for step in range(first, end):
            inner_step({name: tensor.to_local() for name, tensor in parameters.items()}, k, step)
            if nan and not rows:
                parameters['bias'].to_local()[:] = float('nan')
            time.sleep(pause)
            steps_done += 1
            leaves = leave_after == steps_done
            is_over = replica.round_is_over() or leaves
            if is_over:
                break
        trained.append((replica.ledger.round, k, first, step + 1 - first))
        if is_over:
            rows.append(replica.meet(leaves))
            if len(rows) == odd:
                replica.fragment.anchor[3] += 1.0
                replica.state = replica.digest()
        if leaves:
            break
    replica.leave()
    weights = {name: tensor.full_tensor().clone() for name, tensor in parameters.items()}
    return {
        'state': replica.state, 'trained': trained, 'rows': rows, 'name': replica.name, 'step': replica.ledger.step,
        'weights': weights,
    }  # fmt: skip


def journal(folder):
    return [json.loads(line) for line in Path(folder, 'rounds.jsonl').read_text().splitlines()]


def shares_of(piece):
    return [(k, step) for k, first, end in piece for step in range(first, end)]


def assert_counted_once(rows, steps, replicas):
    """Assert that each share of the data is in exactly one delta of the journal."""
    shares = []
    for delta in (delta for row in rows for delta in row['deltas']):
        shares += shares_of(delta['piece'])[: delta['steps']]
    assert sorted(shares) == [(k, step) for k in range(replicas) for step in range(steps)]
