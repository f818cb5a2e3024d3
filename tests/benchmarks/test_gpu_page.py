"""benchmarks/gpu.py, tried on a CPU."""

import json
from types import SimpleNamespace

import pytest
import torch
from launch import run_script

from benchmarks import gpu
from dataset.windows import open_dataset


def test_a_stage_of_the_benchmark_leaves_results_and_a_page_and_repeats_nothing(tmp_path):
    arguments = ['--device=cpu', '--stage=start', f'--out={tmp_path}']
    first = run_script('benchmarks/gpu.py', *arguments).stdout
    assert first.count(' ok ') == 2 and 'FAILED' not in first
    page = (tmp_path / 'gpu.md').read_text()
    assert f'torch {torch.__version__}' in page and 'Checks passed: 2 of 2.' in page
    assert ' ok ' not in run_script('benchmarks/gpu.py', *arguments).stdout


@pytest.mark.slow
@pytest.mark.parametrize('impl', ['torch', 'manual'])
def test_one_of_four_ranks_takes_a_step_alone(tmp_path, impl):
    found = gpu.Bench(SimpleNamespace(device='cpu', nanogpt=None, out=tmp_path, budget=5)).inner(
        'one of four ranks', 200, '--size=tiny', f'--impl={impl}', of=impl
    )
    assert 0 < found['host ms'] <= found['ms']


def test_experts_in_one_kernel_are_as_near_to_float64_as_one_after_the_other(tmp_path):
    bench = gpu.Bench(SimpleNamespace(device='cpu', nanogpt=None, out=tmp_path, budget=5))
    found = bench.inner('experts', 200, '--size=tiny', of='tiny')
    assert 'error' not in found
    for what in ('output', *(f'gradient of {name}' for name in ('rows', 'gate', 'up', 'down'))):
        assert 0 < found[f'{what}, one kernel'] <= 2 * found[f'{what}, one by one'] < 0.02, what
    ways = ('one kernel', 'one by one', 'dense twin', 'with router and sorting')
    assert all(found[f'{way} ms'] > 0 for way in ways)
    assert '| experts-tiny | ' in gpu.page(bench)


def test_on_one_gpu_the_ranks_that_share_experts_are_left_out_with_the_reason(tmp_path, monkeypatch):
    bench = gpu.Bench(SimpleNamespace(device='cuda', nanogpt=None, out=tmp_path, budget=5))
    monkeypatch.setattr(bench, 'inner', lambda name, *_, **__: {'GPUs': 1})
    monkeypatch.setattr(bench, 'train', lambda name, *_, ranks=1, **__: ranks == 1 or pytest.fail(name))
    gpu.experts(bench)
    assert '| experts-on-two-ranks | left out expert_parallel=2 needs 2 GPUs, and here is 1 |' in gpu.page(bench)


@pytest.mark.slow
def test_the_stage_of_experts_on_a_cpu(tmp_path):
    said = run_script('benchmarks/gpu.py', '--device=cpu', '--stage=experts', f'--out={tmp_path}').stdout
    assert said.count(' ok ') == 9 and 'FAILED' not in said and 'left out' not in said, said
    compiled = json.loads((tmp_path / 'compiled-experts.json').read_text())
    assert all(compiled[f'{mode}: graphs'] == 2 for mode in ('none', 'full', 'selective'))
    losses = [json.loads((tmp_path / f'experts-shared-by-{n}-of-2.json').read_text())['losses'] for n in (1, 2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0][-1] < losses[0][0]
    page = (tmp_path / 'gpu.md').read_text()
    rows = page[page.index('## Mixtures of experts') : page.index('## The other checks')]
    for name in ('eager', 'compiled', 'shared-by-1-of-2', 'shared-by-2-of-2'):
        assert f'| experts-{name} | ' in rows
    assert '| 124M-experts-manual | ' in page[: page.index('## Where a step goes')]


def test_kernels_of_a_trace_are_summed_by_kind_and_gaps_are_idle(tmp_path):
    kernels = [
        ('sm90_gemm', 0, 100, 7),
        ('flash_fwd_kernel', 150, 50, 7),
        ('ncclDevKernel', 120, 60, 9),
    ]
    events = [
        {'ph': 'X', 'cat': 'kernel', 'name': name, 'ts': begin, 'dur': length, 'tid': stream}
        for name, begin, length, stream in kernels
    ]
    events.append({'ph': 'X', 'cat': 'cpu_op', 'name': 'aten::mm', 'ts': 0, 'dur': 1000, 'tid': 1})
    (tmp_path / 'trace.json').write_text(json.dumps({'traceEvents': events}))
    found = gpu.summary_of_trace(tmp_path / 'trace.json', tmp_path / 'step.svg')
    sums = {kind: ms for kind, ms in found['kernels_ms'].items() if ms}
    assert sums == pytest.approx({'matmuls': 0.1, 'attention': 0.05, 'NCCL': 0.06})
    assert (
        found['traced_ms'] == pytest.approx(0.2) and found['idle_ms'] == pytest.approx(0.02) and found['launches'] == 3
    )
    assert (tmp_path / 'step.svg').read_text().count('<rect') == 3


def test_tokens_per_second_by_wall_clock_hold_the_gaps_between_steps_and_neither_compiling_nor_the_trace():
    rows = [{'step': step, 'tokens': 100 * step} for step in (1, 10, 20, 30)] + [{'step': 30, 'val_loss': 1.0}]
    came = {1: 60.0, 10: 70.0, 20: 75.0, 30: 99.0}  # between steps the host slept, and the meter's clock stood still
    output = [(second, f'10:00:00 step {step:2}/30 | loss 3.1000 | 9,000 tok/s\n') for step, second in came.items()]
    output.insert(3, (74.0, '10:00:00 step 19/30 | val loss 3.2\n'))
    assert gpu.wall_clock(output, rows, trace_step=28) == {'wall_tokens_per_sec': 200}
    assert gpu.wall_clock(output, rows) == {'wall_tokens_per_sec': pytest.approx(1000 / 24)}
    assert gpu.wall_clock(output[:2], rows) == {}, 'between the first two compiles what the first has not'


@pytest.mark.slow
def test_the_page_has_tokens_per_second_by_wall_clock_beside_the_others(tmp_path):
    bench = gpu.Bench(SimpleNamespace(device='cpu', nanogpt=None, out=tmp_path, budget=5))
    keys = gpu.TINY | dict(compile=False, max_iters=4, log_interval=1, trace_step=4)
    result = bench.train('tiny ddp', 'train_ddp.py', keys)
    assert result['step'] == 3 and result['launches'] > 0, 'both are of the steps before the one that is traced'
    assert result['wall_tokens_per_sec'] > 0 and 'step 4/4' in (tmp_path / 'tiny-ddp.log').read_text()
    rows = [
        line.split(' | ') for line in gpu.page(bench).splitlines() if line.startswith(('| run | tok', '| tiny-ddp'))
    ]
    assert rows[0][2] == 'by wall clock' and float(rows[1][2]) == pytest.approx(result['wall_tokens_per_sec'], rel=1e-3)


@pytest.mark.slow
def test_page_locked_memory_stands_beside_what_the_plan_says(tmp_path):
    bench = gpu.Bench(SimpleNamespace(device='cpu', nanogpt=None, out=tmp_path, budget=5))
    keys = gpu.TINY | dict(compile=False, max_iters=1, cpu_offload='optimizer')
    result = bench.train('offload optimizer torch', 'train_fsdp.py', keys, inside='page locked')
    assert 'error' not in result and len(result['losses']) == 1 and 'page_locked_gb' not in result, 'nothing on a CPU'
    assert gpu.Bench.train(bench, 'x', 'train_fsdp.py', keys | {'n_head': 3}, inside='page locked')['error']
    predicted = bench.predict('offload optimizer', 'train_fsdp.py', keys)
    weights = 12 * 128 * 128 * 3 // 4  # at least, of each of the optimizer's two moments
    assert predicted['host GB'] > 2 * 4 * weights / 1e9
    (tmp_path / 'offload-optimizer-torch.json').write_text(json.dumps(result | {'page_locked_gb': 0.25}))
    assert f'| offload-optimizer-torch | 0.25 | {predicted["host GB"]:.4g} |' in gpu.page(bench)


def test_documents_are_written_that_a_run_packs(tmp_path):
    keys = gpu.write_documents(tmp_path, vocab_size=500, tokens=20_000)
    dataset = open_dataset(tmp_path, keys['dataset'], 'train', 128, keys['vocab_size'], keys['windows'])
    assert dataset.is_packed and dataset.n_tokens == 20_000
    x, y, starts = dataset.read(range(dataset.n_windows))
    documents = (starts < 128).sum(1)
    assert documents.min() >= 1 and documents.max() > 1, 'some windows hold several'
    assert (x == 499).any() and (y == 499).any(), 'with their end-of-text'


def test_a_run_on_packed_documents_is_a_row_of_the_page(tmp_path):
    bench = gpu.Bench(SimpleNamespace(device='cpu', nanogpt=None, out=tmp_path, budget=5))
    packed = gpu.write_documents(tmp_path / 'data', 500)
    keys = bench.size('124M') | packed | dict(compile=False, max_iters=3, log_interval=1)
    assert 'error' not in bench.train('124M documents ddp', 'train_ddp.py', keys)
    assert '| 124M-documents-ddp | ' in gpu.page(bench)
    assert 'windows=documents: ' in (tmp_path / '124M-documents-ddp.log').read_text()
