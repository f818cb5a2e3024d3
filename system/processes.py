"""
The processes of a run: what a launcher says about a rank, ending with its parent, leaving.
"""

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
import time

BAR_AFTER_S, LINE_EVERY_S = 3, 10  # see progress()
# Variables in which launchers other than torchrun say how many copies of a command they have started: srun, Open MPI,
# MPICH and Intel MPI.
COPIES = {'srun': 'SLURM_STEP_NUM_TASKS', 'mpirun': 'OMPI_COMM_WORLD_SIZE', 'mpiexec': 'PMI_SIZE'}
TORCHRUN_VARIABLES = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')


def ranks_from_environment():
    """(rank, local_rank, world_size) as torchrun has set them; (0, 0, 1) if none of its variables is set.

    Raises ValueError if only some are set, because a leftover `export RANK=0` would hang at the rendezvous. Also raises
    it if another launcher has started several copies of this script, since each would take itself for the whole run.
    """
    script = os.path.basename(sys.argv[0])
    missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
    if len(missing) == len(TORCHRUN_VARIABLES):
        for launcher, name in COPIES.items():
            if (copies := os.environ.get(name, '1')) not in ('', '1'):
                raise ValueError(
                    f'{launcher} has started {copies} copies of this script, each by itself ({name}={copies}): start '
                    f'them with `torchrun --nproc_per_node=N {script} ...`, one torchrun per node, as '
                    f'slurm/generic.sh, or `unset {name}` if this is the only one'
                )
        return 0, 0, 1
    set_ones = {name: os.environ[name] for name in TORCHRUN_VARIABLES if name in os.environ}
    found = ', '.join(f'{name}={value}' for name, value in set_ones.items())
    advice = f'start with `torchrun --nproc_per_node=N {script} ...`, or unset them to run as one process'
    if missing:
        raise ValueError(f'{found} set in the environment but not {", ".join(missing)}: {advice}')
    numbers = [set_ones[name] for name in TORCHRUN_VARIABLES[:4]]
    if not all(number.isdigit() for number in numbers):
        raise ValueError(f'{found} set in the environment, of which the first four are no numbers: {advice}')
    rank, local_rank, world_size, local_size = map(int, numbers)
    if not (rank < world_size and local_rank < local_size <= world_size):
        raise ValueError(f'{found} set in the environment, which contradict each other: {advice}')
    return rank, local_rank, world_size


def local_world_size():
    """Ranks on this node."""
    return int(os.environ.get('LOCAL_WORLD_SIZE', 1))


def signal_when_parent_dies(number):
    """Have Linux send this signal to this process when its parent dies."""
    if sys.platform == 'linux':
        PR_SET_PDEATHSIG = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def end_with_parent():
    """Have Linux kill this worker when torchrun dies; otherwise a killed torchrun leaves its workers on the GPUs."""
    if 'TORCHELASTIC_RUN_ID' in os.environ and sys.platform == 'linux':
        signal_when_parent_dies(signal.SIGKILL)
        if os.getppid() == 1:  # torchrun has died already, or is itself the first process of a container
            with open('/proc/1/cmdline', 'rb') as file:
                if b'torch' not in file.read():
                    os._exit(1)


def leave(code=0):
    """Leave the process group and end this process, without the interpreter's finalization. The caller must have closed
    its files.

    In that finalization, 2 of 30 finished runs on 2 ranks ended with SIGABRT, on the rank that does least after its
    last collective. Probably one of gloo's threads drops a tensor there: it asks for the GIL, and the finalizing
    interpreter ends the thread in the middle of C++.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def unwrapped(model):
    """The model itself. What wraps one (DDP, fsdp_manual.ShardedModel, DeepSpeed's engine) has it as `module`."""
    return getattr(model, 'module', model)


def reshard(model):
    """Free the weights that a forward pass has gathered, in a model sharded by either implementation of FSDP."""
    for module in model.modules():
        if hasattr(module, 'reshard'):
            module.reshard()


def progress(what, sizes, unit='B'):
    """
    Iterate over the keys of `sizes`, {key: bytes}, and show on rank 0 how many of the bytes are done: on a terminal by
    a bar, elsewhere, as in the log of a Slurm job, by a line now and then. Short work shows nothing.

    unit: what is counted in place of bytes.
    """
    from tqdm import tqdm

    is_shown = os.environ.get('RANK', '0') == '0'
    total, done, said = sum(sizes.values()), 0, time.monotonic()
    options = {'unit': unit, 'unit_scale': True, 'delay': BAR_AFTER_S, 'leave': False}
    with tqdm(desc=what, total=total, disable=None if is_shown else True, **options) as bar:
        for key, size in sizes.items():
            yield key
            done += size
            bar.update(size)
            if is_shown and bar.disable and time.monotonic() - said >= LINE_EVERY_S:
                said = time.monotonic()
                so_far = f'{done:,} of {total:,} {unit}'
                if unit == 'B':
                    so_far = f'{done / 1e9:.1f} of {total / 1e9:.1f} GB'
                print(f'{time.strftime("%H:%M:%S")} {what}: {so_far}', flush=True)


def ranks_in_words(ranks):
    return f'rank {ranks[0]}' if len(ranks) == 1 else f'ranks {", ".join(map(str, ranks))}'


def interface_to(host):
    """Name of the network interface from which this machine reaches `host`; None if that is not known."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # sends nothing: only asks for the route
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # this interface has no address
                SIOCGIFADDR = 0x8915  # linux/sockios.h
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack('256s', name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
