"""
Inject the faults of clusters into runs: the tests use it, and so can you.

    python tests/faults.py kill out/train --whom=1              # SIGKILL; --whom: a rank, 'all' ranks, or 'torchrun'
    python tests/faults.py signal out/train --whom=1 --name=SIGUSR1      # or SIGSTOP and SIGCONT: freeze and thaw
    python tests/faults.py damage out/train/checkpoints/step_00000100 --how=flip
    python tests/faults.py small-disk out/small                 # mounts 4 MB there; read-only FOLDER; undo FOLDER
    torchrun --nproc_per_node=2 tests/faults.py nan --rank=1 --step=5 -- train_ddp.py config/quickstart.py
    python tests/faults.py storm --kills=100                    # kill a run again and again, and check what is left

Runs are found by a word of their command line, such as their out_dir. Around a script: nan (one gradient element),
weight (one weight is changed), hang (the rank sleeps where it should fetch data), slow (there, for --seconds a step).
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

# --- find processes, and end them -------------------------------------------------------------------------------------


def read_or_empty(path):
    try:
        return Path(path).read_bytes()
    except OSError:  # the process has ended, or belongs to somebody else
        return b''


def find_ranks(word):
    """{rank: pid} of the running job that has `word` in its command line; the launcher's under 'torchrun'."""
    found = {}
    for folder in Path('/proc').glob('[0-9]*'):
        command = read_or_empty(folder / 'cmdline').split(b'\0')
        if int(folder.name) == os.getpid() or not any(word.encode() in part for part in command):
            continue
        variables = dict(line.split(b'=', 1) for line in read_or_empty(folder / 'environ').split(b'\0') if b'=' in line)
        if b'RANK' in variables and b'TORCHELASTIC_RUN_ID' in variables:
            found[int(variables[b'RANK'])] = int(folder.name)
        elif any(part.endswith((b'torch.distributed.run', b'/torchrun')) for part in command):
            found['torchrun'] = int(folder.name)
    return found


def children_of(pid):
    """Processes that this one started and that have not been waited for, in the order of their start."""
    return sorted(map(int, read_or_empty(f'/proc/{pid}/task/{pid}/children').split()))


def is_alive(pid):
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    stat = read_or_empty(f'/proc/{pid}/stat')
    return bool(stat) and stat.rpartition(b')')[2].split()[0] != b'Z'


def send(pid, number=signal.SIGKILL):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_until(condition, seconds, tail=lambda: ''):
    """Poll until condition() is true. Raises AssertionError with tail() after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f'waited for {seconds} s in vain\n{tail()}'
        time.sleep(0.002)


# --- damage what is on the disk ---------------------------------------------------------------------------------------


def largest_shard(path):
    return max(Path(path).glob('*.distcp'), key=lambda file: file.stat().st_size)


def truncate(path):
    file = largest_shard(path)
    os.truncate(file, file.stat().st_size // 2)
    return file.name


def remove(path):
    file = largest_shard(path)
    file.unlink()
    return file.name


def empty(path):
    os.truncate(Path(path, '.metadata'), 0)
    return '.metadata'


def flip(path):
    """One bit, in the middle of the largest file."""
    file = largest_shard(path)
    offset = file.stat().st_size // 2
    with open(file, 'r+b') as content:
        content.seek(offset)
        byte = content.read(1)[0]
        content.seek(offset)
        content.write(bytes([byte ^ 1]))
    return file.name


def hole(path):
    """4 KB of zeros, as of a block that never reached the disk."""
    file = largest_shard(path)
    with open(file, 'r+b') as content:
        content.seek(file.stat().st_size // 2 // 4096 * 4096)
        content.write(bytes(4096))
    return file.name


DAMAGE = {'truncate': truncate, 'remove': remove, 'empty': empty, 'flip': flip, 'hole': hole}


def mount_small_disk(folder, megabytes=4):
    """Raises CalledProcessError where this user may not mount."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    mount('-t', 'tmpfs', '-o', f'size={megabytes}m', 'none', folder)


def make_read_only(folder):
    """For root, whom permissions do not stop, by a mount; for others by permissions."""
    if os.geteuid() != 0:
        Path(folder).chmod(0o555)
        return
    mount('--bind', folder, folder)
    mount('-o', 'remount,ro,bind', folder)


def undo(folder):
    """Make a folder as it was before mount_small_disk() or make_read_only()."""
    if os.geteuid() != 0:
        Path(folder).chmod(0o755)
    else:
        subprocess.run(['umount', '-l', str(folder)], check=True)


def mount(*arguments):
    subprocess.run(['mount', *map(str, arguments)], check=True, capture_output=True)


# --- faults inside of a rank ------------------------------------------------------------------------------------------


def inject(kind, rank, step, count=1, seconds=3600.0, value=None):
    """Have this process do something wrong if it is `rank`, in `count` steps from the `step`th that it takes.

    kind: see the top. A step is one micro-step for 'hang' and 'slow'. value: of the changed weight; None = 1 more.
    """
    if int(os.environ.get('RANK', 0)) != rank:
        return
    if kind in ('nan', 'weight'):
        import torch

        clip, calls = torch.nn.utils.clip_grad_norm_, iter(range(1, 1 << 62))

        def clip_after_fault(parameters, *arguments, **options):
            parameters = list(parameters)
            if step <= next(calls) < step + count:
                poke(parameters, kind, value)
            return clip(parameters, *arguments, **options)

        torch.nn.utils.clip_grad_norm_ = clip_after_fault
    else:
        import data

        original = data.batches

        def batches(*arguments):
            batches = original(*arguments)
            try:
                for number, batch in enumerate(batches, 1):
                    if step <= number < step + count:
                        time.sleep(seconds)  # injected
                    yield batch
            finally:
                batches.close()

        data.batches = batches


def poke(parameters, kind, value):
    """Change one number of what this rank holds."""
    import torch

    with torch.no_grad():
        for parameter in parameters:
            tensor = parameter.grad if kind == 'nan' else parameter
            local = tensor.to_local() if hasattr(tensor, 'to_local') else tensor
            if local.numel():
                numbers = local.view(-1)
                numbers[0] = float('nan') if kind == 'nan' else numbers[0] + 1 if value is None else value
                return
    raise AssertionError('this rank holds nothing to change')


# --- start jobs -------------------------------------------------------------------------------------------------------

# Ranks are forked from a server that has imported torch already, for importing costs more than all these short runs.
CONTEXT = multiprocessing.get_context('forkserver')
CONTEXT.set_forkserver_preload(
    'torch torch.distributed.checkpoint torch.distributed.fsdp torch._dynamo data diloco fsdp_manual model optim '
    'runtime.checkpoint runtime.errors runtime.estimate runtime.health runtime.log runtime.meter runtime.scaling '
    'huggingface.finetune comparison.diloco_check text.tokenizer'.split()
)
GRACE = 10  # seconds between the SIGTERM of launch() to what is left and its SIGKILL; torchrun's are 30
LAUNCHERS_VARIABLES = 'RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT'.split()


class Job:
    """A run of a train script in the background: as torchrun starts it, or forked, which saves 3 seconds a start."""

    def __init__(self, script, arguments, nproc, log, fault=None, torchrun=False, **env):
        """log: file for the output of all ranks. fault: {'kind': ..., ...} as for inject(). env: more variables."""
        self.nproc, self.log, self.torchrun = nproc, Path(log), torchrun
        kept = {key: value for key, value in os.environ.items() if key not in LAUNCHERS_VARIABLES}
        env = {**kept, 'OMP_NUM_THREADS': '1', 'PYTHONUNBUFFERED': '1', 'PET_LOCAL_ADDR': '127.0.0.1', **env}
        command = [str(REPO / script), *map(str, arguments)]
        if torchrun:
            launcher = [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={nproc}']
            if fault:
                options = [f'--{key}={value}' for key, value in fault.items() if key != 'kind']
                command = [__file__, fault['kind'], *options, '--', *command]
            with open(log, 'w') as file:
                self.process = subprocess.Popen([*launcher, *command], env=env, stdout=file, stderr=file)
        else:
            self.log.write_text('')
            self.process = CONTEXT.Process(target=launch, args=(command, nproc, str(log), fault, env))
            self.process.start()
        self.pid = self.process.pid

    def ranks(self):
        """The ranks' processes, once all have been started."""
        return children_of(self.pid)[: self.nproc]

    def is_running(self):
        return self.process.poll() is None if self.torchrun else self.process.is_alive()

    def text(self):
        return self.log.read_text()

    def wait(self, seconds=60):
        """Exit codes of all ranks, from a forked job; of torchrun alone, from torchrun. Raises if it does not end."""
        try:
            wait_until(lambda: not self.is_running(), seconds, self.text)
        finally:
            self.end()
        if self.torchrun:
            return self.process.returncode
        codes = Path(f'{self.log}.codes')
        return json.loads(codes.read_text()) if codes.exists() else None

    def wait_for(self, condition, seconds=60):
        """Wait for a condition that comes true while the job runs."""
        wait_until(lambda: condition() or not self.is_running(), seconds, self.text)
        assert condition(), f'the job ended before that\n{self.text()}'

    def end(self):
        """Kill what is left of it."""
        for pid in [*children_of(self.pid), self.pid] if self.is_running() else []:
            send(pid)
        if self.torchrun:
            self.process.wait()
        else:
            self.process.join()


def launch(command, nproc, log, fault, env):
    """What torchrun does, in short: start the ranks, and when one fails ask the others to end. In a process of its own.

    Leaves the ranks' exit codes in LOG.codes.
    """
    Path(f'{log}.codes').unlink(missing_ok=True)
    os.environ.clear()
    os.environ.update(env)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
    ranks, size = [], {'WORLD_SIZE': str(nproc), 'LOCAL_WORLD_SIZE': str(nproc)}
    for rank in range(nproc):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            try:
                place = {'RANK': str(rank), 'LOCAL_RANK': str(rank), 'MASTER_PORT': str(port), **size}
                run_rank(command, place, fault)
            finally:
                os._exit(1)
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
    Path(f'{log}.codes').write_text(json.dumps([codes[rank] for rank in range(nproc)]))


def run_alone(command, log, place):
    """For CONTEXT.Process: be one rank, at the place that these variables of a launcher say; its output goes to log."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in LAUNCHERS_VARIABLES:
        os.environ.pop(name, None)
    run_rank(command, place)


def run_rank(command, place, fault=None):
    import torch

    torch.set_num_threads(1)  # the server may have read another OMP_NUM_THREADS
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background of a shell ignores it
    os.environ.update(MASTER_ADDR='127.0.0.1', **place)
    os.environ.update(TORCHELASTIC_RUN_ID='forked')  # so that ranks end with their launcher
    os.environ.setdefault('GLOO_SOCKET_IFNAME', 'lo')
    sys.argv = command
    sys.path.insert(0, str(REPO))
    os.chdir(REPO)
    try:
        if fault:
            inject(**fault)
        runpy.run_path(command[0], run_name='__main__')
    except SystemExit as request:
        os._exit(request.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


# --- what a run has left behind ---------------------------------------------------------------------------------------


def rows_of(out_dir):
    """The complete rows of metrics.jsonl."""
    path = Path(out_dir, 'metrics.jsonl')
    lines = path.read_text().split('\n')[:-1] if path.exists() else []  # what follows the last newline is torn
    return [json.loads(line) for line in lines]


def last_step(out_dir):
    """The step of the last complete row; reads no more than the end of the file."""
    with contextlib.suppress(FileNotFoundError), open(Path(out_dir, 'metrics.jsonl'), 'rb') as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        lines = file.read().split(b'\n')[:-1]
        return json.loads(lines[-1])['step'] if lines else 0
    return 0


def complete(out_dir):
    """Steps of the checkpoints that have a manifest, in order."""
    return sorted(int(path.parent.name[5:]) for path in Path(out_dir).glob('checkpoints/step_????????/manifest.json'))


def names_of_checkpoints(out_dir):
    folder = Path(out_dir, 'checkpoints')
    return os.listdir(folder) if folder.is_dir() else []


def weights_of(out_dir, step):
    from runtime import checkpoint

    return checkpoint.load_weights(str(Path(out_dir, 'checkpoints', f'step_{step:08}')))[0]


def assert_same_weights(out_dir, reference, step):
    import torch

    ours, theirs = weights_of(out_dir, step), weights_of(reference, step)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), f'{name} of {out_dir} is not bit-equal to that of {reference}'


def assert_same_rows(out_dir, reference, keys=('step', 'loss', 'val_loss', 'tokens')):
    ours, theirs = ([{key: row.get(key) for key in keys} for row in rows_of(path)] for path in (out_dir, reference))
    assert ours == theirs, next((pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]), 'lengths')


# --- the storm --------------------------------------------------------------------------------------------------------

TINY = '--n_layer=3 --n_head=2 --n_embd=40 --mlp_hidden_dim=56 --block_size=32 --batch_size=2 --device=cpu'.split()
TINY += '--dtype=float32 --dataset=synthetic --vocab_size=257 --learning_rate=3e-3 --warmup_iters=5'.split()
TINY += ['--log_interval=1']  # a step takes about 10 ms
INTERVAL, EVAL_INTERVAL = 5, 7
STORM_RUN = [*TINY, f'--checkpoint_interval={INTERVAL}', f'--eval_interval={EVAL_INTERVAL}', '--eval_iters=6']
STORM_RUN += ['--max_failures=0', '--timeout_s=60']
STORM = {
    'DDP': ('train_ddp.py', []),
    'manual FSDP, async_checkpoint': ('train_fsdp.py', ['--fsdp_impl=manual', '--async_checkpoint']),
}
MOMENTS = ('start', 'step', 'evaluation', 'save', 'rename', 'purge')
VICTIMS = ('one rank', 'all ranks', 'torchrun')


def storm(folder, kills, seed=0, every_torchrun=6, say=print):
    """Kill runs of 2 ranks at random and at chosen moments, start each again with the same command, and compare.

    every_torchrun: every so many starts are by torchrun, the others by launch(). Returns a Counter of what happened.
    Raises AssertionError where anything has been lost.
    """
    chance, figures, began = random.Random(seed), Counter(), time.monotonic()
    for index, (variant, (script, options)) in enumerate(STORM.items()):
        share = kills * (index + 1) // len(STORM) - kills * index // len(STORM)
        max_iters = 20 + 2 * INTERVAL * share
        arguments = [*STORM_RUN, *options, f'--max_iters={max_iters}']
        reference = Path(folder, f'reference_{index}')
        job = Job(script, [*arguments, f'--out_dir={reference}'], 2, Path(folder, f'reference_{index}.log'))
        assert job.wait(300) == [0, 0], job.text()
        say(f'{variant}: {max_iters} steps uninterrupted, {time.monotonic() - began:.0f} s')
        behind_by = 2 * INTERVAL if '--async_checkpoint' in options else INTERVAL  # one save may still be under way
        done, run, last = 0, 0, None
        while True:
            out_dir = Path(folder, f'run_{index}_{run}')
            log = Path(folder, f'run_{index}_{run}.log')
            figures['starts'] += 1
            by_torchrun = figures['starts'] % every_torchrun == 0
            job = Job(script, [*arguments, f'--out_dir={out_dir}'], 2, log, torchrun=by_torchrun)
            figures['starts by torchrun'] += by_torchrun
            killed = False
            if done < share:
                moment, victim = chance.choice(MOMENTS), chance.choice(VICTIMS)
                if reach(moment, job, out_dir, chance, by_torchrun):
                    killed = strike(job, victim, chance, figures)
            codes = job.wait(120)
            check_resumed(job, last, figures)
            if killed:
                done += 1
                figures.update({'kills': 1, f'kills: {moment}': 1, f'kills: {victim}': 1, (moment, victim): 1})
                last = check_after_kill(out_dir, last, behind_by, figures)
                continue
            assert codes in ([0, 0], 0), job.text()
            assert_same_weights(out_dir, reference, max_iters)
            assert_same_rows(out_dir, reference)
            figures['runs finished, bit-equal'] += 1
            if done == share:
                break
            run, last = run + 1, None
        say(f'{variant}: {done} kills, {time.monotonic() - began:.0f} s')
    figures['seconds'] = round(time.monotonic() - began)
    return figures


def reach(moment, job, out_dir, chance, by_torchrun):
    """Wait for a moment of a running job; False if the job ends before."""
    there, newest = names_of_checkpoints(out_dir), max(complete(out_dir), default=0)
    step = last_step(out_dir)

    def until(condition):
        wait_until(lambda: condition() or not job.is_running(), 120, job.text)
        return job.is_running()

    def new_tmp(older_than_newest=False):
        """Whether a folder is being written, or, when it is older than the newest, being deleted."""
        steps = [int(name[5:13]) for name in names_of_checkpoints(out_dir) if name[13:] == '.tmp' and name not in there]
        limit = max(complete(out_dir), default=0)
        return any(one < limit for one in steps) if older_than_newest else bool(steps)

    def before_evaluation():
        now = last_step(out_dir)
        return now > newest and now != step and now % EVAL_INTERVAL == EVAL_INTERVAL - 1

    if moment == 'start':
        time.sleep(chance.uniform(0, 4 if by_torchrun else 1.2))
        return job.is_running()
    condition = {
        'step': lambda: last_step(out_dir) != step,  # the rows after the checkpoint are cut when it starts
        'evaluation': before_evaluation,
        'save': new_tmp,
        'rename': lambda: max(complete(out_dir), default=0) > newest,
        'purge': lambda: new_tmp(older_than_newest=True),
    }[moment]
    if not until(condition):
        return False
    if moment not in ('rename', 'purge'):
        time.sleep(chance.uniform(0, 0.2 if moment == 'step' else 0.03))
    return job.is_running()


def strike(job, victim, chance, figures):
    """SIGKILL; False if nothing was left to kill. Ranks that do not end because of it are counted, and then killed."""
    ranks = job.ranks()
    victims = (
        [job.pid] if victim == 'torchrun' else ranks if victim == 'all ranks' else chance.sample(ranks, len(ranks))[:1]
    )
    if not victims or not all(is_alive(pid) for pid in victims):
        return False
    for pid in victims:
        send(pid)
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not any(map(is_alive, ranks)), 40)
    left = [pid for pid in ranks if is_alive(pid)]
    figures['ranks left running'] += len(left)
    for pid in left:
        send(pid)
    return True


def check_after_kill(out_dir, last, behind_by, figures):
    """What the killed run has left; returns the step of its newest checkpoint, from which the next one has to start."""
    from runtime import checkpoint

    steps = complete(out_dir)
    for step in steps:
        path = str(Path(out_dir, 'checkpoints', f'step_{step:08}'))
        damage = checkpoint.find_damage(path, lambda line: None)
        assert damage is None, f'{path}: {damage}'
    newest = steps[-1] if steps else None
    assert (newest or 0) >= (last or 0), f'checkpoint {last} was there before this start, now there is {newest}'
    repeated = max(0, last_step(out_dir) - (newest or 0))
    assert repeated <= behind_by, f'{repeated} steps are to be repeated after {newest}'
    figures['steps repeated'] += repeated
    figures['most steps repeated'] = max(figures['most steps repeated'], repeated)
    return newest


def check_resumed(job, last, figures):
    """That a start said it goes on from the newest checkpoint that the kill before it had left, if it got so far."""
    said = [line for line in job.text().splitlines() if 'resuming ' in line or 'starting from ' in line]
    if said:
        assert said[0].endswith('starting from scratch' if last is None else f'at step {last}'), (last, said[0])
        figures['resumed from the newest checkpoint'] += last is not None
    assert not re.search(r'^\[\d+\] Traceback', job.text(), re.MULTILINE), job.text()  # torchrun's own is usual


# --- by hand ----------------------------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True)
    for name in ('kill', 'signal'):
        command = commands.add_parser(name, help='send a signal to ranks of a run')
        command.add_argument('word', help='in the command line of the run: its out_dir')
        command.add_argument('--whom', default='1', help="a rank, 'all' or 'torchrun'")
        command.add_argument('--name', default='SIGKILL')
    command = commands.add_parser('damage', help='damage a checkpoint')
    command.add_argument('checkpoint')
    command.add_argument('--how', choices=DAMAGE, required=True)
    for name, text in {
        'small-disk': 'mount 4 MB there',
        'read-only': 'nothing can be written there',
        'undo': 'of these two',
    }.items():
        commands.add_parser(name, help=text).add_argument('folder')
    for name in ('nan', 'weight', 'hang', 'slow'):
        command = commands.add_parser(name, help='run a script in which one rank does that')
        command.add_argument('--rank', type=int, default=1)
        command.add_argument('--step', type=int, default=5)
        command.add_argument('--count', type=int, default=1)
        command.add_argument('--seconds', type=float, default=3600)
        command.add_argument('--value', type=float)
        command.add_argument('script', nargs=argparse.REMAINDER, help='-- SCRIPT ARGUMENTS')
    command = commands.add_parser('storm', help='kill runs at random and check that nothing is lost')
    command.add_argument('--kills', type=int, default=100)
    command.add_argument('--seed', type=int, default=0)
    given = parser.parse_args()

    if given.command in ('kill', 'signal'):
        found = find_ranks(given.word)
        whom = [rank for rank in found if rank != 'torchrun'] if given.whom == 'all' else [given.whom]
        for one in whom:
            one = one if one == 'torchrun' else int(one)
            if one not in found:
                sys.exit(f'{given.whom} of a run with {given.word} in its command line not found: {found}')
            send(found[one], getattr(signal, given.name))
            print(f'{given.name} to {one}, process {found[one]}')
    elif given.command == 'damage':
        print(f'{given.how}: {DAMAGE[given.how](given.checkpoint)}')
    elif given.command in ('small-disk', 'read-only', 'undo'):
        {'small-disk': mount_small_disk, 'read-only': make_read_only, 'undo': undo}[given.command](given.folder)
    elif given.command == 'storm':
        with tempfile.TemporaryDirectory() as folder:
            figures = storm(folder, given.kills, given.seed, say=lambda line: print(line, flush=True))
        print(f'{"kills":12}' + ''.join(f'{victim:>12}' for victim in VICTIMS) + f'{"all":>12}')
        for moment in MOMENTS:
            row = [*(figures[moment, victim] for victim in VICTIMS), figures[f'kills: {moment}']]
            print(f'{moment:12}' + ''.join(f'{count:12}' for count in row))
        for key, count in figures.items():
            if isinstance(key, str) and not key.startswith('kills: '):
                print(f'{key}: {count}')
    else:
        sys.argv = given.script[1:] if given.script[:1] == ['--'] else given.script
        if not sys.argv:
            sys.exit('which script? ... -- train_ddp.py ARGUMENTS')
        inject(given.command, given.rank, given.step, given.count, given.seconds, given.value)
        runpy.run_path(sys.argv[0], run_name='__main__')


if __name__ == '__main__':
    main()
