"""What rounds of a pool cost with other inner_steps and exchange_dtypes: train_pool.py --plan"""

import time
import uuid

import torch
import torch.distributed as dist

from exchange.codec import BYTES, STRETCH, decode_flat, decode_top2bit, encode_flat, encode_top2bit, kept
from exchange.diloco_check import LARGEST_PROBE, Plan, everybodys
from pool.goodput import goodput
from pool.rows import shapes_of
from pool.store import digest_of
from runtime.processes import on_rank_0

STARTED = time.monotonic()  # about when the process has: only torch takes long and is imported before
UP_H, DOWN_MIN = (1, 4, 24), (10, 60)  # how long jobs of the table live, and are then down, on average


def timed(action):
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def best(action):
    return min(timed(action) for _ in range(2))


class StorePlan(Plan):
    """
    The plan of one job of a pool, whose exchange is files: own ones to write, and those of num_replicas - 1 others to
    read. Jobs are taken to be equally fast, so nobody waits for another one.

    On creation all ranks at once time objects in the pool's store, which are then deleted, and what is computed.
    Collective; raises OSError on all ranks where the store fails on one.
    """

    SIZE, WAITS = 'MB of a delta', ', waiting for others included'  # MB: of one rank's rows

    def __init__(self, replica, meter, say):
        self.start_s, self.replica, self.jobs = time.monotonic() - STARTED, replica, replica.config.num_replicas
        super().__init__(replica.outer, meter, say)
        self.small_write, self.small_read, self.write, self.read, self.list = self._time_store()
        self.step, self.add = self._time_steps()

    def _time_store(self):
        """Seconds: to write and to read an object of 1 kB; to write and to read a byte of a large one; to list."""
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
        problems = everybodys(problem)  # from here on nobody writes
        on_rank_0(lambda: (store.remove(folder, store.list(folder)), store.remove_folder(folder)))
        if any(problems):
            raise OSError(next(filter(None, problems)))
        small_write, small_read, write, read, listing = slowest(*map(min, *times))
        write, read = max(write - small_write, 0.1 * write), max(read - small_read, 0.1 * read)
        return small_write, small_read, write / len(large), read / len(large), listing

    def _time_exchanges(self, dtype):
        """(bytes of a rank's rows in a delta, seconds to encode them, to decode them)."""
        if dtype == 'float32':
            return 4 * self.numbers, 0.0, 0.0
        sample, k = torch.randn(STRETCH), self.outer.k
        if dtype == 'top2bit':
            sample = sample.view(-1, 64)
            payload = encode_top2bit([sample], k)
            encoding = best(lambda: encode_top2bit([sample], k))
            decoding = best(lambda: torch.zeros(STRETCH).scatter_(0, *decode_top2bit(payload, [sample.shape], k)))
            shapes = shapes_of(self.replica.shapes, self.replica.ranks, 0)
            size = BYTES[dtype] * sum(int(kept(shape, k).sum()) for shape in shapes)
        else:
            payload = encode_flat(sample, dtype)
            encoding = best(lambda: encode_flat(sample, dtype))
            decoding = best(lambda: decode_flat(payload, dtype))
            size = payload.numel() / STRETCH * self.numbers
        return size, *(seconds * self.numbers / STRETCH for seconds in slowest(encoding, decoding))

    def _time_steps(self):
        """Seconds: of what is computed in a round whatever travels; to add a delta to the sum."""
        replica, fragment = self.replica, self.replica.fragment
        theta, delta, momentum = torch.zeros(3, min(self.numbers, LARGEST_PROBE))
        scale = self.numbers / len(theta)
        fixed = timed(lambda: (self.outer.pseudo_gradient(fragment).sum(), replica.digest()))
        step = best(lambda: self.outer.update(theta, delta, momentum))
        add = best(lambda: theta.add_(delta, alpha=0.5))
        return slowest(fixed + scale * step, scale * add)

    def exchange_seconds(self, dtype):
        """Seconds from a round's last inner step to the next one's first, if all others' deltas are there by then."""
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
        """Lines about jobs that come and go (pool/goodput.py)."""
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
    """Of all ranks, each of them."""
    seconds = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.tolist()
