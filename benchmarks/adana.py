"""
ADANA against AdamW on the standard library's sources: same model, steps and data, each with a sweep of learning rates.

    python prepare_data.py --tokenizer=bytes --name=stdlib-bytes
    python benchmarks/adana.py --dataset=stdlib-bytes --max_iters=2000      # 2 runs at a time, one thread each

One seed finds the best rate among five or more (it goes on until the best is not at an edge); three seeds at that rate
give mean and standard error. Weight decay follows the published rule of each: 4 / wd_ts for ADANA with wd_ts a tenth of
the run, 4 / (learning_rate * max_iters) for AdamW with beta2 0.999. Finished runs in --out are not repeated.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
MODEL = ['--arch=enoki', '--n_layer=4', '--n_head=2', '--n_embd=128', '--block_size=128', '--z_loss=1e-4']
RATES = {  # a factor of 2 apart
    'adamw': [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2],
    'adana': [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3],
}


def run(arguments, optimizer, rate, seed):
    """Final validation loss of one run, nats per token."""
    out_dir = Path(arguments.out) / f'{optimizer}_{arguments.max_iters}_{rate:g}_{seed}'
    steps = arguments.max_iters
    wd_ts = steps // 10
    decay = 4 / wd_ts if optimizer == 'adana' else 4 / (rate * steps)
    command = [sys.executable, str(REPO / 'train_ddp.py'), *MODEL, f'--dataset={arguments.dataset}']
    command += [f'--data_dir={arguments.data_dir}', f'--out_dir={out_dir}', '--batch_size=16', f'--max_iters={steps}']
    command += [f'--optimizer={optimizer}', f'--learning_rate={rate}', f'--weight_decay={decay}', f'--wd_ts={wd_ts}']
    command += ['--beta2=0.999', '--grad_clip=0.5', '--lr_schedule=cos_inf', f'--warmup_iters={steps // 50}']
    command += ['--device=cpu', f'--seed={seed}', '--eval_interval=0', '--eval_iters=60', '--log_interval=500']
    command += ['--checkpoint_interval=0', '--keep_checkpoints=1']
    metrics = out_dir / 'metrics.jsonl'
    if not (out_dir / 'DONE').exists():
        environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
        done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
    loss = float(json.loads(metrics.read_text().splitlines()[-1])['val_loss'])
    print(f'{optimizer} {rate:g} seed {seed}: {loss:.4f}', flush=True)
    return loss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--dataset', default='stdlib-bytes')
    parser.add_argument('--data_dir', default='data')
    parser.add_argument('--max_iters', type=int, default=2000)
    parser.add_argument('--out', default='out/adana')
    parser.add_argument('--at_once', type=int, default=2)
    arguments = parser.parse_args()
    results = {optimizer: {} for optimizer in RATES}
    with ThreadPoolExecutor(arguments.at_once) as threads:
        todo = {optimizer: list(rates) for optimizer, rates in RATES.items()}
        while any(todo.values()):
            cases = [(optimizer, rate) for optimizer, rates in todo.items() for rate in rates]
            losses = threads.map(lambda case: run(arguments, *case, 1), cases)
            for (optimizer, rate), loss in zip(cases, losses, strict=True):
                results[optimizer][rate] = [loss]
            for optimizer, found in results.items():  # NaN is worse than anything
                best = min(found, key=lambda rate: (found[rate][0] != found[rate][0], found[rate][0]))
                lower, upper = min(found), max(found)
                todo[optimizer] = [lower / 2] if best == lower else [upper * 2] if best == upper else []
        best = {optimizer: min(found, key=lambda rate: found[rate][0]) for optimizer, found in results.items()}
        cases = [(optimizer, rate, seed) for optimizer, rate in best.items() for seed in (2, 3)]
        for (optimizer, rate, _), loss in zip(
            cases, threads.map(lambda case: run(arguments, *case), cases), strict=True
        ):
            results[optimizer][rate].append(loss)

    print(
        '\n| optimizer | ' + 'learning rate: validation loss, nats per byte (seed 1) | best, 3 seeds |\n|---|---|---|'
    )
    means, errors = {}, {}
    for optimizer, found in results.items():
        losses = found[best[optimizer]]
        means[optimizer] = statistics.mean(losses)
        errors[optimizer] = statistics.stdev(losses) / len(losses) ** 0.5
        rates = ', '.join(f'{rate:g}: {found[rate][0]:.4f}' for rate in sorted(found))
        print(f'| {optimizer} | {rates} | {means[optimizer]:.4f} +- {errors[optimizer]:.4f} |')
    gap = means['adamw'] - means['adana']
    error = (errors['adamw'] ** 2 + errors['adana'] ** 2) ** 0.5
    print(f'\nAdamW - ADANA = {gap:+.4f}, {gap / error:+.1f} standard errors')


if __name__ == '__main__':
    main()
