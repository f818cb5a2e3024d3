"""What is not finite is named where it is read, and never chosen by: weights of folders, log-likelihoods, logits."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from launch import TINY_RUN, refusals, run_function
from pretrained import POSITIONS, save_model
from safetensors.torch import load_file, save_file

from evaluation import in_run, sampling, tasks
from huggingface import convert, finetune, loading, native, self_test
from huggingface.files import SINGLE, Weights
from huggingface.pretrained import Pretrained
from model import GPT, ModelConfig
from runtime.opened import Opened

CPU = torch.device('cpu')
NAMES = {
    'llama': 'model.layers.1.mlp.up_proj.weight',
    'qwen3_moe': 'model.layers.1.mlp.experts.3.down_proj.weight',
    'gpt2': 'transformer.ln_f.weight',
}


@pytest.fixture(scope='module')
def originals(tmp_path_factory):
    root = tmp_path_factory.mktemp('originals')
    return {kind: save_model(root / kind, kind) for kind in NAMES}


def changed(folder, to, change):
    """A copy of a folder with other numbers in its files. change: changes {name: tensor} in place."""
    shutil.copytree(folder, to)
    weights = load_file(to / SINGLE)
    change(weights)
    save_file(weights, to / SINGLE, metadata={'format': 'pt'})
    return str(to)


def spoil(name, value=math.nan):
    """Sets the last number of a tensor, which is in the rows of the last rank."""

    def change(weights):
        weights[name].view(-1)[-1] = value

    return change


def enlarge(weights):
    """Makes the numbers in a block larger than float16 can hold; all weights can be held."""
    for name in ('gate', 'up', 'down'):
        weights[f'model.layers.1.mlp.{name}_proj.weight'] *= 3e4


def model_on_meta(pretrained, dtype=torch.float32):
    with torch.device('meta'):
        return finetune.for_training(pretrained, dtype)


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', NAMES)
@pytest.mark.parametrize('value', [math.nan, -math.inf])
def test_every_reader_of_a_folder_names_the_tensor_that_is_not_finite(originals, tmp_path, kind, value):
    folder = changed(originals[kind], tmp_path / 'spoilt', spoil(NAMES[kind], value))
    pretrained = Pretrained(folder, block_size=POSITIONS)
    readers = {
        'training, evaluate.py': lambda: loading.load(model_on_meta(pretrained).to_empty(device='cpu'), pretrained),
        'sample.py': lambda: loading.weights_of_folder(pretrained, model_on_meta(pretrained)),
        'export_model.py of LoRA': lambda: loading.base_weights(model_on_meta(pretrained), pretrained, {}),
        'a folder of our own': lambda: convert.weights_of_export(folder, None),
    }
    if kind == 'qwen3_moe':  # whose experts have other names in memory: rank 0 loads the whole model
        readers['training, evaluate.py'] = lambda: loading.whole_model(pretrained)
    if kind == 'llama':
        ours = native.model_config_of(pretrained)
        readers['native'] = lambda: native.Weights(pretrained, ours).initial_value('blocks.1.mlp.up.weight')
    for who, read in readers.items():
        with pytest.raises(
            ValueError, match=f'{folder}.*{NAMES[kind].split(".")[-2]}.* is not finite .1 of '
        ) as refused:
            read()
        assert '\n' not in str(refused.value), who


def test_float8_is_read(tmp_path):
    save_file({'small': torch.ones(4, 4).to(torch.float8_e4m3fn)}, tmp_path / SINGLE)
    assert Weights(str(tmp_path)).read('small', slice(1, 3)).shape == (2, 4)
    save_file({'small': torch.full((4, 4), math.nan).to(torch.float8_e4m3fn)}, tmp_path / SINGLE)
    with pytest.raises(ValueError, match='small is not finite .8 of 8 numbers'):
        Weights(str(tmp_path)).read('small', slice(1, 3))


def test_scripts_end_in_one_line_on_every_rank_though_one_alone_reads_it(originals, tmp_path):
    folder = changed(originals['llama'], tmp_path / 'spoilt', spoil(NAMES['llama']))
    rows = tmp_path / 'rows.jsonl'
    rows.write_text(json.dumps({'context': 'a', 'choices': ['b', 'c'], 'gold': 0}))
    train = ['train_fsdp.py', *TINY_RUN, '--fsdp_impl=manual', f'--init_from={folder}', f'--out_dir={tmp_path / "out"}']
    train += ['--dataset=synthetic', '--max_iters=1', '--batch_size=1', '--block_size=32']
    for command, nproc in (
        (train, 2),
        (['evaluate.py', f'--out_dir={folder}', f'--tasks={rows}', '--shard=torch', '--device=cpu'], 2),
        (['sample.py', f'--out_dir={folder}', '--prompt=a', '--device=cpu'], 1),
    ):
        for line in refusals([command] * nproc):
            assert f'spoilt/{SINGLE}: {NAMES["llama"]} is not finite (1 of ' in line, line
    assert not (tmp_path / 'spoilt' / 'results.jsonl').read_text()


# --- what is computed -------------------------------------------------------------------------------------------------

TASKS = {
    'choices': {'context': 'a', 'choices': ['b', 'cd'], 'gold': 0},
    'words': {'context': 'a', 'continuation': 'bc'},
    'texts': {'text': 'abcd'},
    'prompts': {'prompt': 'a', 'answer': 'b', 'max_new_tokens': 3},
}


@pytest.fixture(scope='module')
def overflows(originals, tmp_path_factory):
    """(a folder whose model overflows in float16, files of tasks)"""
    root = tmp_path_factory.mktemp('overflows')
    for name, row in TASKS.items():
        (root / f'{name}.jsonl').write_text(f'{json.dumps(row)}\n' * 3)
    return changed(originals['llama'], root / 'large', enlarge), [root / f'{name}.jsonl' for name in TASKS]


def scores_of(folder, file, dtype, protocol):
    """What a run says and logs of a task, and whether the model is in train mode as before."""
    pretrained = Pretrained(folder, block_size=POSITIONS)
    model = model_on_meta(pretrained, dtype).to_empty(device='cpu')
    loading.load(model, pretrained)
    encoder = Opened(folder, folder, pretrained=pretrained).language()
    evaluation = in_run.Evaluation([file], encoder, POSITIONS, pretrained, 2, CPU, protocol=protocol)
    lines = []
    return evaluation.scores(model, 7, lines.append, lambda *call: None), lines, model.training


@pytest.mark.parametrize(
    ('task', 'protocol'), [*((task, 'harness') for task in TASKS), ('choices', 'core'), ('words', 'core')]
)
def test_a_run_says_in_place_of_a_score_that_its_model_overflows(overflows, task, protocol):
    folder, files = overflows
    file = files[list(TASKS).index(task)]
    ((row, (line,), trains),) = run_function(1, scores_of, folder, file, torch.float16, protocol)
    assert row == {} and trains
    assert re.match('step 7 .* WARNING: no more scores: .* not finite: the model overflows in float16', line), line
    assert task == 'prompts' or f'{file}, row 1, and 2 more of 3 items' in line
    ((row, (line,), trains),) = run_function(1, scores_of, folder, file, torch.float32, protocol)
    assert row and 'not finite' not in line and trains  # in float32 all of it is finite


def test_scripts_end_in_one_line_where_the_model_overflows(overflows, tmp_path):
    folder, files = overflows
    for name, more in (('evaluate.py', [f'--tasks={file}']) for file in (files[0], files[3])):
        for line in refusals([[name, f'--out_dir={folder}', *more, '--device=cpu', '--dtype=float16']] * 2):
            assert 'not finite: the model overflows in float16; use --dtype=bfloat16' in line, line
    assert not (Path(folder) / 'results.jsonl').read_text()
    for draw in ('--temperature=0', '--temperature=1'):
        keys = [f'--out_dir={folder}', '--prompt=abc', '--device=cpu', '--dtype=float16', '--num_samples=1', draw]
        (line,) = refusals([['sample.py', *keys]])
        assert 'logits after 3 tokens are not finite: the model overflows in float16' in line


def test_the_self_test_does_not_blame_packing(overflows):
    folder, _ = overflows
    pretrained = Pretrained(folder, block_size=POSITIONS)
    model = model_on_meta(pretrained, torch.float16).to_empty(device='cpu')
    loading.load(model, pretrained)
    with pytest.raises(ValueError) as refused:
        self_test.run(model, model, pretrained, loaded=False, packed=True, device=CPU)
    assert re.fullmatch('self-test: logits are not finite: .*/large overflows in float16; .*', str(refused.value))


@torch.no_grad()
def test_no_token_is_drawn_from_logits_that_are_not_finite():
    model = GPT(ModelConfig(arch='llama', n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=20))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    assert len(sampling.generate_batch(model, [[1, 2]], 3)[0]) == 3
    model.head.weight[7] = -math.inf  # times numbers of either sign
    with pytest.raises(sampling.NotFinite, match='logits after 2 tokens are not finite: .* float32; .*diverged'):
        sampling.generate_batch(model, [[1, 2]], 3)


def test_a_perplexity_of_nan_is_not_infinite():
    assert math.isnan(tasks.perplexity_of(math.nan, 0.0)[0]) and tasks.perplexity_of(-800.0, 0.0)[0] == math.inf
