"""The house keeps its rules (see the README's tree): who imports whom, how long files are, what stands only once."""

import ast
import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import REPO, environment

TRAIN_SCRIPTS = sorted(path.name for path in REPO.glob('train_*.py'))
SCRIPTS = {*TRAIN_SCRIPTS, 'prepare_data.py', 'download_model.py', 'export_model.py', 'sample.py', 'compare.py'}
SCRIPTS |= {'evaluate.py'}
LESSONS = {'fsdp_manual.py', 'context_manual.py', 'pipeline_manual.py', 'diloco.py', 'deepspeed_engine.py'}
TENSOR = {'tensor_manual.py'}  # a lesson, too, but lower: estimate.py cuts a model with it, to see what a rank has
SHARED = {'data.py', 'optim.py'}
ROOMS = ('runtime', 'text', 'huggingface', 'comparison', 'exchange', 'pool')
# From the top to the bottom: a file imports what lies below it, and a file of a room also its room.
# Of runtime/ some look above: estimate.py counts a model and its optimizer's groups, offload.py steps a part of them,
# setup.py opens data, evaluation.py has text/ tokenize tasks and score them.
FLOORS = [
    SCRIPTS,
    {'pool'},
    LESSONS,
    {'comparison'},
    {'runtime/estimate.py', 'runtime/offload.py', 'runtime/setup.py', 'runtime/evaluation.py'},
    TENSOR,
    SHARED,
]
FLOORS += [{'text', 'huggingface'}, {'runtime', 'exchange'}, {'configurator.py', 'model.py'}]
FILES = [*sorted(REPO.glob('*.py')), *(path for room in ROOMS for path in sorted((REPO / room).glob('*.py')))]
NAMES = [path.relative_to(REPO).as_posix() for path in FILES]

LONGER = {'train_diloco.py': 545, 'optim.py': 653, 'fsdp_manual.py': 663, 'diloco.py': 611, 'model.py': 640}
LINES_IN_ALL = 21_650

# Where DDP and FSDP differ on purpose. All other blocks between rulers are the same to the letter.
LESSON = {'', 'KNOBS', 'BATCH AND DATA', 'SHARD', 'WEIGHTS', 'EVALUATION', 'LOOP'}
# And FSDP and DiLoCo.
LESSON_OF_DILOCO = {'', 'KNOBS', 'BATCH AND DATA', 'PROCESS GROUP', 'SHARD', 'OUTER OPTIMIZER', 'RESUME', 'LOG'}
LESSON_OF_DILOCO |= {'EVALUATION', 'LOOP', 'END'}
# And FSDP and DeepSpeed.
LESSON_OF_DEEPSPEED = {'', 'KNOBS', 'BATCH AND DATA', 'SHARD', 'WEIGHTS', 'ENGINE', 'EVALUATION', 'LOOP'}
# And FSDP and a pipeline.
LESSON_OF_PIPELINE = {'', 'KNOBS', 'BATCH AND DATA', 'STAGE', 'WEIGHTS', 'EVALUATION', 'LOOP'}


def blocks(script):
    """{name: text} of what stands between `# --- NAME ---` rulers."""
    parts = re.split(r'^# --- ([A-Z ]+)[-:].*$', (REPO / script).read_text(), flags=re.MULTILINE)
    return dict(zip(['', *(name.strip() for name in parts[1::2])], parts[0::2], strict=True))


def imports(name):
    """The files of ours that a file imports, at its top or inside of functions."""
    found = set()
    for node in ast.walk(ast.parse((REPO / name).read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module, *(f'{node.module}.{alias.name}' for alias in node.names)]
        else:  # modeling_gpt.py's `.model` lies beside it only in an exported folder
            continue
        files = {f'{module.replace(".", "/")}{end}' for module in modules for end in ('.py', '/__init__.py')}
        found |= files & set(NAMES)
    return found


def floor_of(name):
    places = (name, name.partition('/')[0])
    return next(number for number, floor in enumerate(FLOORS) if floor & set(places))


# --- scripts ----------------------------------------------------------------------------------------------------------


def test_ddp_and_fsdp_differ_by_at_most_90_lines():
    lines = [(REPO / name).read_text().splitlines() for name in ('train_ddp.py', 'train_fsdp.py')]
    changed = [line for line in difflib.unified_diff(*lines, n=0) if re.match(r'[+-](?![+-]{2} )', line)]
    assert 0 < len(changed) <= 90


def test_what_is_not_the_lesson_is_the_same_to_the_letter():
    ddp, fsdp = blocks('train_ddp.py'), blocks('train_fsdp.py')
    assert set(fsdp) - set(ddp) == {'SHARD'} and set(ddp) <= set(fsdp)
    assert len(ddp) > 10
    for name in ddp.keys() - LESSON:
        assert ddp[name] == fsdp[name], f'block {name} has drifted'


def test_what_diloco_leaves_as_it_is_in_fsdp_is_the_same_to_the_letter():
    fsdp, diloco = blocks('train_fsdp.py'), blocks('train_diloco.py')
    assert set(diloco) - set(fsdp) == {'OUTER OPTIMIZER'} and set(fsdp) <= set(diloco)
    for name in fsdp.keys() - LESSON_OF_DILOCO:
        assert fsdp[name].strip() == diloco[name].strip(), f'block {name} has drifted'


def test_what_deepspeed_leaves_as_it_is_in_fsdp_is_the_same_to_the_letter():
    fsdp, deepspeed = blocks('train_fsdp.py'), blocks('train_deepspeed.py')
    assert set(deepspeed) - set(fsdp) == {'ENGINE'} and set(fsdp) <= set(deepspeed)
    for name in fsdp.keys() - LESSON_OF_DEEPSPEED:
        assert fsdp[name].strip() == deepspeed[name].strip(), f'block {name} has drifted'
    ddp = blocks('train_ddp.py')['EVALUATION']
    assert ddp.strip() == deepspeed['EVALUATION'].strip(), 'an engine is evaluated like a module'


def test_what_a_pipeline_leaves_as_it_is_in_fsdp_is_the_same_to_the_letter():
    fsdp, pipeline = blocks('train_fsdp.py'), blocks('train_pipeline.py')
    assert set(pipeline) - set(fsdp) == {'STAGE'} and set(fsdp) - set(pipeline) == {'SHARD'}
    for name in pipeline.keys() - LESSON_OF_PIPELINE:
        assert fsdp[name].strip() == pipeline[name].strip(), f'block {name} has drifted'


def test_a_key_has_one_default_and_one_meaning_in_all_train_scripts():
    meanings = {}
    for script in TRAIN_SCRIPTS:
        for line in re.findall(r'^    \w+(?:: [^=]+)? = .*$', blocks(script)['KNOBS'], flags=re.MULTILINE):
            key = re.match(r' *(\w+)', line)[1]
            assert meanings.setdefault(key, line) == line or key == 'eval_interval', f'{script} has another {key}'
    assert len(meanings) >= 80


@pytest.mark.parametrize('script', TRAIN_SCRIPTS)
def test_a_comment_says_what_each_phase_of_a_loop_does(script):
    lines = (REPO / script).read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith('while '))
    stretch = []
    for line in lines[begin + 1 :]:
        if line and not line.startswith(' '):
            break
        if line.strip().startswith('#'):
            stretch = []
        elif line.strip():
            stretch.append(line)
            assert len(stretch) <= 12, f'{script}: no comment in\n' + '\n'.join(stretch)


# Runs a script and prints the files of ours whose functions are called in its third step, which logs nothing.
TRACE = """
import os, runpy, sys, threading
repo, *sys.argv = sys.argv[1:]
sys.path.insert(0, repo)
steps, files = 0, {sys.argv[0]}
def look(frame, event, argument):
    global steps
    if event == 'call':
        if frame.f_code.co_name == 'begin_step' and frame.f_code.co_filename.endswith('meter.py'):
            steps += 1
        if steps == 3:
            files.add(frame.f_code.co_filename)
        if steps == 4:
            sys.setprofile(None)
            print('FILES', *(os.path.relpath(file, repo) for file in files if file.startswith(repo)), 'END', flush=True)
sys.setprofile(look)
threading.setprofile(look)
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def test_a_step_of_fsdp_by_hand_runs_through_at_most_8_files_and_those_that_change_a_number_lie_at_the_top(tmp_path):
    script = REPO / 'train_fsdp.py'
    keys = '--fsdp_impl=manual --dataset=synthetic --vocab_size=97 --n_layer=2 --n_head=2 --n_embd=32 --block_size=32'
    keys += f' --batch_size=2 --device=cpu --max_iters=6 --log_interval=6 --eval_interval=0 --out_dir={tmp_path}'
    command = [sys.executable, '-c', TRACE, str(REPO), str(script), *keys.split()]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert 'FILES' in result.stdout, result.stderr
    files = set(result.stdout.split('FILES')[1].split('END')[0].split()) & set(NAMES)
    changing = {'train_fsdp.py', 'data.py', 'model.py', 'fsdp_manual.py', 'optim.py'}
    assert len(files) <= 8, files
    assert {'train_fsdp.py', 'data.py', 'model.py', 'fsdp_manual.py'} <= files
    assert {name for name in files if not name.startswith('runtime/')} <= changing, files


# --- files ------------------------------------------------------------------------------------------------------------


def test_at_the_top_are_the_scripts_the_lessons_and_what_all_runs_share():
    at_the_top = {path.name for path in REPO.glob('*.py')}
    assert at_the_top == SCRIPTS | LESSONS | TENSOR | SHARED | {'configurator.py', 'model.py'}
    assert len(at_the_top) <= 21


@pytest.mark.parametrize('name', NAMES)
def test_imports_run_down_and_nothing_imports_a_script(name):
    for other in imports(name):
        same_room = '/' in name and name.partition('/')[0] == other.partition('/')[0]
        assert floor_of(other) > floor_of(name) or same_room, f'{name} imports {other}'


def test_no_files_import_each_other_in_a_circle():
    graph = {name: imports(name) - {name} for name in NAMES}
    while leaves := {name for name, others in graph.items() if not others}:
        graph = {name: others - leaves for name, others in graph.items() if name not in leaves}
    assert not graph, f'circles among {graph}'


@pytest.mark.parametrize('name', NAMES)
def test_a_file_is_short(name):
    limit = 400 if name in TRAIN_SCRIPTS else 490 if name in SCRIPTS else 600
    lines = len((REPO / name).read_text().splitlines())
    assert lines <= LONGER.get(name, limit), f'{name} has {lines} lines'


def test_all_files_together_are_short():
    assert sum(len(path.read_text().splitlines()) for path in FILES) <= LINES_IN_ALL


def places(pattern):
    """{file: number of its lines that match}."""
    found = {name: len(re.findall(pattern, (REPO / name).read_text(), re.MULTILINE)) for name in NAMES}
    return {name: count for name, count in found.items() if count}


def test_what_several_files_need_stands_once():
    assert places(r'^ *def ranks_in_words\b') == {'runtime/processes.py': 1}
    assert places(r'^PHASES = ') == {'runtime/__init__.py': 1}
    assert places(r'^ *def sha256_of\b') == {'runtime/files.py': 1}
    # A loop that reads a file into a digest; pool/store.py reads one into memory that has been used before.
    assert set(places(r'\.readinto\(|file_digest\(')) <= {'runtime/files.py', 'pool/store.py'}
    # One atomic write. Elsewhere folders are renamed, and downloads that have become whole, and a shard that loses its
    # name again; a sign of life is replaced several times a second, which is not worth an fsync.
    others = {'runtime/checkpoint.py', 'huggingface/finetune.py', 'download_model.py', 'runtime/health.py'}
    allowed = {'runtime/files.py', 'text/shards.py', *others}
    assert set(places(r'\bos\.(replace|rename)\(|shutil\.move\(')) <= allowed


def test_names_are_assigned_where_they_are_read():
    assert places(r'globals\(\)(\.update|\[)') == {}


def test_no_heavy_package_is_imported_until_it_is_needed():
    """transformers, datasets, wandb and matplotlib cost seconds, and are missing on some machines."""
    heavy = {'transformers', 'datasets', 'wandb', 'matplotlib', 'tensorboard', 'tiktoken', 'pyarrow', 'deepspeed'}
    for path in FILES:
        if path.name == 'modeling_gpt.py':  # which lives inside of transformers
            continue
        for node in ast.parse(path.read_text()).body:
            names = {alias.name.split('.')[0] for alias in getattr(node, 'names', []) if isinstance(node, ast.Import)}
            names |= {node.module.split('.')[0]} if isinstance(node, ast.ImportFrom) and not node.level else set()
            assert not names & heavy, f'{path.name} imports {names & heavy} at its top'


# --- tests and benchmarks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize('path', sorted((REPO / 'tests').rglob('*.py')), ids=lambda path: path.name)
def test_no_test_file_imports_another(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or '']
            assert not [module for module in modules if module.startswith(('test_', 'conftest'))]


@pytest.mark.parametrize('path', sorted((REPO / 'benchmarks').glob('[a-z]*.py')), ids=lambda path: path.name)
def test_a_benchmark_says_its_command_and_has_a_help(path):
    name = f'benchmarks/{path.name}'
    result = subprocess.run(
        [sys.executable, name, '--help'], cwd=REPO, env=environment(), capture_output=True, text=True
    )
    assert result.returncode == 0 and name in result.stdout, result.stdout + result.stderr
    assert name in ast.get_docstring(ast.parse(Path(path).read_text()))
