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

# The files that take longest come first; otherwise one worker would still run them when the others have ended.
LONGEST = ['test_compare_smoke', 'test_deepspeed', 'test_faults', 'test_slurm', 'test_train_diloco', 'test_frozen']
LONGEST += ['test_lessons', 'test_prove']
LONGEST += ['test_finetune_runs', 'test_finetune', 'test_expert_manual', 'test_on_cuda', 'test_layouts', 'test_native']
LONGEST += ['test_fsdp_manual', 'test_signals', 'test_prepare_data', 'test_tensor_manual', 'test_lora', 'test_in_run']
LONGEST += ['test_elastic', 'test_slow_link', 'test_memory', 'test_checkpoint', 'test_optim', 'test_train']
LONGEST += ['test_replica', 'test_runs', 'test_diloco', 'test_resume', 'test_compare', 'test_pipeline']


def pytest_addoption(parser):
    parser.addoption('--slow-part', help='K/N: of the slow tests those of every Nth file alone, from the Kth on')


def pytest_collection_modifyitems(config, items):
    if part := config.getoption('--slow-part'):
        k, n = map(int, part.split('/'))
        left_out = [
            item
            for item in items
            if item.get_closest_marker('slow') and zlib.crc32(item.path.name.encode()) % n != k % n
        ]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in {*left_out}]
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


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
