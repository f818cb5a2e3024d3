"""benchmarks/gpu.py, tried on a CPU."""

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from faults import wait_until
from launch import REPO, run_script

from benchmarks import gpu
from benchmarks.gpu import Bench, Check
from dataset.opening import open_dataset


def code(name, program, needs=None, read=lambda text, output: {'said': text.strip()}):
    """A check that runs a line of Python."""
    return Check(name, ['-c', program], 0, read, needs=needs)


# --- running checks ---------------------------------------------------------------------------------------------------


@pytest.fixture
def bench_of(monkeypatch, capsys):
    """bench_of(*arguments): benchmarks/gpu.py itself, in this process; returns (exit code, stdout, stderr)."""
    on_sigterm = signal.getsignal(signal.SIGTERM)

    def run(*arguments):
        monkeypatch.setattr(sys, 'argv', ['gpu.py', '--device=cpu', *arguments])
        try:
            code = gpu.main()
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    yield run
    signal.signal(signal.SIGTERM, on_sigterm)


def test_a_name_that_no_check_has_is_refused(bench_of, tmp_path):
    code, _, said = bench_of('--only=nosuch', f'--out={tmp_path}')
    assert code == 2 and '--only=nosuch: no check has such a name; there are: versions; start; ' in said


def test_without_a_gpu_or_a_folder_of_nanogpt_nothing_begins(bench_of, tmp_path):
    out = tmp_path / 'out'
    if not torch.cuda.is_available():
        code, _, said = bench_of('--device=cuda', f'--out={out}')
        assert code == 2 and 'torch finds no GPU here' in said
    code, _, said = bench_of(f'--nanogpt={tmp_path}', f'--out={out}')
    assert code == 2 and f'--nanogpt={tmp_path}: no train.py there' in said
    assert not out.exists()


def test_checks_leave_results_and_a_page_and_a_second_call_does_those_that_were_left_out(bench_of, tmp_path):
    arguments = ['--only=versions|exact ddp', f'--out={tmp_path}']
    _, none, _ = bench_of(*arguments, '--budget=0')
    assert none.count('left out: ') == 4 and ' ok ' not in none  # the fourth are clocks and power
    assert (
        'left out: versions, 0 s are left, it takes about 15' in none and 'left out: exact ddp, it needs start' in none
    )
    assert 'Checks passed: 0 of 0, left out: 3.' in (tmp_path / 'gpu.md').read_text()
    code, first, _ = bench_of(*arguments)
    assert code == 0 and first.count(' ok ') == 3 and 'FAILED' not in first
    page = (tmp_path / 'gpu.md').read_text()
    assert f'torch {torch.__version__}' in page and 'Checks passed: 3 of 3, left out: 0.' in page
    assert ' ok ' not in bench_of(*arguments)[1]
    (tmp_path / 'start.json').write_text('{"error": "no GPU"}')
    assert bench_of(*arguments)[0] == 1 and '- start: `no GPU`' in (tmp_path / 'gpu.md').read_text()


def test_checks_run_side_by_side_with_their_share_of_the_cores_and_after_those_that_they_need(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, 'cores', lambda: 6)
    meet = 'import os, time; mine, its = {!r}, {!r}; open(mine, "w")\nwhile not os.path.exists(its): time.sleep(0.01)\n'
    meet += 'print(os.environ["OMP_NUM_THREADS"], os.environ["TORCHINDUCTOR_COMPILE_THREADS"])'
    a, b = str(tmp_path / 'a'), str(tmp_path / 'b')
    bench = Bench('cpu', tmp_path / 'out', jobs=2)
    checks = [code('b', meet.format(b, a)), code('late', f'print(open({a!r}).name)', 'a'), code('a', meet.format(a, b))]
    checks += [code('never', '', 'alas'), code('without', '', 'nothing'), code('alas', 'raise OSError("gone")')]
    bench.side_by_side([*checks, bench.cannot('cannot', 'it is for CUDA')])
    assert bench.result('a')['said'] == bench.result('b')['said'] == '3 3' and bench.result('late')['said'] == a
    assert bench.result('alas')['error'] == 'OSError: gone'
    page = gpu.page(bench)
    assert 'Checks passed: 3 of 4, left out: 3.\n- alas: `OSError: gone`' in page
    for name, reason in (('never', 'it needs alas'), ('without', 'it needs nothing'), ('cannot', 'it is for CUDA')):
        assert bench.result(name) is None and f'| {name} | {reason} |' in page


def test_a_check_that_the_time_or_a_signal_ends_has_not_failed_and_leaves_no_process(tmp_path):
    bench = Bench('cpu', tmp_path, budget=2 / 60)
    sleeps = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'
    assert bench.run(code('slow', sleeps)) == {'left out': 'the time was over after 2 s'} and not bench.running
    bench = Bench('cpu', tmp_path)
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(bench.run, code('ended', sleeps))
        wait_until(lambda: (tmp_path / 'ended.log').exists() and (tmp_path / 'ended.log').read_text(), 60)
        bench.end()
        assert future.result() == {'left out': 'this program was ended'} and not (tmp_path / 'ended.json').exists()
    for name in ('slow', 'ended'):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f'{name}.log').read_text()), 0)


SMI = """#!/bin/sh
echo "$@" > {0}.asked
while true; do
    echo '210, 80.00, 0x0000000000000001'
    echo '1980, 650.50, 0x0000000000000000'
    echo '1755, 690.00, 0x0000000000000004'
    echo '[N/A], [N/A], [N/A]'
    sleep 0.1
done
"""


def test_clocks_and_power_of_a_timed_check_are_those_of_a_busy_gpu(tmp_path, monkeypatch):
    """nvidia-smi is a script here, which writes what that program writes."""
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    smi = tmp_path / 'nvidia-smi'
    smi.write_text(SMI.format(smi))
    smi.chmod(0o755)
    bench = Bench('cuda', tmp_path)
    bench.nvidia_smi = str(smi)
    waits = f'import os, time\nwhile not os.path.exists("{smi}.asked"): time.sleep(0.01)\ntime.sleep(0.5)'
    result = bench.run(code('timed', waits, read=lambda text, output: {'tokens_per_sec': 5}), alone=True)
    assert (
        result['lowest_mhz'] == 1755 < result['mhz'] < 1980 and 650 < result['watts'] < result['highest_watts'] == 690
    )
    assert result['held_back_by'] == '0x4' and 'clocks.sm,power.draw' in (tmp_path / 'nvidia-smi.asked').read_text()
    row = [cell.strip() for cell in gpu.page(bench).partition('| timed ')[2].splitlines()[0].split('|')]
    assert row[1] == '5' and row[-3] == '1755'
    assert 'mhz' not in bench.run(code('beside others', waits)) and gpu.summary_of_clocks(['no device\n']) == {}


# --- the page ---------------------------------------------------------------------------------------------------------


def test_losses_too_far_from_those_of_the_other_run_are_a_failure(tmp_path):
    bench = Bench('cpu', tmp_path)
    beside = {'beside': ('exact-cpu', 1e-5)}
    bench.keep('exact cpu', {'losses': [2.0, 4.0]})
    bench.keep('exact ddp', {'losses': [2.0, 4.00002]} | beside)
    bench.keep('exact fsdp', {'losses': [2.0002, 4.0]} | beside)
    bench.keep('exact nan', {'losses': [float('nan'), 4.0]} | beside)
    page = gpu.page(bench)
    assert '- exact-fsdp: losses differ by 1.0e-04 from those of exact-cpu' in page and 'exact-nan: losses' in page
    assert '| exact-ddp | exact-cpu | 5.0e-06 |  |' in page and 'Checks passed: 2 of 4' in page


def test_the_row_of_the_h100_in_the_guide_is_that_of_its_results(tmp_path):
    """docs/pictures/h100.json has what each check found there. Nothing else is a cell that somebody has typed."""
    guide, results = (REPO / 'docs/gpu.md').read_text(), json.loads((REPO / 'docs/pictures/h100.json').read_text())
    for cells in (gpu.CARD, gpu.row_of_card(results)):
        assert f'| {" | ".join(cells)} |' in guide
    bench = Bench('cpu', tmp_path)
    bench.keep('exact ddp', {'losses': [2.0, 4.0]})
    bench.keep('exact fsdp', {'losses': [2.0, 4.00002]})
    assert f'| {" | ".join(gpu.CARD)} |' in gpu.page(bench) and '|  |  |  |  | 5.0e-06 |  |  | ' in gpu.page(bench)


def trace(steps):
    """A trace of some steps: [([(name, begin, length, stream), ...] of its kernels, begin and end on the host), ...]"""
    events, number = [], 0
    for kernels, begin, end in steps:
        label = {'ph': 'X', 'name': gpu.PROFILED_STEP, 'ts': begin, 'dur': end - begin, 'tid': 1}
        events += [label | {'cat': 'user_annotation'}, label | {'cat': 'gpu_user_annotation', 'tid': 7}]
        for name, start, length, stream in kernels:
            number += 1
            call = {'ph': 'X', 'args': {'correlation': number}, 'tid': 1}
            events.append(call | {'cat': 'cuda_runtime', 'name': 'cudaLaunchKernel', 'ts': begin + number, 'dur': 1})
            events.append(call | {'cat': 'kernel', 'name': name, 'ts': start, 'dur': length, 'tid': stream})
        events.append({'ph': 'X', 'cat': 'cpu_op', 'name': 'aten::mm', 'ts': begin, 'dur': 5, 'tid': 1})
    return json.dumps({'traceEvents': events})


def test_kernels_of_the_last_step_in_a_trace_are_summed_by_kind_and_gaps_are_idle(tmp_path):
    """The host is a step ahead: it has launched the second step's kernels before the first one's have run."""
    first = [('sm90_gemm', 10, 300, 7), ('elementwise', 900, 100, 7)]  # the queue was empty: gaps
    kernels = [('sm90_gemm', 1010, 100, 7), ('flash_fwd_kernel', 1160, 50, 7), ('ncclDevKernel', 1130, 60, 9)]
    (tmp_path / 'trace.json').write_text(trace([(first, 0, 50), (kernels, 60, 200)]))
    found = gpu.summary_of_trace(tmp_path / 'trace.json', tmp_path / 'step.svg')
    sums = {kind: ms for kind, ms in found['kernels_ms'].items() if ms}
    assert sums == pytest.approx({'matmuls': 0.1, 'attention': 0.05, 'NCCL': 0.06}) and found['launches'] == 3
    assert found['traced_ms'] == pytest.approx(0.21), 'from the end of the step before'
    assert found['idle_ms'] == pytest.approx(0.03), 'before the first kernel and between two'
    assert (tmp_path / 'step.svg').read_text().count('<rect') == 3
    (tmp_path / 'trace.json').write_text(trace([(kernels, 60, 200)]))
    found = gpu.summary_of_trace(tmp_path / 'trace.json', tmp_path / 'step.svg')
    assert found['traced_ms'] == pytest.approx(0.2) and found['idle_ms'] == pytest.approx(0.02)


# --- the checks -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('impl', ['torch', 'manual'])
def test_one_of_four_ranks_takes_a_step_alone(tmp_path, impl):
    bench = Bench('cpu', tmp_path)
    found = bench.run(bench.inner('one of four ranks', of=impl))
    assert 0 < found['host ms'] <= found['ms']


def test_experts_in_one_kernel_are_as_near_to_float64_as_one_after_the_other(tmp_path):
    bench = Bench('cpu', tmp_path)
    found = bench.run(bench.inner('experts', of='tiny'))
    assert 'error' not in found
    for what in ('output', *(f'gradient of {name}' for name in ('rows', 'gate', 'up', 'down'))):
        assert 0 < found[f'{what}, one kernel'] <= 2 * found[f'{what}, one by one'] < 0.02, what
    ways = ('one kernel', 'one by one', 'dense twin', 'with router and sorting')
    assert all(found[f'{way} ms'] > 0 for way in ways)
    assert '| experts-tiny | ' in gpu.page(bench)


def test_on_one_gpu_the_ranks_that_share_experts_are_left_out_with_the_reason(tmp_path, monkeypatch):
    bench = Bench('cuda', tmp_path)
    for given, count in (('0', 1), ('0,1', 2)):
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', given)
        checks = {check.name: check for check in gpu.experts(bench)}
        assert bool(checks['experts on two ranks'].command) == (count == 2)
        if count == 1:
            bench.run(checks['experts on two ranks'])
    assert '| experts-on-two-ranks | expert_parallel=2 needs 2 GPUs, and here is 1 |' in gpu.page(bench)


@pytest.mark.slow
def test_mixtures_of_experts_on_a_cpu(tmp_path):
    only = '^(compiled )?experts (eager|compiled|on two ranks|none|full|selective)|^124M experts manual'
    said = run_script('benchmarks/gpu.py', '--device=cpu', f'--only={only}', '--jobs=2', f'--out={tmp_path}').stdout
    assert said.count(' ok ') == 7 and 'FAILED' not in said, said
    for mode in ('none', 'full', 'selective'):
        assert json.loads((tmp_path / f'compiled-experts-{mode}.json').read_text())['graphs'] == 2
    assert json.loads((tmp_path / 'experts-on-two-ranks.json').read_text())['said'].startswith(
        '4 ok, 0 WRONG, 0 skipped'
    )
    page = (tmp_path / 'gpu.md').read_text()
    assert '| 124M-experts-manual | ' in page[: page.index('## Where a step goes')]


@pytest.mark.slow
def test_a_tiny_model_of_transformers_learns_conversations_in_4_bits_and_8b_has_a_plain_loop_beside(tmp_path):
    only = '^hf (cpu|manual offload|lora nf4)$|^peft|^Llama 8B LoRA bf16'
    said = run_script('benchmarks/gpu.py', '--device=cpu', f'--only={only}', '--jobs=2', f'--out={tmp_path}').stdout
    assert said.count(' ok ') == 7 and 'FAILED' not in said, said  # with both folders
    for name in ('hf-cpu', 'hf-lora-nf4'):
        losses = json.loads((tmp_path / f'{name}.json').read_text())['losses']
        assert len(losses) == 12 and losses[-1] < losses[0]
    page = (tmp_path / 'gpu.md').read_text()
    assert '| hf-manual-offload | hf-cpu | ' in page and 'losses differ' not in page
    speed = page[: page.index('## Where a step goes')]
    assert '| peft | ' in speed and '| Llama-8B-LoRA-bf16 | ' in speed


def test_tokens_per_second_by_wall_clock_hold_the_gaps_between_steps_and_neither_compiling_nor_the_trace():
    rows = [{'step': step, 'tokens': 100 * step} for step in (1, 10, 20, 30)] + [{'step': 30, 'val_loss': 1.0}]
    came = {1: 60.0, 10: 70.0, 20: 75.0, 30: 99.0}  # between steps the host slept, and the meter's clock stood still
    output = [(second, f'10:00:00 step {step:2}/30 | loss 3.1000 | 9,000 tok/s\n') for step, second in came.items()]
    output.insert(3, (74.0, '10:00:00 step 19/30 | val loss 3.2\n'))
    assert gpu.wall_clock(output, rows, profiled=27) == {'wall_tokens_per_sec': 200}
    assert gpu.wall_clock(output, rows) == {'wall_tokens_per_sec': pytest.approx(1000 / 24)}
    assert gpu.wall_clock(output[:2], rows) == {}, 'between the first two compiles what the first has not'


@pytest.mark.slow
def test_the_page_has_tokens_per_second_by_wall_clock_beside_the_others(tmp_path):
    bench = Bench('cpu', tmp_path)
    keys = gpu.TINY | dict(compile=False, max_iters=5, log_interval=1, trace_step=5)
    result = bench.run(bench.train('tiny ddp', 'train_ddp.py', keys), alone=True)
    assert result['step'] == 3 and result['launches'] > 0, 'of the steps before the two that are in the trace'
    assert result['wall_tokens_per_sec'] > 0 and 'step 5/5' in (tmp_path / 'tiny-ddp.log').read_text()
    rows = [
        line.split(' | ') for line in gpu.page(bench).splitlines() if line.startswith(('| run | tok', '| tiny-ddp'))
    ]
    assert rows[0][2] == 'by wall clock' and float(rows[1][2]) == pytest.approx(result['wall_tokens_per_sec'], rel=1e-3)


@pytest.mark.slow
def test_page_locked_memory_stands_beside_what_the_plan_says(tmp_path):
    bench = Bench('cpu', tmp_path)
    keys = gpu.TINY | dict(compile=False, max_iters=1, cpu_offload='optimizer')
    result = bench.run(bench.train('offload optimizer torch', 'train_fsdp.py', keys, inside='page locked'), alone=True)
    assert 'error' not in result and len(result['losses']) == 1 and 'page_locked_gb' not in result, 'nothing on a CPU'
    assert bench.run(bench.train('x', 'train_fsdp.py', keys | {'n_head': 3}, inside='page locked'))['error']
    predicted = bench.run(bench.predict('offload optimizer', 'train_fsdp.py', keys))
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
    bench = Bench('cpu', tmp_path)
    packed = gpu.write_documents(tmp_path / 'data', 500)
    keys = bench.size('124M') | packed | dict(compile=False, max_iters=3, log_interval=1)
    assert 'error' not in bench.run(bench.train('124M documents ddp', 'train_ddp.py', keys), alone=True)
    assert '| 124M-documents-ddp | ' in gpu.page(bench)
    assert 'windows=documents: ' in (tmp_path / '124M-documents-ddp.log').read_text()
