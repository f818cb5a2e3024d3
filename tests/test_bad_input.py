"""A user's mistake ends a run before any training, with one clear line, an exit code other than 0, and nothing lost."""

import json
import re
import shutil

import numpy as np
import pytest
from launch import TINY_MODEL, TINY_RUN, Job, environment, run_forked, run_script

from dataset import shards
from dataset.shuffle import permuted
from keys import Keys

RUN = [*TINY_MODEL, *TINY_RUN, '--max_iters=2', '--dtype=float32', '--dataset=tiny']


def error_line(text):
    """The one error line in what a failed run has printed; asserts that there is no traceback."""
    assert 'Traceback' not in text, text
    lines = [line for line in text.splitlines() if 'error:' in line]
    assert len(lines) == 1, text
    return lines[0]


@pytest.fixture
def train(tmp_path):
    """train(data_dir, out_dir, *more): runs one process that has to fail, and returns what it prints."""

    def train(data_dir, out_dir, *more):
        keys = [*RUN, f'--data_dir={data_dir}', f'--out_dir={out_dir}', *more]
        job = Job('train_ddp.py', keys, 1, tmp_path / 'log')
        assert job.wait() == [1], job.text()
        return job.text()

    return train


def train_as_a_user(data_dir, out_dir, **options):
    """The CompletedProcess of a run that is started as a user would start it."""
    keys = [*RUN, f'--data_dir={data_dir}', f'--out_dir={out_dir}']
    result = run_script('train_ddp.py', *keys, check=False, **options)
    assert result.returncode != 0
    return result


def test_missing_dataset_names_the_command_that_makes_it(train, data_dir, tmp_path):
    line = error_line(train(data_dir, tmp_path / 'out', '--dataset=nowhere'))
    assert 'nowhere' in line and 'python prepare_data.py' in line
    line = error_line(train(data_dir, tmp_path / 'out', f'--dataset={data_dir}/tiny/', '--vocab_size=100'))
    assert re.search("tiny: .*'train' .*token id \\d+", line)  # a path into data_dir, as a shell completes it
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('damage', ['size', 'magic'])
def test_damaged_shard_is_refused_by_name(train, data_dir, tmp_path, damage):
    shutil.copytree(data_dir / 'tiny', tmp_path / 'tiny')
    shard = next((tmp_path / 'tiny').glob('train_*.bin'))
    content = shard.read_bytes()
    shard.write_bytes(content[:-10] if damage == 'size' else b'abcd' + content[4:])
    line = error_line(train(tmp_path, tmp_path / 'out'))
    assert shard.name in line and damage in line


def test_token_above_the_vocabulary(train, data_dir, tmp_path):
    line = error_line(train(data_dir, tmp_path / 'out', '--vocab_size=100'))
    assert '100' in line and re.search(r'token|vocab', line)


def test_indivisible_global_batch_gives_the_numbers(train, data_dir, tmp_path):
    line = error_line(train(data_dir, tmp_path / 'out', '--global_batch_size=7'))
    assert '7' in line and 'batch_size' in line and '6' in line and '8' in line  # what would work


def test_block_size_longer_than_the_data(train, data_dir, tmp_path):
    line = error_line(train(data_dir, tmp_path / 'out', '--block_size=100000000'))
    assert '100000000' in line.replace(',', '').replace('_', '')


def test_unwritable_out_dir_is_found_before_the_first_step(train, data_dir, tmp_path):
    (tmp_path / 'file').write_text('not a folder')
    said = train(data_dir, tmp_path / 'file' / 'out')
    assert 'out_dir' in error_line(said) and 'step 1' not in said


@pytest.mark.parametrize('name', ['.lock', pytest.param('train.log', marks=pytest.mark.slow), 'DONE.tmp'])
def test_a_run_writes_through_no_link_that_somebody_has_put_into_its_folder(train, data_dir, tmp_path, name):
    (tmp_path / 'mine').write_text('precious')
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out' / name).symlink_to('../mine')
    line = error_line(train(data_dir, tmp_path / 'out'))
    assert f'found a link to {tmp_path}/mine, expected a file' in line and name in line
    assert (tmp_path / 'mine').read_text() == 'precious'


def test_resume_must_without_a_checkpoint(train, data_dir, tmp_path):
    assert 'resume' in error_line(train(data_dir, tmp_path / 'out', '--resume=must'))
    assert 'no checkpoint' in error_line(train(data_dir, tmp_path / 'out', '--eval_only'))


@pytest.mark.parametrize('key', ['--lora_rank=8', '--freeze=embed'])
def test_lora_and_frozen_parts_without_a_model_of_transformers_are_refused(train, data_dir, tmp_path, key):
    line = error_line(train(data_dir, tmp_path / 'out', key))
    assert key.strip('-').split('=')[0] in line and 'init_from=scratch' in line and '--init_from' in line
    assert not (tmp_path / 'out').exists()
    run_forked('train_ddp.py', *RUN, f'--data_dir={data_dir}', f'--out_dir={tmp_path / "mine"}', log=tmp_path / 'log')
    line = error_line(train(data_dir, tmp_path / 'out', key, f'--init_from={tmp_path / "mine"}'))
    assert f'`python export_model.py --out_dir={tmp_path / "mine"}`' in line


def test_half_set_launcher_variables(data_dir, tmp_path):
    line = error_line(train_as_a_user(data_dir, tmp_path / 'out', RANK='0', WORLD_SIZE='2').stderr)
    assert 'RANK=0' in line and 'MASTER_ADDR' in line and 'torchrun' in line


def test_a_checkpoint_of_another_model_or_data_is_refused_with_both_values(train, data_dir, tmp_path):
    out_dir = tmp_path / 'out'
    run_forked('train_ddp.py', *RUN, f'--data_dir={data_dir}', f'--out_dir={out_dir}', log=tmp_path / 'first.log')
    before = sorted(path.stat().st_mtime_ns for path in out_dir.glob('checkpoints/*/*'))
    line = error_line(train(data_dir, out_dir, '--n_layer=4', '--max_iters=3'))
    assert 'n_layer' in line and '3' in line and '4' in line
    line = error_line(train(data_dir, out_dir, '--dataset=synthetic', '--vocab_size=257', '--max_iters=3'))
    assert re.search('dataset=tiny, .*dataset=synthetic', line) and f'--init_from={out_dir}' in line
    assert 'never' in error_line(train(data_dir, out_dir, '--resume=never', '--max_iters=3'))
    assert sorted(path.stat().st_mtime_ns for path in out_dir.glob('checkpoints/*/*')) == before


def test_a_failing_rank_stops_all_and_its_error_is_the_one_shown(data_dir, tmp_path):
    """One token of one shard lies outside of the vocabulary, in a sequence that only rank 1 reads, in a later step."""
    shutil.copytree(data_dir / 'tiny', tmp_path / 'tiny')
    meta = json.loads((tmp_path / 'tiny' / 'meta.json').read_text())
    shard = next((tmp_path / 'tiny').glob('train_*.bin'))
    tokens = np.array(shards.read_shard(shard))
    windows = permuted(np.arange(8), (len(tokens) - 1) // 32, Keys.seed)
    tokens[windows[7] * 32 + 5] = 300  # sample 7: second step, second rank, last row
    shards.write_shard(shard, tokens, np.uint16)
    (tmp_path / 'tiny' / 'meta.json').write_text(json.dumps(meta))
    job = Job('train_ddp.py', [*RUN, f'--data_dir={tmp_path}', f'--out_dir={tmp_path / "out"}'], 2, tmp_path / 'log')
    assert 0 not in job.wait()
    errors = [line for line in job.text().splitlines() if line.startswith(('[0] error', '[1] error'))]
    assert len(errors) == 1 and errors[0].startswith('[1]') and '300' in errors[0], job.text()


def test_out_of_memory_names_the_keys_to_lower(data_dir, tmp_path):
    """It really is out of memory: the address space is limited to 8 GB, and the gradients alone take more."""
    command = 'ulimit -v 8000000; exec "$@"'
    import subprocess
    import sys

    arguments = [*RUN, f'--data_dir={data_dir}', f'--out_dir={tmp_path / "out"}', '--n_embd=16384', '--n_layer=2']
    result = subprocess.run(
        ['bash', '-c', command, 'limited', sys.executable, 'train_ddp.py', *arguments],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=600,
    )
    assert result.returncode != 0
    line = error_line(result.stderr)
    assert 'out of memory' in line and 'batch_size' in line
