"""What the two ranks of test_meter.py run: each measures some steps and leaves the results beside the path given."""

import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from runtime import meter as meters
from runtime import processes

DELAY = 0.5  # seconds
PROFILED = 7  # the step that is profiled in a run of 12 with rows after the 6th and the 12th
COMPILER_IMPORTED_BY_TORCH = 'torch._dynamo' in sys.modules


class Clock:
    """A clock that stands still unless it is told to go on."""

    def __init__(self):
        self.seconds = 0.0

    def perf_counter(self):
        return self.seconds


def measure(train_step, steps=12, log_interval=6):
    """What a few steps of train_step(meter, number) come to."""
    meter = meters.Meter(torch.device('cpu'), dist.get_world_size(), tokens_per_step=1000, flops_per_token=1)
    rows = []
    for number in range(1, steps + 1):
        meter.begin_step()
        train_step(meter, number)
        meter.end_step()
        if number % log_interval == 0:
            rows.append(meter.interval())
    return {
        'rows': rows,
        'profiling_seconds': meter.profiling_seconds,
        'training_seconds': meter.training_seconds,
    }


def late_collective(meter, number):
    """Rank 1 enters the collective DELAY later than rank 0, which has nothing else to do meanwhile."""
    meter.mark('data')
    if dist.get_rank() == 1 and number == PROFILED:
        time.sleep(DELAY)
    meter.mark('update')
    dist.all_reduce(torch.ones(10))


def overlapped_collective(meter, number):
    """The same, but rank 0 computes until the result is there."""
    meter.mark('forward')
    if dist.get_rank() == 1 and number == PROFILED:
        time.sleep(DELAY)
    work = dist.all_reduce(torch.ones(10), async_op=True)
    matrix = torch.ones(600, 600)
    while not work.is_completed():
        matrix @ matrix
    work.wait()


def four_megabytes(thread):
    """A step with an all-reduce of 4 MB, while a thread writes 10 MB to the disk."""

    def step(meter, number):
        meter.mark('update')
        with tempfile.TemporaryFile() as file:
            write = thread.submit(file.write, bytes(10**7))
            dist.all_reduce(torch.ones(10**6))
            write.result()

    return step


def training_step(wrap):
    """A step of a small MLP, wrapped by wrap(model), that marks its phases as the train scripts do."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(4)]
    model = wrap(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(meter, number):
        for _ in range(2):
            meter.mark('data')
            time.sleep(0.002)
            meter.mark('forward')
            loss = model(torch.randn(512, 256)).square().mean()
            meter.mark('backward')
            loss.backward()
        meter.mark('update')
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def fully_sharded(model):
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def measure_on_a_clock_of_its_own(step_seconds, profile_seconds, steps):
    """Steps that take so long, and profiles that take so long to read, on a clock that goes on for nothing else."""
    clock, read = Clock(), meters.recorded_activities

    def slowly_read(profiler):
        clock.seconds += profile_seconds
        return read(profiler)

    def step(meter, number):
        meter.mark('update')
        clock.seconds += step_seconds
        dist.barrier()

    real, meters.time, meters.recorded_activities = (
        meters.time,
        SimpleNamespace(perf_counter=clock.perf_counter),
        slowly_read,
    )
    try:
        return measure(step, steps, log_interval=10)
    finally:
        meters.time, meters.recorded_activities = real, read


def main(path):
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    # Three times: a busy machine can let rank 0 begin to wait late, or hold it up on its way.
    results = {f'late {i}': measure(late_collective) for i in range(3)}
    results |= {f'overlapped {i}': measure(overlapped_collective) for i in range(3)}
    results['compiler_imported'] = 'torch._dynamo' in sys.modules and not COMPILER_IMPORTED_BY_TORCH
    results['ddp'] = measure(training_step(DistributedDataParallel))  # DDP and AdamW do import it
    results['fsdp'] = measure(training_step(fully_sharded))
    with ThreadPoolExecutor() as thread:
        results['four megabytes'] = measure(four_megabytes(thread))
    results['long'] = measure_on_a_clock_of_its_own(0.1, 0.02, steps=120)
    Path(f'{path}.{os.environ["RANK"]}').write_text(json.dumps(results))
    processes.leave()


if __name__ == '__main__':
    main(sys.argv[1])
