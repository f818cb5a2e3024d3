"""
Kills, stops and restarts the jobs of a pool of DiLoCo replicas at random, and checks that nothing is lost.

    python tests/pool_storm.py --kills=200 --seeds=3
    python tests/pool_storm.py --kills=60 --seeds=1 --experts      # the model is a mixture of experts
    python tests/pool_storm.py --goodput                           # against the formula of pool/goodput.py

The storm hits four jobs of train_pool.py with a tiny model, one of them 0.3 times as fast as the others. It passes if
the run gets to its end, each share of the data has counted once, and all jobs had the same bits after every round, as
--replay has, too. In a storm a round has fewer jobs, so there are more rounds for the same tokens and the loss is
lower. It must lie between the losses of undisturbed pools of four and of two jobs, or within 2% of one of them. Printed
is who was hit when, and what it cost.

For the goodput, eight jobs that sleep in place of training are up and away for random times. The inner steps per second
that counted are compared with those of jobs that never stop.
"""

import argparse
import itertools
import json
import math
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / 'tests')]

from faults import send
from launch import TINY_EXPERTS, TINY_MODEL, TINY_RUN, Job, prepare_tiny, run_forked
from outputs import assert_same_weights, column, metrics
from pool_jobs import Jobs, journal, shares_of
from storm import print_figures

from pool.goodput import goodput
from pool.ledger import Ledger
from pool.store import open_store

REPLICAS, H, SPEED = 4, 10, 0.3  # of the slow one
STEPS_PER_KILL = 10  # so many steps of the run for each kill, so that it does not end before all kills are done
NAMES = ['a', 'b', 'c', 'slow']
RUN = [*TINY_MODEL, *TINY_RUN, '--dtype=float32', '--dataset=tiny', f'--inner_steps={H}', '--outer_momentum=0.6']
RUN += ['--global_batch_size=8', f'--num_replicas={REPLICAS}', '--eval_interval=0', '--eval_sequences=160']
RUN += ['--max_failures=0', '--keep_deltas', '--log_interval=10', f'--checkpoint_interval={20 * H}']
HITS = {'SIGKILL': 0.6, 'SIGTERM': 0.2, 'STOP': 0.2}
MOMENTS = ('starts', 'trains', 'waits', 'steps')  # before its first claim; after a claim; after its delta; in between


class Pool:
    """Jobs of train_pool.py that come and go, each with an out_dir of its own."""

    def __init__(self, folder, data_dir, max_iters, *keys):
        self.folder, self.address, self.jobs, self.starts = Path(folder), Path(folder, 'pool'), {}, Counter()
        self.folder.mkdir()
        self.store = open_store(str(self.address))
        self.keys = [*RUN, f'--data_dir={data_dir}', f'--max_iters={max_iters}', f'--exchange={self.address}', *keys]

    def start(self, name, fault=None):
        self.starts[name] += 1
        log = self.folder / f'{name}_{self.starts[name]}.log'
        keys = [*self.keys, f'--out_dir={self.folder / name}']
        self.jobs[name] = Job('train_pool.py', keys, 1, log, fault)

    def moment(self, name):
        """What a job is doing: one of MOMENTS."""
        said = re.search(r'this is job (\S+) of pool', self.jobs[name].text())
        rounds = self.store.list('rounds')
        if not said or not rounds:
            return 'starts'
        for file in self.store.list(f'rounds/{rounds[-1]}'):
            if file.startswith('claim_') and self.store.read(f'rounds/{rounds[-1]}/{file}').decode() == said[1]:
                has_given = f'delta_{file[6:]}.json' in self.store.list(f'rounds/{rounds[-1]}')
                return 'waits' if has_given else 'trains'
        return 'steps'

    def commits(self):
        return [json.loads(self.store.read(f'commits/{name}')) for name in self.store.list('commits')]


def undisturbed(folder, data_dir, seed, max_iters, names, keys=()):
    """(val_loss of a pool of these jobs without faults, seconds of one of its inner steps)."""
    pool = Pool(folder, data_dir, max_iters, f'--seed={seed}', f'--quorum={len(names)}', '--grace_s=5', *keys)
    for name in names:
        pool.start(name)
    check(pool, max_iters, Counter())
    times = [row['time/total'] / 1000 for row in metrics(pool.folder / 'a') if 'time/total' in row]
    return column(pool.folder / 'a', 'val_loss')[-1], statistics.median(times)


def storm(folder, data_dir, kills, seed=1, pause=1.0, step_s=0.0, compare=True, keys=()):
    """Hit the jobs of a pool `kills` times, and check what is left; returns a Counter of what happened.

    pause: mean seconds between two hits, and until a job that was hit is started again. step_s: seconds that are added
    to each inner step. compare: whether to run undisturbed pools and compare losses. keys: more for train_pool.py.
    Raises AssertionError if anything has been lost.
    """
    chance, figures, began = random.Random(seed), Counter(), time.monotonic()
    max_iters = STEPS_PER_KILL * kills + 10 * H
    losses, own_s = {}, 0.02
    for names in (NAMES[:2], NAMES) if compare else ():
        quiet = Path(folder, f'quiet_{seed}_{len(names)}')
        losses[len(names)], own_s = undisturbed(quiet, data_dir, seed, max_iters, names, keys)
    faults = {name: {'kind': 'slow', 'rank': 0, 'step': 1, 'count': 10**9, 'seconds': step_s} for name in NAMES}
    faults['slow']['seconds'] = (own_s + step_s) / SPEED - own_s
    grace_s = 1 + 2 * step_s / SPEED
    figures['seconds undisturbed'] = round(time.monotonic() - began)
    keys = [f'--seed={seed}', f'--grace_s={grace_s}', *keys]
    pool = Pool(Path(folder, f'storm_{seed}'), data_dir, max_iters, *keys)
    for name in NAMES:
        pool.start(name, faults[name])
    may_start = False  # whether the next hit may be on a job that is still starting
    away, next_hit, done = {}, time.monotonic() + 2, 0  # away: {job: when to start it again, None while it still ends}
    while done < kills:
        time.sleep(0.02)
        for name, job in pool.jobs.items():
            if job.is_running():
                continue
            is_done = (pool.folder / name / 'DONE').exists()
            if name not in away:
                assert is_done and job.wait() == [0], job.text()  # it has not been hit
            elif away[name] is None:
                codes = job.wait()
                assert codes in ([0], [143], [-signal.SIGTERM]), job.text()  # the last if it did not listen yet
                figures['stopped in order'] += codes in ([0], [143])
                away[name] = time.monotonic() + chance.expovariate(1 / pause)
            elif time.monotonic() > away[name] and not is_done:
                del away[name]
                pool.start(name, faults[name])
        up = [name for name, job in pool.jobs.items() if name not in away and job.is_running()]
        if any((pool.folder / name / 'DONE').exists() for name in NAMES):
            break  # everything is trained
        if time.monotonic() < next_hit:
            continue
        up = [name for name in up if pool.jobs[name].ranks() and (may_start or pool.moment(name) != 'starts')]
        if not up:
            continue
        name, (kind,) = chance.choice(up), chance.choices([*HITS], [*HITS.values()])
        moment, ranks = pool.moment(name), pool.jobs[name].ranks()
        next_hit, may_start = time.monotonic() + chance.expovariate(1 / pause), chance.random() < 0.2
        if kind == 'STOP':
            (pool.folder / name).mkdir(exist_ok=True)
            (pool.folder / name / 'STOP').touch()
        else:
            for rank in ranks:
                send(rank, getattr(signal, kind))
        away[name] = None
        if kind == 'SIGKILL':
            pool.jobs[name].end()
            away[name] = time.monotonic() + chance.expovariate(1 / pause)
        done += 1
        figures.update({'hits': 1, (moment, kind): 1, f'hits: {moment}': 1, f'hits of {name}': 1})
    figures['seconds of storm'] = round(time.monotonic() - began - figures['seconds undisturbed'])
    for name in NAMES:
        if name in away:
            pool.jobs[name].wait()
            (pool.folder / name / 'STOP').unlink(missing_ok=True)
            pool.start(name, faults[name])
    check(pool, max_iters, figures)
    figures['starts'] = pool.starts.total()
    figures['seconds'] = round(time.monotonic() - began)
    if compare:
        figures['loss'] = in_storm = column(pool.folder / 'a', 'val_loss')[-1]
        figures.update({f'loss of {count} jobs undisturbed': loss for count, loss in losses.items()})
        assert 0.98 * min(losses.values()) <= in_storm <= 1.02 * max(losses.values()), f'{in_storm}, and {losses}'
    print(f'seed {seed}: {figures["hits"]} hits, {figures["rounds"]} rounds, {figures["seconds"]} s', flush=True)
    return figures


def check(pool, max_iters, figures):
    """Check that all jobs end, that each share of the data counts once, and that all jobs and a replay have the same
    bits."""
    for name, job in pool.jobs.items():
        assert job.wait(900) == [0] and (pool.folder / name / 'DONE').exists(), job.text()
    commits, ledger, shares = pool.commits(), Ledger(max_iters, H, REPLICAS), []
    for number, commit in enumerate(commits):
        assert commit['round'] == ledger.round == number
        claimed = [share for claim in range(commit['claims']) for share in shares_of(ledger.piece(claim))]
        figures['shares claimed'] += len(claimed)
        for delta in commit['deltas']:
            piece = shares_of(ledger.piece(delta['number']))
            assert piece == shares_of(delta['piece']) and delta['steps'] <= len(piece)
            shares += piece[: delta['steps']]
            figures['deltas of fewer steps than claimed'] += delta['steps'] < len(piece)
        figures['deltas'] += len(commit['deltas'])
        figures['pieces claimed, and nothing given'] += commit['claims'] - len(commit['deltas'])
        figures['deltas rejected'] += len(commit['rejected'])
        figures['deltas by jobs that left'] += sum(delta['leaves'] for delta in commit['deltas'])
        ledger.advance(commit)
    assert ledger.is_complete and not ledger.returned
    assert sorted(shares) == sorted(itertools.product(range(REPLICAS), range(max_iters))), 'a share is missing or twice'
    figures.update({'rounds': len(commits), 'shares counted': len(shares)})
    figures['shares claimed again'] = figures['shares claimed'] - len(shares)
    ends = {}
    for name in pool.jobs:
        rows = journal(pool.folder / name)
        assert [row['round'] for row in rows] == list(range(len(commits))), f'the journal of {name} has gaps'
        for row, following in itertools.zip_longest(rows, commits[1:]):
            if 'digest' in row:
                assert ends.setdefault(row['round'], row['digest']) == row['digest'], f'{name}, round {row["round"]}'
                assert following is None or row['digest'] == following['state']
        figures['digests compared'] += sum('digest' in row for row in rows)
        # Each job counts the load of its experts in its own data; like Adam's moments, the load is not exchanged.
        assert_same_weights(pool.folder / name, pool.folder / 'a', max_iters, but='router.load')
        assert column(pool.folder / name, 'val_loss')[-1] == column(pool.folder / 'a', 'val_loss')[-1]
    keys = [*pool.keys, f'--out_dir={pool.folder / "replay"}', '--replay']
    said = run_forked('train_pool.py', *keys, log=pool.folder / 'replay.log')
    assert f'replay: rounds 0 to {len(commits) - 1} and' in said and 'equal to the bit' in said, said


# --- goodput ----------------------------------------------------------------------------------------------------------

JOBS, STEP_S = 8, 0.5
UP_S = (60, 30, 15)  # mean seconds of a job's life; it is away for a quarter of that; a round's inner steps take 5 s


def compare_goodput(folder, seconds):
    """Print the goodput as measured and by the formula. Raises AssertionError if they are 10% apart."""
    print(f'{JOBS} jobs, {H} inner steps a round; seconds:')
    print('    up   down  start  inner  round   rounds  lives   measured  formula  joins and counts at rounds only')
    for up_s in UP_S:
        times, measured, rounds, lives = come_and_go(Path(folder, f'{up_s}'), up_s, up_s / 4, seconds, seed=1)
        up, down, start, round, inner = times
        expected = goodput(*times)
        at_rounds = up / (up + down) * math.exp(-(start + round) / up) * inner / round
        print(
            f'{up:6.1f} {down:6.1f} {start:6.2f} {inner:6.2f} {round:6.2f} {rounds:8} {lives:6}'
            f' {measured:10.3f} {expected:8.3f} {at_rounds:8.3f}',
            flush=True,
        )
        assert abs(measured / expected - 1) < 0.1, f'{measured} is 10% away from {expected}'


def come_and_go(folder, up_s, down_s, seconds, seed):
    """(measured times, the arguments of goodput(); measured goodput; rounds; lives) of jobs that die and come back."""
    folder.mkdir()
    keys = {'num_replicas': JOBS, 'max_iters': 10**7, 'inner_steps': H, 'checkpoint_interval': 2 * H}
    jobs = Jobs(str(folder / 'pool'), folder, **keys, keep_deltas=False, grace_s=2.0)
    chance, names, starts = random.Random(seed), [f'{n}' for n in range(JOBS)], {}
    begins, ends = time.time() + 15, time.time() + 15 + seconds  # the first round begins before all are there
    changes, spent, count = {name: time.time() for name in names}, Counter(), Counter()
    while (now := time.time()) < ends:
        name = min(changes, key=changes.get)
        if (pause := changes[name] - now) > 0:
            time.sleep(min(pause, ends - now))
            continue
        state = 'down' if name in jobs.running else 'up'
        if state == 'up':
            starts.setdefault(str(folder / name), []).append(time.time())
            jobs.start(name, pause=STEP_S)
        else:
            jobs.kill(name)
        length = chance.expovariate(1 / (up_s if state == 'up' else down_s))
        changes[name] += length
        first, last = (min(max(at, begins), ends) for at in (changes[name] - length, changes[name]))
        spent[state] += last - first
        count[state] += begins <= changes[name] < ends
    for name in [*jobs.running]:
        jobs.kill(name)
    store = open_store(jobs.address)
    commits = [json.loads(store.read(f'commits/{name}')) for name in store.list('commits')]
    commits = [commit for commit in commits if begins <= commit['time'] <= ends]
    deltas = [delta for commit in commits[1:] for delta in commit['deltas']]
    first = {}  # when a job has begun its first piece
    for delta in deltas:
        first.setdefault(delta['job'], (delta['began'], delta['out_dir']))
    start_s = [began - max(at for at in starts[out_dir] if at <= began) for began, out_dir in first.values()]
    step_s = statistics.fmean((delta['gave'] - delta['began']) / delta['steps'] for delta in deltas)
    took = commits[-1]['time'] - commits[0]['time']
    times = spent['up'] / count['up'], spent['down'] / count['down'], statistics.median(start_s)
    there = [{delta['job'] for delta in commit['deltas']} for commit in commits]  # from the next round's beginning on
    steps = [
        delta['steps']
        for jobs, commit in zip(there, commits[1:], strict=False)
        for delta in commit['deltas']
        if delta['job'] in jobs
    ]
    times += took / (len(commits) - 1), statistics.fmean(steps) * step_s
    return times, sum(delta['steps'] for delta in deltas) * step_s / (took * JOBS), len(commits) - 1, count['up']


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--kills', type=int, default=200, help='hits per seed: SIGKILL, SIGTERM or STOP (%(default)s)')
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--pause', type=float, default=1.0, help='mean seconds between hits (%(default)s)')
    parser.add_argument(
        '--step_s', type=float, default=0.0, help='seconds by which an inner step is longer; no comparison'
    )
    parser.add_argument('--experts', action='store_true', help='a mixture of experts in the place of each MLP')
    parser.add_argument('--folder', help='keep what the jobs leave there, for benchmarks/draw_pool.py')
    parser.add_argument('--goodput', action='store_true', help='instead: measure it, and compare it with the formula')
    parser.add_argument('--seconds', type=float, default=300, help='of each such measurement (%(default)s)')
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        if given.goodput:
            return compare_goodput(temporary, given.seconds)
        folder = Path(given.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        data_dir = prepare_tiny(folder)
        for seed in range(1, 1 + given.seeds):
            keys = TINY_EXPERTS if given.experts else []
            figures = storm(folder, data_dir, given.kills, seed, given.pause, given.step_s, not given.step_s, keys)
            print_figures(figures, 'hits', MOMENTS, HITS)


if __name__ == '__main__':
    main()
