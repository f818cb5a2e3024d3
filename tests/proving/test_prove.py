"""prove.py as a user types it: layouts that are right, and what it refuses."""

import json

import pytest
from chats import write_rows
from corruptions import CORRUPTIONS, corrupt
from launch import run_script
from pretrained import save_model


def proven(tmp_path, *keys, code=0):
    """(what prove.py writes: {(layout, ranks): row}, what it prints)"""
    path = tmp_path / 'prove.json'
    ended = run_script('prove.py', *keys, f'--output={path}', check=False)
    assert ended.returncode == code, ended.stdout + ended.stderr
    rows = json.loads(path.read_text())['layouts'] if path.exists() else []
    return {(row['layout'], row['ranks']): row for row in rows}, ended.stdout + ended.stderr


def test_layouts_are_right_or_say_why_they_are_skipped(tmp_path):
    rows, said = proven(tmp_path, 'config/quickstart.py', '--layouts=ddp,tensor 2,experts 2')
    assert {name: row['verdict'] for (name, _), row in rows.items()} == {
        'ddp': 'ok', 'tensor 2': 'ok', 'experts 2': 'skipped',
    }  # fmt: skip
    assert all(0 < rows['tensor 2', 2]['worst'][kind] <= 4 for kind in ('gradient', 'norm', 'update', 'loss'))
    assert 'n_experts=0' in rows['experts 2', 2]['lines'][0] and '2 ok, 0 WRONG, 1 skipped, 0 failed' in said


@pytest.mark.slow
@pytest.mark.parametrize(
    'config, nproc, least', [('quickstart', '2,4', 40), ('moe_quickstart', '2,4', 30), ('gpt2_124m', '2', 15),
                             ('enoki_8h', '3', 11), ('qwen3_6h', '2', 15)]
)  # fmt: skip
def test_every_layout_is_right(tmp_path, config, nproc, least):
    rows, said = proven(tmp_path, f'config/{config}.py', f'--nproc={nproc}')
    assert {row['verdict'] for row in rows.values()} == {'ok', 'skipped'}, said
    assert sum(row['verdict'] == 'ok' for row in rows.values()) >= least, said


@pytest.mark.slow
def test_models_of_transformers_lora_pairs_and_rewards(tmp_path):
    save_model(tmp_path / 'llama', 'llama', max_position_embeddings=64)
    write_rows(
        tmp_path / 'prompts.jsonl', [{'prompt': f'{n}:', 'answer': f'#### {n}', 'rule': 'gsm8k'} for n in range(20)]
    )
    start = f'--init_from={tmp_path}/llama'
    for keys in (
        [start, '--nproc=3', '--layouts=ddp,fsdp,manual,context'],
        [start, '--lora_rank=4', '--layouts=ddp,fsdp,manual,context'],
        [start, '--learns_from=pairs'],
        [start, f'--prompts={tmp_path}/prompts.jsonl', '--reward=flexible_extract', '--block_size=64'],
    ):
        rows, said = proven(tmp_path, *keys)
        assert {row['verdict'] for row in rows.values()} <= {'ok', 'skipped'}, said
        assert {'ddp', 'fsdp'} <= {name for (name, _), row in rows.items() if row['verdict'] == 'ok'}, said


@pytest.mark.parametrize(
    'keys, code, line',
    [
        (['--layouts=tenser'], 2, 'error: layouts=tenser: expected some of ddp, fsdp, fsdp zero 2, '),
        (['--nproc=1'], 2, 'error: --nproc expects '),
        (['--dataset=gone', '--layouts=ddp'], 2, 'error: one process: dataset=gone: there is no '),
        (['--dropout=0.5', '--layouts=ddp'], 2, 'error: dropout=0.5: each layout draws noise of its own'),
        (['--n_embd=66', '--layouts=ddp'], 2, 'error: one process: n_embd=66'),
        (['--teacher=models/large'], 2, 'error: teacher: train_distill.py is not run here'),
    ],
)
def test_what_cannot_be_proven_ends_in_one_line(tmp_path, keys, code, line):
    rows, said = proven(tmp_path, *keys, code=code)
    assert not rows and line in said and 'Traceback' not in said, said


@pytest.mark.parametrize(
    'line, more, said',
    [
        ('import data\n', 'import os\n\nos.kill(os.getpid(), 9)\n', 'was killed by SIGKILL'),
        ('    step += 1\n', "    raise ValueError('too late to refuse')\n", 'after 1 steps: too late to refuse'),
    ],
)
def test_a_layout_that_ends_with_an_error_leaves_the_others_and_is_not_skipped(tmp_path, line, more, said):
    code = tmp_path / 'code'
    corrupt(CORRUPTIONS[0]._replace(file='train_fsdp.py', changes={line: line + more}), code)
    ended = run_script(code / 'prove.py', '--layouts=ddp,fsdp', f'--output={tmp_path}/out.json', check=False)
    rows = {row['layout']: row['verdict'] for row in json.loads((tmp_path / 'out.json').read_text())['layouts']}
    assert ended.returncode == 2 and rows == {'ddp': 'ok', 'fsdp': 'failed'}
    assert said in ended.stdout
