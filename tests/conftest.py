"""Fixtures that several test files share. Helpers are in launch.py (starts processes), outputs.py (reads what runs
leave) and the other files here without `test_`."""

import os
import runpy
import signal
import sys
import zlib
from pathlib import Path

import pytest
from launch import REPO, prepare_tiny

# In the background of a shell SIGINT is ignored, under nohup SIGHUP, and the processes of the tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# What `bash tests/run.sh` runs: a line names a file, a test with all its cases, or one case, as pytest does. The files
# that take longest stand first, and are run first in every suite; otherwise one worker would still run them when the
# others have ended.
FIVE_MINUTES = (REPO / 'tests/five_minutes.txt').read_text().splitlines()


def file_of(name):
    return name.partition('::')[0]


def names_of(item):
    """The lines that would choose a test."""
    return {file_of(item.nodeid), item.nodeid.partition('[')[0], item.nodeid}


def pytest_addoption(parser):
    parser.addoption('--five-minutes', action='store_true', help='the tests in tests/five_minutes.txt alone')
    parser.addoption('--part', help='K/N: the tests of every Nth file alone, from the Kth on')
    parser.addoption('--slow-part', help='K/N: the same for the slow tests; all others run')


def is_of(item, part):
    k, n = map(int, part.split('/'))
    return zlib.crc32(item.path.name.encode()) % n == k % n


@pytest.hookimpl(tryfirst=True)  # before -m and -k leave tests out
def pytest_collection_modifyitems(config, items):
    config.all_names = set().union(*map(names_of, items))
    left_out = set()
    if config.getoption('five_minutes'):
        left_out |= {item for item in items if not names_of(item) & {*FIVE_MINUTES}}
    if part := config.getoption('--part'):
        left_out |= {item for item in items if not is_of(item, part)}
    if part := config.getoption('--slow-part'):
        left_out |= {item for item in items if item.get_closest_marker('slow') and not is_of(item, part)}
    config.hook.pytest_deselected(items=[*left_out])
    order = {file: number for number, file in enumerate(dict.fromkeys(map(file_of, FIVE_MINUTES)))}
    items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: order.get(file_of(item.nodeid), len(order)))


@pytest.fixture
def without_a_test(request):
    """The lines of five_minutes.txt that name no test. Of a file that pytest was not asked for whole, all exist."""
    config = request.config
    whole = {file_of(name) for name in config.all_names} - {file_of(name) for name in config.args if '::' in name}
    lost = [line for line in FIVE_MINUTES if line not in config.all_names]
    return [line for line in lost if file_of(line) in whole or not (REPO / file_of(line)).exists()]


@pytest.fixture(scope='module')
def has_slow_tests(request):
    """Whether tests of this file that are marked slow run, too. A fixture that starts many runs then adds theirs."""
    items = [item for item in request.session.items if item.path == request.path]
    return any(item.get_closest_marker('slow') for item in items)


@pytest.fixture(scope='session', autouse=True)
def hf_home(tmp_path_factory):
    """A cache of Hugging Face for these tests alone, in which they find nothing that the user has downloaded."""
    os.environ['HF_HOME'] = str(tmp_path_factory.mktemp('hf_home'))
    return Path(os.environ['HF_HOME'])


@pytest.fixture(autouse=True)
def own_random_numbers():
    """What a test draws without a seed does not depend on the tests before it."""
    if 'torch' in sys.modules:
        sys.modules['torch'].manual_seed(0)


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def run_here(monkeypatch, capsys):
    """run_here(script, *arguments): runs a script itself, in this process; returns (stdout, stderr)."""
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)  # scripts install their own: put this one back afterwards
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')

    def run(script, *arguments):
        monkeypatch.setattr(sys, 'argv', [script, *map(str, arguments)])
        runpy.run_path(str(REPO / script), run_name='__main__')
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


@pytest.fixture(scope='session')
def talker(tmp_path_factory):
    """The folder of a model that has learned conversations, see save_talker()."""
    from pretrained import save_talker

    return save_talker(tmp_path_factory.mktemp('talker'))


@pytest.fixture(scope='session')
def data_dir(tmp_path_factory):
    return prepare_tiny(tmp_path_factory.mktemp('tiny'))
