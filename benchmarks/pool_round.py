"""
What does a round of a pool (train_pool.py) cost one job? Its time beside that of reading and writing the same bytes.

    python benchmarks/pool_round.py                                        # 10 million parameters, 4 jobs, a folder
    python benchmarks/pool_round.py --folder=/scratch/me --dtype=int4 --profile

In a round the job gives its delta, finds those of the others already there, closes the round and takes the outer step.
Beside it, a plain pass writes a file of the same size as durably and reads the same files of the others, by open() and
nothing else. Which of the two goes first alternates, and a ratio is taken within a round. There is also a ratio of CPU
time, which says more on a busy machine. --profile shows in which functions the time of a round goes.
"""

import argparse
import contextlib
import cProfile
import json
import os
import pstats
import sys
import tempfile
import time
from types import SimpleNamespace

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import torch.distributed as dist

import diloco
from benchmarks.diloco_round import make_parameters, outer_step
from exchange.codec import encode_flat
from pool.replica import Replica
from system import processes


def give_as_another(replica, number):
    """Write the delta of another job, as if that job had trained on piece `number` of this round."""
    name, job = f'rounds/{replica.ledger.round:06}/delta_{number:02}', f'job {number}'
    generator = torch.Generator().manual_seed(number)
    delta = 1e-3 * torch.randn(replica.fragment.anchor.numel(), generator=generator)
    replica.store.create(name.replace('delta', 'claim'), job.encode())
    marker = {'pool': replica.pool, 'job': job, 'steps': 1, 'leaves': True, 'state': replica.state}
    dtype = replica.config.exchange_dtype
    marker |= {'dtype': dtype, 'xxh128': replica._write(name, encode_flat(delta, dtype).numpy().data)}
    replica.store.create(f'{name}.json', json.dumps(marker).encode())


def plain(written, read, target):
    """Write a file durably, first under another name than its final one, and read others."""
    with open(f'{target}.tmp', 'wb') as file:
        file.write(written)
        file.flush()
        os.fsync(file.fileno())
    os.link(f'{target}.tmp', target)
    os.remove(f'{target}.tmp')
    folder = os.open(os.path.dirname(target), os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    for path in read:
        with open(path, 'rb') as file:
            file.read()


def now():
    """Seconds on the wall, and of CPU time of this process."""
    return torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--numbers', type=int, default=10_000_000)
    parser.add_argument('--jobs', type=int, default=4)
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--dtype', default='float32')
    parser.add_argument('--folder', help='where the pool is made, and deleted again')
    parser.add_argument('--profile', action='store_true', help='show in which functions the time goes')
    arguments = parser.parse_args()

    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    parameters = make_parameters(arguments.numbers)
    outer = diloco.Outer(parameters, outer_step, dist.group.WORLD, inner_steps=1, dtype=arguments.dtype)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        config = SimpleNamespace(
            exchange=f'{folder}/pool', out_dir=folder, max_iters=arguments.rounds + 3, inner_steps=1, quorum=1,
            num_replicas=arguments.jobs, grace_s=60.0, exchange_dtype=arguments.dtype, error_feedback=False,
            checkpoint_interval=0, keep_deltas=False, replay=False,
        )  # fmt: skip
        replica = Replica(config, outer, {}, print)
        profile = cProfile.Profile()
        rounds, plains = [], []

        def meet(name):
            for parameter in parameters.values():
                parameter.sub_(1e-3)
            with profile if arguments.profile else contextlib.nullcontext():
                began = now()
                replica.round_is_over()  # after the one inner step
                replica.meet()
                rounds.append(now() - began)

        def read_and_write(name):
            written = open(f'{name}1_0000', 'rb').read()
            read = [f'{name}{number}_0000' for number in range(1, arguments.jobs)]
            began = now()
            plain(written, read, f'{folder}/plain_{len(plains)}')
            plains.append(now() - began)

        for number in range(arguments.rounds + 2):  # two to warm up
            replica.claim()
            for other in range(1, arguments.jobs):
                give_as_another(replica, other)
            name = f'{config.exchange}/rounds/{replica.ledger.round:06}/delta_0'
            for what in (meet, read_and_write)[:: -1 if number % 2 else 1]:
                what(name)
        replica.leave()
    ours, theirs = torch.stack(rounds[2:]), torch.stack(plains[2:])
    megabytes = sum(parameter.numel() for parameter in parameters.values()) * 4e-6
    print(f'{arguments.jobs} jobs, {megabytes:.1f} MB of parameters, {arguments.dtype}, {arguments.rounds} rounds')
    for column, clock in enumerate(('', ' of CPU time')):
        for what, seconds in (('round', ours[:, column]), ('plain', theirs[:, column])):
            print(f'  {what}  {1000 * seconds.median():8.1f} ms{clock} ({1000 * seconds.min():.1f} at best)')
        ratios = ours[:, column] / theirs[:, column]
        print(f'  ratio  {ratios.median():7.2f}{clock} ({ratios.min():.2f} to {ratios.max():.2f})')
    if arguments.profile:
        pstats.Stats(profile).sort_stats('tottime').print_stats(20)
    processes.leave()


if __name__ == '__main__':
    main()
