"""meter.py: what the numbers mean, measured in real processes over gloo."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from launch import REPO, environment

from runtime import meter as meters
from runtime import processes
from runtime.meter import Activity, Meter

CPU = torch.device('cpu')
CONFIG = {
    'device': 'cpu',
    'batch_size': 8,
    'learning_rate': 3e-4,
    'wandb_log': False,
    'wandb_project': 'tests',
    'wandb_entity': None,
    'wandb_group': None,
    'wandb_run_name': None,
    'tensorboard_log': False,
}
DELAY = 0.1  # seconds

Measured = namedtuple('Measured', 'rows profiling_seconds training_seconds')


# --- TWO RANKS --------------------------------------------------------------------------------------------------------
# What follows runs in two processes that torchrun starts once: `torchrun tests/runtime/test_meter.py results.json`.


def measure(train_step, steps=12, log_interval=6):
    """Metrics of a few steps of train_step(meter); with these intervals the first profiled step is the seventh."""
    import torch.distributed as dist

    meter = Meter(CPU, dist.get_world_size(), tokens_per_step=1000, flops_per_token=1)
    rows = []
    for step in range(1, steps + 1):
        meter.begin_step()
        train_step(meter)
        meter.end_step()
        if step % log_interval == 0:
            rows.append(meter.interval())
    return Measured(rows, meter.profiling_seconds, meter.training_seconds)


def late_collective(meter):
    """Rank 1 enters the collective DELAY later than rank 0, which has nothing else to do meanwhile."""
    import torch.distributed as dist

    meter.mark('data')
    if dist.get_rank() == 1:
        time.sleep(DELAY)
    meter.mark('update')
    dist.all_reduce(torch.ones(10))


def overlapped_collective(meter):
    """The same, but rank 0 computes for longer than that before it waits for the result."""
    import torch.distributed as dist

    meter.mark('forward')
    if dist.get_rank() == 1:
        time.sleep(DELAY)
    work = dist.all_reduce(torch.ones(10), async_op=True)
    if dist.get_rank() == 0:
        matrix = torch.ones(600, 600)
        end = time.perf_counter() + 1.5 * DELAY
        while time.perf_counter() < end:
            matrix @ matrix
    work.wait()


def four_megabytes(thread):
    """A step with an all-reduce of 4 MB, while a thread writes 10 MB to the disk."""
    import torch.distributed as dist

    def step(meter):
        meter.mark('update')
        with tempfile.TemporaryFile() as file:
            write = thread.submit(file.write, bytes(10**7))
            dist.all_reduce(torch.ones(10**6))
            write.result()

    return step


def short_step(meter):
    """About 10 ms with a collective in it."""
    import torch.distributed as dist

    meter.mark('update')
    time.sleep(0.01)
    dist.barrier()


def training_step(wrap):
    """A step of a small MLP, wrapped by wrap(model), that marks its phases as the train scripts do."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(4)]
    model = wrap(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(meter):
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


def run_two_ranks(path):
    """Everything that is measured on two ranks; each writes its results beside `path`."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    # Three times, because a busy machine may delay one of them by more than the 10 ms that the tests allow.
    results = {f'late {i}': measure(late_collective) for i in range(3)}
    results |= {f'overlapped {i}': measure(overlapped_collective) for i in range(3)}
    results['compiler_imported'] = 'torch._dynamo' in sys.modules  # before DDP and AdamW, which do import it
    results['ddp'] = measure(training_step(DistributedDataParallel))
    results['fsdp'] = measure(training_step(fully_sharded))
    with ThreadPoolExecutor() as thread:
        results['four megabytes'] = measure(four_megabytes(thread))
    results['long'] = measure(short_step, steps=600, log_interval=10)
    with open(f'{path}.{dist.get_rank()}', 'w') as file:
        json.dump(results, file)
    dist.destroy_process_group()
    processes.leave()


@pytest.fixture(scope='module')
def ranks(tmp_path_factory):
    """[results of rank 0, results of rank 1], and what the processes wrote to stderr."""
    path = tmp_path_factory.mktemp('telemetry') / 'results.json'
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', __file__, str(path)]
    done = subprocess.run(
        command, env=environment(PYTHONPATH=f'{REPO}:{REPO}/tests'), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    results = []
    for rank in range(2):
        result = json.loads((path.parent / f'{path.name}.{rank}').read_text())
        results.append({key: Measured(*value) if isinstance(value, list) else value for key, value in result.items()})
    return SimpleNamespace(results=results, stderr=done.stderr)


def communication(measured):
    """(time/comm, time/comm_exposed) of a run that profiled once."""
    rows = [row for row in measured.rows if 'time/comm' in row]
    assert len(rows) == 1
    return rows[0]['time/comm'], rows[0]['time/comm_exposed']


def median_communication(results, name):
    """The middle one of the three runs of that name."""
    return sorted(communication(results[f'{name} {i}']) for i in range(3))[1]


def test_a_collective_delayed_by_100_ms_is_found_within_10_percent(ranks):
    comm, exposed = median_communication(ranks.results[0], 'late')
    assert comm == pytest.approx(1000 * DELAY, rel=0.1)
    assert exposed == pytest.approx(1000 * DELAY, rel=0.1)
    comm_of_late_rank, _ = median_communication(ranks.results[1], 'late')
    assert comm_of_late_rank < 100 * DELAY, 'the rank that is late waits for nobody'


def test_communication_under_computation_is_not_exposed(ranks):
    comm, exposed = median_communication(ranks.results[0], 'overlapped')
    assert comm == pytest.approx(1000 * DELAY, rel=0.1)
    assert exposed < 100 * DELAY


@pytest.mark.parametrize('strategy', ['ddp', 'fsdp'])
def test_both_strategies_are_measured_alike(ranks, strategy):
    for result in ranks.results:
        comm, exposed = communication(result[strategy])
        total = result[strategy].rows[1]['time/total']
        assert 0 < exposed <= comm < 2 * total


@pytest.mark.parametrize('strategy', ['ddp', 'fsdp'])
def test_phases_add_up_to_the_total_within_2_percent(ranks, strategy):
    for row in ranks.results[0][strategy].rows:
        phases = [row[f'time/{phase}'] for phase in meters.PHASES if phase != 'outer']  # that is DiLoCo's
        assert sum(phases) == pytest.approx(row['time/total'], rel=0.02)
        assert row['time/data'] >= 4, 'two micro-steps sleep 2 ms each'


def test_profiling_costs_less_than_one_percent(ranks):
    for result in ranks.results:
        run = result['long']
        assert 0 < run.profiling_seconds < 0.01 * run.training_seconds
        assert any('time/comm' in row for row in run.rows)


def test_profiling_neither_prints_nor_imports_the_compiler(ranks):
    assert 'profiler' not in ranks.stderr
    assert not ranks.results[0]['compiler_imported']


@pytest.mark.skipif(not os.access('/proc/self/io', os.R_OK), reason='the system does not tell what was written')
def test_bytes_sent_are_those_of_the_collectives_alone(ranks):
    for result in ranks.results:
        for row in result['four megabytes'].rows:
            assert row['comm/sent_gb'] == pytest.approx(0.004, rel=0.001)


def test_ranks_exchange_their_memory(ranks):
    rows = [result['ddp'].rows[-1] for result in ranks.results]
    for row in rows:
        assert (
            row['mem/rank_min_gb'] == rows[0]['mem/rank_min_gb'] <= row['mem/rank_max_gb'] == rows[0]['mem/rank_max_gb']
        )
        assert row['mem/rank_min_gb'] <= row['mem/peak_gb'] <= row['mem/rank_max_gb']
        assert 0.05 < row['mem/current_gb'] < 5


# --- ONE PROCESS ------------------------------------------------------------------------------------------------------


def test_evaluations_between_steps_do_not_count():
    meter = Meter(CPU, 1, tokens_per_step=100, flops_per_token=1)
    for _ in range(3):
        meter.begin_step()
        meter.mark('forward')
        time.sleep(0.02)
        meter.end_step()
        time.sleep(0.05)  # an evaluation
    row = meter.interval()
    assert 20 <= row['time/total'] < 45
    assert row['tokens_per_sec'] == pytest.approx(100 / (row['time/total'] / 1000), rel=1e-3)
    assert not {'time/comm', 'mfu', 'mem/reserved_gb'} & row.keys(), 'unknown on one CPU process, hence left out'
    assert 'time/total' not in meter.interval(), 'no step, no time'


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
        Activity('aten::mm', 0, 15 * ms, 1),  # the host's view of it covers nothing
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
    + [(name, None) for name in ('NVIDIA H100 PCIe', 'NVIDIA GeForce RTX 4090', 'Intel(R) Xeon(R) Processor')],
)
def test_mfu_only_where_the_peak_is_known(monkeypatch, name, peak):
    monkeypatch.setattr(meters, 'device_name', lambda device: name)
    meter = Meter(CPU, 1, tokens_per_step=1000, flops_per_token=1e9)
    meter.begin_step()
    meter.end_step()
    row = meter.interval()
    assert row.get('mfu') == (peak and pytest.approx(row['tokens_per_sec'] * 1e9 / peak, rel=1e-3))


# --- LOG --------------------------------------------------------------------------------------------------------------


if __name__ == '__main__':
    run_two_ranks(sys.argv[1])
