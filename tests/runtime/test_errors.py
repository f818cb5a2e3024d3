"""The one line for what ends a run; that ranks print it, and once, is in test_bad_input.py and test_train_diloco.py."""

import pytest

from runtime import errors, stopping


@pytest.mark.parametrize(
    'message, line',
    [
        (
            '[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 30000ms for recv operation to complete',
            'waited for another rank longer than timeout_s=30; another rank hangs or is that slow',
        ),
        (
            'Timed out after 31 seconds waiting for clients. 1/2 clients joined.',
            'only 1/2 processes joined within timeout_s=31: ',
        ),
        (
            'The client socket has timed out after 1500ms while trying to connect to (node7, 29500).',
            'nobody answers at node7:29500 within timeout_s=1.5: start the node of rank 0',
        ),
    ],
)
def test_a_wait_that_was_too_long_is_told_in_seconds(capfd, message, line):
    errors.report(RuntimeError(message))
    assert capfd.readouterr().err.startswith(f'[0] error: {line}')


def test_of_several_errors_that_end_a_run_the_first_is_kept_for_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, 'starts_file', str(tmp_path / '.starts.json'))
    stopping.note_error('there is no file yet: this run was not counted')
    assert stopping.read_starts() == {}
    (tmp_path / '.starts.json').write_text('{"step": 5, "error": ""}')
    for line in ('the cause', 'what another rank made of it'):
        stopping.note_error(line)
    assert stopping.read_starts() == {'step': 5, 'error': 'the cause'}
