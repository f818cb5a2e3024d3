"""README.md and docs/ name only files, functions, keys and links that exist; metrics.md names all that runs write."""

import ast
import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch import TINY_EXPERTS, TINY_MODEL, TINY_RUN, run_forked
from outputs import metrics
from short import slow_but

import conditions
from keys import DANA, OPTIMIZERS, SCHEDULES
from system.files import ROOMS

REPO = Path(__file__).resolve().parent.parent
README, CODE = REPO / 'README.md', REPO / 'docs' / 'code.md'
CHAPTERS = sorted((REPO / 'docs').glob('**/*.md'))
TEMPLATES = sorted((REPO / '.github').glob('**/*.md'))
PAGES = [README, REPO / 'AGENTS.md', REPO / 'CONTRIBUTING.md', REPO / 'CHANGELOG.md', *TEMPLATES, *CHAPTERS]
NAMES = [str(page.relative_to(REPO)) for page in PAGES]

TRAIN_SCRIPTS = sorted(path.name for path in REPO.glob('train_*.py'))
SCRIPTS = [*TRAIN_SCRIPTS, 'prepare_data.py', 'download_model.py', 'export_model.py', 'sample.py', 'evaluate.py']
SCRIPTS += ['average.py', 'compare.py', 'prove.py', 'report.py']
ROOMS += ('benchmarks',)

# Files that readers make, or that belong to another project.
THEIRS = {'slurm/local.sh', 'runs.sh', 'train.py', 'table.md', 'console.txt', 'mine.py', 'my_reward.py', 'FILE.py'}
THEIRS |= {f'{name}.png' for name in 'loss phases memory communication experts ladder rates coordinates'.split()}
# Flags of other programs.
FLAGS = {'nnodes', 'nproc_per_node', 'node_rank', 'master_addr', 'master_port', 'standalone', 'local_addr'}  # torchrun
FLAGS |= {'max-restarts', 'rdzv-backend', 'rdzv-id', 'rdzv-endpoint'}
FLAGS |= {'time', 'array', 'account', 'nodes', 'partition', 'signal', 'mem', 'gpus-per-node', 'cpus-per-task'}  # sbatch
FLAGS |= {'exclude', 'gpus-per-task', 'mail-type', 'mail-user'}
FLAGS |= {'more', 'full', 'version', 'durations'}  # tests/run.sh; every script; pytest
FLAGS |= {'config'}  # tune run
FLAGS |= {'key'}  # a placeholder
MISTAKES = {'batchsize', 'gradient_accumulation_steps', 'max-lr'}  # shown together with the error that it causes
# The scripts to which shell scripts pass their arguments; the other files of slurm/ start any train script.
HANDED_ON = {
    'quickstart.sh': ['train_fsdp.py'],
    'diloco.sh': ['train_diloco.py'],
    'pool.sh': ['train_pool.py'],
    'prepare_data.sh': ['prepare_data.py'],
}


def code_blocks(text):
    return re.findall(r'^```\w*\n(.*?)^```', text, flags=re.DOTALL | re.MULTILINE)


def inline_code(text):
    """The spans between backticks, outside of code blocks."""
    return re.findall(r'`([^`\n]+)`', re.sub(r'```.*?```', '', text, flags=re.DOTALL))


@functools.cache
def keys_of(script):
    """The keys that --help of a script lists, or those that a program with argparse declares in its source."""
    if script in SCRIPTS or script == 'planning/rules.py':
        program = ['-m', 'planning.rules'] if script == 'planning/rules.py' else [script]
        answer = subprocess.run(
            [sys.executable, *program, '--help'], cwd=REPO, capture_output=True, text=True, check=True
        )
        keys = set(re.findall(r'^  --(\w+)', answer.stdout, flags=re.MULTILINE))
        assert keys, f'{script} --help lists no keys'
    else:
        keys = set(re.findall(r"'--(\w+)'", (REPO / script).read_text()))  # most import torch before they answer
    if script in ('compare.py', 'prove.py', 'benchmarks/coordinates.py', 'tests/launch.py'):  # they start train scripts
        keys |= keys_of_all(TRAIN_SCRIPTS)
    return keys | {'help', 'version'}


def keys_of_all(scripts):
    return set().union(*(keys_of(script) for script in scripts))


def commands(text):
    """(script, its arguments) of each command that starts a program of this project, in blocks and in the text."""
    blocks = (block.replace('\\\n', ' ') for block in code_blocks(text))
    lines = [line.partition(' #')[0] for block in blocks for line in block.splitlines()]
    for line in [*lines, *inline_code(text)]:
        line = line.removeprefix('$ ').replace('python -m planning.rules', 'python planning/rules.py')
        found = re.match(r'(?:.*&& )?(?:\w+=\S+ )*(?:python|torchrun|bash|sbatch)\b.*?([\w/]+\.(?:py|sh))(.*)', line)
        if found and not found[1].startswith('config/'):
            yield found[1], found[2]


# --- the README -------------------------------------------------------------------------------------------------------


def test_picture_and_both_commands_come_first():
    top = '\n'.join(README.read_text().splitlines()[:40])
    for first in ('<picture>', 'bash quickstart.sh', 'bash tests/run.sh', 'bits per byte'):
        assert first in top, f'{first} is not within the first 40 lines'


def test_the_tree_names_every_file():
    """The tree of docs/code.md has each .py file of the top folder and of the rooms, and nothing else."""
    tree = next(block for block in code_blocks(CODE.read_text()) if 'runtime/' in block)
    named, room = {'': set()}, ''
    for line in tree.splitlines():
        if not line.startswith(' '):
            room = line.split('/')[0] if re.match(r'\w+/', line) else ''
            named.setdefault(room, set())
        leading = re.match(r' *(?:\w+\.py\s+)*', line)[0]
        named[room] |= set(leading.split())
    for room in ('', *ROOMS):
        there = {path.name for path in (REPO / room).glob('*.py')} - {'__init__.py'}
        assert named[room] == there, f'the tree and {room or "the top folder"} differ in {named[room] ^ there}'
    for folder in (path.parent.name for path in REPO.glob('*/*.py')):
        assert folder in named or folder.startswith('.'), f'the tree lacks {folder}/'


def test_every_chapter_is_linked_from_the_readme():
    text = README.read_text()
    assert len(CHAPTERS) >= 10
    for chapter in CHAPTERS:
        assert f'](docs/{chapter.relative_to(REPO / "docs")})' in text, f'no link to {chapter.name}'


# --- every page -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('page', PAGES, ids=NAMES)
def test_files_and_folders_that_a_page_names_exist(page):
    text = page.read_text()
    if page == CODE:  # the tree has a test of its own
        text = text.replace(next(block for block in code_blocks(text) if 'runtime/' in block), '')
    text = re.sub(r'\[[^\]]*\]\([^)]*\)', '', text)  # links have a test of their own, too
    paths = re.findall(r'(?<![\w/.*=-])[\w/-]*\w\.(?:py|sh|md|txt|png)\b', text)
    folders = f'(?:{"|".join(ROOMS)}|config|slurm|docs|assets|tests)/'
    paths += re.findall(rf'(?<![\w/.-]){folders}(?:\w+/)*(?![\w*])', text)
    missing = {path for path in paths if not (REPO / path).exists() and not path.startswith('out/')} - THEIRS
    assert not missing


@pytest.mark.parametrize('page', PAGES, ids=NAMES)
def test_functions_that_a_page_names_exist(page):
    """Functions are named as `Class.method`, in any file, or as `name` after `file.py:` in the same part of a line."""
    text = page.read_text()
    sources = {path: path.read_text() for path in REPO.glob('*.py')}
    sources |= {path: path.read_text() for room in (*ROOMS, 'tests') for path in (REPO / room).glob('*.py')}
    for kind, method in re.findall(r'`([A-Z]\w+)\.(\w+)', text):
        owners = [source for source in sources.values() if re.search(rf'^class {kind}\b', source, flags=re.MULTILINE)]
        assert any(f'def {method}(' in source for source in owners), f'there is no {kind}.{method}'
    for file, part in re.findall(r'([\w/]+\.py): ([^;|()\n]*)', text):
        for name in re.findall(r'`(\w+)`', part):
            defined = rf'(?:def|class) {name}\b|^{name} = '
            assert re.search(defined, sources[REPO / file], flags=re.MULTILINE), f'{file} has no {name}'


def assert_keys_exist(text):
    for script, arguments in commands(text):
        name = script.rpartition('/')[2]
        if name.endswith('.sh'):
            known = keys_of_all(HANDED_ON.get(name, TRAIN_SCRIPTS)) | {'more', 'full'}
        else:
            known = keys_of(script)
        unknown = set(re.findall(r'(?<!\S)--([\w-]+)', re.sub("'[^']*'", '', arguments))) - known - MISTAKES
        assert not unknown, f'{script}{arguments}: no such key: {unknown}'


@pytest.mark.parametrize('page', PAGES, ids=NAMES)
def test_commands_use_only_keys_that_their_script_has(page):
    assert_keys_exist(page.read_text())


@pytest.mark.parametrize('folder', ['.', 'config', 'benchmarks', 'slurm', 'docs/pictures', 'tests'])
def test_so_do_the_commands_at_the_top_of_files(folder):
    """In the docstring of a script, and in the comments that a config or a shell script begins with."""
    for path in [*(REPO / folder).glob('*.py'), *(REPO / folder).glob('*.sh')]:
        text = path.read_text()
        top = path.suffix == '.py' and ast.get_docstring(ast.parse(text))
        top = top or re.sub('^# ?', '', re.match('(#.*\n)*', text)[0], flags=re.MULTILINE)
        lines = re.findall(r'^ +(?!.*nanoGPT/)(\S.*)', top, re.MULTILINE)  # not what it has
        assert_keys_exist('\n'.join(['```', *lines, '```']))
        for config in re.findall(r'config/\w+\.py', ' '.join(lines)):
            assert (REPO / config).exists() or config == 'config/mine.py', f'{path} names {config}'


@pytest.mark.parametrize('page', PAGES, ids=NAMES)
def test_keys_that_a_page_names_exist(page):
    """Written as `--key`, `--key=value` or `key=value`, in text and tables. The first columns of names.md are left out:
    they have the commands of other trainers."""
    text = page.read_text()
    if page.name == 'names.md':
        text = re.sub(r'^\|[^|]*\|', '|', text, flags=re.MULTILINE)
    known = keys_of_all([*SCRIPTS, 'planning/rules.py']) | FLAGS
    for script, _ in commands(text):
        known |= keys_of(script) if script.endswith('.py') else set()
    for code in inline_code(text):
        named = set(re.findall(r'(?<!\S)--([\w-]+)', code)) | set(re.findall(r'^([a-z]\w*)=', code))
        assert not named - known, f'`{code}`: no script has {named - known}'


# --- advice in the code -----------------------------------------------------------------------------------------------

# Benchmarks are left out, since each has flags of its own.
CODE_FILES = [path for room in ('', *ROOMS[:-1]) for path in sorted((REPO / room).glob('*.py'))]
# Flags in strings of the code that other programs get: git, nvidia-smi, Slurm's commands, zstd, benchmarks/links.py.
THEIR_FLAGS = set('abbrev always dirty format query-gpu job-name name me noheader parsable long json'.split())


def words_of(node):
    """The text of a string expression, with … for what it puts in; '' for an expression that is no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ''
    if isinstance(node, ast.JoinedStr):
        return ''.join(words_of(part) if isinstance(part, ast.Constant) else '…' for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (words_of(node.left) or '…') + (words_of(node.right) or '…')
    if isinstance(node, ast.IfExp):
        return f'{words_of(node.body)} / {words_of(node.orelse)}'
    return '…'


def sayings(path):
    """The texts of all strings in a file that are no docstrings, with … for what they put in."""
    todo, kinds = [ast.parse(path.read_text())], (ast.Module, ast.ClassDef, ast.FunctionDef)
    while todo:
        node = todo.pop()
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        if isinstance(node, ast.JoinedStr | ast.BinOp) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str)
        ):
            yield words_of(node)
        if not isinstance(node, ast.JoinedStr):
            todo += ast.iter_child_nodes(node)
        else:
            todo += [part.value for part in node.values if isinstance(part, ast.FormattedValue)]


def unknown_in(text, known):
    """What a text advises that does not exist: keys, scripts, and keys of a script that it names in a command."""
    found = {key for key in re.findall(r'(?<![\w-])--([a-z][\w-]*)', text) if key not in known}
    for name in re.findall(r'(?<![\w/.*=…-])[\w/-]*\w\.(?:py|sh|md)\b', text):
        found |= set() if (REPO / name).exists() or name in THEIRS | {'zero_to_fp32.py'} else {name}
    for script, rest in re.findall(r'(?:python|torchrun\b[^`;]*?) (\w+\.py)([^`;]*)', text):
        keys = keys_of(script) if script in SCRIPTS else known
        found |= set(re.findall(r'(?<![\w-])--([a-z]\w*)', rest)) - keys
    return found


def test_what_lines_of_the_code_advise_exists():
    known = keys_of_all([*SCRIPTS, 'planning/rules.py']) | FLAGS | THEIR_FLAGS
    lines = [(path, text) for path in CODE_FILES for text in sayings(path)]
    assert sum('--' in text for _, text in lines) > 100
    for path, text in lines:
        of_this = keys_of(path.name) | FLAGS | THEIR_FLAGS if path.parent == REPO and path.name in SCRIPTS else known
        names_another = re.search(r'\w+\.(py|sh)\b', text)
        assert not (unknown := unknown_in(text, known if names_another else of_this)), f'{path}: {unknown} in: {text}'


def test_advice_that_does_not_exist_is_found():
    known = keys_of_all(SCRIPTS)
    assert unknown_in('…: give --block_sise=… or --block_size', known) == {'block_sise'}
    assert unknown_in('`python sampel.py` or docs/none.md', known) == {'sampel.py', 'docs/none.md'}
    assert unknown_in('`torchrun --nproc_per_node=2 evaluate.py --fold_system`', known | FLAGS) == {'fold_system'}


def anchors(page):
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r'^#+ (.*)$', re.sub(r'```.*?```', '', page.read_text(), flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


@pytest.mark.parametrize('page', PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    for link in re.findall(r'\]\(([^)\s]+)\)', page.read_text()):
        if link.startswith('http'):
            continue
        path, _, anchor = link.partition('#')
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f'{link}: no such file'
        assert not anchor or anchor in anchors(target), f'{link}: no such heading'


# A picture as GitHub understands it, with an alt text that says what there is to see.
IN_PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="[./]*assets/(?P<dark>\w+_dark\.svg)">'
    r'\s*<img (?:width="\d+%?" )?src="[./]*assets/(?P<light>\w+_light\.svg)" alt="[^"]{20,}"(?: width="\d+%?")?>'
    r'\s*</picture>'
)


def test_every_picture_is_shown():
    text = ''.join(page.read_text() for page in PAGES)
    shown = set(re.findall(r'!\[[^\]]+\]\([./]*assets/([^)]+)\)', text))
    for picture in re.findall(r'<picture>.+?</picture>', text, re.DOTALL):  # one for light pages and one for dark ones
        light, dark = IN_PICTURE.fullmatch(picture).group('light', 'dark')
        assert dark == light.replace('_light.svg', '_dark.svg'), picture
        shown |= {light, dark}
    assert shown == {path.name for path in (REPO / 'assets').iterdir()}


# --- metrics.md -------------------------------------------------------------------------------------------------------

RUNS = {  # together they write all metrics that ranks on CPUs can write
    'train_parallel.py': ['--fsdp_impl=manual', '--expert_parallel=2', '--dataset=a:0.5,b:0.5', '--keep_best=True'],
    'train_diloco.py': ['--num_replicas=2', '--inner_steps=2', '--eval_interval=1', '--dataset=a'],
    'train_pool.py': ['--num_replicas=1', '--inner_steps=2', '--dataset=a'],
}
RUNS['train_parallel.py'] += TINY_EXPERTS


def metrics_of_the_page():
    """The keys in the first columns of the page's tables, as patterns in which NAME is any name."""
    page = (REPO / 'docs/reference/metrics.md').read_text()
    columns = re.findall(r'^\| (`[^|]*) \|', page, flags=re.MULTILINE)
    keys = [key for column in columns for key in re.findall('`([^`]+)`', column)]
    return [key.replace('NAME', '[^/]+') for key in keys if 'TASK' not in key]


def assert_named(keys):
    patterns = metrics_of_the_page()
    unnamed = {key for key in keys if not any(re.fullmatch(pattern, key) for pattern in patterns)}
    assert not unnamed, f'docs/reference/metrics.md does not name {unnamed}'


@pytest.mark.parametrize('script', slow_but(['train_parallel.py'], RUNS))
def test_the_page_of_metrics_names_what_a_run_writes(script, data_dir, tmp_path):
    for name in 'ab':
        shutil.copytree(data_dir / 'tiny', tmp_path / 'data' / name)
    (tmp_path / 'quiz.jsonl').write_text(2 * '{"context": "a", "choices": ["b", "c"], "gold": 0}\n')
    arguments = [*RUNS[script], f'--data_dir={tmp_path / "data"}', f'--out_dir={tmp_path / "run"}']
    arguments += [f'--exchange={tmp_path / "pool"}'] if script == 'train_pool.py' else []
    arguments += ['--max_iters=4', '--global_batch_size=4', f'--eval_tasks={tmp_path / "quiz.jsonl"}']
    run_forked(script, *TINY_MODEL, *TINY_RUN, *arguments, nproc=2, log=tmp_path / 'log')
    written = {key for row in metrics(tmp_path / 'run') for key in row}
    assert len(written) > 30 and 'quiz/acc_stderr' in written
    assert_named({key.removesuffix('_stderr').removeprefix('quiz/') for key in written})  # a score has a row, too


def test_the_page_of_metrics_names_each_key_that_stands_in_the_code_and_no_other():
    folders = [REPO, *(REPO / room for room in ROOMS)]
    code = ''.join(path.read_text() for folder in folders for path in folder.glob('*.py'))
    assert_named(re.findall(r"'((?:val_loss|epochs|time|comm|mem|router|fsdp|diloco|pool)/[a-z_]+)'", code))
    for key in metrics_of_the_page():
        name = key.removesuffix('/[^/]+').rpartition('/')[2]
        parts = name.removesuffix('_gb'), name.removeprefix('worst_'), name.removesuffix('_of_layers')
        assert any(re.search(rf'\b{part}\b', code) for part in (name, *parts)), f'no code writes {key}'


def test_every_optimizer_and_schedule_has_a_row_where_they_are_compared():
    def found(pattern, text):
        return {*re.findall(pattern, text, re.MULTILINE)}

    assert {*OPTIMIZERS, *SCHEDULES} <= found(r'^\| ([\w-]+) \|', (REPO / 'docs/optimizers.md').read_text())
    top = ast.get_docstring(ast.parse((REPO / 'optim.py').read_text()), clean=False)
    assert {*OPTIMIZERS} == found(r'^    ([\w-]+)  +', top)
    words, _ = conditions.READ_IF['train_']['beta1 beta2']
    assert {*OPTIMIZERS} - {*DANA, 'sgd'} == found(r'(?<=[=, ])[a-z][\w-]+', words) - {'or'}
