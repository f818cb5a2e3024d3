"""The lessons in sizes that hardly divide, with all that can be combined: prove.py's judge compares with one process.

A row below is a layout in words, each of which stands for keys. These also say which script runs it.
"""

import shutil
from unittest import mock

import numpy as np
import pytest
from launch import REPO, run_function
from pretrained import save_model
from router_weights import first_weights

import prove
from dataset.shards import read_shard, write_shard
from huggingface.finetune import OWN_ATTENTION
from keys import Keys
from knobs import read_knobs
from model import GPT

WORDS = {
    'sharded': {'accumulate': 'sharded'},
    'offload': {'cpu_offload': 'params'},
    'units of 2': {'blocks_per_unit': 2},
    **{f'batches of {n}': {'batch_size': n} for n in (1, 6)},
    **{f'inputs {mode}': {'activation_checkpointing': mode} for mode in ('full', 'selective', 'offload')},
    **{f'zero {stage}': {'zero_stage': stage} for stage in (1, 2, 3)},
    **{f'prefetch {units}': {'prefetch': units} for units in (0, 2)},
    **{f'{impl} {n}': {'context_parallel': n, 'context_impl': impl} for impl in ('ring', 'gather') for n in (2, 4)},
    **{f'tensor {n}': {'tensor_parallel': n} for n in (2, 4)},
    **{f'experts {n}': {'expert_parallel': n} for n in (2, 4)},
    **{f'stages {n}': {'pipeline_stages': n} for n in (1, 2, 4)},
    'chunks 2': {'pipeline_chunks': 2},
    'copies 2': {'replicate_size': 2},
    'manual': {'fsdp_impl': 'manual'},
    'fsdp': {},
    'ddp': {},
}
SCRIPT_OF = {'expert_parallel': 'train_parallel.py', 'tensor_parallel': 'train_parallel.py'}
SCRIPT_OF |= {'context_parallel': 'train_parallel.py', 'pipeline_stages': 'train_pipeline.py'}  # the last one counts

# Of 30, 41 and 6 rows the last of 4 ranks gets fewer or none. Of 90 tokens it gets only padding, if matrices are cut.
ODD = dict(arch='gpt2', n_layer=5, n_head=3, n_kv_head=None, n_embd=30, mlp_hidden_dim=41, bias=False, windows='stream')
EVEN = dict(n_layer=4, n_head=4, n_kv_head=4, head_dim=6, n_embd=24, mlp_hidden_dim=40, vocab_size=90)
GPT2 = EVEN | dict(arch='gpt2', n_kv_head=None)
LLAMA, QWEN3 = EVEN | dict(arch='llama'), EVEN | dict(arch='qwen3', attention_gate=True)
NEAR = dict(window_pattern='SLS', window_size=5, logit_softcap=0.3)
EXPERTS = dict(arch='qwen3', n_layer=2, n_head=4, n_kv_head=1, n_embd=40, n_experts=8, expert_hidden_dim=24)
EXPERTS |= dict(router_aux=1.0, router_z=0.01, windows='stream')
MUP = dict(parametrization='completep', base_width=12, base_depth=1)
HALF = dict(windows='documents', dataset='halves')
MODELS = {  # of documents if they do not say windows='stream'
    'gpt2': ODD,
    'biases, sgd': ODD | dict(bias=True, optimizer='sgd', learning_rate=0.05),
    'untied': GPT2 | dict(tie_embeddings=False),
    'tied': GPT2 | dict(windows='stream'),
    'enoki': EVEN | dict(arch='enoki', n_kv_head=None, z_loss=1e-3, windows='stream'),
    'llama': LLAMA | dict(windows='stream'),
    'grouped': LLAMA | dict(n_kv_head=2, z_loss=1e-3),
    'near': LLAMA | dict(n_kv_head=1, **NEAR),
    'qwen3': QWEN3 | dict(n_kv_head=1),
    'qwen3 near': QWEN3 | dict(n_kv_head=2, tie_embeddings=True, **NEAR),
    'completep': LLAMA | dict(n_kv_head=2, **MUP),
    'experts': EXPERTS,
    'half of them': EXPERTS,  # all tokens are theirs, so that some ranks compute nothing
    'one half, then the other': EXPERTS | HALF,
    'shared expert': EXPERTS
    | dict(shared_expert_dim=20, shared_expert_gate=True, router_scores='sigmoid', router_scale=2.5, router_bias=1e-3)
    | dict(expert_groups=4, groups_per_token=2),
    'dense layers': EXPERTS | dict(n_layer=4, dense_layers=2, mlp_hidden_dim=57),
    'muon': QWEN3 | dict(optimizer='muon'),
    'muon, experts': EXPERTS | dict(optimizer='muon'),
    'bf16': LLAMA | dict(dtype='bfloat16'),
    'bf16 qwen3': QWEN3 | dict(dtype='bfloat16', n_kv_head=2, windows='stream'),
    'fp16': ODD | dict(dtype='float16'),
    'frozen': dict(init_from='gpt2', freeze=r'wte|wpe|h\.0\.'),
    'all but norms': dict(init_from='gpt2', freeze='^(?!.*ln_)'),
    **{f'{kind} of transformers': dict(init_from=kind) for kind in OWN_ATTENTION},
}
MATRIX = [
    ', '.join(['manual', stage, *sharded, *mode])
    for stage in ('zero 3', 'zero 2', 'zero 1')
    for sharded in ([], ['sharded'])
    for mode in ([], ['inputs full'], ['inputs selective'])
]
FEW = [MATRIX[0], MATRIX[10], MATRIX[14]]
WAYS = ['batches of 6', 'inputs full, zero 2', 'inputs offload, sharded', 'manual']
WAYS += ['manual, inputs full, prefetch 0, batches of 6', 'manual, inputs selective, zero 2, sharded']
WAYS += ['manual, inputs offload, zero 1, units of 2']
BOTH = [WAYS[0], WAYS[5]]
HALVES = ['experts 2', 'experts 2, manual, inputs full', 'experts 2, manual, inputs selective, batches of 1']
ROWS = {  # {(model, ranks): layouts}
    ('gpt2', 1): FEW,
    ('gpt2', 2): [*MATRIX, 'ddp', 'fsdp', 'zero 2, sharded, inputs full', 'manual, prefetch 0', 'manual, units of 2',
                  'manual, prefetch 2, sharded', 'manual, offload', 'ring 2, manual'],
    ('gpt2', 3): [*MATRIX, 'fsdp', 'manual, prefetch 2, sharded'],
    ('gpt2', 4): [*FEW, 'manual, copies 2', 'stages 4', 'stages 2, chunks 2', 'stages 4, batches of 6'],
    ('biases, sgd', 2): ['manual', 'fsdp'],
    ('untied', 2): ['tensor 2, inputs full', 'gather 2', 'manual'],
    ('untied', 3): ['manual'],
    ('untied', 4): ['stages 4', 'tensor 4, manual', 'ring 2, tensor 2, inputs full', 'gather 4, manual'],
    ('tied', 2): ['tensor 2, manual', 'gather 2, manual'],
    ('tied', 4): ['tensor 4', 'stages 2, tensor 2', 'stages 2'],
    ('enoki', 2): ['manual', 'tensor 2, inputs full', 'ring 2'],
    ('enoki', 3): ['manual'],
    ('enoki', 4): ['manual', 'fsdp', 'tensor 2, copies 2, manual', 'gather 2, manual, inputs selective',
                   'stages 2, chunks 2'],
    ('llama', 2): ['manual', 'ring 2', 'gather 2, manual'],
    ('llama', 4): ['tensor 4', 'ring 2', 'stages 2, inputs full'],
    ('grouped', 2): ['tensor 2, manual, inputs full', 'ring 2, manual, inputs selective'],
    ('grouped', 4): ['tensor 2', 'ring 2', 'ring 4', 'ring 2, tensor 2, manual', 'stages 1, tensor 2',
                     'stages 2, tensor 2, inputs full'],
    ('near', 4): ['stages 2', 'stages 4'],
    ('qwen3', 2): ['ring 2, manual, inputs full'],
    ('qwen3', 4): ['ring 4, manual'],
    ('qwen3 near', 2): ['tensor 2'],
    ('qwen3 near', 4): ['tensor 2, manual, inputs selective', 'stages 2', 'stages 2, chunks 2, tensor 2'],
    ('completep', 2): ['tensor 2, manual, inputs selective'],
    ('experts', 2): ['fsdp', 'manual', *(f'experts 2, {way}' for way in WAYS)],
    ('experts', 4): [f'{layout}, {way}' for layout in ('experts 4', 'experts 2, ring 2', 'experts 2, copies 2')
                     for way in BOTH] + [f'experts 2, {way}' for way in WAYS],
    ('half of them', 2): HALVES,
    ('half of them', 4): ['experts 4', 'experts 4, manual, inputs full', 'experts 2, copies 2'],
    ('one half, then the other', 2): HALVES,
    ('shared expert', 2): ['fsdp', 'experts 2, manual, inputs selective'],
    ('shared expert', 4): ['experts 2, copies 2'],
    ('dense layers', 2): ['fsdp', 'experts 2', 'experts 2, manual, units of 2, sharded', 'experts 2, manual, zero 1',
                          'experts 2, manual, prefetch 2, zero 2, inputs full', 'ring 2, manual'],
    ('dense layers', 4): ['experts 4, manual', 'experts 2, copies 2, manual, inputs selective'],
    ('muon', 2): ['tensor 2', 'tensor 2, manual, zero 1', 'stages 1, tensor 2'],
    ('muon', 4): ['tensor 4', 'tensor 2, copies 2, manual', 'tensor 2, ring 2', 'stages 2, tensor 2',
                  'stages 1, tensor 2'],
    ('muon, experts', 2): ['experts 2', 'experts 2, manual'],
    ('muon, experts', 4): ['experts 4', 'experts 2, manual', 'experts 2, copies 2'],
    ('bf16', 2): ['tensor 2', 'ring 2, manual', 'manual', 'fsdp', 'manual, sharded, zero 1', 'stages 2'],
    ('bf16', 3): ['manual'],
    ('bf16', 4): ['tensor 4', 'stages 4', 'stages 2, tensor 2', 'manual, copies 2, sharded', 'ring 2'],
    ('bf16 qwen3', 2): ['tensor 2, manual', 'ring 2'],
    ('fp16', 2): ['manual, inputs full', 'fsdp', 'stages 2, inputs selective'],
    ('fp16', 3): ['manual'],
    ('frozen', 2): ['manual', 'fsdp'],
    ('frozen', 3): ['manual'],
    ('all but norms', 2): ['manual'],
    **{(model, 2): ['ring 2'] for model in MODELS if model.endswith('of transformers')},
}  # fmt: skip
SHORT = {
    ('gpt2', 2): [*(MATRIX[number] for number in (0, 4, 8, 9, 13, 17)), 'manual, units of 2', 'manual, offload'],
    ('gpt2', 3): ['fsdp'],
    ('gpt2', 4): ['manual, copies 2', 'stages 4'],
    ('enoki', 2): ['manual'],
    ('frozen', 2): ['manual'],
    ('fp16', 2): ['manual, inputs full'],
    ('bf16', 2): ['manual'],
    ('bf16', 4): ['stages 2, tensor 2'],
    ('muon', 4): ['tensor 2, copies 2, manual', 'stages 1, tensor 2'],
    ('muon, experts', 4): ['experts 2, manual'],
    ('shared expert', 2): ['experts 2, manual, inputs selective'],
    ('dense layers', 2): ['experts 2, manual, units of 2, sharded'],
    ('untied', 4): ['tensor 4, manual', 'ring 2, tensor 2, inputs full', 'gather 4, manual', 'stages 4'],
    ('qwen3 near', 4): ['tensor 2, manual, inputs selective', 'stages 2', 'stages 2, chunks 2, tensor 2'],
    ('grouped', 4): ['ring 2', 'ring 4'],
    ('experts', 4): [f'experts 2, {WAYS[0]}', f'experts 2, {WAYS[4]}'],
    ('one half, then the other', 2): [HALVES[2]],
}


def beginning_with(weights, function, *arguments):
    """function(*arguments), where a GPT begins with the weights {name: tensor}, or with its own if there are none.

    In a process of its own, since ranks are forked only by one that has computed no gradient."""
    (found,) = run_function(1, begin_with, weights, function, arguments, backend=None)
    return found


def begin_with(weights, function, arguments):
    initial_value = (lambda model, name, *args: weights[name]) if weights else GPT.initial_value
    with mock.patch.object(GPT, 'initial_value', initial_value):
        return function(*arguments)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Datasets: random, and halves, in which all tokens of every other document are 128 and above."""
    folder = tmp_path_factory.mktemp('lessons')
    (folder / 'random').mkdir()
    prove.make_data(folder / 'random', False, prove.SMALL['block_size'])
    shutil.copytree(folder / 'random', folder / 'halves')
    shard = folder / 'halves/train_000000.bin'
    tokens = np.array(read_shard(shard))
    write_shard(shard, tokens + 128 * (((tokens == 0).cumsum() % 2 == 1) & (tokens > 0)), np.uint16)
    return folder


@pytest.fixture(scope='module')
def alone(folder):
    """alone(model): (what one process computes of it, its first weights)."""
    found = {}

    def of(model):
        if model not in found:
            keys = {'dataset': 'random', 'data_dir': folder, 'seed': Keys.seed, **MODELS[model]}
            if kind := keys.get('init_from'):
                keys['init_from'] = save_model(folder / kind, kind, sliding_window=None)  # ranks share no windows
                (folder / kind / 'tokenizer.json').unlink()  # some classes would replace parts of it
            keys = prove.keys_of_runs(keys, keys, prove.Config, 'text') | {'global_batch_size': 24}
            options = [f'--{key}={value}' for key, value in keys.items()]
            weights = first_weights(options, halves=True) if 'half' in model else None
            found[model] = beginning_with(weights, prove.OneProcess, 'text', keys, folder), weights
        return found[model]

    return of


CASES = [
    pytest.param(*of, row, marks=() if row in SHORT.get(of, ()) else pytest.mark.slow)
    for of, rows in ROWS.items()
    for row in rows
]


@pytest.mark.parametrize('model, ranks, row', CASES)
def test_a_layout_computes_what_one_process_computes(folder, alone, model, ranks, row):
    keys = {key: value for word in row.split(', ') for key, value in WORDS[word].items()}
    script = 'train_ddp.py' if row == 'ddp' else 'train_fsdp.py'
    script = [script, *(SCRIPT_OF[key] for key in SCRIPT_OF if key in keys)][-1]
    assert keys.keys() <= read_knobs(REPO / script).keys()
    one, weights = alone(model)
    found = beginning_with(weights, prove.row_of, row, script, ranks, one, keys, folder)
    assert found['verdict'] == 'ok', '\n'.join([*prove.lines_of(found), found.get('traceback', '')])


def test_the_rows_of_the_short_suite_are_there():
    assert all({*rows} <= {*ROWS[of]} for of, rows in SHORT.items())
