"""A real Slurm of two virtual nodes on this machine, with GPUs that exist on paper: for tests/slurm/test_slurm.py."""

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

from launch import free_ports

from benchmarks.runs import end_with_parent

NODES = ('n1', 'n2')
GPUS = {'h100': 8, 'a100': 4, 'h200': 8}  # per node: what the scripts in slurm/ ask for, of every cluster
HOSTS = Path('/etc/hosts')
HOSTS_MARK = '# virtual Slurm nodes of tests/slurm_cluster.py'
PROGRAMS = ('munged', 'slurmctld', 'slurmd', 'sbatch', 'srun', 'scontrol', 'squeue', 'scancel')

# The nodes are this machine twice, each slurmd on its own port. The sizes are made up (config_overrides), jobs are not
# bound to cores (task/none), and no cgroups are needed (proctrack/linuxproc).
SLURM_CONF = """
ClusterName=virtual
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=10
FirstJobId={first_job}
GresTypes=gpu
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs=112 RealMemory=2000000 Gres={gres}
PartitionName=all Nodes=ALL Default=YES MaxTime=7-0 State=UP
"""


class NoSlurm(Exception):
    """Why there is no virtual cluster on this machine; tests skip with it."""


def add_hosts():
    """Let n1 and n2 mean this machine, by the address of its own name: so torchrun knows that it is the head node."""
    names = [*NODES]
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = '127.0.0.1'
        names.append(socket.gethostname())
    remove_hosts()  # of a run that was killed
    with HOSTS.open('a') as file:
        file.write(f'{address} {" ".join(names)} {HOSTS_MARK}\n')


def remove_hosts():
    lines = HOSTS.read_text().splitlines(keepends=True)
    kept = [line for line in lines if HOSTS_MARK not in line]
    if kept != lines:
        HOSTS.write_text(''.join(kept))  # not a new file in its place: in containers it is a mount


def wait_for(condition, seconds, what, daemons=()):
    """Poll condition() until it holds. Raises NoSlurm when it does not within `seconds`, or when a daemon has ended."""
    deadline = time.monotonic() + seconds
    while not condition():
        for daemon in daemons:
            if daemon.poll() is not None:
                raise NoSlurm(f'{daemon.args[0]} ended with {daemon.returncode} while waiting for {what}')
        if time.monotonic() > deadline:
            raise NoSlurm(f'{what}: not within {seconds} s')
        time.sleep(0.2)


@contextmanager
def slurm_cluster(folder):
    """Start the cluster with its state in `folder`; yields the environment in which sbatch and squeue find it.

    Raises NoSlurm with the reason when it cannot be started here. At the end jobs are cancelled and daemons stopped.
    """
    path = os.environ['PATH'] + ':/usr/sbin:/sbin'
    missing = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    if missing:
        raise NoSlurm(f'{", ".join(missing)} not installed: bash tests/install_slurm.sh, as root')
    if os.geteuid() != 0:
        raise NoSlurm('only root can name the virtual nodes in /etc/hosts')

    folder = Path(folder)
    folder.chmod(0o755)
    for name in ('munge', 'state', *(f'spool.{node}' for node in NODES)):
        (folder / name).mkdir(mode=0o755)
    key = folder / 'munge' / 'key'
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    env = {**os.environ, 'PATH': path, 'SLURM_CONF': str(folder / 'slurm.conf')}

    ctld_port, *ports = free_ports(1 + len(NODES))
    lines = [f'NodeName={node} Name=gpu Type={kind} File={folder}/{kind}_[0-{count - 1}]'
             for node in NODES for kind, count in GPUS.items()]  # fmt: skip
    for kind, count in GPUS.items():
        for number in range(count):
            (folder / f'{kind}_{number}').touch()  # Count= alone, without files, drains the node
    (folder / 'gres.conf').write_text('\n'.join(lines) + '\n')
    (folder / 'slurm.conf').write_text(
        SLURM_CONF.format(
            folder=folder,
            host=socket.gethostname(),
            ctld_port=ctld_port,
            nodes=','.join(NODES),
            ports=','.join(map(str, ports)),
            gres=','.join(f'gpu:{kind}:{count}' for kind, count in GPUS.items()),
            first_job=1000 + os.getpid() % 15000,  # the jobs' ports follow from their ids: rarely those of other runs
        )
    )

    daemons = []

    def start(*command):
        with open(folder / f'{command[0]}{len(daemons)}.out', 'w') as output:
            daemons.append(
                subprocess.Popen(
                    command,
                    env=env,
                    stdout=output,
                    stderr=output,
                    stdin=subprocess.DEVNULL,
                    cwd=folder,
                    preexec_fn=end_with_parent,
                )
            )

    def all_idle():
        states = subprocess.run(['sinfo', '-h', '-N', '-o', '%t'], env=env, capture_output=True, text=True).stdout
        return states.split() == ['idle'] * len(NODES)

    munge = folder / 'munge'
    try:
        add_hosts()
        # --force: its checks of who may write to the folders above are for real clusters
        start('munged', '--foreground', '--force', f'--key-file={key}', f'--socket={munge}/socket',
              f'--pid-file={munge}/pid', f'--log-file={munge}/log', f'--seed-file={munge}/seed')  # fmt: skip
        wait_for((munge / 'socket').exists, 20, 'the socket of munged', daemons)
        start('slurmctld', '-D', '-c')
        for node in NODES:
            start('slurmd', '-D', '-N', node)
        wait_for(all_idle, 40, 'nodes in state idle', daemons)
        yield env
    finally:
        stop(env, daemons)
        remove_hosts()


def stop(env, daemons):
    """Cancel what runs, wait until it is gone, end the daemons."""

    def squeue():
        return subprocess.run(['squeue', '-h'], env=env, capture_output=True, text=True, timeout=300).stdout.strip()

    if len(daemons) > 1 and all(daemon.poll() is None for daemon in daemons):
        try:
            if squeue():
                subprocess.run(['scancel', '--user=root'], env=env, timeout=300)
            wait_for(lambda: not squeue(), 30, 'the end of the jobs')
        except (NoSlurm, subprocess.TimeoutExpired) as error:
            print(f'while stopping the virtual cluster: {error}')
    for daemon in reversed(daemons):
        daemon.send_signal(signal.SIGTERM)
    for daemon in reversed(daemons):
        try:
            daemon.wait(15)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
