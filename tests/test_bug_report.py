"""report.py prints what an issue should say, in any state of a machine and a run, and nothing that is secret."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from launch import REPO, environment, fork_script, run_script

from configurator import VERSION

TRAIN_SCRIPTS = sorted(path.name for path in REPO.glob('train_*.py'))


@pytest.fixture(scope='module')
def out_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp('report') / 'run'
    fork_script('train_ddp.py', 'config/sanity_check.py', '--device=cpu', f'--out_dir={folder}')
    return folder


def report(*arguments, **env):
    return run_script('report.py', *arguments, HOME=str(Path(arguments[0].partition('=')[2]).parent), **env).stdout


def test_a_run_is_described_by_its_keys_its_checkpoint_and_its_last_lines(out_dir):
    secrets = 'AWS_SECRET_ACCESS_KEY MASTER_KEY LOCAL_API_TOKEN RANK_PASSWORD TORCHSERVE_TOKEN HF_TOKEN CUDA_KEY'
    text = report(
        f'--out_dir={out_dir}', '--lines=3', NCCL_DEBUG='INFO', **dict.fromkeys(secrets.split(), 'not-to-be-seen')
    )
    assert text.startswith(f'```\nversion {VERSION}, ') and text.endswith('```\n')
    for check in ('torch', 'disk', 'newest checkpoint'):  # a machine without a compiler, or a name, may run this, too
        assert f'  ok      {check}: ' in text
    for expected in ("arch='llama'", 'step_00000001', 'done: 1 of 1', 'command: ', 'NCCL_DEBUG=INFO', 'python 3.'):
        assert expected in text
    assert 'not-to-be-seen' not in text
    assert str(out_dir.parent) not in text and '~/run' in text  # the home folder, which a user's name is part of
    assert 'saved' not in text or text.count('\n  2') <= 3 + 4  # the last lines, and how the run began


def test_what_is_damaged_is_a_line_and_no_end(out_dir, monkeypatch, capsys):
    """What report.py says of a run, without the two processes that it lets meet for what it says of a machine."""
    for weights in (out_dir / 'checkpoints' / 'step_00000001').glob('*.distcp'):
        weights.write_bytes(weights.read_bytes()[:-1])
    monkeypatch.setattr(sys, 'argv', ['report.py', f'--out_dir={out_dir}', '--lines=3'])
    runpy.run_path(str(REPO / 'report.py'))['run_left']()
    text = capsys.readouterr().out
    assert '  FAILED  newest checkpoint: ' in text and 'the last 3 lines of ' in text


def test_without_torch_and_without_a_run_it_says_so(tmp_path):
    """Python alone, without any package, as where an installation has failed."""
    program = (
        f"import sys, runpy; sys.path[:] = [path for path in sys.path if 'site-packages' not in path] + ['{REPO}']"
    )
    bare = tmp_path / 'python'  # for the two processes that are to meet
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    program += f"; sys.executable = '{bare}'"
    program += "; sys.argv = ['report.py', '--out_dir=nobody']; runpy.run_path('report.py', run_name='__main__')"
    command, env = [sys.executable, '-S', '-c', program], environment(HOME=str(tmp_path))
    answer = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert "FAILED  torch: ModuleNotFoundError: No module named 'torch'" in answer.stdout
    assert 'FAILED  two processes: ConnectionError: ' in answer.stdout
    assert 'nobody: there is no such folder' in answer.stdout


@pytest.mark.parametrize('script', [*TRAIN_SCRIPTS, 'report.py', 'sample.py'])
def test_version(script):
    assert run_script(script, '--version').stdout == f'{script} {VERSION}\n'
    assert f'## {VERSION}' in (REPO / 'CHANGELOG.md').read_text()
    assert f'version: {VERSION}\n' in (REPO / 'CITATION.cff').read_text()
