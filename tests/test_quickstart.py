"""What a new user does first: quickstart.sh in a fresh clone, and the environment that it makes."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from launch import REPO, environment
from outputs import metrics

SCRIPTS = ['quickstart.sh', 'whole_way.sh', 'setup_env.sh', 'tests/run.sh', 'tests/versions.sh', '.ci/run']


@pytest.fixture(scope='module')
def clone(tmp_path_factory):
    """A copy of the project without what runs and tests have left in it."""
    folder = tmp_path_factory.mktemp('clone') / 'project'
    left_out = shutil.ignore_patterns('.git', '.venv', 'data', 'out', '__pycache__', '.*_cache', 'wandb')
    shutil.copytree(REPO, folder, ignore=left_out)
    return folder


def bash(*command, folder, **env):
    """The CompletedProcess of a command of bash, for which `python3` is the interpreter of these tests."""
    env = environment(**{'PATH': f'{Path(sys.executable).parent}:{os.environ["PATH"]}', **env})
    return subprocess.run(['bash', *command], cwd=folder, env=env, capture_output=True, text=True, timeout=1200)


@pytest.mark.parametrize('script', ['quickstart.sh', 'whole_way.sh'])
def test_help_shows_the_top_of_the_script_and_starts_nothing(script, tmp_path):
    result = bash(str(REPO / script), '--max_iters=2', '--help', folder=tmp_path)
    assert result.returncode == 0 and f'    bash {script} --max_iters=' in result.stdout and not result.stderr
    assert '#!' not in result.stdout and 'setup_env' not in result.stdout


@pytest.mark.slow
def test_quickstart_trains_samples_and_plots_and_runs_again(clone):
    short = ['quickstart.sh', '--max_iters=3', '--eval_sequences=8', '--warmup_iters=1']
    first = bash(*short, folder=clone)
    assert first.returncode == 0, first.stdout + first.stderr
    assert '; 2 x cpu' in first.stdout or len(os.sched_getaffinity(0)) < 2
    validation, plot = first.stdout.splitlines()[-2:]
    assert validation.startswith(f'validation: {metrics(clone / "out/quickstart")[-1]["val_bpb"]:.3f} bits per byte')
    picture = clone / plot.split()[-1]
    assert picture.suffix == '.png' and picture.read_bytes().startswith(b'\x89PNG')
    assert '\ndef ' in first.stdout  # the sample

    again = bash(*short, folder=clone)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.splitlines()[-2:] == [validation, plot]
    assert [row['step'] for row in metrics(clone / 'out/quickstart')] == [1, 3]


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:3] != (3, 11, 7), reason='the text is the library of this Python, not of 3.11.7')
def test_the_tour_begins_as_its_page_says(clone):
    """Its losses also depend on the tokenizer that prepare_data.py trains."""
    for command in (['prepare_data.py'], ['train_ddp.py', 'config/tour.py']):
        subprocess.run([sys.executable, *command], cwd=clone, env=environment(), check=True, timeout=1200)
    last = metrics(clone / 'out/tour/one')[-1]
    page = (REPO / 'docs/tour.md').read_text()
    said = re.search(r'\| loss (\S+) .*\n.* val loss (\S+), .* (\S+) bits/byte', page).groups()
    assert [last[key] for key in ('loss', 'val_loss', 'val_bpb')] == pytest.approx([*map(float, said)], 1e-3)


@pytest.mark.slow
def test_the_whole_way_ends_with_a_table_and_an_answer_and_goes_on_where_it_was(clone):
    short = ['whole_way.sh', '--max_iters=2', '--warmup_iters=1', '--eval_tasks=']
    first = bash(*short, folder=clone)
    assert first.returncode == 0, first.stdout + first.stderr
    table = first.stdout.partition('right of what it has not seen')[2].splitlines()
    assert table[0].split() == ['answers', 'preferences', 'rewards']
    assert [line.split()[0] for line in table[1:5]] == ['sums', 'products', 'where', 'who']
    assert first.stdout.splitlines()[-1] == 'talk to it: python sample.py --out_dir=out/way/grpo'
    again = bash(*short, folder=clone)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.splitlines()[-8:] == first.stdout.splitlines()[-8:]
    assert (clone / 'models' / 'way' / 'chat_template.jinja').exists()


# --- setup_env.sh -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_interpreter_that_has_everything_is_used_as_it_is(clone):
    result = bash('-c', 'source setup_env.sh && "$PYTHON" -c "import sys; print(sys.prefix)"', folder=clone)
    assert result.stdout.strip() == sys.prefix and result.stderr == ''
    assert not (clone / '.venv').exists()


def write_wheel(folder, name, version):
    """Write a package with one empty module into `folder`, where pip finds it."""
    info = f'{name}-{version}.dist-info'
    with zipfile.ZipFile(folder / f'{name}-{version}-py3-none-any.whl', 'w') as wheel:
        wheel.writestr(f'{name}.py', '')
        wheel.writestr(f'{info}/METADATA', f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n')
        wheel.writestr(f'{info}/WHEEL', 'Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
        wheel.writestr(f'{info}/RECORD', '')


@pytest.mark.slow
def test_a_torch_that_is_there_is_borrowed_and_only_the_rest_is_installed_once(clone, tmp_path):
    shutil.copy(clone / 'setup_env.sh', tmp_path)
    (tmp_path / 'requirements.txt').write_text('torch>=2.11,<2.16\ntiny_package>=1.0\n')
    write_wheel(tmp_path, 'tiny_package', '1.5')
    show = 'source setup_env.sh && "$PYTHON" -c "import sys, torch, tiny_package; print(sys.prefix, torch.__file__)"'
    env = {'PIP_NO_INDEX': '1', 'PIP_FIND_LINKS': str(tmp_path)}
    first = bash('-c', show, folder=tmp_path, **env)
    assert first.stdout.split() == [str(tmp_path / '.venv'), torch.__file__], first.stderr
    assert 'borrowing the torch' in first.stderr
    assert re.search(r'tiny_package>=1.0 .*0.2 GB', first.stderr)
    second = bash('-c', show, folder=tmp_path, **env)
    assert second.stdout == first.stdout and second.stderr == ''


@pytest.mark.slow
@pytest.mark.skipif(shutil.which('nvidia-smi') is not None, reason='this machine has a GPU')
def test_without_a_gpu_the_newest_cpu_build_is_installed_where_there_is_one(clone, tmp_path):
    (tmp_path / 'project').mkdir()
    shutil.copy(clone / 'setup_env.sh', tmp_path / 'project')
    (tmp_path / 'project' / 'requirements.txt').write_text('torch>=2.11,<2.16\n')
    bare = Path(sys.base_prefix, 'bin')  # a Python without packages
    env = {'PIP_NO_INDEX': '1', 'PIP_CONFIG_FILE': os.devnull, 'PIP_FIND_LINKS': str(tmp_path)}
    env['PATH'] = f'{bare}:/usr/bin:/bin'
    show = 'source setup_env.sh && "$PYTHON" -c "from importlib import metadata; print(metadata.version(\'torch\'))"'
    for version, installed in (('2.15.3', '2.15.3'), ('2.14.1+cpu', '2.14.1+cpu')):
        write_wheel(tmp_path, 'torch', version)
        write_wheel(tmp_path, 'torch', '2.16.0+cpu')  # out of range
        shutil.rmtree(tmp_path / 'project' / '.venv', ignore_errors=True)
        assert bash('-c', show, folder=tmp_path / 'project', **env).stdout == f'{installed}\n'


def test_without_an_index_there_is_one_clear_line(clone, tmp_path):
    shutil.copy(clone / 'setup_env.sh', tmp_path)
    (tmp_path / 'requirements.txt').write_text('no-such-package-anywhere>=1.0\n')
    env = {'PIP_NO_INDEX': '1', 'PIP_CONFIG_FILE': os.devnull, 'PIP_FIND_LINKS': ''}
    result = bash('-c', 'source setup_env.sh', folder=tmp_path, **env)
    assert result.returncode == 1
    *_, last = result.stderr.splitlines()
    assert last.startswith('[setup] error: pip failed') and 'no-such-package-anywhere' in last


def test_an_old_python_gets_one_clear_line(clone, tmp_path):
    for name in ('python3', 'python3.10', 'python3.11', 'python3.12', 'python3.13'):
        (tmp_path / name).write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.8.1\nexit 1\n')
        (tmp_path / name).chmod(0o755)
    result = bash('-c', 'source setup_env.sh', folder=clone, PATH=f'{tmp_path}:{os.environ["PATH"]}')
    assert result.returncode == 1
    assert re.fullmatch(r'\[setup\] error: .*3\.10 .*3\.13 .*3\.8\.1\n', result.stderr)


@pytest.mark.skipif(shutil.which('shellcheck') is None, reason='shellcheck is not installed')
def test_shell_scripts_pass_shellcheck():
    result = subprocess.run(['shellcheck', '-x', *SCRIPTS], cwd=REPO, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
