"""The one line for whatever ends a run. That ranks print it, and only once, is tested in test_bad_input.py and
test_train_diloco.py."""

import json
import re
import signal
import subprocess
import sys

import pytest
from launch import REPO
from torch.distributed import DistBackendError, DistNetworkError

from system import errors, stopping

NCCL = 'NCCL error in: NCCLUtils.cpp:94, {} (run with NCCL_DEBUG=INFO for details)\n{}\nLast error:\n{}'


@pytest.mark.parametrize(
    'message, line',
    [
        (
            '[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 30000ms for recv operation to complete',
            '.*another rank.* timeout_s=30',
        ),
        (
            'Timed out after 31 seconds waiting for clients. 1/2 clients joined.',
            '.*1/2 .*timeout_s=31',
        ),
        (
            'The client socket has timed out after 1500ms while trying to connect to (node7, 29500).',
            '.*node7:29500 .*timeout_s=1.5',
        ),
    ],
)
def test_a_wait_that_was_too_long_is_told_in_seconds(capfd, message, line):
    errors.report(RuntimeError(message))
    assert re.match(rf'\[0\] error: {line}', capfd.readouterr().err)


@pytest.mark.parametrize(
    'error',
    [
        DistBackendError(NCCL.format('remote process exited', 'ncclRemoteError: A call failed', 'socket closed')),
        DistBackendError(NCCL.format('unhandled system error', 'ncclSystemError: ...', 'Connection reset by peer')),
        DistNetworkError('Failed to recv, got 0 bytes. Connection was likely closed.'),
        RuntimeError('[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234'),
    ],
)
def test_a_lost_peer_points_to_the_rank_that_failed_first(capfd, error):
    errors.report(error)
    assert re.match(r'\[0\] stopped .*another rank.*the first error', capfd.readouterr().err)


@pytest.mark.parametrize(
    'error, said',
    [
        (DistBackendError(NCCL.format('invalid usage', 'ncclInvalidUsage: ...', 'Duplicate GPU')), 'Duplicate GPU'),
        (DistBackendError(NCCL.format('system error', 'ncclSystemError: ...', 'No space left')), 'No space left'),
        (DistNetworkError('The server socket has failed to listen. name: EADDRINUSE'), 'EADDRINUSE'),
    ],
)
def test_a_communication_error_that_is_this_ranks_own_keeps_its_message(capfd, error, said):
    errors.report(error)
    shown = capfd.readouterr().err
    assert said in shown and 'another rank' not in shown


def test_nccl_out_of_memory_is_out_of_memory(capfd):
    error = DistBackendError(NCCL.format('unhandled cuda error', 'ncclUnhandledCudaError: ...', "2 'out of memory'"))
    errors.report(error, lambda: 'lower batch_size')
    assert '[0] error: out of memory' in (shown := capfd.readouterr().err) and shown.endswith('; lower batch_size\n')


def test_too_many_open_files_are_answered_with_the_command_that_allows_more(capfd, monkeypatch):
    monkeypatch.setattr(errors.resource, 'getrlimit', lambda kind: (48, 1024))
    errors.report(OSError(24, 'Too many open files', 'train_000047.bin'))
    assert re.match(r'\[0\] error: more files .*\(48\): `ulimit -n 4096`', capfd.readouterr().err)


def test_of_several_errors_that_end_a_run_the_first_is_kept_for_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, 'starts_file', str(tmp_path / '.starts.json'))
    stopping.note_error('there is no file yet: this run was not counted')
    assert stopping.read_starts() == {}
    before = {'step': 5, 'command': [], 'count': 1, 'error': ''}
    (tmp_path / '.starts.json').write_text(json.dumps(before))
    for line in ('the cause', 'what another rank made of it'):
        stopping.note_error(line)
    assert stopping.read_starts() == {**before, 'error': 'the cause'}


def test_a_crash_in_native_code_says_in_which_line_it_was():
    code = 'import ctypes\nfrom system import errors\nerrors.report_errors()\nctypes.string_at(0)'
    ended = subprocess.run([sys.executable, '-c', code], cwd=REPO, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGSEGV
    assert 'Segmentation fault' in ended.stderr and 'File "<string>", line 4' in ended.stderr
