"""
What does a slow network cost each strategy? Makes two hosts on one machine with a slow cable between them.

    python benchmarks/slow_link.py --data_dir=data --dataset=stdlib-bpe2048   # all cases and links: 1.5 hours
    python benchmarks/slow_link.py --short --cases=ddp,diloco-20 --links=none,100        # random tokens, some minutes

With --steps=400 the first command is that of the table in docs/diloco.md. It needs stdlib-bpe2048 (python
prepare_data.py). The hosts are network namespaces, the cable is a veth pair that `tc` slows down, and training is real
torchrun with two nodes over it. This works only on Linux and only as root; `ip` and `tc` are in the package iproute2.

tokens/s are tokens trained / the sum of time/total, without the first rows; if the wall clock disagrees by more than
5%, a line says so. Bytes are what one host's interface sent between two rows of metrics.jsonl, per step or per round.
The validation loss does not depend on the link, so it is given for the unshaped runs, which all see the same number of
tokens. These are repeated with each seed, for the mean, smallest and largest loss and the mean tokens/s. Over a slow
link a run has only as many steps as it takes to measure a rate.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from benchmarks.runs import end_with_parent, environment, metrics

ADDRESSES = ('10.77.0.1', '10.77.0.2')  # of the two hosts, which see no other network of this machine
INTERFACE = 'veth0'  # on both
PORT = 29500  # of torchrun's store, on the first host
NAMESPACE = re.compile(r'slow-link-(\d+)-\d+-[ab]')  # id of the process that made it, number of the link, host
numbers = itertools.count()

Finished = namedtuple('Finished', 'outputs returncodes')  # of the two nodes, in order


class NoSlowLink(Exception):
    """Why there is no slow link on this machine, in one line; tests skip with it."""


# --- THE LINK ---------------------------------------------------------------------------------------------------------


def call(*words):
    """Run ip or tc and return what it printed. If that fails, raises NoSlowLink with the program's own words."""
    result = subprocess.run([*map(str, words)], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode != 0:
        raise NoSlowLink(f'{" ".join(map(str, words))}: {" ".join(result.stderr.split())}')
    return result.stdout


def kill_all(namespace):
    """End every process in the namespace. torchrun's workers are in sessions of their own, so no group has them all."""
    for _ in range(100):
        pids = call('ip', 'netns', 'pids', namespace).split()
        if not pids:
            return
        for pid in map(int, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    raise RuntimeError(f'{namespace}: processes {pids} do not end')


def remove_leftovers():
    """Remove the namespaces of processes that were killed before they could do so."""
    for match in NAMESPACE.finditer(call('ip', 'netns', 'list')):
        if not Path('/proc', match[1]).exists():
            with contextlib.suppress(NoSlowLink):  # somebody else was quicker
                kill_all(match[0])
                call('ip', 'netns', 'delete', match[0])


class SlowLink:
    """
    Two network namespaces of this machine and a cable of `mbit` Mbit/s (each way) between them; None = unshaped.

        with SlowLink(mbit=100) as link:
            link.run('train_ddp.py', '--max_iters=10')

    The hosts share files, cores and memory, everything but the network. At the end all processes in the namespaces are
    killed and the namespaces removed. Raises NoSlowLink on a machine that cannot have namespaces.
    """

    def __init__(self, mbit=100):
        self.mbit = mbit
        number = next(numbers)
        self.namespaces = [f'slow-link-{os.getpid()}-{number}-{host}' for host in 'ab']

    def __enter__(self):
        if sys.platform != 'linux' or os.geteuid() != 0:
            raise NoSlowLink('a slow link needs network namespaces: Linux, and to be root')
        missing = [program for program in ('ip', 'tc') if not shutil.which(program)]
        if missing:
            raise NoSlowLink(f'{" and ".join(missing)} not installed: apt-get install iproute2')
        try:
            remove_leftovers()
            for namespace in self.namespaces:
                call('ip', 'netns', 'add', namespace)
            one, other = self.namespaces
            # Jumbo frames, since `tc` also counts headers: with frames of 1500 bytes they would be 4.5% of the rate.
            call('ip', 'link', 'add', INTERFACE, 'netns', one, 'mtu', 9000,
                 'type', 'veth', 'peer', 'name', INTERFACE, 'netns', other, 'mtu', 9000)  # fmt: skip
            for namespace, address in zip(self.namespaces, ADDRESSES, strict=True):
                call('ip', '-n', namespace, 'address', 'add', f'{address}/24', 'dev', INTERFACE)
                for interface in ('lo', INTERFACE):
                    call('ip', '-n', namespace, 'link', 'set', interface, 'up')
            self.shape(self.mbit)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Kill what runs in the namespaces and remove them; the cable goes with them."""
        there = call('ip', 'netns', 'list').split()
        for namespace in self.namespaces:
            if namespace in there:
                kill_all(namespace)
                call('ip', 'netns', 'delete', namespace)

    def shape(self, mbit):
        """Let `mbit` Mbit/s through each way from now on; None = as many as the machine manages."""
        for namespace in self.namespaces:
            queue = ('tc', '-n', namespace, 'qdisc')
            if 'tbf' in call(*queue, 'show', 'dev', INTERFACE):
                call(*queue, 'delete', 'dev', INTERFACE, 'root')
            if mbit is not None:
                # After a pause so many bytes may go out at once: 10 ms' worth, but at least two frames.
                burst = max(int(mbit * 1e6 / 8 * 0.01), 20_000)
                call(*queue, 'add', 'dev', INTERFACE, 'root',
                     'tbf', 'rate', f'{mbit}mbit', 'burst', burst, 'latency', '100ms')  # fmt: skip
        self.mbit = mbit

    def counters(self):
        """[bytes that the first host has sent so far, the second], headers included."""
        shown = (call('ip', '-n', name, '-j', '-s', 'link', 'show', 'dev', INTERFACE) for name in self.namespaces)
        return [json.loads(text)[0]['stats64']['tx']['bytes'] for text in shown]

    def start(self, host, command, output, **env):
        """Start a command on host 0 or 1 with stdout and stderr in the file `output`; returns the Popen."""
        return subprocess.Popen(
            ['ip', 'netns', 'exec', self.namespaces[host], *map(str, command)],
            cwd=REPO,
            env=environment(PET_LOCAL_ADDR=ADDRESSES[host], **env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=end_with_parent,
        )

    def run(self, script, *arguments, nproc=1, timeout=600, patience=10, meanwhile=None, **env):
        """
        `torchrun --nnodes=2 --nproc_per_node=nproc script arguments` on both hosts, one thread per process.

        timeout: seconds for all of it. patience: seconds that one node gets to say why it stops once the other has
        failed. meanwhile: function without arguments that is called every 20 ms.

        Returns Finished(outputs, returncodes). Raises RuntimeError with both outputs if a node failed or time is up. In
        any case no process is left.
        """
        began = time.monotonic()
        with tempfile.TemporaryFile() as one, tempfile.TemporaryFile() as other:
            files, nodes, failed_at, ending = (one, other), [], None, ''
            try:
                for host, file in enumerate(files):
                    command = (
                        *(sys.executable, '-m', 'torch.distributed.run', '--nnodes=2', f'--node_rank={host}'),
                        *(f'--master_addr={ADDRESSES[0]}', f'--master_port={PORT}', f'--nproc_per_node={nproc}'),
                        *(REPO / script, *arguments),
                    )
                    nodes.append(self.start(host, command, file, **env))
                while any(node.poll() is None for node in nodes):
                    if meanwhile:
                        meanwhile()
                    if failed_at is None and any(node.poll() for node in nodes):
                        failed_at = time.monotonic()
                    if failed_at is not None and time.monotonic() - failed_at > patience:
                        ending = f', the other killed {patience} s later'
                        break
                    if time.monotonic() - began > timeout:
                        ending = f', not done after {timeout} s'
                        break
                    time.sleep(0.02)
            finally:
                for namespace in self.namespaces:
                    kill_all(namespace)
                for node in nodes:
                    node.wait()
            outputs = []
            for file in files:
                file.seek(0)
                outputs.append(file.read().decode(errors='replace'))
        finished = Finished(outputs, [node.returncode for node in nodes])
        if any(finished.returncodes):
            logs = ''.join(f'\n--- node {host} ---\n{text}' for host, text in enumerate(outputs))
            raise RuntimeError(f'{script}: the nodes ended with {finished.returncodes}{ending}{logs}')
        return finished


class RowWatch:
    """Notes the time and the counters when a run's metrics.jsonl grows; call it often (SlowLink.run(meanwhile=...))."""

    def __init__(self, link, out_dir):
        self.link, self.path = link, Path(out_dir) / 'metrics.jsonl'
        self.size = 0
        self.seen = {}  # step -> (seconds, [bytes sent by either host])

    def __call__(self):
        if self.path.exists() and self.path.stat().st_size > self.size:
            now, counters = time.monotonic(), self.link.counters()
            self.size = self.path.stat().st_size
            with contextlib.suppress(ValueError, IndexError):  # half a line; the next call sees all of it
                self.seen[json.loads(self.path.read_text().splitlines()[-1])['step']] = (now, counters)

    def bytes_per_step(self, first, last):
        """What one host sent per step between the rows of these two steps, mean of both hosts."""
        before, after = self.seen[first][1], self.seen[last][1]
        return (sum(after) - sum(before)) / len(after) / (last - first)


# --- THE TABLE --------------------------------------------------------------------------------------------------------

# round: optimizer steps from one exchange to the next; bytes are given per round.
# steps: {Mbit/s: optimizer steps of a run on such a link}; a rate in between takes the entry of the next slower link.
# formula: function of (weights in blocks, other weights, ranks) that returns the bytes a rank sends per round, in fp32;
# None: what the run itself says, `diloco/bytes_formula` in metrics.jsonl.
Case = namedtuple('Case', 'script arguments round steps formula')


def ddp_bytes(blocks, others, M):
    """Bytes of one all-reduce of the gradients."""
    return 2 * (M - 1) / M * 4 * (blocks + others)


def fsdp_bytes(blocks, others, M):
    """Blocks are gathered twice, the rest once. A reduce-scatter counts twice, since over gloo it is an all-reduce."""
    return (M - 1) / M * 4 * (4 * blocks + 3 * others)


EVERY_20, EVERY_100 = {100: 120, 10: 80}, {100: 300, 10: 300}

# 400 steps are 20 rounds of 20 steps or 4 of 100. Nesterov with momentum 0.5 needs 4 / (1 - 0.5)^2 = 16 rounds, and 4
# rounds are too few for any, so the long ones take the plain average of the replicas.
NESTEROV, AVERAGE = ['--outer_momentum=0.5'], ['--outer_lr=1', '--outer_momentum=0']
STREAMING = ['--num_fragments=4', '--exchange_dtype=int8', '--error_feedback']
CASES = {
    'ddp': Case('train_ddp.py', [], 1, {100: 60, 10: 12}, ddp_bytes),
    'fsdp': Case('train_fsdp.py', [], 1, {100: 40, 10: 10}, fsdp_bytes),
    'diloco-20': Case('train_diloco.py', ['--inner_steps=20', *NESTEROV], 20, EVERY_20, None),
    'diloco-100': Case('train_diloco.py', ['--inner_steps=100', *AVERAGE], 100, EVERY_100, None),
    'streaming-20': Case(
        'train_diloco.py', ['--inner_steps=20', *NESTEROV, *STREAMING, '--overlap_steps=4'], 20, EVERY_20, None
    ),
    'streaming-100': Case(
        'train_diloco.py', ['--inner_steps=100', *AVERAGE, *STREAMING, '--overlap_steps=10'], 100, EVERY_100, None
    ),
}


def fewest_steps(case):
    """Steps of the shortest run that gives a figure. Its first round is left out, and its last ends with an
    evaluation."""
    return 3 * max(case.round, 4)


def steps_on(case, mbit, arguments):
    """Optimizer steps of a case's run at so many Mbit/s."""
    if mbit is None:  # the same tokens for every case
        return arguments.steps
    if arguments.shaped_steps or arguments.short:
        return max(arguments.shaped_steps or 0, fewest_steps(case))
    return case.steps[max((listed for listed in case.steps if listed <= mbit), default=min(case.steps))]


def measure(link, case, steps, out_dir, keys):
    """Run a case over the link. Returns a dict: tokens_per_sec, by_clock (the same by the wall clock), bytes and
    formula (counted and computed, per round), waited (seconds per round, only DiLoCo), val_loss."""
    warm_up = max(case.round, 4)  # steps left out
    watch = RowWatch(link, out_dir)
    keys = [*keys, *case.arguments, f'--out_dir={out_dir}', f'--max_iters={steps}']
    keys.append(f'--log_interval={max(case.round, 2)}')  # 2, as one step may be profiled: the other gives the time
    link.run(case.script, 'config/quickstart.py', *keys, timeout=7200, meanwhile=watch)
    rows = metrics(out_dir)
    tokens_per_step = rows[-1]['tokens'] / rows[-1]['step']
    timed = [(row['step'] - before['step'], row['time/total'])
             for before, row in itertools.pairwise(rows) if before['step'] >= warm_up]  # fmt: skip
    seconds = sum(count * milliseconds for count, milliseconds in timed) / 1000
    # The last row is left out: it comes after an evaluation, in which FSDP gathers weights, too.
    seen = sorted(step for step in watch.seen if step >= warm_up)
    first, last = seen[0], seen[-2]
    result = {
        'tokens_per_sec': tokens_per_step * sum(count for count, _ in timed) / seconds,
        'by_clock': tokens_per_step * (last - first) / (watch.seen[last][0] - watch.seen[first][0]),
        'bytes': watch.bytes_per_step(first, last) * case.round,
        'val_loss': rows[-1]['val_loss'],
    }
    if case.formula:
        result['formula'] = case.formula(*weights(out_dir), len(ADDRESSES))
    else:
        ends = [row for row in rows if 'diloco/wait_s' in row and row['step'] > case.round]  # from the second round on
        result['formula'] = ends[0]['diloco/bytes_formula']
        result['waited'] = sum(row['diloco/wait_s'] for row in ends) / len(ends)
    return result


def weights(out_dir):
    """(number of weights in the blocks, and of all others) of the model that a run in out_dir trained."""
    import torch

    from model import GPT, ModelConfig
    from runtime import checkpoint

    state = checkpoint.read_state(sorted(Path(out_dir, 'checkpoints').glob('step_*'))[-1])
    with torch.device('meta'):
        model = GPT(ModelConfig.from_keys(state['config']))
    in_blocks = sum(parameter.numel() for parameter in model.blocks.parameters())
    return in_blocks, model.parameter_counts()['total'] - in_blocks


def spread(values):
    """'4.050 (4.041 to 4.062)': the mean, and the smallest and largest of several; of one value, that alone."""
    mean = f'{statistics.mean(values):.3f}'
    return mean if len(values) == 1 else f'{mean} ({min(values):.3f} to {max(values):.3f})'


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--links', default='none,100,10', help='Mbit/s, or none: unshaped (default: %(default)s)')
    parser.add_argument('--cases', default=','.join(CASES), help='default: %(default)s')
    parser.add_argument('--steps', type=int, help='of the unshaped runs; whole rounds of every case (default: 800)')
    parser.add_argument('--shaped_steps', type=int, help='of the other runs (default: CASES, by case and rate)')
    parser.add_argument('--seeds', default='1,2,3', help='of the unshaped runs (default: %(default)s; --short: one)')
    parser.add_argument('--short', action='store_true', help='as few steps as give a figure: three rounds, one seed')
    parser.add_argument('--dataset', default='synthetic', help='as for the train scripts; synthetic = random tokens')
    parser.add_argument('--data_dir', default='data')
    parser.add_argument('--batch', type=int, default=8, help='sequences per step, of both hosts (default: %(default)s)')
    parser.add_argument('--out_dir', help="keep the runs' files here (default: a temporary folder)")
    arguments = parser.parse_args(argv)
    arguments.cases = arguments.cases.split(',')
    unknown = [name for name in arguments.cases if name not in CASES]
    if unknown:
        parser.error(f'--cases: no {", ".join(unknown)}; there is {", ".join(CASES)}')
    arguments.seeds = [int(seed) for seed in arguments.seeds.split(',')][: 1 if arguments.short else None]
    longest = max(fewest_steps(CASES[name]) for name in arguments.cases)
    arguments.steps = arguments.steps or (longest if arguments.short else 800)
    if arguments.steps < longest or any(arguments.steps % CASES[name].round for name in arguments.cases):
        parser.error(f'--steps={arguments.steps}: expected {longest} or more, and whole rounds of every case')
    try:
        arguments.links = [None if rate == 'none' else float(rate) for rate in arguments.links.split(',')]
    except ValueError:
        parser.error(f'--links={arguments.links}: expected Mbit/s and none, as in --links=none,100,10')
    return arguments


def main(argv=None):
    arguments = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the ends of all `with` blocks
    keys = [f'--dataset={arguments.dataset}', f'--data_dir={Path(arguments.data_dir).resolve()}']
    keys += [f'--global_batch_size={arguments.batch}', f'--batch_size={arguments.batch // 2}']
    keys += ['--vocab_size=2048'] if arguments.dataset == 'synthetic' else []
    keys += ['--device=cpu', '--dtype=float32', '--resume=never', '--eval_interval=0', '--checkpoint_interval=0']
    print('| link | case | tokens/s | of unshaped | a host sends every | MB, counted | formula | waited | val loss |')
    print('|---|---|---|---|---|---|---|---|---|', flush=True)
    unshaped = {}
    with tempfile.TemporaryDirectory() as temporary, SlowLink(mbit=None) as link:
        for mbit in arguments.links:
            link.shape(mbit)
            for name in arguments.cases:
                case = CASES[name]
                where = 'unshaped' if mbit is None else f'{mbit:g} Mbit/s'
                steps = steps_on(case, mbit, arguments)
                out_dir = Path(arguments.out_dir or temporary).resolve() / f'{name}-{mbit}'
                runs = []
                for seed in arguments.seeds if mbit is None else arguments.seeds[:1]:
                    shutil.rmtree(out_dir, ignore_errors=True)
                    brief = [] if mbit is None else ['--eval_sequences=8']
                    runs.append(measure(link, case, steps, out_dir, [*keys, *brief, f'--seed={seed}']))
                    if abs(runs[-1]['by_clock'] / runs[-1]['tokens_per_sec'] - 1) > 0.05:
                        by_clock = f'{runs[-1]["by_clock"]:,.0f} tokens/s by the clock on the wall'
                        print(f'{where} {name}, next row: {by_clock}', file=sys.stderr, flush=True)
                result, losses = runs[0], [run['val_loss'] for run in runs]
                rate = statistics.mean(run['tokens_per_sec'] for run in runs)
                if mbit is None:
                    unshaped[name] = rate
                cells = [where, name, f'{rate:,.0f}', f'{rate / unshaped[name]:.1%}' if name in unshaped else '']
                cells += ['step' if case.round == 1 else f'{case.round} steps']
                cells += [f'{result["bytes"] / 1e6:.2f}', f'{result["formula"] / 1e6:.2f}']
                cells += [f'{result["waited"]:.2f} s' if 'waited' in result else '']
                cells += [spread(losses) if mbit is None else '']
                print(f'| {" | ".join(cells)} |', flush=True)


if __name__ == '__main__':
    try:
        main()
    except NoSlowLink as error:
        sys.exit(f'error: {error}')
