"""Starts scripts as a user does, and reads what they leave in out_dir: for benchmarks and tests."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
SHARED = REPO.parent / 'shared'  # material for tests, which may be missing; tests that need it say so

# A step takes milliseconds, and 3 ranks get uneven shards of 40, 56 and 120 rows.
TINY_MODEL = ['--n_layer=3', '--n_head=2', '--n_embd=40', '--mlp_hidden_dim=56', '--block_size=32', '--batch_size=2']
TINY_RUN = ['--device=cpu', '--learning_rate=3e-3', '--warmup_iters=5', '--log_interval=1', '--eval_sequences=24']
TINY_SYNTHETIC = [*TINY_MODEL, *TINY_RUN[:-1], '--dtype=float32', '--dataset=synthetic', '--vocab_size=257']
TINY_EXPERTS = ['--arch=qwen3', '--n_experts=4', '--expert_hidden_dim=16']  # in place of each MLP

LAUNCHERS_VARIABLES = 'RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT'.split()


def environment(threads=1, **changes):
    """This process's environment without a launcher's variables, with `threads` threads per process.

    HF_HUB_OFFLINE is removed, too: huggingface/ sets it in this process, and scripts set it themselves where they must.
    """
    removed = (*LAUNCHERS_VARIABLES, 'HF_HUB_OFFLINE')
    env = {key: value for key, value in os.environ.items() if key not in removed}
    # PET_LOCAL_ADDR is torchrun's --local_addr. Without it torchrun looks up the machine's name, which may not resolve.
    return {**env, 'OMP_NUM_THREADS': str(threads), 'PYTHONUNBUFFERED': '1', 'PET_LOCAL_ADDR': '127.0.0.1', **changes}


def command_of(script, *arguments, nproc=None, torchrun=('--standalone',)):
    """The command line of a script: by python, or with nproc by torchrun with these options."""
    launcher = [sys.executable]
    if nproc:
        launcher += ['-m', 'torch.distributed.run', *torchrun, f'--nproc_per_node={nproc}']
    return [*launcher, str(REPO / script), *map(str, arguments)]


def run_script(script, *arguments, nproc=None, check=True, cwd=REPO, timeout=1200, **env):
    """Run a script: `python script ...`, or under torchrun with nproc processes. Returns the CompletedProcess."""
    command = command_of(script, *arguments, nproc=nproc)
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


def end_with_parent():
    """For preexec_fn: lets Linux kill the new process when the program that started it ends, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of linux/prctl.h


def metrics(out_dir):
    """The complete rows of a run's metrics.jsonl."""
    lines = Path(out_dir, 'metrics.jsonl').read_text().split('\n')[:-1]  # what follows the last newline is torn
    return [json.loads(line) for line in lines]


def column(out_dir, key):
    """One key of metrics.jsonl over the steps that have it."""
    return [row[key] for row in metrics(out_dir) if key in row]
