"""The house keeps its rules: scripts differ by their lesson only, modules stand alone."""

import ast
import difflib
import re

import pytest
from launch import REPO

TRAIN_SCRIPTS = sorted(path.name for path in REPO.glob('train_*.py'))
SCRIPTS = {*TRAIN_SCRIPTS, 'prepare_data.py', 'download_model.py', 'export_model.py', 'sample.py', 'compare.py'}
MODULES = {path.name for path in REPO.glob('*.py')} - SCRIPTS
MAY_IMPORT = {'finetune.py': {'model', 'hf_files'}, 'hf_native.py': {'model'}, 'modeling_gpt.py': {'model'}}
MAY_IMPORT['estimate.py'] = {'scaling'}

LONGER = {
    'finetune.py': 690,
    'fsdp_manual.py': 670,
    'diloco.py': 630,
    'telemetry.py': 675,
    'compare.py': 555,
}
LONGER |= {'optim.py': 575, 'checkpoint.py': 570, 'train_diloco.py': 525}

# Where DDP and FSDP differ on purpose. All other blocks between rulers are the same to the letter.
LESSON = {'', 'KNOBS', 'BATCH AND DATA', 'SHARD', 'WEIGHTS', 'EVALUATION', 'LOOP'}
# And FSDP and DiLoCo.
LESSON_OF_DILOCO = {'', 'KNOBS', 'BATCH AND DATA', 'PROCESS GROUP', 'SHARD', 'OUTER OPTIMIZER', 'RESUME', 'LOG'}
LESSON_OF_DILOCO |= {'EVALUATION', 'LOOP', 'END'}
# And FSDP and DeepSpeed.
LESSON_OF_DEEPSPEED = {'', 'KNOBS', 'BATCH AND DATA', 'SHARD', 'WEIGHTS', 'ENGINE', 'EVALUATION', 'LOOP'}


def blocks(script):
    """{name: text} of what stands between `# --- NAME ---` rulers."""
    parts = re.split(r'^# --- ([A-Z ]+)[-:].*$', (REPO / script).read_text(), flags=re.MULTILINE)
    return dict(zip(['', *(name.strip() for name in parts[1::2])], parts[0::2], strict=True))


def imports(path):
    """Names of the modules that a file imports, at its top or inside of functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


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


def test_a_key_has_one_default_and_one_meaning_in_all_train_scripts():
    meanings = {}
    for script in TRAIN_SCRIPTS:
        for line in re.findall(r'^    \w+(?:: [^=]+)? = .*$', blocks(script)['KNOBS'], flags=re.MULTILINE):
            key = re.match(r' *(\w+)', line)[1]
            assert meanings.setdefault(key, line) == line or key == 'eval_interval', f'{script} has another {key}'
    assert len(meanings) >= 80


def test_scripts_and_modules_stay_short():
    for name in SCRIPTS | MODULES:
        lines = len((REPO / name).read_text().splitlines())
        limit = LONGER.get(name, 400 if name in TRAIN_SCRIPTS else 550)
        assert lines <= limit, f'{name} has {lines} lines'


@pytest.mark.parametrize('module', sorted(MODULES))
def test_a_module_imports_no_other_and_no_script(module):
    ours = {name.removesuffix('.py') for name in SCRIPTS | MODULES}
    assert imports(REPO / module) & ours <= MAY_IMPORT.get(module, set())


def test_no_heavy_package_is_imported_until_it_is_needed():
    """transformers, datasets, wandb and matplotlib cost seconds, and are missing on some machines."""
    heavy = {'transformers', 'datasets', 'wandb', 'matplotlib', 'tensorboard', 'tiktoken', 'pyarrow', 'deepspeed'}
    for name in SCRIPTS | MODULES - {'modeling_gpt.py'}:  # which lives inside of transformers
        for node in ast.parse((REPO / name).read_text()).body:
            names = {alias.name.split('.')[0] for alias in getattr(node, 'names', []) if isinstance(node, ast.Import)}
            names |= {node.module.split('.')[0]} if isinstance(node, ast.ImportFrom) else set()
            assert not names & heavy, f'{name} imports {names & heavy} at its top'
