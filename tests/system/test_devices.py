"""system/devices.py: folders that the compiler needs, and which peak a GPU has by its name."""

import os

import pytest
from launch import TINY_SYNTHETIC, run_script

from system import devices


def test_folders_of_the_compiler_that_cannot_be_written_are_replaced_by_temporary_ones(tmp_path, monkeypatch):
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', '/proc/nope')  # not even root can make it
    monkeypatch.setenv('TRITON_CACHE_DIR', str(tmp_path / 'triton'))
    (line,) = devices.make_compile_caches()
    replaced = os.environ['TORCHINDUCTOR_CACHE_DIR']
    assert 'TORCHINDUCTOR_CACHE_DIR=/proc/nope cannot be written (No such file or directory): ' in line
    assert os.path.isdir(replaced) and replaced in line and (tmp_path / 'triton').is_dir()
    assert devices.make_compile_caches() == [] and os.environ['TORCHINDUCTOR_CACHE_DIR'] == replaced


@pytest.mark.parametrize(('compiles', 'lines'), [(False, 0), pytest.param(True, 1, marks=pytest.mark.slow)])
def test_a_run_ends_well_without_the_folder_of_the_compiler(tmp_path, compiles, lines):
    keys = [*TINY_SYNTHETIC, '--max_iters=1', '--eval_sequences=0', f'--out_dir={tmp_path}', f'--compile={compiles}']
    keys.append('--activation_checkpointing=offload')
    ended = run_script('train_ddp.py', *keys, TORCHINDUCTOR_CACHE_DIR='/proc/nope')
    said = ended.stdout + ended.stderr
    assert said.count('/proc/nope cannot be written') == lines and 'Traceback' not in said


def test_what_is_compiled_is_loaded_from_no_folder_that_others_can_write(tmp_path, monkeypatch):
    (tmp_path / 'made_by_another').mkdir()
    (tmp_path / 'made_by_another').chmod(0o777)
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path / 'made_by_another'))
    monkeypatch.setenv('TRITON_CACHE_DIR', str(tmp_path / 'own'))
    (line,) = devices.make_compile_caches()
    assert f'TORCHINDUCTOR_CACHE_DIR={tmp_path}/made_by_another cannot be written' in line
    assert devices.os.environ['TORCHINDUCTOR_CACHE_DIR'] != str(tmp_path / 'made_by_another')
