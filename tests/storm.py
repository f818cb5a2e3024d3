"""
Kills runs again and again, at random and at chosen moments, and checks that nothing is lost.

    python tests/storm.py --kills=100                      # about 5 minutes on 2 cores

The runs have 2 ranks: under DDP, under fsdp_manual.py with async_checkpoint, and with half of the experts of a mixture
on each rank. After each kill the checkpoints that are left must be whole, and the same command must go on from the
newest of them. A run that gets to its end must be bit-equal to one that was never killed. Printed is how often who was
killed at which moment, and how many steps had to be repeated.
"""

import argparse
import contextlib
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / 'tests')]

from faults import is_alive, send, wait_until
from launch import TINY_EXPERTS, TINY_SYNTHETIC, Job
from outputs import assert_same_rows, assert_same_weights, checkpoint_of, complete, last_step, names_of_checkpoints

from runtime import checkpoint

INTERVAL, EVAL_INTERVAL = 5, 7
STORM_RUN = [
    *TINY_SYNTHETIC,
    f'--checkpoint_interval={INTERVAL}',
    f'--eval_interval={EVAL_INTERVAL}',
    '--eval_sequences=24',
]
STORM_RUN += ['--max_failures=0', '--timeout_s=60']
STORM = {
    'DDP': ('train_ddp.py', []),
    'manual FSDP, async_checkpoint': ('train_fsdp.py', ['--fsdp_impl=manual', '--async_checkpoint']),
    'expert_parallel': ('train_parallel.py', ['--fsdp_impl=manual', *TINY_EXPERTS, '--expert_parallel=2']),
}
MOMENTS = ('start', 'step', 'evaluation', 'save', 'rename', 'purge')
VICTIMS = ('one rank', 'all ranks', 'torchrun')
BY_TORCHRUN = 6  # every 6th start is by torchrun; the others are forked, which is quicker


def storm(folder, kills, seed=0):
    """Kill runs of 2 ranks at random and at chosen moments, start each again with the same command, and compare.

    Returns a Counter of what happened. Raises AssertionError if anything has been lost.
    """
    chance, figures, began = random.Random(seed), Counter(), time.monotonic()
    for index, (variant, (script, options)) in enumerate(STORM.items()):
        share = kills * (index + 1) // len(STORM) - kills * index // len(STORM)
        max_iters = 20 + 2 * INTERVAL * share
        arguments = [*STORM_RUN, *options, f'--max_iters={max_iters}']
        reference = Path(folder, f'reference_{index}')
        job = Job(script, [*arguments, f'--out_dir={reference}'], 2, Path(folder, f'reference_{index}.log'))
        assert job.wait(300) == [0, 0], job.text()
        print(f'{variant}: {max_iters} steps uninterrupted, {time.monotonic() - began:.0f} s', flush=True)
        behind_by = 2 * INTERVAL if '--async_checkpoint' in options else INTERVAL  # one save may still be under way
        done, run, last = 0, 0, None
        while True:
            out_dir = Path(folder, f'run_{index}_{run}')
            log = Path(folder, f'run_{index}_{run}.log')
            figures['starts'] += 1
            by_torchrun = figures['starts'] % BY_TORCHRUN == 0
            job = Job(script, [*arguments, f'--out_dir={out_dir}'], 2, log, torchrun=by_torchrun)
            figures['starts by torchrun'] += by_torchrun
            killed = False
            if done < share:
                moment, victim = chance.choice(MOMENTS), chance.choice(VICTIMS)
                if reach(moment, job, out_dir, chance, by_torchrun):
                    killed = strike(job, victim, chance, figures)
            codes = job.wait()
            check_resumed(job, last, figures)
            if killed:
                done += 1
                figures.update({'kills': 1, f'kills: {moment}': 1, f'kills: {victim}': 1, (moment, victim): 1})
                last = check_after_kill(out_dir, last, behind_by, figures)
                continue
            assert codes in ([0, 0], 0), job.text()
            assert_same_weights(out_dir, reference, max_iters)
            assert_same_rows(out_dir, reference)
            figures['runs finished, bit-equal'] += 1
            if done == share:
                break
            run, last = run + 1, None
        print(f'{variant}: {done} kills, {time.monotonic() - began:.0f} s', flush=True)
    figures['seconds'] = round(time.monotonic() - began)
    return figures


def reach(moment, job, out_dir, chance, by_torchrun):
    """Wait for a moment of a running job; False if the job ends before."""
    there, newest = names_of_checkpoints(out_dir), max(complete(out_dir), default=0)
    step = last_step(out_dir)

    def new_tmp(older_than_newest=False):
        """Whether the folder of a checkpoint is being written, or, with older_than_newest, being deleted."""
        steps = [int(name[5:13]) for name in names_of_checkpoints(out_dir) if name[13:] == '.tmp' and name not in there]
        limit = max(complete(out_dir), default=0)
        return any(one < limit for one in steps) if older_than_newest else bool(steps)

    def before_evaluation():
        now = last_step(out_dir)
        return now > newest and now != step and now % EVAL_INTERVAL == EVAL_INTERVAL - 1

    if moment == 'start':
        time.sleep(chance.uniform(0, 4 if by_torchrun else 1.2))
        return job.is_running()
    condition = {
        'step': lambda: last_step(out_dir) != step,  # `!=`, since a start first cuts rows after the checkpoint
        'evaluation': before_evaluation,
        'save': new_tmp,
        'rename': lambda: max(complete(out_dir), default=0) > newest,
        'purge': lambda: new_tmp(older_than_newest=True),
    }[moment]
    wait_until(lambda: condition() or not job.is_running(), 300, job.text)
    if moment not in ('rename', 'purge'):
        time.sleep(chance.uniform(0, 0.2 if moment == 'step' else 0.03))
    return job.is_running()


def strike(job, victim, chance, figures):
    """Send SIGKILL; returns False if nothing was left to kill. Ranks that do not end with the victim are counted and
    killed, too."""
    ranks = job.ranks()
    victims = (
        [job.pid] if victim == 'torchrun' else ranks if victim == 'all ranks' else chance.sample(ranks, len(ranks))[:1]
    )
    if not victims or not all(is_alive(pid) for pid in victims):
        return False
    for pid in victims:
        send(pid)
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not any(map(is_alive, ranks)), 120)
    left = [pid for pid in ranks if is_alive(pid)]
    figures['ranks left running'] += len(left)
    for pid in left:
        send(pid)
    return True


def check_after_kill(out_dir, last, behind_by, figures):
    """Check what the killed run has left; returns the step of its newest checkpoint, where the next start goes on."""
    steps = complete(out_dir)
    for step in steps:
        path = checkpoint_of(out_dir, step)
        damage = checkpoint.find_damage(path, lambda line: None)
        assert damage is None, f'{path}: {damage}'
    newest = steps[-1] if steps else None
    assert (newest or 0) >= (last or 0), f'checkpoint {last} was there before this start, now there is {newest}'
    repeated = max(0, last_step(out_dir) - (newest or 0))
    assert repeated <= behind_by, f'{repeated} steps are to be repeated after {newest}'
    figures['steps repeated'] += repeated
    figures['most steps repeated'] = max(figures['most steps repeated'], repeated)
    return newest


def check_resumed(job, last, figures):
    """Check that a start, if it got that far, has said that it goes on from the newest checkpoint, that of `last`."""
    said = [line for line in job.text().splitlines() if 'resuming ' in line or 'starting from ' in line]
    if said:
        assert said[0].endswith('starting from scratch' if last is None else f'at step {last}'), (last, said[0])
        figures['resumed from the newest checkpoint'] += last is not None
    assert not re.search(r'^\[\d+\] Traceback', job.text(), re.MULTILINE), job.text()  # torchrun's own is usual


def print_figures(figures, blows, moments, kinds):
    """Print a table of who was hit how and when, then all other counts. blows: 'kills' or 'hits', as in `figures`."""
    print(f'{blows:12}' + ''.join(f'{kind:>12}' for kind in (*kinds, 'all')))
    for moment in moments:
        row = [*(figures[moment, kind] for kind in kinds), figures[f'{blows}: {moment}']]
        print(f'{moment:12}' + ''.join(f'{count:12}' for count in row))
    for key, count in figures.items():
        if isinstance(key, str) and not key.startswith(f'{blows}: '):
            print(f'{key}: {count}', flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--kills', type=int, default=100)
    parser.add_argument('--seed', type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = storm(folder, given.kills, given.seed)
    print_figures(figures, 'kills', MOMENTS, VICTIMS)


if __name__ == '__main__':
    main()
