"""
Write docs/reference/keys.md from the lines in the code that `--help` prints, too.

    python docs/write_reference.py     # after a key has changed; tests/test_docs.py compares
"""

import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from configurator import class_named, read_knobs, types_of

PAGE = REPO / 'docs' / 'reference' / 'keys.md'
TRAIN_SCRIPTS = sorted(path.name for path in REPO.glob('train_*.py'))
OTHERS = ['prepare_data.py', 'download_model.py', 'export_model.py', 'sample.py', 'evaluate.py', 'compare.py']
OTHERS += ['report.py']

BEGIN = """# Keys

Every key of every script, with its default and what it accepts. This page is generated from the same lines that
`--help` prints (`python docs/write_reference.py`), so it is complete. How config files and the command line fit
together is in [configuration.md](../configuration.md).

A key marked ● decides the loss and the weights, so runs that are to be compared should agree on it. All other keys
decide only how the same numbers are computed, where files go, or what is logged.
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
    parts = [BEGIN, '## All train scripts', key_table(shared), '']
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


if __name__ == '__main__':
    PAGE.write_text(keys_page(), encoding='utf-8')
    print(PAGE.relative_to(REPO))
