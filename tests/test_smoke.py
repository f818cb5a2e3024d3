"""The two-minute part of the suite: what a new user does, with the real commands, only smaller."""

import re
import resource
import shutil
import subprocess
import sys

import pytest
from launch import REPO, TINY_MODEL, TINY_RUN, environment, run_script
from outputs import column

TRAIN_SCRIPTS = sorted(path.name for path in REPO.glob('train_*.py'))
TINY = [*TINY_MODEL, *TINY_RUN, '--dataset=tiny', '--global_batch_size=4']


@pytest.fixture(scope='module')
def trained(data_dir, tmp_path_factory):
    """(out_dir of a run of 4 steps on 2 ranks, what it printed)."""
    out_dir = tmp_path_factory.mktemp('smoke') / 'run'
    keys = [*TINY, f'--data_dir={data_dir}', f'--out_dir={out_dir}', '--max_iters=4']
    return out_dir, run_script('train_fsdp.py', *keys, nproc=2).stdout


def test_train_with_fsdp_on_two_ranks(trained):
    out_dir, said = trained
    assert column(out_dir, 'step') == [1, 2, 3, 4]
    assert (out_dir / 'DONE').read_text().strip() == '4'
    assert re.search(r'\d\d:\d\d:\d\d step +4/4 \| loss \d', said)
    assert {'train.log', 'metrics.jsonl', 'checkpoints', 'DONE'} <= {path.name for path in out_dir.iterdir()}


@pytest.fixture
def copy(trained, tmp_path):
    """A copy of that run, for a test that goes on with it."""
    return shutil.copytree(trained[0], tmp_path / 'copy')


def test_go_on_with_ddp_in_one_process(data_dir, copy):
    said = run_script('train_ddp.py', *TINY, f'--data_dir={data_dir}', f'--out_dir={copy}', '--max_iters=6').stdout
    assert 'resuming' in said and column(copy, 'step') == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_evaluate_only(data_dir, copy):
    keys = [*TINY, f'--data_dir={data_dir}', f'--out_dir={copy}', '--max_iters=4']
    said = run_script('train_fsdp.py', *keys, '--eval_only').stdout
    assert f'val loss {column(copy, "val_loss")[-1]:.4f}' in said
    assert column(copy, 'step') == [1, 2, 3, 4]


def test_sample_from_it(trained):
    said = run_script('sample.py', f'--out_dir={trained[0]}', '--prompt=def ', '--max_new_tokens=20', '--num_samples=1')
    assert 'def ' in said.stdout


@pytest.mark.slow
def test_plot_it(trained, tmp_path):
    run_script('compare.py', '--plot', trained[0], f'--output={tmp_path / "loss.png"}')
    assert (tmp_path / 'loss.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'


@pytest.mark.slow  # in one process test_bug_report.py runs it, too
@pytest.mark.parametrize('script, nproc', [('train_ddp.py', None), ('train_ddp.py', 2), ('train_fsdp.py', 2)])
def test_sanity_check_needs_no_data_and_leaves_one_checkpoint(script, nproc, tmp_path):
    run_script(script, 'config/sanity_check.py', '--device=cpu', f'--out_dir={tmp_path}', nproc=nproc)
    assert [path.name for path in (tmp_path / 'checkpoints').iterdir()] == ['step_00000001']
    assert (tmp_path / 'checkpoints' / 'step_00000001' / 'manifest.json').exists()
    assert (tmp_path / 'DONE').read_text().strip() == '1'


@pytest.mark.slow
def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path):
    arguments = ['--dataset=synthetic', '--dry_run', '--device=cuda', f'--out_dir={tmp_path / "out"}', '--arch=llama']
    text = run_script('train_fsdp.py', *arguments, nproc=2).stdout
    for expected in (
        'memory per rank at the peak of a step, in GB (fsdp, 2 ranks, bfloat16, device=cuda, ',
        'weights',
        'activations',
        'per checkpoint',
        'tokens per step',
        'FLOPs',
        'warm-up',
    ):
        assert expected in text
    assert text.count('memory per rank') == 1 and not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
    'script', sorted({*(path.name for path in REPO.glob('train_*.py')), 'prepare_data.py', 'sample.py'})
)
def test_help_comes_at_once_since_it_imports_nothing_large_and_explains_every_key(script):
    command = [sys.executable, '-X', 'importtime', script, '--help']
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    imported = {line.split('|')[-1].strip().split('.')[0] for line in result.stderr.splitlines()}
    assert '--seed' in result.stdout and 'configurator' in imported
    assert not imported & {'torch', 'numpy', 'transformers', 'datasets', 'pyarrow'} and len(imported) < 200
    if script in TRAIN_SCRIPTS:
        keys = [re.split(' {2,}', line.strip()) for line in result.stdout.splitlines() if line.startswith('  --')]
        assert len(keys) > 15 and all(len(words) == 3 for words in keys), 'a key without a comment'
        assert {'--out_dir', '--batch_size', '--seed'} <= {words[0].split('=')[0] for words in keys}


@pytest.mark.slow
def test_a_short_run_costs_little_more_than_to_import_torch(data_dir, tmp_path):
    """At most 1.5 times as much, in CPU time of the whole process."""

    def cpu_seconds(*command):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], cwd=REPO, env=environment(), check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    imports = cpu_seconds('-c', 'import torch, torch.distributed.checkpoint, torch.distributed.fsdp, torch._dynamo')
    run = cpu_seconds('train_ddp.py', *TINY, f'--data_dir={data_dir}', f'--out_dir={tmp_path}', '--max_iters=4')
    assert run < 3 * imports
