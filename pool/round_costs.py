"""What a pool's rounds would cost with other values of inner_steps and exchange_dtype: train_pool.py --plan"""

import time
import uuid

import torch
import torch.distributed as dist

from exchange.codec import STRETCH, decode_flat, encode_flat
from exchange.diloco_check import LARGEST_PROBE, RoundCosts, everybodys
from pool.goodput import goodput
from pool.store import digest_of
from system.collectives import on_rank_0

STARTED = time.monotonic()  # about when the process started: of what was imported before, only torch takes long
UP_H, DOWN_MIN = (1, 4, 24), (10, 60)  # rows of the table: hours that a job lives and minutes it is down, on average


def timed(action):
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def best(action):
    return min(timed(action) for _ in range(2))


class StoreRoundCosts(RoundCosts):
    """
    Those of one job of a pool, which exchanges by files: it writes its own and reads those of num_replicas - 1
    other jobs. All jobs are assumed to be equally fast, so that none waits for another.

    Making one measures: all ranks at once time the pool's store with probe objects, which are deleted afterwards, and
    the computations of a round. Collective; raises OSError on all ranks if the store fails on any.
    """

    SIZE, WAITS = 'MB of a delta', ', waiting for others included'  # the MB are those of one rank's rows

    def __init__(self, replica, meter, say):
        self.start_s, self.replica, self.jobs = time.monotonic() - STARTED, replica, replica.config.num_replicas
        super().__init__(replica.outer, meter, say)
        self.small_write, self.small_read, self.write, self.read, self.list = self._time_store()
        self.step, self.add = self._time_steps()

    def _time_store(self):
        """Seconds to write and to read an object of 1 kB, to write and to read one byte of a large object, and to list
        a folder."""
        store, folder = self.replica.store, on_rank_0(lambda: f'probe_{uuid.uuid4().hex[:12]}')
        large = torch.rand(max(512, min(self.numbers, LARGEST_PROBE))).view(torch.uint8).numpy().data
        room, times, problem = memoryview(bytearray(large)), [], None
        try:
            for turn in range(2):
                times.append([])
                for size in (1024, len(large)):
                    name = f'{folder}/{size}_{turn}_{self.replica.rank}'
                    times[-1].append(timed(lambda name=name, size=size: store.create(name, large[:size])))
                    times[-1].append(timed(lambda name=name, size=size: digest_of(store.read(name, room[:size]))))
                times[-1].append(timed(lambda: store.list(folder)))
        except OSError as error:
            problem = str(error)
        problems = everybodys(problem)  # also a barrier: afterwards no rank writes any more
        on_rank_0(lambda: (store.remove(folder, store.list(folder)), store.remove_folder(folder)))
        if any(problems):
            raise OSError(next(filter(None, problems)))
        small_write, small_read, write, read, listing = slowest(*map(min, *times))
        write, read = max(write - small_write, 0.1 * write), max(read - small_read, 0.1 * read)
        return small_write, small_read, write / len(large), read / len(large), listing

    def _time_exchanges(self, dtype):
        """(bytes of a rank's rows in a delta, seconds to encode them, seconds to decode them)."""
        if dtype == 'float32':
            return 4 * self.numbers, 0.0, 0.0
        sample = torch.randn(STRETCH)
        payload = encode_flat(sample, dtype)
        encoding = best(lambda: encode_flat(sample, dtype))
        decoding = best(lambda: decode_flat(payload, dtype))
        size = payload.numel() / STRETCH * self.numbers
        return size, *(seconds * self.numbers / STRETCH for seconds in slowest(encoding, decoding))

    def _time_steps(self):
        """(seconds of a round's computations that do not depend on the exchange dtype, seconds to add one delta)."""
        replica, fragment = self.replica, self.replica.fragment
        theta, delta, momentum = torch.zeros(3, min(self.numbers, LARGEST_PROBE))
        scale = self.numbers / len(theta)
        fixed = timed(lambda: (self.outer.pseudo_gradient(fragment).sum(), replica.digest()))
        step = best(lambda: self.outer.update(theta, delta, momentum))
        add = best(lambda: theta.add_(delta, alpha=0.5))
        return slowest(fixed + scale * step, scale * add)

    def exchange_seconds(self, dtype):
        """Seconds from a round's last inner step to the next round's first, if all other deltas have arrived by
        then."""
        size, encoding, decoding = self.models[dtype]
        others = self.jobs - 1
        written = 3 * self.small_write + self.write * size  # claim, marker, commit
        read = (others + 1) * self.small_read + others * self.read * size  # the markers, and the commit
        listed = 6 * self.list  # three looks at the commits and at the round
        return written + read + listed + encoding + self.jobs * (decoding + self.add) + self.step

    def speed(self):
        return (
            f'the store writes {1e-6 / self.write:,.0f} MB/s and reads {1e-6 / self.read:,.0f} MB/s per rank; '
            f'a small object takes {1000 * self.small_write:.1f} ms to write, {1000 * self.small_read:.1f} ms to read, '
            f'a folder {1000 * self.list:.1f} ms to list'
        )

    def megabytes(self, dtype):
        return self.models[dtype][0] / 1e6

    def more(self, rounds):
        """Lines with the goodput of jobs that come and go (pool/goodput.py)."""
        mine = self.outer.dtype
        lines = [f'  goodput in {mine}, of jobs that are up, then down, and take {self.start_s:.0f} s to start']
        for up in UP_H:
            for down in DOWN_MIN:
                inner = [inner_steps * self.step_seconds for inner_steps in rounds]
                shares = [
                    goodput(3600 * up, 60 * down, self.start_s, one + self.exchange_seconds(mine), one) for one in inner
                ]
                lines.append(
                    f'    {up:2} h up, {down} min down'.ljust(40) + ''.join(f'{share:8.1%}' for share in shares)
                )
        return lines


def slowest(*seconds):
    """The maximum of each number over all ranks. Collective."""
    seconds = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.tolist()
