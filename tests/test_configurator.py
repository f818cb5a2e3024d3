"""configurator.py and keys.py: defaults, config files and the command line make a script's keys, and every mistake ends
in one line."""

import dataclasses
import math
import re
import runpy
import shutil
import subprocess
import sys

import pytest
from launch import REPO, TINY_MODEL, environment, fork_script, run_script

import conditions
import keys
from conditions import conditions_of, without_effect
from configurator import closest, run_config_file, tagged
from huggingface.pretrained import Pretrained
from keys import GONE
from knobs import Mistake, checked, parse, read_knobs
from model import ModelConfig

TRAIN_SCRIPTS = sorted(path.name for path in REPO.glob('train_*.py'))
SCRIPTS = sorted(path.name for path in REPO.glob('*.py') if read_knobs(path))

SCRIPT = """
'''What the script does.'''
import math
from typing import Literal
from configurator import configure


# --- KNOBS ----
class Config:
    # data
    batch_size = 8  # sequences per rank
    block_size: int | None = None  # None = as long as possible
    name = 'plain'  # a free word
    # optimizer
    learning_rate = 6e-4  # peak
    mode: Literal['slow', 'fast', 'very fast'] = 'slow'  # how to go
    precision: Literal['bf16', 'fp16'] | None = (
        None  # None = full
    )
    rule: Literal[
        32, 512
    ] = 32  # over several lines
    betas = (0.9, 0.95)  # decay of the moments
    layers = [1, 2]
    use_bias = True  # biases
    share: float | None = None  # of all [result, > 0, < 1]
    step: int | str = 'best'  # or a number [>= 0]
    sizes = [1]  # of each [>= 1]

outside = 1  # not a key
config, explicit = configure(Config)
"""
KEYS = ['batch_size', 'block_size', 'name', 'learning_rate', 'mode', 'precision', 'rule', 'betas', 'layers']
KEYS += ['use_bias', 'share', 'step', 'sizes']


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(*arguments, a="source of a.py", ...) -> {key: value}, with `config`, `explicit` and `where` of the script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('RANK', raising=False)
    (tmp_path / 'train_this.py').write_text(SCRIPT)
    other = SCRIPT.replace('layers = [1, 2]', 'zero_stage = 3  # of the other script only')
    (tmp_path / 'train_other.py').write_text(other)

    def run(*arguments, **files):
        for stem, source in files.items():
            (tmp_path / f'{stem}.py').write_text(source)
        monkeypatch.setattr(sys, 'argv', ['train_this.py', *(f'{stem}.py' for stem in files), *arguments])
        script = runpy.run_path(str(tmp_path / 'train_this.py'))
        config = vars(script['config'])
        where = script['explicit']
        return {**config, 'config': config, 'explicit': set(where), 'where': where}

    return run


@pytest.fixture
def error(run, capsys):
    """error(...) -> the one line that a mistake prints; checks that it is one line and that the exit code is 2."""

    def error(*arguments, **files):
        with pytest.raises(SystemExit) as stopped:
            run(*arguments, **files)
        captured = capsys.readouterr()
        assert stopped.value.code == 2 and captured.out == '' and captured.err.count('\n') == 1, captured
        return captured.err.strip()

    return error


# --- what counts as a key ---------------------------------------------------------------------------------------------


def test_keys_are_the_attributes_of_config_in_order(run):
    script = run()
    assert list(script['config']) == KEYS
    assert script['explicit'] == set()


def test_the_final_value_is_an_attribute_and_explicit_says_where_it_was_set(run):
    script = run('--batch_size=16', a='batch_size = 4; learning_rate = 1')
    assert script['batch_size'] == 16
    assert script['where'] == {'batch_size': 'command line', 'learning_rate': 'a.py'}


def test_a_key_set_to_its_default_counts_as_explicit(run):
    assert run('--batch_size=8')['explicit'] == {'batch_size'}
    assert run(a='learning_rate = 6e-4')['explicit'] == {'learning_rate'}


# --- keys that several scripts share ----------------------------------------------------------------------------------

SHARED = """
from typing import Literal

class Keys:
    # data [result]
    batch_size = 8  # sequences per rank [per job]
    block_size: int | None = None  # None = as long as possible [no tag, 1]
    # system [per job, if batch_size]
    seed = 1  # of everything [result, per job]
    device = 'auto'  # where [may change, if rate > 1]

class MoreKeys:
    '''Of some scripts.'''

    # data
    shuffle = True  # or in order
"""
SHARER = """
'''What the script does.'''
from configurator import configure
from keys import Keys, MoreKeys


class Config(Keys, MoreKeys):
    '''The keys of this script.'''

    # special [result]
    rate = 0.5  # how fast
    # data [per job, if batch_size]
    device = 'cpu'  # only there [may change, if rate > 1]
    # data
    windows = 3  # of each
    # special
    plan = False  # print it


config, explicit = configure(Config)
"""


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A script with a keys.py of its own beside it."""
    (tmp_path / 'keys.py').write_text(SHARED)
    (tmp_path / 'train_shared.py').write_text(SHARER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, 'keys', raising=False)
    return tmp_path / 'train_shared.py'


def test_shared_keys_come_first_and_sections_of_one_name_are_one(shared):
    knobs = read_knobs(shared)
    sections = {'data': 'batch_size block_size device shuffle windows', 'system': 'seed', 'special': 'rate plan'}
    expected = [(key, section) for section, keys in sections.items() for key in keys.split()]
    assert [(key, knob.section) for key, knob in knobs.items()] == expected


def test_tags_of_a_section_hold_for_the_keys_that_have_none(shared):
    knobs = read_knobs(shared)
    assert {key: knob.tags for key, knob in knobs.items() if knob.tags} == {
        'batch_size': ('per job',),
        'block_size': ('result',),
        'seed': ('result', 'per job'),
        'device': ('per job', 'may change'),
        'rate': ('result',),
    }
    conditions = {key: knob.conditions for key, knob in knobs.items() if knob.conditions}
    assert conditions == {'seed': ('if batch_size',), 'device': ('if batch_size', 'if rate > 1')}
    assert knobs['seed'].comment == 'of everything' and knobs['block_size'].comment.endswith('[no tag, 1]')


@pytest.mark.parametrize('now', ['device = 1  # only there [may', "device = 'cpu'  # only there [result, may"])
def test_a_shared_key_cannot_get_a_second_meaning(shared, now):
    shared.write_text(SHARER.replace("device = 'cpu'  # only there [may", now))
    with pytest.raises(TypeError, match='train_shared.py gives device of Keys another type, range or tag'):
        read_knobs(shared)


def test_shared_keys_are_set_and_explained_as_if_they_stood_in_the_script(shared, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', [str(shared), '--batch_size=2', '--windows=4'])
    values = vars(runpy.run_path(str(shared))['config'])
    expected = {'batch_size': 2, 'block_size': None, 'shuffle': True, 'windows': 4, 'seed': 1, 'device': 'cpu'}
    assert values == expected | {'rate': 0.5, 'plan': False}
    monkeypatch.setattr(sys, 'argv', [str(shared), '--help'])
    with pytest.raises(SystemExit):
        runpy.run_path(str(shared))
    lines = [' '.join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines.count('data') == lines.count('special') == 1
    assert '--seed=1 int of everything' in lines and '--device=cpu str only there' in lines


OF_LATE_STAGES = ('learning_rate', 'num_epochs', 'warmup_iters')  # whose defaults differ where a model answers already


def test_a_key_has_one_default_in_all_train_scripts_and_tags_that_keys_py_explains():
    defaults = {}
    for script in TRAIN_SCRIPTS:
        for key, knob in read_knobs(REPO / script).items():
            if script == 'train_simple.py':  # whose defaults are config/quickstart.py's, see tests/test_train_simple.py
                assert {*knob.tags} == {*read_knobs(REPO / 'train_ddp.py')[key].tags} - {'model'}
                continue
            assert {*knob.tags} <= {'result', 'per job', 'path', 'model', 'may change'}, (script, key, knob.tags)
            # the losses of train_dpo.py, and others of train_grpo.py; its beta and that of train_distill.py, as in TRL
            if key in ('loss_type', 'beta') or (key == 'num_generations' and script == 'train_distill.py'):
                continue
            is_late = script in ('train_dpo.py', 'train_grpo.py', 'train_distill.py')
            begins_late = is_late and key in OF_LATE_STAGES
            default = defaults.setdefault((key, begins_late), (knob.default, knob.types, knob.choices))
            assert default == (knob.default, knob.types, knob.choices), (script, key)


def test_the_keys_of_a_model_are_those_that_its_classes_have_and_no_other_key_has_such_a_name():
    fields = {field.name for kind in (ModelConfig, Pretrained) for field in dataclasses.fields(kind)}
    for script in (script for script in TRAIN_SCRIPTS if script != 'train_simple.py'):
        knobs = read_knobs(REPO / script)
        of_model = {key for key, knob in knobs.items() if 'model' in knob.tags}
        assert of_model == fields & {*knobs} - {'trust_remote_code'} | {'heads'}, script
    assert tagged('model') == of_model


PATHS = {  # keys that name files or folders, by script; all train scripts have one row
    'train': {
        *'out_dir data_dir init_from eval_tasks exchange deepspeed_config prompts reward teacher measured'.split()
    },
    'average': {'out_dir', 'to'},
    'prepare_data': {'dataset', 'data_dir', 'tokenizer', 'chat_template', 'verify'},
    'sample': {'out_dir', 'data_dir', 'tokenizer', 'prompts'},
    'evaluate': {'out_dir', 'data_dir', 'tokenizer', 'tasks', 'results', 'samples', 'reward'},
    'export_model': {'out_dir', 'data_dir', 'to'},
    'download_model': {'model', 'to'},
    'compare': {'out_dir', 'plot', 'output'},
    'prove': {'output'},
    'report': {'out_dir'},
}


def test_a_tilde_is_the_home_folder_in_every_key_that_is_a_path(monkeypatch):
    monkeypatch.setenv('HOME', '/home/reader')
    for script in sorted(REPO.glob('*.py')):
        paths = PATHS['train' if script.stem.startswith('train_') else script.stem] if read_knobs(script) else set()
        for key, knob in read_knobs(script).items():
            if 'str' in knob.types and not knob.choices:
                expected = '/home/reader/x' if key in paths else '~/x'
                assert parse('~/x', knob, key) == checked('~/x', knob, key) == expected, (script, key)
            elif 'list' in knob.types and key in paths:
                assert parse('~/x,y/~z', knob, key) == parse(['~/x,y/~z'], knob, key) == ['/home/reader/x', 'y/~z']
                assert parse('2', knob, key) == checked([2], knob, key) == ['2'], 'a file may have this name'
            assert ('path' in knob.tags) == (key in paths), (script, key)


@pytest.mark.parametrize('script', TRAIN_SCRIPTS)
def test_keys_read_from_the_source_are_the_attributes_that_the_class_has_when_it_runs(script):
    module = {'__name__': 'script'}
    exec((REPO / script).read_text().partition('\nconfig, explicit = configure(Config)')[0], module)
    attributes = {key for part in module['Config'].__mro__ for key in vars(part) if key[0] != '_'}
    knobs = read_knobs(REPO / script)
    assert attributes == {*knobs}
    assert all(getattr(module['Config'], key) == knob.default for key, knob in knobs.items())


@pytest.mark.parametrize('key', [key for key in GONE if key != 'top2bit'])
def test_a_key_that_is_gone_is_answered_with_what_to_do(error, key):
    instead = GONE[key][1]
    assert f'--{key} is not a key of ' in error(f'--{key}=0.5') and instead in error(f'--{key}=0.5')
    assert f'a.py: {key} is not a key of ' in error(a=f'{key} = 0.5') and instead in error(a=f'{key} = 0.5')


def test_a_value_that_is_gone_is_answered_with_what_to_do():
    knob = read_knobs(REPO / DILOCO)['exchange_dtype']
    for read in (parse, checked):
        with pytest.raises(Mistake, match="expects 'float32' or .*'int4', given 'top2bit'; it is gone, .*=int4"):
            read('top2bit', knob, '--exchange_dtype')


# --- values on the command line ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('argument', 'key', 'value'),
    [
        ('--learning_rate=1', 'learning_rate', 1.0),
        ('--learning_rate=1e3', 'learning_rate', 1000.0),
        ('--batch_size=1e3', 'batch_size', 1000),
        ('--batch_size=-2', 'batch_size', -2),
        ('--block_size=64', 'block_size', 64),
        ('--block_size=None', 'block_size', None),
        ('--use_bias=false', 'use_bias', False),
        ('--use_bias=False', 'use_bias', False),
        ('--use_bias=true', 'use_bias', True),
        ('--use_bias', 'use_bias', True),
        ('--betas=(0.8, 0.9)', 'betas', (0.8, 0.9)),
        ('--betas=0.8,0.9', 'betas', (0.8, 0.9)),
        ('--betas=[1, 2]', 'betas', (1, 2)),
        ('--layers=(3, 4)', 'layers', [3, 4]),
        ('--layers=3', 'layers', [3]),
        ('--layers=3,4', 'layers', [3, 4]),
        ('--layers=a, b,None', 'layers', ['a', 'b', None]),
        ('--name=a=b=c', 'name', 'a=b=c'),
        ('--name=def ', 'name', 'def '),
        ('--name=123', 'name', '123'),
        ('--name=true', 'name', 'true'),
        ('--name=', 'name', ''),
        ("--name='quoted'", 'name', "'quoted'"),
        ('--mode=very fast', 'mode', 'very fast'),
        ('--precision=None', 'precision', None),
        ('--precision=fp16', 'precision', 'fp16'),
        ('--rule=512', 'rule', 512),
        ('--share=.5', 'share', 0.5),
        ('--share=None', 'share', None),
        ('--step=0', 'step', 0),
        ('--step=best', 'step', 'best'),
        ('--sizes=2,1', 'sizes', [2, 1]),
    ],
)
def test_a_value_on_the_command_line_takes_the_type_of_its_key(run, argument, key, value):
    result = run(argument)[key]
    assert result == value and type(result) is type(value)


def test_a_list_takes_the_words_after_its_bare_flag(run):
    script = run('--layers', 'out/a', 'out/b', '--batch_size=4')
    assert script['layers'] == ['out/a', 'out/b'] and script['batch_size'] == 4
    assert run('--layers', '1,2', '4')['layers'] == [1, 2, 4]
    assert run('--layers', 'a,b')['layers'] == ['a', 'b']


@pytest.mark.parametrize(
    ('argument', 'said'),
    [
        ('--batch_size=1.5', ['--batch_size', 'expects int', "'1.5'"]),
        ('--batch_size=True', ['--batch_size', 'expects int', "'True'"]),
        ('--batch_size=None', ['--batch_size', 'expects int', 'None']),
        ('--batch_size=', ['--batch_size', 'expects int', "''"]),
        ('--batch_size', ['--batch_size needs a value', 'int']),
        ('--learning_rate=fast', ['--learning_rate', 'expects float', "'fast'"]),
        ('--use_bias=1', ['--use_bias', 'expects bool', "'1'"]),
        ('--name=None', ['--name', 'expects str', 'None']),
        ('--block_size=x', ['--block_size', 'expects int or None', "'x'"]),
        ('--betas=0.9', ['--betas', 'expects tuple', "'0.9'"]),
        ('--mode=faster', ['--mode', "expects 'slow' or 'fast' or 'very fast'", "'faster'"]),
        ('--precision=fp8', ['--precision', "expects 'bf16' or 'fp16' or None", "'fp8'"]),
        ('--rule=64', ['--rule', 'expects 32 or 512', "'64'"]),
        ('--share=1', ['--share expects float > 0 and < 1 or None, given 1']),
        ('--share=nan', ['--share expects float > 0 and < 1 or None, given nan']),
        ('--step=-1', ['--step expects int >= 0 or str, given -1']),
        ('--step=nan', ['--step expects int >= 0 or str, given nan']),
        ('--sizes=2,0', ['--sizes expects list of numbers >= 1, given (2, 0)']),
        ('--learning_rate=inf', ['--learning_rate expects float, given inf']),
        ('--batchsize=4', ['did you mean batch_size?']),
        ('--batch-size=4', ['did you mean batch_size?']),
        ('--qqq=4', ['--help']),
        ('--outside=4', ['outside']),
        ('--zero_stage=2', ['train_other.py has it']),
        ('--batch_size 4', ['did you mean --batch_size=4?']),
        ('--use_bias False', ['did you mean --use_bias=False?']),
        ('batch_size=4', ['did you mean --batch_size=4?']),
        ('what', ["'what' ", 'config file']),
        ('nowhere.py', ['nowhere.py cannot be read: No such file or directory']),
        ('--layers', ['--layers needs a value']),
        ('--layers=a c', ["'c' is neither"]),
        ('--layers=a,b c', ['did you mean --layers=a,b,c?']),
        ('--layers=a, c', ['did you mean --layers=a,c?']),
    ],
)
def test_a_mistake_on_the_command_line_is_refused_with_key_given_and_expected(error, argument, said):
    message = error(*argument.split())
    assert all(words in message for words in said), message


def test_a_slip_of_the_finger_is_recognized_in_every_key():
    knobs = read_knobs(REPO / 'train_fsdp.py')
    for key in (key for key in knobs if len(key) > 6):
        middle = len(key) // 2
        without, doubled = key[:middle] + key[middle + 1 :], key[:middle] + key[middle] + key[middle:]
        for slip in (without, doubled, key.replace('_', ''), key.replace('_', '-').replace('-', '_')):
            assert slip in knobs or closest(slip, knobs) == key, (slip, closest(slip, knobs))
    assert closest('max_tokens', read_knobs(REPO / 'sample.py')) == 'max_new_tokens'


@pytest.mark.parametrize(
    'word', ['optimizer_in_bwd', 'model', 'loss', 'profiler', 'quantizer', 'packed', 'eval_batch_size', 'cfg', 'epoch']
)
def test_a_word_for_something_else_gets_no_wrong_hint(word):
    assert closest(word, read_knobs(REPO / 'train_fsdp.py')) is None


def test_a_key_that_has_moved_names_its_new_script(tmp_path):
    """Also in a file, whose run would otherwise be another one. At its default it asks for nothing."""
    for old, moved in keys.MOVED.items():
        for key, new in moved.items():
            assert key in read_knobs(REPO / new) and key not in read_knobs(REPO / old)
    path = tmp_path / 'a.py'
    path.write_text('tensor_parallel = 2\n')
    says = 'tensor_parallel is a key of train_parallel.py: type that in place of train_fsdp.py, and the run goes on '
    for argument, where in (('--tensor_parallel=2', ''), (str(path), f'{path}: ')):
        said = run_script('train_fsdp.py', argument, check=False).stderr
        assert said == f'error: {where}{says}from its checkpoint\n'
    path.write_text('tensor_parallel = 1\n')
    said = run_script('train_fsdp.py', str(path), '--batch_size=0', check=False).stderr
    assert said.startswith('error: --batch_size expects ') and said.count('\n') == 1


def test_a_word_without_a_key_is_taken_for_a_config_file_or_the_first_path():
    for script, word, meant in (
        ('train_ddp.py', 'config/sft_chat', 'config/sft_chat.py'),
        ('compare.py', 'sft_chat.yaml', 'config/sft_chat.py'),
        ('download_model.py', 'meta-llama/Llama-3.2-3B', '--model=meta-llama/Llama-3.2-3B'),
        ('report.py', 'docs', '--out_dir=docs'),
        ('compare.py', 'docs', '--plot docs'),
    ):
        said = run_script(script, word, check=False).stderr
        assert said.endswith(f'neither a config file (*.py) nor --key=value; did you mean {meant}?\n'), said
    said = run_script('download_model.py', '--model=a/b', '--output-dir', 'x', check=False).stderr
    assert 'here it is to: the folder to download into' in said


# --- ranges -----------------------------------------------------------------------------------------------------------


FORMS = {'list': lambda number: [number], 'tuple': lambda number: ((number, 'a'),)}


def holds_numbers(knob):
    default = knob.default if isinstance(knob.default, (list, tuple)) else ()
    is_number = {'int', 'float'} & set(knob.types) and not knob.choices
    return bool(is_number or knob.bounds or any(type(element) in (int, float) for element in default))


def is_refused(read, given, knob):
    with pytest.raises(Mistake, match=r'^key expects .*, given [^\n]*$') as refused:
        read(given, knob, 'key')
    assert ' and '.join(knob.bounds) in str(refused.value)


@pytest.mark.parametrize('script', SCRIPTS)
def test_each_number_of_a_script_has_a_range_and_what_is_outside_is_refused_in_one_line(script):
    outside = {}
    for key, knob in read_knobs(REPO / script).items():
        if not holds_numbers(knob):
            continue
        assert knob.bounds, f'{key} of {script} has no range: [> 0], [>= 0, < 1], ... at the end of its comment'
        as_given = next((form for kind, form in FORMS.items() if kind in knob.types), lambda number: number)
        step = 1e-3 if 'float' in knob.types else 1
        for sign, bound in map(str.split, knob.bounds):
            bound = float(bound) if 'float' in knob.types else int(bound)
            inwards = step if sign[0] == '>' else -step
            checked(as_given(bound if '=' in sign else bound + inwards), knob, key)
            outside.setdefault(key, []).append(bound - inwards if '=' in sign else bound)
        for number in (*outside[key], math.nan, math.inf, -math.inf):
            is_refused(checked, as_given(number), knob)
            is_refused(parse, str(as_given(number)), knob)
    for key, numbers in list(outside.items())[:1]:  # and by the script itself
        command = [sys.executable, REPO / script, f'--{key}={numbers[0]}']
        said = subprocess.run(command, capture_output=True, text=True)
        assert (said.returncode, said.stderr.count('\n')) == (2, 1) and f'--{key} expects' in said.stderr, said.stderr


# --- keys without effect ----------------------------------------------------------------------------------------------

FSDP, DILOCO = 'train_fsdp.py', 'train_diloco.py'
# READ_IF {script: {keys: (what of a run makes them read, what does not)}}, in keys and facts beside the defaults.
READ = {
    FSDP: {
        'windows=stream': ({}, {'is_chat': True}),
        'packing=False': ({'is_chat': True}, {}),
        'trust_remote_code=True': ({'transformers': True}, {}),
        'lr_rule=512': ({'heads': 8}, {}),
        'tokens_per_parameter=8.0': ({'heads': 8}, {'heads': 8, 'max_iters': 9}),
        'dataset=web': ({'dataset_stages': ((1, 'code'),)}, {'dataset_stages': ((0, 'code'), (5, 'books'))}),
        'mlp_hidden_dim=64': ({'n_experts': 8}, {'n_experts': 8, 'expert_hidden_dim': 8}),
        'router_aux=0.1': ({'n_experts': 8}, {'transformers': True}),
        'router_z=0.1': ({'transformers': True, 'has_routers': True}, {'transformers': True, 'has_routers': False}),
        'dropout=0.1': ({'transformers': True, 'has_dropout': True}, {'transformers': True}),
        'omega=2.5': ({'optimizer': 'adana'}, {}),
        'kappa=0.5 delta=4.5': ({'optimizer': 'dana-mk4'}, {'optimizer': 'muon'}),
        'beta1=0.5 beta2=0.5': ({'optimizer': 'muon'}, {'optimizer': 'adana'}),
        'wd_ts=9': ({'optimizer': 'adamw-decay'}, {'optimizer': 'ademamix'}),
        'tf32=True': ({'device': 'cuda:0'}, {'device': 'cpu'}),
        'stop_before_end_s=9': ({'ends_at_s': 1e9}, {'ends_at_s': math.inf}),
    },
    'train_grpo.py': {
        'dataset=x data_dir=x dataset_stages=((1,),) val_dataset=x windows=documents eval_interval=9 '
        'eval_sequences=9 eval_iters=9 global_batch_size=9 loss_spike_guard=True': (
            {'prompts': []},
            {'prompts': ['a.jsonl']},
        ),
        'epsilon=0.1': ({'num_iterations': 2}, {'num_iterations': 1, 'sampled_logps': 'tis'}),
        'epsilon_high=0.1': ({'sampled_logps': 'old'}, {'num_iterations': 1}),
    },
    'sample.py': {
        'num_samples=3': ({}, {'temperature': 0.0}),
        'step=4': ({'is_run': True}, {}),
        'data_dir=x': ({}, {'transformers': True}),
        'trust_remote_code=True': ({'transformers': True}, {}),
    },
    'evaluate.py': {
        'step=4': ({'is_run': True}, {}),
        'data_dir=x': ({}, {'transformers': True}),
        'trust_remote_code=True': ({'transformers': True}, {}),
    },
    'export_model.py': {
        'data_dir=x': ({}, {'transformers': True}),
        'trust_remote_code=True': ({'transformers': True}, {}),
    },
    'prepare_data.py': {
        'fold_system=True train_on_input=True': ({'is_chat': True}, {}),
        'source_config=x': ({'is_hub': True}, {}),
    },
    'compare.py': {
        'seeds=3 at_once=3': ({'sweep': {'seed': [1]}}, {}),
        'inner_steps=3': ({'strategies': ['diloco']}, {'strategies': ['ddp']}),
        'zero_stages=2': ({'strategies': ['fsdp']}, {'strategies': ['ddp']}),
    },
}
CASES = [
    (script, setting, *ways)
    for script, settings in READ.items()
    for settings, ways in settings.items()
    for setting in settings.split()
]


def lines_of(script, setting, given, where='command line', **more):
    """without_effect() of a run with one key set, as by configure()."""
    knobs = read_knobs(REPO / script)
    defaults = type('Config', (), {key: knob.default for key, knob in knobs.items()})
    config, (key, text) = defaults(), setting.split('=')
    vars(config).update({key: knob.default for key, knob in knobs.items()})
    vars(config).update({name: value for name, value in given.items() if name in knobs})
    facts = {name: value for name, value in given.items() if name not in knobs}
    if where == 'command line':  # so are the others
        more |= {name: where for name in given if name in knobs}
    setattr(config, key, parse(text, knobs[key], key))
    return without_effect(script, config, {key: where, **more}, **facts)


@pytest.mark.parametrize(('script', 'setting', 'read', 'unread'), CASES)
def test_a_key_that_is_set_and_not_read_says_so(script, setting, read, unread):
    assert lines_of(script, setting, read) == []
    (line,) = lines_of(script, setting, unread)
    assert line.startswith(f'WARNING: {setting} has no effect here, only ') and '\n' not in line


def test_these_are_all_keys_whose_condition_no_tag_says():
    declared = {
        (script, key)
        for scripts, rows in conditions.READ_IF.items()
        for script in SCRIPTS
        if script.startswith(tuple(scripts.split()))
        for key in ' '.join(rows).split()
        if key in read_knobs(REPO / script)
    }
    tested = {(FSDP if script in TRAIN_SCRIPTS else script, setting.split('=')[0]) for script, setting, *_ in CASES}
    assert {(FSDP if script in TRAIN_SCRIPTS else script, key) for script, key in declared} == tested


def ways_of(condition, knobs):
    """The key that decides by a tag's words, values with which that holds, and values with which it does not; None if
    the script lacks the key."""
    words = condition.replace('if ', '').replace('=', ' ').replace(' ! ', ' != ').split()
    knob = knobs.get(words[words[0] == 'not'])
    if knob is None or words[0] == 'not':
        return knob and (words[1], [False], [True])
    if len(words) == 1:
        on = {'bool': True, 'int': 3, 'float': 0.5, 'list': ['x'], 'str': 'x'}[knob.types[0]]
        return words[0], [on], [type(on)()]
    if words[1] == '>':
        return words[0], [int(words[2]) + 1], [int(words[2])]
    wanted = None if words[-1] == 'None' else words[-1]
    others = [value for value in knob.choices or (0, 2) if value != wanted]
    return words[0], *((others, [wanted]) if words[1] == '!=' else ([wanted], others))


@pytest.mark.parametrize('script', SCRIPTS)
def test_a_key_is_read_if_its_tags_say_so(script):
    """Each condition with the others of its key met."""
    knobs = read_knobs(REPO / script)
    for key, knob in knobs.items():
        ways = [found for condition in knob.conditions if (found := ways_of(condition, knobs))]
        for deciding, met, unmet in ways:
            for value in met + unmet:
                values = {name: knob.default for name, knob in knobs.items()}
                config = type('Config', (), values)()
                vars(config).update(values | {name: fulfilled[0] for name, fulfilled, _ in ways} | {deciding: value})
                setattr(config, key, next(other for other in (*knob.choices, 0.25, 'x') if other != knob.default))
                try:
                    said = without_effect(script, config, {key: 'command line'})
                except ValueError as error:
                    said = [f'WARNING: {error}'] * (key in conditions.REFUSED)
                assert len(said) == (value in unmet), (key, deciding, value, said)
                words = rf'WARNING: {key}=.* has no effect here, only .*\bwith(out)?\b.*--{deciding}\b'
                assert all(re.match(words, line) for line in said), said


def test_a_rule_that_another_key_overrides_is_not_read():
    assert lines_of(FSDP, 'omega=2', {'optimizer': 'adana'}, weight_decay='command line')
    assert lines_of(FSDP, 'omega=2', {'heads': 8}) == []
    assert lines_of(FSDP, 'lr_rule=512', {'heads': 8}, learning_rate='command line')


def test_a_run_says_it_once_for_each_key(tmp_path):
    keys = ['--dry_run', '--dataset=synthetic', '--vocab_size=97', *TINY_MODEL, f'--out_dir={tmp_path / "out"}']
    said = fork_script('train_fsdp.py', *keys, '--device=cpu', '--prefetch=0', '--kappa=0.5', '--tf32')[0].stdout
    assert said.count('has no effect here') == 3
    assert 'WARNING: kappa=0.5 has no effect here, only with --optimizer=adana, ' in said
    (refused,) = fork_script('train_fsdp.py', *keys, '--lora_dropout=0.1', check=False)
    assert refused.stderr.count('\n') == 1 and 'lora_dropout=0.1 has no effect here, only with LoRA' in refused.stderr
    command = [sys.executable, 'report.py', '--lines=3']
    with open('/dev/full', 'w') as full_disk:  # where it ends with its first line, before it has looked at anything
        report = subprocess.run(
            command, cwd=REPO, env=environment(), stdout=full_disk, stderr=subprocess.PIPE, text=True
        )
    warning = "WARNING: lines=3 has no effect here, only with a run's folder as --out_dir\n"
    assert report.stderr.startswith(warning), report.stderr


def test_a_key_of_a_file_is_not_blamed_for_what_the_file_could_not_know(tmp_path):
    """Its own keys make it vain, or those of the command line, or the machine."""
    path = tmp_path / 'a.py'
    path.write_text('# torchrun train_fsdp.py train_diloco.py compare.py config/a.py\n')
    for script, setting, vain, cause in (
        (FSDP, 'min_lr=0.1', {'lr_schedule': 'constant'}, 'lr_schedule'),
        (FSDP, 'omega=2', {'optimizer': 'adana'}, 'weight_decay'),
        (FSDP, 'dropout=0.1', {'transformers': True}, 'init_from'),
        (FSDP, 'windows=stream', {'is_chat': True}, 'dataset'),
        (FSDP, 'tf32=True', {'device': 'cpu'}, None),
        (FSDP, 'stop_before_end_s=9', {'ends_at_s': math.inf}, None),
        (DILOCO, 'error_feedback=True', {'exchange_dtype': 'float32'}, 'exchange_dtype'),
        ('compare.py', 'inner_steps=3', {'strategies': ['ddp']}, 'strategies'),
        (FSDP, 'lora_dropout=0.1', {'lora_rank': 0}, 'lora_rank'),  # otherwise refused
    ):
        here, there = ({cause: where} if cause else {} for where in (str(path), 'command line'))
        assert lines_of(script, setting, vain, str(path), **there) == [], setting
        assert len(lines_of(script, setting, vain, **there)) == 1 if cause != 'lora_rank' else True, setting
        if cause not in (None, 'lora_rank') and setting != 'windows=stream':  # the default, for whoever reads the file
            assert len(lines_of(script, setting, vain, str(path), **here)) == 1, setting


def test_what_the_words_advise_is_not_refused():
    """A folder's model has its own size, and one from scratch neither LoRA nor frozen parts."""
    knobs = read_knobs(REPO / FSDP)
    advice = [needs for key in knobs for needs, _ in conditions_of(key, knobs, FSDP)]
    for needs in advice:
        advised = {*re.findall(r'--(\w+)', needs)}
        own = tagged('model') - {field.name for field in dataclasses.fields(Pretrained)}
        assert 'from scratch' in needs or not advised & own, needs
        assert 'init_from' in advised or 'lora_rank' not in advised, needs
    assert len(advice) > 40


def test_what_is_off_asks_for_nothing():
    for off in ('router_bias=0', 'error_feedback=False', 'async_checkpoint=False', 'wandb_group=None'):
        script = DILOCO if 'error' in off else FSDP
        assert lines_of(script, off, {'keep_checkpoints': 0}) == [], off


SHIPPED = [
    (path.stem, script)
    for path in sorted((REPO / 'config').glob('*.py'))
    for script in SCRIPTS
    if script in path.read_text()
]


@pytest.mark.parametrize(('name', 'script'), SHIPPED)
def test_the_files_in_config_set_no_key_in_vain(name, script):
    path, knobs = str(REPO / 'config' / f'{name}.py'), read_knobs(REPO / script)
    defaults = {key: knob.default for key, knob in knobs.items()}
    given = {key: value for key, value in run_config_file(path, defaults).items() if key in knobs}
    config = type('Config', (), defaults)()
    vars(config).update(defaults | given)
    facts = {'transformers': given.get('init_from', 'scratch') != 'scratch', 'has_dropout': True}
    assert without_effect(script, config, dict.fromkeys(given, path), **facts) == []


def test_a_key_of_a_file_counts_if_the_file_names_the_script(tmp_path):
    path = tmp_path / 'a.py'
    path.write_text('# torchrun train_fsdp.py config/a.py\n')
    assert lines_of(FSDP, 'prefetch=0', {}, str(path))
    assert lines_of(FSDP, 'prefetch=1', {}, str(path)) == [], 'the default, for whoever reads the file'
    path.write_text('# torchrun train_ddp.py config/a.py\n')
    assert lines_of(FSDP, 'prefetch=0', {}, str(path)) == []


# --- config files -----------------------------------------------------------------------------------------------------


def test_a_line_of_yaml_in_a_config_file_is_refused(error):
    """Python takes it for an annotation, which sets nothing."""
    for line in ('layers: 4', 'lerning_rate: 1e-3'):
        name = line.partition(':')[0]
        assert error(a=line).endswith(f'a.py: `{name}: ...` is YAML, and sets nothing in Python: write {name} = ...')


def test_files_run_in_order_and_before_the_command_line_wherever_they_stand(run):
    script = run('--name=last', a='batch_size = 2; learning_rate = 1', b="batch_size = batch_size * 3; name = 'file'")
    assert (script['batch_size'], script['learning_rate'], script['name']) == (6, 1.0, 'last')
    assert script['explicit'] == {'batch_size', 'learning_rate', 'name'}


def test_a_file_may_import_define_functions_and_keep_helpers(run):
    source = """
import math, os
from pathlib import Path
_tokens = 4096
def rows(length):
    return _tokens // length
class Shape: pass
batch_size = rows(1024) if os.path.exists(__file__) else 0
learning_rate = math.sqrt(0.25)
betas = tuple(1 - 10.0**-_i for _i in (1, 2))
layers = [1e3]
"""
    script = run(a=source)
    assert (script['batch_size'], script['learning_rate'], script['betas']) == (4, 0.5, (0.9, 0.99))
    assert script['explicit'] == {'batch_size', 'learning_rate', 'betas', 'layers'}


def test_a_file_that_reads_a_key_does_not_set_it(run):
    assert run(a='_twice = 2 * batch_size')['explicit'] == set()


def test_numpy_numbers_from_a_file_become_plain_numbers(run):
    script = run(a='import numpy as np\nbatch_size = np.int64(3)\nlearning_rate = np.float32(0.5)')
    assert (script['batch_size'], script['learning_rate']) == (3, 0.5)
    assert type(script['batch_size']) is int and type(script['learning_rate']) is float


@pytest.mark.parametrize(
    ('source', 'said'),
    [
        ('batchsize = 3', ['a.py: batchsize', 'did you mean batch_size?', 'begin with _']),
        ('batch_size = 1.5', ['a.py: batch_size', 'expects int', '1.5']),
        ('batch_size = True', ['a.py: batch_size', 'expects int', 'True']),
        ("batch_size = '3'", ['a.py: batch_size', 'expects int', "'3'"]),
        ('use_bias = 1', ['a.py: use_bias', 'expects bool', '1']),
        ("mode = 'faster'", ['a.py: mode', "'fast'", "'faster'"]),
        ('from math import pi as mode', ['a.py: mode', '3.14']),
        ('\nbatch_size = nothing', ['a.py, line 2', 'NameError', 'nothing']),
        ('batch_size = = 3', ['a.py', 'SyntaxError', 'line 1']),
        ("raise ValueError('two\\nlines')", ['a.py, line 1', 'ValueError: two lines']),
        ('raise SystemExit(0)', ['a.py, line 1', 'SystemExit']),
    ],
)
def test_a_mistake_in_a_file_is_one_line_that_names_the_file(error, source, said):
    message = error(a=source)
    assert all(words in message for words in said), message


@pytest.mark.parametrize('given', ['config/enoki_8x.py', 'enoki_8h.py'])
def test_a_missing_file_with_a_name_like_that_of_another_is_asked_about(error, monkeypatch, given):
    monkeypatch.chdir(REPO)
    assert error(given).endswith('did you mean config/enoki_8h.py?')


def test_a_key_of_another_train_script_in_a_file_is_skipped_with_one_notice(run, capsys, monkeypatch):
    script = run(a='zero_stage = 2\nbatch_size = 3', b='zero_stage = 3')
    notice = capsys.readouterr().err
    assert notice.count('\n') == 1 and 'zero_stage (of train_other.py)' in notice
    assert 'zero_stage' not in script['config'] and script['explicit'] == {'batch_size'}
    monkeypatch.setenv('RANK', '1')
    run(a='zero_stage = 2')
    assert capsys.readouterr().err == ''  # one rank says it


def test_a_mistake_under_torchrun_names_the_rank(error, monkeypatch, run):
    monkeypatch.setenv('RANK', '3')
    assert error('--batch_size=x').startswith('[3] error: --batch_size')


def test_a_mistake_of_all_ranks_is_said_once_and_once_more_in_the_summary_of_torchrun():
    result = run_script('train_ddp.py', '--optimizr=adamw', nproc=3, check=False)
    lines = [line for line in result.stderr.splitlines() if 'did you mean optimizer?' in line]
    assert result.returncode == 1 and len(lines) == 2, result.stderr
    said, summed_up = (line.partition('error: ')[0] for line in lines)
    assert said == '[0] ' and summed_up.split() == ['traceback', ':'], lines
    assert 'new message format' not in result.stderr, result.stderr
    # A rank that torchrun ends while it is still importing is in the summary, too, but it says nothing.
    *others, first = re.findall(r'exitcode +: (\S+)', result.stderr)
    assert first == '2' and {*others} <= {'-15'}, result.stderr


def test_a_script_may_be_called_through_a_link_and_without_docstrings(tmp_path):
    """What is raised in the script itself is a user's mistake there, too."""
    (tmp_path / 'link.py').symlink_to(REPO / 'prepare_data.py')
    command = [sys.executable, '-OO', tmp_path / 'link.py', '--tokenizer=bytes', '--vocab_size=300']
    result = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.startswith('[0] error: vocab_size=300 is for '), result.stderr
    assert result.stderr.count('\n') == 1, result.stderr
    (tmp_path / 'train.py').symlink_to(REPO / 'train_ddp.py')  # whose keys are in keys.py, beside the script itself
    command = [sys.executable, '-OO', tmp_path / 'train.py', '--help']
    assert '--n_layer=' in subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout


# --- keys for other scripts -------------------------------------------------------------------------------------------

STARTER = """
from configurator import configure


class Config:
    out_dir = 'out'  # of the starter
    ways = ['a']  # how to start


passed_on = {}
config, explicit = configure(Config, pass_on=passed_on)
"""


@pytest.fixture
def starter(run, tmp_path, monkeypatch):
    """starter(*arguments, a='source of a.py') -> (keys of a script that starts train scripts, keys that it passes
    on)."""

    def starter(*arguments, **files):
        run()  # writes train_this.py and train_other.py
        (tmp_path / 'starter.py').write_text(STARTER)
        for stem, source in files.items():
            (tmp_path / f'{stem}.py').write_text(source)
        monkeypatch.setattr(sys, 'argv', ['starter.py', *(f'{stem}.py' for stem in files), *arguments])
        script = runpy.run_path(str(tmp_path / 'starter.py'))
        return vars(script['config']), script['passed_on']

    return starter


def test_keys_of_train_scripts_are_passed_on_in_their_types(starter):
    config, passed_on = starter('--learning_rate=1', '--zero_stage=2', '--ways=a,b', a='batch_size = 4; ways = ["c"]')
    assert config == {'out_dir': 'out', 'ways': ['a', 'b']}
    assert passed_on == {'batch_size': 4, 'learning_rate': 1.0, 'zero_stage': 2}
    assert type(passed_on['learning_rate']) is float


def test_what_both_have_belongs_to_the_script_that_a_file_was_written_for(starter, tmp_path):
    with_out_dir = SCRIPT.replace('batch_size = 8', "out_dir = 'out/train'  # of the run\n    batch_size = 8")
    (tmp_path / 'train_more.py').write_text(with_out_dir)
    config, passed_on = starter(a="out_dir = 'out/run'; batch_size = 2")
    assert config['out_dir'] == 'out' and passed_on == {'out_dir': 'out/run', 'batch_size': 2}
    config, passed_on = starter(a="out_dir = 'out/mine'; ways = ['a']")
    assert config['out_dir'] == 'out/mine' and not passed_on
    assert starter('--out_dir=out/here')[0]['out_dir'] == 'out/here'


def test_mistakes_in_what_is_passed_on_are_found_at_once(starter, capsys):
    for arguments, said in (
        (['--batch_siz=4'], 'did you mean batch_size?'),
        (['--way=4'], 'did you mean ways?'),
        (['--zero_stage=x'], "--zero_stage expects int, given 'x'"),
        (['--mode=faster'], "expects 'slow' or 'fast'"),
    ):
        with pytest.raises(SystemExit):
            starter(*arguments)
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        starter(a='zero_stage = 1.5')
    assert 'a.py: zero_stage expects int, given 1.5' in capsys.readouterr().err


# --- help -------------------------------------------------------------------------------------------------------------


def test_help_prints_docstring_sections_and_every_key_with_default_type_and_comment(run, capsys):
    with pytest.raises(SystemExit) as stopped:
        run('--help')
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith('What the script does.')
    lines = [' '.join(line.split()) for line in text.splitlines()]
    assert lines.index('data') < lines.index('--batch_size=8 int sequences per rank') < lines.index('optimizer')
    assert '--block_size=None int | None None = as long as possible' in lines
    assert '--layers=[1, 2] list' in lines
    assert [line[2:].split('=')[0] for line in lines if line.startswith('--')] == KEYS
    assert 'KNOBS' not in text


def test_help_into_a_pipe_that_closes_early_says_nothing_more():
    help_of = subprocess.Popen(
        [sys.executable, REPO / 'train_ddp.py', '--help'], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    help_of.stdout.close()  # before a line is written, so that the first write fails
    assert (help_of.stderr.read(), help_of.wait()) == (b'', 0)


def test_configurator_needs_nothing_but_the_standard_library():
    code = 'import configurator, sys; print(*sorted({name.split(".")[0] for name in sys.modules}))'
    result = subprocess.run([sys.executable, '-S', '-c', code], cwd=REPO, capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split()) - {'configurator', 'keys', 'knobs', '__main__'}
    assert loaded <= sys.stdlib_module_names


def test_another_torch_than_the_requirements_allow_is_one_line(error, run, tmp_path):
    for wanted in ('torch>=2.96,<2.99', 'torch>=1.13,<1.99', 'torch>=2.1,<2.5'):
        (tmp_path / 'requirements.txt').write_text(f'# comment\n{wanted}\nnumpy>=1.26\n')
        line = error('--batch_size=4')
        assert 'is installed, not' in line and f"`pip install '{wanted}'`" in line
    (tmp_path / 'requirements.txt').write_text('torch>=2.11,<2.99\n')
    assert run('--batch_size=4')['batch_size'] == 4


# --- without the packages ---------------------------------------------------------------------------------------------


def test_a_script_without_its_packages_names_the_command_that_brings_them(tmp_path):
    for name in ('configurator.py', 'keys.py', 'knobs.py', 'requirements.txt', 'train_ddp.py'):
        shutil.copy(REPO / name, tmp_path)

    def ended():
        command = [sys.executable, '-S', tmp_path / 'train_ddp.py']  # -S: nothing that was installed
        return subprocess.run(command, capture_output=True, text=True, env=environment(PYTHONPATH=''))

    begins = f'error: {sys.executable} has no package torch: '
    assert (ended().returncode, ended().stderr) == (1, f'{begins}`bash {tmp_path}/setup_env.sh`\n')
    (tmp_path / '.venv' / 'bin').mkdir(parents=True)
    (tmp_path / '.venv' / 'bin' / 'activate').touch()
    assert ended().stderr == f'{begins}`source {tmp_path}/.venv/bin/activate`\n'
    (tmp_path / 'torch.py').write_text('import modelz\n')  # a mistake in the code keeps its traceback
    assert "No module named 'modelz'" in ended().stderr and 'Traceback' in ended().stderr
