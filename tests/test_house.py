"""The structure of the code (the tree in docs/code.md): which file may import which, and what may exist only once."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import REPO, environment

from system.files import ROOMS

TRAIN_SCRIPTS = sorted(path.name for path in REPO.glob('train_*.py'))
SCRIPTS = {*TRAIN_SCRIPTS, 'prepare_data.py', 'download_model.py', 'export_model.py', 'sample.py', 'compare.py'}
SCRIPTS |= {'average.py', 'evaluate.py', 'report.py', 'prove.py'}
LESSONS = {f'{name}_manual.py' for name in ('fsdp', 'context', 'tensor', 'expert', 'pipeline')}
LESSONS |= {'diloco.py', 'deepspeed_engine.py', 'float8.py'}
FSDP = {'fsdp.py'}  # it chooses between torch's and fsdp_manual.py
STRATEGY = {'strategy.py'}  # it chooses between DDP and FSDP
SHARED = {'data.py', 'logprobs.py'}
# Floors from top to bottom. A file may import what lies on lower floors, and a file in a room also others of that room.
# Two files lie higher than the rest of their room: one measures replicas, one shows what a run would read.
FLOORS = [
    SCRIPTS,
    {'pool', 'comparison', 'proving', *STRATEGY},
    {'runtime', 'exchange/diloco_check.py'},
    {'evaluation', 'text/peek.py'},
    {'planning'},
    FSDP,
    LESSONS,
    SHARED,
    {'huggingface'},
    {'text'},
    {'dataset', 'exchange'},
    {'system'},
    {'conditions.py', 'configurator.py', 'offload.py', 'optim.py'},
    {'knobs.py', 'muon.py'},
    {'model.py', 'layout.py', 'moments.py'},
    {'keys.py', 'attention.py', 'experts.py', 'loss.py', 'other_names.py', 'pieces.py'},
]
FILES = [*sorted(REPO.glob('*.py')), *(path for room in ROOMS for path in sorted((REPO / room).glob('*.py')))]
NAMES = [path.relative_to(REPO).as_posix() for path in FILES]


def imports(name, at_the_top=False):
    """The files of this project that a file imports, at its top or, unless at_the_top, inside functions, too."""
    tree, found = ast.parse((REPO / name).read_text()), set()
    for node in tree.body if at_the_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module, *(f'{node.module}.{alias.name}' for alias in node.names)]
        else:  # a relative import, as in modeling_gpt.py, whose `.model` is beside it only in an exported folder
            continue
        files = {f'{module.replace(".", "/")}{end}' for module in modules for end in ('.py', '/__init__.py')}
        found |= files & set(NAMES)
    return found


def floor_of(name):
    places = (name, name.partition('/')[0])
    return next(number for number, floor in enumerate(FLOORS) if floor & set(places))


# --- files ------------------------------------------------------------------------------------------------------------


def test_at_the_top_are_the_scripts_the_lessons_and_what_all_runs_share():
    at_the_top = {path.name for path in REPO.glob('*.py')}
    assert at_the_top == SCRIPTS | STRATEGY | FSDP | LESSONS | SHARED | {
        'attention.py',
        'conditions.py',
        'configurator.py',
        'experts.py',
        'keys.py',
        'knobs.py',
        'layout.py',
        'loss.py',
        'model.py',
        'moments.py',
        'muon.py',
        'offload.py',
        'optim.py',
        'other_names.py',
        'pieces.py',
    }


def test_no_room_is_missing():
    assert {*ROOMS} == {path.parent.name for path in REPO.glob('*/__init__.py')} - {'benchmarks'}


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


def read_by(name):
    """The files that importing a file imports."""
    found, waiting = set(), [name]
    while waiting:
        name = waiting.pop()
        waiting += imports(name, at_the_top=True) - found
        found.add(name)
    return found


def test_the_page_to_try_an_idea_in_reads_the_model_the_data_and_the_optimizer_alone():
    found = read_by('train_simple.py')
    assert {name.partition('/')[0] for name in found} == {
        'attention.py',
        'configurator.py',
        'data.py',
        'dataset',
        'keys.py',
        'knobs.py',
        'layout.py',
        'loss.py',
        'model.py',
        'optim.py',
        'pieces.py',
        'system',
        'train_simple.py',
    }
    assert not found & {'system/stopping.py', 'system/processes.py', 'system/collectives.py'}


def test_a_plain_run_reads_nothing_that_only_others_need():
    """Models of transformers, planning's reports and tasks are imported where they are used, and so are lessons."""
    found = read_by('train_ddp.py')
    rooms = {name.partition('/')[0] for name in found}
    assert not rooms & {'huggingface', 'exchange', 'pool', 'comparison', *FSDP, *LESSONS}
    assert not found & {'planning/report.py', 'planning/memory.py', 'evaluation/in_run.py', 'text/sources.py'}
    assert not found & {'experts.py', 'muon.py', 'offload.py', 'planning/rules.py'}


@pytest.mark.parametrize('script', ['sample.py', 'evaluate.py', 'export_model.py'])
def test_what_reads_a_checkpoint_reads_neither_an_optimizer_nor_what_saves(script):
    assert not read_by(script) & {'optim.py', 'moments.py', 'offload.py', 'runtime/checkpoint_saver.py'}


def places(pattern):
    """{file: number of its lines that match}."""
    found = {name: len(re.findall(pattern, (REPO / name).read_text(), re.MULTILINE)) for name in NAMES}
    return {name: count for name, count in found.items() if count}


def test_what_several_files_need_stands_once():
    assert places(r'^ *def ranks_in_words\b') == {'system/processes.py': 1}
    # val_loss, in train_simple.py once more, and what pairs are compared with
    validating = {'data.py', 'evaluation/validation.py', 'runtime/reference.py', 'train_simple.py'}
    assert set(places(r'\beval_batches\(')) == validating
    assert places(r'^PHASES = ') == {'runtime/__init__.py': 1}
    assert places(r'^ *def sha256_of\b') == {'system/files.py': 1}
    # A loop that reads a file into a digest. The others read tensors into their place.
    others = {'pool/store.py', 'runtime/checkpoint_index.py', 'runtime/dcp_files.py'}
    assert set(places(r'\.readinto\(|file_digest\(')) <= {'system/files.py', *others}
    # One function writes files atomically. Elsewhere folders are renamed, finished downloads, and a shard that loses
    # its name again; and a sign of life is replaced several times a second, which is not worth an fsync.
    others = {'huggingface/pretrained.py', 'download_model.py', 'runtime/health.py'}
    others |= {'runtime/checkpoint.py', 'runtime/checkpoint_saver.py'}
    allowed = {'system/files.py', 'dataset/shards.py', *others}
    assert set(places(r'\bos\.(replace|rename)\(|shutil\.move\(')) <= allowed


# Files with calls that could run code, or make a name that another user could guess, and why each is safe.
SAFE = {
    'configurator.py': 'exec of a config file, which is code of the user',
    'evaluation/reward.py': 'exec of the file that the key `reward` names, which is code of the user',
    'proving/ranks.py': 'torch.load of what ranks have just written that prove.py forked, in a folder of mkdtemp',
    'proving/scripts.py': 'torch.load of what another rank of the same prove.py wrote there',
    'runtime/checkpoint_saver.py': "os.getpid is written into a run's lock, and part of no name",
    'runtime/reference.py': "np.load of the run's own file; NumPy refuses pickles by default since 1.16.3",
    'system/collectives.py': 'pickle of an error of this process, to test whether it can be sent to the other ranks',
    'system/devices.py': "torch's folder for what it compiles, in the temporary folder: only if it is this user's",
    'dataset/shards.py': 'np.load of .npy refuses pickles',
    'text/sources.py': 'yaml.load_all with the safe loader makes only numbers, strings, lists and dicts',
    'text/tokenizer.py': "tiktoken's cache in the temporary folder: it compares each file's sha256",
    'report.py': 'reads only the free space of the temporary folder',
    'prepare_data.py': "os.getpid is a worker's first call, and part of no name",
    'benchmarks/real_model.py': 'extractall of a wheel that pip verified: zipfile keeps within the folder',
    'benchmarks/beside_trl.py': 'torch.load of weights only, written by the same benchmark',
    'benchmarks/slow_link.py': 'os.getpid in the names of network namespaces, which root makes; there are no files',
}


def test_what_could_run_code_or_be_guessed_has_a_reason_why_it_is_safe():
    calls = [r'pickle\.', r'torch\.load\(', r'(?<![.\w])(exec|eval)\(', r'yaml\.\w*load', r'np\.load\(', r'\bgetpid\b']
    calls += [
        r'mktemp\(',
        r'gettempdir\(',
        r'extractall\(',
        r'shell=True',
        r'os\.(system|popen)\(',
        r'marshal\.|shelve\.',
    ]
    files = [*FILES, *sorted((REPO / 'benchmarks').glob('*.py'))]
    found = {path.relative_to(REPO).as_posix() for path in files if re.search('|'.join(calls), path.read_text())}
    assert found == set(SAFE)


def test_names_are_assigned_where_they_are_read():
    assert places(r'globals\(\)(\.update|\[)') == {}


def test_no_heavy_package_is_imported_until_it_is_needed():
    """Importing transformers, datasets, wandb or matplotlib takes seconds, and some machines do not have them."""
    heavy = {'transformers', 'datasets', 'wandb', 'matplotlib', 'tensorboard', 'tiktoken', 'pyarrow', 'deepspeed'}
    for path in FILES:
        if path.name == 'modeling_gpt.py':  # only transformers imports it
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


def test_the_list_of_five_minutes_names_tests_that_exist(without_a_test):
    assert without_a_test == []


def test_no_benchmark_imports_anything_of_the_tests():
    of_tests = {path.stem for path in (REPO / 'tests').rglob('*.py') if path.parent.name != 'fuzzing'} | {'fuzzing'}
    for path in sorted((REPO / 'benchmarks').glob('*.py')):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ''] if isinstance(node, ast.ImportFrom) else []
            assert not [module for module in modules if {module, module.partition('.')[0]} & {*of_tests, 'tests'}], path


BENCHMARKS = [path for path in sorted((REPO / 'benchmarks').glob('[a-z]*.py')) if 'argparse' in path.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize('path', BENCHMARKS, ids=lambda path: path.name)
def test_a_benchmark_says_its_command_and_has_a_help(path):
    name = f'benchmarks/{path.name}'
    result = subprocess.run(
        [sys.executable, name, '--help'], cwd=REPO, env=environment(), capture_output=True, text=True
    )
    assert result.returncode == 0 and name in result.stdout, result.stdout + result.stderr
    assert name in ast.get_docstring(ast.parse(Path(path).read_text()))


@pytest.mark.parametrize('path', [*REPO.glob('*.sh'), *REPO.glob('slurm/*.sh')], ids=lambda path: path.name)
def test_what_shell_scripts_import_is_there(path):
    """Nothing imports the Python in a shell script, as in slurm/common.sh, so nothing else sees a rename."""
    for _, program in re.findall(r"<< ?'(\w+)'\n(.*?)\n\1\n", path.read_text(), re.DOTALL):
        for module, names in re.findall(r'^from (\w+) import (\w+)$', program, re.MULTILINE):
            if (file := REPO / module / f'{names}.py').exists():
                for used in re.findall(rf'\b{names}\.(\w+)', program):
                    assert re.search(rf'^(def|class) {used}\b', file.read_text(), re.MULTILINE), f'{file}: no {used}'
            else:
                assert module not in ROOMS, f'{module}/{names}.py is not there'
