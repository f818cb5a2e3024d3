"""tests/faults.py does to runs of real processes what clusters do to runs: what is lost then, and what is printed?"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import faults
import pytest
import storm
import torch
import torch.distributed as dist
from launch import TINY_EXPERTS, TINY_SYNTHETIC, Job, join_all, run_function, start_function, write_output_to
from outputs import (
    assert_same_rows,
    assert_same_weights,
    checkpoint_of,
    complete,
    last_step,
    metrics,
    names_of_checkpoints,
    tensors_of,
    weights_of,
)
from short import slow_but

from runtime import checkpoint, checkpoint_saver, health

SCRIPTS = {
    'ddp': ('train_ddp.py', []),
    'fsdp': ('train_fsdp.py', []),
    'manual': ('train_fsdp.py', ['--fsdp_impl=manual']),
    'experts': (
        'train_parallel.py',
        ['--fsdp_impl=manual', *TINY_EXPERTS, '--expert_parallel=2', '--router_bias=0.01'],
    ),
    'diloco': ('train_diloco.py', ['--num_replicas=1', '--inner_steps=5']),
}
RUN = [*TINY_SYNTHETIC, '--checkpoint_interval=5', '--eval_interval=0', '--eval_sequences=8']


def start(strategy, out_dir, *more, nproc=2, **options):
    """Start a job in the background. Its output goes to out_dir.log."""
    script, keys = SCRIPTS[strategy]
    return Job(script, [*RUN, *keys, f'--out_dir={out_dir}', *more], nproc, f'{out_dir}.log', **options)


def numbers_of(strategy, kind, **fault):
    """A fault in the numbers of rank 1. With experts it is in one that no other rank holds."""
    return {'kind': kind, 'rank': 1, 'name': 'experts.up' if strategy == 'experts' else '', **fault}


def errors_in(text):
    """{rank: its error line}. The test fails if a rank prints a traceback, or a second line."""
    assert not re.search(r'^\[\d+\] Traceback', text, re.MULTILINE), text
    found = re.findall(r'^\[(\d+)\] (error: .*)$', text, re.MULTILINE)
    assert len(dict(found)) == len(found), text
    return {int(rank): line for rank, line in found}


# --- hangs: started first, since they mostly wait, and looked at last -------------------------------------------------

PATIENCE = 40  # timeout_s; a rank that makes no progress is reported after 0.8 of it


@pytest.fixture(scope='module')
def hangs(tmp_path_factory):
    """Jobs in the background whose rank 1 sleeps in Python, is frozen, or is only slow."""
    folder = tmp_path_factory.mktemp('hangs')
    run = ['--max_iters=100000', '--checkpoint_interval=0', f'--timeout_s={PATIENCE}']
    asleep = {'kind': 'hang', 'rank': 1, 'step': 8}
    stages = [*RUN, *run, '--n_layer=2', '--tensor_parallel=2', f'--out_dir={folder}/stages']  # 2 micro-steps a step
    shares = [*RUN, *run, '--context_parallel=2', f'--out_dir={folder}/shares']
    # Rank 0 waits 3 x 11.5 s for it: longer than the 32 s after which a rank is looked at, shorter than timeout_s
    slow = {'kind': 'slow', 'rank': 1, 'step': 10, 'count': 3, 'seconds': 11.5}
    jobs = {
        'asleep': start('ddp', folder / 'asleep', *run, fault=asleep, torchrun=True),
        'frozen': start('manual', folder / 'frozen', *run, torchrun=True),
        'shares': Job('train_parallel.py', shares, 4, folder / 'shares.log', {**asleep, 'rank': 3}),
        'stages': Job('train_pipeline.py', stages, 4, folder / 'stages.log', {**asleep, 'rank': 3, 'step': 16}),
        # In the second layer of step 8, when it has tokens of the other rank, which waits for their results
        'exchange': start('experts', folder / 'exchange', *run, fault={**asleep, 'kind': 'stuck', 'step': 7 * 3 + 2}),
        'slow': start('ddp', folder / 'slow', *run[1:], '--max_iters=8', '--global_batch_size=12', fault=slow),
    }
    jobs['frozen'].wait_for(lambda: last_step(folder / 'frozen') >= 5)
    ranks = faults.find_ranks(str(folder / 'frozen'))
    assert ranks.keys() == {0, 1, 'torchrun'}
    command = [sys.executable, faults.__file__, 'signal', folder / 'frozen', '--whom=1', '--name=SIGSTOP']
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert said == f'SIGSTOP to 1, process {ranks[1]}\n'
    jobs['frozen'].frozen_at = time.monotonic()
    yield jobs
    for job in jobs.values():
        job.end()


@pytest.fixture(autouse=True, scope='module')
def begin_early(request):
    """Start those jobs first if any of their tests is to run, so that other tests run while they wait."""
    if any('hangs' in item.fixturenames for item in request.session.items):
        request.getfixturevalue('hangs')


# --- kills ------------------------------------------------------------------------------------------------------------


def check_figures(figures, kills):
    assert figures['kills'] == kills
    assert figures['runs finished, bit-equal'] >= 2
    assert figures['resumed from the newest checkpoint'] > 0
    assert figures['most steps repeated'] <= 2 * storm.INTERVAL
    assert figures['ranks left running'] == 0


@pytest.mark.slow
def test_killed_again_and_again_a_run_loses_nothing(tmp_path):
    """storm() kills each run at chosen and at random moments, and compares it with one that was never killed."""
    check_figures(storm.storm(tmp_path, kills=8, seed=3), 8)


@pytest.mark.slow
def test_killed_a_hundred_times_a_run_loses_nothing(tmp_path):
    figures = storm.storm(tmp_path, kills=110)
    print(figures)
    check_figures(figures, 110)
    assert all(figures[f'kills: {kind}'] >= 5 for kind in (*storm.MOMENTS, *storm.VICTIMS))


def test_a_rank_that_dies_with_tokens_of_another_one_ends_both(tmp_path):
    """It kills itself between dispatch and combine, when the other rank waits for combine."""
    job = start('experts', tmp_path / 'run', '--max_iters=30', fault={'kind': 'die', 'rank': 1, 'step': 7 * 3 + 2})
    assert job.wait() == [1, -signal.SIGKILL], job.text()
    assert errors_in(job.text()) == {} and last_step(tmp_path / 'run') == 7
    assert len(re.findall(r'^\[0\] stopped because another rank stopped', job.text(), re.MULTILINE)) == 1, job.text()


@pytest.mark.slow
def test_ranks_end_with_a_torchrun_that_is_killed_while_they_start(tmp_path):
    """They import torch for seconds, in which they hear of nothing. The second job is killed half a second later."""
    jobs = [start('ddp', tmp_path / f'run_{n}', '--max_iters=100000', torchrun=True) for n in range(2)]
    ranks = []
    for pause, job in zip((0, 0.5), jobs, strict=True):
        job.wait_for(lambda: len(job.ranks()) == 2)  # noqa: B023
        ranks += job.ranks()
        time.sleep(pause)
        faults.send(job.pid)
    try:
        faults.wait_until(lambda: not any(map(faults.is_alive, ranks)), 120, jobs[1].text)
    finally:
        for pid in ranks:
            faults.send(pid)
        for job in jobs:
            job.wait()


@pytest.mark.slow
def test_a_run_that_always_fails_before_its_next_checkpoint_is_not_started_for_ever(tmp_path):
    out_dir = tmp_path / 'run'
    keys = ['--max_iters=20', '--max_failures=2', '--max_bad_steps=0']
    fault = {'kind': 'nan', 'rank': 0, 'step': 8}
    assert start('ddp', out_dir, *keys, nproc=1, fault=fault).wait() == [1]
    assert complete(out_dir) == [5]
    fault['step'] = 2  # of the 7 steps that this process takes
    for _ in range(2):
        job = start('ddp', out_dir, *keys, nproc=1, fault=fault)
        assert job.wait() == [1] and 'gradient not finite' in errors_in(job.text())[0]
    job = start('ddp', out_dir, *keys, nproc=1)
    assert job.wait() == [1]
    line = errors_in(job.text())[0]
    assert re.search('2 starts .* step 5 .*--max_failures', line)
    assert re.search('gradient .*rank 0 .*step 7', line)
    assert start('ddp', out_dir, *keys[:1], '--max_failures=0', nproc=1).wait() == [0]


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    """A run of 15 steps with all its checkpoints."""
    out_dir = tmp_path_factory.mktemp('finished') / 'run'
    job = start('manual', out_dir, '--max_iters=15', '--keep_checkpoints=9')
    assert job.wait() == [0, 0], job.text()
    assert complete(out_dir) == [5, 10, 15]
    return out_dir


@pytest.mark.slow
@pytest.mark.parametrize('how', faults.DAMAGE)
def test_a_run_goes_on_from_the_checkpoint_before_the_damaged_one(finished, tmp_path, how):
    out_dir = tmp_path / 'run'
    shutil.copytree(finished, out_dir)
    name = faults.damage(checkpoint_of(out_dir, 15), how)
    job = start('manual', out_dir, '--max_iters=15', '--keep_checkpoints=9')
    assert job.wait() == [0, 0], job.text()
    assert re.search(rf'WARNING: .*step_00000015 .*damaged: .*{re.escape(name)} ', job.text())
    assert re.search(r'step_00000015 .*step_00000015.damaged; .*step_00000010', job.text())
    assert re.search(r'resuming .*step_00000010 at step 10', job.text())
    assert 'step_00000015.damaged' in names_of_checkpoints(out_dir)
    assert_same_weights(out_dir, finished, 15)
    assert_same_rows(out_dir, finished)


@pytest.mark.slow
def test_a_run_without_any_intact_checkpoint_stops_and_starts_nothing(finished, tmp_path):
    out_dir = tmp_path / 'run'
    shutil.copytree(finished, out_dir)
    for step in (5, 10, 15):
        faults.damage(checkpoint_of(out_dir, step), 'flip')
    job = start('manual', out_dir, '--max_iters=15')
    assert job.wait() == [1, 1]
    assert all('all checkpoints in' in line for line in errors_in(job.text()).values())
    assert 0 in errors_in(job.text()) and 'step 1/' not in job.text()
    assert complete(out_dir) == [5, 10, 15] and len(metrics(out_dir)) == 15


# --- disks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def may_mount(tmp_path):
    (tmp_path / 'probe').mkdir()
    if subprocess.run(['mount', '-t', 'tmpfs', 'none', tmp_path / 'probe'], capture_output=True).returncode != 0:
        pytest.skip('mounting a file system is not permitted here')
    faults.undo(tmp_path / 'probe')


@contextlib.contextmanager
def small_disk(folder):
    faults.mount_small_disk(folder)
    try:
        yield
    finally:
        faults.undo(folder)


def all_are_intact(out_dir):
    return all(checkpoint.find_damage(checkpoint_of(out_dir, step), print) is None for step in complete(out_dir))


@pytest.mark.parametrize('more', slow_but([[]], [[], ['--async_checkpoint']]))
def test_a_full_disk_ends_the_run_in_one_line_and_spares_the_old_checkpoints(may_mount, tmp_path, more):
    """Nine checkpoints of 0.6 MB do not fit on 4 MB."""
    with small_disk(tmp_path / 'run'):
        job = start('ddp', tmp_path / 'run', '--max_iters=60', '--keep_checkpoints=9', *more)
        assert job.wait() == [1, 1], job.text()
        lines = errors_in(job.text())
        assert lines.keys() == {0, 1}, job.text()
        assert all(re.search('No space left on device', line) for line in lines.values())
        assert len(complete(tmp_path / 'run')) >= 3 and all_are_intact(tmp_path / 'run')
        assert not [name for name in names_of_checkpoints(tmp_path / 'run') if name.endswith('.tmp')]


@pytest.mark.slow
@pytest.mark.parametrize('more', [[], ['--async_checkpoint']])
def test_with_save_errors_continue_the_run_trains_on_and_ends_with_what_is_missing(may_mount, tmp_path, more):
    with small_disk(tmp_path / 'run'):
        keys = ['--max_iters=60', '--keep_checkpoints=9', '--save_errors=continue', *more]
        job = start('manual', tmp_path / 'run', *keys)
        assert job.wait() == [1, 1], job.text()
        assert 'step 60/60' in job.text() and metrics(tmp_path / 'run')[-1]['step'] == 60
        assert 'save_errors=continue' in job.text()
        lines = errors_in(job.text())
        assert lines.keys() == {0, 1} and all('step_00000060' in line for line in lines.values()), job.text()
        assert len(complete(tmp_path / 'run')) >= 3 and all_are_intact(tmp_path / 'run')
        assert not (tmp_path / 'run' / 'DONE').exists()


@pytest.mark.slow
def test_a_disk_that_somebody_else_fills_does_not_end_a_run_that_is_to_go_on(may_mount, tmp_path):
    """In the middle of the run there is not one byte left, so its log cannot be written either."""
    out_dir = tmp_path / 'run'
    with small_disk(out_dir):
        keys = ['--max_iters=400', '--save_errors=continue', '--checkpoint_interval=50']
        job = start('ddp', out_dir, *keys)
        job.wait_for(lambda: complete(out_dir))
        with open(out_dir / 'balloon', 'wb', buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        time.sleep(0.5)
        (out_dir / 'balloon').unlink()
        assert job.wait() == [0, 0], job.text()
        assert complete(out_dir)[-1] == 400 and all_are_intact(out_dir)


@pytest.mark.slow
def test_a_directory_that_becomes_read_only_is_said_and_costs_no_older_checkpoint(may_mount, tmp_path):
    for save_errors in ('stop', 'continue'):
        out_dir = tmp_path / save_errors
        job = start('ddp', out_dir, '--max_iters=100', f'--save_errors={save_errors}')
        job.wait_for(lambda: complete(out_dir))  # noqa: B023
        faults.make_read_only(out_dir / 'checkpoints')
        try:
            saved = complete(out_dir)
            assert job.wait() == [1, 1], job.text()
            lines = errors_in(job.text())
            # A rank may end before the other one knows why, which then says that another rank has stopped.
            assert lines and all('Read-only file system' in line for line in lines.values())
            assert ('step 100/100' in job.text()) == (save_errors == 'continue')
            assert complete(out_dir) == saved and all_are_intact(out_dir)
        finally:
            faults.undo(out_dir / 'checkpoints')


def test_a_read_only_out_dir_is_found_before_the_first_step(may_mount, tmp_path):
    (tmp_path / 'run').mkdir()
    faults.make_read_only(tmp_path / 'run')
    try:
        job = start('ddp', tmp_path / 'run', '--max_iters=3')
        assert 1 in job.wait()  # the rank that finds it first; the other may be told to end before it looks
        lines = errors_in(job.text())
        assert lines and all('out_dir=' in line for line in lines.values()), job.text()
        assert 'starting from' not in job.text()
    finally:
        faults.undo(tmp_path / 'run')


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'strategy, ahead',
    slow_but(['fsdp', 'experts', 'diloco'], [*((strategy, False) for strategy in SCRIPTS), ('manual', True)]),
)
def test_one_nan_in_one_gradient_element_of_one_rank_costs_one_step_on_all(tmp_path, strategy, ahead):
    """The step is left out as if it had not been there: the state after it equals the state before it."""
    out_dir = tmp_path / 'run'
    fault = numbers_of(strategy, 'nan', step=7, ahead=ahead)
    keys = ['--max_iters=10', '--checkpoint_interval=1', '--keep_checkpoints=99']
    keys += ['--checksum_interval=1'] if strategy == 'ddp' else []  # every rank has the same weights
    job = start(strategy, out_dir, *keys, fault=fault)
    assert job.wait() == [0, 0], job.text()
    ranks = 'rank 1' if strategy == 'ddp' else r'(rank 1|ranks 0, 1)'
    assert re.search(rf'WARNING: gradient .*{ranks} .*step 7: .*skipped', job.text()), job.text()
    for step in range(1, 11):
        for name, weight in weights_of(out_dir, step).items():
            assert weight.isfinite().all(), (name, step)
    before, after, later = (weights_of(out_dir, step) for step in (6, 7, 8))
    if strategy != 'diloco':  # whose checkpoints have the outer parameters, which change once per round
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert not all(torch.equal(after[name], later[name]) for name in before)
    if strategy == 'experts':  # the balance of experts stands still in that step, too, and then goes on
        balance = [name for name in before if name.endswith(('router.load', 'router.bias'))]
        assert len(balance) == 2 * 3 and not any(torch.equal(after[name], later[name]) for name in balance)
    assert [row.get('skipped', 0) for row in metrics(out_dir)] == [0] * 6 + [1] * 4


@pytest.mark.slow
@pytest.mark.parametrize('strategy', ['fsdp', 'ddp', 'experts'])
def test_a_host_that_runs_ahead_leaves_out_the_same_steps(tmp_path, strategy):
    """As on a GPU, the optimizer skips by itself, and the host reads that one step later."""
    for name, ahead in (('waits', False), ('ahead', True)):
        fault = numbers_of(strategy, 'nan', rank=0, step=8, count=2, ahead=ahead)
        job = start(strategy, tmp_path / name, '--max_iters=10', '--log_interval=4', '--eval_interval=5', fault=fault)
        assert job.wait() == [0, 0], job.text()
        assert len(re.findall(r'step \d+: .*skipped', job.text())) == 2
    assert_same_rows(tmp_path / 'waits', tmp_path / 'ahead', ('step', 'loss', 'grad_norm', 'val_loss', 'skipped'))
    tensors = [tensors_of(checkpoint_of(tmp_path / name, 10)) for name in ('waits', 'ahead')]
    assert tensors[0].keys() == tensors[1].keys() and any(key.startswith('optim.') for key in tensors[0])
    assert all(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[0])


@pytest.mark.parametrize('more, ranks', slow_but([''], [('', 2), ('experts', 4)]))
def test_a_nan_in_one_of_two_replicas_is_said_and_reaches_neither_the_other_nor_the_outer_parameters(
    tmp_path, more, ranks
):
    keys = ['--max_iters=20', '--num_replicas=2', *([*TINY_EXPERTS, '--expert_parallel=2'] if more else [])]
    fault = numbers_of(more, 'nan', rank=ranks - 1, step=7)
    job = start('diloco', tmp_path / 'run', *keys, nproc=ranks, fault=fault)
    assert job.wait() == [0] * ranks, job.text()
    assert all(weight.isfinite().all() for weight in weights_of(tmp_path / 'run', 20).values())
    state = checkpoint.read_state(checkpoint_of(tmp_path / 'run', 20))
    assert [of_replica['skipped'] for of_replica in state['numbers_of_replicas']] == [0, 1]
    assert re.search(f'gradient .*{"ranks 2, 3" if more else "rank 1"} .*step 7', job.text())


@pytest.mark.parametrize('strategy', slow_but(['ddp'], ['ddp', 'manual', 'experts']))
def test_too_many_bad_steps_in_a_row_end_the_run_and_name_the_last_good_checkpoint(tmp_path, strategy):
    fault = numbers_of(strategy, 'nan', step=7, count=99)
    job = start(strategy, tmp_path / 'run', '--max_iters=30', '--max_bad_steps=2', fault=fault)
    assert job.wait() == [1, 1], job.text()
    lines = errors_in(job.text())
    assert lines.keys() == {0, 1}, job.text()
    for line in lines.values():
        assert re.search(r'step 9\b.*3 .*max_bad_steps=2', line)
        assert checkpoint_of(tmp_path / 'run', 5) in line
    assert complete(tmp_path / 'run') == [5]


@pytest.mark.parametrize('strategy', slow_but(['ddp'], ['ddp', 'manual', 'experts']))
def test_weights_that_are_not_finite_are_never_saved(tmp_path, strategy):
    fault = numbers_of(strategy, 'weight', step=10, value=float('nan'))  # after its forward, before its save
    job = start(strategy, tmp_path / 'run', '--max_iters=30', fault=fault)
    assert job.wait() == [1, 1], job.text()
    lines = errors_in(job.text())
    assert lines.keys() == {0, 1}, job.text()
    for line in lines.values():
        assert re.search(r'error: model\.\S+ .*not finite .*rank 1 .*step 10\b', line)
        assert checkpoint_of(tmp_path / 'run', 5) in line
    assert complete(tmp_path / 'run') == [5]
    assert names_of_checkpoints(tmp_path / 'run') == ['step_00000005']


def test_a_weight_that_changes_on_one_rank_is_found_by_checksums(tmp_path):
    fault = {'kind': 'weight', 'rank': 1, 'step': 7}
    job = start('ddp', tmp_path / 'run', '--max_iters=30', '--checksum_interval=4', fault=fault)
    assert job.wait() == [1, 1], job.text()
    lines = errors_in(job.text())
    assert lines.keys() == {0, 1}
    for line in lines.values():
        assert re.search(r'ranks 0, 1 .*step 8\b', line)  # with two ranks nobody knows which is right
        assert re.search(r'\(\S+ first\)', line) and checkpoint_of(tmp_path / 'run', 5) in line


def compare_weights():
    """What ranks are told if rank 2 has a wrong bit in the second parameter."""
    weights = {'embed': torch.zeros(3), 'head': torch.zeros(3)}
    health.refuse_different_weights(weights.items(), 6, lambda: 'step 5')  # still the same
    if dist.get_rank() == 2:
        weights['head'][1] = 1e-45
    with pytest.raises(ValueError) as error:
        health.refuse_different_weights(weights.items(), 7, lambda: 'step 5')
    return str(error.value)


def test_of_three_ranks_the_one_with_other_weights_is_named():
    for message in run_function(3, compare_weights):
        assert re.search(r'rank 2 .*step 7 .*\bhead\b', message)
        assert message.endswith(' step 5')


@pytest.mark.slow
def test_replicas_go_on_with_their_own_loss_scale_and_count_of_bad_steps(tmp_path):
    """In fp16, where a weight of replica 1 is infinite from step 5 on, until the replicas meet."""
    keys = ['--num_replicas=2', '--inner_steps=10', '--max_iters=10', '--dtype=float16', '--max_bad_steps=20']
    keys += ['--checkpoint_interval=4', '--keep_checkpoints=9', '--eval_sequences=0']
    fault = {'kind': 'weight', 'rank': 1, 'step': 5, 'value': 1e5}
    job = start('diloco', tmp_path / 'whole', *keys, fault=fault)
    assert job.wait() == [0, 0], job.text()
    shutil.copytree(tmp_path / 'whole', tmp_path / 'resumed')
    shutil.rmtree(checkpoint_of(tmp_path / 'resumed', 10))
    job = start('diloco', tmp_path / 'resumed', *keys)
    assert job.wait() == [0, 0] and 'at step 8\n' in job.text(), job.text()
    whole, resumed = (checkpoint.read_state(checkpoint_of(tmp_path / name, 10)) for name in ('whole', 'resumed'))
    assert [of_replica['skipped'] for of_replica in whole['numbers_of_replicas']] == [0, 5]
    scales = [of_replica['scale'] for of_replica in whole['scalers']]
    assert scales[1] < scales[0]
    for key in ('numbers_of_replicas', 'scalers'):
        assert resumed[key] == whole[key], key


def judge(numbers, losses, first_step=1):
    """For each loss, the mean over 10 targets, whether it is good enough for a step."""
    norm = torch.tensor(1.0)
    sums = [torch.tensor(10 * loss) for loss in losses]
    return [not numbers.must_skip(step, one, 10, norm, False) for step, one in enumerate(sums, first_step)]


def test_a_loss_far_above_the_last_128_is_a_spike_and_does_not_count_as_normal(one_rank):
    generator = torch.Generator().manual_seed(0)
    noise = (3 + 0.1 * torch.randn(400, generator=generator)).tolist()
    said = []
    numbers = health.Numbers(10, True, said.append, lambda: 'none')
    assert judge(numbers, [50.0, *noise[:127]]) == [True] * 128  # nothing is a spike before there are 128 losses
    assert all(judge(numbers, noise[127:255]))  # the 50 has left the window
    mean, sigma = sum(noise[127:255]) / 128, 0.1
    assert judge(numbers, [mean + 4 * sigma, mean + 8 * sigma, mean + 4 * sigma]) == [True, False, True]
    assert numbers.skipped == 1 and len(said) == 1
    assert re.search(r'WARNING: loss \S+ .* \S+ \+ 6 x \S+ .*128 steps .*step 2: .*skipped', said[0])
    assert judge(numbers, [0.1]) == [True]  # low is no spike
    assert judge(numbers, [float('nan'), float('inf')]) == [False, False]
    assert len(numbers.losses) == 128 and max(numbers.losses) < mean + 5 * sigma  # the spike of 8 sigma is not there


def test_the_spike_guard_decides_the_same_after_a_resume(one_rank):
    import json

    generator = torch.Generator().manual_seed(1)
    losses = (3 + 0.1 * torch.randn(300, generator=generator)).tolist()
    for step in (150, 200, 201, 250):
        losses[step] = 9.0
    whole = health.Numbers(10, True, lambda line: None, lambda: 'none')
    decisions = judge(whole, losses)
    assert [step for step, good in enumerate(decisions) if not good] == [150, 200, 201, 250]
    first = health.Numbers(10, True, lambda line: None, lambda: 'none')
    begun = judge(first, losses[:201])
    second = health.Numbers(10, True, lambda line: None, lambda: 'none', state=json.loads(json.dumps(first.state())))
    assert second.in_a_row == 1
    assert begun + judge(second, losses[201:], 202) == decisions
    assert second.state() == whole.state()


def test_the_spike_guard_begins_anew_where_other_data_begin_and_its_last_line_names_it(one_rank):
    losses = [3.0 + 0.01 * (step % 7) for step in range(150)] + [5.0 + 0.01 * (step % 7) for step in range(150)]
    assert all(judge(health.Numbers(10, True, print, lambda: 'none', changes=(100, 150)), losses))
    late = health.Numbers(10, True, lambda line: None, lambda: 'none', changes=(151,))
    assert [step for step, good in enumerate(judge(late, losses)) if not good] == [150]
    with pytest.raises(ValueError, match='11 bad steps in a row .*--loss_spike_guard=False'):
        judge(health.Numbers(10, True, lambda line: None, lambda: 'none'), losses)
    with pytest.raises(ValueError, match='10 bad steps in a row .*this step$'):
        judge(health.Numbers(9, True, lambda line: None, lambda: 'none'), [float('nan')] * 10)


def test_without_the_guard_a_spike_is_a_step_like_others(one_rank):
    numbers = health.Numbers(10, False, print, lambda: 'none')
    assert all(judge(numbers, [3.0] * 130 + [1000.0]))


def test_bad_steps_are_counted_in_a_row(one_rank):
    numbers = health.Numbers(2, False, lambda line: None, lambda: 'none')
    nan = float('nan')
    assert judge(numbers, [nan, nan, 3.0, nan, nan]) == [False, False, True, False, False]
    with pytest.raises(ValueError, match='loss .*rank 0 .*step 6.*none'):
        judge(numbers, [nan], 6)


# --- what a run leaves behind -----------------------------------------------------------------------------------------


def test_no_key_or_token_of_the_environment_is_written_anywhere(tmp_path):
    """Neither by a run that succeeds nor by one that fails."""
    names = ('HF_TOKEN', 'HUGGING_FACE_HUB_TOKEN', 'WANDB_API_KEY', 'AWS_SECRET_ACCESS_KEY', 'MY_PASSWORD')
    secrets = {name: f'marker-{number}-of-a-secret' for number, name in enumerate(names)}
    out_dir = tmp_path / 'run'
    fault = {'kind': 'nan', 'rank': 1, 'step': 7, 'count': 99}
    job = start('ddp', out_dir, '--max_iters=20', '--max_bad_steps=2', fault=fault, **secrets)
    assert job.wait() == [1, 1]
    job = start('ddp', out_dir, '--max_iters=10', **secrets)
    assert job.wait() == [0, 0], job.text()
    files = [path for path in out_dir.rglob('*') if path.is_file()]
    assert {'train.log', 'metrics.jsonl', 'state.json', '.metadata'} <= {path.name for path in files}
    for path in [*files, job.log]:
        assert b'of-a-secret' not in path.read_bytes(), path


@pytest.mark.slow
def test_two_deterministic_runs_are_bit_equal(tmp_path):
    for name in ('one', 'two'):
        job = start('fsdp', tmp_path / name, '--max_iters=10', '--deterministic', '--dropout=0.1')
        assert job.wait() == [0, 0], job.text()
    assert_same_weights(tmp_path / 'one', tmp_path / 'two', 10)
    assert_same_rows(tmp_path / 'one', tmp_path / 'two', ('step', 'loss', 'grad_norm', 'val_loss'))


def resident_mb():
    return int(re.search(r'VmRSS:\s+(\d+)', Path('/proc/self/status').read_text())[1]) / 1024


def save_and_resume(out_dir, cycles):
    """[(open files, resident MB)] of this process after each cycle of a save and a load with verification."""
    checkpoint_saver.prepare(out_dir)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))  # 1 MB; 3 MB with moments
    optimizer = torch.optim.AdamW(model.parameters())
    savers = [checkpoint_saver.Saver(out_dir, 2, async_save, lambda line: None) for async_save in (False, True)]
    seen = []
    for cycle in range(cycles):
        model(torch.ones(1, 256)).sum().backward()
        optimizer.step()
        savers[cycle % 2].save(cycle, model, optimizer, {'cycle': cycle})
        savers[cycle % 2].wait()
        path = checkpoint.choose(out_dir, 'must', lambda line: None)
        assert checkpoint.load(path, model, optimizer)['cycle'] == cycle
        seen.append((len(os.listdir('/proc/self/fd')), resident_mb()))
    return seen


def check_cycles(out_dir, cycles):
    (seen,) = run_function(1, save_and_resume, str(out_dir), cycles, timeout=max(900, 10 * cycles))
    half = seen[cycles // 2 :]
    files, memory = [files for files, _ in half], [memory for _, memory in half]
    print(f'{cycles} cycles: {seen[0]} after the first, {half[0]} after half of them, {seen[-1]} after the last')
    assert max(files) == min(files)
    assert memory[-1] - memory[0] < max(8, cycles / 50), memory  # a leak of 3 MB per cycle would be 60 MB or more


@pytest.mark.slow
def test_save_and_resume_in_one_process_need_no_more_memory_and_files_each_time(tmp_path):
    check_cycles(tmp_path, 40)


@pytest.mark.slow
def test_200_saves_and_resumes_need_no_more_memory_and_files_each_time(tmp_path):
    check_cycles(tmp_path, 200)


# --- patience ---------------------------------------------------------------------------------------------------------


def be_slow_and_then_hang(out_dir):
    """Rank 1 is slow where that is allowed, in the first step and in a save, and hangs in step 3."""
    rank = dist.get_rank()
    write_output_to(f'{out_dir}/said_{rank}', f'{out_dir}/said_{rank}')
    watchdog = health.Watchdog(out_dir, timeout_s=2)  # hence a patience of 1.6 s
    watchdog.at('forward', 1)
    time.sleep(2.4 * rank)
    dist.barrier()
    watchdog.at('data', 2)
    with watchdog.allow('checkpoint', 7200):
        time.sleep(2.4 * rank)
        dist.barrier()
    Path(out_dir, f'saved_{rank}').touch()
    watchdog.at('forward', 3)
    if rank == 0:
        watchdog.at('backward')  # and here it waits for rank 1
    time.sleep(120)


@pytest.mark.slow
def test_patience_is_longer_in_the_first_step_and_in_a_save_and_not_after_them(tmp_path):
    processes = start_function(2, tmp_path, be_slow_and_then_hang, str(tmp_path))
    assert join_all(processes, 100) == []
    said = ''.join((tmp_path / f'said_{rank}').read_text() for rank in range(2))
    assert (tmp_path / 'saved_0').exists() and (tmp_path / 'saved_1').exists(), said
    assert [process.exitcode for process in processes] == [1, 1]
    for line in errors_in(said).values():
        assert re.search(r"rank 1 .* \d+ s .*'forward' .*step 3\b", line)
    assert errors_in(said).keys() == {0, 1}


def be_stopped_at_once(out_dir):
    """Rank 1 is stopped before it has written a heartbeat."""
    rank = dist.get_rank()
    write_output_to(f'{out_dir}/said_{rank}', f'{out_dir}/said_{rank}')
    if rank == 1:
        health.Watchdog._write_heartbeats = lambda self: os.kill(os.getpid(), signal.SIGSTOP)
    watchdog = health.Watchdog(out_dir, timeout_s=2)
    watchdog.at('forward', 1)
    watchdog.at('update', 6)
    time.sleep(120)


def test_a_rank_that_was_stopped_before_its_first_heartbeat_is_named(tmp_path):
    processes = start_function(2, tmp_path, be_stopped_at_once, str(tmp_path))
    processes[0].join(100)
    assert processes[0].exitcode == 1
    assert join_all(processes, 0) == [1]
    (line,) = errors_in((tmp_path / 'said_0').read_text()).values()
    assert re.search(r"rank 1 .* \d+ s .*'start' .*step 0\b", line), line


# --- hangs: the jobs that were started first --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_that_is_slow_but_moves_is_left_alone(hangs):
    assert hangs['slow'].wait() == [0, 0], hangs['slow'].text()
    assert 'no progress' not in hangs['slow'].text()


@pytest.mark.slow
def test_a_rank_that_hangs_in_python_is_named_with_its_phase_step_and_line(hangs):
    job = hangs['asleep']
    assert job.wait() != 0
    lines = errors_in(job.text())
    assert lines.keys() == {0, 1}, job.text()
    for line in lines.values():
        assert re.search(r"rank 1 .* (3[2-9]|[4-9]\d) s .*'data' .*step [78]\b", line), line
    assert 'stack of rank 1:' in job.text() and 'time.sleep(seconds)  # injected' in job.text()
    assert not faults.find_ranks(str(job.log.with_suffix('')))


@pytest.mark.slow
@pytest.mark.parametrize(
    'name, rank, phase', [('shares', 3, 'data'), ('stages', 3, 'data'), ('exchange', 1, 'forward')]
)
def test_a_rank_that_hangs_beside_one_with_half_of_its_sequences_matrices_or_experts_is_named(hangs, name, rank, phase):
    job = hangs[name]
    assert 0 not in job.wait()
    lines = [line for line in errors_in(job.text()).values() if 'no progress' in line]
    assert lines, job.text()  # of the first that has seen it; the others may find that rank's connections closed
    for line in lines:
        assert re.search(rf"rank {rank} .* (3[2-9]|[4-9]\d) s .*'{phase}' .*step [78]\b", line), line
    if job.nproc == 2:  # with more ranks, the one that sees it first may not be one that prints stacks
        assert f'stack of rank {rank}:' in job.text() and 'time.sleep(seconds)  # injected' in job.text()


@pytest.mark.slow
def test_a_rank_whose_process_is_frozen_is_named_by_the_others_and_the_job_ends(hangs):
    """The frozen process cannot react, so torchrun kills it after 30 s."""
    job = hangs['frozen']
    assert job.wait() != 0
    lines = errors_in(job.text())
    assert lines.keys() == {0}, job.text()
    assert re.search(r"rank 1 .* (3[2-9]|[4-9]\d) s .*'\w+' .*step \d+", lines[0]), lines
    assert 'stack of rank 1:' in job.text()
    assert not faults.find_ranks(str(job.log.with_suffix('')))
