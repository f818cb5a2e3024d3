"""Fixtures that several test files share. Helpers: launch.py starts processes, outputs.py reads what runs leave."""

import os
from pathlib import Path

import pytest
from launch import run_script

# Groups of tests that take longest come first, or one worker would end with them alone. A group is a file, or what is
# marked as one (xdist_group).
LONGEST = ['compare_smoke', 'test_deepspeed', 'test_faults', 'test_slurm', 'test_train_diloco', 'test_finetune_runs']
LONGEST += ['test_finetune', 'test_fsdp_manual', 'test_signals', 'test_prepare_data', 'test_elastic', 'test_slow_link']
LONGEST += ['test_checkpoint', 'test_scaling', 'test_optim', 'test_train', 'test_diloco', 'test_resume', 'test_compare']


@pytest.hookimpl(tryfirst=True)  # before the one of xdist, which reads the marks
def pytest_collection_modifyitems(items):
    """Let one worker run all tests of a file, and the longest files first."""

    def group_of(item):
        mark = item.get_closest_marker('xdist_group')
        return mark.args[0] if mark else item.path.stem

    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
    items.sort(key=lambda item: LONGEST.index(group_of(item)) if group_of(item) in LONGEST else len(LONGEST))


@pytest.fixture(scope='session', autouse=True)
def hf_home(tmp_path_factory):
    """Hugging Face's cache, of these tests alone: they find nothing that a user has downloaded."""
    os.environ['HF_HOME'] = str(tmp_path_factory.mktemp('hf_home'))
    return Path(os.environ['HF_HOME'])


@pytest.fixture(scope='session')
def data_dir(tmp_path_factory):
    """A data_dir with the dataset 'tiny': 40 modules of the standard library as bytes."""
    folder = tmp_path_factory.mktemp('data')
    text = tmp_path_factory.mktemp('text')
    for number, path in enumerate(sorted(Path(os.__file__).parent.glob('*.py'))[:40]):
        (text / f'{number:02}.txt').write_bytes(path.read_bytes()[:20000])
    run_script(
        'prepare_data.py',
        f'--dataset={text}',
        '--tokenizer=bytes',
        f'--data_dir={folder}',
        '--name=tiny',
        '--val_fraction=0.1',
    )
    return folder
