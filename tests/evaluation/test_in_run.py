"""Evaluation on tasks while a run trains: it changes nothing in the run, and its scores are those of evaluate.py."""

import importlib.util
import json
import math
import random
import re

import numpy as np
import pytest
import torch
from launch import TINY_MODEL, TINY_RUN, run_forked, run_function, run_many, run_ranks
from layouts import layout_of
from outputs import metrics
from precision import apart
from pretrained import save_model
from short import slow_but

from evaluation import in_run, sampling
from model import GPT, ModelConfig
from text.language import OwnLanguage
from text.tokenizer import load_tokenizer

ROWS = {
    'choices': [
        {'context': context, 'choices': ['abcd', 'abce', 'no', ' self'][: 2 + n % 3], 'gold': n % 2}
        for n, context in enumerate(['', 'a', 'def ', 'import os, sys', 'x' * 40, 'return'])
    ],
    'contexts': [{'contexts': ['if', 'for it'], 'continuation': 'in x', 'gold': n % 2} for n in range(3)],
    'words': [{'context': 'import', 'continuation': word} for word in ('os', 'sys', 're, json')],
    'texts': [{'text': 'def ' * n} for n in (1, 5, 20)],
    'written': [
        {'prompt': 'import'[: n + 1], 'answer': list('aeorstln')[n:], 'stop': [')'], 'rule': 'contains'}
        | {'max_new_tokens': 3 + n % 2}
        for n in range(6)
    ],
}
SCRIPTS = {
    'ddp': ['train_ddp.py'],
    'fsdp': ['train_fsdp.py'],
    'manual': ['train_fsdp.py', '--fsdp_impl=manual'],
    'context': ['train_parallel.py', '--context_parallel={nproc}', '--dropout=0'],
    'tensor': ['train_parallel.py', '--tensor_parallel={nproc}'],
    'diloco': ['train_diloco.py', '--inner_steps=3'],
    'lora': ['train_ddp.py', '--lora_rank=4', '--learning_rate=0.02'],
    'tuned': ['train_fsdp.py', '--fsdp_impl=manual'],
}
SCRIPTS |= {'deepspeed': ['train_deepspeed.py', '--zero_stage=3']} if importlib.util.find_spec('deepspeed') else {}
# Of these the short suite runs:
SHORT = [('ddp', 1), ('ddp', 2), ('manual', 2), ('tensor', 1), ('tensor', 2), ('diloco', 2), ('lora', 1)]
RUN = [*TINY_RUN, '--dtype=float32', '--batch_size=2', '--block_size=32', '--global_batch_size=4', '--max_iters=5']
RUN += ['--eval_interval=4', '--checkpoint_interval=4', '--keep_checkpoints=3', '--dropout=0.2']


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp('tasks')
    for name, rows in ROWS.items():
        (folder / f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return [folder / f'{name}.jsonl' for name in ROWS]


@pytest.fixture(scope='module')
def runs(data_dir, files, tmp_path_factory, has_slow_tests):
    """{(name, ranks): (out_dir of a run without tasks, of one with tasks)}, both of 5 steps, evaluated after steps 2, 4
    and 5."""
    folder = tmp_path_factory.mktemp('runs')
    models = {'lora': save_model(folder / 'llama', 'llama'), 'tuned': save_model(folder / 'gpt2', 'gpt2')}
    found = {}
    for nproc in (1, 2):
        cases = []
        for name, (script, *more) in SCRIPTS.items():
            if not has_slow_tests and (name, nproc) not in SHORT:
                continue
            of_model = [*TINY_MODEL, '--dataset=tiny', f'--data_dir={data_dir}']
            if name in models:
                of_model = ['--dataset=synthetic', f'--init_from={models[name]}']
            found[name, nproc] = [folder / f'{name}{nproc}_{with_tasks}' for with_tasks in ('without', 'with')]
            # Under tensor parallelism no text can be generated.
            scored = files[: -1 if name == 'tensor' and nproc > 1 else None]
            of_tasks = [f'--eval_tasks={",".join(map(str, scored))}', '--eval_tasks_interval=2']
            for out_dir, keys in zip(found[name, nproc], ([], of_tasks), strict=True):
                keys = [*of_model, *RUN, *(key.format(nproc=nproc) for key in more), *keys, f'--out_dir={out_dir}']
                cases.append({'name': out_dir.name, 'script': script, 'arguments': keys})
        run_many(cases, nproc, folder)
    return found


@pytest.mark.parametrize(
    'name, nproc',
    slow_but(SHORT, [(name, nproc) for name in SCRIPTS for nproc in (1, 2)], lambda *case: case),
)
def test_a_run_is_the_same_to_the_bit_with_and_without(runs, name, nproc):
    without, with_tasks = map(metrics, runs[name, nproc])
    keys = ('step', 'tokens', 'loss', 'lr', 'grad_norm', 'val_loss')
    start = [0] if name in ('lora', 'tuned') else []  # the model is also evaluated before the first step
    assert [row['step'] for row in with_tasks] == [*start, 1, 2, 3, 4, 5]
    for ours, theirs in zip(with_tasks, without, strict=True):
        assert [ours.get(key) for key in keys] == [theirs.get(key) for key in keys]
        assert ('words/acc' in ours) == (ours['step'] in (2, 4, 5)) and 'words/acc' not in theirs
    moved = {row['choices/acc_norm'] for row in with_tasks if 'words/acc' in row}
    moved |= {row['texts/bits_per_byte'] for row in with_tasks if 'words/acc' in row}
    assert len(moved) > 1


def scores_of(row):
    """{task: {score: value}} of a row of metrics.jsonl."""
    found = {name: {} for name in ROWS}
    for key, value in row.items():
        task, _, score = key.partition('/')
        found.get(task, {})[score] = value
    return found


@pytest.mark.parametrize('name', slow_but(['ddp', 'tensor'], SCRIPTS))
def test_evaluate_finds_the_same_scores_to_the_bit_whatever_has_trained_on_1_2_and_3_ranks(runs, files, name, tmp_path):
    of_run = {nproc: scores_of(metrics(runs[name, nproc][1])[-1]) for nproc in (1, 2)}
    keys = [f'--tasks={",".join(map(str, files))}', '--batch_size=2', '--block_size=32', '--dtype=float32']
    cases = ((1, 1, 'none'), (2, 2, 'none'), (2, 3, 'manual'), (2, 1, 'torch'))
    for trained_on, nproc, shard in cases:
        out_dir, results = runs[name, trained_on][1], tmp_path / f'{trained_on}_{nproc}_{shard}.jsonl'
        more = [f'--out_dir={out_dir}', f'--shard={shard}', f'--results={results}', '--device=cpu']
        run_forked('evaluate.py', *keys, *more, nproc=nproc, log=tmp_path / 'log')
        rows = [json.loads(line) for line in results.read_text().splitlines()]
        about = ('task', 'model', 'step', 'num_fewshot', 'protocol', 'items', 'dtype', 'sha256')
        found = {row['task']: {key: value for key, value in row.items() if key not in about} for row in rows}
        for task, expected in of_run[trained_on].items():
            if not expected:
                assert (name, trained_on, task) == ('tensor', 2, 'written')
                continue
            if name != 'tensor' or trained_on == 1:
                assert found[task] == expected, (task, trained_on, nproc, shard)
                continue
            assert found[task].keys() == expected.keys()
            for score, value in expected.items():  # sums over two ranks round differently
                # The error of a standard error is measured by the score whose spread it is. A perplexity is e to the
                # power of nats, so the relative error of the nats is multiplied by their number.
                size = max(abs(value), abs(expected[score.removesuffix('_stderr')]))
                nats = max(1, math.log(size)) if 'perplexity' in score else 1
                assert abs(found[task][score] - value) <= apart() * nats * size, (task, score, nproc, shard)
    assert 'acc_stderr' in found['choices'] and 'bits_per_byte_stderr' in found['texts']
    assert 'acc_stderr' in found['written']


def test_scores_in_bf16_of_a_model_of_transformers_under_ddp_are_evaluates_to_the_bit(files, tmp_path):
    """The run has its weights in float32, evaluate.py has them in bf16."""
    init_from = save_model(tmp_path / 'llama', 'llama')
    keys = ['--dataset=synthetic', f'--init_from={init_from}', *RUN, '--dtype=bfloat16', f'--out_dir={tmp_path}/out']
    tasks = f'{",".join(map(str, files))}'
    run_forked('train_ddp.py', *keys, f'--eval_tasks={tasks}', '--eval_tasks_limit=5', nproc=2, log=tmp_path / 'log')
    more = [f'--out_dir={tmp_path}/out', f'--tasks={tasks}', '--batch_size=2', '--block_size=32', '--dtype=bfloat16']
    more.append('--limit=5')
    run_forked('evaluate.py', *more, f'--results={tmp_path}/results', '--device=cpu', log=tmp_path / 'log')
    expected = scores_of(metrics(tmp_path / 'out')[-1])
    for row in map(json.loads, (tmp_path / 'results').read_text().splitlines()):
        of_task = expected.pop(row['task'])
        assert len(of_task) >= 2 and {name: row[name] for name in of_task} == of_task
    assert not expected


@pytest.mark.slow
def test_each_task_is_a_line_and_the_newest_checkpoint_can_be_evaluated_again(runs, files, data_dir, tmp_path):
    for name in ('ddp', 'diloco'):
        out_dir = runs[name, 2][1]
        before, lines = (out_dir / 'metrics.jsonl').read_text(), (out_dir / 'train.log').read_text().splitlines()
        script, *more = SCRIPTS[name]
        keys = [*TINY_MODEL, '--dataset=tiny', f'--data_dir={data_dir}', *RUN, *more, f'--out_dir={out_dir}']
        keys += [f'--eval_tasks={",".join(map(str, files))}', '--eval_only']
        text = run_forked(script, *keys, nproc=2, log=tmp_path / 'log')
        for task in ROWS:
            (last,) = [line for line in lines if f'step 5 | {task}: ' in line]
            scores = last.partition(' | ')[2].partition(' items')[0]
            assert scores in text and re.match(rf'{task}: \w+ \d+\.\d{{4}} ± \d+\.\d{{4}}', scores)
        assert (out_dir / 'metrics.jsonl').read_text() == before


@pytest.mark.slow
def test_a_resumed_run_may_ask_for_other_tasks(runs, files, data_dir, tmp_path):
    for name in ('fsdp', 'diloco'):
        script, *more = SCRIPTS[name]
        keys = [*TINY_MODEL, '--dataset=tiny', f'--data_dir={data_dir}', *RUN, *more, f'--out_dir={tmp_path / name}']
        run_forked(script, *keys, '--max_iters=3', f'--eval_tasks={files[0]}', '--eval_tasks_interval=0',
                   '--lr_decay_iters=5', nproc=2, log=tmp_path / 'log')  # fmt: skip
        text = run_forked(
            script, *keys, f'--eval_tasks={files[2]}', '--lr_decay_iters=5', nproc=2, log=tmp_path / 'log'
        )
        assert re.search('changed .*step 3: .*eval_tasks', text)
        rows = metrics(tmp_path / name)
        assert [row['step'] for row in rows if 'choices/acc' in row] == [3]
        assert [row['step'] for row in rows if 'words/acc' in row] == [5]
        without = [row['loss'] for row in metrics(runs[name, 2][0])]
        assert [row['loss'] for row in rows] == without


# --- in one process ---------------------------------------------------------------------------------------------------


def score_in_train_mode(folder, data_dir, compiled):
    """(states of the generators before and after, whether each module is in train mode, calls of the watchdog, lines,
    scores, graphs)."""
    import torch._dynamo

    keys = {'n_layer': 2, 'n_head': 2, 'n_embd': 32, 'block_size': 32, 'vocab_size': 257, 'dropout': 0.5}
    model = GPT(ModelConfig(arch='llama', **keys))
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    keys = {'eval_tasks': [f'{folder}/choices.jsonl', f'{folder}/words.jsonl'], 'dataset': 'tiny'}
    keys |= {'data_dir': str(data_dir), 'block_size': 32, 'batch_size': 2}
    keys |= {'eval_tasks_limit': None, 'eval_tasks_chat': False}
    tasks = in_run.tasks_of(keys, layout_of('ddp', 1), OwnLanguage(load_tokenizer('bytes')), None, torch.device('cpu'))
    tokens, graphs = torch.zeros(2, 32, dtype=torch.int64), torch._dynamo.utils.counters['stats']
    if compiled:
        for block in model.blocks:
            block.forward = torch.compile(block.forward, backend='eager')
        model(tokens, tokens)[0].backward()
    compiled_before = graphs['unique_graphs']

    def states():
        return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())

    before, calls, lines = states(), [], []
    scores = tasks.scores(model, 7, lines.append, lambda *call: calls.append(call))
    after, trains = states(), {module.training for module in model.modules()}
    model.eval()
    assert tasks.scores(model, 7, lines.append, lambda *call: None) == scores and not model.training
    if compiled:
        model.train()
        model(tokens, tokens)[0].backward()
    return before == after, trains, calls, lines, scores, (compiled_before, graphs['unique_graphs'])


def test_no_random_number_is_drawn_the_mode_is_restored_and_the_watchdog_sees_each_pass(files, data_dir):
    ((same, trains, calls, lines, scores, _),) = run_function(1, score_in_train_mode, files[0].parent, data_dir, False)
    assert same and trains == {True}
    assert calls == [('evaluation', 7)] * len(calls) and len(calls) >= len(ROWS['choices'])  # up to 4 choices, 2 a pass
    assert [line.partition(': ')[0] for line in lines[:2]] == ['step 7 | choices', 'step 7 | words']
    ((*_, compiled_scores, graphs),) = run_function(1, score_in_train_mode, files[0].parent, data_dir, True)
    assert compiled_scores == pytest.approx(scores) and graphs[0] == graphs[1] > 0  # nothing was compiled for them


@pytest.mark.parametrize('tokens_at_once, at_once', [(0, 2), (40, 4), (1000, 6)])
def test_answers_are_written_as_many_at_once_as_have_the_tokens_of_a_micro_batch(
    files, one_rank, monkeypatch, tokens_at_once, at_once
):
    """The longest of the six prompts has 6 tokens, and answers have up to 4: 10 of these, or as many as choices."""
    write, sizes = sampling.generate_batch, []
    monkeypatch.setattr(
        sampling,
        'generate_batch',
        lambda model, prompts, *more, **k: sizes.append(len(prompts)) or write(model, prompts, *more, **k),
    )
    model = GPT(ModelConfig(vocab_size=257, block_size=32, n_layer=1, n_head=2, n_embd=16))
    encoder = OwnLanguage(load_tokenizer('bytes'))
    evaluation = in_run.Evaluation([files[-1]], encoder, 32, None, 2, torch.device('cpu'), tokens_at_once)
    ((_, scores, *_),) = evaluation.run(model)
    assert sum(sizes) == len(ROWS['written']) and max(sizes) <= at_once and 'acc' in scores
    assert max(sizes) == min(at_once, 3)  # three rows have each of the two max_new_tokens


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('script', ['train_ddp.py', 'train_diloco.py'])
def test_a_mistake_in_a_file_ends_a_run_in_one_line_before_its_first_step(script, files, data_dir, tmp_path):
    good = files[0].read_text()
    (tmp_path / 'bad.jsonl').write_text(good + '{"context": "a", "choices": ["b", "c"], "gold": 2}\n')
    (tmp_path / 'long.jsonl').write_text(json.dumps({'context': 'a', 'choices': ['b', 'c' * 40], 'gold': 0}))
    (tmp_path / 'choices.jsonl').write_text(good)
    prompt = {'prompt': 'a' * 9, 'answer': 'b', 'max_new_tokens': 24}
    (tmp_path / 'prompts.jsonl').write_text(json.dumps(prompt))
    save_model(tmp_path / 'bare', 'gpt2')
    for path in (tmp_path / 'bare').glob('tokenizer*'):
        path.unlink()
    data = ['--dataset=tiny', f'--data_dir={data_dir}', *TINY_MODEL]
    command = [script, *RUN, *(['--inner_steps=5'] if script == 'train_diloco.py' else [])]
    cases = [
        ([*data, f'--eval_tasks={files[1]},{tmp_path}/bad.jsonl'], 'bad.jsonl, row 7: gold=2'),
        ([*data, f'--eval_tasks={tmp_path}/long.jsonl'], 'long.jsonl, row 1: .* 32 tokens'),
        ([*data, f'--eval_tasks={tmp_path}/none.jsonl'], 'none.jsonl'),
        ([*data, f'--eval_tasks={files[0]},{tmp_path}/choices.jsonl'], 'two files .*choices'),
        (['--dataset=synthetic', '--vocab_size=257', *TINY_MODEL, f'--eval_tasks={files[0]}'],
         'eval_tasks .*dataset=synthetic: .*meta.json'),
        (['--dataset=synthetic', f'--init_from={tmp_path}/bare', f'--eval_tasks={files[0]}'], 'no tokenizer'),
        ([*data, f'--eval_tasks={files[0]}', '--eval_tasks_chat'],
         'eval_tasks_chat=True: .*data/tiny has no chat template: leave eval_tasks_chat out$'),
        ([*data, f'--eval_tasks={tmp_path}/prompts.jsonl'],
         'prompts.jsonl, row 1: the prompt has 9 tokens and its answer up to 24, more than the 32'),
    ]  # fmt: skip
    for keys, expected in cases:
        for rank in run_ranks([[*command, *keys, f'--out_dir={tmp_path / "out"}']] * 2):
            lines = rank.stderr.strip().splitlines()
            assert rank.returncode == 1 and re.search(rf'^\[\d\] error: .*{expected}', lines[-1]), rank.stderr
            assert 'Traceback' not in rank.stderr and 'step 1' not in rank.stdout
        assert not (tmp_path / 'out').exists()


def test_answers_have_as_many_tokens_as_the_longest_prompt_leaves_and_at_most_256(tmp_path):
    path, row = tmp_path / 'asked.jsonl', {'answer': 'b', 'rule': 'contains'}

    def opened(window, *lengths, **more):
        path.write_text('\n'.join(json.dumps({'prompt': 'a' * n, **row, **more}) for n in lengths))
        evaluation = in_run.Evaluation([path], OwnLanguage(load_tokenizer('bytes')), window, None, 2, 'cpu')
        return [prompt.max_new_tokens for (prompt,) in evaluation.requests[0]], evaluation.notes

    assert opened(300, 44, 9) == ([256, 256], [])
    room = 'asked: answers may have 40 tokens, which is what the longest prompt leaves of the positions'
    assert opened(256, 9, 216) == ([40, 40], [room])
    assert opened(256, 9, 216, max_new_tokens=30) == ([30, 30], [])
    for lengths, more, says in (
        ([216], {'max_new_tokens': 41}, '216 tokens and its answer up to 41, .* sees: lower max_new_tokens to 40$'),
        ([9, 256], {}, 'row 2: the prompt has 256 tokens .*: shorten it, or raise --block_size'),
    ):
        with pytest.raises(ValueError, match=says):
            opened(256, *lengths, **more)


def test_answers_that_matrices_cut_over_ranks_cannot_write_are_refused_before_the_run(files):
    encoder = OwnLanguage(load_tokenizer('bytes'))
    with pytest.raises(ValueError, match='tensor_parallel=2: written has prompts, .* leave it to `python evaluate.py`'):
        in_run.Evaluation(files, encoder, 32, None, 2, 'cpu', ranks_per_batch=2)
