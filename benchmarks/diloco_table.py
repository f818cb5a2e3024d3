"""
Which loss do DiLoCo and its relatives reach for how many bytes, at equal tokens? Each with the best learning rate of a
grid.

    python benchmarks/diloco_table.py --data_dir=data                                    # the table: some hours
    python benchmarks/diloco_table.py --short --rates=1e-3 --seeds=1 --folder=out/short  # random tokens, 2 minutes

The first command needs stdlib-bpe2048 in data_dir (python prepare_data.py); the figures of docs/log.md come from the
same with --steps=400 --inner_steps=10. Each method trains the model of config/quickstart.py on two ranks, except for
`alone`: one rank with its half of each batch, which is what you have without a network. All learning rates are tried
with the first seed, and then the best one with the other seeds. When a run has ended, a line is added to results.jsonl
in --folder, so the same command continues where it was stopped. A line says neither how many steps the run had nor
which model, so runs that differ in these need a --folder of their own.

Bytes are what the network interfaces of both hosts sent, headers included: the two ranks are on two hosts with an
unshaped cable between them, see slow_link.py. Where that cannot be had, the table has no bytes, and a line says why.
"""

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from benchmarks.runs import TINY_SYNTHETIC, column, run_script
from benchmarks.slow_link import NoSlowLink, RowWatch, SlowLink

# 800 steps with 20 inner steps are 40 rounds, and with so few an outer momentum of 0.6 did far better than 0.9
# (docs/log.md: "an outer momentum of 0.9 is far too much for short runs").
NESTEROV = ['--outer_lr=0.7', '--outer_momentum=0.6']
TWO = ['--num_replicas=2', *NESTEROV]
METHODS = {  # name -> script, keys; train_diloco.py also gets inner_steps
    'ddp': ('train_ddp.py', []),
    'ddp-muon': ('train_ddp.py', ['--optimizer=muon']),
    'alone': ('train_ddp.py', ['--global_batch_size=4', '--batch_size=4']),
    'snoo': ('train_diloco.py', ['--num_replicas=1', *NESTEROV]),  # one replica, sharded over both ranks
    'diloco': ('train_diloco.py', TWO),
    # With momentum mu a pseudo-gradient moves the parameters, in the end, by outer_lr / (1 - mu) of itself: 1.75 above,
    # and 1 in these two as in the plain average.
    'diloco-0.4-0.6': ('train_diloco.py', ['--num_replicas=2', '--outer_lr=0.4', '--outer_momentum=0.6']),
    'diloco-0.1-0.9': ('train_diloco.py', ['--num_replicas=2', '--outer_lr=0.1', '--outer_momentum=0.9']),
    'muloco': ('train_diloco.py', [*TWO, '--optimizer=muon']),
    'int4': ('train_diloco.py', [*TWO, '--exchange_dtype=int4', '--error_feedback']),
    'average': ('train_diloco.py', ['--num_replicas=2', '--outer_lr=1', '--outer_momentum=0']),
}


def train(method, rate, seed, arguments):
    """One run: {'method', 'rate', 'seed', 'val_loss', 'wire': bytes that both hosts sent per step, or None}."""
    script, of_method = METHODS[method]
    out_dir = Path(arguments.folder) / f'{method}_{rate:g}_{seed}'
    shutil.rmtree(out_dir, ignore_errors=True)  # left by a run that was stopped: its counts of bytes are lost
    H = arguments.inner_steps
    keys = TINY_SYNTHETIC if arguments.short else ['config/quickstart.py', f'--data_dir={arguments.data_dir}']
    keys = [*keys, f'--learning_rate={rate}', f'--seed={seed}', f'--max_iters={arguments.steps}', f'--log_interval={H}']
    keys += [
        '--eval_interval=0',
        '--eval_sequences=880',
        '--keep_checkpoints=0',
        '--dtype=float32',
        f'--out_dir={out_dir}',
    ]
    keys += [f'--inner_steps={H}'] if script == 'train_diloco.py' else []
    keys += of_method
    wire = None
    try:
        if method == 'alone':
            run_script(script, *keys, timeout=7200)
        else:
            with SlowLink(mbit=None) as link:
                watch = RowWatch(link, out_dir)
                link.run(script, *keys, timeout=7200, meanwhile=watch)
            rounds = sorted(step for step in watch.seen if step % H == 0)[:-1]  # the last one evaluates, too
            wire = 2 * watch.bytes_per_step(rounds[0], rounds[-1])  # both hosts together; it returns their mean
    except NoSlowLink as reason:
        print(f'no bytes: {reason}')
        run_script(script, *keys, nproc=2, timeout=7200)
    row = {'method': method, 'rate': rate, 'seed': seed, 'val_loss': column(out_dir, 'val_loss')[-1], 'wire': wire}
    shutil.rmtree(out_dir)
    return row


def table(results):
    """Lines of text: for each method its best rate, the loss of that over the seeds, its bytes, and the whole grid."""
    lines, ddp_wire = [], None
    lines.append(
        f'{"":16}{"rate":>8}{"val loss":>10}{"min":>8}{"max":>8}{"seeds":>6}{"kB per step":>13}{"share":>8}  grid'
    )
    for method in METHODS:
        rows = [row for row in results if row['method'] == method]
        if not rows:
            continue
        best = best_rate(rows)
        losses = [row['val_loss'] for row in rows if row['rate'] == best]
        wire = [row['wire'] for row in rows if row['rate'] == best and row['wire']]
        ddp_wire = statistics.mean(wire) if method == 'ddp' and wire else ddp_wire
        sent = f'{statistics.mean(wire) / 1000:13.1f}' if wire else f'{"-":>13}'
        share = f'{statistics.mean(wire) / ddp_wire:8.2%}' if wire and ddp_wire else f'{"-":>8}'
        first = {row['rate']: row['val_loss'] for row in reversed(rows)}  # the first seed's
        grid = ', '.join(f'{rate:g} {first[rate]:.3f}' for rate in sorted(first))
        at_edge = len(first) > 1 and best in (min(first), max(first))
        lines.append(
            f'{method:16}{best:8g}{statistics.mean(losses):10.4f}{min(losses):8.4f}{max(losses):8.4f}{len(losses):6}'
            f'{sent}{share}  {grid}' + (': the best is at the edge, try more --rates' if at_edge else '')
        )
    return lines


def best_rate(rows):
    """The learning rate that was best with the first seed, the only seed for which all rates have been tried."""
    tried = [row for row in rows if row['seed'] == rows[0]['seed']]
    return min(tried, key=lambda row: row['val_loss'])['rate']


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--folder', default='out/diloco_table', help='results.jsonl, and runs while they last')
    parser.add_argument('--data_dir', default='data', help='where stdlib-bpe2048 is (python prepare_data.py)')
    parser.add_argument('--methods', default=','.join(METHODS), help='those to run, of %(default)s')
    parser.add_argument('--rates', default='1e-3,2e-3,4e-3,8e-3', help='learning rates, tried with the first seed')
    parser.add_argument('--seeds', default='1,2,3')
    parser.add_argument('--steps', type=int, default=800)
    parser.add_argument('--inner_steps', type=int, default=20)
    parser.add_argument('--short', action='store_true', help='a tiny model on random tokens for 24 steps: does it run?')
    arguments = parser.parse_args()
    if arguments.short:
        arguments.steps, arguments.inner_steps = 24, 4
    rates, seeds = (
        [float(rate) for rate in arguments.rates.split(',')],
        [int(seed) for seed in arguments.seeds.split(',')],
    )
    path = Path(arguments.folder) / 'results.jsonl'
    path.parent.mkdir(parents=True, exist_ok=True)

    def results():
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def run(method, rate, seed):
        if any((row['method'], row['rate'], row['seed']) == (method, rate, seed) for row in results()):
            return
        row = train(method, rate, seed, arguments)
        print(json.dumps(row), flush=True)
        with path.open('a') as file:
            file.write(json.dumps(row) + '\n')

    for method in arguments.methods.split(','):
        for rate in rates:
            run(method, rate, seeds[0])
        for seed in seeds[1:]:
            run(method, best_rate([row for row in results() if row['method'] == method]), seed)
    print('\n'.join(table(results())))


if __name__ == '__main__':
    main()
