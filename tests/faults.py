"""
Injects the faults that happen on clusters into runs. The tests use it, and so can you.

    python tests/faults.py signal out/train --whom=1            # SIGKILL; --whom: a rank, 'all' ranks, or 'torchrun'
    python tests/faults.py signal out/train --whom=1 --name=SIGUSR1      # or SIGSTOP and SIGCONT: freeze and thaw
    python tests/faults.py damage out/train/checkpoints/step_00000100 --how=flip
    python tests/faults.py small-disk out/small                 # mounts 4 MB there; also: read-only FOLDER, undo FOLDER
    torchrun --nproc_per_node=2 tests/faults.py nan --rank=1 --step=5 -- train_ddp.py config/quickstart.py

signal finds a run by a word of its command line, such as its out_dir. The last form starts a script in which one rank
does something wrong:

    nan         one element of a gradient becomes NaN
    overflow    the same, before GradScaler looks at the gradients (fp16)
    weight      one weight is changed
    hang        the rank sleeps where it should fetch data
    slow        the same, for --seconds in each step
    stuck       with experts on several ranks (expert_parallel), the rank sleeps when it has received the tokens of the
                others and not yet sent back its results
    die         at the same place, the rank kills itself

tests/storm.py kills a run again and again, and checks what is left.
"""

import argparse
import contextlib
import itertools
import os
import runpy
import signal
import subprocess
import sys
import time
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
    """{rank: pid} of the running job that has `word` in its command line; 'torchrun' is the key of the launcher."""
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
    """The processes that `pid` has started and not waited for yet, by pid, which is the order of their start."""
    return sorted(map(int, read_or_empty(f'/proc/{pid}/task/{pid}/children').split()))


def is_alive(pid):
    """Whether a process runs. One that has ended does not, even if nobody has waited for it yet."""
    return state_of(pid) not in (b'', b'Z')


def is_stopped(pid):
    """Whether a process stands still, by SIGSTOP."""
    return state_of(pid) == b'T'


def state_of(pid):
    """The letter of a process's state (R, S, D, T, Z, ...), or nothing if there is no such process."""
    stat = read_or_empty(f'/proc/{pid}/stat')
    return stat.rpartition(b')')[2].split()[0] if stat else b''


def send(pid, number=signal.SIGKILL):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_until(condition, seconds, tail=lambda: ''):
    """Poll until condition() is true. After so many seconds, raises AssertionError with the text of tail()."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f'waited for {seconds} s in vain\n{tail()}'
        time.sleep(0.002)


# --- damage what is on the disk ---------------------------------------------------------------------------------------


def overwrite(file, offset, data):
    with open(file, 'r+b') as content:
        content.seek(offset)
        content.write(data)


def flip_bit(file):
    """Flip one bit in the middle of the file."""
    offset = file.stat().st_size // 2
    overwrite(file, offset, bytes([file.read_bytes()[offset] ^ 1]))


DAMAGE = {
    'truncate': lambda file: os.truncate(file, file.stat().st_size // 2),
    'remove': os.unlink,
    'empty': lambda file: os.truncate(file, 0),
    'flip': flip_bit,
    'hole': lambda file: overwrite(file, file.stat().st_size // 2 // 4096 * 4096, bytes(4096)),  # a block that was lost
}


def damage(path, how):
    """Damage the largest file of a checkpoint, or with 'empty' its index. Returns the file's name."""
    file = max(Path(path).glob('*.distcp'), key=lambda file: file.stat().st_size)
    file = Path(path, '.metadata') if how == 'empty' else file
    DAMAGE[how](file)
    return file.name


def mount_small_disk(folder, megabytes=4):
    """Mount a file system of 4 MB there. Raises CalledProcessError if this user may not mount."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    mount('-t', 'tmpfs', '-o', f'size={megabytes}m', 'none', folder)


def make_read_only(folder):
    """Let nobody write there: for root, whom permissions do not stop, by a mount; for other users by permissions."""
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


def inject(kind, rank, step, count=1, seconds=3600.0, value=None, ahead=False, name=''):
    """Let this process do something wrong if it is `rank`, in `count` steps from the `step`th that it takes.

    kind: see the top. A step is one micro-step for 'hang' and 'slow', and one layer of a micro-step for 'stuck' and
    'die'. value: what the changed weight becomes; None = 1 more. name: the first parameter on this rank that has this
    in its name is the one whose weight or gradient is changed. ahead: the host calls the optimizer before it knows
    whether the step is good, as on a GPU.
    """
    if ahead:
        from runtime import health

        health.runs_ahead = lambda device: True
    if int(os.environ.get('RANK', 0)) != rank:
        return
    is_now = (step <= number < step + count for number in itertools.count(1))
    if kind in ('nan', 'weight'):
        import optim

        clip, from_config = optim.clip_grad_norm_, optim.from_config
        named = []

        def from_config_and_look(model, *arguments, **options):
            named.extend(parameter for one, parameter in model.named_parameters() if name in one)
            return from_config(model, *arguments, **options)

        def clip_after_fault(parameters, *arguments, **options):
            if next(is_now):
                poke(named, kind, value)
            return clip(parameters, *arguments, **options)

        optim.from_config = from_config_and_look
        optim.clip_grad_norm_ = clip_after_fault
    elif kind == 'overflow':
        from torch.amp import GradScaler

        unscale = GradScaler.unscale_

        def unscale_after_fault(scaler, optimizer):
            if next(is_now):
                poke([parameter for group in optimizer.param_groups for parameter in group['params']], 'nan', value)
            unscale(scaler, optimizer)

        GradScaler.unscale_ = unscale_after_fault
    elif kind in ('stuck', 'die'):
        import experts

        compute = experts.Experts.forward  # between expert_manual.py's two exchanges

        def compute_after_fault(experts, *arguments):
            if next(is_now):
                if kind == 'die':
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(seconds)  # injected
            return compute(experts, *arguments)

        experts.Experts.forward = compute_after_fault
    else:
        import data

        original = data.batches

        def batches(*arguments, **options):
            batches = original(*arguments, **options)
            try:
                for batch in batches:
                    if next(is_now):
                        time.sleep(seconds)  # injected
                    yield batch
            finally:
                batches.close()

        data.batches = batches


def poke(parameters, kind, value):
    """Change the first number that this rank holds of these parameters, or of their gradients."""
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


# --- by hand ----------------------------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True)
    command = commands.add_parser('signal', help='send a signal to ranks of a run')
    command.add_argument('word', help='in the command line of the run: its out_dir')
    command.add_argument('--whom', default='1', help="a rank, 'all' or 'torchrun'")
    command.add_argument('--name', default='SIGKILL')
    command = commands.add_parser('damage', help='damage a checkpoint')
    command.add_argument('checkpoint')
    command.add_argument('--how', choices=DAMAGE, required=True)
    disks = {'small-disk': mount_small_disk, 'read-only': make_read_only, 'undo': undo}
    for name, function in disks.items():
        commands.add_parser(name, help=function.__doc__).add_argument('folder')
    for name in ('nan', 'overflow', 'weight', 'hang', 'slow', 'stuck', 'die'):
        command = commands.add_parser(name, help='run a script in which one rank does that')
        command.add_argument('--rank', type=int, default=1)
        command.add_argument('--step', type=int, default=5)
        command.add_argument('--count', type=int, default=1)
        command.add_argument('--seconds', type=float, default=3600)
        command.add_argument('--value', type=float)
        command.add_argument('--name', default='', help='of the weight, or a part of it')
        command.add_argument('script', nargs=argparse.REMAINDER, help='-- SCRIPT ARGUMENTS')
    given = parser.parse_args()

    if given.command == 'signal':
        found = find_ranks(given.word)
        if not found:
            sys.exit(f'no rank has {given.word} in its command line: is the run over, or not yet that far?')
        whom = [rank for rank in found if rank != 'torchrun'] if given.whom == 'all' else [given.whom]
        for one in whom:
            one = one if one == 'torchrun' else int(one)
            if one not in found:
                sys.exit(f'{given.whom} of a run with {given.word} in its command line not found: {found}')
            send(found[one], getattr(signal, given.name))
            print(f'{given.name} to {one}, process {found[one]}')
    elif given.command == 'damage':
        print(f'{given.how}: {damage(given.checkpoint, given.how)}')
    elif given.command in disks:
        disks[given.command](given.folder)
    else:
        sys.argv = given.script[1:] if given.script[:1] == ['--'] else given.script
        if not sys.argv:
            sys.exit('which script? ... -- train_ddp.py ARGUMENTS')
        inject(given.command, given.rank, given.step, given.count, given.seconds, given.value, name=given.name)
        runpy.run_path(sys.argv[0], run_name='__main__')


if __name__ == '__main__':
    main()
