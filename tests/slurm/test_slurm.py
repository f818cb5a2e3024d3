"""The job scripts, on a real Slurm with two virtual nodes and GPUs that exist only on paper; and what they refuse
before any work."""

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from faults import wait_until
from launch import REPO, SHARED, TINY_MODEL, TINY_RUN, environment, free_ports, start_agent
from outputs import column, weights_of

from benchmarks.runs import end_with_parent
from knobs import read_knobs

# What each script requests: (GPUs per node, cores, longest time limit in hours, nodes).
REQUESTS = {
    'rorqual': ('h100:4', 64, 7 * 24, 1),
    'narval': ('a100:4', 48, 7 * 24, 1),
    'fir': ('h100:4', 48, 7 * 24, 1),
    'nibi': ('h100:8', 112, 7 * 24, 1),
    'trillium': ('4', 96, 24, 1),
    'tamia': ('h100:4', 48, 24, 1),
    'generic': ('1', 8, 24, 1),
    'multi_node': ('h100:4', 48, 24, 2),
    'diloco': ('h100:4', 48, 24, 2),
}
STEPS = 200  # of the run that is cut into jobs. They take seconds, since a run looks for STOP only every half second


@pytest.fixture(scope='module')
def project(tmp_path_factory, data_dir):
    """A copy of the project, as a clone would be, with a small config and a slurm/local.sh."""
    folder = tmp_path_factory.mktemp('slurm') / 'project'
    ignored = shutil.ignore_patterns('.git', '.venv', '.*_cache', '__pycache__', 'data', 'out', 'models', 'wandb',
                                     'assets', 'local.sh', '*.out')  # fmt: skip
    shutil.copytree(REPO, folder, ignore=ignored)
    keys = dict(argument.removeprefix('--').split('=') for argument in (*TINY_MODEL, *TINY_RUN))
    keys |= {'dataset': "'tiny'", 'dtype': "'float32'", 'dropout': 0.1}
    keys |= {'global_batch_size': 12, 'max_iters': STEPS, 'log_interval': 10}
    del keys['device']  # so that the default of the job scripts counts
    (folder / 'config' / 'tiny.py').write_text(''.join(f'{key} = {value}\n' for key, value in keys.items()))
    settings = {'DATASETS_DIR': data_dir, 'RESULTS_DIR': folder.parent / 'results', 'PYTHON': sys.executable}
    lines = [f'export {name}=${{{name}-{value}}}\n' for name, value in settings.items()]  # a test may set another value
    (folder / 'slurm' / 'local.sh').write_text(''.join(lines))
    return folder


def job_environment(**changes):
    """The environment of a shell with the `module` function of clusters and two processes per node, without the
    variables of a job in which the tests may run."""
    of_others = ('SLURM_', 'SBATCH_', 'CC_', 'TIKTOKEN_', 'HF_')  # prepare_data.py's tests leave some behind
    env = {name: value for name, value in environment().items() if not name.startswith(of_others)}
    stub = '() { echo "module $*"\n}'  # how bash exports a function, and so sbatch hands it to jobs
    return {**env, 'BASH_FUNC_module%%': stub, 'USER': 'tester', 'NPROC': '2', **changes}


def bash(command, project, **changes):
    """Run a line of bash in the project's folder; a variable set to None is unset."""
    env = {name: value for name, value in job_environment(**changes).items() if value is not None}
    return subprocess.run(
        ['bash', '-c', command],
        cwd=project,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
    )


def in_job(**changes):
    """The variables of a job of one node, for scripts that are run here as if by Slurm."""
    job = {'SLURM_JOB_ID': '7', 'SLURM_NNODES': '1', 'SLURM_JOB_NODELIST': 'n1', 'SLURM_CLUSTER_NAME': 'virtual'}
    return {**job, **changes}


def errors(result):
    """The lines that name an error; asserts that the script has failed."""
    assert result.returncode != 0, result.stdout + result.stderr
    return [line for line in (result.stdout + result.stderr).splitlines() if 'error:' in line]


# --- the scripts as files ---------------------------------------------------------------------------------------------


def test_shellcheck_passes():
    if not shutil.which('shellcheck'):
        pytest.skip('shellcheck is not installed: bash tests/install_slurm.sh')
    files = sorted([*map(str, (REPO / 'slurm').glob('*.sh')), str(REPO / 'tests' / 'install_slurm.sh')])
    files = [file for file in files if not file.endswith('/local.sh')]
    assert len(files) >= 12
    result = subprocess.run(['shellcheck', '-x', *files], cwd=REPO, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize('name', REQUESTS)
def test_a_cluster_file_asks_for_a_whole_node_of_its_cluster_and_is_short(name):
    text = (REPO / 'slurm' / f'{name}.sh').read_text()
    request = dict(re.findall(r'^#SBATCH --([a-z-]+)=(\S+)$', text, flags=re.MULTILINE))
    gpus, cores, hours, nodes = REQUESTS[name]
    assert (request['gpus-per-node'], request['cpus-per-task'], request['nodes']) == (gpus, str(cores), str(nodes))
    days, hours_of_day = re.fullmatch(r'(\d+)-(\d+):00', request['time']).groups()
    assert int(days) * 24 + int(hours_of_day) <= hours
    assert request['signal'] == ('B:USR1@1800' if name == 'diloco' else 'B:USR1@600')
    assert request['array'].endswith('%1')
    assert request['ntasks-per-node'] == '1'
    assert len(text.splitlines()) <= 25
    code = [line for line in text.splitlines() if not line.startswith(('#', ': "${SCRIPT:='))]
    source, *others = code
    assert source.startswith('source slurm/common.sh || exit 1 ') and others == ['launch "$@"']


def test_a_clone_has_the_log_folder_and_never_the_local_settings():
    if not (REPO / '.git').exists():
        pytest.skip('not a git checkout')
    listed = subprocess.run(
        ['git', 'ls-files', '--cached', '--others', '--exclude-standard', 'slurm'],
        cwd=REPO,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert 'slurm/logs/.gitignore' in listed and 'slurm/local.example.sh' in listed
    assert 'slurm/local.sh' not in listed and not [name for name in listed if name.endswith('.out')]
    for name in REQUESTS:
        assert '#SBATCH --output=slurm/logs/' in (REPO / 'slurm' / f'{name}.sh').read_text()


def test_the_template_gives_sbatch_its_account_and_jobs_their_folders(project, tmp_path):
    result = bash(
        'set -eu; source slurm/local.example.sh; echo "$SBATCH_ACCOUNT $DATASETS_DIR $RESULTS_DIR"',
        project,
        SCRATCH=str(tmp_path),
        DATASETS_DIR=None,
    )
    account, *folders = result.stdout.split()
    assert account == 'def-someprof' and all(Path(folder).is_dir() for folder in folders)


# --- common.sh without a cluster --------------------------------------------------------------------------------------


def test_offline_where_compute_nodes_have_no_internet(project):
    show = 'source slurm/common.sh; prepare_environment; echo "${WANDB_MODE:-unset} ${HF_HUB_OFFLINE:-unset}"'
    for cluster, expected in (('narval', 'offline 1'), ('fir', 'unset unset'), ('trillium', 'offline 1')):
        result = bash(show, project, **in_job(CC_CLUSTER=cluster))
        assert result.stdout.splitlines() == ['module load StdEnv/2023 gcc arrow python/3.12', expected], result.stderr
    assert bash(show, project, **in_job(SLURM_CLUSTER_NAME='rorqual')).stdout.endswith('offline 1\n')
    by_host = {'BASH_FUNC_hostname%%': '() { echo tc10.tamia\n}', 'SLURM_CLUSTER_NAME': ''}
    assert bash(show, project, **in_job(**by_host)).stdout.endswith('offline 1\n')
    assert bash(show, project, CC_CLUSTER='narval').stdout.endswith('unset unset\n')  # a login node downloads
    assert bash(show, project, **in_job(OFFLINE='1', MODULES='')).stdout == 'offline 1\n'
    over = in_job(CC_CLUSTER='narval', SLURM_JOB_END_TIME='1')  # what a shell has kept of a job that has ended
    assert bash(show, project, **over).stdout.endswith('unset unset\n')


def test_what_a_shell_has_kept_of_another_job_does_not_lead_to_its_folder(project, tmp_path):
    result = bash('bash slurm/generic.sh', project, SLURM_SUBMIT_DIR=str(tmp_path))
    assert 'this is not a job: `sbatch slurm/generic.sh ' in errors(result)[0], result.stderr


def test_a_log_that_is_full_ends_no_job(project):
    result = bash('source slurm/common.sh; say hello > /dev/full; echo goes on', project)
    assert result.returncode == 0 and result.stdout == 'goes on\n', result.stderr


def test_a_folder_for_temporary_files_that_cannot_be_made_is_replaced(project, tmp_path):
    show = 'source slurm/common.sh; prepare_environment; echo "$TMPDIR $TRITON_CACHE_DIR"'
    (tmp_path / 'file').touch()
    names = {'MODULES': '', 'SLURM_JOB_ID': f'7{os.getpid()}', 'USER': 'tester'}
    own = f'tester-{names["SLURM_JOB_ID"]}[.]\\w{{8}}'
    result = bash(show, project, **in_job(TMPDIR=str(tmp_path / 'file'), **names))
    said, shown = result.stdout.splitlines()
    assert re.fullmatch(f'/tmp /tmp/{own}/triton', shown) and 'cannot be made' in said, result.stderr
    os.rmdir(os.path.dirname(shown.split()[1]))
    result = bash(f'mkdir {tmp_path}/own; {show}', project, **in_job(TMPDIR=f'{tmp_path}/own', **names))
    assert re.fullmatch(f'{tmp_path}/own {tmp_path}/own/{own}/triton\n', result.stdout)


def test_what_is_compiled_is_loaded_from_no_folder_that_somebody_else_could_have_made(project, tmp_path):
    (tmp_path / 'tester-7').mkdir(mode=0o777)
    show = 'source slurm/common.sh; prepare_environment; echo "$JOB_FOLDER"; stat -c %a "$JOB_FOLDER"'
    names = {'MODULES': '', 'SLURM_JOB_ID': '7', 'USER': 'tester', 'TMPDIR': str(tmp_path)}
    folders = [bash(show, project, **in_job(**names)).stdout.split() for _ in range(2)]
    assert [mode for _, mode in folders] == ['700', '700'] and len(
        {tmp_path / 'tester-7', *(f for f, _ in folders)}
    ) == 3


def test_what_was_compiled_is_kept_where_compile_cache_says_by_kind_of_cpu(project, tmp_path):
    show = 'source slurm/common.sh; prepare_environment; echo "$TRITON_CACHE_DIR $TORCHINDUCTOR_CACHE_DIR"'
    environment = in_job(TMPDIR=str(tmp_path), MODULES='')
    lines = [bash(show, project, COMPILE_CACHE=f'{tmp_path}/kept', **environment).stdout for _ in range(2)]
    assert re.fullmatch(rf'({tmp_path}/kept/\w+-\d+)/triton \1/inductor\n', lines[0]) and lines[1] == lines[0]
    (tmp_path / 'file').touch()
    said = bash(show, project, COMPILE_CACHE=f'{tmp_path}/file', **environment).stdout.splitlines()
    assert 'cannot be made' in said[0] and said[1].startswith(f'{tmp_path}/') and '/file/' not in said[1]


def test_the_name_of_a_run_tells_runs_apart_and_not_their_parts(project):
    def name(arguments, **changes):
        command = f'source slurm/common.sh; SCRIPT=${{SCRIPT:-train_fsdp.py}}; run_name {arguments}'
        return bash(command, project, **changes).stdout.strip()

    assert name('config/enoki_8h.py') == 'enoki_8h'
    assert name('config/enoki_8h.py --max_iters=10 --resume=never --log_interval=1') == 'enoki_8h'
    assert name('config/enoki_8h.py --learning_rate=1e-3') == 'enoki_8h,learning_rate=1e-3'
    assert name('config/enoki_8h.py', SCRIPT='train_diloco.py') == 'enoki_8h,train_diloco'
    assert name('config/enoki_8h.py --tensor_parallel=2', SCRIPT='train_parallel.py') == 'enoki_8h'
    assert name("--dataset='a b/c'") == 'run,dataset=a_b_c'
    assert name('config/enoki_8h.py --keep_checkpoints=5 --timeout_s=900 --compile --compile=False') == 'enoki_8h'
    assert name('config/enoki_8h.py --seed=2 --compile --dtype=float32') == 'enoki_8h,seed=2,dtype=float32'
    for key in ('seed=7', 'dropout=0.1', 'optimizer=muon', 'global_batch_size=64'):
        assert name(f'config/enoki_8h.py --{key}') == f'enoki_8h,{key}'


@pytest.mark.parametrize('script', sorted(path.name for path in REPO.glob('train_*.py')))
def test_keys_that_decide_on_losses_are_in_the_name_of_a_run_and_no_others(project, script):
    knobs = read_knobs(REPO / script)
    longer = {'max_iters', 'num_epochs'}  # with other values the same run goes on
    deciding = {key for key, knob in knobs.items() if 'result' in knob.tags} - longer - {'data_dir'}
    deciding |= {'batch_size', 'dtype', 'tf32', 'deepspeed_config'} & {*knobs}  # these round otherwise
    command = f'source slurm/common.sh; SCRIPT=train_fsdp.py; for key in {" ".join(knobs)}; do run_name --$key=1; done'
    named = re.findall(r'^run,(\w+)=1$', bash(command, project).stdout, flags=re.MULTILINE)
    assert {*named} == deciding | {'out_dir'}  # which is never there: with it a run needs no name


def test_the_plan_on_a_login_node_is_that_of_the_jobs_ranks(project):
    result = bash(
        'bash slurm/multi_node.sh config/tiny.py --dry_run --batch_size=1 --global_batch_size=16', project, NPROC=None
    )
    assert '1 sequence x 2 micro-steps x 8 ranks = 16 sequences' in result.stdout, result.stdout + result.stderr
    assert 'memory per rank' in result.stdout and 'no config is named' not in result.stdout


def test_keys_without_a_config_are_said_to_be_alone(project):
    said = bash('bash slurm/diloco.sh --dry_run --dataset=nowhere', project, NPROC='1').stdout
    assert 'no config is named: train_diloco.py has its own defaults, without config/diloco_enoki.py' in said


def test_mistakes_that_cost_no_time_at_all(project):
    def only_error(command, **changes):
        found = errors(bash(command, project, **changes))
        assert len(found) == 1, found
        return found[0]

    start = 'bash slurm/rorqual.sh config/tiny.py'
    assert re.search('DATASETS_DIR .*cp slurm/local.example.sh', only_error(start, **in_job(DATASETS_DIR='')))
    assert 'DATASETS_DIR=/nowhere: ' in only_error(start, **in_job(DATASETS_DIR='/nowhere'))
    assert 'RESULTS_DIR ' in only_error(start, **in_job(RESULTS_DIR=''))
    assert 'no GPU' in only_error(start, **in_job(NPROC=''))
    assert '`bash slurm/setup_env.sh`' in only_error(start, **in_job(PYTHON='/nowhere/python'))
    assert 'SCRIPT=train_dpp.py: not in' in only_error(start, **in_job(SCRIPT='train_dpp.py'))
    assert '`sbatch slurm/rorqual.sh' in only_error(start)
    broken = {'BASH_FUNC_module%%': '() { return 1\n}'}
    assert 'module load StdEnv/2023 gcc arrow python/3.12: ' in only_error(start, **in_job(**broken))


@pytest.mark.slow
def test_mistakes_found_by_the_plan_and_on_the_node(project, tmp_path):
    result = bash('bash slurm/rorqual.sh config/tiny.py --device=cpu --dataset=nowhere', project, **in_job())
    assert 'error: dataset=nowhere: ' in errors(result)[0] and len(errors(result)) == 1

    check = f'source slurm/common.sh; prepare_environment; OUT_DIR={tmp_path}; check_node'
    if not torch.cuda.is_available():
        found = errors(bash(f'{check} --device=cuda', project, **in_job()))
        assert len(found) == 1 and re.search(r'device=cuda: torch \S+ .* 0 GPUs .* 2\b', found[0])

    with open(tmp_path / '.lock', 'w') as lock:  # what a run in tmp_path holds
        fcntl.lockf(lock, fcntl.LOCK_EX)
        lock.write(f'process 12 on {os.uname().nodename}')
        lock.flush()
        found = errors(bash(f'{check} --device=cpu', project, **in_job()))
    assert len(found) == 1 and re.search(f'out_dir={tmp_path} .*12 on {os.uname().nodename}', found[0])


def test_an_early_failure_ends_the_chain_in_its_first_element_only(project, tmp_path):
    """A later element has a command that has trained, so the next one tries again, until max_failures in a row."""
    (tmp_path / 'checkpoints' / 'step_00000100').mkdir(parents=True)
    stub = {'BASH_FUNC_scancel%%': '() { echo "cancelled: $*"\n}'}

    def fails(element, out_dir=tmp_path, chain='9', **changes):
        job = in_job(SLURM_ARRAY_JOB_ID=chain, SLURM_ARRAY_TASK_ID=str(element), SLURM_ARRAY_TASK_MIN='1')
        result = bash(f'source slurm/common.sh; OUT_DIR={out_dir}; fail mistake', project, **stub, **job, **changes)
        assert errors(result) == ['error: mistake'], result.stdout + result.stderr
        is_cancelled = 'cancelled: --quiet --state=PENDING 9' in result.stdout
        assert is_cancelled != ('on n1: the next array element tries again' in result.stdout) or element == 1
        return is_cancelled

    assert fails(1) and not (tmp_path / '.failures').exists()
    assert not fails(1, SLURM_RESTART_COUNT='1')  # the cluster has queued it again: it had begun to train
    assert [fails(element) for element in (3, 4, 5, 6)] == [False, False, False, True], 'the fifth is one too many'
    (tmp_path / 'checkpoints' / 'step_00000200').mkdir()
    (tmp_path / 'checkpoints' / 'step_00000300.damaged').mkdir()
    assert not fails(8) and fails(9, MAX_FAILURES='2') and not fails(10, MAX_FAILURES='0')
    assert not fails(2, chain='10'), 'another chain has its own count'
    assert fails(11, out_dir=tmp_path / 'nowhere'), 'what cannot be counted must not go on for ever'
    assert fails(11, out_dir=''), 'nor what fails before out_dir is known'


def test_a_tokenizer_that_is_missing_or_damaged(project, tmp_path):
    """In a job without internet the error comes at once, and names the command for the login node."""
    text = tmp_path / 'text'
    text.mkdir()
    for number in range(3):
        (text / f'{number}.txt').write_text(f'document {number}')
    command = f'bash slurm/prepare_data.sh --dataset={text} --tokenizer=gpt2 --name=text'
    job = in_job(OFFLINE='1', DATASETS_DIR=str(tmp_path))
    cure = 'run `python prepare_data.py --cache_tokenizer=gpt2`'
    found = errors(bash(command, project, **job))
    assert cure in found[0], found

    if not (SHARED / 'tiktoken_cache').is_dir():
        pytest.skip(f'no tokenizer to damage: {SHARED / "tiktoken_cache"} is not there')
    shutil.copytree(SHARED / 'tiktoken_cache', tmp_path / 'tiktoken')
    for path in (tmp_path / 'tiktoken').iterdir():
        path.chmod(0o644)
    good = bash(command, project, **job)
    assert good.returncode == 0 and (tmp_path / 'text' / 'meta.json').exists(), good.stdout + good.stderr
    shutil.rmtree(tmp_path / 'text2', ignore_errors=True)
    damaged = tmp_path / 'tiktoken' / hashlib.sha1(b'').hexdigest()
    damaged = next(path for path in (tmp_path / 'tiktoken').iterdir() if path != damaged)
    damaged.write_bytes(damaged.read_bytes()[:-100])
    found = errors(bash(command.replace('=text', '=text2'), project, **job))
    assert f'{damaged.name} in' in found[0] and 'was damaged' in found[0] and cure in found[0], found


def wheel(folder, name, version):
    """The smallest wheel that pip installs."""
    info = f'{name}-{version}.dist-info'
    path = folder / f'{name}-{version}-py3-none-any.whl'
    files = {
        f'{name}.py': '',
        f'{info}/METADATA': f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n',
        f'{info}/WHEEL': 'Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n',
    }
    record = ''.join(f'{file},,\n' for file in (*files, f'{info}/RECORD'))
    with zipfile.ZipFile(path, 'w') as archive:
        for file, text in {**files, f'{info}/RECORD': record}.items():
            archive.writestr(file, text)
    return path


@pytest.mark.slow
def test_setup_env_takes_the_clusters_wheels_first_and_the_index_for_the_rest(project, tmp_path):
    copy = tmp_path / 'project'
    (copy / 'slurm').mkdir(parents=True)
    for name in ('common.sh', 'setup_env.sh'):
        shutil.copy(project / 'slurm' / name, copy / 'slurm')
    (copy / 'requirements.txt').write_text('# two of them\nherebefore>=1\nfromindex>=1\n')
    wheels, index = tmp_path / 'wheels', tmp_path / 'index' / 'fromindex'
    wheels.mkdir()
    index.mkdir(parents=True)
    wheel(wheels, 'herebefore', '1.0')
    name = wheel(index, 'fromindex', '1.0').name
    (index / 'index.html').write_text(f'<a href="{name}">{name}</a>')
    env = {'PIP_FIND_LINKS': str(wheels), 'PIP_INDEX_URL': f'file://{index.parent}', 'PIP_EXTRA_INDEX_URL': '',
           'PIP_CONFIG_FILE': os.devnull, 'PATH': f'{Path(sys.executable).parent}:{os.environ["PATH"]}'}  # fmt: skip
    result = bash('bash slurm/setup_env.sh', copy, **env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert 'herebefore>=1: from this cluster' in result.stdout
    assert 'fromindex>=1: from the package index' in result.stdout
    assert bash('.venv/bin/python -c "import herebefore, fromindex"', copy).returncode == 0
    (copy / 'requirements.txt').write_text('nowhere>=1\n')
    found = errors(bash('bash slurm/setup_env.sh', copy, **env))
    assert found == [line for line in found if 'nowhere>=1: ' in line]


# --- several machines without Slurm -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('rendezvous', ['static', 'c10d'])
def test_two_torchruns_without_slurm(rendezvous, data_dir, tmp_path):
    """The two pairs of commands of docs/slurm.md, both agents on this machine."""
    (port,) = free_ports(1)
    run = [
        *TINY_MODEL,
        *TINY_RUN,
        '--dataset=tiny',
        f'--data_dir={data_dir}',
        '--max_iters=2',
        f'--out_dir={tmp_path}/run',
    ]
    agents = []
    for node in range(2):
        if rendezvous == 'static':
            how = [f'--node_rank={node}', '--master_addr=127.0.0.1', f'--master_port={port}']
        else:
            how = ['--rdzv-backend=c10d', '--rdzv-id=1', f'--rdzv-endpoint=127.0.0.1:{port}']
        torchrun, log = ['--nnodes=2', *how], tmp_path / f'agent{node}.log'
        agents.append(start_agent('train_fsdp.py', *run, nproc=1, torchrun=torchrun, log=log))
    try:
        codes = [agent.wait(600) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert codes == [0, 0], ''.join((tmp_path / f'agent{node}.log').read_text()[-3000:] for node in range(2))
    assert (tmp_path / 'run' / 'DONE').read_text().strip() == '2'
    assert '2 ranks' in (tmp_path / 'run' / 'train.log').read_text()


# --- a real Slurm -----------------------------------------------------------------------------------------------------


NODES = ('n1', 'n2')
GPUS = {'h100': 8, 'a100': 4, 'h200': 8}  # per node: what the scripts in slurm/ ask for, of every cluster
HOSTS = Path('/etc/hosts')
HOSTS_MARK = '# virtual Slurm nodes of tests/slurm/test_slurm.py'
PROGRAMS = ('munged', 'slurmctld', 'slurmd', 'sbatch', 'srun', 'scontrol', 'squeue', 'scancel')

# Both nodes are this machine, with a slurmd on a port of its own each. Sizes are made up (config_overrides), jobs are
# not bound to cores (task/none), and no cgroups are needed (proctrack/linuxproc). MinJobAge: a job that has ended is
# remembered for an hour, so that the first element of a chain is still listed when the last one ends on a slow machine.
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
MinJobAge=3600
FirstJobId={first_job}
GresTypes=gpu
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs=112 RealMemory=2000000 Gres={gres}
PartitionName=all Nodes=ALL Default=YES MaxTime=7-0 State=UP
"""


def add_hosts():
    """Let n1 and n2 be this machine, with the address of its own name, by which torchrun knows that it is the head
    node."""
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


@pytest.fixture(scope='module')
def cluster(tmp_path_factory):
    """A Slurm of two virtual nodes with GPUs that exist on paper; the variables by which sbatch and squeue find it.

    Skips with the reason where it cannot be started. At the end jobs are cancelled and daemons stopped.
    """
    path = os.environ['PATH'] + ':/usr/sbin:/sbin'
    missing = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    if missing:
        pytest.skip(f'no virtual Slurm: {", ".join(missing)} not installed: bash tests/install_slurm.sh, as root')
    if os.geteuid() != 0 or not os.access(HOSTS, os.W_OK):
        pytest.skip(f'no virtual Slurm: its nodes cannot be named in {HOSTS}')

    folder = tmp_path_factory.mktemp('cluster')
    folder.chmod(0o755)
    for name in ('munge', 'state', *(f'spool.{node}' for node in NODES)):
        (folder / name).mkdir(mode=0o755)
    key = folder / 'munge' / 'key'
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    variables = {'PATH': path, 'SLURM_CONF': str(folder / 'slurm.conf')}
    env = {**os.environ, **variables}

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
            options = {'env': env, 'cwd': folder, 'stdin': subprocess.DEVNULL, 'preexec_fn': end_with_parent}
            daemons.append(subprocess.Popen(command, stdout=output, stderr=output, **options))

    def running():
        for daemon in daemons:
            assert daemon.poll() is None, f'{daemon.args[0]} has ended with {daemon.returncode}'
        return True

    def all_idle():
        time.sleep(0.2)
        states = subprocess.run(['sinfo', '-h', '-N', '-o', '%t'], env=env, capture_output=True, text=True).stdout
        return states.split() == ['idle'] * len(NODES)

    munge = folder / 'munge'
    try:
        add_hosts()
        # --force: its checks of who may write to the folders above are for real clusters
        start('munged', '--foreground', '--force', f'--key-file={key}', f'--socket={munge}/socket',
              f'--pid-file={munge}/pid', f'--log-file={munge}/log', f'--seed-file={munge}/seed')  # fmt: skip
        wait_until(lambda: running() and (munge / 'socket').exists(), 20, lambda: 'for the socket of munged')
        start('slurmctld', '-D', '-c')
        for node in NODES:
            start('slurmd', '-D', '-N', node)
        wait_until(lambda: running() and all_idle(), 40, lambda: 'for nodes in state idle')
        yield variables
    except AssertionError as reason:
        pytest.skip(f'no virtual Slurm: {reason}')
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
            wait_until(lambda: not squeue(), 30, lambda: 'for the end of the jobs')
        except (AssertionError, subprocess.TimeoutExpired) as error:
            print(f'while stopping the virtual cluster: {error}')
    for daemon in reversed(daemons):
        daemon.send_signal(signal.SIGTERM)
    for daemon in reversed(daemons):
        try:
            daemon.wait(15)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def submit(cluster, project, arguments, **changes):
    """Submit a job by `sbatch --parsable ARGUMENTS` from the project's folder; returns its number."""
    result = bash(f'sbatch --parsable {arguments}', project, **cluster, **changes)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def states(cluster, job):
    """{array element: state} for what squeue still lists of a job. The elements of an array that are not started yet
    are one entry."""
    command = ['squeue', '--noheader', '--states=all', '--job', job, '--format=%K %T']
    lines = subprocess.run(command, env=job_environment(**cluster), capture_output=True, text=True).stdout.splitlines()
    return dict(line.split() for line in lines)


ENDED = {'COMPLETED', 'FAILED', 'CANCELLED', 'TIMEOUT', 'NODE_FAIL', 'OUT_OF_MEMORY'}


def wait_until_ended(cluster, project, job, seconds=900):
    """{element: (state, its log)} once all elements of a job have ended."""
    deadline = time.monotonic() + seconds
    while not set((found := states(cluster, job)).values()) <= ENDED or not found:
        assert time.monotonic() < deadline, f'{found}\n{logs_of(project, job)}'
        time.sleep(0.3)
    return {element: (state, logs_of(project, job, element)) for element, state in found.items()}


def logs_of(project, job, element='*'):
    paths = sorted((project / 'slurm' / 'logs').glob(f'*-{job}_{element}.out'))
    return '\n'.join(path.read_text() for path in paths)


def wait_for_text(path, text, cluster, project, job, seconds=900):
    """Wait until the file has the text; fails if the first element of the job ends without it."""
    deadline = time.monotonic() + seconds
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline and states(cluster, job).get('1') not in ENDED, logs_of(project, job)
        time.sleep(0.05)


@pytest.fixture(scope='module')
def submitted(cluster, project):
    """Two jobs at a time, which saves some waiting: {name: (job, out_dir)} of two scripts as committed."""
    one, two = (project.parent / 'results' / name for name in ('tiny', 'two'))
    # A variable that common.sh exports. Ranks have it even where the cluster lets srun export nothing by itself.
    (project / 'config' / 'exported.py').write_text("import os\n_folder = os.environ['TIKTOKEN_CACHE_DIR']\n")
    (two / 'wandb' / 'offline-run-1').mkdir(parents=True)
    run = f'config/tiny.py config/exported.py --device=cpu --out_dir={two} --max_iters=5 --batch_size=1'
    run += ' --replicate_size=2'
    return {
        'rorqual': (submit(cluster, project, 'slurm/rorqual.sh config/tiny.py --device=cpu'), one),
        'multi_node': (submit(cluster, project, f'slurm/multi_node.sh {run}', SLURM_EXPORT_ENV='NONE'), two),
    }


@pytest.fixture(scope='module')
def diloco(cluster, project, submitted):
    """(job, out_dir) of slurm/diloco.sh on both nodes, once earlier jobs have left them."""
    out_dir = project.parent / 'results' / 'diloco'
    run = f'config/tiny.py --device=cpu --out_dir={out_dir} --max_iters=6 --inner_steps=3 --batch_size=1'
    return submit(cluster, project, f'slurm/diloco.sh {run}'), out_dir


@pytest.fixture(scope='module')
def uninterrupted(cluster, project, submitted):
    """The run of slurm/rorqual.sh, from start to end: (its out_dir, its elements)."""
    job, out_dir = submitted['rorqual']
    return out_dir, wait_until_ended(cluster, project, job)


@pytest.mark.parametrize('name', [*REQUESTS, 'compare', 'pool', 'prepare_data'])
def test_slurm_accepts_the_request_of_a_script_as_committed(cluster, project, name):
    result = bash(f'sbatch --test-only slurm/{name}.sh', project, **cluster)
    assert 'to start at' in result.stderr, result.stderr


@pytest.mark.slow
def test_rorqual_runs_to_done_and_ends_its_chain(uninterrupted):
    out_dir, elements = uninterrupted
    state, log = elements.pop('1')
    assert state == 'COMPLETED', log
    assert (out_dir / 'DONE').read_text().strip() == str(STEPS)
    assert 'module load StdEnv/2023 gcc arrow python/3.12' in log
    assert '1 x 2 processes, rendezvous at n' in log and f'done: {out_dir}' in log
    assert elements and {state for state, _ in elements.values()} == {'CANCELLED'}  # the seven that waited


@pytest.mark.slow
def test_cut_before_its_time_limit_the_next_element_goes_on_to_equal_weights(cluster, project, uninterrupted, tmp_path):
    out_dir = tmp_path / 'cut'
    run = f'config/tiny.py --device=cpu --out_dir={out_dir} --resume=never'
    job = submit(cluster, project, f'slurm/rorqual.sh {run}')
    wait_for_text(out_dir / 'metrics.jsonl', '"step": 10,', cluster, project, job)
    # This is what Slurm sends 600 s before the time limit. Limits are whole minutes, and the test should not wait for
    # one. The signal arrives at once, but scancel 22.05 does not notice and sends it again every five seconds, so the
    # test ends scancel.
    scancel = subprocess.Popen(['scancel', '--batch', '--signal=USR1', f'{job}_1'], env=job_environment(**cluster))
    try:
        wait_for_text(project / 'slurm' / 'logs' / f'rorqual-{job}_1.out', 'asking for', cluster, project, job)
    finally:
        scancel.kill()
        scancel.wait()
    elements = wait_until_ended(cluster, project, job)

    state, log = elements['1']
    stopped = re.search(r'stopped at step (\d+)', log)
    assert state == 'COMPLETED' and 'asking for a checkpoint' in log and stopped, log
    assert 0 < int(stopped[1]) < STEPS
    state, log = elements['2']
    assert state == 'COMPLETED' and f'step_{int(stopped[1]):08} at step {stopped[1]}' in log, log
    assert {state for element, (state, _) in elements.items() if element not in '12'} == {'CANCELLED'}
    assert not (out_dir / 'PREEMPTED').exists() and not (out_dir / 'STOP').exists()

    reference = uninterrupted[0]
    losses = [dict(zip(column(out, 'step'), column(out, 'loss'), strict=True)) for out in (reference, out_dir)]
    assert losses[0] and losses[0] == {step: losses[1].get(step) for step in losses[0]}
    ours, theirs = weights_of(out_dir, STEPS), weights_of(reference, STEPS)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.slow
def test_a_chain_that_has_trained_survives_bad_elements(cluster, project, tmp_path):
    """Element 1 is stopped, 2 fails in its plan and 3 in its ranks, within seconds, and 4 goes on to the end."""
    out_dir = tmp_path / 'run'
    lines = ['import os, sys', "element, is_plan = os.environ.get('SLURM_ARRAY_TASK_ID'), '--dry_run' in sys.argv"]
    lines += ["if (element, is_plan) in {('2', True), ('3', False)}:", "    raise OSError('this node is bad')"]
    lines += ['del element, is_plan']  # which are no keys
    (project / 'config' / 'bad.py').write_text('\n'.join(lines) + '\n')
    run = f'config/tiny.py config/bad.py --device=cpu --out_dir={out_dir}'
    job = submit(cluster, project, f'--array=1-6%1 slurm/generic.sh {run}')
    wait_for_text(out_dir / 'metrics.jsonl', '"step": 10,', cluster, project, job)
    (out_dir / 'STOP').touch()
    elements = wait_until_ended(cluster, project, job)
    assert elements['1'][0] == 'COMPLETED' and 'stopped at step' in elements['1'][1], elements
    for element, failures in (('2', 1), ('3', 2)):
        state, log = elements[element]
        assert state == 'FAILED' and 'this node is bad' in log, log
        assert ('rendezvous at' in log) == (element == '3'), log
        assert re.search(rf'failure {failures} since the last checkpoint, on n\d: the next array element', log), log
    state, log = elements['4']
    assert state == 'COMPLETED' and (out_dir / 'DONE').read_text().strip() == str(STEPS), log
    assert {state for element, (state, _) in elements.items() if element not in '1234'} == {'CANCELLED'}


@pytest.mark.slow
def test_data_is_prepared_in_a_job(cluster, project, tmp_path):
    (tmp_path / 'text.txt').write_text('0123456789\n' * 100)
    run = f'slurm/prepare_data.sh --dataset={tmp_path}/text.txt --tokenizer=bytes'
    job = submit(cluster, project, run, DATASETS_DIR=str(tmp_path))
    wait_until_ended(cluster, project, job)
    log = (project / 'slurm' / 'logs' / f'prepare_data-{job}.out').read_text()
    assert (tmp_path / 'text-bytes' / 'meta.json').exists(), log


@pytest.mark.slow
def test_multi_node_runs_to_done_on_two_nodes(cluster, project, submitted):
    job, out_dir = submitted['multi_node']
    state, log = wait_until_ended(cluster, project, job)['1']
    assert state == 'COMPLETED' and (out_dir / 'DONE').read_text().strip() == '5', log
    assert '2 x 2 processes, rendezvous at n' in log and '4 ranks' in log
    assert f'wandb sync {out_dir}/wandb/offline-run-*' in log


@pytest.mark.slow
def test_diloco_runs_a_replica_on_each_node(cluster, project, diloco):
    job, out_dir = diloco
    state, log = wait_until_ended(cluster, project, job)['1']
    assert state == 'COMPLETED' and (out_dir / 'DONE').read_text().strip() == '6', log
    assert 'mesh: 2 replicas x 2 shards' in log
    assert len(column(out_dir, 'diloco/delta_norm')) == 2


@pytest.mark.slow
def test_jobs_of_an_array_are_replicas_of_one_pool(cluster, project):
    results = project.parent / 'results'
    keys = 'max_iters=8 inner_steps=4 batch_size=1 num_replicas=2 quorum=2 grace_s=120'
    run = f'config/tiny.py --device=cpu --exchange={results}/pool --' + ' --'.join(keys.split())
    job = submit(cluster, project, f'--array=1-2 slurm/pool.sh {run}')
    elements = wait_until_ended(cluster, project, job)
    out_dirs = sorted(results.glob('tiny,train_pool*/replica_*'))
    assert [path.name for path in out_dirs] == ['replica_1', 'replica_2'], elements
    for out_dir in out_dirs:
        assert (out_dir / 'DONE').read_text().strip() == '8', elements
    journals = [(out_dir / 'rounds.jsonl').read_text().splitlines() for out_dir in out_dirs]
    digests = [[json.loads(row)['digest'] for row in journal] for journal in journals]
    assert len(digests[0]) == 2 and digests[0] == digests[1]
    assert [len(json.loads(row)['deltas']) for row in journals[0]] == [2, 2]


# --- the runs of a sweep as jobs --------------------------------------------------------------------------------------

SWEEP = """
strategies = ['single']
sweep = {'learning_rate': [1e-3, 1e-2, 1e5]}
seeds = [1, 2]
arch, n_layer, n_head, n_embd, block_size, batch_size = 'llama', 1, 2, 16, 16, 2
dataset, vocab_size, dtype = 'synthetic', 64, 'float32'
max_iters, log_interval, eval_sequences, warmup_iters, grad_clip = 12, 1, 16, 0, 0.0
device = 'cpu'
"""
OFTEN = """
import runpy, sys
from comparison import jobs
jobs.ASK_S = 1
sys.argv[0] = 'compare.py'
runpy.run_path('compare.py', run_name='__main__')
"""  # compare.py that asks Slurm every second


@pytest.fixture
def start_sweep(cluster, project):
    """start_sweep(*keys) -> Popen of compare.py in the project's folder."""
    (project / 'config' / 'sweep_jobs.py').write_text(SWEEP)
    started = []

    def start(*keys):
        command = [sys.executable, '-c', OFTEN, 'config/sweep_jobs.py', '--out_dir=out/sweep', *keys]
        env = job_environment(**cluster, PYTHONPATH=str(project))
        pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
        started.append(subprocess.Popen(command, cwd=project, env=env, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def read_until(process, text):
    """The next line of a process that has the text."""
    said = []
    while text not in (line := process.stdout.readline()):
        assert line, ''.join(said)
        said.append(line)
    return line


@pytest.mark.slow
def test_a_sweep_as_jobs_is_collected_by_whoever_comes_and_submits_nothing_twice(cluster, project, start_sweep):
    process = start_sweep('--slurm=--hold --cpus-per-task=50')
    job = re.fullmatch(r'3 run\(s\) submitted as job (\d+)\n', read_until(process, 'submitted'))[1]
    process.send_signal(signal.SIGINT)
    said = process.communicate()[0]
    assert process.returncode == 130 and 'jobs go on' in said, said

    def slurm(command):
        subprocess.run(command.split(), env=job_environment(**cluster), check=True)

    slurm(f'scancel {job}_2')
    process = start_sweep('--slurm')
    assert read_until(process, 'already').startswith('2 run(s) ')
    read_until(process, '1 run(s) submitted as job')  # the one that was cancelled meanwhile
    slurm(f'scancel {job}_0')
    assert 'run-lr0.001, seed1: no result: slurm/logs/' in read_until(process, 'no result')
    slurm(f'scontrol release {job}')
    said = process.communicate()[0]
    assert process.returncode == 1 and 'run-lr0.01, seed1: val loss ' in said, said
    assert 'submitted' not in said, 'after a failure nothing new begins'

    said = start_sweep('--slurm').communicate()[0]
    assert re.search(r'^1 run\(s\) submitted as job \d+\nrun-lr0.001, seed1: val loss ', said, re.M), said
    logs = [path.read_text() for path in project.glob('out/sweep/runs/*/*/train.log')]
    assert len(logs) >= 4 and all(log.count('command: ') == 1 for log in logs), 'a run ran twice'
    row = json.loads((project / 'out/sweep/sweep.json').read_text())[0]
    assert len(row['losses']) == 2 and (project / 'out/sweep/report.html').exists()
    assert start_sweep('--slurm').communicate()[0].count('submitted') == 0


@pytest.mark.slow
def test_what_sbatch_refuses_is_one_line(start_sweep):
    process = start_sweep('--slurm=--partition=nowhere', '--out_dir=out/refused')
    said = process.communicate()[0]
    assert process.returncode == 1 and said.count('\n') == 1 and 'slurm=--partition=nowhere: sbatch: error' in said, (
        said
    )


@pytest.mark.slow
def test_a_mistake_ends_the_chain_with_one_line(cluster, project):
    job = submit(cluster, project, 'slurm/generic.sh config/tiny.py --device=cpu --batch_size=5')
    elements = wait_until_ended(cluster, project, job)
    state, log = elements.pop('1')
    assert state == 'FAILED' and 'global_batch_size=12 ' in log, log
    assert log.count('error') == 1 and 'Traceback' not in log
    assert {state for state, _ in elements.values()} == {'CANCELLED'}


@pytest.mark.slow
def test_resume_never_refuses_a_run_and_no_later_element_continues_it(cluster, project, uninterrupted):
    """The run that is refused is of another script, in the same out_dir."""
    run = f'config/tiny.py --device=cpu --max_iters={STEPS + 10} --out_dir={uninterrupted[0]} --resume=never'
    job = submit(cluster, project, f'slurm/generic.sh {run}', SCRIPT='train_ddp.py')
    elements = wait_until_ended(cluster, project, job)
    state, log = elements.pop('1')
    assert state == 'FAILED' and re.search(r'error: .*never', log) and 'train_ddp.py ended with' in log, log
    assert {state for state, _ in elements.values()} == {'CANCELLED'}
    assert (uninterrupted[0] / 'DONE').read_text().strip() == str(STEPS)
