"""
How fast is train_ddp.py compared with nanoGPT's train.py? The same shapes on the same CPU, one process each, in turns.

    git clone https://github.com/karpathy/nanoGPT && python nanoGPT/data/shakespeare_char/prepare.py
    python benchmarks/nanogpt.py path/to/nanoGPT             # tokens/s of two sizes, ours in fp32 and the default dtype
    python benchmarks/nanogpt.py path/to/nanoGPT --loss      # its laptop run: seconds and validation loss (about 1.88)

For tokens/s both are timed from outside and in the same way: the clock starts when the line of one step arrives on
standard output and stops when that of a later step does, so data, update and logging all count, and start-up does not.
With --loss the time is that of the whole process.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
SIZES = {
    '4 layers x 128, context 64, batch 12': (
        dict(n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12),
        200,
        50,
    ),
    '6 layers x 384, context 256, batch 8': (
        dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=8),
        15,
        3,
    ),
}
ROUNDS = 3
RUNS = tempfile.TemporaryDirectory()  # with the out_dir of both


def flags(settings):
    return [f'--{key}={value}' for key, value in settings.items()]


def nanogpt_command(steps, log_interval, **settings):
    """nanoGPT's train.py on a CPU with its laptop settings."""
    fixed = dict(device='cpu', compile=False, dropout=0.0, max_iters=steps, log_interval=log_interval)
    fixed = {'eval_iters': 1, 'eval_interval': 10**6, **fixed, 'out_dir': f'{RUNS.name}/theirs', **settings}
    return [sys.executable, '-u', 'train.py', 'config/train_shakespeare_char.py', *flags(fixed)]


def our_command(steps, log_interval, data_dir, **settings):
    """train_ddp.py with nanoGPT's architecture: gpt2 without biases, tied embeddings, the same character data."""
    fixed = dict(device='cpu', arch='gpt2', bias=False, max_iters=steps, log_interval=log_interval)
    fixed.update(
        eval_interval=0,
        eval_sequences=12,
        checkpoint_interval=0,
        dataset='shakespeare_char',
        data_dir=data_dir,
        vocab_size=65,
    )
    fixed.update(learning_rate=1e-3, beta2=0.99, out_dir=f'{RUNS.name}/ours', resume='auto')
    return [sys.executable, '-u', 'train_ddp.py', *flags(fixed), *flags(settings)]


def seconds_between(command, cwd, pattern, first, last):
    """Seconds from the arrival of step `first`'s line to that of step `last`."""
    arrivals = {}
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    for line in process.stdout:
        lines.append(line)
        match = re.search(pattern, line)
        if match:
            arrivals[int(match.group(1))] = time.perf_counter()
    process.wait()
    if first not in arrivals or last not in arrivals:
        raise RuntimeError(f'{" ".join(command)} printed no line of step {first} or {last}:\n{"".join(lines)}')
    return arrivals[last] - arrivals[first]


def compare_speed(nanogpt):
    """Print tokens per second of both, and the median and range of the ratios ours / theirs by pairs."""
    print(
        '| shape | dtype | ours, tokens/s | nanoGPT, tokens/s | ratio (median of pairs, range) |\n|---|---|---|---|---|'
    )
    for name, (shape, steps, every) in SIZES.items():
        tokens = shape['block_size'] * shape['batch_size'] * (steps - every)
        for dtype in ('float32', 'auto'):
            ours, theirs = [], []
            for _ in range(ROUNDS):
                subprocess.run(['rm', '-rf', f'{RUNS.name}/ours'], check=True)
                # They go on for a while: the line of our last step comes after an evaluation.
                command = our_command(steps + every, every, nanogpt / 'data', dtype=dtype, **shape)
                ours.append(tokens / seconds_between(command, REPO, r'step +(\d+)', every, steps))
                command = nanogpt_command(steps + every, every, **shape)
                theirs.append(tokens / seconds_between(command, nanogpt, r'iter (\d+):', every, steps))
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            print(
                f'| {name} | {dtype} | {statistics.median(ours):,.0f} | {statistics.median(theirs):,.0f} | '
                f'{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |',
                flush=True,
            )


def compare_loss(nanogpt):
    """Print the seconds that each whole process takes for the laptop run, and the validation loss at its end."""
    for _ in range(3):
        subprocess.run(['rm', '-rf', f'{RUNS.name}/ours'], check=True)
        results = {}
        ours = [sys.executable, 'train_ddp.py', 'config/shakespeare_char.py', f'--out_dir={RUNS.name}/ours']
        ours += ['--dataset=shakespeare_char', '--vocab_size=65', f'--data_dir={nanogpt / "data"}']
        shape = dict(n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12, lr_decay_iters=2000)
        theirs = nanogpt_command(2000, 100, eval_iters=20, eval_interval=250, **shape)
        for who, command, cwd in (('ours', ours, REPO), ('nanoGPT', theirs, nanogpt)):
            start = time.perf_counter()
            text = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout
            losses = [float(value) for value in re.findall(r'val(?:_| )loss[ =]+([0-9.]+)', text)]
            results[who] = time.perf_counter() - start
            print(f'{who}: {results[who]:.1f} s, validation loss {losses[-1]:.4f}', flush=True)
        print(f'time ratio {results["ours"] / results["nanoGPT"]:.2f}', flush=True)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('nanogpt', type=lambda path: Path(path).resolve(), help='its folder')
    parser.add_argument('--loss', action='store_true')
    given = parser.parse_args()
    for needed in ('train.py', 'data/shakespeare_char/train.bin'):
        if not (given.nanogpt / needed).exists():
            parser.error(
                f'{given.nanogpt} has no {needed}: the two commands above make a clone of nanoGPT with its data'
            )
    compare_loss(given.nanogpt) if given.loss else compare_speed(given.nanogpt)
