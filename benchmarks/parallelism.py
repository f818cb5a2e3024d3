"""
What does it cost to cut sequences, matrices or layers over 2 ranks? Tokens/s and bytes against FSDP, and peak memory.

    python benchmarks/parallelism.py              # 8 sequences of 1024 tokens a step under each layout, in turns
    python benchmarks/parallelism.py --memory     # 32768 tokens on 2 ranks, 16384 on one: peak memory

The ranks are processes on a CPU, with one thread each. A ratio is taken within a round.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from benchmarks.runs import column, command_of, environment

RUN = '--dataset=synthetic --arch=llama --n_head=4 --device=cpu --dtype=float32'
RUN += ' --eval_sequences=0 --keep_checkpoints=0 --log_interval=1'
SPEED = '--n_layer=4 --n_kv_head=2 --n_embd=256 --vocab_size=1024 --block_size=1024 --global_batch_size=8 --max_iters=5'
# In a micro-step each rank computes 1024 tokens; with half of the matrices under 'tensor', of the layers in 'pipeline'.
LAYOUTS = {
    'FSDP': ('train_fsdp.py', '--fsdp_impl=manual --batch_size=1'),
    'ring': ('train_parallel.py', '--fsdp_impl=manual --batch_size=2 --context_parallel=2'),
    'gather': ('train_parallel.py', '--fsdp_impl=manual --batch_size=2 --context_parallel=2 --context_impl=gather'),
    'tensor': ('train_parallel.py', '--fsdp_impl=manual --batch_size=1 --tensor_parallel=2'),
    'pipeline': ('train_pipeline.py', '--batch_size=1'),
}
MEMORY = '--fsdp_impl=manual --batch_size=1 --global_batch_size=1'
MEMORY += ' --n_layer=2 --n_kv_head=1 --n_embd=128 --vocab_size=4096'
# glibc keeps freed blocks of up to 32 MB in its heap, here about a tenth of the peak. This makes it return them.
RETURN_FREED = {'MALLOC_MMAP_THRESHOLD_': '65536'}


def measure(nproc, script, keys, *columns, **env):
    """Run a script; returns these columns of its metrics.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        command = command_of(script, *RUN.split(), *keys.split(), f'--out_dir={folder}', nproc=nproc)
        subprocess.run(command, cwd=REPO, env=environment(**env), check=True, stdout=subprocess.DEVNULL)
        return [column(folder, key) for key in columns]


def speed(rounds):
    found, sent = {name: [] for name in LAYOUTS}, {}
    for number in range(rounds):
        for name in list(LAYOUTS)[:: -1 if number % 2 else 1]:
            script, keys = LAYOUTS[name]
            rates, gigabytes = measure(2, script, f'{SPEED} {keys}', 'tokens_per_sec', 'comm/sent_gb')
            found[name].append(statistics.median(rates[1:]))
            sent[name] = 1000 * gigabytes[-1]
            print(f'{name}: {found[name][-1]:,.0f} tokens/s', flush=True)
    for name, rates in found.items():
        ratios = sorted(rate / fsdp_rate for rate, fsdp_rate in zip(rates, found['FSDP'], strict=True))
        print(
            f'{name:8} {statistics.median(rates):8,.0f} tokens/s, {statistics.median(ratios):.2f} of FSDP '
            f'({ratios[0]:.2f} to {ratios[-1]:.2f}), {sent[name]:.1f} MB sent per rank and step',
            flush=True,
        )


def memory(rounds):
    for nproc, keys in ((1, '--block_size=16384'), (2, '--block_size=32768 --context_parallel=2')):
        for _ in range(rounds):
            run = f'{MEMORY} {keys} --max_iters=2'
            (peaks,) = measure(nproc, 'train_parallel.py', run, 'mem/rank_max_gb', **RETURN_FREED)
            print(f'{nproc} x cpu, {keys}: at most {max(peaks):.3f} GB per rank', flush=True)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--memory', action='store_true', help='peak memory in place of tokens/s')
    parser.add_argument('--rounds', type=int, default=3, help='of all layouts, in turns (default: 3)')
    arguments = parser.parse_args()
    (memory if arguments.memory else speed)(arguments.rounds)
