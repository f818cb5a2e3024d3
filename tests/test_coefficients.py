"""A coefficient of the loss changes what each kind of run computes, or the run refuses it, or says that it is not read.

The keys are those of keys.py with the tag [may change], so a new one is tested without a line here."""

import pytest
from chats import write_rows
from launch import TINY_EXPERTS, TINY_MODEL, TINY_RUN, run_many
from outputs import column
from prepared import prepare
from pretrained import save_model

from configurator import tagged
from keys import Keys

COEFFICIENTS = sorted(key for key in tagged('may change') if hasattr(Keys, key))
TEXT = ['--dataset=synthetic', '--vocab_size=97', *TINY_MODEL]
FOLDER = ['--init_from=FOLDER/llama', '--dataset=synthetic', '--block_size=32', '--batch_size=2']
KINDS = {  # name: (ranks, script, keys)
    'scratch': (1, 'train_ddp.py', TEXT),
    'mixture': (1, 'train_ddp.py', [*TEXT, *TINY_EXPERTS]),
    'transformers': (1, 'train_ddp.py', FOLDER),
    'mixture of transformers': (1, 'train_ddp.py', [*FOLDER, '--init_from=FOLDER/qwen3_moe']),
    'lora': (1, 'train_ddp.py', [*FOLDER, '--lora_rank=4']),
    'native': (1, 'train_ddp.py', [*FOLDER, '--native=True']),
    'pairs': (1, 'train_dpo.py', [*FOLDER, '--data_dir=FOLDER/data', '--dataset=pairs', '--block_size=64']),
    'rewards': (
        1,
        'train_grpo.py',
        [*FOLDER[:1], *FOLDER[2:], '--prompts=FOLDER/prompts.jsonl', '--prompts_per_step=1'],
    ),
    'teacher': (
        1,
        'train_distill.py',
        [*FOLDER[:1], *FOLDER[2:], '--teacher=FOLDER/other', '--prompts=FOLDER/prompts.jsonl', '--prompts_per_step=2'],
    ),
    'context': (2, 'train_parallel.py', [*TEXT, '--context_parallel=2']),
    'tensor': (2, 'train_parallel.py', [*TEXT, '--arch=llama', '--tensor_parallel=2']),
    'experts': (2, 'train_parallel.py', [*TEXT, *TINY_EXPERTS, '--expert_parallel=2']),
    'pipeline': (2, 'train_pipeline.py', TEXT),
    'replicas': (2, 'train_diloco.py', [*TEXT, '--num_replicas=2', '--inner_steps=1']),
}


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """{(kind, key or None): (its out_dir, what refused it)}. In the first of two steps a router's load is even, and its
    loss has no gradient."""
    folder, cases = tmp_path_factory.mktemp('coefficients'), {1: [], 2: []}
    for name, kind, draw in (('llama', 'llama', 0), ('other', 'llama', 1), ('qwen3_moe', 'qwen3_moe', 0)):
        save_model(folder / name, kind, draw=draw)
    write_rows(folder / 'pairs.jsonl', [{'prompt': f'q{n}', 'chosen': 'g' * n, 'rejected': 'b'} for n in range(1, 9)])
    prepare(folder, '--pairs', f'--dataset={folder}/pairs.jsonl', '--name=pairs', f'--tokenizer={folder}/llama')
    write_rows(folder / 'prompts.jsonl', [{'prompt': 'q', 'answer': 'a', 'rule': 'contains', 'max_new_tokens': 9}] * 2)
    for kind, (ranks, script, keys) in KINDS.items():
        for key in (None, *COEFFICIENTS):
            run = [
                *TINY_RUN,
                '--eval_sequences=0',
                '--keep_checkpoints=0',
                '--max_iters=2',
                '--warmup_iters=0',
                '--dtype=float32',
                *keys,
            ]
            run += [f'--{one}={0.3 if one == key else 0}' for one in COEFFICIENTS if one == key or one == 'router_aux']
            keys_of_run = [text.replace('FOLDER', str(folder)) for text in [*run, f'--out_dir=FOLDER/{kind} {key}']]
            case = {'name': f'{kind} {key}', 'script': script, 'arguments': keys_of_run, 'may_fail': key is not None}
            cases[ranks].append(case)
    found = {}
    for ranks, some in cases.items():
        found |= {name: result.get('error', '') for name, result in run_many(some, ranks, folder).items()}
    return {
        (kind, key): (folder / f'{kind} {key}', found[f'{kind} {key}'])
        for kind in KINDS
        for key in (None, *COEFFICIENTS)
    }


@pytest.mark.parametrize('key', COEFFICIENTS)
@pytest.mark.parametrize('kind', KINDS)
def test_it_changes_the_run_or_the_run_says_why_not(runs, kind, key):
    plain, (out, error) = runs[kind, None][0], runs[kind, key]
    if error:
        assert f'{key}=0.3' in error.splitlines()[-1]
        return
    found, expected = ([column(run, fact) for fact in ('loss', 'grad_norm')] for run in (out, plain))
    warned = f'{key}=0.3 has no effect' in (out / 'train.log').read_text()
    assert (found != expected) != warned, (found, expected)
