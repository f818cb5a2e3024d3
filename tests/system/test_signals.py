"""A run that is asked to stop, by any signal, on any rank and at any moment: all ranks save the same step, and no step
is lost."""

import math
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import faults
import pytest
from launch import TINY_SYNTHETIC, Job
from outputs import assert_same_weights, checkpoint_of, complete, last_step, metrics, names_of_checkpoints

from runtime import checkpoint
from system import stopping

STEPS = 100_000  # a run does not reach them before it is asked to stop
RUN = [
    *TINY_SYNTHETIC,
    '--checkpoint_interval=40',
    '--eval_interval=20',
    '--eval_sequences=160',
    '--lr_decay_iters=500',
]
SCRIPTS = {
    'ddp': ('train_ddp.py', []),
    'manual, async': ('train_fsdp.py', ['--fsdp_impl=manual', '--async_checkpoint']),
}


def start(strategy, out_dir, *more, max_iters=STEPS, **options):
    script, keys = SCRIPTS[strategy]
    return Job(script, [*RUN, *keys, f'--out_dir={out_dir}', f'--max_iters={max_iters}', *more], 2,
               f'{out_dir}.log', **options)  # fmt: skip


# --- moments: each waits for one in a running job ---------------------------------------------------------------------


def has_trained(out_dir, steps=1):
    """A condition that is true once there are so many steps more than now."""
    before = last_step(out_dir)
    return lambda: last_step(out_dir) >= before + steps


def while_starting(job, out_dir):
    job.wait_for(lambda: 'command: ' in job.text())  # the model is there, the first step is not


def in_a_step(job, out_dir):
    job.wait_for(has_trained(out_dir, 5))


def in_an_evaluation(job, out_dir):
    """Wait until the run is in an evaluation. It takes 40 batches, longer than the 19 steps before it, and the last of
    these steps has not been saved yet."""
    before = last_step(out_dir)
    job.wait_for(lambda: last_step(out_dir) > before and last_step(out_dir) % 20 == 19)
    time.sleep(0.05)


def in_a_save(job, out_dir):
    before = set(names_of_checkpoints(out_dir))
    job.wait_for(lambda: any(name.endswith('.tmp') for name in set(names_of_checkpoints(out_dir)) - before))


def ask(job, out_dir, number):
    """Send a signal to rank 1 alone, or with None make the file STOP; and then again, since people are impatient."""
    rank_1 = job.ranks()[1]
    for pause in (0, 0.005, 0.02):
        time.sleep(pause)
        if number is not None:
            faults.send(rank_1, number)
        elif pause == 0:
            Path(out_dir, 'STOP').touch()


def check_stopped(job, out_dir, reason):
    """Assert that all ranks have saved everything at one step; returns that step."""
    codes = job.wait()
    # The exit code of rank 0, which ends last, is that of a shell after a signal that means an end; after one by which
    # a scheduler asks for a checkpoint, torchrun must see no failure.
    found = re.search('stopped as asked .* got (SIGTERM|SIGHUP|SIGINT)', job.text())
    assert codes == [128 + signal.Signals[found[1]] if found else 0, 0], job.text()
    step = int(Path(out_dir, 'PREEMPTED').read_text())
    assert re.search(rf'\({reason}\): {step} of {STEPS} ', job.text()), job.text()
    if step > 0:  # at step 0 there is nothing that could be lost
        assert complete(out_dir)[-1] == step == last_step(out_dir)
        assert checkpoint.find_damage(checkpoint_of(out_dir, step), print) is None
    assert not Path(out_dir, 'STOP').exists() and not Path(out_dir, 'DONE').exists()
    assert not re.search(r'^\[\d\] ', job.text(), re.MULTILINE), job.text()  # so begins what a failing rank prints
    return step


ROUNDS = {
    'ddp': [
        (signal.SIGTERM, while_starting),
        (signal.SIGINT, in_a_step),
        (signal.SIGUSR1, in_an_evaluation),
        (signal.SIGUSR2, in_a_save),
        (None, in_an_evaluation),
        (signal.SIGINT, in_a_save),
    ],
    'manual, async': [
        (signal.SIGUSR1, while_starting),
        (signal.SIGUSR2, in_a_step),
        (signal.SIGTERM, in_an_evaluation),
        (signal.SIGINT, in_a_save),
        (None, in_a_step),
        (signal.SIGTERM, in_a_save),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize('strategy', SCRIPTS)
def test_stopped_six_times_by_one_rank_a_run_ends_as_if_it_had_not_been(tmp_path, strategy):
    out_dir, steps = tmp_path / 'run', [0]
    for number, moment in ROUNDS[strategy]:
        job = start(strategy, out_dir)
        moment(job, out_dir)
        ask(job, out_dir, number)
        who = 'there is a file .*STOP' if number is None else f'rank 1 got {number.name}'
        steps.append(check_stopped(job, out_dir, who))
        assert steps[-2] == 0 or f'at step {steps[-2]}\n' in job.text()
    assert steps == sorted(steps)
    end = steps[-1] + 10
    job = start(strategy, out_dir, max_iters=end)
    assert job.wait() == [0, 0], job.text()
    assert (out_dir / 'DONE').exists() and not (out_dir / 'PREEMPTED').exists()
    job = start(strategy, tmp_path / 'whole', max_iters=end)
    assert job.wait() == [0, 0], job.text()
    assert_same_weights(out_dir, tmp_path / 'whole', end)
    keep = [row for row in metrics(out_dir) if row['step'] <= end]
    assert [row['step'] for row in keep] == list(range(1, end + 1))
    assert [row['loss'] for row in keep] == [row['loss'] for row in metrics(tmp_path / 'whole')]


def test_replicas_stop_together_where_their_round_ends(tmp_path):
    out_dir = tmp_path / 'run'
    SCRIPTS['diloco'] = ('train_diloco.py', ['--num_replicas=2', '--inner_steps=10'])
    for number, moment in ((signal.SIGUSR1, while_starting), (signal.SIGHUP, in_a_step), (None, in_a_save)):
        job = start('diloco', out_dir)
        moment(job, out_dir)
        ask(job, out_dir, number)
        reason = 'there is a file .*STOP' if number is None else f'rank 1 got {number.name}'
        assert check_stopped(job, out_dir, reason) % 10 == 0


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_torchrun_hands_a_signal_on_and_the_ranks_save_and_end_by_themselves(tmp_path, number):
    """torchrun itself returns 1, so the test looks at the marker files."""
    out_dir = tmp_path / 'run'
    job = start('ddp', out_dir, torchrun=True)
    job.wait_for(has_trained(out_dir, 5))
    ranks = job.ranks()
    job.process.send_signal(number)
    job.wait()
    step = int((out_dir / 'PREEMPTED').read_text())
    assert complete(out_dir)[-1] == step == last_step(out_dir)
    last_line = rf'\(rank \d got {number.name}\): {step} of .*; what torchrun prints below is harmless\n'
    assert re.search(last_line + 'Traceback', job.text()), job.text()
    assert '[0] error' not in job.text() and '[1] error' not in job.text()
    assert not any(map(faults.is_alive, ranks))


@pytest.mark.slow
def test_a_signal_to_all_ranks_at_once_is_one_request(tmp_path):
    job = start('ddp', tmp_path / 'run')
    in_a_step(job, tmp_path / 'run')
    for pid in job.ranks():
        faults.send(pid, signal.SIGUSR1)
    check_stopped(job, tmp_path / 'run', r'rank \d got SIGUSR1')


SLOW_STEPS = ['--batch_size=2', '--global_batch_size=512', '--eval_sequences=0', '--log_interval=1']


def interrupt(job, times=1):
    """Ctrl-C in a terminal: all ranks get it, and a moment later once more, from torchrun."""
    for number in range(times):
        time.sleep(number and stopping.AGAIN_AFTER_S + 0.5)
        for pid in job.ranks() * 2:
            faults.send(pid, signal.SIGINT)


@pytest.mark.parametrize(
    'strategy, keys, step', [('ddp', [], 3), ('diloco', ['--num_replicas=2', '--inner_steps=4'], 4)]
)
def test_ctrl_c_says_at_once_after_which_step_the_run_will_have_saved_and_ended(tmp_path, strategy, keys, step):
    SCRIPTS['diloco'] = ('train_diloco.py', [])
    job = start(strategy, tmp_path / 'run', *SLOW_STEPS, *keys)
    job.wait_for(lambda: 'step      1/' in job.text())
    interrupt(job)
    job.wait_for(lambda: 'SIGINT: ' in job.text().rpartition('\n')[0])  # in a whole line
    said = f'SIGINT: stopping after step {step}, then saving; Ctrl-C again ends it now; torchrun ends it after 30 s\n'
    assert job.text().count('SIGINT: ') == job.text().count(said) == 1 and 'stopped' not in job.text(), job.text()
    assert check_stopped(job, tmp_path / 'run', r'rank \d got SIGINT') == step


def test_a_second_ctrl_c_ends_the_run_in_the_middle_of_a_step(tmp_path):
    job = start('ddp', tmp_path / 'run', *SLOW_STEPS, '--global_batch_size=51200', '--keep_checkpoints=0')
    job.wait_for(lambda: 'starting from scratch' in job.text())
    time.sleep(0.5)
    interrupt(job, times=2)
    sent = time.monotonic()
    assert job.wait() == [130, 130], job.text()
    assert time.monotonic() - sent < 5 and 'step      1/' not in job.text(), job.text()
    first, second = re.findall(r'^[\d:]+ (SIGINT: .*|ended .*)$', job.text(), re.MULTILINE)
    assert first.startswith(
        'SIGINT: stopping after step 2; no checkpoints are kept; Ctrl-C again ends it now; torchrun'
    )
    assert second.startswith('ended by a second Ctrl-C, without saving')
    assert not re.search(r'^\[\d\] ', job.text(), re.MULTILINE), job.text()  # so begins what a failing rank prints


def job_with(left, folder):
    """The variables of a job whose squeue says that so much time is left."""
    (folder / 'squeue').write_text(f'#!/bin/sh\necho {left}\n')
    (folder / 'squeue').chmod(0o755)
    path = f'{folder}:{os.environ["PATH"]}'
    return {'SLURM_JOB_ID': stopping.job_of_process() or '7', 'SLURM_JOB_END_TIME': '', 'PATH': path}


def test_a_run_whose_slurm_job_is_nearly_over_saves_and_ends(tmp_path):
    job = start('ddp', tmp_path / 'run', '--stop_before_end_s=50', **job_with('0:02', tmp_path))
    check_stopped(job, tmp_path / 'run', "the job's time is nearly over")


@pytest.fixture
def clock(monkeypatch, one_rank):
    """The time that stopping.py sees: clock.now, which begins at 0. There is a process group of one rank."""
    clock = SimpleNamespace(now=0.0, strftime=time.strftime, localtime=time.localtime)
    clock.time = clock.monotonic = lambda: clock.now
    monkeypatch.setattr(stopping, 'time', clock)
    monkeypatch.setattr(stopping, 'catch_signals', lambda more: None)
    monkeypatch.setattr(stopping, 'job_of_process', lambda: None)
    return clock


@pytest.mark.parametrize('left, leaves_at', [(1000, 950), (100, 75)])  # a short job keeps three quarters of its time
def test_a_run_leaves_before_the_end_of_its_slurm_job(tmp_path, monkeypatch, clock, left, leaves_at):
    monkeypatch.setenv('SLURM_JOB_END_TIME', str(left))
    request = stopping.StopRequest(str(tmp_path), stop_before_end_s=50, say=lambda line: None)
    while not request.agreed():
        clock.now += 1
        assert clock.now < left
    assert leaves_at < clock.now <= leaves_at + 3  # it is seen a step later
    assert 'time' in request.reason


def test_replicas_leave_where_their_last_round_ends_that_fits_into_the_slurm_job(tmp_path, monkeypatch, clock):
    monkeypatch.setenv('SLURM_JOB_END_TIME', '1000')
    request = stopping.StopRequest(str(tmp_path), stop_before_end_s=50, say=lambda line: None)
    clock.now = 200
    while not request.agreed(now=True):
        clock.now += 200
    assert clock.now == 800 and 'time' in request.reason


@pytest.mark.parametrize(
    'left, seconds',
    [
        ('2-03:04:05', ((2 * 24 + 3) * 60 + 4) * 60 + 5),
        ('03:04:05', (3 * 60 + 4) * 60 + 5),
        ('4:05', 4 * 60 + 5),
        ('UNLIMITED', math.inf),
        ('INVALID', math.inf),
    ],
)
def test_an_older_slurm_is_asked_how_much_time_is_left(tmp_path, monkeypatch, left, seconds):
    for name, value in job_with(left, tmp_path).items():
        monkeypatch.setenv(name, value)
    before = time.time()
    assert before + seconds <= stopping.end_of_slurm_job() <= time.time() + seconds
    monkeypatch.delenv('SLURM_JOB_ID')
    monkeypatch.setattr(stopping, 'job_of_process', lambda: None)
    assert stopping.end_of_slurm_job() == math.inf


# SLURM_JOB_ID, seconds until SLURM_JOB_END_TIME, the job of this process by its control group: seconds that are left.
TIMES = {
    'this job': (('7', 1000, '7'), 1000),
    'this job, without control groups': (('7', 1000, None), 1000),
    'a job that has ended, whose variables a shell kept': (('7', -1000, None), math.inf),
    'another job, in whose shell this one was submitted': (('6', 1000, '7'), math.inf),
    'no number': (('7', 'soon', None), math.inf),
    'no job': ((None, None, None), math.inf),
}


@pytest.mark.parametrize('case', TIMES)
def test_the_end_of_another_job_is_not_believed(case, monkeypatch, clock):
    (job, left, job_of_process), expected = TIMES[case]
    for name, value in (('SLURM_JOB_ID', job), ('SLURM_JOB_END_TIME', left)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(value))
    monkeypatch.setenv('PATH', '')  # no squeue
    monkeypatch.setattr(stopping, 'job_of_process', lambda: job_of_process)
    assert stopping.end_of_slurm_job() == expected


@pytest.mark.parametrize(
    'text, job',
    [
        ('0::/system.slice/slurmstepd.scope/job_12/step_0/user/task_0\n', '12'),
        ('9:name=systemd:/\n4:memory:/slurm/uid_1000/job_12/step_batch\n0::/\n', '12'),
        ('0::/user.slice/user-1000.slice\n', None),
        ('0::/slurm/job_by_hand\n', None),
    ],
)
def test_the_control_group_of_a_process_names_its_job(tmp_path, text, job):
    (tmp_path / 'cgroup').write_text(text)
    assert stopping.job_of_process(tmp_path / 'cgroup') == job
    assert stopping.job_of_process(tmp_path / 'missing') is None


def test_stop_before_end_s_0_does_not_look_at_the_time(tmp_path):
    job = start('ddp', tmp_path / 'run', '--stop_before_end_s=0', max_iters=5, **job_with('0:00', tmp_path))
    assert job.wait() == [0, 0] and (tmp_path / 'run' / 'DONE').exists()


def test_an_interruption_before_there_is_anything_to_save_ends_the_run_with_one_line(tmp_path):
    """Ctrl-C while the run starts, which all ranks of a terminal get. Other signals wait until the run can save."""
    job = start('ddp', tmp_path / 'run')
    job.wait_for(lambda: (tmp_path / 'run' / '.lock').exists())
    for pid in job.ranks():
        faults.send(pid, signal.SIGINT)
    codes = job.wait()
    if complete(tmp_path / 'run'):  # if it was quicker, it has saved
        assert codes == [130, 0]
    else:
        assert 0 not in codes and not re.search(r'^\[\d\] Traceback', job.text(), re.MULTILINE), job.text()


@pytest.mark.slow
def test_a_second_signal_during_the_last_save_neither_kills_nor_repeats_it(tmp_path):
    out_dir = tmp_path / 'run'
    job = start('manual, async', out_dir)
    in_a_step(job, out_dir)
    ranks = job.ranks()
    faults.send(ranks[1], signal.SIGTERM)
    while job.is_running():
        for pid in ranks:
            if faults.is_alive(pid) and pid in job.ranks():
                faults.send(pid, signal.SIGUSR1)
        time.sleep(0.01)
    step = check_stopped(job, out_dir, r'rank 1 got SIGTERM|rank \d got SIGUSR1')
    assert names_of_checkpoints(out_dir).count(f'step_{step:08}') == 1
    assert os.listdir(out_dir / 'checkpoints') == names_of_checkpoints(out_dir)
