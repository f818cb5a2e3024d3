"""meter.py: what the numbers mean, measured in real processes over gloo."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launch import REPO, environment, run_function
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from runtime import meter as meters
from runtime.meter import Activity, Meter

CPU = torch.device('cpu')
MS = 1000
DELAY = 0.5  # seconds
PROFILED = 7  # the step that is profiled in a run of 12 with rows after the 6th and the 12th

Measured = namedtuple('Measured', 'rows profiling_seconds training_seconds')


# --- what each of two ranks measures ----------------------------------------------------------------------------------


class Clock:
    """In place of the module time: a clock that stands still unless it is told to go on."""

    def __init__(self):
        self.seconds = 0.0

    def perf_counter(self):
        return self.seconds


def measure(train_step, steps=12, log_interval=6):
    """What a Meter says of a few steps of train_step(meter, number)."""
    meter = Meter(CPU, dist.get_world_size(), tokens_per_step=1000, flops_per_token=1)
    rows = []
    for number in range(1, steps + 1):
        meter.begin_step()
        train_step(meter, number)
        meter.end_step()
        if number % log_interval == 0:
            rows.append(meter.interval())
    return Measured(rows, meter.profiling_seconds, meter.training_seconds)


def late_collective(meter, number):
    """Rank 1 enters the collective DELAY later than rank 0, which does nothing else meanwhile."""
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
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def measure_on_a_clock_of_its_own(step_seconds, profile_seconds, steps):
    """Measure steps on a clock that moves only by step_seconds for each step and profile_seconds for each profile that
    is read."""
    clock, read = Clock(), meters.recorded_activities

    def slowly_read(profiler):
        clock.seconds += profile_seconds
        return read(profiler)

    def step(meter, number):
        meter.mark('update')
        clock.seconds += step_seconds
        dist.barrier()

    with mock.patch.multiple(meters, time=clock, recorded_activities=slowly_read):
        return measure(step, steps, log_interval=10)


def measure_all():
    # Three times, because on a busy machine rank 0 may begin to wait late, or be held up.
    results = {f'late {i}': measure(late_collective) for i in range(3)}
    results |= {f'overlapped {i}': measure(overlapped_collective) for i in range(3)}
    results['ddp'] = measure(training_step(DistributedDataParallel))
    results['fsdp'] = measure(training_step(fully_sharded))
    with ThreadPoolExecutor() as thread:
        results['four megabytes'] = measure(four_megabytes(thread))
    results['long'] = measure_on_a_clock_of_its_own(0.1, 0.02, steps=120)
    return results


# --- TWO RANKS --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def ranks():
    return run_function(2, measure_all)


def communication(measured):
    """(time/comm, time/comm_exposed) of a run that profiled once."""
    rows = [row for row in measured.rows if 'time/comm' in row]
    assert len(rows) == 1
    return rows[0]['time/comm'], rows[0]['time/comm_exposed']


def three_times(results, name):
    """[(time/comm, time/comm_exposed), ...] of the three runs of that name."""
    return [communication(results[f'{name} {number}']) for number in range(3)]


# A busy machine can shorten the wait of rank 0 and lengthen everything else. So the clearest of three runs counts, and
# the bounds are wide.


def test_waiting_for_a_late_rank_is_communication_and_exposed(ranks):
    on_time, late = (three_times(result, 'late') for result in ranks)
    assert max(exposed for _, exposed in on_time) > DELAY * MS / 2  # rank 0 does nothing else
    assert min(comm for comm, _ in late) < max(comm for comm, _ in on_time) / 2, 'the late rank waits for nobody'


def test_communication_under_computation_is_not_exposed(ranks):
    overlapped = three_times(ranks[0], 'overlapped')
    assert max(comm for comm, _ in overlapped) > DELAY * MS / 2
    assert min(exposed / comm for comm, exposed in overlapped) < 0.5


@pytest.mark.parametrize('strategy', ['ddp', 'fsdp'])
def test_both_strategies_are_measured_alike(ranks, strategy):
    for result in ranks:
        comm, exposed = communication(result[strategy])
        assert 0 < exposed <= comm < result[strategy].training_seconds * MS


@pytest.mark.parametrize('strategy', ['ddp', 'fsdp'])
def test_every_phase_of_a_step_has_its_time(ranks, strategy):
    for row in ranks[0][strategy].rows:
        phases = [row[f'time/{phase}'] for phase in meters.PHASES if phase not in ('outer', 'rollout')]
        assert all(phases) and sum(phases) <= row['time/total'] + 0.001
        assert row['time/data'] >= 4, 'two micro-steps sleep 2 ms each'


def test_profiling_costs_less_than_one_percent(ranks):
    """With 120 steps of 100 ms and profiles that take 20 ms, on a clock that moves for nothing else."""
    for result in ranks:
        run = result['long']
        assert run.training_seconds == pytest.approx(12) and 0.04 <= run.profiling_seconds < 0.12
        assert sum('time/comm' in row for row in run.rows) == round(run.profiling_seconds / 0.02)


PROFILE_ONE_STEP = """
import sys, torch, torch.distributed as dist
imported_by_torch = 'torch._dynamo' in sys.modules
from runtime.meter import Meter
dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
meter = Meter(torch.device('cpu'), 1, tokens_per_step=1, flops_per_token=1, trace_step=1, out_dir=sys.argv[1])
meter.begin_step()
meter.mark('update')
dist.all_reduce(torch.ones(10))
meter.end_step()
meter.interval()
print('torch._dynamo' in sys.modules and not imported_by_torch)
"""


def test_profiling_neither_prints_nor_imports_the_compiler(tmp_path):
    command = [sys.executable, '-c', PROFILE_ONE_STEP, str(tmp_path)]
    result = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True)
    assert (tmp_path / 'trace_rank0.json').exists(), result.stderr
    assert result.stdout == 'False\n' and 'profiler' not in result.stderr


@pytest.mark.skipif(not os.access('/proc/self/io', os.R_OK), reason='the system does not tell what was written')
def test_bytes_sent_are_those_of_the_collectives_alone(ranks):
    for result in ranks:
        for row in result['four megabytes'].rows:
            assert row['comm/sent_gb'] == pytest.approx(0.004, rel=0.001)


def test_ranks_exchange_their_memory(ranks):
    rows = [result['ddp'].rows[-1] for result in ranks]
    for row in rows:
        assert (
            row['mem/rank_min_gb'] == rows[0]['mem/rank_min_gb'] <= row['mem/rank_max_gb'] == rows[0]['mem/rank_max_gb']
        )
        assert row['mem/rank_min_gb'] <= row['mem/peak_gb'] <= row['mem/rank_max_gb']
        assert 0.05 < row['mem/current_gb'] < 5


# --- ONE PROCESS ------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """The clock that Meter reads: it stands still until a test adds to its `seconds`."""
    clock = Clock()
    monkeypatch.setattr(meters, 'time', clock)
    return clock


def test_phases_add_up_to_the_step_and_evaluations_between_steps_do_not_count(clock):
    meter = Meter(CPU, 1, tokens_per_step=100, flops_per_token=1)
    for _ in range(3):
        meter.begin_step()
        for _ in range(2):
            for phase, seconds in (('data', 0.002), ('forward', 0.003), ('backward', 0.004)):
                meter.mark(phase)
                clock.seconds += seconds
        meter.mark('update')
        clock.seconds += 0.002
        meter.end_step()
        clock.seconds += 5  # an evaluation
    row = meter.interval()
    milliseconds = {'data': 4, 'forward': 6, 'backward': 8, 'update': 2, 'total': 20}
    assert {key: row[f'time/{key}'] for key in milliseconds} == pytest.approx(milliseconds)
    assert row['tokens_per_sec'] == pytest.approx(5000)
    assert not {'time/comm', 'mfu', 'mem/reserved_gb'} & row.keys(), 'unknown on one CPU process, hence left out'
    assert 'time/total' not in meter.interval(), 'no step, no time'


def test_a_part_between_steps_adds_to_their_time_and_not_to_their_number(clock):
    meter = Meter(CPU, 1, tokens_per_step=100, flops_per_token=1)
    for _ in range(2):
        meter.begin_step()
        meter.mark('update')
        clock.seconds += 0.02
        meter.end_step()
    with meter.part('outer'):
        clock.seconds += 0.01
    row = meter.interval()
    found = {key: row[f'time/{key}'] for key in ('update', 'outer', 'total')}
    assert found == pytest.approx({'update': 20, 'outer': 5, 'total': 25})  # per step
    assert row['tokens_per_sec'] == pytest.approx(4000)


def test_a_profiled_step_counts_only_where_there_is_no_other(clock, one_rank, tmp_path):
    for log_interval, milliseconds in ((3, 20), (1, 5000)):
        meter = Meter(CPU, 1, tokens_per_step=100, flops_per_token=1, trace_step=3, out_dir=tmp_path)
        for number in (1, 2, 3):
            meter.begin_step()
            meter.mark('update')
            clock.seconds += 5 if number == 3 else 0.02
            meter.end_step()
            row = meter.interval() if number % log_interval == 0 else None
        assert row['time/total'] == row['time/update'] == pytest.approx(milliseconds)
        assert row['tokens_per_sec'] == pytest.approx(100 / (milliseconds / MS), rel=1e-3)


@pytest.mark.parametrize('log_interval, outer, total', [(1, 8, 28), (2, 4, 24), (4, 2, 22)])
def test_a_part_counts_in_the_steps_of_its_row_also_behind_a_profiled_one(
    clock, one_rank, tmp_path, log_interval, outer, total
):
    meter = Meter(CPU, 1, tokens_per_step=100, flops_per_token=1, trace_step=2, out_dir=tmp_path)  # profiles 1 and 2
    rows = []
    for number in range(1, 5):
        meter.begin_step()
        meter.mark('update')
        clock.seconds += 0.02
        meter.end_step()
        if number == 2:
            with meter.part('outer'):
                clock.seconds += 0.008
        if number % log_interval == 0:
            rows.append((number, meter.interval()))
    (row,) = [row for number, row in rows if number - log_interval < 2 <= number]
    assert (row['time/outer'], row['time/total']) == pytest.approx((outer, total))
    assert row['tokens_per_sec'] == pytest.approx(100 * MS / total, rel=1e-5)
    assert not any('time/outer' in other for _, other in rows if other is not row)


@pytest.mark.parametrize('trace_step, recorded', [(3, [2, 3]), (1, [1])])
def test_a_trace_holds_the_step_and_the_one_before_and_their_mean_communication(
    monkeypatch, one_rank, tmp_path, trace_step, recorded
):
    monkeypatch.setattr(meters, 'communication_milliseconds', lambda activities: (12, 6))
    meter = Meter(CPU, 2, tokens_per_step=100, flops_per_token=1, trace_step=trace_step, out_dir=tmp_path)
    rows = []
    for number in range(1, 5):
        meter.begin_step()
        meter.mark('update')
        with torch.autograd.profiler.record_function(f'work {number}'):
            torch.ones(10).sum()
        meter.end_step()
        rows.append(meter.interval())
    events = json.loads((tmp_path / 'trace_rank0.json').read_text())['traceEvents']
    names = [event['name'] for event in sorted(events, key=lambda event: event.get('ts', 0)) if event.get('ph') == 'X']
    assert [name for name in names if name.startswith('work')] == [f'work {number}' for number in recorded]
    assert names.count(meters.PROFILED_STEP) == len(recorded)
    found = [(row['time/comm'], row['time/comm_exposed']) if 'time/comm' in row else None for row in rows]
    mean = (12 / len(recorded), 6 / len(recorded))
    assert found == [mean if number == trace_step else None for number in range(1, 5)]


def test_memory_held_counts_each_storage_once_and_in_full():
    flat = torch.zeros(1000)
    assert meters.held_gb([flat[:10], flat[10:20], None, torch.zeros(5, dtype=torch.bfloat16)]) == 4010e-9
    assert meters.held_gb([]) == 0


def test_the_state_of_a_run_is_in_its_first_row():
    meter = Meter(CPU, 1, tokens_per_step=1, flops_per_token=1)
    layer = torch.nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(100)).sum().backward()
    rows = []
    for _ in range(2):
        meter.begin_step()
        optimizer.step()
        meter.measure_state(layer.parameters(), optimizer)
        meter.end_step()
        rows.append(meter.interval())
    parts = ('weights', 'gradients', 'optimizer')
    assert [rows[0][f'mem/{part}_gb'] for part in parts] == [4e-5] * 3
    assert not any(f'mem/{part}_gb' in rows[1] for part in parts)


def test_the_state_is_measured_when_the_optimizer_has_one():
    """In fp16 GradScaler skips the first steps, until its scale fits. Plain SGD never has a state."""
    layer = torch.nn.Linear(100, 100, bias=False)
    for make, expected in ((torch.optim.AdamW, [False, True]), (torch.optim.SGD, [True, False])):
        meter, optimizer = Meter(CPU, 1, 1, 1), make(layer.parameters(), lr=0.1)
        layer(torch.ones(100)).sum().backward()
        found = []
        for is_skipped in (True, False):
            if not is_skipped:
                optimizer.step()
            meter.measure_state(layer.parameters(), optimizer)
            found.append('mem/optimizer_gb' in meter.interval())
        assert found == expected


def test_peak_memory_begins_anew_at_each_interval():
    meter = Meter(CPU, 1, tokens_per_step=1, flops_per_token=1)
    if 'mem/peak_gb' not in meter.interval():
        pytest.skip('this system does not permit resetting the peak')
    block = torch.ones(50_000_000)  # 0.2 GB
    del block
    with_block, without = meter.interval(), meter.interval()
    assert with_block['mem/peak_gb'] > without['mem/peak_gb'] + 0.15
    assert with_block['mem/current_gb'] == pytest.approx(without['mem/current_gb'], abs=0.05)


def test_exposed_communication_on_a_gpu_is_what_no_other_kernel_covers():
    ms = 1_000_000
    activities = [
        Activity('ncclDevKernel_AllGather_RING_LL(...)', 0, 10 * ms, None),
        Activity('ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(...)', 5 * ms, 15 * ms, None),  # overlaps the first
        Activity('ampere_bf16_gemm', 2 * ms, 9 * ms, None),
        Activity('Memcpy HtoD (Pinned -> Device)', 12 * ms, 13 * ms, None),
        Activity('aten::mm', 0, 15 * ms, 1),  # what the host sees of it, which covers nothing
    ]
    assert meters.communication_milliseconds(activities) == (15, 15 - 7 - 1)


def test_a_wait_inside_a_tensor_operation_is_exposed_on_a_cpu():
    ms = 1_000_000
    activities = [
        Activity('gloo:all_reduce', 0, 10 * ms, 2),
        Activity('aten::copy_', 4 * ms, 8 * ms, 2),  # part of the collective, in gloo's thread
        Activity('aten::linalg_vector_norm', 0, 10 * ms, 1),  # a DTensor's
        Activity('aten::sum', 0, 1 * ms, 1),
        Activity('_c10d_functional::all_reduce', 1 * ms, 2 * ms, 1),
        Activity('aten::resolve_conj', 11 * ms, 12 * ms, 1),
    ]
    assert meters.communication_milliseconds(activities) == (10, 9)


@pytest.mark.parametrize(
    'name, peak',
    [('NVIDIA H200', 989e12), ('NVIDIA H100 80GB HBM3', 989e12), ('NVIDIA A100-SXM4-40GB', 312e12)]
    + [('A100-PCIE-40GB', 312e12), ('NVIDIA A100 80GB PCIe', 312e12)]
    + [(name, None) for name in ('NVIDIA H100 PCIe', 'NVIDIA GeForce RTX 4090', 'Intel(R) Xeon(R) Processor')]
    + [(f'NVIDIA H100 80GB HBM3 MIG {part}', None) for part in ('1g.10gb', '1g.10gb+me', '7g.80gb')]
    + [(name, None) for name in ('NVIDIA H100 NVL', 'NVIDIA H200 NVL', 'NVIDIA GH200 480GB', 'NVIDIA H100-1-10C')]
    + [(name, None) for name in ('GRID A100-40C', 'NVIDIA A100-SXM4-40GB MIG 3g.20gb', 'NVIDIA A100X')],
)
def test_mfu_only_where_the_peak_is_known(monkeypatch, name, peak):
    monkeypatch.setattr(meters, 'device_name', lambda device: name)
    meter = Meter(CPU, 1, tokens_per_step=1000, flops_per_token=1e9)
    meter.begin_step()
    meter.end_step()
    row = meter.interval()
    assert row.get('mfu') == (peak and pytest.approx(row['tokens_per_sec'] * 1e9 / peak, rel=1e-3))


def test_mfu_is_that_of_one_of_the_gpus(monkeypatch, clock, one_rank):
    monkeypatch.setattr(meters, 'device_name', lambda device: 'NVIDIA H100 80GB HBM3')
    meter = Meter(CPU, world_size=4, tokens_per_step=1000, flops_per_token=1e9)
    meter.begin_step()
    clock.seconds += 0.001
    meter.end_step()
    row = meter.interval()
    assert row['tokens_per_sec'] == pytest.approx(1e6) and row['tokens_per_sec_per_rank'] == pytest.approx(2.5e5)
    assert row['mfu'] == pytest.approx(2.5e5 * 1e9 / 989e12, rel=1e-3)
