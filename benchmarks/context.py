"""
What sharing a sequence over 2 ranks costs and saves: tokens/s beside FSDP with a sequence for each, and peak memory.

    python benchmarks/context.py              # tokens/s at 4096 tokens, in turns
    python benchmarks/context.py --memory     # 32768 tokens on 2 ranks beside 16384 on one: peak memory

Runs train_fsdp.py on 2 CPU processes with one thread each. Both variants take the same 2 sequences per step.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / 'tests')]

from launch import command_of, environment
from outputs import column

RUN = '--dataset=synthetic --vocab_size=4096 --arch=llama --n_layer=2 --n_head=4 --n_kv_head=1 --n_embd=128'
RUN += ' --batch_size=1 --device=cpu --dtype=float32 --fsdp_impl=manual'
RUN += ' --eval_iters=0 --keep_checkpoints=0 --log_interval=1'
VARIANTS = {
    'FSDP': '',
    'ring': '--context_parallel=2',
    'gather': '--context_parallel=2 --context_impl=gather',
}


def measure(nproc, keys, key):
    """One column of metrics.jsonl of a run."""
    with tempfile.TemporaryDirectory() as folder:
        command = command_of('train_fsdp.py', *RUN.split(), *keys.split(), f'--out_dir={folder}', nproc=nproc)
        subprocess.run(command, cwd=REPO, env=environment(), check=True, stdout=subprocess.DEVNULL)
        return column(folder, key)


def speed(rounds):
    found = {name: [] for name in VARIANTS}
    for number in range(rounds):
        for name in list(VARIANTS)[:: -1 if number % 2 else 1]:
            rates = measure(
                2, f'--block_size=4096 --global_batch_size=2 --max_iters=5 {VARIANTS[name]}', 'tokens_per_sec'
            )
            found[name].append(statistics.median(rates[1:]))
            print(f'{name}: {found[name][-1]:,.0f} tokens/s', flush=True)
    for name, rates in found.items():
        ratios = sorted(rate / of_fsdp for rate, of_fsdp in zip(rates, found['FSDP'], strict=True))
        print(
            f'{name:8} {statistics.median(rates):8,.0f} tokens/s, {statistics.median(ratios):.2f} of FSDP '
            f'({ratios[0]:.2f} to {ratios[-1]:.2f})',
            flush=True,
        )


def memory():
    for nproc, keys in ((1, '--block_size=16384'), (2, '--block_size=32768 --context_parallel=2')):
        peak = measure(nproc, f'--global_batch_size=1 --max_iters=1 {keys}', 'mem/rank_max_gb')[-1]
        print(f'{nproc} x cpu, {keys}: at most {peak:.3f} GB per rank', flush=True)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--memory', action='store_true', help='peak memory in place of tokens/s')
    parser.add_argument('--rounds', type=int, default=3, help='of all variants, in turns (default: 3)')
    arguments = parser.parse_args()
    memory() if arguments.memory else speed(arguments.rounds)
