"""Every kind of model by every script that opens one, under one name; and what a run still knows when its data, or what
it began with, are others or gone."""

import json
import os
import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from launch import REPO, TINY_MODEL, TINY_RUN, fork_script, refusals
from outputs import as_of_step, assert_same_weights, checkpoint_of, column
from precision import assert_same_run
from pretrained import save_model, write_chats
from short import slow_but

from runtime import checkpoint, checkpoint_saver
from runtime.first_weights import run_or_export
from runtime.opened import language_of_run, open_model
from text.control_tokens import plain

KEYS = [*TINY_RUN, '--dtype=float32', '--batch_size=4', '--block_size=64', '--global_batch_size=4', '--max_iters=4']
KEYS += ['--eval_interval=4', '--checkpoint_interval=2', '--keep_checkpoints=3']
OWN = [*TINY_MODEL[:4], '--dataset=text']
# {name: (script, keys)}; {} stands for the folder of all.
RUNS = {
    'llama': ('train_ddp.py', [*OWN, '--arch=llama']),
    'documents': ('train_ddp.py', [*TINY_MODEL[:4], '--arch=enoki', '--dataset=bytes', '--windows=documents']),
    'experts': ('train_ddp.py', [*OWN, '--arch=qwen3', '--n_experts=4', '--experts_per_token=2']),
    'chat': ('train_ddp.py', ['--init_from={}/llama', '--dataset=chats']),
    'pairs': ('train_dpo.py', ['--init_from={}/chat', '--dataset=pairs', '--learning_rate=6e-4']),
    'rewards': (
        'train_grpo.py',
        ['--init_from={}/chat', '--prompts={}/asked.jsonl', '--prompts_per_step=1'],
    ),
    'tuned': ('train_ddp.py', ['--init_from={}/folder', '--dataset=folder_chats', '--rope_theta=500']),
    'lora': (
        'train_ddp.py',
        ['--init_from={}/folder', '--dataset=folder_chats', '--lora_rank=2', '--frozen_dtype=bfloat16'],
    ),
    'nf4': ('train_ddp.py', ['--init_from={}/folder', '--dataset=folder_chats', '--lora_rank=2', '--frozen_dtype=nf4']),
    'native': ('train_ddp.py', ['--init_from={}/folder', '--dataset=folder_chats', '--native=True']),
}
EXPORTS = {f'{name}_exported': name for name in ('llama', 'documents', 'chat', 'lora')}  # the second has model.py in it
KINDS = [*RUNS, *EXPORTS, 'folder', 'earlier']  # the last: a run of a version that kept no language
OF_CHATS = {'chat', 'pairs', 'rewards', 'tuned', 'lora', 'nf4', 'native', 'chat_exported', 'lora_exported', 'folder'}
SAID = {}  # {name of a dataset: what prepare_data.py has printed}, {f'run {name}': what the train script has}
ANSWERED = {}  # {kind: the ids that sample.py has drawn at temperature 0}


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    """A folder with all kinds of models, and in data/ what they were made of."""
    place = tmp_path_factory.mktemp('models')
    (place / 'text.txt').write_text(''.join(f'{n} sheep and {n} goats are {2 * n} animals.\n' for n in range(2000)))
    write_chats(place / 'chats.jsonl')
    with open(place / 'pairs.jsonl', 'w') as file:
        for line in (place / 'chats.jsonl').read_text().splitlines():
            question, answer, *_ = json.loads(line)['messages']
            worse = {**answer, 'content': 'no'}
            file.write(json.dumps({'prompt': [question], 'chosen': [answer], 'rejected': [worse]}) + '\n')
    (place / 'tasks.jsonl').write_text('{"context": "12 sheep and", "continuation": "12 goats"}\n')
    (place / 'asked.jsonl').write_text('{"prompt": "q7", "answer": "0", "max_new_tokens": 4}\n')
    save_model(place / 'folder', 'llama_64')  # whose rows nf4 can store

    def prepare(name, source, *keys):
        command = f'--dataset={place}/{source}', f'--name={name}', f'--data_dir={place}/data', '--val_fraction=0.1'
        SAID[name] = fork_script('prepare_data.py', *command, *keys)[0].stdout
        return SAID[name]

    def train(name):
        script, keys = RUNS[name]
        keys = [key.replace('{}', str(place)) for key in keys]
        out_dir = f'--out_dir={place}/{name}'
        SAID[f'run {name}'] = fork_script(script, *KEYS, f'--data_dir={place}/data', *keys, out_dir)[0].stdout

    prepare('text', 'text.txt', '--vocab_size=300')
    prepare('bytes', 'text.txt', '--tokenizer=bytes')
    for name, source, *keys in (('chats', 'chats.jsonl'), ('text', 'text.txt'), ('pairs', 'pairs.jsonl', '--pairs')):
        prepare(f'folder_{name}', source, *keys, f'--tokenizer={place}/folder')
    train('llama')
    prepare('more_text', 'text.txt', f'--tokenizer={place}/llama')
    said = prepare('chats', 'chats.jsonl', f'--tokenizer={place}/llama')
    assert f'{place}/llama has no chat template: conversations are written as ChatML' in said
    for name in ('documents', 'experts', 'chat', 'tuned', 'lora', 'nf4', 'native'):
        train(name)
    assert 'no chat template' not in prepare('pairs', 'pairs.jsonl', '--pairs', f'--tokenizer={place}/chat')
    prepare('bytes_pairs', 'pairs.jsonl', '--pairs', f'--tokenizer={place}/data/chats')
    train('pairs')
    train('rewards')
    for name, run in EXPORTS.items():
        fork_script('export_model.py', f'--out_dir={place}/{run}', f'--to={place}/{name}')
    shutil.copytree(place / 'llama', place / 'earlier')
    shutil.rmtree(place / 'earlier' / 'model')
    return place


def sample(place, kind, *keys):
    """(the ids that are drawn at temperature 0, what is printed)."""
    common = '--num_samples=1', '--temperature=0', '--max_new_tokens=8', '--show_ids', '--dtype=float32'
    (ended,) = fork_script('sample.py', f'--out_dir={place}/{kind}', *common, '--device=cpu', *keys)
    return json.loads(re.search(r'ids of the text: (\[.*\])', ended.stderr)[1]), ended.stdout


def evaluate(place, kind, *keys, nproc=1):
    results = place / f'{kind}_{nproc}_{"".join(keys).translate({47: "_"})[-20:]}.jsonl'
    command = 'evaluate.py', f'--out_dir={place}/{kind}', f'--results={results}', '--dtype=float32', '--device=cpu'
    fork_script(*command, *keys, nproc=nproc)
    return json.loads(results.read_text().splitlines()[-1])


@pytest.mark.parametrize('kind', KINDS)
def test_each_kind_is_sampled_and_scored_as_what_it_was_made_of(place, kind):
    """An export and the run that it was made of answer alike, and so does a run of an earlier version by its data."""
    asks = ['--prompt=q7', '--chat=True'] if kind in OF_CHATS else ['--prompt=12 sheep']
    ids, text = ANSWERED[kind] = sample(place, kind, *asks)
    assert text.strip() and len(ids) <= 8
    as_text = evaluate(place, kind, f'--tasks={place}/tasks.jsonl')
    assert 1 < as_text['perplexity'] < 1e40
    if kind in OF_CHATS:
        answered = evaluate(place, kind, f'--tasks={place}/asked.jsonl', '--apply_chat_template')
        assert answered['acc'] in (0, 1)
    same_as = EXPORTS.get(kind) or {'earlier': 'llama'}.get(kind)
    if same_as:
        ours = ANSWERED.get(same_as) or sample(place, same_as, *asks)
        assert (ids, text) == ours
        theirs = evaluate(place, same_as, f'--tasks={place}/tasks.jsonl')
        assert as_text['perplexity'] == pytest.approx(theirs['perplexity'], rel=1e-4)


@pytest.mark.parametrize('shard', ['torch', 'manual'])
@pytest.mark.parametrize('kind', ['documents_exported', 'lora', 'native', 'pairs'])
def test_two_ranks_that_share_the_weights_score_as_one_does(place, kind, shard):
    keys = [f'--tasks={place}/tasks.jsonl']
    alone, shared = evaluate(place, kind, *keys), evaluate(place, kind, *keys, f'--shard={shard}', nproc=2)
    assert shared['perplexity'] == pytest.approx(alone['perplexity'], rel=1e-4)


BEGUN_FROM = [
    *(name for name in RUNS if name not in ('pairs', 'rewards')),
    'llama_exported',
    'documents_exported',
    'earlier',
]


@pytest.mark.parametrize('kind', BEGUN_FROM)
def test_a_run_begins_with_the_last_validation_loss_of_the_one_it_begins_from(place, kind, tmp_path):
    made_of = EXPORTS.get(kind) or {'earlier': 'llama'}.get(kind, kind)
    script, keys = RUNS[made_of]
    dataset = [key for key in keys if key.startswith(('--dataset', '--windows'))]
    common = *KEYS, f'--data_dir={place}/data', f'--out_dir={tmp_path}/run', *dataset
    fork_script(script, *common, f'--init_from={place}/{kind}', '--max_iters=1')
    begins = column(tmp_path / 'run', 'val_loss')[0]
    ended = column(place / made_of, 'val_loss')[-1]
    assert begins == ended


@pytest.mark.parametrize('kind', ['chat', 'tuned'])
def test_a_run_on_text_that_begins_with_chats_still_knows_them(place, kind, tmp_path):
    """The runs' scores, evaluate.py, sample.py and the export ask as the model has learned, and stop as it has."""
    run, dataset = tmp_path / 'run', {'chat': 'more_text', 'tuned': 'folder_text'}[kind]
    keys = f'--data_dir={place}/data', f'--dataset={dataset}', f'--eval_tasks={place}/asked.jsonl'
    said = fork_script('train_ddp.py', *KEYS, *keys, f'--init_from={place}/{kind}', f'--out_dir={run}')[0].stdout
    assert '(1 item, by the chat template, ' in said
    assert evaluate(tmp_path, 'run', f'--tasks={place}/asked.jsonl')['chat_template']
    as_text = f'--tasks={place}/tasks.jsonl', '--apply_chat_template=False'
    assert 'chat_template' not in evaluate(tmp_path, 'run', *as_text)
    fork_script('export_model.py', f'--out_dir={run}', f'--to={tmp_path}/export')
    ends = json.loads((tmp_path / 'export' / 'generation_config.json').read_text())['eos_token_id']
    language = open_model(str(run)).language()
    assert {*language.end_of_answer()} <= {*(ends if isinstance(ends, list) else [ends])}
    asked = sample(tmp_path, 'run', '--prompt=q7')
    assert asked == sample(tmp_path, 'run', '--prompt=q7', '--chat')


def test_rewards_are_earned_in_the_form_that_was_learned(place):
    assert checkpoint.read_state(checkpoint_of(place / 'rewards', 4))['config']['prompts_chat'] is True
    assert 'and writes 8 answers to each, by the chat template; the reward is acc' in SAID['run rewards']


def test_who_asks_through_a_template_stops_at_its_end_of_a_turn(place):
    language = open_model(str(place / 'chat')).language()
    (end,) = language.end_of_answer()
    opened = open_model(str(place / 'chat'))
    opened.keys['chats'] = False  # as of a run of an earlier version that has begun from chats
    language = opened.language()
    assert end not in language.stop_tokens
    chat, _ = language.chat_for('apply_chat_template', True)
    assert chat and end in language.stop_tokens


def test_a_folder_with_a_template_is_scored_as_text_and_says_so(place, tmp_path):
    command = 'evaluate.py', f'--out_dir={place}/folder', f'--tasks={place}/asked.jsonl', '--device=cpu'
    (said,) = fork_script(*command, f'--results={tmp_path}/results.jsonl')
    assert 'here a text is continued: --apply_chat_template makes a message of it' in said.stdout
    assert '(1 item, without the chat template, ' in said.stdout


LAYOUTS = {
    'stages': ('train_pipeline.py', ['--pipeline_stages=2']),
    'matrices': ('train_parallel.py', ['--tensor_parallel=2']),
    'shards': ('train_fsdp.py', []),
    'replicas': ('train_diloco.py', ['--num_replicas=2', '--inner_steps=1']),
    'engine': ('train_deepspeed.py', []),
}
OF_LAYOUTS = [('native', layout) for layout in LAYOUTS]
OF_LAYOUTS += [('tuned', 'replicas'), ('tuned', 'engine'), ('lora', 'replicas'), ('nf4', 'replicas'), ('nf4', 'shards')]
SHORT = ['native, stages', 'native, matrices', 'lora, replicas', 'nf4, shards']


@pytest.mark.parametrize('kind, layout', slow_but(SHORT, OF_LAYOUTS, lambda *names: ', '.join(names)))
def test_on_two_ranks_it_begins_with_that_loss_too_whatever_they_share(place, kind, layout, tmp_path):
    script, keys = LAYOUTS[layout]
    if layout == 'engine' and find_spec('deepspeed') is None:
        pytest.skip('pip install -r requirements-deepspeed.txt')
    data = f'--data_dir={place}/data', '--dataset=folder_chats', f'--out_dir={tmp_path}/run'
    more = f'--init_from={place}/{kind}', '--max_iters=1', '--batch_size=2', *keys
    fork_script(script, *KEYS, *data, *more, nproc=2)
    assert_same_run(column(tmp_path / 'run', 'val_loss')[:1], column(place / kind, 'val_loss')[-1:])


def test_a_run_keeps_its_language_when_its_dataset_is_prepared_anew_or_gone(place, tmp_path):
    """A run of an earlier version refuses to speak with another tokenizer, and says which keys help."""
    text, away = place / 'data' / 'text', tmp_path / 'data' / 'text'
    before = sample(place, 'llama', '--prompt=12 sheep')
    away.parent.mkdir()
    shutil.move(text, away)
    earlier = ['sample.py', f'--out_dir={place}/earlier', '--prompt=12 sheep', '--device=cpu']
    try:
        for is_gone in (True, False):
            if not is_gone:
                command = f'--dataset={place}/chats.jsonl', '--text_field={messages}', '--name=text', '--vocab_size=300'
                fork_script('prepare_data.py', *command, f'--data_dir={place}/data')
            assert sample(place, 'llama', '--prompt=12 sheep') == before
            (line,) = refusals([earlier])
            assert ('meta.json is missing' if is_gone else 'it was prepared anew') in line, line
            assert '--data_dir=FOLDER' in line and '--tokenizer=' in line
            assert sample(place, 'earlier', '--prompt=12 sheep', f'--data_dir={tmp_path}/data') == before
            fork_script('export_model.py', f'--out_dir={place}/llama', f'--to={tmp_path}/exported_{is_gone}')
            assert sample(tmp_path, f'exported_{is_gone}', '--prompt=12 sheep') == before
    finally:
        shutil.rmtree(text, ignore_errors=True)
        shutil.move(away, text)


@pytest.mark.parametrize('kind', ['chat', 'tuned'])
def test_a_run_goes_on_without_what_it_began_with(place, kind, tmp_path):
    out_dir = as_of_step(2, place / kind, tmp_path / 'run')
    script, keys = RUNS[kind]
    began_with = place / keys[0].partition('{}/')[2]
    shutil.move(began_with, tmp_path / 'away')
    try:
        keys = [keys[0].replace('{}', str(place)), *keys[1:]]
        fork_script(script, *KEYS, f'--data_dir={place}/data', *keys, f'--out_dir={out_dir}')
    finally:
        shutil.move(tmp_path / 'away', began_with)
    assert_same_weights(out_dir, place / kind, 4)
    assert sample(tmp_path, 'run', '--prompt=q7') == sample(place, kind, '--prompt=q7')


def command_of(place, kind, out_dir, *keys):
    """The command that has made a run, in another out_dir."""
    script, own = RUNS[kind]
    own = [key.replace('{}', str(place)) for key in own]
    return [script, *KEYS, f'--data_dir={place}/data', *own, f'--out_dir={out_dir}', *keys]


@pytest.mark.parametrize(
    'kind, began, other',
    [
        ('chat', 'llama', 'pairs'),
        ('chat', 'llama', 'experts'),  # of another shape
        ('chat', 'llama', 'lama'),
        ('pairs', 'chat', 'llama'),
        ('rewards', 'chat', 'pairs'),
        ('tuned', 'folder', 'tuned'),
        ('tuned', 'folder', 'folder_changed'),
        ('lora', 'folder', 'folder_changed'),
        ('llama', None, 'chat'),
    ],
)
def test_a_run_goes_on_only_with_what_it_began_with(place, kind, began, other, tmp_path):
    """It would train on from its checkpoint, and its config.json would name weights that it has never seen."""
    out_dir = as_of_step(2, place / kind, tmp_path / 'run')
    if other == 'folder_changed' and not (place / other).exists():
        save_model(place / other, 'llama_64', initializer_range=0.2)
    ranks = ['--batch_size=2', *(['--prompts_per_step=2'] if kind == 'rewards' else [])]
    lines = refusals([command_of(place, kind, out_dir, f'--init_from={place}/{other}', *ranks)] * 2)
    was, how = (f'{place}/{began}', 'with ') if began else ('scratch', 'from ')
    state = 'holds other weights' if (place / other).exists() else 'is not there'
    assert lines == 2 * [
        f'error: out_dir={out_dir} holds a run that began {how}{was}, and init_from={place}/{other} {state}: use '
        f'another --out_dir, or --init_from={was}'
    ]


@pytest.mark.parametrize('kind, began', [('chat', 'llama'), ('tuned', 'folder')])
def test_a_run_goes_on_with_the_same_weights_elsewhere(place, kind, began, tmp_path):
    out_dir = as_of_step(2, place / kind, tmp_path / 'run')
    shutil.copytree(place / began, tmp_path / 'copy')
    fork_script(*command_of(place, kind, out_dir, f'--init_from={tmp_path}/copy'))
    assert_same_weights(out_dir, place / kind, 4)


def test_a_run_of_an_earlier_version_goes_on_with_another_name_and_a_warning(place, tmp_path):
    path = Path(checkpoint_of(as_of_step(2, place / 'chat', tmp_path / 'run'), 2))
    state, manifest = (json.loads((path / name).read_text()) for name in ('state.json', 'manifest.json'))
    del state['begun']
    (path / 'state.json').write_text(json.dumps(state))
    manifest['files']['state.json'] = checkpoint_saver.facts_of(path / 'state.json')
    (path / 'manifest.json').write_text(json.dumps(manifest))
    (ended,) = fork_script(*command_of(place, 'chat', tmp_path / 'run', f'--init_from={place}/pairs'))
    said = f'run that began with {place}/llama, and goes on: if init_from={place}/pairs holds other weights, they are'
    assert said in ended.stdout.partition(' training tokens')[0], ended.stdout  # the first line behind the versions


@pytest.mark.parametrize(
    'script, kind, keys',
    [
        ('train_ddp.py', 'tuned', ['--dataset=folder_chats']),
        ('train_ddp.py', 'nf4', ['--dataset=folder_chats']),
        ('train_dpo.py', 'lora', ['--dataset=folder_pairs']),
        ('train_grpo.py', 'tuned', ['--prompts={}/asked.jsonl', '--prompts_chat', '--prompts_per_step=1']),
    ],
)
def test_a_run_that_begins_with_a_run_is_planned_as_well(place, script, kind, keys):
    keys = [key.replace('{}', str(place)) for key in keys]
    (ended,) = fork_script(script, *KEYS, f'--data_dir={place}/data', f'--init_from={place}/{kind}', *keys, '--dry_run')
    assert f'model: llama of {place}/{kind}' in ended.stdout and 'memory per rank' in ended.stdout


@pytest.mark.parametrize(
    'name, says',
    [
        ('lama', 'did you mean --KEY={}/llama?'),
        ('', 'it holds the runs chat, documents, '),
        ('llama/checkpoints/step_00000004', 'that is within the run {}/llama: give --KEY={}/llama'),
        ('llama/model', 'that is within the run {}/llama: give --KEY={}/llama'),
        ('data/text', 'that is a dataset'),
    ],
)
def test_a_name_that_is_no_run_is_answered_with_the_one_that_was_meant(place, name, says):
    for key, command in (
        ('out_dir', ['sample.py', '--device=cpu']),
        ('init_from', ['train_ddp.py', *KEYS, f'--data_dir={place}/data', '--dataset=folder_chats']),
    ):
        (line,) = refusals([[*command, f'--{key}={os.path.join(place, name)}']])
        assert says.replace('{}', str(place)).replace('KEY', key) in line, line
        assert line.endswith(' --step=4') == (key == 'out_dir' and 'step' in name)


def test_what_a_model_cannot_be_begun_with_is_said_with_the_command_that_mends_it(place, tmp_path):
    common = [*KEYS, f'--data_dir={place}/data', f'--out_dir={tmp_path}/run', '--dataset=folder_chats']
    ddp, export = 'train_ddp.py', '`python export_model.py --out_dir='
    for script, keys, says in (
        (ddp, ['--init_from={}/lora', '--lora_rank=4'], f'lora_rank=4 .*has lora_rank=2: .*{export}'),
        (ddp, ['--init_from={}/native', '--native=False'], 'native=False .*has native=True'),
        (ddp, ['--init_from={}/llama'], 'knows the tokens of .*--tokenizer=.*/llama`'),
        (ddp, ['--init_from={}/earlier'], 'knows the tokens of .*--tokenizer=.*/data/text`'),
        (ddp, ['--init_from={}/llama', '--dataset=text', '--lora_rank=2'], export),
        (
            'train_pipeline.py',
            ['--init_from={}/lora'],
            f'{export}.*/lora`, and begin with that folder and --native=True',
        ),
        ('train_parallel.py', ['--init_from={}/tuned', '--tensor_parallel=2'], 'models of transformers are not cut'),
        ('train_deepspeed.py', ['--init_from={}/nf4'], 'DeepSpeed keeps all weights in one dtype: use train_fsdp.py'),
    ):
        lines = refusals([[script, *common, *(key.replace('{}', str(place)) for key in keys)]] * 2)
        assert all(re.search(says, line) for line in lines), lines
    assert not (tmp_path / 'run').exists()


DATASETS = 'text bytes more_text chats pairs bytes_pairs folder_chats folder_text folder_pairs'.split()


@pytest.mark.parametrize('name', DATASETS)
def test_the_command_that_prepare_data_names_next_can_be_typed(place, name, tmp_path):
    lines = [line.partition(': ')[2] for line in SAID[name].splitlines() if line.startswith(('next: ', 'on one GPU: '))]
    python, *command = shlex.split(lines[-1].replace('OUT_DIR', str(place / 'chat')))
    assert python == 'python' and (REPO / command[0]).exists()
    shorter = ['--max_iters=2', '--device=cpu', '--eval_sequences=8', f'--out_dir={tmp_path}/run', '--warmup_iters=1']
    wide = ['--batch_size=1', '--global_batch_size=1'] if 'folder' in name else []
    fork_script(*command, *shorter, *wide)
    assert len(column(tmp_path / 'run', 'loss')) >= 1 and (tmp_path / 'run' / 'DONE').exists()


@pytest.mark.parametrize('name', RUNS)
def test_the_command_that_a_run_names_at_its_end_can_be_typed(place, name):
    (line,) = [line for line in SAID[f'run {name}'].splitlines() if ' next: ' in line]
    python, *command = shlex.split(line.partition(' next: ')[2])
    (ended,) = fork_script(*command, '--prompt=q7', '--max_new_tokens=4', '--device=cpu')
    assert python == 'python' and ended.stdout.strip()


def test_preferences_and_rewards_are_learned_gently_where_nothing_else_is_said(place, tmp_path):
    """One pass, at a rate that a large model bears; how many steps a config file says still counts."""
    (tmp_path / 'asked.jsonl').write_text((place / 'asked.jsonl').read_text() * 40)
    (tmp_path / 'steps.py').write_text('max_iters = 70\n')
    common = '--block_size=64', '--device=cpu', '--dry_run'
    for script, keys, steps in (
        ('train_dpo.py', ['--dataset=folder_pairs', f'--data_dir={place}/data'], r'\d+'),
        ('train_grpo.py', [f'--prompts={tmp_path}/asked.jsonl', '--prompts_per_step=2'], '20'),
    ):
        command = script, *keys, *common, f'--init_from={place}/folder'
        said = fork_script(*command)[0].stdout
        assert re.search(f'schedule\n  {steps} steps .*\n  adamw: warm-up over 10 steps to learning rate 1e-06\n', said)
        assert 'WARNING' not in said and (script == 'train_grpo.py' or '1.00 epochs of folder_pairs' in said)
        said = fork_script(script, f'{tmp_path}/steps.py', *command[1:], '--lora_rank=2')[0].stdout
        assert '\n  70 steps ' in said and 'try --learning_rate=1e-05, as is usual for LoRA' in said


def test_a_folder_that_a_faster_rank_has_made_is_no_run_that_goes_on(tmp_path):
    (tmp_path / 'out' / 'checkpoints').mkdir(parents=True)
    config = SimpleNamespace(init_from='someone/in-the-cache-of-the-hub', out_dir=str(tmp_path / 'out'))
    assert run_or_export(config) is None
    (tmp_path / 'out' / 'checkpoints' / 'step_00000002').mkdir()
    assert run_or_export(config) == config.out_dir


def test_in_a_run_system_messages_are_asked_as_they_were_learned(place):
    keys = {'windows': 'stream', 'chats': True, 'dataset': 'chats'}
    for folds in (False, True):
        config = SimpleNamespace(**keys, fold_system=folds)
        run = SimpleNamespace(
            config=config, pretrained=None, learns_from='text', language_folder=str(place / 'chat' / 'model')
        )
        messages = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'q7'}]
        assert ('system' in plain(language_of_run(run).chat(messages, {}))) == (not folds)


def test_a_table_of_bytes_that_is_too_short_is_refused(place, tmp_path):
    shutil.copytree(place / 'data' / 'text', tmp_path / 'text')
    np.save(tmp_path / 'text' / 'token_bytes.npy', np.ones(9, dtype=np.uint16))
    keys = [*KEYS, *OWN, f'--data_dir={tmp_path}', f'--out_dir={tmp_path}/run']
    (line,) = refusals([['train_ddp.py', *keys]])
    assert 'token_bytes.npy has 9 tokens, the data ' in line and line.endswith(': delete it')
