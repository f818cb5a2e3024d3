"""Fixtures that several test files share. Helpers: launch.py starts processes, outputs.py reads what runs leave."""

import os
from pathlib import Path

import pytest
from launch import run_script


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
