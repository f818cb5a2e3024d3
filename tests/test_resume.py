"""A run that was interrupted and resumed equals one that was not, under every strategy and from one to another."""

import os
import re
import shutil

import pytest
from faults import send
from launch import TINY_MODEL, TINY_RUN, Job, run_forked, run_many
from outputs import as_of_step, assert_same_weights, checkpoint_of, column, metrics
from precision import assert_same_run
from short import slow_but

from runtime import checkpoint

# Every row is compared, so every step is logged.
RUN = [
    *TINY_MODEL,
    *TINY_RUN,
    '--global_batch_size=12',
    '--dtype=float32',
    '--lr_decay_iters=20',
    '--checkpoint_interval=10',
]


NOISY = ('--dropout=0.1', '--dtype=float16')  # noise and the loss scale must also go on where they stopped


SHORT = ['ddp', 'fsdp', 'manual_noisy']  # the runs of the short suite


def arguments(data_dir, out_dir, *more):
    return [*RUN, '--dataset=tiny', f'--data_dir={data_dir}', f'--out_dir={out_dir}', *more]


STRATEGIES = {
    'ddp': ('train_ddp.py',),
    'fsdp': ('train_fsdp.py',),
    'manual': ('train_fsdp.py', '--fsdp_impl=manual'),
}


def case(strategy, data_dir, out_dir, *more):
    script, *options = STRATEGIES[strategy]
    keys = arguments(data_dir, out_dir, '--max_iters=20', *options, *more)
    return {'name': out_dir.name, 'script': script, 'arguments': keys}


@pytest.fixture(scope='module')
def runs(tmp_path_factory, data_dir, has_slow_tests):
    """Uninterrupted runs of 20 steps with a checkpoint at 10: DDP and FSDP on two ranks, plain and with NOISY."""
    folder = tmp_path_factory.mktemp('runs')
    cases = []
    for strategy in STRATEGIES:
        for suffix, more in (('', ()), ('_noisy', NOISY)):
            if has_slow_tests or f'{strategy}{suffix}' in SHORT:
                cases.append(case(strategy, data_dir, folder / f'{strategy}{suffix}', *more))
    run_many(cases, 2, folder)
    return folder


def interrupted_copy(runs, name, copy):
    """A copy of a finished run as a kill at step 17 would have left it, when step 10 had been saved."""
    as_of_step(10, runs / name, runs / copy, rows=17)


def test_resumed_on_the_same_ranks_is_bit_equal_and_on_others_within_rounding(runs, data_dir, has_slow_tests):
    if has_slow_tests:
        repeated = {f'{strategy}{suffix}': strategy for strategy in STRATEGIES for suffix in ('', '_noisy')}
        moved = {
            2: ['ddp fsdp', 'fsdp ddp', 'fsdp manual', 'manual ddp'],
            1: ['ddp fsdp', 'fsdp manual', 'manual fsdp'],
            3: ['manual fsdp', 'ddp manual'],
        }
    else:
        repeated = {'fsdp': 'fsdp', 'manual_noisy': 'manual'}
        moved = {2: ['fsdp ddp'], 1: ['ddp fsdp'], 3: ['ddp manual']}
    cases = {1: [], 2: [], 3: []}
    for saved, strategy in repeated.items():
        interrupted_copy(runs, saved, f'{saved}_again')
        more = NOISY if 'noisy' in saved else ()
        cases[2].append(case(strategy, data_dir, runs / f'{saved}_again', *more))
    others = {}  # from one strategy to another, on 2, 1 and 3 ranks
    for nproc, pairs in moved.items():
        for saved, strategy in map(str.split, pairs):
            name = f'{saved}_to_{strategy}_{nproc}'
            interrupted_copy(runs, saved, name)
            others[name] = saved
            cases[nproc].append(case(strategy, data_dir, runs / name, *(['--batch_size=1'] if nproc == 3 else [])))
    for nproc, of_ranks in cases.items():
        run_many(of_ranks, nproc, runs)

    for saved in repeated:
        assert_same_weights(runs / f'{saved}_again', runs / saved, 20)
        assert column(runs / f'{saved}_again', 'loss') == column(runs / saved, 'loss')  # each step has one row
        assert column(runs / f'{saved}_again', 'step') == list(range(1, 21))
        again, whole = (checkpoint.read_state(checkpoint_of(runs / name, 20)) for name in (f'{saved}_again', saved))
        assert again['scaler'] == whole['scaler'] and bool(whole['scaler']) == ('noisy' in saved)
    for name, saved in others.items():
        assert_same_run(column(runs / name, 'loss'), column(runs / saved, 'loss'), name)


@pytest.mark.parametrize('strategies', [['ddp'], pytest.param(['fsdp', 'manual'], marks=pytest.mark.slow)])
def test_1_and_4_ranks_resume_bit_equal_and_4_go_on_with_what_1_saved(runs, data_dir, strategies):
    """Together with the tests above, which have 2 ranks, this is the matrix of 1, 2 and 4 ranks, for every strategy. On
    4 ranks DDP adds up as its buckets are filled, so a resumed run has to fill them in the same order."""
    for nproc, more in ((1, ()), (4, ('--batch_size=1',))):
        cases, runs_of = [], {}
        for strategy in strategies:
            whole, halves, other = (runs / f'{strategy}_{kind}_{nproc}' for kind in ('whole', 'halves', 'from_1'))
            runs_of[strategy] = whole, halves, other
            begun = case(strategy, data_dir, halves, *more)
            begun |= {'name': f'{halves.name} begun', 'arguments': [*begun['arguments'], '--max_iters=10']}
            cases += [case(strategy, data_dir, whole, *more), begun, case(strategy, data_dir, halves, *more)]
            if nproc != 1:
                interrupted_copy(runs, f'{strategy}_whole_1', other.name)
                cases.append(case(strategy, data_dir, other, *more))
        run_many(cases, nproc, runs)
        for strategy, (whole, halves, other) in runs_of.items():
            assert_same_weights(halves, whole, 20)
            assert column(halves, 'loss') == column(whole, 'loss') and len(column(halves, 'loss')) == 20
            if nproc != 1:
                assert_same_run(column(other, 'loss'), column(runs / f'{strategy}_whole_1', 'loss'), strategy)


def test_a_number_of_ranks_that_does_not_fit_is_refused_and_touches_nothing(runs, data_dir):
    interrupted_copy(runs, 'ddp', 'indivisible')
    before = (runs / 'indivisible' / 'metrics.jsonl').read_bytes()
    keys = arguments(data_dir, runs / 'indivisible', '--max_iters=20')
    job = Job('train_ddp.py', keys, 4, runs / 'indivisible.log')  # 12 sequences, by 2 on each of 4 ranks
    codes = job.wait()
    lines = re.findall(r'^\[\d\] error: (.*)', job.text(), re.MULTILINE)
    assert 0 not in codes and lines and all('global_batch_size' in line for line in lines), job.text()
    assert (runs / 'indivisible' / 'metrics.jsonl').read_bytes() == before
    assert os.listdir(runs / 'indivisible' / 'checkpoints') == ['step_00000010']


def test_a_run_killed_with_sigkill_goes_on_with_the_same_command(runs, data_dir):
    out_dir = runs / 'killed'
    command = case('manual', data_dir, out_dir, *NOISY)
    hang = {'kind': 'hang', 'rank': 0, 'step': 3 * 15}  # 3 micro-steps per step; it cannot end before it is killed
    job = Job(command['script'], command['arguments'], 2, runs / 'killed.log', fault=hang)
    job.wait_for((out_dir / 'checkpoints' / 'step_00000010').exists)
    send(job.pid)  # the launcher: its ranks end with it
    job.wait()
    said = run_forked(command['script'], *command['arguments'], nproc=2, log=runs / 'again.log')
    assert 'resuming' in said
    assert_same_weights(out_dir, runs / 'manual_noisy', 20)
    assert column(out_dir, 'step') == list(range(1, 21))
    again, whole = (checkpoint.read_state(checkpoint_of(path, 20)) for path in (out_dir, runs / 'manual_noisy'))
    assert again['scaler'] == whole['scaler']


def test_a_finished_run_says_so_and_a_larger_max_iters_continues_it(runs, data_dir):
    keys = arguments(data_dir, runs / 'ddp', '--max_iters=20', '--batch_size=6')
    assert 'done' in run_forked('train_ddp.py', *keys, log=runs / 'done.log') and len(metrics(runs / 'ddp')) == 20
    shutil.copytree(runs / 'ddp', runs / 'longer')
    keys = arguments(data_dir, runs / 'longer', '--max_iters=22', '--batch_size=6')
    said = run_forked('train_ddp.py', *keys, log=runs / 'longer.log')
    assert re.search('step 20: .*max_iters 20 -> 22', said)
    assert column(runs / 'longer', 'step') == list(range(1, 23))
    assert (runs / 'longer' / 'DONE').read_text().strip() == '22'


@pytest.mark.parametrize(
    'script, more',
    slow_but(['train_ddp.py'], [('train_ddp.py', ()), ('train_diloco.py', ('--num_replicas=1', '--inner_steps=1'))]),
)
def test_a_run_goes_on_in_float16_that_had_no_loss_scale_so_far(runs, data_dir, script, more):
    out_dir = runs / f'float16_{script}'
    shutil.copytree(runs / 'ddp', out_dir)
    keys = arguments(data_dir, out_dir, '--max_iters=22', '--batch_size=6', '--dtype=float16', *more)
    assert 'dtype float32 -> float16' in run_forked(script, *keys, log=runs / 'float16.log')
    assert column(out_dir, 'step') == list(range(1, 23))
    assert checkpoint.read_state(checkpoint.choose(str(out_dir)))['scaler']['scale'] > 0


def test_keeps_the_last_checkpoints_and_always_one_at_max_iters(runs):
    assert sorted(os.listdir(runs / 'ddp' / 'checkpoints')) == ['step_00000010', 'step_00000020']


@pytest.mark.slow
def test_a_file_named_stop_ends_a_run_on_all_ranks_with_nothing_lost(runs, data_dir):
    """The same command goes on where the run stopped, and ends with the weights of a run that was never stopped."""
    out_dir = runs / 'stopped'
    script, *options = STRATEGIES['manual']
    keys = arguments(data_dir, out_dir, '--max_iters=20', *options)
    out_dir.mkdir()
    (out_dir / 'STOP').touch()  # before the first step
    first = run_forked(script, *keys, nproc=2, log=runs / 'first.log')
    assert int((out_dir / 'PREEMPTED').read_text()) == 0 and 'stopped as asked (' in first
    assert not (out_dir / 'STOP').exists() and not (out_dir / 'DONE').exists()
    second = run_forked(script, *keys, nproc=2, log=runs / 'second.log')
    assert 'starting from scratch' in second and (out_dir / 'DONE').exists()
    assert not (out_dir / 'PREEMPTED').exists()
    assert_same_weights(out_dir, runs / 'manual', 20)


def test_a_run_without_a_global_batch_goes_on_with_other_ranks(data_dir, tmp_path):
    out, whole, log = tmp_path / 'out', tmp_path / 'whole', tmp_path / 'log'
    keys = ['--global_batch_size=None', '--max_iters=6', '--checkpoint_interval=3']
    run_forked('train_fsdp.py', *arguments(data_dir, out, *keys, '--max_iters=3'), nproc=3, log=log)
    run_forked('train_ddp.py', *arguments(data_dir, out, *keys), log=log)
    run_forked('train_ddp.py', *arguments(data_dir, whole, *keys, '--global_batch_size=6'), log=log)
    assert column(out, 'tokens') == column(whole, 'tokens') == [step * 6 * 32 for step in range(1, 7)]
    assert_same_run(column(out, 'loss'), column(whole, 'loss'))
