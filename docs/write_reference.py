"""
Write docs/reference/keys.md and docs/reference/errors.md, which are generated from the code.

    python docs/write_reference.py     # after a key or an error line has changed; tests/test_docs.py compares

The keys come from the same lines as `--help`. The errors are the texts of all `raise` statements, found in the syntax
trees of the files, with … where a line puts in a name or a number.
"""

import ast
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from configurator import class_named, read_knobs, types_of

REFERENCE = REPO / 'docs' / 'reference'
TRAIN_SCRIPTS = sorted(path.name for path in REPO.glob('train_*.py'))
OTHERS = ['prepare_data.py', 'download_model.py', 'export_model.py', 'sample.py', 'evaluate.py', 'compare.py']
OTHERS += ['report.py']

KEYS_BEGIN = """# Keys

Every key of every script, with its default and what it accepts. This page is generated from the same lines that
`--help` prints (`python docs/write_reference.py`), so it is complete. How config files and the command line fit
together is in [configuration.md](../configuration.md).

A key marked ● decides the loss and the weights, so runs that are to be compared should agree on it. All other keys
decide only how the same numbers are computed, where files go, or what is logged.
"""

ERRORS_BEGIN = """# Error lines

Every line with which a script ends because of something a user gave, or because of what it found on the disk or in
the cluster. The page is generated from the code (`python docs/write_reference.py`); … stands for a name or a number
that the line puts in. To find out where a line comes from, search this page for a few of its words that are always
the same, and then the file for them.

A mistake is printed once per rank, as `[RANK] error: ...`, because torchrun may stop the other ranks before rank 0
has spoken; a mistake in the command line is printed by the first rank of each node alone. The exit code is 2 if the
configuration itself was wrong, so that starting again would not help, and 1 otherwise. What else ends a job, and what
it costs, is in [failures.md](failures.md).
"""


def cell(text):
    return str(text).replace('|', '\\|').replace('\n', ' ').strip()


def accepts(knob):
    types = [kind for kind in types_of(knob) if kind == 'None' or not knob.choices]
    return ' or '.join([f'`{choice!r}`' for choice in knob.choices] + types) or 'any'


def key_table(knobs):
    """One table per section of --help."""
    lines, section = [], None
    for key, knob in knobs.items():
        if knob.section != section:
            section = knob.section
            lines += ['', f'**{section}**'] if section else []
            lines += ['', '| key | default | accepts | what it does |', '|---|---|---|---|']
        mark = ' ●' if 'result' in knob.tags else ''
        lines.append(f'| `{key}`{mark} | `{cell(repr(knob.default))}` | {cell(accepts(knob))} | {cell(knob.comment)} |')
    return '\n'.join(lines)


def keys_page():
    every = {script: read_knobs(REPO / script) for script in TRAIN_SCRIPTS}
    shared = {key: knob for key, knob in every['train_ddp.py'].items() if all(key in keys for keys in every.values())}
    parts = [KEYS_BEGIN, '## All train scripts', key_table(shared), '']
    for script, knobs in every.items():
        own = {key: knob for key, knob in knobs.items() if knob != shared.get(key)}  # new, or with another default
        also = class_named('Config', REPO / script).bases
        parts += [
            f'\n## {script}',
            f'\nBeside the keys above (`{script}` builds on {", ".join(base.id for base in also)}):',
        ]
        parts += [key_table(own), '']
    for script in OTHERS:
        parts += [f'\n## {script}', key_table(read_knobs(REPO / script)), '']
    return '\n'.join(parts).replace('\n\n\n', '\n\n').rstrip() + '\n'


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


def errors_in(path):
    """The texts of all exceptions that a file raises, in its order."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = ' '.join(words_of(node.exc.args[0]).split())
            if sum(letter.isalpha() for letter in text) >= 8:  # what only hands on another's text says nothing here
                found.append((node.lineno, text))
    return [text for _, text in sorted(found)]


def errors_page():
    rooms = sorted({path.parent for path in REPO.glob('*/__init__.py')} - {REPO / 'benchmarks'})
    files = [*sorted(REPO.glob('*.py')), *(path for room in rooms for path in sorted(room.glob('*.py')))]
    parts = [ERRORS_BEGIN]
    for path in files:
        if texts := errors_in(path):
            name = path.relative_to(REPO).as_posix()
            parts += [f'## {name}', '', *(f'- {cell(text)}' for text in dict.fromkeys(texts)), '']
    return '\n'.join(parts).rstrip() + '\n'


PAGES = {'keys.md': keys_page, 'errors.md': errors_page}

if __name__ == '__main__':
    for page, text in PAGES.items():
        (REFERENCE / page).write_text(text(), encoding='utf-8')
        print(f'docs/reference/{page}')
