"""Fixtures: a small real dataset, and ways to start the scripts as a user would."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from faults import Job

REPO = Path(__file__).resolve().parent.parent
SHARED = REPO.parent / 'shared'  # test material that may be missing: the tests that need it say so
sys.path.insert(0, str(REPO))

# A step takes milliseconds, and 3 ranks get uneven shards of 40, 56 and 120 rows.
TINY_MODEL = ['--n_layer=3', '--n_head=2', '--n_embd=40', '--mlp_hidden_dim=56', '--block_size=32', '--batch_size=2']
TINY_RUN = ['--device=cpu', '--learning_rate=3e-3', '--warmup_iters=5', '--log_interval=1', '--eval_iters=2']


def environment(threads=1, **changes):
    """This process's environment without a launcher's variables, on `threads` threads per process.

    And without HF_HUB_OFFLINE, which finetune.py has set here: the scripts do that themselves, where they need it.
    """
    names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT', 'HF_HUB_OFFLINE')
    env = {key: value for key, value in os.environ.items() if key not in names}
    # torchrun's --local_addr: without it, it looks up this machine's name, which not every machine can resolve.
    return {**env, 'OMP_NUM_THREADS': str(threads), 'PYTHONUNBUFFERED': '1', 'PET_LOCAL_ADDR': '127.0.0.1', **changes}


def run_script(script, *arguments, nproc=None, check=True, cwd=REPO, timeout=300, **env):
    """Run a script: `python script ...`, or under torchrun with nproc processes. Returns the CompletedProcess."""
    launcher = [sys.executable]
    if nproc:
        launcher += ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={nproc}']
    command = [*launcher, str(REPO / script), *map(str, arguments)]
    result = subprocess.run(
        command,
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )
    if check and result.returncode != 0:
        raise AssertionError(f'{" ".join(command)} ended with {result.returncode}\n{result.stdout}\n{result.stderr}')
    return result


def run_forked(script, *arguments, nproc=1, log, timeout=300, **env):
    """Run a script in nproc processes that have imported torch already (see faults.Job); returns what they said.

    For runs that end well and are looked at afterwards: run_script() starts them as a user does, seconds later.
    """
    job = Job(script, arguments, nproc, log, **env)
    codes = job.wait(timeout)
    assert codes == [0] * nproc, f'{script} {" ".join(map(str, arguments))} ended with {codes}\n{job.text()}'
    return job.text()


def run_many(cases, nproc, folder, timeout=600, **env):
    """Run cases (see tests/many_runs.py) in nproc processes started once; {name: what rank 0 held}."""
    path = Path(folder) / f'cases_{nproc}_{len(os.listdir(folder))}.json'
    path.write_text(json.dumps(cases))
    run_forked('tests/many_runs.py', path, nproc=nproc, log=f'{path}.log', timeout=timeout, **env)
    return json.loads(Path(f'{path}.results').read_text())


def metrics(out_dir):
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (Path(out_dir) / 'metrics.jsonl').read_text().splitlines()]


def column(out_dir, key):
    """One key of metrics.jsonl over the steps that have it."""
    return [row[key] for row in metrics(out_dir) if key in row]


@pytest.fixture(scope='session')
def data_dir(tmp_path_factory):
    """A data_dir with the dataset 'tiny': 40 modules of the standard library as bytes."""
    folder = tmp_path_factory.mktemp('data')
    text = tmp_path_factory.mktemp('text')
    for number, path in enumerate(sorted(Path(os.__file__).parent.glob('*.py'))[:40]):
        (text / f'{number:02}.txt').write_bytes(path.read_bytes()[:20000])
    run_script(
        'prepare_data.py',
        f'--dataset={text}',
        '--tokenizer=bytes',
        f'--data_dir={folder}',
        '--name=tiny',
        '--val_fraction=0.1',
    )
    return folder
