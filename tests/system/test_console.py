"""A run whose console is closed, full or absent trains on, and its files and its exit code are as always."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from faults import wait_until
from launch import REPO, TINY_SYNTHETIC, command_of, environment, fork, free_ports, join_all, places_of, run_rank
from outputs import column, complete, last_step

from system import errors

RUN = [*TINY_SYNTHETIC, '--eval_sequences=0', '--checkpoint_interval=4']


def full():
    os.dup2(os.open('/dev/full', os.O_WRONLY), 1)


def closed_terminal():
    terminal, its_end = pty.openpty()
    os.dup2(its_end, 1)
    os.close(its_end)
    os.close(terminal)


def closed_pipe():
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.close(writing)
    os.close(reading)


def pipe_that_nobody_empties():
    """As another program leaves it that has made it non-blocking."""
    _, writing = os.pipe()
    os.set_blocking(writing, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.dup2(writing, 1)


def absent():
    """As Python is after `<&- >&- 2>&-`."""
    for number, name in enumerate(('stdin', 'stdout', 'stderr')):
        os.close(number)
        setattr(sys, name, None)
        setattr(sys, f'__{name}__', None)


CONSOLES = {  # and what train.log says of them
    full: 'No space left on device',
    closed_terminal: 'Input/output error',
    closed_pipe: 'Broken pipe',
    pipe_that_nobody_empties: None,
    absent: None,
}


def train_with(console, out_dir, place):
    log = os.open(f'{out_dir}.log', os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    console()
    if console is not absent:
        os.dup2(1, 2)
    run_rank([str(REPO / 'train_ddp.py'), *RUN, '--max_iters=6', f'--out_dir={out_dir}'], place)


@pytest.mark.parametrize('console', CONSOLES, ids=lambda console: console.__name__)
def test_a_run_outlives_its_console(tmp_path, console):
    out_dir = tmp_path / 'run'
    (place,) = places_of(1)
    process = fork(train_with, console, out_dir, {**place, 'MASTER_PORT': free_ports(1)[0]})
    assert not join_all([process], 600) and process.exitcode == 0
    assert (out_dir / 'DONE').exists() and complete(out_dir) == [4, 6] and column(out_dir, 'step') == [*range(1, 7)]
    said = (out_dir / 'train.log').read_text()
    assert 'done: 6 of 6 steps' in said
    assert said.count(f'the console takes no more lines ({CONSOLES[console]})') == (CONSOLES[console] is not None)


def test_what_a_script_is_asked_to_print_does_not_vanish_without_an_error():
    """Where the result is what a script prints, a full disk behind `> results` must not end with 0, and is named."""
    plan = ['compare.py', '--plan', '--gpus=8', '--global_batch_size=512', '--vocab_size=50304']
    for arguments in (plan, ['report.py'], ['sample.py', '--help']):
        with open('/dev/full', 'w') as full_disk:
            pipes = {'stdout': full_disk, 'stderr': subprocess.PIPE, 'text': True}
            result = subprocess.run(command_of(*arguments), cwd=REPO, env=environment(), **pipes)
        assert result.returncode == 1, result.stderr
        assert result.stderr.splitlines()[-1].endswith('error: stdout: [Errno 28] No space left on device')
        assert 'Traceback' not in result.stderr


@pytest.mark.parametrize('is_buffered', [True, False])
@pytest.mark.parametrize('command', ['report.py', 'compare.py --plan --gpus=8 {}', '-m planning.rules --ladder'])
def test_a_reader_that_has_seen_enough_ends_a_script_without_a_word(command, is_buffered):
    keys = '--global_batch_size=512 --vocab_size=50304'
    env = environment(PYTHONUNBUFFERED='' if is_buffered else '1')
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, *command.format(keys).split()]
    ended = subprocess.run(command, cwd=REPO, env=env, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, '')


def test_a_full_disk_is_named_by_the_file_that_was_written(tmp_path):
    class Writer:
        def __init__(self):
            self.files = {'.bin': open('/dev/full', 'wb')}

        def write(self, data):
            self.files['.bin'].write(data)

    def line_of(function):
        try:
            function()
        except OSError as error:
            return errors.place_of(error)

    def to_a_file():
        with open('/dev/full', 'w') as file:
            file.write('x')

    assert line_of(to_a_file) == line_of(lambda: Writer().write(bytes(1 << 20))) == '/dev/full: '
    assert line_of(lambda: open(tmp_path / 'absent')) == ''  # it names the file itself


@pytest.mark.parametrize('ignores', [False, True], ids=['', 'as_under_nohup'])
def test_when_its_terminal_goes_away_a_run_saves_and_ends_unless_it_is_to_ignore_that(tmp_path, ignores):
    out_dir, seen = tmp_path / 'run', []
    terminal, its_end = pty.openpty()
    os.set_blocking(terminal, False)

    def begin_session():  # Popen has called setsid()
        fcntl.ioctl(its_end, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignores else signal.SIG_DFL)

    command = command_of('train_ddp.py', *RUN, '--max_iters=100000', f'--out_dir={out_dir}')
    process = subprocess.Popen(
        command, cwd=REPO, env=environment(), stdin=its_end, stdout=its_end, stderr=its_end,
        start_new_session=True, preexec_fn=begin_session,
    )  # fmt: skip
    try:
        os.close(its_end)

        def has_trained():
            try:
                seen.append(os.read(terminal, 1 << 16))  # a terminal that nobody reads would stop the run
            except BlockingIOError:
                pass
            return last_step(out_dir) >= 5 or process.poll() is not None

        wait_until(has_trained, 600, lambda: b''.join(seen).decode(errors='replace'))
        os.close(terminal)  # Linux sends SIGHUP; what the run prints from here on is an error
        if ignores:
            there = last_step(out_dir)
            wait_until(lambda: last_step(out_dir) > there + 5 or process.poll() is not None, 600)
            Path(out_dir, 'STOP').touch()
        assert process.wait(600) == (0 if ignores else 128 + signal.SIGHUP)
    finally:
        process.kill()
        process.wait()
    assert complete(out_dir)[-1] == int((out_dir / 'PREEMPTED').read_text()) == last_step(out_dir)
